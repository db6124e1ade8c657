"""One training run: a workload, an optimizer, the smoothed validation loss every few steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from analysis.optimizer_bench.workload import Build

#: Steps between two validations, and the decay of the moving average of their losses.
EVERY, DECAY = 10, 0.8
#: Makes an optimizer from a model's parameters.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


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
