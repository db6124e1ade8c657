"""What methods share that train on the queries' confidence: the loss's gradient in closed form, and Adam."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from protonet.episodes.batch import Episodes


def unit_rows(episodes: Episodes) -> Tensor:
    """Return supports and queries, scaled to norm 1: (episodes, n_support + n_queries, dim)."""
    rows = torch.cat([episodes.support, episodes.query], dim=1)
    return rows.div_(torch.linalg.vector_norm(rows, dim=2, keepdim=True).clamp_min_(1e-12))


def adaptation_gradient(
    log_p: Tensor, labels: Tensor, weights: tuple[float, float, float], *, alpha: float = 1
) -> Tensor:
    """Return the gradient by the logits of the loss ``cross * CE - marginal * H(Y) + conditional * H(Y|X)``.

    CE is the supports' mean cross-entropy, H(Y) the entropy of the queries' mean probabilities, H(Y|X) the mean of
    their entropies. If u is the loss's derivative by a query's probabilities p, that by its logits is p (u - sum p u).

    Args:
        log_p: (episodes, n_way, n_support + n_queries) log-probabilities, supports first.
        labels: (episodes, n_way, n_support) of zeros and ones.
        weights: Cross, marginal and conditional.
        alpha: > 0, of the entropies (1 - sum p^alpha) / (alpha - 1); Shannon's at 1.

    Returns:
        The shape of ``log_p``.

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
    """Return the weights after some steps of Adam.

    Args:
        weights: Where to start, of any shape.
        gradient: From weights to the loss's gradient, of the same shape.
        learning_rate: > 0.
        steps: >= 0.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1, with its settings.
        https://arxiv.org/abs/1412.6980
    """
    weights, first, second = weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(1, steps + 1):
        g = gradient(weights)
        first.lerp_(g, 0.1)
        second.mul_(0.999).addcmul_(g, g, value=0.001)
        spread = (second / (1 - 0.999**step)).sqrt_().add_(1e-8)
        weights.addcdiv_(first, spread, value=-learning_rate / (1 - 0.9**step))
    return weights
