from __future__ import annotations

import pytest
import torch

from protonet.episodes.methods.mahalanobis import mahalanobis, project_to_span
from tests.episodes.cases import make_episodes


def covariance(rows: torch.Tensor) -> torch.Tensor:
    centred = rows - rows.mean(dim=0)
    return centred.T @ centred / max(len(rows) - 1, 1)


@pytest.mark.parametrize("dim", [6, 12, 50])
def test_slow_loop(dim: int) -> None:
    episodes, _ = make_episodes(dim=dim)
    logits = mahalanobis(episodes, ridge=0.4)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        slow = torch.zeros(len(query), 4, dtype=torch.float64)
        for c in range(4):
            rows = support[labels == c]
            own = len(rows) / (len(rows) + 1)
            matrix = own * covariance(rows) + (1 - own) * covariance(support) + 0.4 * torch.eye(dim)
            for position, row in enumerate(query):
                away = row - rows.mean(dim=0)
                slow[position, c] = -0.5 * away @ torch.linalg.inv(matrix) @ away
        torch.testing.assert_close(logits[number].log_softmax(dim=1), slow.log_softmax(dim=1))


def test_inner_products_with_the_support() -> None:
    episodes, _ = make_episodes(dim=30)
    support, query = project_to_span(episodes.support, episodes.query)
    assert query.shape == (3, 10, 10)
    products = episodes.query @ episodes.support.transpose(1, 2)
    torch.testing.assert_close(query @ support.transpose(1, 2), products)


def test_turning_all_rows_changes_nothing() -> None:
    episodes, _ = make_episodes(dim=30)
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64)).Q
    turned = episodes._replace(support=episodes.support @ turn, query=episodes.query @ turn)
    torch.testing.assert_close(mahalanobis(turned), mahalanobis(episodes))


def test_rows_of_zeros_and_twice_the_same() -> None:
    for dtype in (torch.float32, torch.float64):
        episodes, _ = make_episodes(dtype=dtype, dim=40)
        support = episodes.support.clone()
        support[0] = 0
        support[1, 1:] = support[1, :1]
        assert bool(mahalanobis(episodes._replace(support=support)).isfinite().all())
