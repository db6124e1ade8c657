"""``protonet update``: add samples and classes to a model, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.commands.labels import check_spellings, parse_integers, warn_contradictions, warn_similar_names
from protonet.commands.models import (
    TRAINING_HASHES,
    attach_cv_results,
    detect_uninformative,
    get_class_indices,
    open_model,
    predict_logits,
    read_labelled,
    show_notes,
    warn_cancelled_classes,
    write_model,
)
from protonet.errors import raise_input_error
from protonet.files import Model
from protonet.fit.crossfit import Crossfit, match_held_out, predict_held_out, restore_crossfit, update
from protonet.fit.duplicates import hash_rows
from protonet.fit.uninformative import parse_counts
from protonet.tables.features import encode_block
from protonet.tables.table import RowBlock
from protonet.ui.command_line import check_writable_file
from protonet.ui.text import count


def run(options: argparse.Namespace) -> None:
    """Add the rows of a table to a model, write it, and print the change of accuracy on held-out rows.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: Arguments, model and table do not match.
    """
    outputs = options.outputs
    model = open_model(options, for_update=True)
    output = outputs["output"] if "output" in outputs else check_writable_file("model", options.model)
    crossed = restore_cv(model)
    group = model.metadata.get("group")
    table, block = read_labelled(options, model, None if group is None else str(group))
    x, labels = encode_block(table, block, model.encoding), block.labels
    if not options.new_classes:
        remedy = "Spell them alike, or pass --new-classes if they are new classes."
        check_spellings(np.unique(labels).tolist(), model.classes, remedy)
    known = model.metadata.get("groups", {})
    groups = None
    if block.extra_columns:
        groups = torch.tensor([known.get(name, -1) for name in block.extra_columns[0].tolist()])
    classes = extend_classes(model.classes, labels)
    for network in (crossed.whole, *crossed.folds):
        predict_logits(model._replace(network=network), x)  # raises if the embedding of a row overflows
    before = predict_held_out(crossed)
    update(crossed, torch.from_numpy(x), get_class_indices(labels, classes), len(classes), groups)
    added, model = count_uninformative(model, block, classes)
    if added:
        table.notes.append(f"warning: {count(added, 'row')} without information: all cells are missing")
    show_notes(table, quiet=options.quiet)
    old_hashes, hashes = get_training_hashes(model), hash_rows(torch.from_numpy(x))
    new_rows = ~(torch.isin(hashes, old_hashes) | match_held_out(crossed, torch.from_numpy(x)))
    updated = attach_cv_results(model._replace(classes=classes), crossed, known, torch.cat([old_hashes, hashes]))
    write_model(output, updated, "model" if options.in_place else "--output")
    new = classes[len(model.classes) :]
    named = f": {', '.join(map(to_printable, new[:5]))}{' ...' if len(new) > 5 else ''}" if new else ""
    print(f"{output}: {count(len(x), 'sample')} added, {count(len(new), 'new class')}{named}")
    if repeated := len(x) - len(hashes[new_rows].unique()):
        print(f"{count(repeated, 'sample')} equal to earlier or other new ones: they count again")
    warnings = [*warn_similar_names(new), *warn_cancelled_classes(crossed.whole, classes)]
    informative = np.flatnonzero(~detect_uninformative(model, block)).tolist()
    locations = [table.position_format.format(block.positions[row]) for row in informative]
    warnings += warn_contradictions(x[informative], labels[informative].tolist(), locations)
    print("".join(f"{line}\n" for line in warnings), end="")
    print(compare(before, predict_held_out(crossed), crossed.labels, list(map(to_printable, classes))), end="")


def count_uninformative(model: Model, block: RowBlock, classes: Sequence[str | int]) -> tuple[int, Model]:
    """Count the rows without information of a block, and return the model with updated counts."""
    empty = detect_uninformative(model, block)
    if not empty.any():
        return 0, model
    counts = torch.bincount(get_class_indices(block.labels[empty], classes), minlength=len(classes))
    counts += parse_counts(model.metadata.get("uninformative"), len(classes))
    return int(empty.sum()), model._replace(metadata=model.metadata | {"uninformative": counts.tolist()})


def restore_cv(model: Model) -> Crossfit:
    """Restore the held-out rows and cross-validation networks; raise an InputError if a model has none."""
    try:
        return restore_crossfit(model.network, model.folds, model.update_state)
    except ValueError as error:
        remedy = "Fit it again: an interrupted fit writes a model without it."
        raise_input_error("model", "have the cross-validation of fit", str(error), remedy)


def get_training_hashes(model: Model) -> Tensor:
    """Return the hashes (n,) of the training rows of a model; empty if the file has none."""
    hashes = model.update_state.get(TRAINING_HASHES)
    sound = hashes is not None and hashes.dtype == torch.int64 and hashes.ndim == 1
    return hashes if hashes is not None and sound else torch.empty(0, dtype=torch.int64)


def extend_classes(known: Sequence[str | int], labels: np.ndarray) -> tuple[str, ...] | tuple[int, ...]:
    """Append the new classes of labels (n,) to the known ones, as strings unless all are integers."""
    texts = {str(name) for name in known}
    names = [*known, *(name for name in np.unique(parse_integers(labels)).tolist() if str(name) not in texts)]
    integers = tuple(name for name in names if type(name) is int)
    return integers if len(integers) == len(names) else tuple(map(str, names))


def compare(before: Tensor, after: Tensor, labels: Tensor, classes: Sequence[str | int]) -> str:
    """Format the change of the accuracy on held-out rows, and the classes that lost.

    Args:
        before: (n, old classes) logits of the held-out rows before the update.
        after: (n, classes) logits after it.
        labels: (n,) int64.
        classes: The names of the classes, the old ones first.
    """
    if not len(labels):
        return "no held-out rows: the effect on the old classes is unknown\n"
    correct = torch.stack([logits.argmax(dim=1) == labels for logits in (before, after)]).double()
    counts = torch.bincount(labels, minlength=before.shape[1])
    hits = torch.zeros(2, len(counts), dtype=torch.float64).index_add_(1, labels, correct).long()
    rows = count(len(labels), "held-out row")
    lines = [f"accuracy on {rows}: {100 * correct[0].mean():.2f} % before, {100 * correct[1].mean():.2f} % after"]
    for label, (old, new) in enumerate(hits.T.tolist()):
        if new < old:
            lines.append(f"  {classes[label]}: {old} of {counts[label]} correct before, {new} after")
    return "\n".join(lines) + "\n"
