"""The contenders against other software, slow loops and their descriptions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler

from analysis import contenders
from analysis.bayes import predict_bayes
from analysis.contenders import METHODS, pool_labelled, predict_limit
from protonet.datasets import Split, sample_family


def sample_draw(family: str = "isotropic", n_train: int = 4) -> Split:
    return sample_family(family, seed=3, n_train=n_train, n_val=2, num_classes=6, dim=10)


def relabel(split: Split, order: torch.Tensor) -> Split:
    return dataclasses.replace(split, train_y=order[split.train_y], val_y=order[split.val_y])


def test_nearest_mean_is_scikit_learns() -> None:
    split = sample_draw("subclusters")
    x, y = pool_labelled(split)
    expected = NearestCentroid().fit(x.numpy(), y.numpy()).predict(split.test_x.numpy())
    assert METHODS["nearest_mean"](split).tolist() == expected.tolist()  # type: ignore[union-attr]


def test_cosine_is_the_slow_loop() -> None:
    split = sample_draw("subclusters")
    x, y = pool_labelled(split)
    means = [x[y == c].mean(dim=0) for c in range(6)]
    expected = [int(np.argmax([torch.cosine_similarity(row, mean, dim=0) for mean in means])) for row in split.test_x]
    assert METHODS["cosine"](split).tolist() == expected  # type: ignore[union-attr]


def test_lda_is_the_closed_form() -> None:
    split = sample_draw("correlated", n_train=8)
    x, y = (part.double() if part.is_floating_point() else part for part in pool_labelled(split))
    means = torch.stack([x[y == c].mean(dim=0) for c in range(6)])
    residuals = x - means[y]
    sample = residuals.T @ residuals / len(x)
    target = sample.diagonal().mean() * torch.eye(10, dtype=torch.float64)
    spread = ((residuals[:, :, None] * residuals[:, None, :] - sample) ** 2).mean(dim=0).sum() / len(x)
    share = min(1.0, float(spread / ((sample - target) ** 2).sum()))
    weights = torch.linalg.solve((1 - share) * sample + share * target, means.T)
    scores = split.test_x.double() @ weights - (means * weights.T).sum(dim=1) / 2
    assert METHODS["lda"](split).tolist() == scores.argmax(dim=1).tolist()  # type: ignore[union-attr]


def test_logistic_is_scikit_learns_search() -> None:
    split = sample_draw("nuisance", n_train=8)
    x, y = (part.numpy() for part in pool_labelled(split))
    scaler = StandardScaler().fit(x)
    search = GridSearchCV(
        LogisticRegression(),
        {"C": contenders.STRENGTHS},
        cv=StratifiedKFold(contenders.FOLDS, shuffle=True, random_state=0),
    ).fit(scaler.transform(x), y)
    expected = search.predict(scaler.transform(split.test_x.numpy()))
    assert METHODS["logistic"](split).tolist() == expected.tolist()  # type: ignore[union-attr]


def test_mlp_learns_from_train_alone_and_leaves_the_generator() -> None:
    split = sample_draw(n_train=16)
    before = torch.get_rng_state()
    predicted = METHODS["mlp"](split)
    assert predicted is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert float((predicted == split.test_y).double().mean()) > 0.8
    wrong = dataclasses.replace(split, val_y=(split.val_y + 1) % 6)
    assert torch.equal(predicted, METHODS["mlp"](wrong))  # type: ignore[arg-type]


def test_limit_is_blank_where_unknown() -> None:
    split = sample_draw()
    assert torch.equal(predict_limit(split), predict_bayes(split))  # type: ignore[arg-type]
    assert predict_limit(sample_draw("class_noise")) is None


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mlp"])
def test_relabelling(name: str) -> None:
    split = sample_draw(n_train=8)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    predicted, renamed = METHODS[name](split), METHODS[name](relabel(split, order))
    assert predicted is not None
    assert renamed is not None
    assert order[predicted].tolist() == renamed.tolist()


@pytest.mark.parametrize("name", METHODS)
def test_one_sample_a_class(name: str) -> None:
    split = sample_family("isotropic", seed=0, n_train=1, n_val=1, num_classes=3, dim=4)
    predicted = METHODS[name](split)
    assert predicted is not None
    assert predicted.shape == split.test_y.shape
    assert predicted.dtype == torch.int64
