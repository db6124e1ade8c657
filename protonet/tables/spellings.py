"""Detect names of classes that are spellings of one class, such as "Oak" and "oak ", or lists of classes."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation

from protonet._text import normalize_spelling, shorten_list
from protonet.tables.columns.parsing import BOOLEAN_SPELLINGS


def detect_respellings(names: Iterable[object], known_classes: Sequence[object]) -> dict[str, str]:
    """Return a dict from the names that are other spellings of known classes to these classes.

    Two spellings of a class differ only in number format, case, spaces or Unicode form. If the classes are true and
    false, other words for true and false, and 1 and 0, are spellings, too.
    """
    texts = set(map(str, known_classes))
    are_booleans = sorted(BOOLEAN_SPELLINGS.get(text.casefold(), "") for text in texts) == ["0", "1"]

    def normalize(name: str) -> str | Decimal:
        return _normalize_name(BOOLEAN_SPELLINGS.get(name.casefold(), name) if are_booleans else name)

    forms = {normalize(name): name for name in sorted(texts, reverse=True)}
    unknown = {str(name) for name in names} - texts
    return {name: forms[normalize(name)] for name in sorted(unknown) if normalize(name) in forms}


def describe_similar_names(names: Sequence[object], known_classes: Sequence[object] = ()) -> list[str]:
    """Describe new names that may be spellings of a known class or of each other; return a list of at most one note."""
    known = set(map(str, known_classes))
    new = [name for name in names if str(name) not in known]
    first = {_normalize_name(str(name)): name for name in reversed(new)}
    respellings = detect_respellings(new, [*first.values()]) | detect_respellings(new, known_classes)
    if not respellings:
        return []
    return [f"classes {format_respellings(respellings)}; two spellings of one class?"]


def describe_list_labels(names: Iterable[object], known_classes: Sequence[object] = ()) -> list[str]:
    """Describe class names that are lists of class names, such as "oak;elm"; return a list of at most one note."""
    texts = {str(name) for name in names} | set(map(str, known_classes))
    separator = r"\s*(?:[;,|/+&、，；和]|\s\w{1,3}\s)\s*"  # also words such as "and" in many languages
    split = {text: re.split(separator, text) for text in sorted(texts)}
    repeated = Counter(part for parts in split.values() for part in parts)  # also of "oak;elm" beside "elm;ash"
    lists = [
        text
        for text, parts in split.items()
        if len(parts) > 1 and all(repeated[part] > 1 and any(map(str.isalpha, part)) for part in parts)
    ]
    if not lists:
        return []
    shown = shorten_list(map(repr, lists), 3)
    return [f"classes that look like lists of classes: {shown}: each is a class of its own; keep one class in a row"]


def format_respellings(respellings: Mapping[str, str]) -> str:
    """Format the first results of `detect_respellings`; invisible differences are described in words."""
    pairs = []
    for name, known in respellings.items():
        looks_equal = normalize_spelling(name) == normalize_spelling(known)
        pairs.append(f"{name!r} for {known!r}" + " (spaces or Unicode form)" * looks_equal)
    return shorten_list(pairs, 3)


def _normalize_name(name: str) -> str | Decimal:
    """Convert the name of a class to a number or to case-folded words, which are the same for all of its spellings.

    Source: The Unicode standard, sec. 3.13, default caseless matching (D145).
    """
    try:
        value = Decimal(name.strip().replace(",", "."))
        if value.is_finite():
            return value
    except InvalidOperation:
        pass
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())
    return " ".join(folded.split())
