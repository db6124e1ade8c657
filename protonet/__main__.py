"""The command for people with a file, ``python -m protonet`` or ``protonet``: fit, predict, and what COMMANDS lists."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence

from protonet.errors import DISTRIBUTION, installed_version, renamed_arguments
from protonet.ui.command_line import Parser, check_name, run_command

PROG = "protonet"
COMMANDS = {
    "fit": "learn the classes of a table, and tell how well",
    "predict": "classify the rows of another one",
    "evaluate": "judge a model on a table with classes",
    "update": "add samples and classes to a model, without training",
    "suggest": "say which rows to label next, and why",
    "label": "label rows in the terminal, the most telling ones first",
    "explain": "say which columns matter, and what spoke for the class of a row",
    "info": "say what is in a model",
    "export": "write a model as ONNX",
    "page": "label, look and try in a browser",
    "serve": "answer programs that ask models over HTTP",
}
#: Commands that are not in `protonet.commands`.
MODULES = {"page": "protonet.server.label_api", "serve": "protonet.server.prediction_api"}
#: What a person typed, by what functions call it.
TYPED = dict.fromkeys(("path", "train_loader", "solution", "features", "x"), "table") | {
    "representation": "--representation"
}
EXAMPLES = """\
  python -m protonet fit train.csv --label species -o model.safetensors
  python -m protonet predict model.safetensors new.csv -o predicted.csv --unknown 0.05
  python -m protonet evaluate model.safetensors test.csv
  python -m protonet update model.safetensors more.csv --in-place
  python -m protonet suggest model.safetensors rest.csv -n 10 -o ask.csv
  python -m protonet label rest.csv --model model.safetensors -o labelled.csv
  python -m protonet explain model.safetensors
  python -m protonet explain model.safetensors new.csv --rows 0,5
  python -m protonet info model.safetensors
  python -m protonet export model.safetensors --onnx model.onnx
  python -m protonet page pictures/ --classes cat,dog
  python -m protonet serve model.safetensors"""

SCRIPT = "Where it was installed with pip, protonet alone does what python -m protonet does."


def explain(arguments: Sequence[str] | None) -> None:
    """Print what the commands are, or raise an InputError if another one is asked for."""
    parser = Parser(PROG, "Few-shot classification of your own tables: CSV, NPZ, NPY or Parquet.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    parser.epilog = "\n".join(["commands, each with --help:", *lines, "", "examples:", EXAMPLES, "", SCRIPT])
    parser.add_argument(
        "--version", action="version", version=f"{PROG} {installed_version(DISTRIBUTION) or '(not installed)'}"
    )
    parser.add_argument("command", nargs="?")
    name = parser.parse_args(arguments).command
    if name is not None:
        check_name("command", name, COMMANDS)
    parser.print_help()


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; return the exit code."""
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return run_command(PROG, explain, arguments[:1])

    def command(rest: Sequence[str] | None) -> None:
        with renamed_arguments(**TYPED):
            from protonet.commands.arguments import READERS  # noqa: PLC0415 - not for the help of all

            options = READERS[name](rest)  # what is wrong with these is told before torch is imported
            importlib.import_module(MODULES.get(name, f"protonet.commands.{name}")).run(options)

    prog = f"{PROG} {name}"
    return run_command(prog, command, arguments[1:])


def run() -> int:
    """Run the command that the command line names; return the exit code. This is the script ``protonet``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be in any encoding
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
