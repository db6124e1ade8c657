"""What every workload of the optimizer bench keeps to: seeds, validation, that it can be trained, and its role."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from analysis.optimizer_bench.workload import Workload, validate
from analysis.optimizer_bench.workloads import DRAWN, FAMILIES, FAMILY, ROLE, ROLES, STUDIED, VISIBLE, WORKLOADS, draw

BATCHES, STEPS, RATE = 2, 30, 3e-3
RATES = {"cnn": 1e-2}  #: AdamW's rate for what learns nothing in so few steps at ``RATE``.


def take(workload: Workload) -> list[float]:
    """Return the first losses of a workload, whose weights do not move."""
    return [float(workload.train_loss().detach()) for _ in range(BATCHES)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_keeps_to_the_rules(name: str) -> None:
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    first, same, other = (WORKLOADS[name](seed) for seed in (0, 0, 1))
    weights = copy.deepcopy(first.model.state_dict())
    for key, value in same.model.state_dict().items():
        assert torch.equal(value, weights[key])
    assert any(not torch.equal(each, weights[key]) for key, each in other.model.state_dict().items())
    loss = validate(first.model, first.val_loss)
    assert np.isfinite(loss)
    losses = take(first)
    assert take(same) == losses
    other.model.load_state_dict(weights)
    assert take(other) != losses  # with the same weights: its batches are others
    for workload in (first, other):
        workload.model.load_state_dict(weights)  # batches may have moved buffers
        assert validate(workload.model, workload.val_loss) == loss
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
    assert late < early or validate(first.model, first.val_loss) < loss
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]


def test_every_family_has_one_role() -> None:
    assert sorted(family for families in ROLES.values() for family in families) == sorted(FAMILIES)
    assert len(WORKLOADS) == sum(map(len, FAMILIES.values()))
    assert ROLE.keys() == FAMILY.keys() == WORKLOADS.keys()
    for name, role in ROLE.items():
        assert FAMILY[name] in ROLES[role]


def test_roles_are_what_was_drawn() -> None:
    tuning, validation, test = draw()
    assert sorted([*tuning, *validation, *test]) == sorted(DRAWN)
    assert ROLES["visible"] == [*VISIBLE]
    assert sorted(ROLES["tuning"]) == sorted([*STUDIED, *tuning])
    assert sorted(ROLES["validation"]) == sorted(validation)
    assert sorted(ROLES["test"]) == sorted(test)
