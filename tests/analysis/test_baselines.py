"""Baselines against other software, slow loops and their descriptions, as the contest and real data use them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler

from analysis.contest.draws import METHODS, predict_test_rows
from analysis.real_data.robustness import TUNED_BASELINES
from analysis.shared.baselines import BASELINES, FOLDS, INVERSE_PENALTIES, pool_labelled
from protonet.datasets import Split, sample_family
from tests.strategies import blobs


def sample_draw(family: str = "isotropic", n_train: int = 4) -> Split:
    return sample_family(family, seed=3, n_train=n_train, n_val=2, num_classes=6, dim=10)


def run(split: Split, method: str) -> torch.Tensor:
    predicted = predict_test_rows(split, method)
    assert predicted is not None
    return predicted


def arrays(seed: int, rows: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    x, y = blobs(seed, classes=classes, rows=rows)
    return x.double().numpy(), y.numpy()


def test_means_are_scikit_learns_and_the_slow_loop() -> None:
    split = sample_draw("subclusters")
    x, y = pool_labelled(split)
    expected = NearestCentroid().fit(x.numpy(), y.numpy()).predict(split.test_x.numpy())
    assert run(split, "nearest_mean").tolist() == expected.tolist()
    means = [x[y == c].mean(dim=0) for c in range(6)]
    cosines = [[torch.cosine_similarity(row, mean, dim=0) for mean in means] for row in split.test_x]
    assert run(split, "cosine").tolist() == np.argmax(cosines, axis=1).tolist()


def test_lda_is_the_closed_form() -> None:
    split = sample_draw("correlated", n_train=8)
    x, y = (part.double() if part.is_floating_point() else part for part in pool_labelled(split))
    means = torch.stack([x[y == c].mean(dim=0) for c in range(6)])
    residuals = x - means[y]
    sample = residuals.T @ residuals / len(x)
    target = sample.diagonal().mean() * torch.eye(10, dtype=torch.float64)
    spread = ((residuals[:, :, None] * residuals[:, None, :] - sample) ** 2).mean(dim=0).sum() / len(x)
    shrinkage = min(1.0, float(spread / ((sample - target) ** 2).sum()))
    weights = torch.linalg.solve((1 - shrinkage) * sample + shrinkage * target, means.T)
    scores = split.test_x.double() @ weights - (means * weights.T).sum(dim=1) / 2
    assert run(split, "lda").tolist() == scores.argmax(dim=1).tolist()


def test_logistic_is_scikit_learns_search() -> None:
    split = sample_draw("nuisance", n_train=8)
    x, y = (part.numpy() for part in pool_labelled(split))
    scaler = StandardScaler().fit(x)
    search = GridSearchCV(
        LogisticRegression(), {"C": INVERSE_PENALTIES}, cv=StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    ).fit(scaler.transform(x), y)
    expected = search.predict(scaler.transform(split.test_x.numpy()))
    assert run(split, "logistic").tolist() == expected.tolist()


def test_mlp_learns_from_train_alone_and_leaves_the_generator() -> None:
    split = sample_draw(n_train=16)
    before = torch.get_rng_state()
    predicted = run(split, "mlp")
    assert torch.equal(torch.get_rng_state(), before)
    assert float((predicted == split.test_y).double().mean()) > 0.8
    wrong = dataclasses.replace(split, val_y=(split.val_y + 1) % 6)
    assert torch.equal(predicted, run(wrong, "mlp"))


def test_one_sample_per_class() -> None:
    for name in METHODS:
        split = sample_family("isotropic", seed=0, n_train=1, n_val=1, num_classes=3, dim=4)
        predicted = run(split, name)
        assert predicted.shape == split.test_y.shape, name
        assert predicted.dtype == torch.int64, name


@pytest.mark.parametrize("method", TUNED_BASELINES)
def test_every_tuned_baseline_learns_blobs(method: str) -> None:
    rows = 5
    x, y = arrays(0, rows + 20)
    order = np.argsort(y, kind="stable").reshape(3, -1)
    train, test = order[:, :rows].ravel(), order[:, rows:].ravel()
    outcome = BASELINES[method].fit(x[train], y[train])(x[test])
    assert (outcome.predicted == y[test]).mean() > 0.85


def test_logistic_has_log_probabilities() -> None:
    x, y = arrays(2, 8)
    outcome = BASELINES["logistic"].fit(x, y)(50 * x)  # far out: probabilities themselves would be zero
    assert outcome.log_probabilities is not None
    np.testing.assert_allclose(np.exp(outcome.log_probabilities).sum(1), 1)
    assert np.isfinite(outcome.log_probabilities).all()
    assert (outcome.log_probabilities.argmax(1) == outcome.predicted).all()
