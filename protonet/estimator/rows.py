"""Validate the rows and labels that the estimator gets, and encode rows as features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_X_y
from sklearn.utils.validation import validate_data

from protonet.errors import raise_input_error
from protonet.estimator import frames
from protonet.estimator.labels import check_labels, encode_labels, prepare_weights_and_groups, to_exact_labels
from protonet.pipeline import TablePipeline
from protonet.tables.table import RowBlock
from protonet.tables.training import TrainingTable

#: The value of ``y`` with which scikit-learn's ``validate_data`` validates rows without labels.
NO_LABELS = "no_validation"


def prepare_labelled_rows(
    estimator: Any,
    X: object,
    y: object,
    sample_weight: object,
    groups: object,
    fitted: TrainingTable | TablePipeline | None,
) -> TrainingTable:
    """Validate and encode labelled rows of weight > 0; if nothing is ``fitted``, fit the encoding of their columns.

    The labels of the rows are those that the caller passed, and the features are float64.
    """
    reset, X = fitted is None, frames.to_arrow_table(frames.to_rows(X))
    rows, labels = validate_rows_and_labels(estimator, X, to_exact_labels(y), fitted, reset=reset)
    assert labels is not None
    check_labels(labels)
    chosen, weights, groups = prepare_weights_and_groups(labels, sample_weight, groups)
    if len(chosen) < len(labels):
        rows, labels = rows.select_rows(chosen) if isinstance(rows, RowBlock) else rows[chosen], labels[chosen]
    names = np.unique(labels)
    classes, indices = tuple(map(str, names.tolist())), encode_labels(labels, names)
    if reset and isinstance(rows, RowBlock):
        types, verbose = frames.find_column_types(X, rows, estimator.column_kinds), bool(estimator.verbose)
        encoders = estimator.representation
        # Labels decide whether columns of proper names are used.
        table = TrainingTable.from_frame(
            rows._replace(labels=labels), indices.numpy(), classes, types, encoders=encoders, show_progress=verbose
        )
    else:
        features, mask = encode_rows(rows, fitted)
        x = frames.to_dense(features)
        table = TrainingTable(
            rows=rows if isinstance(rows, RowBlock) else RowBlock.from_columns(list(x.T)),
            x=torch.from_numpy(x),
            y=indices,
            classes=classes,
            encoding=None,
            uninformative_mask=torch.from_numpy(mask),
        )
    positions = chosen.tolist()
    rows = table.rows._replace(labels=labels, positions=positions, row_indices=positions)
    return replace(table, rows=rows, weights=weights, groups=groups)


def validate_rows_and_labels(
    estimator: Any,
    X: object,
    y: object = NO_LABELS,
    fitted: TrainingTable | TablePipeline | None = None,
    *,
    reset: bool = False,
) -> tuple[Any, np.ndarray | None]:
    """Validate rows and labels by scikit-learn's rules; return the rows as a `RowBlock` if they will be encoded.

    They will be by the encoding of a ``fitted`` table or pipeline, if it has one. If there is no fitted one, an
    encoding is to be fitted to them.
    """
    X = frames.to_arrow_table(frames.to_rows(X))
    frame, has_encoding = frames.read_frame(X), fitted is None or fitted.encoding is not None
    if frame is not None and has_encoding:
        validate_data(estimator, X, y, reset=reset, skip_check_array=True)
        unlabelled = isinstance(y, str) and y == NO_LABELS
        labels = None if unlabelled else check_X_y(np.zeros((len(frame.positions), 1)), y, estimator=estimator)[1]
        return frame, labels
    checks = {"accept_sparse": "csr", "dtype": np.float64, "ensure_all_finite": "allow-nan"}
    frames.require_numeric_frame(frame)
    checked = validate_data(estimator, X, y, reset=reset, **checks)
    rows, labels = checked if isinstance(checked, tuple) else (checked, None)
    gaps = int(np.isnan(rows.data if sparse.issparse(rows) else rows).sum())
    if (fitted is not None and has_encoding) or (reset and (estimator.column_kinds or gaps)):
        return RowBlock.from_columns(list(frames.to_dense(rows).T)), labels
    if gaps:
        remedy = "Fill them in, or fit to a data frame, or to rows with gaps: they are then filled in."
        raise_input_error("X", "have no gaps, as the rows of fit had none", f"{gaps} of NaN", remedy)
    return rows, labels


def encode_rows(
    rows: Any, fitted: TrainingTable | TablePipeline | None, *, keep_gaps: bool = False
) -> tuple[Any, np.ndarray]:
    """Encode validated rows; return their features (n, dim), and a mask (n,) of rows without a known cell."""
    if isinstance(rows, RowBlock) and fitted is not None and fitted.encoding is not None:
        names = fitted.columns, list(fitted.column_descriptions)
        return frames.encode_frame(rows, fitted.encoding, *names, keep_gaps=keep_gaps)
    return rows, np.zeros(rows.shape[0], bool)
