"""The contents of the report and its JSON: table, predictions, calibration, columns and learning curve."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.commands.models import get_column_names
from protonet.files import Model
from protonet.fit.crossfit import Crossfit
from protonet.fit.importance import rank_columns
from protonet.fit.learning import extrapolate_accuracy, measure_learning_curve
from protonet.fit.search import Progress
from protonet.fit.solver import Solution
from protonet.metrics import fill_bins, score_label_errors, wilson_interval
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.parsing import format_cells
from protonet.ui.plots import project

#: Bins of the reliability diagram; fewer than for the calibration error, since each is drawn.
RELIABILITY_BINS = 10
#: The maximal numbers of rows, and of suspicious labels, in the report.
MAX_PREDICTIONS, MAX_LISTED_SUSPECTS = 2000, 100
#: The maximal number of columns shown for each row, and of characters of a cell.
MAX_CONTENT_COLUMNS, MAX_TEXT_LENGTH = 6, 40
#: The approximate number of predictions for column importance, and the time limit of the learning curve, s.
IMPORTANCE_PREDICTIONS, LEARNING_SECONDS = 100_000, 60.0


class EvaluatedRows(NamedTuple):
    """Labelled rows and their held-out predictions."""

    logits: Tensor  #: (n, num_classes).
    labels: Tensor  #: (n,) int64.
    indices: Sequence[int]  #: The index of each row in the table, from 0.
    locations: Sequence[str]  #: The location of each row in its file, such as "line 2".
    ids: Sequence[str] | None  #: The identifiers of the rows, if a column has them.
    names: Sequence[str]  #: The names of the columns.
    cells: Sequence[np.ndarray]  #: The cells of each column, (n,).

    def take(self, indices: Sequence[int]) -> EvaluatedRows:
        """Select rows by index."""
        rows = torch.tensor(indices, dtype=torch.long)
        return self._replace(
            logits=self.logits[rows],
            labels=self.labels[rows],
            indices=[self.indices[index] for index in indices],
            locations=[self.locations[index] for index in indices],
            ids=None if self.ids is None else [self.ids[index] for index in indices],
            cells=[column[rows.numpy()] for column in self.cells],
        )


def columns_to_dicts(names: Sequence[str], encoding: Encoding | None, missing: Sequence[int]) -> list[dict[str, Any]]:
    """Describe each column: its name, type, and number of missing cells."""
    types = ["number"] * len(names) if encoding is None else [column.summary() for column in encoding.columns]
    return [
        {"name": name, "type": re.sub(r", \S+ % missing$", "", column_type), "missing": total}
        for name, column_type, total in zip(names, types, missing, strict=True)
    ]


def table_to_dict(
    model: Model, labels: Tensor, rows: int, missing: Sequence[int], notes: Sequence[str]
) -> dict[str, Any]:
    """Describe a table with labels (n,) int64: rows per class, columns and notes."""
    counts = torch.bincount(labels, minlength=len(model.classes)).tolist()
    classes = [{"name": name, "rows": total} for name, total in zip(model.classes, counts, strict=True)]
    columns = columns_to_dicts(get_column_names(model), model.encoding, missing)
    return {"rows": rows, "classes": classes, "columns": columns, "notes": list(notes)}


def compute_reliability(rows: EvaluatedRows) -> list[dict[str, Any]]:
    """Compute mean confidence and accuracy in equal bins of confidence."""
    confidence, predicted = rows.logits.double().softmax(dim=1).max(dim=1)
    bins = fill_bins(confidence, predicted == rows.labels, RELIABILITY_BINS)
    return [
        {
            "low": index / RELIABILITY_BINS,
            "high": (index + 1) / RELIABILITY_BINS,
            "rows": int(n),
            "confidence": total / n,
            "accuracy": correct / n,
            "interval": wilson_interval(correct / n, n),
        }
        for index, (n, total, correct) in enumerate(bins.tolist())
        if n
    ]


def rank_suspicious_labels(rows: EvaluatedRows, logits: Tensor) -> list[dict[str, Any]]:
    """Rank rows by how likely their label is wrong, the likeliest first.

    Args:
        rows: The rows.
        logits: (n, num_classes), held-out logits of repeated partitions; see `repeat_held_out`.

    Returns:
        For each row the given and the most probable other class, with their probabilities. Labels with a ``score``
        above 0 are probably wrong.
    """
    scores, p = score_label_errors(logits, rows.labels), logits.double().softmax(dim=1)
    other = p.scatter(1, rows.labels[:, None], -1.0).max(dim=1)
    order = scores.argsort(descending=True, stable=True)[:MAX_LISTED_SUSPECTS].tolist()
    return [
        {
            "index": rows.indices[row],
            "location": rows.locations[row],
            "id": None if rows.ids is None else rows.ids[row],
            "label": int(rows.labels[row]),
            "label_probability": float(p[row, rows.labels[row]]),
            "suggested": int(other.indices[row]),
            "suggested_probability": float(other.values[row]),
            "score": float(scores[row]),
        }
        for row in order
    ]


def collect_predictions(rows: EvaluatedRows, order: Sequence[int]) -> dict[str, Any]:
    """Collect the predictions of all rows, column by column; of many rows, the most suspicious and a regular sample.

    Args:
        rows: The rows.
        order: Indices of columns, the most important first.
    """
    total, points = len(rows.labels), project(rows.logits)
    if total > MAX_PREDICTIONS:
        ranked = score_label_errors(rows.logits, rows.labels).argsort(descending=True, stable=True).tolist()
        half = MAX_PREDICTIONS // 2
        others = sorted(ranked[half:])
        chosen = sorted([*ranked[:half], *others[:: -(-len(others) // half)]])
        rows, points = rows.take(chosen), points[torch.tensor(chosen)]
    p, predicted = rows.logits.double().softmax(dim=1).max(dim=1)
    points = points / points.abs().amax().clamp_min(1e-12)
    points = torch.cat([points, torch.zeros_like(points)], dim=1)[:, :2]  # pad a single dimension
    shown = order[:MAX_CONTENT_COLUMNS] if rows.cells else []
    texts = [[str(cell)[:MAX_TEXT_LENGTH] for cell in format_cells(rows.cells[column])] for column in shown]
    return {
        "total": total,
        "index": list(rows.indices),
        "location": list(rows.locations),
        "id": None if rows.ids is None else list(rows.ids),
        "label": rows.labels.tolist(),
        "predicted": predicted.tolist(),
        "probability": [round(probability, 6) for probability in p.tolist()],
        "x": [round(x, 4) for x in points[:, 0].tolist()],
        "y": [round(y, 4) for y in points[:, 1].tolist()],
        "columns": [rows.names[column] for column in shown],
        "cells": texts,
    }


def compute_importance(
    evaluated: Crossfit, names: Sequence[str], sizes: Sequence[int], seed: int, deadline: float, progress: Progress
) -> dict[str, Any] | None:
    """Compute `rank_columns`; None after the deadline, or if an embedding overflows."""

    def check_deadline(stage: str, fraction: float) -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError
        progress(stage, fraction)

    generator = torch.Generator().manual_seed(seed)
    try:
        return rank_columns(evaluated, names, sizes, generator, check_deadline, IMPORTANCE_PREDICTIONS)
    except (TimeoutError, FloatingPointError):
        return None


def compute_learning_curve(
    solution: Solution, crossed: Crossfit, deadline: float, progress: Progress
) -> dict[str, Any]:
    """Compute the accuracy for fewer rows per class, and predict it for twice as many; equal rows count once."""
    limit = min(deadline, time.monotonic() + LEARNING_SECONDS)
    curve, sample = measure_learning_curve(solution, crossed, deadline=limit, progress=progress), crossed.sample
    correct = curve.correct.double()
    accuracies = correct @ sample.weights / sample.weights.sum()
    points = [
        {"per_class": size, "accuracy": accuracy, "interval": sample.interval(rows)}
        for size, accuracy, rows in zip(curve.per_class, accuracies.tolist(), correct, strict=True)
    ]
    training = solution.problem.rows
    twice = 2 * len(training.labels) / training.num_classes
    outlook = extrapolate_accuracy(curve, sample, twice)
    return {"points": points, "twice": None if outlook is None else {"per_class": twice, **outlook._asdict()}}


def compute_report_sections(rows: EvaluatedRows, repeated: Tensor, importance: dict[str, Any] | None) -> dict[str, Any]:
    """Compute the sections that only the report has.

    Args:
        rows: The rows.
        repeated: Logits for `rank_suspicious_labels`.
        importance: The result of `compute_importance`.
    """
    columns = range(len(rows.names)) if importance is None else [column["index"] for column in importance["columns"]]
    return {
        "reliability": compute_reliability(rows),
        "wrong_labels": int((score_label_errors(repeated, rows.labels) > 0).sum()),
        "suspects": rank_suspicious_labels(rows, repeated),
        "importance": importance,
        "predictions": collect_predictions(rows, columns),
    }
