"""Cross-validate a fitted model, store its rows in the model file, and fit it again with more rows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from protonet.errors import raise_input_error
from protonet.fit.cross_validation import (
    CrossValidation,
    balanced_class_weights,
    cross_validate,
    held_out_indices,
    restore_row_counts,
)
from protonet.fit.duplicates import hash_rows
from protonet.fit.search import FitProgress, ignore_progress
from protonet.fit.solver import TIME_LIMIT, Solution
from protonet.fit.uninformative import pad_class_counts
from protonet.pipeline import TablePipeline
from protonet.tables.table import RowBlock
from protonet.tables.training import TrainingTable

#: Fraction of the time limit, and of the progress bar, for model selection; cross-validation takes the remainder.
SOLVE_TIME_FRACTION = 0.6
#: Names of the tensors of a model file with the features, labels and groups of all training rows.
STORED_FEATURES, STORED_LABELS, STORED_GROUPS = "stored_features", "stored_labels", "stored_groups"


def cross_validate_model(
    table: TrainingTable, model: TablePipeline, solution: Solution, deadline: float, progress: FitProgress
) -> tuple[TablePipeline, CrossValidation]:
    """Cross-validate a model until ``deadline``; return it with the results, and the cross-validation."""
    cv = cross_validate(solution, deadline=deadline, progress=progress)
    if table.weights is not None:
        cv = restore_row_counts(cv, table.y, table.weights, count_class_names(model, solution))
    # The names of the groups are in the order of the groups of the solution.
    merged = [] if solution.merged_groups is None else solution.merged_groups.tolist()
    # Equal rows are merged into one held-out row, which has the position of the first equal row.
    indices, first = np.unique(held_out_indices(solution.training_set).numpy(), return_index=True)
    positions = torch.tensor(table.rows.positions)[first[indices >= 0]]
    groups = dict(zip(table.group_names, merged, strict=True))
    return model.with_cross_validation(cv, groups, hash_rows(table.x), positions), cv


def count_class_names(model: TablePipeline, solution: Solution) -> Tensor | None:
    """Count the samples (num_classes,) that the name of each class stands for; None if names are no samples."""
    return None if solution.class_names is None else solution.class_names.count_class_samples(len(model.classes))


def store_rows(model: TablePipeline, table: TrainingTable) -> TablePipeline:
    """Copy a model with the features, labels and groups of its training rows, so that `fit_again` can use them."""
    stored = {STORED_FEATURES: table.x, STORED_LABELS: table.y}
    stored |= {} if table.groups is None else {STORED_GROUPS: table.groups}
    return replace(model, update_state=model.update_state | stored)


def count_stored_bytes(model: TablePipeline) -> int:
    """Count the bytes of the stored training rows before compression; 0 if there are none."""
    return sum(tensor.nbytes for name, tensor in model.update_state.items() if name.startswith("stored_"))


def fit_again(
    model: TablePipeline,
    x: Tensor,
    labels: np.ndarray,
    classes: tuple[str, ...] | tuple[int, ...],
    *,
    groups: Sequence[str] | None = None,
    uninformative_mask: np.ndarray,
    progress: FitProgress = ignore_progress,
) -> tuple[TablePipeline, CrossValidation]:
    """Fit a model to its stored rows and to new ones, and cross-validate it; the encoding of the columns stays.

    The arguments are those of `TablePipeline.update`. Class weights, time limit and seed are those of ``fit``.

    Raises:
        InputError: The stored rows do not fit the model.
    """
    metadata, state, extended = model.metadata, model.update_state, replace(model, classes=classes)
    stored_x, stored_y, stored_groups = (state.get(name) for name in (STORED_FEATURES, STORED_LABELS, STORED_GROUPS))
    names = {name: index for index, name in enumerate(metadata.group_indices)}
    if not _are_valid(model, stored_x, stored_y, stored_groups, len(names)) or stored_x is None or stored_y is None:
        raise_input_error("model", "have stored rows that fit it", "others", "Fit it again.")
    indices, all_groups = extended.class_indices(labels), None
    if groups is not None and stored_groups is not None:
        for name in groups:
            names.setdefault(name, len(names))
        all_groups = torch.cat([stored_groups, torch.tensor([names[name] for name in groups])])
    y, rows = torch.cat([stored_y, indices]), range(len(stored_y) + len(indices))
    named = () if metadata.class_names is None else metadata.class_names.descriptions
    table = TrainingTable(
        rows=RowBlock([], rows, rows, model.columns),
        x=torch.cat([stored_x, x.to(stored_x.dtype)]),
        y=y,
        classes=classes,
        encoding=model.encoding,
        uninformative_mask=torch.zeros(len(y), dtype=torch.bool),
        weights=balanced_class_weights(y) if metadata.balanced else None,
        groups=all_groups,
        group_names=list(names) if all_groups is not None else (),
        descriptions=[*named, *[""] * (len(classes) - len(named))] if named else (),
    )
    counts = pad_class_counts(metadata.uninformative_counts, len(classes))
    counts += torch.bincount(indices[torch.from_numpy(uninformative_mask)], minlength=len(classes))
    limit, started = metadata.time_limit, time.monotonic()
    fitted, solution = TablePipeline.fit(
        table,
        metadata=replace(
            metadata,
            uninformative_counts=tuple(counts.tolist()) if counts.any() else (),
            position_format="row {} of fit and updates (counted from 0)",
        ),
        time_limit=TIME_LIMIT if limit is None else SOLVE_TIME_FRACTION * limit,
        seed=metadata.seed or 0,
        progress=lambda stage, fraction: progress(stage, SOLVE_TIME_FRACTION * fraction),
    )
    fitted, cv = cross_validate_model(
        table,
        fitted,
        solution,
        math.inf if limit is None else started + limit,
        lambda stage, fraction: progress(stage, SOLVE_TIME_FRACTION + (1 - SOLVE_TIME_FRACTION) * fraction),
    )
    return store_rows(fitted, table), cv


def _are_valid(
    model: TablePipeline, features: Tensor | None, labels: Tensor | None, groups: Tensor | None, n_groups: int
) -> bool:
    """Test whether tensors of a model file, which is not trusted, are rows of the model, their labels and groups."""
    if features is None or labels is None:
        return False
    indices = [(labels, len(model.classes)), *([] if groups is None else [(groups, n_groups)])]
    are_indices = all(
        values.dtype == torch.int64
        and values.shape == features.shape[:1]
        and bool(((values >= 0) & (values < limit)).all())
        for values, limit in indices
    )
    return are_indices and features.is_floating_point() and features.shape == (len(labels), model.input_dim)
