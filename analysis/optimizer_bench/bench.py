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
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from analysis.optimizer_bench import loading
from analysis.optimizer_bench.peers import LIBRARIES, PEERS
from analysis.optimizer_bench.runs import Candidate, Run, run_bench
from analysis.optimizer_bench.score import Entry, plot, rate, score_workload, summarise, tabulate
from analysis.optimizer_bench.workload import Curve
from analysis.shared.runner import Report, StudyParser, parse_names, parse_wholes
from protonet._checks import fail

PROG = loading.PROG


class Grid(NamedTuple):
    """What optimizers run on."""

    workloads: Mapping[str, Path | None]  #: The file of each, None for a visible one.
    baselines: Mapping[str, loading.Baseline]
    seeds: Sequence[int]  #: Of the runs; the first one decides on a peer's learning rate.

    def list_runs(self, optimizer: Candidate, names: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """Return an optimizer's runs on workloads."""
        runs = []
        for name in names:
            max_steps, target = self.baselines[name]["max_steps"], self.baselines[name]["target"]
            runs += [Run(name, self.workloads[name], seed, max_steps, optimizer, target) for seed in seeds]
        return runs


def add_options(parser: StudyParser) -> None:
    """Add the optimizers, and what they run on."""
    parser.add_argument("--optimizer", metavar="FILE", help="Python file of a class CustomOptimizer(params, **config)")
    parser.add_argument("--config", metavar="FILE", help="its config, a JSON object (default: none)")
    known = f"of {', '.join(PEERS)} (no NAMES: all)"
    parser.add_argument("--compare", nargs="?", const=",".join(PEERS), metavar="NAMES", help=known)
    file = str(loading.BASELINES)
    parser.add_argument("--baselines", default=file, metavar="PATH", help=f"default: {file}")
    parser.add("--seeds", "0,1,2", "seeds, with commas", partial(parse_wholes, low=0))
    parser.add_whole("--jobs", os.cpu_count() or 1, "processes")
    parser.add_plot("the optimizer's loss curves")
    loading.add_workloads(parser)


def run(options: argparse.Namespace) -> Report:
    """Run the optimizer, and peers if asked for, and tell how many times fewer steps they need."""
    peers = [] if options.compare is None else parse_names(PROG, "--compare", options.compare, PEERS)
    missing = [library for library in LIBRARIES if find_spec(library) is None]
    if peers and missing:
        fail(PROG, "--compare", f"have {', '.join(missing)}", "none installed", 'Run pip install "protonet[peers]".')
    candidate = _pick_candidate(options)
    grid = Grid(loading.pick_workloads(options), loading.read_baselines(Path(options.baselines)), options.seeds)
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
    config = {} if options.config is None else loading.read_json("--config", Path(options.config))
    if not isinstance(config, dict):
        got = f"a {type(config).__name__} in {options.config}"
        fail(PROG, "--config", "hold a JSON object", got, "Write {} for no setting.")
    loading.load_optimizer(path, config)
    return Candidate(path.stem, json.dumps(config, sort_keys=True), path)


def check_baselines(grid: Grid) -> None:
    """Say on stderr which workloads differ from what their baselines were made with; raise an InputError without."""
    for name, file in grid.workloads.items():
        if name not in grid.baselines:
            remedy = f"Run python -m analysis optimizer-tune --workloads {name} first, with the same file."
            fail(PROG, "--baselines", "have every workload", f"none of {name}", remedy)
        was, found = grid.baselines[name]["fingerprint"], loading.take_fingerprint(name, file)
        if was != found:
            print(
                f"{name} differs from what its baseline was made with: loss {found:g} before training, not {was:g}; "
                "another Python or torch has other data or weights. Tune it here.",
                file=sys.stderr,
            )


def compete(grid: Grid, candidate: Candidate | None, peers: Sequence[str], state: Path, jobs: int) -> list[Entry]:
    """Run the candidate, if any, and peers, each with the learning rate that is best for it, and score them.

    Visible workloads choose a peer's learning rate, or a file's if there are no others.
    """
    everything = list(grid.workloads)
    visible = [name for name, file in grid.workloads.items() if file is None]
    settings = {peer: [Candidate(peer, json.dumps({"lr": lr})) for lr in PEERS[peer].rates] for peer in peers}
    first = grid.seeds[:1]
    tried = {each: grid.list_runs(each, visible or everything, first) for each in chain(*settings.values())}
    own = [] if candidate is None else grid.list_runs(candidate, everything, grid.seeds)
    curves = run_bench([*own, *chain(*tried.values())], state, jobs=jobs)
    means = {
        setting: statistics.geometric_mean(rate(curves[run], grid.baselines[run.workload]) for run in runs)
        for setting, runs in tried.items()
    }
    best = [max(settings[peer], key=means.__getitem__) for peer in peers]
    rest = chain(*(grid.list_runs(setting, everything, grid.seeds) for setting in best))
    curves |= run_bench(list(rest), state, jobs=jobs)
    entries = []
    if candidate is not None:
        losses = {name: [curves[run].losses for run in own if run.workload == name] for name in everything}
        entries.append(_score(grid, candidate, curves) | {"curves": losses})
    for setting in best:
        rates = {each.config: means[each] for each in settings[setting.name]}
        entries.append(_score(grid, setting, curves) | {"rates": rates})
    return entries


def _score(grid: Grid, optimizer: Candidate, curves: Mapping[Run, Curve]) -> Entry:
    """Return an optimizer's rows and what they come to."""
    entry: Entry = {"name": optimizer.name, "config": json.loads(optimizer.config)}
    for prefix, apart in (("", False), ("apart_", True)):
        rows = []
        for name in [name for name, file in grid.workloads.items() if (file is not None) == apart]:
            runs = grid.list_runs(optimizer, [name], grid.seeds)
            rows.append(score_workload(name, [curves[run] for run in runs], grid.baselines[name]))
        if rows:
            entry |= {f"{prefix}rows": rows, f"{prefix}summary": summarise(rows)}
    return entry
