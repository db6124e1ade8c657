"""Methods that minimise losses of support labels and query entropies: TIM, alpha-TIM, TIM-ADM, fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import join_unit_rows, minimize_by_adam, one_hot
from protonet.episodes.methods.keywords import Count, NonNegative, Positive, PositiveFraction, SearchSpace
from protonet.episodes.samplers.batch import Episodes


def adaptation_gradient(
    log_p: Tensor, labels: Tensor, weights: tuple[float, float, float], *, alpha: float = 1
) -> Tensor:
    """Compute the gradient, with respect to logits, of ``cross * CE - marginal * H(Y) + conditional * H(Y|X)``.

    CE is the mean cross-entropy of the support, H(Y) the entropy of the queries' mean probabilities, H(Y|X) the mean
    entropy of the queries. Entropies are (1 - sum p^alpha) / (alpha - 1), or Shannon's if alpha is 1.

    Args:
        log_p: (episodes, n_way, n_support + n_queries), log-probabilities, support first.
        labels: (episodes, n_way, n_support), one-hot.
        weights: The weights of the three terms: cross, marginal and conditional.
        alpha: The parameter alpha of both entropies, > 0.

    Returns:
        The gradient (episodes, n_way, n_support + n_queries).

    Source: Boudiaf et al., "Transductive information maximization for few-shot learning" (2020), eqs. 2 to 4,
        https://arxiv.org/abs/2008.11297; for alpha Veilleux et al., "Realistic evaluation of transductive few-shot
        learning" (2021), eqs. 5 to 8, https://arxiv.org/abs/2204.11181.
    """
    cross, marginal, conditional = weights
    n_support = labels.shape[2]
    p = log_p.exp()
    of_support, of_query, log_p = p[..., :n_support], p[..., n_support:], log_p[..., n_support:]
    mean = of_query.mean(dim=2, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    if alpha == 1:
        u = marginal * mean.log() - conditional * log_p
    else:
        u = (marginal * mean.pow(alpha - 1) - conditional * (log_p * (alpha - 1)).exp()) * (alpha / (alpha - 1))
    # With the derivative u by a query's probabilities p, the derivative by its logits is p (u - sum p u).
    pu = of_query * u / of_query.shape[2]
    by_query = torch.addcmul(pu, of_query, pu.sum(dim=1, keepdim=True), value=-1)
    return torch.cat([(of_support - labels) * (cross / n_support), by_query], dim=2)


@dataclass(frozen=True)
class AlphaTimDefaults:
    """The defaults of `alpha_tim` for alpha, by the number of support rows per class, from the authors' code."""

    one_shot: float = 2  #: For one support row per class.
    few_shots: float = 5  #: For more than one and fewer than five support rows per class, on average.
    five_shots: float = 7  #: For five or more support rows per class, on average.


ALPHA_TIM_DEFAULTS = AlphaTimDefaults()


def tim(
    episodes: Episodes,
    *,
    weights: tuple[NonNegative, NonNegative, NonNegative] = (0.1, 1.0, 0.1),
    temperature: Positive = 1 / 15,
    learning_rate: Positive = 1e-4,
    steps: Count = 1000,
) -> Tensor:
    """Classify by prototypes that maximise the mutual information of queries and labels (TIM-GD).

    Adam optimises the prototypes in the coordinates of the features. In coordinates of the rows' span, 1,000 steps take
    a quarter of the time, but on raw pixels 6 to 10 % of the predictions change and accuracy falls by up to 3 points.
    The defaults are
    those of the authors' code for balanced queries (src/tim.py, scripts/evaluate/tim_gd); `tim_dirichlet` is for
    unbalanced queries.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        weights: Weights of the support's cross-entropy, the queries' marginal entropy and their conditional entropy,
            >= 0.
        temperature: > 0, divides half the squared distances.
        learning_rate: The learning rate of Adam, > 0.
        steps: Steps of Adam, >= 0.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus half the squared distances to the
        prototypes over the temperature, up to a common constant.

    Source: Boudiaf et al., "Transductive information maximization for few-shot learning" (2020), eqs. 1 to 4.
        https://arxiv.org/abs/2008.11297
    """
    return alpha_tim(
        episodes, alpha=1, weights=weights, temperature=temperature, learning_rate=learning_rate, steps=steps
    )


def tim_dirichlet(episodes: Episodes) -> Tensor:
    """Classify as `tim` does, with equal weights of all terms, for unbalanced queries.

    In `tim` the term for balanced predictions has ten times the weight of the others, which makes it far less accurate
    on unbalanced queries.

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
    """Classify as `tim` does, with alpha-entropies, which favour balanced predictions less.

    The defaults are those of the authors' code, the same for balanced and unbalanced queries (alpha_tim.yaml).

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        alpha: The parameter alpha of the marginal and the conditional entropy, > 0; 1 gives Shannon's entropies. None
            takes the value of `AlphaTimDefaults`.
        weights: Weights of the support's cross-entropy, the queries' marginal entropy and their conditional entropy,
            >= 0.
        temperature: > 0, divides half the squared distances.
        learning_rate: The learning rate of Adam, > 0.
        steps: Steps of Adam, >= 0.

    Returns:
        Logits (episodes, n_queries, n_way), as in `tim`.

    Source: Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), eqs. 5 to 8.
        https://arxiv.org/abs/2204.11181
    """
    if alpha is None:
        shots = episodes.support.shape[1] / episodes.n_way
        tuned = ALPHA_TIM_DEFAULTS
        alpha = tuned.one_shot if shots <= 1 else tuned.five_shots if shots >= 5 else tuned.few_shots
    rows, labels, means = _prepare_rows(episodes)

    def gradient(prototypes: Tensor) -> Tensor:
        log_p = _compute_logits(prototypes, rows, temperature).log_softmax(dim=1)
        g = adaptation_gradient(log_p, labels, weights, alpha=alpha) / temperature
        return torch.baddbmm(g.sum(dim=2, keepdim=True) * prototypes, g, rows, beta=-1)

    prototypes = minimize_by_adam(means, gradient, learning_rate=learning_rate, steps=steps)
    return _compute_logits(prototypes, rows, temperature)[..., labels.shape[2] :].transpose(1, 2)


def _prepare_rows(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor]:
    """Scale rows to unit norm, and compute class means.

    Returns:
        rows: (episodes, n_support + n_queries, dim), support first.
        labels: (episodes, n_way, n_support), the one-hot labels of the support.
        means: (episodes, n_way, dim), the class means of the support.
    """
    rows = join_unit_rows(episodes)
    labels = one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2)
    return rows, labels, (labels / labels.sum(dim=2, keepdim=True)) @ rows[:, : labels.shape[2]]


def _compute_logits(prototypes: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Compute logits (episodes, n_way, rows) by TIM's eq. 1, without the squared norms of the rows, which are 1."""
    squares = prototypes.square().sum(dim=2, keepdim=True)
    return torch.baddbmm(squares, prototypes, rows.transpose(1, 2), beta=-0.5 / temperature, alpha=1 / temperature)


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

    A step assigns soft labels to the queries, then moves the prototypes. Defaults are those of the authors' code for
    balanced queries (src/tim.py, scripts/evaluate/tim_adm).

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        weights: Weights of the support's cross-entropy, the queries' marginal entropy and their conditional entropy,
            > 0.
        temperature: > 0, divides half the squared distances.
        steps: The number of steps, >= 0.
        step_size: The fraction of the way to the new prototypes that a step takes, in (0, 1].

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus half the squared distances to the
        prototypes over the temperature, up to a common constant.

    Source: Boudiaf et al., "Transductive information maximization for few-shot learning" (2020), prop. 1,
        https://arxiv.org/abs/2008.11297, with the exponents of its code: 1 plus the conditional entropy's weight, and
        the marginal entropy's weight over 1 plus this weight.
    """
    cross, marginal, conditional = weights
    n_support, n_queries = episodes.support.shape[1], episodes.query.shape[1]
    rows, labels, prototypes = _prepare_rows(episodes)
    support_weight, query_weight = cross / (1 + conditional), n_support / n_queries
    for _ in range(steps):
        log_p = _compute_logits(prototypes, rows, temperature).log_softmax(dim=1)  # (episodes, n_way, rows)
        raised = (1 + conditional) * log_p[..., n_support:]
        total = raised.logsumexp(dim=2, keepdim=True)  # (episodes, n_way, 1)
        soft_labels = (raised - marginal / (marginal + 1) * total).softmax(dim=1)
        target = torch.cat([support_weight * labels, query_weight * soft_labels], dim=2)
        p = log_p.exp()
        p = torch.cat([support_weight * p[..., :n_support], query_weight * p[..., n_support:]], dim=2)
        numerator = (target - p) @ rows + p.sum(dim=2, keepdim=True) * prototypes
        prototypes = prototypes.lerp(numerator / target.sum(dim=2, keepdim=True), step_size)
    return _compute_logits(prototypes, rows, temperature)[..., n_support:].transpose(1, 2)


def transductive_finetune(
    episodes: Episodes, *, temperature: Positive = 1, learning_rate: Positive = 5e-5, steps: Count = 25
) -> Tensor:
    """Classify by a linear layer trained on the support's cross-entropy plus the queries' entropy.

    The paper trains the whole network. Here only the linear layer is trained, and it changes little at the paper's
    learning rate. If features have a common mean, cosines differ even less, and the method is hardly better than
    chance.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        temperature: > 0, divides the logits. The paper has no temperature.
        learning_rate: The learning rate of Adam, > 0. The paper uses 5e-5.
        steps: Steps of Adam, >= 0. The paper uses 25.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Dhillon et al., "A baseline for few-shot image classification" (2020), support-based initialisation and
        eq. 8. https://arxiv.org/abs/1909.02729
    """
    n_support = episodes.support.shape[1]
    rows = join_unit_rows(episodes)
    labels = one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2)
    imprinted = F.normalize(labels @ rows[:, :n_support], dim=2)
    # The bias is the weight of an added feature that is always 1.
    rows, imprinted = F.pad(rows, (0, 1), value=1), F.pad(imprinted, (0, 1))

    def logits(layer: Tensor) -> Tensor:
        return layer @ rows.transpose(1, 2) / temperature  # (episodes, n_way, rows)

    def gradient(layer: Tensor) -> Tensor:
        return adaptation_gradient(logits(layer).log_softmax(dim=1), labels, (1, 0, 1)) @ rows / temperature

    layer = minimize_by_adam(imprinted, gradient, learning_rate=learning_rate, steps=steps)
    return logits(layer)[..., n_support:].transpose(1, 2)
