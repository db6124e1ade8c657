"""Measurements of what the project promises: each function yields the names and figures of one topic."""

from __future__ import annotations

import gc
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from analysis.contest.trial import evaluate_submission, sample_official_data
from analysis.real_data.sets import load_sklearn_table
from protonet.datasets import load_digits
from protonet.errors import DISTRIBUTION_NAME
from protonet.estimator import ProtoNetClassifier
from protonet.views.density import DensitySpec
from protonet.views.fixed_convolution import FixedConvolutionSpec
from protonet.views.forest import ForestSpec
from protonet.views.kernel_ridge import KERNEL_RIDGE_SPECS
from protonet.views.linear import LinearSpec
from protonet.views.mlp import MLPSpec
from protonet.views.tabular_transformer import TabularTransformerSpec
from protonet.views.view import InputMap, TrainingRows, ViewSpec
from solution.pack import ROOT, pack_single_file, pack_zip

Figures = Iterator[tuple[str, float]]
SETS = ("iris", "wine", "breast_cancer", "digits")
#: Rows per class of the fits whose time and size are measured, and of those whose accuracy is.
ROWS_PER_CLASS, ACCURACY_ROWS_PER_CLASS = 20, (5, 20)
FOREST_TREES = 200
#: A view of each family that a fit may use, as it is fitted to `TIMED_SET`.
TIMED_VIEWS: dict[str, ViewSpec] = {
    "linear": LinearSpec("standardised"),
    "kernel ridge": KERNEL_RIDGE_SPECS[0],
    "density": DensitySpec(LinearSpec("standardised"), per_row=True),
    "forest": ForestSpec(7),
    "random convolutions": FixedConvolutionSpec(8, True, 0.1),
    "transformer": TabularTransformerSpec(),
    "MLP": MLPSpec(LinearSpec("centred"), n_mlps=1, n_hidden=32, n_steps=30, embedding_dim=64),
}
TIMED_SET = "digits"


@cache
def load_split(name: str, rows_per_class: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Load a set, and split it into rows_per_class training rows of each class and test rows: x, test x, y, test y."""
    data = load_digits() if name == "digits" else load_sklearn_table(name)
    x, y = data.x.numpy(), data.y.numpy()
    n = rows_per_class * (int(y.max()) + 1)
    few_x, test_x, few_y, test_y = train_test_split(x, y, train_size=n, stratify=y, random_state=0)
    return few_x, test_x, few_y, test_y


@cache
def fit_classifier(name: str, rows_per_class: int) -> ProtoNetClassifier:
    """Fit the classifier to a set with the settings that a user gets."""
    x, _, y, _ = load_split(name, rows_per_class)
    return ProtoNetClassifier().fit(x, y)


def ratio_of_cpu_times(timed: Callable[[], object], reference: Callable[[], object], repeats: int) -> float:
    """Measure the CPU time of a call relative to that of another one: the least of several, in alternation.

    The least is what the code needs; other programs on the machine only add to it.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, measured in zip((timed, reference), times, strict=True):
            gc.collect()
            started = time.process_time()
            call()
            measured.append(time.process_time() - started)
    return min(times[0]) / min(times[1])


def measure_contest(pythons: Sequence[str]) -> Figures:
    """Evaluate the ZIP and the single file on the official data, in the environment of each interpreter."""
    split = sample_official_data()
    for python in pythons:
        for form, submission in (("ZIP", pack_zip()), ("single file", pack_single_file())):
            result = evaluate_submission(submission, split, python=python)
            where = f"{form}, Python {result['python']}, torch {result['torch'].partition('+')[0]}"
            yield f"score, {where}", round(result["score"], 2)
            yield f"trained parameters, {where}", result["parameters"]
            yield f"memory beyond torch's, {where}", result["added_memory_mib"]


def measure_fits() -> Figures:
    """Measure the CPU time of fits and predictions relative to a random forest's, on each set."""
    for name in SETS:
        x, test_x, y, _ = load_split(name, ROWS_PER_CLASS)
        forest = RandomForestClassifier(FOREST_TREES, random_state=0)
        model = ProtoNetClassifier()
        yield f"fit, {name}", ratio_of_cpu_times(lambda: model.fit(x, y), lambda: forest.fit(x, y), 2)  # noqa: B023
        rows = np.resize(test_x, (500, test_x.shape[1]))
        predictors = [lambda each=each: each.predict_proba(rows) for each in (model, forest)]  # noqa: B023
        yield f"prediction of 500 rows, {name}", ratio_of_cpu_times(predictors[0], predictors[1], 3)


def measure_views() -> Figures:
    """Measure the CPU time of a fit and a prediction of each kind of view, relative to a random forest's."""
    x, test_x, y, _ = load_split(TIMED_SET, ROWS_PER_CLASS)
    features, test_rows = (torch.from_numpy(rows).float() for rows in (x, test_x[:200]))
    rows = TrainingRows(features, torch.from_numpy(y), int(y.max()) + 1)

    def use_forest() -> None:
        RandomForestClassifier(FOREST_TREES, random_state=0).fit(x, y).predict_proba(test_x[:200])

    def use_view(spec: ViewSpec, source: InputMap | None) -> None:
        view = spec.fit(rows, source)
        view(test_rows if source is None else source(test_rows))

    for name, spec in TIMED_VIEWS.items():
        source = None if spec.source is None else spec.source.fit(rows, None).source
        repeats = 10 if name == "linear" else 5
        yield f"view, {name}", ratio_of_cpu_times(lambda: use_view(spec, source), use_forest, repeats)  # noqa: B023


def measure_startup() -> Figures:
    """Measure the CPU time of imports, relative to that of torch and scikit-learn."""
    times: dict[str, list[float]] = {}
    codes = ("import torch, sklearn", "import protonet", "import protonet.estimator")
    for _ in range(5):
        for code in codes:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            times.setdefault(code, []).append(seconds)
    reference, *others = (min(times[code]) for code in codes)
    yield from zip(codes[1:], (seconds / reference for seconds in others), strict=True)


def measure_sizes() -> Figures:
    """Measure the size of the wheel and of model files, in kB."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools would add deleted files from there
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--no-build-isolation", "--wheel-dir", folder, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        yield "wheel", wheel.stat().st_size / 1000
        for name in SETS:
            path = Path(folder) / f"{name}.protonet"
            fit_classifier(name, ROWS_PER_CLASS).save(path)
            yield f"model file, {name}", path.stat().st_size / 1000


def measure_accuracy() -> Figures:
    """Measure mean accuracy and log-loss of fits to all sets, with few and with more rows per class."""
    for rows_per_class in ACCURACY_ROWS_PER_CLASS:
        accuracies, losses = [], []
        for name in SETS:
            _, test_x, _, test_y = load_split(name, rows_per_class)
            probabilities = fit_classifier(name, rows_per_class).predict_proba(test_x)
            accuracies.append(float((probabilities.argmax(axis=1) == test_y).mean()))
            losses.append(log_loss(test_y, probabilities))
        yield f"accuracy, {rows_per_class} rows per class", 100 * float(np.mean(accuracies))
        yield f"log-loss, {rows_per_class} rows per class", float(np.mean(losses))


def measure_display() -> Figures:
    """Measure the time to show fitted estimators, the longest of all sets, in milliseconds."""
    for name, show in (("repr", repr), ("_repr_html_", lambda model: model._repr_html_())):
        seconds = []
        for data in SETS:
            model = fit_classifier(data, ROWS_PER_CLASS)
            started = time.perf_counter()
            show(model)
            seconds.append(time.perf_counter() - started)
        yield name, 1000 * max(seconds)


def measure_versions() -> Figures:
    """Count declared dependencies of users whose lowest version is not the one that `.ci/pythons 3.10` tests."""
    yield "untested lowest versions", len(list_untested_minimums())


#: Extras of developers and of studies, and `words`, which needs NumPy 2 and thus a newer torch.
UNTESTED_EXTRAS = {"words", "robustness", "analysis", "bench", "docs", "dev", "all"}


def list_untested_minimums() -> list[str]:
    """List the declared requirements whose minimum `.ci/lowest.txt` lacks."""
    lines = (ROOT / ".ci/lowest.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    tested = {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pins}
    untested = []
    for requirement in map(Requirement, requires(DISTRIBUTION_NAME) or ()):
        extra = re.search("extra == ['\"](.*?)['\"]", str(requirement.marker))
        if requirement.name == DISTRIBUTION_NAME or (extra and extra.group(1) in UNTESTED_EXTRAS):
            continue
        lowest = max(Version(part.version) for part in requirement.specifier if part.operator == ">=")
        if tested.get(canonicalize_name(requirement.name)) != lowest:
            untested.append(str(requirement))
    return untested
