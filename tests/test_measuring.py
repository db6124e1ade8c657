from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, multivariate_normal
from sklearn.metrics import confusion_matrix, log_loss

from protonet.fit.baselines import score_cosine, score_lda
from protonet.losses import class_means
from protonet.metrics import measure
from protonet.views.linear import shrink_covariance
from tests.strategies import blobs, seeds


def slow_calibration_error(log_p: np.ndarray, labels: np.ndarray) -> float:
    confidence, right = np.exp(log_p.max(axis=1)), log_p.argmax(axis=1) == labels
    bins = [(k / 15 < confidence) & (confidence <= (k + 1) / 15) for k in range(15)]
    return float(sum(abs((right - confidence)[inside].sum()) for inside in bins) / len(labels))


@settings(max_examples=20)
@given(seed=seeds, n=st.integers(1, 60), num_classes=st.integers(2, 6), size=st.sampled_from([0.1, 3.0, 100.0]))
def test_the_figures_are_scikit_learns_and_scipys(seed: int, n: int, num_classes: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(n, num_classes, generator=generator)
    labels = torch.randint(num_classes, (n,), generator=generator)
    figures = measure(logits, labels)
    log_p = logits.double().log_softmax(dim=1).numpy()
    right = int((logits.argmax(dim=1) == labels).sum())
    assert math.isclose(figures.accuracy, right / n)
    np.testing.assert_allclose(figures.interval, binomtest(right, n).proportion_ci(method="wilson"), atol=1e-4)
    classes = list(range(num_classes))
    if size < 100:  # it clips probabilities
        np.testing.assert_allclose(figures.log_loss, log_loss(labels.numpy(), np.exp(log_p), labels=classes), rtol=1e-9)
    np.testing.assert_allclose(figures.calibration_error, slow_calibration_error(log_p, labels.numpy()), atol=1e-12)
    expected = confusion_matrix(labels.numpy(), logits.argmax(dim=1).numpy(), labels=classes)
    assert figures.confusion.tolist() == expected.tolist()


def test_lda_scores_are_the_gaussian_log_posterior() -> None:
    x, y = blobs(0, rows=7)
    queries, _ = blobs(1)
    means = class_means(x.double(), y, 5)[0]
    basis, variances, rest = shrink_covariance(x.double() - means[y], len(x) - 5)
    off = torch.eye(8, dtype=torch.float64) - basis @ basis.T
    covariance = (basis * variances) @ basis.T + rest * off
    expected = np.stack(
        [multivariate_normal(mean.numpy(), covariance.numpy()).logpdf(queries.numpy()) for mean in means], axis=1
    )
    scores = score_lda(x, y, queries, 5).softmax(dim=1)
    torch.testing.assert_close(scores, torch.from_numpy(expected).softmax(dim=1), atol=1e-8, rtol=1e-6)


def test_lda_bears_constant_features_single_rows_and_missing_classes() -> None:
    x, y = blobs(0)
    flat = torch.cat([x, torch.ones(len(x), 3)], dim=1)
    torch.testing.assert_close(score_lda(flat, y, flat, 5), score_lda(x, y, x, 5), atol=1e-3, rtol=1e-3)
    single = torch.stack([x[y == label][0] for label in range(5)])
    assert score_lda(single, torch.arange(5), single, 6).argmax(dim=1).tolist() == [0, 1, 2, 3, 4]


def test_raw_cosines_are_those_to_the_class_means() -> None:
    x, y = blobs(0)
    means = [(x[y == label] / x[y == label].norm(dim=1, keepdim=True)).mean(dim=0) for label in range(5)]
    expected = torch.cosine_similarity(x[:, None], torch.stack(means)[None], dim=2)
    torch.testing.assert_close(score_cosine(x, y, x, 5).float(), expected)


def test_logits_that_give_no_probabilities_get_one_line() -> None:
    logits = torch.tensor([[1.0, -torch.inf], [torch.nan, 0.0], [torch.inf, 0.0]])
    assert measure(logits[:1], torch.tensor([0])).accuracy == 1
    with pytest.raises(ValueError, match="measure: `logits` must give probabilities; got NaN in 2 of 3 rows"):
        measure(logits, torch.tensor([0, 1, 0]))
