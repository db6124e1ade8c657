"""Tests for the bench's workloads on Python's own sources."""

import pytest
import torch

from analysis.optimizer_bench.workload import Build
from analysis.optimizer_bench.workloads import WORKLOADS, recommender
from analysis.optimizer_bench.workloads.text import cut_windows, read_sources

NAMES = ["gpt", "gru", "recommender"]
each_workload = pytest.mark.parametrize("build", [WORKLOADS[name] for name in NAMES], ids=NAMES)


@each_workload
def test_the_same_seed_gives_the_same_losses(build: Build) -> None:
    state = torch.random.get_rng_state()
    first, second = build(3), build(3)
    assert first.val_loss().item() == second.val_loss().item()
    assert [first.train_loss().item() for _ in range(3)] == [second.train_loss().item() for _ in range(3)]
    assert torch.equal(torch.random.get_rng_state(), state)


@each_workload
def test_another_seed_moves_weights_and_batches_but_not_the_validation_set(build: Build) -> None:
    first, second = build(0), build(1)
    assert first.val_loss().item() != second.val_loss().item()
    second.model.load_state_dict(first.model.state_dict())
    assert first.val_loss().item() == second.val_loss().item()
    assert first.train_loss().item() != second.train_loss().item()


@each_workload
def test_training_lowers_the_validation_loss_and_reaches_every_parameter(build: Build) -> None:
    workload = build(0)
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=0.01)
    before = workload.val_loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        workload.train_loss().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in workload.model.parameters())
        optimizer.step()
    assert workload.val_loss().item() < 0.95 * before


def test_modules_and_pairs_are_held_out() -> None:
    train, validation = read_sources()
    assert not train.keys() & validation.keys()
    assert len(validation) > 10
    pairs = recommender.load_pairs()
    assert len(pairs.unique(dim=0)) == len(pairs)


def test_windows_are_cut_at_even_distances() -> None:
    assert cut_windows(torch.arange(10), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cut_windows(torch.arange(10), 2, 3).tolist() == [[0, 1], [4, 5], [8, 9]]
