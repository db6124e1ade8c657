"""The two training losses: episodic, and cross-entropy over cosine logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows that are worked on at a time: bounds the memory, not the data.
CHUNK = 8192


def episodic_loss(embeddings: Tensor, *, n_shot: int, temperature: float, smoothing: float = 0.0) -> Tensor:
    """Classify the queries of each episode by the cosine to its own support prototypes.

    Args:
        embeddings: (..., n_way, n_shot + n_query, dim) unit rows, support first; n_query >= 1.
        n_shot: Support rows a class, >= 1.
        temperature: > 0, divides the cosines.
        smoothing: Label smoothing in [0, 1).

    Returns:
        The mean over all queries of all episodes, 0-d.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eq. 2, with cosines.
    """
    n_way, rows = embeddings.shape[-3:-1]
    prototypes = F.normalize(embeddings[..., :n_shot, :].mean(dim=-2), dim=-1)  # (..., way, dim)
    queries = embeddings[..., n_shot:, :].flatten(-3, -2)  # (..., way * query, dim)
    logits = queries @ prototypes.transpose(-1, -2) / temperature  # (..., way * query, way)
    targets = torch.arange(n_way, device=logits.device).repeat_interleave(rows - n_shot)
    flat = logits.reshape(-1, n_way)
    return F.cross_entropy(flat, targets.repeat(len(flat) // len(targets)), label_smoothing=smoothing)


def cosine_cross_entropy(
    embeddings: Tensor, targets: Tensor, proxies: Tensor, *, temperature: float, smoothing: float = 0.0
) -> Tensor:
    """Classify rows by the cosine to one learned proxy a class.

    Args:
        embeddings: (..., n, dim) unit rows.
        targets: (..., n) int64 labels in [0, num_classes).
        proxies: (..., num_classes, dim), of any norm.
        temperature: > 0, divides the cosines.
        smoothing: Label smoothing in [0, 1).

    Returns:
        The mean over all rows, 0-d.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), eq. 3.
    """
    logits = embeddings @ F.normalize(proxies, dim=-1).transpose(-1, -2) / temperature
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=smoothing)


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
