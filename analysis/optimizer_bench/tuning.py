"""AdamW, tuned strictly for one workload: what every candidate is compared with.

Learning rates are laddered until the best one is interior, at each horizon of the schedule, and weight decay and betas
are tried beside it, all on one seed. The best setting of each horizon then runs on every seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from analysis.optimizer_bench.running import EVERY, Curve, train
from analysis.optimizer_bench.workload import Build

SEEDS = (0, 1, 2)
#: Where the ladder of learning rates starts, its first factor and its second one.
RATE, COARSE, FINE = 3e-3, 3.0, 1.7
RATES = (1e-6, 10.0)
WEIGHT_DECAYS = (0.0, 0.1, 1.0)
BETAS = ((0.9, 0.99), (0.9, 0.95), (0.95, 0.999), (0.8, 0.999))
#: Shares of the steps at whose end a cosine reaches 0; 0 is a constant rate.
HORIZONS = (1.0, 0.6, 0.35, 0.0)
#: Of the steps, the share in which the rate rises.
WARMUP = 0.03


class Setting(NamedTuple):
    """One AdamW: its schedule rises for ``WARMUP`` of the steps and falls as a cosine until ``horizon`` of them."""

    lr: float = RATE
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    horizon: float = 1.0


class Baseline(NamedTuple):
    """What tuned AdamW reaches on a workload.

    Attributes:
        target: The worst seed's best smoothed loss, of the setting for which that is least.
        steps: The median over seeds of the first step that reaches the target, least over the best settings.
        initial: The mean validation loss before training, the seeds' own.
        setting: The setting that made the target.
        fastest: The setting that made ``steps``.
        hits: Its first steps, one a seed, None for a seed that misses the target.
    """

    target: float
    steps: int
    initial: float
    setting: Setting
    fastest: Setting
    hits: list[int | None]


def run_adamw(build: Build, setting: Setting, seed: int, max_steps: int) -> Curve:
    """Train a workload by one AdamW, until its schedule ends."""
    schedule = partial(schedule_rate, max_steps=max_steps, horizon=setting.horizon)
    steps = math.ceil(max_steps * (setting.horizon or 1.0) / EVERY) * EVERY

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, setting.lr, setting.betas, weight_decay=setting.weight_decay)

    return train(build, seed, make, max_steps=min(steps, max_steps), schedule=schedule)


def schedule_rate(step: int, *, max_steps: int, horizon: float) -> float:
    """Return the factor on the learning rate at a step: a linear rise, then a cosine to the horizon or nothing."""
    rise = min(1.0, (step + 1) / max(1.0, WARMUP * max_steps))
    if not horizon:
        return rise
    return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / (horizon * max_steps))))


def tune(measure: Callable[[Setting, int], Curve], seeds: Sequence[int] = SEEDS) -> Baseline:
    """Tune AdamW on a workload.

    Args:
        measure: Trains by a setting and a seed; asked for the same pair again and again.
        seeds: The first one decides on settings, all of them make the baseline.
    """

    def best(settings: Iterator[Setting]) -> Setting:
        return min(settings, key=lambda setting: _least(measure(setting, seeds[0])))

    def ladder(setting: Setting, factor: float) -> Setting:
        """Climb to the rate whose neighbours are both worse."""
        while True:
            rates = [setting.lr / factor, setting.lr, setting.lr * factor]
            tried = best(setting._replace(lr=rate) for rate in rates if RATES[0] <= rate <= RATES[1])
            if tried == setting:
                return setting
            setting = tried

    tuned = ladder(ladder(Setting(), COARSE), FINE)
    tuned = best(iter([tuned, *(tuned._replace(betas=betas) for betas in BETAS)]))
    tuned = best(iter([tuned, *(tuned._replace(weight_decay=decay) for decay in WEIGHT_DECAYS)]))
    finalists = [ladder(tuned._replace(horizon=horizon), FINE) for horizon in HORIZONS]
    curves = {setting: [measure(setting, seed) for seed in seeds] for setting in finalists}
    setting = min(finalists, key=lambda each: max(map(_least, curves[each])))
    target = max(map(_least, curves[setting]))
    hits = {each: [curve.first_hit(target) for curve in curves[each]] for each in finalists}
    medians = {each: statistics.median(hit or math.inf for hit in hits[each]) for each in finalists}
    fastest = min(finalists, key=medians.__getitem__)
    initial = statistics.fmean(curve.losses[0] for curve in curves[setting])
    return Baseline(target, int(medians[fastest]), initial, setting, fastest, hits[fastest])


def _least(curve: Curve) -> float:
    """Return the best smoothed loss of a run, infinite if it diverged."""
    return math.inf if curve.diverged else min(curve.losses[1:], default=math.inf)
