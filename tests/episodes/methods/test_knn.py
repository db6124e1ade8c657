from __future__ import annotations

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from protonet.episodes.methods.knn import LEAST_SHARE, nearest_neighbours
from protonet.episodes.methods.matching import matching_networks
from tests.episodes.cases import make_episodes


@pytest.mark.parametrize("n_neighbours", [1, 3, 50])
def test_slow_loop(n_neighbours: int) -> None:
    episodes, _ = make_episodes()
    ours = nearest_neighbours(episodes, n_neighbours=n_neighbours, temperature=0.2)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        for place, row in enumerate(query):
            near = [
                (float(row @ other / (row.norm() * other.norm())), int(c))
                for other, c in zip(support, labels, strict=True)
            ]
            near = sorted(near, reverse=True)[:n_neighbours]
            weight = torch.zeros(4, dtype=torch.float64)
            for cosine, c in near:
                weight[c] += torch.tensor(cosine / 0.2).exp()
            assert torch.allclose(ours[number, place], (weight / weight.sum() + LEAST_SHARE).log(), atol=1e-5)


def test_scikit_learn() -> None:
    episodes, _ = make_episodes(noise=1.5, n_queries=30)
    ours = nearest_neighbours(episodes, n_neighbours=1).argmax(dim=2)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        theirs = KNeighborsClassifier(1, metric="cosine").fit(support, labels).predict(query.numpy())
        assert ours[number].tolist() == theirs.tolist()


def test_all_neighbours_are_a_matching_network() -> None:
    episodes, _ = make_episodes(shots=(1, 1, 1, 1))
    ours = nearest_neighbours(episodes, n_neighbours=99, temperature=1.0)
    assert torch.allclose(ours.softmax(dim=2), matching_networks(episodes).softmax(dim=2), atol=1e-5)
