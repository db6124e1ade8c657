from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.svm import LinearSVC

from protonet.episodes.methods.svm import linear_svm
from tests.episodes.cases import make_episodes


@pytest.mark.parametrize("inverse_penalty", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("dim", [5, 40])
def test_scikit_learn(dim: int, inverse_penalty: float) -> None:
    episodes, _ = make_episodes(dim=dim, shots=(5, 4, 6, 5), noise=1.0)
    ours = linear_svm(episodes, inverse_penalty=inverse_penalty)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        rows, queries = (F.normalize(each, dim=1).numpy() for each in (support, query))
        oracle = LinearSVC(C=inverse_penalty, tol=1e-10, max_iter=100_000, dual=True).fit(rows, labels.numpy())
        assert torch.allclose(ours[number], torch.from_numpy(oracle.decision_function(queries)), atol=1e-5)


def test_rows_beyond_the_margin_do_not_matter() -> None:
    """Twice a row that is no support vector of any machine is the same machine."""
    episodes, _ = make_episodes(n_episodes=1, noise=0.1, shots=(6, 6, 6, 6))
    support = F.normalize(episodes.support, dim=2)
    outputs = linear_svm(episodes._replace(query=support), inverse_penalty=100.0)[0]
    signs = 2 * F.one_hot(episodes.support_labels[0]) - 1
    free = int((signs * outputs).amin(dim=1).argmax())
    assert float((signs * outputs)[free].min()) > 1
    more = torch.cat([episodes.support, episodes.support[:, free : free + 1]], dim=1)
    labels = torch.cat([episodes.support_labels, episodes.support_labels[:, free : free + 1]], dim=1)
    twice = episodes._replace(support=more, support_labels=labels)
    assert torch.allclose(linear_svm(twice, inverse_penalty=100.0), linear_svm(episodes, inverse_penalty=100.0))
