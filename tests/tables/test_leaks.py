from __future__ import annotations

import numpy as np
import pytest

from protonet.tables.leaks import find_groups, find_row_number, find_suspicion

RNG = np.random.default_rng(0)
ROWS = np.arange(30.0)
SORTED = np.repeat(["a", "b", "c"], 10)
MIXED = np.tile(["a", "b", "c"], 10)


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (ROWS, "whole numbers that all differ, in the order of the rows"),
        (1e6 - 7 * ROWS, "whole numbers that all differ, in the order of the rows"),
        (np.cumsum(RNG.integers(1, 99, 30)), "whole numbers that all differ, in the order of the rows"),
        (RNG.permutation(ROWS) + 1000, "a number for each row"),
        (RNG.permutation(ROWS) * 50, ""),
        (ROWS + 0.5, ""),
        (np.minimum(ROWS, 28), ""),
        (RNG.normal(size=30), ""),
        (ROWS[:9], ""),
    ],
)
def test_row_numbers_are_found(column: np.ndarray, reason: str) -> None:
    assert find_row_number(column) == reason


@pytest.mark.parametrize(
    ("column", "labels", "reason"),
    [
        (ROWS + 0.5, SORTED, "tells the class, as the order of the rows does"),
        (ROWS // 5, SORTED, "tells the class, as the order of the rows does"),
        (ROWS + 0.5, MIXED, ""),
        (RNG.normal(size=30), SORTED, ""),
        (ROWS // 7, SORTED, ""),
        (np.tile([7.0, 2.0, 5.0], 10), MIXED, "has one value for each class"),
        (
            np.tile([0.0, 1000.0, 2000.0], 10) + 31 * (ROWS // 3),
            MIXED,
            "has whole numbers that all differ, sorted by class",
        ),
        (np.ones(30), SORTED, ""),
        (ROWS, np.repeat(["a"], 30), ""),
    ],
)
def test_columns_that_tell_too_much_are_found(column: np.ndarray, labels: np.ndarray, reason: str) -> None:
    assert find_suspicion(column, labels) == reason


SUBJECTS = np.repeat(np.arange(30), 4)
OF_SUBJECT = RNG.integers(3, size=30)[SUBJECTS]
SHUFFLED = RNG.permutation(120)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (SUBJECTS, OF_SUBJECT),
        (SUBJECTS[SHUFFLED], OF_SUBJECT[SHUFFLED]),
        (RNG.permutation(5000)[SUBJECTS], OF_SUBJECT),
        (np.repeat(np.arange(40), 2), RNG.integers(2, size=40)[np.repeat(np.arange(40), 2)]),
        (np.repeat(np.arange(10), 100), np.repeat(np.arange(10) % 2, 100)),
        (SUBJECTS, np.where(SHUFFLED == 7, 1 - OF_SUBJECT % 2, OF_SUBJECT % 2)),  # one row of another class
    ],
)
def test_columns_that_name_sources_are_found(values: np.ndarray, labels: np.ndarray, ordered: bool) -> None:
    assert find_groups(values, labels, ordered=ordered) == len(np.unique(values))


def test_features_of_the_world_name_no_sources() -> None:
    """Categories, whole numbers and thresholds of them, rounded ones, identifiers; classes of a few rows, too."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(20, 400))
        y = rng.integers(int(rng.integers(2, 5)), size=n)
        z, age = rng.normal(size=n) + 3 * y, rng.integers(0, 50, n)
        island = np.where(rng.random(n) < 0.8, y, rng.integers(3, size=n))
        rare = (rng.random(n) < 0.05).astype(int)
        for values, labels, ordered in (
            (np.round(3 * z), y, True),
            (np.round(z, 1), y, True),
            (rng.poisson(3 + 5 * y), y, True),
            (age, y, True),
            (age, (age > 25).astype(int), True),
            (age, age // 10, True),
            (rng.permutation(n), y, True),
            (rng.integers(0, 30, n), y, False),
            (rng.integers(0, n, n), y, False),
            (rng.integers(0, n // 3 + 1, n), rare, False),
            (island, y, False),
            (rng.integers(0, 6, n), rng.integers(0, 6, n) % 2, False),
        ):
            assert find_groups(values, labels, ordered=ordered) == 0
    six = np.arange(300) % 6
    assert find_groups(six, six % 2, ordered=False) == 0  # a category that truly tells the class
