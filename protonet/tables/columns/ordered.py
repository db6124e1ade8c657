"""Columns of numbers and of dates, which are standardized; missing values become the median and have an indicator."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from protonet._text import to_printable
from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.dates import (
    DATE_FORMAT_SEPARATOR,
    DATE_FORMATS,
    parse_date_with_any_time,
    parse_dates,
    parse_distinct_cells,
)
from protonet.tables.columns.parsing import BOOLEAN_SPELLINGS, is_missing_or_missing_word, parse_numeric_column
from protonet.tables.columns.quantities import (
    MAX_NUMBERS_PER_CELL,
    NUMERIC_FORMATS,
    SECONDS_PER_DAY,
    find_bound,
    parse_duration,
)
from protonet.tables.columns.units import detect_unit
from protonet.views.config import UntrustedComponent, raise_unless
from protonet.views.onnx_graph import OnnxGraph

#: The largest absolute value that a number in a table may have.
MAX_FLOAT32 = float(np.finfo(np.float32).max)
#: The length in days of each cycle that dates may follow. Dates are encoded by their phase in a cycle if they span more
#: days than its minimum span.
CYCLE_DAYS = {"day": 1.0, "week": 7.0, "year": 365.2425}
MIN_CYCLE_SPAN_DAYS = {"day": 0.0, "week": 7.0, "year": 60.0}
#: The cosine and the sine of a date's phase in a cycle are multiplied by this factor. It is less than 1, the standard
#: deviation of the linear time, because the linear time is more often informative.
CYCLE_FEATURE_SCALE = 0.4
#: Minimum circular variance (1 minus the mean resultant length) of dates that are encoded by their phase in a cycle.
MIN_CYCLE_PHASE_VARIANCE = 0.01
#: If dates are on at most this many distinct days of the month, such as the first, their weekdays are accidental: the
#: cycle of the week is then not encoded.
MAX_DISTINCT_MONTH_DAYS = 2
#: Numbers are encoded by their logarithm if the largest absolute value is at least this multiple of the median one.
#: Most others would become equal if they were divided by their standard deviation.
MIN_LOGARITHM_SPAN = 20.0
MIN_NUMBERS_FOR_LOGARITHM = 5  #: Minimum number of values other than 0 of such a column.
#: The logarithm is linear below this quantile of the absolute values: it is sign(v) log(1 + |v| / quantile).
LOGARITHM_UNIT_QUANTILE = 0.1
MIN_LOGARITHM_UNIT = 1e-30  #: Lower limit of this quantile as a fraction of the largest absolute value.


@dataclass(frozen=True)
class OrderedColumn(FittedColumn):
    """Base class of fitted columns of numbers and of dates.

    The first feature is the standardized number. The median replaces missing values, and the last feature indicates
    them, if training rows had any.
    """

    format: str  #: The name of the notation of the cells, such as "iso" for dates.
    median: float  #: The median of the training rows, which replaces missing values.
    mean: float  #: The mean of the training rows, with missing values replaced.
    scale: float  #: The standard deviation of the training rows, with missing values replaced; 1 instead of 0.
    missing_fraction: float = field(metadata={"key": "missing"})  #: The fraction of missing values in training rows.

    @abstractmethod
    def to_numeric(self, cells: np.ndarray) -> np.ndarray:
        """Parse cells (n,) to numbers (n,) float64, NaN for cells that are missing or in another format."""

    @staticmethod
    def fit_statistics(values: np.ndarray, usable: np.ndarray) -> tuple[float, float, float, float]:
        """Compute median, mean, standard deviation (1 instead of 0) and fraction of missing values of a column.

        ``values`` (n,) are float64, NaN for missing ones. The median of the ``usable`` ones (n,) replaces all others.
        """
        median = float(np.median(values[usable])) if usable.any() else 0.0
        filled = np.where(usable, values, median)
        mean = float(filled.mean())
        return median, mean, float((filled - mean).std()) or 1.0, float(np.isnan(values).mean())

    @property
    def feature_name_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature's name: the standardized value and, if there is one, the missing indicator."""
        return ("", " missing") if 0 < self.missing_fraction < 1 else ("",)

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32 of cells (n,).

        In this order, they are the standardized value, the `further_features`, and the missing indicator, if any.
        Values beyond float32 become infinite.
        """
        values = self.to_numeric(cells)
        missing = np.isnan(values)
        filled = np.where(missing, self.median, values)
        with np.errstate(over="ignore"):
            features = [self.standardize(filled), *self.further_features(filled)]
            if 0 < self.missing_fraction < 1:
                features.append(
                    (missing - self.missing_fraction) / math.sqrt(self.missing_fraction * (1 - self.missing_fraction))
                )
            return np.stack(features, axis=1).astype(np.float32)

    def standardize(self, filled: np.ndarray) -> np.ndarray:
        """Compute the first feature (n,) from values (n,) in which the median replaces missing ones."""
        return (filled - self.mean) / self.scale

    def further_features(self, filled: np.ndarray) -> list[np.ndarray]:
        """Compute further features (n,) from values (n,) in which the median replaces missing ones; none by default."""
        return []

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the non-missing cells that are in another format than in training."""
        unparsed: np.ndarray = np.isnan(self.to_numeric(cells))
        return unparsed & ~is_missing_or_missing_word(cells) if unparsed.any() else unparsed

    @property
    def missing_note(self) -> str:
        """The phrase about missing values for a summary, such as ", 12 % missing"; "" if there are none."""
        return f", {100 * self.missing_fraction:.2g} % missing" if self.missing_fraction else ""

    @staticmethod
    def restore_statistics(stored: UntrustedComponent) -> tuple[float, float, float, float]:
        """Restore median, mean, scale and fraction of missing values from the untrusted entries of a model file."""
        median, mean = stored.get_float("median"), stored.get_float("mean")
        return median, mean, stored.get_float("scale", math.ulp(0.0)), stored.get_float("missing", 0, 1)


@dataclass(frozen=True)
class Numeric(OrderedColumn):
    """A fitted column of numbers, written in one of ``NUMERIC_FORMATS``."""

    unit: str = ""  #: The unit of measurement that training cells name, such as "kg"; "" if they name none.
    log_unit: float = 0.0
    """The absolute value up to which the logarithmic scale is nearly linear; 0 if the numbers are on no such scale."""
    log_mean: float = 0.0  #: The mean of the training rows on the logarithmic scale.
    log_std: float = 1.0  #: The standard deviation of the training rows on the logarithmic scale.
    #: The extreme training values, which are those of words for a value beyond the range, such as "< LOD".
    lowest: float = 0.0
    highest: float = 0.0
    column_type: ClassVar[str] = "number"

    @classmethod
    def fit(cls, cells: np.ndarray, numeric_format: str = "plain") -> Numeric:
        """Fit a column of numbers to cells (n,).

        Cells that are no numbers of ``numeric_format``, or beyond float32, are replaced by the median of the others.
        """
        has_unit = cells.dtype.kind == "O" and numeric_format not in {"plain", "duration"}
        unit = detect_unit(dict.fromkeys(cells)) if has_unit else ""
        if numeric_format.endswith("annotated") and unit.isalpha() and len(unit) == 1:
            unit = ""  # flags, such as H and L
        numeric = parse_numeric_column(cells, numeric_format, unit or None)
        usable = np.abs(numeric) <= MAX_FLOAT32  # False for NaN
        bounds = (float(numeric[usable].min()), float(numeric[usable].max())) if usable.any() else (0.0, 0.0)
        numeric = _fill_words_beyond_range(numeric, cells, *bounds)
        usable = np.abs(numeric) <= MAX_FLOAT32
        statistics = cls.fit_statistics(numeric, usable)
        column = cls(numeric_format, *statistics, unit=unit, lowest=bounds[0], highest=bounds[1])
        sizes = np.abs(numeric[usable & (numeric != 0)])
        if len(sizes) < MIN_NUMBERS_FOR_LOGARITHM or sizes.max() < MIN_LOGARITHM_SPAN * np.median(sizes):
            return column
        log_unit = max(float(np.quantile(sizes, LOGARITHM_UNIT_QUANTILE)), float(sizes.max()) * MIN_LOGARITHM_UNIT)
        logs = _signed_logarithm(np.where(usable, numeric, statistics[0]), log_unit)
        mean, std = float(logs.mean()), float(logs.std())
        return replace(column, log_unit=log_unit, log_mean=mean, log_std=std)

    def standardize(self, filled: np.ndarray) -> np.ndarray:
        """Compute the first feature (n,) from values (n,) in which the median replaces missing ones."""
        if not self.log_unit:
            return super().standardize(filled)
        features = (_signed_logarithm(filled, self.log_unit) - self.log_mean) / self.log_std
        return np.where(np.abs(filled) > MAX_FLOAT32, filled, features)  # callers refuse such values

    @property
    def is_fully_numeric(self) -> bool:
        """Whether no training cell is missing, so that the numbers may be used without scaling."""
        return not self.missing_fraction

    @property
    def _is_binary(self) -> bool:
        """Whether all training values are 0 or 1, which their mean and their mean square show."""
        if self.format != "plain" or self.missing_fraction >= 1:
            return False
        # No other values in [0, 1] have as large a mean square. The statistics include medians for missing values.
        mean = (self.mean - self.missing_fraction * self.median) / (1 - self.missing_fraction)
        mean_square = (self.scale**2 + self.mean**2 - self.missing_fraction * self.median**2) / (
            1 - self.missing_fraction
        )
        return 0 < mean < 1 and math.isclose(mean, mean_square, rel_tol=1e-9)

    def to_numeric(self, cells: np.ndarray) -> np.ndarray:
        """Parse cells (n,) to numbers (n,) float64, NaN for other text, and for numbers that name another unit.

        If all training values are 0 or 1, words such as yes and no are accepted as well. If they are fractions without
        a unit, as Excel stores percentages, cells with % are hundredths.
        """
        if cells.dtype.kind == "O" and self._is_binary:
            cells = np.array([BOOLEAN_SPELLINGS.get(cell.casefold(), cell) for cell in cells], object)
        numeric = parse_numeric_column(cells, self.format, self.unit or None)
        if cells.dtype.kind == "O" and not self.unit and abs(self.mean) + self.scale < 1:
            numeric[["%" in cell for cell in cells]] /= 100
        if cells.dtype.kind == "O" and not self.unit and self.format in {"plain", "point", "comma"}:
            rows = np.flatnonzero(np.isnan(numeric) & (cells != ""))  # flags and words that training rows lack
            annotated = "comma annotated" if self.format == "comma" else "annotated"
            numeric[rows] = parse_numeric_column(cells[rows], annotated)
        return _fill_words_beyond_range(numeric, cells, self.lowest, self.highest)

    @property
    def invalid_reason(self) -> str:
        """The phrase by which messages explain an invalid cell, such as "not a number in kg, treated as missing"."""
        return f"not a number{f' in {self.unit}' if self.unit else ''}, treated as missing"

    def describe_other_spelling(self, cells: np.ndarray) -> str:
        """Describe the first cell that spells 0 or 1 as a word, as "'yes' is 1"; "" if there is none."""
        if cells.dtype.kind != "O" or not self._is_binary:
            return ""
        words = (cell for cell in cells if cell.isalpha() and cell.casefold() in BOOLEAN_SPELLINGS)
        return next((f"{to_printable(cell)!r} is {BOOLEAN_SPELLINGS[cell.casefold()]}" for cell in words), "")

    def preparse(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) of text to numbers (n,) float64.

        If a number is beyond float32, the cells are returned as they are, so that an error message can quote the text.
        """
        if cells.dtype.kind != "O":
            return cells
        numeric = self.to_numeric(cells)
        return cells if (np.abs(numeric) > MAX_FLOAT32).any() else numeric

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to numbers (n,), the median for missing ones; all but floats are converted to float64."""
        numeric = cells if cells.dtype.kind == "f" else self.to_numeric(cells)
        missing = np.isnan(numeric)
        return np.where(missing, numeric.dtype.type(self.median), numeric) if missing.any() else numeric

    def summary(self) -> str:
        """Summarize the number format and the fraction of missing values in one line, for users."""
        formats = {
            **{"plain": "", "point": ", as 1,234.5", "comma": ", as 1.234,5", "duration": ", durations in seconds"},
            **{"interval": ", midpoints of intervals", "comma interval": ", midpoints of intervals as 1,5-2,5"},
            **{"annotated": ", without flags and words", "comma annotated": ", as 1.234,5, without flags and words"},
        }
        details = f"{f', in {self.unit}' if self.unit else ''}{', on a logarithmic scale' if self.log_unit else ''}"
        shape = formats.get(self.format, f", {self.format.removeprefix('comma ')} of a cell")
        return f"number{shape}{details}{self.missing_note}"

    @classmethod
    def restore(cls, stored: UntrustedComponent) -> Numeric:
        """Restore the column from the untrusted entries of a model file."""
        numeric_format = stored.get_entry("format", str)
        raise_unless(numeric_format in NUMERIC_FORMATS, "numbers of an unknown format")
        return cls(
            numeric_format,
            *cls.restore_statistics(stored),
            unit=stored.get_entry("unit", str),
            log_unit=stored.get_float("log_unit", 0),
            log_mean=stored.get_float("log_mean"),
            log_std=stored.get_float("log_std", math.ulp(0.0)),
            lowest=stored.get_float("lowest"),
            highest=stored.get_float("highest"),
        )

    def add_to_graph(self, graph: OnnxGraph, cells: str) -> tuple[str, str]:
        """Add the features to an ONNX graph; return the names of the features and of the mask of missing cells."""
        missing = graph.add("IsNaN", cells)
        filled = graph.add("Where", missing, np.float64(self.median), cells)
        mean, std = self.mean, self.scale
        if self.log_unit:
            size = graph.add("Div", graph.add("Abs", filled), np.float64(self.log_unit))
            logs = graph.add("Log", graph.add("Add", size, np.float64(1)))
            filled, mean, std = graph.add("Mul", graph.add("Sign", filled), logs), self.log_mean, self.log_std
        z = graph.add("Div", graph.add("Sub", filled, np.float64(mean)), np.float64(std))
        if len(self.feature_name_suffixes) > 1:
            indicator = graph.add("Sub", graph.cast(missing, "DOUBLE"), np.float64(self.missing_fraction))
            indicator = graph.add(
                "Div", indicator, np.sqrt(np.float64(self.missing_fraction * (1 - self.missing_fraction)))
            )
            z = graph.add("Concat", z, indicator, axis=1)
        return graph.cast(z, "FLOAT"), missing


def _fill_words_beyond_range(numeric: np.ndarray, cells: np.ndarray, lowest: float, highest: float) -> np.ndarray:
    """Replace NaN among numbers (n,) by a bound if the cell (n,) means a value beyond the range."""
    if cells.dtype.kind != "O":
        return numeric
    for row in np.flatnonzero(np.isnan(numeric) & (cells != "")).tolist():
        if bound := find_bound(cells[row]):
            numeric[row] = lowest if bound < 0 else highest
    return numeric


def _signed_logarithm(values: np.ndarray, unit: float) -> np.ndarray:
    """Compute sign(v) log(1 + |v| / unit) of values (n,) float64, which is nearly linear for |v| below ``unit``."""
    logarithms: np.ndarray = np.sign(values) * np.log1p(np.abs(values) / unit)
    return logarithms


@dataclass(frozen=True)
class Numbers(FittedColumn):
    """A fitted column of cells with several numbers, such as 120/80 or 10.3±0.2; each is encoded like a column."""

    parts: tuple[Numeric, ...]  #: The column of each number that varies.
    column_type: ClassVar[str] = "numbers"

    @property
    def feature_name_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature's name: the name of the number, then that of its feature."""
        return tuple(f" {part.format}{suffix}" for part in self.parts for suffix in part.feature_name_suffixes)

    @property
    def feature_block_sizes(self) -> list[int]:
        """The sizes of the blocks, one for each number."""
        return [len(part.feature_name_suffixes) for part in self.parts]

    def to_numeric(self, cells: np.ndarray) -> np.ndarray:
        """Parse the first number of cells (n,) that varies, to float64; NaN for other text."""
        return self.parts[0].to_numeric(cells)

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Parse the first number of cells (n,) that varies; its median replaces missing ones."""
        return self.parts[0].comparable_values(cells)

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32 of cells (n,): those of each number."""
        return np.concatenate([part.encode(cells) for part in self.parts], axis=1)

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the non-missing cells without the first number."""
        return self.parts[0].is_invalid(cells)

    def summary(self) -> str:
        """Summarize the numbers of a cell in one line, for users."""
        return f"numbers: {len(self.parts)} in a cell{self.parts[0].missing_note}"

    def stored_values(self) -> dict[str, object]:
        """Return the JSON values of the numbers."""
        return {"parts": [part.stored_values() for part in self.parts]}

    def stored_arrays(self) -> dict[str, np.ndarray]:
        """Return no arrays."""
        return {}

    @classmethod
    def restore(cls, stored: UntrustedComponent) -> Numbers:
        """Restore the column from the untrusted entries of a model file."""
        parts = stored.get_entry("parts", list)
        raise_unless(0 < len(parts) <= MAX_NUMBERS_PER_CELL, "another number of numbers in a cell")
        return cls(tuple(Numeric.restore(UntrustedComponent(part, {})) for part in parts))


@dataclass(frozen=True)
class Date(OrderedColumn):
    """A fitted column of dates, times or both. They are converted to days since 1970.

    The format is one of ``DATE_FORMATS``, or several joined by ``DATE_FORMAT_SEPARATOR``.
    """

    cycles: tuple[str, ...]
    """The names of the ``CYCLE_DAYS`` by which dates are encoded, as they are spread over them."""
    column_type: ClassVar[str] = "date"
    may_be_group: ClassVar[bool] = False  #: Equal dates identify no group: most tables have many rows of the same day.

    @classmethod
    def fit(cls, cells: np.ndarray, date_format: str = "iso") -> Date:
        """Fit a column of dates to cells (n,); text in another format counts as missing."""
        days = parse_dates(cells, date_format)
        present = ~np.isnan(days)
        cycles = tuple(name for name in CYCLE_DAYS if _covers_cycle(name, days[present]))
        return cls(date_format, *cls.fit_statistics(days, present), cycles)

    @property
    def feature_name_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature's name: linear time, two features for each cycle, missing indicator, if any."""
        time, *missing = super().feature_name_suffixes
        return (time, *(f" {part} of {name}" for name in self.cycles for part in ("cosine", "sine")), *missing)

    def to_numeric(self, cells: np.ndarray) -> np.ndarray:
        """Parse cells (n,) to days (n,) float64 since 1970, NaN for cells that are missing or in another format.

        Times may have another form. If those of training are below an hour, cells such as 2:27 are minutes and seconds.
        """
        days = parse_dates(cells, self.format)
        unparsed = np.isnan(days) if cells.dtype.kind == "O" else np.zeros(0, bool)
        if unparsed.any() and self.format == "%H:%M:%S" and self.mean + self.scale < 1 / 24:
            days[unparsed] = parse_distinct_cells(parse_duration, cells[unparsed]) / SECONDS_PER_DAY
        elif unparsed.any():
            is_time = self.format == "iso" and 0 <= self.mean < 1 and self.scale < 1  # times of Parquet files
            parse = partial(parse_date_with_any_time, date_format="%H:%M:%S" if is_time else self.format)
            days[unparsed] = parse_distinct_cells(parse, cells[unparsed])
        return days

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to days (n,) float64 since 1970, the median for missing ones."""
        days = self.to_numeric(cells)
        return np.where(np.isnan(days), self.median, days)

    def format_value(self, value: float) -> str:
        """Format a number of days since 1970 as a date."""
        return str(np.datetime64(0, "D") + np.timedelta64(round(value), "D"))

    def further_features(self, filled: np.ndarray) -> list[np.ndarray]:
        """Compute two features (n,) for each cycle: cosine and sine of the phase of days (n,), scaled."""
        angles = [2 * math.pi * filled / CYCLE_DAYS[name] for name in self.cycles]
        return [CYCLE_FEATURE_SCALE * function(angle) for angle in angles for function in (np.cos, np.sin)]

    def summary(self) -> str:
        """Summarize the format, the cycles and the fraction of missing values in one line, for users."""
        date_format = "" if self.format == "iso" else f" as {self.format}"
        cycles = f", in {', '.join(self.cycles)}" if self.cycles else ""
        return f"date{date_format}{cycles}{self.missing_note}"

    @classmethod
    def restore(cls, stored: UntrustedComponent) -> Date:
        """Restore the column from the untrusted entries of a model file."""
        date_format, cycles = stored.get_entry("format", str), stored.get_strings("cycles")
        known = set(date_format.split(DATE_FORMAT_SEPARATOR)) <= set(DATE_FORMATS) and set(cycles) <= set(CYCLE_DAYS)
        raise_unless(known, "dates of an unknown format or cycle")
        return cls(date_format, *cls.restore_statistics(stored), cycles)


def _covers_cycle(cycle: str, days: np.ndarray) -> bool:
    """Test whether dates (n,), in days since 1970, are spread over the phases of a cycle such as "year"."""
    if np.ptp(days) <= MIN_CYCLE_SPAN_DAYS[cycle]:
        return False
    if cycle == "week":
        dates = np.floor(days).astype("datetime64[D]")
        return len(np.unique(dates - dates.astype("datetime64[M]"))) > MAX_DISTINCT_MONTH_DAYS
    angles = 2 * math.pi * days / CYCLE_DAYS[cycle]
    return 1 - math.hypot(np.cos(angles).mean(), np.sin(angles).mean()) > MIN_CYCLE_PHASE_VARIANCE
