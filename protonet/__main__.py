"""Run the command line: ``protonet`` or ``python -m protonet``, followed by a command such as ``fit``."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
import time
from collections.abc import Sequence

from protonet.commands.arguments import COMMANDS, parse_command_line
from protonet.commands.options import FitOptions
from protonet.errors import DISTRIBUTION_NAME, installed_version, renamed_arguments
from protonet.ui.command_line import CommandParser, check_known_name, run_command
from protonet.ui.options import name_options_in_errors

PROGRAM_NAME = "protonet"
#: The function that runs a command, given its options, if it is not the function ``run`` in the module of its name.
RUN_FUNCTIONS = {
    "export": "protonet.commands.info.run_export",
    "suggest": "protonet.commands.update.run_suggest",
    "page": "protonet.server.labelling.api.run",
    "serve": "protonet.server.prediction_api.run",
}


def print_help(arguments: Sequence[str] | None) -> None:
    """Print the help with the list of commands; raise an InputError if an argument is an unknown command or option."""
    parser = CommandParser(PROGRAM_NAME, "Few-shot classification of tables, texts and pictures.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    examples = [f"  {PROGRAM_NAME} {name} {command.examples[0]}" for name, command in COMMANDS.items()]
    parser.epilog = "\n".join(["commands (protonet COMMAND --help):", *lines, "", "examples:", *examples])
    parser.add_argument(
        "--version",
        action="version",
        version=f"{PROGRAM_NAME} {installed_version(DISTRIBUTION_NAME) or '(not installed)'}",
    )
    parser.add_argument("command", nargs="?")
    name = parser.parse_args(arguments).command
    if name is not None:
        check_known_name("command", name, COMMANDS)
    parser.print_help()


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, with the other arguments, and return the exit code."""
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return run_command(PROGRAM_NAME, print_help, arguments[:1])

    def command(arguments: Sequence[str] | None) -> None:
        declared = COMMANDS[name]
        with name_options_in_errors(declared.options_type), renamed_arguments(**declared.arguments):
            options = parse_command_line(name, arguments)  # errors here are raised before torch is imported
            if name == "fit":
                run_fit(options)
            else:
                module, _, function = RUN_FUNCTIONS.get(name, f"protonet.commands.{name}.run").rpartition(".")
                getattr(importlib.import_module(module), function)(options)

    prog = f"{PROGRAM_NAME} {name}"
    return run_command(prog, command, arguments[1:])


def run_fit(options: FitOptions) -> None:
    """Run ``fit``: read the table, and then train. Errors of the table are reported before torch is imported."""
    started = time.monotonic()
    from protonet.commands.rows import read_training_table  # noqa: PLC0415 - imports NumPy

    tables = [read_training_table(options)]
    from protonet.commands.fit import train  # noqa: PLC0415 - imports torch

    train(options, tables.pop(), started)  # which releases the cells


def run() -> int:
    """Run the command line with the arguments of the process, as the script ``protonet``, and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be in any encoding
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
