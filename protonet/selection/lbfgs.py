"""L-BFGS with a line search by the strong Wolfe conditions, for smooth problems of few variables.

It takes the same steps as `torch.optim.LBFGS`, whose first use imports torch's compiler and takes a second. SciPy is
not available to contest submissions.

Source: Nocedal and Wright, "Numerical optimization" (2006), algorithms 3.5, 3.6, 7.4 and 7.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

#: Function of x (n,) that returns its value and its gradient (n,).
Objective = Callable[[Tensor], tuple[float, Tensor]]


@dataclass(frozen=True)
class LBFGSConstants:
    """Settings of the line search and the stopping criteria; the values are those of `torch.optim.LBFGS`."""

    max_steps: int = 60  #: Maximum number of steps.
    max_line_search_trials: int = 25  #: Maximum number of step sizes that are evaluated in one line search.
    armijo_constant: float = 1e-4  #: Sufficient decrease, as a fraction of the decrease that the slope predicts.
    curvature_constant: float = 0.9
    """Curvature condition: maximum slope after a step, as a fraction of the slope before it."""
    extrapolation_bounds: tuple[float, float] = (0.01, 10.0)
    """Bounds on an extrapolated step size. Lower: the last size plus the first number times its last increase. Upper:
    the last size times the second number."""
    interpolation_margin: float = 0.1
    """Minimum distance of an interpolated size from both ends, as a fraction of the interval."""
    gradient_tolerance: float = 1e-7  #: The search stops if no absolute partial derivative is larger.
    change_tolerance: float = 1e-9
    """The search stops if a step changes the value, or every variable, by less than this."""
    min_curvature: float = 1e-10  #: Steps with a lower curvature (y's) do not update the inverse Hessian.


LBFGS = LBFGSConstants()


class LineSearchTrial(NamedTuple):
    """The value and the derivatives of the objective at one step size of a line search."""

    step_size: float  #: The step size.
    value: float  #: The objective.
    slope: float  #: Derivative of the objective by the step size.
    gradient: Tensor  #: (n,): gradient of the objective.


def minimize(objective: Objective, x: Tensor) -> Tensor:
    """Minimize a smooth function by L-BFGS.

    Args:
        objective: The function; it returns its value and its gradient (n,).
        x: (n,) float64, the start.

    Returns:
        (n,) float64: the minimizer, or the last point if the search has not converged after ``LBFGS.max_steps`` steps.
    """
    value, gradient = objective(x)
    pairs: list[tuple[Tensor, Tensor]] = []  # steps s, and the changes y of the gradient along them
    direction = -gradient
    size = min(1.0, 1 / max(float(gradient.abs().sum()), LBFGS.gradient_tolerance))
    for _ in range(LBFGS.max_steps):
        start = LineSearchTrial(0.0, value, float(gradient @ direction), gradient)
        if float(gradient.abs().max()) <= LBFGS.gradient_tolerance or start.slope > -LBFGS.change_tolerance:
            break
        end = _line_search(objective, x, direction, start, size)
        s, y, decrease = end.step_size * direction, end.gradient - gradient, value - end.value
        x, value, gradient, size = x + s, end.value, end.gradient, 1.0
        if float(s.abs().max()) <= LBFGS.change_tolerance or abs(decrease) < LBFGS.change_tolerance:
            break
        if float(y @ s) > LBFGS.min_curvature:
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
    """Find a step size along a descent direction (n,) that satisfies the strong Wolfe conditions; return the trial."""
    low, high = start, None  # the lowest trial so far; once there is a high one, a minimum lies between the two
    for _ in range(LBFGS.max_line_search_trials):
        value, gradient = objective(x + size * direction)
        trial, last = LineSearchTrial(size, value, float(gradient @ direction), gradient), low
        if value > start.value + LBFGS.armijo_constant * size * start.slope or value >= low.value:
            high = trial
        elif abs(trial.slope) <= -LBFGS.curvature_constant * start.slope:
            return trial
        else:
            if trial.slope * (math.inf if high is None else high.step_size - low.step_size) >= 0:
                high = low
            low = trial
        if high is None:
            smallest, largest = LBFGS.extrapolation_bounds
            size = _interpolate(
                last, low, low.step_size + smallest * (low.step_size - last.step_size), largest * low.step_size
            )
            continue
        left, right = sorted((low.step_size, high.step_size))
        margin = LBFGS.interpolation_margin * (right - left)
        if right - left < LBFGS.change_tolerance / max(float(direction.abs().max()), LBFGS.gradient_tolerance):
            break
        size = _interpolate(low, high, left + margin, right - margin)
    return low


def _interpolate(one: LineSearchTrial, other: LineSearchTrial, lowest: float, highest: float) -> float:
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
