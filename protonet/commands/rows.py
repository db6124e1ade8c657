"""A table as ``fit`` reads it before torch is imported: its rows, and what their classes and groups are."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protonet._text import to_printable
from protonet._validation import check_groups
from protonet.commands.classes import read_classes
from protonet.commands.labels import read_whole
from protonet.commands.options import DEFAULT_LABEL, parse_missing
from protonet.embeddings.pictures.images import text_to_path
from protonet.embeddings.pictures.reading import are_pictures, check_pictures
from protonet.errors import raise_input_error
from protonet.tables.columns import COLUMN_TYPES
from protonet.tables.formats import PICTURE_COLUMN
from protonet.tables.table import ReadSpec, RowBlock, Table, format_names, read_table
from protonet.ui.command_line import check_name

#: More classes than this with one row each are hardly classes, nor are as many fractions; see `_doubt_classes`.
MOST_SINGLE = 20
#: Most whole numbers have at most so many rows each where they are measured, such as an age, ...
FEW_ROWS = 3
#: ... and more than this share of the rows have a number of their own, or the numbers span so many times their count.
LARGE_SHARE, WIDE_SPAN = 0.5, 2


class TableRows(NamedTuple):
    """The rows of a table, and what was checked of them."""

    table: Table  #: With what a person should be told.
    block: RowBlock  #: Those with a class.
    rest: RowBlock | None  #: Those without, if they are to be learned from.
    kinds: Mapping[str, str]  #: What columns hold, by name, where a person says so.
    classes: tuple[str, ...] | tuple[int, ...]  #: Their names, in ascending order.
    labels: np.ndarray  #: (n,) int64, the number of each row's class.
    group_names: np.ndarray  #: (groups,) str, in ascending order; none without groups.
    groups: np.ndarray | None  #: (n,) int64, the place of the group's name.
    seconds: float  #: That reading took.
    descriptions: list[str]  #: Of each class, "" for none.

    @property
    def unlabelled(self) -> bool:
        """Whether no row has a class: they are named beside the table, and the block holds all rows."""
        return not len(self.labels)


def read_rows(options: argparse.Namespace) -> TableRows:
    """Read the table that the options of ``fit`` name.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: Options or a table that do not fit.
    """
    started = time.monotonic()
    label = options.label or DEFAULT_LABEL
    kinds = take_kinds(options, parse_kinds(options.column_type))
    beside = tuple(name for name in (options.group, options.id) if name is not None)
    for name in (*beside, *options.drop, *(options.columns or ()), *kinds):
        if name == label:
            raise_input_error("arguments", "use the classes' column for nothing else", repr(name), "Name another one.")
    described = {} if options.classes is None else read_classes(Path(options.classes))
    wanted = ReadSpec(
        label,
        labelled=not described or options.label is not None,
        for_training=bool(described),
        columns=None if options.columns is None else tuple(options.columns),
        extra_columns=beside,
        ignored=tuple(options.drop),
        partly_labelled=True,
        skip_broken=options.skip_broken,
        user_columns=True,
        sheet=options.sheet,
    )
    if options.missing_values is not None:
        wanted = wanted._replace(missing_texts=parse_missing(options.missing_values.split(",")))
    table, every = read_table(Path(options.table), wanted, options.labels_file and Path(options.labels_file))
    for name, cells in zip(table.columns or (), every.columns, strict=bool(table.columns)) if described else ():
        if (
            label not in table.extra_columns
            and cells.dtype.kind == "O"
            and set(cells.tolist()) - {""} <= described.keys()
        ):
            got = f"{format_names([name])}, whose cells are classes of {options.classes}"
            raise_input_error(
                "--label", "name the column of the classes", got, f"Pass --label {name}, or --drop {name}."
            )
    if not len(every.labels):  # the classes are named beside the table
        every = every._replace(labels=np.full(len(every.positions), ""))
    missing = every.labels == ""
    block, rest, labels = every, None, every.labels[~missing]
    if missing.all():
        block = every._replace(labels=np.zeros(len(every.positions), np.int64))  # one class: no column can tell it
    elif missing.any():
        block = every.take(np.flatnonzero(~missing))
        rest = None if options.drop_unlabelled else every.take(np.flatnonzero(missing))
    one_shot = options.allow_many_classes or are_pictures(Path(options.table))  # whoever makes folders means classes
    classes, numbers = check_classes(labels, label, one_shot=one_shot, described=list(described))
    for name, cells in zip(table.columns or (), every.columns, strict=bool(table.columns)):
        if kinds.get(name) == "picture":
            paths = [text_to_path(str(cell)) for cell in cells.tolist()]
            table.notes.extend(check_pictures(paths, every.labels.astype(str).tolist(), shown=not options.quiet))
    group_names, groups = np.empty(0, np.str_), None
    if options.group is not None and len(labels):
        check_groups("--group", block.extra_columns[0].tolist(), block.labels.tolist())
        group_names, groups = np.unique(block.extra_columns[0], return_inverse=True)
    descriptions, seconds = [described.get(str(name), "") for name in classes], time.monotonic() - started
    return TableRows(table, block, rest, kinds, classes, numbers, group_names, groups, seconds, descriptions)


def take_kinds(options: argparse.Namespace, kinds: Mapping[str, str]) -> Mapping[str, str]:
    """Return what columns hold, by name: of a folder, that its one column holds pictures."""
    return {PICTURE_COLUMN: "picture"} if are_pictures(Path(options.table)) else kinds


def parse_kinds(texts: list[str]) -> dict[str, str]:
    """Return what columns hold, by name, from ``NAME=KIND``; raise an InputError for anything else."""
    kinds = {}
    for text in texts:
        name, equals, kind = text.rpartition("=")
        if not equals:
            raise_input_error(
                "--column-type", "be NAME=TYPE", repr(text), f"Pass for example {text or 'NAME'}=category."
            )
        kinds[name] = check_name("--column-type", kind, COLUMN_TYPES)
    return kinds


def check_classes(
    labels: np.ndarray, label: str, *, one_shot: bool, described: Sequence[str] = ()
) -> tuple[tuple[str, ...] | tuple[int, ...], np.ndarray]:
    """Return the names of the classes in ascending order, and the number (n,) int64 of each row's class.

    Args:
        labels: (n,) of the rows.
        label: The column that they are of.
        one_shot: Whether many classes of a few rows each are meant.
        described: Classes that there are, whether or not a row is of them.

    Raises:
        InputError: There is one class alone, or what looks like something else to be predicted than classes.
    """
    n, one_shot = len(labels), one_shot or bool(described)
    if described:
        labels = np.concatenate([labels.astype(str), np.array(described, str)])
    names, numbers = np.unique(read_whole(labels), return_inverse=True)
    numbers = numbers[:n]
    rows = np.bincount(numbers, minlength=len(names))
    classes = tuple(names.tolist() if names.dtype.kind in "iu" else map(str, names.tolist()))
    if len(classes) < 2:
        got = f"{format_names(list(map(str, classes))) if classes else 'no row'} alone in {to_printable(label)}"
        where = "--classes" if described else "table"
        got = format_names(list(map(str, classes))) if described else got
        raise_input_error(where, "have at least 2 classes", got, "Add another one.")
    doubt = None if one_shot or len(classes) <= MOST_SINGLE else _doubt_classes(classes, rows, to_printable(label))
    if doubt:
        remedy = "Name a column of classes with --label; regression is not supported."
        raise_input_error("--label", "name a column of classes", doubt, f"{remedy} Or pass --allow-many-classes.")
    return classes, numbers


def _doubt_classes(classes: Sequence[str | int], rows: np.ndarray, label: str) -> str | None:
    """Return what many classes of so many rows (classes,) each look like, or None where they may be classes."""
    if rows.max() == 1:
        return f"{len(classes)} classes in {label}, 1 row per class"
    numbers = read_numbers(classes)
    if not numbers:
        return None
    got = f"numbers, such as {to_printable(classes[-1])}, in {label}"
    if any(number % 1 for number in numbers):
        return f"{len(classes)} {got}"
    apart = max(numbers) - min(numbers) >= WIDE_SPAN * len(numbers) or len(numbers) > LARGE_SHARE * rows.sum()
    few = np.median(rows) <= FEW_ROWS
    return f"{len(classes)} whole {got}, most with {FEW_ROWS} rows or fewer" if apart and few else None


def read_numbers(names: Sequence[str | int]) -> list[float]:
    """Return names as numbers, or none of them where one is something else."""
    try:
        return [float(name) for name in names]
    except ValueError:
        return []
