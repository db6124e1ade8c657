"""Linear support vector machines, one per class against all others, for a batch of episodes at once."""

from __future__ import annotations

from dataclasses import dataclass

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
    rows twice.

    Args:
        kernel: (..., n, n) float64 inner products of rows.
        signs: (..., n), 1 and -1.
        inverse_penalty: C > 0.

    Returns:
        (..., n): the shares of the rows in the weights.
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
