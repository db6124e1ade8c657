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


def half_width(values: Tensor, members: Tensor | None = None) -> float:
    """Return half the width of the 95 % interval of the mean of values (n,), by Student's t distribution.

    NaN are left out; fewer than two values give NaN. ``members`` is as in `standard_error`.
    """
    error, freedom = standard_error(values, members)
    if math.isnan(error):
        return math.nan
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error


def standard_error(values: Tensor, members: Tensor | None = None) -> tuple[float, int]:
    """Estimate the standard error of the mean of episodes' values, over episodes or over classes.

    Over episodes, the classes are fixed: the error says how far other episodes of the same classes would lie. Over
    classes, it says how far episodes of other classes of the same kind would. Then the mean is a U-statistic of the
    classes, and the jackknife leaves out one class at a time, with all of its episodes. What the number of episodes
    alone makes these means differ is subtracted, and its share in the mean added. A bootstrap of classes would need
    episodes in which a class meets itself, and tasks without replacement are too few: as many as there are classes,
    divided by the ways.

    Args:
        values: (n,) floating, one for each episode; NaN are left out.
        members: (n, classes) bool, the classes of each episode; None for the error over episodes.

    Returns:
        error: >= 0; NaN for fewer than two values, or where all episodes have the same class.
        freedom: Degrees of freedom of Student's t distribution, the number of episodes or of classes less one.

    Source: Arvesen, "Jackknifing U-statistics" (1969); that the estimate is not too low on average, Efron and Stein,
        "The jackknife estimate of variance" (1981). That intervals over episodes are too narrow for other data,
        Lafargue et al., "Oops, I sampled it again: reinterpreting confidence intervals in few-shot learning" (2024).
        https://arxiv.org/abs/2409.02850
    """
    present = ~values.isnan()
    values = values[present].double()
    n = len(values)
    if n < 2:
        return math.nan, 0
    variance = float(values.var())
    if members is None:
        return math.sqrt(variance / n), n - 1
    inside = members[present].double()  # (n, classes)
    inside = inside[:, inside.any(dim=0)]
    n_classes, without = inside.shape[1], n - inside.sum(dim=0)  # episodes that do not have each class
    if bool((without == 0).any()):
        return math.nan, n_classes - 1
    left_out = (values.sum() - inside.T @ values) / without  # (classes,)
    spread = float((left_out - values.mean()).square().sum()) - variance * float((1 / without - 1 / n).sum())
    return math.sqrt(max(0.0, spread) * (n_classes - 1) / n_classes + variance / n), n_classes - 1


def mean_of(values: Tensor) -> float:
    """Return the mean of those values (n,) that are not NaN; NaN if there are none."""
    return float(values.double().nanmean())


def compare_pairs(
    accuracies: Mapping[str, Tensor], members: Tensor | None = None, against: str | None = None
) -> list[Comparison]:
    """Compare every two methods, or one with each other one, by their accuracies on the same episodes.

    Args:
        accuracies: For each method's name (episodes,) float64 in [0, 1].
        members: As in `standard_error`.
        against: The method to compare with each other one; None for all pairs.

    Returns:
        One comparison per pair, in the order of the methods; ``against`` is the first of each.

    Source: Student's paired t test; Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    from scipy.special import stdtr  # noqa: PLC0415 - slow to import

    pairs = list(combinations(accuracies, 2))
    if against is not None:
        pairs = [(against, name) for name in accuracies if name != against]
    differences = [accuracies[first] - accuracies[second] for first, second in pairs]
    p_values = []
    for each in differences:
        error, freedom = standard_error(each, members)
        if error > ROUNDING:
            p_values.append(2 * float(stdtr(freedom, -abs(mean_of(each)) / error)))
        else:  # the test would divide by zero, or by NaN
            p_values.append(float(math.isnan(error) or float(each.abs().max()) <= ROUNDING))
    return [
        Comparison(*pair, mean_of(each), half_width(each, members), p, holm)
        for pair, each, p, holm in zip(pairs, differences, p_values, adjust_holm(p_values), strict=True)
    ]


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number by Holm's step-down procedure, and return them in the same order."""
    adjusted, highest, n = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, position in enumerate(sorted(range(n), key=lambda position: p_values[position])):
        highest = max(highest, min(1.0, (n - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted
