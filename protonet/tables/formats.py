"""The formats of a person's table: what each file holds, block by block, faults and all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protonet._checks import fail, optional_packages
from protonet.datasets.files import UNREADABLE, check_names, read_arrays, read_rows

#: Cells that are read at a time.
CELLS = 2**20
INSTALL = 'pip install "protonet[parquet]"'


class Raw(NamedTuple):
    """Some rows as a file has them."""

    x: np.ndarray  #: (b, dim) float32, or float64 where there may be more digits; NaN where there is no number.
    labels: np.ndarray | None  #: (b,) numbers or strings, empty where there is none; or None.
    rows: Sequence[int]  #: Where in the file each row is.
    cells: Sequence[Sequence[str]] | None = None  #: The text of each number, where it was one.
    beside: Sequence[np.ndarray] = ()  #: Further columns (b,) as strings.


class Source(NamedTuple):
    """An open file."""

    header: list[str] | None  #: The names of its columns, or None if it has features alone, without names.
    width: int  #: The number of columns.
    place: str  #: What a message calls a row.
    #: Returns the rows, with the columns of these numbers as features, of that number as classes, and of these beside.
    #: A file without names gives all of its features and classes.
    read: Callable[[Sequence[int], int | None, Sequence[int]], Iterator[Raw]]


def open_csv(prog: str, path: Path) -> Source:
    """Open a CSV file; spaces around names are left out."""
    lines = read_rows(prog, path)
    header = [cell.strip() for cell in next(lines, (0, []))[1]]

    def read(features: Sequence[int], label: int | None, beside: Sequence[int]) -> Iterator[Raw]:
        while block := list(islice(lines, max(1, CELLS // len(header)))):
            cells = [[row[column] for column in features] for _, row in block]
            labels = None if label is None else np.array([row[label].strip() for _, row in block])
            texts = [np.array([row[column].strip() for _, row in block]) for column in beside]
            yield Raw(_parse_numbers(cells), labels, [line for line, _ in block], cells, texts)

    return Source(header, len(header), "line {}", read)


def _parse_numbers(cells: list[list[str]]) -> np.ndarray:
    """Return cells as float64, NaN for what is no number, such as 1_000, which Python would read."""
    shape = len(cells), len(cells[0])
    if "_" not in "".join(chain.from_iterable(cells)):
        try:
            return np.fromiter(map(float, chain.from_iterable(cells)), np.float64, math.prod(shape)).reshape(shape)
        except ValueError:
            pass

    def parse(cell: str) -> float:
        try:
            return math.nan if "_" in cell else float(cell)
        except ValueError:
            return math.nan

    return np.array([[parse(cell) for cell in row] for row in cells]).reshape(shape)


def to_floating(values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return values of some shape as float32, or as float64 where they may have more digits."""
    exact = values.dtype.kind in "iuf" and values.dtype.itemsize > (4 if values.dtype.kind == "f" else 2)
    return np.array(values.reshape(shape), np.float64 if exact else np.float32)


def open_arrays(prog: str, path: Path, labels: Path | None, *, labelled: bool) -> Source:
    """Open an NPZ file of ``x`` and ``y``, or an NPY file of rows and another one of their classes."""
    if path.suffix.lower() == ".npz":
        arrays = read_arrays(prog, path, {"x", "y"} if labelled else {"x"})
        names = arrays.get("y")
    else:
        names = None if labels is None else check_names(prog, "--labels", map_array(prog, "--labels", labels))
        arrays = {}

    def load() -> np.ndarray:
        return arrays["x"] if arrays else map_array(prog, "path", path)

    rows = load()
    if rows.dtype.kind not in "biuf" or rows.ndim < 2:
        got = f"{rows.dtype} {rows.shape} in {path}"
        fail(prog, "path", "hold real numbers of shape (n, dim)", got, "Save features as floats.")
    n, width = len(rows), math.prod(rows.shape[1:])
    if names is not None and len(names) != n:
        fail(prog, "path", "have one label per row", f"{len(names)} for {n} rows", "Give both the same length.")
    step = max(1, CELLS // max(1, width))

    def read(_: Sequence[int], __: int | None, ___: Sequence[int]) -> Iterator[Raw]:
        for first in range(0, n, step):
            x = load()[first : first + step]  # mapped anew each time: the pages of the last block are given back
            taken = None if names is None else names[first : first + step]
            yield Raw(to_floating(x, (len(x), width)), taken, range(first, first + step))

    return Source(None, width, "row {} (counted from 0)", read)


def map_array(prog: str, argument: str, path: Path) -> np.ndarray:
    """Return the array of an NPY file, which stays on disk."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("an archive")
    except (FileNotFoundError, IsADirectoryError):
        fail(prog, argument, "be a file that exists", path, "")
    except (ValueError, *UNREADABLE) as error:
        got = f"{path} ({type(error).__name__})"
        fail(prog, argument, "be an NPY file of numbers or strings", got, "Save it with numpy.save(path, values).")
    return array


def open_parquet(prog: str, path: Path) -> Source:
    """Open a Parquet file."""
    with optional_packages(prog, INSTALL):
        from pyarrow import ArrowException, float64, parquet  # noqa: PLC0415 - optional

    @contextmanager
    def one_line(what: object) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError):
            fail(prog, "path", "be a file that exists", path, "")
        except (OSError, ArrowException) as error:
            remedy = "Encode text as numbers, or leave that column out; pandas writes such files: to_parquet(path)."
            fail(prog, "path", "be a Parquet file of numbers", f"{what} ({type(error).__name__})", remedy)

    with one_line(path):
        file = parquet.ParquetFile(path)
    header = list(file.schema_arrow.names)

    def read(features: Sequence[int], label: int | None, beside: Sequence[int]) -> Iterator[Raw]:
        first, batches = 0, file.iter_batches(max(1, CELLS // len(header)))
        while True:
            with one_line(path):
                batch = next(batches, None)
            if batch is None:
                return
            x = np.empty((len(batch), len(features)))
            for at, column in enumerate(features):
                values = batch.column(column)
                with one_line(f"{values.type} in column {header[column]}"):
                    x[:, at] = values.cast(float64(), safe=False).to_numpy(zero_copy_only=False)
            named = [column for column in (label, *beside) if column is not None]
            names = [
                np.array(["" if each is None else each for each in batch.column(column).to_pylist()])
                for column in named
            ]
            names = [
                check_names(prog, f"column {header[column]}", each) for column, each in zip(named, names, strict=True)
            ]
            labels = None if label is None else names.pop(0)
            texts = [each.astype(str) for each in names]
            yield Raw(x, labels, range(first, first + len(batch)), None, texts)
            first += len(batch)

    return Source(header, len(header), "row {} (counted from 0)", read)
