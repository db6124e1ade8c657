"""Training of the weighting prior: an episode is a whole task, its loss the log-loss of the test rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.prior.measure import MeasuredTask
from protonet.fit.prior import MIN_LOG_INFLUENCE, MIN_SPREAD, VIEW_TRAITS, WeightingPrior

#: Passes over the tasks, tasks per step, learning rate and weight decay.
EPOCHS, BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY = 40, 64, 2e-3, 0.05
VIEW_DROPOUT = 0.15  #: Probability that an episode lacks a view.
MAX_TEST_ROWS = 120


class TaskBatch(NamedTuple):
    """Tasks stacked and padded to the largest task."""

    view_statistics: Tensor  #: (tasks, views, view features)
    traits: Tensor  #: (tasks, views, traits)
    dataset_statistics: Tensor  #: (tasks, problem features)
    initial_log_influence: Tensor  #: (tasks, views)
    is_view: Tensor  #: (tasks, views) bool: whether the cosines of a view differ between rows.
    factor: Tensor  #: (tasks,)
    cosines: Tensor  #: (tasks, views, m, classes) float16, divided by the spread of the view.
    truth: Tensor  #: (tasks, m): classes, -1 for padding.
    classes: Tensor  #: (tasks, classes) bool: whether the class exists.

    def select_tasks(self, tasks: Tensor) -> TaskBatch:
        """Select tasks by their indices, or by a mask (tasks,) bool."""
        return TaskBatch(*(task[tasks] for task in self))


def collate(tasks: Sequence[MeasuredTask]) -> TaskBatch:
    """Stack measured tasks, padded to the largest one."""
    sizes = [task.cosines.shape for task in tasks]
    n_views, m, classes = (max(size[axis] for size in sizes) for axis in range(3))
    m = min(m, MAX_TEST_ROWS)

    def pad(values: Tensor, *shape: int, fill: float = 0) -> Tensor:
        padded = values.new_full(shape, fill)
        padded[tuple(slice(length) for length in values.shape)] = values
        return padded

    evidence = [task.prior_input for task in tasks]
    spreads = [task.view_spreads.clamp_min(MIN_SPREAD).float()[:, None, None] for task in evidence]
    scaled = [task.cosines[:, :m].float() / spread for task, spread in zip(tasks, spreads, strict=True)]
    there = torch.stack([pad(task.view_spreads > MIN_SPREAD, n_views) for task in evidence])
    there[~there.any(dim=1), 0] = True
    return TaskBatch(
        torch.stack([pad(task.view_statistics, n_views, task.view_statistics.shape[1]) for task in evidence]),
        torch.stack([pad(task.view_traits, n_views, len(VIEW_TRAITS)) for task in evidence]),
        torch.stack([task.dataset_statistics for task in evidence]),
        torch.stack([pad(task.initial_log_influence, n_views, fill=MIN_LOG_INFLUENCE) for task in evidence]),
        there,
        torch.tensor([task.initial_inverse_temperature for task in evidence]),
        torch.stack([pad(task.clamp(-6e4, 6e4).half(), n_views, m, classes) for task in scaled]),
        torch.stack([pad(task.truth[:m], m, fill=-1) for task in tasks]),
        torch.stack([pad(torch.ones(task.cosines.shape[2], dtype=torch.bool), classes) for task in tasks]),
    )


def score_weights(batch: TaskBatch, log_weight: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-loss and accuracy (tasks,) on the test rows, given log-weights of views and log-factors of logits."""
    mixed = torch.einsum("tv,tvmc->tmc", log_weight.exp(), batch.cosines.float())
    logits = (mixed * (batch.factor * size.exp())[:, None, None]).masked_fill(~batch.classes[:, None], -1e9)
    losses = F.cross_entropy(logits.transpose(1, 2), batch.truth, reduction="none", ignore_index=-1)
    rows = (batch.truth >= 0).float()
    right = (logits.argmax(dim=2) == batch.truth).float() * rows
    return (losses * rows).sum(dim=1) / rows.sum(dim=1), right.sum(dim=1) / rows.sum(dim=1)


@torch.no_grad()
def evaluate_prior(prior: WeightingPrior, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Compute log-loss and accuracy (tasks,) on the test rows of tasks whose views a prior weights."""
    return score_weights(batch, *_weigh(prior, batch, batch.is_view))


def _weigh(prior: WeightingPrior, batch: TaskBatch, there: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-weights of views, tiny for absent ones, and the log-factors of logits."""
    log_weight, size = prior(
        batch.view_statistics, batch.traits, batch.dataset_statistics, batch.initial_log_influence, there
    )
    return log_weight.masked_fill(~there, -1e4), size


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
    prior.view_deviation.copy_(deviation.clamp_min(1e-2))
    prior.dataset_mean.copy_(batch.dataset_statistics.mean(dim=0))
    prior.dataset_deviation.copy_(batch.dataset_statistics.std(dim=0).clamp_min(1e-2))
    optimizer = torch.optim.AdamW(prior.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = epochs * math.ceil(len(batch.initial_log_influence) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    guessing = batch.classes.sum(dim=1).float().log()
    for _ in range(epochs):
        for some in torch.randperm(len(batch.initial_log_influence), generator=generator).split(BATCH_SIZE):
            part = batch.select_tasks(some)
            present = part.is_view & (torch.rand(part.is_view.shape, generator=generator) >= VIEW_DROPOUT)
            there = torch.where(present.any(dim=1, keepdim=True), present, part.is_view)
            loss = (score_weights(part, *_weigh(prior, part, there))[0] / guessing[some]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return prior.eval()
