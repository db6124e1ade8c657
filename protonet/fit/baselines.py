"""Two baselines to compare a model with, fitted in closed form."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import class_means, weigh
from protonet.views.linear import shrink_covariance


def score_cosine(x: Tensor, labels: Tensor, queries: Tensor, num_classes: int, weights: Tensor | None = None) -> Tensor:
    """Return the cosines (m, num_classes) float64 of queries (m, dim) to the class means of unit rows x (n, dim)."""
    means, _ = class_means(F.normalize(x.double(), dim=1), labels, num_classes, weights)
    return F.normalize(queries.double(), dim=1) @ F.normalize(means, dim=1).T


def score_lda(x: Tensor, labels: Tensor, queries: Tensor, num_classes: int, weights: Tensor | None = None) -> Tensor:
    """Fit linear discriminant analysis with a shrunken covariance, and score queries.

    Args:
        x: (n, dim) float32.
        labels: (n,) int64 in [0, num_classes).
        queries: (m, dim) float32.
        num_classes: Number of classes.
        weights: (n,) of the rows, of mean 1; None for 1.

    Returns:
        (m, num_classes) float64, the log posterior up to a constant per row; minus infinity for a class without rows.

    Source: Fisher, "The use of multiple measurements in taxonomic problems" (1936); see `shrink_covariance`.
    """
    means, counts = class_means(x.double(), labels, num_classes, weights)
    degrees = len(x) - int((counts > 0).sum())
    residuals = weigh(x.double() - means[labels], None if weights is None else weights.sqrt())
    basis, variances, rest = shrink_covariance(residuals, degrees)
    constant = float(rest) == 0 and len(variances) > 0  # what is off the basis never varies
    off = 0.0 if constant else 1 / math.sqrt(float(rest) or 1.0)

    def whiten(rows: Tensor) -> Tensor:
        return off * rows + ((rows @ basis) * (variances.rsqrt() - off)) @ basis.T

    return counts.log() - torch.cdist(whiten(queries.double()), whiten(means)).square() / 2
