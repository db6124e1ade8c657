"""Read pickles from untrusted sources without running any code in them.

A pickle is a program: it may name any function and call it. `load_pickle` only lets a pickle name NumPy's arrays,
dtypes and numbers, torch's tensors, and Python's containers. Arrays are built by functions of this module, which check
their arguments.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from protonet._text import to_printable
from protonet.errors import raise_input_error, raise_missing_file

#: Matches dtypes of fixed size without pointers: numbers, bytes and text.
PLAIN_DTYPE_PATTERN = re.compile(r"[biufSU]\d+")


class RefusedPickleError(pickle.UnpicklingError):
    """A pickle names an object, or describes an array, that `load_pickle` does not create."""


class _DtypeStandIn:
    """Stands in for `numpy.dtype` in a pickle, and accepts only dtypes that match ``PLAIN_DTYPE_PATTERN``."""

    def __init__(self, text: str, *_: object) -> None:
        if not isinstance(text, str) or not PLAIN_DTYPE_PATTERN.fullmatch(text):
            raise RefusedPickleError(f"an array of dtype {to_printable(text)!s:.40}")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if any(part is not None for part in state[2:5]):  # a part of another array, or fields
            raise RefusedPickleError("an array with fields")
        self.dtype = self.dtype.newbyteorder(state[1])


class _ArrayStandIn(np.ndarray[Any, Any]):
    """Stands in for an array that a pickle first creates empty, then fills: checks the bytes, dtype and shape."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2's
        filled = _make_array(raw, kind, shape, "C")
        checked: Any = (1, filled.shape, filled.dtype, bool(fortran), bytes(raw))
        super().__setstate__(checked)


def _make_array(raw: bytes, kind: _DtypeStandIn, shape: tuple[int, ...], order: str) -> np.ndarray:
    """Make an array from its bytes, dtype, shape and order; raise any exception if these do not fit together."""
    if not isinstance(kind, _DtypeStandIn):
        raise RefusedPickleError("an array without a dtype")
    if not isinstance(raw, (bytes, bytearray)):
        raise RefusedPickleError("an array of objects")
    return np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if order == "F" else "C")


def _make_empty_array(subtype: object, *_: object) -> np.ndarray:
    if subtype is not np.ndarray:
        raise RefusedPickleError("a subclass of an array")
    return np.ndarray.__new__(_ArrayStandIn, (0,), np.int8)


def _make_scalar(kind: _DtypeStandIn, raw: bytes | str) -> object:
    return _make_array(raw.encode("latin1") if isinstance(raw, str) else raw, kind, (1,), "C")[0]


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise RefusedPickleError(f"text in {encoding}")
    return text.encode("latin1")


def _load_storage(raw: bytes) -> object:
    return torch.load(io.BytesIO(raw), weights_only=True)


#: For each object that a pickle may name, by module and name: the object that takes its place when it is loaded.
_ALLOWED_OBJECTS: dict[tuple[str, str], object] = {
    **{
        ("builtins", builtin.__name__): builtin
        for builtin in (bytes, bytearray, dict, list, set, frozenset, int, float, complex)
    },
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("_codecs", "encode"): _encode,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _DtypeStandIn,
    ("numpy.core.multiarray", "_reconstruct"): _make_empty_array,
    ("numpy.core.multiarray", "scalar"): _make_scalar,
    ("numpy.core.numeric", "_frombuffer"): _make_array,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _load_storage,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that raises a RefusedPickleError if a pickle names an object that is not in ``_ALLOWED_OBJECTS``."""

    def find_class(self, module: str, name: str) -> object:
        module = {"__builtin__": "builtins"}.get(module, module).replace("numpy._core", "numpy.core")
        if (module, name) not in _ALLOWED_OBJECTS:
            raise RefusedPickleError(f"{module}.{name}")
        return _ALLOWED_OBJECTS[module, name]


def load_pickle(argument: str, path: str | Path) -> Any:
    """Load a pickle of arrays, tensors, numbers, texts and containers, without running code in it.

    Byte strings of Python 2 are read as Latin-1. An InputError about ``argument`` names any other object in the pickle;
    it is not created.

    Source: Python's documentation of pickle, "Restricting globals".
    """

    def refuse(got: str, remedy: str) -> NoReturn:
        raise_input_error(
            argument, "be a pickle of arrays, numbers, text and containers alone", f"{path} {got}", remedy
        )

    try:
        with Path(path).open("rb") as file:
            return _Unpickler(file, encoding="latin1").load()
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path, argument=argument)
    except RefusedPickleError as error:
        refuse(f"with {error}, which is not loaded", "Save features with numpy.savez(path, x=x, y=y).")
    except Exception as error:  # a damaged pickle raises anything
        refuse(f"({type(error).__name__})", "It is damaged or none: get it again.")
