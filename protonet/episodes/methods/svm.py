"""Support vector machines: one per class against all others, and one of all classes, the head of MetaOptNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import cosines, one_hot
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes


@dataclass(frozen=True)
class SvmNewton:
    """The limits of Newton's method. All values are our own choice."""

    steps: int = 50  #: Most steps.
    halvings: int = 20  #: Most halvings of a step that would raise the loss.
    rounding: float = 8  #: Rises of the loss by fewer machine epsilons of it are rounding errors.


SVM_NEWTON = SvmNewton()


def linear_svm(episodes: Episodes, *, inverse_penalty: Positive = 1.0) -> Tensor:
    """Classify by linear support vector machines with squared hinge loss on rows of unit norm, one against the rest.

    The bias is the weight of a feature that is one, penalised like the others: scikit-learn's LinearSVC.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        inverse_penalty: scikit-learn's C, > 0: the weight of the sum of the rows' losses against half the squared
            weights. 1 is scikit-learn's default.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: the machines' outputs.

    Source: Fan et al., "LIBLINEAR: a library for large linear classification" (2008), eq. 1 with the L2-loss,
        https://www.jmlr.org/papers/v9/fan08a.html; solved as in Chapelle, "Training a support vector machine in the
        primal" (2007), sec. 4. https://doi.org/10.1162/neco.2007.19.5.1155
    """
    # In float64: which rows are support vectors is decided by their margins.
    rows = F.normalize(episodes.support.double(), dim=2)
    kernel = rows @ rows.transpose(1, 2) + 1  # (episodes, n_support, n_support)
    signs = 2 * one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2) - 1
    dual = fit_machines(kernel[:, None], signs, inverse_penalty)  # (episodes, n_way, n_support)
    dual = dual.to(episodes.query.dtype).transpose(1, 2)
    return cosines(episodes.query, episodes.support) @ dual + dual.sum(dim=1, keepdim=True)


def fit_machines(kernel: Tensor, signs: Tensor, inverse_penalty: float) -> Tensor:
    """Minimise half the squared weights + C * the squared hinge losses, by Newton's method on the support vectors.

    A step solves the least squares of the rows whose margin is below 1; the minimum is found once these are the same
    rows twice. From inner products (..., n, n) float64 and signs (..., n), 1 and -1, it computes the shares (..., n) of
    the rows in the weights.
    """
    eye = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    ridge = eye / (2 * inverse_penalty)
    dual = torch.zeros_like(signs)
    outputs, loss = torch.zeros_like(signs), inverse_penalty * signs.square().sum(dim=-1, keepdim=True)
    going = torch.ones_like(loss, dtype=torch.bool)  # machines that are found stay as they are
    for _ in range(SVM_NEWTON.steps):
        near = (signs * outputs < 1).to(kernel.dtype)
        system = near[..., None] * kernel * near[..., None, :] + ridge
        step = torch.linalg.solve(system, (near * signs)[..., None])[..., 0] - dual
        change = (kernel @ step[..., None])[..., 0]
        size = going.to(kernel.dtype)
        for _ in range(SVM_NEWTON.halvings):
            moved, there = dual + size * step, outputs + size * change
            hinge = (1 - signs * there).clamp_min(0)
            trial = 0.5 * (moved * there).sum(dim=-1, keepdim=True)
            trial = trial + inverse_penalty * hinge.square().sum(dim=-1, keepdim=True)
            worse = trial > loss * (1 + SVM_NEWTON.rounding * torch.finfo(loss.dtype).eps)
            if not bool(worse.any()):
                break
            size = torch.where(worse, size / 2, size)
        dual, outputs, loss = moved, there, trial
        same = ((signs * outputs < 1) == (near > 0)).all(dim=-1, keepdim=True) & (size == 1)
        going = going & ~same
        if not bool(going.any()):
            break
    return dual


@dataclass(frozen=True)
class InteriorPoint:
    """The limits of the interior-point method. All values are our own choice."""

    steps: int = 40  #: Most steps.
    gap: float = 1e-12  #: Steps end once no equation is missed by more than this share of how far it was at first.
    boundary: float = 0.995  #: Share of the way to the boundary that a step takes at most, below 1.


INTERIOR = InteriorPoint()


def metaopt_svm(
    episodes: Episodes, *, inverse_penalty: Positive = 0.1, ridge: Positive = 1.0, scale: Positive = 1.0
) -> Tensor:
    """Classify by the multi-class support vector machine of Crammer and Singer, on the rows as they are.

    The paper learns the encoder and the scale together with it: the scale of features of another encoder is arbitrary,
    and so is what the penalty does.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        inverse_penalty: The paper's C, > 0: the largest share of a row in its class's weight. The authors' code: 0.1.
        ridge: > 0, added to the diagonal of the rows' inner products. The authors' code: 1, against errors of its
            solver; 0 in the paper, near which some programs have no unique solution.
        scale: > 0, the factor on the logits, learned in the paper, where it begins at 1.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Lee, Maji, Ravichandran and Soatto, "Meta-learning with differentiable convex optimization" (2019), sec.
        3.3. https://arxiv.org/abs/1904.03758
    """
    support, query = episodes.support.double(), episodes.query
    # Rows much larger than 1 are scaled: the program is equivalent with smaller rows, ridge and penalty.
    size = support.square().sum(dim=2).amax(dim=1)[:, None, None].clamp_min(ridge)
    gram = support @ support.transpose(1, 2) / size
    gram = gram + torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device) * (ridge / size)
    hot = one_hot(episodes.support_labels, episodes.n_way, gram.dtype).transpose(1, 2)
    dual = solve_program(gram, hot, inverse_penalty * size) / size  # (episodes, n_way, n_support)
    products = query @ (dual @ support).to(query.dtype).transpose(1, 2)
    return scale * products


def solve_program(gram: Tensor, hot: Tensor, limit: Tensor) -> Tensor:
    """Minimise ``sum_m a_m' gram a_m / 2 - sum(hot * a)``, a <= limit * hot, each row's a summing to 0 over classes.

    Mehrotra's predictor and corrector. The matrices of a step are one per class, joined by a row's sum alone, so that a
    step costs as much as inverting n_way + 1 matrices of the support's size. The Gram matrix is (episodes, n, n)
    float64, one-hot labels and a, the shares of the rows in each class's weight, are (episodes, n_way, n).

    Source: Nocedal and Wright, "Numerical optimization" (2006), alg. 16.4, which the authors' solver takes as well:
        Amos and Kolter, "OptNet" (2017), sec. 3. https://arxiv.org/abs/1703.00443
    """
    bound = limit * hot
    dual_variables = torch.zeros_like(bound)
    slack, multiplier = bound.clamp_min(1), torch.ones_like(bound)
    price = torch.zeros_like(bound[:, :1])  # (episodes, 1, n), of the rows' sums
    first: Tensor | None = None
    for _ in range(INTERIOR.steps):
        wrong_bound = dual_variables + slack - bound
        wrong_slope = dual_variables @ gram - hot + multiplier + price
        wrong_sum = dual_variables.sum(dim=1, keepdim=True)
        gap = (slack * multiplier).mean(dim=(1, 2), keepdim=True)
        errors = [error.abs().amax(dim=(1, 2), keepdim=True) for error in (wrong_bound, wrong_slope, wrong_sum)]
        error = torch.cat([*errors, gap], dim=1).amax(dim=1, keepdim=True)
        first = error if first is None else first
        going = error > INTERIOR.gap * first
        if not bool(going.any()):
            break
        inverse = torch.linalg.inv(gram[:, None] + torch.diag_embed(multiplier / slack))  # (episodes, n_way, n, n)
        joint = torch.linalg.cholesky(inverse.sum(dim=1))
        system = KktSystem(
            inverse=inverse,
            joint=joint,
            slack=slack,
            multiplier=multiplier,
            wrong_bound=wrong_bound,
            wrong_slope=wrong_slope,
            wrong_sum=wrong_sum,
        )
        foreseen = system.move(slack * multiplier)
        size = system.max_step(foreseen)
        near = (slack + size * foreseen.slack) * (multiplier + size * foreseen.multiplier)
        centre = (near.mean(dim=(1, 2), keepdim=True) / gap) ** 3 * gap
        step = system.move(slack * multiplier + foreseen.slack * foreseen.multiplier - centre)
        size = INTERIOR.boundary * system.max_step(step) * going
        dual_variables, price = dual_variables + size * step.dual_variables, price + size * step.price
        slack, multiplier = slack + size * step.slack, multiplier + size * step.multiplier
    return dual_variables


class Move(NamedTuple):
    """The changes of one step."""

    dual_variables: Tensor  #: (episodes, n_way, n).
    price: Tensor  #: (episodes, 1, n).
    slack: Tensor  #: (episodes, n_way, n).
    multiplier: Tensor  #: (episodes, n_way, n).


@dataclass(frozen=True, kw_only=True)
class KktSystem:
    """The linear equations of a step."""

    inverse: Tensor  #: (episodes, n_way, n, n), of the matrix of each class.
    joint: Tensor  #: (episodes, n, n), the Cholesky factor of their sum.
    slack: Tensor  #: (episodes, n_way, n) > 0.
    multiplier: Tensor  #: (episodes, n_way, n) > 0.
    wrong_bound: Tensor  #: (episodes, n_way, n), by how much the bounds are missed,
    wrong_slope: Tensor  #: (episodes, n_way, n), the slope of the objective
    wrong_sum: Tensor  #: (episodes, 1, n), and the sums over classes.

    def move(self, product: Tensor) -> Move:
        """Return the changes that mend what is wrong, and lower the products of slack and multiplier by ``product``."""
        free = self._solve((product - self.multiplier * self.wrong_bound) / self.slack - self.wrong_slope)
        excess = (free.sum(dim=1, keepdim=True) + self.wrong_sum).transpose(1, 2)
        price = torch.cholesky_solve(excess, self.joint).transpose(1, 2)
        dual_variables = free - self._solve(price.expand_as(free))
        slack = -self.wrong_bound - dual_variables
        return Move(dual_variables, price, slack, -(product + self.multiplier * slack) / self.slack)

    def max_step(self, move: Move) -> Tensor:
        """Return the largest share of a move, in [0, 1], that keeps slack and multiplier >= 0: (episodes, 1, 1)."""
        before = torch.cat([self.slack, self.multiplier], dim=1)
        change = torch.cat([move.slack, move.multiplier], dim=1)
        return (before / -change).where(change < 0, 1.0).amin(dim=(1, 2), keepdim=True).clamp_max(1)

    def _solve(self, right: Tensor) -> Tensor:
        """Multiply the inverse matrices with vectors (episodes, n_way, n)."""
        return (self.inverse @ right[..., None])[..., 0]
