"""Summaries of a model: views, comparison to baselines, and confusions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.commands.figures import format_percent
from protonet.fit.networks import select_pooled_views
from protonet.fit.search import SelectedModel
from protonet.metrics import Sample, measure, measure_classes
from protonet.ui.text import format_table

#: The maximal number of pairs of classes shown as confusions.
MAX_CONFUSIONS = 5


def describe_views(choice: SelectedModel) -> dict[str, float]:
    """Compute the weight of each view of the network, the largest first."""
    views = choice.views if choice.pooling is None else select_pooled_views(choice.views)
    total = sum(weight for _, weight in views)
    ordered = sorted(views, key=lambda view: -view[1])
    return {specification.name: weight / total for specification, weight in ordered}


def compare_baselines(
    logits: Tensor, labels: Tensor, baselines: Mapping[str, Tensor], sample: Sample, *, balanced: bool
) -> list[dict[str, Any]]:
    """Compare a model with baselines on the same rows.

    Args:
        logits: (n, num_classes).
        labels: (n,) int64.
        baselines: Scores (n, num_classes) of each baseline.
        sample: The weights and groups of the rows.
        balanced: Whether to compare balanced accuracies.

    Returns:
        For "this model" and each baseline, dicts for JSON: accuracy, its interval, and balanced accuracy. For baselines
        also the ``difference`` of the model, paired by rows, with the half-width of its 95 % interval; "compared_by"
        names the metric of the difference.
    """
    correct, paired = (logits.argmax(dim=1) == labels).double(), sample
    if balanced:  # the mean over classes: rows are weighted inversely to the size of their class
        paired = sample._replace(weights=sample.weights / torch.bincount(labels, sample.weights)[labels])
    weights, measured = paired.weights / paired.weights.sum(), "balanced_accuracy" if balanced else "accuracy"
    results = []
    for name, scores in {"this model": logits, **baselines}.items():
        metrics = measure(scores, labels, sample)
        result = {"name": name, "accuracy": metrics.accuracy, "interval": metrics.interval}
        result |= {"balanced_accuracy": measure_classes(metrics.confusion).balanced_accuracy, "compared_by": measured}
        if name in baselines:
            difference = correct - (scores.argmax(dim=1) == labels).double()
            mean = float((weights * difference).sum())
            result |= {"difference": mean, "half_width": paired.half_width(difference)}
        results.append(result)
    return results


def format_baselines(compared: Sequence[Mapping[str, Any]]) -> str:
    """Format the results of `compare_baselines` as a table."""
    rows = [
        [
            result["name"],
            *format_percent(result["accuracy"], result["interval"]),
            f"{100 * result['balanced_accuracy']:.2f}",
            f"{100 * result['difference']:+.2f} ±{100 * result['half_width']:.2f}" if "difference" in result else "",
        ]
        for result in compared
    ]
    header = ["cross-validation", "accuracy, %", "95 % interval", "balanced accuracy, %", name_difference(compared)]
    return format_table(header, rows)


def name_difference(compared: Sequence[Mapping[str, Any]]) -> str:
    """Name the column of differences of `compare_baselines`."""
    balanced = any(result["compared_by"] == "balanced_accuracy" for result in compared)
    return f"{'balanced ' * balanced}difference to baseline, points"


def format_balance(confusion: Tensor, frequent: str | int, accuracy: float) -> str:
    """Format the balanced accuracy and the accuracy of the most frequent class.

    Args:
        confusion: (num_classes, num_classes) counts, rows are labels.
        frequent: The most frequent class of fit.
        accuracy: The accuracy of always predicting this class.
    """
    balanced = 100 * measure_classes(confusion).balanced_accuracy
    baseline = f"baseline, always {to_printable(frequent)} (the most frequent class of fit): {100 * accuracy:.2f} %"
    return f"balanced accuracy {balanced:.2f} %; {baseline}"


def format_confusions(confusion: Tensor, classes: Sequence[str | int]) -> str:
    """List the most frequent confusions; confusion (num_classes, num_classes) are counts, rows are labels."""
    wrong = confusion.clone().fill_diagonal_(0).flatten()
    lines = ["most frequent confusions:"]
    for index in wrong.argsort(descending=True, stable=True)[:MAX_CONFUSIONS].tolist():
        label, predicted = divmod(index, len(classes))
        if wrong[index] > 0:
            pair = f"{to_printable(classes[label])} predicted as {to_printable(classes[predicted])}"
            lines.append(f"  {pair}: {wrong[index]} of {confusion[label].sum()}")
    return "\n".join(lines) + "\n" if len(lines) > 1 else "no confusions\n"
