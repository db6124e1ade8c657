"""The Mahalanobis distance to class means, each class with a covariance shrunk towards the episode's."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.episodes.methods.common import one_hot, reduce_to_span
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes

#: The ridge is at least this many machine epsilons of the covariance's trace: rounding would hide a smaller one.
MIN_RIDGE = 4


def mahalanobis(episodes: Episodes, *, ridge: Positive = 1.0) -> Tensor:
    """Classify by half the squared Mahalanobis distance to the class means.

    The covariance of a class of n rows is n / (n + 1) times its own, which is zero for a single row, plus 1 / (n + 1)
    times that of all support rows, plus the ridge. Covariances divide by the number of rows minus one.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        ridge: The factor of the identity, > 0, the paper's beta, 1 there; more where rounding errors exceed it.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus half the distances within the span of
        the support rows. The part of a query outside it is equally far from every class and left out.

    Source: Bateni, Goyal, Masrani, Wood and Sigal, "Improved few-shot visual classification" (2020), eqs. 2 and 3.
        https://arxiv.org/abs/1912.03432
    """
    # In float64: the ridge is 1 at any scale of the features, and float32 would lose it beside large squares.
    support, query = project_to_span(episodes.support.double(), episodes.query.double())
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype).transpose(1, 2)
    count = hot.sum(dim=2, keepdim=True)  # (episodes, n_way, 1)
    means = hot @ support / count  # (episodes, n_way, dim)
    n_support, dim = support.shape[1:]
    class_weight = count / (count + 1)  # lambda
    within = support[:, None] - means[:, :, None]  # (episodes, n_way, n_support, dim)
    within = within * ((class_weight / (count - 1).clamp_min(1)).sqrt() * hot)[..., None]
    centred = support - support.mean(dim=1, keepdim=True)
    task = centred.transpose(1, 2) @ centred / (n_support - 1)
    # (episodes, n_way, dim, dim)
    covariance = within.transpose(2, 3) @ within + (1 - class_weight)[..., None] * task[:, None]
    trace = covariance.diagonal(dim1=2, dim2=3).sum(dim=2)[..., None]
    min_ridge = (MIN_RIDGE * torch.finfo(support.dtype).eps * trace).clamp_min(ridge)
    factor = torch.linalg.cholesky(covariance + torch.diag_embed(min_ridge.expand(-1, -1, dim)))
    away = (query[:, None] - means[:, :, None]).transpose(2, 3)  # (episodes, n_way, dim, n_queries)
    whitened: Tensor = torch.linalg.solve_triangular(factor, away, upper=False)
    return -0.5 * whitened.square().sum(dim=2).transpose(1, 2).to(episodes.query.dtype)


def project_to_span(support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Project support and query rows to the span of the support rows, keeping inner products with support rows.

    Rows (episodes, n, dim) become rows (episodes, n, k) with k = min(n_support, dim).
    """
    span = reduce_to_span(support)
    if span is support:
        return support, query
    products = support @ query.transpose(1, 2)  # (episodes, n_support, n_queries)
    return span, torch.linalg.solve_triangular(span, products, upper=False).transpose(1, 2)
