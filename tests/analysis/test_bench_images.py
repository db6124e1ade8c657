"""Workloads of the optimizer bench on images and graphs: what a seed moves, and that they can be trained."""

from __future__ import annotations

import pytest
import torch

from analysis.optimizer_bench.workload import Build, Workload
from analysis.optimizer_bench.workloads import WORKLOADS

NAMES = ["cnn", "vae", "prototype", "vit", "gnn"]
pytestmark = pytest.mark.parametrize("build", [WORKLOADS[name] for name in NAMES], ids=NAMES)


def validate(workload: Workload) -> float:
    workload.model.eval()
    with torch.no_grad():
        loss = workload.val_loss().item()
    workload.model.train()
    return loss


def train(workload: Workload, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = workload.train_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_seed_fixes_everything_and_nothing_leaks(build: Build) -> None:
    state = torch.get_rng_state()
    first, second = build(3), build(3)
    assert train(first, 3) == train(second, 3)
    assert validate(first) == validate(second)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_seed_moves_weights_and_batches_but_not_validation(build: Build) -> None:
    first, second = build(0), build(1)
    assert validate(first) != validate(second)
    second.model.load_state_dict(first.model.state_dict())
    assert validate(first) == validate(second)
    assert first.train_loss().item() != second.train_loss().item()


def test_validation_draws_nothing(build: Build) -> None:
    watched, unwatched = build(0), build(0)
    assert validate(watched) == validate(watched)
    assert train(watched, 2) == train(unwatched, 2)


def test_every_parameter_gets_a_gradient(build: Build) -> None:
    workload = build(0)
    loss = workload.train_loss()
    loss.backward()
    assert loss.shape == ()
    assert workload.model.training
    for name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_a_few_steps_lower_the_loss(build: Build) -> None:
    workload = build(0)
    before = validate(workload)
    train(workload, 40)
    assert validate(workload) < before
