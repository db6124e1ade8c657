"""Matching networks: each support row votes for its class, weighted by the query's attention to it."""

from __future__ import annotations

from torch import Tensor

from protonet.episodes.methods.common import cosines, one_hot
from protonet.episodes.samplers.batch import Episodes


def matching_networks(episodes: Episodes) -> Tensor:
    """Classify by attention to the support rows: the softmax of their cosines, summed over each class.

    This is the paper's classifier without full context embeddings, which belong to the encoder.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: log-probabilities.

    Source: Vinyals, Blundell, Lillicrap, Kavukcuoglu and Wierstra, "Matching networks for one shot learning" (2016),
        eq. 1 and sec. 2.1.1. https://arxiv.org/abs/1606.04080
    """
    attention = cosines(episodes.query, episodes.support).softmax(dim=2)  # (episodes, n_queries, n_support)
    return (attention @ one_hot(episodes.support_labels, episodes.n_way, attention.dtype)).log()
