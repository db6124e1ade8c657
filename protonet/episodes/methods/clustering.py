"""Prototypes refined by unlabelled rows or queries: soft k-means, PADDLE, OSLO, BD-CSPN and LaplacianShot."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import (
    compute_episode_centre,
    cosines,
    one_hot,
    squared_distances,
    squared_norms,
    support_means,
)
from protonet.episodes.methods.keywords import Count, NonNegative, Positive, PositiveCount, SearchSpace
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import raise_input_error

ASSIGNMENT_TOLERANCE = 1e-6  #: LaplacianShot's updates end once no assignment changes by this much.


def semi_kmeans(episodes: Episodes, *, temperature: Positive = 1.0, steps: Count = 1) -> Tensor:
    """Classify by the distance to prototypes that are refined by unlabelled rows, weighted by their closeness.

    Args:
        temperature: > 0, divides the squared distances. The paper trains its encoder with 1.
        steps: How often unlabelled rows are assigned and prototypes refined, >= 0. The paper uses 1.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 3.1.1, eqs. 3 and 4.
        https://arxiv.org/abs/1803.00676
    """
    rows, prototypes = get_unlabelled_rows(episodes), support_means(episodes)
    for _ in range(steps):
        memberships = (-squared_distances(rows, prototypes) / temperature).softmax(dim=2)
        prototypes = _refine_prototypes(episodes, rows, memberships)
    return -squared_distances(episodes.query, prototypes) / temperature


def semi_kmeans_cluster(
    episodes: Episodes, *, radius: Positive = 1.0, temperature: Positive = 1.0, steps: Count = 1, centred: bool = False
) -> Tensor:
    """Classify by the distance to prototypes refined by unlabelled rows, some of which belong to a distractor cluster.

    Args:
        radius: The radius of the distractor cluster, > 0, relative to the radius of a class. The authors learn it,
            starting at 100; 1 is our own choice.
        temperature: > 0, divides the squared distances. The paper trains its encoder with 1.
        steps: How often unlabelled rows are assigned and prototypes refined, >= 0.
        centred: Whether the centre of the distractor cluster is the mean of the prototypes. Otherwise it is the origin
            of the embedding, as in the paper, which suits rows that are centred on the base mean (``cl2``).

    Source: Ren et al. (2018), sec. 3.1.2, eqs. 5 and 6, with the factor 1/2 on distances over squared radii that their
        code has but the paper does not. https://arxiv.org/abs/1803.00676
    """
    rows, prototypes = get_unlabelled_rows(episodes), support_means(episodes)
    centre = prototypes.mean(dim=1, keepdim=True) * float(centred)  # (episodes, 1, dim)
    radii = F.pad(prototypes.new_ones(episodes.n_way), (0, 1), value=radius)
    for _ in range(steps):
        distances = squared_distances(rows, torch.cat([prototypes, centre], dim=1)) / temperature
        memberships = (-distances / (2 * radii**2) - radii.log()).softmax(dim=2)
        prototypes = _refine_prototypes(episodes, rows, memberships[..., :-1])
    return -squared_distances(episodes.query, prototypes) / temperature


def semi_kmeans_masked(
    episodes: Episodes,
    *,
    threshold: Positive = 1.0,
    slope: Positive = 10.0,
    temperature: Positive = 1.0,
    steps: Count = 1,
) -> Tensor:
    """Classify by the distance to prototypes refined by the unlabelled rows that are closest to them.

    A mask lowers the weight of an unlabelled row that is far from a prototype. The mask is a falling sigmoid of the
    squared distance over the mean squared distance between unlabelled rows and this prototype.

    Args:
        threshold: The relative squared distance, > 0, at which the mask is 1/2. The paper learns it from statistics of
            the distances; 1 is our own choice.
        slope: The slope of the mask at the threshold, > 0. The paper learns it, too; 10 is our own choice.
        temperature: > 0, divides the squared distances. The paper trains its encoder with 1.
        steps: How often unlabelled rows are assigned and prototypes refined, >= 0.

    Source: Ren et al. (2018), sec. 3.1.3, eqs. 7 to 9; their code multiplies by the mask twice.
        https://arxiv.org/abs/1803.00676
    """
    rows, prototypes = get_unlabelled_rows(episodes), support_means(episodes)
    for _ in range(steps):
        distances = squared_distances(rows, prototypes)  # (episodes, n_unlabelled, n_way)
        mean = distances.mean(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        mask = (slope * (threshold - distances / mean)).sigmoid()
        prototypes = _refine_prototypes(episodes, rows, (-distances / temperature).softmax(dim=2) * mask)
    return -squared_distances(episodes.query, prototypes) / temperature


def get_unlabelled_rows(episodes: Episodes) -> Tensor:
    """Get the unlabelled rows (episodes, n_unlabelled, dim); raise an InputError if there are none."""
    if episodes.unlabelled is None:
        remedy = "Ask for unlabelled rows (`unlabelled` 5), or leave this method out."
        raise_input_error("unlabelled", "be known", None, remedy)
    return episodes.unlabelled


def _refine_prototypes(episodes: Episodes, rows: Tensor, memberships: Tensor) -> Tensor:
    """Compute class means of the support and of ``rows`` with ``memberships`` (episodes, n, n_way) in [0, 1]."""
    hot = one_hot(episodes.support_labels, episodes.n_way, rows.dtype)
    both, weights = torch.cat([episodes.support, rows], dim=1), torch.cat([hot, memberships], dim=1)
    return (weights / weights.sum(dim=1, keepdim=True)).transpose(1, 2) @ both


def soft_kmeans(episodes: Episodes, *, steps: Count = 1) -> Tensor:
    """Classify by the squared Euclidean distance to prototypes that are refined by the queries.

    Args:
        steps: How often the queries are assigned and the prototypes refined, >= 0. The paper uses 1; 0 gives
            a prototypical network.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 3.1.1: memberships
        are the softmax of minus the distances, prototypes the weighted means of eq. 4. https://arxiv.org/abs/1803.00676
    """
    shots = one_hot(episodes.support_labels, episodes.n_way, episodes.support.dtype).sum(dim=1)[..., None]
    means = support_means(episodes)
    distances = squared_distances(means, episodes.query)  # (episodes, n_way, n_queries)
    for _ in range(steps):
        memberships = torch.softmax(-distances, dim=1)
        refined = torch.baddbmm(shots * means, memberships, episodes.query)
        refined = refined / (shots + memberships.sum(dim=2, keepdim=True))
        distances = squared_distances(refined, episodes.query)
    return -distances.transpose(1, 2)


def paddle(
    episodes: Episodes,
    *,
    lambda_: NonNegative | None = None,
    n_steps: PositiveCount = 100,
    temperature: Positive = 1.0,
    scaled: bool = True,
) -> Tensor:
    """Classify by prototypes refined by the queries, with a penalty on the number of classes that have queries.

    It is for queries that may belong to only a few of the classes in the support. As the paper has no temperature, the
    sharpness of assignments depends on the number of features: with a few dozen of them, one class may get all queries.

    Args:
        lambda_: The weight of the penalty, >= 0; 0 gives soft k-means. None takes the number of queries, which adds
            the logarithms of class fractions to the logits. The authors' code uses 75, its number of queries.
        n_steps: Updates of assignments, fractions and prototypes, >= 1. The authors' code uses 100.
        temperature: > 0, divides half the squared distances. The paper has no temperature.
        scaled: Whether to divide each feature by its range over the episode's queries, as the authors' code does.

    Source: Martin et al., "Towards practical few-shot query sets: transductive minimum description length inference"
        (2022), sec. 3, https://arxiv.org/abs/2210.14545, with the scaling of its code (paddle.py).
    """
    n_queries = episodes.query.shape[1]
    weight = 1.0 if lambda_ is None else lambda_ / n_queries
    if scaled:
        spread = episodes.query.amax(dim=1, keepdim=True) - episodes.query.amin(dim=1, keepdim=True)
        spread = spread.where(spread > 0, 1.0)
        episodes = replace(episodes, support=episodes.support / spread, query=episodes.query / spread)
    hot = one_hot(episodes.support_labels, episodes.n_way, episodes.query.dtype).transpose(1, 2)
    sums, count = hot @ episodes.support, hot.sum(dim=2, keepdim=True)
    prototypes = support_means(episodes)
    dual = torch.zeros_like(count)  # (episodes, n_way, 1)
    # Added to the classes' fractions of the queries before the logarithm, as in the authors' code.
    class_fraction_offset = 1e-6
    for step in range(n_steps):
        distances = squared_distances(prototypes, episodes.query)  # (episodes, n_way, n_queries)
        logits = weight * dual - distances / (2 * temperature)
        if step < n_steps - 1:
            assigned = logits.softmax(dim=1)
            dual = (assigned.mean(dim=2, keepdim=True) + class_fraction_offset).log()
            prototypes = (sums + assigned @ episodes.query) / (count + assigned.sum(dim=2, keepdim=True))
    return logits.transpose(1, 2)


def oslo(
    episodes: Episodes, *, steps: PositiveCount = 2, inlier_temperature: Positive = 0.05, temperature: Positive = 0.1
) -> Tensor:
    """Classify by the cosine to prototypes that queries refine, weighted by how likely each query is an inlier.

    It is for episodes with open classes, whose queries are outliers. The highest logit of a query is the logit of the
    probability that it is an inlier. All rows are centred on their mean, then scaled to unit norm.

    Args:
        steps: Updates of inlier scores, assignments and prototypes, >= 1. The authors' code uses 2.
        inlier_temperature: > 0, divides the cosines in inlier scores: the paper's weight of the scores' entropy. The
            authors' code uses 0.05.
        temperature: > 0, divides the cosines in assignments to classes: the paper's weight of the assignments' entropy.
            The authors' code uses 0.1.

    Source: Boudiaf et al., "Open-set likelihood maximization for few-shot learning" (2023), sec. 4,
        https://arxiv.org/abs/2301.08390, with the settings and the centring of its code
        (configs/detectors.yaml, Makefile).
    """
    rows = torch.cat([episodes.support, episodes.query], dim=1)
    rows = F.normalize(rows - rows.mean(dim=1, keepdim=True), dim=2)
    support, query = rows.tensor_split([episodes.support.shape[1]], dim=1)
    hot = one_hot(episodes.support_labels, episodes.n_way, query.dtype).transpose(1, 2)
    sums, count = hot @ support, hot.sum(dim=2, keepdim=True)
    prototypes = sums / count
    assigned = query.new_full((len(query), episodes.n_way, query.shape[1]), 1 / episodes.n_way)
    for _ in range(steps):
        close = cosines(query, prototypes).transpose(1, 2)  # (episodes, n_way, n_queries)
        inlier = (assigned * close).sum(dim=1, keepdim=True) / inlier_temperature
        weight = inlier.sigmoid()
        assigned = (weight * close / temperature).softmax(dim=1)
        class_weights = weight * assigned
        prototypes = (sums + class_weights @ query) / (count + class_weights.sum(dim=2, keepdim=True))
    logits = cosines(query, prototypes) / temperature
    return logits - logits.amax(dim=2, keepdim=True) + inlier.transpose(1, 2)


def centre_and_normalize_support(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor]:
    """Centre all rows by `compute_episode_centre`, and scale the support rows to unit norm.

    For speed, queries are not scaled; the factors (episodes, 1, n_queries) that scale them to unit norm are returned.

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
        episodes: Rows from `centre_and_normalize_support`.
        scale: (episodes, 1, n_queries), the factors on queries from `centre_and_normalize_support`.
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

    Rows are centred by `compute_episode_centre` and scaled to unit norm. Logits are minus half the squared distances
    over the temperature, up to a constant. The queries themselves are not shifted.

    Args:
        temperature: > 0, divides half the squared distances, and the cosines in `rectify_prototypes`.
        paper: Whether to rectify by the paper's weights and classify by the cosine, as the paper does. The published
            code classifies by the nearest prototype.

    Source: Liu, Song and Qin, "Prototype rectification for few-shot learning" (2020),
        https://arxiv.org/abs/1911.10713, in the code of Veilleux et al. (2021), bdcspn.py.
    """
    support, query, scale = centre_and_normalize_support(episodes)
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

    Rows are centred by `compute_episode_centre` and scaled to unit norm.

    Args:
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

    Source: Ziko et al., "Laplacian regularized few-shot learning" (2020), eqs. 1, 10 and algorithm 1,
        https://arxiv.org/abs/2006.15486, with the rectification of its code (train_lshot.py).
    """
    support, query, scale = centre_and_normalize_support(episodes)
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
    """Build a nearest-neighbour graph (episodes, n, n) with edges ``weight``; the function overwrites ``closeness``."""
    closeness.diagonal(dim1=1, dim2=2).fill_(-math.inf)
    affinity = torch.zeros_like(closeness)
    for _ in range(min(n_neighbours, closeness.shape[1] - 1)):
        nearest = closeness.max(dim=1, keepdim=True).indices
        affinity.scatter_(1, nearest, weight)
        closeness.scatter_(1, nearest, -math.inf)
    return affinity
