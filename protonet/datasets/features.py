"""Load features from files of other programs: NPY files with a label file in the same folder, torch files and pickles.

A pickle is a program: it may name any function and call it. `load_pickle` only lets a pickle name NumPy's arrays,
dtypes and numbers, torch's tensors, and Python's containers. Arrays are built by functions of this module, which check
their arguments.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from protonet._text import to_printable
from protonet.datasets.dataset import Dataset, make_dataset
from protonet.errors import raise_input_error, raise_missing_file
from protonet.tables.formats.arrays import decode_labels, memory_map_npy

#: Matches dtypes of fixed size without pointers: numbers, bytes and text.
PLAIN_DTYPE_PATTERN = re.compile(r"[biufSU]\d+")


class RefusedPickleError(pickle.UnpicklingError):
    """Raised for a pickle that contains an object or an array that `load_pickle` does not allow."""


class _UnpickledDtype:
    """A safe replacement of `numpy.dtype` in pickles, which accepts only dtypes that match ``PLAIN_DTYPE_PATTERN``."""

    def __init__(self, text: str, *_: object) -> None:
        if not isinstance(text, str) or not PLAIN_DTYPE_PATTERN.fullmatch(text):
            raise RefusedPickleError(f"an array of dtype {to_printable(text)!s:.40}")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if any(part is not None for part in state[2:5]):  # a part of another array, or fields
            raise RefusedPickleError("an array with fields")
        self.dtype = self.dtype.newbyteorder(state[1])


class _UnpickledArray(np.ndarray[Any, Any]):
    """A safe replacement of NumPy arrays that a pickle creates empty and then fills: checks bytes, dtype and shape."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2's
        filled = _unpickle_array(raw, kind, shape, "C")
        checked: Any = (1, filled.shape, filled.dtype, bool(fortran), bytes(raw))
        super().__setstate__(checked)


def _unpickle_array(raw: bytes, kind: _UnpickledDtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    """Make an array from its bytes, dtype, shape and memory order; raise an exception if they are inconsistent."""
    if not isinstance(kind, _UnpickledDtype):
        raise RefusedPickleError("an array without a dtype")
    if not isinstance(raw, (bytes, bytearray)):
        raise RefusedPickleError("an array of objects")
    return np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if order == "F" else "C")


def _unpickle_empty_array(subtype: object, *_: object) -> np.ndarray:
    if subtype is not np.ndarray:
        raise RefusedPickleError("a subclass of an array")
    return np.ndarray.__new__(_UnpickledArray, (0,), np.int8)


def _unpickle_scalar(kind: _UnpickledDtype, raw: bytes | str) -> object:
    return _unpickle_array(raw.encode("latin1") if isinstance(raw, str) else raw, kind, (1,), "C")[0]


def _unpickle_text_as_bytes(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise RefusedPickleError(f"text in {encoding}")
    return text.encode("latin1")


def _unpickle_torch_storage(raw: bytes) -> object:
    return torch.load(io.BytesIO(raw), weights_only=True)


#: For each object that a pickle may name, by module and name: the object that takes its place when it is loaded.
_ALLOWED_OBJECTS: dict[tuple[str, str], object] = {
    **{("builtins", builtin.__name__): builtin for builtin in (bytes, bytearray, dict, list, set, frozenset)},
    **{("builtins", builtin.__name__): builtin for builtin in (int, float, complex)},
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("_codecs", "encode"): _unpickle_text_as_bytes,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _UnpickledDtype,
    ("numpy.core.multiarray", "_reconstruct"): _unpickle_empty_array,
    ("numpy.core.multiarray", "scalar"): _unpickle_scalar,
    ("numpy.core.numeric", "_frombuffer"): _unpickle_array,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _unpickle_torch_storage,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that raises a RefusedPickleError for objects that are not in ``_ALLOWED_OBJECTS``."""

    def find_class(self, module: str, name: str) -> object:
        module = {"__builtin__": "builtins"}.get(module, module).replace("numpy._core", "numpy.core")
        if (module, name) not in _ALLOWED_OBJECTS:
            raise RefusedPickleError(f"{module}.{name}")
        return _ALLOWED_OBJECTS[module, name]


def load_pickle(argument: str, path: str | Path) -> Any:
    """Load a pickle of arrays, tensors, numbers, texts and containers, without running code in it.

    Byte strings of Python 2 are read as Latin-1. For any other object in the pickle, an InputError about ``argument``
    is raised, and the object is not created.

    Source: Python's documentation of pickle, "Restricting globals".
    """

    def raise_refused(got: str, remedy: str) -> NoReturn:
        must = "be a pickle of arrays, numbers, text and containers alone"
        raise_input_error(argument, must, f"{path} {got}", remedy)

    try:
        with Path(path).open("rb") as file:
            return _Unpickler(file, encoding="latin1").load()
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path, argument=argument)
    except RefusedPickleError as error:
        raise_refused(f"with {error}, which is not loaded", "Save features with numpy.savez(path, x=x, y=y).")
    except Exception as error:  # a damaged pickle raises anything
        raise_refused(f"({type(error).__name__})", "It is damaged or none: get it again.")


#: Keys under which a dictionary may hold the features; the first key of this list that it has is used.
FEATURE_KEYS = ("x", "features", "feats", "embeddings", "concat_features", "data")
#: Keys under which a dictionary may hold the labels; the first key of this list that it has is used.
LABEL_KEYS = ("y", "labels", "targets", "concat_labels")
#: Possible names of the file with the labels of ``NAME.npy``, in the same folder; the braces stand for NAME.
LABEL_FILES = ("{}.labels.npy", "{}_labels.npy", "labels.npy", "y.npy")


class LabelledArrays(NamedTuple):
    """The features, labels and sides of the split that were read from a file, before they are checked."""

    x: np.ndarray  #: Features (n, ...).
    y: np.ndarray  #: The class (n,) of each row, as integers, strings or bytes.
    #: For each row (n,) the side of the split that its class is on, as strings; None without a split.
    split: np.ndarray | None = None


def load_features(path: str | Path) -> Dataset:
    """Load features and labels from a file of another program. Code in the file is not run.

    Args:
        path: One of

            - ``NAME.npy``: rows (n, ...), with ``NAME.labels.npy``, ``NAME_labels.npy``, ``labels.npy`` or ``y.npy``
              beside it, one label per row;
            - ``*.pt``, ``*.pth``: a file of ``torch.save``, read with ``weights_only``;
            - ``*.plk``, ``*.pkl``, ``*.pickle``: a pickle of arrays, tensors, text and containers (`load_pickle`).

            Files of torch and pickles hold one of

            - a pair of features and labels;
            - a dictionary with a key of ``FEATURE_KEYS``, a key of ``LABEL_KEYS`` and perhaps the key ``split``;
            - a dictionary from classes to their rows, such as ``output.plk`` of S2M2 and PT-MAP.

    Returns:
        A data set of the rows, flattened and not scaled. Integer classes are numbered in ascending order.

    Raises:
        InputError: There is no such file, it holds no features and labels, a feature is not finite, the numbers of
            labels and rows differ, or a class is in two parts of the split.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FEATURE_READERS:
        raise_input_error("path", f"end in {', '.join(FEATURE_READERS)}", path, "Rename it.")
    x, y, split = FEATURE_READERS[suffix](path)
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        got, remedy = f"{x.dtype} {x.shape}", "Save them as floats."
        raise_input_error("path", "hold real features of shape (n, dim)", got, remedy)
    sides = None if split is None else decode_labels("path", split)
    return make_dataset("path", torch.from_numpy(np.array(x, np.float32)), decode_labels("path", y), sides)


def _read_npy(path: Path) -> LabelledArrays:
    """Read the features of an NPY file, and the labels from another NPY file in the same folder."""
    names = [name.format(path.stem) for name in LABEL_FILES]
    label_paths = [path.with_name(name) for name in names if path.with_name(name).is_file() and name != path.name]
    if not path.is_file():
        raise_missing_file(path)
    if not label_paths:
        remedy = "Save one label per row there, or numpy.savez(path, x=x, y=y)."
        raise_input_error("path", f"have its labels beside it, in {names[0]} or {names[1]}", f"{path} alone", remedy)
    return LabelledArrays(memory_map_npy("path", path), memory_map_npy("path", label_paths[0]))


def _read_torch(path: Path) -> LabelledArrays:
    """Read features and labels from a file that ``torch.save`` wrote."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except Exception as error:  # torch raises anything of a damaged file
        got, remedy = f"{path} ({type(error).__name__})", "Save it with torch.save((features, labels), path)."
        raise_input_error("path", "be a file of torch.save, of tensors and containers alone", got, remedy)
    return _extract_arrays(path, content)


#: Maps the suffix of a file to the function that reads the file.
FEATURE_READERS: Mapping[str, Callable[[Path], LabelledArrays]] = {
    ".npy": _read_npy,
    **dict.fromkeys((".pt", ".pth"), _read_torch),
    **dict.fromkeys((".plk", ".pkl", ".pickle"), lambda path: _extract_arrays(path, load_pickle("path", path))),
}


def _extract_arrays(path: Path, content: object) -> LabelledArrays:
    """Extract features and labels from ``content``, the object in a file, in any form that `load_features` lists."""
    if isinstance(content, (list, tuple)) and len(content) == 2:
        return LabelledArrays(_to_array(path, content[0]), _to_array(path, content[1]))
    if not isinstance(content, dict):
        _raise_missing_features(path, f"a {type(content).__name__}")
    x, y = (next((content[name] for name in names if name in content), None) for names in (FEATURE_KEYS, LABEL_KEYS))
    if x is not None and y is not None:
        split = content.get("split")
        sides = None if split is None else _to_array(path, split)
        return LabelledArrays(_to_array(path, x), _to_array(path, y), sides)
    has_rows = all(isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) for value in content.values())
    if not has_rows or not content or {"image_data", "class_dict"} & content.keys():
        _raise_missing_features(path, f"a dictionary of {', '.join(map(str, list(content)[:4])) or 'nothing'}")
    return _concatenate_classes(path, content)


def _concatenate_classes(path: Path, rows_by_class: Mapping[object, object]) -> LabelledArrays:
    """Join a dictionary from classes to their rows into one array of features and one array of labels."""
    arrays = {key: _to_array(path, value) for key, value in rows_by_class.items()}
    arrays = {key: array for key, array in arrays.items() if array.size}
    if len({array.shape[1:] for array in arrays.values()}) != 1:
        _raise_missing_features(path, "classes whose rows are of several shapes")
    keys = [key.item() if isinstance(key, (torch.Tensor, np.generic)) else key for key in arrays]
    labels = np.repeat(np.array(keys), [len(array) for array in arrays.values()])
    return LabelledArrays(np.concatenate(list(arrays.values())), labels)


def _to_array(path: Path, value: object) -> np.ndarray:
    """Convert a tensor, a list of tensors, or an array-like value to an array; errors name the file ``path``."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.float() if value.is_floating_point() else value  # NumPy has no bfloat16
        return np.asarray(value.numpy())
    try:
        if isinstance(value, Sequence) and len(value) and isinstance(value[0], torch.Tensor):
            return _to_array(path, torch.stack(list(value)))
        return np.asarray(value)
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        _raise_missing_features(path, f"rows that are no array ({type(error).__name__})")


def _raise_missing_features(path: Path, got: str) -> NoReturn:
    """Raise an InputError about a file without features and labels; ``got`` describes the content of the file."""
    remedy = "Save it with numpy.savez(path, x=x, y=y); pictures are read as KIND:FOLDER."
    raise_input_error("path", "hold features and labels, or rows by class", f"{got} in {path}", remedy)
