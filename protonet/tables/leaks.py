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
    least_groups: int = 8  #: Values that come again, at least, and for each class so many: ...
    groups_per_class: int = 3  #: ... of fewer, a feature of the world may well tell the class.
    covered: float = 0.5  #: Of the rows, those whose value comes again, at least.
    mixed: float = 0.1  #: Of the values that come again, those with rows of several classes, at most.
    chance: float = 1e-4  #: The probability, at most, of so few if class and value were independent.


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
    n, classes = len(column), len(np.unique(labels))
    if n < LEAKS.least_rows or classes < 2 or column.min() == column.max():
        return ""
    runs = _count_runs(labels)
    if _is_in_order(column) and runs == classes and _tells(column, labels, classes):
        return "tells the class, as the order of the rows does"
    values, counts = np.unique(column, return_counts=True)
    if len(values) == classes and counts.min() > 1 and _tells(column, labels, classes):
        return "has one value for each class"
    whole = len(values) == n and np.array_equal(column, np.rint(column))
    return "has whole numbers that all differ, sorted by class" if whole and _tells(column, labels, classes) else ""


def find_groups(values: np.ndarray, labels: np.ndarray, *, ordered: bool) -> int:
    """Count the values of a column that name sources of rows, such as persons: each comes again, with one class.

    A category that tells the class has few values. A number that tells it changes the class a few times from its least
    value to its largest, where names change it as often as chance; or each value has its rows one behind the other.

    Args:
        values: (n,) in the order of the file, of any kind that can be sorted.
        labels: (n,) the classes.
        ordered: Whether the values are in an order that means something, as numbers are.

    Returns:
        How many there are; 0 where the column may be a feature of the world.
    """
    n, (classes, y) = len(labels), np.unique(labels, return_inverse=True)
    levels, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    again = counts > 1
    least = max(LEAKS.least_groups, LEAKS.groups_per_class * len(classes))
    if again.sum() < least or counts[again].sum() < LEAKS.covered * n:
        return 0
    held = np.bincount(places * len(classes) + y, minlength=len(levels) * len(classes)).reshape(len(levels), -1)[again]
    mixed = int((held.max(axis=1) < counts[again]).sum())
    shares = np.bincount(y) / n
    expected = float((1 - (shares ** counts[again][:, None]).sum(axis=1)).sum())
    # Source of the bound: of the lower tail of a sum of independent events, Chernoff (1952).
    log_chance = mixed - expected + mixed * np.log(expected / mixed) if mixed else -expected
    if mixed > LEAKS.mixed * len(held) or log_chance > np.log(LEAKS.chance):
        return 0
    if ordered and _count_runs(places) > len(levels):
        own = held.argmax(axis=1)
        share = 1 - float(np.square(np.bincount(own) / len(own)).sum())
        changes = (len(own) - 1) * share
        if _count_runs(own) - 1 < changes - 2 * np.sqrt(changes * (1 - share)):
            return 0
    return len(held)


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
