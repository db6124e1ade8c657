"""Columns that tell the class by how the table came about: row numbers, identifiers, copies of the label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LeakRules:
    """When a column is no feature."""

    least_rows: int = 10  #: Fewer rows may be in any order by chance.
    dense: float = 1.2
    """Whole numbers that are all different, and span at most this many times as many values as there are rows, are
    numbers of the rows: of ten draws from twelve values, four in a thousand are all different."""


LEAKS = LeakRules()


def find_row_number(column: np.ndarray) -> str:
    """Say why a column (n,), in the order of the file, can be nothing but a name of each row; "" if it can."""
    n = len(column)
    if n < LEAKS.least_rows or not np.array_equal(column, np.rint(column)):
        return ""
    ordered = np.sort(column)
    if not (ordered[1:] > ordered[:-1]).all():
        return ""
    if _is_in_order(column, strictly=True):
        return "whole numbers that all differ, in the order of the rows"
    return "a number for each row" if ordered[-1] - ordered[0] < LEAKS.dense * n else ""


def find_suspicion(column: np.ndarray, labels: np.ndarray) -> str:
    """Say why a column (n,) may tell the classes (n,) in a way that new rows will not share; "" if it does not."""
    n, ordered = len(column), np.sort(column)
    if n < LEAKS.least_rows or ordered[0] == ordered[-1]:
        return ""
    distinct, in_order = 1 + int((ordered[1:] != ordered[:-1]).sum()), _is_in_order(column)
    whole = distinct == n and np.array_equal(column, np.rint(column))
    if not (in_order or whole or 2 * distinct <= n):  # most columns of numbers, and a table may have thousands
        return ""
    classes = len(np.unique(labels))
    if classes < 2:
        return ""
    if in_order and _count_runs(labels) == classes and _tells(column, labels, classes):
        return "tells the class, as the order of the rows does"
    counts = np.unique(column, return_counts=True)[1]
    if len(counts) == classes and counts.min() > 1 and _tells(column, labels, classes):
        return "has one value for each class"
    return "has whole numbers that all differ, sorted by class" if whole and _tells(column, labels, classes) else ""


def _is_in_order(column: np.ndarray, *, strictly: bool = False) -> bool:
    """Return whether a column rises, or falls, from row to row."""
    before, after = column[:-1], column[1:]
    rises, falls = (after > before, after < before) if strictly else (after >= before, after <= before)
    return bool(rises.all() or falls.all())


def _count_runs(labels: np.ndarray) -> int:
    """Return how many runs of equal labels there are."""
    return 1 + int((labels[1:] != labels[:-1]).sum())


def _tells(column: np.ndarray, labels: np.ndarray, classes: int) -> bool:
    """Return whether each class is an interval of the column's values."""
    order = np.lexsort((labels, column))
    ends = np.flatnonzero(labels[order][1:] != labels[order][:-1])
    return len(ends) == classes - 1 and bool((column[order][ends] < column[order][ends + 1]).all())
