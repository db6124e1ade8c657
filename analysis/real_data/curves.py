"""Draw accuracy against labels per class, protonet beside four baselines, from the results of `robustness`.

One panel shows the three sets with the largest leads, whose features are in an order; the other one shows the rest.
Sets with too few rows for 10 labels per class are left out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.real_data.robustness import METHOD_TITLES
from analysis.shared.runner import StudyOptions, StudyReport, plot_option
from protonet.ui.options import option
from protonet.ui.text import format_table
from solution.pack import ROOT

SHOTS = (1, 2, 5, 10)
#: By method: its title and colour.
METHODS = {
    "left-out": ("protonet", "#1f5fa8"),
    "trees": (METHOD_TITLES["trees"], "#2e7d32"),
    "svm": (METHOD_TITLES["svm"], "#d07b0c"),
    "logistic": (METHOD_TITLES["logistic"], "#b3241c"),
    "cosine": ("cosine to class means", "#6d7483"),
}
LARGEST_LEADS = ("glyphs", "OSULeaf", "BasicMotions")


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """The options of the study."""

    results: Path = option("JSON of robustness", ROOT / "analysis/results/robustness.json", metavar="PATH")
    plot: Path | None = plot_option("the curves")


def run(options: Options) -> StudyReport:
    """Compute the means of both panels, and draw them."""
    rows = json.loads(options.results.read_text(encoding="utf-8"))
    accuracy = {(row["dataset"], row["shots"]): row["percent"] for row in rows}
    names = [name for name, shots in accuracy if shots == SHOTS[-1]]
    others = [name for name in names if name not in LARGEST_LEADS]
    panels = {
        f"{len(others)} sets: tables, digits, text, spectra, series": others,
        f"the {len(LARGEST_LEADS)} largest leads: letters, shapes and motions": list(LARGEST_LEADS),
    }
    means: list[dict[str, Any]] = []
    for title, some in panels.items():
        for method in METHODS:
            percent = [statistics.fmean(statistics.fmean(accuracy[name, n][method]) for name in some) for n in SHOTS]
            means.append({"panel": title, "method": method, "percent": percent})
    if options.plot is not None:
        draw(means, list(panels), options.plot)
    lines = [[row["panel"], METHODS[row["method"]][0], *(f"{value:.1f}" for value in row["percent"])] for row in means]
    return StudyReport(means, format_table(["panel", "accuracy, %, at labels per class", *map(str, SHOTS)], lines))


def draw(means: Sequence[dict[str, Any]], titles: Sequence[str], path: Path) -> None:
    """Draw a panel for each title, with a curve for each method."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(9, 3.1), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles), sharey=True), titles, strict=True):
        for row in means:
            if row["panel"] == title:
                label, colour = METHODS[row["method"]]
                width = 2 if row["method"] == "left-out" else 1
                axes.plot(SHOTS, row["percent"], "o-", color=colour, lw=width, ms=4, label=label)
        axes.set_xscale("log")
        axes.set_xticks(SHOTS, list(map(str, SHOTS)))
        axes.minorticks_off()
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("labels per class")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean accuracy, %")
    figure.axes[0].legend(fontsize=7, frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
