"""From columns to features: what is left out, what is looked at, and the place of each cell that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.errors import InputError
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import blank_missing
from protonet.tables.features import Features, check_kinds, choose_features, encode_block
from protonet.tables.table import Block, Table

RNG = np.random.default_rng(0)
N = 40
LABELS = np.repeat(["ant", "bee"], N // 2)
X = RNG.normal(size=N)


def make(columns: dict[str, Any], labels: np.ndarray = LABELS) -> tuple[Table, Block]:
    cells = [
        each if isinstance(each, np.ndarray) else blank_missing(np.array(each, object)) for each in columns.values()
    ]
    block = Block(cells, labels, (), range(2, 2 + len(cells[0])), range(len(cells[0])))
    return Table(tuple(columns), iter([block]), "line {}", []), block


def choose(columns: dict[str, Any], kinds: dict[str, str] | None = None, *, named: bool = False) -> Features:
    return choose_features(*make(columns), kinds or {}, keep=None if named else "--columns keeps it")


def repeat(*cells: str) -> list[str]:
    return [cells[number % len(cells)] for number in range(N)]


def test_labels_are_not_used() -> None:
    columns = {
        "x": X,
        "gaps": [*map(str, X[:-1]), "NA"],
        "sort": repeat("a", "b", "c"),
        "text": [
            f"{a} {b}" for a, b in zip(repeat("red", "big"), repeat("tree", "house", "dog", "cat", "sun"), strict=True)
        ],
        "day": repeat("2020-01-01", "2020-05-03", "2021-07-09"),
    }
    first = choose(columns)
    other = choose_features(*make(columns, RNG.permutation(LABELS)), {}, keep="--columns keeps it")
    assert np.array_equal(first.x, other.x)
    assert first.columns == other.columns == tuple(columns)
    assert first.encoding is not None
    assert other.encoding is not None
    assert first.encoding.describe()[0] == other.encoding.describe()[0]
    table, block = make(columns)
    assert np.array_equal(encode_block(table, block, first.encoding), first.x)


def test_row_numbers_and_columns_of_no_use_are_left_out_by_name() -> None:
    columns = {"row": np.arange(N), "none": [""] * N, "one": ["x"] * N, "id": [f"A{n:04}" for n in range(N)], "x": X}
    found = choose(columns)
    assert found.columns == ("x",)
    assert set(found.left_out) == {"row", "none", "one", "id"}
    assert found.notes == (
        "left out: row: whole numbers that all differ, in the order of the rows (--columns keeps it)",
        "left out: none: empty",
        "left out: one: constant",
        "left out: id: a name for each row",
    )
    assert choose({"row": np.arange(N), "x": X}, named=True).columns == ("row", "x")
    assert choose({"x": X, "dark": np.zeros(N)}).columns == ("x", "dark")
    assert choose({"x": X, "dark": np.zeros(N), "sort": repeat("a", "b")}).columns == ("x", "sort")


def test_what_tells_the_class_too_well_is_named() -> None:
    (note,) = choose({"code": np.where(LABELS == "ant", "p", "q").astype(object), "x": X}).notes
    assert note.startswith("look at: code tells the class, as the order of the rows does")
    mixed = RNG.permutation(N)
    table, block = make({"code": np.where(LABELS == "ant", "p", "q").astype(object)[mixed], "x": X}, LABELS[mixed])
    (note,) = choose_features(table, block, {}, keep="--columns keeps it").notes
    assert note.startswith("look at: code has one value for each class")


def test_a_person_may_say_what_columns_hold() -> None:
    columns = {"zip": repeat("1", "2", "3"), "x": X}
    assert choose(columns).x.shape == (N, 2)
    found = choose(columns, {"zip": "category"})
    assert found.encoding is not None
    assert [column.kind for column in found.encoding.columns] == ["category", "number"]
    with pytest.raises(InputError, match=r"^`--column` must name a feature of the table; got zap\. Look at"):
        choose(columns, {"zap": "category"})
    with pytest.raises(InputError, match=r"^`--column` must name a column that holds a date; got zip with cells"):
        choose(columns, {"zip": "date"})
    with pytest.raises(InputError, match=r"^`path` must have a column of use; got left out: a: empty; left out: b: c"):
        choose({"a": ["NA"] * N, "b": ["x"] * N})


def test_another_kind_than_in_fit_says_both() -> None:
    found = choose({"x": list(map(str, X)), "day": repeat("2020-01-01", "2020-05-03", "2021-07-09")})
    for columns, message in (
        ({"x": repeat("red", "blue"), "day": ["2020-01-01"] * N}, r"got 'red' in x, line 2, which held number\. Mend"),
        ({"x": ["1"] * N, "day": repeat("2020-01-01", "3/4", "5")}, r"got '3/4' in day, line 3, which held date, in"),
        ({"x": ["1"] * N, "day": np.arange(N)}, r"got '0' in day, line 2, which held date, in"),
        ({"x": np.full(N, np.datetime64("2020-01-01")), "day": [""] * N}, "in x, line 2, which held number"),
    ):
        with pytest.raises(InputError, match=rf"^`path` must have columns of the kind that .*{message}"):
            check_kinds(*make(columns), found.encoding)
    few = {"x": ["red", *["1"] * (N - 1)], "day": [""] * N}  # a few count as gaps
    check_kinds(*make(few), found.encoding)
    assert np.isfinite(encode_block(*make(few), found.encoding)).all()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("inf", r"have finite numbers; got 'inf' in x, line 5\. Fill it in"),
        ("1e999", r"have numbers of at most 3\.4e\+38 in absolute value; got '1e999' in x, line 5\. Rescale"),
        ("-1e39", r"have numbers of at most 3\.4e\+38 in absolute value; got '-1e39' in x, line 5\. Rescale"),
    ],
)
def test_infinite_and_too_large_numbers_have_a_place(cell: str, message: str) -> None:
    found = choose({"sort": repeat("a", "b", "c"), "x": list(map(str, X))})
    cells = list(map(str, X))
    cells[3] = cell
    with pytest.raises(InputError, match=f"^`path` must {message}"):
        encode_block(*make({"sort": repeat("a", "b", "c"), "x": cells}), found.encoding)
    with pytest.raises(InputError, match=f"^`path` must {message}"):
        choose({"sort": repeat("a", "b", "c"), "x": cells})
    with pytest.raises(InputError, match=f"^`path` must {message}"):
        choose({"x": cells})


def test_arrays(tmp_path: Path) -> None:
    x = RNG.normal(size=(N, 2)).astype(np.float32)
    block = Block([x[:, 0], x[:, 1]], LABELS, (), range(N), range(N))
    table = Table(None, iter([block]), "row {} (counted from 0)", [])
    found = choose_features(table, block, {}, keep="--columns keeps it")
    assert (found.encoding, found.columns) == (None, None)
    assert found.x.dtype == np.float32
    assert np.array_equal(found.x, x)
    assert np.array_equal(encode_block(table, block, None), x)
    x[3, 1] = np.nan
    with pytest.raises(InputError, match=r"have finite numbers; got 'nan' in column 1, row 3 \(counted from 0\)"):
        encode_block(table, block, None)
    found = choose_features(table, block, {}, keep="--columns keeps it")
    assert isinstance(found.encoding, Encoding)
    assert found.x.shape == (N, 3)
    assert np.isfinite(found.x).all()
    assert isinstance(found.encoding.columns[1], Number)
