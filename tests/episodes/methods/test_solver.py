from __future__ import annotations

import pytest
import torch

from protonet import solve
from protonet._checks import InputError
from protonet.episodes.methods.solver import solver
from tests.episodes.cases import make_episodes


def test_it_is_the_solver() -> None:
    episodes, labels = make_episodes(n_episodes=2, shots=(5, 5, 5, 5), n_queries=20)
    with torch.no_grad():
        ours = solver(episodes)
        again = solver(
            episodes._replace(support=episodes.support.flip(1), support_labels=episodes.support_labels.flip(1))
        )
    for number, (support, own, query) in enumerate(zip(*episodes[:3], strict=True)):
        network = solve((support, own), None, {"num_classes": 4}, effort="fast")
        assert torch.allclose(ours[number], network(query).detach().to(ours.dtype))
    assert float((ours.argmax(dim=2) == labels).double().mean()) > 0.6
    assert torch.allclose(again, ours)


def test_another_effort() -> None:
    episodes, _ = make_episodes(n_episodes=1)
    with pytest.raises(InputError, match=r"^solve: `effort` must be one of fast, default, best; got 'slow'"):
        solver(episodes, effort="slow")
