"""SimpleShot: the nearest mean of the support rows after a simple transformation of the features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import compute_centre, one_hot, squared_norms
from protonet.episodes.samplers.batch import Episodes

#: Queries whose squared norm centring shrinks to less than this share are centred one by one, against rounding errors.
LOST = 1e-2


def simpleshot_l2n(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means of rows of unit norm (L2N).

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus the distances.

    Source: Wang et al., "SimpleShot" (2019), eq. 2 and "L2-normalization" below it. https://arxiv.org/abs/1911.04623
    """
    means = _average_directions(episodes.support, episodes)
    norms = torch.linalg.vector_norm(episodes.query, dim=2).clamp_min(torch.finfo(means.dtype).tiny ** 0.5)
    products = (means @ episodes.query.transpose(1, 2)).div_(norms[:, None])  # (episodes, n_way, n_queries)
    return _compare_directions(products, means)


def simpleshot_cl2n(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means of centred rows of unit norm (CL2N).

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating. The centre is that
            of `compute_centre`.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus the distances.

    Source: Wang et al., "SimpleShot" (2019), eq. 2 and "Centering" below it. https://arxiv.org/abs/1911.04623
    """
    support, query, centre = episodes.support, episodes.query, compute_centre(episodes)
    means = _average_directions(support - centre, episodes)
    # Queries are many, so the centred ones are not formed: products with them follow from products with the queries.
    towards = torch.cat([means, centre], dim=1)
    offset = towards @ centre.transpose(1, 2)
    squares = squared_norms(query)[:, None]
    products = (towards @ query.transpose(1, 2)).sub_(offset)  # (episodes, n_way + 1, n_queries)
    centred = squares - 2 * products[:, -1:] - offset[:, -1:]  # (episodes, 1, n_queries) squared norms
    directions = products[:, :-1] / centred.clamp_min(torch.finfo(query.dtype).tiny).sqrt()
    lost = centred < LOST * squares
    if bool(lost.any()):  # close to the centre, differences of products keep few digits
        directions = (means @ F.normalize(query - centre, dim=2).transpose(1, 2)).where(lost, directions)
    return _compare_directions(directions, means)


def _average_directions(support: Tensor, episodes: Episodes) -> Tensor:
    """Return the class means (episodes, n_way, dim) of support rows (episodes, n_support, dim) scaled to unit norm."""
    norms: Tensor = torch.linalg.vector_norm(support, dim=2).clamp_min(torch.finfo(support.dtype).tiny ** 0.5)
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype).transpose(1, 2)
    return hot / hot.sum(dim=2, keepdim=True) / norms[:, None] @ support


def _compare_directions(products: Tensor, means: Tensor) -> Tensor:
    """Return minus the squared distances of unit queries to means, from ``products`` (episodes, n_way, n_queries)."""
    return (2 * products - 1 - squared_norms(means)[:, :, None]).transpose(1, 2)
