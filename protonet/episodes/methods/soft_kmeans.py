"""Soft k-means: prototypes refined by the queries, or by unlabelled rows, some of them of other classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import one_hot, squared_distances, support_means
from protonet.episodes.methods.keywords import Count, Positive
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import raise_input_error


def semi_kmeans(episodes: Episodes, *, temperature: Positive = 1.0, steps: Count = 1) -> Tensor:
    """Classify by the distance to prototypes in which unlabelled rows count as far as they are near.

    Args:
        episodes: Support (episodes, n_support, dim), query (episodes, n_queries, dim) and unlabelled (episodes,
            n_unlabelled, dim) rows, floating.
        temperature: > 0, divides the squared distances. The paper: 1, in a space that is learned so.
        steps: How often unlabelled rows are assigned and prototypes refined, >= 0. The paper: 1.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: There are no unlabelled rows.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 3.1.1, eqs. 3 and 4.
        https://arxiv.org/abs/1803.00676
    """
    rows, prototypes = get_unlabelled(episodes), support_means(episodes)
    for _ in range(steps):
        prototypes = _refine(episodes, rows, (-squared_distances(rows, prototypes) / temperature).softmax(dim=2))
    return -squared_distances(episodes.query, prototypes) / temperature


def semi_kmeans_cluster(
    episodes: Episodes, *, radius: Positive = 1.0, temperature: Positive = 1.0, steps: Count = 1, centred: bool = False
) -> Tensor:
    """Classify by the distance to prototypes that leave unlabelled rows near a cluster for distractors to it.

    Args:
        episodes: As in `semi_kmeans`.
        radius: Of the distractors' cluster, > 0, where classes have 1. The authors learn it, from 100 on; 1 is our own
            choice.
        temperature: > 0, divides the squared distances. The paper: 1, in a space that is learned so.
        steps: As in `semi_kmeans`, >= 0.
        centred: Put the cluster at the mean of the prototypes, not at the origin, where the paper has it in the space
            that it learns. Rows that are centred on the base mean (``cl2``) do not need it.

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
        prototypes = _refine(episodes, rows, memberships[..., :-1])
    return -squared_distances(episodes.query, prototypes) / temperature


def semi_kmeans_masked(
    episodes: Episodes,
    *,
    threshold: Positive = 1.0,
    slope: Positive = 10.0,
    temperature: Positive = 1.0,
    steps: Count = 1,
) -> Tensor:
    """Classify by the distance to prototypes in which unlabelled rows count that are nearer than most.

    Args:
        episodes: As in `semi_kmeans`.
        threshold: Rows count fully that are far nearer than this many times the class's mean distance of unlabelled
            rows, > 0. The paper learns it from statistics of the distances; 1 is our own choice.
        slope: Of the mask at the threshold, > 0. The paper learns it, too; 10 is our own choice.
        temperature: > 0, divides the squared distances. The paper: 1, in a space that is learned so.
        steps: As in `semi_kmeans`, >= 0.

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
        prototypes = _refine(episodes, rows, (-distances / temperature).softmax(dim=2) * mask)
    return -squared_distances(episodes.query, prototypes) / temperature


def get_unlabelled(episodes: Episodes) -> Tensor:
    """Return the unlabelled rows of a batch, or raise an InputError that names the function that needs them."""
    if episodes.unlabelled is None:
        remedy = "Ask for unlabelled rows (`n_unlabelled` 5), or leave this method out."
        raise_input_error("unlabelled", "be known", None, remedy)
    return episodes.unlabelled


def _refine(episodes: Episodes, rows: Tensor, memberships: Tensor) -> Tensor:
    """Return the means (episodes, n_way, dim) of the support and of rows (episodes, n, dim) by shares (., n, n_way)."""
    hot = one_hot(episodes.support_labels, episodes.n_way, rows.dtype)
    both, weights = torch.cat([episodes.support, rows], dim=1), torch.cat([hot, memberships], dim=1)
    return (weights / weights.sum(dim=1, keepdim=True)).transpose(1, 2) @ both


def soft_kmeans(episodes: Episodes, *, steps: Count = 1) -> Tensor:
    """Classify by the squared Euclidean distance to prototypes that are refined by the queries.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        steps: How often the queries are assigned and the prototypes refined, >= 0. 1 as in the paper; 0 is a
            prototypical network.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus the distances.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 3.1.1: the shares are
        the softmax of minus the distances, the prototypes the weighted means of eq. 4. https://arxiv.org/abs/1803.00676
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
