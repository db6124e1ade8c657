"""Markdown tables that compare methods on data sets: means with standard errors, ranks and regrets."""

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
    """Compute the mean of one or more values and its standard error, NaN for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def format_mean(values: Sequence[float], *, digits: int = 2, sign: bool = False) -> str:
    """Format the mean of values and its standard error as ``mean ±error``; return "" without values."""
    if not values:
        return ""
    mean, error = mean_and_error(values)
    mean = round(mean, digits) + 0.0  # no -0.00
    text = f"{mean:{'+' if sign else ''}.{digits}f}"
    return text if math.isnan(error) else f"{text} ±{error:.{digits}f}"


def mean_by_group(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """Compute the mean of the values of each group, such as the tables of a repository."""
    grouped: dict[str, list[float]] = {}
    for group, value in zip(groups, values, strict=True):
        grouped.setdefault(group, []).append(value)
    return [statistics.fmean(members) for members in grouped.values()]


def paired_differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Compute the differences left - right of paired values; return an empty list if either is empty."""
    return [a - b for a, b in zip(left, right, strict=True)] if left and right else []


def group_by_dataset(results: Mapping[Any, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Group results by data set and shots: ``row[quantity][method]`` lists the values of all splits."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for run, result in results.items():
        row = rows.setdefault((run.dataset, run.shots), {"dataset": run.dataset, "shots": run.shots})
        for quantity, value in result.items():
            row.setdefault(quantity, {}).setdefault(run.method, []).append(value)
    return list(rows.values())


class ComparedQuantity(NamedTuple):
    """A measured quantity by which methods are compared, such as the accuracy."""

    key: str  #: Its key in the rows of `group_by_dataset`.
    title: str  #: Its column heading.
    digits: int = 2  #: Decimal places.
    direction: int = 0  #: 1 if higher values are better, -1 if lower values are, 0 if methods are not ranked.
    unit_factor: float = 1.0  #: Factor from the unit of the rows to the unit of the table.


def get_best_baseline(row: Mapping[str, Any], key: str, baselines: Iterable[str]) -> str | None:
    """Return the baseline whose mean over splits of ``row[key]`` is highest; None without baselines."""
    names = [name for name in baselines if name in row[key]]
    return max(names, key=lambda name: statistics.fmean(row[key][name]), default=None)


def tabulate_datasets(
    rows: Sequence[Mapping[str, Any]], key: str, methods: Mapping[str, str], baselines: Collection[str]
) -> str:
    """Format a table with a line per data set and shots: means of methods, best baseline, first method's regret."""
    main, lines = next(iter(methods)), []
    for row in rows:
        best = get_best_baseline(row, key, baselines) or ""
        regret = format_mean(paired_differences(row[key].get(best, []), row[key][main]), sign=True)
        means = [format_mean(row[key][method]) for method in methods]
        lines.append([row["dataset"], str(row["shots"]), *means, methods.get(best, ""), regret])
    header = ["data set", "shots", *methods.values(), "best baseline", f"regret of {methods[main]}"]
    return format_table(header, lines)


def tabulate_methods(
    rows: Sequence[Mapping[str, Any]],
    quantities: Sequence[ComparedQuantity],
    methods: Mapping[str, str],
    baselines: Collection[str],
) -> str:
    """Format a table with a line per method: means over rows, mean ranks, and regrets in the first quantity."""
    columns: dict[str, dict[str, str]] = {}
    for quantity in quantities:
        measured = [name for name in methods if all(name in row.get(quantity.key, {}) for row in rows)]
        means = np.array([[statistics.fmean(row[quantity.key][name]) for name in measured] for row in rows])
        cells = [f"{quantity.unit_factor * mean:.{quantity.digits}f}" for mean in means.mean(axis=0)]
        if quantity.direction and len(measured) > 1:
            ranks = rankdata(-quantity.direction * means.round(9), axis=1).mean(axis=0)
            cells = [f"{cell} ({rank:.1f})" for cell, rank in zip(cells, ranks, strict=True)]
        if measured:
            columns[quantity.title] = dict(zip(measured, cells, strict=True))
    key, titles = quantities[0].key, dict(methods)
    if any(method in baselines for method in methods):
        best = [statistics.fmean(row[key][get_best_baseline(row, key, baselines)]) for row in rows]
        mean, worst = columns["mean regret"], columns["worst regret"] = {"best": "+0.00"}, {}
        for method in methods:
            regrets = [top - statistics.fmean(row[key][method]) for row, top in zip(rows, best, strict=True)]
            at = rows[int(np.argmax(regrets))]
            mean[method] = f"{statistics.fmean(regrets):+.2f}"
            worst[method] = f"{max(regrets):+.2f} ({at['dataset']} {at['shots']})"
        columns[quantities[0].title]["best"] = f"{statistics.fmean(best):.2f}"
        titles["best"] = "best baseline per data set (oracle)"
    lines = [[title, *(column.get(name, "") for column in columns.values())] for name, title in titles.items()]
    return format_table(["method", *columns], lines)


def write_csv(path: Path, header: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
    """Write a header and rows as a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
