from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.evaluation.evaluate import rate_open
from protonet.episodes.methods.oslo import oslo
from protonet.episodes.methods.prototypes import protonet_cosine
from tests.episodes.cases import make_episodes


def run_slowly(support: Tensor, labels: Tensor, query: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The updates row by row: the queries' probabilities at the end, and their inlier scores."""
    centre = torch.cat([support, query]).mean(dim=0)
    support, query = F.normalize(support - centre, dim=1), F.normalize(query - centre, dim=1)
    means = [support[labels == c].mean(dim=0) for c in range(4)]
    assigned = [torch.full((4,), 0.25, dtype=torch.float64) for _ in query]
    scores: list[Tensor] = []

    def close(row: Tensor) -> Tensor:
        return torch.stack([torch.cosine_similarity(row, mean, dim=0) for mean in means])

    for _ in range(steps):
        scores = [(assigned[n] @ close(row) / 0.05).sigmoid() for n, row in enumerate(query)]
        assigned = [(scores[n] * close(row) / 0.1).softmax(dim=0) for n, row in enumerate(query)]
        new = []
        for k in range(4):
            own = support[labels == k]
            shares = torch.stack([scores[n] * assigned[n][k] for n in range(len(query))])
            new.append((own.sum(dim=0) + shares @ query) / (len(own) + shares.sum()))
        means = new
    return torch.stack([(close(row) / 0.1).softmax(dim=0) for row in query]), torch.stack(scores)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_slow_loop(steps: int) -> None:
    episodes, _ = make_episodes(noise=1.5)
    ours = oslo(episodes, steps=steps)
    for number, case in enumerate(zip(*episodes[:3], strict=True)):
        probabilities, scores = run_slowly(*case, steps)
        assert torch.allclose(ours[number].softmax(dim=1), probabilities)
        assert torch.allclose(ours[number].amax(dim=1).sigmoid(), scores)


def test_open_queries_are_found_better_than_by_the_cosine() -> None:
    known, _ = make_episodes(n_episodes=100, shots=(3, 3, 3, 3), n_queries=15, dim=30, noise=1.0)
    other, _ = make_episodes(n_episodes=100, shots=(3, 3, 3, 3), n_queries=15, dim=30, noise=1.0, seed=1)
    episodes = known._replace(query=torch.cat([known.query, other.query], dim=1))
    ours, plain = (rate_open(method(episodes).amax(dim=2), 15).mean() for method in (oslo, protonet_cosine))
    assert float(ours) > float(plain) + 0.03
