"""Runs of candidates and peers: one curve each, judged at several horizons, and what made it end early."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # exported, but not by its stubs

from analysis.optimizer_bench.loading import find_build, load_optimizer
from analysis.optimizer_bench.peers import PEERS
from analysis.optimizer_bench.runs import Candidate, Run, identify
from analysis.optimizer_bench.workload import Curve, initial_weights, train
from analysis.shared.journal import run_all


class Trial(NamedTuple):
    """What one run of a candidate or a peer showed."""

    curve: Curve
    raised: str | None = None  #: What the optimizer raised, if it did: its curve then ends as one that diverged.


def run_trials(runs: Sequence[Run], state: Path, *, jobs: int = 1) -> dict[Run, Trial]:
    """Return what all runs showed, those of the journal included; see `run_all`."""
    results = run_all(runs, do, state, lambda run: [*identify(run), "trial"], jobs=jobs)
    return {run: Trial(Curve(*curve), raised) for run, (curve, raised) in results.items()}


def do(run: Run) -> Trial:
    """Do one run; what its optimizer draws is the seed's, and the global random state is put back.

    A decomposition that fails, as one does of weights that are not finite, ends the run as one that diverged. So does
    whatever a peer raises, for instance on a shape that it cannot take; what a candidate's file raises is raised.
    """
    candidate, target = run.optimizer, run.target
    assert isinstance(candidate, Candidate), "the judged have no schedule"
    assert target is not None, "candidates are judged at a target"
    config: dict[str, Any] = json.loads(candidate.config)
    build = find_build(run.workload, run.file)
    caught = LinAlgError if candidate.file is not None else Exception
    times: list[float] = []
    raised: list[str] = []

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        maker = PEERS[candidate.name].make if candidate.file is None else load_optimizer(candidate.file, config)
        optimizer = maker(parameters, **config)
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *_: times.append(time.process_time()))
        step: Callable[[], object] = optimizer.step

        def step_or_spoil() -> None:
            """Take a step; if it raises, spoil the weights: the run ends, and what it was before is kept."""
            try:
                step()
            except caught as error:
                raised.append(_describe(error))
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.fill_(torch.nan)

        optimizer.step = step_or_spoil  # type: ignore[assignment, method-assign]
        return optimizer

    with initial_weights(run.seed), warnings.catch_warnings():
        if candidate.file is None:
            warnings.simplefilter("ignore")  # libraries' own
        try:
            curve = train(build, run.seed, make, max_steps=run.max_steps, target=target)
        except caught as error:  # where it is made, or in a loss
            raised.append(_describe(error))
            curve = Curve([], diverged=True)
    seconds = sum(times[1::2]) - sum(times[: len(times) // 2 * 2 : 2])
    step_ms = round(1000 * seconds / max(1, len(times) // 2), 3)
    return Trial(curve._replace(step_ms=step_ms, diverged=curve.diverged or bool(raised)), *raised[:1])


def _describe(error: Exception) -> str:
    """Return an exception on one short line."""
    return f"{type(error).__name__.lstrip('_')}: {' '.join(str(error).split())}"[:160]
