"""Support vector machines (SVMs): one binary SVM per class, and the multi-class SVM of MetaOptNet."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import cosines, one_hot
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes

MAX_INTERIOR_POINT_STEPS = 40  #: Maximum number of steps; the limits of interior-point methods are our own choice.
INTERIOR_POINT_TOLERANCE = 1e-12  #: Steps end once the error is below this fraction of the initial error.

BOUNDARY_FRACTION = 0.995  #: Maximum fraction, below 1, of the way to the boundary that a step takes.


def linear_svm(episodes: Episodes, *, inverse_penalty: Positive = 1.0) -> Tensor:
    """Classify by linear support vector machines with squared hinge loss on rows of unit norm, one against the rest.

    The bias is the weight of a constant feature 1, and is penalised like other weights, as in scikit-learn's LinearSVC.

    Args:
        inverse_penalty: scikit-learn's C, > 0: the weight of the sum of the rows' losses against half the squared
            weights. 1 is scikit-learn's default.

    Source: Fan et al., "LIBLINEAR: a library for large linear classification" (2008), eq. 1 with the L2-loss,
        https://www.jmlr.org/papers/v9/fan08a.html; solved as in Chapelle, "Training a support vector machine in the
        primal" (2007), sec. 4. https://doi.org/10.1162/neco.2007.19.5.1155
    """
    # In float64, as small errors of margins change which rows are support vectors.
    rows = F.normalize(episodes.support.double(), dim=2)
    kernel = rows @ rows.transpose(1, 2) + 1  # (episodes, n_support, n_support)
    signs = 2 * one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2) - 1
    dual = _fit_binary_svms(kernel[:, None], signs, inverse_penalty)  # (episodes, n_way, n_support)
    dual = dual.to(episodes.query.dtype).transpose(1, 2)
    return cosines(episodes.query, episodes.support) @ dual + dual.sum(dim=1, keepdim=True)


def _fit_binary_svms(kernel: Tensor, signs: Tensor, inverse_penalty: float) -> Tensor:
    """Fit SVMs with squared hinge loss to labels 1 or -1, ``signs`` (..., n); return dual coefficients (..., n)."""
    max_steps = 50  # maximum number of Newton steps
    max_halvings = 20  # maximum number of times that a step is halved because it would increase the loss
    loss_tolerance_epsilons = 8  # relative increases of the loss by fewer epsilons count as rounding errors
    # A Newton step solves a least-squares problem on the rows whose margin is below 1. The minimum is found once these
    # are the same rows in two steps.
    eye = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    ridge = eye / (2 * inverse_penalty)
    dual = torch.zeros_like(signs)
    outputs, loss = torch.zeros_like(signs), inverse_penalty * signs.square().sum(dim=-1, keepdim=True)
    going = torch.ones_like(loss, dtype=torch.bool)  # machines that have converged stay as they are
    for _ in range(max_steps):
        near = (signs * outputs < 1).to(kernel.dtype)
        system = near[..., None] * kernel * near[..., None, :] + ridge
        step = torch.linalg.solve(system, (near * signs)[..., None])[..., 0] - dual
        change = (kernel @ step[..., None])[..., 0]
        size = going.to(kernel.dtype)
        for _ in range(max_halvings):
            new_dual, new_outputs = dual + size * step, outputs + size * change
            hinge = (1 - signs * new_outputs).clamp_min(0)
            new_loss = 0.5 * (new_dual * new_outputs).sum(dim=-1, keepdim=True)
            new_loss = new_loss + inverse_penalty * hinge.square().sum(dim=-1, keepdim=True)
            worse = new_loss > loss * (1 + loss_tolerance_epsilons * torch.finfo(loss.dtype).eps)
            if not bool(worse.any()):
                break
            size = torch.where(worse, size / 2, size)
        dual, outputs, loss = new_dual, new_outputs, new_loss
        same = ((signs * outputs < 1) == (near > 0)).all(dim=-1, keepdim=True) & (size == 1)
        going = going & ~same
        if not bool(going.any()):
            break
    return dual


def metaopt_svm(
    episodes: Episodes, *, inverse_penalty: Positive = 0.1, ridge: Positive = 1.0, scale: Positive = 1.0
) -> Tensor:
    """Classify by the multi-class support vector machine of Crammer and Singer, on rows that are not normalised.

    The paper trains the encoder and ``scale`` together with this classifier. With another encoder, the scale of the
    features and so the effect of the penalty are arbitrary.

    Args:
        inverse_penalty: The paper's C, > 0: the largest coefficient of a row in the weight of its class. The authors'
            code uses 0.1.
        ridge: > 0, added to the diagonal of the rows' inner products. The authors' code uses 1, against errors of its
            solver. The paper has no ridge; near 0 some quadratic programs have no unique solution.
        scale: > 0, the factor on the logits. The paper learns it, starting at 1.

    Source: Lee, Maji, Ravichandran and Soatto, "Meta-learning with differentiable convex optimization" (2019), sec.
        3.3. https://arxiv.org/abs/1904.03758
    """
    support, query = episodes.support.double(), episodes.query
    # Rows much larger than 1 are scaled: the program is equivalent with smaller rows, ridge and penalty.
    size = support.square().sum(dim=2).amax(dim=1)[:, None, None].clamp_min(ridge)
    gram = support @ support.transpose(1, 2) / size
    gram = gram + torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device) * (ridge / size)
    hot = one_hot(episodes.support_labels, episodes.n_way, gram.dtype).transpose(1, 2)
    dual = _solve_svm_dual(gram, hot, inverse_penalty * size) / size  # (episodes, n_way, n_support)
    products = query @ (dual @ support).to(query.dtype).transpose(1, 2)
    return scale * products


def _solve_svm_dual(gram: Tensor, hot: Tensor, limit: Tensor) -> Tensor:
    """Solve the dual problem of Crammer and Singer's SVM: minimise ``sum_m a_m' gram a_m / 2 - sum(hot * a)``.

    The coefficients a (episodes, n_way, n) are at most ``limit * hot`` and sum to 0 over the classes. A step of
    Mehrotra's predictor-corrector method inverts one matrix per class.

    Source: Nocedal and Wright, "Numerical optimization" (2006), alg. 16.4, which the authors' solver takes as well:
        Amos and Kolter, "OptNet" (2017), sec. 3. https://arxiv.org/abs/1703.00443
    """
    bound = limit * hot
    dual_variables = torch.zeros_like(bound)
    slack, multiplier = bound.clamp_min(1), torch.ones_like(bound)
    price = torch.zeros_like(bound[:, :1])  # (episodes, 1, n), multipliers of the rows' sums
    first: Tensor | None = None
    for _ in range(MAX_INTERIOR_POINT_STEPS):
        wrong_bound = dual_variables + slack - bound
        wrong_slope = dual_variables @ gram - hot + multiplier + price
        wrong_sum = dual_variables.sum(dim=1, keepdim=True)
        gap = (slack * multiplier).mean(dim=(1, 2), keepdim=True)
        errors = [error.abs().amax(dim=(1, 2), keepdim=True) for error in (wrong_bound, wrong_slope, wrong_sum)]
        error = torch.cat([*errors, gap], dim=1).amax(dim=1, keepdim=True)
        first = error if first is None else first
        going = error > INTERIOR_POINT_TOLERANCE * first
        if not bool(going.any()):
            break
        inverse = torch.linalg.inv(gram[:, None] + torch.diag_embed(multiplier / slack))  # (episodes, n_way, n, n)
        joint = torch.linalg.cholesky(inverse.sum(dim=1))
        before = torch.cat([slack, multiplier], dim=1)  # both stay positive
        solve = partial(_solve_kkt, inverse, joint, slack, multiplier, (wrong_bound, wrong_slope, wrong_sum))
        *_, both = solve(slack * multiplier)
        predicted = torch.mul(*(before + compute_max_step_size(before, both) * both).chunk(2, dim=1))
        centre = (predicted.mean(dim=(1, 2), keepdim=True) / gap) ** 3 * gap
        step, price_step, both = solve(slack * multiplier + torch.mul(*both.chunk(2, dim=1)) - centre)
        size = BOUNDARY_FRACTION * compute_max_step_size(before, both) * going
        dual_variables, price = dual_variables + size * step, price + size * price_step
        slack, multiplier = (before + size * both).chunk(2, dim=1)
    return dual_variables


def compute_max_step_size(values: Tensor, change: Tensor) -> Tensor:
    """Compute the largest fraction (n, 1, 1) in [0, 1] of a ``change`` (n, ., .) that keeps all ``values`` >= 0."""
    return (values / -change).where(change < 0, 1.0).amin(dim=(1, 2), keepdim=True).clamp_max(1)


def _solve_kkt(
    inverse: Tensor,
    joint: Tensor,
    slack: Tensor,
    multiplier: Tensor,
    errors: tuple[Tensor, Tensor, Tensor],
    product: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute an interior-point step that solves the linearised KKT equations and lowers slack * multiplier.

    Returns the changes of coefficients, of dual prices, and of slack and multiplier in one tensor.
    """
    wrong_bound, wrong_slope, wrong_sum = errors
    right = (product - multiplier * wrong_bound) / slack - wrong_slope
    free = (inverse @ right[..., None])[..., 0]
    excess = (free.sum(dim=1, keepdim=True) + wrong_sum).transpose(1, 2)
    price_step = torch.cholesky_solve(excess, joint).transpose(1, 2)
    step = free - (inverse @ price_step.expand_as(free)[..., None])[..., 0]
    slack_step = -wrong_bound - step
    return step, price_step, torch.cat([slack_step, -(product + multiplier * slack_step) / slack], dim=1)
