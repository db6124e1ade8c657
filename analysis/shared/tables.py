"""Tables of measurements in Markdown: means with standard errors, and columns of rows."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

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


class Quantity(NamedTuple):
    """A quantity that methods are compared by."""

    key: str  #: Of the rows of `gather`.
    title: str
    digits: int = 2
    sign: int = 0  #: 1 if more is better, -1 if less is, 0 if methods are not ranked by it.
    factor: float = 1.0  #: From its unit in rows to that in the table.


def average(row: Mapping[str, Any], key: str, method: str) -> float:
    """Compute the mean over splits of a quantity of a method."""
    return statistics.fmean(row[key][method])


def pick_best(row: Mapping[str, Any], key: str, baselines: Iterable[str]) -> str | None:
    """Pick the baseline of the highest mean in a row, in hindsight; None if there is none."""
    return max((name for name in baselines if name in row[key]), key=lambda name: average(row, key, name), default=None)


def tabulate_rows(
    rows: Sequence[Mapping[str, Any]], key: str, methods: Mapping[str, str], baselines: Collection[str]
) -> str:
    """Format a line per row: all methods by their titles, the best baseline, and the first method's regret."""
    main, lines = next(iter(methods)), []
    for row in rows:
        best = pick_best(row, key, baselines) or ""
        regret = format_mean(subtract(row[key].get(best, []), row[key][main]), sign=True)
        means = [format_mean(row[key][method]) for method in methods]
        lines.append([row["dataset"], str(row["shots"]), *means, methods.get(best, ""), regret])
    header = ["data set", "shots", *methods.values(), "best baseline", f"regret of {methods[main]}"]
    return format_table(header, lines)


def tabulate_methods(
    rows: Sequence[Mapping[str, Any]],
    quantities: Sequence[Quantity],
    methods: Mapping[str, str],
    baselines: Collection[str],
) -> str:
    """Format a line per method: means over rows, with mean ranks, and the regret by the first quantity."""
    columns: dict[str, dict[str, str]] = {}
    for quantity in quantities:
        there = [name for name in methods if all(name in row.get(quantity.key, {}) for row in rows)]
        means = np.array([[average(row, quantity.key, name) for name in there] for row in rows])  # (rows, methods)
        cells = [f"{quantity.factor * mean:.{quantity.digits}f}" for mean in means.mean(axis=0)]
        if quantity.sign and len(there) > 1:
            ranks = rankdata(-quantity.sign * means.round(9), axis=1).mean(axis=0)
            cells = [f"{cell} ({rank:.1f})" for cell, rank in zip(cells, ranks, strict=True)]
        if there:
            columns[quantity.title] = dict(zip(there, cells, strict=True))
    key, titles = quantities[0].key, dict(methods)
    if any(method in baselines for method in methods):
        best = [average(row, key, pick_best(row, key, baselines) or "") for row in rows]
        mean, worst = columns["mean regret"], columns["worst regret"] = {"best": "+0.00"}, {}
        for method in methods:
            regrets = [top - average(row, key, method) for row, top in zip(rows, best, strict=True)]
            at = rows[int(np.argmax(regrets))]
            mean[method] = f"{statistics.fmean(regrets):+.2f}"
            worst[method] = f"{max(regrets):+.2f} ({at['dataset']} {at['shots']})"
        columns[quantities[0].title]["best"] = f"{statistics.fmean(best):.2f}"
        titles["best"] = "best baseline per data set (oracle)"
    lines = [[title, *(column.get(name, "") for column in columns.values())] for name, title in titles.items()]
    return format_table(["method", *columns], lines)


def write_csv(path: Path, header: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
    """Write a table as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def format_columns(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a table, given headings and the format of their cells, such as ``{seconds:.1f}``."""
    return format_table(list(columns), [[text.format(**row) for text in columns.values()] for row in rows])
