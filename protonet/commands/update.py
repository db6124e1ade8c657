"""``protonet suggest`` and ``update``: suggest rows to label next, and add labelled rows to a model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protonet._io import open_locked, read_stamp, show_progress, write_text
from protonet._text import plural, shorten_list, to_printable
from protonet.commands.data import get_label_column, load_pipeline, read_cells, read_labelled_rows, read_table_to_label
from protonet.commands.options import N_DEFAULT_SUGGESTIONS, SuggestOptions, UpdateOptions, show_notes
from protonet.commands.rows import check_class_spellings
from protonet.commands.training import STORED_FEATURES, fit_again
from protonet.embeddings.pictures.reading import is_picture_path
from protonet.errors import raise_input_error
from protonet.fit.active import suggest_rows
from protonet.fit.cross_validation import CrossValidation, detect_label_conflicts, is_held_out_row, predict_held_out
from protonet.fit.duplicates import hash_rows
from protonet.tables.formats import PICTURE_COLUMN
from protonet.tables.spellings import describe_list_labels, describe_similar_names
from protonet.tables.training import (
    MAX_LISTED_CONTRADICTORY_ROWS,
    TrainingTable,
    describe_uninformative_rows,
    parse_integer_labels,
)
from protonet.ui.command_line import check_output_path
from protonet.ui.text import format_csv, format_table, warn_cancelled_classes


def run_suggest(options: SuggestOptions) -> None:
    """Run ``suggest``: print the rows to label next, each with a reason, and write them with an empty label column."""
    model = None if options.model is None else load_pipeline(options, options.model, options.table)
    label = get_label_column(options.label, model)
    table = read_table_to_label(options, model, label)
    left = (~table.has_label & ~table.uninformative_mask).nonzero().flatten()
    n_labelled = int(table.has_label.sum())
    if not len(left):
        reason = f"a label in {to_printable(label)}{' or no information' * (n_labelled < len(table.x))}"
        got = f"{reason} in each of {plural(len(table.x), 'row')}"
        raise_input_error("table", "have unlabelled rows", got, "Add rows whose label is empty.")
    if n_labelled:
        labelled = plural(n_labelled, "row")
        table.notes.append(f"{labelled} already labelled in {to_printable(label)}: not suggested")
    n = min(N_DEFAULT_SUGGESTIONS, len(left)) if options.n is None else options.n
    if model is None:
        given = table.x[table.has_label]
        chosen = suggest_rows(None, table.x, n, unlabelled_rows=left, labelled_features=given)
    else:
        chosen = model.suggest(table.x, n, list(map(to_printable, model.classes)), left)
    has_pictures = is_picture_path(options.table)
    if has_pictures or options.output is not None:
        header, lines = read_cells(options, options.table, model, label, [suggestion.row for suggestion in chosen])
    if options.output is not None:
        write_text(options.output, format_csv([[*header, label], *([*cells, ""] for cells in lines)]))
    show_notes(table.notes, quiet=options.quiet)
    positions = [str(table.rows.positions[suggestion.row]) for suggestion in chosen]
    location = table.rows.position_format.format(f"of {to_printable(options.table.name)}")
    if has_pictures:
        positions, location = [to_printable(cells[0]) for cells in lines], PICTURE_COLUMN
    shown = [[position, suggestion.reason] for position, suggestion in zip(positions, chosen, strict=True)]
    print(format_table([location, "reason"], shown), end="")


def run(options: UpdateOptions) -> None:
    """Run ``update``; updates that replace the same model file run one after the other, so that none is lost."""
    output = options.output or options.model
    if not options.model.is_file() or output.resolve() != options.model.resolve():
        update_model(options, output)
        return
    lock = open_locked(options.model, wait=True)
    try:
        update_model(options, check_output_path("model", output), is_replaced=True)
    finally:
        os.close(lock)


def update_model(options: UpdateOptions, output: Path, *, is_replaced: bool = False) -> None:
    """Add labelled rows to a model, write it to ``output``, and print the change of accuracy on held-out rows.

    With ``is_replaced``, ``output`` is the file of the model itself. Another command may write it meanwhile, such as a
    ``fit``, which needs no lock: its result is not overwritten.
    """
    stamp = read_stamp(options.model)
    model = load_pipeline(options, options.model, options.table, for_update=True)
    table = read_labelled_rows(options, options.table, model, model.metadata.group_column)
    labels, empty = table.rows.labels, table.uninformative_mask.numpy()
    if not options.new_classes:
        remedy = "Spell them alike, or pass --new-classes if they are new classes."
        check_class_spellings(np.unique(labels).tolist(), model.classes, remedy)
    classes, old = extend_classes(model.classes, labels), model.cross_validation
    before = None if old is None else predict_held_out(old)  # before the update changes the networks
    contradictions = table.warn_contradictory_labels()
    if old is not None:
        contradictions += warn_held_out_contradictions(old, table, classes)
    groups = table.rows.extra_columns[0].tolist() if table.rows.extra_columns else None
    if is_refit := STORED_FEATURES in model.update_state:
        with show_progress(quiet=options.quiet) as progress:
            updated, _ = fit_again(
                model, table.x, labels, classes, groups=groups, uninformative_mask=empty, progress=progress
            )
    else:
        updated = model.update(table.x, labels, classes, groups=groups, uninformative_mask=empty)
    table.notes.extend(f"warning: {note}" for note in describe_uninformative_rows(empty))
    show_notes(table.notes, quiet=options.quiet)
    hashes = hash_rows(table.x)
    earlier = torch.isin(hashes, model.training_hashes)
    if old is not None:
        earlier |= is_held_out_row(old, table.x)
    if is_replaced and read_stamp(options.model) != stamp:
        remedy = "Another command has written it: run this one again."
        raise_input_error("model", "stay the same during the update", f"another file {options.model}", remedy)
    updated.save(output)
    new = classes[len(model.classes) :]
    named = f": {', '.join(map(to_printable, new[:5]))}{' ...' if len(new) > 5 else ''}" if new else ""
    again = f"; fitted again to {plural(sum(updated.sample_counts), 'row')}" if is_refit else ""
    print(f"{output}: {plural(len(labels), 'sample')} added, {plural(len(new), 'new class')}{named}{again}")
    if repeated := len(labels) - len(hashes[~earlier].unique()):
        print(f"{plural(repeated, 'sample')} equal to earlier or other new ones: they count again")
    warnings = [
        *(f"warning: {note}" for note in (*describe_similar_names(new), *describe_list_labels(new, model.classes))),
        *warn_cancelled_classes(updated.classes, updated.network.has_zero_sum.tolist()),
        *contradictions,
    ]
    print("".join(f"{line}\n" for line in warnings), end="")
    new_crossed = updated.cross_validation
    if before is None or old is None or new_crossed is None:
        print("no held-out rows: the effect on the old classes is unknown")
    elif is_refit:
        print(format_cross_validated_accuracy(before, old.labels, predict_held_out(new_crossed), new_crossed.labels))
    else:
        names = list(map(to_printable, classes))
        print(format_accuracy_change(before, predict_held_out(new_crossed), new_crossed.labels, names), end="")


def format_cross_validated_accuracy(before: Tensor, labels: Tensor, after: Tensor, new_labels: Tensor) -> str:
    """Format the cross-validated accuracy before and after a new fit, whose held-out rows are others.

    The logits are (n, known classes) before and (m, num_classes) after; the labels (n,) and (m,) are class indices.
    """
    accuracies = [
        f"{100 * (logits.argmax(dim=1) == y).double().mean():.2f} % on {plural(len(y), 'held-out row')}"
        for logits, y in ((before, labels), (after, new_labels))
    ]
    return f"cross-validated accuracy: {accuracies[0]} before, {accuracies[1]} after"


def extend_classes(classes: Sequence[str | int], labels: np.ndarray) -> tuple[str, ...] | tuple[int, ...]:
    """Append the new classes among labels (n,) to the known classes; return all as integers, or all as strings."""
    texts = {str(name) for name in classes}
    names = [*classes, *(name for name in np.unique(parse_integer_labels(labels)).tolist() if str(name) not in texts)]
    integers = tuple(name for name in names if type(name) is int)
    return integers if len(integers) == len(names) else tuple(map(str, names))


def warn_held_out_contradictions(cv: CrossValidation, table: TrainingTable, classes: Sequence[str | int]) -> list[str]:
    """Return a warning about new rows that equal a held-out row of ``fit`` with another label; [] if there are none.

    ``classes`` are the names of all classes, in the order of their indices.
    """
    indices = {str(name): index for index, name in enumerate(classes)}
    rows = np.flatnonzero(~table.uninformative_mask.numpy())
    labels = table.rows.labels[rows].tolist()
    given = torch.tensor([indices[str(label)] for label in labels], dtype=torch.int64)
    earlier = detect_label_conflicts(cv, table.x[rows], given).tolist()
    named = [
        f"{table.rows.format_location(row)} ({to_printable(label)}, was {to_printable(classes[before])})"
        for row, label, before in zip(rows.tolist(), labels, earlier, strict=True)
        if before >= 0
    ]
    if not named:
        return []
    count = f"{plural(len(named), 'row')} of another class than equal rows of fit"
    return [f"warning: contradicting labels: {count}: {shorten_list(named, MAX_LISTED_CONTRADICTORY_ROWS)}"]


def format_accuracy_change(before: Tensor, after: Tensor, labels: Tensor, classes: Sequence[str | int]) -> str:
    """Format the accuracy on held-out rows before and after an update, and the classes whose recall decreased.

    The logits are (n, known classes) before and (n, num_classes) after the update; ``labels`` (n,) are class indices.
    """
    max_chance = 2.0  # standard errors of the number of rows that changed sides (McNemar's test)
    correct = torch.stack([logits.argmax(dim=1) == labels for logits in (before, after)]).double()
    counts = torch.bincount(labels, minlength=before.shape[1])
    hits = torch.zeros(2, len(counts), dtype=torch.float64).index_add_(1, labels, correct).long()
    rows = plural(len(labels), "held-out row")
    lines = [f"accuracy on {rows}: {100 * correct[0].mean():.2f} % before, {100 * correct[1].mean():.2f} % after"]
    for label, (old, new) in enumerate(hits.T.tolist()):
        if new < old:
            lines.append(f"  {classes[label]}: {old} of {counts[label]} correct before, {new} after")
    lost, won = int((correct[0] > correct[1]).sum()), int((correct[1] > correct[0]).sum())
    if lost - won > max_chance * math.sqrt(lost + won):
        remedy = "run protonet fit on both tables together, or with --store-rows: update then fits again"
        lines.append(f"update moves prototypes, not the views: {remedy}")
    return "\n".join(lines) + "\n"
