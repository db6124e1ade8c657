"""Simplify cells before they are parsed.

Numbers are separated from units, currencies and signs of approximation. Words such as "million" become digits, and
names of months those that `datetime.strptime` reads. A quantity may have several terms, as in "5 lbs 2 oz"; the unit
of its column decides in which unit it is read.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date
from functools import cache, lru_cache

#: Matches currencies that may stand before a number or after it.
CURRENCIES = re.compile(
    r"(?i:aed|aud|brl|cad|chf|cny|czk|dkk|eur|gbp|hkd|huf|idr|ils|inr|jpy|krw|kč|mxn|myr|nok|nzd|php|pln|ron|sar|sek|"
    r"sfr|sgd|thb|try|twd|usd|vnd|zar|zł|(?:us|au?|ca?|hk|nz|r|s)\$)|Fr|kr|Rs"
)
#: Matches units that may follow a number without a space. Other letters there belong to codes, such as 12B, 3rd and 5e.
UNITS = re.compile(
    rf"(?i:[kmµμun]g|lbs?|oz|[kdcmµμn]m|in|ft|yd|mi|sqm|sqft|ha|cc|[dcmh]l|[kmg]?hz|[kmgt]b|[kmg]w|[kmg]?wh|[mk]v|mah?|"
    rf"[hkm]?pa|bar|psi|mmhg|k?cal|kj|db|m?mol|pp[mb]|rpm|bpm|yo|mph|km?h|kph|px|ms|secs?|mins?|hrs?|yrs?)|"
    rf"[dghlLmsty]|{CURRENCIES.pattern}"
)
#: Matches units in words, in lower case and without a plural s.
UNIT_WORDS = re.compile(
    "year|month|week|day|hour|minute|second|(?:milli|centi|kilo)?(?:met(?:er|re)|gram|lit(?:er|re))|mile|foot|feet|inch|"
    "pound|ounce|gallon|dollar|euro|cent|degree|percent"
)
#: The last words of open intervals, which are no units.
OPEN_INTERVAL_WORDS = frozenset({"over", "more", "above", "up", "higher", "older", "plus", "mehr", "älter", "höher"})
#: Words for powers of ten after a number, and the exponent of each.
_POWERS_OF_TEN = {
    word: exponent
    for exponent, words in {
        **{3: "thousand tausend tsd тыс 千 천", 4: "万 萬 만", 5: "lakh", 7: "crore", 8: "亿 億 억", 12: "trillion"},
        **{6: "million millionen millones milioni mio mln mn млн", 9: "billion milliard milliarden bn mrd mld млрд"},
    }.items()
    for word in words.split()
}
_POWER_WORD = re.compile(
    rf"(?<=\d)\s?({'|'.join(sorted(_POWERS_OF_TEN, reverse=True))})s?(?![a-zа-я])\.?", re.IGNORECASE
)
# Letters for powers of ten, as in $408K and 1.2M. Without a currency or a decimal mark, 12K and 12B may be codes.
_LETTER_EXPONENTS = {"k": 3, "K": 3, "M": 6, "B": 9}
_POWER_LETTER = re.compile(r"(?<=\d)\s?([kKMB])(?![^\W\d_])")
# A number with such a letter or without one, and at most a currency.
_LETTER_NUMBER = re.compile(
    rf"(?:{CURRENCIES.pattern}|[^\w\s])?\s?\d[\d.,]*\s?([kKMB])?\s?(?:{CURRENCIES.pattern}|[^\w\s])?"
)
_FRACTION = re.compile(r"(?:\d+[ -])?\d{1,2}/(?:[234568]|10|12|16|32|64)")  # 10 1/4
#: Results of `detect_unit`: letters are powers of ten, as in "950k" beside "1.2M"; and 3/4 is a fraction.
POWER_LETTERS, FRACTIONS = "k/M/B", "fractions"
_FORMULA_TEXT = re.compile(r'^="([^"]*)"$')
_PLUS_MINUS = re.compile(r"\+\s?/?\s?[-−–]")
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_POWER_OF_TEN = re.compile(rf"(?<=\d)\s?[x×·*]\s?10\s?\^?([-⁻−]?(?:[{_SUPERSCRIPTS}]+|(?<=[\^⁻−-])\d+))")
_VULGAR_FRACTION = re.compile(r"(?<=\d)[¼½¾⅐-⅞]")
_ASCII_CHARACTERS = str.maketrans("⁄−–—’‘′´`”“″،٫٬", "/---'''''\"\"\",.,")
# A term of 6'2", 5 lbs 2 oz and 52°30'15".
_TERM = re.compile(r"(\d+(?:[.,]\d+)*(?:[ -]\d+/\d+)?)\s?([^\W\d_]+|°|'|\")\.?(?:[\s,]+|(?=\d)|$)(?:and\s|und\s|et\s)?")
# 52°30'N and W 13.4°: a direction is the sign.
_DIRECTION = re.compile(r"(?=.*°)(?:([NSEW])\s?(.*)|(.*[°'\"])\s?([NSEW]))", re.IGNORECASE)
_OUT_OF_MAXIMUM = re.compile(r"(\d+(?:[.,]\d+)?)\s?/\s?([2-9]|\d\d|100)")  # 8/10
_BARE_NUMBER = re.compile(r"\d[\d.,\s'’]*")
_UNIT = re.compile(
    r"(?P<space>\s?)(?<![^\W\d_])"
    r"(?P<unit>(?P<base>(?:[^\W\d_²³]|\$)+)[23²³]?(?:/(?:100 ?)?[^\W\d_]+[23]?)?|°[CFKcfk]?)\.?$"
)
# $10,346/yr, 50 € pro Monat and 20 USD an hour.
_RATE = re.compile(r"(?:\s?/\s?|\s(?:per|an?|pro|par|por|al)\s)((?:sq\.?\s)?[^\W\d_]+)\.?$")
_CURRENCY = re.compile(r"(?P<sign>[-+−(]?)(?P<unit>[^\W\d_]+\$?)\.?\s*(?=[-+−.\d])")
# Signs of approximation, and bounds such as limits of detection.
_APPROXIMATE = re.compile(r"^(?:[~≈≤≥]|[<>]=?|(?:ca|circa|about|approx)\b\.?)\s*", re.IGNORECASE)
_NON_NUMERIC_SYMBOL = re.compile(r"[^\w\s.,+-]")
_FOOTNOTE_MARK = re.compile(r"(?<=\d)(?:[.,]|/)[-–—]+$|[*†‡]+$|\[\w{1,2}\]$")  # also the end of 5.- and 5/-

# Parts of dates that are not read: weekdays, "th" of 5th, the comma before a time, time zones of GMT, German "Uhr".
_DATE_NOISE = re.compile(
    r"\b(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day|mon|tues?|wed|thu(?:rs?)?|fri|sat|sun"
    r"|(?:mon|diens|donners|frei|sams|sonn)tag|mittwoch|sonnabend|mo|di|mi|do|fr|sa|so"
    r"|(?:lun|mar|mercre|jeu|vendre|same)di|dimanche)[.,]?\s+(?=.*\d)"
    r"|(?<=\d)(?:st|nd|rd|th|er)\b|,(?=\s\d\d?:\d\d)|\s(?:GMT|UTC|Uhr)$",
    re.IGNORECASE,
)
#: Names of months in English, German and French, in lower case; the first one of each month is that of ``%b``.
_MONTHS = (
    *("jan january januar jänner janv janvier", "feb february februar févr février", "mar march mär märz mrz mars"),
    *("apr april avr avril", "may mai", "jun june juni juin", "jul july juli juil juillet", "aug august août"),
    *("sep sept september septembre", "oct october okt oktober octobre", "nov november novembre"),
    "dec december dez dezember déc décembre",
)
_MONTH_ABBREVIATIONS = {name: names.split()[0] for names in _MONTHS for name in names.split()}
_MONTH = re.compile(rf"\b({'|'.join(_MONTH_ABBREVIATIONS)})\b\.?", re.IGNORECASE)
# 2024-W05 and KW 5/2024; 2024-Q1 and Q1 2024.
_WEEK_OR_QUARTER = re.compile(r"(?:(\d{4})[\s/-]*)?(W|KW|Q)\s?(\d\d?)(?:[\s/-]*(\d{4}))?", re.IGNORECASE)
_CJK_DATE = re.compile(r"(\d{4})\s?[年년]\s?(\d\d?)\s?[月월](?:\s?(\d\d?)\s?[日일])?")
_UNSPACED_HALF_DAY = re.compile(r"(?<=\d)(?=[AP]M\b)", re.IGNORECASE)
_TIME_BEFORE_DATE = re.compile(r"(\d\d?:\d\d(?::\d\d)?(?: [AP]M)?),? (.*\d.*)", re.IGNORECASE)


@cache
def _unit_scales() -> dict[str, dict[str, float]]:
    """Return the size of each unit, by dimension and by name as `split_unit` writes it."""
    small = {"n": 1e-9, "u": 1e-6, "μ": 1e-6, "m": 1e-3, "c": 1e-2, "d": 0.1, "": 1.0, "k": 1e3}
    large = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}  # names are in lower case: MW and mW are the same
    words = {"milli": 1e-3, "centi": 1e-2, "": 1.0, "kilo": 1e3}
    scales = {
        base: {prefix + base: size for prefix, size in small.items()} for base in ("m", "g", "l", "mol", "v", "a")
    }
    scales |= {base: {prefix + base: size for prefix, size in large.items()} for base in ("b", "w", "wh", "hz", "pa")}
    for base, names in {"m": "meter metre", "g": "gram gramm", "l": "liter litre"}.items():
        scales[base] |= {prefix + name: size for name in names.split() for prefix, size in words.items()}
    imperial: dict[str, dict[str, float]] = {
        "m": {'in inch inche "': 0.0254, "ft foot feet '": 0.3048, "yd yard": 0.9144, "mi mile": 1609.344},
        "g": {"oz ounce": 28.349523125, "lb pound": 453.59237, "st stone": 6350.29318, "t tonne": 1e6},
        **{"l": {"gal gallon": 3.785411784, "cc": 1e-3}, "%": {"%": 1e-2, "‰": 1e-3, "ppm": 1e-6, "ppb": 1e-9}},
        **{"s": {"'": 60.0, '" s': 1.0}, "°": {"°": 1.0, "'": 1 / 60, '"': 1 / 3600}},  # hours: see `parse_duration`
    }
    for base, sizes in imperial.items():
        scales.setdefault(base, {}).update((name, size) for names, size in sizes.items() for name in names.split())
    return scales


@cache
def _rate_scale() -> dict[str, float]:
    """Return the length in days of each unit of time that a rate may have, in English, German, French and Spanish."""
    names = {
        **{1 / 86400: "s sec second sekunde seconde segundo", 1 / 1440: "m min minute minuto"},
        **{1 / 24: "h hr hour std stunde heure hora", 1: "d day tag jour dia día", 7: "w wk week woche semaine semana"},
        **{365.2425 / 12: "mo mth month monat mois mes", 365.2425: "y yr year jahr an année ano año annum a"},
    }
    return {normalize_unit(name): size for size, words in names.items() for name in words.split()}


@cache
def convert_unit(source: str, target: str) -> tuple[float, float]:
    """Return the factor and the offset that convert numbers of one unit to another; NaN if their dimensions differ."""
    temperatures = {"°c": (1.0, 0.0), "c": (1.0, 0.0), "°f": (5 / 9, -160 / 9), "f": (5 / 9, -160 / 9)}
    currencies = {"usd": "$", "us$": "$", "dollar": "$", "eur": "€", "euro": "€", "gbp": "£", "jpy": "¥", "inr": "₹"}
    if source == target or currencies.get(source, source) == currencies.get(target, target):
        return 1.0, 0.0
    if source in temperatures and target in temperatures:
        (factor, offset), (other_factor, other_offset) = temperatures[source], temperatures[target]
        return factor / other_factor, (offset - other_offset) / other_factor
    (amount, _, time), (other_amount, _, other_time) = source.partition("/"), target.partition("/")
    if time and other_time:
        rates = _rate_scale()
        factor = rates.get(other_time, math.nan) / rates.get(time, math.nan) if time != other_time else 1.0
        return factor * convert_unit(amount, other_amount)[0], 0.0
    scales = (scale for scale in _unit_scales().values() if source in scale and target in scale)
    return next((scale[source] / scale[target] for scale in scales), math.nan), 0.0


def normalize_unit(unit: str) -> str:
    """Write a unit in lower case, without superscripts and without a plural s: "lbs" is "lb", and "m²" is "m2"."""
    unit = unicodedata.normalize("NFKC", unit.casefold())
    return unit.removesuffix("s") if len(unit) > 2 else unit


@lru_cache(maxsize=4096)
def normalize_cell(cell: str) -> str:
    """Write the characters of a cell as in ASCII: full-width and other digits, fractions, quotation marks and ±.

    Excel's ="10.35" becomes 10.35. Superscripts behind a number are footnotes, unless they are powers of ten.
    """
    cell = _PLUS_MINUS.sub("±", _FORMULA_TEXT.sub(r"\1", cell))
    cell = _POWER_OF_TEN.sub(lambda power: f"e{unicodedata.normalize('NFKC', power[1])}", cell)
    if cell.isascii():
        return cell.replace("''", '"')
    cell = _VULGAR_FRACTION.sub(r" \g<0>", re.sub(rf"(?<=\d)[{_SUPERSCRIPTS}]+$", "", cell))
    cell = unicodedata.normalize("NFKC", cell).translate(_ASCII_CHARACTERS)
    return (
        "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in cell)
        .replace("''", '"')
        .strip()
    )


@lru_cache(maxsize=2**15)  # cells are parsed repeatedly
def split_unit(cell: str, *, has_power_letters: bool = False) -> tuple[str, str]:
    """Split a cell into the text of its number and its unit in lower case, such as "3" and "kg"; "" if it has none.

    The unit may be a currency, a per cent sign, any word after a space, a rate such as "$/yr", or "/10" of 8/10. Signs
    of approximation, bounds and marks of footnotes are removed. Powers of ten become exponents: "$1.2M" and
    "$1.2 million" are "1.2e6" and "$"; so does "950k" if the column ``has_power_letters``.
    """
    if _BARE_NUMBER.fullmatch(cell):  # most cells: the other patterns are slow
        return cell, ""
    if (match := _OUT_OF_MAXIMUM.fullmatch(cell)) and float(match[1].replace(",", ".")) <= int(match[2]):
        return match[1], f"/{match[2]}"
    text, unit, rate = _FOOTNOTE_MARK.sub("", _APPROXIMATE.sub("", cell)), "", ""
    text = _POWER_WORD.sub(lambda word: f"e{_POWERS_OF_TEN[word[1].lower()]}", text)
    if match := _RATE.search(text):
        text, rate = text[: match.start()].rstrip(), f"/{normalize_unit(match[1])}"
    if (match := _UNIT.search(text)) and _is_unit(match):
        text, unit = text[: match.start()].rstrip(), match["unit"]
    elif (match := _CURRENCY.match(text)) and CURRENCIES.fullmatch(match["unit"]):
        text, unit = match["sign"] + text[match.end() :], match["unit"]
    for symbol in _NON_NUMERIC_SYMBOL.findall(text):
        if symbol in "%‰" or unicodedata.category(symbol) == "Sc":  # a currency
            text, unit = text.replace(symbol, ""), unit or symbol
    if rate and not unit and rate[1:] not in _rate_scale():  # a house number, such as 12/b
        return cell, ""
    is_currency = bool(CURRENCIES.fullmatch(unit)) or (len(unit) == 1 and unicodedata.category(unit) == "Sc")
    if has_power_letters or is_currency or "." in text or "," in text:
        text = _POWER_LETTER.sub(lambda letter: f"e{_LETTER_EXPONENTS[letter[1]]}", text)
    return text.strip().replace("( ", "("), normalize_unit(unit) + rate


def _is_unit(match: re.Match[str]) -> bool:
    """Test whether a match of the pattern of units is one: a known unit, or a word after a space."""
    is_numbered = match.string[: match.start()].endswith(".") and match["space"] != ""  # as in "1. White"
    if is_numbered or match["unit"].casefold() in OPEN_INTERVAL_WORDS:
        return False
    is_known = match["base"] is None or UNITS.fullmatch(match["base"]) is not None
    return is_known or (match["space"] != "" and not any(map(str.isdecimal, match["unit"])))


def is_known_unit(unit: str) -> bool:
    """Test whether a result of `split_unit` is a common unit or a currency, rather than any word."""
    return not unit.isalpha() or any(pattern.fullmatch(unit) for pattern in (UNITS, UNIT_WORDS))


@lru_cache(maxsize=2**15)
def split_terms(cell: str) -> tuple[int, list[tuple[str, str]]]:
    """Split a quantity into its sign and its terms, pairs of a number and a unit, as in 5 lbs 2 oz; [] for other text.

    A direction is a sign: that of 13.4°W is -1.
    """
    text = _APPROXIMATE.sub("", cell).strip()
    sign, text = (-1, text[1:]) if text[:1] == "-" else (1, text)
    if direction := _DIRECTION.fullmatch(text):
        text = direction[2] or direction[3]
        sign = -1 if (direction[1] or direction[4]).upper() in "SW" else 1
    terms, end = list[tuple[str, str]](), 0
    for match in _TERM.finditer(text):
        if match.start() != end:
            return sign, []
        terms.append((match[1], normalize_unit(match[2])))
        end = match.end()
    return sign, terms if end == len(text) else []


def sum_terms(cell: str, unit: str | None, parse: Callable[[str], float]) -> float:
    """Add up the terms of a quantity in a unit, by default the smallest one of the cell; NaN for other text.

    ``parse`` converts the numbers. Each term must be less than the unit before it. A single term needs a ``unit``.
    """
    sign, terms = split_terms(cell)
    if len(terms) < 2 and unit is None:
        return math.nan
    for scale in _unit_scales().values():
        if terms and all(name in scale for _, name in terms) and (unit is None or unit in scale):
            sizes = [scale[name] for _, name in terms]
            parts = [parse(number) * size for (number, _), size in zip(terms, sizes, strict=True)]
            if all(part < (1 - 1e-9) * size for part, size in zip(parts[1:], sizes, strict=False)):
                return sign * sum(parts) / (scale[unit] if unit else sizes[-1])
    return math.nan


def detect_unit(cells: Iterable[str]) -> str:
    """Return the most frequent unit of the cells with digits, in lower case; "" if none of them has one.

    Cells with another word before the unit, such as "5 square miles", are ignored. All cells decide whether 10'20" is
    in minutes and seconds or in feet and inches, whether "950k" has a power of ten, and whether "3/4" is a fraction;
    the last two are the units ``POWER_LETTERS`` and ``FRACTIONS``.
    """
    cells = [cell for cell in map(normalize_cell, cells) if any(map(str.isdigit, cell))]
    letters = [match[1] for cell in cells if (match := _LETTER_NUMBER.fullmatch(cell))]
    used = set(letters) - {None}
    are_powers = len(letters) >= 0.9 * len(cells) and used & {"k", "K"} and (len(used) > 1 or "k" in used)
    if are_powers and any(split_unit(cell)[0][-1:].isalpha() for cell in cells):
        return POWER_LETTERS
    fractions = [cell for cell in cells if _FRACTION.fullmatch(cell)]
    several = len({cell.rpartition("/")[2] for cell in fractions}) > 1
    if any(" " in cell for cell in fractions) or (several and 3 < len(fractions) == len(cells)):
        return FRACTIONS
    units, seconds = Counter[str](), list[str]()
    for cell in cells:
        terms = split_terms(cell)[1]
        if len(terms) > 1 or (terms and terms[0][1] in {"'", '"', "°"}):
            units["°" if terms[0][1] == "°" else terms[-1][1]] += 1
            seconds += [number for number, name in terms[1:] if name == '"']
            continue
        text, unit = split_unit(cell)
        last_word = (text.split() or [""])[-1]
        if any(map(str.isdigit, last_word)) or last_word.casefold() in OPEN_INTERVAL_WORDS:
            units[unit] += 1
    del units[""]
    unit = max(units, key=lambda unit: (units[unit], unit), default="")
    if unit not in {"'", '"'} or not units['"']:
        return unit
    # Feet have less than 12 inches, and seconds are often written with two digits.
    is_padded = any(number[0] == "0" and len(number) > 1 for number in seconds)
    return "s" if is_padded or any(float(re.split("[^0-9]", number)[0]) >= 12 for number in seconds) else "in"


@lru_cache(maxsize=256)
def normalize_date(cell: str) -> str:
    """Write a date as `datetime.strptime` reads it; cached, as cells are parsed repeatedly.

    Weekdays and the like are removed, months become English abbreviations, and a time is moved behind the date.
    """
    match = _WEEK_OR_QUARTER.fullmatch(cell)
    if match and (year := int(match[1] or match[4] or 0)) and 0 < (number := int(match[3])) < 54:
        is_quarter = match[2].upper() == "Q"
        return (
            f"{year}-{3 * number - 2:02}"
            if is_quarter
            else f"{date.fromisocalendar(year, min(number, 52), 1):%Y/%m/%d}"
        )
    cell = _CJK_DATE.sub(lambda day: "/".join(filter(None, day.groups())), cell)
    cell = _UNSPACED_HALF_DAY.sub(" ", _DATE_NOISE.sub("", cell))
    cell = _MONTH.sub(lambda month: _MONTH_ABBREVIATIONS[month[1].lower()], cell)
    return _TIME_BEFORE_DATE.sub(r"\2 \1", cell)
