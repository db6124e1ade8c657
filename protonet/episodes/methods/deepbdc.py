"""DeepBDC: prototypes of the Brownian distance covariance matrices of maps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protonet.episodes.methods.common import split_positions, squared_distances, support_means
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes

DISTANCE_OFFSET = 1e-5  #: Added below the root of distances, as in the authors' code.
DISTANCES_AT_ONCE = 2**22  #: Distances between two channels that are held at a time, but at least those of one row ...
HALVES_AT_ONCE = 2**24  #: ... and numbers of rows' matrices.


def deepbdc(episodes: Episodes, *, scale: Positive | None = None) -> Tensor:
    """Classify by the distances between the channels of a map, as a prototype network's features.

    Each channel is a vector over the places; the matrix of their distances, centred along both sides, shows how
    channels depend on each other. As in the authors' code for ResNet-12, channels are not reduced by a trained layer.
    At one shot the logits are inner products, otherwise distances to the class means, as in the code.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating, and their shape.
        scale: > 0, the factor on squared distances between channels, learned by the paper; None for where its training
            begins, 1 over twice the places.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: The rows are not maps.

    Source: Xie, Long, Lv, Wang and Li, "Joint distribution matters: deep Brownian distance covariance for few-shot
        classification" (2022), sec. 3. https://arxiv.org/abs/2204.04567
    """
    support, query = split_positions(episodes)
    channels = support.shape[3]
    halves = channels * (channels + 1) // 2  # numbers that a row becomes
    at_once = max(1, HALVES_AT_ONCE // (halves * support.shape[1]))  # episodes
    queries_at_once = max(1, HALVES_AT_ONCE // (halves * at_once))
    logits = []
    parts = (tensor.split(at_once) for tensor in (support, query, episodes.support_labels))
    for some_support, some_query, labels in zip(*parts, strict=True):
        covariances = _find_covariances(some_support, scale).to(episodes.support)
        prototypes = support_means(replace(episodes, support=covariances, support_labels=labels))
        matrices = []
        for some in some_query.split(queries_at_once, dim=1):
            rows = _find_covariances(some, scale).to(episodes.query)
            one_shot = support.shape[1] == episodes.n_way
            matrices.append(rows @ prototypes.transpose(1, 2) if one_shot else -squared_distances(rows, prototypes))
        logits.append(torch.cat(matrices, dim=1))
    return torch.cat(logits)


def _find_covariances(maps: Tensor, scale: float | None) -> Tensor:
    """Return the upper halves of the matrices of maps (episodes, n, places, channels): (episodes, n, halves)."""
    n_positions, channels = maps.shape[2:]
    factor = 1 / (2 * n_positions) if scale is None else scale
    first, second = torch.triu_indices(channels, channels, device=maps.device)
    matrices = []
    for some in maps.flatten(0, 1).split(max(1, DISTANCES_AT_ONCE // channels**2)):
        gram = some.transpose(1, 2) @ some  # (rows, channels, channels)
        norms = gram.diagonal(dim1=1, dim2=2)
        squares = (norms[:, :, None] + norms[:, None, :] - 2 * gram).clamp_min(0)
        distances = (factor * squares + DISTANCE_OFFSET).sqrt()
        means = distances.mean(dim=2, keepdim=True)
        centred = distances - means - means.transpose(1, 2) + means.mean(dim=1, keepdim=True)
        matrices.append(centred[:, first, second])
    halves: Tensor = torch.cat(matrices).unflatten(0, maps.shape[:2])
    return halves
