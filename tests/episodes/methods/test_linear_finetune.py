from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.linear_finetune import linear_finetune
from tests.episodes.cases import make_episodes


@pytest.mark.parametrize("dampening", [0.9, 0.0])
@pytest.mark.parametrize("zero", [False, True])
def test_torch_sgd(dampening: float, zero: bool) -> None:
    episodes, _ = make_episodes(dim=30)
    changed: dict[str, Any] = {"batch_size": 3, "learning_rate": 0.05, "dampening": dampening, "seed": 5, "zero": zero}
    logits = linear_finetune(episodes, n_epochs=8, weight_decay=0.1, **changed)
    start = 2 * torch.rand(4, 31, generator=torch.Generator().manual_seed(5), dtype=torch.float64) - 1
    start = start * (not zero) / 30**0.5
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        layer = torch.nn.Linear(30, 4, dtype=torch.float64)
        layer.load_state_dict({"weight": start[:, :-1], "bias": start[:, -1]})
        settings = {"lr": 0.05, "momentum": 0.9, "dampening": dampening, "weight_decay": 0.1}
        optimizer = torch.optim.SGD(layer.parameters(), **settings)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(5)
        torch.rand(4, 31, generator=generator, dtype=torch.float64)  # the initial weights
        for _ in range(8):
            for rows in torch.randperm(10, generator=generator).split(3):
                optimizer.zero_grad()
                F.cross_entropy(layer(support[rows]), labels[rows]).backward()
                optimizer.step()
        torch.testing.assert_close(logits[number], layer(query).detach())


def test_initial_weights_are_drawn_from_a_seed_as_torch_draws_them() -> None:
    rows = torch.eye(400).expand(1, -1, -1)
    episodes = Episodes(rows, torch.arange(400)[None] % 5, rows - rows.roll(1, dims=1), 5)
    first, same, other = (linear_finetune(episodes, n_epochs=0, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    spread = (2 / 3) ** 0.5 / 20  # of the difference of two weights, uniform in [-1, 1] / 20
    assert float(first.std(dim=0).mean()) == pytest.approx(spread, rel=0.05)


def test_relabelling() -> None:
    episodes, _ = make_episodes()
    order = torch.tensor([2, 0, 3, 1])
    changed = episodes._replace(support_labels=order[episodes.support_labels])
    relabelled = linear_finetune(changed, n_epochs=5, zero=True)
    torch.testing.assert_close(relabelled[:, :, order], linear_finetune(episodes, n_epochs=5, zero=True))


def test_it_learns() -> None:
    episodes, labels = make_episodes(n_episodes=20, n_queries=30, noise=0.3)
    assert float((linear_finetune(episodes).argmax(dim=2) == labels).double().mean()) > 0.8


def test_rows_of_zeros() -> None:
    episodes, _ = make_episodes(dtype=torch.float32)
    assert bool(linear_finetune(episodes._replace(support=torch.zeros_like(episodes.support))).isfinite().all())
