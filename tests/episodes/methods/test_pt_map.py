from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.pt_map import balance, pt_map, transform
from tests.episodes.cases import load_easyfsl, make_episodes, run_easyfsl

module = importlib.import_module("protonet.episodes.methods.pt_map")  # the package has a function of that name

Array = NDArray[np.float64]


def transport(distances: Array) -> Array:
    """Alg. 1's Sinkhorn: scale the plan's rows and columns in turn until both sum to what they must."""
    n, m = distances.shape
    plan = np.exp(-10 * distances)
    for _ in range(1000):
        plan = plan / plan.sum(axis=1, keepdims=True)
        plan = plan * (n / m) / plan.sum(axis=0, keepdims=True)
    return np.asarray(plan / plan.sum(axis=1, keepdims=True))


def slow(support: Array, labels: Array, query: Array, n_way: int) -> Array:
    """One episode as the paper has it: the rows themselves, QR, distances row by row."""
    rows = np.sqrt(np.concatenate([support, query]) + 1e-6)
    rows = np.linalg.qr(rows.T).R.T
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    sets = [rows[: len(support)], rows[len(support) :]]
    sets = [part - part.mean(axis=0) for part in sets]
    support, query = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in sets]
    means = np.stack([support[labels == c].mean(axis=0) for c in range(n_way)])
    for epoch in range(21):
        distances = np.array([[((row - mean) ** 2).sum() for mean in means] for row in query])
        plan = transport(distances)
        if epoch == 20:
            break
        for c in range(n_way):
            total = support[labels == c].sum(axis=0) + (plan[:, c, None] * query).sum(axis=0)
            means[c] += 0.2 * (total / ((labels == c).sum() + plan[:, c].sum()) - means[c])
    return plan


def test_slow_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes, _ = make_episodes(noise=1.5)  # 10 queries, 4 ways: 2.5 each
    parts = zip(*(part.numpy() for part in episodes[:3]), strict=True)
    expected = torch.tensor(np.stack([slow(support, labels, query, 4) for support, labels, query in parts]))
    assert torch.allclose(pt_map(episodes).exp(), expected, atol=10 * module.SINKHORN.tolerance)
    monkeypatch.setattr(module, "SINKHORN", module.Sinkhorn(tolerance=1e-12, drift=0))
    assert torch.allclose(pt_map(episodes), expected.log(), atol=1e-6)


def test_easyfsl() -> None:
    """Its PT-MAP takes features as they come, of any norm: the MAP step alone is the paper's.

    Rows that are transformed beforehand pass its own transform, a ReLU and a power, when shifted to be positive and
    with power 1; distances do not feel the shift. It stops when a plan's margins hardly change, 1e-4 before the end.
    """
    classifier = load_easyfsl("methods.pt_map").PTMAP(fine_tuning_steps=20, power_factor=1.0)
    episodes, _ = make_episodes(n_queries=12, noise=1.5)  # it rounds the queries of a class down
    support, query = (1 + transform(rows, 0.5) for rows in (episodes.support, episodes.query))
    theirs = run_easyfsl(classifier, episodes._replace(support=support, query=query))
    ours = pt_map(episodes)
    assert torch.equal(ours.argmax(dim=2), theirs.argmax(dim=2))
    assert torch.allclose(ours.exp(), theirs, atol=1e-3)


def test_easyfsl_fails_where_features_are_many() -> None:
    """Unnormalised, all of exp(-10 d^2) underflows: 0 / 0, which never converges, 1000 iterations a transport."""
    episodes, _ = make_episodes(n_episodes=1, dim=640, n_queries=12, dtype=torch.float32)
    theirs = run_easyfsl(load_easyfsl("methods.pt_map").PTMAP(fine_tuning_steps=1), episodes)
    assert bool(theirs.isnan().all())
    assert bool(pt_map(episodes).isfinite().all())


def test_balance_keeps_both_margins() -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = torch.rand(3, 4, 9, generator=generator, dtype=torch.float64) ** 8
    mass = torch.rand(3, 1, 9, generator=generator, dtype=torch.float64)
    quota = torch.rand(3, 4, 1, generator=generator, dtype=torch.float64)
    quota[1, 2] = 0
    quota *= mass.sum(dim=2, keepdim=True) / quota.sum(dim=1, keepdim=True)
    plan = kernel * balance(kernel, mass, quota, torch.ones_like(quota))
    plan *= mass / plan.sum(dim=1, keepdim=True)
    assert torch.allclose(plan.sum(dim=2, keepdim=True), quota, rtol=2 * module.SINKHORN.tolerance)


@pytest.mark.parametrize("noise", [0.05, 0.6])
def test_an_episode_does_not_depend_on_its_batch(noise: float) -> None:
    episodes, _ = make_episodes(n_episodes=5, noise=noise)
    alone = [
        pt_map(Episodes(support[None], labels[None], query[None], episodes.n_way))
        for support, labels, query in zip(*episodes[:3], strict=True)
    ]
    assert torch.allclose(torch.cat(alone), pt_map(episodes), atol=1e-9)


def test_signs_are_kept() -> None:
    episodes, _ = make_episodes()
    negative = episodes._replace(support=-episodes.support, query=-episodes.query)
    assert torch.allclose(pt_map(negative), pt_map(episodes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lam", [10.0, 500.0])
def test_poor_features_give_finite_logits(dtype: torch.dtype, lam: float) -> None:
    episodes, _ = make_episodes(n_episodes=4, n_way=2, shots=(1, 1), dtype=dtype)
    episodes.query[0] = episodes.support[0] = 0.7
    episodes.query[1, :4] = 0
    episodes.support[1, 0] = 0
    episodes.query[2] = episodes.query[2, :1]
    episodes.support[3, :] = episodes.query[3, :2]
    before = episodes.support.clone(), episodes.query.clone()
    logits = pt_map(episodes, lambda_=lam)
    assert logits.dtype == dtype
    assert bool(logits.isfinite().all())
    assert torch.allclose(logits.exp().sum(dim=2), torch.ones(4, 10, dtype=dtype))
    assert torch.equal(before[0], episodes.support)
    assert torch.equal(before[1], episodes.query)


def test_scales_that_drift_on_change_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes far apart: the scales are still on their way, and every row keeps its class to four digits."""
    centre = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])  # two and three rows, where each class is to have 8 / 3
    kernel = torch.full((1, 3, 8), 1e-6, dtype=torch.float64).scatter_(1, centre[None, None], 1.0)
    start = torch.tensor([[[1.0], [1.001], [0.999]]], dtype=torch.float64)
    mass = torch.ones(1, dtype=torch.float64)
    quota = torch.tensor([[[3.0], [2.0], [3.0]]], dtype=torch.float64)
    plans = []
    for drift in (1e-6, 0.0):
        monkeypatch.setattr(module, "SINKHORN", module.Sinkhorn(drift=drift))
        plan = kernel * balance(kernel, mass, quota, start)
        plans.append(plan / plan.sum(dim=1, keepdim=True))
    assert torch.allclose(plans[0], plans[1], atol=1e-4)
    assert torch.equal(plans[0].argmax(dim=1)[0], centre)
