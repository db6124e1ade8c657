"""LaplacianShot: the nearest prototype, and the same class as the nearest queries."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.bd_cspn import rectify_prototypes
from protonet.episodes.methods.common import squared_norms

#: Change of an assignment that ends the updates.
CONVERGED = 1e-6


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
        steps: >= 0, most bound updates; they end when no assignment in the batch changes by 1e-6, the authors' when
            their bound changes by less than that.
        temperature: > 0, divides the cosines that `rectify_prototypes` takes.

    Returns:
        Logits (episodes, n_queries, n_way), whose softmax are the last update's assignments.

    Source: Ziko et al., "Laplacian regularized few-shot learning" (2020), eqs. 1, 10 and algorithm 1.
        https://arxiv.org/abs/2006.15486
    """
    query = episodes.query
    closeness = query @ query.transpose(1, 2)
    lengths = closeness.diagonal(dim1=1, dim2=2).sqrt()[:, None]  # (episodes, 1, n_queries)
    scale = 1 / lengths.clamp_min(torch.finfo(query.dtype).tiny ** 0.5)  # of the queries to norm 1
    unit = episodes._replace(support=F.normalize(episodes.support, dim=2))
    prototypes = rectify_prototypes(unit, scale, (lengths > 0).to(query.dtype), temperature=temperature)
    # Minus the squared distances (episodes, n_way, n_queries), but for the queries' own length.
    unary = (prototypes @ query.transpose(1, 2)).mul_(2 * scale).sub_(squared_norms(prototypes)[:, :, None])
    closeness.mul_(scale.transpose(1, 2))  # of rows of norm 1 to each column
    affinity = _find_neighbours(closeness, n_neighbours, laplacian_weight)
    logits = unary
    assigned = logits.softmax(dim=1)
    for _ in range(steps):
        logits = torch.baddbmm(unary, assigned, affinity)
        before, assigned = assigned, logits.softmax(dim=1)
        if float((assigned - before).abs().max()) < CONVERGED:
            break
    return logits.transpose(1, 2)


def _find_neighbours(closeness: Tensor, n_neighbours: int, weight: float) -> Tensor:
    """Return (episodes, n, n): column p is ``weight`` at the rows closest to p, itself left out, and zero elsewhere.

    Args:
        closeness: (episodes, n, n), of row and column; overwritten.
        n_neighbours: >= 0.
        weight: Of each neighbour.
    """
    closeness.diagonal(dim1=1, dim2=2).fill_(-math.inf)
    affinity = torch.zeros_like(closeness)
    for _ in range(min(n_neighbours, closeness.shape[1] - 1)):
        nearest = closeness.max(dim=1, keepdim=True).indices
        affinity.scatter_(1, nearest, weight)
        closeness.scatter_(1, nearest, -math.inf)
    return affinity
