"""What a column holds, told from its cells alone: a number, a category, a date, text, or nothing of use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from protonet.errors import raise_input_error
from protonet.tables.columns.category import Category
from protonet.tables.columns.date import Date
from protonet.tables.columns.kind import Column
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import (
    POINT_FIRST,
    are_durations,
    are_intervals,
    are_mixed_dates,
    find_date_form,
    find_gaps,
    find_number_form,
    write_cells,
)
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.text import Text, count_grams


@dataclass(frozen=True)
class RecogniseRules:
    """Where categories end."""

    few: int = 5  #: So many levels are categories in any number of rows ...
    share: float = 0.5  #: ... and more, if there are at most this many for each row; otherwise it is text, ...
    words: int = 3  #: So many words, in most cells that all differ, are a text.
    digits: float = 0.5  #: ... or an identifier: single words that all differ, so many of them with a digit.


RULES = RecogniseRules()


class Verdict(NamedTuple):
    """What a column was taken for."""

    column: Column | None  #: Fitted, or None where it is left out ...
    reason: str  #: ... for this reason.
    is_text: bool = False  #: Whether it holds free text, for a representation to read.

    @property
    def takes(self) -> str | None:
        """What a representation has to take to read it, "text" or "picture"; None where none reads such columns."""
        return "text" if self.is_text else None if self.column is None else self.column.takes


def recognise(cells: np.ndarray, *, order: Sequence[str] = POINT_FIRST) -> Verdict:
    """Take a column for what it most likely is, and fit it.

    Args:
        cells: (n,) text without spaces around it, as an array of objects; numbers; or datetime64.
        order: As in `find_number_form`.

    Returns:
        The column; or why it is left out: it is empty, constant, an identifier, or text without a common word.
    """
    present = cells[~find_gaps(cells)]
    distinct = list(dict.fromkeys(present.tolist()))
    if not distinct:
        return Verdict(None, "empty")
    if len(distinct) == 1:
        return Verdict(None, "constant") if len(present) == len(cells) else Verdict(Category.fit(cells), "")
    if cells.dtype.kind == "M":
        return Verdict(Date.fit(cells), "")
    if cells.dtype.kind != "O":
        return Verdict(Number.fit(cells), "")
    if form := find_number_form(distinct, order=order):
        return Verdict(Number.fit(cells, form), "")
    if are_intervals(distinct):
        return Verdict(Number.fit(cells, "interval"), "")
    if are_durations(distinct):
        return Verdict(Number.fit(cells, "duration"), "")
    if form := find_date_form(distinct):
        return Verdict(Date.fit(cells, form), "")
    if len(distinct) <= max(RULES.few, RULES.share * len(present)) and not are_sentences(distinct, len(present)):
        return Verdict(Category.fit(cells), "")
    words = any(" " in cell for cell in distinct)
    digits = sum(any(map(str.isdigit, cell)) for cell in distinct) > RULES.digits * len(distinct)
    if are_mixed_dates(distinct):
        return Verdict(None, "dates in more than one order of day and month")
    if len(distinct) == len(present) and not words and digits:
        told = Category.fit(cells)  # whether there is one may tell something
        return Verdict(told, "") if told.levels == ("",) else Verdict(None, "a name for each row")
    text = Text.fit(cells)
    if text.parts:
        return Verdict(text, "", is_text=True)
    common = set.intersection(*(set(count_grams(cell)) for cell in distinct))
    reason = "text of the same words in every row" if common else "text of which no two rows share a word"
    return Verdict(None, reason, is_text=True)


def are_sentences(distinct: Sequence[Any], rows: int) -> bool:
    """Return whether cells that all differ are texts of some words: of a few rows, they are no categories."""
    words = sorted(len(str(cell).split()) for cell in distinct)
    return len(distinct) == rows and words[len(words) // 2] >= RULES.words


def fit_named(
    name: str,
    kind: str,
    cells: np.ndarray,
    argument: str = "--column",
    *,
    read: bool = False,
    order: Sequence[str] = POINT_FIRST,
) -> Verdict:
    """Fit a column (n,) as a kind of `protonet.tables.columns.NAMES` that a person gave for it, with an argument.

    Args:
        name: Of the column.
        kind: The kind.
        cells: The column.
        argument: What gave the kind.
        read: Whether there is what reads a text of which no two rows share a word.
        order: As in `find_number_form`.

    Raises:
        InputError: Its cells are no such thing.
    """
    present = cells[~find_gaps(cells)]
    distinct = list(dict.fromkeys(present.tolist()))
    got = f"{name} with cells such as {str(distinct[0])[:50]!r}" if distinct else f"{name}, which is empty"
    text = write_cells(cells)
    if distinct and kind == "picture" and cells.dtype.kind == "O":
        return Verdict(Picture(), "")
    if distinct and kind == "category":
        return Verdict(Category.fit(cells), "")
    if distinct and kind == "text" and ((fitted := Text.fit(text)).parts or read):
        return Verdict(fitted, "", is_text=True)
    if distinct and kind == "date":
        if cells.dtype.kind == "M":
            return Verdict(Date.fit(cells), "")
        if form := find_date_form(map(str, distinct)):
            return Verdict(Date.fit(text, form), "")
    if distinct and kind == "number" and cells.dtype.kind != "M":
        form = (
            "plain"
            if cells.dtype.kind != "O"
            else find_number_form(distinct, codes=True, order=order)
            or ("interval" if are_intervals(distinct) else "")
            or ("duration" if are_durations(distinct, clocks=True) else "")
        )
        if form:
            return Verdict(Number.fit(cells, form), "")
    return raise_input_error(argument, f"name a column that holds a {kind}", got, "Name another kind, or none.")
