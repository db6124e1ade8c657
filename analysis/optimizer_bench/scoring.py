"""Scores: how many times fewer steps than tuned AdamW a candidate needs, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.optimizer_bench.bench import Outcome
from analysis.optimizer_bench.running import Curve

#: A miss earns this much at the most, what is left falls by e with every tenth of the way that is left, to the floor.
MISS, STEEPNESS, FLOOR = 0.7, 10.0, 0.05
RESAMPLES = 2000
#: A workload's name, geometric mean (``ratio``) and each seed's ratio, first step at the target (None: a miss) and
#: whether it diverged, and milliseconds a step.
Row = dict[str, Any]
#: What rows come to: ``ratio``, their geometric mean, its 95 % ``interval`` (None for one seed), the ``worst`` row.
Summary = dict[str, Any]


def rate(curve: Curve, baseline: Mapping[str, Any]) -> float:
    """Return AdamW's steps over a run's, or the partial credit of a run that misses the target.

    Args:
        curve: Of the run.
        baseline: The workload's ``target`` and AdamW's ``steps`` to it, from the loss ``initial``.
    """
    if curve.diverged:
        return FLOOR
    hit = curve.first_hit(baseline["target"])
    if hit is not None:
        return float(baseline["steps"] / hit)
    left = (curve.losses[-1] - baseline["target"]) / (baseline["initial"] - baseline["target"])
    return max(FLOOR, MISS * math.exp(-STEEPNESS * left))


def score_workload(name: str, outcomes: Sequence[Outcome], baseline: Mapping[str, Any]) -> Row:
    """Return a workload's row from the outcomes of its seeds."""
    ratios = [rate(outcome.curve, baseline) for outcome in outcomes]
    return {
        "workload": name,
        "ratio": statistics.geometric_mean(ratios),
        "ratios": ratios,
        "hits": [outcome.curve.first_hit(baseline["target"]) for outcome in outcomes],
        "diverged": [outcome.curve.diverged for outcome in outcomes],
        "step_ms": statistics.fmean(outcome.step_ms or 0.0 for outcome in outcomes),
    }


def summarise(rows: Sequence[Row]) -> Summary:
    """Return what rows come to."""
    worst = min(rows, key=lambda row: float(row["ratio"]))
    return {
        "ratio": statistics.geometric_mean(row["ratio"] for row in rows),
        "interval": bootstrap([row["ratios"] for row in rows]) if len(rows[0]["ratios"]) > 1 else None,
        "worst": worst["workload"],
        "worst_ratio": worst["ratio"],
        "diverged": [row["workload"] for row in rows if any(row["diverged"])],
    }


def bootstrap(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean over workloads, seeds drawn again within each.

    Args:
        ratios: (workloads, seeds), each > 0.
    """
    logs = np.log(ratios)  # (workloads, seeds)
    drawn = np.random.default_rng(0).integers(logs.shape[1], size=(RESAMPLES, *logs.shape))
    means = np.take_along_axis(logs[None], drawn, axis=2).mean((1, 2))  # (resamples,)
    low, high = np.exp(np.quantile(means, [0.025, 0.975])).tolist()
    return low, high
