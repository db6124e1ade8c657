"""Labels and weights as arrays have them; which rows have no label: None, a gap, or -1 as in scikit-learn."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import _safe_indexing, check_consistent_length
from torch import Tensor

from protonet._text import to_printable
from protonet.errors import InputTypeError, raise_input_error

#: Up to this share of rows of -1, where it is taken for no label, somebody may have meant a class.
DOUBTFUL = 0.5


def detect_unlabelled(y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Find rows without a label.

    Args:
        y: (n,) or (n, 1) labels of any kind. None, NaN and pandas' NA are none; so is -1 where all other labels are
            whole numbers from 0 on, and two at least, or where there are no others.

    Returns:
        The indices (m,) int64 of the rows without a label, and all labels (n,). Other arrays are returned unchanged.

    Warns:
        UserWarning: At most half of the rows are unlabelled, and some because their label is -1.
    """
    labels = np.asarray(y.to_numpy() if hasattr(y, "to_numpy") else y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iufO":
        return np.empty(0, np.int64), labels
    cells = labels.tolist()
    missing = [_is_gap(cell) for cell in cells]
    there = [cell for cell, is_missing in zip(cells, missing, strict=True) if not is_missing]
    if all(map(_is_integer, there)) and -1 in there:
        others = set(there) - {-1}
        if len(others) != 1 and min(others, default=0) >= 0:
            missing = [is_missing or cell == -1 for cell, is_missing in zip(cells, missing, strict=True)]
            marked = there.count(-1)
            if others and sum(missing) <= DOUBTFUL * len(cells):
                text = f"{marked} of {len(cells)} rows have the label -1, which is taken for none."
                warnings.warn(f"{text} If it is a class, name the classes otherwise: y.astype(str).", stacklevel=4)
    return np.flatnonzero(missing), labels


def split_unlabelled(X: Any, y: Any, sample_weight: Any, groups: Any) -> tuple[Any, Any, Any, Any, list[Any]]:
    """Separate rows without a label, of `detect_unlabelled`, from the others.

    Args:
        X: (n, n_features) rows of any kind that scikit-learn indexes.
        y: (n,) labels.
        sample_weight: (n,), a number or None.
        groups: (n,) or None.

    Returns:
        The same of the rows with a label, and a list of the rows without one: empty if there are none.

    Raises:
        InputError: No row has a label.
    """
    missing, labels = detect_unlabelled(y)
    if not len(missing):
        return X, y, sample_weight, groups, []
    if np.isscalar(sample_weight):
        sample_weight = np.full(len(labels), sample_weight)
    check_consistent_length(X, labels, sample_weight, groups)
    labelled = np.setdiff1d(np.arange(len(labels)), missing)
    if not len(labelled):
        remedy = "Label some; protonet suggest names the first ones."
        raise_input_error("y", "have rows with a label", "none", remedy)
    X = X.tocsr() if sparse.issparse(X) else X
    labelled_parts = [None if part is None else _safe_indexing(part, labelled) for part in (X, sample_weight, groups)]
    return (
        labelled_parts[0],
        labels[labelled].tolist(),
        labelled_parts[1],
        labelled_parts[2],
        [_safe_indexing(X, missing)],
    )


def _is_gap(label: Any) -> bool:
    """Return whether a label is None, not a number or not a time, or pandas' NA."""
    named = label is None or type(label).__name__ in {"NAType", "NaTType"}
    return named or (isinstance(label, float) and math.isnan(label))


def _is_integer(label: Any) -> bool:
    """Return whether a label is a whole number, of any type."""
    is_number = isinstance(label, (int, float)) and not isinstance(label, bool)
    return is_number and math.isfinite(label) and label % 1 == 0


def check_one_kind(argument: str, labels: np.ndarray) -> None:
    """Raise an InputTypeError where labels (n,) are of kinds that are in no order, such as text and numbers."""
    if labels.dtype.kind != "O":
        return
    first: dict[bool, Any] = {}
    for label in labels.tolist():
        first.setdefault(isinstance(label, str), label)
    if len(first) > 1:
        got = f"the text {to_printable(repr(first[True]))} and {to_printable(repr(first[False]))}"
        raise_input_error(argument, "be all text or all numbers", got, "Fit to y.astype(str).", kind=InputTypeError)


def check_labels(labels: np.ndarray) -> None:
    """Raise an error where labels (n,) are no classes: of several kinds, with fractions, or of several columns."""
    from sklearn.utils.multiclass import check_classification_targets, type_of_target  # noqa: PLC0415 - optional

    check_one_kind("y", labels)
    if (kind := type_of_target(labels)).startswith("continuous"):
        remedy = "Cut them into classes first; to predict a number is another task."
        raise_input_error("y", "name classes", f"numbers with fractions ({kind})", remedy)
    check_classification_targets(labels)


def encode_labels(labels: np.ndarray, classes: np.ndarray) -> Tensor:
    """Return the places (n,) of labels (n,) among the classes, which are in ascending order."""
    return torch.from_numpy(np.searchsorted(classes, labels))


def name_classes(classes: np.ndarray) -> tuple[str, ...] | tuple[int, ...]:
    """Return classes (n,) as model files have them; raise an InputError if they are of other types."""
    names = classes.tolist()
    unsupported = [name for name in names if isinstance(name, bool) or not isinstance(name, (str, int))]
    texts = tuple(str(name) for name in names if isinstance(name, str))
    if unsupported or 0 < len(texts) < len(names):
        got = f"{to_printable(repr((unsupported or names)[0]))} among them ({classes.dtype})"
        raise_input_error("classes_", "be all strings or all whole numbers to be saved", got, "Fit to y.astype(str).")
    return texts or tuple(map(int, names))


def normalize_weights(weights: Tensor | None) -> Tensor | None:
    """Return weights (n,) of mean 1, if there are any: what so many rows count for."""
    return None if weights is None else weights / weights.mean()
