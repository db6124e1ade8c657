"""Weights of views from their out-of-fold cosines, and the one-standard-error rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Standard deviation of the prior on the logits' size when weights are fitted.
LOGIT_SCALE = 5.0
#: Log-loss, in nats a row, that nobody would notice.
TIE = 2e-3


def fit_weights(cosines: Tensor, labels: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Fit one non-negative factor a view, so that the softmax of the weighted cosines has the least log-loss.

    The factors' sum is the inverse temperature, their shares are the views' weights. A Gaussian prior on the size
    of the logits keeps few or separable rows from driving the factors to infinity. The problem is convex; projected
    Newton steps with backtracking solve it.

    Args:
        cosines: (views, n, num_classes) float32.
        labels: (n,) int64.
        seen: (num_classes,) bool, the classes that can win.

    Returns:
        factors: (views,) float64, >= 0.
        losses: (n,) float64, the log-loss of each row.
    """
    views = len(cosines)
    hidden = torch.where(seen, 0.0, -torch.inf)

    spread = cosines[:, :, seen].var(dim=2).mean(dim=1, dtype=torch.float64)  # (views,)
    ridge = spread / (LOGIT_SCALE**2 * cosines.shape[1])

    def evaluate(factors: Tensor) -> tuple[float, Tensor, Tensor]:
        log_p = torch.tensordot(factors.float(), cosines, dims=1).add_(hidden).log_softmax(dim=1)
        losses = -log_p.gather(1, labels[:, None])[:, 0].double()
        return float(losses.mean() + (ridge * factors.square()).sum() / 2), losses, log_p

    factors = 1 / spread.clamp_min(1e-12).sqrt() / views
    value, losses, log_p = evaluate(factors)
    true = cosines.gather(2, labels.expand(views, -1)[..., None])[..., 0]
    for _ in range(50):
        p = log_p.exp()  # (n, num_classes)
        mean = torch.stack([(p * view).sum(dim=1) for view in cosines])  # (views, n)
        gradient = (mean - true).mean(dim=1, dtype=torch.float64) + ridge * factors
        second = torch.stack([torch.stack([(p * a * b).sum(dim=1) for b in cosines]) for a in cosines])
        hessian = (second - mean[:, None] * mean[None, :]).mean(dim=2, dtype=torch.float64) + ridge.diag()
        free = (factors > 0) | (gradient < 0)
        step = torch.zeros_like(factors)
        step[free] = torch.linalg.lstsq(hessian[free][:, free], gradient[free]).solution
        for shrink in (1.0, 0.5, 0.25, 0.1, 0.01, 0.001):
            trial = (factors - shrink * step).clamp_min(0)
            trial_value, trial_losses, trial_log_p = evaluate(trial)
            if trial_value < value:
                break
        gain = value - trial_value
        if gain > 0:
            factors, value, losses, log_p = trial, trial_value, trial_losses, trial_log_p
        if gain < 1e-7:
            break
    return factors, losses


def simplest_within_one_error(losses: Sequence[Tensor]) -> int:
    """Return the first candidate whose paired mean loss is within one standard error of the best.

    Args:
        losses: One tensor (n,) a candidate, simplest candidate first, all on the same rows.

    Returns:
        Its position.

    Source: the one-standard-error rule of Breiman et al., "Classification and regression trees" (1984), sec. 3.4.3.
    """
    best = min(losses, key=lambda loss: float(loss.mean()))
    for position, loss in enumerate(losses):
        if not worse_by_one_error(loss, best):
            return position
    raise AssertionError("the best candidate is within one error of itself")


def worse_by_one_error(losses: Tensor, reference: Tensor) -> bool:
    """Return whether ``losses`` (n,) exceed ``reference`` (n,) by more than one standard error of the difference.

    A difference below ``TIE`` is none: twins differ systematically, if by next to nothing.
    """
    excess = losses - reference
    return float(excess.mean()) > max(TIE, float(excess.std(correction=0)) / math.sqrt(len(excess)))
