"""Log-losses of held-out rows: the temperature and weights of views that minimize them, and how losses are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protonet.selection.lbfgs import minimize


@dataclass(frozen=True)
class WeightRules:
    """Constants of the temperature and of the weights of views, which are fitted to held-out rows.

    The values were set on three of the five splits of analysis/results/robustness.md; analysis/results/ablations.md
    shows the effect of the selection.
    """

    logit_scale: float = 3.0  # of 5, 3 and 2 on 240 development tasks, confirmed on 200 others
    """Standard deviation of the prior on the logits' size when a temperature is fitted, in nats."""
    frequency_mean: float = 0.5  # of 0, 0.25, 0.5 and 0.75 on 144 problems with rare classes and 200 tables
    """Prior mean of the factor on the logarithms of class frequencies ..."""
    frequency_deviation: float = 0.5  #: ... and its prior standard deviation.
    equal_classes: float = 0.1  #: Log frequencies that are all nearer to their mean than this count as equal, in nats.
    tie: float = 2e-3  #: Mean log-losses that differ by at most this are equal, in nats per row.
    softness: float = 0.15  #: Excess log-loss that divides a view's weight by e, in nats per row ...
    total_softness: float = 4.0  #: ... or in nats over all rows, if that is more.
    shrinkage: float = 10.0  #: Penalty on the divergence of joint weights from their start, in nats over all rows.
    max_cosines: int = 2**22  #: Maximum number of cosines that joint weights are fitted to.
    block: int = 2**20  #: Maximum number of cosines or logits that are processed at once, which bounds the memory.
    min_influence: float = 0.01  #: A view with a smaller fraction of the influence gets weight 0.
    max_tolerated: float = 0.02
    """If the log-loss of raw cosine exceeds that of the mixture by more, the mixture is used, in nats per row."""
    mixture_prior: float = 1.0
    """Prior evidence for the mixture of views against raw cosine alone, in nats over all rows."""


@dataclass(frozen=True)
class NewtonRules:
    """Settings of Newton's method for the temperature, which takes about five steps."""

    max_steps: int = 50  #: Maximum number of steps.
    backtracking: tuple[float, ...] = (1.0, 0.5, 0.25, 0.1, 0.01, 0.001)
    """Fractions of a step that are tried until the loss decreases."""
    tolerance: float = 1e-7  #: The search stops if the loss decreases by less, in nats per row.
    min_variance: float = 1e-12
    """Cosines with a lower mean variance over the classes do not separate classes; also the minimum curvature."""


WEIGHTS, NEWTON = WeightRules(), NewtonRules()


def row_blocks(n: int, width: int) -> Iterator[slice]:
    """Split n rows of ``width`` values into slices of at most ``WEIGHTS.block`` values, but of at least one row."""
    step = max(1, WEIGHTS.block // max(1, width))
    return (slice(first, first + step) for first in range(0, n, step))


def select_seen(cosines: Tensor, seen: Tensor) -> Tensor:
    """Select the cosines (..., num_classes) to the seen classes, without a copy if all classes are seen."""
    return cosines if bool(seen.all()) else cosines[..., seen]


def fit_temperature(
    cosines: Tensor, labels: Tensor, seen: Tensor, weights: Tensor | None = None
) -> tuple[float, Tensor]:
    """Fit the inverse temperature >= 0 that minimizes the log-loss of cosines; also return the losses of the rows.

    The cosines are (n, num_classes), the labels (n,) int64, ``seen`` (num_classes,) a mask of the classes that can be
    predicted, and the weights (n,) > 0 with a mean of about 1. The losses (n,) float64 are multiplied by the weights.

    Source: temperature scaling, Guo et al., "On calibration of modern neural networks" (2017), sec. 4.2.
    """
    factor, _, losses = _fit_logits(cosines, labels, seen, None, weights)
    return factor, losses


def fit_scale_and_offsets(
    cosines: Tensor, labels: Tensor, sizes: Tensor, weights: Tensor | None = None, repeats: int = 1
) -> tuple[float, Tensor | None, Tensor]:
    """Fit an inverse temperature and class offsets that minimize the log-loss of cosines.

    The offsets are a fitted factor times the logarithms of the class frequencies: cosines to prototypes treat all
    classes alike, while votes of a forest depend on how frequent classes are. A Gaussian prior on this factor, and one
    on the size of the logits, keep few rows from driving them to extremes.

    The arguments are those of `fit_temperature`. In addition, ``sizes`` (num_classes,) is the total weight of the
    labelled rows of each class, 0 for a class that cannot be predicted, and ``repeats`` the number of times that each
    row occurs. Returns the inverse temperature, the offsets (num_classes,), which sum to zero, or None if all are zero,
    and the weighted log-losses (n,).

    Source: Platt, "Probabilistic outputs for support vector machines" (1999), with class frequencies as in Menon et
        al., "Long-tail learning via logit adjustment" (2021).
    """
    frequencies = log_frequencies(sizes)
    factor, exponent, losses = _fit_logits(cosines, labels, sizes > 0, frequencies, weights, repeats)
    return factor, None if frequencies is None else exponent * frequencies, losses


def log_frequencies(sizes: Tensor) -> Tensor | None:
    """Compute the centred logarithms (num_classes,) of class frequencies; None if the classes are equally frequent."""
    logs = torch.where(sizes > 0, sizes, 1.0).log()
    logs = torch.where(sizes > 0, logs - logs.sum() / (sizes > 0).sum(), 0.0)
    return None if float(logs.abs().max()) <= WEIGHTS.equal_classes else logs


def _fit_logits(
    cosines: Tensor, labels: Tensor, seen: Tensor, frequencies: Tensor | None, weights: Tensor | None, repeats: int = 1
) -> tuple[float, float, Tensor]:
    """Fit the factors on the cosines and on the logarithms of class frequencies; also return the losses (n,).

    The problem is convex in the two factors; Newton steps with backtracking solve it. If the frequencies are None,
    their factor is 0.
    """
    targets = (seen.cumsum(dim=0) - 1)[labels][:, None]
    true = cosines.gather(1, labels[:, None])[:, 0]
    weights = torch.ones(len(cosines), dtype=torch.float64) if weights is None else weights
    blocks = [(rows, select_seen(cosines[rows], seen)) for rows in row_blocks(*cosines.shape)]
    variance = torch.empty_like(true)
    for rows, block in blocks:
        variance[rows] = block.var(dim=1, correction=0)
    spread = float(variance.mean())
    separates = spread >= NEWTON.min_variance
    if not separates and frequencies is None:
        return 0.0, 0.0, weights * math.log(max(1, int(seen.sum())))
    ridge = spread * repeats / (WEIGHTS.logit_scale**2 * len(cosines))
    logs = None if frequencies is None else frequencies[seen].to(cosines.dtype)
    true_log = 0.0 if frequencies is None else frequencies[labels]
    prior = 0.0 if logs is None else repeats / (WEIGHTS.frequency_deviation**2 * len(cosines))

    def evaluate(factor: float, exponent: float) -> tuple[float, Tensor, Tensor]:
        """Compute the objective, the losses (n,), and moments (5, n) of the cosines and log frequencies."""
        log_p_true, moments = torch.empty_like(true), true.new_zeros(5, len(true))  # parts would fragment the memory
        for rows, block in blocks:
            logits = factor * block
            log_p = (logits if logs is None else logits.add_(exponent * logs)).log_softmax(dim=1)
            log_p_true[rows] = log_p.gather(1, targets[rows])[:, 0]
            p = log_p.exp_()
            moments[0, rows] = (p * block).sum(dim=1)
            moments[1, rows] = (p * block.square()).sum(dim=1)
            if logs is not None:
                moments[2, rows], moments[3, rows] = p @ logs, p @ logs.square()
                moments[4, rows] = p.mul_(block) @ logs
        losses = weights * -log_p_true.to(torch.float64)
        penalty = ridge * factor**2 + prior * (exponent - WEIGHTS.frequency_mean) ** 2
        return float(losses.mean()) + penalty / 2, losses, moments

    factor, exponent = (1 / math.sqrt(spread) if separates else 0.0), (0.0 if logs is None else WEIGHTS.frequency_mean)
    value, losses, moments = evaluate(factor, exponent)
    for _ in range(NEWTON.max_steps):
        mean, square, log_mean, log_square, product = moments
        slope = float((weights * (mean - true)).mean()) + ridge * factor
        curvature = float((weights * (square - mean.square())).mean()) + ridge
        step, log_step = slope / max(curvature, NEWTON.min_variance) * separates, 0.0
        if logs is not None:
            log_slope = float((weights * (log_mean - true_log)).mean()) + prior * (exponent - WEIGHTS.frequency_mean)
            log_curvature = float((weights * (log_square - log_mean.square())).mean()) + prior
            mixed = float((weights * (product - mean * log_mean)).mean()) * separates
            rest = log_curvature - mixed**2 / max(curvature, NEWTON.min_variance)  # with the best factor
            log_step = (log_slope - mixed * step) / max(rest, NEWTON.min_variance)
            step -= mixed * log_step / max(curvature, NEWTON.min_variance)
            if step >= factor:  # the factor stays at 0, or becomes 0: the best exponent there
                step, log_step = factor, (log_slope - mixed * factor) / max(log_curvature, NEWTON.min_variance)
        for shrink in NEWTON.backtracking:
            trial = max(0.0, factor - shrink * step), exponent - shrink * log_step
            trial_value, *trial_results = evaluate(*trial)
            if trial_value < value:
                break
        drop = value - trial_value
        if drop > 0:
            (factor, exponent), value, (losses, moments) = trial, trial_value, trial_results
        if drop < NEWTON.tolerance:
            break
    return factor, exponent, losses


def soft_weights(cosines: Sequence[Tensor], losses: Sequence[Tensor]) -> Tensor:
    """Compute weights (views,) of views from the held-out losses (n,) of each view alone.

    A weight is ``exp(-excess loss / softness)``, divided by the standard deviation of the view's cosines over the
    classes. Weights sum to 1; those of views below ``WEIGHTS.min_influence`` are 0. Unlike weights that are fitted
    jointly, they do not overfit to few rows.

    Source: exponential weights, as in Dalalyan and Tsybakov, "Aggregation by exponential weighting" (2008).
    """
    means = torch.stack([loss.mean() for loss in losses])
    softness = max(WEIGHTS.softness, WEIGHTS.total_softness / len(losses[0]))
    influence = torch.exp((means.min() - means) / softness)
    influence = torch.where(influence >= WEIGHTS.min_influence * influence.sum(), influence, 0.0)
    spread = torch.stack([view.var(dim=1, correction=0).mean(dtype=torch.float64).sqrt() for view in cosines])
    weights = torch.where(spread > 1e-9, influence / spread.clamp_min(1e-9), 0.0)
    if not bool(weights.sum() > 0):  # no view separates rows
        weights[-1] = 1.0
    return weights / weights.sum()


def fit_weights(
    cosines: Sequence[Tensor], labels: Tensor, sizes: Tensor, start: Tensor, row_weights: Tensor | None = None
) -> Tensor:
    """Fit the weights (views,) of views jointly to held-out rows, shrunk towards the weights ``start`` (views,).

    The objective is the log-loss of the weighted cosines (n, num_classes), with offsets for class ``sizes``, plus a
    penalty on the Kullback-Leibler divergence from the start; see ``WEIGHTS.shrinkage``. Few rows thus hardly change
    the weights. The influence of a view is its weight times the standard deviation of its cosines, and at least
    ``WEIGHTS.min_influence`` unless the start is 0.

    Source: stacking, Wolpert, "Stacked generalization" (1992), with non-negative weights as in Breiman (1996).
    """
    used, seen = start.nonzero().flatten(), sizes > 0
    max_rows = max(1, int(WEIGHTS.max_cosines / (len(used) * int(seen.sum()))))
    rows = slice(None, None, math.ceil(len(labels) / max_rows))
    targets = (seen.cumsum(dim=0) - 1)[labels[rows]]
    importance = torch.ones(len(labels), dtype=torch.float64) if row_weights is None else row_weights
    importance = importance[rows, None]
    stacked = torch.stack([cosines[int(view)][rows][:, seen] for view in used]).to(torch.float64)
    spread = stacked.var(dim=2, correction=0).mean(dim=1).sqrt().clamp_min(1e-9)  # (views,)
    stacked = stacked / spread[:, None, None]
    prior = start[used] * spread
    prior = prior / prior.sum()
    frequencies = log_frequencies(sizes)
    logs = None if frequencies is None else frequencies[seen]

    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_(True)
        log_influence = x[:-2].log_softmax(dim=0)
        logits = x[-2].exp() * torch.tensordot(log_influence.exp(), stacked, dims=1)  # (rows, seen classes)
        size = logits.var(dim=1, correction=0).mean() / WEIGHTS.logit_scale**2
        size = size + ((x[-1] - WEIGHTS.frequency_mean) / WEIGHTS.frequency_deviation).square()
        if logs is not None:
            logits = logits + x[-1] * logs
        divergence = WEIGHTS.shrinkage * (log_influence.exp() * (log_influence - prior.log())).sum()
        log_p = importance * logits.log_softmax(dim=1)
        loss: Tensor = torch.nn.functional.nll_loss(log_p, targets) + (divergence + size / 2) / len(targets)
        return float(loss.detach()), torch.autograd.grad(loss, x)[0]

    fitted = minimize(evaluate, torch.cat([prior.log(), prior.new_tensor([0.0, WEIGHTS.frequency_mean])]))
    influence = fitted[:-2].softmax(dim=0).clamp_min(WEIGHTS.min_influence)
    weights = torch.zeros_like(start)
    weights[used] = influence / spread
    return weights / weights.sum()


def worse_by_one_error(
    losses: Tensor, reference: Tensor, *, max_tolerated: float = math.inf, margin: float = 0.0
) -> bool:
    """Test whether losses (n,) exceed reference losses (n,) by more than one standard error of the mean difference.

    The mean difference must also exceed ``WEIGHTS.tie``, since two fits of the same kind differ systematically. A mean
    difference above ``max_tolerated`` always counts, since one standard error of few rows is large. The margin, in nats
    over all rows, is added to the tolerance.

    Source: the one-standard-error rule of Breiman et al., "Classification and regression trees" (1984), sec. 3.4.3.
    """
    excess = losses - reference
    error = float(excess.std(correction=0)) / math.sqrt(len(excess))
    return float(excess.mean()) > min(max_tolerated, max(WEIGHTS.tie, error)) + margin / len(excess)


def simplest_within_one_error(losses: list[Tensor]) -> int:
    """Choose the first of several candidates that is not worse than the best one by one standard error.

    The losses (n,) of the candidates are in order of increasing complexity. Returns the index of the chosen one.
    """
    best = min(losses, key=lambda loss: float(loss.mean()))
    return next(index for index, loss in enumerate(losses) if not worse_by_one_error(loss, best))
