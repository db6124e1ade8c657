"""The classifiers that people reach for when labels are few: one function a method, from rows to a predictor.

All are scikit-learn's but raw cosine. Where a class has a single row there is nothing to cross-validate, and
each method takes the setting that stands first in its grid (discriminant analysis below three rows).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from protonet.losses import class_means

FOLDS = 5


class Outcome(NamedTuple):
    """What a method says of n test rows: classes (n,) int64, and log-probabilities (n, num_classes) or None."""

    predicted: np.ndarray
    log_probabilities: np.ndarray | None = None


#: From test rows (n, dim) float64 to an outcome.
Predictor = Callable[[np.ndarray], Outcome]
#: From labelled rows (n, dim) float64 and labels (n,) int64, each class of [0, num_classes) among them.
Fit = Callable[[np.ndarray, np.ndarray], Predictor]


def fit_cosine(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit raw cosine to the class means."""
    means = class_means(torch.from_numpy(x), torch.from_numpy(y), int(y.max()) + 1)[0]
    prototypes = nn.functional.normalize(means, dim=1).numpy()  # (num_classes, dim)
    return lambda rows: Outcome((rows @ prototypes.T).argmax(axis=1))


def fit_centroid(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit the nearest class mean, Euclidean, of standardised features."""
    from sklearn.neighbors import NearestCentroid  # noqa: PLC0415 - optional

    return _fit(NearestCentroid(), x, y)


def fit_lda(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit linear discriminant analysis: shrinkage and scaling by folds.

    It works in the span of the rows, which loses nothing and costs little where rows are fewer than features.
    With one row a class no covariance is known, and it is the nearest centroid.
    """
    from sklearn.decomposition import PCA  # noqa: PLC0415 - optional
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415

    if np.bincount(y).min() == 1:
        return fit_centroid(x, y)
    lda = make_pipeline(PCA(), LinearDiscriminantAnalysis(solver="lsqr"))
    shrinkage = {"model__lineardiscriminantanalysis__shrinkage": [0.5, 0.1, 0.02]}
    return _fit(lda, x, y, [shrinkage, {**shrinkage, "scale": ["passthrough"]}], fewest=3)


def fit_logistic(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit logistic regression on standardised features, its penalty chosen by log-loss over folds."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - optional

    grid = {"model__C": [1.0, 0.001, 0.01, 0.1, 10.0]}
    model = _search(LogisticRegression(max_iter=200), x, y, grid, scoring="neg_log_loss")

    def predict(rows: np.ndarray) -> Outcome:
        scores = torch.from_numpy(model.decision_function(rows))
        if scores.ndim == 1:  # two classes
            scores = torch.stack([torch.zeros_like(scores), scores], dim=1)  # (n, 2)
        return Outcome(scores.argmax(dim=1).numpy(), scores.log_softmax(dim=1).numpy())

    return predict


def fit_svm(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit a support vector machine with a radial kernel: penalty, kernel width and scaling by folds."""
    model = _search_svm(x, y)
    return lambda rows: Outcome(model.predict(rows))


def fit_svm_probabilities(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit the same machine, and sigmoids of its scores over folds; where a class has one row, there are none.

    Source: Platt, "Probabilistic outputs for support vector machines" (1999).
    """
    from sklearn.calibration import CalibratedClassifierCV  # noqa: PLC0415 - optional

    model, smallest = _search_svm(x, y), int(np.bincount(y).min())
    if smallest < 2:
        return lambda rows: Outcome(model.predict(rows))
    chosen = getattr(model, "best_estimator_", model)
    calibrated = CalibratedClassifierCV(chosen, cv=min(FOLDS, smallest), ensemble=False).fit(x, y)

    def predict(rows: np.ndarray) -> Outcome:
        probabilities = calibrated.predict_proba(rows)
        return Outcome(probabilities.argmax(axis=1), np.log(probabilities.clip(1e-12)))

    return predict


def _search_svm(x: np.ndarray, y: np.ndarray) -> Any:
    """Return the support vector machine whose settings are best over folds."""
    from sklearn.svm import SVC  # noqa: PLC0415 - optional

    widths = (1.0, 0.1, 10.0)  # in units of scikit-learn's "scale"
    grid: list[dict[str, list[Any]]] = []
    for scale, spread in (("standard", 1.0), ("passthrough", float(x.var()) or 1.0)):
        gammas = [width / (x.shape[1] * spread) for width in widths]
        own = {} if scale == "standard" else {"scale": [scale]}
        grid.append({"model__C": [10.0, 1.0, 100.0], "model__gamma": gammas, **own})
    return _search(SVC(), x, y, grid)


def fit_knn(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit k nearest neighbours: k and scaling by folds."""
    from sklearn.neighbors import KNeighborsClassifier  # noqa: PLC0415 - optional

    smallest = len(y) - -(-len(y) // FOLDS)  # rows of a fold's training part, about
    neighbours = [k for k in (1, 3, 5, 9) if k <= min(smallest, 2 * int(np.bincount(y).max()))]
    grid = [{"model__n_neighbors": neighbours}, {"model__n_neighbors": neighbours, "scale": ["passthrough"]}]
    return _fit(KNeighborsClassifier(), x, y, grid)


def fit_trees(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit 300 extremely randomised trees."""
    from sklearn.ensemble import ExtraTreesClassifier  # noqa: PLC0415 - optional

    return _fit(ExtraTreesClassifier(300, random_state=0), x, y)


def fit_mlp(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit a perceptron with one hidden layer of 100 units on standardised features, weight decay 1."""
    from sklearn.neural_network import MLPClassifier  # noqa: PLC0415 - optional

    return _fit(MLPClassifier((100,), alpha=1.0, max_iter=300, random_state=0), x, y)


CLASSICS: dict[str, Fit] = {
    "cosine": fit_cosine,
    "centroid": fit_centroid,
    "lda": fit_lda,
    "logistic": fit_logistic,
    "svm": fit_svm,
    "svm-probabilities": fit_svm_probabilities,
    "knn": fit_knn,
    "trees": fit_trees,
    "mlp": fit_mlp,
}


def _fit(estimator: Any, x: np.ndarray, y: np.ndarray, grid: Any = None, fewest: int = 2) -> Predictor:
    """Fit scaling and an estimator, settings by accuracy over folds."""
    model = _search(estimator, x, y, grid, fewest=fewest)
    return lambda rows: Outcome(model.predict(rows))


def _search(
    estimator: Any, x: np.ndarray, y: np.ndarray, grid: Any, *, scoring: str = "accuracy", fewest: int = 2
) -> Any:
    """Fit the pipeline ``scale``, ``model``; of a grid, the setting that is best over stratified folds.

    Where a class has fewer than ``fewest`` rows, it is the grid's first.
    """
    from sklearn.model_selection import GridSearchCV, ParameterGrid, StratifiedKFold  # noqa: PLC0415 - optional
    from sklearn.pipeline import Pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    pipeline = Pipeline([("scale", StandardScaler()), ("model", estimator)])
    with warnings.catch_warnings():  # fits that their steps leave unfinished, covariances of single rows
        warnings.simplefilter("ignore")
        smallest = int(np.bincount(y).min())
        if grid is None or smallest < fewest:
            settings = {} if grid is None else ParameterGrid(grid)[0]
            return pipeline.set_params(**settings).fit(x, y)
        folds = StratifiedKFold(min(FOLDS, smallest), shuffle=True, random_state=0)
        return GridSearchCV(pipeline, grid, cv=folds, scoring=scoring).fit(x, y)
