"""Encode tables as features: infer and fit the types of columns, encode rows, and report suspicious columns."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from protonet._text import closest_match, shorten_list, to_printable
from protonet.embeddings.loading import EncoderName, SelectedEncoders, describe_encoder, get_encoder_modality
from protonet.embeddings.pictures.reading import IMAGE_SUFFIXES, text_to_path
from protonet.errors import raise_input_error
from protonet.tables.columns import parsing, quantities
from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.category import Category
from protonet.tables.columns.encoding import (
    Encoding,
    InferredType,
    find_useless_names,
    fit_column_as,
    infer_column_type,
    is_free_text,
    make_encoding,
)
from protonet.tables.columns.ordered import MAX_FLOAT32, Numeric
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.text import EmbeddedText, Text
from protonet.tables.numeric_formats import (
    choose_numeric_format_order,
    describe_mixed_percentages,
    describe_mixed_units,
    describe_numeric_formats,
    detect_numeric_conversion,
)
from protonet.tables.suspicious import GroupColumnEvidence, detect_group_column, explain_leakage, explain_row_index
from protonet.tables.table import RowBlock, Table

#: Number of cells of a column that are examined to detect paths of pictures.
N_EXAMINED_PATH_CELLS = 3
#: Maximum number of columns with invalid cells for the same reason that get a note of their own.
MAX_INVALID_COLUMN_NOTES = 3
#: The selection of no pretrained encoder, neither for texts nor for pictures.
NO_ENCODERS = SelectedEncoders(None, None)


def fit_encoding(
    block: RowBlock,
    column_types: Mapping[str, str],
    *,
    keep_hint: str | None,
    selection: SelectedEncoders = NO_ENCODERS,
    decimal: str | None = None,
    has_semicolons: bool = False,
    keep_numbers: bool = False,
) -> tuple[RowBlock, Encoding, dict[str, str], list[str]]:
    """Infer the type of each column of training rows, and drop useless columns; the labels have no influence.

    Args:
        block: All training rows.
        column_types: The column types that the user has set, by the names of the columns.
        keep_hint: Advice to the user on how to keep a column that is dropped as a row index; None to keep such
            columns.
        selection: The pretrained encoders of texts and pictures.
        decimal: The decimal mark of numbers, "." or ","; None to detect it.
        has_semicolons: Whether semicolons separate the cells of the file.
        keep_numbers: Whether rows of numbers without missing values are used unchanged, even if one is a row index.

    Returns:
        The rows with the columns that are used, the fitted columns, the type of each column or the reason why it is
            dropped by its name, and notes for the user.

    Raises:
        InputError: No column can be used, or ``column_types`` or ``selection`` do not match the columns.
    """
    are_numbers = keep_numbers and not column_types
    are_numbers &= all(cells.dtype.kind in "iuf" and not parsing.is_missing(cells).any() for cells in block.columns)
    if block.names is None or are_numbers:
        encoding = make_encoding(map(Numeric.fit, block.columns))
        summaries = [column.summary() for column in encoding.columns]
        return block, encoding, dict(zip(block.names or (), summaries, strict=block.names is not None)), []
    cells = dict(zip(block.names, block.columns, strict=True))
    inferred = fit_columns(
        cells,
        column_types,
        keep_hint=keep_hint,
        selection=selection,
        decimal=decimal,
        has_semicolons=has_semicolons,
        labels=block.labels if len(block.labels) else None,
    )
    fitted = {name: column for name, (column, *_) in inferred.items() if column is not None}
    reasons = {name: reason for name, (column, reason, _) in inferred.items() if column is None}
    numeric = _select_numeric_columns(inferred)
    notes = describe_numeric_formats(cells, numeric, ambiguous_points=has_semicolons and decimal is None)
    notes += describe_mixed_percentages(cells, numeric)
    notes += describe_mixed_units({name: cells[name] for name in cells if name not in {*numeric, *column_types}})
    for reason in dict.fromkeys(reasons.values()):
        names = [to_printable(name) for name in reasons if reasons[name] == reason]
        notes.append(f"dropped: {', '.join(names)}: {reason}")
    paths = [name for name in cells if name not in column_types and _are_picture_paths(cells[name])]
    notes += [f"warning: {name} names pictures, which are not read; `column_type` {name}=picture" for name in paths]
    modalities = {inferred_type.modality for inferred_type in inferred.values()} - {None}
    notes += [hint for modality in sorted(map(str, modalities)) if (hint := selection.format_install_hint(modality))]
    if not fitted:
        raise_input_error("path", "have a column of use", "; ".join(notes)[:500], "Add features.")
    encoding = make_encoding(fitted.values())
    types = {name: column.summary() for name, column in zip(fitted, encoding.columns, strict=True)}
    descriptions = {name: types.get(name) or f"dropped: {reasons[name]}" for name in cells}
    return block.select_columns(tuple(fitted)), encoding, descriptions, notes


def _are_picture_paths(cells: np.ndarray) -> bool:
    """Test whether the first cells (n,) of a column are paths of existing picture files."""
    paths = [text_to_path(str(cell)) for cell in cells[:N_EXAMINED_PATH_CELLS]] if cells.dtype.kind == "O" else []
    return bool(paths) and all(path.suffix.lower() in IMAGE_SUFFIXES and path.is_file() for path in paths)


def fit_columns(
    columns: Mapping[str, np.ndarray],
    column_types: Mapping[str, str],
    *,
    keep_hint: str | None,
    selection: SelectedEncoders = NO_ENCODERS,
    decimal: str | None = None,
    has_semicolons: bool = False,
    labels: np.ndarray | None = None,
) -> dict[str, InferredType]:
    """Infer the type of each column of a table; return, by name, a fitted column of this type or a reason to drop it.

    The arguments are those of `fit_encoding`. If the
    file ``has_semicolons`` between cells, the comma of "1,234" is a decimal mark. The ``labels`` (n,), "" if
    unlabelled, only decide whether columns of proper names are used; without them, these are dropped.
    """
    for name in column_types:
        if name not in columns:
            similar = closest_match(name, list(columns))
            remedy = f"Did you mean {to_printable(similar)}?" if similar else "Look at its header."
            raise_input_error("column_type", "name a feature of the table", to_printable(name), remedy)

    def fit(name: str, order: Sequence[str]) -> InferredType:
        if name in column_types:
            chosen, encoder = column_types[name], selection.text_encoder_name is not None
            return fit_column_as(
                name, chosen, columns[name], "column_type", has_text_encoder=encoder, format_order=order
            )
        return infer_column_type(columns[name], format_order=order)

    prefer_comma = decimal == "," or (decimal is None and has_semicolons)
    first_order = (
        (quantities.FORMATS_DECIMAL_COMMA_FIRST if decimal else quantities.SEMICOLON_FILE_FORMATS)
        if prefer_comma
        else quantities.FORMATS_DECIMAL_POINT_FIRST
    )
    inferred = {name: fit(name, first_order) for name in columns}
    numeric = _select_numeric_columns(inferred)
    if decimal is None and (order := choose_numeric_format_order(columns, numeric)):  # then "1.200" is not 1.2 either
        inferred |= {name: fit(name, order) for name in numeric if columns[name].dtype.kind == "O"}
    for name, (column, *_) in inferred.items() if keep_hint is not None else ():
        if name not in column_types and column is not None and column.is_fully_numeric:
            reason = explain_row_index(name, column.comparable_values(columns[name]).astype(np.float64))
            if reason:
                inferred[name] = InferredType(None, f"{reason} ({keep_hint})" if keep_hint else reason)
    constants = {name: Numeric.fit(columns[name]) for name, (_, reason, _) in inferred.items() if reason == "constant"}
    others = [column for column, *_ in inferred.values() if column is not None]
    if others and Encoding((*others, *constants.values())).is_fully_numeric:  # they may be pixels, whose order matters
        inferred |= {name: InferredType(column) for name, column in constants.items()}
    used = [name for name, (column, _, is_text) in inferred.items() if column is not None or is_text]
    for name in used:
        is_category = name not in column_types and isinstance(inferred[name].column, Category)
        if is_category and is_free_text(columns[name], is_only_column=len(used) == 1):
            text = Text.fit(columns[name])
            if text.feature_name_suffixes or selection.text_encoder_name is not None:
                inferred[name] = InferredType(text, is_text=True)
    fitted = _fit_text_and_picture_columns(inferred, columns, selection)
    dropped = find_useless_names(fitted, columns, column_types, labels)
    return _fit_text_and_picture_columns({**inferred, **dropped}, columns, selection) if dropped else fitted


def _select_numeric_columns(inferred: Mapping[str, InferredType]) -> dict[str, Numeric]:
    """Select the fitted columns that hold numbers; return them by name."""
    return {name: column for name, (column, *_) in inferred.items() if isinstance(column, Numeric)}


def _fit_text_and_picture_columns(
    inferred: Mapping[str, InferredType], columns: Mapping[str, np.ndarray], selection: SelectedEncoders
) -> dict[str, InferredType]:
    """Fit the columns of texts and pictures again, with the selected pretrained encoders; return all by name."""
    result, used = dict(inferred), set[EncoderName | None]()
    n_used = sum(inferred_type.column is not None or inferred_type.is_text for inferred_type in inferred.values())
    for name, inferred_type in inferred.items():
        modality = inferred_type.modality
        if modality is None:
            continue
        used.add(selection.text_encoder_name if modality == "text" else selection.picture_encoder_name)
        encoder = selection.load_encoder(modality)
        column: FittedColumn
        if modality == "picture":
            column = Picture.fit(columns[name], encoder, show_progress=selection.show_progress)
        elif encoder is None:
            if n_used == 1:
                continue
            column = Text.fit(columns[name], has_other_columns=True)
            if not column.feature_name_suffixes:
                continue
        else:
            words = inferred_type.column if isinstance(inferred_type.column, Text) else None
            column = EmbeddedText.fit(
                columns[name],
                encoder,
                show_progress=selection.show_progress,
                words=words if selection.use_word_features else Text.fit(columns[name][:0]),
                has_other_columns=n_used > 1,
            )
        result[name] = inferred_type._replace(column=column, drop_reason="")
    for encoder_name in selection.requested_names:
        if encoder_name not in used:
            must = f"come with a column of {get_encoder_modality(encoder_name)}s"
            raise_input_error("representation", must, f"{describe_encoder(encoder_name)}, and none", "Leave it out.")
    return result


def detect_suspicious_columns(
    block: RowBlock, labels: np.ndarray, encoding: Encoding, groups: np.ndarray | None = None
) -> tuple[list[str], tuple[int, ...]]:
    """Return warnings about columns that leak labels (n,) or identify groups, and the indices of the group columns.

    ``groups`` (n,) int64 are the groups of rows that cross-validation holds out together; None if there are none.
    """
    notes, group_columns = [], dict[int, GroupColumnEvidence]()
    for index, (column, cells) in enumerate(zip(encoding.columns, block.columns, strict=True)):
        name = block.column_name(index)
        values = column.comparable_values(cells)
        ordered = values.dtype.kind == "f"
        if column.may_be_group and block.names:
            rows = _select_distinct_rows(values, ~parsing.is_missing(cells), groups)
            group = detect_group_column(block.names[index], values[rows], labels[rows], ordered=ordered)
            if group:
                group_columns[index] = group
                continue
        if not ordered:
            if not column.may_be_group:
                continue
            levels, values = np.unique(values, return_inverse=True)
            if len(levels) == len(values):  # texts that all differ have no order
                continue
        if reason := explain_leakage(values.astype(np.float64), labels):
            notes.append(f"warning: {name} {reason}; will it in new rows? (`drop` leaves it out)")
    named = {block.column_name(index): group for index, group in group_columns.items()}
    return notes + describe_group_columns(named), tuple(group_columns)


def _select_distinct_rows(values: np.ndarray, present: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Return the indices (m,) of the rows with a value; of the rows of a group with equal values, only the first."""
    rows = np.flatnonzero(present)
    if groups is None:
        return rows
    pairs = np.stack([np.unique(values[rows], return_inverse=True)[1], groups[rows]])
    return rows[np.sort(np.unique(pairs, axis=1, return_index=True)[1])]


def describe_group_columns(groups: Mapping[str, GroupColumnEvidence]) -> list[str]:
    """Format a warning about columns that seem to identify groups of rows; an empty list if there are none."""
    if not groups:
        return []
    name = max(groups, key=lambda column: groups[column])
    others = [column for column in groups if column != name]
    more = f" (so do those of {', '.join(others)})" if others else ""
    repeat = f"values of {name} repeat, nearly always with the same class{more}"
    option = f"`group` {shlex.quote(name)}"
    if not groups[name].is_certain:
        return [f"warning: {repeat}; do rows with the same value have the same source? If so, {option}"]
    advice = f"if rows with the same value have the same source, {option} holds them out together"
    return [f"warning: {groups[name].n_repeated_values} {repeat}; {advice}"]


def check_column_types(block: RowBlock, encoding: Encoding | None, argument: str = "path") -> list[str]:
    """Describe cells of other types or spellings than in training, in notes for the user.

    Raises:
        InputError: A larger fraction of the cells of a column, and of its distinct cells, is invalid than
            `FittedColumn.max_invalid_fraction` allows. A single placeholder, such as 0 for no date, may be frequent.
    """
    notes, invalid_cells = [], defaultdict[str, dict[str, tuple[int, str]]](dict)  # by reason and column
    for index, (column, cells) in enumerate(zip(encoding.columns if encoding else (), block.columns, strict=False)):
        name = block.column_name(index)
        if spelling := column.describe_other_spelling(cells):
            notes.append(f"cells of {name} have another spelling than in training: {spelling}")
        invalid = column.is_invalid(cells)
        if not invalid.any():
            continue
        row, n_others = int(np.argmax(invalid)), int(invalid.sum()) - 1
        first = f"{str(cells[row])[:50]!r} in {name}, {block.format_location(row)}"
        limit = column.max_invalid_fraction
        if invalid.mean() > limit and len(set(cells[invalid])) > limit * len(set(cells.tolist())):
            got = f"{first}, which held {column.summary()}"
            must = "have columns of the same types as in training"
            raise_input_error(argument, must, got, "Correct it, or fit again.")
        further = f"and {n_others} more" if n_others else "the only one"
        invalid_cells[column.invalid_reason][name] = n_others, f"{first}, {further} of {len(cells)}"
    for reason, described in invalid_cells.items():
        most, *others = sorted(described, key=lambda name: -described[name][0])
        if len(described) <= MAX_INVALID_COLUMN_NOTES:
            notes += [f"{reason}: {text}" for _, text in described.values()]
        else:
            in_others = f"such cells also in {len(others)} more columns: {shorten_list(others)}"
            notes.append(f"{reason}: {described[most][1]}; {in_others}")
    return notes


def convert_to_training_formats(
    table: Table, encoding: Encoding | None, *, decimal: str | None = None, argument: str = "path"
) -> Table:
    """Return a table of new rows whose numbers are rewritten in the formats that the encoding was fitted to.

    Notes about the first block, which is read, are added to those of the table: another decimal mark than in training,
    and cells of other types or spellings. Errors call the table ``argument``.
    """
    first = next(table.blocks)
    conversion = detect_numeric_conversion(first, encoding, decimal=decimal, has_semicolons=table.has_semicolons)
    first = conversion.convert_block(first)
    table.notes.extend([*conversion.notes, *check_column_types(first, encoding, argument)])
    return replace(table, blocks=chain([first], map(conversion.convert_block, table.blocks)))


def encode_block(
    block: RowBlock, encoding: Encoding | None, argument: str = "path", *, keep_gaps: bool = False
) -> np.ndarray:
    """Compute the features (b, dim) of a block of b rows. Without an encoding, the columns are the features.

    If ``keep_gaps``, features are NaN in gaps that training rows did not have; see `Encoding.encode`.

    Raises:
        InputError: A cell is infinite or beyond float32; or a cell is missing, and there is no encoding. The message
            names the first such cell.
    """
    if encoding is not None:
        x = encoding.encode(block.columns, keep_gaps=keep_gaps)
    else:
        columns = [
            cells if cells.dtype.kind in "iuf" else parsing.parse_numeric_column(cells, "plain")
            for cells in block.columns
        ]
        x = Encoding.stack_numeric_columns(columns)
    usable = np.abs(x) <= MAX_FLOAT32  # False for NaN
    if keep_gaps and encoding is not None and encoding.gap_filler is not None:
        usable |= np.isnan(x)
    if not usable.all():
        row, feature = np.argwhere(~usable)[0].tolist()
        sizes = np.ones(x.shape[1], int) if encoding is None else encoding.n_features_per_column
        index = int(np.searchsorted(np.cumsum(sizes), feature, side="right"))
        cell = str(block.columns[index][row])[:50]
        got = f"{cell!r} in {block.column_name(index)}, {block.format_location(row)}"
        if np.isnan(x[row, feature]) or "inf" in cell.lower():
            raise_input_error(argument, "have finite numbers", got, "Fill it in, or leave it out.")
        must = f"have numbers of at most {MAX_FLOAT32:.1e} in absolute value"
        raise_input_error(argument, must, got, "Rescale the column.")
    return x
