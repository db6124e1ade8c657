from __future__ import annotations

import pytest
import torch

from protonet.episodes.methods.bd_cspn import bd_cspn, rectify_prototypes
from protonet.episodes.methods.common import squared_norms
from tests.episodes.cases import load_easyfsl, make_episodes, run_easyfsl


@pytest.mark.parametrize("noise", [0.3, 1.5])
def test_easyfsl(noise: float) -> None:
    episodes, _ = make_episodes(noise=noise, n_episodes=8)
    theirs = run_easyfsl(load_easyfsl("methods.bd_cspn").BDCSPN(), episodes)
    assert torch.allclose(bd_cspn(episodes, temperature=1), theirs)  # they lack the paper's factor of 10 in the weights


def test_slow_loop() -> None:
    episodes, _ = make_episodes(noise=1.5)
    ours = bd_cspn(episodes, temperature=0.1)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        means = [support[labels == c].mean(dim=0) for c in range(episodes.n_way)]
        shifted = query + support.mean(dim=0) - query.mean(dim=0)
        rows, classes = list(support), labels.tolist()
        for row in shifted:
            rows.append(row)
            classes.append(int(torch.stack([torch.cosine_similarity(row, mean, dim=0) for mean in means]).argmax()))
        for c, mean in enumerate(means):
            own = torch.stack([row for row, of in zip(rows, classes, strict=True) if of == c])
            prototype = (torch.cosine_similarity(own, mean[None]) / 0.1).softmax(dim=0) @ own
            assert torch.allclose(ours[number, :, c], torch.cosine_similarity(query, prototype[None]) / 0.1)


def test_prototypes_do_not_know_where_the_queries_lie() -> None:
    episodes, _ = make_episodes(noise=1.5)
    moved = episodes._replace(query=episodes.query + torch.arange(12))
    ones = torch.ones_like(episodes.query[:, None, :, 0])
    first, second = (rectify_prototypes(each, ones, squared_norms(each.query)[:, None]) for each in (moved, episodes))
    assert torch.allclose(first, second)


def test_rows_of_zeros() -> None:
    episodes, _ = make_episodes(dtype=torch.float32)
    blank = episodes._replace(support=torch.zeros_like(episodes.support), query=torch.zeros_like(episodes.query))
    assert bool(bd_cspn(blank).isfinite().all())
