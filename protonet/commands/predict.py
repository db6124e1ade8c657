"""``python -m protonet predict``: the class of each row of a table, and how likely it is."""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from protonet._checks import InputError, fail
from protonet._writing import write_whole
from protonet.commands.models import (
    check_paths,
    classify_block,
    make_parser,
    map_blocks,
    open_model,
    open_rows,
    show_notes,
    want,
)
from protonet.files import Model
from protonet.metrics import find_threshold, score_known
from protonet.tables.formats import PICTURE
from protonet.tables.pictures.reading import are_pictures
from protonet.tables.table import Block, Table

PROG = "protonet predict"
#: What a row that is unlike every class is called.
UNKNOWN = "unknown"
#: The column of the rows' numbers.
ROW = "row"


def run(arguments: Sequence[str] | None) -> None:
    """Classify a table block by block, and write all of it or nothing.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        OSError: The predictions cannot be written.
        InputError: Arguments, a model or a table that do not fit.
    """
    parser = make_parser(PROG, "Classify the rows of a table, in its order.", model=True)
    parser.add_argument("-o", "--output", metavar="FILE", help="the predictions, .csv (default: standard output)")
    rate = "call rows unlike every class unknown, so many that this share of those of known classes would be"
    parser.add_argument("--unknown", metavar="RATE", help=f"{rate}, such as 0.05")
    parser.add_argument(
        "--proba", "--probabilities", dest="proba", action="store_true", help="write the probabilities of all classes"
    )
    parser.add_argument("--row-numbers", action="store_true", help="write the number of each row, from 0, first")
    options = parser.parse_args(arguments)
    outputs = check_paths(PROG, options, {"output": (".csv",)}, [options.model, options.table])
    model = open_model(PROG, options)
    threshold = None if options.unknown is None else choose_threshold(model, options.unknown)
    row_id = model.metadata.get("id")
    pictured = row_id is None and are_pictures(Path(options.table))
    table = open_rows(PROG, options, model, want(model, None, labelled=False, beside=row_id))
    blocks = number_rows(table.blocks) if options.row_numbers else table.blocks
    if pictured:
        blocks = name_pictures(blocks, (model.columns or ()).index(PICTURE))
    first = [ROW] * options.row_numbers + [str(row_id)] * (row_id is not None) + [PICTURE] * pictured

    def write(file: BinaryIO) -> None:
        file.write(format_header(first, model, everything=options.proba).encode())
        work = partial(format_predictions, model, table, threshold, options.proba)
        for text in map_blocks(work, blocks, rows=table.rows, quiet=options.quiet):
            file.write(text.encode())

    if "output" in outputs:
        write_whole(outputs["output"], write)
    else:
        with tempfile.TemporaryFile() as file:  # a fault in the last row must not come after the others are printed
            write(file)
            file.seek(0)
            copy_to_stdout(file)
    show_notes(table, quiet=options.quiet)


def copy_to_stdout(file: BinaryIO) -> None:
    """Copy a file to standard output; whoever reads it may have enough before the end."""
    try:
        sys.stdout.flush()
        shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere


def choose_threshold(model: Model, text: str) -> float:
    """Return the score at and below which a row is unknown, for a share of the rows of known classes.

    Raises:
        InputError: It is no share that the model can tell.
    """
    if UNKNOWN in map(str, model.classes):
        got, remedy = f"one with a class {UNKNOWN!r}", "Rename that class and fit it again."
        fail(PROG, "--unknown", "come with a model that has no class of that name", got, remedy)
    scores = model.metadata.get("scores")
    if not isinstance(scores, list) or not all(type(score) is float for score in scores):
        remedy = "Fit it again, to two samples or more of some classes."
        fail(PROG, "--unknown", "come with a model that was cross-validated", "one without held-out rows", remedy)
    try:
        rate = float(text)
    except ValueError:
        fail(PROG, "--unknown", "be a number between 0 and 1", repr(text), "Pass a number such as 0.05.")
    try:
        return find_threshold(torch.tensor(scores, dtype=torch.float64), rate)
    except InputError as error:
        raise InputError(str(error).replace("find_threshold: `rate`", f"{PROG}: `--unknown`")) from None


def number_rows(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield the blocks with the number of each row, from 0, as the first of the columns beside."""
    for block in blocks:
        yield block._replace(beside=(np.array(block.numbers), *block.beside))


def name_pictures(blocks: Iterable[Block], column: int) -> Iterator[Block]:
    """Yield the blocks with the paths of the pictures of a column as the last of the columns beside."""
    for block in blocks:
        yield block._replace(beside=(*block.beside, block.columns[column]))


def format_header(first: Sequence[str], model: Model, *, everything: bool) -> str:
    """Return the names of the columns as a line of CSV, of which ``first`` come before the class."""
    more = [f"P({name})" for name in model.classes] if everything else []
    return ",".join(map(quote, [*first, "class", "probability", *more])) + "\n"


def format_predictions(model: Model, table: Table, threshold: float | None, everything: bool, block: Block) -> str:
    """Return CSV: the class of each row and how likely it is.

    Args:
        model: What predicts.
        table: What the rows are of.
        threshold: Rows of no higher score than this are unknown, and have no probability; None if none are.
        everything: Add the probabilities of all classes, in the model's order.
        block: The rows.
    """
    names = list(map(quote, model.classes))
    logits = classify_block(PROG, model, table, block)
    probabilities = logits.softmax(dim=1)
    best, places = (each.tolist() for each in probabilities.max(dim=1))
    lines = [f"{names[place]},{share:.6g}" for place, share in zip(places, best, strict=True)]
    if threshold is not None:
        for row in (score_known(logits) <= threshold).nonzero().flatten().tolist():
            lines[row] = f"{UNKNOWN},"
    if everything:
        rows = ["".join(f",{share:.6g}" for share in row) for row in probabilities.tolist()]
        lines = list(map(str.__add__, lines, rows))
    for column in reversed(block.beside):
        lines = [f"{quote(name)},{line}" for name, line in zip(column.tolist(), lines, strict=True)]
    return "\n".join([*lines, ""])


def quote(name: object) -> str:
    """Return a name as a cell of CSV."""
    cell = io.StringIO()
    csv.writer(cell, lineterminator="").writerow([name])
    return cell.getvalue()
