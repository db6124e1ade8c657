"""Read untrusted NPY and NPZ files without unpickling."""

from __future__ import annotations

import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from protonet.errors import raise_input_error, raise_missing_file
from protonet.tables.formats.source import (
    TableChunk,
    TableSource,
    cell_to_text,
    make_text_array,
    rows_per_chunk,
    to_native_dtype,
)

#: Exceptions that numpy and zipfile raise for damaged files.
ARRAY_READ_ERRORS = (
    *(OSError, EOFError, LookupError, MemoryError, OverflowError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
#: Names of arrays that an NPZ file may lack.
OPTIONAL_ARRAY_NAMES = {"split", "maps"}


def read_arrays(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """Read the arrays ``names`` from an untrusted NPZ file, by name; only ``OPTIONAL_ARRAY_NAMES`` may be absent.

    All arrays other than "x" are converted to labels (n,) by `decode_labels`. Raises an InputError if the file cannot
    be read, holds pickled objects, or lacks an array.
    """
    available: list[str] | None = None
    arrays: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as opened, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that Python 2 wrote
            file = np.load(opened, allow_pickle=False)
            if isinstance(file, np.lib.npyio.NpzFile):  # otherwise a single array
                available = file.files
                if names - OPTIONAL_ARRAY_NAMES <= set(available):
                    arrays = {name: file[name] for name in available if name in names}
    except ValueError as error:
        if "Object arrays" in str(error):
            remedy = "Save them as numbers, or labels as strings: y.astype(str)."
            raise_input_error("path", "hold no object arrays, which would be unpickled", str(path), remedy)
        available = None
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except ARRAY_READ_ERRORS as error:
        got = f"{path} ({type(error).__name__})"
        raise_input_error("path", "be an NPZ file that can be read", got, "Save it again with numpy.savez.")
    if available is None:
        raise_input_error("path", "be an NPZ file", str(path), "Use numpy.savez(path, x=x, y=y).")
    missing = sorted((names - OPTIONAL_ARRAY_NAMES) - set(available))
    if missing:
        got = f"{path} with {', '.join(available) or 'nothing'}"
        raise_input_error("path", f"hold an array {missing[0]}", got, "Save it with numpy.savez(path, x=x, y=y).")
    for name in arrays.keys() - {"x"}:
        arrays[name] = decode_labels(name, arrays[name])
    return arrays


def memory_map_npy(argument: str, path: Path) -> np.ndarray:
    """Map the array of an NPY file into memory, without reading it; error messages call the file ``argument``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that Python 2 wrote
            return np.lib.format.open_memmap(path, mode="r")
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path, argument=argument)
    except ARRAY_READ_ERRORS as error:
        got, remedy = f"{path} ({type(error).__name__})", "Save it with numpy.save(path, values)."
        raise_input_error(argument, "be an NPY file of numbers or strings", got, remedy)


def decode_labels(argument: str, values: np.ndarray) -> np.ndarray:
    """Convert labels of any shape, with n elements, to integers or strings (n,); bytes are decoded as UTF-8.

    Raises:
        InputError: The labels are neither integers nor strings. ``argument`` is their name in the message.
    """
    try:
        labels = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
    except UnicodeDecodeError as error:
        raise_input_error(argument, "be UTF-8 if it is bytes", repr(error.object), "Save strings, not bytes.")
    if labels.dtype.kind not in "biuU":
        raise_input_error(argument, "be integers or strings", str(labels.dtype), "Save class numbers or names.")
    return labels.reshape(-1)  # (n,)


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
    step = rows_per_chunk(width)

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        for start in range(0, n, step):
            x = load()[start : start + step]  # mapped again each time, which frees the memory of the last chunk
            x = to_native_dtype(x.reshape(len(x), width))
            extra = [] if y is None else [_to_label_column(y[start : start + step])]
            columns = [x[:, index] if index < width else extra[index - width] for index in indices]
            yield TableChunk(columns, range(start, start + len(x)))

    return TableSource(header=None, n_columns=width, read_chunks=read_chunks, n_rows=n)


def _to_label_column(labels: np.ndarray) -> np.ndarray:
    """Convert integer labels (n,) to native byte order, and other labels to text."""
    if labels.dtype.kind in "iu":
        return to_native_dtype(labels)
    return make_text_array(map(cell_to_text, labels.astype(str).tolist()), len(labels))
