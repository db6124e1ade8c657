"""The optimizer bench: ``python -m analysis.optimizer_bench tune`` and ``... run``.

``tune`` finds what tuned AdamW reaches on each workload, and ``run`` in how many steps an optimizer reaches it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.optimizer_bench.__main__"))

import argparse
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from analysis.optimizer_bench.baselines import read_baselines, tabulate_baselines, tune_workload, write_baselines
from analysis.optimizer_bench.bench import Candidate, keeping
from analysis.optimizer_bench.compare import Grid, check_baselines, contend
from analysis.optimizer_bench.figure import plot
from analysis.optimizer_bench.loading import PROG, load_optimizer, load_workloads, read_config
from analysis.optimizer_bench.peers import LIBRARIES, PEERS
from analysis.optimizer_bench.report import tabulate
from analysis.optimizer_bench.workloads import WORKLOADS
from analysis.options import parse_names, parse_wholes, write_results
from protonet._checks import fail
from protonet.commands.common import Parser, check_outputs, parse_whole, run_command

STATE = "build/optimizer_bench.jsonl"
BASELINES = Path("analysis/results/optimizer_baselines.json")
FORMATS = (".png", ".pdf", ".svg")


def make_parser() -> Parser:
    """Return the parser of both commands."""
    parser = Parser(PROG, "Measure how many steps an optimizer needs to reach what tuned AdamW reaches.")
    commands = parser.add_subparsers(dest="command", required=True)
    tuning = commands.add_parser("tune", description="Tune AdamW on each workload.")
    tuning.add_argument("--max-steps", default="1000", metavar="N", help="of every run (default: 1000)")
    tuning.add_argument("--json", default=str(BASELINES), metavar="PATH", help=f"baselines (default: {BASELINES})")
    running = commands.add_parser("run", description="Run an optimizer on each workload to tuned AdamW's loss.")
    add = running.add_argument
    add("--optimizer", metavar="FILE", help="Python file with a class CustomOptimizer(params, **config)")
    add("--config", metavar="FILE", help="its config, a JSON object (default: none)")
    add("--compare", nargs="?", const=",".join(PEERS), metavar="NAMES", help=f"of {', '.join(PEERS)} (no NAMES: all)")
    add("--baselines", default=str(BASELINES), metavar="PATH", help=f"what tune wrote (default: {BASELINES})")
    add("--seeds", default="0,1,2", help="default: 0,1,2")
    add("--jobs", default=str(os.cpu_count() or 1), metavar="N", help="processes (default: one a core)")
    add("--json", metavar="PATH", help="write the results there")
    add("--markdown", metavar="PATH", help="write the tables there, too")
    add("--figure", metavar="PATH", help="draw the optimizer's loss curves there (.png, .pdf or .svg)")
    for command in (tuning, running):
        command.add_argument("--workloads", help=f"of {', '.join(WORKLOADS)} and the file's (default: all)")
        command.add_argument("--workload-file", metavar="FILE", help="Python file with a dictionary WORKLOADS")
        command.add_argument("--state", default=STATE, metavar="PATH", help=f"finished runs (default: {STATE})")
    return parser


def _pick_workloads(options: argparse.Namespace) -> dict[str, Path | None]:
    """Return the file of each workload that was asked for, None for a visible one."""
    known: dict[str, Path | None] = dict.fromkeys(WORKLOADS)
    if options.workload_file is not None:
        path = Path(options.workload_file).resolve()
        known |= dict.fromkeys(load_workloads(path), path)
    if options.workloads is None:
        return known
    return {name: known[name] for name in parse_names(PROG, "--workloads", options.workloads, known)}


def _tune(options: argparse.Namespace) -> None:
    """Tune AdamW on each workload, and merge its baseline into the file at once."""
    max_steps = parse_whole(PROG, "--max-steps", options.max_steps, low=10)
    workloads = _pick_workloads(options)
    outputs = check_outputs(PROG, options, ("state", "json"))
    path = outputs["json"]
    baselines = read_baselines("--json", path) if path.exists() else {}
    for name, file in workloads.items():
        baselines[name] = tune_workload(name, file, max_steps=max_steps, state=outputs["state"])
        write_baselines(path, baselines)
    print(tabulate_baselines({name: baselines[name] for name in workloads}), end="")


def _pick_candidate(options: argparse.Namespace) -> Candidate | None:
    """Return the optimizer that was given, None if there are peers alone."""
    if options.optimizer is None:
        for option in ("config", "figure"):
            if getattr(options, option) is not None:
                fail(PROG, f"--{option}", "come with --optimizer", "none", "Add the optimizer's file.")
        if options.compare is None:
            fail(PROG, "--optimizer", "be a Python file", "none", "Pass one, or --compare.")
        return None
    path = Path(options.optimizer).resolve()
    config = {} if options.config is None else read_config(Path(options.config))
    load_optimizer(path, config)
    return Candidate(path.stem, json.dumps(config, sort_keys=True), path)


def _compete(options: argparse.Namespace) -> None:
    """Run the optimizer, and peers if asked for, and print how many times fewer steps they need."""
    seeds = parse_wholes(PROG, "--seeds", options.seeds, low=0)
    jobs = parse_whole(PROG, "--jobs", options.jobs, low=1)
    peers = [] if options.compare is None else parse_names(PROG, "--compare", options.compare, PEERS)
    missing = [library for library in LIBRARIES if find_spec(library) is None]
    if peers and missing:
        fail(PROG, "--compare", f"have {', '.join(missing)}", "none installed", 'Run pip install "protonet[peers]".')
    if options.figure is not None and Path(options.figure).suffix.lower() not in FORMATS:
        fail(PROG, "--figure", f"end in {', '.join(FORMATS)}", repr(options.figure), "Rename the file.")
    candidate = _pick_candidate(options)
    grid = Grid(_pick_workloads(options), read_baselines("--baselines", Path(options.baselines)), seeds)
    outputs = check_outputs(PROG, options, ("state", "json", "markdown", "figure"))
    check_baselines(grid)
    contenders = contend(grid, candidate, peers, outputs["state"], jobs)
    if "figure" in outputs:
        plot(contenders[0]["curves"], grid.baselines, outputs["figure"])
    names = ("optimizer", "config", "compare", "seeds", "workloads", "workload_file")
    given = {name.replace("_", "-"): getattr(options, name) for name in names}
    made = " ".join(f"--{name} {value}" for name, value in given.items() if value is not None)
    write_results(
        outputs, contenders, f"{tabulate(contenders, grid.baselines)}\nMade by `python -m {PROG} run {made}`.\n"
    )


def _run(arguments: Sequence[str] | None) -> None:
    """Run the command that was asked for, on one thread: the models are small."""
    options = make_parser().parse_args(arguments)
    torch.set_num_threads(1)
    with keeping(Path(options.state)):
        (_tune if options.command == "tune" else _compete)(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(PROG, _run, arguments)
