"""The workloads kept apart: what a seed moves, what is learnt and what is held out."""

from __future__ import annotations

import pytest
import torch

from analysis.optimizer_bench.workload import Workload
from analysis.optimizer_bench.workloads.dense import (
    KEYWORD,
    PIXEL_VALIDATION,
    WORKLOADS,
    label_characters,
    load_pixels,
    load_syntax,
)


def validate(workload: Workload) -> float:
    workload.model.eval()
    with torch.no_grad():
        loss = workload.val_loss()
    workload.model.train()
    assert loss.ndim == 0
    return loss.item()


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_decides_weights_and_batches(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (WORKLOADS[name](seed) for seed in (3, 3, 4))
    losses = [[workload.train_loss().item() for _ in range(3)] for workload in (first, again, other)]
    assert losses[0] == losses[1] != losses[2]
    assert len(set(losses[0])) == 3  # the batch moves on
    other.model.load_state_dict(first.model.state_dict())
    assert validate(first) == validate(first) == validate(other)  # no seed moves the validation set
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", WORKLOADS)
def test_adamw_learns(name: str) -> None:
    workload = WORKLOADS[name](0)
    parameters = dict(workload.model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)
    start = validate(workload)
    for _ in range(60):
        optimizer.zero_grad()
        workload.train_loss().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for p in parameters.values())
    assert validate(workload) < 0.75 * start


def test_kinds_of_characters() -> None:
    source = "if é2 == 1:  # so\n    f('''a\nb''')\n"
    marks = "".join(" ndsock"[kind] for kind in label_characters(source))
    assert marks == "kk nn oo do  cccc     nossssssssso "


def test_syntax_is_whole_and_held_out() -> None:
    (train, train_kinds), (validation, validation_kinds) = (side.unbind(1) for side in load_syntax())
    assert train.shape == train_kinds.shape
    assert validation.shape == validation_kinds.shape
    assert train_kinds.unique().tolist() == list(range(KEYWORD + 1))
    assert not {tuple(window) for window in validation.tolist()} & {tuple(window) for window in train.tolist()}


def test_pixels() -> None:
    x, y = load_pixels()
    assert len(x.unique(dim=0)) == len(x) == len(y) == 427 * 640
    assert (x.min().item(), x.max().item()) == (0, 1)
    torch.testing.assert_close(y.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(y[:PIXEL_VALIDATION].std(0), torch.ones(3), atol=0.1, rtol=0)
