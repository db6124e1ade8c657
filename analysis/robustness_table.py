"""The tables and the figure of `analysis.robustness`: accuracy in percent, regret against the best classic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.classics import CLASSICS
from analysis.robustness_runs import OURS, Results, Run
from analysis.tables import format_mean, mean_and_error
from protonet.commands.common import count, format_table

#: The methods' names in the tables, where they are not the keys themselves.
NAMES = {
    "fast": "ours, fast",
    "raw": "ours, raw only",
    "no-selection": "no selection",
    "no-moves": "no moves",
    "no-episodes": "no episodes",
    "no-cross-entropy": "no cross-entropy",
    "cosine": "raw cosine",
    "centroid": "nearest centroid",
    "lda": "shrunken LDA",
    "logistic": "logistic regression",
    "svm": "RBF SVM",
    "svm-probabilities": "RBF SVM, Platt's probabilities",
    "knn": "k-NN",
    "trees": "extra trees",
    "mlp": "MLP",
}
#: Shots that the summary keeps apart: from the first to the second, both included.
GROUPS = {"1 and 2 shots": (1, 2), "3 and 4 shots": (3, 4), "5 shots and more": (5, 10**9)}
#: Points that the default may be below the best classic anywhere.
WORST_ALLOWED = 1.5
NOTE = """
Test accuracy in percent, mean over {splits} ± one standard error. The best classic is, with hindsight, the one
with the highest mean of the row; the regret is its accuracy minus the method's, in points. Ranks, 1 being the
best, are among the methods shown. Log-loss is in nats, the calibration error in points, over 15 bins.
"""

Row = dict[str, Any]


def summarise(results: Results) -> list[Row]:
    """Gather the results by data set and shots.

    Returns:
        One row for each, in the order of the results: ``percent`` has the accuracies of each method by split,
        ``seconds``, ``log_loss`` and ``calibration_error`` likewise; ``best`` is the classic with the highest
        mean accuracy, or None without classics.
    """
    rows: dict[tuple[str, int], Row] = {}
    for run in sorted(results, key=lambda run: run.seed):
        key = run.dataset, run.shots
        row = rows.setdefault(key, {"dataset": run.dataset, "shots": run.shots, "percent": {}, "seconds": {}})
        result = results[run]
        row["percent"].setdefault(run.method, []).append(100 * result["accuracy"])
        for name in ("seconds", "log_loss", "calibration_error"):
            if name in result:
                row.setdefault(name, {}).setdefault(run.method, []).append(result[name])
    order = list(dict.fromkeys(_key(run) for run in results))
    for row in rows.values():
        classics = [method for method in CLASSICS if method in row["percent"]]
        row["best"] = max(classics, key=lambda method: statistics.fmean(row["percent"][method]), default=None)
    return [rows[key] for key in order]


def regrets(row: Row, method: str) -> list[float]:
    """Return the row's best classic's accuracy minus a method's, by split, in points; none without classics."""
    if row["best"] is None:
        return []
    best, own = row["percent"][row["best"]], row["percent"][method]
    return [a - b for a, b in zip(best, own, strict=True)]


def ranks(row: Row) -> dict[str, float]:
    """Return each method's rank in a row, the mean over splits; ties share theirs."""
    from scipy.stats import rankdata  # noqa: PLC0415 - slow to import

    accuracies = np.array(list(row["percent"].values()))  # (methods, splits)
    means = rankdata(-accuracies, axis=0).mean(axis=1)  # (methods,)
    return dict(zip(row["percent"], means.tolist(), strict=True))


def tabulate(rows: Sequence[Row]) -> str:
    """Return the Markdown of the rows that `summarise` gathered: all rows, then a summary for few and more shots."""
    methods = list(rows[0]["percent"])
    main = next((method for method in OURS if method in methods), methods[0])
    header = ["data set", "shots", *(NAMES.get(m, m) for m in methods), "best classic", f"regret of {main}"]
    lines = []
    for row in rows:
        best = NAMES.get(row["best"], "")
        cells = [format_mean(row["percent"][method]) for method in methods]
        lines.append([row["dataset"], str(row["shots"]), *cells, best, format_mean(regrets(row, main), sign=True)])
    text = format_table(header, lines) + NOTE.format(splits=count(len(rows[0]["percent"][main]), "split"))
    for title, (low, high) in GROUPS.items():
        group = [row for row in rows if low <= row["shots"] <= high]
        if group:
            text += f"\n**{title}**, {count(len(group), 'row')}:\n\n" + _tabulate_group(group, methods)
    return text


def _tabulate_group(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Return a table with a line a method: means over the rows."""
    header = ["method", "accuracy", "mean regret", "worst regret", "mean rank"]
    header += ["log-loss", "calibration error", "fit seconds"]
    all_ranks = [ranks(row) for row in rows]
    lines = []
    for method in methods:
        regret = {f"{row['dataset']} {row['shots']}": regrets(row, method) for row in rows if row["best"]}
        means = {place: statistics.fmean(values) for place, values in regret.items()}
        worst = max(means, key=lambda place: means[place], default=None)
        line = [NAMES.get(method, method), f"{_mean(rows, 'percent', method):.2f}"]
        line += [f"{statistics.fmean(means.values()):+.2f}", f"{means[worst]:+.2f} ({worst})"] if worst else ["", ""]
        line.append(f"{statistics.fmean(rank[method] for rank in all_ranks):.2f}")
        known = method in rows[0].get("log_loss", {})
        line.append(f"{_mean(rows, 'log_loss', method):.3f}" if known else "")
        line.append(f"{100 * _mean(rows, 'calibration_error', method):.2f}" if known else "")
        lines.append([*line, f"{_mean(rows, 'seconds', method):.2f}"])
    if all(row["best"] for row in rows):
        hindsight = statistics.fmean(statistics.fmean(row["percent"][row["best"]]) for row in rows)
        lines.append(["best classic, row by row", f"{hindsight:.2f}", "+0.00", *[""] * 5])
    return format_table(header, lines)


def plot(rows: Sequence[Row], method: str, path: Path) -> None:
    """Draw a method's accuracy minus the best classic's: a line a data set, a mark for each number of shots.

    Args:
        rows: From `summarise`, each with a best classic.
        method: The method.
        path: Where the figure goes; the name's ending says in which format.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: The format is unknown.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    names = list(dict.fromkeys(row["dataset"] for row in rows))
    shots = sorted({row["shots"] for row in rows})
    figure = Figure(figsize=(7.5, 1.4 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    for position, n in enumerate(shots):
        group = [row for row in rows if row["shots"] == n]
        height = [names.index(row["dataset"]) + 0.7 * ((position + 0.5) / len(shots) - 0.5) for row in group]
        pairs = [mean_and_error([-value for value in regrets(row, method)]) for row in group]
        gains, errors = zip(*pairs, strict=True)
        colour = 0.9 * (1 - (position + 1) / len(shots))
        marks: dict[str, Any] = {"fmt": "o", "ms": 4, "lw": 1, "color": (colour, 0.25 + colour / 2, 0.55)}
        axes.errorbar(gains, height, xerr=np.nan_to_num(errors), label=f"{n}", **marks)
    axes.axvline(0, color="0.2", lw=1)
    axes.axvline(-WORST_ALLOWED, color="0.6", lw=1, ls=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel(f"accuracy of {method} minus the best classic's of the row, points (± one standard error)")
    axes.legend(title="shots", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


def _mean(rows: Sequence[Row], quantity: str, method: str) -> float:
    """Return the mean over rows of a quantity's mean over splits."""
    return statistics.fmean(statistics.fmean(row[quantity][method]) for row in rows)


def _key(run: Run) -> tuple[str, int]:
    """Return the row of a run."""
    return run.dataset, run.shots
