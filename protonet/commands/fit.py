"""``protonet fit``: train a classifier on a table, cross-validate it, and save the model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import torch
from torch import Tensor

from protonet import report
from protonet._io import JsonDict, show_progress
from protonet._text import plural, to_printable
from protonet.commands.options import FitOptions, replace_argument_names, show_notes
from protonet.commands.training import (
    SOLVE_TIME_FRACTION,
    count_class_names,
    count_stored_bytes,
    cross_validate_model,
    store_rows,
)
from protonet.embeddings.pictures.files import split_backbone_spec
from protonet.embeddings.pictures.reading import path_to_text
from protonet.files.metadata import TrainingMetadata
from protonet.fit.active import cluster_unknown
from protonet.fit.cross_validation import (
    CrossValidation,
    balanced_class_weights,
    held_out_indices,
    measure_cross_validation,
    set_sample_counts,
)
from protonet.fit.duplicates import describe_near_duplicates
from protonet.fit.search import FitProgress
from protonet.fit.solver import TIME_LIMIT, Solution
from protonet.fit.training_set import TrainingSet
from protonet.pipeline import TablePipeline
from protonet.tables import DEFAULT_LABEL_COLUMN
from protonet.tables.drift import compute_column_statistics
from protonet.tables.table import format_names
from protonet.tables.training import TrainingTable
from protonet.ui.html import write_results
from protonet.ui.text import (
    format_byte_count,
    format_column_types,
    format_probability_metrics,
    format_view_influences,
    warn_cancelled_classes,
)

#: Fraction of the time limit after which cross-validation stops, to leave time for the computations of a report.
MAX_TIME_FRACTION_BEFORE_REPORT = 0.8
#: Maximum number of groups of similar outliers among the unlabelled rows, and of rows of each group, to be printed.
MAX_LISTED_OUTLIER_GROUPS, MAX_LISTED_GROUP_ROWS = 5, 5


class FinishedFit(NamedTuple):
    """The results of a fit, which are printed and written."""

    table: TrainingTable
    model: TablePipeline
    solution: Solution
    cv: CrossValidation
    unlabelled: JsonDict  #: Facts about the unlabelled rows; empty without such rows.
    compared: Sequence[JsonDict]  #: The model, then baselines, with their held-out accuracy.


def train(options: FitOptions, table: TrainingTable, started: float) -> None:
    """Run ``fit``: train and cross-validate a classifier, print the results, and write the model if a path is given.

    The rows of the table were read and encoded since ``started``, a time of ``time.monotonic()``. Ctrl-C during model
    selection leaves the output file unchanged; during cross-validation, the model is written without its results.
    """
    limit, output = options.time_limit, options.output
    deadline = math.inf if limit is None else started + limit
    metadata = make_metadata(options, table)
    early_notes = ["no model will be written: `output` names its file"] if output is None else []
    if options.json is None and options.report is None:  # frees the memory of the cells
        table = replace(table, rows=table.rows._replace(columns=[]))
    if options.balanced:
        table = replace(table, weights=balanced_class_weights(table.y))
    with show_progress(quiet=options.quiet) as progress:

        def show_part(begin: float, length: float, stage: str, fraction: float) -> None:
            show_notes(early_notes, quiet=options.quiet)  # not before an error about rows
            early_notes.clear()
            progress(stage, begin + length * fraction)

        model, solution = TablePipeline.fit(
            table,
            metadata=metadata,
            time_limit=TIME_LIMIT if limit is None else max(0.0, SOLVE_TIME_FRACTION * (deadline - time.monotonic())),
            seed=options.seed,
            progress=partial(show_part, 0.0, SOLVE_TIME_FRACTION),
        )
        table.notes.extend(describe_training(table, model, solution))
        show_rest = partial(show_part, SOLVE_TIME_FRACTION, 1 - SOLVE_TIME_FRACTION)
        until = started + MAX_TIME_FRACTION_BEFORE_REPORT * (deadline - started) if options.report else deadline
        model, cv, in_time = cross_validate_and_save(options, table, model, solution, until, show_rest)
    try:
        facts = unlabelled_to_dict(solution, table.unlabelled_locations, cluster_unknown(solution))
        compared = report.compare_with_baselines(cv, solution, model)
        fit = FinishedFit(table, model, solution, cv, facts, compared)
        print_results(options, fit)
        if not in_time and len(cv.labels):
            print("time limit reached during cross-validation: the model may be better than these results")
        if options.json is not None or options.report is not None:
            write_reports(options, fit, deadline)
        if stored := count_stored_bytes(model):
            print(f"{plural(len(table.y), 'row')} stored for update, {format_byte_count(stored)} before compression")
        print(format_next_step(output, options.representation))
    except KeyboardInterrupt:
        if output is None:
            raise
        raise KeyboardInterrupt(f"stopped; {output} was written") from None


def list_dropped_columns(options: FitOptions, table: TrainingTable) -> tuple[str, ...]:
    """List the columns of the training table that are no features."""
    extra = [name for name in (options.group, options.id) if name is not None]
    return (*extra, *options.drop, *table.unused_columns, *table.dropped_columns)


def make_metadata(options: FitOptions, table: TrainingTable) -> TrainingMetadata:
    """Make the metadata of the model file: options, numbers of rows per class, and statistics of the columns."""
    without_cells = table.y[table.uninformative_mask]
    missing_texts = options.missing_values
    return TrainingMetadata(
        label_column=options.label or DEFAULT_LABEL_COLUMN,
        seed=options.seed,
        sample_counts=tuple(table.class_counts),
        group_column=options.group,
        id_column=options.id,
        dropped_columns=list_dropped_columns(options, table),
        position_format=table.rows.position_format,
        text_encoding=table.encoding_of_text,
        time_limit=options.time_limit,
        balanced=options.balanced,
        column_statistics=compute_column_statistics(table.rows.columns, table.encoding, table.class_counts)
        if len(table.x)
        else None,
        uninformative_counts=tuple(torch.bincount(without_cells, minlength=len(table.classes)).tolist())
        if len(without_cells)
        else (),
        missing_texts=None if missing_texts is None else tuple(missing_texts.split(",")),
    )


def describe_training(table: TrainingTable, model: TablePipeline, solution: Solution) -> list[str]:
    """Describe near-duplicates, and classes that the model never predicts or that cross-validation cannot evaluate."""
    notes = []
    known = {*table.y.tolist(), *([] if solution.class_names is None else solution.class_names.labels.tolist())}
    lost = [str(name) for label, name in enumerate(table.classes) if label not in known]
    if lost:
        notes.append(f"warning: never predicted, without rows or informative names: {format_names(lost)}")
    if table.groups is None and not table.has_group_columns:  # a note names columns that look like groups
        near_duplicates = describe_near_duplicates(solution.training_set.rows, "`group` NAME")
        notes += [] if near_duplicates is None else [f"warning: {near_duplicates}"]
    unevaluated = warn_unevaluated_classes(table.classes, table.y, solution.training_set)
    return [*notes, *warn_cancelled_classes(model.classes, model.network.has_zero_sum.tolist()), *unevaluated]


def cross_validate_and_save(
    options: FitOptions,
    table: TrainingTable,
    model: TablePipeline,
    solution: Solution,
    deadline: float,
    progress: FitProgress,
) -> tuple[TablePipeline, CrossValidation, bool]:
    """Cross-validate a model until ``deadline``, and write it; Ctrl-C writes it without cross-validation.

    Returns the model with the results, the cross-validation, and whether it ended in time.
    """
    output = options.output
    try:
        model, cv = cross_validate_model(table, model, solution, deadline, progress)
        in_time = time.monotonic() < deadline
        if options.store_rows:
            model = store_rows(model, table)
        if output is not None:
            model.save(output)
        return model, cv, in_time
    except KeyboardInterrupt:
        if output is None:
            raise
        if table.weights is not None:
            counts, name_counts = torch.tensor(table.class_counts), count_class_names(model, solution)
            set_sample_counts(solution.network, counts if name_counts is None else counts + name_counts)
        model.save(output)
        name, facts = path_to_text(options.table.name), unlabelled_to_dict(solution, [], [])
        print(summarize_fit(name, table, model, solution, facts) + format_notes(table.notes), end="")
        lacking = "" if model.cross_validation is not None else " without cross-validation"
        raise KeyboardInterrupt(f"stopped; {output} was written{lacking}") from None


def print_results(options: FitOptions, fit: FinishedFit) -> None:
    """Print the summary of the table, the results beside baselines, and notes; views and all baselines if verbose."""
    table, shown = fit.table, fit.compared
    print(summarize_fit(path_to_text(options.table.name), table, fit.model, fit.solution, fit.unlabelled))
    if options.verbose:
        print(format_view_influences(fit.model.metadata.view_influences, fit.solution.candidate_losses))
    else:  # the model, the most frequent class, and the best of the other baselines
        best = sorted(shown[2:], key=lambda baseline: -float(baseline[baseline["compared_by"]]))[:1]
        shown = [*shown[:2], *best]
    classes = list(map(to_printable, table.classes))
    print(format_evaluation(fit.cv, shown, classes) + format_notes(table.notes), end="")


def write_reports(options: FitOptions, fit: FinishedFit, deadline: float) -> None:
    """Write the results as JSON, as an HTML report, or as both."""
    table, model, solution, cv, unlabelled, compared = fit
    described = report.table_to_dict(model, table, replace_argument_names(table.notes))
    results = report.fit_results_to_dict(path_to_text(options.table.name), described, model, cv, compared)
    results |= {"unlabelled": unlabelled} if unlabelled else {}
    if options.report is not None and len(cv.labels):
        with show_progress(quiet=options.quiet) as progress:
            details = report.compute_fit_report_details(table, model, solution, cv, options.seed, deadline, progress)
            results |= details
    write_results(results, json_path=options.json, report_path=options.report)


def summarize_fit(
    name: str, data: TrainingTable, model: TablePipeline, solution: Solution, unlabelled: JsonDict
) -> str:
    """Format a summary of the training table ``name``: its size, column types, duplicates and unlabelled rows."""
    counts = data.class_counts
    sizes = [plural(len(data.classes), "class"), plural(len(data.x), "sample"), plural(data.x.shape[1], "feature")]
    if data.encoding is not None and not data.encoding.is_fully_numeric:
        sizes[-1] += f" from {plural(len(data.encoding.columns), 'column')}"
    sizes += [plural(len(data.group_names), "group")] * (data.groups is not None)
    upper = "" if min(counts) == max(counts) else f" to {max(counts)}"
    lines = [f"{name}: {', '.join(sizes)}, {min(counts)}{upper} per class"]
    types = None if data.encoding is None else data.encoding.summary
    lines += [f"  {line}" for line in format_column_types(data.rows.names, types)]
    lines += summarize_duplicates_and_sample(solution.training_set)
    if (names := solution.class_names) is not None:
        total = f"each as {plural(round(names.sample_count), 'sample')}"
        lines.append(f"the names of {plural(len(names.labels), 'class')} are training samples, {total}")
    if model.metadata.balanced:
        lines.append("all classes have equal weight in training and in the probabilities (--balanced)")
    if unlabelled:
        lines += summarize_unlabelled(unlabelled)
    return "\n".join(lines) + "\n"


def summarize_duplicates_and_sample(training_set: TrainingSet) -> list[str]:
    """Format a line about duplicate rows, if any, and a line about the random sample of a large table, if drawn."""
    lines = []
    if training_set.n_duplicates:
        rows = plural(training_set.n_duplicates, "row")
        lines.append(f"{rows} equal to others, or nearly: duplicates share a fold, and equal rows count once")
    if training_set.rows_per_sample > 1:
        n = len(training_set.rows.labels)
        distinct = round(n * training_set.rows_per_sample)
        sample = f"a sample of {n:,} of {distinct:,} distinct rows is used"
        lines.append(f"{sample}, with the class frequencies of all rows")
    return lines


def format_notes(notes: Sequence[str]) -> str:
    """Format notes and warnings about the training table, one line each."""
    return "".join(f"{note}\n" for note in replace_argument_names(notes))


def format_next_step(path: Path | None, representation: Sequence[str] | None) -> str:
    """Format the last printed line: the size of the written model and a ``predict`` command for it.

    The command repeats the pretrained encoders that the user named by local paths.
    """
    if path is None:
        return "no model was written: pass -o FILE.protonet"
    size = format_byte_count(path.stat().st_size)
    moved = [quote(name) for name in representation or () if Path(split_backbone_spec(name)[0]).exists()]
    more = f" --representation {' '.join(moved)}" if moved else ""
    return f"{path}: {size}; next: protonet predict {quote(str(path))} NEW.csv -o predicted.csv{more}"


def warn_unevaluated_classes(classes: Sequence[str | int], y: Tensor, training_set: TrainingSet) -> list[str]:
    """Format warnings about classes that cross-validation cannot evaluate, because they have no held-out row."""
    rows, fold = training_set.rows, held_out_indices(training_set) >= 0
    labels = rows.labels if rows.is_class_name is None else rows.labels[~rows.is_class_name]
    distinct, evaluated = (torch.bincount(part, minlength=len(classes)) for part in (labels, y[fold]))
    missing = (distinct > 0) & (evaluated == 0)
    if not bool(evaluated.any()):
        return []
    reasons = {
        "only one distinct row, which stays in every training set": missing & (distinct == 1),
        "none of their rows is held out": missing & (distinct > 1),
    }
    names = {reason: [str(classes[k]) for k in mask.nonzero().flatten()] for reason, mask in reasons.items()}
    return [f"not evaluated: {format_names(some)}: {reason}" for reason, some in names.items() if some]


def summarize_unlabelled(unlabelled: JsonDict) -> list[str]:
    """Format the result of `unlabelled_to_dict` as lines of text."""
    rows, outliers = unlabelled["rows"], unlabelled["outlier_groups"]
    sampled = f", a random sample of {unlabelled['sampled']:,} of them" if unlabelled["sampled"] < rows else ""
    losses = "no held-out rows to compare on"
    if unlabelled["log_loss_with"] is not None:
        losses = "log-loss in cross-validation {log_loss_without:.3f} without them, {log_loss_with:.3f} with them"
        losses = losses.format_map(unlabelled)
        losses += "" if unlabelled["decided"] else "; within one standard error: undecided"
    used = "used in training" if unlabelled["used"] else "not used"
    lines = [f"{plural(rows, 'unlabelled row')}{sampled}: {used} ({losses})"]
    if outliers:
        sizes = [str(len(group)) for group in outliers[:MAX_LISTED_OUTLIER_GROUPS]]
        listed = ", ".join(sizes[:-1]) + " and " * (len(sizes) > 1) + sizes[-1]
        lines.append(f"possible new classes: {plural(len(outliers), 'group')} of {listed} unlabelled rows:")
        for group in outliers[:MAX_LISTED_OUTLIER_GROUPS]:
            lines.append(f"  {', '.join(group[:MAX_LISTED_GROUP_ROWS])}, ...")
    return lines


def format_evaluation(cv: CrossValidation, comparisons: Sequence[JsonDict], classes: Sequence[str | int]) -> str:
    """Format the results of cross-validation as text, with a table that compares the model with baselines."""
    if not len(cv.labels):
        return "no cross-validation: no class has two distinct rows\n"
    metrics, frequent = measure_cross_validation(cv), comparisons[1]
    rows = plural(round(float(cv.weights.sum())), "row")
    text = report.format_baselines(comparisons)
    if frequent["difference"] <= 0:
        text += f"warning: the model is not more accurate than the {frequent['name']}\n"
    n_folds = len(cv.fold_models)
    method = "hold-out validation" if n_folds == 1 else f"{n_folds}-fold cross-validation"
    text += f"{method} on {rows}: {format_probability_metrics(vars(metrics))}"
    return text + report.format_confusions(metrics.confusion, classes)


def unlabelled_to_dict(solution: Solution, locations: Sequence[str], outliers: Sequence[Sequence[int]]) -> JsonDict:
    """Convert the number, use and outliers of the unlabelled rows to a dict for JSON; empty without unlabelled rows.

    ``locations`` say where each unlabelled row is in its file.
    """
    pool, pooled = solution.training_set.unlabelled, solution.semi_supervised
    if pool is None or pooled is None:
        return {}
    before, after = (None, None) if pooled.held_out_losses is None else pooled.held_out_losses
    result: JsonDict = {"rows": pool.n_unlabelled, "sampled": len(pool.features), "used": pooled.uses_unlabelled}
    result |= {"log_loss_without": before, "log_loss_with": after, "decided": pooled.is_significant}
    return result | {"outlier_groups": [[locations[row] for row in group] for group in outliers]}
