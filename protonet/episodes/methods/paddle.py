"""PADDLE: soft k-means in which few classes are preferred to many, by the length of their description."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protonet.episodes.methods.common import one_hot, squared_distances, support_means
from protonet.episodes.methods.keywords import NonNegative, Positive, PositiveCount
from protonet.episodes.samplers.batch import Episodes

MIN_FRACTION = 1e-6  #: Added to the classes' shares of the queries before the logarithm, as in the authors' code.


def paddle(
    episodes: Episodes,
    *,
    lambda_: NonNegative | None = None,
    n_steps: PositiveCount = 100,
    temperature: Positive = 1.0,
    scaled: bool = True,
) -> Tensor:
    """Classify by prototypes refined by the queries, where a class of few queries costs as its share's logarithm.

    For queries of a few of the many classes in the support. The paper has no temperature, so that how
    sharp assignments are depends on the features' number and spread: with a few dozen of them, one class may get all.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        lambda_: The weight of the classes' partition, >= 0; None for the number of queries, so that the logarithms of
            the shares are added as they are. The authors' code: 75, as many as its queries; 0 is soft k-means.
        n_steps: Updates of assignments, shares and prototypes, >= 1. The authors' code: 100.
        temperature: > 0, divides half the squared distances. The paper has none: 1.
        scaled: Divide each feature by its range over the episode's queries, as the authors' code does.

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
            dual = (assigned.mean(dim=2, keepdim=True) + MIN_FRACTION).log()
            prototypes = (sums + assigned @ episodes.query) / (count + assigned.sum(dim=2, keepdim=True))
    return logits.transpose(1, 2)
