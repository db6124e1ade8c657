from __future__ import annotations

import pytest
import torch
from torch import Tensor

from protonet.episodes.methods.paddle import paddle
from protonet.episodes.methods.soft_kmeans import soft_kmeans
from tests.episodes.cases import make_episodes


def run_slowly(support: Tensor, labels: Tensor, query: Tensor, weight: float, steps: int) -> Tensor:
    """The code's updates, entry by entry, after features are divided by their range over queries: the assignments."""
    spread = query.max(dim=0).values - query.min(dim=0).values
    support, query = support / spread, query / spread
    means = [support[labels == c].mean(dim=0) for c in range(4)]
    dual = [0.0] * 4
    for _ in range(steps):
        assigned = torch.zeros(len(query), 4, dtype=torch.float64)
        for n, row in enumerate(query):
            for k in range(4):
                assigned[n, k] = (-0.5 * (row - means[k]).square().sum() + weight / len(query) * dual[k]).exp()
            assigned[n] /= assigned[n].sum()
        dual = [float((assigned[:, k].mean() + 1e-6).log()) + 1 for k in range(4)]
        means = []
        for k in range(4):
            own = [row for row, label in zip(support, labels, strict=True) if label == k]
            total = torch.stack(own).sum(dim=0) + sum(assigned[n, k] * row for n, row in enumerate(query))
            means.append(total / (len(own) + assigned[:, k].sum()))
    return assigned


@pytest.mark.parametrize(("weight", "steps"), [(None, 1), (None, 7), (3.0, 5)])
def test_slow_loop(weight: float | None, steps: int) -> None:
    episodes, _ = make_episodes(noise=1.5)
    ours = paddle(episodes, lambda_=weight, n_steps=steps).softmax(dim=2)
    for number, case in enumerate(zip(*episodes[:3], strict=True)):
        assert torch.allclose(ours[number], run_slowly(*case, 10.0 if weight is None else weight, steps))


def test_without_a_partition_it_is_soft_k_means() -> None:
    episodes, _ = make_episodes()
    half = episodes._replace(support=episodes.support / 2**0.5, query=episodes.query / 2**0.5)
    ours = paddle(episodes, lambda_=0.0, n_steps=4, scaled=False)
    assert torch.allclose(ours.softmax(dim=2), soft_kmeans(half, steps=3).softmax(dim=2))


def test_few_classes_are_preferred() -> None:
    """Queries close together, between four classes: one of them describes all in the fewest words."""
    episodes, _ = make_episodes(n_episodes=20, shots=(2, 2, 2, 2), n_queries=30)
    middle = episodes.support.mean(dim=1, keepdim=True) + 0.3 * episodes.query
    near = episodes._replace(query=middle)
    few, many = (paddle(near, lambda_=weight, scaled=False).argmax(dim=2) for weight in (None, 0.0))
    used = [sum(len(row.unique()) for row in each) for each in (few, many)]
    assert used[0] < used[1]


def test_a_feature_that_never_changes() -> None:
    episodes, _ = make_episodes(dtype=torch.float32)
    episodes.query[..., 0] = 2.0
    assert bool(paddle(episodes).isfinite().all())
