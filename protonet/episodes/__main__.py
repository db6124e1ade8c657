"""Few-shot experiments: ``python -m protonet.episodes`` evaluates methods, ``... train`` meta-trains an encoder.

Slow imports wait until the arguments are checked.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protonet._checks import check_number, fail
from protonet.commands.common import Parser, check_name, check_outputs, parse_whole, run_command

PROG = "protonet.episodes"
DEFAULT_METHODS = ("protonet", "protonet-cosine", "simpleshot", "adaptive", "bd-cspn")
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
SIDES = ("novel", "validation", "base", "all")


def make_parser() -> Parser:
    """Return the parser of the evaluation's arguments."""
    from protonet.episodes.methods import ALIASES, INDUCTIVE, TRANSDUCTIVE  # noqa: PLC0415 - torch takes a second

    parser = Parser(PROG, "Evaluate few-shot methods on the same N-way K-shot episodes, with 95 % intervals.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"""inductive methods:\n  {_wrap(INDUCTIVE)}
transductive methods, which use all queries of an episode together:\n  {_wrap(TRANSDUCTIVE)}
other names:\n  {", ".join(f"{alias} for {name}" for alias, name in ALIASES.items())}
meta-training:\n  python -m protonet.episodes train --help
several processes, with the same results:\n  torchrun --nproc-per-node 2 -m protonet.episodes ..."""
    data = parser.add_argument_group("data")
    text = "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, "
    data.add_argument("--dataset", default="glyphs", help=f"{text}omniglot:ROOT or mini-imagenet:ROOT")
    text = "side of the split by class: novel (default if there is a split), validation, base or all"
    data.add_argument("--side", choices=SIDES, help=text)
    text = "split the classes at random: 60 %% base, 15 %% validation, 25 %% novel"
    data.add_argument("--split-seed", metavar="N", help=text)
    data.add_argument("--encoder", metavar="FILE", help="file from 'train'; without it, features are used as they are")
    episodes = parser.add_argument_group("episodes")
    episodes.add_argument("--way", default="5", metavar="N[-M]", help="classes per episode (default 5)")
    episodes.add_argument("--shot", default="1", metavar="N[-M]", help="support rows per class (default 1)")
    episodes.add_argument("--query", default="15", metavar="N", help="query rows per class (default 15)")
    episodes.add_argument("--unequal", action="store_true", help="draw the number of shots for each class alone")
    text = "share queries by a Dirichlet distribution of this concentration, such as 2.0 (default: equally)"
    episodes.add_argument("--imbalance", metavar="A", help=text)
    episodes.add_argument("--open", default="0", metavar="N", help="classes outside the episode, with queries")
    text = "accept classes with few rows, with fewer queries; with --imbalance, that balances queries somewhat"
    episodes.add_argument("--allow-small", action="store_true", help=text)
    episodes.add_argument("--episodes", default="2000", metavar="N", help="most episodes (default 2000)")
    text = "stop once every 95 %% interval over episodes is within ±P points (default: never)"
    episodes.add_argument("--until", default="0", metavar="P", help=text)
    episodes.add_argument("--seed", default="0", metavar="N", help="seed of the episodes (default 0)")
    text = "of 95 %% intervals and p-values: episodes (default) of these same classes, or other classes like them"
    parser.add_argument("--interval", choices=("episodes", "classes"), default="episodes", help=text)
    text = f"names, or all (default: {' '.join(DEFAULT_METHODS)})"
    parser.add_argument("--method", nargs="+", default=DEFAULT_METHODS, metavar="NAME", help=text)
    for name, text in (("json", "all metrics"), ("csv", "one line per metric"), ("plot", "a .png, .pdf or .svg file")):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"write {text}")
    text = "keep the scores of finished episodes in this new .npz file, every few seconds and after Ctrl-C"
    parser.add_argument("--state", metavar="FILE", help=text)
    text = "continue the run of the --state file, if it is there, with the same arguments"
    parser.add_argument("--resume", action="store_true", help=text)
    return parser


def _wrap(names: Mapping[str, Any]) -> str:
    """Wrap names into indented lines of at most 90 characters."""
    import textwrap  # noqa: PLC0415 - for the help alone

    return "\n  ".join(textwrap.wrap(", ".join(names), 90, break_on_hyphens=False))


def parse_span(argument: str, text: str, *, low: int) -> tuple[int, int]:
    """Parse ``5`` as (5, 5) and ``5-20`` as (5, 20); raise an InputError for anything else."""
    first, dash, last = text.partition("-")
    if not first or (dash and not last):
        fail(PROG, argument, "be a number or a span such as 5-20", repr(text), f"Pass a number >= {low}.")
    least = parse_whole(PROG, argument, first, low=low)
    most = parse_whole(PROG, argument, last, low=low) if dash else least
    if most < least:
        fail(PROG, argument, "be a number or a span such as 5-20", repr(text), "Write the smaller number first.")
    return least, most


def parse_number(argument: str, text: str, *, strict: bool) -> float:
    """Parse a finite float >= 0 (> 0 if ``strict``); raise an InputError for anything else."""
    try:
        value: Any = float(text)
    except ValueError:
        value = text
    return check_number(PROG, argument, value, low=0, strict=strict)


def run(arguments: Sequence[str] | None) -> None:
    """Evaluate as the arguments say."""
    options = make_parser().parse_args(arguments)
    from protonet.episodes.draws import Setting  # noqa: PLC0415
    from protonet.episodes.methods import ALIASES, METHODS  # noqa: PLC0415 - as above

    known = [*METHODS, *ALIASES, "all"]
    names = list(dict.fromkeys(check_name(PROG, "--method", name, known) for name in options.method))
    setting = Setting(
        way=parse_span("--way", options.way, low=2),
        shot=parse_span("--shot", options.shot, low=1),
        n_query=parse_whole(PROG, "--query", options.query, low=1),
        unequal=options.unequal,
        imbalance=None if options.imbalance is None else parse_number("--imbalance", options.imbalance, strict=True),
        n_open=parse_whole(PROG, "--open", options.open, low=0),
        allow_small=options.allow_small,
    )
    n_episodes = parse_whole(PROG, "--episodes", options.episodes, low=1)
    until = parse_number("--until", options.until, strict=False)
    seed = parse_whole(PROG, "--seed", options.seed, low=0)
    split_seed = None if options.split_seed is None else parse_whole(PROG, "--split-seed", options.split_seed, low=0)
    is_main = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts, the first one writes
    if until and options.interval == "classes":
        got = "--interval classes, whose intervals more episodes do not narrow"
        fail(PROG, "--until", "be of intervals over episodes", got, "Leave one of the two out.")
    if options.resume and options.state is None:
        fail(PROG, "--resume", "come with the file to continue", "no --state", "Pass --state FILE.")
    outputs = check_outputs(PROG, options, ("json", "csv", "plot", "state")) if is_main else {}
    for name, path in outputs.items():
        read = {Path(each or ".").resolve() for each in (options.dataset, options.encoder)}
        if path.exists() and path.resolve() in read:
            fail(PROG, f"--{name}", "be another file than what is read", path, "Pass another path.")
    state = outputs.pop("state", None)
    if state is not None and state.exists() and not options.resume:
        remedy = "Continue its run with --resume, or pass another path."
        fail(PROG, "--state", "be a new file", f"{state}, which exists", remedy)
    if "plot" in outputs and outputs["plot"].suffix.lower() not in PLOT_SUFFIXES:
        fail(PROG, "--plot", f"end in {', '.join(PLOT_SUFFIXES)}", outputs["plot"], "Pass a path such as out.png.")
    from protonet.episodes.experiment import Experiment, run_experiment  # noqa: PLC0415 - once the arguments are checked

    source = (options.dataset, options.side, split_seed, options.encoder)
    experiment = Experiment(*source, setting, names, n_episodes, until, seed, options.interval)
    state = None if options.state is None else Path(options.state)  # the other processes read it, too
    run_experiment(experiment, outputs, state=state, resume=options.resume)


def train(arguments: Sequence[str] | None) -> None:
    """Meta-train as the arguments say."""
    from protonet.episodes.train import run_train  # noqa: PLC0415 - one of the two commands needs it

    run_train(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the evaluation or, if ``train`` comes first, the training; return the exit code."""
    if arguments[:1] == ["train"]:
        return run_command(f"{PROG} train", train, arguments[1:])
    return run_command(PROG, run, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
