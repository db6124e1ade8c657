"""Parse numbers as people write them: with units, as intervals or durations, with flags, and several in a cell.

A *format* is the notation of the cells of a column. All rows have the same format, so that "1,234" is the same number
in each of them. Formats are inferred from the distinct cells of the training rows, as `normalize_cell` writes them;
model files store their names.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from protonet._text import join_digit_groups
from protonet.tables.columns.units import (
    FRACTIONS,
    OPEN_INTERVAL_WORDS,
    POWER_LETTERS,
    convert_unit,
    detect_unit,
    is_known_unit,
    normalize_cell,
    split_unit,
    sum_terms,
)
from protonet.tables.delimited import COMMA_NUMBER_PATTERN, POINT_GROUPED_DIGITS, POINT_NUMBER_PATTERN

#: Minimum fraction of the cells of a column that must match its format; the other cells count as missing.
MIN_PARSED_FRACTION = 0.9
#: Words that mean "missing" in columns of numbers or dates, in lower case and without other characters than letters. In
#: columns of other types, these words may be categories.
MISSING_WORDS = frozenset(
    {"", "na", "nan", "nat", "nil", "null", "none", "missing", "unknown", "undefined", "unspecified", "blank", "empty"}
    | {"notavailable", "notapplicable", "notknown", "notmeasured", "notrecorded", "notrated", "unrated", "nodata"}
    | {"novalue", "nd", "tbd", "err"}
)
#: Number of cells on which formats are tried first, to rule out most formats before all cells are parsed.
N_PROBED_CELLS = 100
SECONDS_PER_DAY = 86_400.0
#: The length in days of the units of durations that are longer than a day, and of "only", days without hours.
DAYS_PER_UNIT = {"only": 1.0, "weeks": 7.0, "months": 365.2425 / 12, "years": 365.2425}

#: Two numbers in a cell, as in feet and inches or "3 4".
_TWO_NUMBERS = re.compile(r"\d[\s'’]+\d")
_MIXED_NUMBER = re.compile(r"(-?)(?:(\d+)[\s-])?(\d{1,2})/([234568]|10|12|16|32|64)")
# A number that does not follow a letter, with groups of thousands, for each decimal mark.
_NUMBER_IN_TEXT = {
    mark: re.compile(
        rf"(?<![a-zà-ӿ\d])(?<!\d\{point})(?:(?<![\d)])[-+])?(?:[1-9]\d{{0,2}}(?:\{comma}\d{{3}})+(?!\d)|\d+)"
        rf"(?:\{point}\d+)?(?:e[-+]?\d{{1,2}}(?!\w))?",
        re.IGNORECASE,
    )
    for mark, point, comma in (("point", ".", ","), ("comma", ",", "."))
}
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
TIME_OF_DAY = re.compile(r"(?:(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d)?|24:00(?::00)?)(?: [AP]M)?", re.IGNORECASE)
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
#: Maximum number of numbers in a cell that are read, each as a feature.
MAX_NUMBERS_PER_CELL = 4
#: Formats whose name is that of the notation, behind "comma " for a decimal comma: intervals, a number among flags or
#: words, and the numbers of cells that hold several.
_NOTATIONS = ("interval", "annotated", *(f"number {index + 1}" for index in range(MAX_NUMBERS_PER_CELL)))
#: Formats of numbers: as Python writes them, with a decimal point, with a decimal comma, durations, and ``_NOTATIONS``.
NUMERIC_FORMATS = ("plain", "point", "comma", "duration", *_NOTATIONS, *(f"comma {name}" for name in _NOTATIONS))
#: Orders in which formats are tried, for tables that prefer a decimal point and a decimal comma. The first format wins
#: among those that match equally many cells.
FORMATS_DECIMAL_POINT_FIRST, FORMATS_DECIMAL_COMMA_FIRST = ("plain", "point", "comma"), ("comma", "point", "plain")
#: Order in which formats are tried for files with semicolons between cells. The comma of "1,234" is then a decimal
#: mark. So is the point of "1.234", unless `are_thousands_grouped` is true for its column.
SEMICOLON_FILE_FORMATS = ("plain", "comma", "point")


def is_missing_word(cell: str) -> bool:
    """Test whether a cell of a column of numbers or dates means "missing", such as "n.a.", "(unknown)" or "***"."""
    visible = cell.isascii() or not any(unicodedata.category(char) == "Cf" for char in cell)
    return visible and not any(map(str.isdigit, cell)) and "".join(filter(str.isalpha, cell)).lower() in MISSING_WORDS


#: Words and signs of a value beyond the range of measurement, in lower case: below it, and above it.
_BELOW_RANGE = re.compile(
    r"[<≤].*|b[dql]l|blq|[<≤]?\s?l[oq][dq]|lo|low|below.*|under.*|not detected|undetect\w*|traces?|n\.n\.|unter .*|"
    r"inf[ée]rieur.*|sous .*|nicht nachweisbar|no detectad\w*|non d[ée]tect\w*|não detectado|niet aantoonbaar|"
    r"poniżej.*|ниже.*|не обнаружен\w*|未检出|低于.*|検出限界.*|不検出|불검출"
)
_ABOVE_RANGE = re.compile(
    r"[>≥].*|tntc|too (?:many|numerous|high).*|o(?:ver)?fl(?:ow)?|ol|hi|high|over.*|above.*|saturated|über.*|confluent|"
    r"uncountable|zu viele?.*|zu hoch|trop (?:nombreu|élevé|haut).*|sup[ée]rieur.*|demasiad.*|incont[áa].*|tropp.*|"
    r"te (?:veel|hoog).*|powyżej.*|zbyt .*|выше.*|слишком .*|过多.*|太多.*|高于.*|多すぎ.*|測定不能.*|너무 .*"
)


def find_bound(cell: str) -> int:
    """Return -1 for words of a value below the range of measurement, such as "< LOD", 1 above it ("TNTC"), else 0."""
    if any(map(str.isdigit, cell)):
        return 0
    word = normalize_cell(cell).casefold().strip()
    return -1 if _BELOW_RANGE.fullmatch(word) else 1 if _ABOVE_RANGE.fullmatch(word) else 0


def drop_words(cells: Iterable[str]) -> list[str]:
    """Return the distinct cells of a column without words for "missing" and for values beyond the range.

    At least five cells with digits may have up to two other words beside them, which are then missing values.
    """
    max_words, min_others = 2, 5  # beside fewer numbers, a word is more likely one of several categories
    cells = [cell for cell in cells if not is_missing_word(cell)]
    numbers = [cell for cell in cells if any(map(str.isdigit, cell))]
    n_words = sum(not find_bound(cell) for cell in cells) - len(numbers)
    may_have_words = 2 * len(numbers) > len(cells) and n_words <= (max_words if len(numbers) >= min_others else 0)
    return numbers if may_have_words else cells


def parse_plain_number(cell: str) -> float:
    """Parse a number as Python writes it, including infinities; NaN for other text."""
    try:
        return math.nan if "_" in cell else float(cell)
    except ValueError:
        return math.nan


def parse_formatted_number(cell: str, decimal: str, unit: str | None = None) -> float:
    """Parse a number with the decimal mark "point" or "comma", such as "1,234.50 EUR" or "(3 %)"; NaN for other text.

    Thousands separators, a unit, a currency sign and a per cent sign are ignored. Parentheses mean a negative number.
    If a unit is given, numbers in other units of its dimension are converted to it, and those of others are NaN.
    """
    text, cell_unit = split_unit(cell, has_power_letters=unit == POWER_LETTERS)
    has_prime = cell[-1:] in {"'", '"'} and unit in {"in", "s", "°", "'"}
    value = math.nan if has_prime else _parse_digits(text, decimal)
    if math.isnan(value):
        return sum_terms(cell, unit, partial(_parse_digits, decimal=decimal))
    if unit == FRACTIONS and cell_unit[1:].isdecimal():  # "/4" of 3/4
        return value / int(cell_unit[1:])
    if cell_unit in {"", unit} or unit in {None, POWER_LETTERS}:
        return value
    factor, offset = convert_unit(cell_unit, unit)
    return factor * value + offset


def _parse_digits(text: str, decimal: str) -> float:
    """Parse a number without a unit, such as "-1,234.5" or "10 1/4"; NaN for other text."""
    if match := _MIXED_NUMBER.fullmatch(text):
        whole, numerator, denominator = int(match[2] or 0), int(match[3]), int(match[4])
        value = whole + numerator / denominator
        return (-value if match[1] else value) if numerator < denominator else math.nan
    text = join_digit_groups(text)
    if _TWO_NUMBERS.search(text):
        return math.nan
    if text[:1] + text[-1:] == "()":  # accountants' negative numbers
        text = f"-{text[1:-1]}"
    text = "".join(char for char in text if not char.isspace() and char not in "'’").replace("−", "-")
    if text[-1:] == "-":
        text = _TRAILING_MINUS.sub(r"-\1", text)
    if not (POINT_NUMBER_PATTERN if decimal == "point" else COMMA_NUMBER_PATTERN).fullmatch(text):
        return math.nan
    return float(text.replace(",", "") if decimal == "point" else text.replace(".", "").replace(",", "."))


def split_numbers(cell: str, decimal: str) -> tuple[list[str], list[str]]:
    """Split a cell into its numbers, and the texts before, between and after them; numbers behind letters are texts."""
    text = re.sub(r"(?<=\d)\s?[x×*]\s?(?=\d)", " x ", join_digit_groups(cell))
    pattern = _NUMBER_IN_TEXT[decimal]
    return pattern.findall(text), pattern.split(text)


def parse_annotated_number(cell: str, decimal: str, unit: str | None = None) -> float:
    """Parse the only number of a cell with flags, letters or words, such as "more than 13" or "10.35ab"; else NaN.

    A number in another unit than ``unit`` is NaN. The decimal mark is "point" or "comma".
    """
    value = parse_formatted_number(cell, decimal, unit)
    numbers, texts = split_numbers(cell, decimal) if math.isnan(value) else ([], [])
    if len(numbers) != 1 or any(map(str.isdigit, "".join(texts))):
        return value
    other = split_unit(cell)[1]
    is_other_unit = is_known_unit(other) and (len(other) > 1 or not other.isalpha()) and bool(other)
    return math.nan if is_other_unit else _parse_digits(numbers[0], decimal)


def parse_number_at(cell: str, decimal: str, index: int) -> float:
    """Parse the number of a cell with an index from 0, such as 80 of "120/80"; NaN for other text.

    The second number of 10.35(12) is an uncertainty of the last digits, 0.12.
    """
    numbers, texts = split_numbers(cell, decimal)
    if index >= len(numbers) or any(map(str.isdigit, "".join(texts))):
        return math.nan
    value = _parse_digits(numbers[index], decimal)
    digits = re.split("[.,]", numbers[0])
    is_concise = index == 1 and texts[1] == "(" and len(digits) == 2 and numbers[1].isdecimal()
    return value / 10 ** len(digits[1]) if is_concise else value


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
    cells = drop_words(cells)
    if not cells or all(math.isnan(parse_duration(cell)) for cell in cells[:N_PROBED_CELLS]):
        return False
    durations = [cell for cell in cells if not math.isnan(parse_duration(cell))]
    enough = len(durations) >= MIN_PARSED_FRACTION * len(cells)
    return enough and (allow_times_of_day or not all(map(TIME_OF_DAY.fullmatch, durations)))


def parse_numeric(cell: str, numeric_format: str, unit: str | None = None) -> float:
    """Parse a number in one of ``NUMERIC_FORMATS``; NaN for other text, and for numbers in another unit than ``unit``.

    The format "plain" also accepts thousands separators, units and durations, which may occur in new rows. The format
    "duration" also accepts numbers of seconds.
    """
    cell = normalize_cell(cell)
    mark, notation = ("comma", numeric_format[6:]) if numeric_format[:6] == "comma " else ("point", numeric_format)
    if notation in _NOTATIONS:
        if notation == "interval":
            return parse_interval(cell, mark, unit)
        if notation == "annotated":
            return parse_annotated_number(cell, mark, unit)
        return parse_number_at(cell, mark, int(notation[-1]) - 1)
    if numeric_format not in {"plain", "duration"}:
        return parse_formatted_number(cell, numeric_format, unit)
    formatted = parse_formatted_number(cell, "point") if numeric_format == "plain" else math.nan
    values = (parse_plain_number(cell), formatted, parse_duration(cell, allow_words=numeric_format == "duration"))
    return next((value for value in values if not math.isnan(value)), math.nan)


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
        cells = drop_words(cells)
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

    def select_likely_parsers(sample: list[str], unit: str) -> dict[str, Callable[[str], float]]:
        """Select the parsers, by format, that can parse enough of the cells; none for most text columns."""
        marks = [name for name in format_order if name != "plain"]
        parsers: dict[str, Callable[[str], float]] = {"plain": parse_plain_number}
        parsers |= {mark: partial(parse_formatted_number, decimal=mark, unit=unit) for mark in marks}
        parsers = {name: parsers[name] for name in format_order}
        for mark in marks if _are_annotated(sample, marks) else ():
            name = "annotated" if mark == "point" else "comma annotated"
            parsers[name] = partial(parse_annotated_number, decimal=mark, unit=unit)
        least = MIN_PARSED_FRACTION / 2
        return {name: parse for name, parse in parsers.items() if parsed_fraction(parse, sample) >= least}

    probed = cells[:N_PROBED_CELLS]
    if not select_likely_parsers(probed, detect_unit(probed)):  # to detect the unit of all cells is slow
        return ""
    parsers = select_likely_parsers(probed, detect_unit(cells))
    fractions = {name: parsed_fraction(parse, cells) for name, parse in parsers.items()}
    best = max(fractions, key=lambda name: fractions[name], default="")
    return best if fractions.get(best, 0.0) >= MIN_PARSED_FRACTION else ""


def _are_annotated(cells: Sequence[str], marks: Sequence[str]) -> bool:
    """Test whether most cells are numbers with decimals or without other text, and the others have few annotations."""
    min_clear_fraction, max_words, min_cells = 0.5, 5, 5  # unlike codes such as 12B, sentences, and marks such as 2-
    texts = [split_numbers(cell, marks[0])[1] for cell in cells]
    annotations = {tuple(text.strip().casefold() for text in parts) for parts in texts}
    clear = sum(not any(parts) or bool(re.search(r"\d[.,]\d", cell)) for cell, parts in zip(cells, texts, strict=True))
    few = len(annotations) <= max(4, len(cells) / 2)
    n_words = max(len(" ".join(parts).split()) for parts in annotations)
    return len(cells) >= min_cells and few and n_words <= max_words and clear >= min_clear_fraction * len(cells)


def infer_number_formats(cells: Iterable[str], format_order: Sequence[str] = FORMATS_DECIMAL_POINT_FIRST) -> list[str]:
    """Infer the formats of columns whose cells hold several numbers, such as 120/80 or 10.3±0.2; [] for other types.

    Most cells must hold equally many numbers, with the same text between them, and no codes of many digits. Numbers
    that are the same in all cells have no format.
    """
    min_cells, min_cells_of_one = 5, 3  # fewer cells with one number that varies, such as 4/5 stars, are clear
    cells = [normalize_cell(cell) for cell in drop_words(cells)]
    probed = cells[:N_PROBED_CELLS]
    marks = [name for name in format_order if name != "plain"]
    marks.sort(key=lambda mark: sum(len(split_numbers(cell, mark)[0]) for cell in probed))
    for mark in marks if len(cells) >= min_cells_of_one else ():
        if _list_number_formats(probed, mark) and (formats := _list_number_formats(cells, mark)):
            parsed = {name: {parse_numeric(cell, name) for cell in cells} for name in formats}
            varying = [name for name, values in parsed.items() if len(values) > 1]
            return varying if len(varying) == 1 or len(cells) >= min_cells else []
    return []


def _list_number_formats(cells: Sequence[str], mark: str) -> list[str]:
    """List the format of each number of cells that hold several; [] if the cells differ in form, or are codes."""
    max_digits, max_words = 4, 3
    split = [split_numbers(cell, mark) for cell in cells]
    separators = Counter(tuple(text.strip().casefold() for text in texts[1:-1]) for _, texts in split)
    separator, count = separators.most_common(1)[0]
    is_version = "." in separator  # or an IP address
    if is_version or count < MIN_PARSED_FRACTION * len(cells) or not 0 < len(separator) < MAX_NUMBERS_PER_CELL:
        return []
    numbers = [number for found, _ in split for number in found if number.isdecimal()]
    is_code = any(len(number) > max_digits or (number[0] == "0" and len(number) > 1) for number in numbers)
    if is_code or any(len(" ".join(texts).split()) > max_words for _, texts in split):
        return []
    prefix = "" if mark == "point" else "comma "
    names = [f"{prefix}number {index + 1}" for index in range(len(separator) + 1)]
    unparsed = [sum(math.isnan(parse_numeric(cell, name)) for cell in cells) for name in names]
    return names if max(unparsed) <= (1 - MIN_PARSED_FRACTION) * len(cells) else []


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
