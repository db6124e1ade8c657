"""Drifted columns are reported, but not differences by chance or between classes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from protonet.tables.columns.category import Category
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.ordered import Date, Numeric
from protonet.tables.drift import DRIFT, DriftMonitor, compute_column_statistics
from protonet.tables.table import RowBlock, Table

COLUMNS = ("normal", "skewed", "cauchy", "count", "zeros", "gaps", "colour", "zip", "day")
DAY = np.datetime64("2024-01-01", "us")


def draw(rng: np.random.Generator, y: np.ndarray, shift: float = 2.0) -> list[np.ndarray]:
    """Draw columns of several distributions, of which the first depend on the class."""
    n = len(y)
    missing = rng.normal(size=n) + shift * y
    missing[rng.random(n) < 0.3] = np.nan
    return [
        rng.normal(size=n) + shift * y,
        rng.lognormal(size=n, sigma=2.0) * (1 + y),
        rng.standard_cauchy(size=n),
        rng.poisson(1 + 3 * y).astype(float),
        np.where(rng.random(n) < 0.8, 0.0, rng.exponential(size=n)),
        missing,
        rng.choice(np.array(["red", "green", "blue"], object), n),
        np.array([f"Z{count}" for count in rng.zipf(1.5, n) % 100_000], object),
        DAY + (rng.random(n) * 300 * 86_400_000_000).astype("timedelta64[us]"),
    ]


def fit(cells: Sequence[np.ndarray], y: np.ndarray) -> tuple[Any, Encoding]:
    numeric = [Numeric.fit(values) for values in cells[:6]]
    encoding = Encoding((*numeric, *map(Category.fit, cells[6:8]), Date.fit(cells[8])))
    statistics = compute_column_statistics(cells, encoding, np.bincount(y).tolist())
    return json.loads(json.dumps(statistics, allow_nan=False)), encoding


def warn(statistics: Any, encoding: Encoding | None, cells: Sequence[np.ndarray], blocks: int = 1) -> list[str]:
    """Compute the drift warnings for new rows that are read in several blocks."""
    monitor = DriftMonitor(statistics, encoding, len(cells))
    for rows in np.array_split(np.arange(len(cells[0])), blocks):
        monitor.update(RowBlock([values[rows] for values in cells], np.empty(0), (), rows.tolist(), rows.tolist()))
    return monitor.format_warnings(
        Table(columns=None if encoding is None else COLUMNS[: len(cells)], position_format="row {}")
    )


@pytest.mark.parametrize("new", ["same", "one class", "few"])
def test_false_alarms_are_rare(new: str) -> None:
    """Fit to 10 to 300 rows; new rows have the same distribution, or a single class, or are one to five."""
    rng, reported, tables = np.random.default_rng(0), 0, 60
    for _ in range(tables):
        classes = int(rng.integers(2, 5))
        y = rng.permutation(np.arange(int(rng.integers(5 * classes, 300))) % classes)
        m = int(rng.integers(1, 6) if new == "few" else rng.integers(6, 400))
        new_y = rng.integers(classes) * np.ones(m, int) if new == "one class" else rng.integers(classes, size=m)
        reported += bool(warn(*fit(draw(rng, y), y), draw(rng, new_y)))
    # 1 % of them, and three standard errors
    assert reported <= DRIFT.max_false_alarm_rate * tables + 3 * math.sqrt(DRIFT.max_false_alarm_rate * tables)


@pytest.fixture(scope="module")
def training() -> tuple[Any, Encoding, list[np.ndarray]]:
    """The statistics and encoding of 200 rows, and 60 new rows."""
    rng = np.random.default_rng(1)
    y, new_y = np.arange(200) % 2, rng.integers(2, size=60)
    return *fit(draw(rng, y), y), draw(rng, new_y)


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("normal", lambda x: 1000 * x, "most rows are outside"),
        ("normal", lambda x: x / 1000, "all rows are between "),
        ("normal", lambda x: x + 8, "most rows are outside"),
        ("normal", lambda x: 0 * x, "all rows are 0; in training "),
        ("skewed", lambda x: 1000 * x, "most rows are outside"),
        ("normal", lambda x: np.full_like(x, np.nan), "most cells are missing; in training none were"),
        ("gaps", lambda x: np.full_like(x, np.nan), "most cells are missing; in training "),
        ("colour", lambda x: np.full_like(x, ""), "most cells are missing"),
        ("zip", lambda x: np.array([f"Y{row}" for row in range(60)], object), "most rows have rare or unknown "),
        ("day", lambda x: x + np.timedelta64(900, "D"), "most rows are outside 2024-01-02 to 2024-10-25"),
        ("normal", lambda x: np.where(np.arange(60) == 50, 3000.0, x), "1 row is far outside -"),
        ("normal", lambda x: np.where(np.arange(60) > 57, 3000.0, x), "2 rows are far outside -"),
    ],
)
def test_drifted_columns_are_reported(
    training: tuple[Any, Encoding, list[np.ndarray]], column: str, change: Any, message: str
) -> None:
    statistics, encoding, cells = training
    assert not warn(statistics, encoding, cells)
    cells = [change(values) if name == column else values for name, values in zip(COLUMNS, cells, strict=True)]
    for blocks in (1, 7):
        (line,) = warn(statistics, encoding, cells, blocks)
        assert line.startswith(f"warning: {column} is far from the training rows: {message}")
        assert line.endswith("; another unit?") == (column in {"normal", "skewed"} and "missing" not in message)


def test_the_error_probability_is_shared_by_the_columns() -> None:
    """Two new rows lack a cell that 50 training rows have: by chance in 1 of 1,326 tables with one column."""
    for n_columns, reported in ((1, 1), (20, 0)):
        cells = [np.arange(50.0)] * n_columns
        statistics = compute_column_statistics(cells, None, [50])
        new = [np.full(2, np.nan), *[np.array([20.0, 30.0])] * (n_columns - 1)]
        assert len(warn(statistics, None, new)) == reported, n_columns


def test_arrays_without_an_encoding() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    statistics = compute_column_statistics(list(x.T), None, [20, 40])
    assert warn(statistics, None, list(x.T)) == []
    assert warn(statistics, None, list((x * [1, 1, 50]).astype(np.float32).T))[0].startswith("warning: column 2 is far")
    cells = [np.full(50, 0.123456789), np.arange(50.0)]  # constant columns are unchanged
    assert warn(compute_column_statistics(cells, None, [25, 25]), None, cells) == []


def test_invalid_statistics_are_ignored() -> None:
    cases: list[Any] = [
        None,
        [],
        {"columns": 3},
        {"columns": [{"missing": 0.0}], "per_class": 0, "smallest": 0.5},
        {"columns": [{"missing": 0.0}], "per_class": 9, "smallest": 0},
        {"columns": [{"missing": 0.0}], "per_class": 9, "smallest": 1.5},
        {"columns": [{"missing": 1.5, "quantiles": [0.0, 0.0]}], "per_class": 9, "smallest": 0.5},
        {"columns": [{"missing": "x"}], "per_class": 9, "smallest": 0.5},
        {"columns": [{"missing": 0.0, "quantiles": [2.0, 1.0]}], "per_class": 9, "smallest": 0.5},
        {"columns": [{"missing": 0.0, "quantiles": [1.0, None]}], "per_class": 9, "smallest": 0.5},
        {"columns": [{"missing": 0.0}, {"missing": 0.0}], "per_class": 9, "smallest": 0.5},
    ]
    for statistics in cases:
        assert warn(statistics, None, [1e9 * np.arange(50.0)]) == [], statistics
