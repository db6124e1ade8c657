"""A column of numbers: of mean 0 and variance 1, its gaps filled with the median and told beside."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from protonet._text import to_printable
from protonet.tables.columns.kind import Column, name_gaps, tell_gaps, write_share
from protonet.tables.columns.parsing import BOOLEANS, NUMBER_FORMS, find_words, parse_numbers
from protonet.views.view import Graph, Stored, expect

#: The largest number that is read: what float32 holds.
MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Number(Column):
    """A column of numbers.

    Args:
        form: How they are written, one of ``NUMBER_FORMS``.
        median: What stands for gaps.
        mean: Of the rows of fit, gaps filled.
        scale: Their standard deviation, or 1 where that is 0.
        missing: The share of gaps.
    """

    form: str
    median: float
    mean: float
    scale: float
    missing: float
    kind: ClassVar[str] = "number"

    @classmethod
    def fit(cls, cells: np.ndarray, form: str = "plain") -> Number:
        """Fit to cells (n,) of a form; what is no number counts as a gap, and what is beyond float32 not at all."""
        numbers = parse_numbers(cells, form)
        usable = np.abs(numbers) <= MOST  # not so for NaN
        median = float(np.median(numbers[usable])) if usable.any() else 0.0
        filled = np.where(usable, numbers, median)
        mean = float(filled.mean())
        return cls(form, median, mean, float((filled - mean).std()) or 1.0, float(np.isnan(numbers).mean()))

    @property
    def parts(self) -> tuple[str, ...]:
        """The number, and whether it is missing."""
        return ("", *name_gaps(self.missing))

    @property
    def plain(self) -> bool:
        """Whether there are no gaps."""
        return not self.missing

    @property
    def _binary(self) -> bool:
        """Whether the rows of fit held 0 and 1 alone: of values in [0, 1] their variance is the largest."""
        share = self.mean
        return self.form == "plain" and 0 < share < 1 and math.isclose(self.scale**2, share * (1 - share), rel_tol=1e-9)

    def _parse(self, cells: np.ndarray) -> np.ndarray:
        """Return the numbers (n,) that cells hold; "yes" and "no", however spelled, of a column of 0 and 1."""
        if cells.dtype.kind == "O" and self._binary:
            cells = np.array([BOOLEANS.get(cell.casefold(), cell) for cell in cells], object)
        return parse_numbers(cells, self.form)

    def describe_respelled(self, cells: np.ndarray) -> str:
        """Return the first cell that is a spelling of 0 or 1, if there is one."""
        if cells.dtype.kind != "O" or not self._binary:
            return ""
        found = (cell for cell in cells if cell.isalpha() and cell.casefold() in BOOLEANS)
        return next((f"{to_printable(cell)!r} is {BOOLEANS[cell.casefold()]}" for cell in found), "")

    def read_numbers(self, cells: np.ndarray) -> np.ndarray:
        """Return the numbers (n,) float64, NaN for gaps."""
        return self._parse(cells).astype(np.float64)

    def read_once(self, cells: np.ndarray) -> np.ndarray:
        """Return cells (n,) as numbers, unless one is too large, which is told as it was written."""
        if cells.dtype.kind != "O":
            return cells
        numbers = self._parse(cells)
        return cells if (np.abs(numbers) > MOST).any() else numbers

    def fill(self, cells: np.ndarray) -> np.ndarray:
        """Return the numbers (n,) as they came, float64 unless they have another floating type, gaps filled."""
        numbers = cells if cells.dtype.kind == "f" else self._parse(cells)
        gaps = np.isnan(numbers)
        return np.where(gaps, numbers.dtype.type(self.median), numbers) if gaps.any() else numbers

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32, infinite where that cannot hold it; the mean is taken off in float64."""
        numbers = self._parse(cells)
        gaps = np.isnan(numbers)
        with np.errstate(over="ignore"):
            z = (np.where(gaps, self.median, numbers) - self.mean) / self.scale
            return np.stack([z, *tell_gaps(gaps, self.missing)], axis=1).astype(np.float32)

    def find_strange(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) are no numbers."""
        if cells.dtype.kind in "iuf":
            return np.zeros(len(cells), bool)
        strange: np.ndarray = np.isnan(self._parse(cells))
        return strange & ~find_words(cells) if strange.any() else strange

    def tell(self) -> str:
        """Return the kind and its form."""
        written = {
            "plain": "",
            "point": ", as 1,234.5",
            "comma": ", as 1.234,5",
            "interval": ", the middle of intervals",
            "duration": ", the seconds of durations",
        }
        return f"number{written[self.form]}{write_share(self.missing)}"

    def describe(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def restore(cls, stored: Stored) -> Number:
        """Build the column again."""
        form = stored.entry("form", str)
        expect(form in NUMBER_FORMS, "numbers of an unknown form")
        median, mean = stored.number("median"), stored.number("mean")
        scale = stored.number("scale", math.ulp(0.0))
        return cls(form, median, mean, scale, stored.number("missing", 0, 1))

    def add_to_graph(self, graph: Graph, cells: str) -> str:
        """Add the column: of numbers, whatever their form in a file was."""
        gaps = graph.add("IsNaN", cells)
        filled = graph.add("Where", gaps, np.float64(self.median), cells)
        z = graph.add("Div", graph.add("Sub", filled, np.float64(self.mean)), np.float64(self.scale))
        if len(self.parts) > 1:
            told = graph.add("Sub", graph.cast(gaps, "DOUBLE"), np.float64(self.missing))
            told = graph.add("Div", told, np.sqrt(np.float64(self.missing * (1 - self.missing))))
            z = graph.add("Concat", z, told, axis=1)
        return graph.cast(z, "FLOAT")
