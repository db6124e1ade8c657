"""What a person reads about a model: its views, how often it is right, and what it confuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.commands.figures import format_share
from protonet.fit.networks import leave_out
from protonet.fit.search import Choice
from protonet.metrics import Sample, measure, measure_classes
from protonet.ui.text import format_table

#: Most pairs of classes that are named as confused.
MOST_PAIRS = 5


def describe_views(choice: Choice) -> dict[str, float]:
    """Return the weight of each view that the network has, the largest first."""
    views = choice.views if choice.pooling is None else leave_out(choice.views)
    total = sum(weight for _, weight in views)
    ordered = sorted(views, key=lambda view: -view[1])
    return {specification.name: weight / total for specification, weight in ordered}


def compare_baselines(
    logits: Tensor, labels: Tensor, baselines: Mapping[str, Tensor], sample: Sample, *, balanced: bool
) -> list[dict[str, Any]]:
    """Return how often the model, and each baseline, is right on the same rows, as JSON can hold it.

    Args:
        logits: (n, num_classes).
        labels: (n,) int64.
        baselines: By name, scores (n, num_classes).
        sample: What the rows are.
        balanced: Whether the model is to lead by balanced accuracy.

    Returns:
        For "this model" and each baseline its accuracy, plain and balanced, and the model's lead in pairs, with the
        half-width of its 95 % interval, but for the model itself; "compared_by" names the accuracy that it leads by.
    """
    right, paired = (logits.argmax(dim=1) == labels).double(), sample
    if balanced:  # the mean over classes is one over rows that weigh as much less as their class has more
        paired = sample._replace(weights=sample.weights / torch.bincount(labels, sample.weights)[labels])
    shares, measured = paired.weights / paired.weights.sum(), "balanced_accuracy" if balanced else "accuracy"
    found = []
    for name, scores in {"this model": logits, **baselines}.items():
        metrics = measure(scores, labels, sample)
        lead = right - (scores.argmax(dim=1) == labels).double()
        mean, half = float((shares * lead).sum()), paired.find_half_width(lead)
        own = {"name": name, "accuracy": metrics.accuracy, "interval": metrics.interval}
        own |= {"balanced_accuracy": measure_classes(metrics.confusion).balanced_accuracy, "compared_by": measured}
        found.append({**own, "lead": mean, "half_width": half} if name in baselines else own)
    return found


def format_baselines(compared: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of what `compare_baselines` found."""
    rows = [
        [
            each["name"],
            *format_share(each["accuracy"], each["interval"]),
            f"{100 * each['balanced_accuracy']:.2f}",
            f"{100 * each['lead']:+.2f} ±{100 * each['half_width']:.2f}" if "lead" in each else "",
        ]
        for each in compared
    ]
    header = ["on rows held out", "right, %", "95 % interval", "balanced, %", f"{name_lead(compared)}, points"]
    return format_table(header, rows)


def name_lead(compared: Sequence[Mapping[str, Any]]) -> str:
    """Return what a column of `compare_baselines`'s leads is called."""
    balanced = any(each["compared_by"] == "balanced_accuracy" for each in compared)
    return f"this model's {'balanced ' * balanced}lead"


def format_balance(confusion: Tensor, frequent: str | int, share: float) -> str:
    """Return the balanced accuracy, beside which an accuracy is read, and what naming one class alone would give.

    Args:
        confusion: (num_classes, num_classes) as measured.
        frequent: The most frequent class of fit.
        share: How often it is right.
    """
    balanced = 100 * measure_classes(confusion).balanced_accuracy
    alone = f"the most frequent class of fit, {to_printable(frequent)}, alone: {100 * share:.2f} %"
    return f"balanced accuracy {balanced:.2f} %; {alone}"


def format_pairs(confusion: Tensor, classes: Sequence[str | int]) -> str:
    """Return the pairs of classes that are confused most often; confusion (num_classes, num_classes) as measured."""
    wrong = confusion.clone().fill_diagonal_(0).flatten()
    most = wrong.argsort(descending=True, stable=True)[:MOST_PAIRS].tolist()
    lines = ["most confused:"]
    for place in most:
        row, column = divmod(place, len(classes))
        if wrong[place] > 0:
            pair = f"{to_printable(classes[row])} taken for {to_printable(classes[column])}"
            lines.append(f"  {pair}: {wrong[place]} of {confusion[row].sum()}")
    return "\n".join(lines) + "\n" if len(lines) > 1 else "no class is taken for another\n"
