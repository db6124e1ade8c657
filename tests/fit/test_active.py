"""Suggestions of rows to label next: slow loops and all subsets as oracles, invariances, reasons and errors."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from protonet import InputError, PrototypeNetwork, solve
from protonet.fit import active
from tests.strategies import blobs, seeds, unit_rows


def compute_coverage(rows: Tensor, weights: Tensor, chosen: list[int], bandwidth: float) -> float:
    """Sum the weighted similarities of rows to the nearest chosen one, by a loop."""
    total = 0.0
    for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
        similarities = [math.exp(-(math.dist(row, rows[c].tolist()) ** 2) / 2 / bandwidth) for c in chosen]
        total += weight * max(similarities, default=0.0)
    return total


@given(seeds)
def test_coverage_is_that_of_a_slow_greedy_loop_and_near_the_maximum(seed: int) -> None:
    rows, n, bandwidth = unit_rows(7, 3, seed), 2, 0.2
    weights = torch.rand(7, generator=torch.Generator().manual_seed(seed))
    chosen = active.maximize_coverage(rows, weights, rows[:0], n, bandwidth).tolist()
    slow: list[int] = []
    for _ in range(n):
        others = [row for row in range(7) if row not in slow]
        slow.append(max(others, key=lambda row: compute_coverage(rows, weights, [*slow, row], bandwidth)))
    coverage = compute_coverage(rows, weights, chosen, bandwidth)
    assert coverage == pytest.approx(compute_coverage(rows, weights, slow, bandwidth), rel=1e-5)
    maximum = max(compute_coverage(rows, weights, list(some), bandwidth) for some in combinations(range(7), n))
    assert maximum * (1 - 1 / math.e) - 1e-6 <= coverage <= maximum * (1 + 1e-5)


@given(seeds)
def test_chosen_rows_do_not_depend_on_the_order_of_rows_the_scale_of_weights_and_their_number(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, weights = unit_rows(12, 3, seed), torch.rand(12, generator=generator)
    order = torch.randperm(12, generator=generator)
    chosen = active.maximize_coverage(rows, weights, rows[:0], 5, 0.2)
    assert torch.equal(order[active.maximize_coverage(rows[order], 4 * weights[order], rows[:0], 5, 0.2)], chosen)
    assert torch.equal(active.maximize_coverage(rows, weights, rows[:0], 3, 0.2), chosen[:3])
    assert len(chosen.unique()) == 5


def test_labelled_rows_count_as_covered() -> None:
    x = torch.eye(3).repeat_interleave(torch.tensor([5, 3, 2]), dim=0)
    assert [x[row].argmax() for row, _ in active.suggest_rows(None, x, 1)] == [0]
    assert [x[row].argmax() for row, _ in active.suggest_rows(None, x, 2, labelled_features=x[:1])] == [1, 2]
    assert active.suggest_rows(None, x, 3, labelled_features=x[:0]) == active.suggest_rows(None, x, 3)
    with pytest.raises(InputError, match="`known` must have"):
        active.suggest_rows(None, x, 1, labelled_features=x[:, :2])
    for known, expected in ((x[:0], [0, 1, 2]), (x[:1], [1, 2])):
        chosen = active.maximize_coverage(x, torch.ones(10), known, len(expected), 0.1)
        assert x[chosen].argmax(dim=1).tolist() == expected  # equal rows are chosen once


def test_rows_are_sampled_in_proportion_to_their_weights() -> None:
    weights, n = torch.tensor([1.0, 2.0, 7.0]), 2000
    sampled = torch.cat([active.sample_weighted_rows(weights, 1, seed) for seed in range(n)])
    fractions = torch.bincount(sampled, minlength=3) / n
    for fraction, expected in zip(fractions.tolist(), [0.1, 0.2, 0.7], strict=True):
        assert abs(fraction - expected) < 4 * math.sqrt(expected * (1 - expected) / n)
    assert active.sample_weighted_rows(weights, 3, 0).tolist() == [0, 1, 2]
    assert len(active.sample_weighted_rows(torch.ones(50), 9, 1).unique()) == 9


@pytest.fixture(scope="module")
def network() -> PrototypeNetwork:
    return solve([blobs(0, classes=3, rows=6, dim=4)])


def test_with_one_class_all_rows_are_uncertain() -> None:
    network = PrototypeNetwork(torch.nn.Identity(), embedding_dim=2, num_classes=1)
    network.set_prototypes(torch.eye(2)[:1], torch.zeros(1, dtype=torch.int64))
    x = torch.tensor([[1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    assert active.predict_top_two_classes(network, x).uncertainty.tolist() == [1.0, 1.0, 1.0]
    assert active.suggest_rows(network, x, 1, ["one"])[0].row in {1, 2}


def test_reasons_name_uncertain_rows_and_outliers() -> None:
    network = PrototypeNetwork(torch.nn.Identity(), embedding_dim=3, num_classes=2)
    network.set_prototypes(torch.eye(3)[:2], torch.arange(2))
    certain = torch.eye(3)[:2].repeat_interleave(20, dim=0) + 0.01 * unit_rows(40, 3)
    x = torch.cat([certain, torch.tensor([[1.0, 1.01, 0.0], [0.2, -0.1, 1.0], [0.1, 0.0, -1.0]])])
    reasons = dict(active.suggest_rows(network, x, len(x), ["cat", "dog"]))
    assert reasons[40].startswith("between dog and cat: 5")
    assert reasons[41] == "outlier: 95 % of the rows are closer to a class"
    assert reasons[42] == "outlier: 98 % of the rows are closer to a class"
    assert {reasons[row].split()[0] for row in range(40)} <= {"representative", "unlike"}
    assert {row for row, _ in active.suggest_rows(network, x, 3, ["cat", "dog"])} == {40, 41, 42}


def test_the_first_suggestions_are_typical_of_all_classes_in_any_unit() -> None:
    x, y = blobs(3, classes=4, rows=10, dim=5, noise=0.1)
    chosen = active.suggest_rows(None, x, 4)
    assert len({int(y[row]) for row, _ in chosen}) == 4
    assert {reason for _, reason in chosen} == {"representative of 10 unlabelled rows"}
    units = torch.tensor([1.0, 1e3, 1e-3, 5.0, 1.0])
    constant = torch.full((len(x), 1), 7.0)
    again = active.suggest_rows(None, torch.cat([x * units + 5 * units, constant], dim=1), 4)
    assert [row for row, _ in again] == [row for row, _ in chosen]


def test_uncertain_rows_are_suggested_among_many(network: PrototypeNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "MAX_COMPARED_ROWS", 60)
    x, _ = blobs(4, classes=3, rows=200, dim=4, noise=1.0)
    uncertainty = active.predict_top_two_classes(network, x).uncertainty
    chosen = active.suggest_rows(network, x, 20, range(3))
    rows = [row for row, _ in chosen]
    assert len(set(rows)) == 20
    assert uncertainty[rows].mean() > 1.2 * uncertainty.mean()
    assert chosen == active.suggest_rows(network, x, 20, range(3))
    assert rows != [row for row, _ in active.suggest_rows(network, x, 20, range(3), seed=1)]


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
            active.suggest_rows(network, x, n, range(3))
