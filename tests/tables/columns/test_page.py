"""The page about columns is right: columns of its cells are read as it says, in each of the spellings it shows."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.encoding import InferredType, infer_column_type
from protonet.tables.columns.units import normalize_cell
from protonet.tables.features import fit_columns

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "columns.md"
N = 40
# Digits that are the same in all cells: the maximum of a score, a fraction, an exponent.
FIXED = re.compile(r"/ ?(?:5|10)\b|(?:of|von) 5|\b1/4|\.25|[¼³]|[x×]10\^?3?|e3|(?<!\d)0(?=\.)")


class Line(NamedTuple):
    """A line of the page's table."""

    cells: list[str]
    kind: str

    def spell(self, cell: str, seed: int = 0) -> list[str]:
        """Write N values in the spelling of a cell: they are the same ones for all spellings of the line."""
        source = random.Random(seed)
        written = []
        for _ in range(N):
            if self.kind == "date":  # of days, weeks and quarters of one year
                day, week, quarter = source.randint(10, 28), source.randint(10, 50), source.randint(1, 4)
                text = re.sub(r"(?<!\d)0?6(?!\d)", str(day), cell).replace("Q1", f"Q{quarter}")
                written.append(text.replace("W05", f"W{week}").replace("KW 5", f"KW {week}"))
                continue
            digits = [str(source.randint(1, 5)) for _ in range(9)]
            fixed = [index for match in FIXED.finditer(cell) for index in range(*match.span())]
            places = [index for index, char in enumerate(cell) if char.isdecimal() and index not in fixed]
            chars = list(cell)
            for place, digit in zip(places, digits, strict=False):
                chars[place] = digit
            written.append("".join(chars))
        return written


def read_lines() -> list[Line]:
    """Read the lines of the table."""
    rows = re.findall(
        r"^\| (`.*?) \| (number|numbers|date|category in order|category|text|dropped)\b", PAGE.read_text("utf-8"), re.M
    )
    return [Line(re.findall("`([^`]+)`", cells), kind) for cells, kind in rows]


LINES = read_lines()
SPELLINGS = [line for line in LINES if line.kind in {"number", "numbers", "date"}]
LEVELS = [line for line in LINES if line.kind.startswith("category")]


def objects(cells: list[str]) -> np.ndarray:
    return np.array(cells, object)


def fit(cells: list[str]) -> FittedColumn:
    column, reason, _ = infer_column_type(objects(cells))
    assert column is not None, (reason, cells[:3])
    return column


def test_the_table_has_all_types() -> None:
    assert len(LINES) > 30
    assert {line.kind for line in LINES} == {
        "number",
        "numbers",
        "date",
        "category in order",
        "category",
        "text",
        "dropped",
    }


@pytest.mark.parametrize("line", SPELLINGS, ids=lambda line: line.cells[0])
def test_a_model_fitted_to_one_spelling_reads_the_others(line: Line) -> None:
    column = fit(line.spell(line.cells[0]))
    assert column.column_type == line.kind
    expected = column.encode(objects(line.spell(line.cells[0])))
    assert len(np.unique(expected[:, 0])) > 3
    for cell in line.cells[1:]:
        cells = objects(line.spell(cell))
        assert not column.is_invalid(cells).any(), cell
        np.testing.assert_allclose(column.encode(cells), expected, atol=1e-5, err_msg=cell)


@pytest.mark.parametrize("line", SPELLINGS, ids=lambda line: line.cells[0])
def test_each_spelling_may_be_that_of_training(line: Line) -> None:
    known = fit(line.spell(line.cells[0])).encode(objects(line.spell(line.cells[0])))
    for cell in line.cells[1:]:
        column = fit(line.spell(cell))
        assert column.column_type == line.kind, cell
        np.testing.assert_allclose(column.encode(objects(line.spell(cell))), known, atol=1e-5, err_msg=cell)


@pytest.mark.parametrize("line", LEVELS, ids=lambda line: line.cells[0])
def test_categories_and_their_order(line: Line) -> None:
    column = fit([line.cells[row % len(line.cells)] for row in range(N)])
    assert column.summary().startswith(f"{line.kind}: ")
    features = column.encode(objects(line.cells))
    if line.kind == "category in order":
        ranks = features[:, 0]
        assert (np.diff(ranks) > 0).all() or (np.diff(ranks) < 0).all()
        fewer = fit([cell for row in range(N) if (cell := line.cells[row % len(line.cells)]) != line.cells[-2]])
        if fewer.summary().startswith(line.kind):  # at least three levels are left
            place = fewer.encode(objects(line.cells))[:, 0]
            assert (np.diff(place) > 0).all() or (np.diff(place) < 0).all()
    respelled = column.encode(objects([cell.upper() for cell in line.cells]))
    np.testing.assert_array_equal(respelled, features)


def test_texts_codes_and_names() -> None:
    numbers = np.arange(float(N))
    for line in (line for line in LINES if line.kind in {"text", "dropped"}):
        rows = range(len(line.cells))
        columns = {"cells": objects([line.cells[row] for row in rows]), "x": numbers[: len(line.cells)]}
        inferred: dict[str, InferredType] = fit_columns(columns, {}, keep_hint=None)
        kept = inferred["cells"].column
        assert (kept is None) == (line.kind == "dropped"), line
        assert kept is None or kept.column_type == "text"
        chosen = fit_columns(columns, {"cells": "text"}, keep_hint=None)["cells"].column
        assert chosen is not None, line


def test_characters_are_normalized_once() -> None:
    for line in LINES:
        for cell in line.cells:
            assert normalize_cell(normalize_cell(cell)) == normalize_cell(cell)
