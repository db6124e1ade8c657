"""Validation of labels and weights from arrays; detection of unlabelled rows: None, NaN, or -1 as in scikit-learn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import _safe_indexing, check_consistent_length, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor

from protonet._text import shorten_list, to_printable
from protonet._validation import check_groups
from protonet.errors import InputTypeError, raise_input_error
from protonet.files.metadata import TrainingMetadata

#: If at most this fraction of the rows is unlabelled, a warning says that the label -1 means unlabelled.
MAX_WARNED_UNLABELLED_FRACTION = 0.5


def detect_unlabelled(y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Detect rows without a label; return the indices (m,) of these rows, and the labels (n,) of all rows as an array.

    None, NaN and pandas' NA mean unlabelled. The label -1 means unlabelled, too, if all other labels are integers >= 0
    of at least two classes, or if there are no other labels. A warning then explains the meaning of -1, unless most
    rows are unlabelled or there are no other labels.
    """
    labels = _to_array(y)
    missing, codes = _mask_unlabelled(labels, [])
    if codes.any() and (missing | codes).mean() <= MAX_WARNED_UNLABELLED_FRACTION:
        text = f"{codes.sum()} of {len(labels)} rows have the label -1, which means unlabelled."
        warnings.warn(f"{text} If it is a class, rename the classes: y.astype(str).", stacklevel=4)
    return np.flatnonzero(missing | codes), labels


def require_labels(y: Any, classes: list[Any]) -> None:
    """Raise an InputError if rows of y (n,) have no label, by the rule of `detect_unlabelled`.

    Args:
        y: (n,) the labels of an array, a list or a pandas Series.
        classes: The labels of the classes that the model knows. If -1 is one of them, it is no code for unlabelled
            rows.
    """
    labels = _to_array(y)
    missing, codes = _mask_unlabelled(labels, classes)
    if unlabelled := np.count_nonzero(missing | codes):
        remedy = "Pass rows without a label to fit; if -1 is a class, rename the classes: y.astype(str)."
        raise_input_error("y", "have a label for each row", f"{unlabelled} of {len(labels)} without one", remedy)


def to_exact_labels(y: Any) -> Any:
    """Convert labels of an extension type of pandas, such as Int64, to an array, without a detour over floats."""
    is_extension = hasattr(y, "array") and not isinstance(y.dtype, np.dtype)
    return np.array(_to_array(y).tolist()) if is_extension else y


def _to_array(y: Any) -> np.ndarray:
    """Convert labels to an array, (n,) if they are one column; those of an extension type of pandas become objects."""
    if hasattr(y, "array") and not isinstance(y.dtype, np.dtype):
        y = y.astype(object)
    labels = np.asarray(y.to_numpy() if hasattr(y, "to_numpy") else y)
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels


def _mask_unlabelled(labels: np.ndarray, classes: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Compute masks (n,) of missing labels, and of labels -1 if they mean unlabelled; ``classes`` are known labels."""
    if labels.ndim != 1 or labels.dtype.kind not in "iufO":
        return np.zeros(0, bool), np.zeros(0, bool)
    cells = labels.tolist()
    missing = np.array([_is_missing(cell) for cell in cells], bool)
    present = [*classes, *(cell for cell, is_missing in zip(cells, missing, strict=True) if not is_missing)]
    if all(map(_is_integer, present)) and -1 in present and -1 not in classes:
        others = set(present) - {-1}
        if len(others) != 1 and min(others, default=0) >= 0:
            return missing, np.array([not _is_missing(cell) and cell == -1 for cell in cells], bool)
    return missing, np.zeros_like(missing)


def split_unlabelled(
    X: Any, y: Any, sample_weight: Any, groups: Any
) -> tuple[Any, Any, Any, Any, list[Any], np.ndarray | None]:
    """Separate the labelled rows from the unlabelled rows, as `detect_unlabelled` finds them in y.

    Returns six parts: X, y, ``sample_weight`` and ``groups`` of the labelled rows; a list with one entry, X of the
    unlabelled rows; and the indices (n,) of the labelled rows. If all rows have a label, the list is empty, and there
    are no indices, but None. Raises an InputError if no row has a label.
    """
    missing, labels = detect_unlabelled(y)
    if not len(missing):
        return X, y, sample_weight, groups, [], None
    if np.isscalar(sample_weight):
        sample_weight = np.full(len(labels), sample_weight)
    check_consistent_length(X, labels, sample_weight, groups)
    labelled = np.setdiff1d(np.arange(len(labels)), missing)
    if not len(labelled):
        remedy = "Label some rows; protonet suggest lists the first ones."
        raise_input_error("y", "have rows with a label", "none", remedy)
    X = X.tocsr() if sparse.issparse(X) else X
    unlabelled = [_safe_indexing(X, missing)]
    parts = (X, sample_weight, groups)
    X, sample_weight, groups = (None if part is None else _safe_indexing(part, labelled) for part in parts)
    return X, labels[labelled].tolist(), sample_weight, groups, unlabelled, labelled


def _is_missing(label: Any) -> bool:
    """Test whether a label is None, NaN, NaT, or pandas' NA."""
    named = label is None or type(label).__name__ in {"NAType", "NaTType"}
    return named or (isinstance(label, float) and math.isnan(label))


def _is_integer(label: Any) -> bool:
    """Test whether a label is a number without a fraction, of any type but bool."""
    numeric = isinstance(label, (int, float)) and not isinstance(label, bool)
    return numeric and math.isfinite(label) and label % 1 == 0


def check_one_label_type(argument: str, labels: np.ndarray) -> None:
    """Raise an InputTypeError if labels (n,) mix types that cannot be sorted, such as text and numbers."""
    if labels.dtype.kind != "O":
        return
    first: dict[bool, Any] = {}
    for label in labels.tolist():
        first.setdefault(isinstance(label, str), label)
    if len(first) > 1:
        got = f"the text {to_printable(repr(first[True]))} and {to_printable(repr(first[False]))}"
        raise_input_error(argument, "be all text or all numbers", got, "Fit to y.astype(str).", kind=InputTypeError)


def concatenate_labels(label_arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate arrays of labels; raise an InputTypeError if some are text and others are not."""
    filled = [part for part in label_arrays if len(part)] or label_arrays[:1]
    if len({part.dtype.kind for part in filled}) == 1:
        return np.concatenate(filled)
    joined = np.concatenate([part.astype(object) for part in filled])
    check_one_label_type("y", joined)
    return np.array(joined.tolist())


def check_labels(labels: np.ndarray) -> None:
    """Raise an error if labels (n,) are not classes: mixed types, numbers with fractions, or several columns."""
    from sklearn.utils.multiclass import check_classification_targets, type_of_target  # noqa: PLC0415 - optional

    check_one_label_type("y", labels)
    if (kind := type_of_target(labels)).startswith("continuous"):
        remedy = "Bin them into classes first; regression is not supported."
        raise_input_error("y", "name classes", f"numbers with fractions ({kind})", remedy)
    check_classification_targets(labels)


def prepare_weights_and_groups(
    labels: np.ndarray, sample_weight: Any, groups: Any
) -> tuple[np.ndarray, Tensor | None, Tensor | None]:
    """Validate the sample weights and groups of labelled rows, and drop rows of weight 0.

    Returns three parts: the indices (m,) of the rows that are kept; their weights (m,) float64, scaled to (0, 1], or
    None without weights; and their group ids (m,) int64, or None without groups. Raises an InputError if no weight is
    above 0, or if one group has all rows of a class.
    """
    chosen, weights = np.arange(len(labels)), None
    if groups is not None:
        groups = column_or_1d(groups)
        missing = [row for row, group in enumerate(groups.tolist()) if _is_missing(group)]
        if missing:
            got = f"none in row {missing[0]}"
            raise_input_error("groups", "name the group of each row", got, "Give such rows a group of their own.")
        groups = np.unique(groups, return_inverse=True)[1]
        check_consistent_length(labels, groups)
    if sample_weight is not None:
        weights = _check_sample_weight(sample_weight, labels, dtype=np.float64, ensure_non_negative=True)
        chosen = np.flatnonzero(weights)
        if not len(chosen):
            remedy = "Pass None to weigh all alike."
            raise_input_error("sample_weight", "have a weight above 0", "0 for every row", remedy)
        weights = torch.from_numpy(weights[chosen] / weights.max())
    if groups is not None:
        groups = groups[chosen]
        check_groups("groups", groups.tolist(), labels[chosen].tolist())
        groups = torch.from_numpy(groups)
    return chosen, weights, groups


def encode_labels(labels: np.ndarray, classes: np.ndarray) -> Tensor:
    """Compute the class index (n,) int64 of each label (n,), given the sorted classes."""
    return torch.from_numpy(np.searchsorted(classes, labels))


def to_class_names(classes: np.ndarray) -> tuple[str, ...] | tuple[int, ...]:
    """Convert classes to strings or integers for a model file; raise an InputError if they have other types.

    Floats without a fraction become integers: scikit-learn converts integers with missing values to floats. Booleans
    become "False" and "True", as in tables.
    """
    if are_booleans(classes):
        return tuple(map(str, classes.tolist()))
    names = [int(name) if isinstance(name, float) and name.is_integer() else name for name in classes.tolist()]
    unsupported = [name for name in names if isinstance(name, bool) or not isinstance(name, (str, int))]
    texts = tuple(str(name) for name in names if isinstance(name, str))
    if unsupported or 0 < len(texts) < len(names):
        got = f"{to_printable(repr((unsupported or names)[0]))} among them ({classes.dtype})"
        raise_input_error("classes_", "be all strings or all whole numbers to be saved", got, "Fit to y.astype(str).")
    return texts or tuple(map(int, names))


def are_booleans(classes: np.ndarray) -> bool:
    """Test whether all classes are booleans."""
    return all(isinstance(name, bool) for name in classes.tolist())


def from_class_names(names: Sequence[str] | Sequence[int], metadata: TrainingMetadata) -> np.ndarray:
    """Convert the class names of a model file to labels, with the metadata of the file: reverses `to_class_names`."""
    return np.array([name == "True" for name in names] if metadata.has_boolean_classes else names)


def normalize_weights(weights: Tensor | None) -> Tensor | None:
    """Scale weights (n,) to a mean of 1, or return None if they are None."""
    return None if weights is None else weights / weights.mean()


def apply_class_weights(
    class_weight: str | Mapping[Any, float] | None, y: np.ndarray, weights: Tensor | None
) -> Tensor | None:
    """Multiply sample weights (n,) by the class weight of each label y (n,).

    ``class_weight`` is as in scikit-learn: "balanced", a dict from labels to weights > 0, or None for equal weights.
    Returns the product (n,), or None if both the class weights and the sample weights are None.
    """
    if class_weight is None:
        return weights
    is_sound = isinstance(class_weight, Mapping) and all(weight > 0 for weight in class_weight.values())
    if class_weight != "balanced" and not is_sound:
        raise_input_error("class_weight", 'be "balanced", a dict of weights > 0, or None', repr(class_weight), "")
    by_class = class_weight if isinstance(class_weight, str) else dict(class_weight)
    if isinstance(by_class, dict):
        classes = np.unique(y).tolist()
        unknown = [label for label in by_class if label not in classes]
        if unknown and not by_class.keys() >= set(classes):
            remedy = f"The classes are {shorten_list(map(repr, classes))}."
            raise_input_error("class_weight", "name classes of y", shorten_list(map(repr, unknown)), remedy)
    of_rows = torch.from_numpy(compute_sample_weight(by_class, y))
    return of_rows if weights is None else of_rows * weights
