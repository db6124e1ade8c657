"""Prototypical networks: the nearest mean of the support rows, by Euclidean distance or by cosine."""

from __future__ import annotations

from torch import Tensor

from protonet.episodes.methods.common import cosines, squared_distances, support_means
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes


def protonet(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus the distances.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eqs. 1 and 2.
        https://arxiv.org/abs/1703.05175
    """
    return -squared_distances(episodes.query, support_means(episodes))


def protonet_cosine(episodes: Episodes, *, temperature: Positive = 0.1) -> Tensor:
    """Classify by the cosine to the class means.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        temperature: > 0, divides the cosines. 0.1 is our own choice; the paper learns it.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), eq. 3.
        https://arxiv.org/abs/1804.09458
    """
    return cosines(episodes.query, support_means(episodes)) / temperature
