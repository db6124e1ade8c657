"""Escape texts from files for terminals and spreadsheets, and format counts and lists in messages."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence

#: Control characters that a terminal may interpret; tabs and line breaks are not among them.
CONTROL_CHARS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
#: The start of a cell that a spreadsheet may take for a formula; the last four are full-width signs.
_SPREADSHEET_FORMULA = re.compile("[\\s']*[=+\\-@\uff1d\uff0b\uff0d\uff20]")
_SIGNED_NUMBER = re.compile(r"[-+][\d.,' ]*\d[\d.,]*(?:[eE][-+]?\d+)?\s?%?")
_GROUP_SEPARATOR = re.compile(r"[\s'’]")
_DIGIT_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:[\s'’]\d{3})+(?!\d)")


def to_printable(name: object) -> str:
    """Convert a name from a file to one line of text without control characters."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in str(name)
    )


def escape_control_chars(text: str) -> str:
    """Replace the control characters of a text, except tabs and line breaks, by visible escape sequences."""
    return CONTROL_CHARS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_formula(cell: str) -> str:
    """Escape a cell so that a spreadsheet does not take it for a formula; its control characters are escaped as well.

    A cell that may be a formula gets an apostrophe in front, which `unescape_formula` removes. Numbers such as -1 stay
    unchanged.

    Source: OWASP, "CSV Injection", https://owasp.org/www-community/attacks/CSV_Injection
    """
    cell = escape_control_chars(cell)
    return f"'{cell}" if _SPREADSHEET_FORMULA.match(cell) and not _SIGNED_NUMBER.fullmatch(cell) else cell


def unescape_formula(cell: str) -> str:
    """Remove the apostrophe that `escape_formula` added; escaped control characters stay escaped."""
    return cell[1:] if cell[:1] == "'" and _SPREADSHEET_FORMULA.match(cell) else cell


def normalize_spelling(name: str) -> str:
    """Write white space in a name as single spaces, and letters in Unicode's form NFC."""
    return unicodedata.normalize("NFC", " ".join(name.split()))


def plural(n: int, noun: str) -> str:
    """Format a number with its noun, in the plural if needed: ``1 row``, ``2,000 rows``, ``2 classes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"


def shorten_list(names: Iterable[object], max_names: int = 5) -> str:
    """Join the first ``max_names`` names with commas, and give the number of the remaining ones."""
    texts = list(map(str, names))
    return ", ".join(texts[:max_names]) + (f" and {len(texts) - max_names:,} more" if len(texts) > max_names else "")


def join_digit_groups(text: str) -> str:
    """Remove the spaces and apostrophes that separate groups of three digits, as in 1'234.50 or 1 234,50."""
    return _DIGIT_GROUPS.sub(lambda groups: _GROUP_SEPARATOR.sub("", groups[0]), text)


def closest_match(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate that is most similar to a name, ignoring case; None if no candidate is similar."""
    by_lower = {candidate.lower(): candidate for candidate in reversed(candidates)}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None
