"""Baselines: common classifiers that studies compare the solver with.

A baseline is a function from labelled rows to a predictor. The settings of tuned baselines are cross-validated. If the
smallest class has too few rows for that, the first setting of the grid is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from analysis.shared.convolutions import fit_random_convolutions
from protonet.datasets import Split
from protonet.losses import class_means

with suppress(ImportError):  # optional: cosine, the nearest mean and the statement's MLP do not need it
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.covariance import ledoit_wolf_shrinkage
    from sklearn.decomposition import PCA
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, KFold, ParameterGrid, StratifiedKFold
    from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import Pipeline, make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

N_FOLDS = 5
UNSCALED_GRID = {"scale": ["passthrough"]}  #: Settings of a pipeline that does not scale features.
MLP_HIDDEN_WIDTH, MLP_EPOCHS, MLP_SEED = 384, 50, 2025  #: Of the MLP that the contest's statement shows.
INVERSE_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)  #: The grid of `fit_logistic_by_accuracy`.


class PredictionOutcome(NamedTuple):
    """Predictions for n rows: their classes and, if the classifier has them, log-probabilities."""

    predicted: np.ndarray  #: (n,) int64: the class of each row.
    log_probabilities: np.ndarray | None = None  #: (n, num_classes), if the classifier has them.


Predictor = Callable[[np.ndarray], PredictionOutcome]  #: Maps test rows (n, dim), float32 or float64, to predictions.
#: Fits a predictor to rows (n, dim), float32 or float64, and labels (n,) int64 that hold every class.
FitFunction = Callable[[np.ndarray, np.ndarray], Predictor]


def predict_likeliest(log_probabilities: np.ndarray) -> PredictionOutcome:
    """Predict the most probable classes, given log-probabilities (n, num_classes)."""
    return PredictionOutcome(log_probabilities.argmax(axis=1), log_probabilities)


class Baseline(NamedTuple):
    """A common classifier that the solver is compared with."""

    title: str  #: Its name in tables.
    fit: FitFunction


def concat_train_and_val(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate the training and validation rows of a split: features (n, dim) and labels (n,)."""
    return torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])


def fit_cosine(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit a classifier by the largest cosine between a row and a class mean, on unscaled features."""
    prototypes = nn.functional.normalize(_class_means(x, y), dim=1).T  # (dim, num_classes)
    return lambda rows: PredictionOutcome((torch.from_numpy(rows) @ prototypes).argmax(dim=1).numpy())


def fit_nearest_mean(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit a classifier by the nearest class mean in Euclidean distance, on unscaled features."""
    means = _class_means(x, y)
    return lambda rows: PredictionOutcome(torch.cdist(torch.from_numpy(rows), means).argmin(dim=1).numpy())


def fit_centroid(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit a classifier by the nearest class mean in Euclidean distance, on standardised features."""
    return _fit_tuned(NearestCentroid(), x, y)


def fit_lda(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit linear discriminant analysis, with shrinkage and scaling cross-validated."""
    if np.bincount(y).min() == 1:  # the covariance cannot be estimated
        return fit_centroid(x, y)
    # PCA to the span of the rows loses nothing, and is faster if there are fewer rows than features.
    lda = make_pipeline(PCA(), LinearDiscriminantAnalysis(solver="lsqr"))
    shrinkage = {"model__lineardiscriminantanalysis__shrinkage": [0.5, 0.1, 0.02]}
    return _fit_tuned(lda, x, y, [shrinkage, shrinkage | UNSCALED_GRID], min_class_rows=3)


def fit_lda_ledoit_wolf(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit linear discriminant analysis with closed-form covariance shrinkage.

    Source: Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices" (2004), applied to
        the pooled within-class covariance. Shrinkage of each class, as in scikit-learn, is less accurate here.
    """
    residuals = torch.from_numpy(x) - _class_means(x, y)[y]
    shrinkage = float(ledoit_wolf_shrinkage(residuals.double().numpy(), assume_centered=True))
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(x.astype(np.float64), y)
    return lambda rows: PredictionOutcome(model.predict(rows.astype(np.float64)))


def fit_logistic(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit logistic regression on standardised features, with the penalty cross-validated by log-loss."""
    grid = {"model__C": [1.0, 0.001, 0.01, 0.1, 10.0]}
    model = _search_grid(LogisticRegression(max_iter=200), x, y, grid, scoring="neg_log_loss")

    def predict(rows: np.ndarray) -> PredictionOutcome:
        scores = torch.from_numpy(model.decision_function(rows))
        if scores.ndim == 1:  # two classes
            scores = torch.stack([torch.zeros_like(scores), scores], dim=1)  # (n, 2)
        return predict_likeliest(scores.log_softmax(dim=1).numpy())

    return predict


def fit_logistic_by_accuracy(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit logistic regression on standardised features, with the penalty cross-validated by accuracy."""
    scaler = StandardScaler().fit(x)
    x, largest = scaler.transform(x), int(np.bincount(y).max())
    correct = np.zeros(len(INVERSE_PENALTIES))
    kind = StratifiedKFold if largest > 1 else KFold
    with warnings.catch_warnings():  # small classes, and fits that do not converge
        warnings.simplefilter("ignore")
        for fitted, held_out in kind(max(2, min(N_FOLDS, largest)), shuffle=True, random_state=0).split(x, y):
            model = LogisticRegression(warm_start=True)  # each penalty starts where the last one ended
            for index, inverse_penalty in enumerate(INVERSE_PENALTIES):
                model.set_params(C=inverse_penalty).fit(x[fitted], y[fitted])
                correct[index] += (model.predict(x[held_out]) == y[held_out]).sum()
        best = LogisticRegression(C=INVERSE_PENALTIES[int(correct.argmax())]).fit(x, y)
    return lambda rows: PredictionOutcome(best.predict(scaler.transform(rows)))


def fit_svm(x: np.ndarray, y: np.ndarray, *, probabilities: bool = False) -> Predictor:
    """Fit a support vector machine with an RBF kernel; penalty, bandwidth and scaling are cross-validated.

    Probabilities are sigmoids of cross-validated scores. If a class has a single row, there are no probabilities.

    Source: Platt, "Probabilistic outputs for support vector machines" (1999).
    """
    grid: list[dict[str, list[Any]]] = []
    for scale, spread in (({}, 1.0), (UNSCALED_GRID, float(x.var()) or 1.0)):
        gammas = [factor / (x.shape[1] * spread) for factor in (1.0, 0.1, 10.0)]  # in units of scikit-learn's "scale"
        grid.append({"model__C": [10.0, 1.0, 100.0], "model__gamma": gammas, **scale})
    model, smallest = _search_grid(SVC(), x, y, grid), int(np.bincount(y).min())
    if not probabilities or smallest < 2:
        return lambda rows: PredictionOutcome(model.predict(rows))
    calibrated = CalibratedClassifierCV(model.best_estimator_, cv=min(N_FOLDS, smallest), ensemble=False).fit(x, y)
    return lambda rows: predict_likeliest(np.log(calibrated.predict_proba(rows).clip(1e-12)))


def fit_knn(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit k nearest neighbours, with k and scaling cross-validated."""
    smallest = len(y) - -(-len(y) // N_FOLDS)  # approximate training rows of a fold
    neighbours = [k for k in (1, 3, 5, 9) if k <= min(smallest, 2 * int(np.bincount(y).max()))]
    grid = {"model__n_neighbors": neighbours}
    return _fit_tuned(KNeighborsClassifier(), x, y, [grid, grid | UNSCALED_GRID])


def fit_svm_untuned(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit a support vector machine with an RBF kernel on standardised features; nothing is chosen.

    With many classes, a grid search trains thousands of machines, one for each pair of classes, for each setting.
    """
    return _fit_tuned(SVC(C=10.0), x, y)


def fit_kernel_ridge(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit ridge regression of the classes in an RBF kernel on standardised features.

    Bandwidth and penalty have the best leave-one-out accuracy, in closed form.

    Source: Rifkin and Lippert, "Notes on regularized least squares" (2007), section 3.
    """
    rows = torch.from_numpy(x).double()
    mean, scale = rows.mean(dim=0), rows.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    rows, labels = (rows - mean) / scale, torch.from_numpy(y)
    targets = nn.functional.one_hot(labels).double() - 1 / (int(y.max()) + 1)  # (n, num_classes)
    squares = torch.cdist(rows, rows).square()
    best: tuple[int, float, torch.Tensor] | None = None
    for gamma in (factor / rows.shape[1] for factor in (0.1, 1.0, 10.0)):
        spectrum, basis = torch.linalg.eigh(torch.exp(-gamma * squares))
        for penalty in (1e-3, 1e-2, 1e-1, 1.0, 10.0):
            inverse = (spectrum.clamp_min(0) + penalty).reciprocal()  # eigenvalues may be negative by rounding
            weights = basis @ (inverse[:, None] * (basis.T @ targets))  # (n, num_classes)
            held_out = targets - weights / (basis.square() @ inverse)[:, None]
            correct = int((held_out.argmax(dim=1) == labels).sum())
            if best is None or correct > best[0]:
                best = correct, gamma, weights
    assert best is not None
    _, gamma, weights = best

    def predict(tested: np.ndarray) -> PredictionOutcome:
        distances = torch.cdist((torch.from_numpy(tested).double() - mean) / scale, rows)
        return PredictionOutcome((torch.exp(-gamma * distances.square()) @ weights).argmax(dim=1).numpy())

    return predict


def fit_contest_mlp(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit the MLP that the contest's statement shows, on unscaled features; the global random state is restored."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(MLP_SEED)  # as the contest does
        loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=128, shuffle=True)
        first, last = nn.Linear(x.shape[1], MLP_HIDDEN_WIDTH), nn.Linear(MLP_HIDDEN_WIDTH, int(y.max()) + 1)
        model = nn.Sequential(first, nn.ReLU(), last)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(MLP_EPOCHS):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    model.requires_grad_(False)
    return lambda rows: PredictionOutcome(model(torch.from_numpy(rows)).argmax(dim=1).numpy())


def fit_convolutions(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit random convolutions with ridge classification."""
    model = fit_random_convolutions(x, y)
    return lambda rows: PredictionOutcome(model.predict(rows))


BASELINES = {
    "cosine": Baseline("raw cosine", fit_cosine),
    "centroid": Baseline("nearest centroid", fit_centroid),
    "lda": Baseline("shrunken LDA", fit_lda),
    "logistic": Baseline("logistic regression", fit_logistic),
    "svm": Baseline("RBF SVM", fit_svm),
    "svm-probabilities": Baseline("RBF SVM, Platt's probabilities", partial(fit_svm, probabilities=True)),
    "knn": Baseline("k-NN", fit_knn),
    "trees": Baseline("extra trees", lambda x, y: _fit_tuned(ExtraTreesClassifier(300, random_state=0), x, y)),
    "mlp": Baseline("MLP", lambda x, y: _fit_tuned(MLPClassifier(alpha=1.0, max_iter=300, random_state=0), x, y)),
    "convolutions": Baseline("random convolutions, ridge", fit_convolutions),
    "nearest-mean": Baseline("nearest mean", fit_nearest_mean),
    "svm-untuned": Baseline("RBF SVM, untuned", fit_svm_untuned),
    "kernel-ridge": Baseline("kernel ridge", fit_kernel_ridge),
    "lda-closed-form": Baseline("shrunken LDA", fit_lda_ledoit_wolf),
    "logistic-by-accuracy": Baseline("logistic regression", fit_logistic_by_accuracy),
    "statement-mlp": Baseline("statement's MLP", fit_contest_mlp),
}


def _class_means(x: np.ndarray, y: np.ndarray) -> torch.Tensor:
    """Compute the class means (num_classes, dim) of rows (n, dim) with classes (n,)."""
    return class_means(torch.from_numpy(x), torch.from_numpy(y), int(y.max()) + 1)[0]


def _fit_tuned(estimator: Any, x: np.ndarray, y: np.ndarray, grid: Any = None, min_class_rows: int = 2) -> Predictor:
    """Fit a scaler and an estimator, whose settings are chosen from ``grid`` by cross-validated accuracy.

    If a class has fewer than ``min_class_rows`` rows, the first setting of the grid is used.
    """
    model = _search_grid(estimator, x, y, grid, min_class_rows=min_class_rows)
    return lambda rows: PredictionOutcome(model.predict(rows))


def _search_grid(
    estimator: Any, x: np.ndarray, y: np.ndarray, grid: Any, *, scoring: str = "accuracy", min_class_rows: int = 2
) -> Any:
    """Fit a scaler and an estimator by grid search, or with the grid's first setting if a class has too few rows."""
    pipeline = Pipeline([("scale", StandardScaler()), ("model", estimator)])
    with warnings.catch_warnings():  # fits that do not converge, covariances of single rows
        warnings.simplefilter("ignore")
        smallest = int(np.bincount(y).min())
        if grid is None or smallest < min_class_rows:
            settings = {} if grid is None else ParameterGrid(grid)[0]
            return pipeline.set_params(**settings).fit(x, y)
        folds = StratifiedKFold(min(N_FOLDS, smallest), shuffle=True, random_state=0)
        return GridSearchCV(pipeline, grid, cv=folds, scoring=scoring).fit(x, y)
