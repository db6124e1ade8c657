"""Virtual samples: rows moved along their features, where neighbouring features are alike.

Pixels, series and spectra are sampled from something smooth, and a row moved by a little is still of its class. Tables
and embeddings are not; whether the features are in such an order is seen from the rows themselves, without labels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Features this far apart are alike if their mean squared difference is below this share of what strangers have ...
ALIKE = 0.6
#: ... and if all but a quarter of the pairs are correlated by at least this much.
CORRELATED = 0.1
#: A series is moved as far as changes it by these shares.
CHANGES = (0.1, 0.3, 0.7)
#: Most rows, moved ones included, and most rows that are looked at to find the moves.
MOST_ROWS, ROWS_SEEN = 6144, 512
#: Most pairs of values that are compared.
WORK = 2e8


def find_moves(x: Tensor) -> tuple[int, ...]:
    """Find the offsets, along the features, by which rows may be moved.

    Where features are alike at a distance of one, they are a series, moved both ways by the distances that change it by
    ``CHANGES``. If they are alike again at a larger distance, that is the width of an image, moved to its eight
    neighbours, or, without the former, the number of interleaved channels.

    Args:
        x: (n, dim) float32 features.

    Returns:
        Offsets, 0 first, as many as leave no more than ``MOST_ROWS`` rows; (0,) where features are in no order.

    Source: virtual samples, as in Niyogi, Girosi and Poggio, "Incorporating prior information in machine learning by
        creating virtual examples" (1998).
    """
    n, dim = x.shape
    if n < 3:
        return (0,)
    rows = x[:: math.ceil(n / ROWS_SEEN)]
    farthest = min(dim // 2, math.ceil(4 * math.sqrt(dim)), int(WORK / rows.numel()))
    if farthest < 3:
        return (0,)
    rough, related = _compare_features(rows, farthest)
    alike = [r < ALIKE and q > CORRELATED for r, q in zip(rough, related, strict=True)]
    again = [
        lag
        for lag in range(3, farthest)
        if alike[lag]
        and rough[lag] < rough[lag - 1]
        and rough[lag] <= rough[lag + 1]
        and max(rough[1:lag]) > rough[lag] + 0.2
        and not (alike[1] and rough[lag] > rough[1] + 0.15)
    ]
    width = min(again, key=lambda lag: (round(rough[lag], 1), lag), default=0)
    if width and alike[1]:
        steps = [1, width, width + 1, width - 1]
    elif width:
        steps = [width]
    elif alike[1]:
        steps = sorted({_reach(rough, change) for change in CHANGES})
    else:
        steps = []
    moves = [0, *(sign * step for step in steps for sign in (1, -1))]
    most = MOST_ROWS // n
    return tuple(moves[: most - 1 + most % 2]) if most >= 3 else (0,)  # both ways or not at all


def move_rows(x: Tensor, moves: tuple[int, ...]) -> Tensor:
    """Move rows along their features.

    Args:
        x: (n, dim).
        moves: Offsets, 0 for the rows themselves.

    Returns:
        (len(moves) * n, dim), one copy after the other. What is moved in from outside repeats the outermost feature.
    """
    if moves == (0,):
        return x
    place = torch.arange(x.shape[1], device=x.device)
    return torch.cat([x[:, (place + offset).clamp(0, x.shape[1] - 1)] for offset in moves])


def _compare_features(x: Tensor, farthest: int) -> tuple[list[float], list[float]]:
    """Compare features at each distance from 0 to ``farthest``.

    Returns:
        rough: Mean squared difference of their values, 1 for strangers.
        related: The lower quartile of their correlations.
    """
    values = x - x.mean()
    strangers = float(2 * x.var(dim=1, correction=0).mean()) or 1.0  # of any two features of a row
    deviation = x.std(dim=0, correction=0)
    varies = deviation > 1e-6 * max(float(deviation.max()), 1e-30)
    z = (x - x.mean(dim=0)) / torch.where(varies, deviation, 1.0)
    rough, related = [0.0], [1.0]
    for lag in range(1, farthest + 1):
        rough.append(float((values[:, lag:] - values[:, :-lag]).square().mean()) / strangers)
        both = varies[lag:] & varies[:-lag]
        correlations = (z[:, lag:] * z[:, :-lag]).mean(dim=0)[both]
        related.append(float(correlations.quantile(0.25)) if len(correlations) else 0.0)
    return rough, related


def _reach(rough: list[float], change: float) -> int:
    """Return the largest distance, at least 1, up to which features differ by less than ``change``."""
    return next((lag - 1 for lag in range(2, len(rough)) if rough[lag] >= change), len(rough) - 1)
