"""Format text output: tables, CSV, numbers, metrics and names in natural order. torch is not imported."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence

from protonet._io import JsonDict
from protonet._text import escape_formula, plural, to_printable
from protonet.tables.table import format_names

#: Maximum number of classes in printed tables; JSON output lists all classes.
MAX_LISTED_CLASSES = 20


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns; the text ends with a newline."""
    widths = [max(3, *(len(row[column]) for row in (header, *rows))) for column in range(len(header))]

    def format_line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |\n"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|\n"
    return format_line(header) + rule + "".join(format_line(row) for row in rows)


def natural_sort_indices(names: Sequence[object]) -> list[int]:
    """Return the indices that sort names in natural order, in which k2 comes before k10."""

    def sort_key(at: int) -> list[tuple[int, int, str]]:
        parts = re.split(r"([0-9]+)", str(names[at]))
        return [(0, int(part), part) if index % 2 else (1, 0, part.casefold()) for index, part in enumerate(parts)]

    return sorted(range(len(names)), key=sort_key)


def format_percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction in percent, such as ``12.3 %``."""
    return f"{100 * fraction:.{digits}f} %"


def format_interval(interval: Sequence[float], digits: int = 1) -> str:
    """Format an interval (low, high) of fractions in percent, such as ``12.3 to 45.6 %``."""
    low, high = (100 * bound for bound in interval)
    return f"{low:.{digits}f} to {high:.{digits}f} %"


def format_byte_count(size: int) -> str:
    """Format a number of bytes in MB, kB or, below 1000, bytes."""
    if size < 1000:
        return plural(size, "byte")
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def format_csv(lines: Iterable[Sequence[str]]) -> str:
    """Format ``lines`` of cells as CSV, with spreadsheet formulas and control characters escaped."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_formula, line) for line in lines)
    return text.getvalue()


def format_with_interval(fraction: float, interval: Sequence[float]) -> tuple[str, str]:
    """Format a fraction and its interval in percent without units, such as ``12.34`` and ``[10.00, 15.00]``."""
    low, high = (100 * bound for bound in interval)
    return f"{100 * fraction:.2f}", f"[{low:.2f}, {high:.2f}]"


def format_probability_metrics(metrics: JsonDict) -> str:
    """Format the log-loss and the calibration error as a line, with their confidence intervals if metrics have them."""
    parts = []
    for name, interval, factor, digits in (
        ("log_loss", "log_loss_interval", 1, 3),
        ("calibration_error", "calibration_interval", 100, 1),
    ):
        ends = ", ".join(f"{factor * end:.{digits}f}" for end in metrics.get(interval, ()))
        parts.append(f"{factor * metrics[name]:.{digits}f}" + f" [{ends}]" * bool(ends))
    return "log-loss {}, calibration error {} points\n".format(*parts)


def format_view_influences(influences: Mapping[str, float], losses: Mapping[str, float] | None = None) -> str:
    """Format a table of feature maps (views) with their influence in percent, by name.

    With the held-out log-loss of each candidate by name, it also lists candidates that have no influence.
    """
    names = dict.fromkeys([*influences, *(losses or ())])
    rows = [[name, f"{100 * influences[name]:.1f}" if name in influences else "none"] for name in names]
    if losses is None:
        return format_table(["view", "influence, %"], rows)
    shown = [[*row, f"{losses[row[0]]:.3f}" if row[0] in losses else ""] for row in rows]
    return format_table(["view", "influence, %", "held-out log-loss"], shown)


def warn_cancelled_classes(classes: Sequence[object], has_zero_sum: Sequence[bool]) -> list[str]:
    """Return a warning about the classes without a prototype, whose embeddings sum to zero; an empty list if none."""
    names = format_names([str(name) for name, cancels in zip(classes, has_zero_sum, strict=True) if cancels])
    return [f"warning: the rows of {names} cancel: no prototype, never predicted"] if any(has_zero_sum) else []


def format_column_types(names: Sequence[str] | None, summaries: Sequence[str] | None) -> list[str]:
    """Format a line for each distinct column type, with the names of its columns; [] if names or types are unknown."""
    by_type: dict[str, list[str]] = {}
    for name, summary in zip(names or (), summaries or (), strict=False):
        by_type.setdefault(summary, []).append(to_printable(name))
    return [f"{', '.join(columns)}: {summary}" for summary, columns in by_type.items()]
