"""The method `adaptive` equals loops that really leave out each row."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import one_hot
from protonet.selection.scoring import fit_temperature
from tests.episodes.cases import core_rows, make_episodes

module = importlib.import_module("protonet.episodes.methods.adaptive")  # the package has a function of the same name


def hot_of(labels: Tensor, n_way: int = 4) -> Tensor:
    return one_hot(labels, n_way, torch.float64)


def test_prototypes_leave_a_row_out() -> None:
    episodes, _ = make_episodes()
    view = module._prototype_view((episodes.support, episodes.query), hot_of(episodes.support_labels))
    for index, (support, labels, query) in enumerate(zip(*core_rows(episodes), strict=True)):
        unit = F.normalize(support, dim=1)
        for position in range(len(labels)):
            others = torch.arange(len(labels)) != position
            for c in range(4):
                rows = unit[others & (labels == c)]
                expected = F.cosine_similarity(unit[position], rows.mean(dim=0), dim=0) if len(rows) else 0.0
                assert abs(float(view.leave_one_out_scores[index, position, c] - expected)) < 1e-6
        means = torch.stack([unit[labels == c].mean(dim=0) for c in range(4)])
        assert torch.allclose(view.query_scores[index], F.normalize(query, dim=1) @ F.normalize(means, dim=1).T)


def test_ridge_regression_leaves_a_row_out() -> None:
    episodes, _ = make_episodes()
    hot = hot_of(episodes.support_labels)
    kernel = (-torch.cdist(episodes.support, episodes.support)).exp()
    right = (-torch.cdist(episodes.support, episodes.query)).exp()
    view = module._ridge_view(kernel, right, 0.3, hot, 1.0)
    n = kernel.shape[1]
    targets = hot - 0.25
    for index in range(len(kernel)):
        for position in range(n):
            others = [row for row in range(n) if row != position]
            gram = kernel[index][others][:, others] + 0.3 * torch.eye(n - 1)
            readout = torch.linalg.solve(gram, targets[index][others])
            assert torch.allclose(view.leave_one_out_scores[index, position], kernel[index, position, others] @ readout)
        readout = torch.linalg.solve(kernel[index] + 0.3 * torch.eye(n), targets[index])
        assert torch.allclose(view.query_scores[index], right[index].T @ readout)


def test_the_temperature_equals_the_solvers() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 30, 4, generator=generator, dtype=torch.float64)
    guesses, right = torch.randint(4, (5, 30), generator=generator), torch.rand(5, 30, generator=generator) < 0.5
    labels = torch.where(right, scores.argmax(dim=2), guesses)
    factors, losses = module._fit_temperature(scores.mT, hot_of(labels).mT, torch.ones(5, 30, dtype=torch.float64))
    for rows, target, factor, loss in zip(scores, labels, factors, losses, strict=True):
        expected, row_losses = fit_temperature(rows, target, torch.ones(4, dtype=torch.bool))
        assert abs(float(factor) - expected) < 1e-2 * expected
        assert abs(float(loss - row_losses.mean())) < 1e-4


@pytest.mark.parametrize("dim", [3, module.ADAPTIVE_FLOATS_IN_CACHE // 8])
def test_city_block_distances_equal_torchs(dim: int) -> None:
    """Distances are computed in several blocks if there are many features; those of equal rows are 0."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, n, dim, generator=generator, dtype=torch.float64) for n in (2, 5))
    b[:, 1] = a[:, 0]
    distances = module.city_block_distances(a, b)
    assert torch.allclose(distances, torch.cdist(a, b, p=1.0))
    assert torch.equal(distances[:, 0, 1], torch.zeros(3, dtype=torch.float64))
    assert torch.allclose(module.city_block_distances(2 * b, 2 * a), 2 * distances.transpose(1, 2))


@pytest.mark.parametrize("shots", [(1, 1, 1, 1), (1, 1, 1, 2)])
def test_a_single_row_a_class_gets_the_fixed_mixture(shots: tuple[int, ...]) -> None:
    episodes, _ = make_episodes(shots=shots)
    logits = module.adaptive(episodes)
    spread = logits.std(dim=2, correction=0).mean()
    assert 0.5 < float(spread) < 3.0  # about that of fixed weights
