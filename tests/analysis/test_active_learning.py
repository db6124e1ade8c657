"""The study of the labels that it takes: strategies against slow forms, the curve and the table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from analysis.real_data.active_learning import count_labels, summarise, tabulate
from analysis.real_data.active_strategies import (
    STRATEGIES,
    TARGET,
    Pool,
    Run,
    choose_entropy,
    choose_far,
    choose_margin,
    choose_ours,
    draw_shots,
    split_pool,
)
from protonet import solve
from protonet.fit.active import suggest_rows
from tests.strategies import blobs


@pytest.fixture(scope="module")
def pool() -> Pool:
    x, y = blobs(0, classes=3, rows=15, dim=4, noise=1.0)
    return Pool(solve([(x[:9], y[:9])], effort="fast"), x[9:], x[:9])


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_every_strategy_is_deterministic_and_chooses_distinct_rows(pool: Pool) -> None:
    for name in STRATEGIES:
        with torch.no_grad():
            chosen = STRATEGIES[name](pool, 7, draw())
            assert chosen.dtype == torch.int64, name
            assert len(chosen.unique()) == 7, name
            assert 0 <= int(chosen.min()) <= int(chosen.max()) < 36, name
            assert torch.equal(chosen, STRATEGIES[name](pool, 7, draw())), name
            assert len(STRATEGIES[name](pool, 36, draw()).unique()) == 36, name


@torch.no_grad()
def test_margin_and_entropy_are_those_of_the_probabilities(pool: Pool) -> None:
    p = pool.probabilities.double().numpy()
    best = np.sort(p, axis=1)
    assert choose_margin(pool, 5, draw()).tolist() == np.argsort(best[:, -1] - best[:, -2])[:5].tolist()
    assert choose_entropy(pool, 5, draw()).tolist() == np.argsort(-entropy(p, axis=1))[:5].tolist()


@torch.no_grad()
def test_the_farthest_are_chosen_by_a_slow_loop(pool: Pool) -> None:
    rows, known = pool.rows.tolist(), pool.known.tolist()
    for row in choose_far(pool, 4, draw()).tolist():
        nearest = [min(math.dist(row, other) for other in known) for row in rows]
        assert nearest[row] == pytest.approx(max(nearest), abs=1e-3)
        known.append(rows[row])


@torch.no_grad()
def test_ours_is_what_the_library_suggests(pool: Pool) -> None:
    expected = [suggestion.row for suggestion in suggest_rows(pool.network, pool.x, 5, range(3))]
    assert choose_ours(pool, 5, draw()).tolist() == expected


def test_the_curve_is_read_where_it_first_stays_above() -> None:
    assert count_labels([0.5, 0.6, 0.8, 0.9], 0.7) == pytest.approx(2.5)
    assert count_labels([0.5, 0.6, 0.8, 0.9], 0.4) == 1
    assert count_labels([0.5, 0.6, 0.8, 0.9], 0.95) == 5
    assert count_labels([0.5, 0.9, 0.5, 0.9], 0.7) == pytest.approx(2.0, abs=1)  # a lucky batch does not count in full
    assert count_labels([0.5, 0.9, 0.5, 0.9], 0.7) > count_labels([0.5, 0.9, 0.9, 0.9], 0.7)


def test_splits_do_not_overlap_and_draws_are_of_every_class() -> None:
    x, y, test_x, test_y, num_classes = split_pool("iris", 0)
    assert len(x) + len(test_x) == 150
    assert num_classes == 3
    assert len(test_y) == 50
    rows = draw_shots(y, 4, draw())
    assert torch.bincount(y[rows]).tolist() == [4, 4, 4]
    assert len(set(rows)) == 12
    assert split_pool("digits", 0)[4] == 10


def test_summary_and_table() -> None:
    results = {
        Run("iris", 0, TARGET): [0.8, 0.8],
        Run("iris", 0, "ours"): [0.5, 0.7, 0.9],
        Run("iris", 0, "random"): [0.5, 0.6, 0.7],
        Run("digits", 0, TARGET): [0.9],
        Run("digits", 0, "ours"): [0.7, 0.9, 0.9],
        Run("digits", 0, "random"): [0.7, 0.8, 0.9],
    }
    rows = summarise(results)
    assert [row["labels"] for row in rows] == [{"ours": 2.5, "random": 4.0}, {"ours": 2.0, "random": 3.0}]
    text = tabulate(rows)
    assert "| iris                            | 80.0             | 25    | 40     |" in text
    assert "| **mean of all**                 |                  | 22 ±2 | 35 ±5  |" in text
    assert "ours 64 %, random 100 %" in text
