from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.logistic import fit_logistic, logistic_regression
from tests.episodes.cases import make_episodes


@pytest.mark.parametrize("inverse_penalty", [1.0, 30.0])
@pytest.mark.parametrize("dim", [5, 12, 40])
def test_scikit_learn(dim: int, inverse_penalty: float) -> None:
    episodes, _ = make_episodes(dim=dim)
    probability = logistic_regression(episodes, inverse_penalty=inverse_penalty).softmax(dim=2)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        rows, queries = F.normalize(support, dim=1).numpy(), F.normalize(query, dim=1).numpy()
        oracle = LogisticRegression(C=inverse_penalty, tol=1e-9, max_iter=10_000).fit(rows, labels.numpy())
        assert torch.allclose(probability[number], torch.from_numpy(oracle.predict_proba(queries)), atol=1e-5)


def test_weights_of_many_rows_that_can_be_separated() -> None:
    episodes, _ = make_episodes(shots=(30, 20, 25, 15), n_queries=2, dim=6, noise=0.2)
    target = F.one_hot(episodes.support_labels).double()
    weight, intercept = fit_logistic(10 * episodes.support, target)
    for number, (support, labels) in enumerate(zip(episodes.support, episodes.support_labels, strict=True)):
        oracle = LogisticRegression(tol=1e-9, max_iter=10_000).fit(10 * support.numpy(), labels.numpy())
        assert torch.allclose(weight[number].T, torch.from_numpy(oracle.coef_), atol=1e-4)
        here, there = intercept[number, 0], torch.from_numpy(oracle.intercept_)
        assert torch.allclose(here - here.mean(), there - there.mean(), atol=1e-3)


def test_an_episode_is_on_its_own() -> None:
    episodes, _ = make_episodes(n_episodes=6)
    hard = episodes._replace(support=torch.cat([episodes.support[:3], 100 * episodes.support[3:].square()]))
    parts = zip(hard.support.split(1), hard.support_labels.split(1), hard.query.split(1), strict=True)
    alone = [logistic_regression(Episodes(*part, n_way=hard.n_way)) for part in parts]
    torch.testing.assert_close(logistic_regression(hard), torch.cat(alone))


def test_single_precision() -> None:
    episodes, _ = make_episodes(n_episodes=8, dim=300)
    single = episodes._replace(support=episodes.support.float(), query=episodes.query.float())
    torch.testing.assert_close(logistic_regression(single).double(), logistic_regression(episodes), atol=1e-3, rtol=0)


def test_rows_of_zeros_and_twice_the_same() -> None:
    for dtype in (torch.float32, torch.float64):
        episodes, _ = make_episodes(dtype=dtype, shots=(2, 2, 2, 2), dim=40)
        support = episodes.support.clone()
        support[0] = 0
        support[1, 1:] = support[1, :1]
        logits = logistic_regression(episodes._replace(support=support))
        assert torch.allclose(logits[:2].softmax(dim=2), torch.tensor(0.25, dtype=dtype), atol=1e-4)
        assert bool(logits.isfinite().all())
