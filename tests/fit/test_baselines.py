from __future__ import annotations

import numpy as np
import torch
from scipy.stats import multivariate_normal

from protonet.fit.baselines import score_cosine, score_lda
from protonet.losses import class_means
from protonet.views.linear import shrink_covariance
from tests.strategies import blobs


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
