"""Scores of the optimizer bench against oracles; its workloads keep to the rules."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401 - its import draws from the global state
import torch

from analysis.optimizer_bench.bench import (
    bootstrap_interval,
    compute_loss_gap,
    compute_step_ratio,
    format_tables,
    score_workload,
    summarise,
)
from analysis.optimizer_bench.workload import (
    LossCurve,
    Workload,
    compute_validation_loss,
    cut_windows,
    hold_out,
    read_stdlib_sources,
    shuffled_batches,
)
from analysis.optimizer_bench.workloads import GROUPS_OF_WORKLOAD, WORKLOADS, WORKLOADS_BY_ROLE, streams
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
    assert first["interval"] is None  # of a single seed
    assert second["ratio"] == pytest.approx(1.5)


def test_tables() -> None:
    trials = [curve(5, 1, step_ms=1.0), curve(5, 3, 1.004, step_ms=3.0)]
    rows = [score_workload("gpt", trials, BASELINE), score_workload("labels", [curve(5, diverged=True)] * 2, BASELINE)]
    entry = {"name": "ours", "config": {}, "rows": rows, "summaries": summarise(rows)}
    text = format_tables(entry, {name: {"100": BASELINE} for name in ("gpt", "labels")})
    lines = read_cells(text)
    assert ["gpt", "language", "1", "60", "10, miss", "2.04", "0.4 %", "2.00"] in lines
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
    tripled = bootstrap_interval((3 * np.array(ratios)).tolist())
    assert tripled == pytest.approx([3 * end for end in bootstrap_interval(ratios)])
    assert bootstrap_interval([[2.0, 2.0], [8.0, 8.0]]) == pytest.approx((4, 4))


BATCHES, STEPS, RATE = 2, 30, 3e-3
LEARNING_RATES = {"cnn": 1e-2}  #: AdamW's rate for what learns nothing in so few steps at ``RATE``.


def generate(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def take(workload: Workload) -> list[float]:
    """Return the first losses of a workload, whose weights do not move."""
    return [float(workload.train_loss().detach()) for _ in range(BATCHES)]


@pytest.mark.parametrize(
    "name", [next(iter(builds)) for families in WORKLOADS_BY_ROLE.values() for builds in families.values()]
)
def test_a_workload_keeps_to_the_rules(name: str) -> None:
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    first, same, other = (WORKLOADS[name](seed) for seed in (0, 0, 1))
    weights = copy.deepcopy(first.model.state_dict())
    for key, value in same.model.state_dict().items():
        assert torch.equal(value, weights[key])
    assert any(not torch.equal(value, weights[key]) for key, value in other.model.state_dict().items())
    loss = compute_validation_loss(first.model, first.val_loss)
    assert np.isfinite(loss)
    losses = take(first)
    assert take(same) == losses
    other.model.load_state_dict(weights)
    assert take(other) != losses  # with the same weights: its batches are others
    for workload in (first, other):
        workload.model.load_state_dict(weights)  # batches may have moved buffers
        assert compute_validation_loss(workload.model, workload.val_loss) == loss
        assert workload.model.training
    optimizer = torch.optim.AdamW(first.model.parameters(), LEARNING_RATES.get(name, RATE))
    trained = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch_loss = first.train_loss()
        batch_loss.backward()
        optimizer.step()
        trained.append(float(batch_loss.detach()))
    assert all(parameter.grad is not None for parameter in first.model.parameters())
    early, late = np.mean(trained[:5]), np.mean(trained[-5:])
    assert late < early or compute_validation_loss(first.model, first.val_loss) < loss
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]


def list_rows(batch: object) -> list[tuple[float, ...]]:
    """Return the rows of a stream's batch, of its tensors side by side."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    rows = torch.cat([part.view(len(part), -1).double() for part in parts], 1).tolist()
    return [*map(tuple, rows)]


@pytest.mark.parametrize("name", [name for name, build in WORKLOADS.items() if build.__module__ == streams.__name__])
def test_rows_of_a_stream_never_come_again(name: str) -> None:
    task = inspect.unwrap(WORKLOADS[name])()
    stream = task.batch_stream(generate(3))
    rows = [row for batch in (next(stream), next(stream), task.validation_batch) for row in list_rows(batch)]
    assert len({*rows}) > 0.98 * len(rows)  # those of few symbols may, by chance


def test_every_workload_has_one_role_family_and_kind() -> None:
    assert len(WORKLOADS) == sum(len(builds) for families in WORKLOADS_BY_ROLE.values() for builds in families.values())
    assert GROUPS_OF_WORKLOAD.keys() == WORKLOADS.keys()
    assert all(groups.family in WORKLOADS_BY_ROLE[groups.role] for groups in GROUPS_OF_WORKLOAD.values())


def test_rows_are_seen_once_before_any_again_and_those_held_out_never() -> None:
    train, validation = hold_out(torch.arange(20), 7)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(20))
    stream = shuffled_batches(train, 4, lambda rows, generator: (rows, torch.rand(1, generator=generator)))(generate(3))
    batches = [next(stream)[0] for _ in range(6)]
    for epoch in (batches[:3], batches[3:]):
        assert len(torch.cat(epoch).unique()) == 12
        assert set(torch.cat(epoch).tolist()) < set(train.tolist())


def test_windows_of_text_do_not_overlap_and_modules_are_held_out() -> None:
    assert cut_windows(torch.arange(10), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cut_windows(torch.arange(10), 2, 3).tolist() == [[0, 1], [4, 5], [8, 9]]
    train, validation = read_stdlib_sources()
    assert not train.keys() & validation.keys()
    assert len(validation) > 10
