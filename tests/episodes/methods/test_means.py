"""Methods of class means, and methods of similarities to support rows, equal slow loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from protonet.episodes.methods import clustering
from protonet.episodes.methods.common import squared_distances
from protonet.episodes.methods.prototypes import (
    VOTE_OFFSET,
    clip_zero_shot,
    matching_networks,
    nearest_neighbours,
    protonet,
    protonet_cosine,
    simpleshot_cl2n,
    simpleshot_l2n,
    tip_adapter,
)
from protonet.episodes.samplers.batch import Episodes
from tests.episodes.cases import agree, core_rows, cosines, make_base, make_episodes, means_of, texts_of, unit

Method = Callable[..., Tensor]
BASE = make_base()


def near_means(support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
    """Compute minus the squared distance of each query to each class mean, one by one."""
    means = [torch.stack([row for row, label in zip(support, labels, strict=True) if label == c]) for c in range(4)]
    return torch.stack([torch.stack([-(torch.dist(row, part.mean(dim=0)) ** 2) for part in means]) for row in query])


def near_unit_means(support: Tensor, labels: Tensor, query: Tensor, centre: Tensor | float) -> Tensor:
    return near_means(unit(support, centre), labels, unit(query, centre))


def match(support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
    """Compute the logarithm of each class's share of the attention: matching networks, eq. 1."""
    fractions = cosines(query, support).softmax(dim=1)
    return torch.stack([fractions[:, labels == c].sum(dim=1) for c in range(4)], dim=1).log()


def find_nearest(support: Tensor, labels: Tensor, query: Tensor, n_neighbours: int) -> Tensor:
    """Classify each query by the weighted votes of its nearest support rows."""
    weights = torch.zeros(len(query), 4, dtype=torch.float64)
    for row, weight in zip(query, weights, strict=True):
        angles = cosines(row[None], support)[0].tolist()
        near = zip(angles, labels.tolist(), strict=True)
        for cosine, c in sorted(near, reverse=True)[:n_neighbours]:
            weight[c] += math.exp(cosine / 0.2)
    return (weights / weights.sum(dim=1, keepdim=True) + VOTE_OFFSET).log()


@pytest.mark.parametrize(
    ("method", "slow", "atol"),
    [
        (protonet, near_means, 1e-8),
        (partial(protonet_cosine, temperature=0.5), lambda s, y, q: cosines(q, means_of(s, y)) / 0.5, 1e-8),
        (simpleshot_l2n, partial(near_unit_means, centre=0.0), 1e-8),
        (simpleshot_cl2n, partial(near_unit_means, centre=BASE.mean.double()), 1e-8),
        (matching_networks, match, 1e-8),
        (partial(nearest_neighbours, n_neighbours=1, temperature=0.2), partial(find_nearest, n_neighbours=1), 1e-5),
        (partial(nearest_neighbours, n_neighbours=3, temperature=0.2), partial(find_nearest, n_neighbours=3), 1e-5),
        (partial(nearest_neighbours, n_neighbours=50, temperature=0.2), partial(find_nearest, n_neighbours=50), 1e-5),
    ],
)
def test_equal_to_a_slow_loop(method: Method, slow: Callable[..., Tensor], atol: float) -> None:
    episodes, _ = make_episodes(base=BASE)
    assert agree(method(episodes), episodes, slow, atol=atol)


def test_simpleshot_without_base_classes() -> None:
    episodes, _ = make_episodes()
    assert agree(simpleshot_cl2n(episodes), episodes, lambda s, y, q: near_unit_means(s, y, q, s.mean(dim=0)))


def test_distances_far_from_zero_and_not_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = 5000 + torch.randn(2, 3, 7, 16, generator=generator)
    expected = torch.cdist(a.double(), b[:, :4].double()).float() ** 2
    assert torch.allclose(squared_distances(a, b[:, :4]), expected, rtol=1e-2)
    x = 1e3 + torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert float(squared_distances(x, x).min()) >= 0


def test_methods_of_texts_equal_slow_loops() -> None:
    episodes, _ = make_episodes()
    plain, cached = clip_zero_shot(episodes, temperature=0.5), tip_adapter(episodes, alpha=2.0, beta=3.0)
    for index, (support, labels, query) in enumerate(zip(*core_rows(episodes), strict=True)):
        angles = cosines(query, texts_of(episodes)[index])
        assert torch.allclose(plain[index], angles / 0.5)
        keys = (-3 * (1 - cosines(query, support))).exp()
        votes = torch.stack([keys[:, labels == c].sum(dim=1) for c in range(4)], dim=1)
        assert torch.allclose(cached[index], 100 * angles + 2 * votes)
    assert torch.equal(tip_adapter(episodes, alpha=0.0), clip_zero_shot(episodes))  # without a cache


def refine(
    kind: str, episodes: Episodes, rows_of: Tensor, *, steps: int = 1, temperature: float = 1.0, **more: float
) -> Tensor:
    """Refine prototypes one row at a time by ``rows_of`` (episodes, n, dim), as the paper's equations say."""
    logits = []
    for support, labels, query, rows in zip(*core_rows(episodes), rows_of, strict=True):
        first = moved = list(means_of(support, labels))
        for _ in range(steps):
            sums = [support[labels == c].sum(dim=0) for c in range(4)]
            weights = [float((labels == c).sum()) for c in range(4)]
            means = [sum(float(torch.dist(row, part)) ** 2 for row in rows) / len(rows) for part in moved]
            for row in rows:
                distances = [float(torch.dist(row, part)) ** 2 for part in moved]
                powers = [-distance / temperature for distance in distances]
                if kind == "cluster":
                    position = torch.stack(first).mean(dim=0) if more.get("centred") else torch.zeros_like(row)
                    far = float(torch.dist(row, position)) ** 2 / temperature / (2 * more["radius"] ** 2)
                    powers = [power / 2 for power in powers] + [-far - math.log(more["radius"])]
                total = sum(map(math.exp, powers))
                for c in range(4):
                    fraction = math.exp(powers[c]) / total
                    if kind == "masked":
                        fraction /= 1 + math.exp(-more["slope"] * (more["threshold"] - distances[c] / means[c]))
                    sums[c], weights[c] = sums[c] + fraction * row, weights[c] + fraction
            moved = [part / weight for part, weight in zip(sums, weights, strict=True)]
        logits.append([[-(float(torch.dist(row, part)) ** 2) / temperature for part in moved] for row in query])
    return torch.tensor(logits, dtype=torch.float64)


@pytest.mark.parametrize(
    ("method", "kind", "settings"),
    [
        (clustering.semi_kmeans, "plain", {}),
        (clustering.semi_kmeans, "plain", {"steps": 3, "temperature": 4.0}),
        (clustering.semi_kmeans_cluster, "cluster", {"radius": 2.0, "temperature": 3.0}),
        (clustering.semi_kmeans_cluster, "cluster", {"radius": 0.7, "centred": True, "steps": 2, "temperature": 5.0}),
        (clustering.semi_kmeans_masked, "masked", {"threshold": 0.8, "slope": 4.0, "steps": 2, "temperature": 2.0}),
        (clustering.soft_kmeans, "plain", {"steps": 2}),
    ],
)
def test_k_means_are_refined_row_by_row(method: Method, kind: str, settings: dict[str, Any]) -> None:
    episodes, _ = make_episodes(noise=1.5)
    rows = episodes.query if method is clustering.soft_kmeans else episodes.unlabelled
    assert rows is not None
    tolerance = 1e-5 if method is clustering.soft_kmeans else 1e-8
    expected = refine(kind, episodes, rows, **settings)
    assert torch.allclose(method(episodes, **settings), expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(method(episodes, steps=0), protonet(episodes))


def describe(support: Tensor, labels: Tensor, query: Tensor, weight: float, steps: int) -> Tensor:
    """Run PADDLE entry by entry, on features divided by their range over queries; return the assignments."""
    spread = query.max(dim=0).values - query.min(dim=0).values
    support, query = support / spread, query / spread
    means, dual = list(means_of(support, labels)), [0.0] * 4
    for _ in range(steps):
        assigned = torch.zeros(len(query), 4, dtype=torch.float64)
        for n, row in enumerate(query):
            for k in range(4):
                assigned[n, k] = (-0.5 * (row - means[k]).square().sum() + weight / len(query) * dual[k]).exp()
            assigned[n] /= assigned[n].sum()
        dual = [float((assigned[:, k].mean() + 1e-6).log()) + 1 for k in range(4)]
        means = []
        for k in range(4):
            part = [row for row, label in zip(support, labels, strict=True) if label == k]
            total = torch.stack(part).sum(dim=0) + sum(assigned[n, k] * row for n, row in enumerate(query))
            means.append(total / (len(part) + assigned[:, k].sum()))
    return assigned


def test_paddle_equals_a_slow_loop() -> None:
    for weight, steps in [(None, 1), (None, 7), (3.0, 5)]:
        episodes, _ = make_episodes(noise=1.5)
        ours = clustering.paddle(episodes, lambda_=weight, n_steps=steps).softmax(dim=2)
        assert agree(ours, episodes, partial(describe, weight=10.0 if weight is None else weight, steps=steps))


def weigh_inliers(support: Tensor, labels: Tensor, query: Tensor, steps: int) -> Tensor:
    """Run OSLO one row at a time; return the queries' probabilities, with the inlier scores as a last column."""
    centre = torch.cat([support, query]).mean(dim=0)
    support, query = unit(support, centre), unit(query, centre)
    means, scores = means_of(support, labels), torch.empty(0)
    assigned = torch.full((len(query), 4), 0.25, dtype=torch.float64)
    for _ in range(steps):
        scores = torch.stack([(assigned[n] @ cosines(query, means)[n] / 0.05).sigmoid() for n in range(len(query))])
        assigned = torch.stack([(scores[n] * cosines(query, means)[n] / 0.1).softmax(dim=0) for n in range(len(query))])
        new = []
        for k in range(4):
            part, fractions = support[labels == k], scores * assigned[:, k]
            new.append((part.sum(dim=0) + fractions @ query) / (len(part) + fractions.sum()))
        means = torch.stack(new)
    return torch.cat([(cosines(query, means) / 0.1).softmax(dim=1), scores[:, None]], dim=1)


def test_oslo_equals_a_slow_loop() -> None:
    for steps in [1, 2, 4]:
        episodes, _ = make_episodes(noise=1.5)
        ours = clustering.oslo(episodes, steps=steps)
        ours = torch.cat([ours.softmax(dim=2), ours.amax(dim=2, keepdim=True).sigmoid()], dim=2)
        assert agree(ours, episodes, partial(weigh_inliers, steps=steps))
