"""TIM, by gradients and by alternating directions, and alpha-TIM: mutual information of queries and their labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from protonet.episodes.methods.common import adam, adaptation_gradient, one_hot, unit_rows
from protonet.episodes.methods.keywords import Count, NonNegative, Positive, PositiveFraction, SearchSpace
from protonet.episodes.samplers.batch import Episodes


@dataclass(frozen=True)
class TunedAlpha:
    """The values of alpha-TIM's alpha by shots, from the authors' code."""

    one_shot: float = 2  #: For one support row per class.
    few_shots: float = 5  #: Between one and five.
    five_shots: float = 7  #: For five or more.


TUNED_ALPHA = TunedAlpha()


def tim(
    episodes: Episodes,
    *,
    weights: tuple[NonNegative, NonNegative, NonNegative] = (0.1, 1.0, 0.1),
    temperature: Positive = 1 / 15,
    learning_rate: Positive = 1e-4,
    steps: Count = 1000,
) -> Tensor:
    """Classify by prototypes that maximise the mutual information of queries and labels (TIM-GD).

    Adam's steps depend on the coordinates, so they are taken in those of the features. In coordinates of the rows' span
    1,000 steps take a quarter of the time, but on raw pixels 6 to 10 % of the predictions change and accuracy falls by
    up to 3 points; on learned embeddings almost nothing changes. The defaults are those of the authors' code for
    balanced queries (src/tim.py, scripts/evaluate/tim_gd); `tim_dirichlet` has those for unbalanced ones.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        weights: Of the support's cross-entropy, the queries' marginal entropy and their conditional entropy, >= 0.
        temperature: > 0, divides half the squared distances.
        learning_rate: Adam's, > 0.
        steps: Adam's, >= 0.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus half the squared distances to the
        prototypes over the temperature, up to a constant that all queries and classes share.

    Source: Boudiaf et al., "Transductive information maximization for few-shot learning" (2020), eqs. 1 to 4.
        https://arxiv.org/abs/2008.11297
    """
    return alpha_tim(
        episodes, alpha=1, weights=weights, temperature=temperature, learning_rate=learning_rate, steps=steps
    )


def tim_dirichlet(episodes: Episodes) -> Tensor:
    """Classify as `tim` does, with equal weights of all terms, as for unbalanced queries.

    Balanced queries are pushed for with ten times the weight in `tim`, which costs it dearly where they are not.

    Source: Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), the configuration
        dirichlet/tim.yaml of its code. https://arxiv.org/abs/2204.11181
    """
    return tim(episodes, weights=(1.0, 1.0, 1.0))


def alpha_tim(
    episodes: Episodes,
    *,
    alpha: Positive | None = None,
    weights: tuple[NonNegative, NonNegative, NonNegative] = (1.0, 1.0, 1.0),
    temperature: Positive = 1 / 15,
    learning_rate: Positive = 1e-4,
    steps: Count = 1000,
) -> Tensor:
    """Classify as `tim` does, with alpha-entropies, which push the queries' labels less towards balance.

    The defaults are those of the authors' code, the same for balanced and unbalanced queries (alpha_tim.yaml).

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        alpha: Of both entropies, > 0; None for the value of `TunedAlpha`.
        weights: Of the support's cross-entropy (Shannon's), the queries' marginal and their conditional entropy, >= 0.
        temperature: > 0, divides half the squared distances.
        learning_rate: Adam's, > 0.
        steps: Adam's, >= 0.

    Returns:
        Logits (episodes, n_queries, n_way), as in `tim`.

    Source: Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), eqs. 5 to 8.
        https://arxiv.org/abs/2204.11181
    """
    if alpha is None:
        shots = episodes.support.shape[1] / episodes.n_way
        tuned = TUNED_ALPHA
        alpha = tuned.one_shot if shots <= 1 else tuned.five_shots if shots >= 5 else tuned.few_shots
    n_support = episodes.support.shape[1]
    rows = unit_rows(episodes)
    labels = one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2)
    means = (labels / labels.sum(dim=2, keepdim=True)) @ rows[:, :n_support]

    def logits(prototypes: Tensor) -> Tensor:  # eq. 1, without the rows' squares, which are all 1
        squares = prototypes.square().sum(dim=2, keepdim=True)
        return torch.baddbmm(squares, prototypes, rows.transpose(1, 2), beta=-0.5 / temperature, alpha=1 / temperature)

    def gradient(prototypes: Tensor) -> Tensor:
        g = adaptation_gradient(logits(prototypes).log_softmax(dim=1), labels, weights, alpha=alpha) / temperature
        return torch.baddbmm(g.sum(dim=2, keepdim=True) * prototypes, g, rows, beta=-1)

    prototypes = adam(means, gradient, learning_rate=learning_rate, steps=steps)
    return logits(prototypes)[..., n_support:].transpose(1, 2)


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
