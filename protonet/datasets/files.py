"""Loaders of your own data, from an NPZ file or a CSV file; and scikit-learn's digits.

No loader unpickles anything.
"""

from __future__ import annotations

import math
import mmap
import struct
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from protonet._text import shorten_list
from protonet.datasets.dataset import Dataset, assign_sides, check_finite, make_dataset
from protonet.errors import optional_packages, raise_input_error
from protonet.tables.delimited import read_delimited_rows
from protonet.tables.formats.arrays import ARRAY_READ_ERRORS, read_arrays


def _make_npz_dataset(x: Tensor, arrays: Mapping[str, np.ndarray], mapping: mmap.mmap | None = None) -> Dataset:
    """Make a data set from ``x`` (n, ...), memory-mapped by ``mapping`` if given, and the arrays y, split and maps."""
    x = x.flatten(1)
    data = make_dataset("x", torch.empty(len(x), 0), arrays["y"])
    data = assign_sides("split", data, arrays.get("split"))
    data = data._replace(x=x, memory_map=mapping, shape=check_map_shape(arrays.get("maps"), x.shape[1]))
    check_finite("x", x, data.release_memory)
    return data


def check_map_shape(shape: np.ndarray | None, dim: int) -> tuple[int, int, int] | None:
    """Check and return the feature map ``shape`` (channels, height, width), if any, of rows with ``dim`` features."""
    if shape is None:
        return None
    if shape.shape != (3,) or shape.dtype.kind not in "iu" or math.prod(shape.tolist()) != dim or shape.min() < 1:
        got = f"{shape.tolist()} of {dim} features"
        raise_input_error("maps", "be channels, height and width of a row", got, "Leave it out, or mend it.")
    channels, height, width = shape.tolist()
    return channels, height, width


def load_csv(path: str | Path, *, label: str = "label", encoding: str | None = None) -> Dataset:
    """Load a CSV file with a header, a column of labels and columns of numbers.

    Args:
        path: The file: commas, semicolons, tabs or bars between cells; text, gzip or ZIP. "-" is the standard input.
            Spaces around the names of columns are left out.
        label: The name of the column that holds the class of each row.
        encoding: The encoding of the text, such as "cp1251"; None to detect it.

    Returns:
        A data set of the rows, not scaled; features are in the order of the file's columns.

    Raises:
        InputError: The file does not exist or cannot be read, has no column ``label`` or no further column, a row has
            too few or too many cells, or a feature is not a finite number.
    """
    path = Path(path)
    rows, labels = [], []
    lines = read_delimited_rows(path, names={label}, encoding=encoding)
    header = [cell.strip() for cell in next(lines, (0, []))[1]]
    if header.count(label) != 1 or len(header) < 2:
        got = f"{path} with {shorten_list(header) or 'nothing'}"
        remedy = f"Rename the column of the classes to {label}."
        raise_input_error("path", f"have one column {label} and columns of numbers", got, remedy)
    column = header.index(label)
    for line_index, cells in lines:
        if not any(map(str.strip, cells)):
            continue  # a blank row
        labels.append(cells.pop(column).strip())
        rows.append([_parse_float(cell, line_index) for cell in cells])
    features = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(header) - 1)  # (n, dim)
    return make_dataset("path", features, labels)


def _parse_float(cell: str, line: int) -> float:
    """Parse the number in a cell of a CSV file; an empty cell is NaN. An InputError names the ``line`` number."""
    try:
        return float(cell) if cell.strip() else math.nan
    except ValueError:
        raise_input_error("path", "hold numbers beside the label", f"{cell!r} in line {line}", "Encode it as numbers.")


MEMORY_MAPPED_DTYPES = ("float16", "float32", "float64")  #: The dtypes of features that `load_npz` can memory-map.
#: For each version of the NPY format, the function that reads the header of an array.
NPY_HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def load_npz(path: str | Path, *, memory_map: bool = False) -> Dataset:
    """Load features and labels from an NPZ file with arrays ``x``, ``y`` and, if there is a split by class, ``split``.

    Args:
        path: A file of ``numpy.savez``, which must not change while the data are in use, with

            - ``x`` (n, ...), real features;
            - ``y`` (n,), the class of each row, as integers or strings;
            - perhaps ``split`` (n,), the side of each row's class: "base", "validation" or "novel", or "train", "val"
              (or "valid") or "test";
            - perhaps ``maps`` (3,), channels, height and width, if each row is the feature maps of a network.

            Strings may be bytes in UTF-8.
        memory_map: Whether to memory-map ``x`` if it is as ``numpy.savez`` writes it: not compressed, in C order, and
            of dtype float16, float32 or float64. Rows are then read from the disk when they are used, and
            `Dataset.release_memory` frees their memory. Writing to such an ``x`` would end the process.

    Returns:
        A data set of the rows, flattened and not scaled; float32 unless memory-mapped. Integer classes are numbered in
        ascending order. All rows are read once, block by block, to find NaN.

    Raises:
        InputError: There is no such file, it is not an NPZ file, ``x`` or ``y`` is missing, there are object arrays or
            NaN, the lengths of the arrays differ, or a class is in two parts of the split.
    """
    path = Path(path)
    mapped = memory_map_array(path) if memory_map else None
    arrays = read_arrays(path, {"y", "split", "maps"} | ({"x"} if mapped is None else set()))
    if mapped is not None:
        return _make_npz_dataset(mapped[0], arrays, mapped[1])
    x = arrays["x"]
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise_input_error("x", "be real, of shape (n, dim)", f"{x.dtype} {x.shape}", "Save features as floats.")
    return _make_npz_dataset(torch.from_numpy(x.astype(np.float32, copy=False)), arrays)


def memory_map_array(
    path: Path, dtypes: Sequence[str] = MEMORY_MAPPED_DTYPES, name: str = "x"
) -> tuple[Tensor, mmap.mmap] | None:
    """Memory-map the array ``name`` (n, ...) of an NPZ file: return a read-only tensor and the mapping of the file.

    None is returned if the array is compressed, of another dtype, or cannot be memory-mapped for another reason.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            member = archive.getinfo(f"{name}.npy")
            with archive.open(member) as opened:
                shape, fortran_order, dtype = NPY_HEADER_READERS[npy.read_magic(opened)](opened)
                header = opened.tell()
            file.seek(member.header_offset + 26)
            start = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + header
            count = math.prod(shape)
            is_plain = member.compress_type == zipfile.ZIP_STORED and not fortran_order and dtype.isnative
            is_complete = header + count * dtype.itemsize == member.file_size
            if not (is_plain and is_complete and dtype.name in dtypes and len(shape) > 1 and count):
                return None
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ARRAY_READ_ERRORS:
        return None  # load_npz loads the file, or says what is wrong
    values = np.frombuffer(mapping, dtype, count, start).reshape(shape)
    # Read-only, because a system may refuse a private copy of a file that is larger than memory.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(values), mapping


def write_npz(
    file: BinaryIO,
    shape: tuple[int, ...],
    dtype: str,
    blocks: Iterable[np.ndarray],
    other_arrays: Mapping[str, np.ndarray],
) -> None:
    """Write an NPZ file block by block; `memory_map_array` can memory-map its array ``x``.

    ``blocks`` are the rows of ``x`` in order, any number (k, ...) at a time; a ValueError is raised unless they make up
    an array of ``shape`` (n, ...) and ``dtype``. ``other_arrays`` are written, too, by name.
    """
    left = shape[0]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as member:
            header = {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
            npy.write_array_header_1_0(member, header)
            for block in blocks:
                if block.shape[1:] != shape[1:] or block.dtype != np.dtype(dtype):
                    raise ValueError(f"rows of {block.shape[1:]}, {block.dtype}")
                left -= len(block)
                member.write(np.ascontiguousarray(block).data)
            if left:
                raise ValueError(f"{left} rows too few")
        for name, array in other_arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, array, allow_pickle=False)


def load_digits() -> Dataset:
    """Load the handwritten digits that come with scikit-learn.

    Returns:
        A data set of 1,797 rows of 64 grey values in [0, 1] (8 x 8 pixels), with the classes "0" to "9".

    Raises:
        MissingPackageError: scikit-learn is missing; the message says how to install it.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits" (1998), UCI repository: its test set, as
        shipped with scikit-learn. https://doi.org/10.24432/C50P49
    """
    with optional_packages():
        from sklearn import datasets  # noqa: PLC0415 - optional
    x, y = datasets.load_digits(return_X_y=True)
    rows, names = torch.from_numpy(x).float() / 16, tuple(map(str, range(10)))
    return Dataset(rows, torch.from_numpy(y).long(), names, shape=(1, 8, 8))
