from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from protonet.selection.scoring import minimize


def with_gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[float, Tensor]]:
    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_(True)
        value = function(x)
        return float(value.detach()), torch.autograd.grad(value, x)[0]

    return evaluate


def draw_regression(seed: int, features: int) -> Callable[[Tensor], Tensor]:
    """Make the loss of a logistic regression with a ridge."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, features, generator=generator, dtype=torch.float64)
    signs = torch.randn(40, generator=generator, dtype=torch.float64).sign()
    return lambda w: torch.nn.functional.softplus(-signs * (x @ w)).mean() + 0.01 * w.square().sum()


@pytest.mark.parametrize("seed", range(3))
def test_the_minimum_is_that_of_torch(seed: int) -> None:
    loss = draw_regression(seed, 12)
    w = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(w)
        value.backward()
        return value

    optimizer.step(closure)
    result = minimize(with_gradient(loss), torch.zeros(12, dtype=torch.float64))
    torch.testing.assert_close(result, w.detach(), rtol=0, atol=1e-6)
    assert float(loss(result)) <= float(loss(w.detach())) + 1e-10


def test_curved_valley() -> None:
    """Rosenbrock's function, whose minimum is at (1, 1)."""
    for start in ((-1.2, 1.0), (0.0, 0.0), (3.0, -2.0)):
        rosenbrock = with_gradient(lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2)
        result = minimize(rosenbrock, torch.tensor(start, dtype=torch.float64))
        torch.testing.assert_close(result, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-3)


def test_start_at_the_minimum_and_unbounded_function() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(minimize(with_gradient(lambda w: w.square().sum()), x), x)
    result = minimize(with_gradient(lambda x: -x.sum()), torch.zeros(2, dtype=torch.float64))
    assert all(map(math.isfinite, result.tolist()))
