"""Detect the decimal mark of a table, and convert the numbers of new rows to the format that a model was fitted to.

A cell such as "1,234" may be 1234 or 1.234. Cells with a single meaning ("0,205", "1.5", "1,234.5") determine the
decimal mark of all columns of their table. If there are none, the fitted format is used, unless the numbers would then
be far from those of the training rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from protonet._text import to_printable
from protonet.tables.columns import parsing, quantities
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.ordered import Numeric
from protonet.tables.columns.units import is_known_unit, split_unit
from protonet.tables.table import RowBlock

#: The number format of each decimal mark.
FORMAT_OF_DECIMAL_MARK = {".": "point", ",": "comma"}
DECIMAL_MARK_FORMATS = ("point", "comma")  #: The formats of numbers with a decimal mark.
MAX_MIXED_UNITS = 6  #: Maximum number of units of a column that gets a warning; more are probably parts of codes.
CONVERTIBLE_NUMERIC_FORMATS = {
    "plain",
    *DECIMAL_MARK_FORMATS,
}  #: Number formats that may have another decimal mark in new rows.
MIN_MIXED_PERCENTAGE_FRACTION = 0.1  #: Minimum fraction of percentages, and of other fractions, for a warning.
#: Maximum number of distinct cells of a column that are examined.
MAX_EXAMINED_CELLS = 1000
#: Smaller magnitudes of the numbers of a column are replaced by this one, so that their logarithm is finite.
MIN_NUMBER_MAGNITUDE = 1e-30


class NumericConversion(NamedTuple):
    """The conversion of a table's numbers to the formats that a model was fitted to."""

    #: For the index of each column to convert: the number format of the table, and the column that was fitted.
    column_formats: Mapping[int, tuple[str, Numeric]] = {}
    notes: tuple[str, ...] = ()  #: Notes for the user.

    def convert_block(self, block: RowBlock) -> RowBlock:
        """Return a block whose numbers are rewritten in the formats to which the model was fitted."""
        columns = list(block.columns)
        for index, formats in self.column_formats.items():
            columns[index] = _rewrite_numbers(columns[index], *formats)
        return block._replace(columns=columns)


def choose_numeric_format_order(
    columns: Mapping[str, np.ndarray], numeric: Mapping[str, Numeric]
) -> Sequence[str] | None:
    """Choose the order in which number formats are tried, by the cells of all columns; None to fit no column again."""
    if not any(column.format == "comma" for column in numeric.values()):
        return None
    texts = [_list_distinct_cells(columns[name]) for name in numeric if columns[name].dtype.kind == "O"]
    separators = set[str]().union(*map(quantities.detect_decimal_separators, texts))
    return quantities.FORMATS_DECIMAL_POINT_FIRST if separators == {"point"} else quantities.FORMATS_DECIMAL_COMMA_FIRST


def describe_numeric_formats(
    columns: Mapping[str, np.ndarray], numeric: Mapping[str, Numeric], *, ambiguous_points: bool = False
) -> list[str]:
    """Format notes on how ambiguous points, commas and colons in numbers are read, with examples, by column name.

    If there are ``ambiguous_points``, as in files with semicolons between cells, points may be between thousands even
    in numbers that Python can read.
    """
    meanings = {
        "point": {",": "commas between thousands"},
        "comma": {",": "a decimal comma", ".": "points between thousands"},
        "duration": {":": "minutes and seconds"},
    }
    names, examples = dict[str, list[str]](), dict[str, str]()
    for name, column in numeric.items():
        cells = _list_distinct_cells(columns[name]) if columns[name].dtype.kind == "O" else []
        marks = meanings.get(column.format, {})
        if ambiguous_points and column.format == "plain" and quantities.have_ambiguous_points(cells):
            marks = {".": "a decimal point"}
        if word := next(filter(quantities.find_bound, cells), ""):
            meaning = "words for values beyond their range"
            names.setdefault(meaning, []).append(to_printable(name))
            examples.setdefault(meaning, f"{word!r} is {column.to_numeric(np.array([word], object))[0]:.10g}")
        for mark, meaning in marks.items():
            cell = next((cell for cell in cells if mark in cell), "")
            if not math.isnan(value := quantities.parse_numeric(cell, column.format)):
                names.setdefault(meaning, []).append(to_printable(name))
                option = "" if column.format == "duration" else "; `decimal_mark` changes it"
                examples.setdefault(meaning, f"{cell!r} is {value:.10g}{option}")
                break
    return [f"numbers with {meaning}: {', '.join(names[meaning])} ({examples[meaning]})" for meaning in names]


def describe_mixed_units(columns: Mapping[str, np.ndarray]) -> list[str]:
    """Format a warning about each column whose cells are numbers in several units, and which is not read as numbers."""
    notes = []
    for name, cells in columns.items():
        distinct = (
            _list_distinct_cells(cells[~parsing.is_missing(cells)])[:MAX_EXAMINED_CELLS]
            if cells.dtype.kind == "O"
            else []
        )
        numeric_cells = [
            cell
            for cell in distinct
            if not all(math.isnan(quantities.parse_numeric(cell, mark)) for mark in DECIMAL_MARK_FORMATS)
        ]
        units = sorted({split_unit(cell)[1] for cell in numeric_cells} - {""})
        if (
            1 < len(units) <= MAX_MIXED_UNITS
            and all(map(is_known_unit, units))
            and len(numeric_cells) >= quantities.MIN_PARSED_FRACTION * len(distinct)
        ):
            named = f"{to_printable(name)} has numbers in several units ({', '.join(map(to_printable, units))})"
            notes.append(f"warning: {named}: they are not read as numbers; convert them to one unit")
    return notes


def describe_mixed_percentages(columns: Mapping[str, np.ndarray], numeric: Mapping[str, Numeric]) -> list[str]:
    """Format a warning about each fitted column of numbers with both percentages and fractions, as 35% and 0.35.

    The arguments are those of `describe_numeric_formats`. 0 is no fraction, since it means the same as 0%.
    """
    notes = []
    for name, column in numeric.items():
        if columns[name].dtype.kind != "O" or "%" not in "".join(columns[name]):  # fast exit for most columns
            continue
        counts = Counter(columns[name].tolist())
        values = {cell: quantities.parse_numeric(cell, column.format) for cell in list(counts)[:MAX_EXAMINED_CELLS]}
        numeric_cells = [cell for cell, value in values.items() if not math.isnan(value)]
        units = {cell: split_unit(cell)[1] for cell in numeric_cells}
        percentages = [cell for cell in numeric_cells if units[cell] == "%"]
        fractions = [cell for cell in numeric_cells if not units[cell] and 0 < values[cell] <= 1]
        rows, *mixed = (sum(counts[cell] for cell in cells) for cells in (numeric_cells, percentages, fractions))
        if rows and min(mixed) >= MIN_MIXED_PERCENTAGE_FRACTION * rows:
            percentage, fraction = percentages[0], fractions[0]
            read = f"{percentage!r} is read as {values[percentage]:.10g}, {fraction!r} as {values[fraction]:.10g}"
            notes.append(f"warning: {to_printable(name)} has numbers with and without %: {read}; write all in one way")
    return notes


def detect_numeric_conversion(
    block: RowBlock, encoding: Encoding | None, *, decimal: str | None = None, has_semicolons: bool = False
) -> NumericConversion:
    """Detect from the first block how the numbers of new rows must be converted to the formats of the training rows."""
    texts = {
        index: (column, _list_distinct_cells(cells)[:MAX_EXAMINED_CELLS])
        for index, (column, cells) in enumerate(zip(encoding.columns if encoding else (), block.columns, strict=False))
        if isinstance(column, Numeric) and column.format in CONVERTIBLE_NUMERIC_FORMATS and cells.dtype.kind == "O"
    }
    fitted = {"comma" if column.format == "comma" else "point" for column, _ in texts.values()}
    has_commas = any("," in cell for _, cells in texts.values() for cell in cells)
    if decimal is None and not has_commas and "comma" not in fitted:  # fast exit for most tables
        with_points = [cell for _, cells in texts.values() for cell in cells if "." in cell]
        if not with_points or any(math.isnan(quantities.parse_numeric(cell, "comma")) for cell in with_points):
            return NumericConversion()
    separators = {index: quantities.detect_decimal_separators(cells) for index, (_, cells) in texts.items()}
    certain = set[str]().union(*separators.values())
    table_format = FORMAT_OF_DECIMAL_MARK[decimal] if decimal else next(iter(certain)) if len(certain) == 1 else None
    if not certain and table_format is None:
        prefer_comma = "comma" in fitted or (has_semicolons and has_commas)
        order = DECIMAL_MARK_FORMATS[::-1] if prefer_comma else DECIMAL_MARK_FORMATS
        table_format = min(order, key=lambda candidate: _log10_distance_to_training(texts.values(), candidate))
    formats, examples = dict[int, tuple[str, Numeric]](), dict[str, str]()
    for index, (column, cells) in texts.items():
        column_format = table_format or column.format
        if table_format is None and len(separators[index]) == 1:
            (column_format,) = separators[index]
        if cell := next((cell for cell in cells if _is_read_differently(cell, column_format, column)), ""):
            formats[index] = column_format, column
            rewritten = _rewrite_numbers(np.array([cell], object), *formats[index])
            examples[block.column_name(index)] = f"{cell!r} is {column.to_numeric(rewritten)[0]:.10g}"
    if not formats:
        return NumericConversion()
    first, *others = examples
    more = f" and {len(others)} more" if others else ""
    note = f"numbers have another decimal mark than in training: {first} ({examples[first]}){more}"
    return NumericConversion(formats, (note,))


def _list_distinct_cells(cells: np.ndarray) -> list[str]:
    """List the distinct cells of a column (n,), in order of appearance."""
    return list(dict.fromkeys(cells.tolist()))


def _is_read_differently(cell: str, numeric_format: str, fitted: Numeric) -> bool:
    """Test whether a cell is a number in one format and the fitted unit, but not the same number to the column."""
    value = quantities.parse_numeric(cell, numeric_format, fitted.unit or None)
    return math.isfinite(value) and value != quantities.parse_numeric(cell, fitted.format)


def _log10_distance_to_training(texts: Iterable[tuple[Numeric, list[str]]], numeric_format: str) -> float:
    """Compute the mean difference of log10 of numbers, read in this format, from training; inf without numbers."""
    distances = []
    for column, cells in texts:
        numeric = np.array([quantities.parse_numeric(cell, numeric_format) for cell in cells])
        numeric = numeric[np.isfinite(numeric)]
        if len(numeric):
            magnitude, fitted = math.sqrt(float(np.square(numeric).mean())), math.hypot(column.mean, column.scale)
            distances.append(abs(math.log10(max(magnitude, MIN_NUMBER_MAGNITUDE) / max(fitted, MIN_NUMBER_MAGNITUDE))))
    return sum(distances) / len(distances) if distances else math.inf


def _rewrite_numbers(cells: np.ndarray, numeric_format: str, fitted: Numeric) -> np.ndarray:
    """Rewrite the numbers among text cells (n,) from one format to that of the column; other cells and units stay."""
    converted: dict[str, str] = {}
    for cell in set(cells.tolist()):
        if _is_read_differently(cell, numeric_format, fitted):
            text, unit = repr(quantities.parse_numeric(cell, numeric_format)), split_unit(cell)[1]
            converted[cell] = f"{text.replace('.', ',') if fitted.format == 'comma' else text} {unit}".rstrip()
    return np.array([converted.get(cell, cell) for cell in cells.tolist()], object)
