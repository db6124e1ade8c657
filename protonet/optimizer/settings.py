"""Hyperparameters of the optimizer, and the function that raises its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

# Values without another source were chosen on the visible and tuning families of `analysis.optimizer_bench`;
# docs/decisions/optimizer-form.md has what was tried, and analysis/results what they reach.


@dataclass(frozen=True)
class PreconditionerConfig:
    """Limits of the sides (rows, columns) of matrices that get eigenbases, and how often these are updated."""

    max_side_length: int = 512  #: Number of rows or columns above which a side gets no basis.
    max_aspect_ratio: int = 8  #: Ratio of a side to the other one: above it, the longer side gets no basis.
    block_length: int = 96  #: A longer side is split into blocks of about one length, each with its own basis.
    block_alignment: int = 16  #: Blocks start at multiples of this: products are a third faster than for length 85.
    max_side_sum: int = 400
    """Maximum sum of rows and columns if both sides get bases; otherwise, only one side gets them, columns first."""
    second_moment_decay: float = 0.98**2  #: Decay rate of the average of second moments per gradient, in [0, 1).
    damping: float = 1e-4  #: Fraction of the trace that is added to the diagonal, against rounding errors.
    gradient_interval: int = 2  #: Steps between two gradients that enter the average.
    n_early_steps: int = 20  #: First steps, in which the basis is updated with each of these gradients.
    basis_update_interval: int = 8  #: Steps between two updates of a basis after ``n_early_steps`` (the paper: 10).
    n_frequent_steps: int = 200  #: Steps after which bases change slowly, so that the intervals are longer:
    late_gradient_interval: int = 4
    late_basis_update_interval: int = 32


@dataclass(frozen=True)
class StepConfig:
    """Weights of the gradient averages in a step, and limits of gradients, second moments and step lengths."""

    #: The slow average is over the last 1 / ``slow_avg_weight_divisor`` of the steps.
    slow_avg_weight_divisor: float = 6.0
    slow_avg_weight: float = 0.5  #: Weight of the slow average in a step; the rest is Adam's with Nesterov momentum.
    max_weight_change: float = 0.1  #: Approximate maximum change of a weight in a step.
    #: Minimum root of a second moment, relative to the running RMS of gradients: limits steps along small gradients.
    min_relative_rms: float = 1e-2
    max_gradient_rms_ratio: float = 10.0  #: Gradients are clipped at this multiple of their running RMS.
    min_squared_rms: float = 1e-30  #: Minimum of the squared running RMS, against division by zero.
    max_batch_elements: int = 2**18  #: Maximum elements of a batch; more would not fit in a CPU cache.


@dataclass(frozen=True)
class EmbeddingConfig:
    """Settings of embeddings: tall matrices, most of whose rows have zero gradients in a batch, as rare tokens have."""

    min_aspect_ratio: float = 1.5  #: Minimum ratio of rows to columns.
    min_zero_row_fraction: float = 0.25  #: Minimum fraction of rows with zero gradient, exclusive.
    step_size_factor: float = 5.0  #: Step size, relative to other parameters.
    max_weight_change: float = 0.03  #: Approximate maximum change of a weight in a step.
    #: Added to the second moments of every row, as if gradients of average size came in this fraction of steps beside
    #: the row's own: rows of rarer tokens take shorter steps than Adam's.
    pseudo_gradient_frequency: float = 0.032
    min_beta2: float = 0.999  #: Minimum decay rate of the second moments (Adam's default).
    weight_decay_factor: float = 0.2  #: Weight decay, relative to other parameters.
    anneal_fraction: float = 0.8  #: Replaces that of `StepSizeSearch` if all parameters are embeddings.


@dataclass(frozen=True)
class StepSizeSearch:
    """Constants of the initial growth of the step size, of its later adaptation to slopes, and of its decay."""

    log_rate_growth: float = 0.4  #: Growth of the log rate per step of the initial search.
    usual_step_size: float = 0.01  #: Below it, the search ends only at clearly uphill slopes.
    max_uphill_trend: float = 0.5  #: Uphill trend, in [0, 1], at which the search ends below ``usual_step_size``.
    final_rate_factor: float = 0.7  #: Factor of the rate at the end of the search.
    slope_gain: float = 0.015
    """Change of the log rate per step after the search, at a slope of average size: the minimum of this ..."""
    late_slope_gain: float = 4.0  #: ... and this, divided by the number of steps.
    sign_change_gain: float = 0.4  #: Added to both, divided by 1 + the trend's sign changes (Kesten's rule).
    log_rate_decay: float = 0.0045  #: Decay of the log rate per step: the minimum of this ...
    late_log_rate_decay: float = 1.5  #: ... and this, divided by the number of steps.
    scheduled_log_rate_decay: float = 1.0  #: Replaces ``late_log_rate_decay`` while a scheduler reduces lr.
    #: Reduction by a scheduler at which slopes have no more effect; else the rate would grow by as much.
    max_scheduler_reduction: float = 0.1
    min_scheduler_factor: float = 0.5  #: Minimum factor of a scheduler at which the search goes on.
    trend_decay: float = 0.7  #: Decay rate of the trend, a moving average of slopes.
    slope_decay: float = 0.95  #: Decay rate of the moving average of absolute slopes.
    slope_rms_ratio: float = 1.25
    """Ratio of the root mean square of slopes to their mean absolute value, as of normal numbers."""
    eigenvector_gain: float = 0.03  #: Change of the log step size factor of an eigenvector per step: this ...
    early_eigenvector_gain: float = 0.3  #: ... plus this, divided by the number of steps.
    max_log_step_factor: float = 1.15  #: Bound of the log factor of an eigenvector; factors differ at most tenfold.
    min_relative_slope: float = 1e-3  #: Slopes below this fraction of the block's largest are rounding errors.
    anneal_fraction: float = 0.45  #: Fraction of the steps, at the end, in which the step size falls linearly ...
    final_rate_fraction: float = 1e-3  #: ... until this fraction of the steps remains: it never vanishes.
    max_steps_at_cap: int = 100  #: Number of steps at the maximum step size that end the search.
    reference_steps: int = 1000  #: Number of steps for which gain and decay are set; both are lower in longer runs.


PRECONDITIONER, STEP_CONFIG = PreconditionerConfig(), StepConfig()
EMBEDDING, STEP_SIZE = EmbeddingConfig(), StepSizeSearch()
N_SKIPPED_BEFORE_WARNING = 10  #: A warning is given if the first steps, as many as this, are all skipped.
ParameterGroup = dict[str, Any]  #: A parameter group of torch: "params" and its settings.


def raise_error(name: str, constraint: str, got: str, remedy: str) -> NoReturn:
    """Raise a ValueError: the argument ``name`` must meet a constraint, which the value ``got`` violates."""
    raise ValueError(f"CustomOptimizer: `{name}` must {constraint}; got {got}. {remedy}")
