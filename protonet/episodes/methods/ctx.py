"""CrossTransformers: each place of a query's map beside what the places of a class's maps that are like it show."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.episodes.methods.common import one_hot, split_positions
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes


def cross_transformers(episodes: Episodes, *, temperature: Positive | None = None) -> Tensor:
    """Classify by the distance between a query's places and the mixtures of a class's places that attend to them.

    The paper trains two linear maps of features together with the encoder, to keys and to values. Here features are
    keys and values themselves, which needs no training.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating, and their shape.
        temperature: > 0, divides the inner products of places that attention is the softmax of; None for the paper's
            square root of the channels.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: The rows are not maps.

    Source: Doersch, Gupta and Zisserman, "CrossTransformers: spatially-aware few-shot transfer" (2020), sec. 3.2,
        without its linear heads. https://arxiv.org/abs/2007.11498
    """
    support, query = split_positions(episodes)
    n_positions, channels = query.shape[2:]
    support, query = support.flatten(1, 2), query.flatten(1, 2)  # (episodes, rows * places, channels)
    labels = episodes.support_labels.repeat_interleave(n_positions, dim=1)
    hot = one_hot(labels, episodes.n_way, query.dtype)  # (episodes, n_support * places, n_way)
    inner = query @ support.transpose(1, 2)
    # A softmax over the places of each class: every column is of one class.
    logits = inner / (channels**0.5 if temperature is None else temperature)
    index = labels[:, None].expand_as(logits)
    largest = logits.new_full((*query.shape[:2], episodes.n_way), -torch.inf).scatter_reduce(2, index, logits, "amax")
    attention = (logits - largest.gather(2, index)).exp()
    attention = attention / (attention @ hot).gather(2, index)
    # Squared distances to mixtures, by inner products alone.
    within = support @ support.transpose(1, 2) * (hot @ hot.transpose(1, 2))
    size = (attention @ within - 2 * inner) * attention @ hot  # (episodes, n_queries * places, n_way)
    distances: Tensor = query.square().sum(dim=2, keepdim=True) + size
    return -distances.view(*episodes.query.shape[:2], n_positions, -1).mean(dim=2).to(episodes.query.dtype)
