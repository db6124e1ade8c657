"""Read files of records: JSON, JSON lines, SQLite and ARFF."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from protonet._text import closest_match, normalize_spelling, shorten_list
from protonet.errors import raise_input_error, raise_missing_file
from protonet.tables.encodings import check_encoding, open_bytes
from protonet.tables.formats.arrays import ARRAY_READ_ERRORS
from protonet.tables.formats.source import (
    DEFAULT_ROW_FORMAT,
    TableSource,
    cell_to_text,
    convert_command,
    convert_objects,
    make_column_reader,
    make_text_array,
)


def open_json(path: Path, encoding: str | None = None) -> TableSource:
    """Open a JSON file as a table: a list of objects, or one object per line (JSON lines).

    Lists of equally many numbers, such as embeddings, become one column per number.

    Raises:
        InputError: The file is no such JSON file, or a cell is an object or another list.
    """
    must = "be a list of objects, or one object per line"
    position_format, lines = "row {} (counted from 0)", None
    check_encoding(encoding)
    try:
        with open_bytes(path) as file, TextIOWrapper(file, encoding or "utf-8-sig") as text:
            content = text.read()
        if content.lstrip()[:1] == "{":
            lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
            records, position_format = [json.loads(line) for _, line in lines], "line {}"
        else:
            records = json.loads(content)
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except (*ARRAY_READ_ERRORS, RecursionError) as error:
        remedy = f"Convert it, or pass `encoding` if it is not UTF-8: {convert_command(path, 'read_json')}"
        raise_input_error("path", must, f"{path} ({type(error).__name__})", remedy)
    are_records = isinstance(records, list) and bool(records) and all(isinstance(record, dict) for record in records)
    # An object that holds others is no line of JSON lines, but a whole file of another structure.
    if not are_records or (lines is not None and len(records) == 1 and _has_structure(records[0])):
        remedy = f"Convert it: {convert_command(path, 'read_json')}"
        raise_input_error("path", must, f"{path}, which holds something else", remedy)
    names = list(dict.fromkeys(chain.from_iterable(records)))
    columns = {name: [record.get(name) for record in records] for name in names}
    positions = range(len(records)) if lines is None else [number for number, _ in lines]
    return _make_source(path, columns, positions, position_format)


def _has_structure(record: dict[str, Any]) -> bool:
    """Test whether a value of a record is an object, or a list of others than numbers."""
    lists = [value for value in record.values() if isinstance(value, list)]
    is_flat = all(type(cell) in {int, float} for value in lists for cell in value)
    return not is_flat or any(isinstance(value, dict) for value in record.values())


def open_sqlite(path: Path, table: str | None = None) -> TableSource:
    """Open a table of a SQLite database: the one that is named, or the only one.

    Raises:
        InputError: The file is no database, or it has no table of that name, or several if none is named.
    """
    import sqlite3  # noqa: PLC0415 - slow to import, and absent from some builds of Python

    if not path.is_file():  # SQLite would create it
        raise_missing_file(path)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as database:
            query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            tables = [name for (name,) in database.execute(query)]
            if not tables:
                raise_input_error("path", "be a database with tables", f"{path}, which has none", "Pass another file.")
            if table is None and len(tables) == 1:
                (table,) = tables
            if table is None or table not in tables:
                similar = None if table is None else closest_match(table, tables)
                remedy = f"{'' if similar is None else f'Did you mean {similar!r}? '}It has {shorten_list(tables)}."
                must = f"name a table of the database {path}"
                raise_input_error("sheet", must, "none" if table is None else repr(table), remedy)
            name = table.replace('"', '""')
            cursor = database.execute(f'SELECT * FROM "{name}"')
            rows = cursor.fetchall()
            names = [column[0] for column in cursor.description]
    except sqlite3.Error as error:
        got = f"{path} ({error})"
        raise_input_error("path", "be a SQLite database that can be read", got, "Save the table as CSV.")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
    return _make_source(path, columns, range(len(rows)))


def open_arff(path: Path, encoding: str | None = None) -> TableSource:
    """Open an ARFF file of Weka or OpenML as a table; errors of SciPy, which reads no text columns, are reported."""
    from scipy.io import arff  # noqa: PLC0415 - slow to import

    check_encoding(encoding)
    try:
        with open_bytes(path) as file, TextIOWrapper(file, encoding or "utf-8-sig") as text, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about dates without a time zone
            rows, _ = arff.loadarff(text)
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except (*ARRAY_READ_ERRORS, NotImplementedError, StopIteration, arff.ArffError) as error:
        got = f"{path} ({str(error) or type(error).__name__})"
        must = "be a dense ARFF file of numbers, nominal values in ASCII and dates"
        raise_input_error("path", must, got, "Save it as CSV: java weka.core.converters.CSVSaver -i IN.arff -o OUT.csv")
    columns = {name: _arff_to_cells(rows[name]) for name in rows.dtype.names}
    return _make_source(path, columns, range(len(rows)))


def _arff_to_cells(values: np.ndarray) -> np.ndarray:
    """Convert a column (n,) of an ARFF file to a type of `TableChunk.columns`; "?" of nominal columns becomes ""."""
    if values.dtype.kind == "S":
        texts = [cell_to_text(cell.decode()) for cell in values.tolist()]
        return make_text_array(["" if text == "?" else text for text in texts], len(texts))
    return values.astype("datetime64[us]") if values.dtype.kind == "M" else values


def _make_source(
    path: Path,
    columns: Mapping[str, Sequence[object] | np.ndarray],
    positions: Sequence[int],
    position_format: str = DEFAULT_ROW_FORMAT,
) -> TableSource:
    """Make a table of columns of cells, of which lists of numbers become several columns."""
    header, arrays = list[str](), list[np.ndarray]()
    for name, cells in columns.items():
        for suffix, values in _split_column(path, name, cells):
            header.append(normalize_spelling(name + suffix))
            arrays.append(values)
    return TableSource(
        header=header,
        n_columns=len(header),
        read_chunks=make_column_reader(arrays, positions),
        position_format=position_format,
        n_rows=len(positions),
    )


def _split_column(path: Path, name: str, cells: Sequence[object] | np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the suffix of the name and the cells (n,) of each column that the cells of a file become."""
    if isinstance(cells, np.ndarray):
        yield "", cells
        return
    nested = [cell for cell in cells if isinstance(cell, dict | list)]
    if not nested:
        yield "", convert_objects(cells)
        return
    lists = [cell for cell in nested if isinstance(cell, list) and all(type(item) in {int, float} for item in cell)]
    widths = {len(cell) for cell in lists}
    if len(lists) < sum(cell is not None for cell in cells) or len(widths) > 1:
        got = f"others in column {name} of {path}"
        raise_input_error("path", "have cells of text, numbers or equally many numbers", got, "Leave out the column.")
    (width,) = widths
    missing = [None] * width
    for element, values in enumerate(zip(*(missing if cell is None else cell for cell in cells), strict=True)):
        yield f"_{element}", convert_objects(values)
