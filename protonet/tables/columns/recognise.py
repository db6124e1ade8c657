"""What a column holds, told from its cells alone: a number, a category, a date, text, or nothing of use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from protonet._checks import refuse
from protonet.tables.columns.category import Category
from protonet.tables.columns.date import Date
from protonet.tables.columns.kind import Column
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import (
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
    digits: float = 0.5  #: ... or an identifier: single words that all differ, so many of them with a digit.


RULES = RecogniseRules()


class Verdict(NamedTuple):
    """What a column was taken for."""

    column: Column | None  #: Fitted, or None where it is left out ...
    reason: str  #: ... for this reason.


def recognise(cells: np.ndarray, *, comma: bool = False) -> Verdict:
    """Take a column for what it most likely is, and fit it.

    Args:
        cells: (n,) text without spaces around it, as an array of objects; numbers; or datetime64.
        comma: Whether numbers that may have a decimal comma have one.

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
    if form := find_number_form(distinct, comma=comma):
        return Verdict(Number.fit(cells, form), "")
    if are_intervals(distinct):
        return Verdict(Number.fit(cells, "interval"), "")
    if form := find_date_form(distinct):
        return Verdict(Date.fit(cells, form), "")
    if len(distinct) <= max(RULES.few, RULES.share * len(present)):
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
        return Verdict(text, "")
    common = set.intersection(*(set(count_grams(cell)) for cell in distinct))
    return Verdict(None, "text of the same words in every row" if common else "text of which no two rows share a word")


def fit_named(name: str, kind: str, cells: np.ndarray, argument: str = "--column") -> Column:
    """Fit a column (n,) as a kind of `protonet.tables.columns.NAMES` that a person gave for it, with an argument.

    Raises:
        InputError: Its cells are no such thing.
    """
    present = cells[~find_gaps(cells)]
    distinct = list(dict.fromkeys(present.tolist()))
    got = f"{name} with cells such as {str(distinct[0])[:50]!r}" if distinct else f"{name}, which is empty"
    text = write_cells(cells)
    if distinct and kind == "picture" and cells.dtype.kind == "O":
        return Picture()
    if distinct and kind == "category":
        return Category.fit(cells)
    if distinct and kind == "text" and (fitted := Text.fit(text)).parts:
        return fitted
    if distinct and kind == "date":
        if cells.dtype.kind == "M":
            return Date.fit(cells)
        if form := find_date_form(map(str, distinct)):
            return Date.fit(text, form)
    if distinct and kind == "number" and cells.dtype.kind != "M":
        form = (
            "plain"
            if cells.dtype.kind != "O"
            else find_number_form(distinct, codes=True) or ("interval" if are_intervals(distinct) else "")
        )
        if form:
            return Number.fit(cells, form)
    return refuse(argument, f"name a column that holds a {kind}", got, "Name another kind, or none.")
