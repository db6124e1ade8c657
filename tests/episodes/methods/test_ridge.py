from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.linear_model import Ridge

from protonet.episodes.methods.ridge import ridge_regression
from tests.episodes.cases import make_episodes


def test_scikit_learn() -> None:
    episodes, _ = make_episodes()
    logits = ridge_regression(episodes, penalty=0.3, scale=7.0, shift=-2.0)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        rows, queries = (F.pad(F.normalize(x, dim=1), (0, 1), value=1.0).numpy() for x in (support, query))
        oracle = Ridge(alpha=0.3, fit_intercept=False).fit(rows, F.one_hot(labels).numpy())
        assert torch.allclose(logits[number], 7 * torch.from_numpy(oracle.predict(queries)) - 2)


def test_closed_form_in_features() -> None:
    """Woodbury's identity: rows and features give the same weights, eqs. 4 and 5."""
    episodes, _ = make_episodes(n_episodes=1, shots=(9, 8, 7, 6))
    rows, queries = (F.pad(F.normalize(x[0], dim=1), (0, 1), value=1.0) for x in (episodes.support, episodes.query))
    target = F.one_hot(episodes.support_labels[0]).double()
    weight = torch.linalg.inv(rows.T @ rows + 0.5 * torch.eye(13, dtype=torch.float64)) @ rows.T @ target
    assert torch.allclose(ridge_regression(episodes, penalty=0.5, scale=1.0)[0], queries @ weight)


def test_shift_does_not_change_probabilities() -> None:
    episodes, _ = make_episodes()
    here, there = (ridge_regression(episodes, shift=shift).softmax(dim=2) for shift in (0.0, 3.0))
    torch.testing.assert_close(here, there)


def test_rows_of_zeros_and_twice_the_same() -> None:
    episodes, _ = make_episodes(dtype=torch.float32)
    support = episodes.support.clone()
    support[:, 1] = support[:, 0]
    support[:, 2] = 0
    assert bool(ridge_regression(episodes._replace(support=support)).isfinite().all())
