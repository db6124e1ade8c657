"""The results of ``protonet evaluate``: overall, per class, and on rows of unknown classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from protonet._text import to_printable
from protonet.commands.figures import MAX_LISTED_CLASSES, format_percent, format_probability_metrics, shorten_list
from protonet.commands.summary import compare_baselines, format_balance, format_confusions
from protonet.fit.crossfit import FREQUENT, score_frequent
from protonet.metrics import ClassMetrics, Metrics, Sample, compute_auroc, measure, measure_classes, score_known
from protonet.ui.text import count, format_table


class Report(NamedTuple):
    """The results of a model on a table."""

    name: str  #: The name of the table.
    classes: Sequence[str | int]  #: The known classes.
    metrics: Metrics  #: On the rows of known classes.
    compared: list[dict[str, Any]]  #: The model and the most frequent class of fit; see `compare_baselines`.
    frequent: str | int  #: The most frequent class of fit.
    by_class: ClassMetrics
    unknown: Mapping[str, int]  #: The number of rows of each unknown class.
    auroc: float | None  #: AUROC of the rejection score, known against unknown classes; None without unknown ones.


def make_report(
    name: str,
    classes: Sequence[str | int],
    counts: Tensor,
    logits: Tensor,
    labels: Tensor,
    unknown: Mapping[str, int],
    *,
    balanced: bool,
) -> Report:
    """Compute the results of a model on a table.

    Args:
        name: The name of the table.
        classes: The known classes.
        counts: (num_classes,) int64, training rows of each class.
        logits: (n, num_classes).
        labels: (n,) int64, -1 for unknown classes; at least one row has a known class.
        unknown: The number of rows of each unknown class.
        balanced: As in `compare_baselines`.
    """
    known = labels >= 0
    metrics = measure(logits[known], labels[known])
    scores = score_known(logits)
    auroc = compute_auroc(scores[known], scores[~known]) if unknown else None
    rows = int(known.sum())
    frequent = {FREQUENT: score_frequent(counts, rows)}
    compared = compare_baselines(logits[known], labels[known], frequent, Sample.of(rows), balanced=balanced)
    most_frequent = classes[int(counts.argmax())]
    return Report(name, classes, metrics, compared, most_frequent, measure_classes(metrics.confusion), unknown, auroc)


def format_report(report: Report) -> str:
    """Format the results for people."""
    accuracy, interval = format_percent(report.metrics.accuracy, report.metrics.interval)
    rows = count(int(report.by_class.rows.sum()), "row")
    lines = [f"{report.name}: accuracy {accuracy} % on {rows}, 95 % interval {interval}"]
    lines.append(format_balance(report.metrics.confusion, report.frequent, report.compared[1]["accuracy"]))
    if report.auroc is not None:
        names = shorten_list(list(map(to_printable, report.unknown)))
        others = f"{count(sum(report.unknown.values()), 'row')} of {count(len(report.unknown), 'unknown class')}"
        lines.append(f"{others} ({names}): AUROC {100 * report.auroc:.1f} % of the rejection score")
    lines.append(format_probability_metrics(report.metrics._asdict()))
    lines.append(format_classes(report.by_class, report.classes))
    return "\n".join(lines) + format_confusions(report.metrics.confusion, report.classes)


def format_classes(by_class: ClassMetrics, classes: Sequence[str | int]) -> str:
    """Format a table of the classes that occur or are predicted; of many, those of the lowest F1."""
    occurring = ((by_class.rows + by_class.predicted) > 0).nonzero().flatten().tolist()
    shown = occurring
    if len(occurring) > MAX_LISTED_CLASSES:
        shown = sorted(occurring, key=lambda label: float(by_class.f1[label]))[:MAX_LISTED_CLASSES]
    columns = [by_class.recall, by_class.precision, by_class.f1]
    rows = [
        [
            to_printable(classes[label]),
            str(int(by_class.rows[label])),
            *(f"{100 * float(column[label]):.2f}" for column in columns),
        ]
        for label in shown
    ]
    means = [f"{100 * mean:.2f}" for mean in by_class.macro.values()]
    rows.append([f"mean of {len(occurring)}", str(int(by_class.rows.sum())), *means])
    text = format_table(["class", "rows", "recall, %", "precision, %", "F1, %"], rows)
    if len(shown) < len(occurring):
        text += f"{len(shown)} of {count(len(occurring), 'class')} shown, the lowest F1 first; --json writes all\n"
    return text


def metrics_to_dict(name: str, classes: Sequence[str | int], metrics: Metrics) -> dict[str, Any]:
    """Convert all metrics to a dict for JSON; fractions are of 1."""
    measured = measure_classes(metrics.confusion)
    by_class = [
        {"name": name, **{field: getattr(measured, field)[label].item() for field in ClassMetrics._fields}}
        for label, name in enumerate(classes)
    ]
    results: dict[str, Any] = {"table": name, "rows": int(measured.rows.sum()), **metrics._asdict()}
    results |= {"confusion": metrics.confusion.tolist(), "balanced_accuracy": measured.balanced_accuracy}
    return results | {"mean": measured.macro, "classes": by_class}


def report_to_dict(report: Report) -> dict[str, Any]:
    """Convert a report to a dict for JSON: `metrics_to_dict`, the baselines, and the rows of unknown classes."""
    unknown = {"rows": sum(report.unknown.values()), "classes": dict(report.unknown), "auroc": report.auroc}
    results = metrics_to_dict(report.name, report.classes, report.metrics)
    return {**results, "baselines": report.compared, "unknown": unknown}
