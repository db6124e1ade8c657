"""``protonet explain``: compute the importance of columns, or explain the predictions of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from protonet._io import JsonDict, show_progress, write_json
from protonet._text import plural, to_printable
from protonet.commands.data import load_pipeline, make_read_spec, read_labelled_rows
from protonet.commands.options import ExplainOptions, show_notes
from protonet.commands.rows import check_class_spellings
from protonet.embeddings.pictures.reading import path_to_text
from protonet.errors import raise_input_error
from protonet.fit.diagnostics import RowExplanation, rank_columns_by_importance
from protonet.pipeline import TablePipeline
from protonet.tables.table import RowBlock, Table
from protonet.ui.text import format_table

#: Maximum number of columns in the printed table of importances; the JSON file lists all columns.
MAX_LISTED_COLUMNS = 30
#: Maximum number of columns, and of characters of a cell, in the printed explanation of a row.
MAX_EXPLANATION_COLUMNS, MAX_CELL_LENGTH = 5, 40


def run(options: ExplainOptions) -> None:
    """Run ``explain``: print the importance of each column, or explanations of single rows, and write them as JSON."""
    seed, rows = options.seed, options.rows
    model = load_pipeline(options, options.model, options.table, for_update=True)
    generator = torch.Generator().manual_seed(seed)
    if rows is None or options.table is None:
        results = compute_column_importance(options, model, generator)
        print(format_column_importance(results), end="")
    else:
        results = explain_rows(options, options.table, model, rows, generator)
        print(format_row_explanations(results), end="")
    if options.json is not None:
        write_json(options.json, {"seed": seed, **results})


def compute_column_importance(options: ExplainOptions, model: TablePipeline, generator: torch.Generator) -> JsonDict:
    """Compute the permutation importance of each column, as a dict for JSON with the most important columns first.

    Importance is measured on the table in the options or, without a table, on the held-out rows of the model.
    """
    table = None
    if options.table is None:
        evaluated = model.cross_validation
    else:
        remedy = "Pass another column as --label, or explain the predictions of single rows: --rows."
        table = read_labelled_rows(options, options.table, model, remedy=remedy)
        labels = table.rows.labels
        check_class_spellings(labels.tolist(), model.classes, "Spell them in the table as the model does.")
        model.predict_logits(table.x.numpy())  # raises if the embedding of a row overflows
        evaluated = model.as_single_fold(table.x, model.class_indices(labels))
    if evaluated is None:
        remedy = "Pass a labelled table, or run protonet fit on two or more rows per class (estimators store none)."
        raise_input_error("model", "have held-out rows, if no table is given", "none", remedy)
    names, sizes = model.column_names, model.n_features_per_column
    with show_progress(quiet=options.quiet) as progress:
        results = rank_columns_by_importance(evaluated, names, sizes, generator, progress)
    if table is not None:
        show_notes(table.notes, quiet=options.quiet)
    return {"table": None if options.table is None else path_to_text(options.table.name), **results}


def format_column_importance(results: JsonDict) -> str:
    """Format the results of `compute_column_importance` as text with a table."""
    rows, columns, total = plural(results["rows"], "row"), results["columns"], results["total_rows"]
    sample = f", a random sample of {total:,}" if results["rows"] < total else ""
    source = "held out in fit" if results["table"] is None else f"of {to_printable(results['table'])}"
    accuracy, log_loss = 100 * results["accuracy"], results["log_loss"]
    shuffles = plural(results["shuffles"], "shuffle")
    lines = [
        f"{rows} {source}{sample}: accuracy {accuracy:.2f} %, log-loss {log_loss:.3f}",
        f"permutation importance: the change if the values of a column are shuffled, the mean of {shuffles}",
    ]
    shown = []
    for column in columns[:MAX_LISTED_COLUMNS]:
        rise, fall = column["log_loss_rise"], 100 * column["accuracy_fall"]
        ends = "[{:+.3f}, {:+.3f}]".format(*column["log_loss_interval"])
        points = "[{:+.2f}, {:+.2f}]".format(*(100 * end for end in column["accuracy_interval"]))
        shown.append([to_printable(column["name"]), f"{rise:+.3f}", ends, f"{fall:+.2f}", points])
    header = ["column", "log-loss increase", "95 % interval", "accuracy decrease, points", "95 % interval"]
    lines += ["", format_table(header, shown)]
    if len(shown) < len(columns):
        lines[-1] += f"{len(shown)} of {plural(len(columns), 'column')} shown, the largest first; --json writes all\n"
    return "\n".join(lines)


def explain_rows(
    options: ExplainOptions, table_path: Path, model: TablePipeline, rows: Sequence[int], generator: torch.Generator
) -> JsonDict:
    """Compute the predictions, nearest held-out rows and column contributions of rows, as a dict for JSON.

    ``rows`` are positions in the file, such as line numbers. To measure contributions, the cells of held-out rows that
    the generator draws replace the cells of the explained row.
    """
    table = model.open_table(table_path, make_read_spec(options, model.new_row_spec, options.label))
    x, cells, uninformative_mask, position_format = read_rows_at_positions(table, model, rows)
    ranked = model.predict_logits(x, uninformative_mask).softmax(dim=1).sort(dim=1, descending=True, stable=True)
    show_notes(table.all_notes, quiet=options.quiet)
    with show_progress(quiet=options.quiet) as progress:
        features, labels = torch.from_numpy(model.fill_gaps(x)), ranked.indices[:, 0].tolist()
        explanations = model.explain(features, labels, generator, progress)
    explained: list[JsonDict] = []
    for index, row in enumerate(rows):
        best = zip(ranked.indices[index, :2].tolist(), ranked.values[index, :2].tolist(), strict=True)
        classes = [{"name": model.classes[label], "probability": probability} for label, probability in best]
        result = {"row": row, "location": position_format.format(row), "classes": classes}
        described = explanation_to_dict(model, explanations[index], cells[index]) if explanations else {}
        explained.append({**result, "neighbors": None, "columns": None, **described})
    sample = explanations[0].n_replacement_rows if explanations else 0
    return {"table": path_to_text(table_path.name), "sample": sample, "rows": explained}


def explanation_to_dict(model: TablePipeline, explanation: RowExplanation, cells: Sequence[str]) -> JsonDict:
    """Convert the explanation of a row to a dict for JSON, with the row's cells in the order of the columns."""
    assert model.cross_validation is not None
    held_out = [model.classes[label] for label in model.cross_validation.labels.tolist()]
    contributions, names = explanation.contributions, model.column_names
    order = contributions.abs().argsort(descending=True, stable=True).tolist()
    return {
        "neighbors": [
            {"index": row, "location": model.format_held_out_location(row), "class": held_out[row], "cosine": cosine}
            for row, cosine in explanation.neighbors
        ],
        "columns": [
            {"name": names[index], "index": index, "cell": cells[index], "contribution": float(contributions[index])}
            for index in order
        ],
    }


def read_rows_at_positions(
    table: Table, model: TablePipeline, rows: Sequence[int]
) -> tuple[np.ndarray, list[list[str]], np.ndarray, str]:
    """Read and encode the rows at the given positions in the file, such as line numbers.

    Returns:
        The features (rows, dim), the cells of each row as text, a mask (rows,) bool of rows in which each cell is
            missing or unknown to the model, and the format string of positions.
    """
    requested, positions, selected, position_format = set(rows), list[int](), list[RowBlock](), ""
    for block in table.blocks:
        indices = [index for index, position in enumerate(block.positions) if position in requested]
        selected.append(block.select_rows(np.array(indices, int)))
        positions += block.positions[:: max(1, len(block.positions) - 1)]  # the first and the last
        position_format = block.position_format
    found = RowBlock.concatenate(selected)
    for row in rows:
        if row not in found.positions:
            location, first, last = map(position_format.format, (row, positions[0], positions[-1]))
            is_between = positions[0] < row < positions[-1]
            got = f"{row}, and the rows are from {first} to {last}"
            got = f"{location}, where no row begins" if is_between else got
            counted = "Count the lines of a text file, or the rows of a spreadsheet; the header is the first."
            remedy = "Count the rows from 0." if "counted from 0" in position_format else counted
            raise_input_error("rows", "be rows of the table", got, remedy)
    found = found.select_rows(np.array([list(found.positions).index(row) for row in rows]))
    cells = [list(map(str, line)) for line in zip(*found.columns, strict=True)]
    return model.encode(found, keep_gaps=True), cells, model.is_uninformative(found), position_format


def format_row_explanations(results: JsonDict) -> str:
    """Format the results of `explain_rows` as text."""
    lines = []
    for row in results["rows"]:
        classes = [f"{to_printable(best['name'])} {100 * best['probability']:.2f} %" for best in row["classes"]]
        lines.append(f"{row['location']}: {', then '.join(classes)}")
        if results["sample"]:
            near = [
                f"{to_printable(neighbor['location'])} ({to_printable(neighbor['class'])}, {neighbor['cosine']:.3f})"
                for neighbor in row["neighbors"]
            ]
            lines.append(f"  nearest rows of fit (class, cosine): {', '.join(near)}")
            for column in row["columns"][:MAX_EXPLANATION_COLUMNS]:
                cell = to_printable(column["cell"][:MAX_CELL_LENGTH])
                lines.append(f"  {column['contribution']:<+9.2g} {to_printable(column['name'])} = {cell}")
    if results["sample"]:
        rows = plural(results["sample"], "held-out row")
        lines.append("contribution of a column: the log-probability of the class, minus its mean if the cell is")
        lines.append(f"replaced by that of {rows} of fit")
    else:
        lines.append("the model has no held-out rows of fit: nearest rows and contributions are unknown")
    return "\n".join([*lines, ""])
