"""Class means, and the two training losses: episodic, and cross-entropy over cosine logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 8192  #: Rows that are worked on at a time: bounds the memory, not the data.


def episodic_loss(embeddings: Tensor, *, n_shot: int, temperature: float, smoothing: float = 0.0) -> Tensor:
    """Compute the cross-entropy of queries classified by their cosine to the episode's prototypes.

    Args:
        embeddings: (..., n_way, n_shot + n_query, dim) floating, rows of unit norm, support first; n_query >= 1.
        n_shot: Support rows per class, >= 1.
        temperature: > 0, divides the cosines.
        smoothing: Label smoothing in [0, 1).

    Returns:
        0-d, the dtype of ``embeddings``: the mean over all queries of all episodes, in nats.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eq. 2, with cosines instead
        of squared distances. https://arxiv.org/abs/1703.05175
    """
    n_way, rows = embeddings.shape[-3:-1]
    prototypes = F.normalize(embeddings[..., :n_shot, :].mean(dim=-2), dim=-1)  # (..., n_way, dim)
    queries = embeddings[..., n_shot:, :].flatten(-3, -2)  # (..., n_way * n_query, dim)
    logits = queries @ prototypes.transpose(-1, -2) / temperature  # (..., n_way * n_query, n_way)
    targets = torch.arange(n_way, device=logits.device).repeat_interleave(rows - n_shot)
    flat = logits.reshape(-1, n_way)  # (queries of all episodes, n_way)
    return F.cross_entropy(flat, targets.repeat(len(flat) // len(targets)), label_smoothing=smoothing)


def cosine_cross_entropy(
    embeddings: Tensor, targets: Tensor, proxies: Tensor, *, temperature: float, smoothing: float = 0.0
) -> Tensor:
    """Compute the cross-entropy of rows classified by their cosine to one learned proxy per class.

    Args:
        embeddings: (..., n, dim) floating, rows of unit norm.
        targets: (..., n) int64 labels in [0, num_classes).
        proxies: (..., num_classes, dim) floating, of any norm.
        temperature: > 0, divides the cosines.
        smoothing: Label smoothing in [0, 1).

    Returns:
        0-d, the dtype of ``embeddings``: the mean over all rows, in nats.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), eq. 3.
        https://arxiv.org/abs/1804.09458
    """
    logits = embeddings @ F.normalize(proxies, dim=-1).transpose(-1, -2) / temperature
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=smoothing)


def class_means(embeddings: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Average the rows of each class.

    Args:
        embeddings: (n, dim) floating.
        labels: (n,) int64 in [0, num_classes).
        num_classes: The number of classes.

    Returns:
        means: (num_classes, dim), the dtype of ``embeddings``; zero for a class without rows.
        counts: (num_classes,), the same dtype: rows per class.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eq. 1.
        https://arxiv.org/abs/1703.05175
    """
    sums = embeddings.new_zeros(num_classes, embeddings.shape[1]).index_add_(0, labels, embeddings)
    counts = torch.bincount(labels, minlength=num_classes).to(embeddings.dtype)
    return sums / counts.clamp_min(1)[:, None], counts  # (num_classes, dim), (num_classes,)
