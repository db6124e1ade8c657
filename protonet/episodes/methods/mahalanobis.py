"""The Mahalanobis distance to class means, each class with a covariance shrunk to the episode's."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import one_hot, reduce_to_span


def mahalanobis(episodes: Episodes, *, ridge: float = 1.0) -> Tensor:
    """Classify by half the squared Mahalanobis distance to the class means.

    The covariance of a class of n rows is n / (n + 1) its own, zero for a single row, and 1 / (n + 1) that of all
    support rows, plus the ridge; covariances divide by their rows less one.

    Args:
        episodes: Supports and queries, (episodes, rows, dim).
        ridge: The paper's beta, > 0, times the identity; more where the features' rounding errors are larger than that.

    Returns:
        Logits (episodes, n_queries, n_way): minus half the distances in the span of the support rows. What a query has
        outside it costs every class the same and is left out.

    Source: Bateni, Goyal, Masrani, Wood and Sigal, "Improved few-shot visual classification" (2020), eqs. 2 and 3.
        https://arxiv.org/abs/1912.03432
    """
    # In float64: the ridge is one whatever the features' scale, and float32 would lose it beside their squares.
    support, query = project_to_span(episodes.support.double(), episodes.query.double())
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype).transpose(1, 2)
    count = hot.sum(dim=2, keepdim=True)  # (episodes, n_way, 1)
    means = hot @ support / count  # (episodes, n_way, dim)
    n_support, dim = support.shape[1:]
    own = count / (count + 1)  # lambda
    within = support[:, None] - means[:, :, None]  # (episodes, n_way, n_support, dim)
    within = within * ((own / (count - 1).clamp_min(1)).sqrt() * hot)[..., None]
    centred = support - support.mean(dim=1, keepdim=True)
    task = centred.transpose(1, 2) @ centred / (n_support - 1)
    covariance = within.transpose(2, 3) @ within + (1 - own)[..., None] * task[:, None]  # (episodes, n_way, dim, dim)
    trace = covariance.diagonal(dim1=2, dim2=3).sum(dim=2)[..., None]
    least = (4 * torch.finfo(support.dtype).eps * trace).clamp_min(ridge)  # rounding hides a smaller ridge
    factor = torch.linalg.cholesky(covariance + torch.diag_embed(least.expand(-1, -1, dim)))
    away = (query[:, None] - means[:, :, None]).transpose(2, 3)  # (episodes, n_way, dim, n_queries)
    whitened: Tensor = torch.linalg.solve_triangular(factor, away, upper=False)
    return -0.5 * whitened.square().sum(dim=2).transpose(1, 2).to(episodes.query.dtype)


def project_to_span(support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return support and query rows in coordinates of the support rows' span, their inner products the same.

    Args:
        support: (episodes, n_support, dim).
        query: (episodes, n_queries, dim).

    Returns:
        (episodes, n_support, k) and (episodes, n_queries, k), k = min(n_support, dim).
    """
    span = reduce_to_span(support)
    if span is support:
        return support, query
    products = support @ query.transpose(1, 2)  # (episodes, n_support, n_queries)
    return span, torch.linalg.solve_triangular(span, products, upper=False).transpose(1, 2)
