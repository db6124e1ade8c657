"""``protonet fit``: train a classifier on a table, cross-validate it, and save the model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from torch import Tensor

from protonet import report
from protonet._io import JsonDict, show_progress
from protonet._text import plural, to_printable
from protonet.commands.data import EncodedTable, encode_table
from protonet.commands.options import FitOptions, replace_argument_names, show_notes
from protonet.commands.rows import TableRows
from protonet.embeddings.pictures.files import split_backbone_spec
from protonet.embeddings.pictures.reading import path_to_text
from protonet.errors import raise_input_error, renamed_arguments
from protonet.fit.active import cluster_unknown
from protonet.fit.cross_validation import (
    CrossValidation,
    cross_validate,
    held_out_indices,
    measure_cross_validation,
    restore_row_counts,
    set_sample_counts,
)
from protonet.fit.duplicates import describe_near_duplicates, hash_rows
from protonet.fit.solver import TIME_LIMIT, Solution
from protonet.fit.training_set import TrainingSet
from protonet.pipeline import TablePipeline
from protonet.tables import DEFAULT_LABEL_COLUMN, features
from protonet.tables.table import ReadSpec, format_names, open_table
from protonet.ui.html import write_results
from protonet.ui.text import format_byte_count, format_column_types, format_probability_metrics, format_view_influences

#: Fraction of the time limit after which cross-validation stops, to leave time for the computations of a report.
MAX_TIME_FRACTION_BEFORE_REPORT = 0.8
#: Maximum number of groups of similar outliers among the unlabelled rows, and of rows of each group, to be printed.
MAX_LISTED_OUTLIER_GROUPS, MAX_LISTED_GROUP_ROWS = 5, 5
#: Fraction of the time limit, and of the progress bar, for model selection; cross-validation takes the remainder.
SOLVE_TIME_FRACTION = 0.6


class UnlabelledRows:
    """An iterable of the features of all unlabelled rows of ``fit``, in blocks (b, dim).

    The unlabelled rows of the training table come first, then those of the table at ``path``, if there is one. The
    object is false if there are no unlabelled rows.
    """

    def __init__(self, data: EncodedTable, options: FitOptions) -> None:
        self.data, self.path = data, options.unlabelled
        self.positions = list(data.unlabelled_positions)  #: The position in its file of each row that was read so far.
        if self.path is not None:
            width = data.x.shape[1] if data.encoding is None else len(data.encoding.columns)
            spec = ReadSpec(
                label_column=options.label or DEFAULT_LABEL_COLUMN,
                require_labels=False,
                columns=data.columns,
                n_features=width,
                ignored_columns=data.metadata.dropped_columns,
                for_training=True,
                missing_texts=data.missing_texts,
                no_header=options.no_header,
            )
            with renamed_arguments(path="unlabelled"):
                table = open_table(self.path, spec)
                self.table = features.convert_to_training_formats(table, data.encoding)

    def __bool__(self) -> bool:
        return self.path is not None or self.data.unlabelled is not None

    def __iter__(self) -> Iterator[Tensor]:
        if self.data.unlabelled is not None:
            yield self.data.unlabelled
        left_out = list[int]()
        with renamed_arguments(path="unlabelled"):
            for block in () if self.path is None else self.table.blocks:
                used, positions = features.split_uninformative_rows(block, self.data.encoding)
                left_out += positions
                self.positions += used.positions
                x = features.encode_block(self.table, used, self.data.encoding)
                yield torch.from_numpy(np.ascontiguousarray(x))
        if left_out and not self.positions:
            got = f"{plural(len(left_out), 'row')} without one"
            raise_input_error("unlabelled", "have rows with a readable cell", got, "Leave it out.")
        if self.path is not None:
            file = f" of {to_printable(self.path.name)}"
            self.data.notes.extend(features.describe_left_out_rows(left_out, self.table.position_format, file))

    def format_location(self, row: int) -> str:
        """Format the location in its file, such as "line 2", of unlabelled row ``row``, numbered in iteration order."""
        if row < len(self.data.unlabelled_positions) or self.path is None:
            return self.data.position_format.format(self.positions[row])
        return f"{self.table.position_format.format(self.positions[row])} of {to_printable(self.path.name)}"


def train(options: FitOptions, rows: TableRows) -> None:
    """Run ``fit``: train and cross-validate a classifier, print the results, and write the model if a path is given.

    The rows of the table were read and checked before torch was imported. Ctrl-C during model selection leaves the
    output file unchanged; during cross-validation, the model is written without its results.
    """
    limit, output, started = options.time_limit, options.output, time.monotonic() - rows.reading_seconds
    data = encode_table(options, rows, keep_cells=options.report is not None)
    early_notes = ["no model will be written: `output` names its file"] if output is None else []
    del rows
    name = path_to_text(options.table.name)
    unlabelled = UnlabelledRows(data, options)
    name_samples = None if data.class_name_rows is None else data.class_name_rows.count_class_samples(len(data.classes))

    deadline = math.inf if limit is None else started + limit
    model = None
    try:
        with show_progress(quiet=options.quiet) as show_stage:

            def show_part_progress(part: int, stage: str, fraction: float) -> None:
                show_notes(early_notes, quiet=options.quiet)  # not before an error about rows
                early_notes.clear()
                begin, length = ((0, SOLVE_TIME_FRACTION), (SOLVE_TIME_FRACTION, 1 - SOLVE_TIME_FRACTION))[part]
                show_stage(stage, begin + length * fraction)

            remaining = SOLVE_TIME_FRACTION * (deadline - time.monotonic())
            model, solution = TablePipeline.fit(
                data,
                unlabelled=unlabelled or None,
                time_limit=TIME_LIMIT if limit is None else max(0.0, remaining),
                seed=options.seed,
                progress=partial(show_part_progress, 0),
            )
            if data.groups is None and not data.has_group_columns:  # a note names columns that look like groups
                near_duplicates = describe_near_duplicates(solution.training_set.rows, "`group` NAME")
                data.notes.extend([] if near_duplicates is None else [f"warning: {near_duplicates}"])
            data.notes.extend(model.warn_cancelled_classes())
            data.notes.extend(warn_unevaluated_classes(data.classes, data.y, solution.training_set))
            until = deadline
            if limit is not None and options.report is not None:
                until = started + MAX_TIME_FRACTION_BEFORE_REPORT * limit
            cv = cross_validate(solution, deadline=until, progress=partial(show_part_progress, 1))
            in_time = time.monotonic() < until
        if data.weights is not None:
            cv = restore_row_counts(cv, data.y, data.weights, name_samples)
        groups, positions = data.map_group_names(solution), data.held_out_positions(solution)
        model = model.with_cross_validation(cv, groups, hash_rows(data.x), positions)
        if output is not None:
            model.save(output)
    except KeyboardInterrupt:
        if model is None or output is None:
            raise
        if data.weights is not None:
            samples = torch.tensor(data.class_counts)
            set_sample_counts(solution.network, samples if name_samples is None else samples + name_samples)
        model.save(output)
        facts = unlabelled_to_dict(solution, unlabelled, [])
        print(summarize_fit(name, data, model, solution, facts) + format_notes(data.notes), end="")
        lacking = "" if model.cross_validation is not None else " without cross-validation"
        raise KeyboardInterrupt(f"stopped; {output} was written{lacking}") from None
    try:
        facts = unlabelled_to_dict(solution, unlabelled, cluster_unknown(solution))
        print(summarize_fit(name, data, model, solution, facts))
        if options.verbose:
            print(format_view_influences(model.metadata.view_influences))
        compared = report.compare_with_baselines(cv, solution, model)
        shown, others = compared, compared[2:]
        if not options.verbose:  # the model, the most frequent class, and the best of the other baselines
            best = sorted(others, key=lambda baseline: -float(baseline[baseline["compared_by"]]))[:1]
            shown = [*compared[:2], *best]
        classes = list(map(to_printable, data.classes))
        print(format_evaluation(cv, shown, classes) + format_notes(data.notes), end="")
        if not in_time and len(cv.labels):
            print("time limit reached during cross-validation: the model may be better than these results")
        if options.json is not None or options.report is not None:
            notes = replace_argument_names(data.notes)
            table = report.table_to_dict(model, data.y, len(data.x), data.missing_counts, notes)
            results = report.fit_results_to_dict(name, table, model, cv, compared)
            results |= {"unlabelled": facts} if facts else {}
            if options.report is not None and len(cv.labels):
                with show_progress(quiet=options.quiet) as progress:
                    training_rows = report.LabelledCells(
                        labels=data.y,
                        indices=data.row_indices,
                        locations=list(map(data.position_format.format, data.positions)),
                        ids=data.row_ids,
                        column_names=model.column_names,
                        cells=data.cells,
                    )
                    results |= report.compute_fit_report_details(
                        training_rows, model, solution, cv, options.seed, deadline, progress
                    )
            write_results(results, json_path=options.json, report_path=options.report)
        print(format_next_step(output, options.representation))
    except KeyboardInterrupt:
        if output is None:
            raise
        raise KeyboardInterrupt(f"stopped; {output} was written") from None


def summarize_fit(name: str, data: EncodedTable, model: TablePipeline, solution: Solution, unlabelled: JsonDict) -> str:
    """Format a summary of the training table ``name``: its size, column types, duplicates and unlabelled rows."""
    counts = data.class_counts
    sizes = [plural(len(data.classes), "class"), plural(len(data.x), "sample"), plural(data.x.shape[1], "feature")]
    if data.encoding is not None and not data.encoding.is_fully_numeric:
        sizes[-1] += f" from {plural(len(data.encoding.columns), 'column')}"
    sizes += [plural(len(data.group_names), "group")] * (data.groups is not None)
    upper = "" if min(counts) == max(counts) else f" to {max(counts)}"
    lines = [f"{name}: {', '.join(sizes)}, {min(counts)}{upper} per class"]
    types = None if data.encoding is None else data.encoding.summary
    lines += [f"  {line}" for line in format_column_types(data.columns, types)]
    lines += summarize_duplicates_and_sample(solution.training_set)
    if data.class_name_rows is not None:
        total = f"each as {plural(round(data.class_name_rows.sample_count), 'sample')}"
        lines.append(f"the names of {plural(len(data.class_name_rows.labels), 'class')} are training samples, {total}")
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


def unlabelled_to_dict(solution: Solution, unlabelled: UnlabelledRows, outliers: Sequence[Sequence[int]]) -> JsonDict:
    """Convert the number, use and outliers of the unlabelled rows to a dict for JSON; empty without unlabelled rows."""
    pool, pooled = solution.training_set.unlabelled, solution.semi_supervised
    if pool is None or pooled is None:
        return {}
    before, after = (None, None) if pooled.held_out_losses is None else pooled.held_out_losses
    result: JsonDict = {"rows": pool.n_unlabelled, "sampled": len(pool.features), "used": pooled.uses_unlabelled}
    result |= {"log_loss_without": before, "log_loss_with": after, "decided": pooled.is_significant}
    return result | {"outlier_groups": [[unlabelled.format_location(row) for row in group] for group in outliers]}
