"""Train the weighting prior on measured tasks, and evaluate it on tasks of unseen kinds.

Tasks are measured once each, into a folder, by --jobs processes; an interrupted command resumes, and a deleted folder
is measured anew. Four priors, each trained without a quarter of the families, are evaluated on that quarter. --write
trains the published prior on all tasks, and one per real set without its family, for `robustness --methods left-out`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from analysis.prior.tasks import MeasuredTask, load_measured_task, write_measured_task
from analysis.real_data.sets import DATASETS, REPORTED_TABLE_NAMES
from analysis.shared.runner import StudyOptions, StudyReport, int_option, run_all
from analysis.shared.tables import mean_and_error
from protonet._io import write_atomically
from protonet.errors import raise_input_error
from protonet.fit.prior import (
    MIN_LOG_VIEW_INFLUENCE,
    MIN_VIEW_SPREAD,
    VIEW_TAGS,
    WeightingPrior,
    deserialize_prior,
    serialize_prior,
)
from protonet.ui.options import option
from protonet.ui.text import format_table
from solution.pack import ROOT

#: Passes over the tasks, tasks per step, learning rate and weight decay.
EPOCHS, BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY = 40, 64, 2e-3, 0.05
MAX_TEST_ROWS = 120
N_FOLDS = 4  #: Folds of families of data sets.
#: The data sets of `analysis.real_data.sets` that share rows with each of them, by name.
JAPANESE_VOWELS_NAMES = {"spectra", "JapaneseVowels"}
DATASET_FAMILIES = {name: JAPANESE_VOWELS_NAMES if name in JAPANESE_VOWELS_NAMES else {name} for name in DATASETS}
PARAMETERS_FILE = ROOT / "protonet/fit/prior_numbers.py"
LEFT_OUT_PRIORS = Path("build/prior-left-out")  #: Folder of priors, each trained without a data set's family.
MIXED_PRIOR_NAME = "mixed"  #: Name of the prior that is trained without the mixed tables.
HEADER = '"""Parameters of the pretrained prior in base64 of float16, from `python -m analysis prior --write`."""\n'
TABLE_NOTE = """
Mean over tasks of families that the prior was not trained on, in nats and percent, ± one standard error of the
difference to the first line, whose log-loss is large for one task in which cosines hardly differ. "Judged" tasks have
rows to hold out; the others have one labelled row per class, so that only the features' distribution is known. The
published prior is trained on all {tasks} tasks; `robustness` has, as "ours, left out", its value on real sets when no
task of the set's family was trained on.
"""


class TaskBatch(NamedTuple):
    """A batch of measured tasks, stacked and padded to the largest task."""

    view_statistics: Tensor  #: (tasks, views, view features)
    view_tags: Tensor  #: (tasks, views, tags)
    dataset_statistics: Tensor  #: (tasks, problem features)
    initial_log_influence: Tensor  #: (tasks, views)
    is_view: Tensor  #: (tasks, views) bool: whether the cosines of a view differ between rows.
    inverse_temperature: Tensor  #: (tasks,): factor from cosines to logits
    cosines: Tensor  #: (tasks, views, m, classes) float16, divided by the spread of the view.
    test_y: Tensor  #: (tasks, m): classes, -1 for padding.
    is_class: Tensor  #: (tasks, classes) bool: whether the class exists; False for padding.

    def select_tasks(self, tasks: Tensor) -> TaskBatch:
        """Select tasks by their indices, or by a mask (tasks,) bool."""
        return TaskBatch(*(task[tasks] for task in self))


def collate(tasks: Sequence[MeasuredTask]) -> TaskBatch:
    """Stack measured tasks into a batch, padded to the largest task."""
    sizes = [task.cosines.shape for task in tasks]
    n_views, m, classes = (max(size[axis] for size in sizes) for axis in range(3))
    m = min(m, MAX_TEST_ROWS)

    def pad(values: Tensor, *shape: int, fill: float = 0) -> Tensor:
        padded = values.new_full(shape, fill)
        padded[tuple(slice(length) for length in values.shape)] = values
        return padded

    evidence = [task.prior_input for task in tasks]
    spreads = [task.view_spreads.clamp_min(MIN_VIEW_SPREAD).float()[:, None, None] for task in evidence]
    scaled = [task.cosines[:, :m].float() / spread for task, spread in zip(tasks, spreads, strict=True)]
    is_present = torch.stack([pad(task.view_spreads > MIN_VIEW_SPREAD, n_views) for task in evidence])
    is_present[~is_present.any(dim=1), 0] = True
    return TaskBatch(
        torch.stack([pad(task.view_statistics, n_views, task.view_statistics.shape[1]) for task in evidence]),
        torch.stack([pad(task.view_tags, n_views, len(VIEW_TAGS)) for task in evidence]),
        torch.stack([task.dataset_statistics for task in evidence]),
        torch.stack([pad(task.initial_log_influence, n_views, fill=MIN_LOG_VIEW_INFLUENCE) for task in evidence]),
        is_present,
        torch.tensor([task.initial_inverse_temperature for task in evidence]),
        torch.stack([pad(task.clamp(-6e4, 6e4).half(), n_views, m, classes) for task in scaled]),
        torch.stack([pad(task.test_y[:m], m, fill=-1) for task in tasks]),
        torch.stack([pad(torch.ones(task.cosines.shape[2], dtype=torch.bool), classes) for task in tasks]),
    )


def score_view_weights(batch: TaskBatch, log_weights: Tensor, log_factor: Tensor) -> tuple[Tensor, Tensor]:
    """Compute test log-loss and accuracy (tasks,), given log-weights of views and log-factors of logits."""
    mixed = torch.einsum("tv,tvmc->tmc", log_weights.exp(), batch.cosines.float())
    logits = mixed * (batch.inverse_temperature * log_factor.exp())[:, None, None]
    logits = logits.masked_fill(~batch.is_class[:, None], -1e9)
    losses = F.cross_entropy(logits.transpose(1, 2), batch.test_y, reduction="none", ignore_index=-1)
    rows = (batch.test_y >= 0).float()
    right = (logits.argmax(dim=2) == batch.test_y).float() * rows
    return (losses * rows).sum(dim=1) / rows.sum(dim=1), right.sum(dim=1) / rows.sum(dim=1)


@torch.no_grad()
def evaluate_prior(prior: WeightingPrior, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Compute log-loss and accuracy (tasks,) on the test rows of tasks whose views a prior weights."""
    return score_view_weights(batch, *_compute_log_weights(prior, batch, batch.is_view))


def _compute_log_weights(prior: WeightingPrior, batch: TaskBatch, is_present: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a prior's log-weights (tasks, views), -1e4 unless ``is_present``, and log-factors of logits (tasks,)."""
    log_weights, log_factor = prior(
        batch.view_statistics, batch.view_tags, batch.dataset_statistics, batch.initial_log_influence, is_present
    )
    return log_weights.masked_fill(~is_present, -1e4), log_factor


def train_prior(batch: TaskBatch, *, epochs: int = EPOCHS) -> WeightingPrior:
    """Train a prior on tasks by the log-loss relative to chance, with random dropout of views."""
    generator = torch.Generator().manual_seed(0)
    prior = WeightingPrior()
    for weight in (prior.first.weight, prior.second.weight, prior.belief.weight):
        weight.data = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1])
    rows = batch.is_view[..., None].float()
    mean = (batch.view_statistics * rows).sum(dim=(0, 1)) / rows.sum()
    prior.view_mean.copy_(mean)
    deviation = (((batch.view_statistics - mean).square() * rows).sum(dim=(0, 1)) / rows.sum()).sqrt()
    prior.view_std.copy_(deviation.clamp_min(1e-2))
    prior.dataset_mean.copy_(batch.dataset_statistics.mean(dim=0))
    prior.dataset_std.copy_(batch.dataset_statistics.std(dim=0).clamp_min(1e-2))
    optimizer = torch.optim.AdamW(prior.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    # The schedule divides by zero if its warmup, a tenth, is a single step.
    steps = max(11, epochs * math.ceil(len(batch.initial_log_influence) / BATCH_SIZE))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    guessing = batch.is_class.sum(dim=1).float().log()
    view_dropout = 0.15  # probability that an episode lacks a view
    for _ in range(epochs):
        for some in torch.randperm(len(batch.initial_log_influence), generator=generator).split(BATCH_SIZE):
            part = batch.select_tasks(some)
            present = part.is_view & (torch.rand(part.is_view.shape, generator=generator) >= view_dropout)
            is_present = torch.where(present.any(dim=1, keepdim=True), present, part.is_view)
            loss = (score_view_weights(part, *_compute_log_weights(prior, part, is_present))[0] / guessing[some]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return prior.eval()


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """The options of the study."""

    tasks: int = int_option("tasks, by their numbers from 0 on", 1500)
    epochs: int = int_option("passes over the tasks in training", EPOCHS)
    jobs: int = int_option("processes that measure tasks", 2)
    folder: Path = option("measured tasks (default: build/prior)", Path("build/prior"), metavar="PATH")
    write: bool = option("write the library's numbers, and those that leave a set out", False)


def run(options: Options) -> StudyReport:
    """Measure the tasks that are missing in the folder; evaluate the prior, and write it if ``--write`` is set."""
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    runs = [(str(folder / f"{task_id:05d}.npz"), task_id) for task_id in range(options.tasks)]
    run_all(runs, write_measured_task, folder / "journal.jsonl", lambda _: "", unit="task", jobs=options.jobs)
    loaded = [load_measured_task(path) for path, _ in tqdm(runs, unit="task", desc="evidence", dynamic_ncols=True)]
    tasks = [task for task in loaded if task is not None]
    batch = collate(tasks)
    if options.write:
        write_prior(train_prior(batch, epochs=options.epochs))
        LEFT_OUT_PRIORS.mkdir(parents=True, exist_ok=True)
        for name, family in [*DATASET_FAMILIES.items(), (MIXED_PRIOR_NAME, REPORTED_TABLE_NAMES)]:
            used = torch.tensor([task.family not in family for task in tasks])
            prior = train_prior(batch.select_tasks(used), epochs=options.epochs)
            (LEFT_OUT_PRIORS / name).write_text(serialize_prior(prior), encoding="ascii")
    rows = compare_priors(tasks, batch, options.epochs)
    return StudyReport(rows, tabulate(rows) + TABLE_NOTE.format(tasks=f"{len(tasks):,}"))


def load_left_out_prior(name: str) -> WeightingPrior:
    """Load the prior that was trained without the family of a data set: a key of `DATASETS`, or "mixed"."""
    path = LEFT_OUT_PRIORS / name
    if not path.exists():
        remedy = "Run python -m analysis prior --write first: it trains the priors that leave a set out."
        raise_input_error("name", "have a prior", str(path), remedy)
    return deserialize_prior(path.read_text(encoding="ascii"))


def write_prior(prior: WeightingPrior, path: Path = PARAMETERS_FILE) -> None:
    """Write the weights of a prior as a Python module like the library's ``prior_numbers``."""
    text = serialize_prior(prior)
    lines = "".join(f'    "{text[at : at + 108]}",\n' for at in range(0, len(text), 108))
    content = f"{HEADER}\nPRIOR_PARAMETERS = (\n{lines})\n".encode()
    write_atomically(path, lambda file: file.write(content))


def compare_priors(tasks: Sequence[MeasuredTask], batch: TaskBatch, epochs: int) -> list[dict[str, Any]]:
    """Compute log-loss and accuracy of the prior and its ablations by cross-validation over families of data sets."""
    families = np.random.default_rng(0).permutation(sorted({task.family for task in tasks}))
    fold_of = {name: index % N_FOLDS for index, name in enumerate(families.tolist())}
    owner = torch.tensor([fold_of[task.family] for task in tasks])
    judged = torch.tensor([task.has_held_out_rows for task in tasks])
    synthetic = torch.tensor([task.family.startswith("synthetic ") for task in tasks])
    half = torch.arange(len(tasks)) % 2 == 0
    blind = batch._replace(view_tags=torch.zeros(len(tasks), batch.view_tags.shape[1], len(VIEW_TAGS)))
    unseen = batch._replace(dataset_statistics=torch.zeros_like(batch.dataset_statistics))
    everything = torch.ones_like(synthetic)
    compared_epochs = (10, 80)  # numbers of training epochs of further variants of the prior
    variants: list[tuple[str, TaskBatch, torch.Tensor, int]] = [
        ("learned", batch, everything, epochs),
        ("learned, without the kinds of views", blind, everything, epochs),
        ("learned, the problem not seen", unseen, everything, epochs),
        ("learned on half of the tasks", batch, half, 2 * epochs),
        ("learned on synthetic tasks alone", batch, synthetic, 2 * epochs),
        *((f"learned in {count} epochs", batch, everything, count) for count in compared_epochs),
    ]
    start = torch.stack(evaluate_prior(WeightingPrior().eval(), batch))
    rows = [_average_scores("what held-out rows suggest", start, start, judged)]
    for name, variant, used, count in tqdm(variants, unit="variant", dynamic_ncols=True):
        scores = torch.zeros(2, len(tasks))  # log-losses and accuracies, by cross-validation over folds of families
        for fold in range(N_FOLDS):
            out = owner == fold
            prior = train_prior(variant.select_tasks((owner != fold) & used), epochs=count)
            scores[:, out] = torch.stack(evaluate_prior(prior, variant.select_tasks(out)))
        rows.append(_average_scores(name, scores, start, judged))
    return rows


def _average_scores(name: str, scores: torch.Tensor, start: torch.Tensor, judged: torch.Tensor) -> dict[str, Any]:
    """Average scores (2, tasks) and the gain in accuracy over ``start``, for ``judged`` tasks and others."""
    row: dict[str, Any] = {"prior": name}
    for title, which in (("judged", judged), ("unjudged", ~judged)):
        log_loss, accuracy = scores[:, which].mean(dim=1).tolist()
        gain = mean_and_error((100 * (scores[1] - start[1])[which]).tolist())
        row[title] = {"tasks": int(which.sum()), "log_loss": log_loss, "accuracy": 100 * accuracy, "gain": gain}
    return row


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results of `compare_priors` as Markdown."""
    header = ["prior"]
    for title in ("judged", "unjudged"):
        header += [f"{rows[0][title]['tasks']} {title}: log-loss", "accuracy", "gain"]
    lines = []
    for row in rows:
        line = [row["prior"]]
        for title in ("judged", "unjudged"):
            part = row[title]
            line += [f"{part['log_loss']:.4f}", f"{part['accuracy']:.2f}", "{:+.2f} ±{:.2f}".format(*part["gain"])]
        lines.append(line)
    return format_table(header, lines)
