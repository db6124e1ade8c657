from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.alpha_am import alpha_am
from tests.episodes.cases import make_episodes


def entropy(p: Tensor, alpha: float) -> Tensor:
    return -(p * p.log()).sum(dim=-1) if alpha == 1 else (1 - (p**alpha).sum(dim=-1)) / (alpha - 1)


def spread_labels(nodes: Tensor, bandwidth: Tensor, weight: Tensor, k: int, share: float) -> Tensor:
    """The graph edge by edge: what reaches each node from the first four, the centroids."""
    n = len(nodes)
    distances = ((nodes[:, None] - nodes).square().sum(dim=2) + 1e-16).sqrt() * (1 - torch.eye(n))
    distances = distances / distances.std()
    affinity = torch.zeros(n, n, dtype=torch.float64)
    for i in range(4, n):
        strength = torch.stack([(-distances[i, j] * bandwidth[i, j]).exp() for j in range(n) if j != i])
        others = [j for j in range(n) if j != i]
        first = strength * torch.tensor([1.00001 if j < 4 else 1.0 for j in others])  # where a centroid is a row
        for place in first.argsort(descending=True)[:k].tolist():
            affinity[i, others[place]] = strength[place]
    graph = weight * (affinity + affinity.T) / 2
    degree = graph.sum(dim=1) + 1e-12
    graph = graph / degree.sqrt() / degree.sqrt()[:, None]
    reached: Tensor = torch.linalg.inv(torch.eye(n, dtype=torch.float64) - share * graph)[:, :4]
    return reached


def run_autograd(
    support: Tensor, labels: Tensor, query: Tensor, alpha: float, weights: tuple[float, ...], k: int, share: float
) -> Tensor:
    """Five rounds as in the code, by torch's own Adam, at a learning rate at which they matter."""
    support, query = F.normalize(support, dim=1), F.normalize(query, dim=1)
    means = torch.stack([support[labels == c].mean(dim=0) for c in range(4)]).requires_grad_()
    n = 4 + len(support) + len(query)
    bandwidth = torch.ones(n, n, dtype=torch.float64, requires_grad=True)
    weight = torch.full((n, n), share, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([means, bandwidth, weight], lr=1e-2)
    for _ in range(5):
        nodes = torch.cat([means, support, query])
        logits = 15 * spread_labels(nodes, bandwidth, weight, k, share)[4:]
        p = logits[len(support) :].softmax(dim=1)
        parts = (
            F.cross_entropy(logits[: len(support)], labels),
            -entropy(p.mean(dim=0), alpha),
            entropy(p, alpha).mean(),
        )
        optimizer.zero_grad()
        torch.stack([each * part for each, part in zip(weights, parts, strict=True)]).sum().backward()
        optimizer.step()
    return logits[len(support) :].detach()


@pytest.mark.parametrize(
    ("shots", "alpha", "weights"),
    [((3, 2, 2, 4), 2.0, (1.0, 1.0, 1.0)), ((5, 5, 5, 5), 5.0, (1.0, 10.0, 1.0)), ((2, 2, 1, 2), 1.0, (0.5, 1.0, 0.3))],
)
def test_autograd(shots: tuple[int, ...], alpha: float, weights: tuple[float, float, float]) -> None:
    episodes, _ = make_episodes(n_episodes=2, noise=1.0, shots=shots, n_queries=9)
    late = sum(shots) >= 20
    chosen = alpha if alpha == 1 else None
    ours = alpha_am(episodes, alpha=chosen, weights=weights, learning_rate=1e-2, steps=5)
    k, share = (10, 0.9) if late else (20, 0.8)
    for number, case in enumerate(zip(*episodes[:3], strict=True)):
        expected = run_autograd(*case, alpha, weights, min(k, sum(shots) + 12), share)
        assert torch.allclose(ours[number], expected, atol=1e-5)
    assert not torch.allclose(ours, alpha_am(episodes, alpha=chosen, weights=weights, steps=1), atol=1e-2)


def test_transformed_rows_do_not_depend_on_their_length() -> None:
    episodes, _ = make_episodes()
    longer = episodes._replace(support=9 * episodes.support, query=9 * episodes.query)
    assert torch.allclose(alpha_am(longer, plc=True, steps=3), alpha_am(episodes, plc=True, steps=3), atol=1e-4)
    assert not torch.allclose(alpha_am(longer, steps=3), alpha_am(episodes, plc=True, steps=3), atol=1e-2)


def test_labels_that_do_not_spread_reach_nothing() -> None:
    episodes, _ = make_episodes()
    assert not bool(alpha_am(episodes, spread=0.0, steps=1).any())
