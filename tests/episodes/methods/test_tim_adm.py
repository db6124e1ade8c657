from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.tim import tim
from protonet.episodes.methods.tim_adm import tim_adm
from tests.episodes.cases import make_episodes


def run_slowly(
    support: Tensor, labels: Tensor, query: Tensor, weights: tuple[float, float, float], steps: int, size: float
) -> Tensor:
    """Prop. 1 with the code's exponents, class by class: the queries' probabilities."""
    cross, marginal, conditional = weights
    support, query = F.normalize(support, dim=1), F.normalize(query, dim=1)
    means = torch.stack([support[labels == c].mean(dim=0) for c in range(4)])

    def probabilities(rows: Tensor) -> Tensor:
        return torch.stack([(-7.5 * (row - means).square().sum(dim=1)).softmax(dim=0) for row in rows])

    for _ in range(steps):
        of_support, of_query = probabilities(support), probabilities(query)
        raised = of_query ** (1 + conditional)
        guess = raised / raised.sum(dim=0) ** (marginal / (1 + marginal))
        guess = guess / guess.sum(dim=1, keepdim=True)
        share, ratio = cross / (1 + conditional), len(support) / len(query)
        new = []
        for k in range(4):
            total, norm = torch.zeros_like(means[k]), 0.0
            for n, row in enumerate(support):
                own = float(labels[n] == k)
                total = total + share * (own * row + of_support[n, k] * (means[k] - row))
                norm += share * own
            for n, row in enumerate(query):
                total = total + ratio * (guess[n, k] * row + of_query[n, k] * (means[k] - row))
                norm += ratio * float(guess[n, k])
            new.append(means[k] + size * (total / norm - means[k]))
        means = torch.stack(new)
    return probabilities(query)


@pytest.mark.parametrize(("steps", "size"), [(0, 1.0), (1, 1.0), (8, 1.0), (5, 0.3)])
@pytest.mark.parametrize("weights", [(0.1, 1.0, 0.1), (1.0, 0.5, 0.3)])
def test_slow_loop(weights: tuple[float, float, float], steps: int, size: float) -> None:
    episodes, _ = make_episodes(noise=1.5)
    ours = tim_adm(episodes, weights=weights, steps=steps, step_size=size).softmax(dim=2)
    for number, case in enumerate(zip(*episodes[:3], strict=True)):
        assert torch.allclose(ours[number], run_slowly(*case, weights, steps, size))


def test_its_labels_are_mostly_those_of_gradient_descent() -> None:
    episodes, _ = make_episodes(n_episodes=20, n_queries=40, shots=(3, 3, 3, 3))
    same = tim_adm(episodes).argmax(dim=2) == tim(episodes, learning_rate=1e-3).argmax(dim=2)
    assert float(same.double().mean()) > 0.9
