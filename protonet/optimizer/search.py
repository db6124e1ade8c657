"""Adaptation of the step size, which all parameters of a training run share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protonet.optimizer.settings import EMBEDDING, STEP_SIZE_SEARCH, raise_error


@dataclass
class OptimizerRun:
    """The step size of one training run, with the statistics of slopes by which it is adapted."""

    rate: float  #: Step size, divided by the learning rate.
    total_steps: int | None = None  #: Number of steps of the run; None if unknown.
    steps: int = 0  #: Steps taken.
    skipped: int = 0  #: Steps skipped because a gradient was not finite.
    settled_rate: float = 0.0  #: The rate at the end of the initial search; 0 during it.
    slopes: int = 0  #: Number of slopes so far.
    slope_size: float = 0.0  #: Moving average of absolute slopes, not corrected for bias.
    trend: float = 0.0  #: Moving average of normalized slopes, in [-1, 1]; > 0 if steps lead downhill.
    turns: int = 0  #: Number of sign changes of ``trend`` after the search.
    steps_at_cap: int = 0  #: Number of search steps at the maximum step size.
    factor: float = 0.0  #: Largest ratio of a group's learning rate to its initial one, at the last step ...
    peak_factor: float = 0.0  #: ... and at any step.
    anneal_fraction: float = STEP_SIZE_SEARCH.anneal_fraction
    """Fraction of ``total_steps`` at the end in which the step size is annealed."""

    def anneal(self, steps: int) -> float:
        """Compute the factor of the step size after some steps: 1 at first, then a linear decay."""
        if self.total_steps is None:
            return 1.0
        return min(1.0, max(STEP_SIZE_SEARCH.final_fraction, 1 - steps / self.total_steps) / self.anneal_fraction)

    def __post_init__(self) -> None:
        """Raise a ValueError if the total number of steps is not a positive int."""
        if self.total_steps is not None and (type(self.total_steps) is not int or self.total_steps < 1):
            raise_error("total_steps", "be an int >= 1", repr(self.total_steps), "Use None if it is not known.")

    def adapt_rate(self, slope: float, lr: float, factor: float = 1.0) -> None:
        """Adapt the step size to a slope: the inner product of the new gradient and the last step.

        ``lr`` is the largest initial learning rate of the parameter groups, ``factor`` the largest ratio of a group's
        current learning rate to its initial one, which a scheduler changes.
        """
        length, rising = self.rate * self.anneal(self.steps - 1) * self.factor, factor > self.peak_factor > 0
        self._set_scheduler_factor(factor, lr)
        downhill = -slope / length if length else 0.0
        if downhill == 0 or not math.isfinite(downhill):
            return
        unit, reduced = lr * (self.peak_factor or 1.0), factor / (self.peak_factor or 1.0)
        self.slopes += 1
        self.slope_size += (1 - STEP_SIZE_SEARCH.slope_size_decay) * (abs(downhill) - self.slope_size)
        usual_size = (
            STEP_SIZE_SEARCH.usual_slope_ratio * self.slope_size / (1 - STEP_SIZE_SEARCH.slope_size_decay**self.slopes)
        )
        evidence, last_trend = max(-1.0, min(1.0, downhill / usual_size)), self.trend
        self.trend = STEP_SIZE_SEARCH.trend_decay * last_trend + (1 - STEP_SIZE_SEARCH.trend_decay) * evidence
        if self.settled_rate:
            self.turns += (last_trend > 0) != (self.trend > 0)
            stretch = max(1.0, (self.total_steps or 0) / STEP_SIZE_SEARCH.reference_steps)
            trust = max(0.0, 1 - (1 - reduced) / STEP_SIZE_SEARCH.max_reduction)
            gain = min(
                STEP_SIZE_SEARCH.slope_gain / stretch, STEP_SIZE_SEARCH.late_slope_gain / self.slopes
            ) + STEP_SIZE_SEARCH.turn_gain / (1 + self.turns)
            late_fall = trust * STEP_SIZE_SEARCH.late_log_rate_fall + (1 - trust) * STEP_SIZE_SEARCH.scheduled_fall
            fall = min(STEP_SIZE_SEARCH.log_rate_fall / stretch, late_fall / self.slopes)
            # No slope takes the rate below it.
            min_rate = min(self.settled_rate, math.sqrt(stretch) / self.slopes / unit)
            self.rate = max(min_rate, self.rate * math.exp(trust * gain * evidence - fall))
        elif self.trend < (
            0 if self.rate * unit >= STEP_SIZE_SEARCH.usual_rate and not rising else -STEP_SIZE_SEARCH.max_uphill_trend
        ):
            self.rate *= STEP_SIZE_SEARCH.final_rate_factor
            self.settled_rate = self.rate
        elif reduced >= STEP_SIZE_SEARCH.min_search_factor and not rising:  # a warm-up is waited for
            self.rate *= math.exp(
                STEP_SIZE_SEARCH.log_rate_growth
                * (self.trend if self.rate * unit >= STEP_SIZE_SEARCH.usual_rate else 1)
            )

    def _set_scheduler_factor(self, factor: float, lr: float) -> None:
        """Set the scheduler's ``factor``; in a warm-up, reduce ``rate`` by as much, down to the usual step size."""
        if factor > self.peak_factor:
            if self.peak_factor:
                scale = max(self.peak_factor / factor, min(1.0, STEP_SIZE_SEARCH.usual_rate / lr / self.rate))
                self.rate, self.settled_rate = self.rate * scale, self.settled_rate * scale
            self.peak_factor = factor
        self.factor = factor

    def cap_rate(self, max_rate: float, *, embeddings_alone: bool) -> None:
        """Cap the rate at ``max_rate``, divided by the annealing factor and by the largest factor of a scheduler.

        If all parameters are embeddings, which train best near this cap, reaching it does not end the initial search,
        and annealing starts earlier.
        """
        self.anneal_fraction = EMBEDDING.anneal_fraction if embeddings_alone else STEP_SIZE_SEARCH.anneal_fraction
        max_rate = max_rate / self.anneal(self.steps) / (self.peak_factor or 1.0)
        if self.rate >= max_rate:
            self.rate = max_rate
            self.steps_at_cap += not self.settled_rate
            if not embeddings_alone and self.steps_at_cap >= STEP_SIZE_SEARCH.max_cap_steps:
                self.settled_rate = self.settled_rate or max_rate
