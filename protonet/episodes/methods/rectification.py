"""Prototypes rectified by the queries: BD-CSPN, and LaplacianShot, which draws neighbouring queries to one class."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import compute_episode_centre, cosines, one_hot, squared_norms, support_means
from protonet.episodes.methods.keywords import Count, NonNegative, Positive, SearchSpace
from protonet.episodes.samplers.batch import Episodes

ASSIGNMENT_TOLERANCE = 1e-6  #: LaplacianShot's updates end once no assignment changes by this much.


def compute_unit_rows(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor]:
    """Centre all rows by `compute_episode_centre`, and scale the support rows to unit norm.

    For speed, the queries are not scaled; the factors that would scale them are returned instead.

    Returns:
        support: (episodes, n_support, dim), centred and of unit norm.
        query: (episodes, n_queries, dim), centred.
        scale: (episodes, 1, n_queries), the factors that scale queries to unit norm.

    Source: "CL2N" of Wang et al., "SimpleShot" (2019), as BD-CSPN and LaplacianShot are evaluated by Ziko et al. (2020,
        train_lshot.py) and Veilleux et al. (2021, bdcspn.yaml, laplacianshot.yaml). Their "L2N" is not enough without
        base classes: if cosines are nearly equal, the class whose rows have the largest weight gets nearly all queries.
    """
    centre = compute_episode_centre(episodes)
    support, query = episodes.support - centre, episodes.query - centre
    norms: Tensor = torch.linalg.vector_norm(query, dim=2)[:, None]
    scale = 1 / norms.clamp_min(torch.finfo(query.dtype).tiny ** 0.5)
    return F.normalize(support, dim=2), query, scale


def rectify_prototypes(
    episodes: Episodes, scale: Tensor, *, temperature: Positive = 0.1, paper: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute prototypes that are corrected by the queries (rectified), as weighted means of support and queries.

    First the queries are shifted, so that their mean is the mean of the support (against the cross-class bias). Each
    query gets the label of the class mean with the largest cosine. Then the rows of each class are averaged, with
    larger weights near the class mean (against the intra-class bias). In the published code, support rows get such
    labels, too, and the weight of a row is the probability of its class, a softmax over classes. Prototypes are then
    shorter than the rows, and a class without rows keeps its mean.

    Args:
        episodes: Rows from `compute_unit_rows`.
        scale: (episodes, 1, n_queries), the factors on queries from `compute_unit_rows`.
        temperature: > 0, divides the cosines. 0.1 is the factor of 10 of paper and code.
        paper: Whether to follow the paper instead of the code: the weights of a class's rows are the exponentials of
            their cosines over the sum of these, and support rows keep their labels. The support rows then determine
            nearly all of their prototype.

    Returns:
        prototypes: (episodes, n_way, dim).
        shift: (episodes, 1, dim), the vector that is added to queries of unit norm.

    Source: Liu, Song and Qin, "Prototype rectification for few-shot learning" (2020), eqs. 6 to 9, every query being
        pseudo-labelled, https://arxiv.org/abs/1911.10713; the code of Ziko et al. (2020, train_lshot.py), which
        Veilleux et al. (2021, bdcspn.py) took over. That of Liu et al. is not public.
    """
    support, query = episodes.support, episodes.query
    n_support, n_queries = support.shape[1], query.shape[1]
    labels = one_hot(episodes.support_labels, episodes.n_way, query.dtype).transpose(1, 2)
    means = labels / labels.sum(dim=2, keepdim=True) @ support  # (episodes, n_way, dim)
    shift = support.mean(dim=1, keepdim=True) - (scale / n_queries) @ query
    towards = torch.cat([F.normalize(means, dim=2), shift], dim=1)
    products = (towards @ query.transpose(1, 2)).mul_(scale).add_(towards @ shift.transpose(1, 2))
    squares = (scale < torch.finfo(query.dtype).tiny ** -0.5).to(query.dtype)  # 1, or 0 of a row of zeros
    shifted = squares + 2 * products[:, -1:] - squared_norms(shift)[:, None]
    norms = shifted.clamp_min(torch.finfo(query.dtype).tiny).sqrt()
    query_cosines = (products[:, :-1] / norms).clamp(-1, 1)  # (episodes, n_way, n_queries)
    logits = torch.cat([cosines(support, means).transpose(1, 2), query_cosines], dim=2) / temperature

    members = one_hot(logits.max(dim=1).indices, episodes.n_way, query.dtype).transpose(1, 2)
    if paper:
        members[..., :n_support] = labels
    weights = members * (logits.exp() if paper else logits.softmax(dim=1))
    mass = (weights if paper else members).sum(dim=2, keepdim=True)  # (episodes, n_way, 1)
    support_weights, query_weights = weights.split([n_support, n_queries], dim=2)
    offset = query_weights.sum(dim=2, keepdim=True) * shift
    rectified = support_weights @ support + torch.baddbmm(offset, query_weights * scale, query)
    return torch.where(mass > 0, rectified / mass, means), shift


def bd_cspn(episodes: Episodes, *, temperature: Positive = 0.1, paper: bool = False) -> Tensor:
    """Classify by the distance to prototypes that the queries correct (rectify), or by the cosine to them.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; the function
            centres rows by `compute_episode_centre`, and scales them to unit norm.
        temperature: > 0, divides half the squared distances, and the cosines in `rectify_prototypes`.
        paper: Whether to rectify by the paper's weights and classify by the cosine, as the paper does. The published
            code classifies by the nearest prototype.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus half the squared distances over the
        temperature, up to a constant. The queries themselves are not shifted.

    Source: Liu, Song and Qin, "Prototype rectification for few-shot learning" (2020),
        https://arxiv.org/abs/1911.10713, in the code of Veilleux et al. (2021), bdcspn.py.
    """
    support, query, scale = compute_unit_rows(episodes)
    unit = replace(episodes, support=support, query=query)
    prototypes, _ = rectify_prototypes(unit, scale, temperature=temperature, paper=paper)
    if paper:  # of unit norm, distances are in the order of cosines
        prototypes = F.normalize(prototypes, dim=2)
    products = (prototypes @ query.transpose(1, 2)).mul_(scale)
    return products.sub_(squared_norms(prototypes)[:, :, None] / 2).div_(temperature).transpose(1, 2)


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
    """Classify by the distance to rectified prototypes, with similar logits for queries that are neighbours.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; the function
            centres rows by `compute_episode_centre`, and scales them to unit norm.
        lambda_: Weight of the agreement with neighbours, >= 0. The paper chooses it in [0.1, 1.5] by validation. The
            authors' code uses 0.7 for most data sets at 1-shot.
        n_neighbours: Number of nearest queries of a query, without itself, >= 0. The authors' 3 includes the query. As
            in the authors' code, the graph is directed.
        steps: Maximum number of bound updates, >= 0; 20 in the authors' code (lshot_update.py). They end early once no
            assignment in the batch changes by 1e-6; in the authors' code, once the bound changes by less than that.
        temperature: > 0, divides the cosines in `rectify_prototypes`.
        rectify: Whether to rectify the prototypes by `rectify_prototypes`. The configuration of Veilleux et al. (2021)
            for unbalanced queries does not, see `laplacian_shot_dirichlet`.
        shift: Whether to classify queries after the shift of `rectify_prototypes`. The code of Veilleux et al. (2021)
            does not shift them; its balanced configuration has ``lambda_`` 0.7 at 1-shot, and 0.3 at 5-shot on
            mini-ImageNet and CUB, 0.1 on tiered-ImageNet.
        paper: Whether to rectify by the paper's weights, see `rectify_prototypes`, without a shift of the queries.

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
    closeness = (query @ query.transpose(1, 2)).mul_(scale.transpose(1, 2))  # cosines, up to a factor on each column
    affinity = _build_neighbour_graph(closeness, n_neighbours, lambda_)
    logits = unary
    assigned = logits.softmax(dim=1)
    for _ in range(steps):
        logits = torch.baddbmm(unary, assigned, affinity)
        before, assigned = assigned, logits.softmax(dim=1)
        if float((assigned - before).abs().max()) < ASSIGNMENT_TOLERANCE:
            break
    return logits.transpose(1, 2)


def laplacian_shot_dirichlet(episodes: Episodes) -> Tensor:
    """Classify as `laplacian_shot` does, with class means as prototypes, for unbalanced queries.

    Source: Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), the configuration
        dirichlet/laplacianshot.yaml of its code. https://arxiv.org/abs/2204.11181
    """
    return laplacian_shot(episodes, rectify=False)


def _build_neighbour_graph(closeness: Tensor, n_neighbours: int, weight: float) -> Tensor:
    """Build a graph (episodes, n, n) of queries: column p is ``weight`` at the nearest neighbours of p, else 0.

    ``closeness`` (episodes, n, n) has the cosines, and is overwritten.
    """
    closeness.diagonal(dim1=1, dim2=2).fill_(-math.inf)
    affinity = torch.zeros_like(closeness)
    for _ in range(min(n_neighbours, closeness.shape[1] - 1)):
        nearest = closeness.max(dim=1, keepdim=True).indices
        affinity.scatter_(1, nearest, weight)
        closeness.scatter_(1, nearest, -math.inf)
    return affinity
