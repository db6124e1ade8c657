"""Validate the rows and labels that the estimator gets, and encode rows as features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_X_y
from sklearn.utils.validation import validate_data
from torch import Tensor

from protonet.embeddings.loading import SelectedEncoders
from protonet.errors import raise_input_error
from protonet.estimator.labels import check_labels, encode_labels, prepare_weights_and_groups, to_exact_labels
from protonet.files.metadata import TrainingMetadata
from protonet.pipeline import TrainingTable
from protonet.tables import frames

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The value of ``y`` with which scikit-learn's ``validate_data`` validates rows without labels.
NO_LABELS = "no_validation"


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledRows(TrainingTable):
    """The labelled rows of ``fit`` or ``partial_fit`` after validation and encoding, with float64 features."""

    labels: np.ndarray  #: (n,) the labels as the caller passed them.
    indices: np.ndarray  #: (n,) int64, the index of each row among the rows that were passed.
    cells: Sequence[np.ndarray]  #: The cells (n,) of each column that is used.
    uninformative_mask: Tensor  #: (n,) bool, rows in which each cell is missing or unknown to the encoding.
    frame_encoding: frames.FrameEncoding | None  #: The encoding of the columns; None for arrays without missing values.


def prepare_labelled_rows(
    estimator: Any,
    X: object,
    y: object,
    sample_weight: object,
    groups: object,
    encoding: frames.FrameEncoding | None,
    *,
    reset: bool,
) -> LabelledRows:
    """Validate and encode labelled rows of weight > 0; if ``reset``, first fit the encoding of their columns."""
    name = getattr(y, "name", None)
    rows, labels = validate_rows_and_labels(estimator, X, to_exact_labels(y), encoded=encoding is not None, reset=reset)
    assert labels is not None
    check_labels(labels)
    chosen, weights, groups = prepare_weights_and_groups(labels, sample_weight, groups)
    if len(chosen) < len(labels):
        rows, labels = rows.select_rows(chosen) if isinstance(rows, frames.Frame) else rows[chosen], labels[chosen]
    if reset and isinstance(rows, frames.Frame):
        selection = SelectedEncoders.from_names(estimator.representation, show_progress=bool(estimator.verbose))
        encoding = frames.fit_frame_columns(rows, estimator.column_kinds, selection, labels)
    features, uninformative_mask = encode_rows(rows, encoding)
    x, classes = frames.to_dense(features), np.unique(labels)
    return LabelledRows(
        x=torch.from_numpy(x),
        y=encode_labels(labels, classes),
        classes=tuple(map(str, classes.tolist())),
        columns=None if encoding is None else encoding.used_names,
        encoding=None if encoding is None else encoding.encoding,
        weights=weights,
        groups=groups,
        labels=labels,
        indices=chosen,
        cells=list(x.T) if encoding is None else [rows.columns[index] for index in encoding.column_indices],
        uninformative_mask=torch.from_numpy(uninformative_mask),
        frame_encoding=encoding,
        metadata=TrainingMetadata(
            **frames.describe_frame_columns(encoding, name if isinstance(name, str) else "label"),
            effort=estimator.effort if isinstance(estimator.effort, str) else None,
            seed=estimator.random_state if isinstance(estimator.random_state, int) else None,
        ),
    )


def validate_rows_and_labels(
    estimator: Any, X: object, y: object = NO_LABELS, *, encoded: bool = False, reset: bool = False
) -> tuple[Any, np.ndarray | None]:
    """Validate rows and labels by scikit-learn's rules; return rows as a `Frame` if they will be ``encoded``."""
    X = frames.to_rows(X)
    frame = frames.read_frame(X)
    if frame is not None and (reset or encoded):
        validate_data(estimator, frame.data_frame, y, reset=reset, skip_check_array=True)
        unlabelled = isinstance(y, str) and y == NO_LABELS
        labels = None if unlabelled else check_X_y(np.zeros((len(frame.columns[0]), 1)), y, estimator=estimator)[1]
        return frame, labels
    checks = {"accept_sparse": "csr", "dtype": np.float64, "ensure_all_finite": "allow-nan"}
    frames.require_numeric_frame(frame)
    checked = validate_data(estimator, X, y, reset=reset, **checks)
    rows, labels = checked if isinstance(checked, tuple) else (checked, None)
    gaps = int(np.isnan(rows.data if sparse.issparse(rows) else rows).sum())
    if encoded or (reset and (estimator.column_kinds or gaps)):
        return frames.make_array_frame(frames.to_dense(rows)), labels
    if gaps:
        remedy = "Fill them in, or fit to a data frame, or to rows with gaps: they are then filled in."
        raise_input_error("X", "have no gaps, as the rows of fit had none", f"{gaps} of NaN", remedy)
    return rows, labels


def encode_rows(rows: Any, encoding: frames.FrameEncoding | None) -> tuple[Any, np.ndarray]:
    """Encode validated rows; return their features (n, dim), and a mask (n,) of rows without a known cell."""
    if isinstance(rows, frames.Frame) and encoding is not None:
        return encoding.encode(rows), encoding.is_uninformative(rows)
    return rows, np.zeros(rows.shape[0], bool)
