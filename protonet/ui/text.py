"""Text output: tables, counts with nouns, natural order of names, CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from protonet._text import escape_formula


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns and a final newline."""
    widths = [max(3, *(len(row[column]) for row in (header, *rows))) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |\n"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|\n"
    return line(header) + rule + "".join(line(row) for row in rows)


def order_naturally(names: Sequence[object]) -> list[int]:
    """Return the indices of names in natural order: k2 before k10."""

    def key(at: int) -> list[tuple[int, int, str]]:
        parts = re.split(r"([0-9]+)", str(names[at]))
        return [(0, int(part), part) if index % 2 else (1, 0, part.casefold()) for index, part in enumerate(parts)]

    return sorted(range(len(names)), key=key)


def count(n: int, noun: str) -> str:
    """Format a number and its noun: ``1 draw``, ``2,000 draws``, ``2 classes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"


def percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction in per cent."""
    return f"{100 * fraction:.{digits}f} %"


def span(interval: Sequence[float], digits: int = 1) -> str:
    """Format an interval of fractions in per cent."""
    low, high = (100 * bound for bound in interval)
    return f"{low:.{digits}f} to {high:.{digits}f} %"


def format_size(size: int) -> str:
    """Format a number of bytes in kB or MB."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def format_csv(lines: Iterable[Sequence[str]]) -> str:
    """Format rows of cells as CSV, with formulas and control characters escaped."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_formula, line) for line in lines)
    return text.getvalue()
