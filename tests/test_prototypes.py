from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import NearestCentroid

from protonet.losses import class_means
from tests.strategies import blobs, seeds


def test_means_are_scikit_learns_centroids() -> None:
    x, y = blobs(0)
    means, counts = class_means(x.double(), y, 5)
    centroids = NearestCentroid().fit(x.double().numpy(), y.numpy()).centroids_
    torch.testing.assert_close(means, torch.from_numpy(centroids))
    assert counts.tolist() == [6.0] * 5


def test_a_class_without_rows_is_zero_and_counted_zero() -> None:
    means, counts = class_means(torch.ones(2, 3), torch.tensor([0, 2]), 4)
    assert counts.tolist() == [1, 0, 1, 0]
    assert means[1].tolist() == [0, 0, 0]


@given(seed=seeds, permutation=st.permutations(range(5)))
def test_relabelling_permutes_the_means(seed: int, permutation: list[int]) -> None:
    x, y = blobs(seed)
    x = x.double()
    order = torch.tensor(permutation)
    torch.testing.assert_close(class_means(x, order[y], 5)[0][order], class_means(x, y, 5)[0])
