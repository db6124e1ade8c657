"""Real text that is offline wherever Python is: the sources of its own standard library."""

from __future__ import annotations

import functools
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload, batches, initial_weights

VALIDATION_SHARE = 10  # one module in ten


@functools.cache
def read_sources() -> tuple[dict[str, str], dict[str, str]]:
    """Return the sources by name of the standard library's modules: those to train and those to validate on."""
    train: dict[str, str] = {}
    validation: dict[str, str] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        # A module stays on its side whatever others its Python has.
        side = train if zlib.crc32(path.name.encode()) % VALIDATION_SHARE else validation
        side[path.name] = path.read_text(encoding="utf-8")
    return train, validation


def cut_windows(symbols: Tensor, length: int, n: int | None = None) -> Tensor:
    """Cut a text (size,) into windows (n, length) that do not overlap: all, or n at even distances."""
    windows = symbols[: len(symbols) // length * length].view(-1, length)
    return windows if n is None else windows[torch.linspace(0, len(windows) - 1, n).long()]  # (n, length)


def build_language_model(
    make: Callable[[], nn.Module], windows: tuple[Tensor, Tensor], batch: int, seed: int
) -> Workload:
    """Build the workload of predicting the next symbol of windows (n, 1 + length) to train and to validate on."""
    train, validation = windows
    with initial_weights(seed):
        model = make()
    rows = batches(len(train), batch, torch.Generator().manual_seed(seed))

    def loss(symbols: Tensor) -> Tensor:
        logits = model(symbols[:, :-1])  # (batch, length, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())

    return Workload(model, lambda: loss(train[next(rows)]), lambda: loss(validation))
