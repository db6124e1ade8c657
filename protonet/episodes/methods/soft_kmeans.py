"""Soft k-means: prototypes refined by the queries, which belong to all classes with some probability."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.episodes.methods.common import one_hot, squared_distances, support_means
from protonet.episodes.methods.keywords import Count
from protonet.episodes.samplers.batch import Episodes


def soft_kmeans(episodes: Episodes, *, steps: Count = 1) -> Tensor:
    """Classify by the squared Euclidean distance to prototypes that are refined by the queries.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        steps: How often the queries are assigned and the prototypes refined, >= 0. 1 as in the paper; 0 is a
            prototypical network.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus the distances.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 3.1.1: the shares are
        the softmax of minus the distances, the prototypes the weighted means of eq. 4. https://arxiv.org/abs/1803.00676
    """
    shots = one_hot(episodes.support_labels, episodes.n_way, episodes.support.dtype).sum(dim=1)[..., None]
    means = support_means(episodes)
    distances = squared_distances(means, episodes.query)  # (episodes, n_way, n_queries)
    for _ in range(steps):
        memberships = torch.softmax(-distances, dim=1)
        refined = torch.baddbmm(shots * means, memberships, episodes.query) / (
            shots + memberships.sum(dim=2, keepdim=True)
        )
        distances = squared_distances(refined, episodes.query)
    return -distances.transpose(1, 2)
