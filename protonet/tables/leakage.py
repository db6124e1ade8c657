"""Detect columns that identify the class because of how the table was made: row indices, identifiers, label copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LeakageRules:
    """When a column is not a feature."""

    min_rows: int = 10  #: Fewer rows may be in order by chance.
    max_range_per_row: float = 1.2
    """Distinct integers that span at most this many values per row are row indices: ten draws from twelve values are
    all different in four of a thousand cases."""


LEAKAGE = LeakageRules()


def detect_row_index(column: np.ndarray) -> str:
    """Detect a column (n,), in file order, that can only be an index or identifier; return the reason, or ""."""
    n = len(column)
    if n < LEAKAGE.min_rows or not np.array_equal(column, np.rint(column)):
        return ""
    ordered = np.sort(column)
    if not (ordered[1:] > ordered[:-1]).all():
        return ""
    if _is_monotonic(column, strictly=True):
        return "distinct integers in the order of the rows"
    return "a distinct number for each row" if ordered[-1] - ordered[0] < LEAKAGE.max_range_per_row * n else ""


def detect_leakage(column: np.ndarray, labels: np.ndarray) -> str:
    """Detect a column (n,) that may leak the labels (n,), unlike in new rows; return the reason, or ""."""
    n, ordered = len(column), np.sort(column)
    if n < LEAKAGE.min_rows or ordered[0] == ordered[-1]:
        return ""
    n_distinct, monotonic = 1 + int((ordered[1:] != ordered[:-1]).sum()), _is_monotonic(column)
    distinct_integers = n_distinct == n and np.array_equal(column, np.rint(column))
    if not (monotonic or distinct_integers or 2 * n_distinct <= n):  # most columns: tables may have thousands
        return ""
    n_classes = len(np.unique(labels))
    if n_classes < 2:
        return ""
    n_runs = 1 + int((labels[1:] != labels[:-1]).sum())
    if monotonic and n_runs == n_classes and _separates(column, labels, n_classes):
        return "determines the class, as the order of the rows does"
    counts = np.unique(column, return_counts=True)[1]
    if len(counts) == n_classes and counts.min() > 1 and _separates(column, labels, n_classes):
        return "has one value for each class"
    sorted_by_class = distinct_integers and _separates(column, labels, n_classes)
    return "has distinct integers that are sorted by class" if sorted_by_class else ""


def _is_monotonic(column: np.ndarray, *, strictly: bool = False) -> bool:
    """Test whether a column increases, or decreases, from row to row."""
    before, after = column[:-1], column[1:]
    increases, decreases = (after > before, after < before) if strictly else (after >= before, after <= before)
    return bool(increases.all() or decreases.all())


def _separates(column: np.ndarray, labels: np.ndarray, n_classes: int) -> bool:
    """Test whether the values of each class are an interval without values of other classes."""
    order = np.lexsort((labels, column))
    ends = np.flatnonzero(labels[order][1:] != labels[order][:-1])
    return len(ends) == n_classes - 1 and bool((column[order][ends] < column[order][ends + 1]).all())
