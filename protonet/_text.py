"""Text from outside, made safe for terminals and spreadsheets."""

from __future__ import annotations

import re

#: Control characters that a terminal may obey: all but tabs and line breaks.
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
#: The start of a cell that a spreadsheet may take for a formula (the last four signs are wide), and numbers.
_FORMULA = re.compile("[\\s']*[=+\\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[-+][\d.,' ]*\d[\d.,]*(?:[eE][-+]?\d+)?\s?%?")


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
