from __future__ import annotations

import torch

from protonet.episodes.methods.common import squared_distances
from protonet.episodes.methods.prototypes import protonet, protonet_cosine
from tests.episodes.cases import load_easyfsl, make_episodes, run_easyfsl


def test_slow_loop() -> None:
    episodes, _ = make_episodes()
    euclidean, cosine = protonet(episodes), protonet_cosine(episodes, temperature=0.5)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        for c in range(episodes.n_way):
            mean = torch.stack([row for row, label in zip(support, labels, strict=True) if label == c]).mean(dim=0)
            for position, row in enumerate(query):
                assert torch.isclose(euclidean[number, position, c], -(torch.dist(row, mean) ** 2))
                angle = row @ mean / (row.norm() * mean.norm())
                assert torch.isclose(cosine[number, position, c], angle / 0.5)


def test_easyfsl() -> None:
    episodes, _ = make_episodes()
    theirs = run_easyfsl(load_easyfsl("methods.prototypical_networks").PrototypicalNetworks(), episodes)
    assert torch.allclose(protonet(episodes), -(theirs**2))


def test_distances_far_from_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = 5000 + torch.randn(2, 3, 7, 16, generator=generator)
    assert torch.allclose(
        squared_distances(a, b[:, :4]), torch.cdist(a.double(), b[:, :4].double()).float() ** 2, rtol=1e-2
    )


def test_distances_are_not_negative() -> None:
    x = 1e3 + torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert float(squared_distances(x, x).min()) >= 0
