"""Gradient descent on queries, shared by transductive methods: the loss's gradient in closed form, and Adam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from protonet.episodes.methods.keywords import NonNegative, Positive
from protonet.episodes.samplers.batch import Episodes


@dataclass(frozen=True)
class Adam:
    """Adam's constants, those of the paper: Kingma and Ba (2015), algorithm 1.

    The differences to 1 are constants, because 1 - 0.9 is not 0.1 in floating point.
    """

    beta1: float = 0.9  #: Decay of the average gradient per step.
    one_minus_beta1: float = 0.1  #: 1 - beta1.
    beta2: float = 0.999  #: Decay of the average squared gradient per step.
    one_minus_beta2: float = 0.001  #: 1 - beta2.
    epsilon: float = 1e-8  #: Added to the root of the average squared gradient.


ADAM = Adam()
MIN_NORM = 1e-12  #: Rows are divided by this norm at least.


def unit_rows(episodes: Episodes) -> Tensor:
    """Return support and query rows scaled to unit norm, (episodes, n_support + n_queries, dim)."""
    rows = torch.cat([episodes.support, episodes.query], dim=1)
    return rows.div_(torch.linalg.vector_norm(rows, dim=2, keepdim=True).clamp_min_(MIN_NORM))


def adaptation_gradient(
    log_p: Tensor, labels: Tensor, weights: tuple[NonNegative, NonNegative, NonNegative], *, alpha: Positive = 1
) -> Tensor:
    """Compute the gradient, with respect to logits, of ``cross * CE - marginal * H(Y) + conditional * H(Y|X)``.

    CE is the mean cross-entropy of the support, H(Y) the entropy of the queries' mean probabilities, H(Y|X) the mean
    entropy of the queries. If u is the derivative of the loss with respect to a query's probabilities p, then that with
    respect to its logits is p (u - sum p u).

    Args:
        log_p: (episodes, n_way, n_support + n_queries) log-probabilities, support first.
        labels: (episodes, n_way, n_support), zeros and ones, the dtype of ``log_p``.
        weights: Cross, marginal and conditional, >= 0.
        alpha: > 0, of the entropies (1 - sum p^alpha) / (alpha - 1); 1 for Shannon entropies.

    Returns:
        (episodes, n_way, n_support + n_queries), the dtype of ``log_p``.

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
    pu = of_query * u / of_query.shape[2]
    by_query = torch.addcmul(pu, of_query, pu.sum(dim=1, keepdim=True), value=-1)
    return torch.cat([(of_support - labels) * (cross / n_support), by_query], dim=2)


def adam(weights: Tensor, gradient: Callable[[Tensor], Tensor], *, learning_rate: float, steps: int) -> Tensor:
    """Take some steps of Adam.

    Args:
        weights: The initial weights, of any shape, floating.
        gradient: Maps weights to the loss's gradient, of the same shape.
        learning_rate: > 0.
        steps: >= 0.

    Returns:
        The weights after the steps, of the same shape.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1, with its settings.
        https://arxiv.org/abs/1412.6980
    """
    weights, first, second = weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(1, steps + 1):
        g = gradient(weights)
        first.lerp_(g, ADAM.one_minus_beta1)
        second.mul_(ADAM.beta2).addcmul_(g, g, value=ADAM.one_minus_beta2)
        spread = (second / (1 - ADAM.beta2**step)).sqrt_().add_(ADAM.epsilon)
        weights.addcdiv_(first, spread, value=-learning_rate / (1 - ADAM.beta1**step))
    return weights
