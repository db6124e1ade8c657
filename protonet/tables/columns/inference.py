"""Infer the type of a column from its cells: number, category, date or text; or a reason to drop it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from protonet.errors import raise_input_error
from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.category import Category
from protonet.tables.columns.ordered import Date, Numeric
from protonet.tables.columns.parsing import (
    POINT_FIRST_FORMATS,
    are_dates_in_any_format,
    are_durations,
    format_cells,
    infer_date_format,
    infer_interval_format,
    infer_numeric_format,
    is_missing,
)
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.text import Text, count_ngrams


@dataclass(frozen=True)
class TypeInferenceThresholds:
    """Thresholds to distinguish categories, texts and identifiers."""

    max_levels: int = 5  #: Maximum number of distinct cells of a column of categories, however few rows there are.
    #: Maximum number of distinct cells per non-missing cell of a column of categories. The larger maximum is valid.
    max_levels_per_row: float = 0.5
    #: Minimum median number of words per cell of a column of free text whose cells all differ.
    min_words_per_text: int = 3
    min_digit_fraction: float = 0.5  #: Minimum fraction of distinct cells with a digit in a column of identifiers.


TYPE_INFERENCE = TypeInferenceThresholds()


class InferredType(NamedTuple):
    """The result of type inference for a column: a fitted column of the inferred type, or the reason to drop it."""

    column: FittedColumn | None  #: The fitted column; None if the column is dropped.
    drop_reason: str = ""  #: The reason why the column is dropped; "" if it is not.
    is_text: bool = False  #: Whether the column holds free text, which a pretrained representation can embed.

    @property
    def modality(self) -> str | None:
        """The kind of pretrained network that can embed the column: "text" or "picture"; None for other columns."""
        return "text" if self.is_text else None if self.column is None else self.column.modality


def infer_column_type(cells: np.ndarray, *, order: Sequence[str] = POINT_FIRST_FORMATS) -> InferredType:
    """Infer the type of a column from its cells, and fit a column of this type.

    Args:
        cells: (n,) the cells: text without surrounding spaces (object), numbers or datetime64.
        order: The numeric formats, in the order in which they are tried. The first wins among those that match equally
            many cells.

    Returns:
        The fitted column, or the reason to drop the column: it is empty, constant, an identifier of the rows, dates in
        contradictory formats, or text without shared words.
    """
    present = cells[~is_missing(cells)]
    distinct = list(dict.fromkeys(present.tolist()))
    if not distinct:
        return InferredType(None, "empty")
    if len(distinct) == 1:
        return InferredType(None, "constant") if len(present) == len(cells) else InferredType(Category.fit(cells))
    if cells.dtype.kind == "M":
        return InferredType(Date.fit(cells))
    if cells.dtype.kind != "O":
        return InferredType(Numeric.fit(cells))
    if numeric_format := _infer_any_numeric_format(distinct, order):
        return InferredType(Numeric.fit(cells, numeric_format))
    if date_format := infer_date_format(distinct):
        return InferredType(Date.fit(cells, date_format))
    max_levels = max(TYPE_INFERENCE.max_levels, TYPE_INFERENCE.max_levels_per_row * len(present))
    if len(distinct) <= max_levels and not are_distinct_sentences(distinct, len(present)):
        return InferredType(Category.fit(cells))
    if are_dates_in_any_format(distinct):
        return InferredType(None, "dates in more than one order of day and month")
    has_spaces = any(" " in cell for cell in distinct)
    with_digits = sum(any(map(str.isdigit, cell)) for cell in distinct)
    has_digits = with_digits > TYPE_INFERENCE.min_digit_fraction * len(distinct)
    if len(distinct) == len(present) and not has_spaces and has_digits:
        presence = Category.fit(cells)  # whether a row has an identifier may be informative
        if presence.levels == ("",):
            return InferredType(presence)
        return InferredType(None, "an identifier of each row")
    text = Text.fit(cells)
    if text.feature_suffixes:
        return InferredType(text, is_text=True)
    shared = set.intersection(*(set(count_ngrams(cell)) for cell in distinct))
    reason = "text with the same words in every row" if shared else "text in which no two rows share a word"
    return InferredType(None, reason, is_text=True)


def _infer_any_numeric_format(distinct: Sequence[str], order: Sequence[str], *, named: bool = False) -> str:
    """Infer the format of the numbers, intervals or durations in a column; "" if it has another type.

    Codes with leading zeros, and times of day, are numbers only if ``named``: the user has set the type to number.
    """
    if numeric_format := infer_numeric_format(distinct, allow_codes=named, order=order):
        return numeric_format
    if interval_format := infer_interval_format(distinct, order):
        return interval_format
    return "duration" if are_durations(distinct, allow_times_of_day=named) else ""


def are_distinct_sentences(distinct: Sequence[object], rows: int) -> bool:
    """Test whether a column holds sentences: its cells, ``rows`` in number, all differ and have several words."""
    word_counts = sorted(len(str(cell).split()) for cell in distinct)
    return len(distinct) == rows and word_counts[len(word_counts) // 2] >= TYPE_INFERENCE.min_words_per_text


def fit_column_as(
    name: str,
    column_type: str,
    cells: np.ndarray,
    argument: str = "column_type",
    *,
    has_text_encoder: bool = False,
    order: Sequence[str] = POINT_FIRST_FORMATS,
) -> InferredType:
    """Fit a column of a type that the user has set.

    Args:
        name: The name of the column.
        column_type: The type of the column, one of ``COLUMN_TYPES``.
        cells: (n,) the cells of the column.
        argument: The name of ``column_type`` in error messages.
        has_text_encoder: Whether a pretrained network will embed texts. Texts without shared words are then accepted.
        order: The numeric formats, in the order in which they are tried.

    Raises:
        InputError: The column is empty, or its cells are not of this type.
    """
    distinct = list(dict.fromkeys(cells[~is_missing(cells)].tolist()))
    text = format_cells(cells)
    if distinct and column_type == "picture" and cells.dtype.kind == "O":
        return InferredType(Picture())
    if distinct and column_type == "category":
        return InferredType(Category.fit(cells))
    if distinct and column_type == "text" and ((fitted := Text.fit(text)).feature_suffixes or has_text_encoder):
        return InferredType(fitted, is_text=True)
    if distinct and column_type == "date":
        if cells.dtype.kind == "M":
            return InferredType(Date.fit(cells))
        if date_format := infer_date_format(map(str, distinct)):
            return InferredType(Date.fit(text, date_format))
    if distinct and column_type == "number" and cells.dtype.kind != "M":
        is_text = cells.dtype.kind == "O"
        if numeric_format := _infer_any_numeric_format(distinct, order, named=True) if is_text else "plain":
            return InferredType(Numeric.fit(cells, numeric_format))
    got = f"{name} with cells such as {str(distinct[0])[:50]!r}" if distinct else f"{name}, which is empty"
    return raise_input_error(argument, f"name a column that holds a {column_type}", got, "Name another type, or none.")
