"""Separate numbers from their units, currencies and signs of approximation."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

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
#: The last words of open intervals, which are no units.
OPEN_INTERVAL_WORDS = frozenset({"over", "more", "above"})
_BARE_NUMBER = re.compile(r"\d[\d.,\s'’]*")
_UNIT = re.compile(
    r"(?P<space>\s?)(?<![^\W\d_])(?P<unit>(?P<base>(?:[^\W\d_²³]|\$)+)[23²³]?(?:/(?:100 ?)?[^\W\d_]+[23]?)?|°\w?)\.?$"
)
_CURRENCY = re.compile(r"(?P<sign>[-+−(]?)(?P<unit>[^\W\d_]+\$?)\.?\s*(?=[-+−.\d])")
# Signs of approximation, and bounds such as limits of detection.
_APPROXIMATE = re.compile(r"^(?:[~≈≤≥]|[<>]=?|(?:ca|circa|about|approx)\b\.?)\s*", re.IGNORECASE)
_NON_NUMERIC_SYMBOL = re.compile(r"[^\w\s.,+-]")
_MARK = re.compile(r"(?<=\d)(?:[.,]|/)[-–—]+$|[*†‡]+$|\[\w{1,2}\]$")  # such as 5.- and 5/-, and marks of footnotes


def split_unit(cell: str) -> tuple[str, str]:
    """Split a cell into the text of its number and its unit in lower case, such as "3" and "kg"; "" if it has none.

    The unit may be a currency, a per cent sign, or any word after a space. Signs of approximation, bounds and marks of
    footnotes are removed.
    """
    if _BARE_NUMBER.fullmatch(cell):  # most cells: the other patterns are slow
        return cell, ""
    text, unit = _MARK.sub("", _APPROXIMATE.sub("", cell)), ""
    if (match := _UNIT.search(text)) and match["unit"].casefold() not in OPEN_INTERVAL_WORDS:
        is_known = match["base"] is None or UNITS.fullmatch(match["base"])
        if is_known or (match["space"] and not any(map(str.isdecimal, match["unit"]))):
            text, unit = text[: match.start()].rstrip(), match["unit"]
    elif (match := _CURRENCY.match(text)) and CURRENCIES.fullmatch(match["unit"]):
        text, unit = match["sign"] + text[match.end() :], match["unit"]
    for symbol in _NON_NUMERIC_SYMBOL.findall(text):
        if symbol in "%‰" or unicodedata.category(symbol) == "Sc":  # a currency
            text, unit = text.replace(symbol, ""), unit or symbol
    unit = unit.casefold()
    return text, unit.removesuffix("s") if len(unit) > 2 else unit  # "lbs" is "lb"


def detect_unit(cells: Iterable[str]) -> str:
    """Return the most frequent unit of the cells with digits, in lower case; "" if none of them has one."""
    units = Counter(split_unit(cell)[1] for cell in cells if any(map(str.isdigit, cell)))
    del units[""]
    return max(units, key=lambda unit: units[unit], default="")
