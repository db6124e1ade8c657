"""Open a table and read its requested columns and labels, block by block."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protonet._text import closest_match, plural, shorten_list, to_printable
from protonet.errors import raise_input_error
from protonet.tables.columns.parsing import format_cells, is_missing, replace_missing_cells
from protonet.tables.columns.quantities import parse_formatted_number
from protonet.tables.delimited import CLASS_NAME_TEXTS, MISSING_TEXTS, is_decimal_number
from protonet.tables.formats import PICTURE_COLUMN, open_table_source
from protonet.tables.formats.source import DEFAULT_ROW_FORMAT, TableChunk, TableSource
from protonet.tables.summary_rows import handle_summary_rows

#: Common names of columns of labels, in lower case.
COMMON_LABEL_NAMES = frozenset(
    {"label", "class", "target", "y", "species", "category", "type", "kind", "group", "outcome", "result", "status"}
    | {"diagnosis", "survived", "quality", "grade", "churn", "default"}
)
#: Maximum number of values, and minimum rows per value, of columns that are suggested as labels.
MAX_SUGGESTED_LABEL_VALUES, MIN_ROWS_PER_SUGGESTED_VALUE = 50, 3
#: Maximum number of suggestions in a message.
MAX_SUGGESTIONS = 4
#: Maximum ratio of the largest to the smallest step between column names that form a scale, such as wavelengths.
MAX_NUMERIC_NAME_STEP_RATIO = 2
#: The first words of the note about texts that are read as missing.
MISSING_NOTE = "read as missing"
#: The remedy for a file that may lack a header.
MISSING_HEADER_REMEDY = "The first line looks like a row: if it is one, pass `no_header`. "


@dataclass(frozen=True, kw_only=True)
class ReadSpec:
    """Specification of the columns of a table that are read, and of how they are read."""

    label_column: str  #: The name of the label column, in files that name their columns.
    require_labels: bool = True  #: Whether the label column is read and must exist.
    #: The names of the columns that are features, in this order; None for all other than labels and extra columns.
    columns: tuple[str, ...] | None = None
    n_features: int | None = None  #: The required number of features; None for any number.
    extra_columns: Mapping[str, str] = field(default_factory=dict)
    """Columns that are read as text and are not features, such as groups. Each name of a column is mapped to the name
    of the argument that requests it, for error messages."""
    has_groups: bool = False  #: Whether the first extra column names the group of each row.
    has_ids: bool = False  #: Whether the last extra column, which may be the first one, identifies each row.
    column_types: Mapping[str, str] = field(default_factory=dict)  #: The types of columns that the user set, by name.
    ignored_columns: tuple[str, ...] = ()  #: Names of columns that are not features, if the table has them.
    #: Whether rows may have no label. All labels are then read as text, "" if missing.
    allow_unlabelled: bool = False
    #: What to do if a table lacks the label column of a model, for the error message; "" if the user named the column.
    missing_label_remedy: str = ""
    skip_broken: bool = False  #: Whether pictures that cannot be decoded are skipped; otherwise they are an error.
    #: Whether ``columns`` and ``ignored_columns`` come from the user; otherwise they come from a model file.
    are_columns_from_user: bool = False
    sheet: str | None = None  #: The name of the sheet of an Excel workbook; None for the first sheet.
    are_all_columns_extra: bool = False  #: Whether all columns, including the features, are also read as extra columns.
    #: Whether rows without a label are dropped; otherwise they are an error. None means the same as False, but the
    #: error message does not suggest to drop the rows.
    drop_unlabelled: bool | None = None
    missing_texts: frozenset[str] = MISSING_TEXTS  #: Texts, in lower case, that mean a missing label or cell.
    class_names: tuple[str, ...] = ()  #: The classes of a model; a label that is one of them is not missing.
    #: Whether a model is trained on the rows. Blank rows are then dropped, even if no labels are required.
    for_training: bool = False
    decimal_mark: str | None = None  #: The decimal mark of numbers, "." or ","; None to detect it.
    no_header: bool = False  #: Whether delimited text has no header; its columns are then "1", "2" and so on.
    encoding: str | None = None  #: The encoding of a file of text; None to detect it.
    usual_encoding: str | None = None  #: The encoding of the training table, which is preferred to other guesses.


class RowBlock(NamedTuple):
    """Consecutive rows of a table, column by column."""

    columns: list[np.ndarray]
    """The cells (b,) of each feature column; types as in `protonet.tables.formats.source.TableChunk`."""
    positions: Sequence[int]  #: The position of each row in the file, such as the number of its line.
    row_indices: Sequence[int]
    """The index of each row in the table, from 0; rows that are dropped are counted as well."""
    names: tuple[str, ...] | None = None  #: The names of the feature columns; None if the file has no column names.
    position_format: str = DEFAULT_ROW_FORMAT  #: The format string of positions, such as "line {}".
    labels: np.ndarray = np.empty(0, np.str_)  #: (b,) labels, numbers or strings; (0,) if no labels are read.
    #: The cells (b,) of each extra column (`ReadSpec.extra_columns`), as strings.
    extra_columns: tuple[np.ndarray, ...] = ()
    #: (b,) bool, whether all cells of a row are uninformative, such as missing; None if this is not computed.
    uninformative_mask: np.ndarray | None = None

    @classmethod
    def from_columns(
        cls, columns: list[np.ndarray], names: tuple[str, ...] | None = None, position_format: str = DEFAULT_ROW_FORMAT
    ) -> RowBlock:
        """Make a block of rows without labels, which are counted from 0, from the cells (n,) of each column."""
        rows = range(len(columns[0]))
        return cls(columns, rows, rows, names, position_format)

    @classmethod
    def concatenate(cls, blocks: Sequence[RowBlock]) -> RowBlock:
        """Concatenate the rows of one block or more of the same table."""
        first, *others = blocks
        if not others:
            return first
        masks = [block.uninformative_mask for block in blocks if block.uninformative_mask is not None]
        return first._replace(
            columns=[np.concatenate(parts) for parts in zip(*(block.columns for block in blocks), strict=True)],
            labels=np.concatenate([block.labels for block in blocks]),
            extra_columns=tuple(map(np.concatenate, zip(*(block.extra_columns for block in blocks), strict=True))),
            positions=[position for block in blocks for position in block.positions],
            row_indices=[index for block in blocks for index in block.row_indices],
            uninformative_mask=np.concatenate(masks) if masks else None,
        )

    def select_rows(self, rows: np.ndarray) -> RowBlock:
        """Return a block of the rows with the given indices (m,) in this block."""
        return self._replace(
            columns=[cells[rows] for cells in self.columns],
            labels=self.labels[rows] if len(self.labels) else self.labels,
            extra_columns=tuple(cells[rows] for cells in self.extra_columns),
            positions=[self.positions[row] for row in rows.tolist()],
            row_indices=[self.row_indices[row] for row in rows.tolist()],
            uninformative_mask=None if self.uninformative_mask is None else self.uninformative_mask[rows],
        )

    def select_columns(self, names: Sequence[str] | None) -> RowBlock:
        """Return a block with the feature columns of these names, in this order; None keeps all columns."""
        if names is None or names == self.names:
            return self
        by_name = dict(zip(self.names or (), self.columns, strict=True))
        return self._replace(columns=[by_name[name] for name in names], names=tuple(names))

    def column_name(self, index: int) -> str:
        """Format the name of the feature column ``index`` for messages, such as "column 3" if it has no name."""
        return f"column {index}" if self.names is None else to_printable(self.names[index])

    def format_location(self, row: int) -> str:
        """Format where row ``row`` of the block is in the file, such as "line 2"."""
        return self.position_format.format(self.positions[row])


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """An open table, whose rows can be read once."""

    blocks: Iterator[RowBlock]  #: The rows, block by block.
    notes: list[str] = field(default_factory=list)
    """Notes for the user on how the table is read; more may follow as rows are read."""
    unused_columns: tuple[str, ...] = ()  #: The names of the columns that are not read.
    n_rows: int | None = None  #: The number of rows, including unlabelled ones; None if it is not known yet.
    extra_columns: tuple[str, ...] = ()  #: The names of the extra columns (`ReadSpec.extra_columns`).
    has_semicolons: bool = False  #: Whether semicolons separate the cells of the file.
    encoding: str | None = None  #: The encoding of the file; see `TableSource.encoding`.

    @property
    def all_notes(self) -> list[str]:
        """The notes for the user, followed by a note about the columns that are not read, if there are any."""
        return [*self.notes, describe_unused_columns(self.unused_columns)] if self.unused_columns else self.notes


def open_table(path: Path, spec: ReadSpec, labels: Path | None = None) -> Table:
    """Open a table, and validate its header and first block; the other blocks are validated as they are read.

    Args:
        path: The file. NPZ files hold ``x`` (n, ...) and ``y`` (n,).
        spec: The columns to read. If the file has column names, columns are matched by name.
        labels: The NPY file of labels (n,), if ``path`` is an NPY file of rows (n, ...).

    Returns:
        The open table. Iterate over its blocks to read its rows.

    Raises:
        InputError: The file cannot be read, or does not have the columns, labels or rows that ``spec`` requires.
    """
    is_npy = path.suffix.lower() == ".npy"
    if labels is not None and not is_npy:
        remedy = "Leave it out: that file holds its classes."
        raise_input_error("labels", "come with an NPY file of rows", path, remedy)
    if spec.require_labels and labels is None and is_npy:
        got = f"none beside {path}"
        raise_input_error("labels", "name the file of the classes", got, "Save them with numpy.save.")
    source = open_table_source(
        path,
        labels,
        label=spec.label_column,
        require_labels=spec.require_labels,
        skip_broken=spec.skip_broken,
        names={*(spec.columns or ()), *spec.extra_columns, *([spec.label_column] if spec.require_labels else [])},
        sheet=spec.sheet,
        text_column=spec.columns[0] if spec.columns and len(spec.columns) == 1 else "text",
        has_header=not spec.no_header,
        encoding=spec.encoding,
        usual_encoding=spec.usual_encoding,
    )
    label: int | None = source.n_columns if spec.require_labels else None  # the label column follows the features
    names: tuple[str, ...] | None = None
    unused: list[str] = []
    if source.header is None:
        chosen = (spec.columns or ()) + spec.ignored_columns if spec.are_columns_from_user else ()
        requested = (*spec.extra_columns, *chosen)
        if requested:
            got = f"{path}, which names none, and {format_names(requested)}"
            raise_input_error("path", "name its columns to choose among them", got, "Save it as CSV or Parquet.")
        if source.n_columns == 0 or spec.n_features not in {None, source.n_columns}:
            remedy = "Pass the features that the model was fitted to." if spec.n_features else "Add features."
            got = f"{source.n_columns} in {path}"
            raise_input_error("path", f"have {spec.n_features or 'some'} features per row", got, remedy)
        features = list(range(source.n_columns))
        extra = {f"column {index}": index for index in features} if spec.are_all_columns_extra else {}
    else:
        header = _rename_repeated_columns(path, source, spec.label_column)
        selected, unused = _select_columns(path, replace(source, header=header), spec)
        names = tuple(selected)
        index = {name: column for column, name in enumerate(header)}
        features = [index[name] for name in names]
        extra_names = filter(None, header) if spec.are_all_columns_extra else spec.extra_columns
        extra = {name: index[name] for name in extra_names}
        label = index.get(spec.label_column) if spec.require_labels or spec.allow_unlabelled else None
        if (spec.columns is None or spec.are_columns_from_user) and (values := list_number_like_names(header)):
            source.notes.append(f"warning: columns are named {format_names(values)}. {MISSING_HEADER_REMEDY}".rstrip())
    if "" in unused:
        n_unnamed = unused.count("")
        source.notes.append(f"{plural(n_unnamed, 'unnamed column')} {'is' if n_unnamed == 1 else 'are'} not used")
    chunks = source.read_chunks([*features, *extra.values(), *([] if label is None else [label])])
    blocks = _read_blocks(source, chunks, names, len(features), len(extra), spec)
    first = next(blocks, None)
    if first is None:
        raise_input_error("path", "have at least one row", f"none in {path}", "Add rows.")
    return Table(
        blocks=chain([first], blocks),
        notes=source.notes,
        unused_columns=tuple(name for name in unused if name and name not in extra),
        n_rows=source.n_rows,
        extra_columns=tuple(extra),
        has_semicolons=source.has_semicolons,
        encoding=source.encoding,
    )


def read_table(path: Path, spec: ReadSpec, labels: Path | None = None) -> tuple[Table, RowBlock]:
    """Open a table and read all of its rows. The arguments and the errors are those of `open_table`.

    Returns:
        The table, whose blocks are used up, and a single block of all rows.
    """
    table = open_table(path, spec, labels)
    return table, RowBlock.concatenate(list(table.blocks))


def _rename_repeated_columns(file: Path, source: TableSource, label: str) -> list[str]:
    """Return the names of the columns; repeated ones are renamed as by pandas, such as "price.1", and a note says so.

    Raises:
        InputError: The label column is repeated, or names are numbers, so that the header is probably a row.
    """
    header = source.header or []
    repeated = [name for name, times in Counter(filter(None, header)).items() if times > 1]
    if not repeated:
        return header
    hint = MISSING_HEADER_REMEDY * bool(list_number_like_names(header))
    if label in repeated or hint:
        got = f"{format_names(repeated)} twice in {file}{source.sheet_note}"
        raise_input_error("path", "name each column once", got, f"{hint}Rename or drop one.")
    used, seen, renamed = set(header), set[str](), list[str]()
    for name in header:
        new = name
        if name and name in seen:
            new = next(f"{name}.{suffix}" for suffix in count(1) if f"{name}.{suffix}" not in used)
            used.add(new)
        seen.add(name)
        renamed.append(new)
    source.notes.append(f"columns with the same name: {format_names(repeated)}; .1, .2, ... is appended to later ones")
    return renamed


def _select_columns(file: Path, source: TableSource, spec: ReadSpec) -> tuple[list[str], list[str]]:
    """Select columns by name: return the names of the features, in the requested order, and of the unused columns."""
    header = source.header or []
    path = f"{file}{source.sheet_note}"
    hint = MISSING_HEADER_REMEDY * bool(list_number_like_names(header))
    got = f"{path} with {format_names(header)}"
    if spec.require_labels and spec.label_column not in header:
        suggestion = _suggest_label(source, spec.label_column)
        if spec.missing_label_remedy:
            must = f"have the column of the labels, {to_printable(spec.label_column)}"
            raise_input_error("path", must, got, f"{hint}{suggestion} {spec.missing_label_remedy}")
        given = f"{format_names([spec.label_column])}, and {path} has {format_names([name for name in header if name])}"
        remedy = hint + (suggestion or "Name the column of the classes.")
        raise_input_error("label", "name a column of the table", given, remedy)
    if spec.label_column in (spec.columns or ()):
        got = to_printable(spec.label_column)
        raise_input_error("label", "name another column than the features", got, "Name the column of the classes.")
    for name, argument in spec.extra_columns.items():
        if argument != "path":
            _check_user_columns(argument, [name], path, header)
        elif name not in header:
            must, remedy = f"have the column {to_printable(name)}, which names the groups of the model", "Add it."
            raise_input_error("path", must, got, f"{hint}{remedy}")
    others = {"", spec.label_column, *spec.extra_columns, *spec.ignored_columns}
    features = [name for name in header if name not in others]
    if spec.are_columns_from_user:
        _check_user_columns("columns", spec.columns or (), path, features)
        _check_user_columns("ignored", spec.ignored_columns, path, header)
    if spec.columns is not None:
        missing = [name for name in spec.columns if name not in set(features)]
        if missing:
            lacking = f"{path} without {format_names(missing)}"
            remedy = hint + _suggest_columns(missing, [name for name in header if name not in spec.columns])
            raise_input_error("path", "have the model's columns", lacking, remedy)
        features = list(spec.columns)
    if not features:
        raise_input_error("path", "have columns beside the classes", got, "Add features.")
    used = {*features, *spec.extra_columns, *spec.ignored_columns, spec.label_column}
    return features, [name for name in header if name not in used]


def list_number_like_names(header: Sequence[str]) -> list[str]:
    """List the column names that are numbers, which suggest that the file lacks a header.

    The result is empty if the numbers count the columns, or form a scale such as wavelengths.
    """
    values = [name for name in header if is_decimal_number(name)]
    readings = [[parse_formatted_number(name, mark) for mark in ("point", "comma")] for name in values]
    numeric = [comma if math.isnan(point) else point for point, comma in readings]
    steps = [after - before for before, after in pairwise(numeric)]
    is_scale = bool(steps) and 0 < max(steps) <= MAX_NUMERIC_NAME_STEP_RATIO * min(steps)
    integral = all(value.is_integer() for value in numeric)
    return [] if (is_scale and (integral or len(steps) > 1)) or (integral and len(values) < 2) else values


def _check_user_columns(argument: str, names: Sequence[str], path: str, available: Sequence[str]) -> None:
    """Raise an InputError, which suggests a similar name, if a name that the user typed is not ``available``."""
    if unknown := [name for name in names if name not in available]:
        got = f"{format_names(unknown)}, and {path} has {format_names([name for name in available if name])}"
        similar = closest_match(unknown[0], available)
        remedy = f"Did you mean {to_printable(similar)}?" if similar else "Name those that it has."
        raise_input_error(argument, "name columns of the table", got, remedy)


def _suggest_columns(missing: Sequence[str], unused: Sequence[str]) -> str:
    """Format the advice of an error about missing feature columns: it suggests unused columns with similar names."""
    if list(missing) == [PICTURE_COLUMN]:
        return "The model was fitted to pictures: pass a folder of them."
    pairs = [(name, similar) for name in missing if (similar := closest_match(name, unused))][:MAX_SUGGESTIONS]
    similar = ", ".join(f"{to_printable(similar)} for {to_printable(name)}" for name, similar in pairs)
    remedy = "Name the columns as in the table that the model was fitted to."
    return f"Did you mean {similar}? {remedy}" if similar else remedy


def _suggest_label(source: TableSource, label: str) -> str:
    """Format the advice of an error about a missing label column: a similar name, and columns that may be labels."""
    header = source.header or []
    similar = closest_match(label, header)
    chunk = next(source.read_chunks(range(len(header))), None)
    likely = []
    for index, (name, cells) in enumerate(zip(header, chunk.columns if chunk else [], strict=False)):
        n_values = len(set(cells.tolist()))
        few_values = 2 <= n_values <= min(MAX_SUGGESTED_LABEL_VALUES, len(cells) / MIN_ROWS_PER_SUGGESTED_VALUE)
        labels = replace_missing_cells(cells, list_missing_label_texts(set(map(str, cells.tolist()))))
        if name and few_values and not parse_labels(labels)[1].any():
            likely.append((name != similar, name.lower() not in COMMON_LABEL_NAMES, n_values, -index, name))
    shown = sorted(likely)[:MAX_SUGGESTIONS]
    columns = ", ".join(f"{to_printable(name)} ({n_values} values)" for *_, n_values, _, name in shown)
    meant = f"Did you mean {to_printable(similar)}? " if similar else ""
    return meant + (f"These look like classes: {columns}." if columns else "")


def describe_unused_columns(names: Sequence[str]) -> str:
    """Describe the columns of a table that are not read, given their names, as a note for the user."""
    return f"{plural(len(names), 'column')} of the table not used: {format_names(names)}"


def format_names(names: Sequence[str]) -> str:
    """Format a list of names, in quotes unless they are identifiers; a long list is cut."""
    return shorten_list(name if name.isidentifier() else repr(name[:50]) for name in names) or "nothing"


def _read_blocks(
    source: TableSource,
    chunks: Iterator[TableChunk],
    names: tuple[str, ...] | None,
    n_features: int,
    n_extra: int,
    spec: ReadSpec,
) -> Iterator[RowBlock]:
    """Yield chunks of a file as blocks with parsed labels, without blank and unlabelled rows that ``spec`` drops."""
    start = n_blank = n_unlabelled = n_kept = 0
    missing_counts = {"label": Counter[str](), "cell": Counter[str]()}  # by their text
    missing_texts = spec.missing_texts
    chunks = handle_summary_rows(
        chunks,
        source.notes,
        source.position_format,
        missing_texts,
        are_dropped=spec.require_labels or spec.allow_unlabelled or spec.for_training,
    )
    if missing_texts == MISSING_TEXTS and spec.class_names:
        missing_texts = list_missing_label_texts(spec.class_names) - {name.lower() for name in spec.class_names}
    elif missing_texts == MISSING_TEXTS and (spec.require_labels or spec.allow_unlabelled):
        chunks = iter(all_chunks := list(chunks))  # the labels of all chunks decide
        labels_read = {str(label) for columns, _ in all_chunks for label in set(columns[-1].tolist())}
        missing_texts = list_missing_label_texts(labels_read)
        class_names = sorted(name for name in labels_read if name.lower() in CLASS_NAME_TEXTS - missing_texts)
        if class_names and spec.are_columns_from_user:
            source.notes.append(f"class: {format_names(class_names)}; `missing_values` can list it as missing")
    for columns, positions in chunks:
        labels, unlabelled = np.empty(0, np.str_), np.empty(0, bool)
        features = [replace_missing_cells(cells, spec.missing_texts) for cells in columns[:n_features]]
        if len(columns) > n_features + n_extra:
            labels, unlabelled = parse_labels(replace_missing_cells(columns[-1], missing_texts))
            missing_counts["label"].update(format_cells(columns[-1][unlabelled & ~is_missing(columns[-1])]))
        for cells, blanked in zip(columns, features, strict=False):
            if cells is not blanked:
                missing_counts["cell"].update(format_cells(cells[is_missing(blanked) & ~is_missing(cells)]))
        keep = np.ones(len(positions), bool)
        if spec.for_training or (spec.require_labels and unlabelled.any()):
            keep = ~np.logical_and.reduce([*map(_are_empty_cells, columns)])
            n_blank += len(keep) - int(keep.sum())
        if spec.allow_unlabelled:
            labels = np.where(unlabelled, "", labels.astype(np.str_))
        elif spec.drop_unlabelled:
            n_unlabelled += int((unlabelled & keep).sum())
            keep &= ~unlabelled if len(unlabelled) else True
        elif unlabelled.any() and (unlabelled & keep).any():
            rows = np.flatnonzero(unlabelled & keep).tolist()
            got = f"none in {shorten_list((source.position_format.format(positions[row]) for row in rows), 3)}"
            has_option = spec.drop_unlabelled is not None
            remedy = f"Fill it in, or {'leave the row out: `drop_unlabelled`' if has_option else 'remove the row'}."
            raise_input_error("path", "name the class of every row", got, remedy)
        extra = tuple(convert_cells_to_text(cells) for cells in columns[n_features : n_features + n_extra])
        indices = range(start, start + len(positions))
        block = RowBlock(features, positions, indices, names, source.position_format, labels, extra)
        start, n_kept = start + len(positions), n_kept + int(keep.sum())
        if keep.any():
            yield block if keep.all() else block.select_rows(np.flatnonzero(keep))
    if n_unlabelled and not n_kept:
        got = f"none in {plural(n_unlabelled, 'row')}"
        raise_input_error("path", f"have labels in {to_printable(spec.label_column)}", got, "Label some rows.")
    if n_unlabelled:
        source.notes.append(f"{n_unlabelled} row{'s' * (n_unlabelled > 1)} without a class dropped (`drop_unlabelled`)")
    if n_blank:
        source.notes.append(f"{n_blank} blank row{'s' * (n_blank > 1)} dropped")
    if spec.are_columns_from_user and (spec.require_labels or spec.for_training):
        source.notes.extend(_describe_missing_texts(missing_counts))


def _describe_missing_texts(counts: Mapping[str, Counter[str]]) -> list[str]:
    """Format a note about texts that are read as missing, given their counts as "label" and as "cell"; [] for none."""
    parts = []
    for noun, counter in counts.items():
        texts = ", ".join(f"{to_printable(text)!r} {n:,}" for text, n in counter.most_common(MAX_SUGGESTIONS))
        parts += [f"{counter.total()} {noun}{'s' * (counter.total() > 1)} ({texts})"] * bool(counter)
    return [f"{MISSING_NOTE}: {' and '.join(parts)}; `missing_values` changes the list"] if parts else []


def list_missing_label_texts(names: Collection[str]) -> frozenset[str]:
    """List the texts, in lower case, that mean a missing label, given all labels of a table or the classes of a model.

    They are ``MISSING_TEXTS`` without class names: "none" and "missing" beside other words, and "-" beside "+".
    """
    words = any(name.lower() not in MISSING_TEXTS and not is_decimal_number(name) for name in names)
    return MISSING_TEXTS - (CLASS_NAME_TEXTS if words else set()) - ({"-"} if "+" in names else set())


def _are_empty_cells(cells: np.ndarray) -> np.ndarray:
    """Compute a mask (n,) bool of empty cells (n,); words that mean "missing" are not empty."""
    return np.asarray(cells == "") if cells.dtype.kind == "O" else is_missing(cells)


def parse_labels(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert cells (b,) to labels (b,), integers if possible, else floats or strings; and mask (b,) missing labels."""
    if cells.dtype.kind == "O":
        return cells.astype(np.str_), is_missing(cells)
    if cells.dtype.kind == "M":
        return cells.astype("datetime64[s]").astype(np.str_), np.isnat(cells)
    if cells.dtype.kind == "f":
        missing = np.isnan(cells)
        filled = np.where(missing, 0, cells)
        integral = bool((filled == np.rint(filled)).all()) and bool((np.abs(filled) < 2**53).all())
        return filled.astype(np.int64) if integral else filled, missing
    return cells.astype(np.str_) if cells.dtype.kind == "b" else cells, np.zeros(len(cells), bool)


def convert_cells_to_text(cells: np.ndarray) -> np.ndarray:
    """Convert cells (b,) of any type, such as identifiers, to text (b,); missing values become ""."""
    if cells.dtype.kind not in "fM":
        return cells.astype(np.str_)
    texts, missing = parse_labels(cells)
    return np.where(missing, "", texts.astype(np.str_))
