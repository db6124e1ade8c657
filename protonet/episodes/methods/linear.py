"""Classifiers that are fitted to convergence: ridge and logistic regression, and the Mahalanobis distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import cosines, one_hot, reduce_to_span
from protonet.episodes.methods.keywords import Positive, SearchSpace
from protonet.episodes.samplers.batch import Episodes

#: Minimum ridge of `mahalanobis`, in machine epsilons times the trace of the covariance. A smaller ridge would be lost
#: by rounding.
MIN_RIDGE_IN_EPSILONS = 4


def ridge_regression(
    episodes: Episodes, *, penalty: Positive = 1.0, scale: Positive = 10.0, shift: float = 0.0
) -> Tensor:
    """Classify by ridge regression from rows of unit norm, with a bias feature, to the one-hot labels.

    The paper learns the three settings together with the encoder. The defaults and the unit norm are our own choice,
    for encoders that were not trained with them.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        penalty: The paper's lambda, > 0: the ridge.
        scale: The paper's alpha, > 0: the factor on the predicted labels.
        shift: The paper's beta: added to all logits.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Bertinetto, Henriques, Torr and Vedaldi, "Meta-learning with differentiable closed-form solvers" (2019),
        eqs. 5 and 6. https://arxiv.org/abs/1805.08136
    """
    rows = F.normalize(episodes.support, dim=2)
    gram = rows @ rows.transpose(1, 2) + 1  # X X^T (episodes, n_support, n_support), with the ones of the bias
    target = one_hot(episodes.support_labels, episodes.n_way, rows.dtype)
    eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    coefficients: Tensor = torch.linalg.solve(gram + penalty * eye, target)
    return scale * (cosines(episodes.query, rows) + 1) @ coefficients + shift  # eq. 6


@dataclass(frozen=True)
class LogisticNewtonLimits:
    """The limits of Newton's method for logistic regression. All values are our own choice."""

    max_steps: int = 30  #: Maximum number of Newton steps.
    max_gradient_steps: int = 50  #: Maximum number of conjugate gradient steps per Newton step.
    max_residual: float = 0.1  #: Conjugate gradients end once the residual is this fraction of the initial one.
    max_halvings: int = 20  #: Maximum number of times that a step is halved because it would increase the loss.
    rounding_epsilons: float = 8  #: Relative increases of the loss by fewer machine epsilons count as rounding errors.


LOGISTIC_NEWTON = LogisticNewtonLimits()


def logistic_regression(
    episodes: Episodes, *, inverse_penalty: Annotated[Positive, SearchSpace((0.1, 1.0, 10.0, 100.0))] = 1.0
) -> Tensor:
    """Classify by L2-penalised logistic regression on rows of unit norm, without a penalty on the intercept.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        inverse_penalty: scikit-learn's C, > 0: the weight of the sum of the rows' losses against half the squared
            weights. 1 is scikit-learn's default.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Tian, Wang, Krishnan, Tenenbaum and Isola, "Rethinking few-shot image classification: a good embedding is
        all you need?" (2020), eq. 4 and sec. 3.2. https://arxiv.org/abs/2003.11539
    """
    rows = F.normalize(episodes.support, dim=2)
    target = one_hot(episodes.support_labels, episodes.n_way, rows.dtype)
    span = reduce_to_span(rows)
    weight, intercept = fit_logistic(span, target, inverse_penalty=inverse_penalty)
    # Where the gradient is zero, the weights are these combinations of the rows, in any coordinates.
    residual = inverse_penalty * (target - (span @ weight + intercept).softmax(dim=2))
    return cosines(episodes.query, rows) @ residual + intercept


def fit_logistic(
    rows: Tensor, target: Tensor, *, inverse_penalty: Positive = 1.0, decrement: Positive = 1e-9
) -> tuple[Tensor, Tensor]:
    """Fit L2-penalised logistic regression: minimise C * (sum of cross-entropies) + (sum of squared weights) / 2.

    The algorithm is Newton's method with conjugate gradients. The intercept is not penalised.

    Args:
        rows: (episodes, n, dim).
        target: (episodes, n, n_way), one-hot.
        inverse_penalty: C, > 0.
        decrement: Steps end once the next one would lower the objective by less than half of this, in nats.

    Returns:
        weight: (episodes, dim, n_way).
        intercept: (episodes, 1, n_way).

    Source: Nocedal and Wright, "Numerical optimization" (2006), alg. 7.1.
    """
    mean = rows.mean(dim=1, keepdim=True)  # goes into the intercept: centred rows need fewer steps
    rows = torch.cat([rows - mean, torch.ones_like(rows[:, :, :1])], dim=2)  # (episodes, n, dim + 1)
    penalty = rows.new_full((rows.shape[2], 1), 1 / inverse_penalty)
    penalty[-1] = 0  # the intercept's
    weight = rows.new_zeros(len(rows), rows.shape[2], target.shape[2])
    logits = torch.zeros_like(target)
    loss = _compute_objective(logits, target, weight, penalty)
    going = torch.ones_like(loss, dtype=torch.bool)  # (episodes, 1, 1): converged episodes stay as they are
    for _ in range(LOGISTIC_NEWTON.max_steps):
        probability = logits.softmax(dim=2)
        gradient = _multiply_transpose(rows, probability - target) + penalty * weight
        # A constant on all classes changes no probability; conjugate gradients would follow one from rounding errors.
        gradient = gradient - gradient.mean(dim=2, keepdim=True)
        step = _newton_step(rows, probability, penalty, gradient)
        going = going & (-_inner_product(gradient, step) > decrement)
        if not bool(going.any()):
            break
        size, change = going.to(rows.dtype), rows @ step
        for _ in range(LOGISTIC_NEWTON.max_halvings):
            trial = _compute_objective(logits + size * change, target, weight + size * step, penalty)
            worse = trial > loss * (1 + LOGISTIC_NEWTON.rounding_epsilons * torch.finfo(loss.dtype).eps)
            if not bool(worse.any()):
                break
            size = torch.where(worse, size / 2, size)
        weight, logits, loss = weight + size * step, logits + size * change, trial
    weight, intercept = weight[:, :-1], weight[:, -1:]
    return weight, intercept - mean @ weight


def _compute_objective(logits: Tensor, target: Tensor, weight: Tensor, penalty: Tensor) -> Tensor:
    """Compute the objective of `fit_logistic` over C: the sum of cross-entropies plus the penalty, (episodes, 1, 1)."""
    return 0.5 * _inner_product(penalty * weight, weight) - _inner_product(logits.log_softmax(dim=2), target)


def _newton_step(rows: Tensor, probability: Tensor, penalty: Tensor, gradient: Tensor) -> Tensor:
    """Solve Hessian @ step = -gradient, (episodes, dim, n_way), by conjugate gradients."""
    step, residual = torch.zeros_like(gradient), -gradient
    direction, square = residual, _inner_product(residual, residual)
    enough = LOGISTIC_NEWTON.max_residual**2 * square
    for _ in range(LOGISTIC_NEWTON.max_gradient_steps):
        going = square > enough
        if not bool(going.any()):
            break
        change = probability * (rows @ direction)
        change = change - probability * change.sum(dim=2, keepdim=True)
        curved = _multiply_transpose(rows, change) + penalty * direction
        size = torch.where(going, square / _inner_product(direction, curved), 0)
        step, residual = step + size * direction, residual - size * curved
        last, square = square, _inner_product(residual, residual)
        direction = residual + torch.where(going, square / last, 0) * direction
    return step


def _multiply_transpose(rows: Tensor, change: Tensor) -> Tensor:
    """Compute ``rows.transpose(1, 2) @ change`` as a product in the memory order of the rows, for speed."""
    return (change.transpose(1, 2) @ rows).transpose(1, 2)


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute the inner product of each episode's two matrices, (episodes, 1, 1)."""
    return (a * b).sum(dim=(1, 2), keepdim=True)


def linear_probe(episodes: Episodes, *, inverse_penalty: Positive = 0.316) -> Tensor:
    """Classify by L2-penalised logistic regression on rows that are not normalised.

    The effect of the penalty depends on the scale of the features. The intercept is not penalised.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        inverse_penalty: scikit-learn's C, > 0. The authors' code uses 0.316, found on ImageNet.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Radford et al., "Learning transferable visual models from natural language supervision" (2021), sec. 3.2 and
        A.3, and the example of its code (README.md, "Linear-probe evaluation"). https://arxiv.org/abs/2103.00020
    """
    # In float64: the penalty is the same at any scale of the features, and float32 would lose it beside large squares.
    support, query = project_to_span(episodes.support.double(), episodes.query.double())
    target = one_hot(episodes.support_labels, episodes.n_way, support.dtype)
    weight, intercept = fit_logistic(support, target, inverse_penalty=inverse_penalty)
    return (query @ weight + intercept).to(episodes.query.dtype)


def mahalanobis(episodes: Episodes, *, ridge: Positive = 1.0) -> Tensor:
    """Classify by half the squared Mahalanobis distance to the class means.

    The covariance of a class of n rows is n / (n + 1) times its own, which is zero for a single row, plus 1 / (n + 1)
    times that of all support rows, plus the ridge. Covariances divide by the number of rows minus one.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        ridge: The paper's beta, > 0: the factor of the identity that is added to the covariance. The paper uses 1. It
            is increased where rounding errors would exceed it.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: minus half the squared distances within the
        span of the support rows. The part of a query outside of the span is equally far from all classes.

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
    min_ridge = (MIN_RIDGE_IN_EPSILONS * torch.finfo(support.dtype).eps * trace).clamp_min(ridge)
    factor = torch.linalg.cholesky(covariance + torch.diag_embed(min_ridge.expand(-1, -1, dim)))
    away = (query[:, None] - means[:, :, None]).transpose(2, 3)  # (episodes, n_way, dim, n_queries)
    whitened: Tensor = torch.linalg.solve_triangular(factor, away, upper=False)
    return -0.5 * whitened.square().sum(dim=2).transpose(1, 2).to(episodes.query.dtype)


def project_to_span(support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Project support rows and queries to the span of the support, in k = min(n_support, dim) coordinates.

    Inner products with support rows stay the same.

    Returns:
        support: (episodes, n_support, k).
        query: (episodes, n_queries, k).
    """
    span = reduce_to_span(support)
    if span is support:
        return support, query
    products = support @ query.transpose(1, 2)  # (episodes, n_support, n_queries)
    return span, torch.linalg.solve_triangular(span, products, upper=False).transpose(1, 2)
