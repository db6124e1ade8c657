"""From the columns of a table to features: what fit takes each column for, and what new rows become by that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from protonet._text import to_printable
from protonet.errors import raise_input_error
from protonet.representations.opening import Selection, find_takes
from protonet.tables.columns.embedded import EmbeddedText
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.kind import Column
from protonet.tables.columns.number import MOST, Number
from protonet.tables.columns.parsing import find_gaps, parse_numbers
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.recognise import Verdict, fit_named, recognise
from protonet.tables.columns.text import Text
from protonet.tables.leaks import find_row_number, find_suspicion
from protonet.tables.sources import Sources, find_sources
from protonet.tables.spelling import choose_order, describe_marks, revise_order
from protonet.tables.table import Block, Table

#: No representation.
NOTHING = Selection(None, None)


class Features(NamedTuple):
    """The features of a table."""

    x: np.ndarray  #: (n, features) float32, or float64 where there may be more digits.
    encoding: Encoding | None  #: What made them; None for arrays without gaps, which are their features.
    columns: tuple[str, ...] | None  #: The names of the columns that were encoded, if they have any.
    left_out: tuple[str, ...]  #: The names of those that were not.
    notes: tuple[str, ...]  #: What a person should know of them, a line each.
    sources: tuple[int, ...] = ()  #: The numbers, of those encoded, that seem to name the sources of rows.


def choose_features(
    table: Table,
    block: Block,
    kinds: Mapping[str, str],
    *,
    keep: str | None,
    groups: np.ndarray | None = None,
    selection: Selection = NOTHING,
    mark: str | None = None,
) -> Features:
    """Take each column of a table for something, and leave out what is of no use or none for new rows.

    Args:
        table: The table.
        block: All of its rows, with classes.
        kinds: By a column's name, what a person says that it holds, of `protonet.tables.columns.NAMES`.
        keep: As in `take_columns`.
        groups: As in `suspect`.
        selection: What embeds texts and pictures.
        mark: As in `take_columns`.

    Raises:
        InputError: A column of that name is not there, or holds something else; no column is left; a number is infinite
            or beyond float32.
    """
    if table.columns is None:
        encoding = Encoding(tuple(map(Number.fit, block.columns)))
        notes, _ = suspect(table, block, encoding)
        x = encode_block(table, block, encoding)
        return Features(x, None if encoding.plain else encoding, None, (), tuple(notes))
    columns = dict(zip(table.columns, block.columns, strict=True))
    verdicts = take_columns(columns, kinds, keep=keep, selection=selection, mark=mark, semicolons=table.semicolons)
    used = {name: verdict.column for name, verdict in verdicts.items() if verdict.column is not None}
    kinds_read = {verdict.takes for verdict in verdicts.values() if verdict.takes}
    reasons: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.column is None:
            reasons.setdefault(verdict.reason, []).append(to_printable(name))
    notes = describe_marks(columns, _list_numbers(verdicts))
    notes += [f"left out: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    notes += [hint for takes in sorted(kinds_read) if (hint := selection.hint(takes))]
    if not used:
        raise_input_error("path", "have a column of use", "; ".join(notes)[:500], "Add features.")
    encoding = Encoding(tuple(used.values()))
    own = [cells for name, cells in zip(table.columns, block.columns, strict=True) if name in used]
    chosen = [column.read_once(cells) for column, cells in zip(used.values(), own, strict=True)]
    table, block = table._replace(columns=tuple(used)), block._replace(columns=chosen)
    suspicions, sources = suspect(table, block, encoding, groups)
    notes += suspicions
    notes += check_kinds(table, block._replace(columns=own), encoding)
    left_out = tuple(name for name in verdicts if name not in used)
    return Features(encode_block(table, block, encoding), encoding, tuple(used), left_out, tuple(notes), sources)


def take_columns(
    columns: Mapping[str, np.ndarray],
    kinds: Mapping[str, str],
    *,
    keep: str | None,
    argument: str = "--column",
    selection: Selection = NOTHING,
    mark: str | None = None,
    semicolons: bool = False,
) -> dict[str, Verdict]:
    """Take each column for something.

    Args:
        columns: By name, the cells (n,).
        kinds: As in `choose_features`.
        keep: What a person does to use a column that may be the rows' numbers, "" for nothing; None where they have
            named the columns: then none is taken for these.
        argument: What gave the kinds.
        selection: What embeds texts and pictures.
        mark: The decimal mark of numbers, where a person names it.
        semicolons: Whether semicolons separate cells: then a comma that may be the decimal mark is.

    Raises:
        InputError: A column of that name is not there, or holds something else.
    """
    for name in kinds:
        if name not in columns:
            raise_input_error(argument, "name a feature of the table", to_printable(name), "Look at its header.")

    def take(name: str, order: Sequence[str]) -> Verdict:
        """Take a column for something, its numbers in an order of forms."""
        if name in kinds:
            read = selection.text is not None
            return fit_named(name, kinds[name], columns[name], argument, read=read, order=order)
        return recognise(columns[name], order=order)

    verdicts = {name: take(name, choose_order(mark, semicolons=semicolons)) for name in columns}
    numbers = _list_numbers(verdicts)
    if mark is None and (order := revise_order(columns, numbers)):  # then "1.200" is not 1.2 either
        verdicts |= {name: take(name, order) for name in numbers if columns[name].dtype.kind == "O"}
    for name, verdict in verdicts.items():
        if name not in kinds and verdict.column is not None and verdict.column.plain and keep is not None:
            reason = find_row_number(verdict.column.fill(columns[name]).astype(np.float64))
            verdicts[name] = Verdict(None, f"{reason} ({keep})" if keep else reason) if reason else verdict
    keep_constants(verdicts, columns)
    return read_columns(verdicts, columns, selection)


def _list_numbers(verdicts: Mapping[str, Verdict]) -> dict[str, Number]:
    """Return the columns, by name, that were taken for numbers."""
    return {name: each.column for name, each in verdicts.items() if isinstance(each.column, Number)}


def read_columns(
    verdicts: Mapping[str, Verdict], columns: Mapping[str, np.ndarray], selection: Selection
) -> dict[str, Verdict]:
    """Let what embeds texts and pictures read the columns (n,) that hold some.

    Raises:
        MissingPackageError: A package that it needs is missing.
        InputError: It cannot be opened; a picture cannot be read; or a person has named one for what is not there.
    """
    found, of_use = dict(verdicts), set[str | None]()
    used = sum(verdict.column is not None or verdict.is_text for verdict in verdicts.values())
    for name, verdict in verdicts.items():
        takes = verdict.takes
        if takes is None:
            continue
        of_use.add(selection.text if takes == "text" else selection.picture)
        representation = selection.open(takes)
        if takes == "picture":
            column: Column = Picture.fit(columns[name], representation, shown=selection.shown)
        elif representation is None:
            few = None if used == 1 else Text.fit(columns[name], beside=True)
            if few is None or not few.parts:
                continue
            column = few
        else:
            words = verdict.column if isinstance(verdict.column, Text) else None
            words = words if selection.words else Text.fit(columns[name][:0])
            settings = {"shown": selection.shown, "alone": used == 1}
            column = EmbeddedText.fit(columns[name], representation, words=words, **settings)
        found[name] = verdict._replace(column=column, reason="")
    for each in selection.asked:
        if each not in of_use:
            raise_input_error(
                "representation", f"come with a column of {find_takes(each)}s", f"{each}, and none", "Leave it out."
            )
    return found


def keep_constants(verdicts: dict[str, Verdict], cells: Mapping[str, np.ndarray]) -> None:
    """Take constant columns of a table of numbers back in: they may be pixels, which are in an order."""
    constant = [name for name, verdict in verdicts.items() if verdict.reason == "constant"]
    fitted = {name: Number.fit(cells[name]) for name in constant}
    others = [verdict.column for name, verdict in verdicts.items() if name not in fitted and verdict.column is not None]
    if others and Encoding((*others, *fitted.values())).plain:
        verdicts |= {name: Verdict(column, "") for name, column in fitted.items()}


def suspect(
    table: Table, block: Block, encoding: Encoding, groups: np.ndarray | None = None
) -> tuple[list[str], tuple[int, ...]]:
    """Look for columns that may tell the classes in a way that new rows will not share.

    Args:
        table: What the rows are of.
        block: All of its rows, with classes.
        encoding: Fitted to its columns.
        groups: (n,) of the rows, int64, where some are held out together already.

    Returns:
        A line for each such column, and one for all that seem to name the sources of rows; the numbers of these.
    """
    notes, sources = [], dict[int, Sources]()
    for number, (column, cells) in enumerate(zip(encoding.columns, block.columns, strict=True)):
        name = table.name_column(number)
        values = column.fill(cells)
        ordered = values.dtype.kind == "f"
        if column.names_sources:
            there = find_rows(values, ~find_gaps(cells), groups)
            own = table.columns[number] if table.columns else ""
            found = find_sources(own, values[there], block.labels[there], ordered=ordered) if own else None
            if found:
                sources[number] = found
                continue
            if not ordered:
                names, values = np.unique(values, return_inverse=True)
                if len(names) == len(values):  # texts that all differ are in no order
                    continue
        elif not ordered:
            continue
        if reason := find_suspicion(values.astype(np.float64), block.labels):
            notes.append(f"look at: {name} {reason}; will it in new rows? (--drop leaves it out)")
    return notes + tell_sources({table.name_column(number): each for number, each in sources.items()}), tuple(sources)


def find_rows(values: np.ndarray, there: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Return the numbers (m,) of the rows (n,) that are there; of those of one group that share a value, the first."""
    rows = np.flatnonzero(there)
    if groups is None:
        return rows
    pairs = np.stack([np.unique(values[rows], return_inverse=True)[1], groups[rows]])
    return rows[np.sort(np.unique(pairs, axis=1, return_index=True)[1])]


def tell_sources(found: Mapping[str, Sources]) -> list[str]:
    """Return a line, or none, about columns that seem to name the sources of rows."""
    if not found:
        return []
    name = max(found, key=lambda each: found[each])
    others = [each for each in found if each != name]
    more = f" (so do those of {', '.join(others)})" if others else ""
    if not found[name].sure:
        what = f"values of {name} come again, nearly always with the same class{more}"
        return [f"look at: {what}; do rows of one {name} have one source? If so, --group {name}"]
    what = f"{found[name].size} values of {name} come again, nearly always with the same class{more}"
    return [f"look at: {what}; if rows of one value have one source, --group {name} holds them out together"]


def check_kinds(table: Table, block: Block, encoding: Encoding | None, argument: str = "path") -> list[str]:
    """Look for cells of numbers or dates that hold something else, and count as gaps, and for unknown categories.

    Args:
        table: What the rows are of.
        block: The rows, the first ones of a long table.
        encoding: As in `encode_block`.
        argument: The same.

    Returns:
        A line for each column that has some.

    Raises:
        InputError: Most cells of a column are something else than in fit.
    """
    notes = []
    for number, (column, cells) in enumerate(zip(encoding.columns if encoding else (), block.columns, strict=False)):
        if respelled := column.describe_respelled(cells):
            notes.append(f"cells of {table.name_column(number)} are spelled otherwise than in fit: {respelled}")
        strange = column.find_strange(cells)
        if not strange.any():
            continue
        row, name = int(np.argmax(strange)), table.name_column(number)
        first = f"{str(cells[row])[:50]!r} in {name}, {table.place.format(block.rows[row])}"
        others = int(strange.sum()) - 1
        rest = f"{first}, {f'and {others} more' if others else 'the only one'} of {len(cells)}"
        if strange.mean() > column.most_strange:
            got = f"{first}, which held {column.tell()}"
            raise_input_error(
                argument, "have columns of the kind that they were of in fit", got, "Mend it, or fit again."
            )
        notes.append(f"{column.strange}: {rest}")
    return notes


def encode_block(table: Table, block: Block, encoding: Encoding | None, argument: str = "path") -> np.ndarray:
    """Return the features (b, features) of some rows.

    Args:
        table: What the rows are of.
        block: The rows; their columns are those of the encoding, in that order.
        encoding: Fitted; None where the columns are features already.
        argument: What the rows came by.

    Raises:
        InputError: An infinite number, or one beyond float32; without an encoding, a gap.
    """
    if encoding is not None:
        x = encoding.encode(block.columns)
    else:
        x = Encoding.stack(
            [each if each.dtype.kind in "iuf" else parse_numbers(each, "plain") for each in block.columns]
        )
    usable = np.abs(x) <= MOST  # not so for NaN
    if not usable.all():
        row, at = np.argwhere(~usable)[0].tolist()
        sizes = np.ones(x.shape[1], int) if encoding is None else encoding.sizes
        number = int(np.searchsorted(np.cumsum(sizes), at, side="right"))
        cell = str(block.columns[number][row])[:50]
        got = f"{cell!r} in {table.name_column(number)}, {table.place.format(block.rows[row])}"
        if np.isnan(x[row, at]) or "inf" in cell.lower():
            raise_input_error(argument, "have finite numbers", got, "Fill it in, or leave it out.")
        raise_input_error(argument, f"have numbers of at most {MOST:.1e} in absolute value", got, "Rescale the column.")
    return x
