"""``protonet suggest``: list the rows of a table to label next, with reasons."""

from __future__ import annotations

import argparse
from pathlib import Path

from protonet._text import to_printable
from protonet._writing import write_atomically
from protonet.commands.data import read_cells, read_unlabelled
from protonet.commands.models import get_label_column, open_model, show_notes, suggest
from protonet.fit.names import classify_by_names
from protonet.ui.text import format_csv, format_table


def run(options: argparse.Namespace) -> None:
    """Print the suggested rows and reasons, and write the rows to label.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        OSError: The rows cannot be written.
        InputError: Arguments, model and table do not match.
    """
    outputs = options.outputs
    model = None if options.model is None else open_model(options)
    label = get_label_column(options.label, model)
    rows = read_unlabelled(options, model, label)
    names = [] if model is None else [to_printable(name) for name in model.classes]
    network, known = (None, rows.x[rows.known]) if model is None else (model.network, None)
    by_name = None
    if model is not None and isinstance(named := model.metadata.get("named"), dict):
        texts = named.get("descriptions")
        sound = (
            isinstance(texts, list) and len(texts) == len(model.classes) and all(type(text) is str for text in texts)
        )
        by_name = classify_by_names(model.encoding, model.classes, rows.x, texts if sound else None)
    chosen = suggest(network, rows.x, options.n, names, rows=rows.remaining, known=known, by_name=by_name)
    if "output" in outputs:
        header, table = read_cells(options, model, label, [suggestion.row for suggestion in chosen])
        lines = [[*header, label], *([*cells, ""] for cells in table)]
        write_atomically(outputs["output"], lambda file: file.write(format_csv(lines).encode()))
    show_notes(rows.table, quiet=options.quiet)
    location = rows.table.position_format.format(f"of {to_printable(Path(options.table).name)}")
    print(format_table([location, "reason"], [[str(rows.positions[row]), reason] for row, reason in chosen]), end="")
