"""TIM-ADM: TIM's prototypes by alternating directions, in a few closed-form steps instead of gradients."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from protonet.episodes.methods.adaptation import unit_rows
from protonet.episodes.methods.common import one_hot
from protonet.episodes.methods.keywords import Count, Positive, PositiveFraction, SearchSpace
from protonet.episodes.samplers.batch import Episodes


def tim_adm(
    episodes: Episodes,
    *,
    weights: Annotated[tuple[Positive, Positive, Positive], SearchSpace(((0.1, 1.0, 0.1), (1.0, 1.0, 1.0)))] = (
        0.1,
        1.0,
        0.1,
    ),
    temperature: Positive = 1 / 15,
    steps: Count = 150,
    step_size: PositiveFraction = 1.0,
) -> Tensor:
    """Classify by prototypes that maximise the mutual information of queries and labels, by alternating directions.

    A step labels the queries in part, then moves the prototypes. Defaults are those of the authors'
    code for balanced queries (src/tim.py, scripts/evaluate/tim_adm).

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        weights: Of the support's cross-entropy, > 0, of the queries' marginal entropy and of their conditional one.
        temperature: > 0, divides half the squared distances.
        steps: >= 0.
        step_size: Share of the way to the new prototypes that a step takes, in (0, 1].

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus half the squared distances to the
        prototypes over the temperature, up to a constant that all queries and classes share.

    Source: Boudiaf et al., "Transductive information maximization for few-shot learning" (2020), prop. 1,
        https://arxiv.org/abs/2008.11297, with the exponents of its code: 1 + the conditional entropy's weight, and the
        marginal one's over itself plus 1.
    """
    cross, marginal, conditional = weights
    n_support, n_queries = episodes.support.shape[1], episodes.query.shape[1]
    rows = unit_rows(episodes)
    labels = one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2)
    prototypes = (labels / labels.sum(dim=2, keepdim=True)) @ rows[:, :n_support]
    of_support, of_query = cross / (1 + conditional), n_support / n_queries

    def logits(prototypes: Tensor) -> Tensor:  # without the rows' squares, which are all 1
        squares = prototypes.square().sum(dim=2, keepdim=True)
        return torch.baddbmm(squares, prototypes, rows.transpose(1, 2), beta=-0.5 / temperature, alpha=1 / temperature)

    for _ in range(steps):
        log_p = logits(prototypes).log_softmax(dim=1)  # (episodes, n_way, rows)
        raised = (1 + conditional) * log_p[..., n_support:]
        total = raised.logsumexp(dim=2, keepdim=True)  # (episodes, n_way, 1)
        guess = (raised - marginal / (marginal + 1) * total).softmax(dim=1)
        target = torch.cat([of_support * labels, of_query * guess], dim=2)
        p = log_p.exp()
        p = torch.cat([of_support * p[..., :n_support], of_query * p[..., n_support:]], dim=2)
        pull = (target - p) @ rows + p.sum(dim=2, keepdim=True) * prototypes
        prototypes = prototypes.lerp(pull / target.sum(dim=2, keepdim=True), step_size)
    return logits(prototypes)[..., n_support:].transpose(1, 2)
