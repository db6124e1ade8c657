"""The report of an evaluation in the browser: one file without network, whose figures are those of ``--json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protonet._writing import write_text
from protonet.episodes.evaluation.evaluate import Scores
from protonet.episodes.evaluation.report import MEASURES, explain_intervals, list_summary_interval_kinds, show_p
from protonet.episodes.evaluation.statistics import (
    SIDE_MEASURES,
    ClassAccuracy,
    Evaluation,
    Rate,
    Summary,
    get_half_width,
)
from protonet.ui.page.charts import draw_interval, draw_spread
from protonet.ui.page.html import (
    Markup,
    Section,
    Tile,
    format_document,
    join,
    name_class,
    paragraph,
    percent,
    span,
    table,
    tag,
)
from protonet.ui.page.report import MAX_NAME
from protonet.ui.text import count

#: Classes that are shown, at the most, the hardest first; the JSON has all.
MAX_CLASSES_SHOWN = 100
#: Classes in fewer episodes differ from others by chance.
MIN_EPISODES_PER_CLASS = 20
#: The quantiles of accuracies over episodes that are shown.
QUANTILES = (0.05, 0.5, 0.95)


def write_page(path: Path, title: str, notes: Sequence[str], evaluation: Evaluation) -> None:
    """Write the report.

    Args:
        path: Of the file.
        title: A line on the evaluated data, episodes and seed.
        notes: Further lines.
        evaluation: With the classes of `list_classes`.

    Raises:
        OSError: The file cannot be written.
    """
    write_text(path, format_page(title, notes, evaluation))


def format_page(title: str, notes: Sequence[str], evaluation: Evaluation) -> str:
    """Return the report as HTML."""
    summary = evaluation.summary
    several = len(next(iter(summary.methods.values())).by_shot) > 1
    sections = [
        ("methods", "How often each method is right", format_methods(summary)),
        ("pairs", "Which method is ahead", format_pairs(summary)) if summary.comparisons else None,
        ("episodes", "From episode to episode", format_episodes(evaluation)),
        ("shots", "By the number of shots", format_shots(summary)) if several else None,
        ("classes", "Which classes are hard", format_classes(evaluation)),
        ("sampled", "How episodes were sampled", format_sampling(evaluation)),
        ("data", "Data, settings and versions", format_data(notes, evaluation)),
    ]
    shown: list[Section] = [section for section in sections if section is not None]
    return format_document(title, list_tiles(evaluation), shown, evaluation.describe(), "protonet.episodes")


def list_classes(scores: Mapping[str, Scores], class_mask: Tensor, names: Sequence[str]) -> list[ClassAccuracy]:
    """Compute the accuracy of each method in the episodes that have a class, for each class.

    Args:
        scores: Of each method, on the same episodes.
        class_mask: (episodes, classes) bool, the classes of each episode.
        names: The names of the classes.
    """
    inside = class_mask.double()
    counts = inside.sum(dim=0)  # (classes,)
    means = {name: (inside.T @ score.accuracy / counts).tolist() for name, score in scores.items()}
    return [
        ClassAccuracy(name, int(counts[at]), {method: mean[at] for method, mean in means.items()})
        for at, name in enumerate(names)
        if counts[at]
    ]


def list_tiles(evaluation: Evaluation) -> list[Tile]:
    """List the main results: the best accuracy, and the numbers of methods, episodes and classes."""
    summary = evaluation.summary
    best = summary.order[0]
    accuracy = summary.methods[best].accuracy
    return [
        ("best accuracy", percent(accuracy.mean, 2), f"{best}{format_half_widths(accuracy)}"),
        ("methods", f"{len(summary.methods)}", None),
        ("episodes", f"{summary.n_episodes:,}", f"{describe_kind(summary)}"),
        ("classes", f"{evaluation.n_classes:,}", f"the {summary.settings['side']} side"),
    ]


def describe_kind(summary: Summary) -> str:
    """Return the kind of episodes in a few words."""
    way, shot = ("-".join(map(str, dict.fromkeys(summary.settings[name]))) for name in ("way", "shot"))
    return f"{way}-way {shot}-shot"


def format_half_widths(rate: Rate) -> str:
    """Format the half-widths of a rate's intervals in percentage points, over classes first."""
    return "".join(f", ±{100 * half:.2f}" for half in rate.halves)


def draw_half(value: float, half: float, low: float, high: float) -> Markup:
    """Return a value with its interval, for a cell of a table."""
    return draw_interval(value, (value - half, value + half), low, high)


def format_methods(summary: Summary) -> Markup:
    """Return accuracy, calibration and open classes of each method."""
    methods = summary.methods
    measures = ["auroc"] * bool(summary.settings["n_open_classes"])
    measures += [side for side in SIDE_MEASURES if side in next(iter(methods.values())).measures]
    over = list_summary_interval_kinds([summary])
    rates = [method.accuracy for method in methods.values()]
    low = max(0.0, min(rate.mean - rate.widest for rate in rates))
    high = min(1.0, max(rate.mean + rate.widest for rate in rates))
    rows = []
    for name in summary.order:
        method = methods[name]
        rate, error = method.accuracy, method.calibration_error
        row = [name_class(name, longest=MAX_NAME), percent(rate.mean, 2)]
        row += [_format_interval(rate.mean, get_half_width(rate, kind)) for kind in over]
        row += [draw_half(rate.mean, rate.widest, low, high), "" if error is None else percent(error)]
        others = (method.measures[measure] for measure in measures)
        rows.append(row + [percent(other.mean, 2) + format_half_widths(other) for other in others])
    header = ["method", "accuracy", *(f"95 % interval over {kind}" for kind in over)]
    header += [f"{percent(low)} to {percent(high)}", "calibration error"]
    header += [MEASURES[measure].removesuffix(", %") for measure in measures]
    paragraphs = [
        "Accuracy is the fraction of queries that a method classifies correctly, averaged over episodes.",
        "The calibration error is that of the method's own probabilities, the softmax of its logits.",
    ]
    parts = [paragraph(" ".join(paragraphs)), table(header, rows, "Methods", numbers=1)]
    return join([*parts, paragraph(explain_intervals(summary), soft=True)] if over else parts)


def _format_interval(mean: float, half: float) -> str:
    """Format an interval in per cent; "" if it is unknown."""
    return "" if math.isnan(half) else span((mean - half, mean + half), 2)


def format_pairs(summary: Summary) -> Markup:
    """Return the paired differences, the largest first; who is ahead is named first, or the one compared with all."""
    pairs, against = summary.comparisons, summary.against
    over = list_summary_interval_kinds([summary])
    reach = max(abs(pair.difference) + pair.rate.widest for pair in pairs) or 1e-9
    rows = []
    for pair in sorted(pairs, key=lambda pair: -abs(pair.difference)):
        turned = against is None and pair.difference < 0
        first, second = (pair.second, pair.first) if turned else (pair.first, pair.second)
        lead = -pair.difference if turned else pair.difference
        named = join([name_class(first, longest=MAX_NAME), " over ", name_class(second, longest=MAX_NAME)])
        halves = [get_half_width(pair, kind) for kind in over]
        cells: list[Markup | str] = ["" if math.isnan(half) else f"±{100 * half:.2f}" for half in halves]
        cells.append(draw_half(lead, pair.rate.widest, -reach, reach))
        rows.append([named, f"{100 * lead:+.2f}", *cells, *(show_p(pair.get_p_value(kind)) for kind in over)])
    family = count(len(pairs), "pair") if against is None else f"{count(len(pairs), 'comparison')} of {against}"
    paragraphs = [
        "Differences are paired by episode, in points: all methods have the same rows.",
        "If an interval contains 0, the difference may be due to chance.",
        f"p-values are of paired t tests, adjusted by Holm for {family}.",
    ]
    header = ["", "points", *(f"95 % interval over {kind}" for kind in over), "around 0"]
    header += [f"p over {kind} (Holm)" for kind in over]
    parts = [paragraph(" ".join(paragraphs)), table(header, rows, "Paired differences", numbers=1)]
    return join([*parts, paragraph(explain_intervals(summary), soft=True)] if over else parts)


def format_episodes(evaluation: Evaluation) -> Markup:
    """Format the distribution of accuracies over episodes."""
    accuracies, rows = evaluation.accuracies, []
    for name in evaluation.summary.order:
        values = accuracies[name]
        spread = f"{100 * float(values.std()):.1f}" if len(values) > 1 else ""
        quantiles = torch.quantile(values, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
        drawn = draw_spread(values.tolist(), float(values.mean()))
        rows.append([name_class(name, longest=MAX_NAME), drawn, *map(percent, quantiles), spread])
    paragraphs = [
        "The distribution of accuracies over episodes; the line across is the mean.",
        "One episode in twenty is below the 5 % column, and one in twenty above the 95 % one.",
        "The intervals above are of the mean, and much narrower.",
    ]
    header = ["method", "0 to 100 %", "5 %", "median", "95 %", "standard deviation, points"]
    return join([paragraph(" ".join(paragraphs)), table(header, rows, "Episodes", numbers=2)])


def format_shots(summary: Summary) -> Markup:
    """Return the accuracy on classes of each number of shots."""
    shots = list(next(iter(summary.methods.values())).by_shot)
    rows = []
    for name in summary.order:
        rates = summary.methods[name].by_shot.values()
        cells = (percent(rate.mean, 2) + format_half_widths(rate) if rate.is_known else "" for rate in rates)
        rows.append([name_class(name, longest=MAX_NAME), *cells])
    header = ["method", *(f"{shot}-shot" for shot in shots)]
    shown = table(header, rows, "By shots", numbers=1)
    return join(
        [paragraph("Accuracy on queries of classes by their number of support rows, with 95 % intervals."), shown]
    )


def format_classes(evaluation: Evaluation) -> Markup:
    """Return the episodes of each class, the hardest first."""
    best, by_class = evaluation.summary.order[0], evaluation.by_class or ()
    classes = [row for row in by_class if row.episodes >= MIN_EPISODES_PER_CLASS]
    if not classes:
        return paragraph(
            f"None of {count(len(by_class), 'class')} is in {MIN_EPISODES_PER_CLASS} episodes: too few for a table."
        )
    shown = sorted(classes, key=lambda row: row.accuracy[best])[:MAX_CLASSES_SHOWN]
    mean = evaluation.summary.methods[best].accuracy.mean
    ends = [mean, *(row.accuracy[best] for row in shown)]
    low, high = min(ends), max(ends)
    rows = [
        [
            name_class(row.name, longest=MAX_NAME),
            percent(row.accuracy[best]),
            f"{100 * (row.accuracy[best] - mean):+.1f}",
            draw_half(row.accuracy[best], 0.0, low, high),
            f"{row.episodes:,}",
        ]
        for row in shown
    ]
    paragraphs = [
        f"The accuracy of {best} in the episodes that have a class, over queries of all classes,",
        "lowest first. Episodes have several classes, so that differences between classes are larger than shown.",
    ]
    header = ["class", "accuracy", "to all episodes, points", f"{percent(low)} to {percent(high)}", "episodes"]
    parts = [paragraph(" ".join(paragraphs)), table(header, rows, "Classes", numbers=1)]
    if len(shown) < len(by_class):
        few = f"those in {MIN_EPISODES_PER_CLASS} episodes or more" if len(classes) < len(by_class) else "the hardest"
        parts.append(paragraph(f"{len(shown)} of {count(len(by_class), 'class')}, {few}; --json has all.", soft=True))
    return join(parts)


def format_sampling(evaluation: Evaluation) -> Markup:
    """Describe how episodes were drawn."""
    summary = evaluation.summary
    settings = summary.settings
    if "kind" in settings:
        lines = [
            f"{summary.n_episodes:,} episodes are drawn with the seed {settings['seed']}: {settings['kind']}.",
            "They are the same for all methods, and again with the same seed, data and setting.",
        ]
        return tag("ul", *(tag("li", line) for line in lines), class_="notes")
    shared = "as many of each" if settings["imbalance"] is None else f"by Dirichlet shares of {settings['imbalance']:g}"
    fewest, largest = int(evaluation.queries.min()), int(evaluation.queries.max())
    queries = f"{fewest}" if fewest == largest else f"{fewest} to {largest}"
    low, high = settings["shot"]
    lines = [
        f"{summary.n_episodes:,} episodes, {describe_kind(summary)}, are drawn with the seed {settings['seed']}.",
        "They are the same for all methods, and again with the same seed, data and setting.",
        f"An episode's classes are different ones of {evaluation.n_classes:,}, those of the {settings['side']} side.",
        "The rows of a class in an episode are different ones: no query is a support row.",
        f"Queries: {queries} an episode, {settings['query']} a class on average, {shared}.",
    ]
    if low < high:
        scope = "for each class" if settings["unequal"] else "once per episode"
        lines.append(f"{low} to {high} shots, all equally likely, are sampled {scope}.")
    if settings["n_open_classes"]:
        lines.append(
            f"Queries of {count(settings['n_open_classes'], 'class')} outside each episode are to be detected."
        )
    if settings["target_half_width"]:
        lines.append(
            f"It was to stop once all intervals over episodes were within {settings['target_half_width']:g} points."
        )
    return tag("ul", *(tag("li", line) for line in lines), class_="notes")


def format_data(notes: Sequence[str], evaluation: Evaluation) -> Markup:
    """List the settings, versions and hashes that the results depend on."""
    named = {
        **{f"setting {name.replace('_', '-')}": value for name, value in evaluation.summary.settings.items()},
        "SHA-256 of the rows, class by class": evaluation.data,
        **{f"version of {name}": value for name, value in evaluation.versions.items()},
        **{f"SHA-256 of {name}": value for name, value in evaluation.plugins.items()},
    }
    rows = [[name_class(name, longest=MAX_NAME), tag("span", format_value(value))] for name, value in named.items()]
    parts = [paragraph("Runs that share all of these have the same episodes, and give the same results.")]
    if notes:
        parts.append(tag("ul", *(tag("li", note) for note in notes), class_="notes"))
    for tuning in evaluation.tuning:
        parts.append(paragraph("Tuned on validation classes: ", format_value(tuning.describe())))
    return join([*parts, table(["", "value"], rows, "Settings")])


def format_value(value: Any) -> str:
    """Format a setting as text."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_value(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, dict.fromkeys(map(str, value)))) or "none"
    return {"True": "yes", "False": "no"}.get(str(value), str(value))
