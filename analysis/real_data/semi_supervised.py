"""Measure how much unlabelled rows improve the solver, or mislead it, compared with scikit-learn's methods.

Splits of real data have labelled rows and up to 60 unlabelled rows per class; all methods are evaluated on these.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.real_data.robustness import DATA_SOURCES
from analysis.real_data.sets import DATASETS, MIN_SPARE_ROWS, load_real_dataset
from analysis.shared.runner import StudyParser, StudyReport, hash_sources, load_available_sets, parse_integers, run_all
from analysis.shared.tables import format_mean
from protonet.datasets import Dataset
from protonet.errors import raise_input_error
from protonet.fit.active import cluster_unknown
from protonet.fit.search import EFFORTS
from protonet.fit.solver import fit_solution
from protonet.ui.command_line import check_known_name
from protonet.ui.text import format_table
from solution.pack import library_files

#: Maximal number of classes of a data set, of unlabelled rows per class, and of test rows per class.
MAX_CLASSES, MAX_ROWS, MAX_TEST_ROWS = 20, 60, 200
#: Data sets on which the method was developed; the others are held out.
DEVELOPMENT_DATASETS = ("digits", "wine", "glyphs", "spectra", "OSULeaf", "GunPoint", "BasicMotions", "JapaneseVowels")
#: How unlabelled rows are sampled.
UNLABELLED_REGIMES = {
    "alike": "as many of each class",
    "shares": "shares of a Dirichlet distribution of concentration 1",
    "strangers": "a third of them, or nearly, of classes that have no label",
}
SKLEARN_METHODS = ("LabelSpreading", "LabelPropagation", "SelfTraining")
TABLE_NOTE = """
Accuracy in percent on the rows without a label, of the classes that are known, ± one standard error over the splits;
lead: with these rows, less without them, in points. "Fresh": the same on rows of the same classes that were in neither.
Learned: in how many runs they were learned from. scikit-learn's methods have standardised columns, a kernel of 7
neighbours, and logistic regression where one is to be trained on its own answers; the better of these columns and raw
ones is shown. What ours learns was chosen on {chosen}; the other sets
are held out. With novel classes, "found" counts the rows that `cluster_unknown` lists, how many of them are
of novel classes, and how many rows of novel classes there were, over all runs.

Regimes: {regimes}. Effort {effort}.
"""


class Run(NamedTuple):
    """A split of a data set, and the methods that are evaluated on it."""

    dataset: str
    shots: int
    seed: int
    regime: str
    effort: str
    peers: bool  #: Whether scikit-learn's methods are evaluated, too.


class Split(NamedTuple):
    """Labelled, unlabelled and test rows; classes from ``num_classes`` on are novel."""

    train: tuple[Tensor, Tensor]  #: Labelled rows and their classes.
    unlabelled: tuple[Tensor, Tensor]  #: Unlabelled rows and their classes, which methods do not see.
    test: tuple[Tensor, Tensor]  #: Test rows and their classes.
    num_classes: int  #: Number of known classes.


def add_options(parser: StudyParser) -> None:
    """Add the study's options: data sets, regimes (kinds of unlabelled rows) and splits."""
    parser.add_names_option("--datasets", DATASETS)
    parser.add_names_option("--regimes", UNLABELLED_REGIMES)
    parser.add_option("--shots", "1,2,5,20", "labelled samples per class", partial(parse_integers, low=1))
    parser.add_int_option("--splits", 3, "splits of each data set")
    parser.add_option("--effort", "fast", "of the fit", partial(check_known_name, known_names=EFFORTS))
    parser.add_argument("--peers", action="store_true", help="ask scikit-learn's methods, too, where classes are alike")
    parser.add_state_options()


def run(options: argparse.Namespace) -> StudyReport:
    """Execute all runs, and average the results over the splits of each data set."""
    runs = list(list_runs(options))
    if not runs:
        got = f"none at {options.shots} shots"
        raise_input_error("--datasets", "have rows enough for a split", got, "Pass fewer shots.")
    code = hash_sources("analysis/real_data/semi_supervised.py", *DATA_SOURCES, *library_files())
    results = run_all(runs, measure_run, options.state, lambda _: code)
    rows = [{**setting._asdict(), **result} for setting, result in results.items()]
    return StudyReport(rows, tabulate(rows, options.effort))


def list_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs on all data sets with enough rows, one split after another."""
    for name, data in load_available_sets(options.datasets or DATASETS, load_real_dataset):
        for shots in options.shots:
            for regime in options.regimes or list(UNLABELLED_REGIMES):
                peers = options.peers and regime == "alike"
                for seed in range(options.splits):
                    if split_rows(data, shots, seed, regime) is not None:
                        yield Run(name, shots, seed, regime, options.effort, peers)


def split_rows(data: Dataset, shots: int, seed: int, regime: str) -> Split | None:
    """Split a data set; None if fewer than two classes (three, if ``regime`` has novel classes) have enough rows."""
    random = np.random.default_rng([seed, 16])
    y = data.y.numpy()
    classes = [c for c in range(data.num_classes) if (y == c).sum() >= shots + MIN_SPARE_ROWS]
    if len(classes) > MAX_CLASSES:
        classes = sorted(random.permutation(classes)[:MAX_CLASSES].tolist())
    if len(classes) < (3 if regime == "strangers" else 2):
        return None
    proportions = random.dirichlet(np.ones(len(classes)))
    known = max(2, -(-2 * len(classes) // 3)) if regime == "strangers" else len(classes)
    parts: list[list[tuple[int, int]]] = [[], [], []]
    for position, c in enumerate(classes):
        order = random.permutation(np.flatnonzero(y == c)).tolist()
        remaining = order[shots:]
        hidden = min(MAX_ROWS, len(remaining))
        test_rows = remaining[hidden:][:MAX_TEST_ROWS]
        if regime == "shares":
            hidden = round(hidden * proportions[position] / proportions.max())
        for part, rows in zip(parts, (order[:shots], remaining[:hidden], test_rows), strict=True):
            if position < known or part is parts[1]:
                part += [(row, position) for row in rows]

    def take(part: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        return data.x[[row for row, _ in part]].float(), torch.tensor([label for _, label in part], dtype=torch.int64)

    train, hidden_rows, fresh = map(take, parts)
    return Split(train, hidden_rows, fresh, known)


def measure_run(run: Run) -> dict[str, Any]:
    """Measure accuracies in percent, without and with unlabelled rows, and how well novel classes are detected."""
    split = split_rows(load_real_dataset(run.dataset), run.shots, run.seed, run.regime)
    assert split is not None, "list_runs leaves these out"
    known = split.unlabelled[1] < split.num_classes
    metadata = {"num_classes": split.num_classes}
    outcome: dict[str, Any] = {}
    for name, rows in (("without", None), ("with", split.unlabelled[0])):
        started = time.process_time()
        solution = fit_solution([split.train], None, metadata, effort=run.effort, unlabelled=rows)
        outcome[f"{name}_seconds"] = time.process_time() - started
        with torch.no_grad():
            right, fresh = (solution.network(x).argmax(dim=1) == y for x, y in (split.unlabelled, split.test))
        outcome[name] = 100 * float(right[known].double().mean())
        if len(fresh):
            outcome[f"{name}_fresh"] = 100 * float(fresh.double().mean())
    assert solution.semi_supervised is not None
    novel = (~known).nonzero().flatten().tolist()
    groups = cluster_unknown(solution)
    listed = [row for group in groups for row in group]
    outcome |= {"learned": solution.semi_supervised.uses_unlabelled, "groups": len(groups), "unlike": len(listed)}
    outcome |= {"strangers": len(set(listed) & set(novel)), "all_strangers": len(novel)}
    return outcome | (score_sklearn(split) if run.peers else {})


def score_sklearn(split: Split) -> dict[str, float]:
    """Measure the accuracy, in percent, of scikit-learn's semi-supervised methods with the better of two scalings."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - optional
    from sklearn.semi_supervised import LabelPropagation, LabelSpreading, SelfTrainingClassifier  # noqa: PLC0415

    methods = {
        "LabelSpreading": LabelSpreading("knn", n_neighbors=7, max_iter=100),
        "LabelPropagation": LabelPropagation("knn", n_neighbors=7, max_iter=1000),
        "SelfTraining": SelfTrainingClassifier(LogisticRegression(max_iter=200)),
    }
    x = torch.cat([split.train[0], split.unlabelled[0]]).double().numpy()
    y = torch.cat([split.train[1], torch.full_like(split.unlabelled[1], -1)]).numpy()
    deviation = x.std(axis=0)
    spaces = (x, (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1))
    outcome = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # methods that do not converge
        for name, method in methods.items():
            hidden = [method.fit(space, y).predict(space)[len(split.train[1]) :] for space in spaces]
            outcome[name] = max(100 * float((setting == split.unlabelled[1].numpy()).mean()) for setting in hidden)
    return outcome


def tabulate(rows: Sequence[Mapping[str, Any]], effort: str) -> str:
    """Format a table of all data sets for each number of labels and regime, and a table of means."""
    tables, summary = [], []
    for shots, regime in dict.fromkeys((row["shots"], row["regime"]) for row in rows):
        some = [row for row in rows if (row["shots"], row["regime"]) == (shots, regime)]
        names = sorted({row["dataset"] for row in some}, key=lambda name: (name not in DEVELOPMENT_DATASETS, name))
        lines, leads = [], {}
        for name in names:
            selected = [row for row in some if row["dataset"] == name]
            lead = [row["with"] - row["without"] for row in selected]
            fresh = [row["with_fresh"] - row["without_fresh"] for row in selected if "with_fresh" in row]
            leads[name] = statistics.fmean(lead)
            peers = [format_mean([row[peer] for row in selected if peer in row]) for peer in SKLEARN_METHODS]
            learned = f"{sum(row['learned'] for row in selected)} of {len(selected)}"
            means = [format_mean([row[part] for row in selected]) for part in ("without", "with")]
            lines.append([name, *means, format_mean(lead), format_mean(fresh), learned, *peers])
        columns = ["data set", "without", "with", "lead", "lead, fresh", "learned", *SKLEARN_METHODS]
        tables.append(f"**{shots} per class, {regime}**\n\n{format_table(columns, lines)}")
        means = [
            format_mean([leads[name] for name in names if (name in DEVELOPMENT_DATASETS) == chosen], sign=True)
            for chosen in (True, False)
        ]
        worst = min(leads, key=leads.__getitem__)
        ahead = [
            f"{statistics.fmean(row['with'] - row[peer] for row in some):+.1f}" if peer in some[0] else ""
            for peer in SKLEARN_METHODS
        ]
        seconds = statistics.fmean(row["with_seconds"] / row["without_seconds"] for row in some)
        outcome = " / ".join(str(sum(row[part] for row in some)) for part in ("unlike", "strangers", "all_strangers"))
        line = [f"{shots}, {regime}", *means, f"{worst} {leads[worst]:+.1f}", f"{seconds:.1f}", outcome]
        summary.append([*line, *ahead])
    columns = ["per class, regime", "lead, sets that chose", "other sets", "worst", "times as long", "found"]
    columns += [f"ahead of {peer}" for peer in SKLEARN_METHODS]
    tables.append(f"**Means**\n\n{format_table(columns, summary)}")
    regimes = "; ".join(f"{name}: {text}" for name, text in UNLABELLED_REGIMES.items())
    return "\n".join(tables) + TABLE_NOTE.format(chosen=", ".join(DEVELOPMENT_DATASETS), regimes=regimes, effort=effort)
