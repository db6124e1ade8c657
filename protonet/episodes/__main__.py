"""The command line of few-shot experiments: ``python -m protonet.episodes`` evaluates few-shot methods.

``... train`` meta-trains an encoder; ``... paper`` compares a new method with common methods; ``... compare`` compares
the results of several evaluations; ``... extract`` embeds pictures.

Slow imports, such as torch, wait until the arguments are checked.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from protonet._validation import check_device
from protonet.commands.options import REPORT_SUFFIXES
from protonet.episodes.arguments import (
    IMAGE_SIZE_HELP,
    SPLIT_SEED_HELP,
    TRACEBACK_HELP,
    IntegerOption,
    NumberOption,
    parse_compare_arguments,
    parse_extract_arguments,
    parse_paper_arguments,
    parse_train_arguments,
)
from protonet.episodes.names import (
    EVALUATE_PROG,
    OPTION_NAMES,
    PAPER_OPTION_NAMES,
    PRESETS,
    ROW_NORMALIZATIONS,
    format_presets,
)
from protonet.errors import InputError, raise_input_error, renamed_arguments
from protonet.ui.command_line import CommandParser, check_known_name, check_output_options, run_command

DEFAULT_METHODS = ("protonet", "protonet-cosine", "simpleshot", "adaptive", "bd-cspn")
OUTPUT_SUFFIXES = {"plot": (".png", ".pdf", ".svg"), "report": REPORT_SUFFIXES}
#: For each option that names a file to write, the content of the file, for the help text.
OUTPUT_FILE_CONTENTS = {
    "json": "all metrics, and how many queries of each episode each method has right",
    "plot": "a .png, .pdf or .svg file",
    "latex": "the tables, for a paper",
    "markdown": "the tables",
    "report": "a report for the browser, .html: one file, without network; with it, --json has its figures as well",
}
EPISODE_PROTOCOLS = ("episodes", "generalized", "meta-dataset")
EVALUATE_EXAMPLES = (
    "python -m protonet.episodes --dataset glyphs --shot 1,5 --method protonet simpleshot bd-cspn",
    "python -m protonet.episodes --dataset features.npz --method mine.py:classify protonet",
    "python -m protonet.episodes train -o encoder.safetensors; then --encoder encoder.safetensors",
)
SPLIT_SIDE_CHOICES = ("novel", "validation", "base", "all")


def make_parser() -> CommandParser:
    """Build the command-line parser of an evaluation."""
    parser = CommandParser(
        EVALUATE_PROG,
        "Evaluate few-shot methods on the same N-way K-shot episodes, with 95 % intervals.",
        EVALUATE_EXAMPLES,
    )
    parser.write_appendix = _format_help_appendix
    add = parser.add_argument
    text = "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, KIND:ROOT"
    add("--dataset", nargs="+", default=["glyphs"], metavar="DATA", help=f"{text}; several for a table of all")
    text = "side of the split by class: novel (default if there is a split), validation, base or all"
    add("--side", choices=SPLIT_SIDE_CHOICES, metavar="SIDE", help=text)
    add("--encoder", metavar="FILE", help="file from 'train'; without it, features are used as they are")
    add("--way", default="5", metavar="N[-M]", help="classes per episode (default 5), or all")
    add("--shot", default="1", metavar="N[-M]", help="support rows per class (default 1); 1,5 evaluates both")
    add("--query", action=IntegerOption, low=1, default=15, help="query rows per class (default 15)")
    text = "most episodes (default 2000; 10 of a fixed test split, which are draws of the support)"
    add("--episodes", action=IntegerOption, low=1, help=text)
    text = f"names, with settings as in tim:steps=100, FILE.py:FUNCTION, or all (default: {' '.join(DEFAULT_METHODS)})"
    add("--method", nargs="+", default=DEFAULT_METHODS, metavar="NAME", help=text)
    add("--list-methods", action="store_true", help="list methods and their settings, and do nothing else")
    text = "add methods with the settings best on validation classes: METHOD:name=v1,v2 (v1/v2 where each is several)"
    add("--tune", nargs="+", default=(), metavar="GRID", help=text)
    text = "set the options of a paper's evaluation; options on the command line take precedence"
    add("--preset", metavar="NAME", help=text)
    add("--json", metavar="FILE", help=f"write {OUTPUT_FILE_CONTENTS['json']}")

    add = parser.add_expert_group("data").add_argument
    text = "list the classes of the usual benchmarks by name, with counts and hashes, and do nothing else"
    add("--class-lists", action="store_true", help=text)
    text = "test rows of each --dataset, of the same classes: all are queries, of all-way draws of the support; with "
    text += "--way N, or --n-effective-classes, queries of N-way episodes are drawn from them"
    add("--test-dataset", nargs="+", metavar="DATASET", help=text)
    text = "with --test-dataset and --tune: validation rows of each --dataset, of the same classes"
    add("--validation-dataset", nargs="+", metavar="DATASET", help=text)
    add("--split-seed", action=IntegerOption, low=0, help=SPLIT_SEED_HELP)
    add("--image-size", action=IntegerOption, low=1, help=IMAGE_SIZE_HELP)
    text = "of all rows, before any method: l2, to unit norm; cl2, less the base mean, then l2; z, each row's features "
    add("--normalize", choices=ROW_NORMALIZATIONS, default="none", help=f"{text}to mean 0, variance 1")
    text = "take the base classes of this data set, in place of the evaluated one's"
    add("--base", metavar="FILE", help=text)
    text = "embeddings of texts by class, such as CLIP's: .npz of x and y, the names of the data set's classes"
    add("--texts", metavar="FILE", help=text)

    add = parser.add_expert_group("episodes").add_argument
    add("--list-presets", action="store_true", help="list presets, and do nothing else")
    text = "episodes (default); generalized: base classes beside novel ones; meta-dataset: its ways and shots"
    add("--protocol", choices=EPISODE_PROTOCOLS, default="episodes", help=text)
    add("--unequal", action="store_true", help="draw the number of shots for each class alone")
    text = "share queries by a Dirichlet distribution of this concentration, such as 2.0 (default: equally)"
    add("--imbalance", action=NumberOption, metavar="A", help=text)
    text = "queries of this many of an episode's classes, drawn at random (default: of all)"
    add("--n-effective-classes", action=IntegerOption, low=1, help=text)
    text = "draw each query from the rows of all (effective) classes, so that numbers of queries are multinomial"
    add("--multinomial", action="store_true", help=text)
    text = "classes outside the episode, with queries"
    add("--n-open-classes", action=IntegerOption, low=0, default=0, help=text)
    text = "unlabelled rows of each class, for methods that learn from them"
    add("--unlabelled", action=IntegerOption, low=0, default=0, help=text)
    text = "classes outside the episode, with as many unlabelled rows"
    add("--distractors", action=IntegerOption, low=0, default=0, help=text)
    text = "of meta-dataset: names (superclass/class) or meta-ilsvrc-2012"
    add("--hierarchy", metavar="NAME", help=text)
    text = "accept classes with few rows, with fewer queries; with --imbalance, that balances queries somewhat"
    add("--allow-small", action="store_true", help=text)
    add("--seed", action=IntegerOption, low=0, default=0, help="seed of the episodes (default 0)")
    text = "such as cuda: where rows are embedded, classified and scored (default cpu); episodes are the same"
    add("--device", default="cpu", metavar="NAME", help=text)

    add = parser.add_expert_group("results").add_argument
    text = "compare this method alone with each other one, not all pairs; the tuned one where --tune has it"
    add("--against", metavar="NAME", help=text)
    for name, text in OUTPUT_FILE_CONTENTS.items():
        if name != "json":
            add(f"--{name}", metavar="FILE", help=f"write {text}")
    text = "keep the scores of finished episodes in this new .npz file, every few seconds and after Ctrl-C"
    add("--state", metavar="FILE", help=text)
    text = "continue the run of the --state file, if it is there, with the same arguments"
    add("--resume", action="store_true", help=text)
    add("--traceback", action="store_true", help=TRACEBACK_HELP)
    return parser


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


def run_evaluate_command(arguments: Sequence[str] | None) -> None:
    """Run an evaluation from its command line, or print methods, presets or classes if an option asks for them."""
    parser, words = make_parser(), list(arguments or ())
    if words and not words[0].startswith("-"):
        check_known_name("command", words[0], SUBCOMMANDS)
    options = parser.parse_args(words)
    listing_flags = (options.list_methods, options.list_presets, options.class_lists)
    if any(listing_flags):
        from protonet.datasets.benchmarks import format_class_lists  # noqa: PLC0415 - as above
        from protonet.episodes.methods.choice import format_methods  # noqa: PLC0415

        print((format_methods, format_presets, format_class_lists)[listing_flags.index(True)](), end="")
        return
    preset: list[str] = []
    if options.preset is not None:
        preset = PRESETS[check_known_name("--preset", options.preset, PRESETS)].options.split()
        options = parser.parse_args([*preset, *words])

    def list_given_options(given_words: Sequence[str]) -> set[str]:
        """Return the names of the options that ``given_words`` of a command line set."""
        unset = argparse.Namespace(**dict.fromkeys(vars(options)))
        return {name for name, value in vars(parser.parse_args(given_words, unset)).items() if value is not None}

    options.given_options, options.preset_options = list_given_options(words), list_given_options(preset)
    options.outputs = _get_output_paths(options)
    check_device("--device", options.device)
    from protonet.episodes.evaluation.several import run_evaluations  # noqa: PLC0415 - torch, as above

    with _print_traceback_of_cause(options):
        run_evaluations(options)


@contextmanager
def _print_traceback_of_cause(options: argparse.Namespace) -> Iterator[None]:
    """A context manager that, with ``--traceback``, prints the traceback of the error that caused an InputError."""
    try:
        yield
    except InputError as error:
        if getattr(options, "traceback", False) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise


def _get_output_paths(options: argparse.Namespace) -> dict[str, Path]:
    """Return output paths by option name, after a check of all options that name files; empty in further processes."""
    paths = [Path(dataset).resolve() for dataset in options.dataset]
    if options.resume and options.state is None:
        raise_input_error("--resume", "come with the file to continue", "no --state", "Pass --state FILE.")
    for name in ("test_dataset", "validation_dataset"):
        others = getattr(options, name)
        if others is not None and len(others) != len(options.dataset):
            got = f"{len(others)} for {len(options.dataset)}"
            option = f"--{name.replace('_', '-')}"
            raise_input_error(option, "be one for each --dataset, in their order", got, "Name as many.")
    if options.validation_dataset and not (options.test_dataset and options.tune):
        raise_input_error("--validation-dataset", "come with --test-dataset and --tune", "it without", "Leave it out.")
    if len(set(options.dataset)) < len(options.dataset):
        raise_input_error("--dataset", "name each data set once", " ".join(options.dataset), "Leave one out.")
    if options.base is not None and Path(options.base).resolve() in paths:
        remedy = "Leave it out: the base classes of a split are taken anyway."
        raise_input_error("--base", "be another data set than --dataset", options.base, remedy)
    if os.environ.get("RANK", "0") != "0":  # torchrun starts several processes; only the first one writes
        return {}
    outputs = check_output_options(options, (*OUTPUT_FILE_CONTENTS, "state"))
    others = (*(options.test_dataset or ()), *(options.validation_dataset or ()))
    read = {*paths, *(Path(path).resolve() for path in (*others, options.encoder, options.base, options.texts) if path)}
    for name, path in outputs.items():
        if path.exists() and path.resolve() in read:
            raise_input_error(f"--{name}", "be another file than what is read", path, "Pass another path.")
        if path.suffix.lower() not in OUTPUT_SUFFIXES.get(name, (path.suffix.lower(),)):
            raise_input_error(f"--{name}", f"end in {', '.join(OUTPUT_SUFFIXES[name])}", path, "Rename it.")
    return outputs


#: For each further command, the function that parses and checks its arguments, and the path of the function of the
#: parsed options below `protonet.episodes`, whose module is imported only after that.
SUBCOMMANDS = {
    "train": (parse_train_arguments, "training.train:run_train"),
    "compare": (parse_compare_arguments, "evaluation.several:run_compare"),
    "extract": (parse_extract_arguments, "features.extract:run_extract"),
    "paper": (parse_paper_arguments, "paper:run_paper"),
}


def run_subcommand(name: str, arguments: Sequence[str] | None) -> None:
    """Parse and check the arguments of a command of ``SUBCOMMANDS``, import its module and run it."""
    parse_arguments, function_path = SUBCOMMANDS[name]
    options = parse_arguments(arguments)
    run_with_options = resolve_name(f"protonet.episodes.{function_path}")
    with _print_traceback_of_cause(options):
        run_with_options(options)


def main(arguments: Sequence[str]) -> int:
    """Run the command of ``SUBCOMMANDS`` that the first argument names, or an evaluation; return the exit code."""
    prog, command, names = EVALUATE_PROG, run_evaluate_command, OPTION_NAMES
    if arguments and arguments[0] in SUBCOMMANDS:
        name, *arguments = arguments
        prog, command = f"{prog} {name}", partial(run_subcommand, name)
        names = PAPER_OPTION_NAMES if name == "paper" else OPTION_NAMES

    def run_renamed(given: Sequence[str] | None) -> None:
        with renamed_arguments(**names):
            command(given)

    return run_command(prog, run_renamed, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
