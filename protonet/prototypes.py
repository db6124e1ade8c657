"""Class prototypes from labelled embeddings."""

from __future__ import annotations

import torch
from torch import Tensor


def class_means(embeddings: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Average the rows of each class.

    Args:
        embeddings: (n, dim) floating.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.

    Returns:
        means: (num_classes, dim), the dtype of ``embeddings``; zero for a class without rows.
        counts: (num_classes,), the same dtype.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eq. 1.
    """
    sums = embeddings.new_zeros(num_classes, embeddings.shape[1]).index_add_(0, labels, embeddings)
    counts = torch.bincount(labels, minlength=num_classes).to(embeddings.dtype)
    return sums / counts.clamp_min(1)[:, None], counts  # (num_classes, dim), (num_classes,)
