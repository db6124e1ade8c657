"""Validate the names of classes that users type, and detect misspelled ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from protonet.errors import raise_input_error
from protonet.pipeline import TablePipeline
from protonet.tables.table import list_missing_label_texts


def parse_classes(text: str | None, model: TablePipeline | None) -> list[str]:
    """Parse a comma-separated list of class names; raise an InputError if the model does not know one of them.

    If the text is None, return the classes of the model or, without a model, an empty list.
    """
    known = [] if model is None else list(map(str, model.classes))
    names = known if text is None else [name.strip() for name in text.split(",")]
    missing_texts = list_missing_label_texts(names)
    for name in names:
        if name.lower() in missing_texts or names.count(name) > 1:
            must = "be different names, not a missing value"
            raise_input_error("classes", must, repr(name), "Separate other names by commas.")
        if known and name not in known:
            got = f"{name!r}, and it knows {', '.join(known[:10])}{' ...' if len(known) > 10 else ''}"
            remedy = "Name those, or leave out --model; protonet update adds classes afterwards."
            raise_input_error("classes", "be classes that the model knows", got, remedy)
    return names


def validate_class_name(name: object, classes: Sequence[str]) -> str:
    """Return a class name without surrounding spaces.

    Raises an InputError unless the name is in ``classes``, or is printable, short enough and not a missing value like
    NA.
    """
    text = name.strip() if isinstance(name, str) else ""
    if text in classes:
        return text
    max_length = 100  # of characters, which fit on a button of the page
    is_missing = text.lower() in list_missing_label_texts([*classes, text])
    if is_missing or len(text) > max_length or not text.isprintable():
        must = f"be a printable name of up to {max_length} characters that is no missing value"
        raise_input_error("name", must, repr(text[:40]), "Type another one.")
    return text


def get_similar_class(name: str, classes: Sequence[str]) -> str | None:
    """Return the known class that a name may misspell.

    Return None if the name is itself in ``classes``, or is not similar to any of them.
    """
    name = name.strip()
    if name in classes:
        return None
    min_similarity = 0.85  # by difflib.SequenceMatcher.ratio: two of thirteen letters differ
    folded = {other.casefold(): other for other in classes if re.findall(r"\d+", other) == re.findall(r"\d+", name)}
    matches = difflib.get_close_matches(name.casefold(), folded, 1, min_similarity)
    return folded[matches[0]] if matches else None
