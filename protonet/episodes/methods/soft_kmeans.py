"""Soft k-means: prototypes refined by the queries, each in part of every class."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import one_hot, squared_distances, support_means


def soft_kmeans(episodes: Episodes, *, steps: int = 1) -> Tensor:
    """Classify by the squared Euclidean distance to prototypes that the queries have moved.

    Args:
        episodes: Supports and queries, (episodes, rows, dim).
        steps: >= 0, how often the queries are shared out and the prototypes moved; 0 is a prototypical network.

    Returns:
        Logits (episodes, n_queries, n_way): minus the distances.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 3.1.1: the shares are
        the softmax of minus the distances, and eq. 4 the weighted means. https://arxiv.org/abs/1803.00676
    """
    shots = one_hot(episodes.support_labels, episodes.n_way, episodes.support.dtype).sum(dim=1)[..., None]
    means = support_means(episodes)
    distances = squared_distances(means, episodes.query)  # (episodes, n_way, n_queries)
    for _ in range(steps):
        shares = torch.softmax(-distances, dim=1)
        moved = torch.baddbmm(shots * means, shares, episodes.query) / (shots + shares.sum(dim=2, keepdim=True))
        distances = squared_distances(moved, episodes.query)
    return -distances.transpose(1, 2)
