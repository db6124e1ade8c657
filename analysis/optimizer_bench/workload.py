"""A workload is a model, a training loss that draws its own batches, and a validation loss on a fixed set.

One training run on it gives a curve: the smoothed validation loss every few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

EVERY, DECAY = 10, 0.8  #: Steps between two validations, and the decay of the moving average of their losses.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Workload(NamedTuple):
    """What an optimizer is judged on."""

    model: nn.Module  #: In training mode; all of its parameters are trained.
    train_loss: Callable[[], Tensor]  #: Draws the next batch from the workload's own generator, returns its loss, 0-d.
    #: Returns the loss, 0-d, of a validation set that no seed changes. Called without gradients, in evaluation mode.
    val_loss: Callable[[], Tensor]


#: From a seed, which decides initial weights and the order of batches and nothing else.
Build = Callable[[int], Workload]


@contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Draw torch's default initialisations from a seed; the global random state is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def batches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield row numbers (size,) for ever: every row once before any row again, incomplete batches left out."""
    while True:
        yield from torch.randperm(n, generator=generator).split(size)[: n // size]


def build_on_rows(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    rows: Tensor,
    validation: Any,
    *,
    size: int,
    seed: int,
    draw: Callable[[Tensor, torch.Generator], Any] = lambda batch, _: batch,
) -> Workload:
    """Build a workload whose batches are rows of a tensor.

    Args:
        make: Makes the model.
        loss: Maps the model and a batch to the loss, 0-d.
        rows: To train on, (n, ...).
        validation: The batch to validate on.
        size: Rows of a batch.
        seed: Of the initial weights, the order of the rows and what ``draw`` draws.
        draw: Adds to rows (size, ...) what is drawn anew for each batch.
    """
    with initial_weights(seed):
        model = make()
    generator = torch.Generator().manual_seed(seed)
    order = batches(len(rows), size, generator)
    return Workload(model, lambda: loss(model, draw(rows[next(order)], generator)), lambda: loss(model, validation))


class Curve(NamedTuple):
    """What one run showed."""

    #: The bias-corrected moving average of the validation loss, after 0, ``EVERY``, 2 ``EVERY`` ... steps.
    losses: list[float]
    diverged: bool = False  #: A training or validation loss was not finite; the run ended there.
    step_ms: float = 0.0  #: CPU milliseconds of one ``step()``, where they were measured.

    def first_hit(self, target: float) -> int | None:
        """Return the first step whose smoothed loss is at most the target, or None."""
        return next((EVERY * index for index, loss in enumerate(self.losses) if index and loss <= target), None)


def train(
    build: Build,
    seed: int,
    make_optimizer: MakeOptimizer,
    *,
    max_steps: int,
    target: float = -math.inf,
    schedule: Callable[[int], float] | None = None,
) -> Curve:
    """Train a workload until its smoothed validation loss reaches a target, or for ``max_steps``.

    ``schedule`` is the factor on every group's learning rate at step 0, 1, ... (for baselines: a candidate has none,
    and its groups are its own).
    """
    workload = build(seed)
    optimizer = make_optimizer(workload.model.parameters())
    rates = [] if schedule is None else [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    smoothed, weight = 0.0, 0.0
    for step in range(max_steps + 1):
        if step % EVERY == 0:
            loss = validate(workload.model, workload.val_loss)
            if not math.isfinite(loss):
                return Curve(losses, diverged=True)
            if step:  # the loss before training would drag the average for twenty validations
                smoothed = DECAY * smoothed + (1 - DECAY) * loss
                weight = DECAY * weight + (1 - DECAY)
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
        if not math.isfinite(float(batch_loss.detach())):
            return Curve(losses, diverged=True)
        optimizer.step()
    return Curve(losses)


def validate(model: nn.Module, val_loss: Callable[[], Tensor]) -> float:
    """Return the validation loss in evaluation mode, and go back to training mode."""
    model.eval()
    with torch.no_grad():
        loss = float(val_loss())
    model.train()
    return loss
