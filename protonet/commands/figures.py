"""Figures, classes, views and columns as people read them, of numbers and names alone: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protonet._text import to_printable
from protonet.ui.text import format_table

#: Most classes that are printed; a JSON file has all.
MOST_CLASSES = 20
#: Most names that a line lists.
MOST_NAMES = 5


def format_share(share: float, interval: Sequence[float]) -> tuple[str, str]:
    """Return a share in per cent, and its interval."""
    low, high = (100 * bound for bound in interval)
    return f"{100 * share:.2f}", f"[{low:.2f}, {high:.2f}]"


def format_losses(figures: Mapping[str, Any]) -> str:
    """Return how good the probabilities are, given a `Metrics` as a dict; files of older versions have no intervals."""
    told = []
    for name, interval, factor, digits in (
        ("log_loss", "log_loss_interval", 1, 3),
        ("calibration_error", "calibration_interval", 100, 1),
    ):
        ends = ", ".join(f"{factor * end:.{digits}f}" for end in figures.get(interval, ()))
        told.append(f"{factor * figures[name]:.{digits}f}" + f" [{ends}]" * bool(ends))
    return "log-loss {}, calibration error {} points\n".format(*told)


def format_views(views: Mapping[str, float]) -> str:
    """Return a table of the views and their weights."""
    return format_table(["view", "weight, %"], [[name, f"{100 * weight:.1f}"] for name, weight in views.items()])


def tell_columns(names: Sequence[str] | None, told: Sequence[str] | None) -> list[str]:
    """Return a line for each kind of column: the names, and what they were taken for; none for numbers alone."""
    kinds: dict[str, list[str]] = {}
    for name, text in zip(names or (), told or (), strict=False):
        kinds.setdefault(text, []).append(to_printable(name))
    return [f"{', '.join(same)}: {text}" for text, same in kinds.items()]


def count_own(counts: Sequence[int], classes: Sequence[str | int], named: Any) -> list[int]:
    """Return of how many samples each class is, without what its name counts as.

    Args:
        counts: (num_classes,) with that.
        classes: The name of each class.
        named: What the metadata of a file say of names; it may be anything.
    """
    if not isinstance(named, dict) or not isinstance(named.get("classes"), list):
        return list(counts)
    weight = named.get("weight")
    less = round(weight) if isinstance(weight, float) and 0 <= weight < 2**31 else 0
    return [max(0, rows - less * (name in named["classes"])) for name, rows in zip(classes, counts, strict=True)]


def list_names(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Return the first of several names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
