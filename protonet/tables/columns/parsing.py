"""Numbers, intervals, dates and gaps as people write them.

A *form* says how the cells of a whole column are written, so that "1,234" is one number throughout and "3/4/2020" one
day. It is found once, on the rows of fit, and stored by its name.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import product

import numpy as np

from protonet.tables.delimited import GAPS

#: The share of the cells of a column that have to fit its form; the others count as gaps.
ENOUGH = 0.9
#: What stands for nothing among numbers or dates, as letters alone, in lower case; elsewhere it may be a category.
GAP_WORDS = frozenset(
    {"", "na", "nan", "nat", "nil", "null", "none", "missing", "unknown", "undefined", "unspecified", "blank", "empty"}
    | {
        "notavailable",
        "notapplicable",
        "notknown",
        "notmeasured",
        "notrecorded",
        "nodata",
        "novalue",
        "nd",
        "tbd",
        "err",
    }
)
#: How programs and people write yes and no, in lower case.
BOOLEANS = dict.fromkeys(("true", "t", "yes", "y", "on", "1"), "1") | dict.fromkeys(
    ("false", "f", "no", "n", "off", "0"), "0"
)
#: Ways to write dates that a column may mix, and the least share of its cells that the second one has.
MOST_FORMS, LEAST_SHARE = 3, 0.02
#: Between them, in a form that is several.
OR = " or "
#: Cells that are looked at before all are.
SOME = 100
SECONDS_PER_DAY = 86_400.0

_EXPONENT = r"(?:[eE][-+]?\d+)?"
# Thousands are grouped, in India lakhs too; no first group begins with 0, so that "0,205" has a decimal comma.
_GROUPED = r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3})"
_GROUPED_POINTS = r"(?:[1-9]\d{0,2}(?:\.\d{3})+|[1-9]\d?(?:\.\d{2})+\.\d{3})"
_POINT = re.compile(rf"[-+]?(?:{_GROUPED}(?:\.\d*)?|\d+\.?\d*|\.\d+)" + _EXPONENT)
_COMMA = re.compile(rf"[-+]?(?:{_GROUPED_POINTS}(?:,\d*)?|\d+,?\d*|,\d+)" + _EXPONENT)
_CODE = re.compile(r"0\d+")
_UNIT = re.compile(r"\s+([^\W\d_][^\W\d_]*|°\w?)$")
_INTERVAL = re.compile(
    r"(?:(?P<below><=?|≤|under|below|up to|less than)|(?P<above>>=?|≥|over|above|from|more than|at least))?\s*"
    r"(?P<low>\d+(?:[.,]\d+)*)"
    r"(?:\s*(?:-|–|—|to|\.\.+|and)\s*(?P<high>\d+(?:[.,]\d+)*))?"
    r"\s*(?P<open>\+|and over|and more|and above|or more|or over)?",
    re.IGNORECASE,
)
# 37:02:11, 9:16 (minutes and seconds), 1 day, 13:02:11 (Python), -1 days +23:00:00 (pandas), PT37H2M11S (ISO 8601).
_DURATION = re.compile(
    r"(?:(?P<days>-?\d+) days?,? ?\+?)?(?P<sign>-?)(?:(?P<hours>\d+):(?=\d\d:))?(?P<minutes>\d+):"
    r"(?P<seconds>[0-5]\d(?:[.,]\d+)?)|(?P<only>-?\d+) days?"
)
_TIME_OF_DAY = re.compile(r"(?:(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d)?|24:00(?::00)?)(?: [AP]M)?", re.IGNORECASE)
_ISO_DURATION = re.compile(
    r"(?P<sign>-?)P(?=.)(?:(?P<days>\d+)D)?(?:T(?=.)(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?"
    r"(?:(?P<seconds>\d+(?:[.,]\d+)?)S)?)?"
)
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}(?::?\d{2})?)?)?")
_COMPACT = re.compile(r"(?:19|20)\d{6}")  # other numbers of so many digits are no days
_ZONE = re.compile(r"(?:Z|[+-]\d{2}(?::?\d{2})?)$")
_DAYS = (
    *("%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%m/%d/%y", "%d/%m/%y", "%d.%m.%y"),
    *("%d %b %Y", "%d %B %Y", "%b %d %Y", "%b %d, %Y", "%B %d, %Y", "%d-%b-%Y", "%d-%b-%y", "%b %Y", "%B %Y"),
)
#: Days as numbers, which are dates only in a column of others: numbers alone are numbers.
COMPACT = "%Y%m%d"
_CLOCKS = ("%H:%M", "%H:%M:%S", "%I:%M %p", "%I:%M:%S %p")
#: The ways to write a day, a time or both, in the order in which they are tried: of two that fit, the first is meant.
DATE_FORMS = ("iso", COMPACT, *_DAYS, *_CLOCKS, *(f"{day} {clock}" for day, clock in product(_DAYS, _CLOCKS)))
NUMBER_FORMS = ("plain", "point", "comma", "interval", "duration")
#: In which order forms are tried, by the decimal mark that is likely: of two that fit as many cells the first is meant.
POINT_FIRST, COMMA_FIRST = ("plain", "point", "comma"), ("comma", "point", "plain")
#: The same where only commas between digits may be decimal marks, and points are: a file whose separator is ";".
COMMA_OVER_POINT = ("plain", "comma", "point")


def find_gaps(values: np.ndarray) -> np.ndarray:
    """Return which of some values (n,), of any kind of column, are missing, after `blank_missing`: (n,) bool."""
    if values.dtype.kind == "O":
        return np.asarray(values == "", bool)
    return np.asarray(np.isnat(values) if values.dtype.kind == "M" else np.isnan(values))


def blank_missing(values: np.ndarray, missing: Collection[str] = GAPS) -> np.ndarray:
    """Return values (n,) of any kind of column, those texts as "" that are missing values (in lower case)."""
    if values.dtype.kind != "O":
        return values
    lower = "\0".join(values).lower().split("\0")  # one by one takes four times as long
    if len(lower) != len(values):  # a cell holds the mark, or there is none
        lower = [cell.lower() for cell in values]
    found = np.fromiter(map(missing.__contains__, lower), bool, len(values))
    return np.where(found, "", values).astype(object) if found.any() else values


def count_gaps(values: np.ndarray) -> int:
    """Return how many of some values (n,) stand for nothing."""
    return int(find_gaps(values).sum())


def is_gap_word(cell: str) -> bool:
    """Return whether a cell is a gap where others are numbers or dates: "n.a.", "(unknown)", "***".

    A cell with invisible characters is not: it only looks empty.
    """
    visible = cell.isascii() or not any(unicodedata.category(sign) == "Cf" for sign in cell)
    return visible and not any(map(str.isdigit, cell)) and "".join(filter(str.isalpha, cell)).lower() in GAP_WORDS


def find_words(values: np.ndarray) -> np.ndarray:
    """Return which of some values (n,) of a column of numbers or dates stand for nothing: (n,) bool."""
    gaps = find_gaps(values)
    if values.dtype.kind != "O":
        return gaps
    words = (cell.lower() in GAPS or is_gap_word(cell) for cell in values)
    return np.asarray(gaps | np.fromiter(words, bool, len(values)))


def write_cells(values: np.ndarray) -> np.ndarray:
    """Return values (n,) of any kind of column as text, gaps as "", whole numbers without a fraction: (n,) object.

    A cell is written in one way, whatever is beside it.
    """
    gaps = find_gaps(values)
    texts = values.astype(object) if values.dtype.kind == "O" else values.astype(str).astype(object)
    if values.dtype.kind == "f":
        whole = np.abs(values) < 2**53
        whole[whole] = values[whole] == np.rint(values[whole])
        texts[whole] = values[whole].astype(np.int64).astype(str)
    texts[gaps] = ""
    return texts


def map_distinct(parse: Callable[[str], float], cells: np.ndarray) -> np.ndarray:
    """Return a number for each of some cells (n,), worked out once for equal ones: (n,) float64."""
    known: dict[str, float] = {}
    values = np.empty(len(cells))
    for row, cell in enumerate(cells):
        value = known.get(cell)
        if value is None:
            value = known[cell] = parse(cell)
        values[row] = value
    return values


def read_plain(cell: str) -> float:
    """Return the number that Python writes so, infinities too; NaN if it is none."""
    try:
        return math.nan if "_" in cell else float(cell)
    except ValueError:
        return math.nan


def read_written(cell: str, form: str) -> float:
    """Return a number with a currency, a per cent sign, a unit or marks between its thousands; NaN if it is none.

    Args:
        cell: The text.
        form: "point" for 2,688.64, "comma" for 2.688,64.
    """
    bare = _UNIT.sub("", cell)
    if bare[:1] + bare[-1:] == "()":  # as accountants write what is below 0
        bare = f"-{bare[1:-1]}"
    bare = "".join(
        "-" if sign == "−" else sign
        for sign in bare
        if not sign.isspace() and sign not in "%‰'’" and unicodedata.category(sign) != "Sc"
    )
    if not (_POINT if form == "point" else _COMMA).fullmatch(bare):
        return math.nan
    return float(bare.replace(",", "") if form == "point" else bare.replace(".", "").replace(",", "."))


def read_duration(cell: str) -> float:
    """Return the seconds of a duration: hours, minutes and seconds, or minutes and seconds; NaN if it is none."""
    match = _DURATION.fullmatch(cell) or _ISO_DURATION.fullmatch(cell)
    if match is None:
        return math.nan
    parts = {name: float((text or "0").replace(",", ".")) for name, text in match.groupdict().items() if name != "sign"}
    if match["hours"] and ":" in cell and parts["minutes"] > 59:
        return math.nan
    seconds = 3600 * parts["hours"] + 60 * parts["minutes"] + parts["seconds"]
    return 86_400 * (parts["days"] + parts.get("only", 0)) + (-seconds if match["sign"] else seconds)


def are_durations(cells: Iterable[str], *, clocks: bool = False) -> bool:
    """Return whether most of some distinct cells are durations, and not all of them may be times of day.

    Args:
        cells: Without gaps.
        clocks: Whether all may be times of day.
    """
    cells = [cell for cell in cells if not is_gap_word(cell)]
    if not cells or all(math.isnan(read_duration(cell)) for cell in cells[:SOME]):
        return False
    found = [cell for cell in cells if not math.isnan(read_duration(cell))]
    return len(found) >= ENOUGH * len(cells) and (clocks or not all(map(_TIME_OF_DAY.fullmatch, found)))


def read_number(cell: str, form: str) -> float:
    """Return the number of a form other than "interval"; NaN if it is none.

    A column that was plain in fit may have marks between thousands, a unit or durations later; one of durations may
    have seconds.
    """
    if form not in {"plain", "duration"}:
        return read_written(cell, form)
    readings = (read_plain(cell), read_written(cell, "point") if form == "plain" else math.nan, read_duration(cell))
    return next((value for value in readings if not math.isnan(value)), math.nan)


def parse_numbers(values: np.ndarray, form: str) -> np.ndarray:
    """Return the numbers (n,) float64 that cells (n,) of one form hold; NaN for gaps and for what is no number."""
    if values.dtype.kind == "M":  # times, of durations below a day
        seconds = SECONDS_PER_DAY * parse_dates(values, "")
        return seconds if form == "duration" else np.full(len(values), math.nan)
    if values.dtype.kind != "O":
        return np.asarray(values, np.float64)
    if form == "interval":
        return map_distinct(read_interval, values)
    if form == "plain" and "_" not in "".join(values):
        with suppress(ValueError):
            return np.fromiter(map(float, values), np.float64, len(values))
    return map_distinct(lambda cell: read_number(cell, form), values)


def find_decimal_marks(cells: Iterable[str]) -> set[str]:
    """Return which of "point" and "comma" some cell must have as its decimal mark, as "0,205" and "1.5" must."""
    marked = [cell for cell in cells if "," in cell or "." in cell]
    return {
        form
        for form, other in (("point", "comma"), ("comma", "point"))
        if any(math.isnan(read_written(cell, other)) and not math.isnan(read_written(cell, form)) for cell in marked)
    }


def find_number_form(cells: Iterable[str], *, codes: bool = False, order: Sequence[str] = POINT_FIRST) -> str:
    """Return the form of numbers that most of some distinct cells have; "" if few have any.

    Args:
        cells: Without gaps.
        codes: Take cells of one length with zeros before them, such as post codes, for numbers, too.
        order: The forms that are tried; of two that fit as many cells, the first one is meant.
    """
    cells = list(cells)
    if not (plain := _are_plain(cells)):  # else none is a word
        cells = [cell for cell in cells if not is_gap_word(cell)]
        plain = _are_plain(cells)
    if not cells:
        return ""
    zeros = [cell for cell in cells if cell[0] == "0"]  # most columns have none: patterns are slow
    if not codes and any(map(_CODE.fullmatch, zeros)) and len(set(map(len, cells))) == 1:
        return ""
    if plain and (order[0] == "plain" or not any("." in cell for cell in cells)):
        return "plain"

    def share(read: Callable[[str], float], among: list[str]) -> float:
        return sum(not math.isnan(read(cell)) for cell in among) / len(among)

    readers: dict[str, Callable[[str], float]] = {"plain": read_plain}
    if len({match.group(1) for cell in cells if (match := _UNIT.search(cell))}) <= 1:
        readers |= {form: partial(read_written, form=form) for form in ("point", "comma")}
    # A few tell that a column of long texts is none.
    likely = [form for form in order if form in readers and share(readers[form], cells[:SOME]) >= ENOUGH / 2]
    shares = {form: share(readers[form], cells) for form in likely}
    best = max(shares, key=lambda form: shares[form], default="")
    return best if shares.get(best, 0.0) >= ENOUGH else ""


def _are_plain(cells: list[str]) -> bool:
    """Return whether all cells are finite numbers as Python writes them."""
    return all(math.isfinite(read_plain(cell)) for cell in cells)


def read_interval(cell: str) -> float:
    """Return the middle of an interval such as "10 to 20", or the end of an open one; NaN if it is none."""
    match = _INTERVAL.fullmatch(_UNIT.sub("", cell) if not cell.lower().endswith(("over", "more", "above")) else cell)
    if match is None:
        return math.nan
    ends = [read_written(end, "point") for end in match.group("low", "high") if end is not None]
    if len(ends) == 2 and ends[0] > ends[1]:
        return math.nan
    return sum(ends) / len(ends)


def are_intervals(cells: Iterable[str]) -> bool:
    """Return whether all of some distinct cells are intervals, and one of them has a sign of it."""
    cells = [cell for cell in cells if not is_gap_word(cell)]
    return (
        len(cells) > 2
        and not any(math.isnan(read_interval(cell)) for cell in cells)
        and any(math.isnan(read_written(cell, "point")) for cell in cells)
    )


def read_date(cell: str, form: str) -> float:
    """Return the days since 1970 of a date, or the part of a day of a time alone; NaN if the cell has another form."""
    if OR in form:
        read = (read_date(cell, part) for part in form.split(OR))
        return next((day for day in read if not math.isnan(day)), math.nan)
    try:
        if form == "iso":
            if not _ISO.fullmatch(cell):
                return math.nan
            bare, zone = (cell, "") if len(cell) < 17 else (_ZONE.sub("", cell), "".join(_ZONE.findall(cell)))
            days = float(np.datetime64(bare[:26], "us").astype(np.int64)) / (1e6 * SECONDS_PER_DAY)
            minutes = 0 if zone in {"", "Z"} else int(zone[1:3]) * 60 + int(zone[3:].strip(":") or 0)
            return days - (-minutes if zone[:1] == "-" else minutes) / 1440
        if form == COMPACT and not _COMPACT.fullmatch(cell):
            return math.nan
        moment = datetime.strptime(cell, form)
    except (ValueError, OverflowError):
        longer = form in _CLOCKS and not _TIME_OF_DAY.fullmatch(cell)
        return read_duration(cell) / SECONDS_PER_DAY if longer else math.nan
    since = datetime(1900, 1, 1) if form in _CLOCKS else datetime(1970, 1, 1)
    return (moment - since).total_seconds() / SECONDS_PER_DAY


def parse_dates(values: np.ndarray, form: str) -> np.ndarray:
    """Return days (n,) float64 since 1970 of dates (n,), text or datetime64; NaN for gaps and for what is no date."""
    if values.dtype.kind == "M":
        days = values.astype("datetime64[us]").astype(np.int64) / (1e6 * SECONDS_PER_DAY)
        return np.where(np.isnat(values), math.nan, days)
    if values.dtype.kind != "O":  # durations, where times of day were fitted
        return values / SECONDS_PER_DAY if set(form.split(OR)) <= {*_CLOCKS} else np.full(len(values), math.nan)
    return map_distinct(lambda cell: read_date(cell, form), values)


def find_date_form(cells: Iterable[str]) -> str:
    """Return the form of dates that most of some distinct cells have, of equal ones the first; "" if few have any.

    Where no form has enough, several do together, if no cell is another day in one than in the other.
    """
    cells = [cell for cell in cells if not is_gap_word(cell)]
    forms, left = list[str](), cells
    while len(left) > (1 - ENOUGH) * len(cells) and len(forms) < MOST_FORMS:
        form, fitting = _find_likeliest(left)
        if fitting <= LEAST_SHARE * len(cells) or any(_are_confused(cells, form, other) for other in forms):
            return ""
        forms.append(form)
        left = [cell for cell in left if math.isnan(read_date(cell, form))]
    return OR.join(forms) if cells and len(left) <= (1 - ENOUGH) * len(cells) else ""


def are_mixed_dates(cells: Iterable[str]) -> bool:
    """Return whether most of some distinct cells are dates, of which no forms together fit all."""
    cells = list(cells)
    forms = [form for form in (COMPACT, *_DAYS) if any(not math.isnan(read_date(cell, form)) for cell in cells[:SOME])]
    return sum(not math.isnan(read_date(cell, OR.join(["iso", *forms]))) for cell in cells) >= ENOUGH * len(cells)


def _find_likeliest(cells: list[str]) -> tuple[str, int]:
    """Return the form of dates that most of some cells have, of equal ones the first, and how many have it."""
    few = [cell for cell in cells if any(map(str.isdigit, cell))][:SOME]
    best, most = "", 0
    for form in DATE_FORMS:
        if any(not math.isnan(read_date(cell, form)) for cell in few):
            fitting = sum(not math.isnan(read_date(cell, form)) for cell in cells)
            best, most = (form, fitting) if fitting > most else (best, most)
            if fitting == len(cells):
                break
    return best, most


def _are_confused(cells: list[str], form: str, other: str) -> bool:
    """Return whether a cell is one day in a form and another one in another."""
    days = [(read_date(cell, form), read_date(cell, other)) for cell in cells]
    return any(abs(one - two) > 0 for one, two in days)  # not so for NaN
