"""Parse numbers, intervals, durations and dates as people write them, and recognize missing values.

A *format* is the notation of the cells of a column. All rows have the same format, so that "1,234" is the same number
and "3/4/2020" the same day in each of them. Formats are inferred from the training rows; model files store their names.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from itertools import islice, product

import numpy as np

from protonet._text import join_digit_groups
from protonet.tables.columns.units import OPEN_INTERVAL_WORDS, detect_unit, normalize_date, split_unit
from protonet.tables.delimited import COMMA_NUMBER_PATTERN, MISSING_TEXTS, POINT_GROUPED_DIGITS, POINT_NUMBER_PATTERN

#: Minimum fraction of the cells of a column that must match its format; the other cells count as missing.
MIN_PARSED_FRACTION = 0.9
#: Words that mean "missing" in columns of numbers or dates, in lower case and without other characters than letters. In
#: columns of other types, these words may be categories.
MISSING_WORDS = frozenset(
    {"", "na", "nan", "nat", "nil", "null", "none", "missing", "unknown", "undefined", "unspecified", "blank", "empty"}
    | {"notavailable", "notapplicable", "notknown", "notmeasured", "notrecorded", "notrated", "unrated", "nodata"}
    | {"novalue", "nd", "tbd", "err"}
)
#: The spellings of true and false in English, German and French, in lower case: "1" for true, "0" for false.
BOOLEAN_SPELLINGS = dict.fromkeys(("true", "t", "yes", "y", "on", "1", "wahr", "ja", "vrai", "oui"), "1")
BOOLEAN_SPELLINGS |= dict.fromkeys(("false", "f", "no", "n", "off", "0", "falsch", "nein", "faux", "non"), "0")
#: Maximum number of different date formats in a column, and the fraction of its cells that every further format must
#: exceed.
MAX_DATE_FORMATS, MIN_EXTRA_FORMAT_FRACTION = 3, 0.02
#: Separates the single formats in the name of a date format that combines several.
DATE_FORMAT_SEPARATOR = " or "
#: Number of cells on which formats are tried first, to rule out most formats before all cells are parsed.
N_PROBED_CELLS = 100
SECONDS_PER_DAY = 86_400.0
#: The length in days of the units of durations that are longer than a day, and of "only", days without hours.
DAYS_PER_UNIT = {"only": 1.0, "weeks": 7.0, "months": 365.2425 / 12, "years": 365.2425}

#: Two numbers in a cell, as in feet and inches or "3 4".
_TWO_NUMBERS = re.compile(r"\d[\s'’]+\d")
_TRAILING_MINUS = re.compile(r"^([\d.,]*[.,]\d+)-$")  # 5.00- of accounts; marks in school such as 2- are no numbers
_ZERO_PADDED = re.compile(r"0\d+")
_INTERVAL = re.compile(
    r"(?:(?P<below><=?|≤|under|below|up to|less than|unter|bis)"
    r"|(?P<above>>=?|≥|over|above|from|more than|at least|über|ab))?\s*"
    r"(?P<low>\d+(?:[.,]\d+)*(?:e\d+)?)"
    r"(?:\s*(?:-|–|—|to|\.\.+|and|bis)\s*(?P<high>\d+(?:[.,]\d+)*(?:e\d+)?))?"
    rf"\s*(?P<open>\+|plus|(?:[^\W\d_]+ )?(?:and|or|und|oder) (?:{'|'.join(sorted(OPEN_INTERVAL_WORDS - {'plus'}))}))?",
    re.IGNORECASE,
)
# 37:02:11, 9:16 (minutes and seconds), 1 day, 13:02:11 (Python), -1 days +23:00:00 (pandas), PT37H2M11S (ISO 8601).
_DURATION = re.compile(
    r"(?:(?P<days>-?\d+) days?,? ?\+?)?(?P<sign>-?)(?:(?P<hours>\d+):(?=\d\d:))?(?P<minutes>\d+):"
    r"(?P<seconds>[0-5]\d(?:[.,]\d+)?)|(?P<only>-?\d+) days?"
)
_TIME_OF_DAY = re.compile(r"(?:(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d)?|24:00(?::00)?)(?: [AP]M)?", re.IGNORECASE)
_TIME_AT_END = re.compile(rf"(?<![\d:])(?:{_TIME_OF_DAY.pattern})$", re.IGNORECASE)
_TIME_DIRECTIVES = re.compile(" ?%[HI]:.*")  # in date formats
_ISO_DURATION = re.compile(
    r"(?P<sign>-?)P(?=.)(?:(?P<days>\d+)D)?(?:T(?=.)(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?"
    r"(?:(?P<seconds>\d+(?:[.,]\d+)?)S)?)?"
)
# 1h 05m 20s, 3h54, 2 hours 5 minutes, 3 weeks, 1 year 2 months (months and years of average length).
_DURATION_WORDS = {
    **{"years": "y(?:(?:ea)?rs?)?", "months": "mo(?:nth|n)?s?", "weeks": "w(?:ee)?ks?", "days": "d(?:ays?)?"},
    **{"hours": "h(?:(?:ou)?rs?)?", "minutes": "m(?:in(?:ute)?s?)?|(?<=h\\d\\d)", "seconds": "s(?:ec(?:ond)?s?)?"},
}
_WORD_DURATION = re.compile(
    r"(?P<sign>-?)(?=\d)"
    + "".join(rf"(?:(?P<{name}>\d+(?:[.,]\d+)?) ?(?:{word}),? ?)?" for name, word in _DURATION_WORDS.items())
)
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
#: Formats of numbers: as Python writes them, with a decimal point, with a decimal comma, intervals, intervals with a
#: decimal comma, and durations.
NUMERIC_FORMATS = ("plain", "point", "comma", "interval", "comma interval", "duration")
#: The decimal mark of each format of intervals.
INTERVAL_DECIMAL_MARKS = {"interval": "point", "comma interval": "comma"}
#: Orders in which formats are tried, for tables that prefer a decimal point and a decimal comma. The first format wins
#: among those that match equally many cells.
FORMATS_DECIMAL_POINT_FIRST, FORMATS_DECIMAL_COMMA_FIRST = ("plain", "point", "comma"), ("comma", "point", "plain")
#: Order in which formats are tried for files with semicolons between cells. The comma of "1,234" is then a decimal
#: mark. So is the point of "1.234", unless `are_thousands_grouped` is true for its column.
SEMICOLON_FILE_FORMATS = ("plain", "comma", "point")


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


def is_missing_word(cell: str) -> bool:
    """Test whether a cell of a column of numbers or dates means "missing", such as "n.a.", "(unknown)" or "***"."""
    visible = cell.isascii() or not any(unicodedata.category(char) == "Cf" for char in cell)
    return visible and not any(map(str.isdigit, cell)) and "".join(filter(str.isalpha, cell)).lower() in MISSING_WORDS


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


def parse_distinct_cells(parse: Callable[[str], float], cells: np.ndarray) -> np.ndarray:
    """Parse text cells (n,) to numbers (n,) float64; the function ``parse`` is called once for each distinct cell."""
    return np.fromiter(map(cache(parse), cells), np.float64, len(cells))


def parse_plain_number(cell: str) -> float:
    """Parse a number as Python writes it, including infinities; NaN for other text."""
    try:
        return math.nan if "_" in cell else float(cell)
    except ValueError:
        return math.nan


def parse_formatted_number(cell: str, decimal: str, unit: str | None = None) -> float:
    """Parse a number with the decimal mark "point" or "comma", such as "1,234.50 EUR" or "(3 %)"; NaN for other text.

    Thousands separators, a unit, a currency sign and a per cent sign are ignored. Parentheses mean a negative number.
    If a unit is given, a number must have it or none.
    """
    text, cell_unit = split_unit(cell)
    text = join_digit_groups(text)
    if _TWO_NUMBERS.search(text) or (unit is not None and cell_unit not in {"", unit}):
        return math.nan
    if text[:1] + text[-1:] == "()":  # accountants' negative numbers
        text = f"-{text[1:-1]}"
    text = "".join(char for char in text if not char.isspace() and char not in "'’").replace("−", "-")
    if text[-1:] == "-":
        text = _TRAILING_MINUS.sub(r"-\1", text)
    if not (POINT_NUMBER_PATTERN if decimal == "point" else COMMA_NUMBER_PATTERN).fullmatch(text):
        return math.nan
    return float(text.replace(",", "") if decimal == "point" else text.replace(".", "").replace(",", "."))


def parse_duration(cell: str, *, allow_words: bool = True) -> float:
    """Parse hours, minutes and seconds, also "3h 54m" if ``allow_words``, to seconds; NaN for other text."""
    match = _DURATION.fullmatch(cell) or _ISO_DURATION.fullmatch(cell)
    match = match or (_WORD_DURATION.fullmatch(cell) if allow_words else None)
    if match is None:
        return math.nan
    parts = {name: float((text or "0").replace(",", ".")) for name, text in match.groupdict().items() if name != "sign"}
    if match["hours"] and ":" in cell and parts["minutes"] > 59:
        return math.nan
    days = parts["days"] + sum(parts.get(name, 0) * length for name, length in DAYS_PER_UNIT.items())
    seconds = 3600 * parts["hours"] + 60 * parts["minutes"] + parts["seconds"]
    if match["sign"]:
        days, seconds = days if match.start("sign") else -days, -seconds
    return 86_400 * days + seconds


def are_durations(cells: Iterable[str], *, allow_times_of_day: bool = False) -> bool:
    """Test whether most of the distinct cells of a column are durations, such as 37:02:11.

    If all of them may be times of day, such as 13:02, the result is False, unless ``allow_times_of_day``.
    """
    cells = [cell for cell in cells if not is_missing_word(cell)]
    if not cells or all(math.isnan(parse_duration(cell)) for cell in cells[:N_PROBED_CELLS]):
        return False
    durations = [cell for cell in cells if not math.isnan(parse_duration(cell))]
    enough = len(durations) >= MIN_PARSED_FRACTION * len(cells)
    return enough and (allow_times_of_day or not all(map(_TIME_OF_DAY.fullmatch, durations)))


def parse_numeric(cell: str, numeric_format: str, unit: str | None = None) -> float:
    """Parse a number in one of ``NUMERIC_FORMATS``; NaN for other text, and for numbers in another unit than ``unit``.

    The format "plain" also accepts thousands separators, units and durations, which may occur in new rows. The format
    "duration" also accepts numbers of seconds.
    """
    if numeric_format in INTERVAL_DECIMAL_MARKS:
        return parse_interval(cell, INTERVAL_DECIMAL_MARKS[numeric_format], unit)
    if numeric_format not in {"plain", "duration"}:
        return parse_formatted_number(cell, numeric_format, unit)
    formatted = parse_formatted_number(cell, "point") if numeric_format == "plain" else math.nan
    values = (parse_plain_number(cell), formatted, parse_duration(cell, allow_words=numeric_format == "duration"))
    return next((value for value in values if not math.isnan(value)), math.nan)


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


def detect_decimal_separators(cells: Iterable[str]) -> set[str]:
    """Detect the decimal marks that the cells require, as a set of the names "point" and "comma".

    "1.5" requires a point, "0,205" a comma. "1,234" requires neither, as its comma may be between thousands.
    """
    marked = [cell for cell in cells if "," in cell or "." in cell]
    return {
        mark
        for mark, other in (("point", "comma"), ("comma", "point"))
        if any(
            math.isnan(parse_formatted_number(cell, other)) and not math.isnan(parse_formatted_number(cell, mark))
            for cell in marked
        )
    }


def infer_numeric_format(
    cells: Iterable[str], *, allow_codes: bool = False, format_order: Sequence[str] = FORMATS_DECIMAL_POINT_FIRST
) -> str:
    """Infer the format that most cells of a column match: "plain", "point" or "comma"; "" for no numbers.

    The cells are distinct and not missing. Cells of equal length with leading zeros are codes, unless ``allow_codes``.
    The first format of ``format_order`` wins among those that match equally many cells.
    """
    cells = list(cells)
    if not (plain := _are_plain_numbers(cells)):
        cells = [cell for cell in cells if not is_missing_word(cell)]
        plain = _are_plain_numbers(cells)
    if not cells:
        return ""
    zeros = [cell for cell in cells if cell[0] == "0"]  # few columns have any, and patterns are slow
    if not allow_codes and any(map(_ZERO_PADDED.fullmatch, zeros)) and len(set(map(len, cells))) == 1:
        return ""
    if plain and (format_order[0] == "plain" or not any("." in cell for cell in cells)):
        return "comma" if format_order == SEMICOLON_FILE_FORMATS and are_thousands_grouped(cells) else "plain"

    def parsed_fraction(parse: Callable[[str], float], sample: list[str]) -> float:
        return sum(not math.isnan(parse(cell)) for cell in sample) / len(sample)

    def select_likely_parsers(unit: str | None) -> dict[str, Callable[[str], float]]:
        """Select the parsers, by format, that can parse enough of the first cells; none for most text columns."""
        parsers: dict[str, Callable[[str], float]] = {"plain": parse_plain_number}
        parsers |= {mark: partial(parse_formatted_number, decimal=mark, unit=unit) for mark in ("point", "comma")}
        probed = cells[:N_PROBED_CELLS]
        least = MIN_PARSED_FRACTION / 2
        return {name: parsers[name] for name in format_order if parsed_fraction(parsers[name], probed) >= least}

    if not select_likely_parsers(None):  # the unit depends on all cells, and is slow to detect
        return ""
    parsers = select_likely_parsers(detect_unit(cells))
    fractions = {name: parsed_fraction(parse, cells) for name, parse in parsers.items()}
    best = max(fractions, key=lambda name: fractions[name], default="")
    return best if fractions.get(best, 0.0) >= MIN_PARSED_FRACTION else ""


def are_thousands_grouped(cells: Sequence[str]) -> bool:
    """Test whether the points in numbers are thousands separators, as in a column of "950" and "1.200".

    The numbers of 1000 or more must have points, and the smaller ones must not.
    """
    others = [float(cell) for cell in cells if "." not in cell]
    return have_ambiguous_points(cells) and bool(others) and max(map(abs, others)) < 1000


def have_ambiguous_points(cells: Iterable[str]) -> bool:
    """Test whether cells have points, and all of them may be decimal points or between thousands, as in "22.361"."""
    marked = [cell for cell in cells if "." in cell]
    return bool(marked) and all(re.fullmatch(rf"[-+]?{POINT_GROUPED_DIGITS}", cell) for cell in marked)


def _are_plain_numbers(cells: list[str]) -> bool:
    """Test whether all cells are finite numbers as Python writes them."""
    return all(math.isfinite(parse_plain_number(cell)) for cell in cells)


def parse_interval(cell: str, decimal: str = "point", unit: str | None = None) -> float:
    """Parse an interval such as "10 to 20" to its midpoint, or an open interval to its bound; NaN for other text.

    The arguments are those of `parse_formatted_number`.
    """
    text, cell_unit = split_unit(cell)
    match = _INTERVAL.fullmatch(text)
    if match is None or (unit is not None and cell_unit not in {"", unit}):
        return math.nan
    low, high = match.group("low", "high")
    bounds = [parse_formatted_number(bound, decimal) for bound in (low, high) if bound is not None]
    factor = 10.0 ** int(high.rpartition("e")[2]) if "e" in (high or "") and "e" not in low else 1.0
    if factor > 1 and bounds[0] < bounds[1] / factor:  # 5-10K
        bounds[0] *= factor
    if len(bounds) == 2 and bounds[0] > bounds[1]:
        return math.nan
    return sum(bounds) / len(bounds)


def infer_interval_format(cells: Iterable[str], format_order: Sequence[str] = FORMATS_DECIMAL_POINT_FIRST) -> str:
    """Infer the format of the distinct cells of a column: "interval" or "comma interval"; "" for another type.

    At least three cells are required, all of them intervals or numbers, and one an interval. Of five or more cells, one
    may be an answer in words, such as "prefer not to say"; it is then missing. If both decimal marks are possible, the
    order of the number formats (``format_order``) decides.
    """
    cells = [cell for cell in cells if not is_missing_word(cell)]
    marks = ("comma", "point") if format_order.index("comma") < format_order.index("point") else ("point", "comma")

    def list_non_intervals(mark: str, unit: str | None) -> list[str]:
        """List the first two cells that are not intervals with this decimal mark and unit."""
        return list(islice((cell for cell in cells if math.isnan(parse_interval(cell, mark, unit))), 2))

    for mark in marks if len(cells) > 2 else ():
        if len(list_non_intervals(mark, None)) > 1:  # most columns; to detect the unit of all cells is slow
            continue
        others = list_non_intervals(mark, detect_unit(cells))
        is_answer = len(others) == 1 and len(cells) > 4 and not any(map(str.isdigit, others[0]))
        numbers = (parse_formatted_number(cell, mark) for cell in cells if cell not in others)
        if (not others or is_answer) and any(map(math.isnan, numbers)):
            return "interval" if mark == "point" else "comma interval"
    return ""


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
        is_duration = date_format in _TIME_FORMATS and not _TIME_OF_DAY.fullmatch(cell)  # such as 37:02
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
    cells = [cell for cell in cells if not is_missing_word(cell)]
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
