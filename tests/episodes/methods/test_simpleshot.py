from __future__ import annotations

import torch
import torch.nn.functional as F

from protonet.episodes.methods.simpleshot import simpleshot_cl2n, simpleshot_l2n
from tests.episodes.cases import load_easyfsl, make_base, make_episodes, run_easyfsl


def slow_loop(support: torch.Tensor, labels: torch.Tensor, query: torch.Tensor, n_way: int) -> torch.Tensor:
    means = [torch.stack([row for row, label in zip(support, labels, strict=True) if label == c]) for c in range(n_way)]
    return torch.stack([torch.stack([-((row - mean.mean(dim=0)) ** 2).sum() for mean in means]) for row in query])


def test_slow_loop() -> None:
    base = make_base()
    episodes, _ = make_episodes(base=base)
    l2n, cl2n = simpleshot_l2n(episodes), simpleshot_cl2n(episodes)
    own = simpleshot_cl2n(episodes._replace(base=None))
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):

        def unit(x: torch.Tensor, centre: torch.Tensor | float) -> torch.Tensor:
            return torch.stack([(row - centre) / (row - centre).norm() for row in x])

        for logits, centre in ((l2n, 0.0), (cl2n, base.mean.double()), (own, support.mean(dim=0))):
            theirs = slow_loop(unit(support, centre), labels, unit(query, centre), 4)
            assert torch.allclose(logits[number], theirs)


def test_easyfsl() -> None:
    # Its SimpleShot takes cosines to the means, the paper distances; with one shot the means have unit norm, too.
    base = make_base()
    episodes, _ = make_episodes(shots=(1, 1, 1, 1), base=base)
    module = load_easyfsl("methods.simple_shot")
    for ours, centre in ((simpleshot_l2n, None), (simpleshot_cl2n, base.mean.double())):
        theirs = run_easyfsl(module.SimpleShot(feature_centering=centre, feature_normalization=2.0), episodes)
        assert torch.allclose(ours(episodes), 2 * theirs - 2)


def test_the_length_of_rows_does_not_matter() -> None:
    episodes, _ = make_episodes()
    lengths = torch.rand(3, 10, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    scaled = episodes._replace(support=lengths * episodes.support, query=lengths * episodes.query)
    assert torch.allclose(simpleshot_l2n(scaled), simpleshot_l2n(episodes))


def test_rows_of_zeros_and_constant_features() -> None:
    episodes, _ = make_episodes(dtype=torch.float32)
    support = F.pad(episodes.support[:, :, 1:], (1, 0))
    support[0] = 0
    for method in (simpleshot_l2n, simpleshot_cl2n):
        assert bool(method(episodes._replace(support=support)).isfinite().all())
