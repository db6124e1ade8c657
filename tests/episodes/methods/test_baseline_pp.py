from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.baseline_pp import baseline_pp
from tests.episodes.cases import make_episodes


def run_autograd(episodes: Episodes, n_epochs: int, seed: int) -> Tensor:
    """Train direction and length by torch's own SGD, an episode at a time, from the same weights and in one order."""
    outputs = []
    for support, labels, query in zip(*episodes[:3], strict=True):
        generator = torch.Generator().manual_seed(seed)
        dim = support.shape[1]
        v = nn.Parameter((2 * torch.rand(4, dim, generator=generator, dtype=torch.float64) - 1) / dim**0.5)
        g = nn.Parameter(v.detach().norm(dim=1))
        optimizer = torch.optim.SGD([v, g], lr=0.01, momentum=0.9, dampening=0.9, weight_decay=0.001)
        for _ in range(n_epochs):
            for rows in torch.randperm(len(labels), generator=generator).split(4):
                logits = 2 * g * F.cosine_similarity(support[rows, None], v, dim=2)
                optimizer.zero_grad()
                F.cross_entropy(logits, labels[rows]).backward()
                optimizer.step()
        outputs.append((2 * g * F.cosine_similarity(query[:, None], v, dim=2)).detach())
    return torch.stack(outputs)


@pytest.mark.parametrize("dim", [6, 40])
def test_autograd(dim: int) -> None:
    episodes, _ = make_episodes(dim=dim)
    ours = baseline_pp(episodes, n_epochs=20, seed=3)
    assert torch.allclose(ours, run_autograd(episodes, 20, 3))
    assert not torch.allclose(ours, baseline_pp(episodes, n_epochs=20, seed=4), atol=1e-2)


def test_the_length_of_rows_does_not_matter() -> None:
    episodes, _ = make_episodes()
    lengths = torch.rand(3, 10, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    stretched = episodes._replace(support=episodes.support * lengths, query=7 * episodes.query)
    assert torch.allclose(baseline_pp(stretched), baseline_pp(episodes))
