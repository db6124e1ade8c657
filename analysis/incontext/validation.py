"""Paired comparison of the transformer's weights on held-out tables, with standard errors clustered by table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.incontext.episodes import Episodes, make_episodes, mask_labelled_classes
from analysis.incontext.real import RealTables, load_part
from analysis.incontext.train import NEW_ROWS, classify
from analysis.shared.tables import mean_and_error
from protonet.views.transformer import unpack_weights

#: Numbers of labelled rows and maximal columns of tasks from real tables; episodes of each task.
REAL_SIZES, REPEATS = ((6, 4), (12, 8), (25, 20), (50, 10), (100, 6), (180, 12)), 6
#: Numbers of labelled rows, columns and minimal rows per class of synthetic tasks; tables of each size.
SYNTHETIC_SIZES = ((6, 4, 2), (12, 8, 3), (25, 20, 5), (50, 10, 10), (100, 6, 20), (180, 12, 30))
SYNTHETIC_COUNT = 32
SCALES = torch.logspace(0.3, 1.7, 15)  #: Factors of the cosines; the log loss is that of the best one.


class Task(NamedTuple):
    """Episodes of one size, from one real table or from synthetic tables."""

    group: Literal["mixed", "numeric", "synthetic"]
    table: int  #: Index of the real table; -1 for synthetic tables, of which each episode has another one.
    labelled: int
    episodes: Episodes


class Scores(NamedTuple):
    """Results per episode, in the order of the tasks."""

    accuracy: np.ndarray  #: In percent.
    loss: np.ndarray  #: Log loss at the best common scale, in nats.


class Difference(NamedTuple):
    """Mean paired difference over tables, its standard error, and the numbers of both."""

    mean: float
    error: float
    tables: int
    episodes: int


def draw_tasks() -> list[Task]:
    """Sample tasks of all sizes: from each real table for validation, with all or numeric columns, and synthetic."""
    generator, tasks = torch.Generator().manual_seed(0), list[Task]()
    for index, columns_of_table in enumerate(load_part("validation").tables):
        table = RealTables([columns_of_table])
        for labelled, max_columns in REAL_SIZES:
            for numeric, width in ((False, table.width), (True, table.numeric_width)):
                columns = min(max_columns, int(width[0]))
                if columns >= 2:
                    drawn = table.draw(generator, REPEATS, labelled, NEW_ROWS, columns, numeric=numeric)
                    if drawn is not None:
                        tasks.append(Task("numeric" if numeric else "mixed", index, labelled, drawn))
    for labelled, columns, per_class in SYNTHETIC_SIZES:
        for _ in range(SYNTHETIC_COUNT // 8):
            drawn = make_episodes(generator, 8, labelled, NEW_ROWS, columns, per_class)
            tasks.append(Task("synthetic", -1, labelled, drawn))
    return tasks


@torch.no_grad()
def score(flat: Tensor, tasks: Sequence[Task]) -> Scores:
    """Compute accuracy and log loss of the nearest prototype on the new rows, with stored weights (WEIGHT_COUNT,)."""
    weights, accuracy, losses = unpack_weights(flat), list[Tensor](), list[Tensor]()
    for task in tasks:
        n, (_, classes, known) = task.labelled, task.episodes
        absent = ~mask_labelled_classes(classes, n)[:, None]
        cosines = classify(weights, task.episodes, n)[1].masked_fill(absent, -math.inf)
        scored, truth = known[:, n:], classes[:, n:]
        count = scored.sum(dim=1).clamp_min(1)
        accuracy.append(((cosines.argmax(dim=2) == truth) & scored).sum(dim=1) / count)
        log_probabilities = (SCALES[:, None, None, None] * cosines).log_softmax(dim=3)
        loss = -log_probabilities.gather(3, truth.expand(len(SCALES), *truth.shape)[..., None]).squeeze(3)
        losses.append(loss.masked_fill(~scored, 0).sum(dim=2) / count)
    loss = torch.cat(losses, dim=1)  # (scales, episodes)
    return Scores(100 * torch.cat(accuracy).numpy(), loss[loss.mean(dim=1).argmin()].numpy())


def compare(new: np.ndarray, old: np.ndarray, tasks: Sequence[Task], group: str | None = None) -> Difference:
    """Compute the mean of new - old over tables, each averaged over its episodes; ``group`` selects tasks."""
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
