from __future__ import annotations

import pytest
import torch
from sklearn.neighbors import kneighbors_graph
from torch import Tensor

from protonet.episodes.methods.laplacian_shot import _find_neighbours, laplacian_shot, laplacian_shot_dirichlet
from tests.episodes.cases import centre_rows, load_easyfsl, make_centred_episodes, make_episodes, run_easyfsl
from tests.episodes.methods.test_bd_cspn import rectify, unit


def assign(unary: Tensor, query: Tensor) -> Tensor:
    """Algorithm 1, query by query: the assignments after 20 bound updates."""
    graph = torch.as_tensor(kneighbors_graph(query.numpy(), 2).toarray())
    assigned = (-unary).softmax(dim=1)
    for _ in range(20):
        assigned = torch.stack([(graph[p] @ assigned * 0.7 - unary[p]).softmax(dim=0) for p in range(len(query))])
    return assigned


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("shots", [(1, 1, 1, 1), (3, 1, 2, 4)])
def test_slow_loop(shots: tuple[int, ...], with_base: bool) -> None:
    episodes, centres = make_centred_episodes(shots, with_base=with_base)
    ours, plain = laplacian_shot(episodes).softmax(dim=2), laplacian_shot_dirichlet(episodes).softmax(dim=2)
    balanced = laplacian_shot(episodes, shift=False).softmax(dim=2)
    for number, (support, labels, query, centre) in enumerate(zip(*episodes[:3], centres, strict=True)):
        rows, queries = unit(support, centre), unit(query, centre)
        prototypes, shifted = rectify(rows, labels, queries, 4)
        assert torch.allclose(ours[number], assign(torch.cdist(shifted, prototypes).square(), queries), atol=1e-6)
        assert torch.allclose(balanced[number], assign(torch.cdist(queries, prototypes).square(), queries), atol=1e-6)
        means = torch.stack([rows[labels == c].mean(dim=0) for c in range(4)])
        assert torch.allclose(plain[number], assign(torch.cdist(queries, means).square(), queries), atol=1e-6)


def test_easyfsl() -> None:
    episodes = centre_rows(make_episodes(noise=1.5, n_episodes=8, n_queries=30, dtype=torch.float32)[0])
    classifier = load_easyfsl("methods.laplacian_shot").LaplacianShot(feature_normalization=2.0)
    theirs = run_easyfsl(classifier, episodes)
    ours = laplacian_shot(episodes, temperature=1, paper=True)  # their BD-CSPN lacks the factor of 10
    assert torch.allclose(ours.softmax(dim=2), theirs, atol=1e-4)  # they stop at a change of the bound of 1e-6
    assert torch.equal(ours.argmax(dim=2), theirs.argmax(dim=2))


def test_neighbours() -> None:
    episodes, _ = make_episodes(n_queries=20)
    ours = _find_neighbours(-torch.cdist(episodes.query, episodes.query), 3, 1.0)
    for rows, neighbours in zip(episodes.query, ours, strict=True):
        theirs = kneighbors_graph(rows.numpy(), 3).toarray()
        assert torch.equal(neighbours.T, torch.as_tensor(theirs))


def test_the_update_is_a_fixed_point() -> None:
    episodes, _ = make_episodes(noise=1.0)
    assert torch.allclose(laplacian_shot(episodes, steps=200), laplacian_shot(episodes, steps=201))


def test_a_single_query_has_no_neighbour() -> None:
    episodes, _ = make_episodes(n_queries=1)
    assert torch.allclose(laplacian_shot(episodes), laplacian_shot(episodes, lambda_=0))


def test_twins_are_neighbours_and_a_row_is_none_of_its_own() -> None:
    rows = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    one, five = (_find_neighbours(rows @ rows.transpose(1, 2), n, 1.0) for n in (1, 5))
    assert one[0].diagonal().sum() == 0
    assert one[0, 0, 1] == 1
    assert bool((five.sum(dim=1) == 2).all())
