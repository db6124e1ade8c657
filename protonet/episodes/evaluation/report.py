"""The report of an evaluation: summarise scores, and format the summary as text, LaTeX, a plot or an HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from protonet._io import write_atomically, write_text
from protonet._text import plural
from protonet._validation import check_type
from protonet.episodes.evaluation.evaluate import EpisodeScores
from protonet.episodes.evaluation.statistics import (
    GENERALIZED_MEASURES,
    OPEN_SET_MEASURES,
    Evaluation,
    EvaluationSummary,
    MeasureMean,
    MethodSummary,
    compare_method_pairs,
    list_interval_kinds,
)
from protonet.episodes.methods import Method
from protonet.episodes.methods.choice import METHOD_SETTINGS, ChosenMethod
from protonet.episodes.samplers.config import check_integer_range
from protonet.episodes.samplers.sampler import format_span
from protonet.errors import optional_packages
from protonet.metrics import calibration_error
from protonet.ui.html import format_document
from protonet.ui.text import format_interval, format_percent, format_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BALANCED = METHOD_SETTINGS[-1]
TextTable = tuple[Sequence[str], Sequence[Sequence[str]]]  #: A table of texts as a pair: the header, and the rows.
#: The LaTeX code of each special character.
LATEX_ESCAPES = {character: rf"\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    "±": r"$\pm$",
}
#: Matches a table cell with a number, which may have a sign, an exponent, half-widths or a rank in brackets.
NUMBER_CELL_PATTERN = re.compile(
    r"(?P<value>[<+-]?[\d.]+)(e(?P<sign>[+-])0*(?P<exponent>\d+))?(?P<halves>( ±[\d.]+)*)(?P<rank> \([\d.]+\))?"
)
#: The column heading of each measure beside the accuracy.
MEASURE_HEADINGS = {
    "auroc": "AUROC of open classes, %",
    "fpr95": "FPR at 95 %, %",
    "oscr": "OSCR, %",
    "base": "of base classes, %",
    "novel": "of novel classes, %",
    "harmonic": "harmonic mean, %",
}
#: Explanations of intervals and p-values over classes and episodes, over episodes alone, and over draws of the support.
INTERVAL_NOTES = {
    "both": "The first 95 % interval (±) and p-value apply to new classes of the same kind (jackknife over classes), "
    "the second to new episodes of these classes.",
    "episodes": "95 % intervals (±) and p-values apply to new episodes of these classes: those for new classes need "
    "some episodes that leave each class out, and the same number of classes in all.",
    "supports": "95 % intervals (±) and p-values apply to new draws of the support, of the same test split.",
}


def summarize(
    scores: Mapping[str, EpisodeScores],
    shot: tuple[int, int],
    settings: Mapping[str, Any] = MappingProxyType({}),
    class_mask: torch.Tensor | None = None,
    methods: Mapping[str, Method] = MappingProxyType({}),
) -> EvaluationSummary:
    """Summarise the scores of several methods: mean accuracies with intervals, further measures, and paired tests.

    Args:
        scores: The scores of each method by name, on the same episodes.
        shot: The smallest and the largest number of shots per class.
        settings: The settings of the evaluation, for the report. If there is a setting ``against``, it names the method
            that all others are compared with.
        class_mask: (episodes, classes) bool, whether each episode has each class. It is needed for intervals over
            classes; with None there are only intervals over episodes.
        methods: The methods by name, as `evaluate` takes them, for the report on which of them are transductive.

    Returns:
        The summary, for `format_report`.
    """
    check_type("scores", scores, Mapping, "a mapping from names to scores, from evaluate")
    shot = check_integer_range("shot", shot, low=1)
    summaries = {}
    for name, score in scores.items():
        method = methods.get(name)
        fields = dict(zip(OPEN_SET_MEASURES, OPEN_SET_MEASURES, strict=True))
        fields |= {} if score.harmonic_mean.isnan().any() else GENERALIZED_MEASURES
        shots = zip(range(shot[0], shot[1] + 1), score.accuracy_by_shot.unbind(1), strict=True)
        summaries[name] = MethodSummary(
            MeasureMean.from_values(score.accuracy, class_mask),
            calibration_error(score.confidence_bins),
            {name: MeasureMean.from_values(getattr(score, field), class_mask) for name, field in fields.items()},
            {n_shot: MeasureMean.from_values(column, class_mask) for n_shot, column in shots},
            method.setting if isinstance(method, ChosenMethod) else None,
        )
    accuracies = {name: score.accuracy for name, score in scores.items()}
    comparisons = compare_method_pairs(accuracies, class_mask, settings.get("against"))
    return EvaluationSummary(settings, len(next(iter(accuracies.values()))), summaries, comparisons)


def format_accuracy_heading(rates: Iterable[MeasureMean]) -> str:
    """Format the heading of a column of accuracies with half-widths of intervals: "accuracy, % ±classes ±episodes".

    The heading names only the intervals that at least one of the means has.
    """
    return " ".join(["accuracy, %", *(f"±{kind}" for kind in list_interval_kinds(rates))])


def format_evaluation(evaluation: Evaluation) -> str:
    """Format the results of an evaluation as text: title, notes, and the Markdown tables of `format_report`."""
    check_type("evaluation", evaluation, Evaluation, "an Evaluation, from evaluate_dataset")
    return "\n".join([evaluation.title, *evaluation.notes]) + "\n\n" + format_report(evaluation.summary)


def format_report(summary: EvaluationSummary) -> str:
    """Format a summary, from `summarize`, as Markdown tables with explanations of the numbers."""
    check_type("summary", summary, EvaluationSummary, "an EvaluationSummary, from summarize")
    text = "\n".join(format_table(*table) for table in format_summary_tables(summary))
    n_pairs, against = len(summary.comparisons), summary.reference_method
    if n_pairs:
        family = f"{n_pairs} pair{'s' * (n_pairs > 1)} of methods"
        if against is not None:
            family = f"{n_pairs} comparison{'s' * (n_pairs > 1)} of {against} with another"
        text += f"\nDifferences are paired by episode; p-values are of paired t tests, adjusted by Holm for {family}.\n"
    if summary.interval_kinds:
        text += f"{explain_intervals(summary)}\n"
    text += explain_settings(summary.methods.values())
    if any(method.calibration_error is None for method in summary.methods.values()):
        return text
    return text + "The calibration error is that of the method's own probabilities, the softmax of its logits.\n"


def explain_settings(methods: Iterable[MethodSummary]) -> str:
    """Return a text that explains the settings behind the names of methods; "" if none of them is transductive."""
    settings = {method.setting for method in methods if method.is_transductive}
    if not settings:
        return ""
    text = "Transductive methods classify all queries of an episode together"
    return text + ("; balanced ones assume equally many of each class.\n" if BALANCED in settings else ".\n")


def explain_intervals(summary: EvaluationSummary) -> str:
    """Return a text that explains which data the intervals and p-values of a summary apply to, such as new classes."""
    if summary.settings.get("protocol") == "fixed-split":
        return INTERVAL_NOTES["supports"]
    return INTERVAL_NOTES["both" if "classes" in summary.interval_kinds else "episodes"]


def format_summary_tables(summary: EvaluationSummary) -> list[TextTable]:
    """Format a summary as tables of texts, with numbers in percent.

    The first table has a row per method, the most accurate first. A second table has accuracies by number of shots, if
    this varies between classes. Differences are between the best method and each other method. If the settings name a
    method ``against``, they are between that method and each other method.
    """
    methods, order, against = summary.methods, summary.methods_by_accuracy, summary.reference_method
    best, several = order[0], len(order) > 1
    kinds = summary.interval_kinds
    heading = format_accuracy_heading(method.accuracy for method in methods.values())
    calibrated = all(method.calibration_error is not None for method in methods.values())
    further = methods[best].further_measures
    measures = [name for name in MEASURE_HEADINGS if name in further and further[name].is_known]
    header = ["method", heading]
    if several:
        header += [f"behind {best}" if against is None else f"{against} is ahead by"]
        header += [f"p over {kind} (Holm)" for kind in kinds]
    header += ["calibration error, %"] if calibrated else []
    header += [MEASURE_HEADINGS[measure] for measure in measures]
    rows = []
    for name in order:
        method = methods[name]
        row = [method.mark_name(name), format_mean(method.accuracy)]
        row += _format_difference(summary, against or best, name, signed=against is not None) if several else []
        if calibrated and method.calibration_error is not None:
            row.append(f"{100 * method.calibration_error:.1f}")
        rows.append(row + [format_mean(method.further_measures[measure]) for measure in measures])
    tables: list[TextTable] = [(header, rows)]
    shots = list(methods[best].accuracy_by_shot)
    # The table of accuracies by number of shots is left out if it had more columns than this.
    max_shot_columns = 20
    if 1 < len(shots) <= max_shot_columns:
        rows = [
            [methods[name].mark_name(name), *map(format_mean, methods[name].accuracy_by_shot.values())]
            for name in order
        ]
        tables.append(([heading, *(f"{n_shot}-shot" for n_shot in shots)], rows))
    return tables


def format_latex_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table of texts as LaTeX's ``tabular``, with horizontal rules of the package booktabs."""

    def format_line(cells: Sequence[str]) -> str:
        return "  " + " & ".join(map(format_latex_cell, cells)) + r" \\" + "\n"

    begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}" + "\n  \\toprule\n"
    body = "".join(map(format_line, rows))
    return f"{begin}{format_line(header)}  \\midrule\n{body}  \\bottomrule\n\\end{{tabular}}\n"


def format_latex_cell(cell: str) -> str:
    """Format the text of a table cell as LaTeX: a number in math mode, other text with escaped special characters."""
    match = NUMBER_CELL_PATTERN.fullmatch(cell)
    if match is None:
        return "".join(LATEX_ESCAPES.get(character, character) for character in cell)
    power = "" if match["sign"] is None else rf" \times 10^{{{match['sign'].strip('+')}{match['exponent']}}}"
    halves = match["halves"].replace("±", r"\pm ")
    return f"${match['value']}{power}{halves}${match['rank'] or ''}"


def write_tables(outputs: Mapping[str, Path], tables: Sequence[TextTable]) -> None:
    """Write tables as LaTeX to the path ``outputs["latex"]`` and as Markdown to ``outputs["markdown"]``, if present."""
    for kind, form in (("latex", format_latex_table), ("markdown", format_table)):
        if kind in outputs:
            write_text(outputs[kind], "\n".join(form(*table) for table in tables))


def format_mean(rate: MeasureMean) -> str:
    """Format a mean in percent with the half-widths of its intervals, such as "71.23 ±2.10 ±0.40"; "" if it is NaN."""
    return " ±".join(f"{100 * value:.2f}" for value in (rate.mean, *rate.known_half_widths)) if rate.is_known else ""


def _format_difference(summary: EvaluationSummary, best: str, name: str, *, signed: bool) -> list[str]:
    """Format the difference in accuracy, with a sign if ``signed``, and its p-values as cells; "" for equal methods."""
    for pair in summary.comparisons:
        if {pair.first, pair.second} == {best, name} and best != name:
            rate = pair.mean_difference if signed else replace(pair.mean_difference, mean=abs(pair.difference))
            text = ("+" if signed and rate.mean >= 0 else "") + format_mean(rate)
            return [text, *(format_p_value(pair.get_p_value(kind)) for kind in summary.interval_kinds)]
    return [""] * (1 + len(summary.interval_kinds))


def format_p_value(p_value: float | None) -> str:
    """Format a p-value with two digits; "" for None."""
    if p_value is None:
        return ""
    return "<1e-300" if p_value < 1e-300 else f"{p_value:.2g}"


def write_accuracy_figure(path: Path, summaries: Mapping[str, EvaluationSummary]) -> None:
    """Plot accuracies with intervals to a file, in one panel per summary; the keys are the panels' titles, or ""."""
    with optional_packages():
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    plot_panel_inches = 4.2  # the width of a panel of a figure, in inches
    height = max(0.7 * plot_panel_inches, 0.3 * max(len(summary.methods) for summary in summaries.values()))
    figure = Figure(figsize=(plot_panel_inches * len(summaries), height), layout="constrained")
    panels = figure.subplots(1, len(summaries), squeeze=False)[0]
    for axes, (title, summary) in zip(panels, summaries.items(), strict=True):
        _plot_accuracies(axes, summary.methods)
        axes.set_title(", ".join(filter(None, [title, axes.get_title()])), fontsize=8)
    form = path.suffix[1:].lower()
    metadata = {"CreationDate": None} if form == "pdf" else {}  # the same figure is the same file
    write_atomically(path, lambda file: figure.savefig(file, format=form, dpi=120, metadata=metadata))


def _plot_accuracies(axes: Axes, methods: Mapping[str, MethodSummary]) -> None:
    """Plot accuracies with 95 % intervals: as curves over the number of shots if it varies, otherwise by method."""
    shots = list(next(iter(methods.values())).accuracy_by_shot)
    over = [f"over {kind}" for kind in list_interval_kinds(method.accuracy for method in methods.values())[:1]]
    if len(shots) > 1:
        for position, (name, method) in enumerate(methods.items()):
            rates = method.accuracy_by_shot.values()
            values = [100 * rate.mean for rate in rates]
            halves = [100 * next(iter(rate.known_half_widths), 0.0) for rate in rates]
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
    halves = [100 * next(iter(methods[name].accuracy.known_half_widths), 0.0) for name in names]
    axes.errorbar(values, range(len(names)), xerr=halves, fmt="o", capsize=3)
    title = " ".join(["accuracy, 95 % intervals", *over])
    axes.set(xlabel="accuracy, %", title=title, yticks=range(len(names)), yticklabels=names)
    axes.grid(axis="x", alpha=0.3)


def format_evaluation_page(evaluation: Evaluation) -> str:
    """Format an evaluation as an HTML page: tables, paired tests and accuracies by class."""
    summary = evaluation.summary
    methods, kinds, best = summary.methods, summary.interval_kinds, summary.methods_by_accuracy[0]
    rates = [method.accuracy for method in methods.values()]
    measures = ["auroc"] * bool(summary.settings["n_open_classes"])
    measures += [side for side in GENERALIZED_MEASURES if side in methods[best].further_measures]
    against, pairs = summary.reference_method, len(summary.comparisons)
    way, shot = (format_span(summary.settings[name]) for name in ("way", "shot"))
    # It shows no classes in fewer episodes, because their accuracies differ by chance.
    min_episodes_per_class = 20
    classes = [row for row in evaluation.class_accuracies if row["episodes"] >= min_episodes_per_class]
    # The HTML page shows at most this many classes, the hardest first.
    max_classes_on_page = 100
    values = {
        "classes": [
            {**row, "accuracy": row["accuracy"][best]} for row in sorted(classes, key=lambda row: row["accuracy"][best])
        ],
        "evaluation": evaluation,
        "explain_intervals": explain_intervals,
        "family": plural(pairs, "pair") if against is None else f"{plural(pairs, 'comparison')} of {against}",
        "format_intervals": lambda rate: format_intervals(rate, kinds),
        "format_means": format_means,
        "format_value": format_setting_value,
        "half_widths": format_half_widths,
        "intervals": [f"95 % interval over {kind}" for kind in kinds],
        "kind": f"{way}-way {shot}-shot",
        "limits": (
            max(0.0, min(rate.mean - rate.widest_half_width for rate in rates)),
            min(1.0, max(rate.mean + rate.widest_half_width for rate in rates)),
        ),
        "max_classes": max_classes_on_page,
        "measured": {
            name: format_means(method.further_measures[measure] for measure in measures)
            for name, method in methods.items()
        },
        "measures": [MEASURE_HEADINGS[measure].removesuffix(", %") for measure in measures],
        "min_episodes": min_episodes_per_class,
        "notes": evaluation.notes,
        "origin": provenance_to_dict(evaluation),
        "over": kinds,
        "p_values": [f"p over {kind} (Holm)" for kind in kinds],
        "pairs": comparisons_to_dicts(summary),
        "queries": [int(evaluation.query_counts.min()), int(evaluation.query_counts.max())],
        "reach": max(
            (abs(pair.difference) + pair.mean_difference.widest_half_width for pair in summary.comparisons), default=0.0
        )
        or 1e-9,
        "shots": [f"{shot}-shot" for shot in methods[best].accuracy_by_shot],
    }
    return format_document(
        "episodes.html", evaluation.title, evaluation.to_dict(by_class=True), "protonet.episodes", values
    )


def compute_class_accuracies(
    scores: Mapping[str, EpisodeScores], class_mask: torch.Tensor, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Compute for each class the mean accuracy of each method over the episodes that have the class.

    Args:
        scores: The scores of each method by name.
        class_mask: (episodes, classes) bool, whether each episode has each class.
        names: The names of the classes.

    Returns:
        For each class that is in any episode its ``name``, the number of ``episodes`` that have it, and the mean
        ``accuracy`` of each method in these episodes.
    """
    inside = class_mask.double()
    counts = inside.sum(dim=0)  # (classes,)
    means = {name: (inside.T @ score.accuracy / counts).tolist() for name, score in scores.items()}
    return [
        {"name": name, "episodes": int(counts[at]), "accuracy": {method: mean[at] for method, mean in means.items()}}
        for at, name in enumerate(names)
        if counts[at]
    ]


def format_half_widths(rate: MeasureMean) -> str:
    """Format the half-widths of a mean's intervals over classes and episodes, in % points, such as ", ±2.10, ±0.40"."""
    return "".join(f", ±{100 * half:.2f}" for half in rate.known_half_widths)


def format_means(rates: Iterable[MeasureMean]) -> list[str]:
    """Format each mean in percent with the half-widths of its confidence intervals; "" for a mean that is NaN."""
    return [format_percent(rate.mean, 2) + format_half_widths(rate) if rate.is_known else "" for rate in rates]


def format_intervals(rate: MeasureMean, kinds: Sequence[str]) -> list[str]:
    """Format a mean's 95 % intervals over "classes" or "episodes" (``kinds``) in percent; "" for an unknown one."""
    halves = [rate.get_half_width(kind) for kind in kinds]
    return ["" if math.isnan(half) else format_interval((rate.mean - half, rate.mean + half), 2) for half in halves]


def comparisons_to_dicts(summary: EvaluationSummary) -> list[dict[str, object]]:
    """Convert the paired differences between methods to dictionaries for the HTML page, largest absolute one first."""
    kinds, rows = summary.interval_kinds, []
    for pair in sorted(summary.comparisons, key=lambda pair: -abs(pair.difference)):
        names, lead = [pair.first, pair.second], pair.difference
        if summary.reference_method is None and lead < 0:
            names, lead = names[::-1], -lead
        halves = [pair.mean_difference.get_half_width(kind) for kind in kinds]
        row = {"first": names[0], "second": names[1], "lead": lead, "widest": pair.mean_difference.widest_half_width}
        row["halves"] = ["" if math.isnan(half) else f"±{100 * half:.2f}" for half in halves]
        row["p_values"] = [format_p_value(pair.get_p_value(kind)) for kind in kinds]
        rows.append(row)
    return rows


def provenance_to_dict(evaluation: Evaluation) -> dict[str, object]:
    """Convert settings, versions and hashes that the results depend on to dictionaries for the HTML template."""
    return {
        **{f"setting {name.replace('_', '-')}": value for name, value in evaluation.summary.settings.items()},
        "SHA-256 of the rows, class by class": evaluation.data_hash,
        **{f"version of {name}": value for name, value in evaluation.versions.items()},
        **{f"SHA-256 of {name}": value for name, value in evaluation.plugin_versions.items()},
    }


def format_setting_value(value: object) -> str:
    """Format the value of a setting as text, such as "yes" for True, and with commas between the items of lists."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_setting_value(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_setting_value, dict.fromkeys(map(str, value)))) or "none"
    return {"True": "yes", "False": "no"}.get(str(value), str(value))
