"""``python -m protonet update``: add samples and classes to a model, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.commands.labels import check_spellings, list_contradictions, read_whole, suspect_spellings
from protonet.commands.models import (
    GIVEN,
    classify,
    find_uninformative,
    keep_crossfit,
    list_cancelled,
    number_classes,
    open_model,
    read_labelled,
    show_notes,
    write_model,
)
from protonet.errors import raise_input_error
from protonet.files import Model
from protonet.fit.copies import hash_rows
from protonet.fit.crossfit import Crossfit, find_held, predict_held, restore_crossfit, update
from protonet.fit.uninformative import parse_counts
from protonet.tables.features import encode_block
from protonet.tables.table import RowBlock
from protonet.ui.command_line import check_writable_file
from protonet.ui.text import count


def run(options: argparse.Namespace) -> None:
    """Add as the arguments say, print which of the old classes lost by it, and write the model.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: Arguments, a model or a table that do not fit.
    """
    outputs = options.outputs
    model = open_model(options, held=True)
    output = outputs["output"] if "output" in outputs else check_writable_file("model", options.model)
    crossed = open_crossfit(model)
    group = model.metadata.get("group")
    table, block = read_labelled(options, model, None if group is None else str(group))
    x, labels, beside = encode_block(table, block, model.encoding), block.labels, block.extra_columns
    if not options.new_classes:
        remedy = "Spell them as it does, or pass --new-classes if they are classes of their own."
        check_spellings(np.unique(labels).tolist(), model.classes, remedy)
    known = model.metadata.get("groups", {})
    groups = torch.tensor([known.get(name, -1) for name in beside[0].tolist()]) if beside else None
    classes = extend_classes(model.classes, labels)
    for network in (crossed.whole, *crossed.folds):
        classify(model._replace(network=network), x)  # no row may overflow and spoil its prototype
    before = predict_held(crossed)
    update(crossed, torch.from_numpy(x), number_classes(labels, classes), len(classes), groups)
    added, model = count_uninformative(model, block, classes)
    if added:
        table.notes.append(f"warning: {count(added, 'row')} without information: no cell is there and readable")
    show_notes(table, quiet=options.quiet)
    given, numbers = list_given(model), hash_rows(torch.from_numpy(x))
    fresh = ~(torch.isin(numbers, given) | find_held(crossed, torch.from_numpy(x)))
    updated = keep_crossfit(model._replace(classes=classes), crossed, known, torch.cat([given, numbers]))
    write_model(output, updated, "model" if options.in_place else "--output")
    new = classes[len(model.classes) :]
    named = f": {', '.join(map(to_printable, new[:5]))}{' ...' if len(new) > 5 else ''}" if new else ""
    print(f"{output}: {count(len(x), 'sample')} more, {count(len(new), 'new class')}{named}")
    if repeated := len(x) - len(numbers[fresh].unique()):
        print(f"{count(repeated, 'sample')} equal to others that the model was given, before or now: they count again")
    told = [*suspect_spellings(new), *list_cancelled(crossed.whole, classes)]
    some = np.flatnonzero(~find_uninformative(model, block)).tolist()
    places = [table.position_format.format(block.positions[row]) for row in some]
    told += list_contradictions(x[some], labels[some].tolist(), places)
    print("".join(f"{line}\n" for line in told), end="")
    print(compare(before, predict_held(crossed), crossed.labels, list(map(to_printable, classes))), end="")


def count_uninformative(model: Model, block: RowBlock, classes: Sequence[str | int]) -> tuple[int, Model]:
    """Count the rows of a block without information, and return the model with those of each class added."""
    empty = find_uninformative(model, block)
    if not empty.any():
        return 0, model
    counts = torch.bincount(number_classes(block.labels[empty], classes), minlength=len(classes))
    counts += parse_counts(model.metadata.get("uninformative"), len(classes))
    return int(empty.sum()), model._replace(metadata=model.metadata | {"uninformative": counts.tolist()})


def open_crossfit(model: Model) -> Crossfit:
    """Return what it takes to add samples to a model; raise an InputError if it has not got that."""
    try:
        return restore_crossfit(model.network, model.folds, model.held)
    except ValueError as error:
        remedy = "Fit it again: a fit that is stopped may keep a model without."
        raise_input_error("model", "hold what fit keeps for an update", str(error), remedy)


def list_given(model: Model) -> Tensor:
    """Return the numbers (n,) of the rows that a model was given; none of a file that does not say."""
    given = model.held.get(GIVEN)
    sound = given is not None and given.dtype == torch.int64 and given.ndim == 1
    return given if given is not None and sound else torch.empty(0, dtype=torch.int64)


def extend_classes(known: Sequence[str | int], labels: np.ndarray) -> tuple[str, ...] | tuple[int, ...]:
    """Return the known classes and those of labels (n,) that are new, as strings unless all are numbers."""
    texts = {str(name) for name in known}
    names = [*known, *(name for name in np.unique(read_whole(labels)).tolist() if str(name) not in texts)]
    whole = tuple(name for name in names if type(name) is int)
    return whole if len(whole) == len(names) else tuple(map(str, names))


def compare(before: Tensor, after: Tensor, labels: Tensor, classes: Sequence[str | int]) -> str:
    """Say which classes are recognised less often than before.

    Args:
        before: (n, old classes) logits of the rows that were held out.
        after: (n, classes) of the same.
        labels: (n,) int64.
        classes: The names, the old ones first.
    """
    if not len(labels):
        return "no row was held out in fit: what the old classes lose is not known\n"
    right = torch.stack([logits.argmax(dim=1) == labels for logits in (before, after)]).double()
    counts = torch.bincount(labels, minlength=before.shape[1])
    hits = torch.zeros(2, len(counts), dtype=torch.float64).index_add_(1, labels, right).long()
    rows = f"{count(len(labels), 'row')} held out"
    lines = [f"of {rows}: right {100 * right[0].mean():.2f} % before, {100 * right[1].mean():.2f} % now"]
    for old, (was, now) in enumerate(hits.T.tolist()):
        if now < was:
            lines.append(f"  {classes[old]} lost: {was} of {counts[old]} right before, {now} now")
    return "\n".join(lines) + ("" if len(lines) > 1 else ": no class lost") + "\n"
