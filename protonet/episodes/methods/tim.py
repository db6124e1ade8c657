"""TIM and alpha-TIM: prototypes that maximise the mutual information of queries and their labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protonet.episodes.methods.adaptation import adam, adaptation_gradient, unit_rows
from protonet.episodes.methods.common import one_hot
from protonet.episodes.methods.keywords import Count, NonNegative, Positive
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
