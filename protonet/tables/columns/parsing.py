"""Recognize missing values, and convert columns of any type to text or to numbers."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from functools import cache

import numpy as np

from protonet.tables.columns.dates import parse_date, parse_dates, parse_distinct_cells
from protonet.tables.columns.quantities import SECONDS_PER_DAY, is_missing_word, parse_numeric, parse_plain_number
from protonet.tables.delimited import MISSING_TEXTS

#: The spellings of true and false in English, German and French, in lower case: "1" for true, "0" for false.
BOOLEAN_SPELLINGS = dict.fromkeys(("true", "t", "yes", "y", "on", "1", "wahr", "ja", "vrai", "oui"), "1")
BOOLEAN_SPELLINGS |= dict.fromkeys(("false", "f", "no", "n", "off", "0", "falsch", "nein", "faux", "non"), "0")


def is_missing(values: np.ndarray) -> np.ndarray:
    """Compute a mask (n,) bool of the missing values of a column (n,) of any type: "", NaN and NaT.

    Texts such as "N/A" are not missing values, unless the caller has replaced them by `replace_missing_cells` before.
    """
    if values.dtype.kind == "O":
        return np.asarray(values == "", bool)
    return np.asarray(np.isnat(values) if values.dtype.kind == "M" else np.isnan(values))


def replace_missing_cells(values: np.ndarray, missing: Collection[str] = MISSING_TEXTS) -> np.ndarray:
    """Replace the cells of a column (n,) that mean "missing" by "", NaN or NaT, according to the type of the column.

    A number or date is missing if one of the texts ``missing``, in lower case, has its value, as "-999" for -999.0.
    Returns a copy, float64 if integers were replaced; or ``values`` itself if no cell means "missing".
    """
    if values.dtype.kind != "O":
        return _replace_missing_values(values, frozenset(missing))
    lower = "\0".join(values).lower().split("\0")  # four times as fast as cell by cell
    if len(lower) != len(values):  # a cell contains the separator, or the column is empty
        lower = [cell.lower() for cell in values]
    mask = np.fromiter(map(missing.__contains__, lower), bool, len(values))
    return np.where(mask, "", values).astype(object) if mask.any() else values


def _replace_missing_values(values: np.ndarray, missing: frozenset[str]) -> np.ndarray:
    """Replace numbers or dates (n,) that mean "missing" by NaN or NaT; integers become float64 if one is replaced."""
    numbers, days = _parse_missing_values(missing)
    if values.dtype.kind == "M":
        mask = np.isin(parse_dates(values, ""), days)
        return np.where(mask, np.datetime64("NaT"), values) if mask.any() else values
    with np.errstate(over="ignore"):
        mask = np.isin(values, numbers.astype(values.dtype) if values.dtype.kind == "f" else numbers)
    if not mask.any():
        return values
    return np.where(mask, math.nan, values if values.dtype.kind == "f" else values.astype(np.float64))


@cache
def _parse_missing_values(missing: frozenset[str]) -> tuple[np.ndarray, np.ndarray]:
    """Parse texts that mean "missing"; return those that are numbers, and those that are dates in days since 1970."""
    numbers = np.array([parse_plain_number(text) for text in missing])
    days = np.array([parse_date(text.upper(), "iso") for text in missing])
    return numbers[np.isfinite(numbers)], days[np.isfinite(days)]


def is_missing_or_missing_word(values: np.ndarray) -> np.ndarray:
    """Compute a mask (n,) bool of the cells of a column of numbers or dates that are missing or mean "missing"."""
    missing = is_missing(values)
    if values.dtype.kind != "O":
        return missing
    words = (cell.lower() in MISSING_TEXTS or is_missing_word(cell) for cell in values)
    return np.asarray(missing | np.fromiter(words, bool, len(values)))


def format_cells(values: np.ndarray) -> np.ndarray:
    """Format cells (n,) of any type as text (n,): missing values as "", and floats without a fraction as integers."""
    missing = is_missing(values)
    texts = values.astype(object) if values.dtype.kind == "O" else values.astype(str).astype(object)
    if values.dtype.kind == "f":
        integral = np.abs(values) < 2**53
        integral[integral] = values[integral] == np.rint(values[integral])
        texts[integral] = values[integral].astype(np.int64).astype(str)
    texts[missing] = ""
    return texts


def parse_numeric_column(values: np.ndarray, numeric_format: str, unit: str | None = None) -> np.ndarray:
    """Parse the cells (n,) of a column to float64, NaN for missing values and other text; see `parse_numeric`."""
    if values.dtype.kind == "M":  # Excel stores durations below a day as times
        seconds = SECONDS_PER_DAY * parse_dates(values, "")
        return seconds if numeric_format == "duration" else np.full(len(values), math.nan)
    if values.dtype.kind != "O":
        return np.asarray(values, np.float64)
    if numeric_format == "plain" and "_" not in "".join(values):
        with suppress(ValueError):
            return np.fromiter(map(float, values), np.float64, len(values))
    return parse_distinct_cells(lambda cell: parse_numeric(cell, numeric_format, unit), values)
