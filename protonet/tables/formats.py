"""The formats of a person's table: what each file holds, block by block, faults and all."""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protonet._text import escape_control_chars, unescape_formula
from protonet.errors import optional_packages, raise_input_error, raise_missing_file
from protonet.representations.pictures.images import path_to_text
from protonet.representations.pictures.reading import MOST_NAMED, are_pictures, find_broken, list_pictures
from protonet.tables.arrays import UNREADABLE, check_names, read_arrays
from protonet.tables.delimited import DELIMITERS, ERRORS, SAMPLE, SEPARATED, find_header, note_titles, read_rows

#: Cells that are read at a time.
CELLS = 2**20
#: What the name of a table of text may end in; each may be compressed as well (.csv.gz).
TEXTS = (".csv", ".tsv", ".txt")
#: What a file's name may end in.
SUFFIXES = (*TEXTS, *(f"{suffix}.gz" for suffix in TEXTS), ".npz", ".npy", ".parquet", ".xlsx")
COUNTED = "row {} (counted from 0)"
#: The column of the paths of pictures in folders, and how many of them are a block.
PICTURE, PICTURES_AT_ONCE = "picture", 256


class Raw(NamedTuple):
    """Some rows as a file has them."""

    #: The columns asked for, in that order, each (b,). Text is objects of str without spaces at its ends, "" for none;
    #: so are booleans ("True", "False"), categories, and each column of a table of text. Numbers are integers or
    #: floating of up to 64 bits, with gaps float64 and NaN; dates and times datetime64[us] in UTC, NaT for none.
    columns: list[np.ndarray]
    rows: Sequence[int]  #: Where in the file each row is: the line of text, counted from 0 for others.


class Source(NamedTuple):
    """An open file."""

    header: list[str] | None  #: The names of its columns, "" for none, or None if it has features alone.
    width: int  #: The number of columns.
    place: str  #: What a message calls a row.
    read: Callable[[Sequence[int]], Iterator[Raw]]  #: Returns blocks of rows, with the columns of these numbers. Once.
    notes: list[str]  #: What a person should be told about how the file was read; it may grow as rows are read.
    rows: int | None = None  #: How many there are; None where only reading it tells.
    part: str = ""  #: What of the file it is, where that holds more: its sheet, and the others.
    semicolons: bool = False  #: Whether semicolons separate cells, as where a comma is the decimal mark.


def open_source(
    path: Path,
    labels: Path | None = None,
    *,
    label: str = "label",
    labelled: bool = False,
    skip_broken: bool = False,
    names: Collection[str] = (),
    sheet: str | None = None,
) -> Source:
    """Open a file by what its name ends in; "-" is a table of text from the standard input.

    A folder of pictures, or one picture, is a table of their paths.

    Args:
        path: The file.
        labels: An NPY file of the classes (n,), beside one of rows.
        label: What the column of the classes of pictures in folders is called.
        labelled: Must an NPZ file or a folder hold classes?
        skip_broken: Leave out pictures that cannot be decoded.
        names: Columns that the table should have, by which its header and separator are found.
        sheet: Of an Excel workbook; None for the first.

    Raises:
        MissingPackageError: The file is Parquet or Excel, and the package that reads it is missing.
        InputError: There is no such file, or it cannot be read; the message says where.
    """
    name = path.name.lower()
    if sheet is not None and not name.endswith(".xlsx"):
        raise_input_error("--sheet", "come with an Excel workbook", path, "Leave it out.")
    if are_pictures(path):
        return open_pictures(path, label, labelled=labelled, skip_broken=skip_broken)
    if not path.suffix and path != Path("-") and not path.exists():
        raise_input_error("path", "be a table or a folder that exists", path, "Pass another path.")
    if path != Path("-") and not name.endswith(SUFFIXES):
        raise_input_error("path", f"end in {', '.join(SUFFIXES)}", path, "Save the table as one of these.")
    if name.endswith((".npz", ".npy")):
        return open_arrays(path, labels, labelled=labelled)
    if name.endswith(".parquet"):
        return open_parquet(path)
    return open_excel(path, names, sheet) if name.endswith(".xlsx") else open_csv(path, names)


def open_pictures(path: Path, label: str, *, labelled: bool, skip_broken: bool) -> Source:
    """Open a folder of pictures, or one picture: a column of their paths and, if there are classes, one of these."""
    paths, classes, notes = list_pictures(path, labelled=labelled)
    if skip_broken:
        broken = find_broken(paths)
        lost = [path_to_text(each) for each, own in zip(paths, broken, strict=True) if own]
        kept = [number for number, own in enumerate(broken) if not own]
        if lost:
            more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
            notes.append(f"{len(lost)} of {len(paths)} pictures cannot be read: {', '.join(lost[:MOST_NAMED])}{more}")
        if not kept:
            raise_input_error(
                "path", "hold pictures that can be read", f"none of {len(paths)} in {path}", "Look at them."
            )
        if classes is not None:
            gone = set(classes) - {classes[number] for number in kept} if labelled else set()
            if gone:
                remedy = "Add one, or remove the folder."
                got = f"broken ones alone in {path / min(gone)}"
                raise_input_error("path", "have a picture in every class folder", got, remedy)
            classes = [classes[number] for number in kept]
        paths = [paths[number] for number in kept]

    columns = [list(map(path_to_text, paths))] + ([] if classes is None else [classes])

    def read(places: Sequence[int]) -> Iterator[Raw]:
        for first in range(0, len(paths), PICTURES_AT_ONCE):
            rows = range(first, min(first + PICTURES_AT_ONCE, len(paths)))
            yield Raw([to_text(columns[at][rows.start : rows.stop], len(rows)) for at in places], rows)

    header = [PICTURE, label][: len(columns)]
    return Source(header, len(header), "picture {} (counted from 0)", read, notes, len(paths))


def open_csv(path: Path, names: Collection[str] = ()) -> Source:
    """Open a table of text, as `read_rows` reads it."""
    notes: list[str] = []
    lines = read_rows(path, notes, names=names)
    header = [cell.strip() for cell in next(lines, (0, []))[1]]

    def read(columns: Sequence[int]) -> Iterator[Raw]:
        while block := list(islice(lines, max(1, CELLS // (4 * max(1, len(header)))))):  # text takes more memory
            numbers, rows = zip(*block, strict=True)
            cells = list(zip(*rows, strict=True))
            yield Raw([to_text(map(str.strip, cells[column]), len(rows)) for column in columns], numbers)

    semicolons = SEPARATED.format(DELIMITERS[";"]) in notes
    return Source(header, len(header), "line {}", read, notes, semicolons=semicolons)


def read_text(cell: object) -> str:
    """Return a cell as text without spaces around it, and without control characters."""
    return escape_control_chars(str(cell).strip())


def to_text(cells: Iterable[str], n: int) -> np.ndarray:
    """Return n strings as objects (n,)."""
    return np.fromiter(cells, object, n)


def open_arrays(path: Path, labels: Path | None, *, labelled: bool) -> Source:
    """Open an NPZ file of ``x`` and ``y``, or an NPY file of rows and another one of their classes.

    Classes, where they are read, are a further column after the features.
    """
    if path.suffix.lower() == ".npz":
        arrays = read_arrays(path, {"x", "y"} if labelled else {"x"})
        names = arrays.get("y")
    else:
        names = None if labels is None else check_names("--labels", map_array("--labels", labels))
        arrays = {}

    def load() -> np.ndarray:
        return arrays["x"] if arrays else map_array("path", path)

    rows = load()
    if rows.dtype.kind not in "biuf" or rows.ndim < 2:
        got = f"{rows.dtype} {rows.shape} in {path}"
        raise_input_error("path", "hold real numbers of shape (n, dim)", got, "Save features as floats.")
    n, width = len(rows), math.prod(rows.shape[1:])
    if names is not None and len(names) != n:
        raise_input_error("path", "have one label per row", f"{len(names)} for {n} rows", "Give both the same length.")
    step = max(1, CELLS // max(1, width))

    def read(columns: Sequence[int]) -> Iterator[Raw]:
        for first in range(0, n, step):
            x = load()[first : first + step]  # mapped anew each time: the pages of the last block are given back
            x = to_numbers(x.reshape(len(x), width))
            taken = [] if names is None else [to_labels(names[first : first + step])]
            chosen = [x[:, column] if column < width else taken[column - width] for column in columns]
            yield Raw(chosen, range(first, first + len(x)))

    return Source(None, width, COUNTED, read, [], n)


def to_numbers(values: np.ndarray) -> np.ndarray:
    """Return numbers as this machine has them, of at most 64 bits; the same memory where they are so."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    return values.astype(np.float64 if values.dtype.itemsize > 8 else values.dtype.newbyteorder("="), copy=False)


def to_labels(names: np.ndarray) -> np.ndarray:
    """Return integers as they are, booleans and strings as objects of str."""
    return (
        to_numbers(names)
        if names.dtype.kind in "iu"
        else to_text(map(read_text, names.astype(str).tolist()), len(names))
    )


def map_array(argument: str, path: Path) -> np.ndarray:
    """Return the array of an NPY file, which stays on disk."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a header that Python 2 wrote
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("an archive")
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path, argument=argument)
    except (ValueError, *UNREADABLE) as error:
        got = f"{path} ({type(error).__name__})"
        raise_input_error(
            argument, "be an NPY file of numbers or strings", got, "Save it with numpy.save(path, values)."
        )
    return array


def open_parquet(path: Path) -> Source:
    """Open a Parquet file. The index of a data frame without a name is a column without a name."""
    with optional_packages("parquet"):
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - optional

    @contextmanager
    def one_line(what: object) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError):
            raise_missing_file(path)
        except (ValueError, *UNREADABLE, ArrowException) as error:
            remedy = "Leave that column out; pandas writes such files: to_parquet(path)."
            raise_input_error(
                "path", "be a Parquet file of numbers and text", f"{what} ({type(error).__name__})", remedy
            )

    with one_line(path):
        file = parquet.ParquetFile(path, buffer_size=2**20)
        header = list(file.schema_arrow.names)
    distinct = len(set(header)) == len(header)

    def read(columns: Sequence[int]) -> Iterator[Raw]:
        first, places = 0, dict.fromkeys(header[column] for column in columns)
        with one_line(path):
            size = max(1, CELLS // max(1, len(header)))
            batches = file.iter_batches(size, columns=list(places) if distinct and places else None)
        while True:
            with one_line(path):
                batch = next(batches, None)
            if batch is None:
                return
            taken = []
            for column in columns:
                values = batch.column(header[column] if distinct else column)
                with one_line(f"{values.type} in column {header[column]}"):
                    taken.append(from_arrow(values))
            yield Raw(taken, range(first, first + len(batch)))
            first += len(batch)

    names = ["" if re.fullmatch(r"__index_level_\d+__", name) else name.strip() for name in header]
    return Source(names, len(header), COUNTED, read, [], file.metadata.num_rows)


def from_arrow(values: Any) -> np.ndarray:
    """Return an Arrow array (b,) as `Raw` has it; raise an ArrowException for what is neither number, date nor text."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    kinds, kind = pa.types, values.type
    safe = getattr(kind, "unit", "") != "ns"  # else an error where microseconds are not enough
    if isinstance(values, pa.ExtensionArray):
        return from_arrow(values.storage)
    if kinds.is_dictionary(kind):
        return to_shared(map(str, from_arrow(values.dictionary).tolist()), values.indices)
    if kinds.is_null(kind):
        return to_text([""] * len(values), len(values))
    if kinds.is_boolean(kind):
        return to_shared(["False", "True"], values.cast(pa.int8()))
    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind):
        kind, values = pa.string(), values.cast(pa.binary()).cast(pa.string())
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kind == pa.string_view():
        found = values.dictionary_encode()  # each text is made once, and rows share it
        return to_shared(map(read_text, found.dictionary.to_pylist()), found.indices)
    if (kinds.is_integer(kind) and values.null_count) or kinds.is_decimal(kind):
        return to_plain(values.cast(pa.float64(), safe=False))
    if kinds.is_integer(kind) or kinds.is_floating(kind):
        return to_plain(values)
    if kinds.is_duration(kind):
        return to_plain(values.cast(pa.duration("us"), safe=safe).cast(pa.int64()).cast(pa.float64())) / 1e6
    if kinds.is_time(kind):
        values = values.cast(pa.time64("us"), safe=safe).cast(pa.int64())
    elif not kinds.is_timestamp(kind) and not kinds.is_date(kind):
        raise pa.ArrowTypeError(f"{kind} is nested")
    return to_plain(values.cast(pa.timestamp("us"), safe=safe))


def to_shared(texts: Iterable[str], places: Any) -> np.ndarray:
    """Return the texts of some places (b,) among all, "" where the place is null."""
    known = [*texts, ""]
    at = places.cast("int64").fill_null(len(known) - 1)
    return np.asarray(to_text(known, len(known))[to_plain(at)])


def to_plain(values: Any) -> np.ndarray:
    """Return an Arrow array (b,) as numpy has it, nulls as NaN or NaT."""
    return np.asarray(values.to_numpy(zero_copy_only=False))


def open_excel(path: Path, names: Collection[str] = (), sheet: str | None = None) -> Source:
    """Open a sheet of an Excel workbook, at most 2^20 rows, which are read at once.

    Its header is found as that of a table of text; each row below it is one, up to the last with a cell.
    """
    with optional_packages("excel"):
        from openpyxl import load_workbook  # noqa: PLC0415 - optional
        from openpyxl.utils.exceptions import InvalidFileException  # noqa: PLC0415

    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of styles and the like, which no table needs
            book = load_workbook(file, read_only=True, data_only=True)
            sheets = {each.title: each for each in book.worksheets}
            chosen = next(iter(sheets)) if sheet is None else sheet
            lines: list[tuple[object, ...]] = []
            if chosen in sheets:
                sheets[chosen].reset_dimensions()  # some programs write wrong ones
                lines = list(sheets[chosen].iter_rows(values_only=True))
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except (ValueError, AttributeError, AssertionError, InvalidFileException, StopIteration, *UNREADABLE) as error:
        got = f"{path} ({type(error).__name__})"
        raise_input_error("path", "be an Excel workbook that can be read", got, "Save the sheet as CSV.")
    if chosen not in sheets:
        near = find_near(chosen, list(sheets))
        meant = "" if near is None else f"Did you mean {near!r}? "
        raise_input_error(
            "--sheet", f"name a sheet of {path}", repr(chosen), f"{meant}It has {', '.join(map(repr, sheets))}."
        )
    places = [at for at, line in enumerate(lines) if any(map(has_content, line))]  # from 0, those of rows with cells
    tops = [[read_cell(cell) for cell in lines[at]] for at in places[:SAMPLE]]
    most = max(map(len, tops), default=0)
    tops = [cells + [""] * (most - len(cells)) for cells in tops]
    top = find_header(tops, names)
    first, end = (places[top], places[-1] + 1) if places else (0, 0)
    notes: list[str] = []
    if len(sheets) > 1:
        others = ", ".join(repr(each) for each in sheets if each != chosen)
        notes.append(f"sheet {chosen!r} of {len(sheets)}; --sheet names another one: {others}")
    note_titles(notes, tops[:top])
    n_blank = len(lines) - end if places else 0
    notes += [f"{n_blank} blank row{'s' if n_blank > 1 else ''} at the end left out"] * (n_blank > 0)
    rows = lines[first:end]
    width = max((at for row in rows for at, cell in enumerate(row, 1) if is_cell(cell)), default=0)
    padded = [[*row[:width], *[None] * (width - len(row))] for row in rows]
    header = [read_cell(cell) for cell in padded[0]] if padded else []
    whole = [from_cells([cell if is_cell(cell) else None for cell in cells]) for cells in zip(*padded[1:], strict=True)]

    def read(columns: Sequence[int]) -> Iterator[Raw]:
        step = max(1, CELLS // max(1, width))
        for start in range(0, len(rows) - 1, step):
            below = range(first + 2 + start, min(first + 2 + start + step, end + 1))  # as Excel counts them
            yield Raw([whole[at][start : start + step] for at in columns], below)

    part = f", sheet {chosen!r} of {', '.join(map(repr, sheets))}" if len(sheets) > 1 else ""
    return Source(header, width, "row {}", read, notes, max(0, len(rows) - 1), part)


def find_near(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that is most like a name, whatever the case; None where none is."""
    forms = {each.lower(): each for each in reversed(known)}
    near = difflib.get_close_matches(name.lower(), forms, n=1)
    return forms[near[0]] if near else None


def has_content(cell: object) -> bool:
    """Return whether a cell of Excel holds anything, an error included."""
    return cell is not None and not (isinstance(cell, str) and not cell.strip())


def is_cell(cell: object) -> bool:
    """Return whether a cell of Excel holds something, other than an error."""
    return has_content(cell) and not (isinstance(cell, str) and cell.strip().lower() in ERRORS)


def read_cell(cell: object) -> str:
    """Return a cell of Excel, of which None is none, as text: read from a file of ours, as it was before that."""
    return "" if cell is None else unescape_formula(read_text(cell))


def _count_seconds(cell: object) -> float:
    """Return the seconds of a duration, or since midnight."""
    if isinstance(cell, time):
        cell = timedelta(0, cell.second, cell.microsecond, 0, cell.minute, cell.hour)
    return cell.total_seconds() if isinstance(cell, timedelta) else math.nan


def from_cells(cells: Sequence[object]) -> np.ndarray:
    """Return a column of Excel (b,), of which None is no cell, as `Raw` has it."""
    kinds = {type(cell) for cell in cells} - {type(None)}
    if kinds and kinds <= {int, float}:
        whole = all(isinstance(cell, int) and abs(cell) < 2**63 for cell in cells)
        return np.array(cells, np.int64 if whole else np.float64)  # None is NaN
    if timedelta in kinds and kinds <= {timedelta, time}:  # durations below a day may come as times
        return np.array([math.nan if cell is None else _count_seconds(cell) for cell in cells])
    if kinds and kinds <= {datetime, date}:
        return np.array(cells, "datetime64[us]")  # None is NaT
    return to_text(map(read_cell, cells), len(cells))
