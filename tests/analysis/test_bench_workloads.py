"""What the workloads of the optimizer bench keep to. Each run compares their first loss with the committed one."""

from __future__ import annotations

import copy
import inspect
import random

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401 - its import draws from the global state
import torch

from analysis.optimizer_bench.workload import (
    Workload,
    compute_validation_loss,
    cut_windows,
    hold_out,
    read_sources,
    shuffle_batches,
)
from analysis.optimizer_bench.workloads import GROUPS_OF_WORKLOAD, WORKLOADS, WORKLOADS_BY_ROLE, streams

BATCHES, STEPS, RATE = 2, 30, 3e-3
RATES = {"cnn": 1e-2}  #: AdamW's rate for what learns nothing in so few steps at ``RATE``.


def generate(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def take(workload: Workload) -> list[float]:
    """Return the first losses of a workload, whose weights do not move."""
    return [float(workload.train_loss().detach()) for _ in range(BATCHES)]


@pytest.mark.parametrize(
    "name", [builds[0].__name__ for families in WORKLOADS_BY_ROLE.values() for builds in families.values()]
)
def test_a_workload_keeps_to_the_rules(name: str) -> None:
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    first, same, other = (WORKLOADS[name](seed) for seed in (0, 0, 1))
    weights = copy.deepcopy(first.model.state_dict())
    for key, value in same.model.state_dict().items():
        assert torch.equal(value, weights[key])
    assert any(not torch.equal(value, weights[key]) for key, value in other.model.state_dict().items())
    loss = compute_validation_loss(first.model, first.val_loss)
    assert np.isfinite(loss)
    losses = take(first)
    assert take(same) == losses
    other.model.load_state_dict(weights)
    assert take(other) != losses  # with the same weights: its batches are others
    for workload in (first, other):
        workload.model.load_state_dict(weights)  # batches may have moved buffers
        assert compute_validation_loss(workload.model, workload.val_loss) == loss
        assert workload.model.training
    optimizer = torch.optim.AdamW(first.model.parameters(), RATES.get(name, RATE))
    trained = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch_loss = first.train_loss()
        batch_loss.backward()
        optimizer.step()
        trained.append(float(batch_loss.detach()))
    assert all(parameter.grad is not None for parameter in first.model.parameters())
    early, late = np.mean(trained[:5]), np.mean(trained[-5:])
    assert late < early or compute_validation_loss(first.model, first.val_loss) < loss
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]


def list_rows(batch: object) -> list[tuple[float, ...]]:
    """Return the rows of a stream's batch, of its tensors side by side."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    rows = torch.cat([part.view(len(part), -1).double() for part in parts], 1).tolist()
    return [*map(tuple, rows)]


@pytest.mark.parametrize("name", [name for name, build in WORKLOADS.items() if build.__module__ == streams.__name__])
def test_rows_of_a_stream_never_come_again(name: str) -> None:
    task = inspect.unwrap(WORKLOADS[name])()
    stream = task.stream(generate(3))
    rows = [row for batch in (next(stream), next(stream), task.validation) for row in list_rows(batch)]
    assert len({*rows}) > 0.98 * len(rows)  # those of few symbols may, by chance


def test_every_workload_has_one_role_family_and_kind() -> None:
    assert len(WORKLOADS) == sum(len(builds) for families in WORKLOADS_BY_ROLE.values() for builds in families.values())
    assert GROUPS_OF_WORKLOAD.keys() == WORKLOADS.keys()
    assert all(groups.family in WORKLOADS_BY_ROLE[groups.role] for groups in GROUPS_OF_WORKLOAD.values())


def test_rows_are_seen_once_before_any_again_and_those_held_out_never() -> None:
    train, validation = hold_out(torch.arange(20), 7)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(20))
    stream = shuffle_batches(train, 4, lambda rows, generator: (rows, torch.rand(1, generator=generator)))(generate(3))
    batches = [next(stream)[0] for _ in range(6)]
    for epoch in (batches[:3], batches[3:]):
        assert len(torch.cat(epoch).unique()) == 12
        assert set(torch.cat(epoch).tolist()) < set(train.tolist())


def test_windows_of_text_do_not_overlap_and_modules_are_held_out() -> None:
    assert cut_windows(torch.arange(10), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cut_windows(torch.arange(10), 2, 3).tolist() == [[0, 1], [4, 5], [8, 9]]
    train, validation = read_sources()
    assert not train.keys() & validation.keys()
    assert len(validation) > 10
