from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize

from protonet.episodes.methods.metaopt import metaopt_svm, solve_program
from tests.episodes.cases import make_episodes

Array = NDArray[np.float64]


def solve_slowly(support: Array, labels: Array, limit: float, ridge: float) -> Array:
    """The program as the paper writes it, by SciPy's sequential quadratic programming: weights (n_way, dim)."""
    n, n_way = len(support), int(labels.max()) + 1
    hot = np.eye(n_way)[labels]
    kernel = support @ support.T + ridge * np.eye(n)

    def lose(flat: Array) -> tuple[float, Array]:
        share = flat.reshape(n, n_way)
        return float(0.5 * np.sum(share * (kernel @ share)) - np.sum(hot * share)), (kernel @ share - hot).ravel()

    sums = {"type": "eq", "fun": lambda flat: flat.reshape(n, n_way).sum(axis=1)}
    bounds = [(None, limit if own else 0.0) for own in hot.ravel()]
    options = {"maxiter": 2000, "ftol": 1e-15}
    found = minimize(lose, np.zeros(n * n_way), jac=True, bounds=bounds, constraints=[sums], options=options)
    return np.asarray(found.x.reshape(n, n_way).T @ support)


@pytest.mark.parametrize(("limit", "ridge"), [(0.1, 1.0), (10.0, 1.0), (0.01, 0.1)])
def test_a_slow_program(limit: float, ridge: float) -> None:
    episodes, _ = make_episodes(n_episodes=2, noise=1.0)
    ours = metaopt_svm(episodes, inverse_penalty=limit, ridge=ridge, scale=3.0)
    for number, (support, labels, query) in enumerate(zip(*(each.numpy() for each in episodes[:3]), strict=True)):
        weights = solve_slowly(support, labels, limit, ridge)
        assert np.allclose(ours[number], 3 * query @ weights.T, atol=1e-4)


def test_the_conditions_of_a_minimum() -> None:
    """Within its bounds, and no row gains by moving a share from one class to another."""
    episodes, _ = make_episodes(shots=(5, 5, 5, 5), noise=1.5)
    gram = episodes.support @ episodes.support.transpose(1, 2) + torch.eye(20)
    hot = F.one_hot(episodes.support_labels).double().transpose(1, 2)
    share = solve_program(gram, hot, torch.tensor(0.1))
    assert float(share.sum(dim=1).abs().max()) < 1e-8
    assert float((share - 0.1 * hot).max()) < 1e-8
    slope = share @ gram - hot
    free = share < 0.1 * hot - 1e-4
    highest = slope.where(free, -torch.inf).amax(dim=1)
    assert float((slope.where(free, torch.inf).amin(dim=1) - highest).abs().max()) < 1e-5
    assert float((slope - highest[:, None]).max()) < 1e-5


def test_small_penalties_bind_every_row() -> None:
    episodes, _ = make_episodes()
    gram = episodes.support @ episodes.support.transpose(1, 2)
    hot = F.one_hot(episodes.support_labels).double().transpose(1, 2)
    assert torch.allclose((solve_program(gram, hot, torch.tensor(1e-4)) * hot).sum(dim=1), torch.tensor(1e-4).double())


def test_rows_ridge_and_penalty_of_another_size_are_the_same_program() -> None:
    episodes, _ = make_episodes()
    larger = episodes._replace(support=1e3 * episodes.support, query=1e3 * episodes.query)
    ours = metaopt_svm(larger, inverse_penalty=1e-7, ridge=1e6)
    assert torch.allclose(ours, metaopt_svm(episodes), atol=1e-6)
