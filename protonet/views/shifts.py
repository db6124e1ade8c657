"""Augmentation by shifted rows, if the features are the pixels of an image or the values of a series.

Such features are samples of a smooth function, and a slightly shifted row has the same class. Whether the features are
ordered in this way is detected from the rows, without labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShiftRules:
    """When features are an image or a series, and how far rows are shifted.

    The values were chosen on the data sets of analysis/results/robustness.md. A *difference* is the mean squared
    difference of features at some lag, divided by that of two independent features.
    """

    max_difference: float = 0.6  #: Features at a lag are similar if their difference is below this ...
    min_correlation: float = 0.1  #: ... and if three quarters of the pairs are correlated at least this much.
    dip: float = 0.2  #: Minimum decrease of the difference at a lag of one line of an image.
    excess: float = 0.15  #: Maximum difference at a lag of one line above that of neighbours.
    changes: tuple[float, ...] = (0.1, 0.3, 0.7)  #: A series is shifted by the largest lags with these differences.
    max_rows: int = 6144  #: Maximum number of rows including shifted copies.
    detection_rows: int = 512  #: Maximum number of rows from which the order is detected.
    work: float = 2e8  #: Maximum number of pairs of values that are compared.
    permutations: int = 40  #: Number of random orders of the features in which an order is searched, too.
    max_chance: int = 1  #: Maximum number of random orders with a detected order; with more, the order has no meaning.
    max_permuted: int = 1024  #: Maximum number of features for this test: an order of more is hardly due to chance.


SHIFTS = ShiftRules()


class FeatureOrder(NamedTuple):
    """Whether the order of features has a meaning, and by how many features rows are shifted."""

    shifts: tuple[int, ...] = (0,)  #: Numbers of features by which rows are shifted, 0 first.
    width: int = 0  #: Pixels per line of an image, or length of a series; 0 if the order has no meaning.


def detect_order(x: Tensor) -> FeatureOrder:
    """Detect whether the features of rows (n, dim) are a series or an image, and by how much to shift rows.

    Features that are similar at a lag of 1 are a series, which is shifted both ways by the lags that change it by
    ``SHIFTS.changes``. If features are similar again at a larger lag, this is the width of an image, which is shifted
    by one pixel in eight directions. If features are similar at the larger lag alone, it is the number of interleaved
    channels. An order that is also detected in random orders of the features is due to chance.

    Source: virtual samples, as in Niyogi, Girosi and Poggio, "Incorporating prior information in machine learning by
        creating virtual examples" (1998).
    """
    n, dim = x.shape
    if n < 3:
        return FeatureOrder()
    rows = x[:: math.ceil(n / SHIFTS.detection_rows)]
    max_lag = min(dim // 2, math.ceil(4 * math.sqrt(dim)), int(SHIFTS.work / rows.numel()))
    if max_lag < 3:
        return FeatureOrder()
    difference, correlation = _compare_features(rows, max_lag)
    series, period = _detect_series_and_period(difference, correlation)
    if (series or period) and dim <= SHIFTS.max_permuted:
        by_chance = torch.tensor([_detect_series_and_period(*lags) for lags in _compare_permuted(rows, max_lag)]) > 0
        n_series, n_periods = by_chance.sum(dim=0).tolist()
        series, period = series and n_series <= SHIFTS.max_chance, period * (n_periods <= SHIFTS.max_chance)
    if period and series:
        steps = [1, period, period + 1, period - 1]
    elif period:
        steps = [period]
    elif series:
        steps = sorted({_largest_lag(difference, change) for change in SHIFTS.changes})
    else:
        steps = []
    shifts = [0, *(sign * step for step in steps for sign in (1, -1))]
    max_copies = SHIFTS.max_rows // n
    both_ways = tuple(shifts[: max_copies - 1 + max_copies % 2]) if max_copies >= 3 else (0,)
    is_image = period and dim % period == 0
    return FeatureOrder(both_ways, (period if is_image else dim) if series else 0)


def _detect_series_and_period(difference: Sequence[float], correlation: Sequence[float]) -> tuple[bool, int]:
    """Decide whether features are a series, and the lag of their period, 0 for none.

    The arguments are results of `_compare_features`.
    """
    similar = [
        d < SHIFTS.max_difference and c > SHIFTS.min_correlation for d, c in zip(difference, correlation, strict=True)
    ]
    periods = [
        lag
        for lag in range(3, len(similar) - 1)
        if similar[lag]
        and difference[lag] < difference[lag - 1]
        and difference[lag] <= difference[lag + 1]
        and max(difference[1:lag]) > difference[lag] + SHIFTS.dip
        and not (similar[1] and difference[lag] > difference[1] + SHIFTS.excess)
    ]
    return similar[1], min(periods, key=lambda lag: (round(difference[lag], 1), lag), default=0)


def shift_rows(x: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Shift all rows (n, dim) along their features by each of the offsets: (len(shifts) * n, dim).

    The copies of all rows by one offset are adjacent. The first or last feature is repeated at the ends.
    """
    if shifts == (0,):
        return x
    index = torch.arange(x.shape[1], device=x.device)
    return torch.cat([x[:, (index + offset).clamp(0, x.shape[1] - 1)] for offset in shifts])


def _compare_features(x: Tensor, max_lag: int) -> tuple[list[float], list[float]]:
    """Compare the features of rows x (n, dim) at each lag from 0 to ``max_lag``.

    Returns for each lag the mean squared difference of their values, divided by that of independent features, and the
    lower quartile of their correlations.
    """
    values, z, varies, independent = _standardize(x)
    difference, correlation = [0.0], [1.0]
    for lag in range(1, max_lag + 1):
        difference.append(float((values[:, lag:] - values[:, :-lag]).square().mean()) / independent)
        both_vary = varies[lag:] & varies[:-lag]
        correlations = (z[:, lag:] * z[:, :-lag]).mean(dim=0)[both_vary]
        correlation.append(float(correlations.quantile(0.25)) if len(correlations) else 0.0)
    return difference, correlation


def _standardize(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Centre all values (n, dim), standardize each feature, and measure how much independent features differ.

    Returns the centred values, the standardized features, a mask (dim,) of the features that vary, and the mean squared
    difference of two independent features.
    """
    values = x - x.mean()
    independent = float(2 * x.var(dim=1, correction=0).mean()) or 1.0
    deviation = x.std(dim=0, correction=0)
    varies = deviation > 1e-6 * max(float(deviation.max()), 1e-30)
    return values, (x - x.mean(dim=0)) / torch.where(varies, deviation, 1.0), varies, independent


def _compare_permuted(x: Tensor, max_lag: int) -> Iterator[tuple[list[float], list[float]]]:
    """Compare features as `_compare_features` does, in several random orders; yield the results of each order.

    A few features that are much larger than the others can be similar at some lag by chance, with any number of rows.

    Source: permutation tests, Fisher, "The design of experiments" (1935).
    """
    values, z, varies, independent = _standardize(x.double())
    product = values.T @ values / len(x)
    square = product.diagonal()
    differences = (square[:, None] + square - 2 * product) / independent  # (dim, dim)
    correlations = torch.where(varies[:, None] & varies, z.T @ z / len(x), torch.nan)
    generator = torch.Generator().manual_seed(0)
    orders = torch.rand(SHIFTS.permutations, x.shape[1], generator=generator).argsort(dim=1)
    by_lag = [(orders.new_zeros(len(orders)).double(), orders.new_ones(len(orders)).double())]
    for lag in range(1, max_lag + 1):
        pairs = orders[:, lag:], orders[:, :-lag]
        by_lag.append((differences[pairs].mean(dim=1), correlations[pairs].nanquantile(0.25, dim=1)))
    difference, correlation = (torch.stack(parts, dim=1).tolist() for parts in zip(*by_lag, strict=True))
    return zip(difference, correlation, strict=True)


def _largest_lag(difference: list[float], change: float) -> int:
    """Compute the largest lag, at least 1, up to which features differ by less than ``change``."""
    return next((lag - 1 for lag in range(2, len(difference)) if difference[lag] >= change), len(difference) - 1)
