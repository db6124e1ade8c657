"""LaplacianShot: the nearest prototype, and the same class as the nearest queries."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.bd_cspn import rectify_prototypes
from protonet.episodes.methods.common import squared_distances


def laplacian_shot(
    episodes: Episodes,
    *,
    laplacian_weight: float = 0.7,
    n_neighbours: int = 2,
    steps: int = 20,
    temperature: float = 0.1,
) -> Tensor:
    """Classify by the distance to rectified prototypes, rows being of norm 1, regularised by the queries' neighbours.

    Args:
        episodes: Supports and queries, (episodes, rows, dim).
        laplacian_weight: >= 0, of the agreement with neighbours; the paper chooses it in [0.1, 1.5] by validation.
        n_neighbours: >= 0, the queries nearest to a query, itself not counted: the authors' 3 counts it. That q is a
            neighbour of p does not make p one of q, there as here.
        steps: >= 0 bound updates. The authors stop earlier once the bound changes by less than 1e-6 of itself.
        temperature: > 0, divides the cosines that `rectify_prototypes` takes.

    Returns:
        Logits (episodes, n_queries, n_way), whose softmax are the last update's assignments.

    Source: Ziko et al., "Laplacian regularized few-shot learning" (2020), eqs. 1, 10 and algorithm 1.
        https://arxiv.org/abs/2006.15486
    """
    support, query = F.normalize(episodes.support, dim=2), F.normalize(episodes.query, dim=2)
    prototypes = rectify_prototypes(episodes._replace(support=support, query=query), temperature=temperature)
    unary = -squared_distances(prototypes, query)  # (episodes, n_way, n_queries)
    affinity = laplacian_weight * _find_neighbours(query, n_neighbours)
    logits = unary
    for _ in range(steps):
        logits = torch.baddbmm(unary, torch.softmax(logits, dim=1), affinity)
    return logits.transpose(1, 2)


def _find_neighbours(rows: Tensor, n_neighbours: int) -> Tensor:
    """Return (episodes, n, n): column p is one at the rows nearest to row p, itself left out, and zero elsewhere."""
    closeness = rows @ rows.transpose(1, 2)
    closeness -= closeness.diagonal(dim1=1, dim2=2)[..., None] / 2  # less the half of |p|^2: minus half the distances
    closeness.diagonal(dim1=1, dim2=2).fill_(-math.inf)
    neighbours = torch.zeros_like(closeness)
    for _ in range(min(n_neighbours, rows.shape[1] - 1)):
        nearest = closeness.max(dim=1, keepdim=True).indices
        neighbours.scatter_(1, nearest, 1)
        closeness.scatter_(1, nearest, -math.inf)
    return neighbours
