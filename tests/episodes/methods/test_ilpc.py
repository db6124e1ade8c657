from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.neighbors import kneighbors_graph

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.ilpc import ilpc
from tests.episodes.cases import make_episodes

Array = NDArray[np.float64]
STEPS = 40


def propagate(rows: Array, labels: dict[int, int], n_way: int, n_neighbours: int) -> Array:
    near = 1 - kneighbors_graph(rows, n_neighbours, mode="distance", metric="cosine").toarray()
    near[near == 1] = 0  # no neighbours
    affinity = np.maximum(near, 0) ** 3
    affinity = (affinity + affinity.T) / 2
    degree = affinity.sum(axis=1)
    graph = affinity / np.sqrt(degree[:, None] * degree[None, :])
    given = np.zeros((len(rows), n_way))
    for row, label in labels.items():
        given[row, label] = 1
    reached = np.maximum(np.linalg.solve(np.eye(len(rows)) - 0.8 * graph, given), 0)
    return np.asarray(reached / reached.sum(axis=1, keepdims=True))


def transport(plan: Array, quota: Array) -> Array:
    for _ in range(1000):
        plan = plan / plan.sum(axis=1, keepdims=True)
        plan = plan * quota / np.maximum(plan.sum(axis=0), 1e-300)
    return np.asarray(plan / plan.sum(axis=1, keepdims=True))


def train(rows: Array, labels: dict[int, int], guesses: dict[int, int], n_way: int) -> Array:
    """Return the mean losses of a linear classifier, by autograd and torch's own optimizer."""
    layer = torch.nn.Linear(rows.shape[1], n_way, dtype=torch.float64)
    means = [np.mean([rows[row] for row, label in labels.items() if label == c], axis=0) for c in range(n_way)]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(np.stack([mean / np.linalg.norm(mean) for mean in means])))
        layer.bias.zero_()
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


def slow(support: Array, support_labels: Array, query: Array, n_way: int, n_neighbours: int, n_clean: int) -> Array:
    """One episode as the paper has it; returns the queries' rows of the plan."""
    rows = np.sqrt(np.concatenate([support, query]) + 1e-6)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows -= rows.mean(axis=0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    labels = dict(enumerate(support_labels.astype(int).tolist()))
    left, result = list(range(len(support), len(rows))), np.zeros((len(query), n_way))
    moved = np.zeros(n_way)
    while left:
        quota = np.maximum(len(query) / n_way - moved, 0)
        reached = propagate(rows, labels, n_way, n_neighbours)[left]
        plan = transport(reached**3, quota * len(left) / quota.sum())
        guesses = dict(zip(left, plan.argmax(axis=1).tolist(), strict=True))
        losses = train(rows, labels, guesses, n_way)
        for c in range(n_way):
            mine = sorted((row for row in left if guesses[row] == c), key=lambda row: losses[row])
            for row in mine[:n_clean]:
                labels[row] = c
                moved[c] += 1
                result[row - len(support)] = plan[left.index(row)]
        left = [row for row in left if row not in labels]
    return result


@pytest.mark.parametrize(("n_neighbours", "n_clean"), [(15, 1), (6, 3)])
def test_slow_loop(monkeypatch: pytest.MonkeyPatch, n_neighbours: int, n_clean: int) -> None:
    episodes, _ = make_episodes()
    module = importlib.import_module("protonet.episodes.methods.pt_map")
    monkeypatch.setattr(module, "SINKHORN", module.Sinkhorn(tolerance=1e-9))
    logits = ilpc(episodes, n_neighbours=n_neighbours, n_clean=n_clean, n_steps=STEPS)
    parts = zip(*(part.numpy() for part in episodes[:3]), strict=True)
    expected = np.stack([slow(support, labels, query, 4, n_neighbours, n_clean) for support, labels, query in parts])
    assert torch.allclose(logits.exp(), torch.tensor(expected), atol=1e-6)


def test_every_class_gets_its_quota() -> None:
    episodes, _ = make_episodes(n_queries=12)
    labels = ilpc(episodes, n_clean=1, n_steps=5).argmax(dim=2)
    assert bool((F.one_hot(labels).sum(dim=1) == 3).all())


def test_more_queries_are_right_than_by_the_nearest_support() -> None:
    episodes, labels = make_episodes(n_episodes=30, n_way=3, shots=(1, 1, 1), n_queries=60, dim=40, noise=0.8)
    nearest = torch.cdist(episodes.query, episodes.support).argmin(dim=2)  # (episodes, n_queries)
    before = episodes.support_labels.gather(1, nearest) == labels
    after = ilpc(episodes, n_steps=STEPS).argmax(dim=2) == labels
    gain = (after.double() - before.double()).mean(dim=1)  # (episodes,)
    assert float(gain.mean()) > 3 * float(gain.std()) / len(gain) ** 0.5


def test_an_episode_does_not_depend_on_its_batch() -> None:
    episodes, _ = make_episodes(n_episodes=5)
    logits = ilpc(episodes, n_steps=STEPS)
    alone = [
        ilpc(Episodes(support[None], labels[None], query[None], episodes.n_way), n_steps=STEPS)
        for support, labels, query in zip(*episodes[:3], strict=True)
    ]
    assert torch.allclose(torch.cat(alone), logits, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poor_features_give_finite_logits(dtype: torch.dtype) -> None:
    episodes, _ = make_episodes(n_episodes=4, n_way=2, shots=(1, 1), dtype=dtype)
    episodes.query[0] = episodes.support[0] = 0.7
    episodes.query[1, :4] = 0
    episodes.support[1, 0] = 0
    episodes.query[2] = episodes.query[2, :1]
    episodes.support[3, :] = episodes.query[3, :2]
    before = episodes.support.clone(), episodes.query.clone()
    logits = ilpc(episodes, n_steps=STEPS)
    assert logits.dtype == dtype
    assert bool(logits.isfinite().all())
    assert torch.allclose(logits.exp().sum(dim=2), torch.ones(4, 10, dtype=dtype))
    assert torch.equal(before[0], episodes.support)
    assert torch.equal(before[1], episodes.query)
