"""Number of labels that active learning needs to match ten random rows per class.

Labels come in batches of one per class, from one random row per class on; after each batch the solver is fitted again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from analysis.real_data.active_strategies import FITTED, SHOTS, STRATEGIES, TARGET, Run, run_strategy
from analysis.real_data.robustness import DATA
from analysis.real_data.sets import load_real
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import Report, StudyParser, load_sets
from analysis.shared.tables import mean_and_error
from protonet.errors import optional_packages
from protonet.ui.command_line import check_name
from protonet.ui.text import count, format_table
from solution.pack import library_files

#: Development sets, and held-out sets: every other one of those with enough rows.
DEVELOPED = ("digits", "breast_cancer", "glyphs", "spectra", "ArrowHead", "ItalyPowerDemand")
REPORTED = ("wine", "iris", "text", "OSULeaf", "GunPoint", "JapaneseVowels")
NOTE = """
Labels in percent of ten per class, at which the mean over {splits} of the test accuracy, made monotone, reaches that of
ten random rows per class; {most:.0f} counts for runs that did not get there within {labels} labels per class. In the
lines of means: ± one standard error over the sets. The sets of the first half chose the strategy and its bandwidth;
those of the second half are held out.
"""

Row = dict[str, Any]


def add_options(parser: StudyParser) -> None:
    """Add the data sets, strategies and splits."""
    parser.add_names("--datasets", (*DEVELOPED, *REPORTED))
    parser.add_names("--strategies", STRATEGIES)
    parser.add("--effort", "linear", f"of {', '.join(FITTED)}", partial(check_name, known=FITTED))
    parser.add_int("--splits", 3, "splits of each data set")
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Execute all runs, and report the number of labels that each strategy needs."""
    with optional_packages():
        import sklearn.cluster  # noqa: F401, PLC0415 - TypiClust and the isotonic curves
    strategies = options.strategies or list(STRATEGIES)
    runs = []
    for name, _ in load_sets(options.datasets or (*DEVELOPED, *REPORTED), load_real):
        pairs = [(seed, method) for seed in range(options.splits) for method in (TARGET, *strategies)]
        runs += [Run(name, seed, method, options.effort) for seed, method in pairs]
    code = hash_sources(
        "analysis/real_data/active_learning.py",
        "analysis/real_data/active_strategies.py",
        "protonet/fit/active.py",
        *DATA,
        *library_files(),
    )
    rows = summarise(run_all(runs, run_strategy, options.state, lambda _: code))
    return Report(rows, tabulate(rows))


def count_labels(curve: Sequence[float], target: float) -> float:
    """Count the labels per class at which a learning curve, which starts at one label per class, reaches a target.

    The curve is made monotone, and is straight between its points; one that does not reach it takes a batch more.

    Source: isotonic regression, Barlow et al., "Statistical inference under order restrictions" (1972).
    """
    from sklearn.isotonic import isotonic_regression  # noqa: PLC0415 - optional

    rising = isotonic_regression(np.asarray(curve, float))
    if rising[-1] < target:
        return len(curve) + 1.0
    at = int(np.argmax(rising >= target))
    before = rising[max(at - 1, 0)]
    return 1.0 + at if at == 0 else at + float((target - before) / (rising[at] - before))


def summarise(results: Mapping[Run, Sequence[float]]) -> list[Row]:
    """Group the results by data set: the target accuracy, and the mean curve and number of labels of each strategy."""
    rows: dict[str, Row] = {}
    gathered: dict[tuple[str, str], list[Sequence[float]]] = {}
    for run, result in results.items():
        gathered.setdefault((run.dataset, run.strategy), []).append(result)
    for (name, strategy), curves in gathered.items():
        row = rows.setdefault(name, {"dataset": name, "splits": len(curves), "curves": {}, "labels": {}})
        mean = np.mean(curves, axis=0)
        if strategy == TARGET:
            row["target"] = float(mean.mean())
        else:
            row["curves"][strategy] = mean.round(5).tolist()
            row["labels"][strategy] = count_labels(mean, row["target"])
    return list(rows.values())


def tabulate(rows: Sequence[Row]) -> str:
    """Format the results of `summarise` as Markdown, in two halves with their means."""
    strategies = list(rows[0]["labels"])
    lines = []
    for title, names in (("mean of the developing half", DEVELOPED), ("mean of the other half", REPORTED)):
        half = [row for row in rows if row["dataset"] in names]
        for row in half:
            cells = [f"{100 * row['labels'][method] / SHOTS:.0f}" for method in strategies]
            lines.append([row["dataset"], f"{100 * row['target']:.1f}", *cells])
        if half:
            lines.append([f"**{title}**", "", *(_format_ratio(half, method) for method in strategies)])
    lines.append(["**mean of all**", "", *(_format_ratio(rows, method) for method in strategies)])
    labels = len(rows[0]["curves"][strategies[0]])
    note = NOTE.format(splits=count(rows[0]["splits"], "split"), most=100 * (labels + 1) / SHOTS, labels=labels)
    text = format_table(["data set", "to be reached, %", *strategies], lines) + note
    if "random" in strategies:
        means = {method: statistics.fmean(row["labels"][method] for row in rows) for method in strategies}
        cells = [f"{method} {100 * mean / means['random']:.0f} %" for method, mean in means.items()]
        text += f"\nLabels as a share of those that random rows take, mean over all sets: {', '.join(cells)}.\n"
    return text


def _format_ratio(rows: Sequence[Row], strategy: str) -> str:
    """Format the mean number of labels of a strategy over sets, in percent of ten per class."""
    mean, error = mean_and_error([100 * row["labels"][strategy] / SHOTS for row in rows])
    return f"{mean:.0f}" if len(rows) == 1 else f"{mean:.0f} ±{error:.0f}"
