"""Simplify cells before they are parsed.

Numbers are separated from units, currencies and signs of approximation. Words such as "million" become digits, and
names of months those that `datetime.strptime` reads.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

#: Matches currencies that may stand before a number or after it.
CURRENCIES = re.compile(
    r"(?i:aed|aud|brl|cad|chf|cny|czk|dkk|eur|gbp|hkd|huf|idr|ils|inr|jpy|krw|kč|mxn|myr|nok|nzd|php|pln|ron|sar|sek|"
    r"sfr|sgd|thb|try|twd|usd|vnd|zar|zł|(?:us|au?|ca?|hk|nz|r|s)\$)|Fr|kr|Rs"
)
#: Matches units that may follow a number without a space. Other letters there belong to codes, such as 12B, 3rd and 5e.
UNITS = re.compile(
    rf"(?i:[kmµμun]g|lbs?|oz|[kdcmµμn]m|in|ft|yd|mi|sqm|sqft|ha|cc|[dcmh]l|[kmg]?hz|[kmgt]b|[kmg]w|[kmg]?wh|[mk]v|mah?|"
    rf"[hkm]?pa|bar|psi|mmhg|k?cal|kj|db|m?mol|pp[mb]|rpm|bpm|mph|km?h|kph|px|ms|secs?|mins?|hrs?|yrs?)|"
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
    **{"thousand": 3, "lakh": 5, "million": 6, "mio": 6, "mln": 6, "crore": 7},
    **{"billion": 9, "bn": 9, "mrd": 9, "trillion": 12},
}
_POWER_WORD = re.compile(rf"(?<=\d)\s?({'|'.join(_POWERS_OF_TEN)})s?\b\.?", re.IGNORECASE)
# Letters for powers of ten, as in $408K and 1.2M. Without a currency or a decimal mark, 12K and 12B may be codes.
_LETTER_EXPONENTS = {"k": 3, "K": 3, "M": 6, "B": 9}
_POWER_LETTER = re.compile(r"(?<=\d)\s?([kKMB])(?![^\W\d_])")
# 6'2", 6 ft 2 in and 6 feet 2 inches.
_FEET_AND_INCHES = re.compile(
    r"(\d+)\s?(?:['’′]|ft\.?|feet|foot)\s?(\d\d?(?:\.\d+)?)\s?(?:\"|''|[”″]|in\.?|inch(?:es)?)", re.IGNORECASE
)
_OUT_OF_MAXIMUM = re.compile(r"(\d+(?:[.,]\d+)?)\s?/\s?([2-9]|\d\d|100)")  # 8/10
_BARE_NUMBER = re.compile(r"\d[\d.,\s'’]*")
_UNIT = re.compile(
    r"(?P<space>\s?)(?<![^\W\d_])(?P<unit>(?P<base>(?:[^\W\d_²³]|\$)+)[23²³]?(?:/(?:100 ?)?[^\W\d_]+[23]?)?|°\w?)\.?$"
)
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
_UNSPACED_HALF_DAY = re.compile(r"(?<=\d)(?=[AP]M\b)", re.IGNORECASE)
_TIME_BEFORE_DATE = re.compile(r"(\d\d?:\d\d(?::\d\d)?(?: [AP]M)?),? (.*\d.*)", re.IGNORECASE)


def split_unit(cell: str) -> tuple[str, str]:
    """Split a cell into the text of its number and its unit in lower case, such as "3" and "kg"; "" if it has none.

    The unit may be a currency, a per cent sign, any word after a space, or "/10" of 8/10. Signs of approximation,
    bounds and marks of footnotes are removed. Powers of ten become exponents: "$1.2M" and "$1.2 million" are "1.2e6"
    and "$". Feet and inches become inches.
    """
    if _BARE_NUMBER.fullmatch(cell):  # most cells: the other patterns are slow
        return cell, ""
    if match := _FEET_AND_INCHES.fullmatch(cell):
        return f"{12 * int(match[1]) + float(match[2]):.10g}", "in"
    if (match := _OUT_OF_MAXIMUM.fullmatch(cell)) and float(match[1].replace(",", ".")) <= int(match[2]):
        return match[1], f"/{match[2]}"
    text, unit = _FOOTNOTE_MARK.sub("", _APPROXIMATE.sub("", cell)), ""
    text = _POWER_WORD.sub(lambda word: f"e{_POWERS_OF_TEN[word[1].lower()]}", text)
    if (match := _UNIT.search(text)) and _is_unit(match):
        text, unit = text[: match.start()].rstrip(), match["unit"]
    elif (match := _CURRENCY.match(text)) and CURRENCIES.fullmatch(match["unit"]):
        text, unit = match["sign"] + text[match.end() :], match["unit"]
    for symbol in _NON_NUMERIC_SYMBOL.findall(text):
        if symbol in "%‰" or unicodedata.category(symbol) == "Sc":  # a currency
            text, unit = text.replace(symbol, ""), unit or symbol
    is_currency = bool(CURRENCIES.fullmatch(unit)) or (len(unit) == 1 and unicodedata.category(unit) == "Sc")
    if is_currency or "." in text or "," in text:
        text = _POWER_LETTER.sub(lambda letter: f"e{_LETTER_EXPONENTS[letter[1]]}", text)
    unit = unicodedata.normalize("NFKC", unit.casefold())  # "m²" is "m2"
    return text.strip().replace("( ", "("), unit.removesuffix("s") if len(unit) > 2 else unit  # "lbs" is "lb"


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


def detect_unit(cells: Iterable[str]) -> str:
    """Return the most frequent unit of the cells with digits, in lower case; "" if none of them has one.

    Cells with another word before the unit, such as "5 square miles", are ignored.
    """
    units = Counter[str]()
    for text, unit in (split_unit(cell) for cell in cells if any(map(str.isdigit, cell))):
        last_word = (text.split() or [""])[-1]
        if any(map(str.isdigit, last_word)) or last_word.casefold() in OPEN_INTERVAL_WORDS:
            units[unit] += 1
    del units[""]
    return max(units, key=lambda unit: units[unit], default="")


@lru_cache(maxsize=256)
def normalize_date(cell: str) -> str:
    """Write a date as `datetime.strptime` reads it; cached, as cells are parsed repeatedly.

    Weekdays and the like are removed, months become English abbreviations, and a time is moved behind the date.
    """
    cell = _UNSPACED_HALF_DAY.sub(" ", _DATE_NOISE.sub("", cell))
    cell = _MONTH.sub(lambda month: _MONTH_ABBREVIATIONS[month[1].lower()], cell)
    return _TIME_BEFORE_DATE.sub(r"\2 \1", cell)
