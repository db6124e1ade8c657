"""Columns of numbers, which are standardized; missing values become the median and have an indicator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protonet._text import to_printable
from protonet.tables.columns.base import OrderedColumn
from protonet.tables.columns.parsing import BOOLEANS, NUMERIC_FORMATS, parse_numeric_column
from protonet.views.config import Stored, expect
from protonet.views.view import Graph

#: The largest absolute value of a number in a table.
MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Numeric(OrderedColumn):
    """A column of numbers in one of ``NUMERIC_FORMATS``."""

    kind: ClassVar[str] = "number"

    @classmethod
    def fit(cls, cells: np.ndarray, numeric_format: str = "plain") -> Numeric:
        """Fit a column of numbers to cells (n,); other text and numbers beyond float32 are replaced by the median."""
        numeric = parse_numeric_column(cells, numeric_format)
        return cls(numeric_format, *cls.fit_statistics(numeric, np.abs(numeric) <= MAX_FLOAT32))  # False for NaN

    @property
    def plain(self) -> bool:
        """Whether no value of the training rows is missing."""
        return not self.missing

    @property
    def _is_binary(self) -> bool:
        """Whether all training values are 0 or 1, judged by their mean and mean square without missing values."""
        if self.format != "plain" or self.missing >= 1:
            return False
        # No other values in [0, 1] have as large a mean square. The statistics include medians for missing values.
        mean = (self.mean - self.missing * self.median) / (1 - self.missing)
        mean_square = (self.scale**2 + self.mean**2 - self.missing * self.median**2) / (1 - self.missing)
        return 0 < mean < 1 and math.isclose(mean, mean_square, rel_tol=1e-9)

    def to_numeric(self, cells: np.ndarray) -> np.ndarray:
        """Parse cells (n,) to numbers (n,) float64; a binary column also accepts words such as yes and no."""
        if cells.dtype.kind == "O" and self._is_binary:
            cells = np.array([BOOLEANS.get(cell.casefold(), cell) for cell in cells], object)
        return parse_numeric_column(cells, self.format)

    def describe_other_spelling(self, cells: np.ndarray) -> str:
        """Describe the first of cells (n,) that spells 0 or 1 as a word; "" if there is none."""
        if cells.dtype.kind != "O" or not self._is_binary:
            return ""
        words = (cell for cell in cells if cell.isalpha() and cell.casefold() in BOOLEANS)
        return next((f"{to_printable(cell)!r} is {BOOLEANS[cell.casefold()]}" for cell in words), "")

    def preparse(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to numbers, unless one is too large: an error message will quote its text."""
        if cells.dtype.kind != "O":
            return cells
        numeric = self.to_numeric(cells)
        return cells if (np.abs(numeric) > MAX_FLOAT32).any() else numeric

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to numbers with missing values filled in; floats keep their type, others are float64."""
        numeric = cells if cells.dtype.kind == "f" else self.to_numeric(cells)
        missing = np.isnan(numeric)
        return np.where(missing, numeric.dtype.type(self.median), numeric) if missing.any() else numeric

    def summary(self) -> str:
        """Summarize the number format and the fraction of missing values in one line."""
        formats = {
            "plain": "",
            "point": ", as 1,234.5",
            "comma": ", as 1.234,5",
            "interval": ", midpoints of intervals",
            "duration": ", durations in seconds",
        }
        return f"number{formats[self.format]}{self.missing_note}"

    @classmethod
    def restore(cls, stored: Stored) -> Numeric:
        """Restore the column from the untrusted entries of a model file."""
        numeric_format = stored.entry("format", str)
        expect(numeric_format in NUMERIC_FORMATS, "numbers of an unknown format")
        return cls(numeric_format, *cls.restore_statistics(stored))

    def add_to_graph(self, graph: Graph, cells: str) -> tuple[str, str]:
        """Add the standardized numbers and the missing indicator to an ONNX graph."""
        missing = graph.add("IsNaN", cells)
        filled = graph.add("Where", missing, np.float64(self.median), cells)
        z = graph.add("Div", graph.add("Sub", filled, np.float64(self.mean)), np.float64(self.scale))
        if len(self.feature_suffixes) > 1:
            indicator = graph.add("Sub", graph.cast(missing, "DOUBLE"), np.float64(self.missing))
            indicator = graph.add("Div", indicator, np.sqrt(np.float64(self.missing * (1 - self.missing))))
            z = graph.add("Concat", z, indicator, axis=1)
        return graph.cast(z, "FLOAT"), missing
