"""Scores of optimizers: the ratio of tuned AdamW's steps to theirs within a horizon, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.optimizer_bench.runs import FILE_ROLE
from analysis.optimizer_bench.workload import STEPS_PER_VALIDATION, LossCurve
from analysis.optimizer_bench.workloads import FAMILY_OF_WORKLOAD, KIND_OF_WORKLOAD, ROLE_OF_WORKLOAD

#: Maximal score of a miss, its decay (a factor of e per tenth of the remaining distance), and the minimal score.
MAX_PARTIAL_SCORE, GAP_STEEPNESS, MIN_PARTIAL_SCORE = 0.7, 10.0, 0.05
BOOTSTRAP_SAMPLES = 2000
#: Workload name, role, family and kind; horizon (``steps``); geometric mean over seeds (``ratio``); for each seed the
#: ratio, the first step at the target (None: a miss), whether it diverged, and the exception (None: none); for misses,
#: the gap of the best smoothed loss to the target in percent (``gaps``, None for a hit or no loss); ratios against
#: ``easier`` baselines by name, if any; and milliseconds per step.
Row = dict[str, Any]
#: Summary of the rows of one role and horizon: ``role``, ``steps``, ``ratio``, their geometric mean, its 95 %
#: ``interval`` (None for one seed), the mean for each of the ``kinds`` and against each ``easier`` baseline that all
#: rows have, the ``worst`` row and family, and the workloads that ``diverged`` on any seed.
Summary = dict[str, Any]


def truncate_curve(curve: LossCurve, target: float, max_steps: int) -> LossCurve:
    """Return the curve of a run up to the step that reaches a target, or up to a horizon."""
    hit = curve.first_step_below(target)
    end = max_steps if hit is None else min(hit, max_steps)
    losses = curve.losses[: end // STEPS_PER_VALIDATION + 1]
    return curve._replace(losses=losses, diverged=curve.diverged and len(losses) <= end // STEPS_PER_VALIDATION)


def compute_step_ratio(curve: LossCurve, baseline: Mapping[str, Any]) -> float:
    """Compute the ratio of AdamW's steps to those of a run; a run that misses the target gets a partial score."""
    target = baseline["target"]
    curve = truncate_curve(curve, target, baseline["max_steps"])
    if curve.diverged:
        return MIN_PARTIAL_SCORE
    hit = curve.first_step_below(target)
    if hit is not None:
        return float(baseline["steps"] / hit)
    left = (curve.losses[-1] - target) / (baseline["initial"] - target)
    return max(MIN_PARTIAL_SCORE, MAX_PARTIAL_SCORE * math.exp(-GAP_STEEPNESS * max(0.0, left)))


def compute_loss_gap(curve: LossCurve, baseline: Mapping[str, Any]) -> float | None:
    """Compute the gap of a run's best loss to the target, in percent of the target; None if it is reached."""
    target = baseline["target"]
    losses = truncate_curve(curve, target, baseline["max_steps"]).losses[1:]
    best = min(losses, default=-math.inf)
    return None if best <= target else 100 * (best - target) / abs(target) if target else math.inf


def score_workload(name: str, curves: Sequence[LossCurve], baseline: Mapping[str, Any]) -> Row:
    """Compute a workload's row at its baseline's horizon, from the runs of its seeds."""
    target, max_steps = baseline["target"], baseline["max_steps"]
    seen = [truncate_curve(curve, target, max_steps) for curve in curves]
    ratios = [compute_step_ratio(curve, baseline) for curve in seen]
    return {
        "workload": name,
        "role": ROLE_OF_WORKLOAD.get(name, FILE_ROLE),
        "family": FAMILY_OF_WORKLOAD.get(name, FILE_ROLE),
        "kind": KIND_OF_WORKLOAD.get(name, FILE_ROLE),
        "steps": max_steps,
        "ratio": statistics.geometric_mean(ratios),
        "ratios": ratios,
        "easier": {
            easier: statistics.geometric_mean(compute_step_ratio(curve, baseline | entry) for curve in curves)
            for easier, entry in baseline.get("easier", {}).items()
        },
        "hits": [curve.first_step_below(target) for curve in seen],
        "diverged": [curve.diverged for curve in seen],
        "raised": [curve.error_message if curve.diverged else None for curve in seen],
        "gaps": [compute_loss_gap(curve, baseline) for curve in seen],
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
    families = average_ratios_by(rows, "family")
    worst_family = min(families, key=families.__getitem__)
    return {
        "ratio": statistics.geometric_mean(row["ratio"] for row in rows),
        "kinds": average_ratios_by(rows, "kind"),
        "easier": {
            name: statistics.geometric_mean(row["easier"][name] for row in rows)
            for name in rows[0]["easier"]
            if all(name in row["easier"] for row in rows)
        },
        "interval": bootstrap_interval([row["ratios"] for row in rows]) if len(rows[0]["ratios"]) > 1 else None,
        "worst": worst["workload"],
        "worst_ratio": worst["ratio"],
        "worst_family": worst_family,
        "worst_family_ratio": families[worst_family],
        "diverged": [row["workload"] for row in rows if any(row["diverged"])],
    }


def average_ratios_by(rows: Sequence[Row], key: str) -> dict[Any, float]:
    """Compute the geometric mean of the ratios for each value of a key, such as the family."""
    values = dict.fromkeys(row[key] for row in rows)
    return {value: statistics.geometric_mean(row["ratio"] for row in rows if row[key] == value) for value in values}


def bootstrap_interval(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Compute the 95 % interval of the geometric mean of ratios (workloads, seeds), resampling seeds per workload."""
    logs = np.log(ratios)  # (workloads, seeds)
    drawn = np.random.default_rng(0).integers(logs.shape[1], size=(BOOTSTRAP_SAMPLES, *logs.shape))
    means = np.take_along_axis(logs[None], drawn, axis=2).mean((1, 2))  # (resamples,)
    low, high = np.exp(np.quantile(means, [0.025, 0.975])).tolist()
    return low, high
