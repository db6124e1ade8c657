from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from protonet.sampling import draw_without_replacement, index_classes, sample_episodes
from tests.strategies import seeds


def labels_of(counts: list[int]) -> torch.Tensor:
    labels = torch.cat([torch.full((count,), 10 * c) for c, count in enumerate(counts)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


def draw(labels: torch.Tensor, seed: int, **sizes: int) -> torch.Tensor:
    return sample_episodes(index_classes(labels), generator=torch.Generator().manual_seed(seed), **sizes)


@given(seed=seeds, counts=st.lists(st.integers(4, 9), min_size=3, max_size=6))
def test_rows_are_distinct_and_have_one_class_per_way(seed: int, counts: list[int]) -> None:
    labels = labels_of(counts)
    rows = draw(labels, seed, n_way=3, n_shot=1, n_query=3, n_episodes=7)
    assert rows.shape == (7, 3, 4)
    for episode in rows:
        classes = labels[episode]
        assert (classes == classes[:, :1]).all()
        assert len(classes[:, 0].unique()) == 3
        assert len(episode.unique()) == episode.numel()


@given(seed=seeds, count=st.integers(1, 3))
def test_all_rows_of_a_small_class_are_drawn_before_any_is_repeated(seed: int, count: int) -> None:
    rows = draw(labels_of([count, 8]), seed, n_way=2, n_shot=2, n_query=4, n_episodes=5)
    labels = labels_of([count, 8])
    for row in rows.flatten(0, 1):
        times = torch.bincount(row)[row.unique()]
        if labels[row[0]] == 0:
            assert times.tolist() == [6 // count] * count
            assert all(len(part.unique()) == count for part in row.split(count))
        else:
            assert times.max() == 1


@given(seed=seeds, counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), slots=st.integers(1, 12))
def test_draws_equal_those_of_a_slow_loop(seed: int, counts: list[int], slots: int) -> None:
    uniform = torch.rand(len(counts), slots, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = []
    for count, draws in zip(counts, uniform.tolist(), strict=True):
        pool: list[int] = []
        for value in draws:
            pool = pool or list(range(count))
            expected.append(pool.pop(int(value * len(pool))))
    assert draw_without_replacement(uniform, torch.tensor(counts)).flatten().tolist() == expected


def test_every_pair_of_rows_is_equally_likely() -> None:
    rows = draw(torch.zeros(5, dtype=torch.int64), 0, n_way=1, n_shot=1, n_query=1, n_episodes=20000)[:, 0]
    observed = torch.bincount(rows[:, 0] * 5 + rows[:, 1], minlength=25)
    pairs = observed[~torch.eye(5, dtype=torch.bool).flatten()]
    assert int(pairs.sum()) == 20000
    assert chisquare(pairs.numpy()).pvalue > 1e-3


def test_errors() -> None:
    cases: list[tuple[dict[str, int], str]] = [
        ({"n_way": 4}, r"`n_way` must be at most the number of classes \(3\); got 4\."),
        ({"n_way": 0}, "`n_way` must be a whole number >= 1; got 0"),
        ({"n_shot": 0}, "`n_shot` must be a whole number >= 1; got 0"),
        ({"n_query": -1}, "`n_query` must be a whole number >= 0; got -1"),
        ({"n_episodes": -1}, "`n_episodes` must be a whole number >= 0; got -1"),
    ]
    for sizes, message in cases:
        with pytest.raises(ValueError, match=message):
            draw(labels_of([5, 5, 5]), 0, **{"n_way": 2, "n_shot": 1, "n_query": 1, "n_episodes": 1, **sizes})
