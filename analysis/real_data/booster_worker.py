"""A peer of the study `analysis.real_data.boosters`, in a process and an environment of its own.

``python -I booster_worker.py`` prints the versions of the peers' packages, null where one is not installed.
``python -I booster_worker.py METHOD DATA RESULT`` fits a peer on the NPZ file DATA (``train_x`` (n, dim) float32,
``train_y`` (n,) int64 and ``test_x``) and writes the NPZ file RESULT: ``probabilities`` (n_test, num_classes) and the
``wall`` and ``cpu`` seconds of the fit, without imports. This file imports nothing of the repository.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module, metadata

import numpy as np

CORES = 2
TIME_LIMIT = 60.0  #: Seconds of wall time that AutoGluon may take; its presets have no limit of their own.
#: What pip installs for each peer.
PACKAGES = {"lightgbm": "lightgbm", "catboost": "catboost", "autogluon": "autogluon.tabular"}
#: From rows (n, dim) to the peer's classes and their probabilities (n, classes).
Predictor = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def fit_lightgbm(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit LightGBM as it is set by default."""
    model = import_module("lightgbm").LGBMClassifier(n_jobs=CORES, verbose=-1).fit(x, y)
    return lambda rows: (model.classes_, model.predict_proba(rows))


def fit_catboost(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit CatBoost as it is set by default."""
    maker = import_module("catboost").CatBoostClassifier
    model = maker(thread_count=CORES, verbose=False, allow_writing_files=False).fit(x, y)
    return lambda rows: (model.classes_, model.predict_proba(rows))


def fit_autogluon(x: np.ndarray, y: np.ndarray) -> Predictor:
    """Fit AutoGluon-Tabular as it is set by default, within a time limit; its models go to the working folder.

    Classes are words to it: numbers of few rows would be a regression's.
    """
    frame = import_module("pandas").DataFrame
    names = [f"column {column}" for column in range(x.shape[1])]
    predictor = import_module("autogluon.tabular").TabularPredictor("class", path="models", verbosity=0)
    predictor.fit(frame(x, columns=names).assign(**{"class": y.astype(str)}), time_limit=TIME_LIMIT, num_cpus=CORES)

    def predict(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shares = predictor.predict_proba(frame(rows, columns=names))
        return shares.columns.to_numpy(), shares.to_numpy()

    return predict


FITS = {"lightgbm": fit_lightgbm, "catboost": fit_catboost, "autogluon": fit_autogluon}


def spread(classes: np.ndarray, shares: np.ndarray, num_classes: int) -> np.ndarray:
    """Return probabilities (n, num_classes) of the shares (n, len(classes)): 0 for classes that the peer left out."""
    probabilities = np.zeros((len(shares), num_classes))
    probabilities[:, np.asarray(classes, int)] = shares
    return probabilities


def find_versions() -> dict[str, str | None]:
    """Return the version of each peer's package, None where it is not installed."""
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    return {method: installed.get(package) for method, package in PACKAGES.items()}


def measure_cpu() -> float:
    """Return the CPU seconds of this process and of those that it started and that ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def work(method: str, data: str, result: str) -> None:
    """Fit a peer and write what it says of the test rows."""
    import_module(PACKAGES[method])  # before the clock starts
    with np.load(data) as arrays:
        x, y, rows = (arrays[name] for name in ("train_x", "train_y", "test_x"))
    cpu, wall = measure_cpu(), time.perf_counter()
    predict = FITS[method](x, y)
    wall, cpu = time.perf_counter() - wall, measure_cpu() - cpu
    np.savez(result, probabilities=spread(*predict(rows), int(y.max()) + 1), wall=wall, cpu=cpu)


if __name__ == "__main__":
    if sys.argv[1:]:
        work(*sys.argv[1:])
    else:
        print(json.dumps(find_versions()))
