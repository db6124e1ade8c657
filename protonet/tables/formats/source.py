"""`TableSource`: an open table file of any format, whose rows are read chunk by chunk, and conversions of its cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protonet._text import escape_control_chars, unescape_formula

#: Number of cells that are read at a time.
CELLS_PER_CHUNK = 2**20
#: The format string for the position of a row in messages, for files that have no lines.
DEFAULT_ROW_FORMAT = "row {} (counted from 0)"


class TableChunk(NamedTuple):
    """Consecutive rows of a file, column by column."""

    #: The cells (b,) of each requested column. Text, booleans ("True", "False"), categories and all columns of
    #: delimited text are arrays of objects: str without surrounding spaces, "" if missing. Numbers are integers or
    #: floats of up to 64 bits; if some are missing, they are float64 with NaN. Dates and times are datetime64[us] in
    #: UTC, NaT if missing.
    columns: list[np.ndarray]
    positions: Sequence[int]  #: The position of each row: a line of text, a row of a sheet, or an index from 0.


@dataclass(frozen=True, kw_only=True, eq=False)
class TableSource:
    """An open table file, whose rows can be read once."""

    header: list[str] | None  #: The column names, "" for unnamed ones; None for files without names.
    n_columns: int  #: The number of columns; in files without column names, the label column is not counted.
    read_chunks: Callable[[Sequence[int]], Iterator[TableChunk]]
    """Reads the columns with the given indices, chunk by chunk."""
    #: The format string for the position of a row in messages, such as "line {}".
    position_format: str = DEFAULT_ROW_FORMAT
    #: Notes for the user on how the file is read; more may follow as rows are read.
    notes: list[str] = field(default_factory=list)
    n_rows: int | None = None  #: The number of rows; None if it is unknown before they are read.
    sheet_note: str = ""  #: A phrase for messages with the names of the sheet and of all sheets of a workbook.
    has_semicolons: bool = False  #: Whether semicolons separate cells, as in files with decimal commas.
    encoding: str | None = None  #: The encoding of text that was given or guessed; None for Unicode and other formats.


def rows_per_chunk(n_columns: int) -> int:
    """Return the number of rows of a chunk of so many columns."""
    return max(1, CELLS_PER_CHUNK // max(1, n_columns))


def make_column_reader(
    columns: Sequence[np.ndarray], positions: Sequence[int], step: int | None = None
) -> Callable[[Sequence[int]], Iterator[TableChunk]]:
    """Return the function `TableSource.read_chunks` of columns (n,) in memory, with ``step`` rows per chunk."""

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        n_rows = step or rows_per_chunk(len(columns))
        for start in range(0, len(positions), n_rows):
            rows = slice(start, start + n_rows)
            yield TableChunk([columns[index][rows] for index in indices], positions[rows])

    return read_chunks


def cell_to_text(cell: object) -> str:
    """Convert a cell to stripped text with escaped control characters."""
    return escape_control_chars(str(cell).strip())


def make_text_array(cells: Iterable[str], n_cells: int) -> np.ndarray:
    """Convert ``n_cells`` strings to an array (n_cells,) of objects."""
    return np.fromiter(cells, object, n_cells)


def to_native_dtype(values: np.ndarray) -> np.ndarray:
    """Convert numbers or booleans to numbers of at most 64 bits in native byte order, without a copy if possible."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    return values.astype(np.float64 if values.dtype.itemsize > 8 else values.dtype.newbyteorder("="), copy=False)


def object_to_text(cell: object) -> str:
    """Convert a cell to text, None to ""; formulas that this package escaped are unescaped."""
    return "" if cell is None else unescape_formula(cell_to_text(cell))


def convert_objects(cells: Sequence[object]) -> np.ndarray:
    """Convert a list of n Python objects, None if missing, to an array (n,) of a type of `TableChunk.columns`."""
    types = {type(cell) for cell in cells} - {type(None)}
    if types and types <= {int, float}:
        integral = all(isinstance(cell, int) and abs(cell) < 2**63 for cell in cells)
        with suppress(OverflowError):  # of an integer beyond the range of numbers
            return np.array(cells, np.int64 if integral else np.float64)  # None becomes NaN
    if timedelta in types and types <= {timedelta, time}:  # openpyxl returns durations below a day as times
        return np.array([_time_to_seconds(cell) for cell in cells])
    if types and types <= {datetime, date}:
        return np.array(cells, "datetime64[us]")  # None becomes NaT
    return make_text_array(map(object_to_text, cells), len(cells))


def _time_to_seconds(cell: object) -> float:
    """Convert a duration, or a time of day, to seconds; other cells become NaN."""
    if isinstance(cell, time):
        cell = timedelta(0, cell.second, cell.microsecond, 0, cell.minute, cell.hour)
    return cell.total_seconds() if isinstance(cell, timedelta) else math.nan


def convert_command(path: Path, reader: str) -> str:
    """Format the command that writes a file as CSV, given the function of pandas that reads it."""
    read = f"pandas.{reader}({str(path)!r})"
    return f'python -c "import pandas; {read}.to_csv({str(path.with_suffix(".csv"))!r}, index=False)"'
