"""Which rows to label next: against slow loops and all subsets, and what must not matter."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.spatial.distance import cdist
from torch import Tensor

from protonet import InputError, PrototypeNetwork, solve
from protonet.fit import active
from protonet.fit.active import RULES, kernel_similarity, maximize_coverage, predict_classes, sample_rows, suggest_rows
from tests.strategies import blobs, seeds


def draw_unit(seed: int, n: int, dim: int = 3) -> Tensor:
    rows = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=1)


def add_up(rows: Tensor, weights: Tensor, chosen: list[int], bandwidth: float) -> float:
    """What rows have in common with the nearest chosen one, by a loop."""
    total = 0.0
    for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
        alike = [math.exp(-(math.dist(row, rows[c].tolist()) ** 2) / 2 / bandwidth) for c in chosen]
        total += weight * max(alike, default=0.0)
    return total


@given(seeds)
def test_likeness_is_that_of_cosines(seed: int) -> None:
    rows, others = draw_unit(seed, 7), draw_unit(seed + 1, 4)
    expected = np.exp(-cdist(rows.double(), others.double(), "cosine") / 0.3)
    np.testing.assert_allclose(kernel_similarity(rows, others, 0.3).numpy(), expected, atol=2e-6)


@given(seeds)
def test_the_choice_is_the_slow_greedy_one_and_near_the_best_of_all(seed: int) -> None:
    rows, n, bandwidth = draw_unit(seed, 7), 2, 0.2
    weights = torch.rand(7, generator=torch.Generator().manual_seed(seed))
    chosen = maximize_coverage(rows, weights, rows[:0], n, bandwidth).tolist()
    slow: list[int] = []
    for _ in range(n):
        left = [row for row in range(7) if row not in slow]
        slow.append(max(left, key=lambda row: add_up(rows, weights, [*slow, row], bandwidth)))
    reached = add_up(rows, weights, chosen, bandwidth)
    assert reached == pytest.approx(add_up(rows, weights, slow, bandwidth), rel=1e-5)
    maximum = max(add_up(rows, weights, list(some), bandwidth) for some in combinations(range(7), n))
    assert maximum * (1 - 1 / math.e) - 1e-6 <= reached <= maximum * (1 + 1e-5)


@given(seeds)
def test_the_order_of_rows_and_the_scale_of_weights_do_not_matter_and_more_rows_begin_alike(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, weights = draw_unit(seed, 12), torch.rand(12, generator=generator)
    order = torch.randperm(12, generator=generator)
    chosen = maximize_coverage(rows, weights, rows[:0], 5, 0.2)
    assert torch.equal(order[maximize_coverage(rows[order], 4 * weights[order], rows[:0], 5, 0.2)], chosen)
    assert torch.equal(maximize_coverage(rows, weights, rows[:0], 3, 0.2), chosen[:3])
    assert len(chosen.unique()) == 5


def test_rows_that_are_labelled_already_are_as_good_as_chosen() -> None:
    x = torch.eye(3).repeat_interleave(torch.tensor([5, 3, 2]), dim=0)
    assert [x[row].argmax() for row, _ in suggest_rows(None, x, 1)] == [0]
    assert [x[row].argmax() for row, _ in suggest_rows(None, x, 2, known=x[:1])] == [1, 2]
    assert suggest_rows(None, x, 3, known=x[:0]) == suggest_rows(None, x, 3)
    with pytest.raises(InputError, match="`known` must have"):
        suggest_rows(None, x, 1, known=x[:, :2])
    for known, expected in ((x[:0], [0, 1, 2]), (x[:1], [1, 2])):
        chosen = maximize_coverage(x, torch.ones(10), known, len(expected), 0.1)
        assert x[chosen].argmax(dim=1).tolist() == expected  # equal rows are chosen once


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    weights, n = torch.tensor([1.0, 2.0, 7.0]), 2000
    drawn = torch.cat([sample_rows(weights, 1, seed) for seed in range(n)])
    fractions = torch.bincount(drawn, minlength=3) / n
    for fraction, expected in zip(fractions.tolist(), [0.1, 0.2, 0.7], strict=True):
        assert abs(fraction - expected) < 4 * math.sqrt(expected * (1 - expected) / n)
    assert sample_rows(weights, 3, 0).tolist() == [0, 1, 2]
    assert torch.equal(sample_rows(torch.ones(50), 9, 1), sample_rows(torch.ones(50), 9, 1))
    assert len(sample_rows(torch.ones(50), 9, 1).unique()) == 9


@pytest.fixture(scope="module")
def network() -> PrototypeNetwork:
    return solve([blobs(0, classes=3, rows=6, dim=4)], effort="fast")


def test_with_one_class_all_rows_are_in_doubt() -> None:
    network = PrototypeNetwork(torch.nn.Identity(), embedding_dim=2, num_classes=1)
    network.set_prototypes(torch.eye(2)[:1], torch.zeros(1, dtype=torch.int64))
    x = torch.tensor([[1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    assert predict_classes(network, x).uncertainty.tolist() == [1.0, 1.0, 1.0]
    assert suggest_rows(network, x, 1, ["one"])[0].row in {1, 2}


def test_reasons_say_what_stands_out() -> None:
    network = PrototypeNetwork(torch.nn.Identity(), embedding_dim=3, num_classes=2)
    network.set_prototypes(torch.eye(3)[:2], torch.arange(2))
    sure = torch.eye(3)[:2].repeat_interleave(20, dim=0) + 0.01 * draw_unit(0, 40)
    x = torch.cat([sure, torch.tensor([[1.0, 1.01, 0.0], [0.2, -0.1, 1.0], [0.1, 0.0, -1.0]])])
    reasons = dict(suggest_rows(network, x, len(x), ["cat", "dog"]))
    assert reasons[40].startswith("between dog and cat: 5")
    assert reasons[41] == "outlier: 95 % of the rows are closer to a class"
    assert reasons[42] == "outlier: 98 % of the rows are closer to a class"
    assert {reasons[row].split()[0] for row in range(40)} <= {"representative", "unlike"}
    assert {row for row, _ in suggest_rows(network, x, 3, ["cat", "dog"])} == {40, 41, 42}


def test_the_first_rows_are_typical_and_spread_whatever_the_units() -> None:
    x, y = blobs(3, classes=4, rows=10, dim=5, noise=0.1)
    chosen = suggest_rows(None, x, 4)
    assert len({int(y[row]) for row, _ in chosen}) == 4
    assert {reason for _, reason in chosen} == {"representative of 10 unlabelled rows"}
    units = torch.tensor([1.0, 1e3, 1e-3, 5.0, 1.0])
    constant = torch.full((len(x), 1), 7.0)
    again = suggest_rows(None, torch.cat([x * units + 5 * units, constant], dim=1), 4)
    assert [row for row, _ in again] == [row for row, _ in chosen]


def test_of_many_rows_those_in_doubt_are_compared(network: PrototypeNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "RULES", replace(RULES, max_rows=60))
    x, _ = blobs(4, classes=3, rows=200, dim=4, noise=1.0)
    doubt = predict_classes(network, x).uncertainty
    chosen = suggest_rows(network, x, 20, range(3))
    rows = [row for row, _ in chosen]
    assert len(set(rows)) == 20
    assert doubt[rows].mean() > 1.2 * doubt.mean()
    assert chosen == suggest_rows(network, x, 20, range(3))
    assert rows != [row for row, _ in suggest_rows(network, x, 20, range(3), seed=1)]


def test_errors(network: PrototypeNetwork) -> None:
    cases: list[tuple[Tensor, int, str]] = [
        (torch.zeros(3, 4), 4, r"^`n` must be a whole number in \[1, 3\]; got 4\. Ask for at most 3"),
        (torch.zeros(3, 4), 0, "`n` must be a whole number"),
        (torch.zeros(0, 4), 1, "`x` must have at least one row"),
        (torch.zeros(3, 5), 1, "`x` must have 4 features per row"),
        (torch.full((3, 4), torch.nan), 1, "`x` must be finite"),
        (torch.full((3, 4), 3e38), 1, "`x` must hold numbers of the size that the network was fitted to"),
    ]
    for x, n, message in cases:
        with pytest.raises(InputError, match=message):
            suggest_rows(network, x, n, range(3))
