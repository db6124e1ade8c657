"""Methods of feature maps, and of queries in equal numbers, equal slow loops and linear programs."""

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
from numpy.typing import NDArray
from scipy.optimize import linprog
from sklearn.neighbors import kneighbors_graph
from torch import Tensor

from protonet.episodes.methods import METHODS
from protonet.episodes.methods import transport as module
from protonet.episodes.methods.maps import (
    RIDGE_OFFSET,
    cross_transformers,
    deepbdc,
    deepemd,
    feature_map_reconstruction,
    solve_optimal_transport,
)
from protonet.episodes.methods.transport import ilpc, proto_lp, pt_map, sinkhorn_scales
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
    pairs = zip(query, aligned, strict=True)
    return -torch.stack([(position - item).square().sum() for position, item in pairs]).mean()


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
    logits = [feature_map_reconstruction(episodes, scale=scale) / scale for scale in (1.0, 2.0)]
    torch.testing.assert_close(*logits)


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


Array = NDArray[np.float64]
STEPS = 40


def unit(rows: Array) -> Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def find_means(rows: Array, labels: Array) -> Array:
    return np.stack([rows[labels == c].mean(axis=0) for c in range(4)])


def transport(plan: Array, quota: Array | float | None = None) -> Array:
    """Scale a plan's rows and columns in turn until each row sums to 1 and each column to its quota."""
    quota = len(plan) / plan.shape[1] if quota is None else quota
    for _ in range(3000):
        plan = plan / plan.sum(axis=1, keepdims=True)
        sums = plan.sum(axis=0)
        if np.abs(sums - quota).max() < 1e-8:
            break
        plan = plan * quota / np.maximum(sums, 1e-300)
    return np.asarray(plan / plan.sum(axis=1, keepdims=True))


def find_distances(rows: Array, means: Array) -> Array:
    return np.asarray(((rows[:, None] - means) ** 2).sum(axis=2))


def map_slowly(*episode: Tensor) -> Array:
    """Run PT-MAP as its paper has it, with QR of the rows, and distances one row at a time."""
    support, labels, query = (part.numpy() for part in episode)
    rows = unit(np.linalg.qr(np.sqrt(np.concatenate([support, query]) + 1e-6).T).R.T)
    support, query = (unit(part - part.mean(axis=0)) for part in (rows[: len(support)], rows[len(support) :]))
    means = find_means(support, labels)
    for _ in range(20):
        plan = transport(np.exp(-10 * find_distances(query, means)))
        for c in range(4):
            total = support[labels == c].sum(axis=0) + (plan[:, c, None] * query).sum(axis=0)
            means[c] += 0.2 * (total / ((labels == c).sum() + plan[:, c].sum()) - means[c])
    return transport(np.exp(-10 * find_distances(query, means)))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Sinkhorn's iterations until they are as exact as in the oracles."""
    monkeypatch.setattr(module, "SINKHORN_TOLERANCE", 1e-8)
    monkeypatch.setattr(module, "SINKHORN_MAX_DRIFT", 0)


@pytest.mark.usefixtures("exact")
def test_pt_map_equals_a_slow_loop() -> None:
    episodes, _ = make_episodes(n_episodes=2, noise=1.5)  # 10 queries, 4 ways: 2.5 each
    assert agree(pt_map(episodes).exp(), episodes, map_slowly, atol=1e-6)


def test_balance_keeps_both_margins() -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = torch.rand(3, 4, 9, generator=generator, dtype=torch.float64) ** 8
    mass = torch.rand(3, 1, 9, generator=generator, dtype=torch.float64)
    quota = torch.rand(3, 4, 1, generator=generator, dtype=torch.float64)
    quota[1, 2] = 0
    quota *= mass.sum(dim=2, keepdim=True) / quota.sum(dim=1, keepdim=True)
    plan = kernel * sinkhorn_scales(kernel, mass, quota, torch.ones_like(quota))
    plan *= mass / plan.sum(dim=1, keepdim=True)
    assert torch.allclose(plan.sum(dim=2, keepdim=True), quota, rtol=2 * module.SINKHORN_TOLERANCE)


def propagate_prototypes(*episode: Tensor, dims: int, balanced: bool, paper: bool) -> Array:
    """Run six steps of protoLP with the transform of its code, on the rows themselves; return the assignments."""
    support, labels, query = (part.numpy() for part in episode)
    rows = unit(np.sqrt(np.concatenate([support, query]) + 1e-6))
    rows = rows @ np.linalg.svd(rows, full_matrices=False)[2][:dims].T
    rows = unit(rows - rows.mean(axis=0))
    n, hot = len(support), np.eye(4)[labels]
    means = unit(find_means(rows[:n], labels))
    gamma, fraction = (0.05, 0.7) if paper else (1.0, 0.6)

    def scale(plan: Array) -> Array:
        return transport(plan) if balanced else np.asarray(plan / plan.sum(axis=1, keepdims=True))

    for _ in range(6):
        plan = scale(np.exp(-10 * find_distances(rows[n:], means)))
        z = np.concatenate([hot, plan])
        together, inverse = z.T @ z, np.diag(1 / z.sum(axis=0))
        laplacian = together - together @ inverse @ together if paper else np.eye(4) - together @ inverse
        label = z @ np.linalg.inv(hot.T @ hot + gamma * laplacian) @ hot.T @ hot
        label = scale(np.maximum(label[n:], 1e-300))
        joined = np.concatenate([hot, fraction * label + (1 - fraction) * plan])
        means = means + 0.2 * (joined.T @ rows / joined.sum(axis=0)[:, None] - means)
    return scale(np.exp(-10 * find_distances(rows[n:], means)))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("dims", "balanced", "paper"), [(40, True, False), (5, False, False), (5, True, True)])
def test_proto_lp_equals_a_slow_loop(dims: int, balanced: bool, paper: bool) -> None:
    episodes, _ = make_episodes(noise=1.0, n_queries=12)
    settings = {"gamma": 0.05, "mixing_weight": 0.7} if paper else {}
    ours = proto_lp(episodes, n_dims=dims, balanced=balanced, paper=paper, n_epochs=6, **settings).exp()
    slow = partial(propagate_prototypes, dims=dims, balanced=balanced, paper=paper)
    assert agree(ours, episodes, slow, atol=1e-5)


def test_balanced_classes_have_as_many_queries() -> None:
    episodes, _ = make_episodes(noise=1.0, n_queries=12)
    assert torch.allclose(proto_lp(episodes, n_epochs=9).exp().sum(dim=1), torch.tensor(3.0).double(), atol=1e-2)
    assert float((proto_lp(episodes, n_epochs=9, balanced=False).exp().sum(dim=1) - 3).abs().max()) > 0.5
    labels = ilpc(episodes, n_clean=1, n_steps=5).argmax(dim=2)
    assert bool((F.one_hot(labels).sum(dim=1) == 3).all())


def propagate(rows: Array, labels: dict[int, int], n_neighbours: int) -> Array:
    near = 1 - kneighbors_graph(rows, n_neighbours, mode="distance", metric="cosine").toarray()
    near[near == 1] = 0  # no neighbours
    affinity = np.maximum(near, 0) ** 3
    affinity = (affinity + affinity.T) / 2
    degree = affinity.sum(axis=1)
    graph = affinity / np.sqrt(degree[:, None] * degree[None, :])
    given = np.zeros((len(rows), 4))
    for row, label in labels.items():
        given[row, label] = 1
    reached = np.maximum(np.linalg.solve(np.eye(len(rows)) - 0.8 * graph, given), 0)
    return np.asarray(reached / reached.sum(axis=1, keepdims=True))


def train(rows: Array, labels: dict[int, int], guesses: dict[int, int]) -> Array:
    """Train a linear classifier by autograd and torch's own optimizer; return each row's mean loss over the steps."""
    layer = torch.nn.Linear(rows.shape[1], 4, dtype=torch.float64)
    known = [*labels]
    means = unit(find_means(rows[known], np.array([labels[row] for row in known])))
    layer.load_state_dict({"weight": torch.tensor(means), "bias": torch.zeros(4)})
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    target = torch.tensor([(labels | guesses)[row] for row in range(len(rows))])
    total = np.zeros(len(rows))
    for _ in range(STEPS):
        losses = F.cross_entropy(layer(torch.tensor(rows)), target, reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        total += losses.detach().numpy() / STEPS
    return total


def clean_labels(*episode: Tensor, n_neighbours: int, n_clean: int) -> Array:
    """Run ILPC as its paper has it; return the queries' rows of the plan."""
    support, support_labels, query = (part.numpy() for part in episode)
    rows = unit(np.sqrt(np.concatenate([support, query]) + 1e-6))
    rows = unit(rows - rows.mean(axis=0))
    labels = dict(enumerate(support_labels.tolist()))
    left, result = list(range(len(support), len(rows))), np.zeros((len(query), 4))
    moved = np.zeros(4)
    while left:
        quota = np.maximum(len(query) / 4 - moved, 0)
        plan = transport(propagate(rows, labels, n_neighbours)[left] ** 3, quota * len(left) / quota.sum())
        guesses = dict(zip(left, plan.argmax(axis=1).tolist(), strict=True))
        losses = train(rows, labels, guesses)
        for c in range(4):
            for row in sorted((row for row in left if guesses[row] == c), key=lambda row: losses[row])[:n_clean]:
                labels[row] = c
                moved[c] += 1
                result[row - len(support)] = plan[left.index(row)]
        left = [row for row in left if row not in labels]
    return result


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("n_neighbours", "n_clean"), [(15, 1), (6, 3)])
def test_ilpc_equals_a_slow_loop(n_neighbours: int, n_clean: int) -> None:
    episodes, _ = make_episodes(n_episodes=2)
    ours = ilpc(episodes, n_neighbours=n_neighbours, n_clean=n_clean, n_steps=STEPS).exp()
    assert agree(ours, episodes, partial(clean_labels, n_neighbours=n_neighbours, n_clean=n_clean), atol=1e-6)


@pytest.mark.parametrize("method", [pt_map, proto_lp])
def test_negative_features_keep_their_signs(method: Callable[..., Tensor]) -> None:
    episodes, _ = make_episodes()
    negative = replace(episodes, support=-episodes.support, query=-episodes.query)
    tolerance = 1e-8 if method is pt_map else 1e-5
    assert torch.allclose(method(negative, n_epochs=3), method(episodes, n_epochs=3), atol=tolerance)
