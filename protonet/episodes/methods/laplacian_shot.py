"""LaplacianShot: the nearest prototype, with neighbouring queries drawn to the same class."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from protonet.episodes.methods.bd_cspn import compute_unit_rows, rectify_prototypes
from protonet.episodes.methods.common import squared_norms, support_means
from protonet.episodes.methods.keywords import Count, NonNegative, Positive, SearchSpace
from protonet.episodes.samplers.batch import Episodes

CONVERGED = 1e-6  #: The updates end once no assignment changes by this much.


def laplacian_shot(
    episodes: Episodes,
    *,
    lambda_: Annotated[NonNegative, SearchSpace((0.1, 0.3, 0.7, 1.5))] = 0.7,
    n_neighbours: Count = 2,
    steps: Count = 20,
    temperature: Positive = 0.1,
    rectify: bool = True,
    shift: bool = True,
    paper: bool = False,
) -> Tensor:
    """Classify by the distance of unit rows to rectified prototypes, regularised by the queries' neighbours.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are centred as
            `compute_centre` says and scaled to unit norm.
        lambda_: Weight of the agreement with neighbours, >= 0. The paper chooses it in [0.1, 1.5] by validation; its
            authors' choice is 0.7 for most sets at 1-shot.
        n_neighbours: Nearest queries of a query, without itself, >= 0. The authors' 3 counts it. As there, q may be a
            neighbour of p without p being one of q.
        steps: Most bound updates, >= 0; 20 in the authors' code (lshot_update.py). They end early once no assignment
            in the batch changes by 1e-6; in the authors' code, once their bound changes by less than that.
        temperature: > 0, divides the cosines in `rectify_prototypes`.
        rectify: Rectify the prototypes. The configuration of Veilleux et al. (2021) for unbalanced queries does not,
            see `laplacian_shot_dirichlet`.
        shift: Shift the queries, too, as the rectification does. The code of Veilleux et al. (2021) leaves them where
            they are, with the same weights; its balanced configuration has ``lambda_`` 0.7 at 1-shot, and 0.3 at 5-shot
            on mini-ImageNet and CUB, 0.1 on tiered-ImageNet.
        paper: Rectify by the paper's weights, see `rectify_prototypes`, and leave the queries where they are.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows; their softmax is the last update's assignment.

    Source: Ziko et al., "Laplacian regularized few-shot learning" (2020), eqs. 1, 10 and algorithm 1,
        https://arxiv.org/abs/2006.15486, with the rectification of its code (train_lshot.py).
    """
    support, query, scale = compute_unit_rows(episodes)
    unit = replace(episodes, support=support, query=query)
    if rectify:
        prototypes, offset = rectify_prototypes(unit, scale, temperature=temperature, paper=paper)
    else:
        prototypes = support_means(unit)
    # Minus the squared distances (episodes, n_way, n_queries), without the queries' own norms.
    unary = (prototypes @ query.transpose(1, 2)).mul_(2 * scale).sub_(squared_norms(prototypes)[:, :, None])
    if rectify and shift and not paper:
        unary += 2 * prototypes @ offset.transpose(1, 2)
    closeness = (query @ query.transpose(1, 2)).mul_(scale.transpose(1, 2))  # of unit rows to each column
    affinity = _find_neighbours(closeness, n_neighbours, lambda_)
    logits = unary
    assigned = logits.softmax(dim=1)
    for _ in range(steps):
        logits = torch.baddbmm(unary, assigned, affinity)
        before, assigned = assigned, logits.softmax(dim=1)
        if float((assigned - before).abs().max()) < CONVERGED:
            break
    return logits.transpose(1, 2)


def laplacian_shot_dirichlet(episodes: Episodes) -> Tensor:
    """Classify as `laplacian_shot` does, without rectified prototypes, as for unbalanced queries.

    Source: Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), the configuration
        dirichlet/laplacianshot.yaml of its code. https://arxiv.org/abs/2204.11181
    """
    return laplacian_shot(episodes, rectify=False)


def _find_neighbours(closeness: Tensor, n_neighbours: int, weight: float) -> Tensor:
    """Return the graph of nearest neighbours by ``closeness`` (episodes, n, n), which is overwritten.

    Its column p is ``weight`` at the rows closest to p, without p itself, and zero elsewhere.
    """
    closeness.diagonal(dim1=1, dim2=2).fill_(-math.inf)
    affinity = torch.zeros_like(closeness)
    for _ in range(min(n_neighbours, closeness.shape[1] - 1)):
        nearest = closeness.max(dim=1, keepdim=True).indices
        affinity.scatter_(1, nearest, weight)
        closeness.scatter_(1, nearest, -math.inf)
    return affinity
