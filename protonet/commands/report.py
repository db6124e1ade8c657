"""What evaluate tells: figures of all classes and of each, and of rows of classes that the model does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from protonet._text import to_printable
from protonet.commands.figures import MOST_CLASSES, format_losses, format_share, list_names
from protonet.commands.summary import compare_baselines, format_balance, format_pairs
from protonet.fit.crossfit import FREQUENT, score_frequent
from protonet.metrics import ClassMetrics, Metrics, Sample, find_auroc, measure, measure_classes, score_known
from protonet.ui.text import count, format_table


class Report(NamedTuple):
    """How a model does on a table."""

    name: str  #: Of the table.
    classes: Sequence[str | int]  #: That the model knows.
    metrics: Metrics  #: Of the rows of these classes.
    compared: list[dict[str, Any]]  #: With what naming the most frequent class of fit gives; see `compare_baselines`.
    frequent: str | int  #: That class.
    by_class: ClassMetrics
    strange: Mapping[str, int]  #: The rows of each class that the model does not know.
    auroc: float | None  #: Of the rejection score, rows of known classes against the others; None without others.


def judge(
    name: str,
    classes: Sequence[str | int],
    counts: Tensor,
    logits: Tensor,
    labels: Tensor,
    strange: Mapping[str, int],
    *,
    balanced: bool,
) -> Report:
    """Judge a model on a table.

    Args:
        name: Of the table.
        classes: That the model knows.
        counts: (num_classes,) int64: the rows of each that it was fitted to.
        logits: (n, num_classes).
        labels: (n,) int64, -1 for a class that the model does not know; one row at least has another.
        strange: The rows of each such class.
        balanced: As of `compare_baselines`.
    """
    known = labels >= 0
    metrics = measure(logits[known], labels[known])
    scores = score_known(logits)
    auroc = find_auroc(scores[known], scores[~known]) if strange else None
    rows = int(known.sum())
    frequent = {FREQUENT: score_frequent(counts, rows)}
    compared = compare_baselines(logits[known], labels[known], frequent, Sample.of(rows), balanced=balanced)
    most = classes[int(counts.argmax())]
    return Report(name, classes, metrics, compared, most, measure_classes(metrics.confusion), strange, auroc)


def format_report(report: Report) -> str:
    """Return what a person should know, in lines."""
    right, interval = format_share(report.metrics.accuracy, report.metrics.interval)
    rows = count(int(report.by_class.rows.sum()), "row")
    lines = [f"{report.name}: {right} % of {rows} right, 95 % interval {interval}"]
    lines.append(format_balance(report.metrics.confusion, report.frequent, report.compared[1]["accuracy"]))
    if report.auroc is not None:
        names = list_names(list(map(to_printable, report.strange)))
        others = f"{count(sum(report.strange.values()), 'row')} of {count(len(report.strange), 'unknown class')}"
        lines.append(f"and {others} ({names}): AUROC {100 * report.auroc:.1f} % of known rows against these")
    lines.append(format_losses(report.metrics._asdict()) + "\n" + format_classes(report.by_class, report.classes))
    return "\n".join(lines) + format_pairs(report.metrics.confusion, report.classes)


def format_classes(by_class: ClassMetrics, classes: Sequence[str | int]) -> str:
    """Return a table of the classes that have a row or are predicted, the lowest F1 first where they are many."""
    there = ((by_class.rows + by_class.predicted) > 0).nonzero().flatten().tolist()
    shown = there
    if len(there) > MOST_CLASSES:
        shown = sorted(there, key=lambda number: float(by_class.f1[number]))[:MOST_CLASSES]
    columns = [by_class.recall, by_class.precision, by_class.f1]
    rows = [
        [
            to_printable(classes[at]),
            str(int(by_class.rows[at])),
            *(f"{100 * float(column[at]):.2f}" for column in columns),
        ]
        for at in shown
    ]
    means = [f"{100 * mean:.2f}" for mean in by_class.macro.values()]
    rows.append([f"mean of {len(there)}", str(int(by_class.rows.sum())), *means])
    text = format_table(["class", "rows", "recall, %", "precision, %", "F1, %"], rows)
    if len(shown) < len(there):
        text += f"{len(shown)} of {count(len(there), 'class')} shown, the lowest F1 first; --json writes all\n"
    return text


def list_figures(name: str, classes: Sequence[str | int], metrics: Metrics) -> dict[str, Any]:
    """Return all figures of judged rows as JSON can hold them; shares of 1, as `protonet.metrics` gives them."""
    own = measure_classes(metrics.confusion)
    by_class = [
        {"name": each, **{field: getattr(own, field)[at].item() for field in ClassMetrics._fields}}
        for at, each in enumerate(classes)
    ]
    figures: dict[str, Any] = {"table": name, "rows": int(own.rows.sum()), **metrics._asdict()}
    figures |= {"confusion": metrics.confusion.tolist(), "balanced_accuracy": own.balanced_accuracy}
    return figures | {"mean": own.macro, "classes": by_class}


def list_report(report: Report) -> dict[str, Any]:
    """Return all figures of a report, as `list_figures`, with the rows of classes that the model does not know."""
    unknown = {"rows": sum(report.strange.values()), "classes": dict(report.strange), "auroc": report.auroc}
    figures = list_figures(report.name, report.classes, report.metrics)
    return {**figures, "baselines": report.compared, "unknown": unknown}
