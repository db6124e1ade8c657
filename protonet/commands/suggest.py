"""``protonet suggest``: suggest the rows of a table to label next (active learning)."""

from __future__ import annotations

from protonet._io import write_text
from protonet._text import to_printable
from protonet.commands.data import get_label_column, open_pipeline, read_cells, read_table_to_label
from protonet.commands.options import SuggestOptions, show_notes
from protonet.embeddings.pictures.reading import is_picture_path
from protonet.fit.active import suggest_rows
from protonet.tables.formats import PICTURE_COLUMN
from protonet.ui.text import format_csv, format_table


def run(options: SuggestOptions) -> None:
    """Run ``suggest``: print the rows to label next, each with a reason, and write them with an empty label column."""
    model = None if options.model is None else open_pipeline(options, options.model, options.table)
    label = get_label_column(options.label, model)
    rows = read_table_to_label(options, options.table, model, label)
    if model is None:
        chosen = suggest_rows(
            None, rows.x, options.n, unlabelled_rows=rows.unlabelled_indices, labelled_features=rows.x[rows.has_label]
        )
    else:
        chosen = model.suggest(rows.x, options.n, list(map(to_printable, model.classes)), rows.unlabelled_indices)
    has_pictures = is_picture_path(options.table)
    if has_pictures or options.output is not None:
        header, table = read_cells(options, options.table, model, label, [suggestion.row for suggestion in chosen])
    if options.output is not None:
        write_text(options.output, format_csv([[*header, label], *([*cells, ""] for cells in table)]))
    show_notes(rows.table.all_notes, quiet=options.quiet)
    positions = [str(rows.positions[suggestion.row]) for suggestion in chosen]
    location = rows.table.position_format.format(f"of {to_printable(options.table.name)}")
    if has_pictures:
        positions, location = [to_printable(cells[0]) for cells in table], PICTURE_COLUMN
    shown = [[position, suggestion.reason] for position, suggestion in zip(positions, chosen, strict=True)]
    print(format_table([location, "reason"], shown), end="")
