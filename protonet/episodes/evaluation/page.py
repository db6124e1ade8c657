"""The HTML report of an evaluation: one self-contained file with the numbers of the JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from protonet._text import count
from protonet.episodes.evaluation.evaluate import Scores
from protonet.episodes.evaluation.report import MEASURE_HEADINGS, explain_intervals, format_p_value
from protonet.episodes.evaluation.statistics import SIDE_MEASURES, ClassAccuracy, Evaluation, Rate, Summary
from protonet.ui.html import format_document
from protonet.ui.text import format_interval, to_percent

MAX_CLASSES_SHOWN = 100  #: At most this many classes are shown, the hardest first; the JSON file has all.
MIN_EPISODES_PER_CLASS = 20  #: Classes in fewer episodes are not shown, because their accuracies differ by chance.
QUANTILES = (0.05, 0.5, 0.95)  #: The quantiles of accuracies over episodes that are shown.
HISTOGRAM_BARS = 40  #: The number of bars of a histogram.


def format_page(evaluation: Evaluation) -> str:
    """Format an evaluation as an HTML page: tables, paired tests, accuracies by class and distributions."""
    summary = evaluation.summary
    methods, kinds, best = summary.methods, summary.interval_kinds, summary.order[0]
    rates = [method.accuracy for method in methods.values()]
    measures = ["auroc"] * bool(summary.settings["n_open_classes"])
    measures += [side for side in SIDE_MEASURES if side in methods[best].measures]
    against, pairs = summary.against, len(summary.comparisons)
    way, shot = ("-".join(map(str, dict.fromkeys(summary.settings[name]))) for name in ("way", "shot"))
    classes = [row for row in evaluation.by_class or () if row.episodes >= MIN_EPISODES_PER_CLASS]
    values = {
        "classes": [
            {"name": row.name, "accuracy": row.accuracy[best], "episodes": row.episodes}
            for row in sorted(classes, key=lambda row: row.accuracy[best])
        ],
        "evaluation": evaluation,
        "explain_intervals": explain_intervals,
        "family": count(pairs, "pair") if against is None else f"{count(pairs, 'comparison')} of {against}",
        "format_intervals": lambda rate: format_intervals(rate, kinds),
        "format_rates": format_rates,
        "format_value": format_value,
        "half_widths": format_half_widths,
        "intervals": [f"95 % interval over {kind}" for kind in kinds],
        "kind": f"{way}-way {shot}-shot",
        "limits": (
            max(0.0, min(rate.mean - rate.widest for rate in rates)),
            min(1.0, max(rate.mean + rate.widest for rate in rates)),
        ),
        "max_classes": MAX_CLASSES_SHOWN,
        "measured": {
            name: format_rates(method.measures[measure] for measure in measures) for name, method in methods.items()
        },
        "measures": [MEASURE_HEADINGS[measure].removesuffix(", %") for measure in measures],
        "min_episodes": MIN_EPISODES_PER_CLASS,
        "notes": evaluation.notes,
        "origin": list_origin(evaluation),
        "over": kinds,
        "p_values": [f"p over {kind} (Holm)" for kind in kinds],
        "pairs": list_pairs(summary),
        "queries": [int(evaluation.queries.min()), int(evaluation.queries.max())],
        "reach": max((abs(pair.difference) + pair.rate.widest for pair in summary.comparisons), default=0.0) or 1e-9,
        "shots": [f"{shot}-shot" for shot in methods[best].by_shot],
        "spreads": list_distributions(evaluation),
    }
    return format_document("episodes.html", evaluation.title, evaluation.describe(), "protonet.episodes", values)


def compute_class_accuracies(
    scores: Mapping[str, Scores], class_mask: Tensor, names: Sequence[str]
) -> list[ClassAccuracy]:
    """Compute for each class the mean accuracy of each method over the episodes that have the class.

    Args:
        scores: The scores of each method by name.
        class_mask: (episodes, classes) bool, whether each episode has each class.
        names: The names of the classes.

    Returns:
        One entry for each class that is in any episode, in the order of the classes.
    """
    inside = class_mask.double()
    counts = inside.sum(dim=0)  # (classes,)
    means = {name: (inside.T @ score.accuracy / counts).tolist() for name, score in scores.items()}
    return [
        ClassAccuracy(name, int(counts[at]), {method: mean[at] for method, mean in means.items()})
        for at, name in enumerate(names)
        if counts[at]
    ]


def format_half_widths(rate: Rate) -> str:
    """Format the half-widths of a rate's intervals in points, such as ", ±2.10, ±0.40"; that over classes is first.

    Half-widths that are NaN are left out.
    """
    return "".join(f", ±{100 * half:.2f}" for half in rate.half_widths)


def format_rates(rates: Iterable[Rate]) -> list[str]:
    """Format each rate in percent with the half-widths of its intervals; "" for a rate that is NaN."""
    return [to_percent(rate.mean, 2) + format_half_widths(rate) if rate.is_known else "" for rate in rates]


def format_intervals(rate: Rate, kinds: Sequence[str]) -> list[str]:
    """Format the 95 % intervals of a rate in percent, one for each of ``kinds``; "" for an interval that is NaN.

    ``kinds`` are of ``INTERVAL_KINDS``: over classes and over episodes.
    """
    halves = [rate.half_width(kind) for kind in kinds]
    return ["" if math.isnan(half) else format_interval((rate.mean - half, rate.mean + half), 2) for half in halves]


def list_pairs(summary: Summary) -> list[dict[str, object]]:
    """List the paired differences between methods as values for the page's template, the largest difference first.

    ``first`` is the more accurate method of a pair, or the method ``against`` that all others are compared with.
    """
    kinds, rows = summary.interval_kinds, []
    for pair in sorted(summary.comparisons, key=lambda pair: -abs(pair.difference)):
        names, lead = [pair.first, pair.second], pair.difference
        if summary.against is None and lead < 0:
            names, lead = names[::-1], -lead
        halves = [pair.rate.half_width(kind) for kind in kinds]
        row = {"first": names[0], "second": names[1], "lead": lead, "widest": pair.rate.widest}
        row["halves"] = ["" if math.isnan(half) else f"±{100 * half:.2f}" for half in halves]
        row["p_values"] = [format_p_value(pair.get_p_value(kind)) for kind in kinds]
        rows.append(row)
    return rows


def list_distributions(evaluation: Evaluation) -> list[dict[str, object]]:
    """Describe how each method's accuracy varies over episodes: histogram, mean, standard deviation and quantiles.

    Returns one dictionary per method for the page's template, the most accurate method first.
    """
    quantiles, rows = torch.tensor(QUANTILES, dtype=torch.float64), []
    for name in evaluation.summary.order:
        values = evaluation.accuracies[name]
        counts = (values * HISTOGRAM_BARS).long().clamp(max=HISTOGRAM_BARS - 1).bincount(minlength=HISTOGRAM_BARS)
        deviation = f"{100 * float(values.std()):.1f}" if len(values) > 1 else ""
        shown = {"name": name, "counts": counts.tolist(), "mean": float(values.mean()), "deviation": deviation}
        rows.append(shown | {"quantiles": torch.quantile(values, quantiles).tolist()})
    return rows


def list_origin(evaluation: Evaluation) -> dict[str, object]:
    """List the settings, versions and hashes that the results depend on, by their labels on the page."""
    return {
        **{f"setting {name.replace('_', '-')}": value for name, value in evaluation.summary.settings.items()},
        "SHA-256 of the rows, class by class": evaluation.data,
        **{f"version of {name}": value for name, value in evaluation.versions.items()},
        **{f"SHA-256 of {name}": value for name, value in evaluation.plugins.items()},
    }


def format_value(value: object) -> str:
    """Format the value of a setting as text, such as "yes" for True, and with commas between the items of lists."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_value(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, dict.fromkeys(map(str, value)))) or "none"
    return {"True": "yes", "False": "no"}.get(str(value), str(value))
