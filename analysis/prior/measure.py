"""What every view does on a task: its cosines out of fold, and those of rows to judge on once it is fitted to all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.prior.tasks import Task, draw_task
from protonet.fit.search import Search, explore
from protonet.fit.solver import PARAM_LIMIT, _fit_view, pose_problem, untouched_globals
from protonet.losses import class_means
from protonet.views.mlp import plan_encoder
from protonet.views.view import Specification, View


def measure(task: Task, search: Search | None = None) -> dict[str, Any] | None:
    """Return what is known of a task's views as arrays; None where nothing was tried.

    ``held`` (views, n, classes) are cosines out of fold, ``labels`` (n,) their classes; ``judged`` (views, m, classes)
    those of the rows to judge on, ``truth`` (m,) their classes; ``views`` (views,) the names; ``x`` and ``y`` the
    rows as views are fitted to them.
    """
    started = time.process_time()
    with untouched_globals():
        y = torch.from_numpy(task.y).long()
        num_classes = max(2, int(y.max()) + 1)
        problem, _ = pose_problem(torch.from_numpy(task.x.copy()), y, num_classes, blocks=task.blocks)
        plan = plan_encoder(task.x.shape[1], num_classes, PARAM_LIMIT)
        explored = explore(problem.rows, plan, search or Search())
        if explored is None:
            return None
        rows, fitted = explored.rows, {}
        test = ((torch.from_numpy(task.test_x) - problem.origin) / problem.scale).float()
        judged = torch.stack([_cosines(each.specification, rows, fitted, test) for each in explored.candidates])
    held = torch.stack([each.cosines for each in explored.candidates])
    return {
        "name": task.name,
        "kin": task.kin,
        "views": np.array([each.specification.name for each in explored.candidates]),
        "held": held.numpy().astype(np.float16),
        "labels": explored.judge.labels.numpy().astype(np.int16),
        "judged": judged.numpy().astype(np.float16),
        "truth": task.test_y.astype(np.int16),
        "x": rows.features.numpy(),
        "y": rows.labels.numpy().astype(np.int16),
        "blocks": np.zeros(0, np.int16) if rows.blocks is None else rows.blocks.numpy().astype(np.int16),
        "shifts": np.array(rows.shifts),
        "was_judged": explored.judged,
        "seconds": time.process_time() - started,
    }


def _cosines(specification: Specification, rows: Any, fitted: dict[Specification, View], test: Tensor) -> Tensor:
    """Return the cosines (m, classes) of rows to the prototypes of a view that is fitted to all rows."""
    view = _fit_view(specification, rows, fitted)

    def embed(x: Tensor) -> Tensor:
        parts: Tensor = view(x if view.source is None else view.source(x))
        return F.normalize(parts.unflatten(1, (len(view.sizes), -1)), dim=2)  # (n, parts, width)

    with torch.no_grad():
        own = embed(rows.features).flatten(1)
        means, _ = class_means(own, rows.labels, rows.num_classes, rows.weights)
        prototypes = F.normalize(means.unflatten(1, (len(view.sizes), -1)), dim=2)
        return torch.einsum("npw,cpw->nc", embed(test), prototypes) / len(view.sizes)


def measure_all(numbers: list[int], folder: Path) -> None:
    """Measure tasks by number, each into a file; those that are there are left alone."""
    for number in numbers:
        path = folder / f"{number:05d}.npz"
        if path.exists():
            continue
        found = measure(draw_task(number))
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, **(found or {"views": np.zeros(0, str)}))
        temporary.replace(path)
