"""Workloads of the optimizer bench that are convex or nearly so: what the bags, the loss and the factors are."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from analysis.optimizer_bench.workloads import convex
from analysis.optimizer_bench.workloads.gnn import SMALLEST


def test_bags_count_words_of_functions() -> None:
    x, y = convex.load_bags()
    assert x.shape == (len(y), convex.WORDS)
    assert torch.equal(x, x.round())
    totals = x.sum(0)
    assert (totals.diff() <= 0).all()  # the commonest first
    assert totals[0] > 50 * totals[-1] > 0  # on scales far apart
    assert y.bincount().min() >= SMALLEST


def test_the_classifier_is_convex() -> None:
    workload, other = convex.build_softmax(0), convex.build_softmax(1)
    assert isinstance(workload.model, nn.Linear)
    ends = [workload.val_loss(), other.val_loss()]
    with torch.no_grad():
        for mine, yours in zip(workload.model.parameters(), other.model.parameters(), strict=True):
            mine.lerp_(yours, 0.5)
    assert workload.val_loss() < sum(ends) / 2


def test_factors_multiply() -> None:
    model = convex.build_factor(0).model
    assert isinstance(model, convex.Factors)
    image = convex.load_photograph()
    rows, columns = torch.tensor([3, 3, 400]), torch.tensor([0, 600, 7])
    product = model.rows @ model.columns.T
    assert product.shape == image.shape
    torch.testing.assert_close(model(rows, columns), product[rows, columns])


def test_no_factors_of_this_rank_know_the_photograph_exactly() -> None:
    image = convex.load_photograph()
    torch.testing.assert_close(image.std(), torch.tensor(1.0))
    u, s, vh = torch.linalg.svd(image)
    best = F.mse_loss(u[:, : convex.RANK] * s[: convex.RANK] @ vh[: convex.RANK], image)
    assert 0.01 < best < 0.1  # what full knowledge would leave


def test_pixels_known_and_held_out_are_apart() -> None:
    workload = convex.build_factor(0)
    assert isinstance(workload.model, convex.Factors)
    workload.val_loss().backward()
    held_out = workload.model.rows.grad
    assert held_out is not None
    assert held_out.any(dim=1).float().mean() > 0.99  # pixels of nearly all rows
