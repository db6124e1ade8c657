"""Arrays of NumPy's files, which are not trusted: nothing is unpickled."""

from __future__ import annotations

import struct
import tokenize
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np

from protonet.errors import raise_input_error, raise_missing_file

#: What numpy and zipfile raise for a damaged file, beside a ValueError.
UNREADABLE = (
    *(OSError, EOFError, LookupError, MemoryError, OverflowError, RuntimeError, SyntaxError, TypeError),
    *(struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
OPTIONAL = {"split", "maps"}  #: Arrays that may be missing.


def read_arrays(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """Read the arrays of some ``names`` of x, y, split and maps from an NPZ file, all but x with shape (n,).

    Only split and maps may be missing. Nothing is unpickled.

    Raises:
        InputError: There is no such file, it is not an NPZ file, x or y is missing, there are object arrays, labels are
            neither integers nor strings, or bytes are not UTF-8.
    """
    found: list[str] | None = None
    arrays: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as opened, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            file = np.load(opened, allow_pickle=False)
            if isinstance(file, np.lib.npyio.NpzFile):  # else a single array
                found = file.files
                if names - OPTIONAL <= set(found):
                    arrays = {name: file[name] for name in found if name in names}
    except ValueError as error:
        if "Object arrays" in str(error):
            remedy = "Save them as numbers, or labels as strings: y.astype(str)."
            raise_input_error("path", "hold no object arrays, which would be unpickled", str(path), remedy)
        found = None
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except UNREADABLE as error:
        got = f"{path} ({type(error).__name__})"
        raise_input_error("path", "be an NPZ file that can be read", got, "Save it again with numpy.savez.")
    if found is None:
        raise_input_error("path", "be an NPZ file", str(path), "Use numpy.savez(path, x=x, y=y).")
    missing = sorted((names - OPTIONAL) - set(found))
    if missing:
        got = f"{path} with {', '.join(found) or 'nothing'}"
        raise_input_error("path", f"hold an array {missing[0]}", got, "Save it with numpy.savez(path, x=x, y=y).")
    for name in arrays.keys() - {"x"}:
        arrays[name] = check_names(name, arrays[name])
    return arrays


def check_names(argument: str, values: np.ndarray) -> np.ndarray:
    """Return labels or names of any shape as (n,) integers or strings, with bytes decoded.

    Raises:
        InputError: They are neither integers, strings nor bytes in UTF-8.
    """
    try:
        names = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
    except UnicodeDecodeError as error:
        raise_input_error(argument, "be UTF-8 where it is bytes", repr(error.object), "Save strings, not bytes.")
    if names.dtype.kind not in "biuU":
        raise_input_error(argument, "be integers or strings", str(names.dtype), "Save class numbers or names.")
    return names.reshape(-1)  # (n,)
