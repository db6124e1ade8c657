from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from protonet.episodes.methods.linear_finetune import linear_finetune
from tests.episodes.cases import make_episodes


@pytest.mark.parametrize("dampening", [0.9, 0.0])
def test_torch_sgd(dampening: float) -> None:
    episodes, _ = make_episodes(dim=30)
    logits = linear_finetune(episodes, n_epochs=8, batch_size=3, learning_rate=0.05, dampening=dampening, seed=5)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        layer = torch.nn.Linear(30, 4, dtype=torch.float64)
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        settings = {"lr": 0.05, "momentum": 0.9, "dampening": dampening, "weight_decay": 0.001}
        optimizer = torch.optim.SGD(layer.parameters(), **settings)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(5)
        for _ in range(8):
            for rows in torch.randperm(10, generator=generator).split(3):
                optimizer.zero_grad()
                F.cross_entropy(layer(support[rows]), labels[rows]).backward()
                optimizer.step()
        torch.testing.assert_close(logits[number], layer(query).detach())


def test_relabelling() -> None:
    episodes, _ = make_episodes()
    order = torch.tensor([2, 0, 3, 1])
    relabelled = linear_finetune(episodes._replace(support_labels=order[episodes.support_labels]), n_epochs=5)
    torch.testing.assert_close(relabelled[:, :, order], linear_finetune(episodes, n_epochs=5))


def test_it_learns() -> None:
    episodes, labels = make_episodes(n_episodes=20, n_queries=30, noise=0.3)
    assert float((linear_finetune(episodes).argmax(dim=2) == labels).double().mean()) > 0.8


def test_rows_of_zeros() -> None:
    episodes, _ = make_episodes(dtype=torch.float32)
    assert bool(linear_finetune(episodes._replace(support=torch.zeros_like(episodes.support))).isfinite().all())
