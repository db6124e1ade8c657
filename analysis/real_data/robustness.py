"""Compare the solver, its parts and baselines on few-shot splits of real data.

The regret is the difference to the best baseline in each row of the table, with hindsight.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.prior.study import load_left_out_prior
from analysis.real_data.sets import DATASETS, load_real_dataset, split_shots
from analysis.shared import tables
from analysis.shared.baselines import BASELINES, FitFunction, PredictionOutcome, Predictor, predict_likeliest
from analysis.shared.runner import (
    JournalOptions,
    StudyReport,
    hash_sources,
    int_option,
    list_option,
    load_installed_sets,
    names_option,
    parse_integers,
    plot_option,
    run_all,
)
from protonet._text import plural
from protonet.errors import install_command, raise_input_error
from protonet.fit.search import ModelSearch
from protonet.fit.solver import PARAM_LIMIT, fit_solution
from protonet.metrics import calibration_error, compute_metrics, sum_confidence_bins
from protonet.views.mlp import MLPFamily, MLPTrainingConfig
from solution.pack import library_files

DATA_SOURCES = ("analysis/real_data/sets.py", "protonet/datasets")  #: Source files of the data sets and splits.
BASELINE_SOURCES = ("analysis/shared/baselines.py", "analysis/shared/convolutions.py", "protonet/losses.py")
#: Arguments of `fit_protonet` by method: the default, or without a part of the solver.
PROTONET_SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {},
    "left-out": {},
    "raw": {"metadata": {"param_limit": 0}},
    "no-selection": {"search": ModelSearch(n_folds=0)},
    "no-shifts": {"search": ModelSearch(use_shifts=False)},
    **{
        name: {"search": ModelSearch().with_family(MLPFamily(training_config=config))}
        for name, config in (
            ("no-episodes", MLPTrainingConfig(episodic_loss_weight=0.0)),
            ("no-cross-entropy", MLPTrainingConfig(cross_entropy_weight=0.0)),
        )
    },
}
#: Baselines that are tuned for few rows; the others of the registry are the contest's.
TUNED_BASELINES = (
    *("cosine", "centroid", "lda", "logistic", "svm", "svm-probabilities", "knn", "trees", "mlp"),
    "convolutions",  # for series
)
METHOD_TITLES = {  #: In the tables.
    **{name: name.replace("-", " ") for name in PROTONET_SETTINGS},
    **{"left-out": "ours, left out", "raw": "ours, raw only"},
    **{name: baseline.title for name, baseline in BASELINES.items()},
}
#: Title, minimal and maximal shots of each table of means.
SHOT_GROUPS = {"1 and 2 shots": (1, 2), "3 and 4 shots": (3, 4), "5 shots and more": (5, 10**9)}
COMPARED_QUANTITIES = (
    tables.ComparedQuantity("percent", "accuracy, %", direction=1),
    tables.ComparedQuantity("log_loss", "log-loss", digits=3, direction=-1),
    tables.ComparedQuantity("calibration_error", "calibration error", direction=-1, unit_factor=100),
    tables.ComparedQuantity("seconds", "fit seconds"),
)
TABLE_NOTE = """
Test accuracy in percent, mean over {splits} ± one standard error. The best baseline is, with hindsight, the one
with the highest mean of the row; the regret is its accuracy minus the method's, in points. Ranks in brackets, 1 being
the best, are among the methods shown. Log-loss is in nats, the calibration error in points, over 15 bins. "Ours, left
out" weighs the views by a prior that was trained without any task of the row's data set or related ones; the published
prior, "ours", was trained on tasks of all of them.
"""

Row = dict[str, Any]


class MethodRun(NamedTuple):
    """One run: a method on a split of a data set."""

    dataset: str
    shots: int
    seed: int
    method: str


def fit_protonet(
    x: np.ndarray, y: np.ndarray, search: ModelSearch | None = None, metadata: dict[str, Any] | None = None
) -> Predictor:
    """Fit a prototype network to rows (n, dim) and classes (n,) by ``solve``."""
    metadata = {"param_limit": PARAM_LIMIT} if metadata is None else metadata
    network = fit_solution([(torch.from_numpy(x).float(), torch.from_numpy(y))], None, metadata, search=search).network

    def predict(rows: np.ndarray) -> PredictionOutcome:
        with torch.no_grad():
            logits = network(torch.from_numpy(rows).float())  # (n, num_classes)
        return predict_likeliest(logits.double().log_softmax(dim=1).numpy())

    return predict


#: The fit function of each method.
METHODS: dict[str, FitFunction] = {
    **{name: functools.partial(fit_protonet, **settings) for name, settings in PROTONET_SETTINGS.items()},
    **{name: BASELINES[name].fit for name in TUNED_BASELINES},
}


@dataclass(frozen=True, kw_only=True)
class Options(JournalOptions):
    """The options of the study."""

    datasets: Sequence[str] | None = names_option(DATASETS)
    methods: Sequence[str] | None = names_option(METHODS)
    shots: Sequence[int] = list_option(
        "labelled samples per class", "1,2,5,10,20", functools.partial(parse_integers, low=1)
    )
    splits: int = int_option("splits of each data set", 5)
    plot: Path | None = plot_option("ours minus the best baseline")


def run(options: Options) -> StudyReport:
    """Execute all runs, and compare the methods for each data set and number of shots."""
    methods = options.methods or list(METHODS)
    ours = [method for method in methods if method in PROTONET_SETTINGS]
    baselines = [method for method in methods if method not in PROTONET_SETTINGS]
    if {*baselines} - {"cosine"} and find_spec("sklearn") is None:
        remedy = f"Run {install_command('analysis')}, or pass --methods ours,cosine."
        raise_input_error("--methods", "have scikit-learn for the baselines", "none installed", remedy)
    if options.plot and not (ours and baselines):
        raise_input_error("--plot", "come with ours and a baseline", f"{methods}", "Add to --methods.")
    runs = list(list_runs(options.datasets or DATASETS, options.shots, options.splits, methods))
    if not runs:
        got = f"none at {options.shots} shots"
        raise_input_error("--datasets", "have rows enough for a split", got, "Pass fewer shots or other data sets.")
    codes = (hash_sources(*DATA_SOURCES, *library_files()), hash_sources(*DATA_SOURCES, *BASELINE_SOURCES))
    rows = summarise(run_all(runs, run_method, options.state, lambda run: codes[run.method in baselines]))
    if options.plot:
        plot_differences(rows, ours[0], options.plot)
    return StudyReport(rows, tabulate(rows))


def list_runs(
    datasets: Iterable[str], shots: Sequence[int], n_splits: int, methods: Sequence[str]
) -> Iterator[MethodRun]:
    """Yield the runs of all methods on each split of each data set; data sets with too few rows are left out."""
    for name, data in load_installed_sets(datasets, load_real_dataset):
        for n in shots:
            if split_shots(data, n, 0) is not None:  # the same for every seed
                yield from (MethodRun(name, n, seed, method) for seed in range(n_splits) for method in methods)


def run_method(run: MethodRun) -> dict[str, float]:
    """Measure a method's accuracy, log-loss and calibration error on a split, and its seconds to fit."""
    split = split_shots(load_real_dataset(run.dataset), run.shots, run.seed)
    assert split is not None, "list_runs leaves these out"
    fit = METHODS[run.method]
    if run.method == "left-out":
        fit = functools.partial(fit_protonet, search=ModelSearch(prior=load_left_out_prior(run.dataset)))
    started = time.perf_counter()
    predictor = fit(split.train_x.double().numpy(), split.train_y.numpy())
    seconds = time.perf_counter() - started
    return compute_scores(predictor(split.test_x.double().numpy()), split.test_y) | {"seconds": round(seconds, 4)}


def compute_scores(outcome: PredictionOutcome, truth: Tensor) -> dict[str, float]:
    """Compute accuracy and, with probabilities, log-loss and calibration error of predictions, given classes (n,)."""
    predicted, log_probabilities = outcome
    result = {"accuracy": float((predicted == truth.numpy()).mean())}
    if log_probabilities is not None:
        log_p = torch.from_numpy(log_probabilities)
        bins = sum_confidence_bins(log_p.log_softmax(dim=1).amax(dim=1).exp(), log_p.argmax(dim=1) == truth)
        result |= {"log_loss": compute_metrics(log_p, truth).log_loss, "calibration_error": calibration_error(bins)}
    return result


def summarise(results: Mapping[MethodRun, Mapping[str, float]]) -> list[Row]:
    """Group results by data set and shots; add accuracies in percent and the baseline with the best mean (``best``)."""
    percents = {run: {"percent": 100 * result["accuracy"], **result} for run, result in results.items()}
    rows = tables.group_by_dataset(percents)
    for row in rows:
        del row["accuracy"]
        row["best"] = tables.get_best_baseline(row, "percent", BASELINES)
    return rows


def tabulate(rows: Sequence[Row]) -> str:
    """Format the results of `summarise` as Markdown: all data sets and shots, then means for few and for more shots."""
    names = sorted(rows[0]["percent"], key=lambda name: name in BASELINES)
    methods = {name: METHOD_TITLES[name] for name in names}
    text = tables.tabulate_datasets(rows, "percent", methods, BASELINES)
    text += TABLE_NOTE.format(splits=plural(len(next(iter(rows[0]["percent"].values()))), "split"))
    for title, (low, high) in SHOT_GROUPS.items():
        group = [row for row in rows if low <= row["shots"] <= high]
        if group:
            table = tables.tabulate_methods(group, COMPARED_QUANTITIES, methods, BASELINES)
            text += f"\n**{title}**, {plural(len(group), 'row')}:\n\n{table}"
    return text


def plot_differences(rows: Sequence[Row], method: str, path: Path) -> None:
    """Plot a method's accuracy minus the best baseline's: a line per data set, a colour per number of shots."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    names = list(dict.fromkeys(row["dataset"] for row in rows))
    shots = sorted({row["shots"] for row in rows})
    figure = Figure(figsize=(7.5, 1.4 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    for position, n in enumerate(shots):
        group = [row for row in rows if row["shots"] == n]
        height = [names.index(row["dataset"]) + 0.7 * ((position + 0.5) / len(shots) - 0.5) for row in group]
        pairs = [
            tables.mean_and_error(tables.paired_differences(row["percent"][method], row["percent"][row["best"]]))
            for row in group
        ]
        leads, errors = zip(*pairs, strict=True)
        shade = 0.9 * (1 - (position + 1) / len(shots))
        colour = (shade, 0.25 + shade / 2, 0.55)
        axes.errorbar(leads, height, None, np.nan_to_num(errors), "o", ms=4, lw=1, color=colour, label=f"{n}")
    axes.axvline(0, color="0.2", lw=1)
    # Maximal regret in points that is acceptable on a row; the plot shows it as a line.
    max_accepted_regret = 1.5
    axes.axvline(-max_accepted_regret, color="0.6", lw=1, ls=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel(f"accuracy of {method} minus the best baseline's of the row, points (± one standard error)")
    axes.legend(title="shots", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
