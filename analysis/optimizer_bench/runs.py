"""Training runs of the benchmark: a workload, a seed and an optimizer each."""

from __future__ import annotations

import functools
import inspect
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # exported, but not by its stubs

from analysis.optimizer_bench.loading import compute_fingerprint, get_build, load_optimizer
from analysis.optimizer_bench.peers import LIBRARIES, PEERS
from analysis.optimizer_bench.workload import EVERY, Curve, initial_weights, train
from analysis.optimizer_bench.workloads import WORKLOADS
from analysis.shared.journal import hash_sources, run_all
from protonet.errors import installed_version

WARMUP = 0.03  #: Fraction of the steps in which the rate rises.
FOLDER = "analysis/optimizer_bench"
#: Sources that affect every run.
SHARED = [f"{FOLDER}/workload.py", *(f"{FOLDER}/workloads/{name}.py" for name in ("data", "models"))]


class Candidate(NamedTuple):
    """An optimizer with its settings."""

    name: str  #: A key of ``peers.PEERS``, or the name in tables.
    config: str  #: Settings as a JSON object.
    file: Path | None = None  #: File of its class ``CustomOptimizer``; None for a peer.


class Setting(NamedTuple):
    """An AdamW setting: linear warmup for the fraction ``WARMUP`` of ``horizon`` steps, then cosine decay."""

    lr: float = 3e-3  #: Start of the search.
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    horizon: float = 1.0

    @classmethod
    def read(cls, written: dict[str, Any]) -> Setting:
        """Build a setting from the JSON form of its `_asdict`."""
        return cls(**written | {"betas": tuple(written["betas"])})


class Run(NamedTuple):
    """One training run."""

    workload: str
    file: Path | None  #: File whose ``WORKLOADS`` has it; None for a built-in one.
    seed: int  #: Seed of initial weights and batches.
    max_steps: int  #: Maximum number of steps.
    optimizer: Candidate | Setting
    target: float | None = None  #: The smoothed loss at which a candidate's run ends.


Curves = dict[tuple[Candidate | Setting, str, int], Curve]  #: By optimizer, workload and seed.


def run_adamw(run: Run) -> Curve:
    """Train a workload with AdamW to the end of its schedule."""
    build, setting, max_steps = get_build(run.workload, run.file), run.optimizer, run.max_steps
    assert isinstance(setting, Setting), "candidates have no schedule"
    schedule = functools.partial(schedule_rate, max_steps=max_steps, horizon=setting.horizon)
    steps = math.ceil(max_steps * (setting.horizon or 1.0) / EVERY) * EVERY

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, setting.lr, setting.betas, weight_decay=setting.weight_decay, fused=True)

    return train(build, run.seed, make, max_steps=min(steps, max_steps), schedule=schedule)


def schedule_rate(step: int, *, max_steps: int, horizon: float) -> float:
    """Compute the factor on the learning rate at a step: linear warmup, then cosine decay or nothing."""
    rise = min(1.0, (step + 1) / max(1.0, WARMUP * max_steps))
    return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / (horizon * max_steps)))) if horizon else rise


def identify(run: Run) -> list[Any]:
    """Collect the inputs that determine a run's outcome, for the journal."""
    optimizer = run.optimizer
    if isinstance(optimizer, Setting):
        source, versions = f"{FOLDER}/runs.py", []
    else:
        source = str(optimizer.file or f"{FOLDER}/peers.py")
        versions = [] if optimizer.file else [*map(installed_version, LIBRARIES)]
    workload = str(run.file or inspect.getfile(inspect.unwrap(WORKLOADS[run.workload])))
    return [compute_fingerprint(run.workload, run.file), versions, hash_sources(*SHARED, workload, source)]


def train_all(runs: Sequence[Run], state: Path, jobs: int) -> Curves:
    """Train candidates and peers, or read their curves from the journal; see `run_all`."""
    results = run_all(runs, do, state, lambda run: [*identify(run), "candidate"], jobs=jobs)
    return {(run.optimizer, run.workload, run.seed): Curve(*result) for run, result in results.items()}


def do(run: Run) -> Curve:
    """Execute one run of a candidate or a peer.

    What its optimizer draws is the seed's, and the global random state is put back.

    A decomposition that fails, as one does of weights that are not finite, ends the run as one that diverged. So does
    whatever a peer raises, for instance on a shape that it cannot take; errors of a candidate's file are raised.
    """
    candidate, target = run.optimizer, run.target
    assert isinstance(candidate, Candidate), "the judged have no schedule"
    assert target is not None, "candidates are judged at a target"
    config: dict[str, Any] = json.loads(candidate.config)
    build = get_build(run.workload, run.file)
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
            """Take a step; if it raises an exception, set the weights to NaN, so that the run ends."""
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
            warnings.simplefilter("ignore")  # warnings of libraries
        try:
            curve = train(build, run.seed, make, max_steps=run.max_steps, target=target)
        except caught as error:  # where it is made, or in a loss
            raised.append(_describe(error))
            curve = Curve([], diverged=True)
    seconds = sum(times[1::2]) - sum(times[: len(times) // 2 * 2 : 2])
    step_ms = round(1000 * seconds / max(1, len(times) // 2), 3)
    diverged, first = curve.diverged or bool(raised), raised[0] if raised else None
    return curve._replace(step_ms=step_ms, diverged=diverged, raised=first)


def _describe(error: Exception) -> str:
    """Format an exception as one short line."""
    return f"{type(error).__name__.lstrip('_')}: {' '.join(str(error).split())}"[:160]
