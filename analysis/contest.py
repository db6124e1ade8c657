"""The contest, simulated: ``python -m analysis.contest``.

Without arguments the packed submission is judged as the contest judges it. With ``--draws N`` the solver and
its contenders meet N new draws of the data, and a table says how far each is from the limit.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.contest"))

import argparse
import hashlib
import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from analysis.contenders import METHODS
from analysis.contest_draws import Grid, measure
from analysis.contest_judge import judge
from analysis.contest_table import summarise, tabulate
from analysis.official import sample_official
from analysis.options import parse_names, parse_wholes, write_results
from protonet._checks import fail
from protonet.commands.common import Parser, check_outputs, check_writable_file, parse_whole, run_command
from protonet.datasets import FAMILIES
from solution.pack import pack_single, pack_zip

PROG = "analysis.contest"
#: Samples a class of train, validation and test.
CONFIGS = {"official": (16, 4, 8), "agentics": (1, 1, 1)}
BUILD = Path("build")
STATE = BUILD / "contest.jsonl"
#: Options that mean something in one mode alone, and what they are otherwise.
JUDGE_ONLY = {"config": "official", "python": sys.executable, "single_file": False}
DRAWS_ONLY = {
    "family": "isotropic",
    "shots": "16+4",
    "limits": "500000",
    "methods": None,
    "first_seed": "0",
    "classes": "128",
    "dim": "384",
    "fresh": False,
    "state": str(STATE),
    "markdown": None,
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; those of the mode that was not asked for may not be given."""
    parser = Parser(PROG, "Judge the packed submission as the contest does, or measure it on new draws.")
    absent: Any = argparse.SUPPRESS
    add = parser.add_argument
    add("--json", metavar="PATH", help=f"where the results go (default: {BUILD}/contest*.json; with --draws, nowhere)")
    one = parser.add_argument_group("one submission")
    one.add_argument("--config", default=absent, help="official (default) or agentics: 1 sample a class")
    one.add_argument("--single-file", default=absent, action="store_true", help="judge the single file")
    one.add_argument("--python", default=absent, metavar="PATH", help="interpreter of the clean process")
    many = parser.add_argument_group("new draws")
    many.add_argument("--draws", metavar="N", help="number of draws, >= 1")
    many.add_argument("--family", default=absent, help=f"of {', '.join(FAMILIES)} (default: isotropic)")
    many.add_argument("--shots", default=absent, help="train+val samples a class (default: 16+4)")
    many.add_argument("--limits", default=absent, help="parameter limits (default: 500000)")
    many.add_argument("--methods", default=absent, help=f"of {', '.join(METHODS)} (default: all that fit)")
    many.add_argument("--first-seed", default=absent, metavar="N", help="the first draw's seed (default: 0)")
    many.add_argument("--classes", default=absent, metavar="N", help="default: 128")
    many.add_argument("--dim", default=absent, metavar="N", help="features (default: 384)")
    many.add_argument("--state", default=absent, metavar="PATH", help=f"finished results (default: {STATE})")
    many.add_argument("--fresh", default=absent, action="store_true", help="forget the finished results")
    many.add_argument("--markdown", default=absent, metavar="PATH", help="write the table there, too")
    options = parser.parse_args(arguments)
    foreign = JUDGE_ONLY if options.draws is not None else DRAWS_ONLY
    for name in foreign:
        if hasattr(options, name):
            option = f"--{name.replace('_', '-')}"
            if foreign is JUDGE_ONLY:
                fail(PROG, option, "come without --draws", f"--draws {options.draws}", "Drop one of them.")
            fail(PROG, option, "come with --draws", "no --draws", "Add for instance --draws 5.")
    return argparse.Namespace(**{**JUDGE_ONLY, **DRAWS_ONLY, **vars(options)})


def _judge(options: argparse.Namespace) -> None:
    """Judge the packed submission on the official data."""
    if options.config not in CONFIGS:
        fail(PROG, "--config", f"be one of {', '.join(CONFIGS)}", repr(options.config), "Pick a listed one.")
    if shutil.which(options.python) is None:
        fail(PROG, "--python", "be an interpreter", repr(options.python), "Pass its path.")
    name = "contest" + "_agentics" * (options.config == "agentics") + "_single_file" * options.single_file
    path = check_writable_file(PROG, "--json", options.json or BUILD / f"{name}.json")
    submission = pack_single() if options.single_file else pack_zip()
    result = judge(submission, sample_official(*CONFIGS[options.config]), python=options.python)
    facts = {
        "submission": "single file" if options.single_file else "ZIP",
        "sha256": hashlib.sha256(submission).hexdigest(),
        "config": options.config,
    }
    path.write_text(json.dumps(facts | result, indent=2) + "\n", encoding="utf-8")
    print(
        f"accuracy {result['accuracy']:.4f}  score {result['score']:.2f}  "
        f"parameters {result['parameters']:,}  seconds {result['seconds']:.1f}  "
        f"peak memory {result['peak_memory_mib']:.0f} MiB"
    )


def _draw(options: argparse.Namespace) -> None:
    """Measure the solver and its contenders on new draws."""
    n_draws = parse_whole(PROG, "--draws", options.draws, low=1)
    first = parse_whole(PROG, "--first-seed", options.first_seed, low=0)
    grid = Grid(
        families=parse_names(PROG, "--family", options.family, FAMILIES),
        shots=list(dict.fromkeys(_parse_shots(text) for text in options.shots.split(","))),
        limits=parse_wholes(PROG, "--limits", options.limits, low=0),
        seeds=range(first, first + n_draws),
        methods=None if options.methods is None else parse_names(PROG, "--methods", options.methods, METHODS),
        num_classes=parse_whole(PROG, "--classes", options.classes, low=2),
        dim=parse_whole(PROG, "--dim", options.dim, low=2),
    )
    needed = {method for family in grid.families for method in grid.methods_of(family)}
    if needed & {"lda", "logistic"} and find_spec("sklearn") is None:
        remedy = 'Run pip install "protonet[analysis]", or leave out lda and logistic.'
        fail(PROG, "--methods", "have scikit-learn for lda and logistic", "none installed", remedy)
    outputs = check_outputs(PROG, options, ("state", "json", "markdown"))
    torch.set_num_threads(1)  # a second one saves a quarter here, and costs thirty-fold on a busy machine
    if options.fresh:
        outputs["state"].unlink(missing_ok=True)
    rows = summarise(grid, measure(grid, outputs["state"]))
    write_results(outputs, rows, tabulate(rows))


def _parse_shots(text: str) -> tuple[int, int]:
    """Return the train and validation samples a class of a text such as 16+4."""
    parts = text.split("+")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) < 1:
        fail(PROG, "--shots", "be train+val samples a class", repr(text), "Pass for instance 16+4,1+1.")
    return int(parts[0]), int(parts[1])


def _run(arguments: Sequence[str] | None) -> None:
    """Run the mode that was asked for."""
    options = parse_arguments(arguments)
    (_judge if options.draws is None else _draw)(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(PROG, _run, arguments)
