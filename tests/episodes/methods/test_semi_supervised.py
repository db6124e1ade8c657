from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from protonet._checks import InputError
from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.prototypes import protonet
from protonet.episodes.methods.semi_supervised import semi_kmeans, semi_kmeans_cluster, semi_kmeans_masked
from tests.episodes.cases import make_episodes

Method = Callable[..., Tensor]
METHODS: list[Method] = [semi_kmeans, semi_kmeans_cluster, semi_kmeans_masked]


def slow(kind: str, episodes: Episodes, *, steps: int = 1, temperature: float = 1.0, **more: float) -> Tensor:
    """Refine prototypes row by row, as the paper's equations say."""
    logits = []
    assert episodes.unlabelled is not None
    for support, labels, query, rows in zip(*episodes[:3], episodes.unlabelled, strict=True):
        first = [support[labels == c].mean(dim=0) for c in range(episodes.n_way)]
        moved = list(first)
        for _ in range(steps):
            sums = [support[labels == c].sum(dim=0) for c in range(episodes.n_way)]
            weights = [float((labels == c).sum()) for c in range(episodes.n_way)]
            means = [sum(float(torch.dist(row, own)) ** 2 for row in rows) / len(rows) for own in moved]
            for row in rows:
                distances = [float(torch.dist(row, own)) ** 2 for own in moved]
                powers = [-each / temperature for each in distances]
                if kind == "cluster":
                    place = torch.stack(first).mean(dim=0) if more.get("centred") else torch.zeros_like(row)
                    own = float(torch.dist(row, place)) ** 2 / temperature / (2 * more["radius"] ** 2)
                    powers = [each / 2 for each in powers] + [-own - math.log(more["radius"])]
                total = sum(map(math.exp, powers))
                for c in range(episodes.n_way):
                    share = math.exp(powers[c]) / total
                    if kind == "masked":
                        share /= 1 + math.exp(-more["slope"] * (more["threshold"] - distances[c] / means[c]))
                    sums[c], weights[c] = sums[c] + share * row, weights[c] + share
            moved = [own / weight for own, weight in zip(sums, weights, strict=True)]
        logits.append([[-(float(torch.dist(row, own)) ** 2) / temperature for own in moved] for row in query])
    return torch.tensor(logits, dtype=torch.float64)


@pytest.mark.parametrize(
    ("method", "kind", "settings"),
    [
        (semi_kmeans, "plain", {}),
        (semi_kmeans, "plain", {"steps": 3, "temperature": 4.0}),
        (semi_kmeans_cluster, "cluster", {"radius": 2.0, "temperature": 3.0}),
        (semi_kmeans_cluster, "cluster", {"radius": 0.7, "centred": True, "steps": 2, "temperature": 5.0}),
        (semi_kmeans_masked, "masked", {"threshold": 0.8, "slope": 4.0, "steps": 2, "temperature": 2.0}),
    ],
)
def test_slow_loop(method: Method, kind: str, settings: dict[str, Any]) -> None:
    episodes, _ = make_episodes(noise=1.5)
    assert torch.allclose(method(episodes, **settings), slow(kind, episodes, **settings), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_no_step_is_a_prototypical_network(method: Method) -> None:
    episodes, _ = make_episodes()
    assert torch.allclose(method(episodes, steps=0), protonet(episodes))


@pytest.mark.parametrize("method", METHODS)
def test_unlabelled_rows_in_another_order(method: Method) -> None:
    episodes, _ = make_episodes()
    assert episodes.unlabelled is not None
    moved = episodes._replace(unlabelled=episodes.unlabelled.flip(1))
    assert torch.allclose(method(moved), method(episodes))


@pytest.mark.parametrize(
    "method", [partial(semi_kmeans_masked, threshold=0.5), partial(semi_kmeans_cluster, radius=0.8)]
)
def test_rows_that_are_far_from_all_classes_are_left_out(method: Method) -> None:
    """Distractors opposite of the classes draw plain k-means away, and neither of the two."""
    episodes, _ = make_episodes(noise=0.2, shots=(2, 2, 2, 2))
    assert episodes.unlabelled is not None
    more = torch.cat([episodes.unlabelled, -0.8 * episodes.unlabelled], dim=1)
    without, far = episodes, episodes._replace(unlabelled=more)
    moved = (method(far, temperature=20.0) - method(without, temperature=20.0)).abs().mean()
    plain = (semi_kmeans(far, temperature=20.0) - semi_kmeans(without, temperature=20.0)).abs().mean()
    assert moved < 0.8 * plain


@pytest.mark.parametrize("method", METHODS)
def test_without_unlabelled_rows(method: Method) -> None:
    episodes, _ = make_episodes()
    with pytest.raises(InputError, match=rf"^{method.__name__}: `unlabelled` must be known; got None\. Ask for"):
        method(episodes._replace(unlabelled=None))
