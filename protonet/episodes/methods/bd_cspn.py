"""BD-CSPN: prototypes rectified by shifted and pseudo-labelled queries, and cosines to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import cosines, one_hot, squared_norms


def rectify_prototypes(episodes: Episodes, scale: Tensor, squares: Tensor, *, temperature: float = 0.1) -> Tensor:
    """Return the rectified prototypes (episodes, n_way, dim).

    Queries are shifted so that their mean is the supports' (cross-class bias) and labelled by the nearest mean; then
    each class's rows of both kinds are averaged, weighted by the exponential of their cosine to its mean (intra-class
    bias). Queries are many: neither the scaled nor the shifted ones are formed, but products with them follow from
    products with the queries.

    Args:
        episodes: Supports and queries, (episodes, rows, dim).
        scale: (episodes, 1, n_queries) factors on the queries.
        squares: (episodes, 1, n_queries) squared lengths of the queries so scaled.
        temperature: > 0, divides the cosines.

    Source: Liu, Song and Qin, "Prototype rectification for few-shot learning" (2020), eqs. 6 to 9, every query being
        pseudo-labelled. https://arxiv.org/abs/1911.10713
    """
    support, query = episodes.support, episodes.query
    labels = one_hot(episodes.support_labels, episodes.n_way, query.dtype).transpose(1, 2)
    sums = labels @ support  # (episodes, n_way, dim)
    shift = sums.mean(dim=1, keepdim=True) * (episodes.n_way / support.shape[1]) - (scale / query.shape[1]) @ query
    means = F.normalize(sums, dim=2)
    towards = torch.cat([means, shift], dim=1)
    products = (towards @ query.transpose(1, 2)).mul_(scale).add_(towards @ shift.transpose(1, 2))
    shifted = squares + 2 * products[:, -1:] - squared_norms(shift)[:, None]
    norms = shifted.clamp_min(torch.finfo(query.dtype).tiny).sqrt()
    of_query = (products[:, :-1] / norms).clamp(-1, 1)  # (episodes, n_way, n_queries)
    of_support = cosines(support, means).transpose(1, 2)

    pseudo_labels = one_hot(of_query.max(dim=1).indices, episodes.n_way, query.dtype).transpose(1, 2)
    support_weights = labels * (of_support / temperature).exp()
    query_weights = pseudo_labels * (of_query / temperature).exp()
    on_queries = query_weights.sum(dim=2, keepdim=True)
    rectified = support_weights @ support + torch.baddbmm(on_queries * shift, query_weights * scale, query)
    return rectified.div_(support_weights.sum(dim=2, keepdim=True) + on_queries)


def bd_cspn(episodes: Episodes, *, temperature: float = 0.1) -> Tensor:
    """Classify by the cosine to rectified prototypes.

    Args:
        episodes: Supports and queries, (episodes, rows, dim).
        temperature: > 0, divides the cosines, of the rectification too.

    Returns:
        Logits (episodes, n_queries, n_way), of the queries as they are: only the prototypes know of the shift.

    Source: Liu, Song and Qin, "Prototype rectification for few-shot learning" (2020). https://arxiv.org/abs/1911.10713
    """
    query = episodes.query
    squares = squared_norms(query)[:, None]
    prototypes = rectify_prototypes(episodes, torch.ones_like(squares), squares, temperature=temperature)
    norms = (temperature * squares.sqrt()).clamp_min(torch.finfo(query.dtype).tiny ** 0.5)
    return (F.normalize(prototypes, dim=2) @ query.transpose(1, 2)).div_(norms).transpose(1, 2)
