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

from protonet._io import progress_bar
from protonet._text import plural, to_printable
from protonet.commands.options import FitOptions, LabelOptions, PageOptions, ReadOptions, SuggestOptions
from protonet.commands.rows import TableRows, get_column_types, parse_column_types, warn_contradictory_labels
from protonet.embeddings.loading import SelectedEncoders
from protonet.errors import install_command, raise_input_error
from protonet.files.metadata import TrainingMetadata
from protonet.fit.cross_validation import balanced_class_weights, held_out_indices
from protonet.fit.names import describe_class_names, embed_class_names
from protonet.fit.solver import Solution
from protonet.fit.training_set import ClassNameRows
from protonet.pipeline import TablePipeline, TrainingTable
from protonet.tables import DEFAULT_LABEL_COLUMN
from protonet.tables.columns.encoding import Encoding, make_encoding
from protonet.tables.columns.parsing import is_missing
from protonet.tables.columns.picture import Picture
from protonet.tables.delimited import MISSING_TEXTS, parse_missing_texts
from protonet.tables.drift import compute_column_statistics
from protonet.tables.features import (
    TableFeatures,
    describe_left_out_rows,
    describe_uninformative_rows,
    encode_block,
    fit_features,
    split_uninformative_rows,
)
from protonet.tables.spellings import describe_similar_names
from protonet.tables.table import (
    COMMON_LABEL_NAMES,
    ReadSpec,
    RowBlock,
    Table,
    format_names,
    make_table,
    open_table,
    read_table,
)

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
    # Words shared between texts and class names are no evidence if no row has a label.
    selection = SelectedEncoders.from_names(options.representation, show_progress=not options.quiet)
    selection = selection._replace(use_word_features=not rows.is_fully_unlabelled)
    encoded = fit_features(
        table,
        block,
        rows.column_types,
        keep_hint="--columns keeps it" if options.columns is None else None,
        groups=rows.groups,
        selection=selection,
        decimal=options.decimal_mark,
    )
    encoding, columns = encoded.encoding, encoded.columns
    features = torch.from_numpy(np.ascontiguousarray(encoded.x))
    labels = torch.from_numpy(rows.labels)
    unlabelled, unlabelled_positions, left_out = _encode_unlabelled_rows(rows, encoded)
    if rows.is_fully_unlabelled:
        features, unlabelled, unlabelled_positions = features[:0], features, block.positions
    names = embed_class_names(encoding, rows.classes, features, labels, rows.descriptions)
    if rows.is_fully_unlabelled and names is None:
        raise_missing_labels(encoding, rows.classes)
    cells = _select_column_cells(table, block, columns)
    labelled = [column[: len(labels)] for column in cells]
    empty = np.zeros(len(labels), bool)
    if encoding is not None and len(labels):
        empty = encoding.is_uninformative(labelled)
    notes = [*table.notes, *encoded.notes, *(f"warning: {note}" for note in describe_similar_names(rows.classes))]
    notes += describe_left_out_rows(left_out, table.position_format)
    notes += _warn_about_rows(rows, features.numpy(), names, empty)
    missing_texts = options.missing_values
    return EncodedTable(
        x=features,
        y=labels,
        classes=rows.classes,
        columns=columns,
        encoding=encoding,
        weights=balanced_class_weights(labels) if options.balanced else None,
        groups=None if rows.groups is None else torch.from_numpy(rows.groups),
        class_name_rows=names,
        metadata=_make_metadata(options, rows, encoded, cells, names, empty),
        positions=block.positions[: len(labels)],
        position_format=table.position_format,
        row_indices=block.row_indices[: len(labels)],
        row_ids=None if options.id is None else block.extra_columns[-1].astype(str).tolist(),  # behind the groups
        group_names=rows.group_names.tolist(),
        notes=notes,
        missing_counts=[int(is_missing(column).sum()) for column in labelled],
        cells=cells if keep_cells else [],
        unlabelled=unlabelled,
        unlabelled_positions=unlabelled_positions,
        has_group_columns=bool(encoded.group_columns),
        missing_texts=MISSING_TEXTS if missing_texts is None else parse_missing_texts(missing_texts.split(",")),
    )


def _encode_unlabelled_rows(
    rows: TableRows, encoded: TableFeatures
) -> tuple[Tensor | None, Sequence[int], Sequence[int]]:
    """Encode the unlabelled rows of the table of ``fit`` beside its labelled ones.

    Returns the features (m, dim), None without such rows, the position of each of these rows in the file, and the
    positions of the rows that are left out since they have no information.
    """
    if rows.unlabelled_block is None:
        return None, (), ()
    cells = _select_column_cells(rows.table, rows.unlabelled_block, encoded.columns)
    block, left_out = split_uninformative_rows(rows.unlabelled_block._replace(columns=cells), encoded.encoding)
    if not block.positions:
        return None, (), left_out
    x = encode_block(replace(rows.table, columns=encoded.columns), block, encoded.encoding)
    return torch.from_numpy(np.ascontiguousarray(x)), block.positions, left_out


def _warn_about_rows(rows: TableRows, x: np.ndarray, names: ClassNameRows | None, empty: np.ndarray) -> list[str]:
    """Describe classes without rows or informative names, rows without information, and contradictory labels.

    ``x`` (n, dim) are the features of the labelled rows; ``empty`` (n,) bool marks those without information.
    """
    known = {*rows.labels.tolist(), *(() if names is None else names.labels.tolist())}
    lost = [str(name) for label, name in enumerate(rows.classes) if label not in known]
    notes = []
    if lost:
        notes.append(f"warning: never predicted, without rows or informative names: {format_names(lost)}")
    notes += [f"warning: {note}" for note in describe_uninformative_rows(empty)]
    informative = np.flatnonzero(~empty).tolist()
    given = [rows.classes[rows.labels[row]] for row in informative]
    locations = [rows.table.position_format.format(rows.labelled_block.positions[row]) for row in informative]
    return notes + warn_contradictory_labels(x[informative], given, locations)


def _make_metadata(
    options: FitOptions,
    rows: TableRows,
    encoded: TableFeatures,
    cells: Sequence[np.ndarray],
    names: ClassNameRows | None,
    empty: np.ndarray,
) -> TrainingMetadata:
    """Make the metadata of the model file: options, numbers of rows per class, and statistics of the columns."""
    counts, empty_counts = (
        np.bincount(labels, minlength=len(rows.classes)).tolist() for labels in (rows.labels, rows.labels[empty])
    )
    extra = [name for name in (options.group, options.id) if name is not None]
    return TrainingMetadata(
        label_column=options.label or "label",
        seed=options.seed,
        sample_counts=tuple(counts),
        group_column=options.group,
        id_column=options.id,
        dropped_columns=(*extra, *options.drop, *rows.table.unused_columns, *encoded.dropped_columns),
        position_format=rows.table.position_format,
        time_limit=options.time_limit,
        balanced=options.balanced,
        column_statistics=compute_column_statistics(cells, encoded.encoding, counts),
        uninformative_counts=tuple(empty_counts) if any(empty_counts) else (),
        missing_texts=None if options.missing_values is None else tuple(options.missing_values.split(",")),
        class_names=None if names is None else describe_class_names(names, rows.classes),
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
    rows = _fit_table_to_label(options, label) if model is None else _encode_table_to_label(options, model, label)
    n, known = len(rows.x), rows.has_label
    if bool((known | rows.uninformative_mask).all()) and not allow_labelled:
        reason = f"a label in {to_printable(label)}{'' if bool(known.all()) else ' or no information'}"
        got = f"{reason} in each of {plural(n, 'row')}"
        raise_input_error("table", "have unlabelled rows", got, "Add rows whose label is empty.")
    if bool(known.any()) and not allow_labelled:
        labelled = plural(int(known.sum()), "row")
        rows.table.notes.append(f"{labelled} already labelled in {to_printable(label)}: not suggested")
    return rows


def _fit_table_to_label(options: SuggestOptions | PageOptions, label: str) -> TableToLabel:
    """Read a table to label without a model: infer its column types, unless the options of ``page`` set them."""
    spec = ReadSpec(label_column=label, allow_unlabelled=True, are_columns_from_user=True)
    spec, column_types = make_read_spec(options, spec), {}
    if isinstance(options, PageOptions):
        extra = {} if options.group is None else {options.group: "group"}
        spec = replace(spec, ignored_columns=tuple(options.drop), extra_columns=extra)
        column_types = parse_column_types(options.column_type)
    table, block = read_table(options.table, spec)
    types = get_column_types(options.table, column_types)
    selection = SelectedEncoders.from_names(options.representation, show_progress=not options.quiet)
    # One class for all: no column is then dropped as a copy of the label.
    one_class = block._replace(labels=np.zeros(len(block.positions), np.int64))
    features = fit_features(table, one_class, types, keep_hint="", selection=selection, decimal=options.decimal_mark)
    labels = list(map(str, block.labels))
    uninformative_mask = np.zeros(len(features.x), bool)
    if features.encoding is not None:
        cells = _select_column_cells(table, block, features.columns)
        uninformative_mask = features.encoding.is_uninformative(cells)
    table.notes.extend(describe_uninformative_rows(uninformative_mask))
    likely = [name for name in table.columns or () if name.lower() in COMMON_LABEL_NAMES and not labels]
    if likely:
        table.notes.append(f"no column {label}; if {format_names(likely)} holds the labels, pass it with --label")
    return TableToLabel(
        x=torch.from_numpy(np.ascontiguousarray(features.x)),
        table=table,
        has_label=_mark_labelled_rows(labels, len(features.x)),
        encoding=features.encoding,
        columns=features.columns,
        notes=tuple(features.notes),
        positions=list(block.positions),
        labels=labels,
        uninformative_mask=torch.from_numpy(uninformative_mask),
    )


def make_empty_picture_table(options: PageOptions, paths: Sequence[str]) -> TableToLabel:
    """Make a table of pictures without rows; ``paths`` are the pictures to fit its encoding to, if there are any."""
    cells, no_cells = np.array(paths, object), np.empty(0, object)
    selection = SelectedEncoders.from_names(options.representation, show_progress=not options.quiet)
    column = Picture.fit(cells, selection.load_encoder("picture"), show_progress=not options.quiet)
    encoding, table = make_encoding([column]), make_table([no_cells], ("picture",))
    hint = selection.format_install_hint("picture")
    nothing = torch.zeros(0, dtype=torch.bool)
    return TableToLabel(
        x=torch.from_numpy(column.encode(no_cells)),
        table=table,
        has_label=nothing,
        encoding=encoding,
        columns=table.columns,
        notes=(hint,) if hint else (),
        uninformative_mask=nothing,
    )


def _encode_table_to_label(options: SuggestOptions | PageOptions, model: TablePipeline, label: str) -> TableToLabel:
    """Read a table to label with the columns and the encoding of a model."""
    spec = replace(make_read_spec(options, model.new_row_spec, label), allow_unlabelled=True)
    table = model.open_table(options.table, spec)
    positions, labels, parts = list[int](), list[str](), []
    for block in table.blocks:
        positions += block.positions
        labels += map(str, block.labels)
        assert block.uninformative_mask is not None  # open_table marks them
        parts.append((model.encode(table, block), block.uninformative_mask))
    x, uninformative_mask = map(np.concatenate, zip(*parts, strict=True))
    return TableToLabel(
        x=torch.from_numpy(x),
        table=table,
        has_label=_mark_labelled_rows(labels, len(x)),
        encoding=model.encoding,
        columns=model.columns,
        positions=positions,
        labels=labels,
        uninformative_mask=torch.from_numpy(uninformative_mask),
    )


def _mark_labelled_rows(labels: Sequence[str], n: int) -> Tensor:
    """Mark the rows (n,) bool whose label is not ""; no row is marked if there is no label column."""
    return torch.tensor([label != "" for label in labels] or [False] * n)


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
