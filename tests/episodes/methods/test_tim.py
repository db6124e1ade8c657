from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.tim import alpha_tim, tim, tim_dirichlet
from tests.episodes.cases import load_easyfsl, make_episodes, run_easyfsl


def entropy(p: Tensor, alpha: float) -> Tensor:
    return -(p * p.log()).sum(dim=-1) if alpha == 1 else (1 - (p**alpha).sum(dim=-1)) / (alpha - 1)


def run_autograd(
    episodes: Episodes, weights: tuple[float, float, float], alpha: float, steps: int, learning_rate: float = 1e-3
) -> Tensor:
    """TIM-GD as the paper writes it, an episode at a time, in the features' own coordinates: the probabilities."""
    outputs = []
    rows = F.normalize(episodes.support, dim=2), episodes.support_labels, F.normalize(episodes.query, dim=2)
    for support, labels, query in zip(*rows, strict=True):
        prototypes = torch.stack([support[labels == c].mean(dim=0) for c in range(episodes.n_way)]).requires_grad_()
        optimizer = torch.optim.Adam([prototypes], lr=1e-3)
        for _ in range(steps):
            cross = F.cross_entropy(-7.5 * (support[:, None] - prototypes).square().sum(dim=2), labels)
            p = (-7.5 * (query[:, None] - prototypes).square().sum(dim=2)).softmax(dim=1)
            parts = cross, -entropy(p.mean(dim=0), alpha), entropy(p, alpha).mean()
            optimizer.zero_grad()
            torch.stack([weight * part for weight, part in zip(weights, parts, strict=True)]).sum().backward()
            optimizer.step()
        outputs.append((-7.5 * (query[:, None] - prototypes.detach()).square().sum(dim=2)).softmax(dim=1))
    return torch.stack(outputs)


def test_autograd() -> None:
    episodes, _ = make_episodes(noise=1.0)
    expected = run_autograd(episodes, (0.1, 1.0, 0.1), 1, 30)
    ours = tim(episodes, learning_rate=1e-3, steps=30).softmax(dim=2)
    assert torch.allclose(ours, expected, atol=1e-6)
    assert not torch.allclose(ours, tim(episodes, steps=0).softmax(dim=2), atol=1e-3)


@pytest.mark.parametrize(("alpha", "shots"), [(0.5, (3, 1, 2, 4)), (None, (1, 1, 1, 1)), (None, (3, 1, 2, 4))])
def test_autograd_of_alpha_entropies(alpha: float | None, shots: tuple[int, ...]) -> None:
    episodes, _ = make_episodes(noise=1.0, shots=shots, n_queries=12)
    ours = alpha_tim(episodes, alpha=alpha, learning_rate=1e-3, steps=30).softmax(dim=2)
    expected = run_autograd(episodes, (1.0, 1.0, 1.0), alpha or (2 if sum(shots) == 4 else 5), 30)
    assert torch.allclose(ours, expected, atol=1e-6)


def test_alpha_near_one_is_shannon() -> None:
    episodes, _ = make_episodes()
    near = alpha_tim(episodes, alpha=1 + 1e-6, steps=20)
    assert torch.allclose(near, tim(episodes, weights=(1.0, 1.0, 1.0), steps=20), atol=1e-5)


def test_easyfsl() -> None:
    episodes, _ = make_episodes(n_episodes=8)
    theirs = run_easyfsl(load_easyfsl("methods.tim").TIM(feature_normalization=2.0, temperature=15.0), episodes)
    ours = tim(episodes, weights=(1.0, 1.0, 0.1), steps=50)
    # Theirs are cosines, which overlook the means' norms: classes apart are told alike, not queries between them.
    assert float((ours.argmax(dim=2) == theirs.argmax(dim=2)).double().mean()) > 0.95


def test_settings_for_unbalanced_queries() -> None:
    """The authors' configuration for Dirichlet queries, which loses far less where a class has nearly all of them."""
    episodes, labels = make_episodes(
        n_episodes=6, n_queries=40, shots=(1, 1, 1, 1), noise=0.4, dim=40, dtype=torch.float32
    )
    order = (labels == 0).double().argsort(dim=1, descending=True, stable=True)[:, :12]
    uneven = episodes._replace(query=episodes.query.gather(1, order[..., None].expand(-1, -1, 40)))
    labels = labels.gather(1, order)
    balanced, settled = (method(uneven) for method in (tim, tim_dirichlet))
    assert torch.equal(settled, tim(uneven, weights=(1.0, 1.0, 1.0)))
    right = [float((logits.argmax(dim=2) == labels).double().mean()) for logits in (balanced, settled)]
    assert right[1] > right[0] + 0.05


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 10.0, 1.0)])
def test_autograd_of_other_weights(weights: tuple[float, float, float]) -> None:
    episodes, _ = make_episodes(noise=1.0, n_episodes=1)
    ours = tim(episodes, weights=weights, learning_rate=1e-3, steps=20).softmax(dim=2)
    assert torch.allclose(ours, run_autograd(episodes, weights, 1, 20), atol=1e-6)


def test_more_features_than_rows() -> None:
    episodes, _ = make_episodes(dim=100, noise=1.0)
    ours = tim(episodes, learning_rate=1e-3, steps=30).softmax(dim=2)
    assert torch.allclose(ours, run_autograd(episodes, (0.1, 1.0, 0.1), 1, 30), atol=1e-6)


def test_episodes_alone() -> None:
    episodes, _ = make_episodes(dim=40)
    alone = episodes._replace(**{name: getattr(episodes, name)[1:2] for name in ("support", "support_labels", "query")})
    assert torch.allclose(tim(alone, steps=50), tim(episodes, steps=50)[1:2])


@pytest.mark.parametrize("method", [tim, alpha_tim])
def test_certain_rows_stay_finite(method: Callable[..., Tensor]) -> None:
    episodes, _ = make_episodes(dtype=torch.float32)
    blank = episodes._replace(support=torch.zeros_like(episodes.support))
    for some in (episodes, blank):
        assert bool(method(some, temperature=1e-3, steps=20).isfinite().all())
