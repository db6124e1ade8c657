"""The L-BFGS that fits weights, against torch.optim.LBFGS and minima that are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from protonet.scoring import _minimize


def with_gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[float, Tensor]]:
    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_(True)
        value = function(x)
        return float(value.detach()), torch.autograd.grad(value, x)[0]

    return evaluate


def draw_regression(seed: int, features: int) -> Callable[[Tensor], Tensor]:
    """Return the loss of a logistic regression with a ridge."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, features, generator=generator, dtype=torch.float64)
    signs = torch.randn(40, generator=generator, dtype=torch.float64).sign()
    return lambda w: torch.nn.functional.softplus(-signs * (x @ w)).mean() + 0.01 * w.square().sum()


@pytest.mark.parametrize("seed", range(5))
def test_it_ends_where_torchs_does(seed: int) -> None:
    loss = draw_regression(seed, 12)
    w = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(w)
        value.backward()
        return value

    optimizer.step(closure)
    found = _minimize(with_gradient(loss), torch.zeros(12, dtype=torch.float64))
    torch.testing.assert_close(found, w.detach(), rtol=0, atol=1e-6)
    assert float(loss(found)) <= float(loss(w.detach())) + 1e-10


@pytest.mark.parametrize("start", [(-1.2, 1.0), (0.0, 0.0), (3.0, -2.0)])
def test_a_curved_valley_takes_more_than_one_trial_of_a_step(start: tuple[float, float]) -> None:
    """Rosenbrock's function, least at (1, 1)."""
    rosenbrock = with_gradient(lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2)
    found = _minimize(rosenbrock, torch.tensor(start, dtype=torch.float64))
    torch.testing.assert_close(found, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-3)


def test_a_minimum_stays_and_what_has_none_ends() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(_minimize(with_gradient(lambda w: w.square().sum()), x), x)
    found = _minimize(with_gradient(lambda x: -x.sum()), torch.zeros(2, dtype=torch.float64))
    assert all(map(math.isfinite, found.tolist()))
