"""Adaptation of the step size, which all parameters of a training run share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protonet.optimizer.settings import EMBEDDING, STEP_SIZE, raise_error


@dataclass
class OptimizerRun:
    """The step size of one training run, with the statistics of slopes by which it is adapted."""

    rate: float  #: Step size, divided by the learning rate.
    total_steps: int | None = None  #: Number of steps of the run; None if unknown.
    steps: int = 0  #: Steps taken.
    n_skipped: int = 0  #: Steps skipped because a gradient was not finite.
    rate_after_search: float = 0.0  #: The rate at the end of the initial search; 0 during it.
    n_slopes: int = 0  #: Number of slopes so far.
    mean_abs_slope: float = 0.0  #: Moving average of absolute slopes, not corrected for bias.
    trend: float = 0.0  #: Moving average of normalized slopes, in [-1, 1]; > 0 if steps lead downhill.
    n_sign_changes: int = 0  #: Number of sign changes of ``trend`` after the search.
    n_steps_at_cap: int = 0  #: Number of search steps at the maximum step size.
    lr_factor: float = 0.0  #: Largest ratio of a group's learning rate to its initial one, at the last step ...
    max_lr_factor: float = 0.0  #: ... and at any step.
    anneal_fraction: float = STEP_SIZE.anneal_fraction
    """Fraction of ``total_steps`` at the end in which the step size is annealed."""

    def annealing_factor(self, steps: int) -> float:
        """Compute the factor of the step size after some steps: 1 at first, then a linear decay."""
        if self.total_steps is None:
            return 1.0
        return min(1.0, max(STEP_SIZE.final_rate_fraction, 1 - steps / self.total_steps) / self.anneal_fraction)

    def __post_init__(self) -> None:
        """Raise a ValueError if the total number of steps is not a positive int."""
        if self.total_steps is not None and (type(self.total_steps) is not int or self.total_steps < 1):
            raise_error("total_steps", "be an int >= 1", repr(self.total_steps), "Use None if it is not known.")

    def adapt_rate(self, slope: float, lr: float, factor: float = 1.0) -> None:
        """Adapt the step size to a slope: the inner product of the new gradient and the last step.

        ``lr`` is the largest initial learning rate of the parameter groups, ``factor`` the largest ratio of a group's
        current learning rate to its initial one, which a scheduler changes.
        """
        length = self.rate * self.annealing_factor(self.steps - 1) * self.lr_factor
        rising = factor > self.max_lr_factor > 0
        self._set_scheduler_factor(factor, lr)
        downhill = -slope / length if length else 0.0
        # The first step has no slope, and neither has a gradient that is 0.
        if downhill == 0 or not math.isfinite(downhill):
            return
        unit, reduced = lr * (self.max_lr_factor or 1.0), factor / (self.max_lr_factor or 1.0)
        self.n_slopes += 1
        self.mean_abs_slope += (1 - STEP_SIZE.slope_decay) * (abs(downhill) - self.mean_abs_slope)
        usual_size = STEP_SIZE.slope_rms_ratio * self.mean_abs_slope / (1 - STEP_SIZE.slope_decay**self.n_slopes)
        evidence, last_trend = max(-1.0, min(1.0, downhill / usual_size)), self.trend
        self.trend = STEP_SIZE.trend_decay * last_trend + (1 - STEP_SIZE.trend_decay) * evidence
        if self.rate_after_search:
            self.n_sign_changes += (last_trend > 0) != (self.trend > 0)
            # Gain and fall are set for ``reference_steps``; both are lower in longer runs.
            stretch = max(1.0, (self.total_steps or 0) / STEP_SIZE.reference_steps)
            # Slopes would raise the rate by as much as a scheduler reduces it.
            trust = max(0.0, 1 - (1 - reduced) / STEP_SIZE.max_scheduler_reduction)
            gain = min(
                STEP_SIZE.slope_gain / stretch, STEP_SIZE.late_slope_gain / self.n_slopes
            ) + STEP_SIZE.sign_change_gain / (1 + self.n_sign_changes)
            late_fall = trust * STEP_SIZE.late_log_rate_decay + (1 - trust) * STEP_SIZE.scheduled_log_rate_decay
            fall = min(STEP_SIZE.log_rate_decay / stretch, late_fall / self.n_slopes)
            # No slope takes the rate below it; it is higher on longer runs (docs/decisions/optimizer-decay.md).
            min_rate = min(self.rate_after_search, math.sqrt(stretch) / self.n_slopes / unit)
            self.rate = max(min_rate, self.rate * math.exp(trust * gain * evidence - fall))
        elif self.trend < (
            0 if self.rate * unit >= STEP_SIZE.usual_step_size and not rising else -STEP_SIZE.max_uphill_trend
        ):
            self.rate *= STEP_SIZE.final_rate_factor
            self.rate_after_search = self.rate
        elif reduced >= STEP_SIZE.min_scheduler_factor and not rising:  # a warm-up is waited for
            self.rate *= math.exp(
                STEP_SIZE.log_rate_growth * (self.trend if self.rate * unit >= STEP_SIZE.usual_step_size else 1)
            )

    def _set_scheduler_factor(self, factor: float, lr: float) -> None:
        """Set ``lr_factor``. If a warm-up raises it, lower ``rate`` by the same ratio, down to ``usual_step_size``."""
        if factor > self.max_lr_factor:
            if self.max_lr_factor:
                scale = max(self.max_lr_factor / factor, min(1.0, STEP_SIZE.usual_step_size / lr / self.rate))
                self.rate, self.rate_after_search = self.rate * scale, self.rate_after_search * scale
            self.max_lr_factor = factor
        self.lr_factor = factor

    def cap_rate(self, max_rate: float, *, embeddings_alone: bool) -> None:
        """Cap the learning rate at ``max_rate / (annealing factor * largest factor of a scheduler)``.

        Some steps at the cap end the initial search. If all parameters are embeddings, which train best near the cap,
        they do not, and annealing starts earlier.
        """
        self.anneal_fraction = EMBEDDING.anneal_fraction if embeddings_alone else STEP_SIZE.anneal_fraction
        max_rate = max_rate / self.annealing_factor(self.steps) / (self.max_lr_factor or 1.0)
        if self.rate >= max_rate:
            self.rate = max_rate
            self.n_steps_at_cap += not self.rate_after_search
            if not embeddings_alone and self.n_steps_at_cap >= STEP_SIZE.max_steps_at_cap:
                self.rate_after_search = self.rate_after_search or max_rate
