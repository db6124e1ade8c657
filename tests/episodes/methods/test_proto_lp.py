from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protonet.episodes.methods.proto_lp import proto_lp
from tests.episodes.cases import make_episodes

module = importlib.import_module("protonet.episodes.methods.pt_map")  # the package has a function of that name
Array = NDArray[np.float64]


def transport(plan: Array) -> Array:
    """Scale a plan's rows and columns in turn until both sum to what they must."""
    n, m = plan.shape
    for _ in range(3000):
        plan = plan / plan.sum(axis=1, keepdims=True)
        plan = plan * (n / m) / plan.sum(axis=0, keepdims=True)
    return np.asarray(plan / plan.sum(axis=1, keepdims=True))


def run_slowly(support: Array, labels: Array, query: Array, *, dims: int, balanced: bool, paper: bool) -> Array:
    """Six steps with the code's transform, in the rows' own coordinates: the assignments."""
    rows = np.sqrt(np.concatenate([support, query]) + 1e-6)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    _, _, directions = np.linalg.svd(rows, full_matrices=False)
    rows = rows @ directions[:dims].T
    rows = rows - rows.mean(axis=0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    n = len(support)
    hot = np.eye(4)[labels]
    means = np.stack([rows[:n][labels == c].mean(axis=0) for c in range(4)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    gamma, share = (0.05, 0.7) if paper else (1.0, 0.6)
    for step in range(7):
        plan = np.array([[np.exp(-10 * ((row - mean) ** 2).sum()) for mean in means] for row in rows[n:]])
        plan = transport(plan) if balanced else plan / plan.sum(axis=1, keepdims=True)
        if step == 6:
            break
        z = np.concatenate([hot, plan])
        together, inverse = z.T @ z, np.diag(1 / z.sum(axis=0))
        laplacian = together - together @ inverse @ together if paper else np.eye(4) - together @ inverse
        label = z @ np.linalg.inv(hot.T @ hot + gamma * laplacian) @ hot.T @ hot
        label = np.maximum(label[n:], 1e-300)
        label = transport(label) if balanced else label / label.sum(axis=1, keepdims=True)
        joined = np.concatenate([hot, share * label + (1 - share) * plan])
        means = means + 0.2 * (joined.T @ rows / joined.sum(axis=0)[:, None] - means)
    return plan


@pytest.mark.parametrize("dims", [40, 5])
@pytest.mark.parametrize(("balanced", "paper"), [(True, False), (False, False), (True, True)])
def test_slow_loop(monkeypatch: pytest.MonkeyPatch, dims: int, balanced: bool, paper: bool) -> None:
    monkeypatch.setattr(module, "SINKHORN", module.Sinkhorn(tolerance=1e-12, drift=0))
    episodes, _ = make_episodes(noise=1.0, n_queries=12)
    settings = {"gamma": 0.05, "share": 0.7} if paper else {}
    ours = proto_lp(episodes, n_dims=dims, balanced=balanced, paper=paper, n_epochs=6, **settings).exp()
    for number, case in enumerate(zip(*(each.numpy() for each in episodes[:3]), strict=True)):
        expected = run_slowly(*case, dims=dims, balanced=balanced, paper=paper)
        assert np.allclose(ours[number], expected, atol=1e-5)


def test_balanced_classes_have_as_many_queries() -> None:
    episodes, _ = make_episodes(noise=1.0, n_queries=12)
    assert torch.allclose(proto_lp(episodes).exp().sum(dim=1), torch.tensor(3.0).double(), atol=1e-2)
    free = proto_lp(episodes, balanced=False).exp().sum(dim=1)
    assert float((free - 3).abs().max()) > 0.5


def test_signs_are_kept() -> None:
    episodes, _ = make_episodes()
    negative = episodes._replace(support=-episodes.support, query=-episodes.query)
    assert torch.allclose(proto_lp(negative), proto_lp(episodes), atol=1e-5)
