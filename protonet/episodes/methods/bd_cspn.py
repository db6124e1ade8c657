"""BD-CSPN: prototypes rectified by shifted and pseudo-labelled queries, and cosines to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import cosines, one_hot, squared_norms, support_means


def rectify_prototypes(episodes: Episodes, *, temperature: float = 0.1) -> Tensor:
    """Return the rectified prototypes (episodes, n_way, dim).

    Queries are shifted so that their mean is the supports' (cross-class bias) and labelled by the nearest mean; then
    each class's rows of both kinds are averaged, weighted by the exponential of their cosine to its mean (intra-class
    bias).

    Args:
        episodes: Supports and queries, (episodes, rows, dim).
        temperature: > 0, divides the cosines.

    Source: Liu, Song and Qin, "Prototype rectification for few-shot learning" (2020), eqs. 6 to 9, every query being
        pseudo-labelled. https://arxiv.org/abs/1911.10713
    """
    support, query = episodes.support, episodes.query
    means = F.normalize(support_means(episodes), dim=2)
    shift = support.mean(dim=1, keepdim=True) - query.mean(dim=1, keepdim=True)  # (episodes, 1, dim)
    # The shifted queries' products and norms follow from the queries' own: one pass over them instead of three.
    towards = torch.cat([means, shift], dim=1)
    products = torch.baddbmm(towards @ shift.transpose(1, 2), towards, query.transpose(1, 2))
    squares = squared_norms(query)[:, None] + 2 * products[:, -1:] - squared_norms(shift)[:, None]
    norms = squares.clamp_min(torch.finfo(query.dtype).tiny).sqrt()
    of_query = (products[:, :-1] / norms).clamp(-1, 1)  # (episodes, n_way, n_queries)
    of_support = cosines(support, means).transpose(1, 2)

    labels = one_hot(episodes.support_labels, episodes.n_way, query.dtype).transpose(1, 2)
    pseudo_labels = one_hot(of_query.max(dim=1).indices, episodes.n_way, query.dtype).transpose(1, 2)
    support_weights = labels * (of_support / temperature).exp()
    query_weights = pseudo_labels * (of_query / temperature).exp()
    on_queries = query_weights.sum(dim=2, keepdim=True)
    total = support_weights.sum(dim=2, keepdim=True) + on_queries
    return (support_weights @ support + query_weights @ query + on_queries * shift) / total


def bd_cspn(episodes: Episodes, *, temperature: float = 0.1) -> Tensor:
    """Classify by the cosine to rectified prototypes.

    Args:
        episodes: Supports and queries, (episodes, rows, dim).
        temperature: > 0, divides the cosines, of the rectification too.

    Returns:
        Logits (episodes, n_queries, n_way), of the queries as they are: only the prototypes know of the shift.

    Source: Liu, Song and Qin, "Prototype rectification for few-shot learning" (2020). https://arxiv.org/abs/1911.10713
    """
    return cosines(episodes.query, rectify_prototypes(episodes, temperature=temperature)) / temperature
