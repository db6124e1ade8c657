"""``python -m protonet explain``: which columns matter, and what spoke for the class of a row."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet._text import to_printable
from protonet._writing import write_whole
from protonet.commands.labels import check_spellings
from protonet.commands.models import (
    classify,
    find_sizes,
    find_uninformative,
    name_columns,
    number_classes,
    open_model,
    open_rows,
    read_labelled,
    show_notes,
    show_progress,
    want,
)
from protonet.embeddings.pictures.images import path_to_text
from protonet.errors import raise_input_error
from protonet.files import Model
from protonet.fit.crossfit import Crossfit, restore_crossfit
from protonet.fit.importance import measure_support, rank_columns
from protonet.tables.features import encode_block
from protonet.tables.table import Table
from protonet.ui.text import count, format_table

#: Most columns that are printed; a JSON file has all.
MOST_COLUMNS = 30
#: Of each row: how many columns, and how many near rows, are told.
COLUMNS, NEIGHBOURS = 5, 3
#: Most characters of a cell that are shown.
MOST_CELL = 40
#: Rows of fit whose cells stand in for those of a row.
SAMPLE = 50
#: Rows that are embedded at a time.
ROWS_AT_ONCE = 1024


def run(options: argparse.Namespace) -> None:
    """Explain as the arguments say.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: Arguments, a model or a table that do not fit.
    """
    seed, rows, outputs = options.seed, options.rows, options.outputs
    model = open_model(options, held=True)
    generator = torch.Generator().manual_seed(seed)
    if rows is None:
        figures = judge_columns(options, model, generator)
        print(format_columns(figures), end="")
    else:
        figures = explain_rows(options, model, rows, generator)
        print(format_rows(figures), end="")
    if "json" in outputs:
        content = json.dumps({"seed": seed, **figures}, indent=1, allow_nan=False) + "\n"
        write_whole(outputs["json"], lambda file: file.write(content.encode()))


def find_held(model: Model) -> Crossfit | None:
    """Return the rows that fit held out, with the fold models, or None where the model has none."""
    try:
        crossed = restore_crossfit(model.network, model.folds, model.held)
    except ValueError:  # a fit that is stopped may keep a model without
        return None
    return crossed if len(crossed.labels) else None


def judge_columns(options: argparse.Namespace, model: Model, generator: torch.Generator) -> dict[str, Any]:
    """Return what shuffling each column costs, the costliest first, as JSON can hold it.

    Raises:
        InputError: A table that does not fit; without one, a model that has no row that was held out.
    """
    table, judged = (None, find_held(model)) if options.table is None else read_judged(options, model)
    if judged is None:
        remedy = "Pass a table with classes, or fit it again, to two samples or more of some classes."
        raise_input_error("model", "hold rows that fit held out, where no table is passed", "none", remedy)
    with show_progress(quiet=options.quiet) as progress:
        found = rank_columns(judged, name_columns(model), find_sizes(model), generator, progress)
    if table is not None:
        show_notes(table, quiet=options.quiet)
    return {"table": None if options.table is None else path_to_text(Path(options.table).name), **found}


def read_judged(options: argparse.Namespace, model: Model) -> tuple[Table, Crossfit]:
    """Return a table with classes, and its rows, all judged by the network of all rows.

    Raises:
        InputError: A table that does not fit, has classes that the model does not know, or a row that is far out.
    """
    table, block = read_labelled(options, model)
    check_spellings(block.labels.tolist(), model.classes, "Spell them in the table as the model does.")
    labels = number_classes(block.labels, model.classes)
    x = encode_block(table, block, model.encoding)
    classify(model, x)  # which says of a row that is far out how large it is
    judged = judge_by_all(model, torch.from_numpy(x), labels)
    return table, judged


def judge_by_all(model: Model, features: Tensor, labels: Tensor) -> Crossfit:
    """Return rows (n, dim) of known classes (n,), all judged by the network of all rows."""
    weights, offset = torch.ones(len(labels), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    fold, groups = torch.zeros_like(labels), torch.full_like(labels, -1)
    return Crossfit(model.network, (model.network,), features, labels, weights, fold, groups, offset)


def format_columns(figures: Mapping[str, Any]) -> str:
    """Return what `judge_columns` found, in lines."""
    rows, columns = count(figures["rows"], "row"), figures["columns"]
    drawn = f", drawn at random from {figures['drawn_from']:,}" if figures["rows"] < figures["drawn_from"] else ""
    held = f"{rows} that fit held out{drawn}, each judged by a fit without its fold"
    judged = held if figures["table"] is None else f"{rows} of {to_printable(figures['table'])}{drawn}"
    shuffles = count(figures["shuffles"], "shuffle")
    lines = [
        f"{judged}: {100 * figures['accuracy']:.2f} % right, log-loss {figures['log_loss']:.3f}",
        f"what is lost where the cells of one column are shuffled among the rows, the mean of {shuffles}:",
    ]
    shown = []
    for column in columns[:MOST_COLUMNS]:
        rise, fall = column["log_loss_rise"], 100 * column["accuracy_fall"]
        ends = "[{:+.3f}, {:+.3f}]".format(*column["log_loss_interval"])
        points = "[{:+.2f}, {:+.2f}]".format(*(100 * share for share in column["accuracy_interval"]))
        shown.append([to_printable(column["name"]), f"{rise:+.3f}", ends, f"{fall:+.2f}", points])
    header = ["column", "log-loss rises by", "95 % interval", "right falls by, points", "95 % interval"]
    lines += ["", format_table(header, shown)]
    if len(shown) < len(columns):
        lines[-1] += f"{len(shown)} of {count(len(columns), 'column')} shown, the largest first; --json writes all\n"
    return "\n".join(lines)


def explain_rows(
    options: argparse.Namespace, model: Model, rows: Sequence[int], generator: torch.Generator
) -> dict[str, Any]:
    """Return what the model says of some rows of a table, and why, as JSON can hold it.

    Raises:
        InputError: A table that does not fit, or has no such row.
    """
    table = open_rows(options, model, want(model, options.label, labelled=False))
    x, cells, uninformative = read_rows(table, model, rows)
    held, names = find_held(model), name_columns(model)
    ranked = classify(model, x, uninformative).softmax(dim=1).sort(dim=1, descending=True, stable=True)
    show_notes(table, quiet=options.quiet)
    told: list[dict[str, Any]] = []
    for row, shares, places in zip(rows, ranked.values.tolist(), ranked.indices.tolist(), strict=True):
        best = [{"name": model.classes[at], "probability": share} for at, share in zip(places, shares, strict=True)]
        told.append(
            {
                "row": row,
                "place": table.position_format.format(row),
                "classes": best[:2],
                "neighbours": None,
                "columns": None,
            }
        )
    figures = {"table": path_to_text(Path(options.table).name), "sample": 0, "rows": told}
    if held is None:
        return figures
    drawn = torch.randperm(len(held.labels), generator=generator)[:SAMPLE]
    figures["sample"] = len(drawn)
    sample, weights = held.features[drawn], held.weights[drawn]
    with show_progress(quiet=options.quiet) as progress, torch.inference_mode():
        features = torch.from_numpy(x)
        cosines = embed(model, features) @ embed(model, held.features).T
        nearest = cosines.topk(min(NEIGHBOURS, len(held.labels)), dim=1)
        for at, each in enumerate(told):
            progress(f"row {each['row']}", at / len(told))
            pairs = zip(nearest.indices[at].tolist(), nearest.values[at].tolist(), strict=True)
            each["neighbours"] = [
                {"number": number, "class": model.classes[int(held.labels[number])], "cosine": cosine}
                for number, cosine in pairs
            ]
            label = int(ranked.indices[at, 0])
            support = measure_support(model.network, features[at], label, sample, weights, find_sizes(model))
            each["columns"] = [
                {"name": names[number], "number": number, "cell": cells[at][number], "support": float(support[number])}
                for number in support.abs().argsort(descending=True, stable=True).tolist()
            ]
    return figures


def read_rows(table: Table, model: Model, rows: Sequence[int]) -> tuple[np.ndarray, list[list[str]], np.ndarray]:
    """Return some rows of a table, by their lines in the file.

    Returns:
        Their features (rows, dim), the cells of each as text, and which of them (rows,) bool have no information.

    Raises:
        InputError: The table has no such row, or one that does not fit.
    """
    found: dict[int, tuple[np.ndarray, list[str], bool]] = {}
    last = None
    for block in table.blocks:
        numbers = {place: number for number, place in enumerate(block.positions)}
        here = [row for row in rows if row in numbers]
        if here:
            taken = block.take(np.array([numbers[row] for row in here]))
            features, cells = encode_block(table, taken, model.encoding), zip(*taken.columns, strict=True)
            uninformative = find_uninformative(model, taken).tolist()
            found |= {
                row: (x, [*map(str, own)], empty)
                for row, x, own, empty in zip(here, features, cells, uninformative, strict=True)
            }
        last = block.positions[-1]
    for row in rows:
        if row not in found:
            remedy = "Number rows as notes do: by the lines of a text file, or the rows of a spreadsheet."
            raise_input_error(
                "--rows",
                "name rows of the table",
                f"{row}, and the last is {table.position_format.format(last)}",
                remedy,
            )
    x, texts, empty = zip(*(found[row] for row in rows), strict=True)
    return np.stack(x), list(texts), np.array(empty)


def embed(model: Model, x: Tensor) -> Tensor:
    """Return the embeddings (n, embedding_dim) of rows (n, dim)."""
    return torch.cat([model.network.embed(some) for some in x.split(ROWS_AT_ONCE)])


def format_rows(figures: Mapping[str, Any]) -> str:
    """Return what `explain_rows` found, in lines."""
    lines = []
    for told in figures["rows"]:
        shares = [f"{to_printable(each['name'])} {100 * each['probability']:.2f} %" for each in told["classes"]]
        lines.append(f"{told['place']}: {', then '.join(shares)}")
        if figures["sample"]:
            near = [
                f"{each['number']} ({to_printable(each['class'])}, {each['cosine']:.3f})" for each in told["neighbours"]
            ]
            lines.append(f"  nearest rows that fit held out: {', '.join(near)}")
            lines += [
                f"  {each['support']:<+9.2g} {to_printable(each['name'])} = {to_printable(each['cell'][:MOST_CELL])}"
                for each in told["columns"][:COLUMNS]
            ]
    if figures["sample"]:
        lines.append(
            "in brackets: the class of a near row, and its cosine in the embedding; before a column: the class's"
        )
        rows = count(figures["sample"], "row")
        lines.append(f"log-probability, less its mean where that cell is one of {rows} that fit held out")
    else:
        lines.append(
            "the model holds no rows that fit held out: what is near these, and which columns spoke, is not known"
        )
    return "\n".join([*lines, ""])
