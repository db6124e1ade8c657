"""Read tables chunk by chunk: delimited text, NPZ, NPY, Parquet, Excel, and folders of pictures."""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protonet._text import escape_control_chars, normalize_spelling, plural, shorten_list, unescape_formula
from protonet.embeddings.pictures.reading import detect_broken_pictures, is_picture_path, list_pictures, path_to_text
from protonet.errors import UserError, optional_packages, raise_input_error, raise_missing_file
from protonet.tables import delimited
from protonet.tables.arrays import ARRAY_READ_ERRORS, decode_labels, memory_map_npy, read_arrays
from protonet.tables.excel import (
    EXCEL_READ_ERRORS,
    FORMULA_WITHOUT_VALUE,
    check_workbook_parts,
    fill_merged_cells,
    has_content,
    iterate_shown_rows,
    read_excel_rows,
)

#: Number of cells that are read at a time.
CELLS_PER_CHUNK = 2**20
#: Suffixes of files of delimited text. A second suffix .gz means that the file is compressed.
TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".data", ".dat")
DELIMITED_SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES))
TABLE_SUFFIXES = (*DELIMITED_SUFFIXES, ".npz", ".npy", ".parquet", ".xlsx")
#: The format string for the position of a row in messages, for files that have no lines.
DEFAULT_ROW_FORMAT = "row {} (counted from 0)"
#: Name of the column of paths in tables of pictures, and number of pictures that are read at a time.
PICTURE_COLUMN, PICTURES_PER_CHUNK = "picture", 256


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


def open_table_source(
    path: Path,
    labels: Path | None = None,
    *,
    label: str = "label",
    require_labels: bool = False,
    skip_broken: bool = False,
    names: Collection[str] = (),
    sheet: str | None = None,
    text_column: str = "text",
    has_header: bool = True,
) -> TableSource:
    """Open a table file in the format that its suffix names, and read its header.

    Args:
        path: The file; "-" is delimited text from the standard input. A picture, or a folder of pictures, is opened as
            a table of paths.
        labels: The NPY file of labels, if ``path`` is an NPY file of rows.
        label: The name of the label column of a table of pictures with one folder per class.
        require_labels: Whether labels are required in arrays and folders of pictures.
        skip_broken: Whether pictures that cannot be decoded are skipped.
        names: Names of expected columns, which help to detect header and separator.
        sheet: The name of the sheet of an Excel workbook; None for the first sheet.
        text_column: The name of the only column of a list of texts: a .txt file with one text per line and no header.
        has_header: Whether the first row of delimited text names the columns; see `read_delimited_rows`.

    Raises:
        InputError: There is no such file, its suffix is not supported, or it cannot be read.
    """
    name = path.name.lower()
    if sheet is not None and not name.endswith(".xlsx"):
        raise_input_error("sheet", "come with an Excel workbook", path, "Leave it out.")
    is_delimited = name.endswith(DELIMITED_SUFFIXES) or path == Path("-")
    if not has_header and not is_delimited:
        raise_input_error("no_header", "come with delimited text, such as CSV", path, "Leave it out.")
    if is_picture_path(path):
        return open_picture_table(path, label, require_labels=require_labels, skip_broken=skip_broken)
    if not path.suffix and path != Path("-") and not path.exists():
        raise_input_error("path", "be a table or a folder that exists", path, "Pass another path.")
    if path != Path("-") and not name.endswith(TABLE_SUFFIXES):
        raise_input_error("path", f"end in {', '.join(TABLE_SUFFIXES)}", path, "Save the table as one of these.")
    if name.endswith((".npz", ".npy")):
        return open_array_table(path, labels, require_labels=require_labels)
    if name.endswith(".parquet"):
        return open_parquet(path)
    if name.endswith(".xlsx"):
        return open_excel(path, names, sheet)
    is_text = has_header and name.endswith((".txt", ".txt.gz"))
    return open_csv(path, names, text_column if is_text else None, has_header=has_header)


def open_picture_table(path: Path, label: str, *, require_labels: bool, skip_broken: bool) -> TableSource:
    """Open a picture or a folder of pictures as a table of paths, with the column ``label`` for class folders."""
    paths, classes, notes = list_pictures(path, require_labels=require_labels)
    if skip_broken:
        broken = detect_broken_pictures(paths)
        skipped = [path_to_text(picture) for picture, is_broken in zip(paths, broken, strict=True) if is_broken]
        readable = [index for index, is_broken in enumerate(broken) if not is_broken]
        if skipped:
            notes.append(f"{len(skipped)} of {len(paths)} pictures cannot be read: {shorten_list(skipped)}")
        if not readable:
            got = f"none of {len(paths)} in {path}"
            raise_input_error("path", "hold pictures that can be read", got, "Check the files.")
        if classes is not None:
            empty = set(classes) - {classes[index] for index in readable} if require_labels else set()
            if empty:
                remedy = "Add one, or remove the folder."
                got = f"broken ones alone in {path / min(empty)}"
                raise_input_error("path", "have a picture in every class folder", got, remedy)
            classes = [classes[index] for index in readable]
        paths = [paths[index] for index in readable]
    columns = [list(map(path_to_text, paths))] + ([] if classes is None else [classes])

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        for start in range(0, len(paths), PICTURES_PER_CHUNK):
            rows = range(start, min(start + PICTURES_PER_CHUNK, len(paths)))
            cells = [make_text_array(columns[index][rows.start : rows.stop], len(rows)) for index in indices]
            yield TableChunk(cells, rows)

    header = [PICTURE_COLUMN, label][: len(columns)]
    return TableSource(
        header=header,
        n_columns=len(header),
        position_format="picture {} (counted from 0)",
        read_chunks=read_chunks,
        notes=notes,
        n_rows=len(paths),
    )


def open_csv(
    path: Path, names: Collection[str] = (), text_column: str | None = None, *, has_header: bool = True
) -> TableSource:
    """Open a file of delimited text as a table; the arguments are those of `open_table_source`."""
    notes: list[str] = []
    lines = delimited.read_delimited_rows(path, notes, names=names, text_column=text_column, has_header=has_header)
    header = list(map(normalize_spelling, next(lines, (0, []))[1]))
    if not header:
        raise_input_error("path", "have a header and rows", f"{path}, which is empty", "Pass another file.")

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        step = max(1, CELLS_PER_CHUNK // (4 * max(1, len(header))))  # text takes more memory than numbers
        while numbered := list(islice(lines, step)):
            positions, rows = zip(*numbered, strict=True)
            cells = list(zip(*rows, strict=True))
            yield TableChunk([make_text_array(map(str.strip, cells[index]), len(rows)) for index in indices], positions)

    semicolons = delimited.DELIMITER_NOTE.format(delimited.DELIMITERS[";"]) in notes
    return TableSource(
        header=header,
        n_columns=len(header),
        position_format="line {}",
        read_chunks=read_chunks,
        notes=notes,
        has_semicolons=semicolons,
    )


def cell_to_text(cell: object) -> str:
    """Convert a cell to stripped text with escaped control characters."""
    return escape_control_chars(str(cell).strip())


def make_text_array(cells: Iterable[str], n_cells: int) -> np.ndarray:
    """Convert ``n_cells`` strings to an array (n_cells,) of objects."""
    return np.fromiter(cells, object, n_cells)


def open_array_table(path: Path, labels: Path | None, *, require_labels: bool) -> TableSource:
    """Open an NPZ file of ``x`` and ``y``, or NPY files of rows and of labels; the label column is the last one."""
    if path.suffix.lower() == ".npz":
        arrays = read_arrays(path, {"x", "y"} if require_labels else {"x"})
        y = arrays.get("y")
    else:
        y = None if labels is None else decode_labels("labels", memory_map_npy("labels", labels))
        arrays = {}

    def load() -> np.ndarray:
        return arrays["x"] if arrays else memory_map_npy("path", path)

    rows = load()
    if rows.dtype.kind not in "biuf" or rows.ndim < 2:
        got = f"{rows.dtype} {rows.shape} in {path}"
        raise_input_error("path", "hold real numbers of shape (n, dim)", got, "Save features as floats.")
    n, width = len(rows), math.prod(rows.shape[1:])
    if y is not None and len(y) != n:
        raise_input_error("path", "have one label per row", f"{len(y)} for {n} rows", "Give both the same length.")
    step = max(1, CELLS_PER_CHUNK // max(1, width))

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        for start in range(0, n, step):
            x = load()[start : start + step]  # mapped again each time, which frees the memory of the last chunk
            x = to_native_dtype(x.reshape(len(x), width))
            extra = [] if y is None else [_to_label_column(y[start : start + step])]
            columns = [x[:, index] if index < width else extra[index - width] for index in indices]
            yield TableChunk(columns, range(start, start + len(x)))

    return TableSource(header=None, n_columns=width, read_chunks=read_chunks, n_rows=n)


def to_native_dtype(values: np.ndarray) -> np.ndarray:
    """Convert numbers or booleans to numbers of at most 64 bits in native byte order, without a copy if possible."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    return values.astype(np.float64 if values.dtype.itemsize > 8 else values.dtype.newbyteorder("="), copy=False)


def _to_label_column(labels: np.ndarray) -> np.ndarray:
    """Convert integer labels (n,) to native byte order, and other labels to text."""
    if labels.dtype.kind in "iu":
        return to_native_dtype(labels)
    return make_text_array(map(cell_to_text, labels.astype(str).tolist()), len(labels))


def open_parquet(path: Path) -> TableSource:
    """Open a Parquet file as a table; lists of equally many numbers, such as embeddings, become one column per number.

    The unnamed index of a data frame becomes an unnamed column.
    """
    with optional_packages("parquet"):
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - optional

    @contextmanager
    def report_errors(subject: object) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError):
            raise_missing_file(path)
        except (*ARRAY_READ_ERRORS, ArrowException) as error:
            got = f"{subject} ({type(error).__name__})"
            remedy = "Leave out other columns; pandas writes such files: to_parquet(path)."
            raise_input_error(
                "path", "be a Parquet file of numbers, lists of equally many numbers and text", got, remedy
            )

    with report_errors(path):
        file = parquet.ParquetFile(path, buffer_size=2**20)
        fields = list(file.schema_arrow)
        widths = [_find_list_width(file, field) for field in fields]
    distinct = len({field.name for field in fields}) == len(fields)
    # The field of each column, and its index in the lists of the field.
    columns_of = [(index, element) for index, width in enumerate(widths) for element in range(width or 1)]

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        used = list(dict.fromkeys(columns_of[index][0] for index in indices))
        start, names = 0, [fields[index].name for index in used]
        with report_errors(path):
            step = max(1, CELLS_PER_CHUNK // max(1, len(columns_of)))
            batches = file.iter_batches(step, columns=names if distinct and names else None)
        while True:
            with report_errors(path):
                batch = next(batches, None)
            if batch is None:
                return
            cells = dict[int, Sequence[np.ndarray] | np.ndarray]()
            for index in used:
                values, width = batch.column(fields[index].name if distinct else index), widths[index]
                with report_errors(f"{values.type} in column {fields[index].name}"):
                    cells[index] = [arrow_to_numpy(values)] if width is None else _split_lists(values, width)
            columns = [cells[field][element] for field, element in (columns_of[index] for index in indices)]
            yield TableChunk(columns, range(start, start + len(batch)))
            start += len(batch)

    names = ["" if re.fullmatch(r"__index_level_\d+__", field.name) else field.name for field in fields]
    header = [
        normalize_spelling(names[index] if widths[index] is None else f"{names[index]}_{element}")
        for index, element in columns_of
    ]
    return TableSource(header=header, n_columns=len(header), read_chunks=read_chunks, n_rows=file.metadata.num_rows)


def _find_list_width(file: Any, field: Any) -> int | None:
    """Find how many numbers the first list in a field of a Parquet file has; None for fields of other types."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    dtype, types = field.type, pa.types
    if not (types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)):
        return None
    if not (types.is_floating(dtype.value_type) or types.is_integer(dtype.value_type)):
        return None
    if types.is_fixed_size_list(dtype):
        return int(dtype.list_size) or None
    rows = (batch.column(0)[0] for batch in file.iter_batches(1, columns=[field.name]))
    return len(next((row for row in rows if row.is_valid), ())) or None


def _split_lists(values: Any, width: int) -> np.ndarray:
    """Convert an Arrow array (b,) of lists of ``width`` numbers to numbers (width, b); missing lists become NaN.

    Raises an ArrowException if a list has another length.
    """
    import pyarrow as pa  # noqa: PLC0415 - optional

    if (values.drop_null().value_lengths().to_numpy() != width).any():
        raise pa.ArrowInvalid("lists of different lengths")
    numbers = arrow_to_numpy(values.flatten()).reshape(-1, width)  # without missing lists
    if values.null_count:
        present, numbers = numbers, np.full((len(values), width), np.nan)
        numbers[values.is_valid().to_numpy(zero_copy_only=False)] = present
    return np.ascontiguousarray(numbers.T)


def arrow_to_numpy(values: Any) -> np.ndarray:
    """Convert an Arrow array (b,) to a type of `TableChunk.columns`; raise an ArrowException for nested types."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    types, dtype = pa.types, values.type
    safe = getattr(dtype, "unit", "") != "ns"  # nanoseconds are rounded; otherwise lost digits are an error
    if isinstance(values, pa.ExtensionArray):
        return arrow_to_numpy(values.storage)
    if types.is_dictionary(dtype):
        return _decode_dictionary(map(str, arrow_to_numpy(values.dictionary).tolist()), values.indices)
    if types.is_null(dtype):
        return make_text_array([""] * len(values), len(values))
    if types.is_boolean(dtype):
        return _decode_dictionary(["False", "True"], values.cast(pa.int8()))
    if types.is_binary(dtype) or types.is_large_binary(dtype) or types.is_fixed_size_binary(dtype):
        dtype, values = pa.string(), values.cast(pa.binary()).cast(pa.string())
    if types.is_string(dtype) or types.is_large_string(dtype) or dtype == pa.string_view():
        encoded = values.dictionary_encode()  # creates each distinct text once
        return _decode_dictionary(map(cell_to_text, encoded.dictionary.to_pylist()), encoded.indices)
    if (types.is_integer(dtype) and values.null_count) or types.is_decimal(dtype):
        return _arrow_numbers_to_numpy(values.cast(pa.float64(), safe=False))
    if types.is_integer(dtype) or types.is_floating(dtype):
        return _arrow_numbers_to_numpy(values)
    if types.is_duration(dtype):
        microseconds = values.cast(pa.duration("us"), safe=safe).cast(pa.int64())
        return _arrow_numbers_to_numpy(microseconds.cast(pa.float64())) / 1e6
    if types.is_time(dtype):
        values = values.cast(pa.time64("us"), safe=safe).cast(pa.int64())
    elif not types.is_timestamp(dtype) and not types.is_date(dtype):
        raise pa.ArrowTypeError(f"{dtype} is nested")
    return _arrow_numbers_to_numpy(values.cast(pa.timestamp("us"), safe=safe))


def _decode_dictionary(texts: Iterable[str], indices: Any) -> np.ndarray:
    """Look up Arrow indices (b,) in a list of texts; return the texts (b,), "" for a null index."""
    dictionary = [*texts, ""]
    filled = indices.cast("int64").fill_null(len(dictionary) - 1)
    return np.asarray(make_text_array(dictionary, len(dictionary))[_arrow_numbers_to_numpy(filled)])


def _arrow_numbers_to_numpy(values: Any) -> np.ndarray:
    """Convert an Arrow array (b,) of numbers or times to a NumPy array; nulls become NaN or NaT."""
    return np.asarray(values.to_numpy(zero_copy_only=False))


def open_excel(path: Path, names: Collection[str] = (), sheet: str | None = None) -> TableSource:
    """Open a sheet of an Excel workbook as a table; its header is located as in delimited text."""
    with optional_packages("excel"):
        from openpyxl import load_workbook  # noqa: PLC0415 - optional
        from openpyxl.utils.exceptions import InvalidFileException  # noqa: PLC0415

    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about styles and the like, which tables do not need
            check_workbook_parts(file)
            book = load_workbook(file, read_only=True, data_only=True, keep_links=False)
            sheets = {worksheet.title: worksheet for worksheet in book.worksheets}
            title = next(iter(sheets)) if sheet is None else sheet
            lines: list[Sequence[object]] = []
            notes: list[str] = []
            if title in sheets:
                sheets[title].reset_dimensions()  # some programs write wrong ones
                with sheets[title]._get_source() as source:  # openpyxl reads merged cells with all styles only: slow
                    xml = source.read()
                max_cells = max(2**20, 4 * len(xml))  # a filled cell takes 30 bytes
                lines = read_excel_rows(iterate_shown_rows(sheets[title]), max_cells)
                notes += fill_merged_cells(lines, xml, max_cells)
                if n_formulas := len(FORMULA_WITHOUT_VALUE.findall(xml)):
                    notes.append(f"{plural(n_formulas, 'formula')} without a value: save the workbook in a spreadsheet")
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except UserError:
        raise
    except (*ARRAY_READ_ERRORS, *EXCEL_READ_ERRORS, InvalidFileException) as error:
        got = f"{path} ({type(error).__name__})"
        raise_input_error("path", "be an Excel workbook that can be read", got, "Save the sheet as CSV.")
    if title not in sheets:
        similar = closest_match(title, list(sheets))
        remedy = f"{'' if similar is None else f'Did you mean {similar!r}? '}It has {', '.join(map(repr, sheets))}."
        raise_input_error("sheet", f"name a sheet of {path}", repr(title), remedy)
    filled = [index for index, line in enumerate(lines) if any(map(has_content, line))]  # rows with content, from 0
    first_rows = filled[: delimited.N_LAYOUT_DETECTION_ROWS]
    sample = [[_excel_cell_to_text(cell) for cell in lines[index]] for index in first_rows]
    max_width = max(map(len, sample), default=0)
    sample = [cells + [""] * (max_width - len(cells)) for cells in sample]
    header_index = delimited.locate_header(sample, names)
    first, end = (filled[header_index], filled[-1] + 1) if filled else (0, 0)
    others = ", ".join(repr(name) for name in sheets if name != title)
    sheet_note = f"sheet {title!r}; `sheet` names another one: {others}" if others else ""
    notes += [sheet_note] * bool(others)
    delimited.add_title_notes(notes, sample[:header_index])
    n_blank = len(lines) - end if filled else 0
    notes += [f"{n_blank} blank row{'s' if n_blank > 1 else ''} at the end skipped"] * (n_blank > 0)
    rows = lines[first:end]
    width = max((index for row in rows for index, cell in enumerate(row, 1) if _has_valid_value(cell)), default=0)
    if width > 1 and rows[0] in rows[1:]:
        got = f"the header again in row {first + 2 + rows[1:].index(rows[0])} of {path}, sheet {title!r}"
        raise_input_error("path", "hold one table", got, "Save each table in its own sheet.")
    transposed = list(islice(zip_longest(*rows), width))
    header = [normalize_spelling(_excel_cell_to_text(cells[0])) for cells in transposed]
    valid = ([cell if _has_valid_value(cell) else None for cell in cells[1:]] for cells in transposed)
    columns = list(map(convert_excel_column, valid))

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        step = max(1, CELLS_PER_CHUNK // max(1, width))
        for start in range(0, len(rows) - 1, step):
            positions = range(first + 2 + start, min(first + 2 + start + step, end + 1))  # Excel counts from 1
            yield TableChunk([columns[index][start : start + step] for index in indices], positions)

    return TableSource(
        header=header,
        n_columns=width,
        position_format="row {}",
        read_chunks=read_chunks,
        notes=notes,
        n_rows=max(0, len(rows) - 1),
        sheet_note=f" ({sheet_note})" if others else "",
    )


def closest_match(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate that is most similar to a name, ignoring case; None if no candidate is similar."""
    by_lower = {candidate.lower(): candidate for candidate in reversed(candidates)}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def _has_valid_value(cell: object) -> bool:
    """Test whether an Excel cell has content other than an error value."""
    return has_content(cell) and not (isinstance(cell, str) and cell.strip().lower() in delimited.SPREADSHEET_ERRORS)


def _excel_cell_to_text(cell: object) -> str:
    """Convert an Excel cell to text, None to ""; formulas that this package escaped are unescaped."""
    return "" if cell is None else unescape_formula(cell_to_text(cell))


def _excel_time_to_seconds(cell: object) -> float:
    """Convert a duration, or a time of day, in an Excel cell to seconds; other cells become NaN."""
    if isinstance(cell, time):
        cell = timedelta(0, cell.second, cell.microsecond, 0, cell.minute, cell.hour)
    return cell.total_seconds() if isinstance(cell, timedelta) else math.nan


def convert_excel_column(cells: Sequence[object]) -> np.ndarray:
    """Convert a list of n Excel cells, None if missing, to an array (n,) of a type of `TableChunk.columns`."""
    types = {type(cell) for cell in cells} - {type(None)}
    if types and types <= {int, float}:
        integral = all(isinstance(cell, int) and abs(cell) < 2**63 for cell in cells)
        return np.array(cells, np.int64 if integral else np.float64)  # None becomes NaN
    if timedelta in types and types <= {timedelta, time}:  # openpyxl returns durations below a day as times
        return np.array([_excel_time_to_seconds(cell) for cell in cells])
    if types and types <= {datetime, date}:
        return np.array(cells, "datetime64[us]")  # None becomes NaT
    return make_text_array(map(_excel_cell_to_text, cells), len(cells))
