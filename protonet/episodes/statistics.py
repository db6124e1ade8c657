"""Intervals and paired tests of scores over episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

CONFIDENCE = 0.95  #: The level of all intervals.
ROUNDING = 1e-12  #: Smaller differences of accuracies are rounding errors.


class Comparison(NamedTuple):
    """Two methods compared on the same episodes; accuracies are in [0, 1]."""

    first: str  #: A method's name.
    second: str  #: Another method's name.
    difference: float  #: The mean over episodes of the first method's accuracy minus the second's.
    half_width: float  #: Half the width of the 95 % interval of the difference, NaN for a single episode.
    p_value: float  #: Of a paired t test, 1 where no episode differs.
    p_holm: float  #: The p-value adjusted for the number of comparisons, by Holm's procedure.


def half_width(values: Tensor) -> float:
    """Return half the width of the 95 % interval of the mean of values (n,), by Student's t distribution.

    NaN are left out; fewer than two values give NaN.
    """
    values = values[~values.isnan()].double()
    n = len(values)
    if n < 2:
        return math.nan
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    return float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * float(values.std()) / math.sqrt(n)


def mean_of(values: Tensor) -> float:
    """Return the mean of those values (n,) that are not NaN; NaN if there are none."""
    return float(values.double().nanmean())


def compare_pairs(accuracies: Mapping[str, Tensor]) -> list[Comparison]:
    """Compare every two methods by their accuracies on the same episodes.

    Args:
        accuracies: For each method's name (episodes,) float64 in [0, 1].

    Returns:
        One comparison per pair, in the order of the methods.

    Source: Student's paired t test (SciPy's); Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    from scipy.stats import ttest_1samp  # noqa: PLC0415 - slow to import

    pairs = list(combinations(accuracies, 2))
    differences = [accuracies[first] - accuracies[second] for first, second in pairs]
    p_values = []
    for each in differences:
        if len(each) > 1 and float(each.std()) > ROUNDING:
            p_values.append(float(ttest_1samp(each.numpy(), 0.0).pvalue))
        else:  # the test would divide by zero
            p_values.append(float(len(each) < 2 or float(each.abs().max()) <= ROUNDING))
    return [
        Comparison(*pair, mean_of(each), half_width(each), p, holm)
        for pair, each, p, holm in zip(pairs, differences, p_values, adjust_holm(p_values), strict=True)
    ]


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number by Holm's step-down procedure, and return them in the same order."""
    adjusted, highest, n = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, position in enumerate(sorted(range(n), key=lambda position: p_values[position])):
        highest = max(highest, min(1.0, (n - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted
