"""How good logits are, and the scores of two classics to compare them with."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet._checks import fail
from protonet.prototypes import class_means
from protonet.views import shrink_covariance

#: Bins of confidence for the calibration error, and the normal quantile of a 95 % interval.
BINS, NORMAL = 15, 1.96


class Figures(NamedTuple):
    """How good logits are: shares of 1, and nats a row."""

    accuracy: float
    interval: tuple[float, float]  # of the accuracy, 95 %
    log_loss: float
    calibration_error: float
    confusion: Tensor  # (num_classes, num_classes) int64: rows of each class (down), by prediction (across)


def measure(logits: Tensor, labels: Tensor) -> Figures:
    """Judge logits.

    Args:
        logits: (n, num_classes) floating, n >= 1.
        labels: (n,) int64.

    Returns:
        The figures, the accuracy's interval after Wilson.

    Raises:
        ValueError: Logits that give no probabilities.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927); calibration error,
        Guo et al., "On calibration of modern neural networks" (2017), eq. 3.
    """
    n, num_classes = logits.shape
    log_p = logits.double().log_softmax(dim=1)
    if bool(log_p.isnan().any()):
        got = f"NaN in {int(log_p.isnan().any(dim=1).sum())} of {n} rows"
        fail("measure", "logits", "give probabilities", got, "Mend or drop the rows that they come from.")
    predicted = logits.argmax(dim=1)
    right = (predicted == labels).double()
    confidence = log_p.amax(dim=1).exp()
    bins = ((confidence * BINS).ceil() - 1).clamp(0, BINS - 1).long()
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, right - confidence)
    accuracy, spread = float(right.mean()), NORMAL**2 / n
    middle = (accuracy + spread / 2) / (1 + spread)
    half = math.sqrt(accuracy * (1 - accuracy) * spread + spread**2 / 4) / (1 + spread)
    confusion = torch.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return Figures(
        accuracy,
        (max(0.0, middle - half), min(1.0, middle + half)),
        -float(log_p.gather(1, labels[:, None]).mean()),
        float(gaps.abs().sum() / n),
        confusion.reshape(num_classes, num_classes),
    )


def score_cosine(x: Tensor, labels: Tensor, queries: Tensor, num_classes: int) -> Tensor:
    """Return the cosines (m, num_classes) float64 of queries (m, dim) to the class means of unit rows x (n, dim)."""
    means, _ = class_means(F.normalize(x.double(), dim=1), labels, num_classes)
    return F.normalize(queries.double(), dim=1) @ F.normalize(means, dim=1).T


def score_lda(x: Tensor, labels: Tensor, queries: Tensor, num_classes: int) -> Tensor:
    """Fit linear discriminant analysis with a shrunken covariance, and score queries.

    Args:
        x: (n, dim) float32.
        labels: (n,) int64 in [0, num_classes).
        queries: (m, dim) float32.
        num_classes: Number of classes.

    Returns:
        (m, num_classes) float64, the log posterior up to a constant a row; minus infinity for a class without rows.

    Source: Fisher, "The use of multiple measurements in taxonomic problems" (1936); see `shrink_covariance`.
    """
    means, counts = class_means(x.double(), labels, num_classes)
    degrees = max(1, len(x) - int((counts > 0).sum()))
    basis, variances, rest = shrink_covariance(x.double() - means[labels], degrees)
    constant = float(rest) == 0 and len(variances) > 0  # what is off the basis never varies
    off = 0.0 if constant else 1 / math.sqrt(float(rest) or 1.0)

    def whiten(rows: Tensor) -> Tensor:
        return off * rows + ((rows @ basis) * (variances.rsqrt() - off)) @ basis.T

    return counts.log() - torch.cdist(whiten(queries.double()), whiten(means)).square() / 2
