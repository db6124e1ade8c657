"""Compare the labels of a table with the classes of a model: unknown classes, other spellings, contradictions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation

import numpy as np

from protonet._text import to_printable
from protonet.errors import raise_input_error

#: The maximal number of sets of contradicting rows, and of rows of each, that are named.
MAX_EQUAL = 3
#: Labels of this form are integers, also in a file of text.
_WHOLE = re.compile(r"0|-?[1-9]\d{0,17}")


def parse_integers(labels: np.ndarray) -> np.ndarray:
    """Convert labels (n,) to integers, which sort 2 before 10, or to text if one is not an integer."""
    if labels.dtype.kind in "iu":
        return labels
    texts = labels.astype(str)
    return texts.astype(np.int64) if all(map(_WHOLE.fullmatch, np.unique(texts).tolist())) else texts


def detect_unknown_classes(labels: np.ndarray, known: Sequence[str | int]) -> np.ndarray:
    """Detect the rows (n,) bool whose label is no known class; the labels 7 and "7" are equal."""
    return ~np.isin(labels.astype(str), list(map(str, known)))


def find_respellings(names: Iterable[object], known: Sequence[str | int]) -> dict[str, str]:
    """Find the names that are not known classes but resemble one, and map them to it.

    These are numbers of the same value (0.0 and 0), and texts that differ only in case, spaces around and between
    words, or Unicode normalization (one code point for e with an accent, or two).
    """
    texts = set(map(str, known))
    forms = {_simplify(name): name for name in sorted(texts, reverse=True)}
    unknown = {str(name) for name in names} - texts
    return {name: forms[_simplify(name)] for name in sorted(unknown) if _simplify(name) in forms}


def check_spellings(names: Iterable[object], known: Sequence[str | int], remedy: str) -> None:
    """Raise an InputError if names resemble other spellings of known classes."""
    if respellings := find_respellings(names, known):
        raise_input_error("table", "spell known classes as the model does", _format_respellings(respellings), remedy)


def warn_similar_names(names: Sequence[str | int]) -> list[str]:
    """Warn of classes that resemble other spellings of each other."""
    first = {_simplify(str(name)): name for name in reversed(names)}
    respellings = find_respellings(names, [*first.values()])
    if not respellings:
        return []
    return [f"warning: classes {_format_respellings(respellings)}; two spellings of one class?"]


def _format_respellings(respellings: Mapping[str, str]) -> str:
    """Format some of the results of `find_respellings`, and the number of others."""
    shown = [_format_pair(name, known) for name, known in respellings.items()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _format_pair(name: str, known: str) -> str:
    """Format two spellings, and their difference if it is invisible."""
    visible = [unicodedata.normalize("NFC", " ".join(text.split())) for text in (name, known)]
    return f"{name!r} for {known!r}" + " (spaces or Unicode form)" * (visible[0] == visible[1])


def _simplify(name: str) -> str | Decimal:
    """Convert a name to the form that all its spellings share: a number, or case-folded words.

    Source: The Unicode standard, sec. 3.13, default caseless matching (D145).
    """
    try:
        value = Decimal(name.strip())
        if value.is_finite():
            return value
    except InvalidOperation:
        pass
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())
    return " ".join(folded.split())


def warn_contradictions(x: np.ndarray, labels: Sequence[str | int], locations: Sequence[str]) -> list[str]:
    """Warn of equal rows with different labels.

    Args:
        x: (n, dim) features.
        labels: (n,), the name of each row's class.
        locations: (n,), the location of each row in its file.
    """
    equal: dict[int, list[int]] = {}
    for row, values in enumerate(x + 0.0):  # -0.0 becomes 0.0
        equal.setdefault(hash(values.tobytes()), []).append(row)
    sets = [rows for rows in equal.values() if len({labels[row] for row in rows}) > 1]
    if not sets:
        return []
    total = sum(map(len, sets))
    shown = []
    for rows in sets[:MAX_EQUAL]:
        named = [f"{locations[row]} ({to_printable(labels[row])})" for row in rows[:MAX_EQUAL]]
        shown.append(", ".join([*named, *["..."] * (len(rows) > MAX_EQUAL)]))
    more = "; ..." * (len(sets) > MAX_EQUAL)
    return [f"warning: contradicting labels: {total} rows equal rows of another class: {'; '.join(shown)}{more}"]
