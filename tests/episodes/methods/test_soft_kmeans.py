from __future__ import annotations

import torch

from protonet.episodes.methods.prototypes import protonet
from protonet.episodes.methods.soft_kmeans import soft_kmeans
from tests.episodes.cases import make_episodes


def test_slow_loop() -> None:
    episodes, _ = make_episodes(noise=1.5)
    ours = soft_kmeans(episodes, steps=2)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        means = [support[labels == c].mean(dim=0) for c in range(episodes.n_way)]
        moved = means
        for _ in range(2):
            shares = [
                torch.tensor([-(float(torch.dist(row, mean)) ** 2) for mean in moved]).softmax(0) for row in query
            ]
            moved = []
            for c in range(episodes.n_way):
                total, weight = support[labels == c].sum(dim=0), float((labels == c).sum())
                for row, share in zip(query, shares, strict=True):
                    total, weight = total + share[c] * row, weight + float(share[c])
                moved.append(total / weight)
        expected = torch.stack([torch.stack([-(torch.dist(row, mean) ** 2) for mean in moved]) for row in query])
        assert torch.allclose(ours[number], expected, rtol=1e-5, atol=1e-5)


def test_no_step_is_a_prototypical_network() -> None:
    episodes, _ = make_episodes()
    assert torch.allclose(soft_kmeans(episodes, steps=0), protonet(episodes))


def test_queries_in_another_order() -> None:
    episodes, _ = make_episodes()
    order = torch.arange(9, -1, -1)
    moved = soft_kmeans(episodes._replace(query=episodes.query[:, order]))
    assert torch.allclose(moved, soft_kmeans(episodes)[:, order])
