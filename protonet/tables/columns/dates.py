"""Parse dates and times as people write them.

All rows of a column have the same format, or a few that do not contradict each other, so that "3/4/2020" is the same
day in each of them. Formats are inferred from the training rows; model files store their names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cache
from itertools import product

import numpy as np

from protonet.tables.columns.quantities import (
    MIN_PARSED_FRACTION,
    N_PROBED_CELLS,
    SECONDS_PER_DAY,
    TIME_OF_DAY,
    drop_words,
    parse_duration,
    parse_plain_number,
)
from protonet.tables.columns.units import normalize_cell, normalize_date

#: Maximum number of different date formats in a column, and the fraction of its cells that every further format must
#: exceed.
MAX_DATE_FORMATS, MIN_EXTRA_FORMAT_FRACTION = 3, 0.02
#: Separates the single formats in the name of a date format that combines several.
DATE_FORMAT_SEPARATOR = " or "
_TIME_AT_END = re.compile(rf"(?<![\d:])(?:{TIME_OF_DAY.pattern})$", re.IGNORECASE)
_TIME_DIRECTIVES = re.compile(" ?%[HI]:.*")  # in date formats
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}(?::?\d{2})?)?)?")
_COMPACT_DATE = re.compile(r"(?:19|20)\d{6}")  # other numbers of eight digits are not dates
_TIME_ZONE = re.compile(r"(?:Z|[+-]\d{2}(?::?\d{2})?)$")
#: Formats of days that name the same day to everybody. They are read beside every other format.
_UNAMBIGUOUS_DAY_FORMATS = (
    *("iso", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%d.%m.%y", "%d-%b-%Y", "%d-%b-%y", "%d/%b/%Y", "%d. %b %Y"),
    *("%d %b %Y", "%b %d %Y", "%b %d, %Y"),
)
_DAY_FORMATS = (
    *("%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m-%d-%Y", "%m/%d/%y", "%d/%m/%y"),
    *(*_UNAMBIGUOUS_DAY_FORMATS[1:], "%b %Y", "%Y-%m", "%m/%Y"),
)
#: Format of dates such as 20240306, which is only used beside other date formats: digits alone are numbers.
COMPACT_DATE_FORMAT = "%Y%m%d"
_TIME_FORMATS = ("%H:%M", "%H:%M:%S", "%I:%M %p", "%I:%M:%S %p")
#: Formats of dates, times and both, in the order in which they are tried: the first of several that match is used.
DATE_FORMATS = (
    *("iso", COMPACT_DATE_FORMAT, *_DAY_FORMATS, *_TIME_FORMATS),
    *(f"{day} {time}" for day, time in product(_DAY_FORMATS, _TIME_FORMATS)),
)


def parse_distinct_cells(parse: Callable[[str], float], cells: np.ndarray) -> np.ndarray:
    """Parse text cells (n,) to numbers (n,) float64; the function ``parse`` is called once for each distinct cell."""
    return np.fromiter(map(cache(parse), cells), np.float64, len(cells))


def parse_date(cell: str, date_format: str) -> float:
    """Parse a date to days since 1970, or a time without a date to a fraction of a day; NaN for other text."""
    if DATE_FORMAT_SEPARATOR in date_format:
        values = (parse_date(cell, part) for part in date_format.split(DATE_FORMAT_SEPARATOR))
        return next((value for value in values if not math.isnan(value)), math.nan)
    try:
        if date_format == "iso":
            if not _ISO_DATE.fullmatch(cell):
                return math.nan
            zone = "" if len(cell) < 17 else "".join(_TIME_ZONE.findall(cell))
            local = cell.removesuffix(zone)
            days = float(np.datetime64(local[:26], "us").astype(np.int64)) / (1e6 * SECONDS_PER_DAY)
            minutes = 0 if zone in {"", "Z"} else int(zone[1:3]) * 60 + int(zone[3:].strip(":") or 0)
            return days - (-minutes if zone[:1] == "-" else minutes) / 1440
        if date_format == COMPACT_DATE_FORMAT and not _COMPACT_DATE.fullmatch(cell):
            return math.nan
        moment = datetime.strptime(normalize_date(cell), date_format)
    except (ValueError, OverflowError):
        is_duration = date_format in _TIME_FORMATS and not TIME_OF_DAY.fullmatch(cell)  # such as 37:02
        return parse_duration(cell) / SECONDS_PER_DAY if is_duration else math.nan
    epoch = datetime(1900, 1, 1) if date_format in _TIME_FORMATS else datetime(1970, 1, 1)
    return (moment - epoch).total_seconds() / SECONDS_PER_DAY


def parse_date_with_any_time(cell: str, date_format: str) -> float:
    """Parse a date whose day is clear or in a format, and whose time is in any form or missing; NaN for other text.

    If the format is that of a time of day, the cell must be one. The result is as by `parse_date`.
    """
    text = normalize_date(cell)
    match = _TIME_AT_END.search(text)
    day, time = (text[: match.start()].rstrip(", "), match[0]) if match else (text, "")
    days = {_TIME_DIRECTIVES.sub("", part): None for part in date_format.split(DATE_FORMAT_SEPARATOR)}
    any_day, any_time = map(DATE_FORMAT_SEPARATOR.join, ([*days, *_UNAMBIGUOUS_DAY_FORMATS], _TIME_FORMATS))
    if bool(day) == ("" in days):  # times of day have no day, other dates have one
        return math.nan
    clock = parse_date(time, any_time) if time or not day else 0
    return clock + (parse_date(day, any_day) if day else 0)


def parse_dates(values: np.ndarray, date_format: str) -> np.ndarray:
    """Parse the cells (n,) of a column of dates to days (n,) float64 since 1970; NaN for cells that are not dates.

    Dates with a clear day and month are accepted beside those of ``date_format``, unless that is a time of day.
    """
    if values.dtype.kind == "M":
        days = values.astype("datetime64[us]").astype(np.int64) / (1e6 * SECONDS_PER_DAY)
        return np.where(np.isnat(values), math.nan, days)
    is_time = set(date_format.split(DATE_FORMAT_SEPARATOR)) <= {*_TIME_FORMATS}  # numbers are then durations in seconds
    if values.dtype.kind != "O":
        return values / SECONDS_PER_DAY if is_time else np.full(len(values), math.nan)

    any_clear_day = DATE_FORMAT_SEPARATOR.join(_UNAMBIGUOUS_DAY_FORMATS)

    def parse(cell: str) -> float:
        cell = normalize_cell(cell)
        days = parse_date(cell, date_format)
        if math.isnan(days):
            return parse_plain_number(cell) / SECONDS_PER_DAY if is_time else parse_date(cell, any_clear_day)
        return days

    return parse_distinct_cells(parse, values)


def infer_date_format(cells: Iterable[str]) -> str:
    """Infer the date format that most of the distinct, non-missing cells of a column match; "" for no dates.

    The first of ``DATE_FORMATS`` wins among those that match equally many cells. If one format is not enough, several
    are joined by ``DATE_FORMAT_SEPARATOR``; the result is "" if a cell is a different day in two of them.
    """
    cells = drop_words(cells)
    formats, unmatched = list[str](), cells
    allowed = (1 - MIN_PARSED_FRACTION) * len(cells)
    while len(unmatched) > allowed and len(formats) < MAX_DATE_FORMATS:
        best, count = _best_date_format(unmatched)
        pairs = ((parse_date(cell, best), parse_date(cell, other)) for other in formats for cell in cells)
        too_few = count <= MIN_EXTRA_FORMAT_FRACTION * len(cells)
        if too_few or any(abs(one - two) > 0 for one, two in pairs):  # ambiguous; False for NaN
            return ""
        formats.append(best)
        unmatched = [cell for cell in unmatched if math.isnan(parse_date(cell, best))]
    return DATE_FORMAT_SEPARATOR.join(formats) if cells and len(unmatched) <= allowed else ""


def are_dates_in_any_format(cells: Iterable[str]) -> bool:
    """Test whether most of the distinct cells are dates, in any mixture of formats."""
    cells = list(cells)
    formats = [
        date_format
        for date_format in (COMPACT_DATE_FORMAT, *_DAY_FORMATS)
        if any(not math.isnan(parse_date(cell, date_format)) for cell in cells[:N_PROBED_CELLS])
    ]
    combined = DATE_FORMAT_SEPARATOR.join(["iso", *formats])
    return sum(not math.isnan(parse_date(cell, combined)) for cell in cells) >= MIN_PARSED_FRACTION * len(cells)


def _best_date_format(cells: list[str]) -> tuple[str, int]:
    """Return the date format that most cells match, the first if there are several, and the number of these cells."""
    probe = [cell for cell in cells if any(map(str.isdigit, cell))][:N_PROBED_CELLS]
    best, best_count = "", 0
    for date_format in DATE_FORMATS:
        if any(not math.isnan(parse_date(cell, date_format)) for cell in probe):
            count = sum(not math.isnan(parse_date(cell, date_format)) for cell in cells)
            best, best_count = (date_format, count) if count > best_count else (best, best_count)
            if count == len(cells):
                break
    return best, best_count
