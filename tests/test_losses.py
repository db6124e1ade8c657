from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from sklearn.neighbors import NearestCentroid

from protonet.losses import add_to_class_sums, class_means, cosine_cross_entropy, episodic_loss
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


@given(seed=seeds, permutation=st.permutations(range(5)))
def test_relabelling_permutes_the_means(seed: int, permutation: list[int]) -> None:
    x, y = blobs(seed)
    x = x.double()
    order = torch.tensor(permutation)
    torch.testing.assert_close(class_means(x, order[y], 5)[0][order], class_means(x, y, 5)[0])


@given(seed=seeds, size=st.integers(1, 30))
def test_sums_of_classes_do_not_depend_on_the_blocks(seed: int, size: int) -> None:
    x, y = blobs(seed)
    weights = torch.rand(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
    start = torch.ones(5, x.shape[1], dtype=torch.float64)
    sums = add_to_class_sums(start.clone(), x.double().split(size), y, weights)
    slow = [1 + (weights[y == label, None] * x[y == label]).sum(dim=0) for label in range(5)]
    torch.testing.assert_close(sums, torch.stack(slow))
