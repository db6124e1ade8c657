from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from protonet.episodes.evaluation.statistics import (
    adjust_p_values,
    compare_method_pairs,
    interval_half_width,
    mean_standard_error,
    nan_mean,
)


def normal(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_half_width_equals_scipys() -> None:
    values = normal(20, 0)
    low, high = stats.t.interval(0.95, 19, loc=values.mean().item(), scale=stats.sem(values.numpy()))
    assert math.isclose(interval_half_width(values), (high - low) / 2)
    holed = torch.cat([values, torch.tensor([math.nan])])
    assert interval_half_width(holed) == interval_half_width(values)
    assert nan_mean(holed) == values.mean().item()
    assert math.isnan(interval_half_width(values[:1]))
    assert math.isnan(nan_mean(values[:0]))


def test_pairs_equal_scipys_paired_tests() -> None:
    a, b, c = normal(30, 0), normal(30, 1) + 0.5, normal(30, 2)
    result = compare_method_pairs({"a": a, "b": b, "c": c})
    assert [(item.first, item.second) for item in result] == [("a", "b"), ("a", "c"), ("b", "c")]
    for item, (x, y) in zip(result, [(a, b), (a, c), (b, c)], strict=True):
        assert math.isclose(item.p_value_episodes, stats.ttest_rel(x.numpy(), y.numpy()).pvalue)
        assert math.isclose(item.difference, float((x - y).mean()))
        assert math.isclose(item.half_width_episodes, interval_half_width(x - y))
    assert [item.p_holm_episodes for item in result] == adjust_p_values([item.p_value_episodes for item in result])


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_rejects_the_hypotheses_that_its_definition_rejects(p_values: list[float]) -> None:
    adjusted = adjust_p_values(p_values)
    order = np.argsort(p_values, kind="stable")
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, position in enumerate(order):
            if p_values[position] * (len(order) - rank) > level:
                break
            rejected.add(int(position))
        assert {position for position, p in enumerate(adjusted) if p <= level} == rejected


def make_tasks(*, n: int, n_classes: int, spread: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make values of 5-way episodes, to which each class of the episode adds its share; return them and the class mask.

    The mean of the classes' shares is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    effects = spread * torch.randn(n_classes, generator=generator, dtype=torch.float64)
    order = torch.rand(n, n_classes, generator=generator).argsort(dim=1)
    class_mask = order < 5
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return class_mask.double() @ effects / 5 + 0.1 * noise, class_mask


def test_intervals_over_classes_equal_a_slow_jackknife() -> None:
    values, class_mask = make_tasks(n=40, n_classes=9, spread=1.0, seed=0)
    n, variance, total = 40, float(values.var()), 0.0
    for c in range(9):
        left = [float(value) for value, has in zip(values, class_mask[:, c], strict=True) if not has]
        total += (sum(left) / len(left) - float(values.mean())) ** 2 - variance * (1 / len(left) - 1 / n)
    error, freedom = mean_standard_error(values, class_mask)
    assert freedom == 8
    assert math.isclose(error, math.sqrt(8 / 9 * total + variance / n))
    known = interval_half_width(values, class_mask)
    assert math.isclose(known, float(stats.t.ppf(0.975, 8)) * error)
    holed = torch.cat([values, torch.tensor([math.nan])])
    assert interval_half_width(holed, torch.cat([class_mask, class_mask[:1]])) == known


def test_false_positives_over_classes_are_as_frequent_as_stated() -> None:
    """P-values over classes find a difference in 5 % of the populations; so do p-values over episodes of like classes.

    If classes differ, p-values over episodes find far too many differences. Values are the lead of one method in each
    episode, whose mean over the population of classes is 0. The standard error of 5 % of 200 populations is 1.6 %.
    """
    n_runs = 200
    for spread, minimum in ((0.3, 0.4), (0.0, 0.0)):
        shown = {"classes": 0, "episodes": 0}
        for seed in range(n_runs):
            values, class_mask = make_tasks(n=200, n_classes=20, spread=spread, seed=seed)
            (pair,) = compare_method_pairs({"a": values, "b": torch.zeros_like(values)}, class_mask)
            shown["classes"] += pair.p_value_classes < 0.05
            shown["episodes"] += pair.p_value_episodes < 0.05
            assert (pair.p_value_classes < 0.05) == (abs(pair.difference) > pair.half_width_classes)
        assert shown["classes"] / n_runs < 0.05 + 3 * 0.016
        assert minimum <= shown["episodes"] / n_runs < (1.0 if spread else 0.05 + 3 * 0.016)


def test_pairs_over_classes_equal_a_t_test_on_the_jackknife_error() -> None:
    (a, class_mask), (b, _) = (make_tasks(n=60, n_classes=9, spread=0.3, seed=seed) for seed in (0, 1))
    pair, *others = compare_method_pairs({"a": a, "b": b, "c": -a}, class_mask)
    error, _ = mean_standard_error(a - b, class_mask)
    assert math.isclose(pair.p_value_classes, 2 * float(stats.t.sf(abs(float((a - b).mean())) / error, 8)))
    assert math.isclose(pair.half_width_classes, interval_half_width(a - b, class_mask))
    p_values = [item.p_value_classes for item in (pair, *others)]
    assert [item.p_holm_classes for item in (pair, *others)] == adjust_p_values(p_values)
    (alone,) = compare_method_pairs({"a": a, "b": b})
    assert alone.half_width_episodes == pair.half_width_episodes  # classes do not matter
    assert math.isnan(alone.p_holm_classes)


def test_no_interval_over_classes_of_unequal_ways_or_with_few_episodes_without_a_class() -> None:
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(60, 10, generator=generator).argsort(dim=1)
    equal, unequal = order < 5, order < torch.where(torch.arange(60) % 2 == 0, 5, 6)[:, None]
    rare = equal.clone()
    rare[:, 0] = torch.arange(60) >= 4  # four episodes leave it out
    rare[:, 1] = torch.arange(60) < 4  # the number of classes stays
    rare[:, 2:] = torch.rand(60, 8, generator=generator).argsort(dim=1) < 4
    assert not math.isnan(interval_half_width(normal(60, 0), equal))
    for class_mask in (unequal, rare, torch.ones(60, 5, dtype=torch.bool)):  # the last one: every episode has a class
        assert math.isnan(interval_half_width(normal(60, 0), class_mask))
        (pair,) = compare_method_pairs({"a": normal(60, 0), "b": normal(60, 1)}, class_mask)
        assert pair.p_value_classes == 1.0


def test_pairs_without_spread() -> None:
    same, more = torch.full((5,), 0.5, dtype=torch.float64), torch.full((5,), 0.7, dtype=torch.float64)
    equal, apart, _ = compare_method_pairs({"a": same, "b": same.clone(), "c": more})
    assert (equal.p_value_episodes, apart.p_value_episodes) == (1.0, 0.0)
    assert compare_method_pairs({"a": same[:1], "b": more[:1]})[0].p_value_episodes == 1.0
    assert compare_method_pairs({"a": same}) == []
