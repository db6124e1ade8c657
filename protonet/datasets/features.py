"""Features as others save them: NPY beside its labels, torch's files, and pickles of rows by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from protonet.datasets.dataset import Dataset, make_dataset
from protonet.datasets.unpickling import load_pickle
from protonet.errors import raise_input_error, raise_missing_file
from protonet.tables.arrays import decode_labels, memory_map

#: What features, and their labels, are called in files of several things.
FEATURES = ("x", "features", "feats", "embeddings", "concat_features", "data")
LABELS = ("y", "labels", "targets", "concat_labels")
#: Names of the files of labels beside ``NAME.npy``, in the same folder.
LABEL_FILES = ("{}.labels.npy", "{}_labels.npy", "labels.npy", "y.npy")


class Content(NamedTuple):
    """Features, and a label of each."""

    x: np.ndarray  #: (n, ...).
    y: np.ndarray  #: (n,) integers, strings or bytes.
    split: np.ndarray | None = None  #: (n,) strings.


def load_features(path: str | Path) -> Dataset:
    """Load features from a file of another program. Nothing in it is run.

    Args:
        path: One of

            - ``NAME.npy``: rows (n, ...), with ``NAME.labels.npy``, ``NAME_labels.npy``, ``labels.npy`` or ``y.npy``
              beside it, one label per row;
            - ``*.pt``, ``*.pth``: what ``torch.save`` wrote, read with ``weights_only``;
            - ``*.plk``, ``*.pkl``, ``*.pickle``: a pickle of arrays, tensors, text and containers (`load_pickle`).

            The two last hold a pair of features and labels; a dictionary of them, under one of the names ``FEATURES``
            and ``LABELS``, perhaps with ``split``; or a dictionary from classes to their rows, as the ``output.plk`` of
            S2M2, PT-MAP and others, alone or, as LaplacianShot's, behind the means of base classes.

    Returns:
        The rows, flattened and not scaled. Integer classes are numbered in ascending order.

    Raises:
        InputError: There is no such file, it holds something else or nothing that is read, there is NaN, labels and
            rows are not as many, or a class is on two sides.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FEATURE_READERS:
        raise_input_error("path", f"end in {', '.join(FEATURE_READERS)}", path, "Rename it.")
    rows = FEATURE_READERS[suffix](path)
    if rows.x.dtype.kind not in "biuf" or rows.x.ndim < 2:
        got = f"{rows.x.dtype} {rows.x.shape}"
        raise_input_error("path", "hold real features of shape (n, dim)", got, "Save them as floats.")
    x = torch.from_numpy(np.array(rows.x, np.float32))
    split = None if rows.split is None else decode_labels("path", rows.split)
    return make_dataset("path", x, decode_labels("path", rows.y), split)


def _read_npy(path: Path) -> Content:
    """Read an NPY file and the one of labels beside it."""
    names = [name.format(path.stem) for name in LABEL_FILES]
    label_paths = [path.with_name(name) for name in names if path.with_name(name).is_file() and name != path.name]
    if not path.is_file():
        raise_missing_file(path)
    if not label_paths:
        remedy = "Save one label per row there, or numpy.savez(path, x=x, y=y)."
        raise_input_error("path", f"have its labels beside it, in {names[0]} or {names[1]}", f"{path} alone", remedy)
    return Content(*(memory_map("path", file) for file in (path, label_paths[0])))


def _read_torch(path: Path) -> Content:
    """Read a file of ``torch.save``."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except Exception as error:  # torch raises anything of a damaged file
        got, remedy = f"{path} ({type(error).__name__})", "Save it with torch.save((features, labels), path)."
        raise_input_error("path", "be a file of torch.save, of tensors and containers alone", got, remedy)
    return _interpret(path, content)


#: What reads a file, by how its name ends.
FEATURE_READERS: Mapping[str, Callable[[Path], Content]] = {
    ".npy": _read_npy,
    **dict.fromkeys((".pt", ".pth"), _read_torch),
    **dict.fromkeys((".plk", ".pkl", ".pickle"), lambda path: _interpret(path, load_pickle("path", path))),
}


def _interpret(path: Path, content: object) -> Content:
    """Return features and labels, in whatever form they are."""
    if isinstance(content, (list, tuple)) and len(content) == 4 and isinstance(content[2], dict):
        content = content[2]  # means and scores beside it
    if isinstance(content, (list, tuple)) and len(content) == 2:
        return Content(_as_array(path, content[0]), _as_array(path, content[1]))
    if not isinstance(content, dict):
        _refuse(path, f"a {type(content).__name__}")
    x, y = (next((content[name] for name in names if name in content), None) for names in (FEATURES, LABELS))
    if x is not None and y is not None:
        split = content.get("split")
        return Content(_as_array(path, x), _as_array(path, y), None if split is None else _as_array(path, split))
    rows = all(isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) for value in content.values())
    if not rows or not content or {"image_data", "class_dict"} & content.keys():
        _refuse(path, f"a dictionary of {', '.join(map(str, list(content)[:4])) or 'nothing'}")
    return _join_classes(path, content)


def _join_classes(path: Path, by_class: Mapping[object, object]) -> Content:
    """Return the rows of a dictionary from classes to rows."""
    arrays = {key: _as_array(path, value) for key, value in by_class.items()}
    rows = {key: value for key, value in arrays.items() if value.size}
    if len({part.shape[1:] for part in rows.values()}) != 1:
        _refuse(path, "classes whose rows are of several shapes")
    keys = [key.item() if isinstance(key, (torch.Tensor, np.generic)) else key for key in rows]
    labels = np.repeat(np.array(keys), [len(part) for part in rows.values()])
    return Content(np.concatenate(list(rows.values())), labels)


def _as_array(path: Path, value: object) -> np.ndarray:
    """Return a tensor, an array or a list of these or of numbers or text as an array."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.float() if value.is_floating_point() else value  # NumPy has no bfloat16
        return np.asarray(value.numpy())
    try:
        if isinstance(value, Sequence) and len(value) and isinstance(value[0], torch.Tensor):
            return _as_array(path, torch.stack(list(value)))
        return np.asarray(value)
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        _refuse(path, f"rows that are no array ({type(error).__name__})")


def _refuse(path: Path, got: str) -> NoReturn:
    """Raise an InputError: a file holds no features."""
    remedy = "Save it with numpy.savez(path, x=x, y=y); pictures are read as KIND:FOLDER."
    raise_input_error("path", "hold features and labels, or rows by class", f"{got} in {path}", remedy)
