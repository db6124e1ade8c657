"""Load the model of a command, read a table for it by the options, and process a table in blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from protonet._io import progress_bar
from protonet.commands.options import LabelOptions, PageOptions, ReadOptions, SuggestOptions
from protonet.commands.rows import parse_column_types
from protonet.embeddings.pictures.reading import is_picture_path
from protonet.errors import raise_input_error
from protonet.pipeline import TablePipeline
from protonet.tables import DEFAULT_LABEL_COLUMN
from protonet.tables.table import ReadSpec, RowBlock, open_table
from protonet.tables.training import TrainingTable, describe_uninformative_rows

#: Maximum number of blocks of rows that are processed at the same time, each by one thread.
MAX_BLOCK_THREADS = 8
#: What to do if a table lacks the label column of a model, for the error message.
LABEL_COLUMN_REMEDY = "Pass the name of another column as --label."

Result = TypeVar("Result")


def load_pipeline(options: ReadOptions, model: Path, table: Path | None, *, for_update: bool = False) -> TablePipeline:
    """Load the model of a command and, if a table is read, the pretrained encoders of its text and picture columns.

    With ``for_update``, the cross-validation networks and the held-out rows are loaded as well.
    """
    pipeline = TablePipeline.load(model, for_update=for_update, argument="model")
    if table is None:
        return pipeline
    check_picture_table(pipeline, table)
    return pipeline.with_loaded_encoders(options.representation, show_progress=not options.quiet)


def check_picture_table(model: TablePipeline, table: Path) -> None:
    """Raise an InputError if only one of the table and the model has pictures."""
    if not model.has_pictures and is_picture_path(table):
        got, remedy = f"the pictures {table}", "Pass a table, or train on pictures."
        raise_input_error("table", "be a table, as in fit", got, remedy)
    if model.has_pictures and table.suffix.lower() in {".npy", ".npz"}:
        remedy = "Pass a folder of them, or a table with their paths in that column."
        raise_input_error("table", "have pictures, as in fit", table, remedy)


def get_label_column(label: str | None, pipeline: TablePipeline | None) -> str:
    """Get the name of the label column: ``label`` if it is given, else the model's label column, else the default."""
    return label or (DEFAULT_LABEL_COLUMN if pipeline is None else pipeline.metadata.label_column)


def make_read_spec(
    options: ReadOptions,
    base_spec: ReadSpec,
    label: str | None = None,
    *,
    require_labels: bool = False,
    extra: object = None,
    remedy: str = LABEL_COLUMN_REMEDY,
) -> ReadSpec:
    """Copy a specification for reading a table, with the options of a command.

    Args:
        options: The options, such as the sheet of a workbook.
        base_spec: The specification to be copied.
        label: The name of the label column; None to keep that of ``base_spec``.
        require_labels: Whether the table must have labels.
        extra: The name of an additional column to read, such as the group column; None for no such column.
        remedy: What to do if the table lacks the label column of ``base_spec``, for the error message.
    """
    return replace(
        base_spec,
        label_column=label or base_spec.label_column,
        require_labels=require_labels,
        missing_label_remedy="" if label else remedy,
        extra_columns={} if extra is None else {str(extra): "path"},
        skip_broken=options.skip_broken,
        sheet=options.sheet,
        decimal_mark=options.decimal_mark,
        no_header=options.no_header,
        encoding=options.encoding,
    )


def read_labelled_rows(
    options: LabelOptions, table: Path, model: TablePipeline, extra: object = None, remedy: str = LABEL_COLUMN_REMEDY
) -> TrainingTable:
    """Read and encode the rows of a labelled table for a model. See `make_read_spec`."""
    spec = make_read_spec(options, model.new_row_spec, options.label, require_labels=True, extra=extra, remedy=remedy)
    return model.read_table(table, spec, options.labels_file)


def read_table_to_label(
    options: SuggestOptions | PageOptions, model: TablePipeline | None, label: str
) -> TrainingTable:
    """Read the table of ``suggest`` or ``page``, which need not have the column ``label``, and encode its rows.

    A model determines which columns are read and how they are encoded. Without a model, column types are inferred,
    unless the options of ``page`` set them.
    """
    if model is not None:
        spec = make_read_spec(options, model.new_row_spec, label)
        rows = model.read_table(options.table, replace(spec, allow_unlabelled=True))
        rows.notes.extend(describe_uninformative_rows(rows.uninformative_mask.numpy()))
        return rows
    spec = make_read_spec(options, ReadSpec(label_column=label))
    if isinstance(options, PageOptions):
        spec = replace(
            spec,
            ignored_columns=tuple(options.drop),
            extra_columns={} if options.group is None else {options.group: "group"},
            column_types=parse_column_types(options.column_type),
        )
    return TrainingTable.from_file_to_label(
        options.table, spec, encoders=options.representation, show_progress=not options.quiet
    )


def read_cells(
    options: ReadOptions, path: Path, model: TablePipeline | None, label: str, row_indices: Sequence[int] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Read the original texts of the cells of a table, without the label column, to show or write rows.

    ``row_indices`` count from 0; None for all rows. Returns the column names, and a list of cells for each row.
    """
    spec = ReadSpec(label_column=label) if model is None else model.new_row_spec
    table = open_table(path, replace(make_read_spec(options, spec, label), are_all_columns_extra=True))
    names = {name: index for index, name in enumerate(table.extra_columns) if name != label}
    cells: dict[int, list[str]] = {}
    first = 0
    for block in table.blocks:
        n = len(block.positions)
        selected = range(n) if row_indices is None else [row - first for row in row_indices if 0 <= row - first < n]
        indices = np.array(selected, int)
        columns = [block.extra_columns[index][indices].tolist() for index in names.values()]
        cells.update(zip((first + indices).tolist(), map(list, zip(*columns, strict=True)), strict=True))
        first += n
    return list(names), [cells[row] for row in (cells if row_indices is None else row_indices)]


def map_blocks(
    function: Callable[[RowBlock], Result],
    blocks: Iterable[RowBlock],
    *,
    n_rows: int | None = None,
    quiet: bool = False,
    sequential: bool = False,
) -> Iterator[Result]:
    """Apply a function to each block of rows of a table, and yield the results in the order of the blocks.

    Several blocks are processed at the same time, each by one thread. If threads shared a block, they would wait for
    each other at every small matrix. On a busy machine that takes five times as long. A function that uses all cores
    itself is called for one block after the other (``sequential``). ``n_rows`` is the total for the progress bar.
    """
    if sequential:
        yield from map(function, blocks)
        return
    threads = torch.get_num_threads()
    ahead = min(threads, MAX_BLOCK_THREADS)
    torch.set_num_threads(1)
    try:
        bar = progress_bar(total=n_rows, unit="row", unit_scale=True, leave=False, shown=not quiet)
        with bar, ThreadPoolExecutor(ahead) as pool:
            waiting: deque[Future[Result]] = deque()
            for block in blocks:
                waiting.append(pool.submit(function, block))
                bar.update(len(block.positions))
                if len(waiting) > 2 * ahead:  # bounds the memory of a long table
                    yield waiting.popleft().result()
            for result in waiting:
                yield result.result()
    finally:
        torch.set_num_threads(threads)
