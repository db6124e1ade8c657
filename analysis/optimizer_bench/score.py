"""Scores of optimizers: the ratio of tuned AdamW's steps to theirs within a horizon, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.optimizer_bench.runs import FILE
from analysis.optimizer_bench.workload import EVERY, Curve
from analysis.optimizer_bench.workloads import FAMILY, KIND, ROLE

#: Maximal score of a miss, its decay (a factor of e per tenth of the remaining distance), and the minimal score.
MISS, STEEPNESS, FLOOR = 0.7, 10.0, 0.05
RESAMPLES = 2000
#: Workload name, role, family and kind; horizon (``steps``); geometric mean over seeds (``ratio``); for each seed the
#: ratio, the first step at the target (None: a miss), whether it diverged, and the exception (None: none); for misses,
#: the gap of the best smoothed loss to the target in percent (``gaps``, None for a hit or no loss); ratios against
#: ``easier`` baselines by name, if any; and milliseconds per step.
Row = dict[str, Any]
#: Summary of the rows of one role and horizon: ``role``, ``steps``, ``ratio``, their geometric mean, its 95 %
#: ``interval`` (None for one seed), the mean for each of the ``kinds`` and against each ``easier`` baseline that all
#: rows have, the ``worst`` row and family, and the workloads that ``diverged`` on any seed.
Summary = dict[str, Any]


def truncate(curve: Curve, target: float, max_steps: int) -> Curve:
    """Return the curve of a run up to the step that reaches a target, or up to a horizon."""
    hit = curve.first_hit(target)
    end = max_steps if hit is None else min(hit, max_steps)
    losses = curve.losses[: end // EVERY + 1]
    return curve._replace(losses=losses, diverged=curve.diverged and len(losses) <= end // EVERY)


def rate(curve: Curve, baseline: Mapping[str, Any]) -> float:
    """Compute the ratio of AdamW's steps to those of a run; a run that misses the target gets a partial score."""
    target = baseline["target"]
    curve = truncate(curve, target, baseline["max_steps"])
    if curve.diverged:
        return FLOOR
    hit = curve.first_hit(target)
    if hit is not None:
        return float(baseline["steps"] / hit)
    left = (curve.losses[-1] - target) / (baseline["initial"] - target)
    return max(FLOOR, MISS * math.exp(-STEEPNESS * max(0.0, left)))


def measure_gap(curve: Curve, baseline: Mapping[str, Any]) -> float | None:
    """Compute the gap of a run's best loss to the target, in percent of the target; None if it is reached."""
    target = baseline["target"]
    losses = truncate(curve, target, baseline["max_steps"]).losses[1:]
    best = min(losses, default=-math.inf)
    return None if best <= target else 100 * (best - target) / abs(target) if target else math.inf


def score_workload(name: str, curves: Sequence[Curve], baseline: Mapping[str, Any]) -> Row:
    """Compute a workload's row at its baseline's horizon, from the runs of its seeds."""
    target, max_steps = baseline["target"], baseline["max_steps"]
    seen = [truncate(curve, target, max_steps) for curve in curves]
    ratios = [rate(curve, baseline) for curve in seen]
    return {
        "workload": name,
        "role": ROLE.get(name, FILE),
        "family": FAMILY.get(name, FILE),
        "kind": KIND.get(name, FILE),
        "steps": max_steps,
        "ratio": statistics.geometric_mean(ratios),
        "ratios": ratios,
        "easier": {
            easier: statistics.geometric_mean(rate(curve, baseline | entry) for curve in curves)
            for easier, entry in baseline.get("easier", {}).items()
        },
        "hits": [curve.first_hit(target) for curve in seen],
        "diverged": [curve.diverged for curve in seen],
        "raised": [curve.raised if curve.diverged else None for curve in seen],
        "gaps": [measure_gap(curve, baseline) for curve in seen],
        "step_ms": statistics.fmean(curve.step_ms for curve in seen),
    }


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """Summarize the rows of each role and horizon; all workloads have equal weight."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["role"], row["steps"]), []).append(row)
    return [{"role": role, "steps": steps, **_summarise(group)} for (role, steps), group in groups.items()]


def _summarise(rows: Sequence[Row]) -> Summary:
    """Compute means, intervals and worst cases of the rows of one role and horizon."""
    worst = min(rows, key=lambda row: float(row["ratio"]))
    families = average_by(rows, "family")
    worst_family = min(families, key=families.__getitem__)
    return {
        "ratio": statistics.geometric_mean(row["ratio"] for row in rows),
        "kinds": average_by(rows, "kind"),
        "easier": {
            name: statistics.geometric_mean(row["easier"][name] for row in rows)
            for name in rows[0]["easier"]
            if all(name in row["easier"] for row in rows)
        },
        "interval": bootstrap([row["ratios"] for row in rows]) if len(rows[0]["ratios"]) > 1 else None,
        "worst": worst["workload"],
        "worst_ratio": worst["ratio"],
        "worst_family": worst_family,
        "worst_family_ratio": families[worst_family],
        "diverged": [row["workload"] for row in rows if any(row["diverged"])],
    }


def average_by(rows: Sequence[Row], key: str) -> dict[Any, float]:
    """Compute the geometric mean of the ratios for each value of a key, such as the family."""
    values = dict.fromkeys(row[key] for row in rows)
    return {value: statistics.geometric_mean(row["ratio"] for row in rows if row[key] == value) for value in values}


def bootstrap(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Compute the 95 % interval of the geometric mean of ratios (workloads, seeds), resampling seeds per workload."""
    logs = np.log(ratios)  # (workloads, seeds)
    drawn = np.random.default_rng(0).integers(logs.shape[1], size=(RESAMPLES, *logs.shape))
    means = np.take_along_axis(logs[None], drawn, axis=2).mean((1, 2))  # (resamples,)
    low, high = np.exp(np.quantile(means, [0.025, 0.975])).tolist()
    return low, high
