"""Weighted class means, and two training losses: to the prototypes of episodes, and to learned class proxies."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CHUNK_ROWS = 8192  #: Maximum number of rows that are processed at once, which bounds the memory.


def multiply_by_weights(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply each row (..., n, dim) by its weight (..., n); return the rows unchanged if ``weights`` is None."""
    return rows if weights is None else rows * weights.to(rows.dtype)[..., None]


def episodic_loss(
    embeddings: Tensor, *, n_shot: int, temperature: float, smoothing: float = 0.0, weights: Tensor | None = None
) -> Tensor:
    """Compute the weighted mean cross-entropy of queries classified by their cosine to the episode's prototypes.

    Args:
        embeddings: (..., n_way, n_shot + n_query, dim) of unit norm; each class's support rows precede its queries.
        n_shot: The number of support rows of each class.
        temperature: The divisor of the cosines, > 0.
        smoothing: Label smoothing, in [0, 1).
        weights: (..., n_way, n_shot + n_query) sample weights > 0. If None, all weights are 1.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eq. 2, with cosines instead
        of squared distances. https://arxiv.org/abs/1703.05175
    """
    n_way, rows = embeddings.shape[-3:-1]
    means = multiply_by_weights(embeddings, weights)[..., :n_shot, :].mean(dim=-2)
    prototypes = F.normalize(means, dim=-1)  # (..., n_way, dim)
    queries = embeddings[..., n_shot:, :].flatten(-3, -2)  # (..., n_way * n_query, dim)
    logits = queries @ prototypes.transpose(-1, -2) / temperature  # (..., n_way * n_query, n_way)
    targets = torch.arange(n_way, device=logits.device).repeat_interleave(rows - n_shot)
    flat = logits.reshape(-1, n_way)  # (queries of all episodes, n_way)
    query_weights = None if weights is None else weights[..., n_shot:].flatten()
    return _cross_entropy(flat, targets.repeat(len(flat) // len(targets)), smoothing, query_weights)


def cosine_cross_entropy(
    embeddings: Tensor,
    targets: Tensor,
    proxies: Tensor,
    *,
    temperature: float,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute the weighted mean cross-entropy of rows classified by their cosine to one learned proxy per class.

    Args:
        embeddings: (..., n, dim) of unit norm.
        targets: (..., n) int64, the class of each row.
        proxies: (..., num_classes, dim), a trained vector for each class, of any norm.
        temperature: The divisor of the cosines, > 0.
        smoothing: Label smoothing, in [0, 1).
        weights: (..., n) sample weights > 0. If None, all weights are 1.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), eq. 3.
        https://arxiv.org/abs/1804.09458
    """
    logits = embeddings @ F.normalize(proxies, dim=-1).transpose(-1, -2) / temperature
    weights = None if weights is None else weights.flatten()
    return _cross_entropy(logits.flatten(0, -2), targets.flatten(), smoothing, weights)


def _cross_entropy(logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
    """Compute the weighted mean cross-entropy of logits (n, classes) for targets and weights (n,)."""
    if weights is None:
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)
    losses = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    return (weights * losses).mean() / weights.mean()


def add_to_class_sums(sums: Tensor, blocks: Iterable[Tensor], labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Add embeddings, times their weights, to the sums of their classes, in place.

    Args:
        sums: (..., num_classes, dim), changed in place.
        blocks: The embeddings of n rows, as consecutive blocks (..., m, dim).
        labels: (n,) int64, the class of each row.
        weights: (n,). If None, all weights are 1.

    Returns:
        The tensor ``sums``.
    """
    first = 0
    for block in blocks:
        rows = slice(first, first + block.shape[-2])
        sums.index_add_(-2, labels[rows], multiply_by_weights(block, None if weights is None else weights[rows]))
        first = rows.stop
    return sums


def class_means(
    embeddings: Tensor, labels: Tensor, num_classes: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the weighted mean embedding of each class.

    Args:
        embeddings: (n, dim).
        labels: (n,) int64 in [0, num_classes).
        num_classes: The number of classes.
        weights: (n,) >= 0. If None, all weights are 1.

    Returns:
        The means (num_classes, dim), which are zero for a class without rows, and the summed weights (num_classes,) of
        the rows of each class.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eq. 1.
        https://arxiv.org/abs/1703.05175
    """
    sums = add_to_class_sums(embeddings.new_zeros(num_classes, embeddings.shape[1]), [embeddings], labels, weights)
    counts = torch.bincount(labels, weights, minlength=num_classes).to(embeddings.dtype)
    return sums / torch.where(counts > 0, counts, 1)[:, None], counts
