"""The report of an evaluation: one summary, as tables, JSON, CSV or a plot."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from protonet._io import write_text
from protonet._validation import check_type
from protonet.episodes.evaluation.evaluate import Scores
from protonet.episodes.evaluation.statistics import (
    INTERVAL_KINDS,
    OPEN_SET_MEASURES,
    SIDE_MEASURES,
    Evaluation,
    MethodSummary,
    Rate,
    Summary,
    compare_pairs,
    list_interval_kinds,
)
from protonet.episodes.methods.common import support_means
from protonet.episodes.samplers.batch import Episodes
from protonet.episodes.samplers.config import check_span
from protonet.errors import optional_packages
from protonet.metrics import calibration_error
from protonet.ui.text import format_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_SIZE = 4.6  #: Inches, the side of a plot.
TextTable = tuple[Sequence[str], Sequence[Sequence[str]]]  #: A header and rows, of texts.
#: How LaTeX writes characters that mean something else to it.
LATEX = {character: rf"\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    "±": r"$\pm$",
}
#: A cell that is a number: with a sign, an exponent, half-widths or a rank in brackets, perhaps.
NUMBER = re.compile(
    r"(?P<value>[<+-]?[\d.]+)(e(?P<sign>[+-])0*(?P<exponent>\d+))?(?P<halves>( ±[\d.]+)*)(?P<rank> \([\d.]+\))?"
)
#: The headings of columns of measures.
MEASURES = {
    "auroc": "AUROC of open classes, %",
    "fpr95": "FPR at 95 %, %",
    "oscr": "OSCR, %",
    "base": "of base classes, %",
    "novel": "of novel classes, %",
    "harmonic": "harmonic mean, %",
}
MAX_SHOT_COLUMNS = 20  #: Columns of a table by shot; there is none of more.
#: What intervals and p-values apply to: where both are known, where each episode has all classes, of a fixed split.
INTERVAL_NOTES = {
    "both": "The first 95 % interval (±) and p-value apply to new classes of the same kind (jackknife over classes), "
    "the second to new episodes of these classes.",
    "episodes": "95 % intervals (±) and p-values apply to new episodes of these classes: those for new classes need "
    "some episodes that leave each class out, and the same number of classes in all.",
    "supports": "95 % intervals (±) and p-values apply to new draws of the support, of the same test split.",
}


def summarize(
    scores: Mapping[str, Scores],
    shot: tuple[int, int],
    settings: Mapping[str, Any] = MappingProxyType({}),
    class_mask: torch.Tensor | None = None,
) -> Summary:
    """Summarise an evaluation.

    Args:
        scores: Of each method, on the same episodes.
        shot: Least and most shots per class.
        settings: The settings of the evaluation, passed on; ``against`` names the method to compare with each other.
        class_mask: (episodes, classes) bool, for intervals over classes; None where they are not known.
    """
    check_type("scores", scores, Mapping, "a mapping from names to scores, from evaluate")
    shot = check_span("shot", shot, low=1)
    methods = {}
    for name, score in scores.items():
        measures = OPEN_SET_MEASURES if score.harmonic.isnan().any() else OPEN_SET_MEASURES + SIDE_MEASURES
        shots = zip(range(shot[0], shot[1] + 1), score.by_shot.unbind(1), strict=True)
        methods[name] = MethodSummary(
            Rate.measure(score.accuracy, class_mask),
            calibration_error(score.bins),
            {measure: Rate.measure(getattr(score, measure), class_mask) for measure in measures},
            {n_shot: Rate.measure(column, class_mask) for n_shot, column in shots},
        )
    accuracies = {name: score.accuracy for name, score in scores.items()}
    comparisons = compare_pairs(accuracies, class_mask, settings.get("against"))
    return Summary(settings, len(next(iter(accuracies.values()))), methods, comparisons)


def accuracy_heading(rates: Iterable[Rate]) -> str:
    """Format the heading of a column of accuracies with their half-widths."""
    return " ".join(["accuracy, %", *(f"±{over}" for over in list_interval_kinds(rates))])


def format_evaluation(evaluation: Evaluation) -> str:
    """Format an evaluation as the command prints it: title, notes, and the tables of `format_report`."""
    check_type("evaluation", evaluation, Evaluation, "an Evaluation, from evaluate_dataset")
    return "\n".join([evaluation.title, *evaluation.notes]) + "\n\n" + format_report(evaluation.summary)


def format_report(summary: Summary) -> str:
    """Format a summary as Markdown tables for people, with notes on what the numbers mean.

    Args:
        summary: From `summarize`.
    """
    check_type("summary", summary, Summary, "a Summary, from summarize")
    text = "\n".join(format_table(*table) for table in tabulate(summary))
    n_pairs, against = len(summary.comparisons), summary.against
    if n_pairs:
        family = f"{n_pairs} pair{'s' * (n_pairs > 1)} of methods"
        if against is not None:
            family = f"{n_pairs} comparison{'s' * (n_pairs > 1)} of {against} with another"
        text += f"\nDifferences are paired by episode; p-values are of paired t tests, adjusted by Holm for {family}.\n"
    target, methods = summary.settings.get("target_half_width", 0), summary.methods.values()
    if target and not all(100 * method.accuracy.half_width_episodes < target for method in methods):
        text += f"Intervals over episodes are not within {target:g} points yet: more episodes are needed.\n"
    if summary.interval_kinds:
        text += f"{explain_intervals(summary)}\n"
    if any(method.calibration_error is None for method in methods):
        return text
    return text + "The calibration error is that of the method's own probabilities, the softmax of its logits.\n"


def explain_intervals(summary: Summary) -> str:
    """Explain which population the intervals of a summary refer to."""
    if summary.settings.get("protocol") == "fixed-split":
        return INTERVAL_NOTES["supports"]
    return INTERVAL_NOTES["both" if "classes" in summary.interval_kinds else "episodes"]


def tabulate(summary: Summary) -> list[TextTable]:
    """Format a summary as tables: the methods in percent, the best first; their accuracy by shot where shots vary.

    Differences are those to the best method; with ``against`` among the settings, what that one is ahead by.
    """
    methods, order, against = summary.methods, summary.order, summary.against
    best, several = order[0], len(order) > 1
    over = summary.interval_kinds
    heading = accuracy_heading(method.accuracy for method in methods.values())
    calibrated = all(method.calibration_error is not None for method in methods.values())
    measures = [name for name in MEASURES if name in methods[best].measures and methods[best].measures[name].is_known]
    header = ["method", heading]
    if several:
        header += [f"behind {best}" if against is None else f"{against} is ahead by"]
        header += [f"p over {kind} (Holm)" for kind in over]
    header += ["calibration error, %"] if calibrated else []
    header += [MEASURES[measure] for measure in measures]
    rows = []
    for name in order:
        method = methods[name]
        row = [name, percent(method.accuracy)]
        row += _compare(summary, against or best, name, over, signed=against is not None) if several else []
        if calibrated and method.calibration_error is not None:
            row.append(f"{100 * method.calibration_error:.1f}")
        rows.append(row + [percent(method.measures[measure]) for measure in measures])
    tables: list[TextTable] = [(header, rows)]
    shots = list(methods[best].by_shot)
    if 1 < len(shots) <= MAX_SHOT_COLUMNS:
        rows = [[name, *map(percent, methods[name].by_shot.values())] for name in order]
        tables.append(([heading, *(f"{n_shot}-shot" for n_shot in shots)], rows))
    return tables


def format_latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as LaTeX's ``tabular``, with the rules of the package booktabs, ending in a newline."""

    def line(cells: Sequence[str]) -> str:
        return "  " + " & ".join(map(write_latex, cells)) + r" \\" + "\n"

    begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}" + "\n  \\toprule\n"
    body = "".join(map(line, rows))
    return f"{begin}{line(header)}  \\midrule\n{body}  \\bottomrule\n\\end{{tabular}}\n"


def write_latex(cell: str) -> str:
    """Format a table's cell as LaTeX, numbers as mathematics."""
    match = NUMBER.fullmatch(cell)
    if match is None:
        return "".join(LATEX.get(character, character) for character in cell)
    power = "" if match["sign"] is None else rf" \times 10^{{{match['sign'].strip('+')}{match['exponent']}}}"
    halves = match["halves"].replace("±", r"\pm ")
    return f"${match['value']}{power}{halves}${match['rank'] or ''}"


def write_tables(outputs: Mapping[str, Path], tables: Sequence[TextTable]) -> None:
    """Write tables to those paths of ``outputs`` that are under ``latex`` and ``markdown``."""
    for kind, form in (("latex", format_latex), ("markdown", format_table)):
        if kind in outputs:
            write_text(outputs[kind], "\n".join(form(*table) for table in tables))


def percent(rate: Rate) -> str:
    """Format a rate in percent, such as ``71.23 ±2.10 ±0.40``; one that is not known becomes an empty text."""
    return " ±".join(f"{100 * value:.2f}" for value in (rate.mean, *rate.halves)) if rate.is_known else ""


def _compare(summary: Summary, best: str, name: str, over: Sequence[str], *, signed: bool) -> list[str]:
    """Format how much less accurate a method is than another, paired, and the adjusted p-values."""
    for pair in summary.comparisons:
        if {pair.first, pair.second} == {best, name} and best != name:
            rate = pair.rate if signed else replace(pair.rate, mean=abs(pair.difference))
            text = ("+" if signed and rate.mean >= 0 else "") + percent(rate)
            return [text, *(show_p(pair.get_p_value(kind)) for kind in over)]
    return [""] * (1 + len(over))


def show_p(p_value: float | None) -> str:
    """Format a p-value; None becomes an empty text."""
    if p_value is None:
        return ""
    return "<1e-300" if p_value < 1e-300 else f"{p_value:.2g}"


def write_csv(path: Path, summary: Summary) -> None:
    """Write a summary to ``path``, one line per metric: method, measure, shot ("" for all), value and half-widths."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)

        def write(method: str, measure: str, n_shot: object, rate: Rate) -> None:
            writer.writerow([method, measure, n_shot, *rate.describe().values()])

        writer.writerow(["method", "measure", "shot", "value", *(f"half_width_{over}" for over in INTERVAL_KINDS)])
        for name, method in summary.methods.items():
            write(name, "accuracy", "", method.accuracy)
            if method.calibration_error is not None:
                write(name, "calibration_error", "", Rate(method.calibration_error))
            for measure, rate in method.measures.items():
                if rate.is_known:
                    write(name, measure, "", rate)
            for n_shot, rate in method.by_shot.items():
                write(name, "accuracy", n_shot, rate)
        for pair in summary.comparisons:
            write(pair.first, f"accuracy less {pair.second}'s", "", pair.rate)
            for over in INTERVAL_KINDS:
                p_value = pair.get_p_value(over)
                rate = Rate(math.nan if p_value is None else p_value)
                write(pair.first, f"p over {over} (Holm) against {pair.second}", "", rate)


def write_plot(path: Path, summary: Summary, episode: Episodes, query_labels: torch.Tensor) -> None:
    """Plot accuracies, by shot where shots vary; paired differences, if there are several methods; and one episode.

    ``episode`` is a batch of one; ``query_labels`` (1, n_queries) int64 are -1 for queries of open classes.
    """
    with optional_packages():
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    several = len(summary.methods) > 1
    size = max(PLOT_SIZE, 0.42 * len(summary.methods))  # inches: one line of text per method
    widths = [PLOT_SIZE, *[size] * several, PLOT_SIZE]  # the differences alone grow with the number of methods
    figure = Figure(figsize=(sum(widths) + 0.6 * len(widths), size), layout="constrained")
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    plot_accuracies(axes[0], summary.methods)
    if several:
        _plot_differences(axes[1], summary)
    _plot_episode(axes[-1], episode, query_labels[0])
    figure.savefig(path, dpi=120)


def plot_accuracies(axes: Axes, methods: Mapping[str, MethodSummary]) -> None:
    """Plot accuracy by shot with bands, or one bar per method where there is a single number of shots."""
    shots = list(next(iter(methods.values())).by_shot)
    over = [f"over {first}" for first in list_interval_kinds(method.accuracy for method in methods.values())[:1]]
    if len(shots) > 1:
        for position, (name, method) in enumerate(methods.items()):
            rates = method.by_shot.values()
            values = [100 * rate.mean for rate in rates]
            halves = [100 * next(iter(rate.halves), 0.0) for rate in rates]
            dash = ("-", "--", ":")[position // 10 % 3]  # there are ten colours
            axes.plot(shots, values, label=name, marker="o", markersize=3, linestyle=dash)
            low = [max(0.0, value - half) for value, half in zip(values, halves, strict=True)]
            high = [min(100.0, value + half) for value, half in zip(values, halves, strict=True)]
            axes.fill_between(shots, low, high, alpha=0.2)
        title = " ".join(["accuracy by shot, 95 % bands", *over])
        axes.set(xlabel="shots", ylabel="accuracy, %", title=title, xticks=shots)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
        return
    names = sorted(methods, key=lambda name: methods[name].accuracy.mean)
    values = [100 * methods[name].accuracy.mean for name in names]
    halves = [100 * next(iter(methods[name].accuracy.halves), 0.0) for name in names]
    axes.errorbar(values, range(len(names)), xerr=halves, fmt="o", capsize=3)
    title = " ".join(["accuracy, 95 % intervals", *over])
    axes.set(xlabel="accuracy, %", title=title, yticks=range(len(names)), yticklabels=names)
    axes.grid(axis="x", alpha=0.3)


def _plot_differences(axes: Axes, summary: Summary) -> None:
    """Plot a heat map of paired differences, the row's accuracy minus the column's; stars where p (Holm) < 0.05.

    That is the p-value over classes where it is known.
    """
    names = summary.order
    grid = torch.zeros(len(names), len(names), dtype=torch.float64)
    labels_of: dict[tuple[int, int], str] = {}  # --against compares one with each
    for pair in summary.comparisons:
        row, column = names.index(pair.first), names.index(pair.second)
        grid[row, column], grid[column, row] = 100 * pair.difference, -100 * pair.difference
        p_value = next((p for p in map(pair.get_p_value, INTERVAL_KINDS) if p is not None), 1.0)
        labels_of[row, column] = labels_of[column, row] = "*" * (p_value < 0.05)
    limit = max(1.0, float(grid.abs().max()))
    image = axes.imshow(grid.numpy(), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    axes.figure.colorbar(image, ax=axes, shrink=0.8, label="points")
    for (row, column), mark in labels_of.items():
        points = float(grid[row, column])
        colour = "white" if abs(points) > 0.6 * limit else "black"
        axes.text(column, row, f"{points:+.1f}{mark}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title("row minus column (* p < 0.05, Holm)")


def _plot_episode(axes: Axes, episode: Episodes, query_labels: torch.Tensor) -> None:
    """Plot an episode's rows and prototypes along the two directions of most variance between prototypes."""
    prototypes = support_means(episode)[0].double()
    centre = prototypes.mean(dim=0)
    directions = torch.linalg.svd(prototypes - centre, full_matrices=False).Vh[:2]  # (at most 2, dim)
    if len(directions) < 2:  # a single feature
        directions = torch.cat([directions, torch.zeros_like(directions)])

    def point_at(rows: torch.Tensor) -> np.ndarray:
        return np.asarray((directions @ (rows.double() - centre).T).cpu())  # (2, n)

    colours = [f"C{label}" if label >= 0 else "grey" for label in query_labels.tolist()]
    x, y = point_at(episode.query[0])
    axes.scatter(x, y, c=colours, s=14, alpha=0.6, label="query" + ", open ones grey" * ("grey" in colours))
    x, y = point_at(episode.support[0])
    colours = [f"C{label}" for label in episode.support_labels[0].tolist()]
    # On top of the prototypes: a class's only support row is its prototype.
    axes.scatter(x, y, c=colours, marker="s", s=30, edgecolors="white", linewidths=0.6, zorder=3, label="support")
    x, y = point_at(prototypes)
    axes.scatter(x, y, c=[f"C{c}" for c in range(len(x))], marker="*", s=220, edgecolors="black", label="prototype")
    axes.set(title="the first episode, along its prototypes", xticks=[], yticks=[])
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3)  # below, where no row lies
