"""What is far from what was fitted is named, and what chance and classes do is not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import hypergeom

from protonet.tables.columns.category import Category
from protonet.tables.columns.date import Date
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.number import Number
from protonet.tables.drift import DRIFT, Watch, compare_shares, describe_columns
from protonet.tables.table import Block, Table

COLUMNS = ("normal", "skewed", "cauchy", "count", "zeros", "gaps", "colour", "zip", "day")
DAY = np.datetime64("2024-01-01", "us")


def draw(rng: np.random.Generator, y: np.ndarray, shift: float = 2.0) -> list[np.ndarray]:
    """Draw columns of many forms, the first of which tell the class."""
    n = len(y)
    gaps = rng.normal(size=n) + shift * y
    gaps[rng.random(n) < 0.3] = np.nan
    return [
        rng.normal(size=n) + shift * y,
        rng.lognormal(size=n, sigma=2.0) * (1 + y),
        rng.standard_cauchy(size=n),
        rng.poisson(1 + 3 * y).astype(float),
        np.where(rng.random(n) < 0.8, 0.0, rng.exponential(size=n)),
        gaps,
        rng.choice(np.array(["red", "green", "blue"], object), n),
        np.array([f"Z{number}" for number in rng.zipf(1.5, n) % 100_000], object),
        DAY + (rng.random(n) * 300 * 86_400_000_000).astype("timedelta64[us]"),
    ]


def fit(cells: Sequence[np.ndarray], y: np.ndarray) -> tuple[Any, Encoding]:
    numbers = [Number.fit(each) for each in cells[:6]]
    encoding = Encoding((*numbers, *map(Category.fit, cells[6:8]), Date.fit(cells[8])))
    seen = describe_columns(cells, encoding, np.bincount(y).tolist())
    return json.loads(json.dumps(seen, allow_nan=False)), encoding


def tell(seen: Any, encoding: Encoding | None, cells: Sequence[np.ndarray], blocks: int = 1) -> list[str]:
    """Return the lines about new rows, which come in some blocks."""
    watch = Watch(seen, encoding, len(cells))
    for rows in np.array_split(np.arange(len(cells[0])), blocks):
        watch.look(Block([each[rows] for each in cells], np.empty(0), (), rows.tolist(), rows.tolist()))
    return watch.tell(Table(None if encoding is None else COLUMNS[: len(cells)], iter(()), "row {}", []))


@pytest.mark.parametrize("new", ["same", "one class", "few"])
def test_chance_names_a_column_in_one_table_of_a_hundred_at_most(new: str) -> None:
    """Of fits to 10 to 300 rows; rows like these, rows of one class alone, one to five rows."""
    rng, named, tables = np.random.default_rng(0), 0, 120
    for _ in range(tables):
        classes = int(rng.integers(2, 5))
        y = rng.permutation(np.arange(int(rng.integers(5 * classes, 300))) % classes)
        m = int(rng.integers(1, 6) if new == "few" else rng.integers(6, 400))
        fresh = rng.integers(classes) * np.ones(m, int) if new == "one class" else rng.integers(classes, size=m)
        named += bool(tell(*fit(draw(rng, y), y), draw(rng, fresh)))
    # 1 % of them, and three standard errors
    assert named <= DRIFT.chance * tables + 3 * math.sqrt(DRIFT.chance * tables)


@pytest.mark.parametrize("blocks", [1, 7])
@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("normal", lambda x: 1000 * x, "most rows lie outside"),
        ("normal", lambda x: x / 1000, "all rows lie within"),
        ("normal", lambda x: x + 8, "most rows lie outside"),
        ("normal", lambda x: 0 * x, "all rows are 0, where "),
        ("skewed", lambda x: 1000 * x, "most rows lie outside"),
        ("count", lambda x: 100 * x + 50, "most rows lie outside"),
        ("normal", lambda x: np.full_like(x, np.nan), "most of its cells are gaps, where none were in fit"),
        ("gaps", lambda x: np.full_like(x, np.nan), "most of its cells are gaps, where "),
        ("colour", lambda x: np.full_like(x, ""), "most of its cells are gaps"),
        ("zip", lambda x: np.array([f"Y{place}" for place in range(len(x))], object), "most rows have categories that"),
        ("day", lambda x: x + np.timedelta64(900, "D"), "most rows lie outside 2024-01-02 to 2024-10-25; "),
    ],
)
def test_a_column_that_is_far_away_is_named(column: str, change: Any, words: str, blocks: int) -> None:
    rng = np.random.default_rng(1)
    y, fresh = np.arange(200) % 2, rng.integers(2, size=60)
    seen, encoding = fit(draw(rng, y), y)
    cells = draw(rng, fresh)
    place = COLUMNS.index(column)
    cells[place] = change(cells[place])
    line, *more = tell(seen, encoding, cells, blocks)
    assert not more
    assert line.startswith(f"look at: {column} is far from what was fitted: {words}")


@pytest.mark.parametrize("blocks", [1, 7])
def test_a_single_row_that_is_far_away_is_told(blocks: int) -> None:
    rng = np.random.default_rng(1)
    y, fresh = np.arange(200) % 2, rng.integers(2, size=60)
    seen, encoding = fit(draw(rng, y), y)
    cells = draw(rng, fresh)
    cells[0][[10, 50]] = 3.0, 3000.0
    cells[8][20] = np.datetime64("2524-01-01", "us")
    number, day = tell(seen, encoding, cells, blocks)
    assert re.search(r"normal is far .*: 1 row lies far beyond -\S+ to \S+, such as 3000; another unit\?$", number)
    assert "day is far from what was fitted: 1 row lies far beyond 2024-01-02 to 2024-10-25, such as 2524-01-0" in day
    cells[0][10] = 4000.0
    assert "normal is far from what was fitted: 2 rows lie far beyond " in tell(seen, encoding, cells, blocks)[0]


def test_arrays_are_compared_without_an_encoding() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    seen = describe_columns(list(x.T), None, [20, 40])
    assert tell(seen, None, list(x.T)) == []
    assert tell(seen, None, list((x * [1, 1, 50]).astype(np.float32).T))[0].startswith("look at: column 2 is far")
    cells = [np.full(50, 0.123456789), np.arange(50.0)]  # constant columns stay what they are
    assert tell(describe_columns(cells, None, [25, 25]), None, cells) == []


@pytest.mark.parametrize(
    "seen",
    [
        None,
        [],
        {"columns": 3},
        {"columns": [{"gaps": 0.0}], "per_class": 0, "smallest": 0.5},
        {"columns": [{"gaps": 0.0}], "per_class": 9, "smallest": 0},
        {"columns": [{"gaps": "x"}], "per_class": 9, "smallest": 0.5},
        {"columns": [{"gaps": 0.0, "quantiles": [2.0, 1.0]}], "per_class": 9, "smallest": 0.5},
        {"columns": [{"gaps": 0.0, "quantiles": [1.0, None]}], "per_class": 9, "smallest": 0.5},
        {"columns": [{"gaps": 0.0}, {"gaps": 0.0}], "per_class": 9, "smallest": 0.5},
    ],
)
def test_nothing_is_told_by_a_file_without_it_or_with_something_else(seen: Any) -> None:
    assert tell(seen, None, [1e9 * np.arange(50.0)]) == []


def test_shares_are_compared_as_scipy_does() -> None:
    for k, m, k0, n in ((3, 3, 2, 50), (40, 60, 10, 30), (1, 1, 0, 1), (0, 5, 3, 9), (900, 1000, 5, 40)):
        assert compare_shares(k, m, k0, n) == pytest.approx(hypergeom.sf(k - 1, n + m, k + k0, m), rel=1e-6)
