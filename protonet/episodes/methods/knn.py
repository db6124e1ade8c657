"""k nearest neighbours among the support rows, each weighted by its cosine."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.episodes.methods.common import cosines, one_hot
from protonet.episodes.methods.keywords import Positive, PositiveCount
from protonet.episodes.samplers.batch import Episodes

#: Share of all neighbours' weight that a class without any has, so that its logit is finite. Our own choice.
EMPTY_CLASS_WEIGHT = 1e-6


def nearest_neighbours(episodes: Episodes, *, n_neighbours: PositiveCount = 5, temperature: Positive = 0.07) -> Tensor:
    """Classify by the nearest support rows, which vote with the exponential of their cosine to the query.

    The paper takes 200 of a whole data set. With as many neighbours as support rows this is `matching_networks` at a
    lower temperature; with 1 it is the nearest neighbour, whose class has nearly all of the probability.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        n_neighbours: >= 1; all support rows where there are fewer. 5 is our own choice.
        temperature: > 0, divides the cosines. The paper: 0.07.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: logarithms of the classes' weights.

    Source: Wu, Xiong, Yu and Lin, "Unsupervised feature learning via non-parametric instance discrimination" (2018),
        sec. 3.4. https://arxiv.org/abs/1805.01978
    """
    near = cosines(episodes.query, episodes.support).topk(min(n_neighbours, episodes.support.shape[1]), dim=2)
    hot = one_hot(episodes.support_labels, episodes.n_way, episodes.query.dtype)
    position = torch.arange(len(hot), device=hot.device).reshape(-1, 1, 1)
    classes = hot[position, near.indices]  # (episodes, n_queries, n_neighbours, n_way)
    weights = (near.values / temperature).softmax(dim=2)
    return ((weights[..., None] * classes).sum(dim=2) + EMPTY_CLASS_WEIGHT).log()
