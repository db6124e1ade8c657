"""Tables of measurements: means with standard errors, in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least one value and its standard error (NaN for a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def format_mean(values: Sequence[float], *, digits: int = 2, sign: bool = False) -> str:
    """Return ``mean ±error``, the mean with its sign if asked for, or an empty text for no value."""
    if not values:
        return ""
    mean, error = mean_and_error(values)
    mean = round(mean, digits) + 0.0  # no -0.00
    text = f"{mean:{'+' if sign else ''}.{digits}f}"
    return text if math.isnan(error) else f"{text} ±{error:.{digits}f}"
