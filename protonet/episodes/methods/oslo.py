"""OSLO: prototypes refined by those queries that seem to be of the episode's classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import cosines, one_hot
from protonet.episodes.methods.keywords import Positive, PositiveCount
from protonet.episodes.samplers.batch import Episodes


def oslo(
    episodes: Episodes, *, steps: PositiveCount = 2, inlier_temperature: Positive = 0.05, temperature: Positive = 0.1
) -> Tensor:
    """Classify by the cosine to prototypes in which queries count as far as they seem to belong to any class.

    Made for episodes with open classes: the highest logit of a query is the logit of how much it is an inlier.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are centred on
            the mean of both, then scaled to unit norm.
        steps: Updates, >= 1. The authors' code: 2.
        inlier_temperature: The paper's lambda of the scores' entropy, > 0, divides the cosines of inlier scores.
            The authors' code: 0.05.
        temperature: The paper's lambda of the labels' entropy, > 0, divides the cosines of the assignments. The
            authors' code: 0.1.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: cosines over the temperature, shifted per
        query.

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
