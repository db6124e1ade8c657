"""Columns of dates or times, encoded as a linear time and as positions in the day, the week and the year."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protonet.tables.columns.base import OrderedColumn
from protonet.tables.columns.parsing import (
    DATE_FORMATS,
    FORMAT_SEPARATOR,
    SECONDS_PER_DAY,
    map_unique,
    parse_dates,
    parse_duration,
)
from protonet.views.config import Stored, expect

#: Length of each cycle in days, and minimum time span in days of the dates for which it is used.
CYCLES = {"day": 1.0, "week": 7.0, "year": 365.2425}
MIN_SPANS = {"day": 0.0, "week": 7.0, "year": 60.0}
#: Radius of the features of a cycle; the linear time, which is more often informative, has standard deviation 1.
CYCLE_RADIUS = 0.4
#: Minimum circular variance (1 minus the mean resultant length) of dates over a cycle.
MIN_CYCLE_SPREAD = 0.01
#: Maximum distinct days of the month of dates whose weekdays are accidental, as those of the first of each month.
MAX_FIXED_MONTH_DAYS = 2


@dataclass(frozen=True)
class Date(OrderedColumn):
    """A column of dates, times or both, in days since 1970.

    The format is one of ``DATE_FORMATS``, or several joined by ``FORMAT_SEPARATOR``.
    """

    cycles: tuple[str, ...]  #: The names of the ``CYCLES`` that are encoded: the dates are spread over them.
    kind: ClassVar[str] = "date"
    may_be_group: ClassVar[bool] = False  #: Most tables have many rows of the same day.

    @classmethod
    def fit(cls, cells: np.ndarray, date_format: str = "iso") -> Date:
        """Fit a column of dates to cells (n,); text in another format counts as missing."""
        days = parse_dates(cells, date_format)
        present = ~np.isnan(days)
        cycles = tuple(name for name in CYCLES if _covers_cycle(name, days[present]))
        return cls(date_format, *cls.fit_statistics(days, present), cycles)

    @property
    def feature_suffixes(self) -> tuple[str, ...]:
        """The suffixes of the linear time, of two features for each cycle, and of the missing indicator."""
        time, *missing = super().feature_suffixes
        return (time, *(f" {part} of {name}" for name in self.cycles for part in ("cosine", "sine")), *missing)

    def to_numeric(self, cells: np.ndarray) -> np.ndarray:
        """Parse cells (n,) to days (n,) since 1970, NaN if missing.

        If the training times are below an hour, cells such as 2:27 are minutes and seconds.
        """
        days = parse_dates(cells, self.format)
        if cells.dtype.kind == "O" and self.format == "%H:%M:%S" and self.mean + self.scale < 1 / 24:
            unparsed = np.isnan(days)
            days[unparsed] = map_unique(parse_duration, cells[unparsed]) / SECONDS_PER_DAY
        return days

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to days (n,) since 1970, with missing values filled in."""
        days = self.to_numeric(cells)
        return np.where(np.isnan(days), self.median, days)

    def format_value(self, value: float) -> str:
        """Format a number of days since 1970 as a date."""
        return str(np.datetime64(0, "D") + np.timedelta64(round(value), "D"))

    def further_features(self, filled: np.ndarray) -> list[np.ndarray]:
        """Compute the cosine and the sine (n,) of days (n,) in each cycle."""
        angles = [2 * math.pi * filled / CYCLES[name] for name in self.cycles]
        return [CYCLE_RADIUS * function(angle) for angle in angles for function in (np.cos, np.sin)]

    def summary(self) -> str:
        """Summarize the format, the cycles and the fraction of missing values in one line."""
        date_format = "" if self.format == "iso" else f" as {self.format}"
        cycles = f", in {', '.join(self.cycles)}" if self.cycles else ""
        return f"date{date_format}{cycles}{self.missing_note}"

    @classmethod
    def restore(cls, stored: Stored) -> Date:
        """Restore the column from the untrusted entries of a model file."""
        date_format, cycles = stored.entry("format", str), stored.get_strings("cycles")
        known = set(date_format.split(FORMAT_SEPARATOR)) <= set(DATE_FORMATS) and set(cycles) <= set(CYCLES)
        expect(known, "dates of an unknown format or cycle")
        return cls(date_format, *cls.restore_statistics(stored), cycles)


def _covers_cycle(cycle: str, days: np.ndarray) -> bool:
    """Test whether dates (n,), in days since 1970, span enough time for a cycle and are spread over it."""
    if np.ptp(days) <= MIN_SPANS[cycle]:
        return False
    if cycle == "week":
        dates = np.floor(days).astype("datetime64[D]")
        return len(np.unique(dates - dates.astype("datetime64[M]"))) > MAX_FIXED_MONTH_DAYS
    angles = 2 * math.pi * days / CYCLES[cycle]
    return 1 - math.hypot(np.cos(angles).mean(), np.sin(angles).mean()) > MIN_CYCLE_SPREAD
