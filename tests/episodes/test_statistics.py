from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from protonet.episodes.statistics import adjust_holm, compare_pairs, half_width, mean_of


def normal(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_half_width_is_scipys() -> None:
    values = normal(20, 0)
    low, high = stats.t.interval(0.95, 19, loc=values.mean().item(), scale=stats.sem(values.numpy()))
    assert math.isclose(half_width(values), (high - low) / 2)
    holed = torch.cat([values, torch.tensor([math.nan])])
    assert half_width(holed) == half_width(values)
    assert mean_of(holed) == values.mean().item()
    assert math.isnan(half_width(values[:1]))
    assert math.isnan(mean_of(values[:0]))


def test_intervals_cover() -> None:
    covered = [abs(float(sample.mean())) < half_width(sample) for sample in normal(8000, 1).reshape(1000, 8)]
    assert abs(sum(covered) / 1000 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 1000)


def test_pairs_are_scipys_paired_tests() -> None:
    a, b, c = normal(30, 0), normal(30, 1) + 0.5, normal(30, 2)
    found = compare_pairs({"a": a, "b": b, "c": c})
    assert [each[:2] for each in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    for each, (x, y) in zip(found, [(a, b), (a, c), (b, c)], strict=True):
        assert math.isclose(each.p_value, stats.ttest_rel(x.numpy(), y.numpy()).pvalue)
        assert math.isclose(each.difference, float((x - y).mean()))
        assert math.isclose(each.half_width, half_width(x - y))
    assert [each.p_holm for each in found] == adjust_holm([each.p_value for each in found])


def test_pairs_without_spread() -> None:
    same, more = torch.full((5,), 0.5, dtype=torch.float64), torch.full((5,), 0.7, dtype=torch.float64)
    equal, apart, _ = compare_pairs({"a": same, "b": same.clone(), "c": more})
    assert (equal.p_value, apart.p_value) == (1.0, 0.0)
    assert compare_pairs({"a": same[:1], "b": more[:1]})[0].p_value == 1.0
    assert compare_pairs({"a": same}) == []


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_rejects_what_the_definition_rejects(p_values: list[float]) -> None:
    adjusted = adjust_holm(p_values)
    order = np.argsort(p_values, kind="stable")
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, position in enumerate(order):
            if p_values[position] * (len(order) - rank) > level:
                break
            rejected.add(int(position))
        assert {position for position, p in enumerate(adjusted) if p <= level} == rejected
