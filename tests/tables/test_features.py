"""Features of tables: dropped columns, warnings, and errors that name the cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.errors import InputError
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.ordered import Numeric
from protonet.tables.columns.parsing import replace_missing_cells
from protonet.tables.features import TableFeatures, check_column_types, encode_block, fit_features
from protonet.tables.table import RowBlock, Table

RNG = np.random.default_rng(0)
N = 40
LABELS = np.repeat(["ant", "bee"], N // 2)
X = RNG.normal(size=N)


def make(columns: dict[str, Any], labels: np.ndarray = LABELS) -> tuple[Table, RowBlock]:
    cells = [
        column if isinstance(column, np.ndarray) else replace_missing_cells(np.array(column, object))
        for column in columns.values()
    ]
    block = RowBlock(cells, labels, (), range(2, 2 + len(cells[0])), range(len(cells[0])))
    return Table(columns=tuple(columns), blocks=iter([block]), position_format="line {}"), block


def fit(columns: dict[str, Any], kinds: dict[str, str] | None = None, *, named: bool = False) -> TableFeatures:
    return fit_features(*make(columns), kinds or {}, keep_option=None if named else "--columns keeps it")


def repeat(*cells: str) -> list[str]:
    return [cells[index % len(cells)] for index in range(N)]


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
    first = fit(columns)
    other = fit_features(*make(columns, RNG.permutation(LABELS)), {}, keep_option="--columns keeps it")
    assert np.array_equal(first.x, other.x)
    assert first.columns == other.columns == tuple(columns)
    assert first.encoding is not None
    assert other.encoding is not None
    assert first.encoding.describe_columns()[0] == other.encoding.describe_columns()[0]
    table, block = make(columns)
    assert np.array_equal(encode_block(table, block, first.encoding), first.x)


def test_useless_columns_are_dropped() -> None:
    columns = {"row": np.arange(N), "none": [""] * N, "one": ["x"] * N, "id": [f"A{n:04}" for n in range(N)], "x": X}
    features = fit(columns)
    assert features.columns == ("x",)
    assert set(features.dropped_columns) == {"row", "none", "one", "id"}
    assert features.notes == (
        "dropped: row: distinct integers in the order of the rows (--columns keeps it)",
        "dropped: none: empty",
        "dropped: one: constant",
        "dropped: id: an identifier of each row",
    )
    assert fit({"row": np.arange(N), "x": X}, named=True).columns == ("row", "x")
    assert fit({"x": X, "dark": np.zeros(N)}).columns == ("x", "dark")
    assert fit({"x": X, "dark": np.zeros(N), "sort": repeat("a", "b")}).columns == ("x", "sort")


def test_leakage_is_reported() -> None:
    code = np.where(LABELS == "ant", "p", "q").astype(object)
    (note,) = fit({"code": code, "x": X}).notes
    assert note.startswith("warning: code determines the class, as the order of the rows does")


def test_other_types_than_in_training_are_refused() -> None:
    features = fit({"x": list(map(str, X)), "day": repeat("2020-01-01", "2020-05-03", "2021-07-09")})
    for columns, message in (
        (
            {"x": repeat("red", "blue"), "day": ["2020-01-01"] * N},
            r"got 'red' in x, line 2, which held number\. Correct",
        ),
        ({"x": ["1"] * N, "day": repeat("2020-01-01", "3/4", "5")}, r"got '3/4' in day, line 3, which held date, in"),
        ({"x": ["1"] * N, "day": np.arange(N)}, r"got '0' in day, line 2, which held date, in"),
        ({"x": np.full(N, np.datetime64("2020-01-01")), "day": [""] * N}, "in x, line 2, which held number"),
    ):
        with pytest.raises(InputError, match=rf"^`path` must have columns of the same types .*{message}"):
            check_column_types(*make(columns), features.encoding)
    few = {"x": ["red", *["1"] * (N - 1)], "day": [""] * N}  # few invalid cells count as missing
    check_column_types(*make(few), features.encoding)
    assert np.isfinite(encode_block(*make(few), features.encoding)).all()


def test_unknown_categories_of_many_columns_get_one_note() -> None:
    columns = {name: repeat("a", "b") for name in "pqrstuvw"}
    features = fit(columns)
    for n_columns, n_notes in ((1, 1), (3, 3), (4, 1), (8, 1)):
        new = {**columns, **{name: ["new"] * (1 + (name == "q")) + ["a"] * (N - 2) for name in "pqrstuvw"[:n_columns]}}
        new = {name: [*cells, *["a"] * N][:N] for name, cells in new.items()}
        notes = check_column_types(*make(new), features.encoding)
        assert len(notes) == n_notes, notes
        if n_columns > 3:  # the column with the most cells first
            assert re.search(rf"'new' in q, .*in {n_columns - 1} more columns: p, r, s", notes[0]), notes


def test_errors_locate_infinite_and_too_large_values() -> None:
    sort, numbers = repeat("a", "b", "c"), list(map(str, X))
    features = fit({"sort": sort, "x": numbers})
    for cell, message in (
        ("inf", r"have finite numbers; got 'inf' in x, line 5\. Fill it in"),
        ("-1e39", r"have numbers of at most 3\.4e\+38 in absolute value; got '-1e39' in x, line 5\. Rescale"),
    ):
        cells = [*numbers[:3], cell, *numbers[4:]]
        with pytest.raises(InputError, match=f"^`path` must {message}"):
            encode_block(*make({"sort": sort, "x": cells}), features.encoding)
        for columns in ({"sort": sort, "x": cells}, {"x": cells}):
            with pytest.raises(InputError, match=f"^`path` must {message}"):
                fit(columns)


def test_arrays(tmp_path: Path) -> None:
    x = RNG.normal(size=(N, 2)).astype(np.float32)
    block = RowBlock([x[:, 0], x[:, 1]], LABELS, (), range(N), range(N))
    table = Table(columns=None, blocks=iter([block]), position_format="row {} (counted from 0)", notes=[])
    features = fit_features(table, block, {}, keep_option="--columns keeps it")
    assert (features.encoding, features.columns) == (None, None)
    assert features.x.dtype == np.float32
    assert np.array_equal(features.x, x)
    assert np.array_equal(encode_block(table, block, None), x)
    x[3, 1] = np.nan
    with pytest.raises(InputError, match=r"have finite numbers; got 'nan' in column 1, row 3 \(counted from 0\)"):
        encode_block(table, block, None)
    features = fit_features(table, block, {}, keep_option="--columns keeps it")
    assert isinstance(features.encoding, Encoding)
    assert features.x.shape == (N, 3)
    assert np.isfinite(features.x).all()
    assert isinstance(features.encoding.columns[1], Numeric)


def test_numbers_in_several_units_get_a_warning() -> None:
    mixed = [f"{value} {unit}" for value, unit in zip(range(N), repeat("kg", "g", "kg"), strict=True)]
    streets = [f"{value} {chr(65 + value % 9)}" for value in range(N)]
    columns = {"x": X, "weight": mixed, "street": streets, "price": [f"{value} kg" for value in range(N)]}
    warnings = [note for note in fit(columns).notes if "several units" in note]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: weight has numbers in several units (g, kg)")
    assert not any("several units" in note for note in fit(columns, {"weight": "text"}).notes)


def test_percentages_beside_fractions_get_a_warning() -> None:
    columns = {
        "rate": repeat("0.25", "87%", "26%"),
        "comma": repeat("0,25", "87,5 %"),
        "percent": repeat("0.5%", "87%"),
        "zero": repeat("0", "87%", "12%"),
        "large": repeat("25", "87%"),
        "rare": [*repeat("88%", "26%")[:-1], "0.5"],
        "plain": repeat("0.25", "0.5", "12"),
    }
    for name, cells in columns.items():
        notes = [note for note in fit({"x": X, name: cells}).notes if "%" in note]
        assert [note.split()[1] for note in notes] == [name] * (name in {"rate", "comma"}), notes
