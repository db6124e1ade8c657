"""Rows unlike every class: how much a row is like some class, and below which score it is called unknown."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protonet._checks import check_number, fail

#: Most scores that a threshold is found from.
MOST_SCORES = 2000


def score_known(logits: Tensor) -> Tensor:
    """Score how much each row is like some class: the logarithm of the sum of its classes' exponentials.

    The largest probability asks which class it is, given that it is one; this also asks how near the classes are.

    Args:
        logits: (n, num_classes) floating.

    Returns:
        (n,) float64, higher for rows that are more like a class.

    Source: Liu, Wang, Owens and Li, "Energy-based out-of-distribution detection" (2020), eq. 4.
    """
    return logits.double().logsumexp(dim=1)


def calibrate(logits: Tensor, gain: float = 0.0) -> Tensor:
    """Return the scores that fresh rows of known classes have, in ascending order, for `find_threshold`.

    Args:
        logits: (n, num_classes) of rows by networks that did not see them, as of `protonet.crossfit.predict_held`.
        gain: What a network of all rows adds to such a row's score: `protonet.crossfit.Crossfit.gain`.

    Returns:
        (min(n, MOST_SCORES),) float64.
    """
    scores = score_known(logits).sort().values + gain
    places = torch.linspace(0, len(scores) - 1, min(len(scores), MOST_SCORES), dtype=torch.float64)
    return scores[places.round().long()]


def find_threshold(scores: Tensor, rate: float) -> float:
    """Find the score at and below which a row is unknown, so that few rows of known classes are.

    Args:
        scores: (n,) of `calibrate`.
        rate: The share of the rows of known classes that may be called unknown, in (0, 1).

    Returns:
        The threshold.

    Raises:
        TypeError: The rate is not a number.
        ValueError: A rate that is not below 1, or smaller than so few scores can tell.

    Source: conformal p-values, Vovk, Gammerman and Shafer, "Algorithmic learning in a random world" (2005), sec. 2.2.
    """
    rate = check_number("find_threshold", "rate", rate, low=0, strict=True)
    if not len(scores):
        remedy = "Fit to two samples or more of some classes."
        fail("find_threshold", "scores", "come from rows that were held out", "none", remedy)
    place = math.floor(rate * (len(scores) + 1) + 1e-9)
    if not 0 < place <= len(scores):
        bounds = f"be in [{1 / (len(scores) + 1):.2g}, 1)"
        remedy = f"{len(scores)} held-out rows tell no more than that."
        fail("find_threshold", "rate", bounds, rate, remedy)
    return float(scores[place - 1])
