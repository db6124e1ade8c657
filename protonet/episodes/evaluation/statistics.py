"""Intervals and paired tests of scores, over classes and over episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

#: What intervals and p-values are over: other classes of the same kind, and other episodes of these same classes.
OVER = ("classes", "episodes")
CONFIDENCE = 0.95  #: The level of all intervals.
ROUNDING = 1e-12  #: Smaller differences of accuracies are rounding errors.


class Comparison(NamedTuple):
    """Two methods compared on the same episodes; accuracies are in [0, 1].

    What is over classes is NaN where that is not known: without members, or where no episode leaves a class out.
    """

    first: str  #: A method's name.
    second: str  #: Another method's name.
    difference: float  #: The mean over episodes of the first method's accuracy minus the second's.
    half_width_classes: float  #: Half the width of the difference's 95 % interval over classes.
    p_value_classes: float  #: Of a paired t test over classes, 1 where no episode differs.
    p_holm_classes: float  #: That p-value adjusted for the number of comparisons, by Holm's procedure.
    half_width_episodes: float  #: As over classes; NaN for a single episode.
    p_value_episodes: float  #: As over classes; 1 for a single episode, too.
    p_holm_episodes: float  #: As over classes.


def half_width(values: Tensor, members: Tensor | None = None) -> float:
    """Return half the width of the 95 % interval of the mean of values (n,), by Student's t distribution.

    NaN are left out; fewer than two values give NaN. ``members`` is as in `standard_error`.
    """
    return _widen(*standard_error(values, members))


def _widen(error: float, freedom: int) -> float:
    """Return half the width of a 95 % interval; NaN for an error that is NaN."""
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
    if members is not None:
        return _jackknife(values[:, None], members)[0]
    values = values[~values.isnan()].double()
    n = len(values)
    return (math.nan, 0) if n < 2 else (math.sqrt(float(values.var()) / n), n - 1)


def _jackknife(values: Tensor, members: Tensor) -> list[tuple[float, int]]:
    """Return the standard error over classes, with its degrees of freedom, of each column of values (n, k)."""
    present, inside = (~values.isnan()).double(), members.double()
    values = values.double().nan_to_num()
    n, total = present.sum(dim=0), values.sum(dim=0)  # (k,)
    mean = total / n
    variance = ((values - mean) * present).square().sum(dim=0) / (n - 1)
    having = inside.T @ present  # (classes, k), episodes that have each class
    drawn, without = having > 0, n - having
    left_out = (total - inside.T @ values) / without  # (classes, k)
    spread = ((left_out - mean).square() - variance * (1 / without - 1 / n)).where(drawn, 0.0).sum(dim=0)
    n_classes = drawn.sum(dim=0)
    errors = (spread.clamp_min(0.0) * (n_classes - 1) / n_classes + variance / n).sqrt()
    unknown = (n < 2) | (drawn & (without == 0)).any(dim=0)
    freedom = (n_classes - 1).clamp_min(0).tolist()
    return list(zip(errors.masked_fill(unknown, math.nan).tolist(), freedom, strict=True))


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
    pairs = list(combinations(accuracies, 2))
    if against is not None:
        pairs = [(against, name) for name in accuracies if name != against]
    if not pairs:
        return []
    differences = torch.stack([accuracies[first] - accuracies[second] for first, second in pairs], dim=1)
    unknown = [(math.nan,) * 3] * len(pairs)
    over_classes = unknown if members is None else _test(differences, _jackknife(differences, members))
    over_episodes = _test(differences, list(map(standard_error, differences.unbind(1))))
    means = map(mean_of, differences.unbind(1))
    told = zip(pairs, means, over_classes, over_episodes, strict=True)
    return [Comparison(*pair, mean, *classes, *episodes) for pair, mean, classes, episodes in told]


def _test(differences: Tensor, errors: Sequence[tuple[float, int]]) -> list[tuple[float, float, float]]:
    """Return half-widths, p-values and adjusted p-values of differences (n, pairs), with their standard errors."""
    from scipy.special import stdtr  # noqa: PLC0415 - slow to import

    p_values = []
    for each, (error, freedom) in zip(differences.unbind(1), errors, strict=True):
        if error > ROUNDING:
            p_values.append(2 * float(stdtr(freedom, -abs(mean_of(each)) / error)))
        else:  # the test would divide by zero, or by NaN
            p_values.append(float(math.isnan(error) or float(each.abs().max()) <= ROUNDING))
    return list(zip([_widen(*each) for each in errors], p_values, adjust_holm(p_values), strict=True))


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number by Holm's step-down procedure, and return them in the same order."""
    adjusted, highest, n = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, position in enumerate(sorted(range(n), key=lambda position: p_values[position])):
        highest = max(highest, min(1.0, (n - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted
