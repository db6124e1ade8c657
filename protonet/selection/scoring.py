"""Fits of the temperature and of the weights of views to held-out rows, and comparisons of their log-losses.

A view is a feature map; the cosines of a view are those of embedded rows to class prototypes.

The weights of views are fitted by L-BFGS with a line search by the strong Wolfe conditions. It takes the same steps as
`torch.optim.LBFGS`, whose first use imports torch's compiler and takes a second. SciPy is not available to contest
submissions. Source: Nocedal and Wright, "Numerical optimization" (2006), algorithms 3.5, 3.6, 7.4 and 7.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: The mixture of views is always used if its log-loss is lower than that of raw cosine by more than this, in nats per
#: row.
MAX_TOLERATED_EXCESS = 0.02
#: Advantage given to the mixture of views over raw cosine when their log-losses are compared, in nats summed over all
#: rows.
MIXTURE_ADVANTAGE = 1.0


#: Maximum number of cosines or logits that are processed at once, which bounds the memory.
VALUES_PER_BLOCK = 2**20


def row_slices(n: int, values_per_row: int) -> Iterator[slice]:
    """Iterate over slices of n rows such that each slice has at most ``VALUES_PER_BLOCK`` values.

    Every slice has at least one row.
    """
    step = max(1, VALUES_PER_BLOCK // max(1, values_per_row))
    return (slice(first, first + step) for first in range(0, n, step))


def select_by_class_mask(cosines: Tensor, class_mask: Tensor) -> Tensor:
    """Select the cosines (..., num_classes) to the classes of a mask ``class_mask`` (num_classes,) bool.

    If all classes are selected, the tensor is returned without a copy.
    """
    return cosines if bool(class_mask.all()) else cosines[..., class_mask]


def fit_temperature(
    cosines: Tensor, labels: Tensor, class_mask: Tensor, weights: Tensor | None = None
) -> tuple[float, Tensor]:
    """Fit the inverse temperature that minimizes the log-loss of cosines to prototypes.

    Args:
        cosines: (n, num_classes) floating, of held-out rows to the class prototypes.
        labels: (n,) int64.
        class_mask: (num_classes,) bool: whether a class has a prototype and can be predicted.
        weights: (n,) > 0 with a mean of about 1. If None, all weights are 1.

    Returns:
        The inverse temperature, >= 0, and the log-losses (n,) float64 at it, multiplied by the weights.

    Source: temperature scaling, Guo et al., "On calibration of modern neural networks" (2017), sec. 4.2.
    """
    factors, losses = fit_temperatures(cosines[None], labels, class_mask, weights)
    return float(factors), losses[0]


def fit_temperatures(
    cosines: Tensor, labels: Tensor, class_mask: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fit an inverse temperature to each of several cosines or logits (settings, n, num_classes) as `fit_temperature`.

    Returns the inverse temperatures (settings,) and the log-losses (settings, n), both float64.
    """
    factors, _, losses = _fit_logits(cosines, labels, class_mask, None, weights)
    return factors, losses


def fit_scale_and_offsets(
    cosines: Tensor, labels: Tensor, class_sizes: Tensor, weights: Tensor | None = None
) -> tuple[float, Tensor | None, Tensor]:
    """Fit an inverse temperature and class offsets that minimize the log-loss of cosines.

    The offsets are a fitted factor times the logarithms of the class frequencies: cosines to prototypes treat all
    classes alike, while votes of a forest depend on how frequent classes are. Gaussian priors on this factor and on the
    logits avoid extreme values if there are few rows.

    Args:
        cosines: (n, num_classes) floating, of held-out rows to the class prototypes.
        labels: (n,) int64.
        class_sizes: (num_classes,) summed weights of the labelled rows of each class; 0 for a class without a
            prototype.
        weights: (n,) > 0 with a mean of about 1. If None, all weights are 1.

    Returns:
        The inverse temperature, >= 0; the offsets (num_classes,), which sum to zero, or None if the classes are equally
        frequent; and the log-losses (n,) float64, multiplied by the weights.

    Source: Platt, "Probabilistic outputs for support vector machines" (1999), with class frequencies as in Menon et
        al., "Long-tail learning via logit adjustment" (2021).
    """
    frequencies = log_class_frequencies(class_sizes)
    factors, exponents, losses = _fit_logits(cosines[None], labels, class_sizes > 0, frequencies, weights)
    return float(factors), None if frequencies is None else float(exponents) * frequencies, losses[0]


def compute_fitted_losses(
    cosines: Sequence[Tensor] | Tensor, labels: Tensor, class_sizes: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Compute the log-losses (views, n) float64 of views, each at its own inverse temperature and class offsets.

    Args:
        cosines: For each view, cosines (n, num_classes) floating of held-out rows to the class prototypes.
        labels: (n,) int64.
        class_sizes: (num_classes,), as for `fit_scale_and_offsets`.
        weights: (n,) > 0 with a mean of about 1. If None, all weights are 1.
    """
    frequencies = log_class_frequencies(class_sizes)
    # Views are stacked block by block, since a copy of all would double the memory.
    blocks = (torch.stack(list(cosines[views])) for views in row_slices(len(cosines), cosines[0].numel()))
    return torch.cat([_fit_logits(block, labels, class_sizes > 0, frequencies, weights)[2] for block in blocks])


def log_class_frequencies(class_sizes: Tensor) -> Tensor | None:
    """Compute the logarithms (num_classes,) of class frequencies, shifted to a mean of 0.

    A class of size 0 gets 0. The result is None if the classes are about equally frequent.
    """
    # Log frequencies that are all nearer to their mean than this count as equal, in nats.
    max_equal_log_frequency = 0.1
    logs = torch.where(class_sizes > 0, class_sizes, 1.0).log()
    logs = torch.where(class_sizes > 0, logs - logs.sum() / (class_sizes > 0).sum(), 0.0)
    return None if float(logs.abs().max()) <= max_equal_log_frequency else logs


#: Standard deviation of the Gaussian prior on the logits when a temperature is fitted, in nats. Of 5, 3 and 2 on 240
#: development tasks, confirmed on 200 others.
LOGIT_PRIOR_STD = 3.0
#: Prior mean of the factor that multiplies the logarithms of class frequencies in the class offsets. Of 0, 0.25, 0.5
#: and 0.75 on 144 problems with rare classes and 200 tables.
FREQUENCY_FACTOR_MEAN = 0.5
#: Prior standard deviation of this factor.
FREQUENCY_FACTOR_STD = 0.5
#: Cosines with a lower mean variance over the classes do not separate classes; also the minimum curvature.
MIN_VARIANCE = 1e-12


def _fit_logits(
    cosines: Tensor, labels: Tensor, mask: Tensor, frequencies: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit logits ``factor * cosines + exponent * frequencies`` by Newton's method, separately for each of some views.

    The cosines are (views, n, num_classes). The results are float64: factors (views,), exponents (views,) and losses
    (views, n).
    """
    # Maximum number of steps.
    max_steps = 50
    # Fractions of a step that are tried until the loss decreases.
    step_fractions = (1.0, 0.5, 0.25, 0.1, 0.01, 0.001)
    # The search stops if the loss decreases by less, in nats per row.
    loss_tolerance = 1e-7
    n = len(labels)
    true = cosines.gather(2, labels[None, :, None].expand(len(cosines), n, 1))[:, :, 0]
    cosines = select_by_class_mask(cosines, mask)
    targets = (mask.cumsum(dim=0) - 1)[labels][None, :, None].expand(len(cosines), n, 1)
    weights = torch.ones(n, dtype=torch.float64) if weights is None else weights
    blocks = list(row_slices(n, len(cosines) * cosines.shape[2]))
    variance = torch.empty_like(true)
    for rows in blocks:
        variance[:, rows] = cosines[:, rows].var(dim=2, correction=0)
    spread = variance.mean(dim=1).double()
    separates = spread >= MIN_VARIANCE
    ridge = spread / (LOGIT_PRIOR_STD**2 * n)
    logs = None if frequencies is None else frequencies[mask].to(cosines.dtype)
    prior = 0.0 if logs is None else 1 / (FREQUENCY_FACTOR_STD**2 * n)

    def evaluate(factor: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the objective (views,), losses (views, n), and the first and second derivatives (5, views)."""
        losses, derivatives = weights.new_empty(true.shape), weights.new_zeros(5, len(cosines))
        for rows in blocks:
            block, row_weights = cosines[:, rows], weights[rows] / n
            logits = factor.to(block.dtype)[:, None, None] * block
            if logs is not None:
                logits += exponent.to(block.dtype)[:, None, None] * logs
            log_p = logits.log_softmax(dim=2)
            losses[:, rows] = log_p.gather(2, targets[:, rows])[:, :, 0].double() * -weights[rows]
            p = log_p.exp_()
            product = p * block
            mean = product.sum(dim=2)
            moments = [mean - true[:, rows], (product * block).sum(dim=2) - mean.square()]
            if logs is not None and frequencies is not None:
                log_mean = p @ logs
                moments += [log_mean - frequencies[labels[rows]], p @ logs.square() - log_mean.square()]
                moments += [product @ logs - mean * log_mean]
            derivatives[: len(moments)] += torch.stack(moments).double() @ row_weights
        excess = exponent - FREQUENCY_FACTOR_MEAN
        derivatives[0] += ridge * factor
        derivatives[1] += ridge
        derivatives[2] += prior * excess
        derivatives[3] += prior
        return losses.mean(dim=1) + (ridge * factor**2 + prior * excess**2) / 2, losses, derivatives

    factor = torch.where(separates, spread.clamp_min(MIN_VARIANCE).rsqrt(), 0.0)
    exponent = torch.full_like(factor, 0.0 if logs is None else FREQUENCY_FACTOR_MEAN)
    value, losses, derivatives = evaluate(factor, exponent)
    done = torch.zeros_like(separates)
    for _ in range(max_steps):
        step, log_step, expected_drop = _newton_step(derivatives, factor, separates, logs is not None)
        near = expected_drop < loss_tolerance  # take the whole step: rounding errors could hide the decrease
        start, pending = (factor, exponent, value), ~done
        for shrink in step_fractions:
            trial = (start[0] - shrink * step).clamp_min(0.0), start[1] - shrink * log_step
            trial_value, trial_losses, trial_derivatives = evaluate(*trial)
            taken = pending & (near | (trial_value < start[2]))
            factor, exponent = torch.where(taken, trial[0], factor), torch.where(taken, trial[1], exponent)
            value, losses = torch.where(taken, trial_value, value), torch.where(taken[:, None], trial_losses, losses)
            derivatives = torch.where(taken, trial_derivatives, derivatives)
            pending = pending & ~taken
            if not bool(pending.any()):
                break
        done = done | near | pending
        if bool(done.all()):
            break
    return factor, exponent, losses


def _newton_step(
    derivatives: Tensor, factor: Tensor, separates: Tensor, has_exponent: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute steps of factors and exponents, which are subtracted, and expected drops of the objective, all (views,).

    The derivatives are (5, views). A step keeps its factor >= 0.
    """
    slope, curvature, log_slope, log_curvature, mixed = derivatives
    curvature = curvature.clamp_min(MIN_VARIANCE)
    step = slope / curvature * separates
    if not has_exponent:
        return step, torch.zeros_like(step), slope * step / 2
    mixed = mixed * separates
    rest = log_curvature - mixed.square() / curvature  # with the best factor
    log_step = (log_slope - mixed * step) / rest.clamp_min(MIN_VARIANCE)
    step = step - mixed * log_step / curvature
    alone = (log_slope - mixed * factor) / log_curvature.clamp_min(MIN_VARIANCE)
    ends = step >= factor  # the factor stays at 0, or becomes 0: the best exponent there
    step, log_step = torch.where(ends, factor, step), torch.where(ends, alone, log_step)
    return step, log_step, (slope * step + log_slope * log_step) / 2


#: Excess log-loss at which a view's weight is divided by e, in nats per row.
LOSS_SCALE = 0.15
#: Minimum of this excess, in nats summed over all rows.
MIN_TOTAL_LOSS_SCALE = 4.0
#: A view gets weight 0 if its fraction of the influence of all views is smaller.
MIN_INFLUENCE = 0.01


def weights_from_losses(cosines: Sequence[Tensor], losses: Sequence[Tensor]) -> Tensor:
    """Compute the weight of each view by its own held-out log-loss: lower losses give larger weights.

    The influence of a view is ``exp(-excess loss / LOSS_SCALE)``, with a larger scale if rows are few. The
    excess loss is that over the best view. The weight is proportional to the influence divided by the standard
    deviation of its cosines over the classes. A view with less than ``MIN_INFLUENCE`` of the total influence
    gets weight 0. Jointly fitted weights would overfit to few rows.

    Args:
        cosines: For each view, its cosines (n, num_classes).
        losses: For each view, its log-losses (n,).

    Returns:
        (views,) float64, summing to 1.

    Source: exponential weights, as in Dalalyan and Tsybakov, "Aggregation by exponential weighting" (2008).
    """
    means = torch.stack([loss.mean() for loss in losses])
    softness = max(LOSS_SCALE, MIN_TOTAL_LOSS_SCALE / len(losses[0]))
    influence = torch.exp((means.min() - means) / softness)
    influence = torch.where(influence >= MIN_INFLUENCE * influence.sum(), influence, 0.0)
    spread = torch.stack([view.var(dim=1, correction=0).mean(dtype=torch.float64).sqrt() for view in cosines])
    weights = torch.where(spread > 1e-9, influence / spread.clamp_min(1e-9), 0.0)
    if not bool(weights.sum() > 0):  # no view separates rows
        weights[-1] = 1.0
    return weights / weights.sum()


#: Factor on the divergence of joint weights from their start, in nats over all rows.
WEIGHT_SHRINKAGE = 10.0
#: Maximum number of cosines that joint weights are fitted to.
MAX_WEIGHTED_COSINES = 2**22


def fit_view_weights(
    cosines: Sequence[Tensor],
    labels: Tensor,
    class_sizes: Tensor,
    initial_weights: Tensor,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Fit the weights of all views jointly to held-out rows, shrunk towards given weights.

    The objective is the log-loss of the weighted sum of the views' cosines, plus a penalty on the Kullback-Leibler
    divergence from the initial weights; see ``WEIGHT_SHRINKAGE``. Few rows thus hardly change the weights. A
    view with a positive initial weight keeps at least ``MIN_INFLUENCE`` of the influence, which is the weight
    times the standard deviation of the view's cosines.

    Args:
        cosines: For each view, its cosines (n, num_classes).
        labels: (n,) int64.
        class_sizes: (num_classes,) summed weights of the labelled rows of each class, for class offsets.
        initial_weights: (views,) float64, >= 0: the weights towards which the result is shrunk. A weight of 0 stays 0.
        row_weights: (n,) > 0. If None, all rows have weight 1.

    Returns:
        (views,) float64, summing to 1.

    Source: stacking, Wolpert, "Stacked generalization" (1992), with non-negative weights as in Breiman (1996).
    """
    used, seen = initial_weights.nonzero().flatten(), class_sizes > 0
    max_rows = max(1, int(MAX_WEIGHTED_COSINES / (len(used) * int(seen.sum()))))
    rows = slice(None, None, math.ceil(len(labels) / max_rows))
    targets = (seen.cumsum(dim=0) - 1)[labels[rows]]
    importance = torch.ones(len(labels), dtype=torch.float64) if row_weights is None else row_weights
    importance = importance[rows, None]
    stacked = torch.stack([cosines[int(view)][rows][:, seen] for view in used]).to(torch.float64)
    spread = stacked.var(dim=2, correction=0).mean(dim=1).sqrt().clamp_min(1e-9)  # (views,)
    stacked = stacked / spread[:, None, None]
    prior = initial_weights[used] * spread
    prior = prior / prior.sum()
    frequencies = log_class_frequencies(class_sizes)
    logs = None if frequencies is None else frequencies[seen]

    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_(True)
        log_influence = x[:-2].log_softmax(dim=0)
        logits = x[-2].exp() * torch.tensordot(log_influence.exp(), stacked, dims=1)  # (rows, seen classes)
        size = logits.var(dim=1, correction=0).mean() / LOGIT_PRIOR_STD**2
        size = size + ((x[-1] - FREQUENCY_FACTOR_MEAN) / FREQUENCY_FACTOR_STD).square()
        if logs is not None:
            logits = logits + x[-1] * logs
        divergence = WEIGHT_SHRINKAGE * (log_influence.exp() * (log_influence - prior.log())).sum()
        log_p = importance * logits.log_softmax(dim=1)
        loss: Tensor = torch.nn.functional.nll_loss(log_p, targets) + (divergence + size / 2) / len(targets)
        return float(loss.detach()), torch.autograd.grad(loss, x)[0]

    fitted = minimize(evaluate, torch.cat([prior.log(), prior.new_tensor([0.0, FREQUENCY_FACTOR_MEAN])]))
    influence = fitted[:-2].softmax(dim=0).clamp_min(MIN_INFLUENCE)
    weights = torch.zeros_like(initial_weights)
    weights[used] = influence / spread
    return weights / weights.sum()


#: Mean log-losses that differ by at most this count as equal, in nats per row.
LOSS_TIE_TOLERANCE = 2e-3


def is_worse_by_one_error(
    losses: Tensor, reference: Tensor, *, max_tolerated: float = math.inf, margin: float = 0.0
) -> bool:
    """Test whether losses (n,) exceed reference losses (n,) by more than one standard error of the mean difference.

    The mean difference must also exceed ``LOSS_TIE_TOLERANCE``, in nats per row, since even two similar
    fits differ by that.

    Args:
        losses: (n,) in nats.
        reference: (n,) losses on the same rows.
        max_tolerated: A mean difference above this always counts, in nats per row: with few rows, one standard error
            is large.
        margin: An increase of the tolerated difference, in nats summed over all rows.

    Source: the one-standard-error rule of Breiman et al., "Classification and regression trees" (1984), sec. 3.4.3.
    """
    excess = losses - reference
    error = float(excess.std(correction=0)) / math.sqrt(len(excess))
    return float(excess.mean()) > min(max_tolerated, max(LOSS_TIE_TOLERANCE, error)) + margin / len(excess)


def select_simplest_within_one_error(losses: list[Tensor]) -> int:
    """Return the index of the simplest candidate whose loss is within one standard error of the best candidate's.

    ``losses`` has the losses (n,) of each candidate on the same rows, in order of increasing complexity.
    """
    best = min(losses, key=lambda loss: float(loss.mean()))
    return next(index for index, loss in enumerate(losses) if not is_worse_by_one_error(loss, best))


#: Function of x (n,) that returns its value and its gradient (n,).
Objective = Callable[[Tensor], tuple[float, Tensor]]


class LineSearchTrial(NamedTuple):
    """The value and the derivatives of the objective at one step size of a line search."""

    step_size: float  #: The step size.
    value: float  #: The objective.
    slope: float  #: Derivative of the objective by the step size.
    gradient: Tensor  #: (n,): gradient of the objective.


#: Maximum number of steps.
MAX_STEPS = 60
#: The search stops if no absolute partial derivative is larger.
GRADIENT_TOLERANCE = 1e-7
#: The search stops if a step changes the value, or every variable, by less than this.
CHANGE_TOLERANCE = 1e-9


def minimize(objective: Objective, x: Tensor) -> Tensor:
    """Minimize a smooth function by L-BFGS from x (n,) float64; return the minimizer, or the last point."""
    # Steps with a lower curvature (y's) do not update the inverse Hessian.
    min_curvature = 1e-10
    value, gradient = objective(x)
    pairs: list[tuple[Tensor, Tensor]] = []  # steps s, and the changes y of the gradient along them
    direction = -gradient
    size = min(1.0, 1 / max(float(gradient.abs().sum()), GRADIENT_TOLERANCE))
    for _ in range(MAX_STEPS):
        start = LineSearchTrial(0.0, value, float(gradient @ direction), gradient)
        if float(gradient.abs().max()) <= GRADIENT_TOLERANCE or start.slope > -CHANGE_TOLERANCE:
            break
        end = _line_search(objective, x, direction, start, size)
        s, y, decrease = end.step_size * direction, end.gradient - gradient, value - end.value
        x, value, gradient, size = x + s, end.value, end.gradient, 1.0
        if float(s.abs().max()) <= CHANGE_TOLERANCE or abs(decrease) < CHANGE_TOLERANCE:
            break
        if float(y @ s) > min_curvature:
            pairs.append((s, y))
        direction = _multiply_by_inverse_hessian(pairs, -gradient)
    return x


def _multiply_by_inverse_hessian(pairs: list[tuple[Tensor, Tensor]], vector: Tensor) -> Tensor:
    """Multiply a vector (n,) by the inverse Hessian that is estimated from pairs of steps and gradient changes."""
    coefficients = []
    for s, y in reversed(pairs):
        coefficients.append(s @ vector / (y @ s))
        vector = vector - coefficients[-1] * y
    if pairs:
        s, y = pairs[-1]
        vector = vector * ((y @ s) / (y @ y))
    for (s, y), coefficient in zip(pairs, reversed(coefficients), strict=True):
        vector = vector + (coefficient - y @ vector / (y @ s)) * s
    return vector


def _line_search(
    objective: Objective, x: Tensor, direction: Tensor, start: LineSearchTrial, size: float
) -> LineSearchTrial:
    """Search a step size along a direction (n,), first ``size``, by the strong Wolfe conditions; return the trial."""
    # Maximum number of step sizes that are evaluated in one line search.
    max_line_search_trials = 25
    # Sufficient decrease, as a fraction of the decrease that the slope predicts.
    armijo_constant = 1e-4
    # Curvature condition: maximum slope after a step, as a fraction of the slope before it.
    curvature_constant = 0.9
    # Bounds on an extrapolated step size. Lower: the last size plus the first number times its last increase. Upper:
    # the last size times the second number.
    extrapolation_bounds = (0.01, 10.0)
    # Minimum distance of an interpolated size from both ends, as a fraction of the interval.
    interpolation_margin = 0.1
    low, high = start, None  # the lowest trial so far; once there is a high one, a minimum lies between the two
    for _ in range(max_line_search_trials):
        value, gradient = objective(x + size * direction)
        trial, last = LineSearchTrial(size, value, float(gradient @ direction), gradient), low
        if value > start.value + armijo_constant * size * start.slope or value >= low.value:
            high = trial
        elif abs(trial.slope) <= -curvature_constant * start.slope:
            return trial
        else:
            if trial.slope * (math.inf if high is None else high.step_size - low.step_size) >= 0:
                high = low
            low = trial
        if high is None:
            smallest, largest = extrapolation_bounds
            least = low.step_size + smallest * (low.step_size - last.step_size)
            size = _minimize_cubic(last, low, least, largest * low.step_size)
            continue
        left, right = sorted((low.step_size, high.step_size))
        margin = interpolation_margin * (right - left)
        if right - left < CHANGE_TOLERANCE / max(float(direction.abs().max()), GRADIENT_TOLERANCE):
            break
        size = _minimize_cubic(low, high, left + margin, right - margin)
    return low


def _minimize_cubic(one: LineSearchTrial, other: LineSearchTrial, lowest: float, highest: float) -> float:
    """Compute the step size in [lowest, highest] with the minimum of a cubic through two trials (eq. 3.59)."""
    left, right = sorted((one, other), key=lambda trial: trial.step_size)
    width = right.step_size - left.step_size
    d1 = left.slope + right.slope + 3 * (left.value - right.value) / width
    discriminant = d1 * d1 - left.slope * right.slope
    denominator = right.slope - left.slope + 2 * math.sqrt(max(discriminant, 0.0))
    if discriminant < 0 or denominator <= 0:  # no minimum
        return (lowest + highest) / 2
    size = right.step_size - width * (right.slope + math.sqrt(discriminant) - d1) / denominator
    return min(max(size, lowest), highest)
