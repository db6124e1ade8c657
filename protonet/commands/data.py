"""A table as ``fit`` reads it, its columns taken for something, its classes checked; and one that lacks classes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.commands.labels import list_contradictions, suspect_spellings
from protonet.commands.models import open_rows, want
from protonet.commands.options import parse_missing
from protonet.commands.rows import TableRows, take_kinds
from protonet.embeddings.opening import Selection
from protonet.errors import install_command, raise_input_error, renamed_arguments
from protonet.files import Model
from protonet.fit.names import read_names
from protonet.fit.problem import Names
from protonet.fit.solver import Solution
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.parsing import count_missing_cells
from protonet.tables.delimited import MISSING_TEXTS
from protonet.tables.drift import column_statistics
from protonet.tables.features import encode_block, fit_features
from protonet.tables.numeric_formats import convert_numeric
from protonet.tables.table import COMMON_LABEL_NAMES, ReadSpec, RowBlock, Table, format_names, open_table, read_table
from protonet.ui.text import count


class Data(NamedTuple):
    """A table as it is fitted to."""

    x: Tensor  #: (n, dim) float32 or float64.
    y: Tensor  #: (n,) int64.
    classes: tuple[str, ...] | tuple[int, ...]  #: Their names.
    columns: tuple[str, ...] | None  #: The names of the columns that are used, if they have any.
    encoding: Encoding | None  #: What made features of them.
    groups: Tensor | None  #: (n,) int64, the place of the group's name.
    group_names: list[str]  #: In ascending order.
    left_out: list[str]  #: Columns that are no features.
    notes: list[str]  #: What a person should know of the columns and the classes, a line each.
    rows: Sequence[int]  #: Where in the file each row is, ...
    place: str  #: ... and what a message calls that, with its number to be put in.
    numbers: Sequence[int]  #: Of each row in the table, from 0, those that are left out counted as well.
    ids: list[str] | None  #: The name of each row, if a column holds them.
    gaps: list[int]  #: How many cells of each column that is used are gaps.
    cells: list[np.ndarray]  #: Of the columns that are used, (n,) each; none if only the features are wanted.
    rest: Tensor | None  #: (m, dim) rows without a class, if there are any.
    rest_rows: Sequence[int]  #: Where in the file each of them is.
    seen: Any  #: What was seen of the columns, for the model file: see `protonet.tables.drift`.
    sources: tuple[int, ...] = ()  #: The numbers of the columns that seem to name the sources of rows.
    missing: frozenset[str] = MISSING_TEXTS  #: As in `ReadSpec`.
    names: Names | None = None  #: What the classes are called, as rows, where that says something.
    uninformative: Sequence[int] = ()  #: Of each class, how many rows have no information.

    def number_groups(self, solution: Solution) -> dict[str, int]:
        """Return the number in the solution of each group's name."""
        numbers = [] if solution.groups is None else solution.groups.tolist()
        return dict(zip(self.group_names, numbers, strict=True))


class Unlabelled(NamedTuple):
    """A table with rows that lack a class, as features."""

    x: Tensor  #: (n, dim) float32 or float64.
    blocks: Tensor | None  #: (dim,) int64: which column each feature comes from; None where each is one.
    table: Table  #: With what a person should be told.
    known: Tensor  #: (n,) bool: which rows have a class already, and are not asked for.
    encoding: Encoding | None = None  #: What made the features.
    columns: tuple[str, ...] | None = None  #: The names of the columns that are used, if they have any.
    told: tuple[str, ...] = ()  #: What a person should know of the columns, a line each.
    places: Sequence[int] = ()  #: Where in the file each row is.

    @property
    def left(self) -> Tensor:
        """The numbers (m,) int64 of the rows without a class."""
        return (~self.known).nonzero().flatten()


class Taken(NamedTuple):
    """What a person says of columns, as ``fit`` is told."""

    kinds: Mapping[str, str] = MappingProxyType({})  #: What columns hold, by name.
    dropped: tuple[str, ...] = ()  #: Those that are no features.
    group: str | None = None  #: The one whose equal cells are held out together; it is no feature, either.

    def list_options(self) -> list[str]:
        """Return the options that say so."""
        kinds = [f"{name}={kind}" for name, kind in self.kinds.items()]
        options = [*["--column-type"] * bool(kinds), *kinds, *["--drop"] * bool(self.dropped), *self.dropped]
        return [*options, *([] if self.group is None else ["--group", self.group])]


#: Nothing is said of columns.
AS_SEEN = Taken()


def read_data(options: argparse.Namespace, rows: TableRows, *, keep_cells: bool = False) -> Data:
    """Take each column of a table's rows for what it is; cells take memory.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: Options or a table that do not fit.
    """
    table, block, rest = rows.table, rows.block, rows.rest
    keep = "--columns keeps it" if options.columns is None else None
    selection = select(options)._replace(words=not rows.unlabelled)  # that texts share a word says nothing of names
    settings = {"selection": selection, "decimal": options.decimal_mark}
    x, encoding, columns, left, notes, sources = fit_features(
        table, block, rows.kinds, keep_hint=keep, groups=rows.groups, **settings
    )
    beside = [name for name in (options.group, options.id) if name is not None]
    left_out = [*beside, *options.drop, *table.unused, *left]
    features = torch.from_numpy(np.ascontiguousarray(x))
    labels = torch.from_numpy(rows.labels)
    others, rest_rows = None, list[int]()
    if rest is not None:
        others, rest_rows = _encode_rest(table, rest, columns, encoding), list(rest.positions)
    elif rows.unlabelled:
        others, rest_rows, features = features, list(block.positions), features[:0]
    names = read_names(encoding, rows.classes, features, labels, rows.descriptions)
    if rows.unlabelled and names is None:
        refuse_names(encoding, rows.classes)
    groups = None if rows.groups is None else torch.from_numpy(rows.groups)
    known = {*rows.labels.tolist(), *(() if names is None else names.labels.tolist())}
    lost = [str(name) for number, name in enumerate(rows.classes) if number not in known]
    told = [*table.notes, *notes, *suspect_spellings(rows.classes)]
    if lost:
        what = "neither a row nor a name says what these classes are, never predicted"
        told.append(f"warning: {what}: {format_names(lost)}")
    uninformative, empty = np.zeros(len(rows.classes), np.int64), np.zeros(len(labels), bool)
    ids = None if options.id is None else block.extra_columns[beside.index(options.id)].astype(str).tolist()
    if columns is None or table.columns is None:
        cells = list(block.columns)
    else:
        used = set(columns)
        cells = [each for name, each in zip(table.columns, block.columns, strict=True) if name in used]
    labelled = [each[: len(labels)] for each in cells]
    if encoding is not None and len(labels):
        empty = encoding.is_uninformative(labelled)
        uninformative = np.bincount(rows.labels[empty], minlength=len(rows.classes))
        if empty.any():
            told.append(f"warning: {count(int(empty.sum()), 'row')} without information: no cell is there and readable")
    gaps, places = list(map(count_missing_cells, labelled)), block.positions[: len(labels)]
    some = np.flatnonzero(~empty).tolist()
    given = [rows.classes[rows.labels[row]] for row in some]
    told += list_contradictions(
        features.numpy()[some], given, [table.position_format.format(places[row]) for row in some]
    )
    where = places, table.position_format, block.indices[: len(labels)], ids, gaps, cells if keep_cells else []
    missing = MISSING_TEXTS if options.missing_values is None else parse_missing(options.missing_values.split(","))
    seen = column_statistics(cells, encoding, np.bincount(rows.labels, minlength=len(rows.classes)).tolist())
    return Data(
        features,
        labels,
        rows.classes,
        columns,
        encoding,
        groups,
        rows.group_names.tolist(),
        left_out,
        told,
        *where,
        others,
        rest_rows,
        seen,
        sources,
        missing,
        names,
        uninformative.tolist(),
    )


def refuse_names(encoding: Encoding | None, classes: Sequence[str | int]) -> NoReturn:
    """Raise an InputError: no row has a class, and nothing can be learned from the names of the classes."""
    columns = () if encoding is None else encoding.columns
    texts = [column for column in columns if column.modality == "text"]
    if any(column.record is not None for column in texts):
        got = format_names(list(map(str, classes)))
        raise_input_error(
            "--classes", "name classes in words, or describe them", got, "Add a column description, or label rows."
        )
    if texts:
        remedy = f"Run {install_command('text')}, pass --representation, or label some rows."
        raise_input_error("table", "be read by a representation, where no row has a class", "texts, and none", remedy)
    raise_input_error("table", "have texts, where no row has a class", "none", "Label some rows.")


def _encode_rest(table: Table, rest: RowBlock, columns: tuple[str, ...] | None, encoding: Encoding | None) -> Tensor:
    """Return the features (m, dim) of the rows of a table that have no class."""
    if columns is not None and table.columns is not None:
        used = [cells for name, cells in zip(table.columns, rest.columns, strict=True) if name in columns]
        table, rest = table._replace(columns=columns), rest._replace(columns=used)
    return torch.from_numpy(np.ascontiguousarray(encode_block(table, rest, encoding)))


class Rest:
    """The rows that have no class, a block of features at a time: those of the table itself, and those of another one.

    Args:
        data: What is fitted to.
        path: Of the other table, or None. It has the columns of the first one, and perhaps one of classes, which is not
            looked at.
        label: That column.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: A table that does not fit; as it is read, a number that does not.
    """

    def __init__(self, data: Data, path: Path | None, label: str) -> None:
        self.data, self.path = data, path
        self.rows = list(data.rest_rows)  #: Where in its file each row is that has been read.
        if path is not None:
            width = data.x.shape[1] if data.encoding is None else len(data.encoding.columns)
            wanted = ReadSpec(label, labelled=False, columns=data.columns, width=width, ignored=tuple(data.left_out))
            wanted = wanted._replace(for_training=True, missing_texts=data.missing)
            with renamed_arguments(path="--unlabelled"):
                self.table = convert_numeric(open_table(path, wanted), data.encoding)

    def __bool__(self) -> bool:
        return self.path is not None or self.data.rest is not None

    def __iter__(self) -> Iterator[Tensor]:
        if self.data.rest is not None:
            yield self.data.rest
        for block in () if self.path is None else self.table.blocks:
            self.rows += block.positions
            x = encode_block(self.table, block, self.data.encoding, "--unlabelled")
            yield torch.from_numpy(np.ascontiguousarray(x))

    def name(self, row: int) -> str:
        """Return what a message calls a row, given its number among those that were read."""
        own = row < len(self.data.rest_rows)
        place = self.data.place if own else self.table.position_format
        return place.format(self.rows[row]) + (
            "" if own or self.path is None else f" of {to_printable(self.path.name)}"
        )


def select(options: argparse.Namespace) -> Selection:
    """Return what embeds texts and pictures, as the options say.

    Raises:
        InputError: There is no such thing.
    """
    return Selection.of(options.representation, shown=not options.quiet)


def read_unlabelled(options: argparse.Namespace, model: Model | None, label: str, taken: Taken = AS_SEEN) -> Unlabelled:
    """Read the table that the options name, as features for a model, or as what its own columns are taken for.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: A table that does not fit, or all of whose rows have a class.
    """
    blocks, notes = None, list[str]()
    if model is None:
        beside = () if taken.group is None else (taken.group,)
        wanted = ReadSpec(
            label, labelled=False, extra_columns=beside, ignored=taken.dropped, partly_labelled=True, user_columns=True
        )
        wanted = wanted._replace(skip_broken=options.skip_broken, sheet=options.sheet)
        table, block = read_table(Path(options.table), wanted)
        labels, places = block.labels, list(block.positions)
        block = block._replace(labels=np.zeros(len(block.positions), np.int64))  # one class: no column can tell it
        settings = {"selection": select(options), "decimal": options.decimal_mark}
        features = fit_features(table, block, take_kinds(options, taken.kinds), keep_hint="", **settings)
        x, blocks = features.x, None if features.encoding is None else features.encoding.blocks
        encoding, columns = features.encoding, features.columns
        told = features.notes
        likely = [name for name in table.columns or () if name.lower() in COMMON_LABEL_NAMES and not len(labels)]
        if likely:
            notes.append(
                f"there is no column {label}; if {format_names(likely)} holds the classes, name it with --label"
            )
    else:
        encoding, columns, told = model.encoding, model.columns, ()
        table = open_rows(options, model, want(model, label, labelled=False)._replace(partly_labelled=True))
        places, parts = list[int](), []
        for block in table.blocks:
            places += block.positions
            parts.append((encode_block(table, block, model.encoding), block.labels))
        x, labels = map(np.concatenate, zip(*parts, strict=True))
    known = labels != "" if len(labels) else np.zeros(len(x), bool)
    if known.all():
        got = f"one in {to_printable(label)} for each of {count(len(x), 'row')}"
        raise_input_error("table", "have rows without a class", got, "Add rows whose cell there is empty.")
    if known.any():
        verb = "has" if known.sum() == 1 else "have"
        notes.append(f"{count(int(known.sum()), 'row')} {verb} a class in {to_printable(label)} already: not asked for")
    table.notes.extend(notes)
    rows = torch.from_numpy(np.ascontiguousarray(x))
    return Unlabelled(rows, blocks, table, torch.from_numpy(known), encoding, columns, told, places)


def read_cells(
    options: argparse.Namespace, model: Model | None, label: str, rows: Sequence[int] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Read all columns of a table as text, but for that of the classes and one without a name.

    Args:
        options: They name the table.
        model: What it is read for, or None.
        label: The column of the classes, which need not be there.
        rows: The numbers of the rows, in the order wanted; None for all.

    Returns:
        The columns' names, and the cells of each row.
    """
    wanted = ReadSpec(label, labelled=False) if model is None else want(model, label, labelled=False)
    wanted = wanted._replace(skip_broken=options.skip_broken, sheet=options.sheet, all_extra=True)
    table = open_table(Path(options.table), wanted)
    names = {name: number for number, name in enumerate(table.extra_columns) if name != label}
    found: dict[int, list[str]] = {}
    first = 0
    for block in table.blocks:
        places = range(len(block.positions)) if rows is None else [row - first for row in rows]
        taken = np.array([place for place in places if 0 <= place < len(block.positions)], int)
        columns = [block.extra_columns[number][taken].tolist() for number in names.values()]
        found.update(zip((first + taken).tolist(), map(list, zip(*columns, strict=True)), strict=True))
        first += len(block.positions)
    return list(names), [found[row] for row in (found if rows is None else rows)]
