"""Methods of the places of maps equal slow loops over the papers' equations, and SciPy's linear programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch import Tensor

from protonet.episodes.methods import METHODS
from protonet.episodes.methods.maps import (
    RIDGE_OFFSET,
    cross_transformers,
    deepbdc,
    deepemd,
    feature_map_reconstruction,
    solve_optimal_transport,
)
from tests.episodes.cases import agree, make_episodes, needing

CHANNELS, PLACES = 6, 4  #: The maps that `make_episodes` makes of 24 features.


def spread(row: Tensor) -> Tensor:
    """Reshape a row to a map (places, channels)."""
    return row.view(CHANNELS, PLACES).T


def classify_slowly(
    score: Callable[[list[Tensor], Tensor], Tensor], support: Tensor, labels: Tensor, query: Tensor
) -> Tensor:
    """Classify each query by the ``score`` of a class's maps and the query's map."""
    classes = [[spread(row) for row in support[labels == c]] for c in range(4)]
    return torch.stack([torch.stack([score(maps, spread(row)) for maps in classes]) for row in query])


def reconstruct(maps: list[Tensor], query: Tensor, *, ridge: float = 1.0, shrinkage: float = 1.0) -> Tensor:
    """Reconstruct a query's map from a class's maps: Wertheimer et al. (2021), eqs. 4, 5 and 10."""
    pool, rows = torch.cat(maps) / math.sqrt(CHANNELS), query / math.sqrt(CHANNELS)
    penalty = ridge * len(pool) / CHANNELS + RIDGE_OFFSET
    hat = (pool.T @ pool + penalty * torch.eye(CHANNELS, dtype=pool.dtype)).inverse() @ pool.T @ pool
    return -(shrinkage * rows @ hat - rows).square().sum(dim=1).mean()


def attend(maps: list[Tensor], query: Tensor, *, temperature: float = math.sqrt(CHANNELS)) -> Tensor:
    """Align a class's maps to each place of a query: Doersch et al. (2020), sec. 3.2, without linear heads."""
    pool = torch.cat(maps)
    aligned = [(pool @ position / temperature).softmax(dim=0) @ pool for position in query]
    return -torch.stack(
        [(position - item).square().sum() for position, item in zip(query, aligned, strict=True)]
    ).mean()


def find_covariances(maps: Tensor, scale: float) -> Tensor:
    """Compute the upper half of the Brownian distance covariance of a map: Xie et al. (2022), sec. 3."""
    distances = torch.tensor([[(scale * (a - b).square().sum() + 1e-5).sqrt() for a in maps.T] for b in maps.T])
    centring = torch.eye(CHANNELS) - 1 / CHANNELS
    return (centring.double() @ distances.double() @ centring.double())[np.triu_indices(CHANNELS)]


def compare_covariances(maps: list[Tensor], query: Tensor, *, scale: float = 1 / (2 * PLACES), single: bool) -> Tensor:
    prototype = torch.stack([find_covariances(item, scale) for item in maps]).mean(dim=0)
    covariances = find_covariances(query, scale)
    return covariances @ prototype if single else -(covariances - prototype).square().sum()


def find_flow(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    """Solve the linear program of transport by SciPy."""
    n, m = costs.shape
    rows = np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))
    sums = torch.cat([supply, demand]).numpy()
    result = linprog(costs.flatten().numpy(), A_eq=np.concatenate(rows), b_eq=sums, method="highs")
    return torch.from_numpy(result.x).view(n, m)


def move_slowly(class_map: Tensor, query: Tensor, *, scale: float = 12.5) -> Tensor:
    """Score by the earth mover's distance: Zhang et al. (2020), sec. 3, and its code; gradients are of costs alone."""
    with torch.no_grad():
        supply = torch.stack([(position @ class_map.mean(dim=0)).relu() + 1e-3 + 1e-5 for position in query])
        demand = torch.stack([(position @ query.mean(dim=0)).relu() + 1e-3 + 1e-5 for position in class_map])
    centred = [item - item.mean(dim=1, keepdim=True) for item in (query, class_map)]
    cosines = F.cosine_similarity(centred[0][:, None], centred[1][None], dim=2)
    flow = find_flow(1 - cosines.detach(), PLACES * supply / supply.sum(), PLACES * demand / demand.sum())
    return scale / PLACES * (cosines * flow).sum()


def train_slowly(support: Tensor, labels: Tensor, query: Tensor, *, steps: int) -> Tensor:
    """Train DeepEMD's structured layer by torch's own optimizer, map by map."""
    means = [torch.stack([spread(row) for row in support[labels == c]]).mean(dim=0) for c in range(4)]
    layer = torch.stack(means).requires_grad_()
    optimizer = torch.optim.SGD([layer], lr=100.0, momentum=0.9, dampening=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for rows in torch.randperm(len(support), generator=generator).split(4):
            optimizer.zero_grad()
            logits = [torch.stack([move_slowly(part, spread(row)) for part in layer]) for row in support[rows]]
            F.cross_entropy(torch.stack(logits), labels[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return torch.stack([torch.stack([move_slowly(part, spread(row)) for part in layer]) for row in query])


@pytest.mark.parametrize("shots", [(1, 1, 1, 1), (3, 1, 2, 4)])
def test_methods_of_maps_equal_slow_loops(shots: tuple[int, ...]) -> None:
    episodes, _ = make_episodes(n_episodes=2, shots=shots, n_queries=4, dim=CHANNELS * PLACES)
    single = shots == (1, 1, 1, 1)
    pairs: list[tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Any]]] = [
        (feature_map_reconstruction, reconstruct, {}),
        (feature_map_reconstruction, reconstruct, {"ridge": 0.2, "shrinkage": 1.3}),
        (cross_transformers, attend, {}),
        (cross_transformers, attend, {"temperature": 0.05}),
        (deepbdc, partial(compare_covariances, single=single), {}),
        (deepbdc, partial(compare_covariances, single=single), {"scale": 3.0}),
    ]
    for ours, score, settings in pairs:
        slow = partial(classify_slowly, partial(score, **settings))
        assert agree(ours(episodes, **settings), episodes, slow, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        feature_map_reconstruction(episodes, scale=2.0), 2 * feature_map_reconstruction(episodes)
    )


@pytest.mark.parametrize("shots", [(1, 1, 1, 1), (3, 1, 2, 4)])
def test_the_earth_movers_distance_equals_linear_programs(shots: tuple[int, ...]) -> None:
    episodes, _ = make_episodes(n_episodes=2, shots=shots, n_queries=2, dim=CHANNELS * PLACES)
    slow = partial(train_slowly, steps=0 if sum(shots) == 4 else 2)
    assert agree(deepemd(episodes, steps=2), episodes, slow, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(deepemd(episodes, steps=0, scale=25.0), 2 * deepemd(episodes, steps=0))


def test_the_order_of_places_in_a_map_does_not_matter() -> None:
    for name in sorted(needing("maps")):
        episodes, _ = make_episodes(shots=(1, 1, 1, 1), dim=CHANNELS * PLACES)
        moved = episodes.query.unflatten(2, episodes.shape or ()).flip(4).flatten(2)
        torch.testing.assert_close(METHODS[name](replace(episodes, query=moved)), METHODS[name](episodes))


def make_transport(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Make 40 problems of transport between 7 places and 5."""
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(40, 7, 5, generator=generator, dtype=torch.float64)
    supply, demand = (torch.rand(40, n, generator=generator, dtype=torch.float64) for n in (7, 5))
    if kind == "ties":
        costs, supply, demand = costs.round(), torch.ones_like(supply), torch.ones_like(demand)
    elif kind == "flat":
        costs = torch.ones_like(costs)
    elif kind == "skewed":
        supply, demand = supply**10 + 1e-6, demand**10 + 1e-6
    return costs, 5 * supply / supply.sum(dim=1, keepdim=True), 5 * demand / demand.sum(dim=1, keepdim=True)


def test_transport_equals_linear_programs() -> None:
    for kind in ["plain", "ties", "flat", "skewed"]:
        costs, supply, demand = make_transport(kind)
        flow = solve_optimal_transport(costs, supply, demand)
        assert bool((flow >= 0).all())
        torch.testing.assert_close(flow.sum(dim=2), supply, rtol=0, atol=1e-8)
        torch.testing.assert_close(flow.sum(dim=1), demand, rtol=0, atol=1e-8)
        expected = torch.stack([find_flow(*problem) for problem in zip(costs, supply, demand, strict=True)])
        worth = [(costs * item).sum(dim=(1, 2)) for item in (flow, expected)]
        torch.testing.assert_close(worth[0], worth[1], rtol=0, atol=1e-8)
        if kind == "plain":  # there is one best flow
            torch.testing.assert_close(flow, expected, rtol=0, atol=1e-6)
