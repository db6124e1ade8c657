"""Data augmentation by shifted rows, if the features are the pixels of an image or the values of a series.

Such features are values of a smooth function, and a slightly shifted row has the same class. Whether features are an
image or a series is detected from the rows, without labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class FeatureOrder(NamedTuple):
    """Whether features are an image or a series, and by how many features rows are shifted for augmentation."""

    shifts: tuple[int, ...] = (0,)  #: Numbers of features by which rows are shifted, 0 first; (0,) for no shifts.
    line_width: int = 0  #: Pixels per line of an image, or length of a series; 0 if features are neither.


#: A series is shifted by the largest lags at which the difference is still below each of these values.
SERIES_DIFFERENCES = (0.1, 0.3, 0.7)
#: Maximum number of rows including shifted copies.
MAX_SHIFTED_ROWS = 6144
#: Maximum number of rows from which an image or a series is detected.
MAX_DETECTION_ROWS = 512
#: Maximum number of pairs of values that are compared.
MAX_COMPARED_PAIRS = 2e8
#: A detection is due to chance if more random permutations than this are detected, too.
MAX_CHANCE_DETECTIONS = 1
#: Maximum number of features for the permutation test; with more, chance is unlikely.
MAX_PERMUTED_FEATURES = 1024


def detect_feature_order(x: Tensor) -> FeatureOrder:
    """Detect whether the features of rows x (n, dim) are a series or an image, and by how much to shift rows.

    - Series: neighbouring features are similar. Rows are shifted in both directions, by
      ``SERIES_DIFFERENCES`` features.
    - Image: features are also similar to those one image row further on. Rows are shifted by one pixel in eight
      directions.
    - Interleaved series: only features that are k apart are similar, where k is the number of series. Rows are shifted
      by k features.

    An order that is also detected after random permutations of the features is due to chance, and is ignored.

    Source: virtual samples, as in Niyogi, Girosi and Poggio, "Incorporating prior information in machine learning by
        creating virtual examples" (1998).
    """
    n, dim = x.shape
    if n < 3:
        return FeatureOrder()
    rows = x[:: math.ceil(n / MAX_DETECTION_ROWS)]
    max_lag = min(dim // 2, math.ceil(4 * math.sqrt(dim)), int(MAX_COMPARED_PAIRS / rows.numel()))
    if max_lag < 3:
        return FeatureOrder()
    difference, correlation = _measure_feature_similarity(rows, max_lag)
    series, period = _detect_series_and_period(difference, correlation)
    if (series or period) and dim <= MAX_PERMUTED_FEATURES:
        permuted = _iterate_similarities_of_permuted_features(rows, max_lag)
        by_chance = torch.tensor([_detect_series_and_period(*lags) for lags in permuted]) > 0
        n_series, n_periods = by_chance.sum(dim=0).tolist()
        series, period = (series and n_series <= MAX_CHANCE_DETECTIONS, period * (n_periods <= MAX_CHANCE_DETECTIONS))
    if period and series:
        steps = [1, period, period + 1, period - 1]
    elif period:
        steps = [period]
    elif series:
        steps = sorted({_largest_similar_lag(difference, change) for change in SERIES_DIFFERENCES})
    else:
        steps = []
    shifts = [0, *(sign * step for step in steps for sign in (1, -1))]
    max_copies = MAX_SHIFTED_ROWS // n
    both_ways = tuple(shifts[: max_copies - 1 + max_copies % 2]) if max_copies >= 3 else (0,)
    is_image = period and dim % period == 0
    return FeatureOrder(both_ways, (period if is_image else dim) if series else 0)


def _detect_series_and_period(difference: Sequence[float], correlation: Sequence[float]) -> tuple[bool, int]:
    """Test whether features are a series, by their similarity at each lag; also return the period, 0 for none."""
    # Features at a lag are called similar only if their difference is below this.
    max_difference = 0.6
    # They are similar only if three quarters of the pairs have a higher correlation.
    min_correlation = 0.1
    # At a lag of one line of an image, the difference is lower by at least this than its maximum at smaller lags.
    min_image_dip = 0.2
    # At a lag of one line of an image, the difference exceeds that of adjacent features by at most this.
    max_image_excess = 0.15
    similar = [d < max_difference and c > min_correlation for d, c in zip(difference, correlation, strict=True)]
    periods = [
        lag
        for lag in range(3, len(similar) - 1)
        if similar[lag]
        and difference[lag] < difference[lag - 1]
        and difference[lag] <= difference[lag + 1]
        and max(difference[1:lag]) > difference[lag] + min_image_dip
        and not (similar[1] and difference[lag] > difference[1] + max_image_excess)
    ]
    return similar[1], min(periods, key=lambda lag: (round(difference[lag], 1), lag), default=0)


def shift_rows(x: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Stack copies of rows x (n, dim) whose features are shifted by each offset: (len(shifts) * n, dim).

    All rows are copied with the first offset, then all with the second, and so on. The first or last feature fills the
    positions at the ends that have no value.
    """
    if shifts == (0,):
        return x
    index = torch.arange(x.shape[1], device=x.device)
    return torch.cat([x[:, (index + offset).clamp(0, x.shape[1] - 1)] for offset in shifts])


def _measure_feature_similarity(x: Tensor, max_lag: int) -> tuple[list[float], list[float]]:
    """Measure, at each lag from 0 on, the relative difference of features and the lower quartile of correlations."""
    values, z, varies, independent = _standardize(x)
    difference, correlation = [0.0], [1.0]
    for lag in range(1, max_lag + 1):
        difference.append(float((values[:, lag:] - values[:, :-lag]).square().mean()) / independent)
        both_vary = varies[lag:] & varies[:-lag]
        correlations = (z[:, lag:] * z[:, :-lag]).mean(dim=0)[both_vary]
        correlation.append(float(correlations.quantile(0.25)) if len(correlations) else 0.0)
    return difference, correlation


def _standardize(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return x (n, dim) centred, x standardized, a mask (dim,) of varying features, and the difference by chance."""
    values = x - x.mean()
    independent = float(2 * x.var(dim=1, correction=0).mean()) or 1.0
    deviation = x.std(dim=0, correction=0)
    varies = deviation > 1e-6 * max(float(deviation.max()), 1e-30)
    return values, (x - x.mean(dim=0)) / torch.where(varies, deviation, 1.0), varies, independent


def _iterate_similarities_of_permuted_features(x: Tensor, max_lag: int) -> Iterator[tuple[list[float], list[float]]]:
    """Compute `_measure_feature_similarity` for random permutations of the features.

    Source: permutation tests, Fisher, "The design of experiments" (1935).
    """
    # Number of random permutations of the features, for a permutation test.
    n_permutations = 40
    values, z, varies, independent = _standardize(x.double())
    product = values.T @ values / len(x)
    square = product.diagonal()
    differences = (square[:, None] + square - 2 * product) / independent  # (dim, dim)
    correlations = torch.where(varies[:, None] & varies, z.T @ z / len(x), torch.nan)
    generator = torch.Generator().manual_seed(0)
    orders = torch.rand(n_permutations, x.shape[1], generator=generator).argsort(dim=1)
    by_lag = [(orders.new_zeros(len(orders)).double(), orders.new_ones(len(orders)).double())]
    for lag in range(1, max_lag + 1):
        pairs = orders[:, lag:], orders[:, :-lag]
        by_lag.append((differences[pairs].mean(dim=1), correlations[pairs].nanquantile(0.25, dim=1)))
    difference, correlation = (torch.stack(parts, dim=1).tolist() for parts in zip(*by_lag, strict=True))
    return zip(difference, correlation, strict=True)


def _largest_similar_lag(difference: list[float], change: float) -> int:
    """Compute the largest lag, at least 1, up to which the ``difference`` at each lag is below ``change``."""
    return next((lag - 1 for lag in range(2, len(difference)) if difference[lag] >= change), len(difference) - 1)
