"""Text from outside, made safe for terminals and spreadsheets; counts and lists in messages."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Control characters that a terminal may obey: all but tabs and line breaks.
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
#: The start of a cell that a spreadsheet may take for a formula (the last four signs are wide), and numbers.
_FORMULA = re.compile("[\\s']*[=+\\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[-+][\d.,' ]*\d[\d.,]*(?:[eE][-+]?\d+)?\s?%?")
_GROUP_SEPARATOR = re.compile(r"[\s'’]")
_DIGIT_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:[\s'’]\d{3})+(?!\d)")


def to_printable(name: object) -> str:
    """Convert a name to one line without control characters."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in str(name)
    )


def escape_control_chars(text: str) -> str:
    """Escape control characters of a text other than tabs and line breaks."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_formula(cell: str) -> str:
    """Escape a cell so that spreadsheets read no formula and terminals no control character; numbers stay.

    A possible formula gets an apostrophe in front, which `unescape_formula` removes.

    Source: OWASP, "CSV Injection", https://owasp.org/www-community/attacks/CSV_Injection
    """
    cell = escape_control_chars(cell)
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def unescape_formula(cell: str) -> str:
    """Undo `escape_formula`, apart from control characters."""
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell


def count(n: int, noun: str) -> str:
    """Format a number and its noun: ``1 draw``, ``2,000 draws``, ``2 classes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"


def shorten_list(names: Iterable[object], max_names: int = 5) -> str:
    """Join the first names, and count the others."""
    texts = list(map(str, names))
    return ", ".join(texts[:max_names]) + (f" and {len(texts) - max_names:,} more" if len(texts) > max_names else "")


def join_digit_groups(text: str) -> str:
    """Remove the spaces and apostrophes that separate groups of three digits, as in 1'234.50 or 1 234,50."""
    return _DIGIT_GROUPS.sub(lambda groups: _GROUP_SEPARATOR.sub("", groups[0]), text)
