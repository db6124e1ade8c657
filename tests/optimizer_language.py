"""A small language model on text of a Markov chain, and its training under a schedule, for the optimizer's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from analysis.optimizer_bench.workload import initial_weights

VOCABULARY, CONTEXT, BATCH, STEPS = 24, 3, 64, 300
#: Makes the function that is called after each step with its number, from 1.
Schedule = Callable[[torch.optim.Optimizer], Callable[[int], object]]


@functools.cache
def sample_text() -> Tensor:
    """Sample 12,000 tokens of a second-order Markov chain."""
    generator = torch.Generator().manual_seed(0)
    probabilities = (2 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator)).softmax(2).cumsum(2)
    tokens = [0, 1]
    for u in torch.rand(11_998, generator=generator):
        tokens.append(min(int(torch.searchsorted(probabilities[tokens[-2], tokens[-1]], u)), VOCABULARY - 1))
    return torch.tensor(tokens).unfold(0, CONTEXT + 1, 1)  # (positions, context and the next token)


def compute_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]), rows[:, -1])


class Training(NamedTuple):
    loss: float  #: On held-out text, after the last step.
    step_lengths: list[float]


def train_language_model(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    schedule: Schedule | None = None,
    steps: int = STEPS,
) -> Training:
    with initial_weights(0):
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, 64),
            nn.LayerNorm(64),
            nn.GELU(),
            nn.Linear(64, VOCABULARY),
        )
    train, validation = sample_text().tensor_split([10_000])
    optimizer = make_optimizer(list(model.parameters()))
    after_step = schedule(optimizer) if schedule else lambda *_: None
    generator = torch.Generator().manual_seed(0)
    step_lengths = []
    for step in range(1, steps + 1):
        loss = compute_loss(model, train[torch.randint(len(train), (BATCH,), generator=generator)])
        optimizer.zero_grad()
        loss.backward()
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer.step()
        step_lengths.append(float((nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm()))
        after_step(step)
    with torch.no_grad():
        return Training(float(compute_loss(model, validation)), step_lengths)


def linear(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    """As `transformers.get_linear_schedule_with_warmup` without warm-up: below one from the second step on."""
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    return lambda step: scheduler.step()


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    """From a 25th of the constructor's learning rate up to it, and down."""
    scheduler = OneCycleLR(optimizer, optimizer.defaults["lr"], STEPS + 1, cycle_momentum=False)
    return lambda step: scheduler.step()


def step_down(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    scheduler = StepLR(optimizer, STEPS, gamma=0.1)
    return lambda step: scheduler.step()


def warm_up_by_hand(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    """Raise ``group["lr"]`` for 40 steps, without a scheduler that would note the initial one."""

    def set_lr(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * min(1.0, (step + 1) / 40)

    set_lr(0)
    return set_lr
