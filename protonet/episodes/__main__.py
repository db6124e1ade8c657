"""The command line of few-shot experiments: ``python -m protonet.episodes`` evaluates few-shot methods.

``... train`` meta-trains an encoder; ``... paper`` compares a new method with common methods; ``... compare`` compares
the results of several evaluations; ``... extract`` embeds pictures.

Slow imports, such as torch, wait until the arguments are checked.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name

from protonet.episodes.names import EVALUATE_PROG, format_presets
from protonet.episodes.options import (
    EPISODE_COMMANDS,
    EvaluationOptions,
    check_evaluate_options,
    make_parser,
    parse_command,
    parse_preset,
    split_evaluations,
)
from protonet.errors import InputError
from protonet.ui.command_line import check_known_name, run_command
from protonet.ui.options import name_options_in_errors, parse_options


def _format_help_appendix() -> str:
    """Format the end of the text of ``--help-all``: kinds of data sets, methods and further commands."""
    import textwrap  # noqa: PLC0415 - for the help alone

    from protonet.episodes.methods import METHODS  # noqa: PLC0415 - torch takes a second

    def wrap_names(*, transductive: bool) -> str:
        names = ", ".join(name for name, spec in METHODS.items() if spec.transductive is transductive)
        return "\n  ".join(textwrap.wrap(names, 90, break_on_hyphens=False))

    return f"""kinds of --dataset KIND:ROOT, as their authors publish them:
  mini-imagenet, tiered-imagenet, cub, cifar-fs, fc100, omniglot, omniglot-rotations;
  meta-aircraft and others of --class-lists, of
  Meta-Dataset, in plain folders by class; features also as .npy, .pt, .plk
inductive methods:\n  {wrap_names(transductive=False)}
transductive methods, which use all queries of an episode together:\n  {wrap_names(transductive=True)}
other commands:
  train    meta-train an encoder
  paper    a method of your own beside the usual ones, with all that a paper needs
  compare  the --json files of two runs, compared by episode
  extract  features of pictures, by a network
several processes, with the same results:\n  torchrun --nproc-per-node 2 -m protonet.episodes ..."""


@name_options_in_errors(EvaluationOptions)
def run_evaluate_command(words: Sequence[str] | None) -> None:
    """Run evaluations from their command line, or print methods, presets or classes if an option asks for them."""
    words = words or ()
    if words and not words[0].startswith("-"):
        check_known_name("command", words[0], SUBCOMMAND_FUNCTIONS)
    parser = make_parser()
    parser.write_appendix = _format_help_appendix
    options = parse_options(parser, EvaluationOptions, words)
    listing_flags = (options.list_methods, options.list_presets, options.class_lists)
    if any(listing_flags):
        from protonet.datasets.benchmarks import format_class_lists  # noqa: PLC0415 - torch takes a second
        from protonet.episodes.methods.choice import format_methods  # noqa: PLC0415

        print((format_methods, format_presets, format_class_lists)[listing_flags.index(True)](), end="")
        return
    if options.preset is not None:
        options = parse_preset(options, words)
    evaluations = split_evaluations(options)
    outputs = check_evaluate_options(options, evaluations)
    from protonet.episodes.evaluation.several import run_evaluations  # noqa: PLC0415 - torch, as above

    with _print_traceback_of_cause(shown=options.traceback):
        run_evaluations(evaluations, outputs, state=options.state, resume=options.resume)


@contextmanager
def _print_traceback_of_cause(*, shown: bool) -> Iterator[None]:
    """If ``shown``, print the traceback of the cause of an InputError, such as an error in a method of the user."""
    try:
        yield
    except InputError as error:
        if shown and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise


#: The function below `protonet.episodes` that runs each further command; its module is imported after the options are
#: checked.
SUBCOMMAND_FUNCTIONS = {
    "train": "training.train:run_train",
    "compare": "evaluation.several:run_compare",
    "extract": "features.extract:run_extract",
    "paper": "paper:run_paper",
}


def run_subcommand(name: str, words: Sequence[str] | None) -> None:
    """Run a command of ``SUBCOMMAND_FUNCTIONS`` from its command line."""
    with name_options_in_errors(EPISODE_COMMANDS[name].options_type):
        options = parse_command(name, words or ())
        run_with_options = resolve_name(f"protonet.episodes.{SUBCOMMAND_FUNCTIONS[name]}")
        with _print_traceback_of_cause(shown=getattr(options, "traceback", False)):
            run_with_options(options)


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand that the first argument names, or an evaluation; return the exit code."""
    name, *words = arguments if arguments and arguments[0] in SUBCOMMAND_FUNCTIONS else ("", *arguments)

    if not name:
        return run_command(EVALUATE_PROG, run_evaluate_command, words)
    return run_command(f"{EVALUATE_PROG} {name}", partial(run_subcommand, name), words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
