"""Compute the results of ``fit`` and ``evaluate`` as dicts for JSON and the HTML report, and format them as text."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from protonet._io import JsonDict
from protonet._text import plural, shorten_list, to_printable
from protonet.fit.cross_validation import (
    MOST_FREQUENT_CLASS,
    CrossValidation,
    held_out_indices,
    measure_cross_validation,
    predict_baselines,
    predict_held_out,
    repeat_cross_validation,
    score_class_frequencies,
)
from protonet.fit.diagnostics import extrapolate_accuracy, measure_learning_curve, rank_columns_by_importance
from protonet.fit.search import FitProgress, ignore_progress
from protonet.fit.solver import Solution
from protonet.metrics import (
    ClassMetrics,
    EvaluationSample,
    Metrics,
    compute_auroc,
    compute_class_metrics,
    compute_metrics,
    score_known_class,
    score_label_errors,
    sum_confidence_bins,
    wilson_interval,
)
from protonet.pipeline import TablePipeline
from protonet.tables.columns.encoding import Encoding, list_fitted_columns
from protonet.tables.columns.parsing import format_cells
from protonet.tables.training import TrainingTable
from protonet.ui.text import MAX_LISTED_CLASSES, format_probability_metrics, format_table, format_with_interval

#: Maximum number of class pairs in the printed list of the most frequent confusions.
MAX_LISTED_CONFUSIONS = 5


def compare_baselines(
    logits: Tensor, labels: Tensor, baselines: Mapping[str, Tensor], sample: EvaluationSample, *, balanced: bool
) -> list[JsonDict]:
    """Compare the accuracy of a model with the accuracy of baselines on the same labelled rows, as dicts for JSON.

    Args:
        logits: (n, num_classes) logits of the model.
        labels: (n,) int64, class indices.
        baselines: The logits (n, num_classes) of each baseline, by name.
        sample: The weights and groups of the rows, by which confidence intervals are computed.
        balanced: Whether the model is compared by balanced accuracy instead of accuracy.

    Returns:
        The results of the model, then of each baseline. The dict of a baseline also has the paired "difference" of the
            model and the baseline, the "half_width" of its 95 % interval, and "compared_by", the metric of both.
    """
    correct, paired = (logits.argmax(dim=1) == labels).double(), sample
    if balanced:  # the mean over classes: rows are weighted inversely to the size of their class
        paired = sample._replace(weights=sample.weights / torch.bincount(labels, sample.weights)[labels])
    weights, measured = paired.weights / paired.weights.sum(), "balanced_accuracy" if balanced else "accuracy"
    results = []
    for name, scores in {"this model": logits, **baselines}.items():
        is_baseline = name in baselines
        used = sample._replace(accuracy_gain=0.0, accuracy_gain_error=0.0) if is_baseline else sample
        metrics = compute_metrics(scores, labels, used)
        result = {"name": name, "accuracy": metrics.accuracy, "interval": metrics.interval}
        accuracy = compute_class_metrics(metrics.confusion).balanced_accuracy
        result |= {"balanced_accuracy": accuracy, "compared_by": measured}
        if is_baseline:
            difference = correct - (scores.argmax(dim=1) == labels).double()
            mean = float((weights * difference).sum())
            result |= {"difference": mean, "half_width": paired.mean_half_width(difference)}
        results.append(result)
    return results


def format_baselines(comparisons: Sequence[JsonDict]) -> str:
    """Format the results of `compare_baselines` as a text table."""
    rows = [
        [
            result["name"],
            *format_with_interval(result["accuracy"], result["interval"]),
            f"{100 * result['balanced_accuracy']:.2f}",
            f"{100 * result['difference']:+.2f} ±{100 * result['half_width']:.2f}" if "difference" in result else "",
        ]
        for result in comparisons
    ]
    balanced = any(result["compared_by"] == "balanced_accuracy" for result in comparisons)
    difference = f"{'balanced ' * balanced}difference to baseline, points"
    header = ["cross-validation", "accuracy, %", "95 % interval", "balanced accuracy, %", difference]
    return format_table(header, rows)


def format_confusions(confusion: Tensor, classes: Sequence[str | int]) -> str:
    """Format the most frequent pairs of label and wrong prediction, one line each.

    ``confusion`` (num_classes, num_classes) has counts by label and by predicted class.
    """
    cells = confusion.nonzero()  # of thousands of classes, few pairs occur
    cells = cells[cells[:, 0] != cells[:, 1]]
    order = confusion[cells[:, 0], cells[:, 1]].argsort(descending=True, stable=True)
    lines = ["most frequent confusions:"]
    for label, predicted in cells[order[:MAX_LISTED_CONFUSIONS]].tolist():
        pair = f"{to_printable(classes[label])} predicted as {to_printable(classes[predicted])}"
        lines.append(f"  {pair}: {confusion[label, predicted]} of {confusion[label].sum()}")
    return "\n".join(lines) + "\n" if len(lines) > 1 else "no confusions\n"


def evaluate_to_dict(
    name: str, model: TablePipeline, logits: Tensor, labels: Tensor, unknown_labels: Mapping[str, int]
) -> JsonDict:
    """Compute the metrics of a model on the labelled table ``name``, as a dict for JSON.

    Args:
        name: The name of the table.
        model: The evaluated model.
        logits: (n, num_classes) logits.
        labels: (n,) int64, class indices; -1 for classes that the model does not know.
        unknown_labels: The number of rows of each class that the model does not know, by class name.
    """
    known, counts = labels >= 0, torch.tensor(model.sample_counts)
    metrics, scores, rows = compute_metrics(logits[known], labels[known]), score_known_class(logits), int(known.sum())
    auroc = compute_auroc(scores[known], scores[~known]) if unknown_labels else None
    frequent, balanced = score_class_frequencies(counts, rows), model.metadata.balanced
    baselines, sample = {MOST_FREQUENT_CLASS: frequent}, EvaluationSample.with_defaults(rows)
    compared = compare_baselines(logits[known], labels[known], baselines, sample, balanced=balanced)
    others = {"rows": sum(unknown_labels.values()), "classes": dict(unknown_labels), "auroc": auroc}
    return {**metrics_to_dict(name, model.classes, metrics), "baselines": compared, "unknown": others}


def format_evaluate_results(results: JsonDict, most_frequent_class: str | int) -> str:
    """Format the result of `evaluate_to_dict` as text, with the most frequent class of the training rows."""
    accuracy, interval = format_with_interval(results["accuracy"], results["interval"])
    rows, unknown, names = results["rows"], results["unknown"], [entry["name"] for entry in results["classes"]]
    lines = [f"{results['table']}: accuracy {accuracy} % on {plural(rows, 'row')}, 95 % interval {interval}"]
    baseline = f"baseline, always {to_printable(most_frequent_class)} (the most frequent class of fit)"
    lines.append(f"balanced accuracy {100 * results['balanced_accuracy']:.2f} %; {baseline}: ")
    lines[-1] += f"{100 * results['baselines'][1]['accuracy']:.2f} %"
    if unknown["auroc"] is not None:
        listed = shorten_list(map(to_printable, unknown["classes"]))
        others = f"{plural(unknown['rows'], 'row')} of {plural(len(unknown['classes']), 'unknown class')} ({listed})"
        lines.append(f"{others}: AUROC {100 * unknown['auroc']:.1f} % of the rejection score")
    lines += [format_probability_metrics(results), format_class_metrics(results)]
    return "\n".join(lines) + format_confusions(torch.tensor(results["confusion"]), names)


def format_class_metrics(results: JsonDict) -> str:
    """Format a table of recall, precision and F1 of each class, given the result of `evaluate_to_dict`.

    If there are more than `MAX_LISTED_CLASSES` classes, only the classes with the lowest F1 are shown.
    """
    names = ("recall", "precision", "f1")
    occurring = [entry for entry in results["classes"] if entry["rows"] + entry["predicted"]]
    shown = occurring
    if len(occurring) > MAX_LISTED_CLASSES:
        shown = sorted(occurring, key=lambda entry: float(entry["f1"]))[:MAX_LISTED_CLASSES]
    means = {"name": f"mean of {len(occurring)}", "rows": results["rows"], **results["mean"]}
    rows = [
        [to_printable(entry["name"]), str(entry["rows"]), *(f"{100 * entry[name]:.2f}" for name in names)]
        for entry in (*shown, means)
    ]
    text = format_table(["class", "rows", "recall, %", "precision, %", "F1, %"], rows)
    if len(shown) < len(occurring):
        text += f"{len(shown)} of {plural(len(occurring), 'class')} shown, the lowest F1 first; --json writes all\n"
    return text


def metrics_to_dict(name: str, classes: Sequence[str | int], metrics: Metrics) -> JsonDict:
    """Convert the overall metrics and the metrics of each class to a dict for JSON; ``name`` is the table's name."""
    measured = compute_class_metrics(metrics.confusion)
    by_class = [
        {"name": name, **{field: getattr(measured, field)[label].item() for field in ClassMetrics._fields}}
        for label, name in enumerate(classes)
    ]
    results: JsonDict = {"table": name, "rows": int(measured.rows.sum()), **vars(metrics)}
    results |= {"confusion": metrics.confusion.tolist(), "balanced_accuracy": measured.balanced_accuracy}
    return results | {"mean": measured.macro_averages, "classes": by_class}


#: Number of bins of the histogram as which `project_logits` arranges the rows if there are only two classes.
N_HISTOGRAM_BINS = 48


def project_logits(logits: Tensor) -> Tensor:
    """Project logits (n, num_classes) to points (n, 2) float64 in [-1, 1] for a scatter plot, by principal components.

    Logits are projected, not embeddings, because embeddings of different cross-validation networks are not comparable.
    Up to two classes have a single component. It is binned, and rows in the same bin are stacked, as in a histogram.
    """
    rows = torch.where(logits > torch.finfo(logits.dtype).min, logits, 0.0).double()
    rows = rows - rows.mean(dim=1, keepdim=True)
    rows = rows - rows.mean(dim=0)
    directions = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -2:].flip(1)  # (num_classes, at most 2)
    signs = directions.sum(dim=0).sign()
    points: Tensor = rows @ (directions * torch.where(signs == 0, 1.0, signs))
    scale = points.abs().amax().clamp_min(1e-12)
    if logits.shape[1] > 2:
        return points / scale
    x = points[:, 0] / scale
    bins = ((x + 1) / 2 * N_HISTOGRAM_BINS).long().clamp(max=N_HISTOGRAM_BINS - 1)
    counts, order = bins.bincount(minlength=N_HISTOGRAM_BINS), bins.argsort(stable=True)
    heights = torch.empty_like(x)
    heights[order] = (torch.arange(len(x)) - (counts.cumsum(0) - counts)[bins[order]]).double()  # ranks in their bins
    return torch.stack([x, 2 * heights / counts.max().clamp_min(2).sub(1) - 1], dim=1)


#: Number of bins of the reliability diagram. The calibration error has more, but each bin here is drawn.
N_RELIABILITY_BINS = 10
#: Maximum number of rows whose predictions the report has, and of suspicious labels that it lists.
MAX_REPORTED_PREDICTIONS, MAX_LISTED_LABEL_ERRORS = 2000, 100
#: Maximum number of columns that the report shows of a row, and of characters that it shows of a cell.
MAX_SHOWN_COLUMNS, MAX_SHOWN_CELL_LENGTH = 6, 40
#: Approximate number of predictions to compute column importance, and time limit of the learning curve in seconds.
MAX_IMPORTANCE_PREDICTIONS, MAX_LEARNING_CURVE_SECONDS = 100_000, 60.0


def columns_to_dicts(names: Sequence[str], encoding: Encoding | None, missing_counts: Sequence[int]) -> list[JsonDict]:
    """Convert columns to dicts for JSON, each with the name, the type and the number of missing cells of a column."""
    types = [column.summary() for column in list_fitted_columns(encoding, len(names))]
    return [
        {"name": name, "type": re.sub(r", \S+ % missing$", "", column_type), "missing": total}
        for name, column_type, total in zip(names, types, missing_counts, strict=True)
    ]


def table_to_dict(model: TablePipeline, table: TrainingTable, notes: Sequence[str]) -> JsonDict:
    """Describe a table by a dict for JSON: its rows, the rows of each class that the model knows, columns and notes."""
    counts = torch.bincount(table.y[table.y >= 0], minlength=len(model.classes)).tolist()
    classes = [{"name": name, "rows": total} for name, total in zip(model.classes, counts, strict=True)]
    columns = columns_to_dicts(model.column_names, model.encoding, table.missing_counts)
    return {"rows": len(table.y), "classes": classes, "columns": columns, "notes": list(notes)}


def compute_reliability(logits: Tensor, labels: Tensor) -> list[JsonDict]:
    """Compute a reliability diagram of logits (n, num_classes): a dict for JSON for each bin of confidence with rows.

    Each dict has the bounds of the bin, and the number, mean confidence and accuracy (with interval) of its rows.
    """
    confidence, predicted = logits.double().softmax(dim=1).max(dim=1)
    bins = sum_confidence_bins(confidence, predicted == labels, N_RELIABILITY_BINS)
    return [
        {
            "low": index / N_RELIABILITY_BINS,
            "high": (index + 1) / N_RELIABILITY_BINS,
            "rows": int(n),
            "confidence": total / n,
            "accuracy": correct / n,
            "interval": wilson_interval(correct / n, n),
        }
        for index, (n, total, correct) in enumerate(bins.tolist())
        if n
    ]


def rank_suspicious_labels(table: TrainingTable, logits: Tensor) -> list[JsonDict]:
    """List the rows whose labels are most probably wrong, as dicts for JSON, the most probable first.

    The ``logits`` (n, num_classes) are computed without the labels; in ``fit``, they are the mean of repeated
    cross-validations.
    """
    scores, p, labels = score_label_errors(logits, table.y), logits.double().softmax(dim=1), table.y.tolist()
    ids = table.ids
    other = p.scatter(1, table.y[:, None], -1.0).max(dim=1)
    order = scores.argsort(descending=True, stable=True)[:MAX_LISTED_LABEL_ERRORS].tolist()
    return [
        {
            "index": table.rows.row_indices[row],
            "location": table.rows.format_location(row),
            "id": None if ids is None else ids[row],
            "label": labels[row],
            "label_probability": float(p[row, labels[row]]),
            "suggested": int(other.indices[row]),
            "suggested_probability": float(other.values[row]),
            "score": float(scores[row]),
        }
        for row in order
    ]


def collect_predictions(table: TrainingTable, logits: Tensor, column_order: Sequence[int]) -> JsonDict:
    """Collect the rows, predictions and points of the report's scatter plot, as lists for JSON with an entry per row.

    The ``logits`` (n, num_classes) are of networks that were not trained on the rows. More than
    `MAX_REPORTED_PREDICTIONS` rows are reduced: half of the remaining rows are the most likely label errors, the other
    half are evenly spaced in the table. Only cells of the first `MAX_SHOWN_COLUMNS` columns of ``column_order`` are
    included.
    """
    total, points = len(table.y), project_logits(logits)
    if total > MAX_REPORTED_PREDICTIONS:
        ranked = score_label_errors(logits, table.y).argsort(descending=True, stable=True).tolist()
        half = MAX_REPORTED_PREDICTIONS // 2
        others = sorted(ranked[half:])
        chosen = np.sort([*ranked[:half], *others[:: -(-len(others) // half)]])
        table, logits, points = table.select_rows(chosen), logits[chosen], points[chosen]
    p, predicted = logits.double().softmax(dim=1).max(dim=1)
    points = points / points.abs().amax().clamp_min(1e-12)
    shown, rows = column_order[:MAX_SHOWN_COLUMNS] if table.rows.columns else [], table.rows
    texts = [[str(cell)[:MAX_SHOWN_CELL_LENGTH] for cell in format_cells(rows.columns[column])] for column in shown]
    return {
        "total": total,
        "index": list(rows.row_indices),
        "location": list(map(rows.format_location, range(len(table.y)))),
        "id": table.ids,
        "label": table.y.tolist(),
        "predicted": predicted.tolist(),
        "probability": [round(probability, 6) for probability in p.tolist()],
        "x": [round(x, 4) for x in points[:, 0].tolist()],
        "y": [round(y, 4) for y in points[:, 1].tolist()],
        "columns": [f"column {column}" if rows.names is None else rows.names[column] for column in shown],
        "cells": texts,
    }


def compute_importance(
    cv: CrossValidation,
    column_names: Sequence[str],
    n_features_per_column: Sequence[int],
    seed: int,
    deadline: float,
    progress: FitProgress,
) -> JsonDict | None:
    """Compute the permutation importance of each column by `rank_columns_by_importance`.

    Returns None if the ``deadline``, a time of ``time.monotonic()``, passed or an embedding overflowed.
    """

    def check_deadline(stage: str, fraction: float) -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError
        progress(stage, fraction)

    generator = torch.Generator().manual_seed(seed)
    try:
        return rank_columns_by_importance(
            cv, column_names, n_features_per_column, generator, check_deadline, MAX_IMPORTANCE_PREDICTIONS
        )
    except (TimeoutError, FloatingPointError):
        return None


def compute_learning_curve(solution: Solution, cv: CrossValidation, deadline: float, progress: FitProgress) -> JsonDict:
    """Compute the learning curve: the held-out accuracy of models that are fitted to fewer rows per class.

    Returns:
        A dict for JSON: "points" has the accuracies by rows per class, and "twice" the accuracy that is extrapolated to
            twice as many rows as there are, or None if it cannot be extrapolated.
    """
    limit = min(deadline, time.monotonic() + MAX_LEARNING_CURVE_SECONDS)
    curve, sample = measure_learning_curve(solution, cv, deadline=limit, progress=progress), cv.evaluation_sample
    correct = curve.is_correct.double()
    accuracies = correct @ sample.weights / sample.weights.sum()
    points = [
        {"per_class": size, "accuracy": accuracy, "interval": sample.accuracy_interval(rows)}
        for size, accuracy, rows in zip(curve.rows_per_class, accuracies.tolist(), correct, strict=True)
    ]
    training = solution.training_set.rows
    twice = 2 * len(training.labels) / training.num_classes
    outlook = extrapolate_accuracy(curve, sample, twice)
    return {"points": points, "twice": None if outlook is None else {"per_class": twice, **outlook._asdict()}}


def compute_report_sections(
    table: TrainingTable, logits: Tensor, repeated_logits: Tensor, importance: JsonDict | None
) -> JsonDict:
    """Compute the sections that the reports of ``fit`` and ``evaluate`` share, as a dict for JSON.

    The ``logits`` (n, num_classes) are of networks that were not trained on the rows. ``repeated_logits`` of the same
    shape score the labels: in ``fit``, they are the mean of repeated cross-validations.
    """
    order = range(len(table.rows.columns))
    columns = order if importance is None else [column["index"] for column in importance["columns"]]
    return {
        "reliability": compute_reliability(logits, table.y),
        "wrong_labels": int((score_label_errors(repeated_logits, table.y) > 0).sum()),
        "suspects": rank_suspicious_labels(table, repeated_logits),
        "importance": importance,
        "predictions": collect_predictions(table, logits, columns),
    }


def compare_with_baselines(cv: CrossValidation, solution: Solution, model: TablePipeline) -> list[JsonDict]:
    """Evaluate the model, then its baselines, on the held-out rows, as dicts for JSON; [] without held-out rows."""
    if not len(cv.labels):
        return []
    balanced = model.metadata.balanced
    frequent = score_class_frequencies(torch.tensor(model.sample_counts), len(cv.labels))
    baselines = {MOST_FREQUENT_CLASS: frequent, **predict_baselines(solution.training_set)}
    return compare_baselines(predict_held_out(cv), cv.labels, baselines, cv.evaluation_sample, balanced=balanced)


def fit_results_to_dict(
    name: str, table: JsonDict, model: TablePipeline, cv: CrossValidation, comparisons: Sequence[JsonDict]
) -> JsonDict:
    """Convert the results of ``fit`` to a dict for JSON: the table and, if there are held-out rows, all metrics.

    ``table`` is the result of `table_to_dict` for the training table ``name``.
    """
    results: JsonDict = {"command": "fit", "table": name, "views": model.metadata.view_influences, "data": table}
    if not len(cv.labels):
        return results
    results |= metrics_to_dict(name, model.classes, measure_cross_validation(cv))
    return results | {"baselines": comparisons}


def compute_fit_report_details(
    table: TrainingTable,
    model: TablePipeline,
    solution: Solution,
    cv: CrossValidation,
    seed: int,
    deadline: float,
    progress: FitProgress = ignore_progress,
) -> JsonDict:
    """Compute the sections that only the HTML report of ``fit`` needs, as a dict for JSON.

    They include the column importance, by permutations with ``seed``, the learning curve and the suspicious labels.
    After ``deadline``, a time of ``time.monotonic()``, optional sections are left out.
    """
    held_out = held_out_indices(solution.training_set)
    evaluated = (held_out >= 0).nonzero().flatten()
    parts = iter(range(3))

    def start_next_part() -> FitProgress:
        part = next(parts)  # the parts take about equally long
        return lambda name, fraction: progress(name, (part + fraction) / 3)

    names, sizes = model.column_names, model.n_features_per_column
    importance = compute_importance(cv, names, sizes, seed, deadline, start_next_part())
    repeated = repeat_cross_validation(solution, cv, deadline=deadline, progress=start_next_part())
    learning = compute_learning_curve(solution, cv, deadline, start_next_part())
    rows, logits = held_out[evaluated], predict_held_out(cv)
    evaluated_rows = table.select_rows(evaluated.numpy())
    sections = compute_report_sections(evaluated_rows, logits[rows], repeated[rows], importance)
    return sections | {"learning": learning}
