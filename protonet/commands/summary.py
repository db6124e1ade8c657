"""What a person reads about a model: its views, how often it is right, and what it confuses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from protonet._checks import show
from protonet.commands.common import format_table
from protonet.fit.search import Choice
from protonet.metrics import NORMAL, Metrics, count_equal_rows, measure

#: Most pairs of classes that are named as confused.
MOST_PAIRS = 5


def describe_views(choice: Choice) -> dict[str, float]:
    """Return the weight of each view that was chosen, the largest first."""
    total = sum(weight for _, weight in choice.views)
    ordered = sorted(choice.views, key=lambda view: -view[1])
    return {specification.name: weight / total for specification, weight in ordered}


def format_views(views: Mapping[str, float]) -> str:
    """Return a table of the views and their weights."""
    return format_table(["view", "weight, %"], [[name, f"{100 * weight:.1f}"] for name, weight in views.items()])


def format_baselines(
    logits: Tensor, labels: Tensor, baselines: Mapping[str, Tensor], weights: Tensor | None = None
) -> str:
    """Return a table of accuracies on the same rows, the baselines' differences in pairs.

    Args:
        logits: (n, num_classes).
        labels: (n,) int64.
        baselines: By name, scores (n, num_classes).
        weights: (n,), as in `protonet.metrics.measure`.
    """
    right = (logits.argmax(dim=1) == labels).double()
    weights = torch.ones_like(right) if weights is None else weights
    shares = weights / weights.mean()
    rows = []
    for name, scores in {"this model": logits, **baselines}.items():
        metrics = measure(scores, labels, weights)
        lead = right - (scores.argmax(dim=1) == labels).double()
        mean = float((shares * lead).mean())
        spread = math.sqrt(float((shares * (lead - mean).square()).mean()))
        half = NORMAL * spread / math.sqrt(count_equal_rows(weights))
        difference = f"{100 * mean:+.2f} ±{100 * half:.2f}" if name in baselines else ""
        rows.append([name, *format_accuracy(metrics), difference])
    return format_table(["on rows held out", "right, %", "95 % interval", "this model's lead, points"], rows)


def format_accuracy(metrics: Metrics) -> tuple[str, str]:
    """Return an accuracy in per cent, and its interval."""
    low, high = (100 * bound for bound in metrics.interval)
    return f"{100 * metrics.accuracy:.2f}", f"[{low:.2f}, {high:.2f}]"


def format_losses(metrics: Metrics) -> str:
    """Return how good the probabilities are."""
    return f"log-loss {metrics.log_loss:.3f}, calibration error {100 * metrics.calibration_error:.1f} points\n"


def format_pairs(confusion: Tensor, classes: Sequence[str | int]) -> str:
    """Return the pairs of classes that are confused most often; confusion (num_classes, num_classes) as measured."""
    wrong = confusion.clone().fill_diagonal_(0).flatten()
    most = wrong.argsort(descending=True, stable=True)[:MOST_PAIRS].tolist()
    lines = ["most confused:"]
    for place in most:
        row, column = divmod(place, len(classes))
        if wrong[place] > 0:
            pair = f"{show(classes[row])} taken for {show(classes[column])}"
            lines.append(f"  {pair}: {wrong[place]} of {confusion[row].sum()}")
    return "\n".join(lines) + "\n" if len(lines) > 1 else "no class is taken for another\n"
