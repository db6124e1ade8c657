"""Labels of a table beside the classes of a model: which it does not know, and which are only spelled otherwise."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation

import numpy as np

from protonet._text import to_printable
from protonet.errors import raise_input_error

#: Sets of equal rows of different classes, and rows of each, that are named at most.
MAX_EQUAL = 3
#: Classes of this form are numbers, also where a file holds text.
_WHOLE = re.compile(r"0|-?[1-9]\d{0,17}")


def read_whole(labels: np.ndarray) -> np.ndarray:
    """Return labels (n,) as whole numbers, of which 2 comes before 10, or as text where one is something else."""
    if labels.dtype.kind in "iu":
        return labels
    texts = labels.astype(str)
    return texts.astype(np.int64) if all(map(_WHOLE.fullmatch, np.unique(texts).tolist())) else texts


def find_strange(labels: np.ndarray, known: Sequence[str | int]) -> np.ndarray:
    """Return of which rows (n,) the label is no known class, bool; 7 and "7" are the same."""
    return ~np.isin(labels.astype(str), list(map(str, known)))


def find_spellings(names: Iterable[object], known: Sequence[str | int]) -> dict[str, str]:
    """Return the names that are no known class, but look like another spelling of one, and that class.

    Such are numbers of the same value (0.0 and 0), and texts that differ in case, spaces around and between words, or
    the Unicode form of their letters (one code point for e with an accent, or two).
    """
    texts = set(map(str, known))
    forms = {_simplify(name): name for name in sorted(texts, reverse=True)}
    strange = {str(name) for name in names} - texts
    return {name: forms[_simplify(name)] for name in sorted(strange) if _simplify(name) in forms}


def check_spellings(names: Iterable[object], known: Sequence[str | int], remedy: str) -> None:
    """Raise an InputError, which names some of them, if names look like other spellings of known classes."""
    if found := find_spellings(names, known):
        raise_input_error("table", "spell known classes as the model does", _list_spellings(found), remedy)


def suspect_spellings(names: Sequence[str | int]) -> list[str]:
    """Return a line, or none, about classes that look like other spellings of one among them."""
    first = {_simplify(str(name)): name for name in reversed(names)}
    found = find_spellings(names, [*first.values()])
    return [f"warning: classes {_list_spellings(found)}; one class, spelled in two ways?"] if found else []


def _list_spellings(found: Mapping[str, str]) -> str:
    """Return some of `find_spellings`, and how many more there are."""
    shown = [_compare(name, meant) for name, meant in found.items()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _compare(name: str, meant: str) -> str:
    """Return two spellings in quotes, and how they differ where that cannot be seen."""
    seen = [unicodedata.normalize("NFC", " ".join(each.split())) for each in (name, meant)]
    return f"{name!r} for {meant!r}" + " (spaces or Unicode form)" * (seen[0] == seen[1])


def _simplify(name: str) -> str | Decimal:
    """Return what all spellings of a name have in common: the number that it is, or its words.

    Source: The Unicode standard, sec. 3.13, default caseless matching (D145).
    """
    try:
        number = Decimal(name.strip())
        if number.is_finite():
            return number
    except InvalidOperation:
        pass
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())
    return " ".join(folded.split())


def list_contradictions(x: np.ndarray, labels: Sequence[str | int], places: Sequence[str]) -> list[str]:
    """Return a line, or none, about rows that are equal to rows of another class.

    Args:
        x: (n, dim) features.
        labels: (n,) the name of each row's class.
        places: (n,) where in the file each row is.
    """
    equal: dict[int, list[int]] = {}
    for row, values in enumerate(x + 0.0):  # -0.0 is 0.0
        equal.setdefault(hash(values.tobytes()), []).append(row)
    sets = [rows for rows in equal.values() if len({labels[row] for row in rows}) > 1]
    if not sets:
        return []
    total = sum(map(len, sets))
    shown = []
    for rows in sets[:MAX_EQUAL]:
        named = [f"{places[row]} ({to_printable(labels[row])})" for row in rows[:MAX_EQUAL]]
        shown.append(", ".join([*named, *["..."] * (len(rows) > MAX_EQUAL)]))
    more = "; ..." * (len(sets) > MAX_EQUAL)
    return [f"warning: labels contradict: {total} rows are equal to rows of another class: {'; '.join(shown)}{more}"]
