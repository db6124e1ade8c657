"""Features of tables: dropped columns, warnings, errors that name the cell; number formats of several countries."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet.errors import InputError
from protonet.fit import solver
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.ordered import Numeric
from protonet.tables.columns.parsing import replace_missing_cells
from protonet.tables.columns.quantities import parse_numeric
from protonet.tables.delimited import locate_header
from protonet.tables.features import check_column_types, encode_block
from protonet.tables.numeric_formats import detect_numeric_conversion
from protonet.tables.table import ReadSpec, RowBlock, Table
from protonet.tables.training import TrainingTable
from tests.commands.cases import FAST, Run
from tests.strategies import PLAIN

RNG = np.random.default_rng(0)
N = 40
LABELS, Y = np.repeat(["ant", "bee"], N // 2), np.repeat([0, 1], N // 2)
X = RNG.normal(size=N)


def make(columns: dict[str, Any]) -> RowBlock:
    cells = [
        column if isinstance(column, np.ndarray) else replace_missing_cells(np.array(column, object))
        for column in columns.values()
    ]
    positions = range(2, 2 + len(cells[0]))
    return RowBlock(cells, positions, range(len(cells[0])), tuple(columns), "line {}", LABELS[: len(cells[0])])


def fit_rows(
    block: RowBlock,
    labels: np.ndarray,
    kinds: dict[str, str] | None = None,
    *,
    named: bool = False,
    semicolons: bool = False,
    decimal: str | None = None,
) -> TrainingTable:
    table = Table(blocks=iter(()), has_semicolons=semicolons)
    spec = ReadSpec(label_column="kind", column_types=kinds or {}, decimal_mark=decimal)
    return TrainingTable.from_rows(table, block, labels, spec, keep_hint=None if named else "--columns keeps it")


def fit(columns: dict[str, Any], kinds: dict[str, str] | None = None, *, named: bool = False) -> TrainingTable:
    return fit_rows(make(columns), Y, kinds, named=named)


def repeat(*cells: str) -> list[str]:
    return [cells[index % len(cells)] for index in range(N)]


def test_labels_are_not_used() -> None:
    columns = {"x": X, "gaps": [*map(str, X[:-1]), "NA"], "sort": repeat("a", "b", "c")}
    columns["text"] = [f"{a} {b}" for a in ("red", "big") for b in ("tree", "house", "dog", "cat", "sun")] * 4
    columns["day"] = repeat("2020-01-01", "2020-05-03", "2021-07-09")
    first = fit(columns)
    other = fit_rows(make(columns), RNG.permutation(Y))
    assert np.array_equal(first.x, other.x)
    assert first.columns == other.columns == tuple(columns)
    assert first.encoding is not None
    assert other.encoding is not None
    assert first.encoding.describe_columns()[0] == other.encoding.describe_columns()[0]
    assert np.array_equal(encode_block(make(columns), first.encoding), first.x)


def test_useless_columns_are_dropped() -> None:
    columns = {"row": np.arange(N), "none": [""] * N, "one": ["x"] * N, "id": [f"A{n:04}" for n in range(N)], "x": X}
    features = fit(columns)
    assert features.columns == ("x",)
    assert set(features.dropped_columns) == {"row", "none", "one", "id"}
    assert features.notes == [
        "dropped: row: distinct integers in the order of the rows (--columns keeps it)",
        "dropped: none: empty",
        "dropped: one: constant",
        "dropped: id: a different code in each row",
    ]
    assert fit({"row": np.arange(N), "x": X}, named=True).columns == ("row", "x")
    assert fit({"x": X, "dark": np.zeros(N)}).columns == ("x", "dark")
    assert fit({"x": X, "dark": np.zeros(N), "sort": repeat("a", "b")}).columns == ("x", "sort")


def test_other_types_than_in_training_are_refused() -> None:
    features = fit({"x": list(map(str, X)), "day": repeat("2020-01-01", "2020-05-03", "2021-07-09")})
    for columns, message in (
        ({"x": repeat("red", "blue"), "day": ["2020-01-01"] * N}, "got 'red' in x, line 2, which held number"),
        ({"x": ["1"] * N, "day": repeat("2020-01-01", "3/4", "5")}, r"got '3/4' in day, line 3, which held date, in"),
        ({"x": ["1"] * N, "day": np.arange(N)}, r"got '0' in day, line 2, which held date, in"),
        ({"x": np.full(N, np.datetime64("2020-01-01")), "day": [""] * N}, "in x, line 2, which held number"),
    ):
        with pytest.raises(InputError, match=rf"^`path` must have columns of the same types .*{message}"):
            check_column_types(make(columns), features.encoding)
    few = {"x": ["red", *["1"] * (N - 1)], "day": [""] * N}  # few invalid cells count as missing
    placeholder = {"x": ["1"] * N, "day": ["2020-01-01", "2020-05-03", *["0"] * (N - 2)]}  # so does a frequent one
    for columns in (few, placeholder):
        check_column_types(make(columns), features.encoding)
        assert np.isfinite(encode_block(make(columns), features.encoding)).all()


def test_unknown_categories_of_many_columns_get_one_note() -> None:
    columns = {name: repeat("a", "b") for name in "pqrstuvw"}
    features = fit(columns)
    for n_columns, n_notes in ((1, 1), (3, 3), (4, 1), (8, 1)):
        new = {**columns, **{name: ["new"] * (1 + (name == "q")) + ["a"] * (N - 2) for name in "pqrstuvw"[:n_columns]}}
        new = {name: [*cells, *["a"] * N][:N] for name, cells in new.items()}
        notes = check_column_types(make(new), features.encoding)
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
            encode_block(make({"sort": sort, "x": cells}), features.encoding)
        for columns in ({"sort": sort, "x": cells}, {"x": cells}):
            with pytest.raises(InputError, match=f"^`path` must {message}"):
                fit(columns)


def test_arrays(tmp_path: Path) -> None:
    x = RNG.normal(size=(N, 2)).astype(np.float32)
    block = RowBlock.from_columns([x[:, 0], x[:, 1]])
    features = fit_rows(block, Y)
    assert (features.encoding, features.columns) == (None, None)
    assert features.x.dtype == torch.float32
    assert np.array_equal(features.x, x)
    assert np.array_equal(encode_block(block, None), x)
    x[3, 1] = np.nan
    with pytest.raises(InputError, match=r"have finite numbers; got 'nan' in column 1, row 3 \(counted from 0\)"):
        encode_block(block, None)
    features = fit_rows(block, Y)
    assert isinstance(features.encoding, Encoding)
    assert features.x.shape == (N, 3)
    assert bool(features.x.isfinite().all())
    assert isinstance(features.encoding.columns[1], Numeric)


def test_numbers_in_several_units_get_a_warning() -> None:
    mixed = [f"{value} {unit}" for value, unit in zip(range(N), repeat("kg", "m", "kg"), strict=True)]
    streets = [f"{value} {chr(65 + value % 9)}" for value in range(N)]
    columns = {"x": X, "weight": mixed, "street": streets, "price": [f"{value} kg" for value in range(N)]}
    warnings = [note for note in fit(columns).notes if "several units" in note]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: weight has numbers in several units (kg, m)")
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


def swap(text: str) -> str:
    return text.translate(str.maketrans(",.", ".,"))


def group_lakhs(value: float, digits: int) -> str:
    """Format a number as in India, such as 12,34,567.8."""
    integer, point, fraction = f"{abs(value):.{digits}f}".partition(".")
    head, tail = integer[:-3], integer[-3:]
    parts = [head[max(0, end - 2) : end] for end in range(len(head), 0, -2)][::-1]
    return "-" * (value < 0) + ",".join([*parts, tail]) + point + fraction


#: How numbers are formatted with a given number of digits, by the place where the format is usual.
LOCALES: dict[str, Callable[[float, int], str]] = {
    "plain": lambda value, digits: f"{value:.{digits}f}",
    "English": lambda value, digits: f"{value:,.{digits}f}",
    "German": lambda value, digits: swap(f"{value:,.{digits}f}"),
    "French": lambda value, digits: swap(f"{value:,.{digits}f}").replace(".", "\N{NARROW NO-BREAK SPACE}"),
    "Swiss": lambda value, digits: f"{value:,.{digits}f}".replace(",", "'"),
    "Indian": group_lakhs,
    "comma alone": lambda value, digits: f"{value:.{digits}f}".replace(".", ","),
}


def make_numeric(columns: list[list[str]]) -> RowBlock:
    return make(dict(zip("abc", columns, strict=False)))


def fit_numeric(columns: list[list[str]], decimal: str | None = None, *, semicolons: bool = False) -> TrainingTable:
    block = make_numeric(columns)
    return fit_rows(block, np.arange(len(columns[0])) % 2, named=True, semicolons=semicolons, decimal=decimal)


def encode(columns: list[list[str]], features: TrainingTable, decimal: str | None = None) -> np.ndarray:
    block = make_numeric(columns)
    spelling = detect_numeric_conversion(block, features.encoding, decimal=decimal)
    return encode_block(spelling.convert_block(block), features.encoding)


#: Magnitude, digits and seed of a column: most measurements of a column have one magnitude.
VALUES = st.tuples(st.sampled_from([1.0, 40.0, 2000.0, 3e6]), st.integers(0, 4), st.integers(0, 2**32 - 1))


@given(st.lists(VALUES, min_size=1, max_size=3), st.sampled_from([*LOCALES]), st.sampled_from([*LOCALES]))
def test_models_read_all_formats_alike(columns: list[tuple[float, int, int]], fitted: str, predicted: str) -> None:
    values = []
    for size, digits, seed in columns:
        # Two unambiguous cells: without any, "2,974" may be either number in training.
        sample = size * np.random.default_rng(seed).uniform(0.5, 3, 30).round(6)
        values.append([(0.25, 2), (1.5, 1), *((value, digits) for value in sample.tolist())])
    one, two = (
        [[write(value, digits) for value, digits in column] for column in values]
        for write in (LOCALES[fitted], LOCALES[predicted])
    )
    features = fit_numeric(one)
    for column, expected in zip(features.encoding.columns if features.encoding else (), values, strict=True):
        assert isinstance(column, Numeric)
        assert column.mean == pytest.approx(np.mean([round(value, digits) for value, digits in expected]))
    assert np.array_equal(encode(two, features), features.x)
    block = make_numeric(two)
    assert not detect_numeric_conversion(block, features.encoding).notes or fitted != predicted


@given(st.sampled_from([*LOCALES]), st.sampled_from([*LOCALES]), st.integers(0, 2**32 - 1))
def test_magnitudes_resolve_ambiguous_cells(fitted: str, predicted: str, seed: int) -> None:
    values = np.random.default_rng(seed).uniform(1.001, 9.999, 30).round(3).tolist()
    features = fit_numeric([[LOCALES[fitted](value, 3) for value in values]])
    assert np.array_equal(encode([[LOCALES[predicted](value, 3) for value in values]], features), features.x)


def test_commands_read_both_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
    rng = np.random.default_rng(0)
    rows = [(rng.normal(row % 2) ** 2, 1 + rng.uniform() * 5, "ab"[row % 2]) for row in range(16)]
    points = "x;y;kind\n" + "".join(f"{x:.3f};{y:.3f};{kind}\n" for x, y, kind in rows)
    (tmp_path / "points.csv").write_text(points.replace(";", ","), encoding="utf-8")
    (tmp_path / "commas.csv").write_text(points.replace(".", ","), encoding="utf-8")
    output = run("fit", tmp_path / "commas.csv", *FAST, "-o", tmp_path / "m.protonet")
    assert "numbers with a decimal comma: x, y ('" in output
    predicted = []
    for name in ("commas", "points"):
        predicted.append(run("predict", tmp_path / "m.protonet", tmp_path / f"{name}.csv", quiet=False))
        assert ("another decimal mark than in training" in run.notes) == (name == "points")
    assert predicted[0] == predicted[1]
    assert "decimal-mark" in run("fit", tmp_path / "commas.csv", *FAST, "--decimal-mark", ";", code=2)


@pytest.mark.parametrize("cell", ["1'234.50", "1’234’567", "1 234,5", "1,234.50", "1.234,50"])
def test_a_title_above_grouped_numbers_is_no_header(cell: str) -> None:
    rows = [["Prices", "shops"], ["shop", "price", "kind"], ["north", cell, "a"], ["south", cell, "b"]]
    assert locate_header(rows) == 1


@pytest.mark.parametrize("cell", ["5'11", "6’2", "3 4", "12 34", "1.234'50"])
def test_two_numbers_are_not_read_as_one(cell: str) -> None:
    assert all(np.isnan(parse_numeric(cell, mark)) for mark in ("plain", "point", "comma"))


def test_numbers_in_another_unit_than_in_training_are_not_read() -> None:
    columns = [["3.1 m", "4 m", "5.5 m", "", "2 m"], ["7", "3 kg", "1", "2 kg", "9"]]
    features = fit_numeric(columns)
    assert features.encoding is not None
    metres, kilograms = features.encoding.columns
    assert isinstance(metres, Numeric)
    assert metres.summary() == "number, as 1,234.5, in m, 20 % missing"
    cells = np.array(["3.1 M", "3.1", "310 cm", "10 ft", ""], object)
    assert metres.is_invalid(np.array(["3 kg"], object)).all()
    assert metres.comparable_values(cells)[:4].tolist() == pytest.approx([3.1, 3.1, 3.1, 3.048])
    assert metres.is_invalid(cells).tolist() == [False] * 5
    assert np.array_equal(metres.encode(cells[:1]), metres.encode(cells[1:2]))
    assert kilograms.is_invalid(np.array(["3", "3 kg", "3 g"], object)).tolist() == [False] * 3
    block = make_numeric([["2,5 m", "1.310,5 kg", "3,5m"]])
    rewritten = detect_numeric_conversion(block, Encoding((metres,))).convert_block(block)
    assert metres.comparable_values(rewritten.columns[0]).tolist() == [2.5, metres.median, 3.5]
    assert rewritten.columns[0][1] == "1.310,5 kg"  # errors quote the cell of the file


def test_percentages_are_hundredths_if_training_had_fractions() -> None:
    features = fit_numeric([["0.12", "0.05", "0", "0.3"], ["12", "5", "0", "30"]])
    for new, note in ((["12%", "5 %", "0.0%", "0.3"], ()), (["12,0 %", "5%", "0%", "30%"], ("('12,0 %' is 0.12)",))):
        block = make_numeric([new, new])
        conversion = detect_numeric_conversion(block, features.encoding)
        assert all(any(text in line for line in conversion.notes) for text in note)
        fractions, percentages = features.encoding.columns if features.encoding else ()
        first, second = conversion.convert_block(block).columns
        assert fractions.comparable_values(first).tolist() == pytest.approx([0.12, 0.05, 0, 0.3])
        assert percentages.comparable_values(second)[:3].tolist() == [12, 5, 0]


def test_decimal_separators() -> None:
    cases: list[tuple[list[list[str]], bool, str | None, list[float]]] = [
        ([["0,205", "2,974"]], False, None, [1.5895]),
        ([["0,205", "0,974"], ["2,000", "3,000"]], False, None, [0.5895, 2.5]),
        ([["2,000", "3,000"]], False, None, [2500]),
        ([["2,000", "3,000"]], True, None, [2.5]),
        ([["2.000", "3.000"]], True, None, [2.5]),
        ([["2,000", "3,000"], ["0.5", "1.5"]], True, None, [2500, 1]),
        ([["2,000", "3,000"], ["2.000", "3.000"]], True, None, [2.5, 2500]),
        ([["2,000", "3,000"]], False, ",", [2.5]),
        ([["2.000", "3.000"]], False, ",", [2500]),
        ([["2,000", "3,000"]], True, ".", [2500]),
        ([["355", "22.361", "-4.492"]], True, None, [(355 + 22361 - 4492) / 3]),
        ([["355", "22.361"], ["0.5", "1.5"]], True, None, [(355 + 22.361) / 2, 1]),
        ([["1355", "22.361"]], True, None, [(1355 + 22.361) / 2]),
        ([["355", "22.361"]], True, ".", [(355 + 22.361) / 2]),
        ([["355", "22.361"]], False, None, [(355 + 22.361) / 2]),
        ([["-0,205", "2,974"]], False, None, [1.3845]),
        ([["1,23,456.7", "1"]], False, None, [61728.85]),
    ]
    for columns, semicolons, decimal, means in cases:
        features = fit_numeric(columns, decimal, semicolons=semicolons)
        assert features.encoding is not None, columns
        fitted = [column.mean for column in features.encoding.columns if isinstance(column, Numeric)]
        assert fitted == pytest.approx(means), columns
        marks = {mark for cells in columns for cell in cells for mark in ",." if mark in cell}
        expects_note = "," in marks or decimal == "," or (semicolons and decimal is None and "." in marks)
        assert any("numbers with" in note for note in features.notes) == expects_note, columns
