"""``protonet predict``: predict the class of each row of a table, with its probability."""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._io import remove_temporary_files, write_atomically
from protonet._text import escape_formula
from protonet.commands import folder
from protonet.commands.arguments import check_single_table_options
from protonet.commands.data import check_picture_table, make_read_spec, map_blocks
from protonet.commands.options import PredictOptions, ReadOptions, show_notes
from protonet.embeddings.encoder import hash_file
from protonet.embeddings.pictures.reading import contains_pictures, is_picture_path
from protonet.errors import InputError, raise_input_error
from protonet.metrics import rejection_threshold, score_known_class
from protonet.pipeline import TablePipeline
from protonet.tables.formats import PICTURE_COLUMN, open_table_source
from protonet.tables.table import RowBlock, Table
from protonet.ui.command_line import check_output_path
from protonet.ui.text import format_csv

#: The class name that rejected rows have in the output.
UNKNOWN_CLASS_NAME = "unknown"
#: The name of the output column of row numbers.
ROW_NUMBER_COLUMN = "row"


class PredictionOutputSpec(NamedTuple):
    """The columns of the CSV output of ``predict``, and the score below which rows are rejected."""

    rejection_threshold: float | None  #: Rows with at most this score get the class "unknown"; None to reject no row.
    has_all_probabilities: bool  #: Whether the last columns are the probabilities of all classes.
    has_row_numbers: bool  #: Whether the first column is the line number of each row, or its number in a spreadsheet.
    has_picture_paths: bool = False  #: Whether a column has the path of the picture of each row.
    keep_columns: bool = False  #: Whether all columns of the table are copied to the output.


def run(options: PredictOptions) -> None:
    """Run ``predict``: classify the rows of a table, or of the files of a folder, and write the predictions as CSV.

    An output file is written completely or not at all.
    """
    model = TablePipeline.load(options.model, argument="model")
    if options.table.is_dir():
        pictures, model_has_pictures = contains_pictures(options.table), model.has_pictures
        if model_has_pictures and pictures is False:
            raise_input_error("table", "have pictures, as in fit", f"the tables of {options.table}", "")
        if not model_has_pictures and not pictures:
            predict_folder(model, options)
            return
        check_single_table_options(options)
    check_picture_table(model, options.table)
    model = model.with_loaded_encoders(options.representation, show_progress=not options.quiet)
    spec = make_output_spec(model, options)
    named = spec.keep_columns or model.metadata.id_column is not None
    spec = spec._replace(has_picture_paths=not named and is_picture_path(options.table))
    table = open_table(model, spec, options, options.table)
    function, sequential = partial(format_prediction_rows, model, spec), model.has_pretrained_encoder

    def write(file: BinaryIO) -> None:
        file.write(format_csv_header(model, spec, table.extra_columns).encode())
        for text in map_blocks(function, table.blocks, n_rows=table.n_rows, quiet=options.quiet, sequential=sequential):
            file.write(text.encode())

    if options.output is not None:
        write_atomically(options.output, write)
    else:
        with tempfile.TemporaryFile() as file:  # an error in the last row must precede all output
            write(file)
            file.seek(0)
            sys.stdout.flush()
            shutil.copyfileobj(file, sys.stdout.buffer)
    show_notes(table.all_notes, quiet=options.quiet)


def predict_folder(model: TablePipeline, options: PredictOptions) -> None:
    """Classify the rows of all Parquet files of a folder, and write a file of predictions for each.

    Files whose predictions an earlier run wrote are skipped.
    """
    workers = count_usable_cores() if options.workers is None else options.workers
    if options.sheet is not None:
        raise_input_error("sheet", "come with a workbook or a database", options.table, "Leave it out.")
    if options.output is None:
        raise_input_error("output", "name a folder", "none", "Pass -o FOLDER, for one output per file.")
    path = options.model.resolve()
    spec, digest = make_output_spec(model, options), hash_file(path)
    output = check_output_path("output", options.output, folder=True)
    tasks = folder.list_file_tasks(options.table, output)
    folder.check_or_record_settings(output, {"model": digest, **spec._asdict()})
    names = None if options.representation is None else tuple(options.representation)
    model.with_loaded_encoders(names, show_progress=False)  # fails before the processes start
    work = partial(predict_file, str(path), digest, names, spec)
    try:
        notes = folder.run_file_tasks(work, tasks, workers=workers, quiet=options.quiet)
    finally:
        remove_temporary_files(output)  # removes incomplete files of killed processes
    show_notes(notes, quiet=options.quiet)


def predict_file(
    model_path: str,
    model_hash: str,
    encoder_names: tuple[str, ...] | None,
    spec: PredictionOutputSpec,
    task: folder.FileTask,
    count_rows: folder.CountFinishedRows,
) -> list[str]:
    """Classify the rows of one Parquet file of a folder by one thread, write its output, and return notes for the user.

    The model file must have the SHA-256 ``model_hash``; ``encoder_names`` are the encoders that the user named, None
    for those of ``fit``.
    """
    torch.set_num_threads(1)
    model = load_cached_model(model_path, model_hash, encoder_names)
    notes: list[str] = []

    def write(file: BinaryIO) -> None:
        if not task.n_rows:
            columns = open_table_source(task.parquet_path).header if spec.keep_columns else [model.metadata.id_column]
            file.write(format_csv_header(model, spec, [str(name) for name in columns or () if name]).encode())
        else:
            table = open_table(model, spec, ReadOptions(), task.parquet_path)
            file.write(format_csv_header(model, spec, table.extra_columns).encode())
            for block in table.blocks:
                file.write(format_prediction_rows(model, spec, block).encode())
                count_rows(len(block.positions))
            notes.extend(table.all_notes)

    try:
        write_atomically(task.output_path, write)
    except InputError as error:
        raise folder.add_file_name_to_error(error, task) from None
    return notes


@lru_cache(maxsize=1)
def load_cached_model(path: str, model_hash: str, encoder_names: tuple[str, ...] | None) -> TablePipeline:
    """Load a model with its pretrained encoders once per process; raise an InputError if its SHA-256 differs."""
    model = TablePipeline.load(path, argument="model").with_loaded_encoders(encoder_names, show_progress=False)
    if hash_file(Path(path)) != model_hash:
        raise_input_error("model", "remain unchanged", path, "Do not replace it until the folder is finished.")
    return model


def count_usable_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_output_spec(model: TablePipeline, options: PredictOptions) -> PredictionOutputSpec:
    """Create the specification of the output of ``predict`` from its options and the model."""
    threshold = None if options.unknown is None else choose_rejection_threshold(model, options.unknown)
    return PredictionOutputSpec(threshold, options.proba, options.row_numbers, keep_columns=options.keep_columns)


def open_table(model: TablePipeline, spec: PredictionOutputSpec, options: ReadOptions, path: Path) -> Table:
    """Open a table for prediction, with the columns that ``predict`` copies to its output as extra columns."""
    new_row_spec = make_read_spec(options, model.new_row_spec, extra=model.metadata.id_column)
    return model.open_table(path, replace(new_row_spec, are_all_columns_extra=spec.keep_columns))


def choose_rejection_threshold(model: TablePipeline, false_rejection_rate: float) -> float:
    """Choose the score at and below which rows are rejected, for a false-rejection rate of rows of known classes."""
    if UNKNOWN_CLASS_NAME in map(str, model.classes):
        got, remedy = f"one with a class {UNKNOWN_CLASS_NAME!r}", "Rename that class and fit it again."
        raise_input_error("unknown", f"come with a model without a class {UNKNOWN_CLASS_NAME!r}", got, remedy)
    scores = model.metadata.known_scores
    if not scores:
        must, remedy = "come with a model that was cross-validated", "Run protonet fit on two or more rows per class."
        raise_input_error("unknown", must, "one without held-out rows", remedy)
    return rejection_threshold(torch.tensor(scores, dtype=torch.float64), false_rejection_rate)


def format_csv_header(model: TablePipeline, spec: PredictionOutputSpec, extra: Sequence[str]) -> str:
    """Format the CSV header of the predictions; ``extra`` names the columns that are copied from the table.

    A column of predictions that would have the name of a copied column gets a suffix.
    """
    first = [*extra, *[PICTURE_COLUMN] * spec.has_picture_paths]
    names = [ROW_NUMBER_COLUMN] * spec.has_row_numbers + ["class", "probability"]
    names += [f"P({name})" for name in model.classes] if spec.has_all_probabilities else []
    used = set(first)
    for index, name in enumerate(names):
        suffixed = (f"{name} (predicted{f' {repetition}' if repetition > 1 else ''})" for repetition in count(1))
        names[index] = next(candidate for candidate in chain([name], suffixed) if candidate not in used)
        used.add(names[index])
    return format_csv([[*names[: spec.has_row_numbers], *first, *names[spec.has_row_numbers :]]])


def format_predicted_classes(classes: Sequence[str], logits: Tensor, threshold: float | None) -> list[tuple[str, str]]:
    """Convert logits (n, num_classes) to the predicted class and its probability, as texts, for each row.

    A row whose score is at most the threshold gets ("unknown", ""); None rejects no row.
    """
    probabilities, labels = (values.tolist() for values in logits.softmax(dim=1).max(dim=1))
    rows = [(classes[label], f"{p:.6g}") for label, p in zip(labels, probabilities, strict=True)]
    if threshold is not None:
        for row in (score_known_class(logits) <= threshold).nonzero().flatten().tolist():
            rows[row] = (UNKNOWN_CLASS_NAME, "")
    return rows


def format_prediction_rows(model: TablePipeline, spec: PredictionOutputSpec, block: RowBlock) -> str:
    """Classify the rows of a block, and format their predictions and copied cells as lines of CSV."""
    names = [escape_formula(str(name)) for name in model.classes]
    logits = model.predict_logits(model.encode(block, keep_gaps=True), block.uninformative_mask)
    lines = [list(pair) for pair in format_predicted_classes(names, logits, spec.rejection_threshold)]
    if spec.has_all_probabilities:
        for line, row in zip(lines, logits.softmax(dim=1).tolist(), strict=True):
            line += [f"{probability:.6g}" for probability in row]
    columns = [np.array(block.positions)] * spec.has_row_numbers + [*block.extra_columns]
    if spec.has_picture_paths:
        columns.append(block.columns[(model.columns or ()).index(PICTURE_COLUMN)])
    extra = [[escape_formula(str(cell)) for cell in column.tolist()] for column in columns]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*cells, *line] for *cells, line in zip(*extra, lines, strict=True))
    return text.getvalue()
