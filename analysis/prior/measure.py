"""Training data of the weighting prior: the cosines of every view on the held-out rows and test rows of a task."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.prior.tasks import Task, draw_task
from protonet._io import write_atomically
from protonet.fit.networks import fit_view
from protonet.fit.prior import PriorInput, build_prior_input, encode_traits
from protonet.fit.search import ModelSearch, evaluate_candidates
from protonet.fit.solver import PARAM_LIMIT, preserve_torch_state
from protonet.fit.training_set import prepare_training_set
from protonet.losses import class_means
from protonet.views.evaluation import plan_encoder
from protonet.views.view import TrainingRows, View, ViewSpec


class MeasuredTask(NamedTuple):
    """A task with the evidence on its views."""

    name: str
    family: str  #: Family of data sets, as in `analysis.prior.tasks.Task`.
    has_held_out_rows: bool  #: Whether rows were held out.
    prior_input: PriorInput
    cosines: Tensor  #: (views, m, classes) float16: cosines of the test rows.
    truth: Tensor  #: (m,) classes of the test rows.


def measure_views(task: Task) -> dict[str, np.ndarray]:
    """Compute the arrays of a measured task by name; empty if raw cosine is the only view.

    ``held`` (views, n, classes) are cosines of held-out rows and ``labels`` (n,) their classes; ``judged`` (views, m,
    classes) are cosines of test rows and ``truth`` (m,) their classes; ``traits`` (views, traits) describe the views;
    ``x``, ``y``, ``blocks`` and ``shifts`` are the rows that views are fitted to.
    """
    started = time.process_time()
    with preserve_torch_state():
        y = torch.from_numpy(task.y).long()
        num_classes = max(2, int(y.max()) + 1)
        problem, _ = prepare_training_set(torch.from_numpy(task.x.copy()), y, num_classes, blocks=task.blocks)
        plan = plan_encoder(task.x.shape[1], num_classes, PARAM_LIMIT)
        searched = evaluate_candidates(problem.rows, plan, ModelSearch())
        if searched is None:
            return {}
        fitted: dict[ViewSpec, View] = {}
        rows, test = searched.rows, ((torch.from_numpy(task.test_x) - problem.origin) / problem.scale).float()
        judged = torch.stack([_classify(candidate.spec, rows, fitted, test) for candidate in searched.candidates])
    held_out = torch.stack([candidate.cosines for candidate in searched.candidates])
    blocks = np.zeros(0) if rows.column_indices is None else rows.column_indices.numpy()
    return {
        "name": np.array(task.name),
        "kin": np.array(task.family),
        "traits": encode_traits([candidate.spec for candidate in searched.candidates]).numpy(),
        "held": held_out.numpy().astype(np.float16),
        "labels": searched.evaluator.labels.numpy().astype(np.int16),
        "judged": judged.numpy().astype(np.float16),
        "truth": task.test_y.astype(np.int16),
        "x": rows.features.numpy(),
        "y": rows.labels.numpy().astype(np.int16),
        "blocks": blocks.astype(np.int16),
        "shifts": np.array(rows.shifts),
        "was_judged": np.array(searched.has_held_out_rows),
        "seconds": np.array(time.process_time() - started),
    }


def _classify(spec: ViewSpec, rows: TrainingRows, fitted: dict[ViewSpec, View], test: Tensor) -> Tensor:
    """Compute the cosines (m, classes) of test rows (m, dim) to the prototypes of a view fitted to all rows."""
    view = fit_view(spec, rows, fitted)

    def embed(x: Tensor) -> Tensor:
        parts: Tensor = view(x if view.source is None else view.source(x))
        return F.normalize(parts.unflatten(1, (len(view.sizes), -1)), dim=2)  # (n, parts, width)

    with torch.no_grad():
        means, _ = class_means(embed(rows.features).flatten(1), rows.labels, rows.num_classes, rows.weights)
        prototypes = F.normalize(means.unflatten(1, (len(view.sizes), -1)), dim=2)
        return torch.einsum("npw,cpw->nc", embed(test), prototypes) / len(view.sizes)


def measure_task(run: tuple[str, int]) -> float:
    """Measure the task of an index into the file of a path, unless it exists; return the CPU seconds."""
    path, started = Path(run[0]), time.process_time()
    if not path.exists():
        arrays = measure_views(draw_task(run[1]))
        write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return time.process_time() - started


def load_measured(path: str | Path) -> MeasuredTask | None:
    """Load a measured task with the evidence on its views; None if raw cosine is its only view."""
    with np.load(path) as stored:
        if "traits" not in stored:
            return None
        arrays = {name: stored[name] for name in stored.files}
    integers = {name: torch.from_numpy(arrays[name].astype(np.int64)) for name in ("y", "labels", "truth", "blocks")}
    held_out = torch.from_numpy(arrays["held"].astype(np.float32))
    blocks = integers["blocks"] if len(integers["blocks"]) else None
    shifts, x = tuple(arrays["shifts"].tolist()), torch.from_numpy(arrays["x"])
    rows = TrainingRows(x, integers["y"], held_out.shape[2], shifts=shifts, column_indices=blocks)
    traits, judged = torch.from_numpy(arrays["traits"]), bool(arrays["was_judged"])
    evidence = build_prior_input(rows, traits, list(held_out), integers["labels"] if judged else None)
    cosines = torch.from_numpy(arrays["judged"])
    return MeasuredTask(str(arrays["name"]), str(arrays["kin"]), judged, evidence, cosines, integers["truth"])
