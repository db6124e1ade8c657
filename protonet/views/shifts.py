"""Augmentation by shifting: rows shifted along their features, where neighbouring features are alike.

Pixels, series and spectra are sampled from something smooth, and a row shifted by a little is still of its class.
Tables and embeddings are not; whether the features are in such an order is seen from the rows themselves, without
labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShiftRules:
    """When features are in an order, and how far rows are shifted.

    The numbers were set on the sets of analysis/results/robustness.md.
    """

    alike: float = 0.6
    """Features at one distance are alike if their mean squared difference is below this share of that of any two ..."""
    correlated: float = 0.1  #: ... and if all but a quarter of the pairs are correlated by at least this much.
    dip: float = 0.2
    """How far, in those shares, the difference rises before it falls again at the width of an image ..."""
    excess: float = 0.15  #: ... and how much larger than between neighbours it may be there.
    changes: tuple[float, ...] = (0.1, 0.3, 0.7)  #: A series is shifted as far as changes it by these shares.
    most_rows: int = 6144  #: Rows, shifted copies included, at the most.
    rows_seen: int = 512  #: Rows that are looked at to find the shifts, at the most.
    work: float = 2e8  #: Pairs of values that are compared, at the most.


SHIFTS = ShiftRules()


class Order(NamedTuple):
    """The order that features are in."""

    shifts: tuple[int, ...] = (0,)  #: Offsets by which rows may be shifted, 0 first.
    width: int = 0  #: Features of a line of a picture, or of a whole series; 0 where they are in no order.


def find_order(x: Tensor) -> Order:
    """Find whether features are in an order, and the offsets, along them, by which rows may be shifted.

    Where features are alike at a distance of one, they are a series, shifted both ways by the distances that change
    it by ``SHIFTS.changes``. If they are alike again at a larger distance, that is the width of an image, shifted to
    its eight neighbours, or, without the former, the number of interleaved channels.

    Args:
        x: (n, dim) float32 features.

    Returns:
        The order; as many offsets as leave no more than ``SHIFTS.most_rows`` rows, (0,) where features are in none.

    Source: virtual samples, as in Niyogi, Girosi and Poggio, "Incorporating prior information in machine learning by
        creating virtual examples" (1998).
    """
    n, dim = x.shape
    if n < 3:
        return Order()
    rows = x[:: math.ceil(n / SHIFTS.rows_seen)]
    farthest = min(dim // 2, math.ceil(4 * math.sqrt(dim)), int(SHIFTS.work / rows.numel()))
    if farthest < 3:
        return Order()
    rough, related = _compare_features(rows, farthest)
    alike = [r < SHIFTS.alike and q > SHIFTS.correlated for r, q in zip(rough, related, strict=True)]
    again = [
        lag
        for lag in range(3, farthest)
        if alike[lag]
        and rough[lag] < rough[lag - 1]
        and rough[lag] <= rough[lag + 1]
        and max(rough[1:lag]) > rough[lag] + SHIFTS.dip
        and not (alike[1] and rough[lag] > rough[1] + SHIFTS.excess)
    ]
    period = min(again, key=lambda lag: (round(rough[lag], 1), lag), default=0)
    if period and alike[1]:
        steps = [1, period, period + 1, period - 1]
    elif period:
        steps = [period]
    elif alike[1]:
        steps = sorted({_reach(rough, change) for change in SHIFTS.changes})
    else:
        steps = []
    shifts = [0, *(sign * step for step in steps for sign in (1, -1))]
    most = SHIFTS.most_rows // n
    both_ways = tuple(shifts[: most - 1 + most % 2]) if most >= 3 else (0,)
    picture = period and dim % period == 0
    return Order(both_ways, (period if picture else dim) if alike[1] else 0)


def shift_rows(x: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Shift rows along their features.

    Args:
        x: (n, dim).
        shifts: Offsets, 0 for the rows themselves.

    Returns:
        (len(shifts) * n, dim), one copy after the other. What is shifted in from outside repeats the outermost feature.
    """
    if shifts == (0,):
        return x
    place = torch.arange(x.shape[1], device=x.device)
    return torch.cat([x[:, (place + offset).clamp(0, x.shape[1] - 1)] for offset in shifts])


def _compare_features(x: Tensor, farthest: int) -> tuple[list[float], list[float]]:
    """Compare features at each distance from 0 to ``farthest``.

    Returns:
        rough: Mean squared difference of their values, 1 for two features that have nothing in common.
        related: The lower quartile of their correlations.
    """
    values = x - x.mean()
    any_two = float(2 * x.var(dim=1, correction=0).mean()) or 1.0
    deviation = x.std(dim=0, correction=0)
    varies = deviation > 1e-6 * max(float(deviation.max()), 1e-30)
    z = (x - x.mean(dim=0)) / torch.where(varies, deviation, 1.0)
    rough, related = [0.0], [1.0]
    for lag in range(1, farthest + 1):
        rough.append(float((values[:, lag:] - values[:, :-lag]).square().mean()) / any_two)
        both = varies[lag:] & varies[:-lag]
        correlations = (z[:, lag:] * z[:, :-lag]).mean(dim=0)[both]
        related.append(float(correlations.quantile(0.25)) if len(correlations) else 0.0)
    return rough, related


def _reach(rough: list[float], change: float) -> int:
    """Return the largest distance, at least 1, up to which features differ by less than ``change``."""
    return next((lag - 1 for lag in range(2, len(rough)) if rough[lag] >= change), len(rough) - 1)
