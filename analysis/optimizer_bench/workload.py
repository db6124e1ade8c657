"""A workload: a model, a training loss that samples its batches, and a validation loss on a fixed set.

Most are a task, which says how to make the model, a batch's loss, the stream of batches and what is held out. One
training run on a workload gives a curve: the smoothed validation loss every few steps.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protonet.datasets import Dataset

#: Steps between two validations, and the decay of the moving average of their losses.
STEPS_PER_VALIDATION, SMOOTHING_DECAY = 10, 0.8
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Workload(NamedTuple):
    """A task that optimizers are evaluated on."""

    model: nn.Module  #: In training mode; all of its parameters are trained.
    train_loss: Callable[[], Tensor]  #: Samples the next batch, and computes its loss, 0-d.
    val_loss: Callable[[], Tensor]
    """Computes the loss, 0-d, of a fixed validation set. Called without gradients, in evaluation mode."""


#: Builds a workload from a seed, which determines initial weights and the order of batches alone.
WorkloadBuilder = Callable[[int], Workload]
BatchStream = Callable[[torch.Generator], Iterator[Any]]  #: Yields batches without end.
DrawBatch = Callable[[Tensor, torch.Generator], Any]  #: Augments the rows of a batch.


@contextmanager
def seed_initial_weights(seed: int) -> Iterator[None]:
    """Sample torch's default initialization from a seed; the global random state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class WorkloadTask(NamedTuple):
    """The parts of a workload that do not depend on its seed."""

    make_model: Callable[[], nn.Module]  #: Makes the model.
    loss: Callable[[nn.Module, Any], Tensor]  #: Maps the model and a batch to the loss, 0-d.
    stream: BatchStream
    validation: Any  #: Validation batch.


def make_workload_builder(describe: Callable[[], WorkloadTask]) -> WorkloadBuilder:
    """Wrap a function that describes a task, called once, into a builder of workloads."""
    describe_once = functools.cache(describe)

    @functools.wraps(describe)
    def build(seed: int) -> Workload:
        task = describe_once()
        with seed_initial_weights(seed):
            model = task.make_model()
        batches = task.stream(torch.Generator().manual_seed(seed))
        return Workload(model, lambda: task.loss(model, next(batches)), lambda: task.loss(model, task.validation))

    return build


def shuffle_batches(rows: Tensor, size: int, draw: DrawBatch = lambda rows, _: rows) -> BatchStream:
    """Yield batches of rows (n, ...): each row once per epoch, no incomplete batch."""

    def stream(generator: torch.Generator) -> Iterator[Any]:
        while True:
            for batch in torch.randperm(len(rows), generator=generator).split(size)[: len(rows) // size]:
                yield draw(rows[batch], generator)

    return stream


def fixed_generator() -> torch.Generator:
    """Make the generator for everything that is independent of the workload's seed."""
    return torch.Generator().manual_seed(0)


def hold_out(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Shuffle rows (n, ...), and split off ``count`` rows for validation."""
    validation, train = rows[torch.randperm(len(rows), generator=fixed_generator())].tensor_split([count])
    return train, validation


def make_row_task(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    rows: tuple[Tensor, Tensor],
    size: int,
    draw: DrawBatch = lambda rows, _: rows,
) -> WorkloadTask:
    """Make the task of batches of ``size`` training rows (n, ...), with validation rows."""
    train, validation = rows
    return WorkloadTask(make, loss, shuffle_batches(train, size, draw), draw(validation, fixed_generator()))


def classification_loss(x: Tensor, y: Tensor) -> Callable[[nn.Module, Tensor], Tensor]:
    """Make the loss of classifying rows (n, ...) with classes (n,), given a model and row indices."""
    return lambda model, rows: F.cross_entropy(model(x[rows]), y[rows])


def make_classification_task(
    make: Callable[[int], nn.Module], data: Dataset, *, held_out: int, size: int
) -> WorkloadTask:
    """Make the task of classifying a data set by a model of the number of classes; some rows are held out."""
    loss, rows = classification_loss(data.x, data.y), hold_out(torch.arange(len(data.y)), held_out)
    return make_row_task(functools.partial(make, data.num_classes), loss, rows, size)


class LossCurve(NamedTuple):
    """The losses of one run."""

    #: The bias-corrected moving average of the validation loss, after 0, ``STEPS_PER_VALIDATION``, 2
    #: ``STEPS_PER_VALIDATION`` ... steps.
    losses: list[float]
    diverged: bool = False  #: A training or validation loss was not finite, or there was an error; the run ended there.
    step_ms: float = 0.0  #: CPU milliseconds of one ``step()``.

    def first_step_below(self, target: float) -> int | None:
        """Find the first step whose smoothed loss is at most the target; None if there is none."""
        hits = (STEPS_PER_VALIDATION * index for index, loss in enumerate(self.losses) if index and loss <= target)
        return next(hits, None)


def train_workload(
    build: WorkloadBuilder,
    seed: int,
    make_optimizer: MakeOptimizer,
    *,
    max_steps: int,
    target: float = -math.inf,
    schedule: Callable[[int], float] | None = None,
    caught: type[Exception] | tuple[()] = (),
) -> LossCurve:
    """Train a workload until its smoothed validation loss reaches a target, or for ``max_steps``.

    ``schedule`` is the factor on every group's learning rate at step 0, 1, ... (for baselines: a candidate has none,
    and its groups are its own). Errors of the kind ``caught`` end the run, with a line on stderr.
    """
    workload = build(seed)
    losses: list[float] = []
    smoothed, weight, seconds, step, diverged = 0.0, 0.0, 0.0, 0, False
    try:
        optimizer = make_optimizer(workload.model.parameters())
        rates = [] if schedule is None else [group["lr"] for group in optimizer.param_groups]
        while True:
            if step % STEPS_PER_VALIDATION == 0:
                loss = compute_validation_loss(workload.model, workload.val_loss)
                if diverged := not math.isfinite(loss):
                    break
                if step:  # the loss before training would drag the average for twenty validations
                    smoothed = SMOOTHING_DECAY * smoothed + (1 - SMOOTHING_DECAY) * loss
                    weight = SMOOTHING_DECAY * weight + (1 - SMOOTHING_DECAY)
                    loss = smoothed / weight
                losses.append(loss)
                if step and loss <= target:
                    break
            if step == max_steps:
                break
            if schedule is not None:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * schedule(step)
            optimizer.zero_grad(set_to_none=True)
            batch_loss = workload.train_loss()
            batch_loss.backward()
            if diverged := not math.isfinite(float(batch_loss.detach())):
                break
            started = time.process_time()
            optimizer.step()
            seconds += time.process_time() - started
            step += 1
    except caught as error:
        print(f"{getattr(build, '__name__', 'workload')}, seed {seed}: {error!r}", file=sys.stderr)
        diverged = True
    return LossCurve(losses, diverged, round(1000 * seconds / max(1, step), 3))


def compute_validation_loss(model: nn.Module, val_loss: Callable[[], Tensor]) -> float:
    """Compute the validation loss in evaluation mode, then restore training mode."""
    model.eval()
    with torch.no_grad():
        loss = float(val_loss())
    model.train()
    return loss
