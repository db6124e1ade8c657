"""The bench's runs: a workload, a seed and an optimizer each, and what decides them; those of AdamW."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from analysis.optimizer_bench.loading import find_build, take_fingerprint
from analysis.optimizer_bench.peers import LIBRARIES
from analysis.optimizer_bench.workload import EVERY, Curve, train
from analysis.optimizer_bench.workloads import WORKLOADS
from analysis.shared.journal import hash_sources
from protonet._checks import find_version

WARMUP = 0.03  #: Of the steps, the share in which the rate rises.
FOLDER = "analysis/optimizer_bench"
#: The sources that decide every run.
SHARED = [f"{FOLDER}/workload.py", *(f"{FOLDER}/workloads/{name}.py" for name in ("data", "models"))]


class Candidate(NamedTuple):
    """An optimizer with its settings."""

    name: str  #: A key of ``peers.PEERS``, or what tables call it.
    config: str  #: Its settings, a JSON object.
    file: Path | None = None  #: The file of its class ``CustomOptimizer``, or None for a peer.


class Setting(NamedTuple):
    """One AdamW: its schedule rises for ``WARMUP`` of the steps and falls as a cosine until ``horizon`` of them."""

    lr: float = 3e-3  #: Where the search starts.
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    horizon: float = 1.0

    @classmethod
    def read(cls, written: dict[str, Any]) -> Setting:
        """Return a setting from what its `_asdict` became as JSON."""
        return cls(**written | {"betas": tuple(written["betas"])})


class Run(NamedTuple):
    """One training run."""

    workload: str
    file: Path | None  #: The file whose ``WORKLOADS`` has it, or None for a visible one.
    seed: int  #: Of its initial weights and batches.
    max_steps: int  #: Where it ends at the latest.
    optimizer: Candidate | Setting
    target: float | None = None  #: The smoothed loss at which a candidate's run ends.


def run_adamw(run: Run) -> Curve:
    """Train a workload by one AdamW, until its schedule ends."""
    build, setting, max_steps = find_build(run.workload, run.file), run.optimizer, run.max_steps
    assert isinstance(setting, Setting), "candidates have no schedule"
    schedule = functools.partial(schedule_rate, max_steps=max_steps, horizon=setting.horizon)
    steps = math.ceil(max_steps * (setting.horizon or 1.0) / EVERY) * EVERY

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, setting.lr, setting.betas, weight_decay=setting.weight_decay, fused=True)

    return train(build, run.seed, make, max_steps=min(steps, max_steps), schedule=schedule)


def schedule_rate(step: int, *, max_steps: int, horizon: float) -> float:
    """Return the factor on the learning rate at a step: a linear rise, then a cosine to the horizon or nothing."""
    rise = min(1.0, (step + 1) / max(1.0, WARMUP * max_steps))
    return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / (horizon * max_steps)))) if horizon else rise


def identify(run: Run) -> list[Any]:
    """Return what decides a run's outcome beside the run itself."""
    optimizer = run.optimizer
    if isinstance(optimizer, Setting):
        source, versions = f"{FOLDER}/runs.py", []
    else:
        source = str(optimizer.file or f"{FOLDER}/peers.py")
        versions = [] if optimizer.file else [*map(find_version, LIBRARIES)]
    workload = str(run.file or inspect.getfile(inspect.unwrap(WORKLOADS[run.workload])))
    return [take_fingerprint(run.workload, run.file), versions, hash_sources(*SHARED, workload, source)]
