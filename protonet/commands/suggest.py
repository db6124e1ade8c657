"""``python -m protonet suggest``: which rows of a table to label next, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from protonet._text import to_printable
from protonet._writing import write_whole
from protonet.commands.data import read_cells, read_unlabelled
from protonet.commands.models import name_label, open_model, show_notes, suggest
from protonet.fit.names import classify_by_names
from protonet.ui.text import format_csv, format_table


def run(options: argparse.Namespace) -> None:
    """Suggest as the arguments say: print rows and reasons, and write the rows to be labelled.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        OSError: The rows cannot be written.
        InputError: Arguments, a model or a table that do not fit.
    """
    outputs = options.outputs
    model = None if options.model is None else open_model(options)
    label = name_label(options.label, model)
    rows = read_unlabelled(options, model, label)
    names = [] if model is None else [to_printable(name) for name in model.classes]
    network, known = (None, rows.x[rows.known]) if model is None else (model.network, None)
    by_name = None
    if model is not None and isinstance(named := model.metadata.get("named"), dict):
        told = named.get("descriptions")
        sound = isinstance(told, list) and len(told) == len(model.classes) and all(type(each) is str for each in told)
        by_name = classify_by_names(model.encoding, model.classes, rows.x, told if sound else None)
    chosen = suggest(network, rows.x, options.n, names, rows=rows.left, known=known, by_name=by_name)
    if "output" in outputs:
        header, cells = read_cells(options, model, label, [each.row for each in chosen])
        lines = [[*header, label], *([*own, ""] for own in cells)]
        write_whole(outputs["output"], lambda file: file.write(format_csv(lines).encode()))
    show_notes(rows.table, quiet=options.quiet)
    where = rows.table.position_format.format(f"of {to_printable(Path(options.table).name)}")
    print(format_table([where, "reason"], [[str(rows.places[row]), reason] for row, reason in chosen]), end="")
