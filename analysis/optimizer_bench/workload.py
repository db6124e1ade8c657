"""A workload is a model, a training loss that draws its own batches, and a validation loss on a fixed set.

One training run on it gives a curve: the smoothed validation loss every few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

#: Steps between two validations, and the decay of the moving average of their losses.
EVERY, DECAY = 10, 0.8
#: Makes an optimizer from a model's parameters.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Workload(NamedTuple):
    """What an optimizer is judged on.

    Attributes:
        model: In training mode; all of its parameters are trained.
        train_loss: Draws the next batch from the workload's own generator, returns its loss, 0-d.
        val_loss: Returns the loss, 0-d, of a validation set that no seed changes. Called without gradients and in
            evaluation mode.
    """

    model: nn.Module
    train_loss: Callable[[], Tensor]
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


class Curve(NamedTuple):
    """What one run showed.

    Attributes:
        losses: The bias-corrected moving average of the validation loss, after 0, ``EVERY``, 2 ``EVERY`` ... steps.
        diverged: A training or validation loss was not finite; the run ended there.
    """

    losses: list[float]
    diverged: bool

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
    """Train a workload until its smoothed validation loss reaches a target.

    Args:
        build: Makes the workload.
        seed: Of its initial weights and batches.
        make_optimizer: Makes the optimizer.
        max_steps: Where the run ends at the latest.
        target: Where it ends earlier.
        schedule: The factor on every group's learning rate at step 0, 1, ... (for baselines: a candidate has none,
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
    return Curve(losses, diverged=False)


def validate(model: nn.Module, val_loss: Callable[[], torch.Tensor]) -> float:
    """Return the validation loss in evaluation mode, and go back to training mode."""
    model.eval()
    with torch.no_grad():
        loss = float(val_loss())
    model.train()
    return loss
