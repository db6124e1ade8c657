"""Features that do not fit into memory: the rows of an NPZ file, mapped from disk."""

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

from protonet.datasets.dataset import Dataset, assign_sides, check_finite, make_dataset
from protonet.datasets.files import load_npz, read_shape
from protonet.tables.arrays import READ_ERRORS, read_arrays

FLOATING = ("float16", "float32", "float64")
#: Readers of an array's header, by its version.
HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def map_npz(path: str | Path) -> Dataset:
    """Load an NPZ file as `load_npz` does, but leave its features on disk where possible.

    It is possible where ``x`` is as ``numpy.savez`` writes it: not compressed, row after row, of float16, float32 or
    float64. This dtype is kept. Rows are read when they are used, and `Dataset.release` frees their memory. All of them
    are read once here, a piece at a time, to find NaN.

    Args:
        path: As in `load_npz`. The file must not change while the data are in use.

    Returns:
        The rows, flattened and not scaled. Writing to them would end the process.

    Raises:
        InputError: As in `load_npz`.
    """
    path = Path(path)
    x, mapping = map_rows(path) or (None, None)
    if x is None:
        return load_npz(path)
    arrays = read_arrays(path, {"y", "split", "maps"})
    classes = make_dataset("x", torch.empty(len(x), 0), arrays["y"])
    data = assign_sides("split", classes, arrays.get("split"))
    shape = read_shape(arrays.get("maps"), x.shape[1])
    data = data._replace(x=x, mapping=mapping, shape=shape)
    check_finite("x", x, data.release)
    return data


def map_rows(path: Path, dtypes: Sequence[str] = FLOATING, name: str = "x") -> tuple[Tensor, mmap.mmap] | None:
    """Return the rows (n, dim) of an NPZ file's array and their mapping, or None where they cannot be mapped."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            member = archive.getinfo(f"{name}.npy")
            with archive.open(member) as opened:
                shape, fortran_order, dtype = HEADER_READERS[npy.read_magic(opened)](opened)
                header = opened.tell()
            file.seek(member.header_offset + 26)
            start = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + header
            count = math.prod(shape)
            plain = member.compress_type == zipfile.ZIP_STORED and not fortran_order and dtype.isnative
            is_complete = header + count * dtype.itemsize == member.file_size
            if not (plain and is_complete and dtype.name in dtypes and len(shape) > 1 and count):
                return None
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (ValueError, *READ_ERRORS):
        return None  # load_npz loads the file, or says what is wrong
    values = np.frombuffer(mapping, dtype, count, start).reshape(shape[0], -1)  # (n, dim)
    # Read-only, because a system may refuse a private copy of a file that is larger than memory.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(values), mapping


def write_npz(
    file: BinaryIO, shape: tuple[int, ...], dtype: str, rows: Iterable[np.ndarray], more: Mapping[str, np.ndarray]
) -> None:
    """Write an NPZ file that `map_rows` maps, with rows that do not fit into memory together.

    Args:
        file: To write to.
        shape: Of ``x``, the rows (n, ...).
        dtype: Of the rows, such as "float32".
        rows: Some of them at a time, (k, ...), in their order.
        more: Further arrays by name, without objects.

    Raises:
        ValueError: The rows are not as many as ``shape`` says.
    """
    left = shape[0]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as member:
            header = {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
            npy.write_array_header_1_0(member, header)
            for block in rows:
                if block.shape[1:] != shape[1:] or block.dtype != np.dtype(dtype):
                    raise ValueError(f"rows of {block.shape[1:]}, {block.dtype}")
                left -= len(block)
                member.write(np.ascontiguousarray(block).data)
            if left:
                raise ValueError(f"{left} rows too few")
        for name, array in more.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, array, allow_pickle=False)
