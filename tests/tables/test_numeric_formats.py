"""Number formats of several countries: a model that is fitted to one reads all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protonet.fit.search import EFFORTS
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.ordered import Numeric
from protonet.tables.columns.parsing import parse_numeric
from protonet.tables.delimited import locate_header
from protonet.tables.features import TableFeatures, encode_block, fit_features
from protonet.tables.numeric_formats import detect_numeric_conversion
from protonet.tables.table import RowBlock, Table
from tests.commands.cases import FAST, Run
from tests.strategies import PLAIN
from tests.tables.test_features import make as make_table


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


def make(columns: list[list[str]], *, semicolons: bool = False) -> tuple[Table, RowBlock]:
    table, block = make_table(dict(zip("abc", columns, strict=False)), np.arange(len(columns[0])) % 2)
    return replace(table, has_semicolons=semicolons), block


def fit(columns: list[list[str]], decimal: str | None = None, *, semicolons: bool = False) -> TableFeatures:
    return fit_features(*make(columns, semicolons=semicolons), {}, keep_option=None, decimal=decimal)


def encode(columns: list[list[str]], features: TableFeatures, decimal: str | None = None) -> np.ndarray:
    table, block = make(columns)
    spelling = detect_numeric_conversion(table, block, features.encoding, decimal=decimal)
    return encode_block(table, spelling.apply(block), features.encoding)


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
    features = fit(one)
    for column, expected in zip(features.encoding.columns if features.encoding else (), values, strict=True):
        assert isinstance(column, Numeric)
        assert column.mean == pytest.approx(np.mean([round(value, digits) for value, digits in expected]))
    assert np.array_equal(encode(two, features), features.x)
    table, block = make(two)
    assert not detect_numeric_conversion(table, block, features.encoding).notes or fitted != predicted


@given(st.sampled_from([*LOCALES]), st.sampled_from([*LOCALES]), st.integers(0, 2**32 - 1))
def test_magnitudes_resolve_ambiguous_cells(fitted: str, predicted: str, seed: int) -> None:
    values = np.random.default_rng(seed).uniform(1.001, 9.999, 30).round(3).tolist()
    features = fit([[LOCALES[fitted](value, 3) for value in values]])
    assert np.array_equal(encode([[LOCALES[predicted](value, 3) for value in values]], features), features.x)


def test_commands_read_both_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setitem(EFFORTS, "fast", PLAIN)
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
    features = fit(columns)
    assert features.encoding is not None
    metres, kilograms = features.encoding.columns
    assert isinstance(metres, Numeric)
    assert metres.summary() == "number, as 1,234.5, in m, 20 % missing"
    cells = np.array(["3.1 M", "3.1", "310 cm", "10 ft", ""], object)
    assert metres.is_invalid(cells).tolist() == [False, False, True, True, False]
    assert np.array_equal(metres.encode(cells[:1]), metres.encode(cells[1:2]))
    assert kilograms.is_invalid(np.array(["3", "3 kg", "3 g"], object)).tolist() == [False, False, True]
    table, block = make([["2,5 m", "1.310,5 cm", "3,5m"]])
    rewritten = detect_numeric_conversion(table, block, Encoding((metres,))).apply(block)
    assert metres.comparable_values(rewritten.columns[0]).tolist() == [2.5, metres.median, 3.5]


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
        features = fit(columns, decimal, semicolons=semicolons)
        assert features.encoding is not None, columns
        assert [column.mean for column in features.encoding.columns if isinstance(column, Numeric)] == pytest.approx(
            means
        ), columns
        marks = {mark for cells in columns for cell in cells for mark in ",." if mark in cell}
        expects_note = "," in marks or decimal == "," or (semicolons and decimal is None and "." in marks)
        assert any("numbers with" in note for note in features.notes) == expects_note, columns
