"""Sample weights: equal weights, integer weights as repeated rows, and balanced weights."""

from __future__ import annotations

import numpy as np
from sklearn.metrics import balanced_accuracy_score, log_loss
from sklearn.utils.class_weight import compute_sample_weight

from protonet.estimator import ProtoNetClassifier
from tests.strategies import EVERY_KIND, PLAIN, blobs

X, Y = (part.numpy() for part in blobs(0, rows=8, noise=0.8))
TEST_X, TEST_Y = (part.numpy() for part in blobs(0, rows=60, noise=0.8))


def test_equal_weights_of_any_size_change_nothing() -> None:
    plain = ProtoNetClassifier(effort=EVERY_KIND).fit(X, Y).predict_proba(TEST_X)
    for weight in (1e-30, 1e30):
        weighted = ProtoNetClassifier(effort=EVERY_KIND).fit(X, Y, np.full(len(X), weight)).predict_proba(TEST_X)
        np.testing.assert_allclose(weighted, plain, atol=1e-5)


def test_integer_weights_are_repeated_rows() -> None:
    weights = np.random.default_rng(0).integers(0, 5, len(X))
    chosen = np.arange(len(X)).repeat(weights)
    x, test_x = 1e6 + X, 1e6 + TEST_X  # columns that vary by little beside what they have in common
    repeated = ProtoNetClassifier(effort=EVERY_KIND).fit(x[chosen], Y[chosen]).predict_proba(test_x)
    weighted = ProtoNetClassifier(effort=EVERY_KIND).fit(x, Y, 0.25 * weights).predict_proba(test_x)
    np.testing.assert_allclose(weighted, repeated, rtol=1e-7, atol=1e-9)
    assert log_loss(TEST_Y, repeated) < log_loss(TEST_Y, np.full_like(repeated, 0.2))


def test_balanced_weights_raise_the_mean_recall() -> None:
    gains = []
    for dim, noise, seed in [(*item, seed) for item in ((3, 1.0), (6, 1.2), (12, 1.5)) for seed in range(2)]:
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(3, dim))
        y, test_y = np.arange(3).repeat([30, 15, 5]), np.arange(3).repeat(200)
        x, test_x = (centres[part] + noise * rng.normal(size=(len(part), dim)) for part in (y, test_y))
        plain, balanced = (
            ProtoNetClassifier(effort=PLAIN).fit(x, y, weights).predict(test_x)
            for weights in (None, compute_sample_weight("balanced", y))
        )
        gains.append(balanced_accuracy_score(test_y, balanced) - balanced_accuracy_score(test_y, plain))
    assert np.mean(gains) > 2 * np.std(gains, ddof=1) / np.sqrt(len(gains))
