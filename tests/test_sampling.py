"""Losses and class means against slow loops; episodes that are sampled without replacement."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from scipy.stats import chisquare
from sklearn.neighbors import NearestCentroid

from protonet.losses import add_to_class_sums, class_means, cosine_cross_entropy, episodic_loss
from protonet.sampling import draw_without_replacement, index_classes, sample_episodes
from tests.strategies import blobs, seeds


def random_episode(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64), dim=-1)


def test_episodic_loss_equals_slow_loops() -> None:
    episodes = random_episode(0)
    total = []
    for episode in episodes.numpy():
        prototypes = [rows[:2].mean(axis=0) for rows in episode]
        prototypes = [p / math.sqrt(p @ p) for p in prototypes]
        for label, rows in enumerate(episode):
            total += [-log_softmax([query @ p / 0.3 for p in prototypes])[label] for query in rows[2:]]
    loss = episodic_loss(episodes, n_shot=2, temperature=0.3)
    torch.testing.assert_close(loss, torch.tensor(sum(total) / len(total), dtype=torch.float64))
    loss = episodic_loss(torch.ones(3, 8, 4, 1), n_shot=1, temperature=0.1)
    torch.testing.assert_close(loss, torch.tensor(math.log(8)))


def test_cross_entropy_equals_a_slow_loop() -> None:
    rows = random_episode(1)[0].flatten(0, 1)
    proxies = torch.randn(7, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = torch.arange(len(rows)) % 7
    unit = proxies.numpy() / (proxies.numpy() ** 2).sum(axis=1, keepdims=True) ** 0.5
    slow = [-log_softmax(unit @ row / 0.2)[t] for row, t in zip(rows.numpy(), targets.tolist(), strict=True)]
    loss = cosine_cross_entropy(rows, targets, proxies, temperature=0.2)
    torch.testing.assert_close(loss, torch.tensor(sum(slow) / len(slow), dtype=torch.float64))


def test_means_are_scikit_learns_centroids() -> None:
    x, y = blobs(0)
    means, counts = class_means(x.double(), y, 5)
    centroids = NearestCentroid().fit(x.double().numpy(), y.numpy()).centroids_
    torch.testing.assert_close(means, torch.from_numpy(centroids))
    assert counts.tolist() == [6.0] * 5
    means, counts = class_means(torch.ones(2, 3), torch.tensor([0, 2]), 4)
    assert counts.tolist() == [1, 0, 1, 0]
    assert means[1].tolist() == [0, 0, 0]


@given(seed=seeds, size=st.integers(1, 30))
def test_sums_of_classes_do_not_depend_on_the_blocks(seed: int, size: int) -> None:
    x, y = blobs(seed)
    weights = torch.rand(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
    start = torch.ones(5, x.shape[1], dtype=torch.float64)
    sums = add_to_class_sums(start.clone(), x.double().split(size), y, weights)
    slow = [1 + (weights[y == label, None] * x[y == label]).sum(dim=0) for label in range(5)]
    torch.testing.assert_close(sums, torch.stack(slow))


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
