"""Contenders on the bench: the candidate and other people's optimizers, each at its best shared learning rate."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from analysis.optimizer_bench.baselines import Baseline
from analysis.optimizer_bench.bench import Candidate, Outcome, Run, measure
from analysis.optimizer_bench.loading import PROG, take_fingerprint
from analysis.optimizer_bench.peers import PEERS
from analysis.optimizer_bench.scoring import rate, score_workload, summarise
from protonet._checks import fail

Outcomes = dict[Run, Outcome]
#: An optimizer's ``name`` and ``config``, ``rows`` and ``summary`` of visible workloads, ``apart_rows`` and
#: ``apart_summary`` of a file's, as far as there are any. A peer's ``ladder`` has the geometric means of its settings
#: on the first seed, the candidate's ``curves`` the smoothed losses of each seed, by the workload's name.
Contender = dict[str, Any]


class Grid(NamedTuple):
    """What contenders run on.

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


def check_baselines(grid: Grid) -> None:
    """Say on stderr which workloads differ from what their baselines were made with.

    Raises:
        ValueError: A workload has no baseline.
    """
    for name, file in grid.workloads.items():
        if name not in grid.baselines:
            remedy = f"Run python -m {PROG} tune --workloads {name} first, with the same --workload-file if any."
            fail(PROG, "--baselines", "have every workload", f"none of {name}", remedy)
        was, found = grid.baselines[name]["fingerprint"], take_fingerprint(name, file)
        if was != found:
            differs = (
                f"{name} differs from what its baseline was made with: loss {found:g} before training, not {was:g}"
            )
            print(f"{differs}; another Python or torch has other data or weights. Tune it here.", file=sys.stderr)


def contend(grid: Grid, candidate: Candidate | None, peers: Sequence[str], state: Path, jobs: int) -> list[Contender]:
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
    ladders = {
        peer: {
            setting: grid.list_runs(setting, visible or everything, grid.seeds[:1])
            for setting in (Candidate(peer, json.dumps({"lr": lr})) for lr in PEERS[peer].rates)
        }
        for peer in peers
    }
    own = [] if candidate is None else grid.list_runs(candidate, everything, grid.seeds)
    tried = [run for ladder in ladders.values() for runs in ladder.values() for run in runs]
    outcomes = _run_all([*own, *tried], state, jobs)
    means = {
        peer: {
            setting: statistics.geometric_mean(rate(outcomes[run].curve, grid.baselines[run.workload]) for run in runs)
            for setting, runs in ladder.items()
        }
        for peer, ladder in ladders.items()
    }
    best = {peer: max(of, key=of.__getitem__) for peer, of in means.items()}
    outcomes |= _run_all(
        [run for it in best.values() for run in grid.list_runs(it, everything, grid.seeds)], state, jobs
    )
    curves = {name: [outcomes[run].curve.losses for run in own if run.workload == name] for name in everything}
    contenders = [] if candidate is None else [_score(grid, candidate, outcomes) | {"curves": curves}]
    for peer, of in means.items():
        ladder = {setting.config: mean for setting, mean in of.items()}
        contenders.append(_score(grid, best[peer], outcomes) | {"ladder": ladder})
    return contenders


def _run_all(runs: Sequence[Run], state: Path, jobs: int) -> Outcomes:
    """Do what the journal does not have, with a progress bar on stderr."""
    bar = tqdm(measure(runs, state, jobs), total=len(runs), unit="run", dynamic_ncols=True, disable=not runs)
    outcomes: Outcomes = {}
    for run, outcome in bar:
        outcomes[run] = outcome
        bar.set_postfix_str(f"{run.workload} {run.optimizer[0]}")
    return outcomes


def _score(grid: Grid, optimizer: Candidate, outcomes: Outcomes) -> Contender:
    """Return an optimizer's rows and what they come to."""
    contender: Contender = {"name": optimizer.name, "config": json.loads(optimizer.config)}
    for prefix, apart in (("", False), ("apart_", True)):
        names = [name for name, file in grid.workloads.items() if (file is not None) == apart]
        rows = [
            score_workload(name, [outcomes[run] for run in grid.list_runs(optimizer, [name], grid.seeds)], baseline)
            for name in names
            for baseline in [grid.baselines[name]]
        ]
        if rows:
            contender |= {f"{prefix}rows": rows, f"{prefix}summary": summarise(rows)}
    return contender
