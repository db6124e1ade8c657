"""The HTML report of an evaluation: one self-contained file with the numbers of the JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from protonet._text import plural
from protonet.episodes.evaluation.evaluate import EpisodeScores
from protonet.episodes.evaluation.report import MEASURE_HEADINGS, explain_intervals, format_p_value
from protonet.episodes.evaluation.statistics import GENERALIZED_MEASURES, Evaluation, EvaluationSummary, MeasureMean
from protonet.episodes.samplers.sampler import format_span
from protonet.ui.html import format_document
from protonet.ui.text import format_interval, format_percent

MAX_CLASSES_SHOWN = 100  #: At most this many classes are shown, the hardest first; the JSON file has all.
MIN_EPISODES_PER_CLASS = 20  #: Classes in fewer episodes are not shown, because their accuracies differ by chance.


def format_evaluation_page(evaluation: Evaluation) -> str:
    """Format an evaluation as an HTML page: tables, paired tests and accuracies by class."""
    summary = evaluation.summary
    methods, kinds, best = summary.methods, summary.interval_kinds, summary.methods_by_accuracy[0]
    rates = [method.accuracy for method in methods.values()]
    measures = ["auroc"] * bool(summary.settings["n_open_classes"])
    measures += [side for side in GENERALIZED_MEASURES if side in methods[best].further_measures]
    against, pairs = summary.reference_method, len(summary.comparisons)
    way, shot = (format_span(summary.settings[name]) for name in ("way", "shot"))
    classes = [row for row in evaluation.class_accuracies or () if row["episodes"] >= MIN_EPISODES_PER_CLASS]
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
        "max_classes": MAX_CLASSES_SHOWN,
        "measured": {
            name: format_means(method.further_measures[measure] for measure in measures)
            for name, method in methods.items()
        },
        "measures": [MEASURE_HEADINGS[measure].removesuffix(", %") for measure in measures],
        "min_episodes": MIN_EPISODES_PER_CLASS,
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
    return format_document("episodes.html", evaluation.title, evaluation.to_dict(), "protonet.episodes", values)


def compute_class_accuracies(
    scores: Mapping[str, EpisodeScores], class_mask: Tensor, names: Sequence[str]
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
