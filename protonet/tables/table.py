"""A person's table: CSV, NPZ, NPY or Parquet in; rows of numbers and their classes out, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protonet._checks import fail
from protonet.datasets.files import check_names
from protonet.tables.formats import Source, open_source

#: The largest number that is read: what float32 holds.
MOST = float(np.finfo(np.float32).max)


class Wanted(NamedTuple):
    """What a table is read for."""

    label: str  #: The name of the column of classes, in a file that names its columns.
    labelled: bool = True  #: Are the classes wanted? If not, their column may be missing.
    columns: tuple[str, ...] | None = None  #: The names of the features, in the order wanted; None for all.
    dim: int | None = None  #: How many features there must be; None for any number.
    beside: tuple[str, ...] = ()  #: Columns that are read as text beside: a row's group, its name.
    ignored: tuple[str, ...] = ()  #: Columns that are no features, where the table has them.
    extra: bool = False  #: May there be other columns beside the features that are named?


class Block(NamedTuple):
    """Some rows: features (b, dim), finite, and their classes (b,), numbers or strings; (0,) for none."""

    x: np.ndarray  #: float32, or float64 where there may be more digits.
    labels: np.ndarray
    beside: tuple[np.ndarray, ...] = ()  #: The columns that are wanted beside, strings (b,).


class Table(NamedTuple):
    """An open table: the names of its features, if they have any, and its rows, to be read once."""

    columns: tuple[str, ...] | None
    blocks: Iterator[Block]
    unused: tuple[str, ...] = ()  #: Columns that are there, and not wanted.


def open_table(prog: str, path: Path, wanted: Wanted, labels: Path | None = None) -> Table:
    """Open a table. Its header and its first rows are checked now, the others as they are read.

    Args:
        prog: The command's name, for messages.
        path: A file with a suffix of ``SUFFIXES``. CSV and Parquet name their columns, which are matched by name; NPZ
            holds ``x`` (n, ...) and ``y`` (n,); NPY holds rows (n, ...) alone. Of an NPZ file all rows are in memory
            at once, of the others a block.
        wanted: What it is read for.
        labels: An NPY file of the classes (n,), beside one of rows.

    Returns:
        The table. It has at least one row.

    Raises:
        MissingPackageError: The file is Parquet, and pyarrow is missing.
        InputError: No such file, columns that are not those wanted, no row, a row of another length or without a
            class, a cell that is no finite number; the message says where.
    """
    suffix = path.suffix.lower()
    if labels is not None and suffix != ".npy":
        fail(prog, "--labels", "come with an NPY file of rows", path, "Leave it out: that file holds its classes.")
    if wanted.labelled and labels is None and suffix == ".npy":
        fail(prog, "--labels", "name the file of the classes", f"none beside {path}", "Save them with numpy.save.")
    source = open_source(prog, path, labels, labelled=wanted.labelled)
    if source.header is None:
        if wanted.beside:
            got = f"{path}, which names none, and {_list(wanted.beside)}"
            fail(prog, "path", "name its columns to choose among them", got, "Save it as CSV or Parquet.")
        _check_width(prog, path, source.width, wanted)
        label = source.width if wanted.labelled else None
        columns, blocks = None, _check_blocks(prog, source, None, range(source.width), label, [])
    else:
        features, label = _choose_columns(prog, path, source.header, wanted)
        columns = tuple(source.header[column] for column in features)
        beside = [source.header.index(name) for name in wanted.beside]
        blocks = _check_blocks(prog, source, columns, features, label, beside)
    first = next(blocks, None)
    if first is None:
        fail(prog, "path", "have at least one row", f"none in {path}", "Add rows.")
    used = {*(columns or ()), *wanted.beside, *wanted.ignored, wanted.label}
    unused = tuple(name for name in source.header or () if name not in used)
    return Table(columns, chain([first], blocks), unused)


def read_table(prog: str, path: Path, wanted: Wanted, labels: Path | None = None) -> tuple[Table, Block]:
    """Read a whole table with its classes; return the table and all of its rows.

    Raises:
        MissingPackageError: As in `open_table`.
        InputError: As in `open_table`.
    """
    table = open_table(prog, path, wanted, labels)
    x, names, beside = zip(*table.blocks, strict=True)
    columns = zip(*beside, strict=True)
    return table, Block(np.concatenate(x), np.concatenate(names), tuple(map(np.concatenate, columns)))


def _choose_columns(prog: str, path: Path, header: list[str], wanted: Wanted) -> tuple[list[int], int | None]:
    """Return the numbers of the columns that are wanted as features, in that order, and of the classes' column."""
    if "" in header:
        got = f"none for column {header.index('') + 1} of {path}"
        fail(prog, "path", "name every column", got, "Name it, or drop it: an index is no feature.")
    twice = [name for name in dict.fromkeys(header) if header.count(name) > 1]
    if twice:
        fail(prog, "path", "name each column once", f"{_list(twice)} twice in {path}", "Rename or drop one.")
    if wanted.labelled and wanted.label not in header:
        got = f"{path} with {_list(header)}"
        fail(prog, "path", f"have a column {wanted.label}", got, "Pass --label with the name of the classes' column.")
    for name in wanted.beside:
        if name not in header:
            fail(prog, "path", f"have a column {name}", f"{path} with {_list(header)}", "Name one that it has.")
    others = {wanted.label, *wanted.beside, *wanted.ignored}
    features = [name for name in header if name not in others]
    if not features:
        fail(prog, "path", "have columns of numbers", f"{path} with {_list(header)}", "Add features.")
    if wanted.columns is not None:
        known, found = set(wanted.columns), set(features)
        missing = [name for name in wanted.columns if name not in found]
        more = [name for name in features if name not in known and not wanted.extra]
        if missing or more:
            got = f"{path} without {_list(missing)}" if missing else f"{path} with {_list(more)} more"
            remedy = "Name the columns as in the table that the model was fitted to."
            fail(prog, "path", "have the model's columns", got, remedy)
        features = list(wanted.columns)
    _check_width(prog, path, len(features), wanted)
    number = {name: column for column, name in enumerate(header)}
    return [number[name] for name in features], number[wanted.label] if wanted.labelled else None


def _check_width(prog: str, path: Path, width: int, wanted: Wanted) -> None:
    """Raise an InputError if a table has no features, or another number of them than is wanted."""
    if width == 0 or wanted.dim not in {None, width}:
        remedy = "Pass the features that the model was fitted to." if wanted.dim else "Add features."
        fail(prog, "path", f"have {wanted.dim or 'some'} features per row", f"{width} in {path}", remedy)


def _list(names: Sequence[str]) -> str:
    """Return the first of several names, in quotes where they are more than a word."""
    shown = ", ".join(name if name.isidentifier() else repr(name[:50]) for name in names[:5]) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _check_blocks(
    prog: str,
    source: Source,
    columns: Sequence[object] | None,
    features: Sequence[int],
    label: int | None,
    beside: Sequence[int],
) -> Iterator[Block]:
    """Yield rows that have finite numbers and a class; raise an InputError at the first that has not."""
    names = features if columns is None else columns
    for found, rows in source.read([*features, *([] if label is None else [label]), *beside]):
        cells, others = found[: len(features)], found[len(features) :]
        x = np.stack([_parse_numbers(column) for column in cells], axis=1)
        usable = np.abs(x) <= MOST  # not so for NaN
        if not usable.all():
            row, at = np.argwhere(~usable)[0].tolist()
            text = str(cells[at][row])[:50]
            got = "an empty cell" if text == "" else repr(text) if cells[at].dtype.kind == "O" else text
            got += f" in column {names[at]}, {source.place.format(rows[row])}"
            if not np.isnan(x[row, at]) and "inf" not in text.lower():
                fail(prog, "path", f"have numbers of at most {MOST:.1e} in absolute value", got, "Rescale the column.")
            fail(prog, "path", "have a finite number in every cell", got, "Fill it in, encode it, or leave it out.")
        labels = np.empty(0, np.str_) if label is None else others.pop(0)
        if labels.dtype.kind == "O":
            if not np.all(labels != ""):
                got = f"none in {source.place.format(rows[int(np.argmin(labels != ''))])}"
                fail(prog, "path", "name the class of every row", got, "Fill it in, or drop the row.")
            labels = labels.astype(np.str_)
        yield Block(x, check_names(prog, "path", labels), tuple(column.astype(np.str_) for column in others))


def _parse_numbers(column: np.ndarray) -> np.ndarray:
    """Return a column as floating, NaN for what is no number, such as 1_000, which Python would read."""
    if column.dtype.kind != "O":
        exact = column.dtype.kind in "iuf" and column.dtype.itemsize > (4 if column.dtype.kind == "f" else 2)
        return column.astype(np.float64 if exact else np.float32)
    if "_" not in "".join(column):
        try:
            return np.fromiter(map(float, column), np.float64, len(column))
        except ValueError:
            pass

    def parse(cell: str) -> float:
        try:
            return math.nan if "_" in cell else float(cell)
        except ValueError:
            return math.nan

    return np.array([parse(cell) for cell in column])
