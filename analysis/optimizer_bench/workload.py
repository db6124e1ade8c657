"""A workload: a model, a training loss that draws its own batches, a validation loss on a fixed set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


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


#: From a seed, which moves initial weights and the order of batches and nothing else.
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
