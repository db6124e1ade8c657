"""Load the model of a command, read and encode a table, and process a table in blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from protonet._io import JsonDict, progress_bar
from protonet._text import plural, to_printable
from protonet.commands.options import FitOptions, LabelOptions, PageOptions, ReadOptions, SuggestOptions
from protonet.commands.rows import (
    TableRows,
    get_column_types,
    parse_column_types,
    warn_contradictory_labels,
    warn_similar_names,
)
from protonet.embeddings.loading import SelectedEncoders
from protonet.errors import install_command, raise_input_error
from protonet.fit.cross_validation import balanced_class_weights, held_out_indices
from protonet.fit.names import embed_class_names
from protonet.fit.solver import Solution
from protonet.pipeline import TablePipeline, TrainingTable
from protonet.tables import DEFAULT_LABEL_COLUMN
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.parsing import is_missing
from protonet.tables.delimited import MISSING_TEXTS, parse_missing_texts
from protonet.tables.drift import compute_column_statistics
from protonet.tables.features import describe_left_out_rows, encode_block, fit_features, split_uninformative_rows
from protonet.tables.table import COMMON_LABEL_NAMES, ReadSpec, RowBlock, Table, format_names, open_table, read_table

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
    return pipeline.with_loaded_encoders(options.representation, show_progress=not options.quiet, table=table)


def get_label_column(label: str | None, pipeline: TablePipeline | None) -> str:
    """Get the name of the label column: ``label`` if it is given, else the model's label column, else the default."""
    return label or (DEFAULT_LABEL_COLUMN if pipeline is None else pipeline.label_column)


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
    )


def read_labelled_rows(
    options: LabelOptions, table: Path, model: TablePipeline, extra: object = None, remedy: str = LABEL_COLUMN_REMEDY
) -> tuple[Table, RowBlock]:
    """Read a labelled table; return the table, with its notes, and all rows as a block. See `make_read_spec`."""
    spec = make_read_spec(options, model.new_row_spec, options.label, require_labels=True, extra=extra, remedy=remedy)
    return model.read_table(table, spec, options.labels_file)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedTable(TrainingTable):
    """The encoded training rows of ``fit``, with information about the table for messages and the report."""

    positions: Sequence[int]  #: The position of each row in its file, such as its line number.
    position_format: str  #: A format string for positions, such as "line {}".
    row_indices: Sequence[int]  #: The index of each row in the table, from 0; unlabelled rows are counted.
    row_ids: list[str] | None  #: The identifier of each row; None if the option ``--id`` names no column.
    group_names: list[str]  #: The names of the groups of rows, in ascending order; empty without groups.
    notes: list[str]  #: Notes and warnings for the user, one line each.
    missing_counts: list[int]  #: The number of missing cells of each feature column.
    cells: list[np.ndarray]  #: The cells of the feature columns, (n,) each; empty unless requested.
    unlabelled: Tensor | None  #: (m, dim) features of the unlabelled rows of the table; None if there are none.
    unlabelled_positions: Sequence[int]  #: The position of each unlabelled row in its file, such as its line number.
    has_group_columns: bool  #: Whether some columns seem to identify groups of related rows, such as patients.
    missing_texts: frozenset[str]  #: Texts, in lower case, that mean a missing label or cell, such as "n/a".

    @property
    def class_counts(self) -> list[int]:
        """The number of rows of each class."""
        return torch.bincount(self.y, minlength=len(self.classes)).tolist()

    def map_group_names(self, solution: Solution) -> dict[str, int]:
        """Map the name of each group of rows to its index in the groups of the fitted ``solution``."""
        indices = [] if solution.merged_groups is None else solution.merged_groups.tolist()
        return dict(zip(self.group_names, indices, strict=True))

    def held_out_positions(self, solution: Solution) -> Tensor:
        """Get the position (held_out,) int64 in the file of each held-out row of cross-validation.

        Equal rows are merged into one held-out row, which has the position of the first equal row.
        """
        held_out = held_out_indices(solution.training_set)
        indices, first = np.unique(held_out.numpy(), return_index=True)
        return torch.tensor(self.positions)[first[indices >= 0]]


@dataclass(frozen=True, kw_only=True, eq=False)
class TableToLabel:
    """The encoded rows of a table for active learning, which has rows without a label and perhaps labelled rows."""

    x: Tensor  #: (n, dim) features, float32 or float64.
    table: Table  #: The table that was read, with its notes.
    has_label: Tensor  #: (n,) bool, rows that already have a label and are not suggested.
    encoding: Encoding | None = None  #: Maps the columns to features; None if the columns are the features.
    columns: tuple[str, ...] | None = None  #: The names of the feature columns; None if they have no names.
    notes: tuple[str, ...] = ()  #: Notes for the user about the columns, one line each.
    positions: Sequence[int] = ()  #: The position of each row in its file, such as its line number.
    labels: Sequence[str] = ()  #: The label of each row, "" for an unlabelled row; empty without a label column.
    uninformative_mask: Tensor  #: (n,) bool, rows in which each cell is missing or unknown to the encoding.

    @property
    def unlabelled_indices(self) -> Tensor:
        """The indices (m,) int64 of the informative rows without a label."""
        return (~self.has_label & ~self.uninformative_mask).nonzero().flatten()


def encode_table(options: FitOptions, rows: TableRows, *, keep_cells: bool = False) -> EncodedTable:
    """Infer the column types of the table of ``fit``, and encode its rows as features.

    The result also holds the cells of the feature columns if ``keep_cells``, which only the report shows.
    """
    table, block = rows.table, rows.labelled_block
    keep = "--columns keeps it" if options.columns is None else None
    # Words shared between texts and class names are no evidence if no row has a label.
    selection = SelectedEncoders.from_names(options.representation, show_progress=not options.quiet)
    selection = selection._replace(use_word_features=not rows.is_fully_unlabelled)
    encoded = fit_features(
        table,
        block,
        rows.column_types,
        keep_hint=keep,
        groups=rows.groups,
        selection=selection,
        decimal=options.decimal_mark,
    )
    encoding, columns = encoded.encoding, encoded.columns
    extra = [name for name in (options.group, options.id) if name is not None]
    features = torch.from_numpy(np.ascontiguousarray(encoded.x))
    labels = torch.from_numpy(rows.labels)
    unlabelled, unlabelled_positions, left_out = None, list[int](), list[int]()
    if rows.unlabelled_block is not None:
        used = rows.unlabelled_block._replace(columns=_select_column_cells(table, rows.unlabelled_block, columns))
        used, left_out = split_uninformative_rows(used, encoding)
        if used.positions:
            x = encode_block(replace(table, columns=columns), used, encoding)
            unlabelled, unlabelled_positions = torch.from_numpy(np.ascontiguousarray(x)), list(used.positions)
    elif rows.is_fully_unlabelled:
        unlabelled, unlabelled_positions, features = features, list(block.positions), features[:0]
    names = embed_class_names(encoding, rows.classes, features, labels, rows.descriptions)
    if rows.is_fully_unlabelled and names is None:
        raise_missing_labels(encoding, rows.classes)
    known = {*rows.labels.tolist(), *(() if names is None else names.labels.tolist())}
    lost = [str(name) for label, name in enumerate(rows.classes) if label not in known]
    notes = [*table.notes, *encoded.notes, *warn_similar_names(rows.classes)]
    notes += describe_left_out_rows(left_out, table.position_format)
    if lost:
        notes.append(f"warning: never predicted, without rows or informative names: {format_names(lost)}")
    uninformative_counts, empty = np.zeros(len(rows.classes), np.int64), np.zeros(len(labels), bool)
    ids = None if options.id is None else block.extra_columns[extra.index(options.id)].astype(str).tolist()
    cells = _select_column_cells(table, block, columns)
    labelled = [column[: len(labels)] for column in cells]
    if encoding is not None and len(labels):
        empty = encoding.is_uninformative(labelled)
        uninformative_counts = np.bincount(rows.labels[empty], minlength=len(rows.classes))
        if empty.any():
            notes.append(f"warning: {plural(int(empty.sum()), 'row')} without information: all cells are missing")
    positions = block.positions[: len(labels)]
    informative = np.flatnonzero(~empty).tolist()
    given = [rows.classes[rows.labels[row]] for row in informative]
    locations = [table.position_format.format(positions[row]) for row in informative]
    notes += warn_contradictory_labels(features.numpy()[informative], given, locations)
    missing_texts = None if options.missing_values is None else options.missing_values.split(",")
    dropped = [*extra, *options.drop, *table.unused_columns, *encoded.dropped_columns]
    counts = np.bincount(rows.labels, minlength=len(rows.classes)).tolist()
    metadata: JsonDict = {"label": options.label or "label", "effort": options.effort, "seed": options.seed}
    metadata |= {"samples": counts, "group": options.group, "id": options.id, "left_out": dropped}
    metadata |= {"position_format": table.position_format}
    metadata |= {"time_limit": options.time_limit, "balanced": options.balanced or None}
    metadata |= {"seen": compute_column_statistics(cells, encoding, counts)}
    metadata |= {"uninformative": uninformative_counts.tolist()} if uninformative_counts.any() else {}
    metadata |= {} if missing_texts is None else {"missing_values": missing_texts}
    metadata |= {} if names is None else {"named": names.to_dict(rows.classes)}
    return EncodedTable(
        x=features,
        y=labels,
        classes=rows.classes,
        columns=columns,
        encoding=encoding,
        weights=balanced_class_weights(labels) if options.balanced else None,
        groups=None if rows.groups is None else torch.from_numpy(rows.groups),
        class_name_rows=names,
        metadata=metadata,
        positions=positions,
        position_format=table.position_format,
        row_indices=block.row_indices[: len(labels)],
        row_ids=ids,
        group_names=rows.group_names.tolist(),
        notes=notes,
        missing_counts=[int(is_missing(column).sum()) for column in labelled],
        cells=cells if keep_cells else [],
        unlabelled=unlabelled,
        unlabelled_positions=unlabelled_positions,
        has_group_columns=bool(encoded.group_columns),
        missing_texts=MISSING_TEXTS if missing_texts is None else parse_missing_texts(missing_texts),
    )


def raise_missing_labels(encoding: Encoding | None, classes: Sequence[str | int]) -> NoReturn:
    """Raise an InputError that says why ``fit`` cannot use a table without labels.

    Without labels, a classifier can only compare texts to class names. The message says which of both is missing.
    """
    columns = () if encoding is None else encoding.columns
    texts = [column for column in columns if column.modality == "text"]
    if any(column.encoder_record is not None for column in texts):
        got = format_names(list(map(str, classes)))
        remedy = "Add a column description, or label rows."
        raise_input_error("classes", "name or describe classes in words", got, remedy)
    if texts:
        remedy = f"Run {install_command('text')}, pass --representation, or label some rows."
        raise_input_error("table", "have labels, or texts and a pretrained encoder", "texts alone", remedy)
    raise_input_error("table", "have labels, or texts", "neither", "Label some rows.")


def read_table_to_label(
    options: SuggestOptions | PageOptions, model: TablePipeline | None, label: str, *, allow_labelled: bool = False
) -> TableToLabel:
    """Read the table of ``suggest`` or ``page``, and encode its rows as features.

    A model determines which columns are read and how they are encoded. Without a model, column types are inferred,
    unless the options of ``page`` set them. The table need not have the column ``label``; if all rows have a label,
    the function raises an InputError unless ``allow_labelled``.
    """
    path, page = options.table, options if isinstance(options, PageOptions) else None
    notes = list[str]()
    if model is None:
        dropped, group = ((), None) if page is None else (tuple(page.drop), page.group)
        spec = ReadSpec(label_column=label, ignored_columns=dropped, allow_unlabelled=True, are_columns_from_user=True)
        extra = {} if group is None else {group: "group"}
        table, block = read_table(path, replace(make_read_spec(options, spec), extra_columns=extra))
        labels, positions = block.labels, list(block.positions)
        # One class for all: no column is then dropped as a copy of the label.
        block = block._replace(labels=np.zeros(len(block.positions), np.int64))
        types = get_column_types(path, parse_column_types(() if page is None else page.column_type))
        selection = SelectedEncoders.from_names(options.representation, show_progress=not options.quiet)
        features = fit_features(table, block, types, keep_hint="", selection=selection, decimal=options.decimal_mark)
        x, encoding, columns, column_notes = features.x, features.encoding, features.columns, features.notes
        uninformative_mask = np.zeros(len(x), bool)
        if encoding is not None:
            uninformative_mask = encoding.is_uninformative(_select_column_cells(table, block, columns))
        if uninformative_mask.any():
            notes.append(f"{plural(int(uninformative_mask.sum()), 'row')} without information: all cells are missing")
        likely = [name for name in table.columns or () if name.lower() in COMMON_LABEL_NAMES and not len(labels)]
        if likely:
            notes.append(f"no column {label}; if {format_names(likely)} holds the labels, pass it with --label")
    else:
        encoding, columns, column_notes = model.encoding, model.columns, ()
        spec = replace(make_read_spec(options, model.new_row_spec, label), allow_unlabelled=True)
        table = model.open_table(path, spec)
        positions, parts = list[int](), []
        for block in table.blocks:
            positions += block.positions
            assert block.uninformative_mask is not None  # open_table marks them
            parts.append((model.encode(table, block), block.labels, block.uninformative_mask))
        x, labels, uninformative_mask = map(np.concatenate, zip(*parts, strict=True))
    known = labels != "" if len(labels) else np.zeros(len(x), bool)
    if (known | uninformative_mask).all() and not allow_labelled:
        reason = f"a label in {to_printable(label)}{'' if known.all() else ' or no information'}"
        got = f"{reason} in each of {plural(len(x), 'row')}"
        raise_input_error("table", "have unlabelled rows", got, "Add rows whose label is empty.")
    if known.any() and not allow_labelled:
        rows = plural(int(known.sum()), "row")
        notes.append(f"{rows} already labelled in {to_printable(label)}: not suggested")
    table.notes.extend(notes)
    return TableToLabel(
        x=torch.from_numpy(np.ascontiguousarray(x)),
        table=table,
        has_label=torch.from_numpy(known),
        encoding=encoding,
        columns=columns,
        notes=column_notes,
        positions=positions,
        labels=list(map(str, labels)),
        uninformative_mask=torch.from_numpy(uninformative_mask),
    )


def _select_column_cells(table: Table, block: RowBlock, columns: Sequence[str] | None) -> list[np.ndarray]:
    """Select the cells (n,) of each named column from a block that has all columns of the table."""
    if columns is None or table.columns is None:
        return list(block.columns)
    used, pairs = set(columns), zip(table.columns, block.columns, strict=True)
    return [cells for name, cells in pairs if name in used]


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
