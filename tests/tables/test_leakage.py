from __future__ import annotations

import numpy as np

from protonet.tables.suspicious import detect_leakage, detect_row_index

RNG = np.random.default_rng(0)
ROWS = np.arange(30.0)
SORTED = np.repeat(["a", "b", "c"], 10)
ALTERNATING = np.tile(["a", "b", "c"], 10)


def test_row_indices_are_detected() -> None:
    cases: list[tuple[np.ndarray, str]] = [
        (ROWS, "distinct integers in the order of the rows"),
        (1e6 - 7 * ROWS, "distinct integers in the order of the rows"),
        (np.cumsum(RNG.integers(1, 99, 30)), "distinct integers in the order of the rows"),
        (RNG.permutation(ROWS) + 1000, "a distinct number for each row"),
        (RNG.permutation(ROWS) * 50, ""),
        (ROWS + 0.5, ""),
        (np.minimum(ROWS, 28), ""),
        (RNG.normal(size=30), ""),
        (ROWS[:9], ""),
    ]
    for column, reason in cases:
        assert detect_row_index(column) == reason, reason


def test_leakage_is_detected() -> None:
    cases: list[tuple[np.ndarray, np.ndarray, str]] = [
        (ROWS + 0.5, SORTED, "determines the class, as the order of the rows does"),
        (ROWS // 5, SORTED, "determines the class, as the order of the rows does"),
        (ROWS + 0.5, ALTERNATING, ""),
        (RNG.normal(size=30), SORTED, ""),
        (ROWS // 7, SORTED, ""),
        (np.tile([7.0, 2.0, 5.0], 10), ALTERNATING, "has one value for each class"),
        (
            np.tile([0.0, 1000.0, 2000.0], 10) + 31 * (ROWS // 3),
            ALTERNATING,
            "has distinct integers that are sorted by class",
        ),
        (np.ones(30), SORTED, ""),
        (ROWS, np.repeat(["a"], 30), ""),
    ]
    for column, labels, reason in cases:
        assert detect_leakage(column, labels) == reason, reason
