"""Tables of measurements in Markdown: means with standard errors, and columns of rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from protonet.ui.text import format_table


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Compute the mean of at least one value and its standard error (NaN for a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def format_mean(values: Sequence[float], *, digits: int = 2, sign: bool = False) -> str:
    """Format ``mean ±error``, optionally with the sign of the mean; "" for no value."""
    if not values:
        return ""
    mean, error = mean_and_error(values)
    mean = round(mean, digits) + 0.0  # no -0.00
    text = f"{mean:{'+' if sign else ''}.{digits}f}"
    return text if math.isnan(error) else f"{text} ±{error:.{digits}f}"


def subtract(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Compute paired differences; none if one side has no value."""
    return [a - b for a, b in zip(left, right, strict=True)] if left and right else []


def gather(results: Mapping[Any, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Group results by data set and shots: for each quantity and method, the values of the splits."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for run, result in results.items():
        row = rows.setdefault((run.dataset, run.shots), {"dataset": run.dataset, "shots": run.shots})
        for quantity, value in result.items():
            row.setdefault(quantity, {}).setdefault(run.method, []).append(value)
    return list(rows.values())


def average_rows(rows: Sequence[Mapping[str, Any]], quantity: str, method: str) -> float:
    """Compute the mean over rows of a quantity's mean over splits."""
    return statistics.fmean(statistics.fmean(row[quantity][method]) for row in rows)


def describe_regrets(regrets: Mapping[str, float]) -> list[str]:
    """Format the mean of regrets, and the largest with the name of its row."""
    worst = max(regrets, key=lambda name: regrets[name])
    return [f"{statistics.fmean(regrets.values()):+.2f}", f"{regrets[worst]:+.2f} ({worst})"]


def format_columns(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a table, given headings and the format of their cells, such as ``{seconds:.1f}``."""
    return format_table(list(columns), [[text.format(**row) for text in columns.values()] for row in rows])
