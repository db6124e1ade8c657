from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.bd_cspn import bd_cspn, find_unit_rows, rectify_prototypes
from tests.episodes.cases import centre_rows, load_easyfsl, make_base, make_centred_episodes, make_episodes, run_easyfsl


def rectify(support: Tensor, labels: Tensor, query: Tensor, n_way: int) -> tuple[Tensor, Tensor]:
    """Rectify as the published code does, row by row; return the prototypes and the shifted queries."""
    shifted = query + support.mean(dim=0) - query.mean(dim=0)
    means = [support[labels == c].mean(dim=0) for c in range(n_way)]
    own: list[list[Tensor]] = [[] for _ in means]
    for row in torch.cat([support, shifted]):
        weights = torch.stack([10 * torch.cosine_similarity(row, mean, dim=0) for mean in means]).softmax(dim=0)
        own[int(weights.argmax())].append(weights.max() * row)
    return torch.stack([torch.stack(rows).mean(dim=0) if rows else means[c] for c, rows in enumerate(own)]), shifted


def unit(rows: Tensor, centre: Tensor | float = 0.0) -> Tensor:
    return F.normalize(rows - centre, dim=1)


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("shots", [(1, 1, 1, 1), (3, 1, 2, 4)])
def test_slow_loop(shots: tuple[int, ...], with_base: bool) -> None:
    episodes, centres = make_centred_episodes(shots, with_base=with_base)
    ours = bd_cspn(episodes)
    for number, (support, labels, query, centre) in enumerate(zip(*episodes[:3], centres, strict=True)):
        prototypes, _ = rectify(unit(support, centre), labels, unit(query, centre), 4)
        distances = torch.cdist(unit(query, centre), prototypes).square()
        assert torch.equal(ours[number].argmax(dim=1), distances.argmin(dim=1))
        assert torch.allclose(ours[number].softmax(dim=1), (-distances / 0.2).softmax(dim=1))


@pytest.mark.parametrize("noise", [0.3, 1.5])
def test_easyfsl(noise: float) -> None:
    episodes = centre_rows(make_episodes(noise=noise, n_episodes=8)[0])
    theirs = run_easyfsl(load_easyfsl("methods.bd_cspn").BDCSPN(feature_normalization=2.0), episodes)
    ours = bd_cspn(episodes, temperature=1, paper=True)  # they lack the paper's factor of 10 in the weights
    assert torch.allclose(ours + 0.5, theirs)


def test_slow_loop_of_the_paper() -> None:
    episodes = centre_rows(make_episodes(noise=1.5)[0])
    ours = bd_cspn(episodes, paper=True)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        support, query = unit(support), unit(query)  # noqa: PLW2901
        means = [support[labels == c].mean(dim=0) for c in range(episodes.n_way)]
        shifted = query + support.mean(dim=0) - query.mean(dim=0)
        rows, classes = list(support), labels.tolist()
        for row in shifted:
            rows.append(row)
            classes.append(int(torch.stack([torch.cosine_similarity(row, mean, dim=0) for mean in means]).argmax()))
        for c, mean in enumerate(means):
            own = torch.stack([row for row, of in zip(rows, classes, strict=True) if of == c])
            prototype = (torch.cosine_similarity(own, mean[None]) / 0.1).softmax(dim=0) @ own
            assert torch.allclose(ours[number, :, c] + 5, torch.cosine_similarity(query, prototype[None]) / 0.1)


def test_queries_count_beside_a_single_support_row() -> None:
    """The paper's weights leave a class's support row nearly all of its prototype, the code's an equal share."""
    episodes, _ = make_episodes(shots=(1, 1, 1, 1), n_queries=40, n_episodes=8, dim=100, noise=1.5)
    support, query, scale = find_unit_rows(episodes)
    case = episodes._replace(support=support, query=query)
    means = torch.zeros_like(episodes.support)
    means.scatter_(1, episodes.support_labels[..., None].expand(-1, -1, 100), support)
    code, paper = (rectify_prototypes(case, scale, paper=paper)[0] for paper in (False, True))
    far, near = ((F.normalize(each, dim=2) - means).norm(dim=2).median() for each in (code, paper))
    assert far > 1.5 * near


def test_a_class_without_rows_keeps_its_mean() -> None:
    support = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]])
    episodes, _ = make_episodes(n_episodes=1, n_way=2, shots=(3, 2), n_queries=2, dim=2, dtype=torch.float32)
    labels = torch.tensor([[0, 0, 1, 1, 1]])
    case = episodes._replace(support=F.normalize(support, dim=2), support_labels=labels, query=support[:, :2])
    assert bool(bd_cspn(case).isfinite().all())
    same = case._replace(support=torch.ones_like(support))  # every row is labelled 0
    prototypes, _ = rectify_prototypes(same, torch.ones(1, 1, 2))
    assert torch.equal(prototypes[0, 1], torch.ones(2))


def test_scaled_and_centred_rows_are_the_same_case() -> None:
    base = make_base()
    episodes, _ = make_episodes(noise=1.5, base=base)
    sizes = 1 + torch.arange(10, dtype=torch.float64)[:, None]
    centre = base.mean.double()
    stretched = episodes._replace(query=centre + sizes * (episodes.query - centre))
    assert torch.allclose(bd_cspn(stretched), bd_cspn(episodes))


@pytest.mark.parametrize("paper", [False, True])
def test_rows_of_zeros(paper: bool) -> None:
    episodes, _ = make_episodes(dtype=torch.float32)
    blank = episodes._replace(support=torch.zeros_like(episodes.support), query=torch.zeros_like(episodes.query))
    assert bool(bd_cspn(blank, paper=paper).isfinite().all())
