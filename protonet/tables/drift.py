"""Detect drift of columns: new rows with other units, shifts, missing values or unknown categories.

The model file stores statistics of each column of the training rows. New rows are compared with them as they are read,
and a warning is given for each drifted column. Predictions do not change.

A column is reported if both conditions hold:

- **The difference is large**. There are three cases. Most new cells are outside the training range, or missing, or of
  rare or unknown categories, and in training that fraction was lower by at least 0.5. Or all new cells are in an
  interval with few training rows of any class. Or a cell is outside the training range by many times the width of the
  range, in a column without long tails.
- **The difference is significant**. If new rows had the training distribution, at most one of a hundred tables would
  have any report, whatever the distribution is. The tests are Fisher's exact test of the two fractions, and a bound for
  the range of all new cells, each with a Bonferroni correction for all columns. New rows may be of a single class:
  therefore the tests count only as many training rows as a class has on average, and the minimum and the maximum of
  these as outside. The distance of a single cell has no such bound. It is ignored in columns with long tails, whose
  range is many times as wide as the interquartile range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protonet._io import JsonDict
from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.encoding import Encoding, list_fitted_columns
from protonet.tables.columns.parsing import is_missing
from protonet.tables.table import RowBlock, Table


def compute_column_statistics(
    cells: Sequence[np.ndarray], encoding: Encoding | None, class_counts: Sequence[int]
) -> Any:
    """Compute the statistics of training rows with which `DriftMonitor` compares new rows, as JSON values.

    ``cells`` has the cells (n,) of each column, ``class_counts`` the number of rows of each class. The result has the
    fraction of missing cells of each column and, for numbers and dates, quantiles; the mean number of rows per class;
    and the fraction of the rows in the smallest class.
    """
    # Minimum and maximum number of intervals between the stored quantiles of a column, both multiples of four.
    min_quantile_intervals = 16
    max_quantile_intervals = 64
    # Maximum number of stored quantiles of all columns together.
    max_quantiles = 2**17
    statistics: list[JsonDict] = []
    limits = (min_quantile_intervals, max_quantile_intervals)
    n_steps = sorted([*limits, max_quantiles // (4 * len(cells)) * 4])[1]
    for column, values in zip(list_fitted_columns(encoding, len(cells)), cells, strict=True):
        numeric = column.to_numeric(values)
        missing = is_missing(values) if numeric is None else np.isnan(numeric)
        statistics.append({"missing": float(missing.mean())})
        if numeric is not None and not missing.all():
            low, *inner, high = np.quantile(numeric[~missing], np.linspace(0, 1, n_steps + 1)).tolist()
            rounded = (min(max(low, float(f"{quantile:.5g}")), high) for quantile in inner)
            statistics[-1]["quantiles"] = [low, *rounded, high]
    per_class = sum(class_counts) // len(class_counts)
    return {"columns": statistics, "per_class": per_class, "smallest": min(class_counts) / max(1, sum(class_counts))}


@dataclass
class ColumnCounts:
    """Counts of the cells of a column in new rows, such as those outside the range of the training rows."""

    n_cells: int = 0  #: The number of cells.
    n_missing: int = 0  #: The number of missing cells.
    n_outside_range: int = 0  #: The number of values outside the training range.
    n_outliers: int = 0  #: The number of values so far outside the training range that a single one is reported.
    last_outlier: float = math.nan  #: The last of the distant values.
    n_rare: int = 0  #: The number of cells with a rare or unknown category.
    minimum: float = math.inf  #: The smallest value.
    maximum: float = -math.inf  #: The largest value.


#: Maximum fraction of tables without drift in which any column is reported.
MAX_FALSE_ALARM_RATE = 0.01


@dataclass
class DriftMonitor:
    """Compares new rows with the statistics of the training rows, block by block."""

    #: The untrusted result of `compute_column_statistics` from a model file; if it is invalid, nothing is reported.
    training_statistics: Any
    encoding: Encoding | None  #: The columns fitted to the training rows; None if the columns are features already.
    n_columns: int  #: The number of columns.
    column_counts: list[ColumnCounts] = field(init=False)  #: The counts of the new cells of each column.

    def __post_init__(self) -> None:
        self.training_statistics = (
            self.training_statistics if _is_valid_statistics(self.training_statistics, self.n_columns) else None
        )
        self.column_counts = [ColumnCounts() for _ in range(self.n_columns if self.training_statistics else 0)]

    def update(self, block: RowBlock) -> None:
        """Add the rows of a block to the counts of the new rows."""
        # Maximum number of rows of a block that are examined, equally spaced.
        max_examined_rows = 4096
        columns = list_fitted_columns(self.encoding, self.n_columns)
        step = -(-len(block.positions) // max_examined_rows)
        for index, counts in enumerate(self.column_counts):
            column, cells = columns[index], block.columns[index][::step]
            numeric = column.to_numeric(cells)
            missing = is_missing(cells) if numeric is None else np.isnan(numeric)
            counts.n_cells += len(cells)
            counts.n_missing += int(missing.sum())
            counts.n_rare += int((column.is_rare_or_unknown(cells) & ~missing).sum())
            quantiles = self.training_statistics["columns"][index].get("quantiles")
            if numeric is not None and quantiles and not missing.all():
                present = numeric[~missing]
                excess = np.maximum(quantiles[0] - present, present - quantiles[-1])
                distant = present[excess > _outlier_distance(quantiles)]
                counts.n_outside_range += int((excess > 0).sum())
                counts.n_outliers += len(distant)
                counts.last_outlier = distant[-1] if len(distant) else counts.last_outlier
                counts.minimum = min(counts.minimum, present.min())
                counts.maximum = max(counts.maximum, present.max())

    def format_warnings(self, block: RowBlock) -> list[str]:
        """Format a warning for each drifted column, after `update`; ``block`` is one of the blocks that it received."""
        columns, warnings = list_fitted_columns(self.encoding, self.n_columns), []
        for index, (column, counts) in enumerate(zip(columns, self.column_counts, strict=False)):
            if reason := self._describe_drift(column, counts, self.training_statistics["columns"][index]):
                warnings.append(f"warning: {block.column_name(index)} is far from the training rows: {reason}")
        return warnings

    def _describe_drift(self, column: FittedColumn, counts: ColumnCounts, statistics: JsonDict) -> str:
        """Describe the drift of a column from its ``counts`` in new rows and its training statistics; "" for none."""
        # Maximum number of training rows in the interval that holds all new cells, relative to the smallest class.
        max_training_fraction_in_new_range = 0.5
        # Minimum number of training rows per class for reports of single cells. Fewer rows do not show long tails.
        min_rows_per_class = 16
        n_present = counts.n_cells - counts.n_missing
        if self._is_significant_increase(counts.n_missing, counts.n_cells, statistics["missing"]):
            return f"most cells are missing; in training {_format_percentage(statistics['missing'])} were"
        # If all training categories have a feature, `check_column_types` reports the unknown ones.
        if (rare := column.rare_fraction) and self._is_significant_increase(counts.n_rare, n_present, rare):
            return f"most rows have rare or unknown categories; in training {100 * rare:.2g} % had"
        if "quantiles" not in statistics or counts.minimum > counts.maximum:  # there were no numbers
            return ""
        another_unit = "; another unit?" if column.column_type == "number" else ""
        low, *_, high = statistics["quantiles"]
        training_range = f"{column.format_value(low)} to {column.format_value(high)}"
        per_class = self.training_statistics["per_class"]
        expected = min(2, per_class) / per_class
        if self._is_significant_increase(counts.n_outside_range, n_present, expected, reference=0.0):
            return f"most rows are outside {training_range}{another_unit}"
        fraction = _max_fraction_between(np.array(statistics["quantiles"]), counts.minimum, counts.maximum)
        relative = fraction / self.training_statistics["smallest"]
        if (
            relative < max_training_fraction_in_new_range
            and n_present * relative ** (n_present - 1) < MAX_FALSE_ALARM_RATE / self.n_columns
        ):
            ends = dict.fromkeys(column.format_value(end) for end in (counts.minimum, counts.maximum))
            interval = f"are between {' and '.join(ends)}" if len(ends) > 1 else f"are {''.join(ends)}"
            training = f"{'at most ' * bool(fraction)}{_format_percentage(fraction)}"
            return f"all rows {interval}; in training {training} were{another_unit}"
        if counts.n_outliers and per_class >= min_rows_per_class:
            rows = "1 row is" if counts.n_outliers == 1 else f"{counts.n_outliers} rows are"
            example = column.format_value(counts.last_outlier)
            return f"{rows} far outside {training_range}, such as {example}{another_unit}"
        return ""

    def _is_significant_increase(
        self, count: int, n_rows: int, training_fraction: float, reference: float | None = None
    ) -> bool:
        """Test if ``count / n_rows`` is significantly above the fraction in training, and far above the reference.

        The reference is by default the fraction in training.
        """
        # Minimum increase from training to new rows of the fraction of cells that are missing, outside the training
        # range, or of rare categories.
        min_fraction_increase = 0.5
        # Maximum number of rows that a significance test counts; more are scaled down to it.
        max_rows_in_significance_test = 1000
        if (
            not n_rows
            or count / n_rows - (training_fraction if reference is None else reference) < min_fraction_increase
        ):
            return False
        n = self.training_statistics["per_class"]
        if n_rows > (limit := max_rows_in_significance_test):
            count, n_rows = count * limit // n_rows, limit
        from scipy.stats import hypergeom  # noqa: PLC0415 - slow to import

        # Fisher's exact test: the probability of as many unusual rows if both samples have the same distribution.
        p_value = hypergeom.sf(count - 1, n + n_rows, count + math.ceil(training_fraction * n), n_rows)
        return bool(p_value < MAX_FALSE_ALARM_RATE / self.n_columns)


def monitor_drift(table: Table, monitor: DriftMonitor) -> Iterator[RowBlock]:
    """Yield the blocks of a table unchanged; after the last block, add warnings about drift to the table's notes."""
    block = None
    for block in table.blocks:
        monitor.update(block)
        yield block
    table.notes.extend([] if block is None else monitor.format_warnings(block))


def _max_fraction_between(quantiles: np.ndarray, low: float, high: float) -> float:
    """Compute an upper bound of the fraction of training cells in [low, high], given evenly spaced quantiles."""
    n_steps = len(quantiles) - 1
    first = max(0, int(np.searchsorted(quantiles, low, side="left")) - 1)
    return (min(n_steps, int(np.searchsorted(quantiles, high, side="right"))) - first) / n_steps


def _outlier_distance(quantiles: Sequence[float]) -> float:
    """Compute the distance from the training range beyond which a cell is reported; infinite for long tails."""
    # Minimum distance of a single reported cell from the training range, as a multiple of the width of the range.
    min_outlier_distance = 100.0
    # Maximum width of the training range, in interquartile ranges, of a column in which single cells are reported.
    max_range_in_iqrs = 6.0
    width, quarter = quantiles[-1] - quantiles[0], len(quantiles) // 4
    interquartile_range = quantiles[-1 - quarter] - quantiles[quarter]
    has_no_long_tails = 0 < width <= max_range_in_iqrs * interquartile_range
    return min_outlier_distance * width if has_no_long_tails else math.inf


def _format_percentage(fraction: float) -> str:
    """Format a fraction in per cent; "none" for 0."""
    return f"{100 * fraction:.2g} %" if fraction else "none"


def _is_valid_statistics(statistics: Any, n_columns: int) -> bool:
    """Test whether an untrusted value has the form of a result of `compute_column_statistics`."""
    if not isinstance(statistics, dict):
        return False
    columns, per_class, smallest = (statistics.get(key) for key in ("columns", "per_class", "smallest"))
    if not isinstance(columns, list) or len(columns) != n_columns or type(per_class) is not int or per_class < 1:
        return False
    return type(smallest) is float and 0 < smallest <= 1 and all(map(_is_valid_column_statistics, columns))


def _is_valid_column_statistics(column: object) -> bool:
    """Test whether an untrusted value has the form of the statistics of one column."""
    if not isinstance(column, dict) or type(column.get("missing")) is not float or not 0 <= column["missing"] <= 1:
        return False
    quantiles = column.get("quantiles", [0.0, 0.0])
    is_list = isinstance(quantiles, list) and len(quantiles) >= 2 and all(type(value) is float for value in quantiles)
    return is_list and quantiles == sorted(quantiles)
