"""Load features from files of other programs: NPY files with a file of labels beside them, torch files and pickles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from protonet.datasets.dataset import Dataset, make_dataset
from protonet.datasets.unpickling import load_pickle
from protonet.errors import raise_input_error, raise_missing_file
from protonet.tables.arrays import decode_labels, memory_map_npy

#: Keys under which a dictionary may hold the features; the first key of this list that it has is used.
FEATURE_KEYS = ("x", "features", "feats", "embeddings", "concat_features", "data")
#: Keys under which a dictionary may hold the labels; the first key of this list that it has is used.
LABEL_KEYS = ("y", "labels", "targets", "concat_labels")
#: Possible names of the file with the labels of ``NAME.npy``, in the same folder; the braces stand for NAME.
LABEL_FILES = ("{}.labels.npy", "{}_labels.npy", "labels.npy", "y.npy")


class LabelledArrays(NamedTuple):
    """The features, labels and sides that were read from a file, not yet checked."""

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
            - a dictionary from classes to their rows, such as ``output.plk`` of S2M2 and PT-MAP;
            - a list of four, whose third entry is such a dictionary, as LaplacianShot writes it.

    Returns:
        A data set of the rows, flattened and not scaled. Integer classes are numbered in ascending order.

    Raises:
        InputError: There is no such file, it holds no features and labels, a feature is not finite, the numbers of
            labels and rows differ, or a class is on two sides.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FEATURE_READERS:
        raise_input_error("path", f"end in {', '.join(FEATURE_READERS)}", path, "Rename it.")
    x, y, split = FEATURE_READERS[suffix](path)
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise_input_error(
            "path", "hold real features of shape (n, dim)", f"{x.dtype} {x.shape}", "Save them as floats."
        )
    sides = None if split is None else decode_labels("path", split)
    return make_dataset("path", torch.from_numpy(np.array(x, np.float32)), decode_labels("path", y), sides)


def _read_npy(path: Path) -> LabelledArrays:
    """Read the features of an NPY file, and their labels from the file of labels in the same folder."""
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
    """Find features and labels in the object that a file holds, in any of the forms that `load_features` lists."""
    if isinstance(content, (list, tuple)) and len(content) == 4 and isinstance(content[2], dict):
        content = content[2]  # LaplacianShot: the other entries are means and scores
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
    """Raise an InputError about a file that holds no features with labels; ``got`` says what it holds instead."""
    remedy = "Save it with numpy.savez(path, x=x, y=y); pictures are read as KIND:FOLDER."
    raise_input_error("path", "hold features and labels, or rows by class", f"{got} in {path}", remedy)
