from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.optimize import minimize
from scipy.special import log_softmax

from protonet.stacking import LOGIT_SCALE, fit_weights, simplest_within_one_error, worse_by_one_error
from tests.strategies import seeds


@pytest.mark.parametrize("views", [1, 3])
def test_weights_are_the_minimum_that_scipy_finds(views: int) -> None:
    generator = torch.Generator().manual_seed(views)
    cosines = torch.rand(views, 60, 5, generator=generator) * 2 - 1
    labels = torch.arange(60) % 5
    cosines[0, torch.arange(60), labels] += 0.3  # the first view knows something, the others do not
    seen = torch.tensor([True] * 5)
    factors, losses = fit_weights(cosines, labels, seen)
    array = cosines.double().numpy()
    ridge = np.var(array, axis=2, ddof=1).mean(axis=1) / (LOGIT_SCALE**2 * 60)

    def objective(beta: np.ndarray) -> float:
        log_p = log_softmax(np.tensordot(beta, array, axes=1), axis=1)
        return float(-log_p[np.arange(60), labels.numpy()].mean() + (ridge * beta**2).sum() / 2)

    best = minimize(objective, np.ones(views), bounds=[(0, None)] * views, tol=1e-12)
    assert objective(factors.numpy()) <= best.fun + 1e-6
    np.testing.assert_allclose(factors.numpy(), best.x, atol=0.02)
    assert float(losses.mean()) <= objective(factors.numpy())


def test_a_class_that_cannot_win_takes_no_probability() -> None:
    cosines, labels = torch.zeros(1, 4, 3), torch.tensor([0, 1, 0, 1])
    _, losses = fit_weights(cosines, labels, torch.tensor([True, True, False]))
    torch.testing.assert_close(losses, torch.full((4,), 2.0, dtype=torch.float64).log())


@given(seed=seeds)
def test_the_simplest_within_one_error(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = list(torch.rand(5, 30, generator=generator, dtype=torch.float64))
    best = min(losses, key=lambda loss: float(loss.mean()))
    chosen = simplest_within_one_error(losses)
    assert not worse_by_one_error(losses[chosen], best)
    assert all(worse_by_one_error(loss, best) for loss in losses[:chosen])
