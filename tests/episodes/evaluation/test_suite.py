from __future__ import annotations

import torch
from hypothesis import given
from scipy.stats import ttest_rel

from protonet.episodes.evaluation.suite import rank_methods
from tests.strategies import seeds


def rank_slowly(accuracies: dict[str, torch.Tensor]) -> dict[str, float]:
    """Rank as Meta-Dataset's notebook does, with a paired test."""
    left, following = list(accuracies), 1
    ranks: dict[str, float] = {}
    while left:
        best = max(left, key=lambda name: float(accuracies[name].mean()))
        tied = [best]
        for name in left:
            p_value = 1.0 if name == best else float(ttest_rel(accuracies[best], accuracies[name]).pvalue)
            if name != best and not p_value < 0.05:
                tied.append(name)
        shared = following + (len(tied) - 1) / 2
        following += len(tied)
        ranks |= dict.fromkeys(tied, shared)
        left = [name for name in left if name not in tied]
    return ranks


@given(seed=seeds)
def test_ranks_are_those_of_the_slow_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    means = 0.05 * torch.randint(4, (6, 1), generator=generator)
    rows = means + 0.1 * torch.randn(6, 20, generator=generator, dtype=torch.float64)
    accuracies = dict(zip("abcdef", rows, strict=True))
    ranks = rank_methods(accuracies)
    assert ranks == rank_slowly(accuracies)
    assert sum(ranks.values()) == 21


def test_equal_methods_have_the_same_rank() -> None:
    part = torch.tensor([0.5, 0.75, 1.0], dtype=torch.float64)
    assert rank_methods({"a": part, "b": part.clone(), "c": part - 0.25}) == {"a": 1.5, "b": 1.5, "c": 3}
    assert rank_methods({"alone": part}) == {"alone": 1}
