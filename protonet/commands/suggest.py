"""``python -m protonet suggest``: which rows of a table to label next, and why."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._checks import InputError, fail, show
from protonet._writing import write_whole
from protonet.commands.common import format_table, parse_whole
from protonet.commands.models import check_paths, make_parser, open_rows, show_notes, want
from protonet.files import Model, load_model
from protonet.fit.active import Suggestion, suggest_rows
from protonet.network import PrototypeNetwork
from protonet.tables.features import choose_features, encode_block
from protonet.tables.table import Table, Wanted, name_cells, open_table, read_table

PROG = "protonet suggest"
#: What the column of the classes is called by default.
LABEL = "label"
#: The columns before those of the table: the number of a row, from 0, and why it is asked for.
FIRST = ("row", "reason")


class Unlabelled(NamedTuple):
    """A table without labels, as features."""

    x: Tensor  #: (n, dim) float32 or float64.
    blocks: Tensor | None  #: (dim,) int64: which column each feature comes from; None where each is one.
    table: Table  #: With what a person should be told.


def run(arguments: Sequence[str] | None) -> None:
    """Suggest as the arguments say: print rows and reasons, and write the rows to be labelled.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        OSError: The rows cannot be written.
        InputError: Arguments, a model or a table that do not fit.
    """
    text = "Say which rows to label next, the first one first, and why; without a model, which rows to label first."
    parser = make_parser(PROG, text, model=True, may_lack_table=True)
    parser.add_argument("-n", default="10", metavar="N", help="how many rows (default 10)")
    parser.add_argument("-o", "--output", metavar="FILE", help="these rows with an empty column of classes, .csv")
    parser.add_argument("--label", metavar="NAME", help=f"the column of the classes (default: the model's, or {LABEL})")
    options = parser.parse_args(arguments)
    if options.table is None:  # a table alone
        options.model, options.table = None, options.model
    n = parse_whole(PROG, "-n", options.n, low=1)
    check_table(PROG, options)
    outputs = check_paths(PROG, options, {"output": (".csv",)}, [options.model, options.table])
    model = None if options.model is None else load_model(options.model)
    label = name_label(options.label, model)
    rows = read_rows(PROG, options, model, label)
    names = [] if model is None else [show(name) for name in model.classes]
    chosen = suggest(PROG, None if model is None else model.network, rows.x, n, names)
    if "output" in outputs:
        header, cells = read_cells(PROG, Path(options.table), label, [each.row for each in chosen])
        for name in FIRST:
            if name in header:
                remedy = "Rename it, or leave out -o: the rows are printed."
                fail(PROG, "path", "have no column of the name of one of ours", name, remedy)
        lines = [[*FIRST, *header, label]]
        lines += [[str(row), reason, *own, ""] for (row, reason), own in zip(chosen, cells, strict=True)]
        write_whole(outputs["output"], lambda file: file.write(format_csv(lines).encode()))
    show_notes(rows.table, quiet=options.quiet)
    print(format_table(FIRST, [[str(row), reason] for row, reason in chosen]), end="")


def check_table(prog: str, options: argparse.Namespace) -> None:
    """Raise an InputError for a table that cannot be read twice, or for a model in its place."""
    if options.table == "-":
        fail(prog, "path", "be a file: it is read twice", "the standard input", "Save it, and name that file.")
    if options.table.lower().endswith(".safetensors"):
        fail(prog, "arguments", "name a table", f"the model {options.table} alone", "Pass the table after it.")


def name_label(option: str | None, model: Model | None) -> str:
    """Return what the column of the classes is called."""
    return option or (LABEL if model is None else str(model.metadata.get("label", LABEL)))


def read_rows(prog: str, options: argparse.Namespace, model: Model | None, label: str) -> Unlabelled:
    """Read the table that the options name, as features for a model, or as what its own columns are taken for.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: A table that does not fit.
    """
    if model is None:
        table, block = read_table(prog, Path(options.table), Wanted(label, labelled=False))
        block = block._replace(labels=np.zeros(len(block.rows), np.int64))  # one class: no column can tell it
        features = choose_features(prog, table, block, {}, named=False)
        blocks = None if features.encoding is None else features.encoding.blocks
        return Unlabelled(torch.from_numpy(np.ascontiguousarray(features.x)), blocks, table)
    table = open_rows(prog, options, model, want(model, label, labelled=False))
    parts = [encode_block(prog, table, block, model.encoding) for block in table.blocks]
    return Unlabelled(torch.from_numpy(np.concatenate(parts)), None, table)


def suggest(prog: str, network: PrototypeNetwork | None, x: Tensor, n: int, names: Sequence[str]) -> list[Suggestion]:
    """Return `protonet.fit.active.suggest_rows`, its errors in the name of a command."""
    try:
        return suggest_rows(network, x, n, names)
    except InputError as error:
        text = str(error).replace("suggest_rows: `n`", f"{prog}: `-n`").replace("suggest_rows: `x`", f"{prog}: `path`")
        raise InputError(text) from None


def read_cells(
    prog: str, path: Path, label: str, rows: Sequence[int] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Read all columns of a table as text, but for that of the classes and one without a name.

    Args:
        prog: The command's name, for messages.
        path: Of the table.
        label: The column of the classes, which need not be there.
        rows: The numbers of the rows, in the order wanted; None for all.

    Returns:
        The columns' names, and the cells of each row.
    """
    table = open_table(prog, path, Wanted(label, labelled=False))
    found: dict[int, list[str]] = {}
    first = 0
    for block in table.blocks:
        places = range(len(block.rows)) if rows is None else [row - first for row in rows]
        taken = np.array([place for place in places if 0 <= place < len(block.rows)], int)
        columns = [name_cells(cells[taken]).tolist() for cells in block.columns]
        found.update(zip((first + taken).tolist(), map(list, zip(*columns, strict=True)), strict=True))
        first += len(block.rows)
    width = len(next(iter(found.values())))
    names = list(table.columns) if table.columns is not None else [f"column {number}" for number in range(width)]
    return names, [found[row] for row in (found if rows is None else rows)]


def format_csv(lines: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
