"""BD-CSPN: the cosine to prototypes that shifted, pseudo-labelled queries have rectified."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import cosines, one_hot, squared_norms


def rectify_prototypes(episodes: Episodes, scale: Tensor, squares: Tensor, *, temperature: float = 0.1) -> Tensor:
    """Compute rectified prototypes.

    Queries are shifted so that their mean is that of the support (against the cross-class bias), and labelled by the
    nearest mean. Then each class's support rows and queries are averaged, weighted by the exponential of their cosine
    to the class mean (against the intra-class bias). Queries are many, so neither the scaled nor the shifted ones are
    formed: products with them follow from products with the queries.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        scale: (episodes, 1, n_queries) factors on the queries, > 0.
        squares: (episodes, 1, n_queries) squared norms of the scaled queries.
        temperature: > 0, divides the cosines. 0.1 is the paper's factor of 10.

    Returns:
        (episodes, n_way, dim), the dtype of the query rows.

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
    query_cosines = (products[:, :-1] / norms).clamp(-1, 1)  # (episodes, n_way, n_queries)
    support_cosines = cosines(support, means).transpose(1, 2)  # (episodes, n_way, n_support)

    pseudo_labels = one_hot(query_cosines.max(dim=1).indices, episodes.n_way, query.dtype).transpose(1, 2)
    support_weights = labels * (support_cosines / temperature).exp()
    query_weights = pseudo_labels * (query_cosines / temperature).exp()
    query_mass = query_weights.sum(dim=2, keepdim=True)
    rectified = support_weights @ support + torch.baddbmm(query_mass * shift, query_weights * scale, query)
    return rectified.div_(support_weights.sum(dim=2, keepdim=True) + query_mass)


def bd_cspn(episodes: Episodes, *, temperature: float = 0.1) -> Tensor:
    """Classify by the cosine to rectified prototypes.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        temperature: > 0, divides the cosines, also those of the rectification. 0.1 is the paper's factor of 10.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows. The queries themselves are not shifted.

    Source: Liu, Song and Qin, "Prototype rectification for few-shot learning" (2020). https://arxiv.org/abs/1911.10713
    """
    query = episodes.query
    squares = squared_norms(query)[:, None]
    prototypes = rectify_prototypes(episodes, torch.ones_like(squares), squares, temperature=temperature)
    norms = (temperature * squares.sqrt()).clamp_min(torch.finfo(query.dtype).tiny ** 0.5)
    return (F.normalize(prototypes, dim=2) @ query.transpose(1, 2)).div_(norms).transpose(1, 2)
