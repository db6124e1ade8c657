"""Columns of dates or times: a linear time, and positions in the day, the week and the year."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protonet.tables.columns.base import (
    FittedColumn,
    format_missing_fraction,
    missing_indicator,
    missing_indicator_suffix,
)
from protonet.tables.columns.parsing import DATE_FORMATS, FORMAT_SEPARATOR, is_missing_or_word, parse_dates
from protonet.views.config import Stored, expect

#: Cycles and their lengths in days, and the minimum time span in days of the dates that they are used for.
CYCLES = {"day": 1.0, "week": 7.0, "year": 365.2425}
MIN_SPANS = {"day": 0.0, "week": 7.0, "year": 60.0}
#: Radius of a cycle's features, relative to the linear time with standard deviation 1, which is more often informative.
CYCLE_RADIUS = 0.4
#: Minimum circular variance (1 minus the mean resultant length) of dates over a cycle.
MIN_CYCLE_SPREAD = 0.01
#: The weekdays of dates on at most this many days of the month are accidental.
MAX_FIXED_MONTH_DAYS = 2


@dataclass(frozen=True)
class Date(FittedColumn):
    """A column of dates, times or both.

    Args:
        format: One of ``DATE_FORMATS``, or several joined by ``FORMAT_SEPARATOR``.
        median: Replaces missing values, in days since 1970.
        mean: Mean of the training rows, with missing values replaced.
        scale: Their standard deviation, or 1 if that is 0.
        missing: The fraction of missing values.
        cycles: Those of ``CYCLES`` that the dates are spread over.
    """

    format: str
    median: float
    mean: float
    scale: float
    missing: float
    cycles: tuple[str, ...]
    kind: ClassVar[str] = "date"
    may_be_group: ClassVar[bool] = False  #: Most tables have many rows of the same day.

    @classmethod
    def fit(cls, cells: np.ndarray, date_format: str = "iso") -> Date:
        """Fit to cells (n,); other text counts as missing."""
        days = parse_dates(cells, date_format)
        missing = np.isnan(days)
        present = days[~missing]
        median = float(np.median(present))
        filled = np.where(missing, median, days)
        cycles = tuple(name for name in CYCLES if _covers_cycle(name, present))
        scale = float(filled.std()) or 1.0
        return cls(date_format, median, float(filled.mean()), scale, float(missing.mean()), cycles)

    @property
    def feature_suffixes(self) -> tuple[str, ...]:
        """The time, two features for each cycle, and whether it is missing."""
        cycles = [f" {part} of {name}" for name in self.cycles for part in ("cosine", "sine")]
        return ("", *cycles, *missing_indicator_suffix(self.missing))

    def to_numeric(self, cells: np.ndarray) -> np.ndarray:
        """Return days (n,) since 1970, NaN if missing."""
        return parse_dates(cells, self.format)

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Return days (n,) since 1970, with missing values filled in."""
        days = parse_dates(cells, self.format)
        return np.where(np.isnan(days), self.median, days)

    def format_value(self, value: float) -> str:
        """Format days since 1970 as a date."""
        return str(np.datetime64(0, "D") + np.timedelta64(round(value), "D"))

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return the features (n, features) float32."""
        days = parse_dates(cells, self.format)
        missing = np.isnan(days)
        filled = np.where(missing, self.median, days)
        angles = [2 * math.pi * filled / CYCLES[name] for name in self.cycles]
        circles = [CYCLE_RADIUS * function(angle) for angle in angles for function in (np.cos, np.sin)]
        parts = [(filled - self.mean) / self.scale, *circles, *missing_indicator(missing, self.missing)]
        return np.stack(parts, axis=1).astype(np.float32)

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Return a mask (n,) bool of non-missing cells that are not dates of the format."""
        invalid: np.ndarray = np.isnan(parse_dates(cells, self.format)) & ~is_missing_or_word(cells)
        return invalid

    def summary(self) -> str:
        """Return the type, the format, the cycles and the fraction of missing values."""
        date_format = "" if self.format == "iso" else f" as {self.format}"
        cycles = f", in {', '.join(self.cycles)}" if self.cycles else ""
        return f"date{date_format}{cycles}{format_missing_fraction(self.missing)}"

    @classmethod
    def restore(cls, stored: Stored) -> Date:
        """Restore the column."""
        date_format, cycles = stored.entry("format", str), stored.get_strings("cycles")
        known = set(date_format.split(FORMAT_SEPARATOR)) <= set(DATE_FORMATS) and set(cycles) <= set(CYCLES)
        expect(known, "dates of an unknown format or cycle")
        median, mean = stored.get_float("median"), stored.get_float("mean")
        scale = stored.get_float("scale", math.ulp(0.0))
        return cls(date_format, median, mean, scale, stored.get_float("missing", 0, 1), cycles)


def _covers_cycle(cycle: str, days: np.ndarray) -> bool:
    """Test whether dates (n,), in days since 1970, are spread over a cycle and span enough time."""
    if np.ptp(days) <= MIN_SPANS[cycle]:
        return False
    if cycle == "week":
        dates = np.floor(days).astype("datetime64[D]")
        return len(np.unique(dates - dates.astype("datetime64[M]"))) > MAX_FIXED_MONTH_DAYS
    angles = 2 * math.pi * days / CYCLES[cycle]
    return 1 - math.hypot(np.cos(angles).mean(), np.sin(angles).mean()) > MIN_CYCLE_SPREAD
