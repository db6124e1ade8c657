"""Settings of the optimizer, and the error for a value that is not allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

# Values without another source were chosen on the visible and tuning families of `analysis.optimizer_bench`;
# docs/decisions/optimizer-form.md has what was tried, and analysis/results what they reach.


@dataclass(frozen=True)
class PreconditionerConfig:
    """Which sides of matrices get eigenbases, inputs first, and how these follow the gradients."""

    max_side_length: int = 512  #: Rows or columns: a longer side gets no basis.
    max_ratio: int = 8  #: Ratio of a side to the other one: above it, the longer side gets no basis.
    block_length: int = 96  #: A longer side is split into blocks of about one length, each with its own basis.
    block_unit: int = 16  #: Blocks of a split side begin at multiples of it: products are a third faster than of 85.
    max_side_sum: int = 400
    """Largest sum of both sides with bases; beyond it the inputs alone get them, or the outputs."""
    second_moment_decay: float = 0.98  #: Decay per step of the second moments' average, in [0, 1).
    damping: float = 1e-4  #: Fraction of the trace that is added to the diagonal: no direction is left to rounding.
    gradient_interval: int = 2  #: Steps between two gradients that enter the average.
    early_steps: int = 20  #: Steps during which a basis is updated with each of these gradients.
    basis_update_interval: int = 8  #: Steps between two updates of a basis after them (the paper: 10).


@dataclass(frozen=True)
class StepConfig:
    """The parts of a step, and its bounds against single gradients and silent directions."""

    slow_mean_divisor: float = 6.0  #: The slow mean averages the last 1 / ``slow_mean_divisor`` of the steps.
    slow_fraction: float = 0.5  #: Part of the step that follows the slow mean, not the new gradient and Adam's mean.
    max_step: float = 0.1  #: Longest step per element, about, in units of the weights.
    #: Smallest root of a second moment, relative to the gradient's usual size: silent directions are not blown up.
    min_relative_rms: float = 1e-2
    max_gradient_ratio: float = 10.0  #: A gradient is scaled down to this many times its usual size.
    tiny: float = 1e-30  #: Smallest square of the usual size, against division by zero.
    max_short_length: int = 256  #: Up to this length, vectors without bases are padded and step as one.
    batch_elements: int = 2**18  #: Elements of equal parameters that step as one: more would not stay in a cache.


@dataclass(frozen=True)
class EmbeddingConfig:
    """Settings of embeddings: tall matrices whose first gradient is zero in many rows, because rows are seldom seen."""

    min_ratio: float = 1.5  #: Smallest ratio of rows to columns.
    min_untouched: float = 0.25  #: Fraction of rows without gradient, exclusive.
    rate_factor: float = 5.0  #: Step size, relative to other parameters.
    max_step: float = 0.03  #: Longest step per element.
    #: Added to the second moments of every row, as if gradients of usual size came in this fraction of steps beside
    #: the row's own: one that is seen less often takes shorter steps than Adam's.
    extra_frequency: float = 0.032
    min_beta2: float = 0.999  #: Smallest decay of the second moments (Adam's default).
    decay_factor: float = 0.2  #: Weight decay, relative to other parameters.
    anneal_fraction: float = 0.8  #: That of `StepSizeSearch` if there are no other parameters.


@dataclass(frozen=True)
class StepSizeSearch:
    """How the rate, which is the step size, is searched and follows slopes of their usual size."""

    log_rate_growth: float = 0.4  #: Growth of the rate's logarithm per step of the search.
    usual_rate: float = 0.01  #: Up to it the rate grows unless evidence is against it, beyond it if evidence is for it.
    max_uphill_trend: float = 0.5  #: Evidence against a rate below the usual one: the trend of slopes, in [0, 1].
    final_rate_factor: float = 0.7  #: Factor of the rate at the end of the search.
    slope_gain: float = 0.015
    """Largest change of the rate's logarithm per step after it, at a slope of the usual size ..."""
    late_slope_gain: float = 4.0  #: ... or this over the number of steps, if that is less.
    turn_gain: float = 0.4  #: Added to it, over one plus the number of turns of the trend (Kesten's rule).
    log_rate_fall: float = 0.0045  #: Fall of the rate's logarithm per step ...
    late_log_rate_fall: float = 1.5  #: ... or this over the number of steps, if that is less.
    scheduled_fall: float = 1.0  #: The same while a scheduler lowers the rate: runs without one fall about as 1/steps.
    #: Reduction by a scheduler at which slopes cease to count, else the rate would grow by as much.
    max_reduction: float = 0.1
    min_search_factor: float = 0.5  #: Smallest factor of a scheduler at which the search goes on.
    trend_decay: float = 0.7  #: Decay per step of the trend of slopes.
    slope_size_decay: float = 0.95  #: Decay per step of the slopes' mean size.
    usual_slope_ratio: float = 1.25
    """The usual size, in units of the mean size: of normal numbers, their root mean square."""
    direction_gain: float = 0.03  #: Change of the logarithm of a direction's factor per step ...
    early_direction_gain: float = 0.3  #: ... and an addition to it, over the number of steps.
    max_log_factor: float = 1.15  #: Bound of the logarithm of a direction's factor: factors stay within a tenfold.
    min_relative_slope: float = 1e-3  #: Fraction of the largest direction's slope below which a slope is rounding.
    anneal_fraction: float = 0.45  #: Last fraction of a known number of steps, in which steps shrink linearly ...
    final_fraction: float = 1e-3  #: ... until this fraction of the steps remains: they never vanish.
    max_cap_steps: int = 100  #: Steps at the longest step that end the search, as in adversarial training.
    reference_steps: int = 1000  #: Steps for which gain and fall are meant; a larger known number stretches them.


PRECONDITIONER, STEP, EMBEDDING, STEP_SIZE_SEARCH = (
    PreconditionerConfig(),
    StepConfig(),
    EmbeddingConfig(),
    StepSizeSearch(),
)
SKIPPED_BEFORE_WARNING = 10  #: Skipped steps before the first that is taken, after which a warning is given.
ParameterGroup = dict[str, Any]  #: A parameter group.


def raise_error(name: str, constraint: str, got: str, remedy: str) -> NoReturn:
    """Raise the error of a value that violates a constraint."""
    raise ValueError(f"CustomOptimizer: `{name}` must {constraint}; got {got}. {remedy}")
