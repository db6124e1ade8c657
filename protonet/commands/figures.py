"""Format metrics, views, columns and lists of names as text; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protonet._text import to_printable
from protonet.ui.text import format_table

#: The maximal number of classes printed; JSON has all.
MAX_LISTED_CLASSES = 20
#: The maximal number of names in a line.
MAX_NAMES = 5


def format_percent(fraction: float, interval: Sequence[float]) -> tuple[str, str]:
    """Format a fraction and its interval in percent."""
    low, high = (100 * bound for bound in interval)
    return f"{100 * fraction:.2f}", f"[{low:.2f}, {high:.2f}]"


def format_probability_metrics(metrics: Mapping[str, Any]) -> str:
    """Format log-loss and calibration error, with intervals if there are any, given a `Metrics` as a dict."""
    parts = []
    for name, interval, factor, digits in (
        ("log_loss", "log_loss_interval", 1, 3),
        ("calibration_error", "calibration_interval", 100, 1),
    ):
        ends = ", ".join(f"{factor * end:.{digits}f}" for end in metrics.get(interval, ()))
        parts.append(f"{factor * metrics[name]:.{digits}f}" + f" [{ends}]" * bool(ends))
    return "log-loss {}, calibration error {} points\n".format(*parts)


def format_views(views: Mapping[str, float]) -> str:
    """Format the views and their weights as a table."""
    return format_table(["view", "weight, %"], [[name, f"{100 * weight:.1f}"] for name, weight in views.items()])


def summarize_columns(names: Sequence[str] | None, summaries: Sequence[str] | None) -> list[str]:
    """Format a line for each type of column: the names and the type; none for a table of numbers."""
    by_type: dict[str, list[str]] = {}
    for name, summary in zip(names or (), summaries or (), strict=False):
        by_type.setdefault(summary, []).append(to_printable(name))
    return [f"{', '.join(columns)}: {summary}" for summary, columns in by_type.items()]


def subtract_name_samples(counts: Sequence[int], classes: Sequence[str | int], named: Any) -> list[int]:
    """Subtract the samples that class names count as from the samples of each class.

    Args:
        counts: (num_classes,) samples, including those of names.
        classes: The name of each class.
        named: The entry about names in a file's metadata; it may be invalid.
    """
    if not isinstance(named, dict) or not isinstance(named.get("classes"), list):
        return list(counts)
    weight = named.get("weight")
    less = round(weight) if isinstance(weight, float) and 0 <= weight < 2**31 else 0
    return [max(0, rows - less * (name in named["classes"])) for name, rows in zip(classes, counts, strict=True)]


def shorten_list(names: Sequence[str], max_names: int = MAX_NAMES) -> str:
    """Join the first names, and count the others."""
    return ", ".join(names[:max_names]) + (f" and {len(names) - max_names} more" if len(names) > max_names else "")
