"""Methods that compare the positions of feature maps: FRN, CrossTransformers and DeepBDC."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protonet.episodes.methods.common import one_hot, squared_distances, support_means
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import raise_input_error

RIDGE_OFFSET = 1e-6  #: Added to the ridge of `feature_map_reconstruction`, as in the authors' code.
DISTANCE_OFFSET = 1e-5  #: Added to squared distances before the root, as in the authors' code.
#: Maximum number of distances between channels in memory, but at least those of one row.
DISTANCES_PER_BLOCK = 2**22
#: Maximum number of covariances between channels in memory, but at least those of one row.
COVARIANCES_PER_BLOCK = 2**24


def reshape_to_positions(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Reshape the rows to feature maps with an axis of spatial positions, height times width.

    Returns:
        support: (episodes, n_support, positions, channels) float64.
        query: (episodes, n_queries, positions, channels) float64.

    Raises:
        InputError: The rows are not feature maps: the episodes have no shape.
    """
    if episodes.shape is None:
        remedy = "Make maps by `protonet.episodes extract --maps`, or leave this method out."
        raise_input_error("shape", "be known", None, remedy)
    channels, height, width = episodes.shape
    sizes = channels, height * width
    support, query = (rows.double().unflatten(2, sizes).transpose(2, 3) for rows in (episodes.support, episodes.query))
    return support, query


def feature_map_reconstruction(
    episodes: Episodes, *, ridge: Positive = 1.0, shrinkage: Positive = 1.0, scale: Positive = 1.0
) -> Tensor:
    """Classify by the error of ridge regression from the positions of a class's feature maps to those of a query's.

    The paper learns the three settings together with the encoder; the defaults are their initial values. As in its code
    for ResNet-12, features are divided by the square root of the channels.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating, which are flattened
            feature maps of the shape ``episodes.shape``.
        ridge: The exponential of the paper's alpha, > 0. The ridge of a class is this times its number of positions, of
            all support rows, over the number of channels.
        shrinkage: The exponential of the paper's beta, > 0: the factor on the predictions of the regression.
        scale: The paper's gamma, > 0: the factor on the logits.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: The rows are not feature maps: the episodes have no shape.

    Source: Wertheimer, Tang and Hariharan, "Few-shot classification with feature map reconstruction networks" (2021),
        eqs. 4 to 8. https://arxiv.org/abs/2012.01506
    """
    support, query = reshape_to_positions(episodes)
    n_positions, channels = query.shape[2:]
    support, query = (maps.flatten(1, 2) / channels**0.5 for maps in (support, query))  # (episodes, ., channels)
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype)  # (episodes, n_support, n_way)
    gram, inner = support @ support.transpose(1, 2), query @ support.transpose(1, 2)
    norms = query.square().sum(dim=2)  # (episodes, n_queries * positions)
    eye = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    logits = []
    for inside in hot.repeat_interleave(n_positions, dim=1).unbind(2):  # (episodes, n_support * positions), per class
        masked_gram = gram * inside[:, :, None] * inside[:, None, :]
        penalty = ridge * inside.sum(dim=1) / channels + RIDGE_OFFSET
        across = inner * inside[:, None, :]
        # In the space of the class's positions, which are fewer than channels: eq. 8. Other positions have zeros.
        weights = torch.linalg.solve(masked_gram + penalty[:, None, None] * eye, across.transpose(1, 2)).transpose(1, 2)
        fit, size = (weights * across).sum(dim=2), (weights @ masked_gram * weights).sum(dim=2)
        distances = norms - 2 * shrinkage * fit + shrinkage**2 * size
        logits.append(-scale * distances.unflatten(1, (-1, n_positions)).mean(dim=2))
    return torch.stack(logits, dim=2).to(episodes.query.dtype)


def cross_transformers(episodes: Episodes, *, temperature: Positive | None = None) -> Tensor:
    """Classify by the distances between a query's positions and attention-weighted means of a class's positions.

    The paper trains linear maps from features to keys and values together with the encoder. Here the features are keys
    and values.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating, which are flattened
            feature maps of the shape ``episodes.shape``.
        temperature: > 0, divides the inner products before the softmax of the attention. None takes the paper's value,
            the square root of the number of channels.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: The rows are not feature maps: the episodes have no shape.

    Source: Doersch, Gupta and Zisserman, "CrossTransformers: spatially-aware few-shot transfer" (2020), sec. 3.2,
        without its linear heads. https://arxiv.org/abs/2007.11498
    """
    support, query = reshape_to_positions(episodes)
    n_positions, channels = query.shape[2:]
    support, query = support.flatten(1, 2), query.flatten(1, 2)  # (episodes, rows * positions, channels)
    labels = episodes.support_labels.repeat_interleave(n_positions, dim=1)
    hot = one_hot(labels, episodes.n_way, query.dtype)  # (episodes, n_support * positions, n_way)
    inner = query @ support.transpose(1, 2)
    # A softmax over the positions of each class: every column is of one class.
    logits = inner / (channels**0.5 if temperature is None else temperature)
    index = labels[:, None].expand_as(logits)
    largest = logits.new_full((*query.shape[:2], episodes.n_way), -torch.inf).scatter_reduce(2, index, logits, "amax")
    attention = (logits - largest.gather(2, index)).exp()
    attention = attention / (attention @ hot).gather(2, index)
    # Squared distances to the means, from inner products.
    within = support @ support.transpose(1, 2) * (hot @ hot.transpose(1, 2))
    size = (attention @ within - 2 * inner) * attention @ hot  # (episodes, n_queries * positions, n_way)
    distances: Tensor = query.square().sum(dim=2, keepdim=True) + size
    return -distances.view(*episodes.query.shape[:2], n_positions, -1).mean(dim=2).to(episodes.query.dtype)


def deepbdc(episodes: Episodes, *, scale: Positive | None = None) -> Tensor:
    """Classify by prototypes of feature maps that are represented by Brownian distance covariances of their channels.

    Each channel is a vector over the positions. Distances between channels, centred along rows and columns of their
    matrix, are the covariances. As in the authors' code for ResNet-12, channels are not reduced by a trained layer. At
    one shot the logits are inner products, otherwise minus squared distances to the class means, as in the code.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating, which are flattened
            feature maps of the shape ``episodes.shape``.
        scale: > 0, the factor on squared distances between channels. The paper learns it; None takes the paper's
            initial value, 1 over twice the number of positions.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: The rows are not feature maps: the episodes have no shape.

    Source: Xie, Long, Lv, Wang and Li, "Joint distribution matters: deep Brownian distance covariance for few-shot
        classification" (2022), sec. 3. https://arxiv.org/abs/2204.04567
    """
    support, query = reshape_to_positions(episodes)
    channels = support.shape[3]
    n_covariances = channels * (channels + 1) // 2  # of a row
    max_episodes = max(1, COVARIANCES_PER_BLOCK // (n_covariances * support.shape[1]))
    max_queries = max(1, COVARIANCES_PER_BLOCK // (n_covariances * max_episodes))
    one_shot = support.shape[1] == episodes.n_way
    logits = []
    blocks = (tensor.split(max_episodes) for tensor in (support, query, episodes.support_labels))
    for some_support, some_query, labels in zip(*blocks, strict=True):
        covariances = _compute_covariances(some_support, scale).to(episodes.support)
        prototypes = support_means(replace(episodes, support=covariances, support_labels=labels))
        logits_of_block = []
        for some in some_query.split(max_queries, dim=1):
            rows = _compute_covariances(some, scale).to(episodes.query)
            similarities = rows @ prototypes.transpose(1, 2) if one_shot else -squared_distances(rows, prototypes)
            logits_of_block.append(similarities)
        logits.append(torch.cat(logits_of_block, dim=1))
    return torch.cat(logits)


def _compute_covariances(maps: Tensor, scale: float | None) -> Tensor:
    """Compute Brownian distance covariances of channels of feature maps (episodes, n, positions, channels).

    The result (episodes, n, pairs) has each pair of channels once. ``scale`` is a factor on squared distances.
    """
    n_positions, channels = maps.shape[2:]
    factor = 1 / (2 * n_positions) if scale is None else scale
    first, second = torch.triu_indices(channels, channels, device=maps.device)
    matrices = []
    for some in maps.flatten(0, 1).split(max(1, DISTANCES_PER_BLOCK // channels**2)):
        gram = some.transpose(1, 2) @ some  # (rows, channels, channels)
        norms = gram.diagonal(dim1=1, dim2=2)
        squares = (norms[:, :, None] + norms[:, None, :] - 2 * gram).clamp_min(0)
        distances = (factor * squares + DISTANCE_OFFSET).sqrt()
        means = distances.mean(dim=2, keepdim=True)
        centred = distances - means - means.transpose(1, 2) + means.mean(dim=1, keepdim=True)
        matrices.append(centred[:, first, second])
    covariances: Tensor = torch.cat(matrices).unflatten(0, maps.shape[:2])
    return covariances
