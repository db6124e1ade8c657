"""How the numbers of a table are spelled: which is the decimal mark, and what a fitted model makes of the other one.

A cell such as "1,234" is 1234 or 1.234. Cells that can be read in one way alone ("0,205", "1.5", "1,234.5") decide for
all columns of their table. Without any, the spelling of the fitted columns is taken, unless numbers would then lie far
from those of fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from protonet._text import to_printable
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.kind import Column
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import COMMA_FIRST, COMMA_OVER_POINT, POINT_FIRST, find_decimal_marks, read_number
from protonet.tables.table import Block, Table

#: The form of numbers for each decimal mark.
MARKS = {".": "point", ",": "comma"}
#: Distinct cells of a column that are looked at for its decimal mark.
MOST_CELLS = 1000
#: The least size of a column's numbers whose logarithm is looked at.
SMALLEST = 1e-30


class Spelling(NamedTuple):
    """What is to be written otherwise in the cells of a table, for the columns of a model."""

    forms: Mapping[int, str] = {}  #: By the number of a column, the form of its cells, where it is not that of fit.
    notes: tuple[str, ...] = ()  #: What a person should know of it, a line each.

    def apply(self, block: Block, encoding: Encoding | None) -> Block:
        """Return rows whose cells are spelled as those of fit."""
        if encoding is None or not self.forms:
            return block
        columns = list(block.columns)
        for number, form in self.forms.items():
            columns[number] = _respell(columns[number], form, encoding.columns[number])
        return block._replace(columns=columns)


def choose_order(mark: str | None, *, semicolons: bool = False) -> Sequence[str]:
    """Return the order in which forms of numbers are tried: see `find_number_form`.

    Args:
        mark: The decimal mark, where a person names it.
        semicolons: As in `Source`.
    """
    if mark is None:
        return COMMA_OVER_POINT if semicolons else POINT_FIRST
    return COMMA_FIRST if mark == "," else POINT_FIRST


def revise_order(columns: Mapping[str, np.ndarray], numbers: Mapping[str, Number]) -> Sequence[str] | None:
    """Return the order that the numbers of a whole table speak for, None where none is to be read again.

    Args:
        columns: By name, the cells (n,).
        numbers: The columns that were taken for numbers.
    """
    commas = [name for name, number in numbers.items() if number.form == "comma"]
    if not commas:
        return None
    marks = [find_decimal_marks(_list_distinct(columns[name])) for name in numbers if columns[name].dtype.kind == "O"]
    proven = set[str]().union(*marks)
    return POINT_FIRST if proven == {"point"} else COMMA_FIRST


def describe_marks(columns: Mapping[str, np.ndarray], numbers: Mapping[str, Number]) -> list[str]:
    """Return a line for each mark in numbers that could mean something else, with the first such cell."""
    marks = {
        "point": {",": "commas between thousands"},
        "comma": {",": "a decimal comma", ".": "points between thousands"},
        "duration": {":": "minutes and seconds"},
    }
    names, examples = dict[str, list[str]](), dict[str, str]()
    for name, number in numbers.items():
        cells = _list_distinct(columns[name]) if columns[name].dtype.kind == "O" else []
        for mark, what in marks.get(number.form, {}).items():
            cell = next((cell for cell in cells if mark in cell), "")
            if not math.isnan(value := read_number(cell, number.form)):
                names.setdefault(what, []).append(to_printable(name))
                change = "" if number.form == "duration" else "; --decimal-mark changes it"
                examples.setdefault(what, f"{cell!r} is {value:.10g}{change}")
                break
    return [f"numbers with {what}: {', '.join(names[what])} ({examples[what]})" for what in names]


def detect_spelling(
    table: Table, block: Block, encoding: Encoding | None, *, mark: str | None = None, semicolons: bool = False
) -> Spelling:
    """Find how the numbers of a table are spelled, for a model.

    Args:
        table: What the rows are of.
        block: The rows, the first ones of a long table.
        encoding: The model's.
        mark: The decimal mark, where a person names it.
        semicolons: As in `Source`.
    """
    texts = {
        number: (column, _list_distinct(cells)[:MOST_CELLS])
        for number, (column, cells) in enumerate(zip(encoding.columns if encoding else (), block.columns, strict=False))
        if isinstance(column, Number) and column.form not in {"interval", "duration"} and cells.dtype.kind == "O"
    }
    fitted = {"comma" if column.form == "comma" else "point" for column, _ in texts.values()}
    commas = any("," in cell for _, cells in texts.values() for cell in cells)
    if mark is None and not commas and "comma" not in fitted:  # most tables: the first cell with a fraction tells
        marked = [cell for _, cells in texts.values() for cell in cells if "." in cell]
        if not marked or any(math.isnan(read_number(cell, "comma")) for cell in marked):
            return Spelling()
    marks = {number: find_decimal_marks(cells) for number, (_, cells) in texts.items()}
    proven = set[str]().union(*marks.values())
    form = MARKS[mark] if mark else next(iter(proven)) if len(proven) == 1 else None
    if not proven and form is None:
        order = ("comma", "point") if "comma" in fitted or (semicolons and commas) else ("point", "comma")
        form = min(order, key=lambda each: _measure_distance(texts.values(), each))
    forms, examples = dict[int, str](), dict[str, str]()
    for number, (column, cells) in texts.items():
        own = form or (next(iter(marks[number])) if len(marks[number]) == 1 else column.form)
        if cell := next((cell for cell in cells if _reads_otherwise(cell, own, column.form)), ""):
            forms[number] = own
            examples[table.name_column(number)] = f"{cell!r} is {read_number(cell, own):.10g}"
    if not forms:
        return Spelling()
    return Spelling(forms, (f"numbers are spelled otherwise than in fit: {_list_names(examples)}",))


def _list_names(examples: Mapping[str, str]) -> str:
    """Return the first names of columns, with an example of the first."""
    first, *others = examples
    return f"{first} ({examples[first]})" + (f" and {len(others)} more" if others else "")


def respell_blocks(table: Table, encoding: Encoding | None, *, mark: str | None = None) -> Table:
    """Return a table whose cells are spelled as those of fit; its notes tell of it. Its first block is read."""
    first = next(table.blocks)
    spelling = detect_spelling(table, first, encoding, mark=mark, semicolons=table.semicolons)
    table.notes.extend(spelling.notes)
    return table._replace(blocks=(spelling.apply(block, encoding) for block in chain([first], table.blocks)))


def _list_distinct(cells: np.ndarray) -> list[str]:
    """Return the different ones of cells (n,) of text."""
    return list(dict.fromkeys(cells.tolist()))


def _reads_otherwise(cell: str, form: str, fitted: str) -> bool:
    """Return whether a cell is a number in a form, and not that number in the form of fit."""
    value = read_number(cell, form)
    return math.isfinite(value) and value != read_number(cell, fitted)


def _measure_distance(texts: Iterable[tuple[Number, list[str]]], form: str) -> float:
    """Return how far the size of numbers is from that in fit: the mean over columns, in powers of ten."""
    distances = []
    for column, cells in texts:
        numbers = np.array([read_number(cell, form) for cell in cells])
        numbers = numbers[np.isfinite(numbers)]
        if len(numbers):
            size, fitted = math.sqrt(float(np.square(numbers).mean())), math.hypot(column.mean, column.scale)
            distances.append(abs(math.log10(max(size, SMALLEST) / max(fitted, SMALLEST))))
    return sum(distances) / len(distances) if distances else math.inf


def _respell(cells: np.ndarray, form: str, column: Column) -> np.ndarray:
    """Return cells (n,), numbers of a form among them as a column has them."""
    if cells.dtype.kind != "O" or not isinstance(column, Number):
        return cells
    known: dict[str, str] = {}
    for cell in set(cells.tolist()):
        if _reads_otherwise(cell, form, column.form):
            text = repr(read_number(cell, form))
            known[cell] = text.replace(".", ",") if column.form == "comma" else text
    return np.array([known.get(cell, cell) for cell in cells.tolist()], object)
