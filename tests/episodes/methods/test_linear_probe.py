from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from protonet.episodes.methods.linear_probe import linear_probe
from tests.episodes.cases import make_episodes


@pytest.mark.parametrize("dim", [5, 40])
def test_scikit_learn(dim: int) -> None:
    episodes, _ = make_episodes(dim=dim)
    ours = linear_probe(episodes).softmax(dim=2)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        oracle = LogisticRegression(C=0.316, tol=1e-9, max_iter=10_000).fit(support.numpy(), labels.numpy())
        assert torch.allclose(ours[number], torch.from_numpy(oracle.predict_proba(query.numpy())), atol=1e-5)


def test_the_size_of_features_acts_as_the_penalty() -> None:
    episodes, _ = make_episodes()
    larger = episodes._replace(support=3 * episodes.support, query=3 * episodes.query)
    assert torch.allclose(
        linear_probe(larger, inverse_penalty=0.1), linear_probe(episodes, inverse_penalty=0.9), atol=1e-4
    )
