"""A column of dates or times: how late it is, and where in the day, the week and the year."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from protonet.tables.columns.kind import Column, name_gaps, tell_gaps, write_share
from protonet.tables.columns.parsing import DATE_FORMS, OR, find_words, parse_dates
from protonet.views.view import Stored, expect

#: Days in each cycle that a date may be a part of, and the least span of dates that tell of it.
CYCLES = {"day": 1.0, "week": 7.0, "year": 365.2425}
LEAST_SPANS = {"day": 0.0, "week": 7.0, "year": 60.0}
#: The radius of a cycle, next to a standard deviation of 1 of how late it is: most dates tell by that.
CYCLE_SIZE = 0.4
#: A cycle is told where dates are spread over it: 1 less the length of the mean of their directions is above this.
LEAST_SPREAD = 0.01
#: Dates that all lie on so few days of the month have weekdays by chance.
FEW_MONTH_DAYS = 2


@dataclass(frozen=True)
class Date(Column):
    """A column of dates, times or both.

    Args:
        form: How they are written, one of ``DATE_FORMS`` or several.
        median: What stands for gaps, in days since 1970.
        mean: Of the rows of fit, gaps filled.
        scale: Their standard deviation, or 1 where that is 0.
        missing: The share of gaps.
        cycles: Those of ``CYCLES`` that they are spread over.
    """

    form: str
    median: float
    mean: float
    scale: float
    missing: float
    cycles: tuple[str, ...]
    kind: ClassVar[str] = "date"
    names_sources: ClassVar[bool] = False  #: Of one day there are many rows in most tables.

    @classmethod
    def fit(cls, cells: np.ndarray, form: str = "iso") -> Date:
        """Fit to cells (n,) of a form; what is no date counts as a gap."""
        days = parse_dates(cells, form)
        gaps = np.isnan(days)
        present = days[~gaps]
        median = float(np.median(present))
        filled = np.where(gaps, median, days)
        cycles = tuple(name for name in CYCLES if _is_told(name, present))
        return cls(form, median, float(filled.mean()), float(filled.std()) or 1.0, float(gaps.mean()), cycles)

    @property
    def parts(self) -> tuple[str, ...]:
        """The time, two numbers for each cycle, and whether it is missing."""
        cycles = [f" {part} of {name}" for name in self.cycles for part in ("cosine", "sine")]
        return ("", *cycles, *name_gaps(self.missing))

    def read_numbers(self, cells: np.ndarray) -> np.ndarray:
        """Return days (n,) since 1970, NaN for gaps."""
        return parse_dates(cells, self.form)

    def fill(self, cells: np.ndarray) -> np.ndarray:
        """Return days (n,) since 1970, gaps filled."""
        days = parse_dates(cells, self.form)
        return np.where(np.isnan(days), self.median, days)

    def write(self, value: float) -> str:
        """Return days since 1970 as a date."""
        return str(np.datetime64(0, "D") + np.timedelta64(round(value), "D"))

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32."""
        days = parse_dates(cells, self.form)
        gaps = np.isnan(days)
        filled = np.where(gaps, self.median, days)
        angles = [2 * math.pi * filled / CYCLES[name] for name in self.cycles]
        circles = [CYCLE_SIZE * turn(angle) for angle in angles for turn in (np.cos, np.sin)]
        parts = [(filled - self.mean) / self.scale, *circles, *tell_gaps(gaps, self.missing)]
        return np.stack(parts, axis=1).astype(np.float32)

    def find_strange(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) are no dates of the form."""
        strange: np.ndarray = np.isnan(parse_dates(cells, self.form)) & ~find_words(cells)
        return strange

    def tell(self) -> str:
        """Return the kind, the form and the cycles."""
        form = "" if self.form == "iso" else f" as {self.form}"
        cycles = f", in {', '.join(self.cycles)}" if self.cycles else ""
        return f"date{form}{cycles}{write_share(self.missing)}"

    def describe(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self) | {"cycles": list(self.cycles)}

    @classmethod
    def restore(cls, stored: Stored) -> Date:
        """Build the column again."""
        form, cycles = stored.entry("form", str), stored.names("cycles")
        known = set(form.split(OR)) <= set(DATE_FORMS) and set(cycles) <= set(CYCLES)
        expect(known, "dates of an unknown form or cycle")
        median, mean = stored.number("median"), stored.number("mean")
        scale = stored.number("scale", math.ulp(0.0))
        return cls(form, median, mean, scale, stored.number("missing", 0, 1), cycles)


def _is_told(cycle: str, days: np.ndarray) -> bool:
    """Return whether dates (n,), in days since 1970, are spread over a cycle that they tell of."""
    if np.ptp(days) <= LEAST_SPANS[cycle]:
        return False
    if cycle == "week":
        dates = np.floor(days).astype("datetime64[D]")
        return len(np.unique(dates - dates.astype("datetime64[M]"))) > FEW_MONTH_DAYS
    angles = 2 * math.pi * days / CYCLES[cycle]
    return 1 - math.hypot(np.cos(angles).mean(), np.sin(angles).mean()) > LEAST_SPREAD
