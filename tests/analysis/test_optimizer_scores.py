"""Scores of the optimizer bench: against oracles, on curves made by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from analysis.optimizer_bench.bench import (
    bootstrap_interval,
    compute_loss_gap,
    compute_step_ratio,
    format_tables,
    score_workload,
    summarise,
)
from analysis.optimizer_bench.workload import LossCurve
from tests.analysis.conftest import read_cells

BASELINE: dict[str, Any] = {"target": 1.0, "steps": 60, "initial": 5.0, "max_steps": 100}


def curve(*losses: float, diverged: bool = False, **more: Any) -> LossCurve:
    return LossCurve(list(losses), diverged, **more)


#: Losses of a run, the horizon, and what the run earns: AdamW takes 60 steps to a loss of 1 from 5.
RATES: list[tuple[LossCurve, int, float]] = [
    (curve(5, 3, 1, 2), 100, 60 / 20),  # a hit ends it, whatever comes later
    (curve(5, 3, 0.9, diverged=True), 100, 60 / 20),
    (curve(0.5, 3, 2, 0.9), 100, 60 / 30),  # nothing is reached before training
    (curve(5, 3, 1.4), 100, 0.7 * math.exp(-1)),
    (curve(5, 1 + 1e-9), 100, 0.7),
    (curve(5, 3), 100, 0.05),
    (curve(5, 1.5, diverged=True), 100, 0.05),
    (curve(diverged=True), 100, 0.05),
    (curve(5, 3, 2, 1.4, 0.9), 10, 0.05),  # a horizon hides what comes later
    (curve(5, 3, 2, 1.4, 0.9), 20, 0.7 * math.exp(-2.5)),
    (curve(5, 3, 2, 1.4, 0.9), 30, 0.7 * math.exp(-1)),
    (curve(5, 3, 2, 1.4, 0.9), 40, 1.5),
    (curve(5, 3, 2, diverged=True), 20, 0.7 * math.exp(-2.5)),  # its loss at 30 steps was not finite, or before
    (curve(5, 3, 2, diverged=True), 30, 0.05),
]


def test_rate() -> None:
    for losses, steps, expected in RATES:
        assert compute_step_ratio(losses, BASELINE | {"max_steps": steps}) == pytest.approx(expected), expected


def test_gaps_are_of_the_best_loss_within_the_horizon() -> None:
    assert compute_loss_gap(curve(0.1, 3, 1.2, 1.5), BASELINE) == pytest.approx(20)
    assert compute_loss_gap(curve(5, 3, 1.2, 1.1), BASELINE | {"max_steps": 20}) == pytest.approx(20)
    assert compute_loss_gap(curve(5, 3, 1), BASELINE) is None
    assert compute_loss_gap(curve(5, diverged=True), BASELINE) is None
    assert compute_loss_gap(curve(5, 2, diverged=True), BASELINE) == pytest.approx(100)
    assert compute_loss_gap(curve(5, -1, -1.5), BASELINE | {"target": -2.0}) == pytest.approx(25)


def test_summary() -> None:
    seeds = [curve(5, 1, step_ms=1.0), curve(5, 2, 1, step_ms=3.0)]
    good = score_workload("gpt", seeds, BASELINE)
    assert good["ratio"] == pytest.approx(math.sqrt(6 * 3))
    assert (good["hits"], good["step_ms"], good["gaps"]) == ([10, 20], 2.0, [None, None])
    assert (good["role"], good["family"], good["steps"]) == ("visible", "language", 100)
    lost = [curve(5, diverged=True), curve(5, 5)]
    bad = score_workload("vae", lost, BASELINE)
    (summary,) = summarise([good, bad])
    assert summary["ratio"] == pytest.approx(math.sqrt(math.sqrt(18) * 0.05))
    assert (summary["worst"], summary["diverged"]) == ("vae", ["vae"])
    assert summary["interval"][0] < summary["ratio"] < summary["interval"][1]
    assert summarise([score_workload("gpt", seeds[:1], BASELINE)])[0]["interval"] is None


def test_workloads_have_equal_weight_and_the_worst_family_is_reported() -> None:
    rows = [
        score_workload(name, [curve(*[5] * rank, 1)], BASELINE | {"max_steps": steps})
        for steps in (100, 200)
        for name, rank in (("cnn", 1), ("vit", 3), ("gpt", 2), ("labels", 4))
    ]
    first, second, *_ = summaries = summarise(rows)
    assert [(summary["role"], summary["steps"]) for summary in summaries] == [
        *(("visible", 100), ("tuning", 100)),
        *(("visible", 200), ("tuning", 200)),
    ]
    assert first["ratio"] == pytest.approx((6 * 2 * 3) ** (1 / 3))
    assert (first["worst"], first["worst_family"]) == ("vit", "language")  # vision has sqrt(12)
    assert first["worst_family_ratio"] == pytest.approx(3)
    assert second["ratio"] == pytest.approx(1.5)


def test_tables() -> None:
    trials = [curve(5, 1), curve(5, 3, 1.004)]
    rows = [score_workload("gpt", trials, BASELINE), score_workload("labels", [curve(5, diverged=True)] * 2, BASELINE)]
    entry = {"name": "ours", "config": {}, "factor": 1.0, "rows": rows, "summaries": summarise(rows)}
    text = format_tables([entry], {name: {"100": BASELINE} for name in ("gpt", "labels")})
    lines = read_cells(text)
    assert ["gpt", "language", "1", "60", "10, miss", "2.04", "0.4 %", "0.00"] in lines
    assert ["labels", "noise", "1", "60", "not finite, not finite", "0.05", "", "0.00"] in lines
    assert "**Visible workloads, 100 steps**" in text
    assert "ours: geometric mean 0.05 (0.05 to 0.05), worst labels 0.05, worst family noise 0.05, " in text
    assert "not finite: labels.\n" in text


def test_bootstrap_is_the_enumeration() -> None:
    logs = np.log(ratios := [[1.0, 2.0, 1.5], [0.5, 0.7, 3.0]])
    draws = list(itertools.product(range(3), repeat=3))
    means = [(a[list(i)].mean() + b[list(j)].mean()) / 2 for a, b in [logs] for i in draws for j in draws]
    assert bootstrap_interval(ratios) == pytest.approx(np.exp(np.quantile(means, [0.025, 0.975])), rel=0.03)
    assert bootstrap_interval(ratios) == bootstrap_interval(ratios)
    assert bootstrap_interval((3 * np.array(ratios)).tolist()) == pytest.approx(
        [3 * end for end in bootstrap_interval(ratios)]
    )
    assert bootstrap_interval([[2.0, 2.0], [8.0, 8.0]]) == pytest.approx((4, 4))
