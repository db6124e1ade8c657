"""Prototypes refined by unlabelled rows or by the queries: soft k-means, PADDLE and OSLO."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import cosines, one_hot, squared_distances, support_means
from protonet.episodes.methods.keywords import Count, NonNegative, Positive, PositiveCount
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import raise_input_error

#: Added to the classes' fractions of the queries before the logarithm, as in the authors' code.
MIN_CLASS_FRACTION = 1e-6


def semi_kmeans(episodes: Episodes, *, temperature: Positive = 1.0, steps: Count = 1) -> Tensor:
    """Classify by the distance to prototypes that are refined by unlabelled rows, weighted by their closeness.

    Args:
        episodes: Support (episodes, n_support, dim), query (episodes, n_queries, dim) and unlabelled (episodes,
            n_unlabelled, dim) rows, floating.
        temperature: > 0, divides the squared distances. The paper trains its encoder with 1.
        steps: How often unlabelled rows are assigned and prototypes refined, >= 0. The paper uses 1.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: There are no unlabelled rows.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 3.1.1, eqs. 3 and 4.
        https://arxiv.org/abs/1803.00676
    """
    rows, prototypes = get_unlabelled(episodes), support_means(episodes)
    for _ in range(steps):
        memberships = (-squared_distances(rows, prototypes) / temperature).softmax(dim=2)
        prototypes = _refine_prototypes(episodes, rows, memberships)
    return -squared_distances(episodes.query, prototypes) / temperature


def semi_kmeans_cluster(
    episodes: Episodes, *, radius: Positive = 1.0, temperature: Positive = 1.0, steps: Count = 1, centred: bool = False
) -> Tensor:
    """Classify by the distance to prototypes refined by unlabelled rows, some of which belong to a distractor cluster.

    Args:
        episodes: Support (episodes, n_support, dim), query (episodes, n_queries, dim) and unlabelled (episodes,
            n_unlabelled, dim) rows, floating.
        radius: The radius of the distractor cluster, > 0, relative to the radius of a class. The authors learn it,
            starting at 100; 1 is our own choice.
        temperature: > 0, divides the squared distances. The paper trains its encoder with 1.
        steps: How often unlabelled rows are assigned and prototypes refined, >= 0.
        centred: Whether the centre of the distractor cluster is the mean of the prototypes. Otherwise it is the origin
            of the embedding, as in the paper, which suits rows that are centred on the base mean (``cl2``).

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: There are no unlabelled rows.

    Source: Ren et al. (2018), sec. 3.1.2, eqs. 5 and 6, with the factor 1/2 on distances over squared radii that their
        code has and the paper has not. https://arxiv.org/abs/1803.00676
    """
    rows, prototypes = get_unlabelled(episodes), support_means(episodes)
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
        episodes: Support (episodes, n_support, dim), query (episodes, n_queries, dim) and unlabelled (episodes,
            n_unlabelled, dim) rows, floating.
        threshold: The relative squared distance, > 0, at which the mask is 1/2. The paper learns it from statistics of
            the distances; 1 is our own choice.
        slope: The slope of the mask at the threshold, > 0. The paper learns it, too; 10 is our own choice.
        temperature: > 0, divides the squared distances. The paper trains its encoder with 1.
        steps: How often unlabelled rows are assigned and prototypes refined, >= 0.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: There are no unlabelled rows.

    Source: Ren et al. (2018), sec. 3.1.3, eqs. 7 to 9; their code multiplies by the mask twice.
        https://arxiv.org/abs/1803.00676
    """
    rows, prototypes = get_unlabelled(episodes), support_means(episodes)
    for _ in range(steps):
        distances = squared_distances(rows, prototypes)  # (episodes, n_unlabelled, n_way)
        mean = distances.mean(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        mask = (slope * (threshold - distances / mean)).sigmoid()
        prototypes = _refine_prototypes(episodes, rows, (-distances / temperature).softmax(dim=2) * mask)
    return -squared_distances(episodes.query, prototypes) / temperature


def get_unlabelled(episodes: Episodes) -> Tensor:
    """Get the unlabelled rows (episodes, n_unlabelled, dim); raise an InputError if there are none."""
    if episodes.unlabelled is None:
        remedy = "Ask for unlabelled rows (`n_unlabelled` 5), or leave this method out."
        raise_input_error("unlabelled", "be known", None, remedy)
    return episodes.unlabelled


def _refine_prototypes(episodes: Episodes, rows: Tensor, memberships: Tensor) -> Tensor:
    """Compute class means (episodes, n_way, dim) of the support rows and of other rows, weighted by membership.

    ``rows`` are (episodes, n, dim), their ``memberships`` (episodes, n, n_way) in [0, 1].
    """
    hot = one_hot(episodes.support_labels, episodes.n_way, rows.dtype)
    both, weights = torch.cat([episodes.support, rows], dim=1), torch.cat([hot, memberships], dim=1)
    return (weights / weights.sum(dim=1, keepdim=True)).transpose(1, 2) @ both


def soft_kmeans(episodes: Episodes, *, steps: Count = 1) -> Tensor:
    """Classify by the squared Euclidean distance to prototypes that are refined by the queries.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        steps: How often the queries are assigned and the prototypes refined, >= 0. The paper uses 1; 0 gives
            a prototypical network.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus the squared distances.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 3.1.1: memberships
        are the softmax of minus the distances, prototypes the weighted means of eq. 4. https://arxiv.org/abs/1803.00676
    """
    shots = one_hot(episodes.support_labels, episodes.n_way, episodes.support.dtype).sum(dim=1)[..., None]
    means = support_means(episodes)
    distances = squared_distances(means, episodes.query)  # (episodes, n_way, n_queries)
    for _ in range(steps):
        memberships = torch.softmax(-distances, dim=1)
        refined = torch.baddbmm(shots * means, memberships, episodes.query) / (
            shots + memberships.sum(dim=2, keepdim=True)
        )
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
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        lambda_: The weight of the penalty, >= 0; 0 gives soft k-means. None takes the number of queries, which adds
            the logarithms of class fractions to the logits. The authors' code uses 75, its number of queries.
        n_steps: Updates of assignments, fractions and prototypes, >= 1. The authors' code uses 100.
        temperature: > 0, divides half the squared distances. The paper has no temperature.
        scaled: Whether to divide each feature by its range over the episode's queries, as the authors' code does.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows; their softmax is the last assignment.

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
    for step in range(n_steps):
        distances = squared_distances(prototypes, episodes.query)  # (episodes, n_way, n_queries)
        logits = weight * dual - distances / (2 * temperature)
        if step < n_steps - 1:
            assigned = logits.softmax(dim=1)
            dual = (assigned.mean(dim=2, keepdim=True) + MIN_CLASS_FRACTION).log()
            prototypes = (sums + assigned @ episodes.query) / (count + assigned.sum(dim=2, keepdim=True))
    return logits.transpose(1, 2)


def oslo(
    episodes: Episodes, *, steps: PositiveCount = 2, inlier_temperature: Positive = 0.05, temperature: Positive = 0.1
) -> Tensor:
    """Classify by the cosine to prototypes that queries refine, weighted by how likely each query is an inlier.

    It is for episodes with open classes, whose queries are outliers. The highest logit of a query is the logit of the
    probability that it is an inlier.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; the function
            centres all rows on their mean, then scales them to unit norm.
        steps: Updates of inlier scores, assignments and prototypes, >= 1. The authors' code uses 2.
        inlier_temperature: > 0, divides the cosines in inlier scores: the paper's weight of the scores' entropy. The
            authors' code uses 0.05.
        temperature: > 0, divides the cosines in assignments to classes: the paper's weight of the assignments' entropy.
            The authors' code uses 0.1.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: cosines over the temperature, plus
        a constant per query.

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
