"""``protonet predict``: the class of each row of a table, and how likely it is."""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._text import escape_formula
from protonet._writing import clear_folder, write_whole
from protonet.commands.arguments import check_single_table
from protonet.commands.folder import Part, Tick, claim_folder, list_parts, name_file, run_parts
from protonet.commands.models import (
    attach,
    classify_block,
    has_pictures,
    is_read,
    list_notes,
    map_blocks,
    open_model,
    open_rows,
    read_model,
    show_notes,
    want,
)
from protonet.embeddings.pictures.reading import are_pictures, hold_pictures
from protonet.embeddings.representation import hash_file
from protonet.errors import InputError, raise_input_error, renamed_arguments
from protonet.files import Model
from protonet.metrics import find_threshold, score_known
from protonet.tables.formats import PICTURE_COLUMN, open_source
from protonet.tables.table import RowBlock, Table
from protonet.ui.command_line import check_writable_folder, parse_whole
from protonet.ui.text import format_csv

PROG = "protonet predict"
#: What a row that is unlike every class is called.
UNKNOWN = "unknown"
#: The column of the rows' numbers.
ROW = "row"


class Asked(NamedTuple):
    """What is wanted of a model."""

    threshold: float | None  #: Rows of no higher score than this are unknown, and have no probability; None if none.
    everything: bool  #: Add the probabilities of all classes, in the model's order.
    numbered: bool  #: Begin with the number of each row, from 0.
    pictured: bool = False  #: Name each row's picture, before its class.
    inputs: bool = False  #: Repeat all columns of the table, before its class.


def run(options: argparse.Namespace) -> None:
    """Classify a table block by block, and write all of it or nothing; of a folder, each file so.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        OSError: The predictions cannot be written.
        InputError: Arguments, a model or a table that do not fit.
    """
    if Path(options.table).is_dir():
        model = read_model(options.model)
        held, pictured = hold_pictures(Path(options.table)), has_pictures(model)
        if pictured and held is False:
            raise_input_error(
                "table", "hold pictures, as the model was fitted to", f"the tables of {options.table}", ""
            )
        if not pictured and not held:
            predict_folder(model, options)
            return
        check_single_table(options)
    model = open_model(options)
    asked = ask(model, options)
    named = asked.inputs or model.metadata.get("id") is not None
    asked = asked._replace(pictured=not named and are_pictures(Path(options.table)))
    table, blocks = open_blocks(model, asked, options)
    work = partial(format_predictions, model, table, asked)

    def write(file: BinaryIO) -> None:
        file.write(format_header(model, asked, table.extra_columns).encode())
        for text in map_blocks(work, blocks, rows=table.n_rows, quiet=options.quiet, alone=is_read(model)):
            file.write(text.encode())

    if "output" in options.outputs:
        write_whole(options.outputs["output"], write)
    else:
        with tempfile.TemporaryFile() as file:  # a fault in the last row must not come after the others are printed
            write(file)
            file.seek(0)
            copy_to_stdout(file)
    show_notes(table, quiet=options.quiet)


def predict_folder(model: Model, options: argparse.Namespace) -> None:
    """Classify the rows of the files of a folder; what was finished before is left as it is.

    Raises:
        MissingPackageError: As in `run`.
        InputError: As in `run`, `list_parts`, `claim_folder` and `run_parts`.
    """
    workers = count_cores() if options.workers is None else parse_workers(options.workers)
    if options.sheet is not None:
        raise_input_error("--sheet", "come with an Excel workbook", options.table, "Leave it out.")
    if options.output is None:
        raise_input_error("--output", "name a folder", "none", "Pass -o FOLDER: every file there gets one of its name.")
    path = Path(options.model).resolve()
    asked, digest = ask(model, options), hash_file(path)
    output = check_writable_folder("--output", options.output)
    parts = list_parts(Path(options.table), output)
    claim_folder(output, {"model": digest, **asked._asdict()})
    names = None if options.representation is None else tuple(options.representation)
    attach(model, names, shown=False)  # before the work, in all processes
    work = partial(predict_part, str(path), digest, names, asked)
    try:
        notes = run_parts(work, parts, workers=workers, quiet=options.quiet)
    finally:
        clear_folder(output)  # of what those had in work that were killed
    for note in notes * (not options.quiet):
        print(f"note: {note}", file=sys.stderr)


def predict_part(
    path: str, digest: str, names: tuple[str, ...] | None, asked: Asked, part: Part, tick: Tick
) -> list[str]:
    """Classify one file of a folder on one thread, as `run` does; return what a person should be told.

    Args:
        path: Of the model.
        digest: What the file must hold.
        names: What reads its texts and pictures, as a person types it, or None.
        asked: What is wanted of it.
        part: The file.
        tick: Told how many rows are done further.
    """
    torch.set_num_threads(1)
    model = load_once(path, digest, names)
    notes: list[str] = []

    def write(file: BinaryIO) -> None:
        if not part.rows:
            own = open_source(part.table).header if asked.inputs else [model.metadata.get("id")]
            file.write(format_header(model, asked, [str(name) for name in own or () if name]).encode())
        else:
            options = argparse.Namespace(table=str(part.table), skip_broken=False, sheet=None)
            table, blocks = open_blocks(model, asked, options)
            file.write(format_header(model, asked, table.extra_columns).encode())
            for block in blocks:
                file.write(format_predictions(model, table, asked, block).encode())
                tick(len(block.positions))
            notes.extend(list_notes(table))

    try:
        write_whole(part.output, write)
    except InputError as error:
        raise name_file(error, part) from None
    return notes


@lru_cache(maxsize=1)
def load_once(path: str, digest: str, names: tuple[str, ...] | None) -> Model:
    """Return a model that is read once per process; raise an InputError where its file holds another one by now."""
    model = attach(read_model(path), names, shown=False)
    if hash_file(Path(path)) != digest:
        raise_input_error("model", "stay as it was", path, "Leave it alone until the folder is done.")
    return model


def parse_workers(text: str) -> int | str:
    """Return a number of processes, or the address of a Dask scheduler, which has a colon."""
    return text if ":" in text else parse_whole("--workers", text, low=1)


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ask(model: Model, options: argparse.Namespace) -> Asked:
    """Return what the options want of a model."""
    threshold = None if options.unknown is None else choose_threshold(model, options.unknown)
    return Asked(threshold, options.proba, options.row_numbers, inputs=options.keep_columns)


def open_blocks(model: Model, asked: Asked, options: argparse.Namespace) -> tuple[Table, Iterable[RowBlock]]:
    """Open the table that the options name; return it, and its rows with what comes before their classes."""
    wanted = want(model, None, labelled=False, beside=model.metadata.get("id"))._replace(all_extra=asked.inputs)
    table = open_rows(options, model, wanted)
    blocks: Iterable[RowBlock] = number_rows(table.blocks) if asked.numbered else table.blocks
    return table, name_pictures(blocks, (model.columns or ()).index(PICTURE_COLUMN)) if asked.pictured else blocks


def copy_to_stdout(file: BinaryIO) -> None:
    """Copy a file to standard output; whoever reads it may have enough before the end."""
    try:
        sys.stdout.flush()
        shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere


def choose_threshold(model: Model, rate: float) -> float:
    """Return the score at and below which a row is unknown, for a share of the rows of known classes.

    Raises:
        InputError: It is no share that the model can tell.
    """
    if UNKNOWN in map(str, model.classes):
        got, remedy = f"one with a class {UNKNOWN!r}", "Rename that class and fit it again."
        raise_input_error("--unknown", "come with a model that has no class of that name", got, remedy)
    scores = model.metadata.get("scores")
    if not isinstance(scores, list) or not all(type(score) is float for score in scores):
        remedy = "Fit it again, to two samples or more of some classes."
        raise_input_error(
            "--unknown", "come with a model that was cross-validated", "one without held-out rows", remedy
        )
    with renamed_arguments(rate="--unknown"):
        return find_threshold(torch.tensor(scores, dtype=torch.float64), rate)


def number_rows(blocks: Iterable[RowBlock]) -> Iterator[RowBlock]:
    """Yield the blocks with the number of each row, from 0, as the first of the columns beside."""
    for block in blocks:
        yield block._replace(extra_columns=(np.array(block.indices), *block.extra_columns))


def name_pictures(blocks: Iterable[RowBlock], column: int) -> Iterator[RowBlock]:
    """Yield the blocks with the paths of the pictures of a column as the last of the columns beside."""
    for block in blocks:
        yield block._replace(extra_columns=(*block.extra_columns, block.columns[column]))


def format_header(model: Model, asked: Asked, beside: Sequence[str]) -> str:
    """Return the names of the columns as a line of CSV, given those of the table that come first."""
    first = [*beside, *[PICTURE_COLUMN] * asked.pictured]
    own = [ROW] * asked.numbered + ["class", "probability"]
    own += [f"P({name})" for name in model.classes] if asked.everything else []
    taken = set(first)
    for at, name in enumerate(own):
        others = (f"{name} (predicted{f' {number}' if number > 1 else ''})" for number in count(1))
        own[at] = next(each for each in chain([name], others) if each not in taken)
        taken.add(own[at])
    return format_csv([[*own[: asked.numbered], *first, *own[asked.numbered :]]])


def name_classes(names: Sequence[str], logits: Tensor, threshold: float | None) -> list[tuple[str, str]]:
    """Return the class of each row of logits (n, num_classes), and how likely it is, "" for an unknown one."""
    best, places = (each.tolist() for each in logits.softmax(dim=1).max(dim=1))
    found = [(names[place], f"{share:.6g}") for place, share in zip(places, best, strict=True)]
    if threshold is not None:
        for row in (score_known(logits) <= threshold).nonzero().flatten().tolist():
            found[row] = (UNKNOWN, "")
    return found


def format_predictions(model: Model, table: Table, asked: Asked, block: RowBlock) -> str:
    """Return CSV: the class of each row of a table's block and how likely it is."""
    names = [escape_formula(str(name)) for name in model.classes]
    logits = classify_block(model, table, block)
    lines = [[name, share] for name, share in name_classes(names, logits, asked.threshold)]
    if asked.everything:
        for line, row in zip(lines, logits.softmax(dim=1).tolist(), strict=True):
            line += [f"{share:.6g}" for share in row]
    beside = [[escape_formula(str(cell)) for cell in column.tolist()] for column in block.extra_columns]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [*cells, *line] for *cells, line in zip(*beside, lines, strict=True)
    )
    return text.getvalue()
