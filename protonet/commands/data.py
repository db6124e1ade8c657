"""A table as ``fit`` reads it, its columns taken for something, its classes checked; and one that lacks classes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._checks import as_typed, check_groups, refuse, show
from protonet.commands.classes import read_classes
from protonet.commands.labels import read_whole, suspect_spellings
from protonet.commands.models import open_rows, want
from protonet.files import Model
from protonet.fit.names import Names, read_names
from protonet.fit.solver import Solution
from protonet.representations.opening import Selection
from protonet.representations.pictures.files import SETTINGS
from protonet.representations.pictures.reading import are_pictures
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.parsing import count_gaps
from protonet.tables.columns.recognise import NAMES
from protonet.tables.drift import describe_columns
from protonet.tables.features import choose_features, encode_block
from protonet.tables.formats import PICTURE
from protonet.tables.table import CLASS_NAMES, Block, Table, Wanted, list_names, open_table, read_table
from protonet.ui.command_line import Parser, check_name
from protonet.ui.text import count

#: More classes than this with one row each are hardly classes, nor are as many fractions; see `_doubt_classes`.
MOST_SINGLE = 20
#: Most whole numbers have at most so many rows each where they are measured, such as an age, ...
FEW_ROWS = 3
#: ... and more than this share of the rows have a number of their own, or the numbers span so many times their count.
LARGE_SHARE, WIDE_SPAN = 0.5, 2


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
    names: Names | None = None  #: What the classes are called, as rows, where that says something.

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

    @property
    def left(self) -> Tensor:
        """The numbers (m,) int64 of the rows without a class."""
        return (~self.known).nonzero().flatten()


def add_options(parser: Parser) -> None:
    """Add what says how the table is to be taken."""
    parser.add_argument("--group", metavar="NAME", help="a column: rows that share its value are held out together")
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "--columns", nargs="+", metavar="NAME", help="the features (default: all columns but the classes')"
    )
    some.add_argument("--drop", nargs="+", metavar="NAME", default=[], help="columns that are no features")
    kinds = f"what columns hold, where it was not seen: {', '.join(NAMES)}"
    parser.add_argument("--column", nargs="+", metavar="NAME=KIND", default=[], help=kinds)
    parser.add_argument("--unlabelled", metavar="FILE", help="more rows, without a class, to be learned from")
    text = "the classes: a table with a column class, and perhaps description; then rows need no label at all"
    parser.add_argument("--classes", "--describe", metavar="FILE", help=text)
    add = parser.add_expert_group("rows of the table").add_argument
    add("--id", metavar="NAME", help="a column that names the rows; predict carries it to its output")
    add("--drop-unlabelled", action="store_true", help="leave out the table's rows without a class")
    add("--one-shot", action="store_true", help="the many classes of a few rows each are meant")
    for name in SETTINGS:
        parser.add_removed(f"--{name}", f"Metadata of the network's file say it, or --representation FILE:{name}=...")


def read_data(options: argparse.Namespace, *, keep_cells: bool = False) -> Data:
    """Read the table that the options name, and take each of its columns for what it is; cells take memory.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: Options or a table that do not fit.
    """
    label = options.label or "label"
    kinds, selection = take_kinds(options, parse_kinds(options.column)), select(options)
    beside = tuple(name for name in (options.group, options.id) if name is not None)
    for name in (*beside, *options.drop, *(options.columns or ()), *kinds):
        if name == label:
            refuse("arguments", "use the classes' column for nothing else", repr(name), "Name another one.")
    only = None if options.columns is None else tuple(options.columns)
    named = {} if options.classes is None else read_classes(Path(options.classes))
    wanted = Wanted(
        label,
        labelled=not named,
        learned=bool(named),
        columns=only,
        beside=beside,
        ignored=tuple(options.drop),
        partly=True,
        skip_broken=options.skip_broken,
        typed=True,
        sheet=options.sheet,
    )
    table, every = read_table(Path(options.table), wanted, options.labels and Path(options.labels))
    if not len(every.labels):  # the classes are named beside the table
        every = every._replace(labels=np.full(len(every.rows), ""))
    missing = every.labels == ""
    block, rest, none = every, None, bool(missing.all())
    if none:
        selection = selection._replace(words=False)  # that texts share a word says nothing of names
    elif missing.any():
        block = every.take(np.flatnonzero(~missing))
        rest = None if options.drop_unlabelled else every.take(np.flatnonzero(missing))
    one_shot = options.one_shot or are_pictures(Path(options.table))  # whoever makes folders means classes
    classes, labels = check_classes(block.labels[: 0 if none else None], label, one_shot=one_shot, named=list(named))
    if none:
        block = block._replace(labels=np.zeros(len(block.rows), np.int64))  # one class: no column can tell it
    groups, numbered, group_names = None, None, np.empty(0, np.str_)
    if options.group is not None and not none:
        check_groups("fit", "--group", block.beside[0].tolist(), block.labels.tolist())
        group_names, numbered = np.unique(block.beside[0], return_inverse=True)
        groups = torch.from_numpy(numbered)
    keep = "--columns keeps it" if only is None else None
    x, encoding, columns, left, notes, sources = choose_features(
        table, block, kinds, keep=keep, groups=numbered, selection=selection
    )
    left_out = [*beside, *options.drop, *table.unused, *left]
    features = torch.from_numpy(np.ascontiguousarray(x))
    others = features if none else None if rest is None else _encode_rest(table, rest, columns, encoding)
    rest_rows: Sequence[int] = block.rows if none else [] if rest is None else rest.rows
    features = features[:0] if none else features
    names = read_names(encoding, classes, features, labels, [named.get(str(each), "") for each in classes])
    if none and names is None:
        needed = "be texts that a representation reads, and classes be named in words, where no row has a class"
        refuse("table", needed, "others", 'Run pip install "protonet[text]", or label some rows.')
    told = [*table.notes, *notes, *suspect_spellings(classes)]
    ids = None if options.id is None else block.beside[beside.index(options.id)].astype(str).tolist()
    cells = [
        each
        for number, each in enumerate(block.columns)
        if columns is None or table.columns is None or table.columns[number] in columns
    ]
    gaps = list(map(count_gaps, cells))
    rows = block.rows[: 0 if none else None]
    where = rows, table.place, block.numbers[: len(rows)], ids, gaps, cells if keep_cells else []
    seen = describe_columns(cells, encoding, torch.bincount(labels, minlength=len(classes)).tolist())
    return Data(
        features,
        labels,
        classes,
        columns,
        encoding,
        groups,
        group_names.tolist(),
        left_out,
        told,
        *where,
        others,
        rest_rows,
        seen,
        sources,
        names,
    )


def _encode_rest(table: Table, rest: Block, columns: tuple[str, ...] | None, encoding: Encoding | None) -> Tensor:
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
            wanted = Wanted(label, labelled=False, columns=data.columns, width=width, ignored=tuple(data.left_out))
            wanted = wanted._replace(learned=True)
            with as_typed(path="--unlabelled"):
                self.table = open_table(path, wanted)

    def __bool__(self) -> bool:
        return self.path is not None or self.data.rest is not None

    def __iter__(self) -> Iterator[Tensor]:
        if self.data.rest is not None:
            yield self.data.rest
        for block in () if self.path is None else self.table.blocks:
            self.rows += block.rows
            x = encode_block(self.table, block, self.data.encoding, "--unlabelled")
            yield torch.from_numpy(np.ascontiguousarray(x))

    def name(self, row: int) -> str:
        """Return what a message calls a row, given its number among those that were read."""
        own = row < len(self.data.rest_rows)
        place = self.data.place if own else self.table.place
        return place.format(self.rows[row]) + ("" if own or self.path is None else f" of {show(self.path.name)}")


def take_kinds(options: argparse.Namespace, kinds: Mapping[str, str]) -> Mapping[str, str]:
    """Return what columns hold, by name: of a folder, that its one column holds pictures."""
    return {PICTURE: "picture"} if are_pictures(Path(options.table)) else kinds


def select(options: argparse.Namespace) -> Selection:
    """Return what embeds texts and pictures, as the options say.

    Raises:
        InputError: There is no such thing.
    """
    return Selection.of(options.representation, shown=not options.quiet)


def parse_kinds(texts: list[str]) -> dict[str, str]:
    """Return what columns hold, by name, from ``NAME=KIND``; raise an InputError for anything else."""
    kinds = {}
    for text in texts:
        name, equals, kind = text.rpartition("=")
        if not equals:
            refuse("--column", "be NAME=KIND", repr(text), f"Pass --column {text or 'NAME'}=category, say.")
        kinds[name] = check_name("--column", kind, NAMES)
    return kinds


def check_classes(
    labels: np.ndarray, label: str, *, one_shot: bool, named: Sequence[str] = ()
) -> tuple[tuple[str, ...] | tuple[int, ...], Tensor]:
    """Return the names of the classes in ascending order, and the number (n,) int64 of each row's class.

    Args:
        labels: (n,) of the rows, a class each.
        label: The column that they are of.
        one_shot: Whether many classes of a few rows each are meant.
        named: Classes that there are, whether a row is of them or not.

    Raises:
        InputError: There is one class alone, or what looks like something else to be predicted than classes.
    """
    n, one_shot = len(labels), one_shot or bool(named)
    every = read_whole(np.concatenate([labels.astype(str), np.array(named, str)]) if named else labels)
    names, numbers = np.unique(every, return_inverse=True)
    numbers = numbers[:n]
    rows = np.bincount(numbers, minlength=len(names))
    classes = tuple(names.tolist() if names.dtype.kind in "iu" else map(str, names.tolist()))
    if len(classes) < 2:
        got = f"{list_names(list(map(str, classes))) if classes else 'no row'} alone in {show(label)}"
        refuse("table", "have at least 2 classes", got, "Add another one.")
    doubt = None if one_shot or len(classes) <= MOST_SINGLE else _doubt_classes(classes, rows, show(label))
    if doubt:
        remedy = "Name a column of classes with --label; to predict a number is another task."
        refuse("--label", "name a column of classes", doubt, f"{remedy} If they are meant, pass --one-shot.")
    return classes, torch.from_numpy(numbers)


def _doubt_classes(classes: Sequence[str | int], rows: np.ndarray, label: str) -> str | None:
    """Return what many classes of so many rows (classes,) each look like, or None where they may be classes."""
    if rows.max() == 1:
        return f"{len(classes)} classes in {label}, 1 row per class"
    numbers = read_numbers(classes)
    if not numbers:
        return None
    got = f"numbers, such as {show(classes[-1])}, in {label}"
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


def check_table(options: argparse.Namespace) -> None:
    """Raise an InputError for a table that cannot be read twice, or for a model in its place."""
    if options.table == "-":
        refuse("table", "be a file: it is read twice", "the standard input", "Save it, and name that file.")
    if options.table.lower().endswith(".safetensors"):
        refuse("arguments", "end in a table", f"the model {options.table}", "Name the table there.")


def read_unlabelled(options: argparse.Namespace, model: Model | None, label: str) -> Unlabelled:
    """Read the table that the options name, as features for a model, or as what its own columns are taken for.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        InputError: A table that does not fit, or all of whose rows have a class.
    """
    blocks, notes = None, list[str]()
    if model is None:
        wanted = Wanted(label, labelled=False, partly=True, skip_broken=options.skip_broken, sheet=options.sheet)
        table, block = read_table(Path(options.table), wanted)
        labels = block.labels
        block = block._replace(labels=np.zeros(len(block.rows), np.int64))  # one class: no column can tell it
        features = choose_features(table, block, take_kinds(options, {}), keep="", selection=select(options))
        x, blocks = features.x, None if features.encoding is None else features.encoding.blocks
        likely = [name for name in table.columns or () if name.lower() in CLASS_NAMES and not len(labels)]
        if likely:
            notes.append(f"there is no column {label}; if {list_names(likely)} holds the classes, name it with --label")
    else:
        table = open_rows(options, model, want(model, label, labelled=False)._replace(partly=True))
        parts = [(encode_block(table, block, model.encoding), block.labels) for block in table.blocks]
        x, labels = map(np.concatenate, zip(*parts, strict=True))
    known = labels != "" if len(labels) else np.zeros(len(x), bool)
    if known.all():
        got = f"one in {show(label)} for each of {count(len(x), 'row')}"
        refuse("table", "have rows without a class", got, "Add rows whose cell there is empty.")
    if known.any():
        verb = "has" if known.sum() == 1 else "have"
        notes.append(f"{count(int(known.sum()), 'row')} {verb} a class in {show(label)} already: not asked for")
    table.notes.extend(notes)
    return Unlabelled(torch.from_numpy(np.ascontiguousarray(x)), blocks, table, torch.from_numpy(known))


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
    wanted = Wanted(label, labelled=False) if model is None else want(model, label, labelled=False)
    wanted = wanted._replace(skip_broken=options.skip_broken, sheet=options.sheet, everything=True)
    table = open_table(Path(options.table), wanted)
    names = {name: number for number, name in enumerate(table.beside) if name != label}
    found: dict[int, list[str]] = {}
    first = 0
    for block in table.blocks:
        places = range(len(block.rows)) if rows is None else [row - first for row in rows]
        taken = np.array([place for place in places if 0 <= place < len(block.rows)], int)
        columns = [block.beside[number][taken].tolist() for number in names.values()]
        found.update(zip((first + taken).tolist(), map(list, zip(*columns, strict=True)), strict=True))
        first += len(block.rows)
    return list(names), [found[row] for row in (found if rows is None else rows)]
