"""A small network with an embedding, a convolution and matrices, and its training, for the optimizer's tests."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.optimizer_bench.workload import seed_initial_weights
from protonet.optimizer import CustomOptimizer

WORDS, LENGTH, CLASSES = 40, 4, 3


def make_model(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    with seed_initial_weights(seed):
        return nn.Sequential(
            nn.Embedding(WORDS, 6),
            nn.Unflatten(1, (1, LENGTH)),
            nn.Conv2d(1, 3, 3, padding=1),
            nn.Flatten(),
            nn.Linear(72, 12),
            nn.LayerNorm(12),
            nn.Tanh(),
            nn.Linear(12, CLASSES),
        ).to(dtype)


def draw_batch(step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (size, LENGTH), generator=generator)  # (size, length)
    return words, words.sum(dim=1) % CLASSES


def loss_on(model: nn.Module, *steps: int) -> Tensor:
    """Return the mean loss on the batches of some steps together."""
    words, labels = (torch.cat(parts) for parts in zip(*map(draw_batch, steps), strict=True))
    return F.cross_entropy(model(words), labels)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0, scale: float = 1.0
) -> nn.Module:
    """Take steps ``first`` to ``first + steps - 1``, each on its own batch."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        (scale * loss_on(model, step)).backward()
        optimizer.step()
    return model


def trained(steps: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = make_model(dtype)
    return train(model, CustomOptimizer(model.parameters()), steps)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(model: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters are equal bit for bit, and finite."""
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    return all(torch.equal(p, q) and bool(p.isfinite().all()) for p, q in pairs)


def distance(model: nn.Module, other: nn.Module) -> float:
    """Return how far two runs from the same start ended apart, relative to how far the second came."""
    models = (make_model(next(model.parameters()).dtype), model, other)
    start, end, reference = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in models)
    return float((end - reference).norm() / (reference - start).norm())


def through_file(saved: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]
