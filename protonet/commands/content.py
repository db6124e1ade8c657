"""What the report tells, as JSON can hold it: of the table, of rows that were not seen, of columns, of more labels."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.commands.models import name_columns
from protonet.files import Model
from protonet.fit.crossfit import Crossfit
from protonet.fit.importance import rank_columns
from protonet.fit.learning import draw_curve, expect_more
from protonet.fit.search import Progress
from protonet.fit.solver import Solution
from protonet.metrics import fill_bins, find_interval, suspect_labels
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.parsing import format_cells
from protonet.ui.plots import project

#: Bins of confidence in the diagram of reliability: fewer than for the calibration error, as each is looked at.
BINS = 10
#: Rows that are told one by one, and the likeliest mislabelled ones that are listed, at the most.
MOST_ROWS, MOST_SUSPECTS = 2000, 100
#: Columns whose cells are told of each row, and characters of a cell, at the most.
MOST_CELLS, MOST_CELL = 6, 40
#: Predictions that tell which columns matter, about, and seconds of refits that tell what more labels give, at most.
PREDICTIONS, LEARNING_SECONDS = 100_000, 60.0


class JudgedRows(NamedTuple):
    """Rows with a class, and what networks that did not see them say."""

    logits: Tensor  #: (n, num_classes).
    labels: Tensor  #: (n,) int64, as given.
    numbers: Sequence[int]  #: Of each row in the table, from 0.
    places: Sequence[str]  #: Where in the file each row is: "line 2".
    ids: Sequence[str] | None  #: The name of each row, if a column holds them.
    names: Sequence[str]  #: Of the columns.
    cells: Sequence[np.ndarray]  #: Of the columns, (n,) each.

    def take(self, places: Sequence[int]) -> JudgedRows:
        """Return some of the rows."""
        at = torch.tensor(places, dtype=torch.long)
        ids = None if self.ids is None else [self.ids[place] for place in places]
        numbers, where = [self.numbers[place] for place in places], [self.places[place] for place in places]
        cells = [each[at.numpy()] for each in self.cells]
        return JudgedRows(self.logits[at], self.labels[at], numbers, where, ids, self.names, cells)


def list_columns(names: Sequence[str], encoding: Encoding | None, gaps: Sequence[int]) -> list[dict[str, Any]]:
    """Return of each column its name, what it was taken for, and how many of its cells are gaps."""
    kinds = ["number"] * len(names) if encoding is None else [column.summary() for column in encoding.columns]
    return [
        {"name": name, "kind": re.sub(r", \S+ % missing$", "", kind), "gaps": number}
        for name, kind, number in zip(names, kinds, gaps, strict=True)
    ]


def list_table(model: Model, labels: Tensor, rows: int, gaps: Sequence[int], notes: Sequence[str]) -> dict[str, Any]:
    """Return what a table is: its rows, those of each class, given labels (n,) of known ones, its columns and notes."""
    counts = torch.bincount(labels, minlength=len(model.classes)).tolist()
    classes = [{"name": name, "rows": number} for name, number in zip(model.classes, counts, strict=True)]
    columns = list_columns(name_columns(model), model.encoding, gaps)
    return {"rows": rows, "classes": classes, "columns": columns, "notes": list(notes)}


def list_bins(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return, of the rows whose class is believed to about the same degree, that degree and how many are right."""
    confidence, predicted = rows.logits.double().softmax(dim=1).max(dim=1)
    bins = fill_bins(confidence, predicted == rows.labels, BINS)
    return [
        {
            "low": number / BINS,
            "high": (number + 1) / BINS,
            "rows": int(n),
            "confidence": total / n,
            "accuracy": right / n,
            "interval": find_interval(right / n, n),
        }
        for number, (n, total, right) in enumerate(bins.tolist())
        if n
    ]


def list_suspects(rows: JudgedRows, doubts: Tensor) -> list[dict[str, Any]]:
    """Return the rows that look most as if their label were wrong, the likeliest first.

    Args:
        rows: All of them.
        doubts: (n, num_classes), logits as theirs that tell more of single rows; see `repeat_held`.

    Returns:
        Those whose ``suspicion`` is above 0 are believed to be of another class; after them come the hardest of the
        others, with the class that they are nearly taken for.
    """
    suspicion, p = suspect_labels(doubts, rows.labels), doubts.double().softmax(dim=1)
    other = p.scatter(1, rows.labels[:, None], -1.0).max(dim=1)
    order = suspicion.argsort(descending=True, stable=True)[:MOST_SUSPECTS].tolist()
    return [
        {
            "row": rows.numbers[at],
            "place": rows.places[at],
            "id": None if rows.ids is None else rows.ids[at],
            "label": int(rows.labels[at]),
            "believed": int(other.indices[at]),
            "given": float(p[at, rows.labels[at]]),
            "probability": float(other.values[at]),
            "suspicion": float(suspicion[at]),
        }
        for at in order
    ]


def list_rows(rows: JudgedRows, order: Sequence[int]) -> dict[str, Any]:
    """Return what is told of each row, by column; of many rows, the most suspicious, and others at equal distances.

    Args:
        rows: All of them.
        order: Numbers of columns, those whose cells are told first.
    """
    drawn_from, points = len(rows.labels), project(rows.logits)
    if drawn_from > MOST_ROWS:
        ranked = suspect_labels(rows.logits, rows.labels).argsort(descending=True, stable=True).tolist()
        half = MOST_ROWS // 2
        rest = sorted(ranked[half:])
        chosen = sorted([*ranked[:half], *rest[:: -(-len(rest) // half)]])
        rows, points = rows.take(chosen), points[torch.tensor(chosen)]
    p, predicted = rows.logits.double().softmax(dim=1).max(dim=1)
    points = points / points.abs().amax().clamp_min(1e-12)
    points = torch.cat([points, torch.zeros_like(points)], dim=1)[:, :2]  # of one direction alone
    shown = order[:MOST_CELLS] if rows.cells else []
    texts = [[str(cell)[:MOST_CELL] for cell in format_cells(rows.cells[at])] for at in shown]
    return {
        "drawn_from": drawn_from,
        "row": list(rows.numbers),
        "place": list(rows.places),
        "id": None if rows.ids is None else list(rows.ids),
        "label": rows.labels.tolist(),
        "predicted": predicted.tolist(),
        "probability": [round(share, 6) for share in p.tolist()],
        "x": [round(x, 4) for x in points[:, 0].tolist()],
        "y": [round(y, 4) for y in points[:, 1].tolist()],
        "columns": [rows.names[at] for at in shown],
        "cells": texts,
    }


def list_importance(
    judged: Crossfit, names: Sequence[str], sizes: Sequence[int], seed: int, deadline: float, progress: Progress
) -> dict[str, Any] | None:
    """Return `rank_columns`, or None where the time is over, or an embedding overflows."""

    def tell(stage: str, share: float) -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError
        progress(stage, share)

    generator = torch.Generator().manual_seed(seed)
    try:
        return rank_columns(judged, names, sizes, generator, tell, PREDICTIONS)
    except (TimeoutError, FloatingPointError):
        return None


def list_learning(solution: Solution, crossed: Crossfit, deadline: float, progress: Progress) -> dict[str, Any]:
    """Return how often the model is right with fewer rows, and of twice as many; of equal rows one counts."""
    limit = min(deadline, time.monotonic() + LEARNING_SECONDS)
    curve, sample = draw_curve(solution, crossed, deadline=limit, progress=progress), crossed.sample
    right = curve.right.double()
    shares = right @ sample.weights / sample.weights.sum()
    points = [
        {"per_class": size, "accuracy": share, "interval": sample.find_interval(each)}
        for size, share, each in zip(curve.per_class, shares.tolist(), right, strict=True)
    ]
    rows = solution.problem.rows
    twice = 2 * len(rows.labels) / rows.num_classes
    outlook = expect_more(curve, sample, twice)
    return {"points": points, "twice": None if outlook is None else {"per_class": twice, **outlook._asdict()}}


def list_sections(rows: JudgedRows, doubts: Tensor, importance: dict[str, Any] | None) -> dict[str, Any]:
    """Return what only the report tells of judged rows.

    Args:
        rows: The rows.
        doubts: As in `list_suspects`.
        importance: Which columns matter, from `list_importance`.
    """
    columns = range(len(rows.names)) if importance is None else [each["number"] for each in importance["columns"]]
    return {
        "reliability": list_bins(rows),
        "doubted": int((suspect_labels(doubts, rows.labels) > 0).sum()),
        "suspects": list_suspects(rows, doubts),
        "importance": importance,
        "each_row": list_rows(rows, columns),
    }
