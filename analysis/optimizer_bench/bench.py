"""The steps that an optimizer needs to the loss of tuned AdamW, on each workload.

With --compare, other libraries' optimizers too, each at its best shared learning rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from analysis.optimizer_bench.loading import (
    BASELINES,
    PROG,
    Baseline,
    add_workloads,
    load_optimizer,
    pick_workloads,
    read_baselines,
    read_config,
    take_fingerprint,
)
from analysis.optimizer_bench.peers import LIBRARIES, PEERS
from analysis.optimizer_bench.runs import Candidate, Outcome, Run, run_bench
from analysis.optimizer_bench.score import Entry, plot, rate, score_workload, summarise, tabulate
from analysis.shared.runner import Report, StudyParser, parse_names, parse_wholes
from protonet._checks import fail


class Grid(NamedTuple):
    """What optimizers run on.

    Attributes:
        workloads: The file of each, None for a visible one.
        baselines: At least theirs.
        seeds: Of the runs; the first one decides on a peer's learning rate.
    """

    workloads: Mapping[str, Path | None]
    baselines: Mapping[str, Baseline]
    seeds: Sequence[int]

    def list_runs(self, optimizer: Candidate, names: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """Return an optimizer's runs on workloads."""
        return [
            Run(name, self.workloads[name], seed, baseline["max_steps"], optimizer, baseline["target"])
            for name in names
            for baseline in [self.baselines[name]]
            for seed in seeds
        ]


def add_options(parser: StudyParser) -> None:
    """Add the optimizers, and what they run on."""
    parser.add_argument("--optimizer", metavar="FILE", help="Python file of a class CustomOptimizer(params, **config)")
    parser.add_argument("--config", metavar="FILE", help="its config, a JSON object (default: none)")
    known = f"of {', '.join(PEERS)} (no NAMES: all)"
    parser.add_argument("--compare", nargs="?", const=",".join(PEERS), metavar="NAMES", help=known)
    parser.add_argument("--baselines", default=str(BASELINES), metavar="PATH", help=f"default: {BASELINES}")
    parser.add("--seeds", "0,1,2", "seeds, with commas", partial(parse_wholes, low=0))
    parser.add_whole("--jobs", os.cpu_count() or 1, "processes")
    parser.add_plot("the optimizer's loss curves")
    add_workloads(parser)


def run(options: argparse.Namespace) -> Report:
    """Run the optimizer, and peers if asked for, and tell how many times fewer steps they need."""
    peers = [] if options.compare is None else parse_names(PROG, "--compare", options.compare, PEERS)
    missing = [library for library in LIBRARIES if find_spec(library) is None]
    if peers and missing:
        fail(PROG, "--compare", f"have {', '.join(missing)}", "none installed", 'Run pip install "protonet[peers]".')
    candidate = _pick_candidate(options)
    grid = Grid(pick_workloads(options), read_baselines(Path(options.baselines)), options.seeds)
    check_baselines(grid)
    entries = compete(grid, candidate, peers, options.state, options.jobs)
    if options.plot:
        plot(entries[0]["curves"], grid.baselines, options.plot)
    return Report(entries, tabulate(entries, grid.baselines))


def _pick_candidate(options: argparse.Namespace) -> Candidate | None:
    """Return the optimizer that was given, None if there are peers alone."""
    if options.optimizer is None:
        for option in ("config", "plot"):
            if getattr(options, option) is not None:
                fail(PROG, f"--{option}", "come with --optimizer", "none", "Add the optimizer's file.")
        if options.compare is None:
            fail(PROG, "--optimizer", "be a Python file", "none", "Pass one, or --compare.")
        return None
    path = Path(options.optimizer).resolve()
    config = {} if options.config is None else read_config(Path(options.config))
    load_optimizer(path, config)
    return Candidate(path.stem, json.dumps(config, sort_keys=True), path)


def check_baselines(grid: Grid) -> None:
    """Say on stderr which workloads differ from what their baselines were made with.

    Raises:
        InputError: A workload has no baseline.
    """
    for name, file in grid.workloads.items():
        if name not in grid.baselines:
            remedy = f"Run python -m analysis optimizer-tune --workloads {name} first, with the same file."
            fail(PROG, "--baselines", "have every workload", f"none of {name}", remedy)
        was, found = grid.baselines[name]["fingerprint"], take_fingerprint(name, file)
        if was != found:
            print(
                f"{name} differs from what its baseline was made with: loss {found:g} before training, not {was:g}; "
                "another Python or torch has other data or weights. Tune it here.",
                file=sys.stderr,
            )


def compete(grid: Grid, candidate: Candidate | None, peers: Sequence[str], state: Path, jobs: int) -> list[Entry]:
    """Run the candidate, if any, and peers, each with the learning rate that is best for it, and score them.

    Args:
        grid: What they run on.
        candidate: Comes first.
        peers: Keys of ``PEERS``; visible workloads choose their learning rates, or a file's if there are no others.
        state: The journal.
        jobs: How many processes.
    """
    everything = list(grid.workloads)
    visible = [name for name, file in grid.workloads.items() if file is None]
    tried_rates = {
        peer: {
            setting: grid.list_runs(setting, visible or everything, grid.seeds[:1])
            for setting in (Candidate(peer, json.dumps({"lr": lr})) for lr in PEERS[peer].rates)
        }
        for peer in peers
    }
    own = [] if candidate is None else grid.list_runs(candidate, everything, grid.seeds)
    tried = [run for rates in tried_rates.values() for runs in rates.values() for run in runs]
    outcomes = run_bench([*own, *tried], state, jobs=jobs)
    means = {
        peer: {
            setting: statistics.geometric_mean(rate(outcomes[run].curve, grid.baselines[run.workload]) for run in runs)
            for setting, runs in rates.items()
        }
        for peer, rates in tried_rates.items()
    }
    best = {peer: max(of, key=of.__getitem__) for peer, of in means.items()}
    outcomes |= run_bench(
        [run for it in best.values() for run in grid.list_runs(it, everything, grid.seeds)], state, jobs=jobs
    )
    curves = {name: [outcomes[run].curve.losses for run in own if run.workload == name] for name in everything}
    entries = [] if candidate is None else [_score(grid, candidate, outcomes) | {"curves": curves}]
    for peer, of in means.items():
        rates = {setting.config: mean for setting, mean in of.items()}
        entries.append(_score(grid, best[peer], outcomes) | {"rates": rates})
    return entries


def _score(grid: Grid, optimizer: Candidate, outcomes: Mapping[Run, Outcome]) -> Entry:
    """Return an optimizer's rows and what they come to."""
    entry: Entry = {"name": optimizer.name, "config": json.loads(optimizer.config)}
    for prefix, apart in (("", False), ("apart_", True)):
        names = [name for name, file in grid.workloads.items() if (file is not None) == apart]
        rows = [
            score_workload(name, [outcomes[run] for run in grid.list_runs(optimizer, [name], grid.seeds)], baseline)
            for name in names
            for baseline in [grid.baselines[name]]
        ]
        if rows:
            entry |= {f"{prefix}rows": rows, f"{prefix}summary": summarise(rows)}
    return entry
