"""A person's table, opened for some purpose: the columns that are wanted, block by block, and the classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protonet._text import to_printable
from protonet.errors import raise_input_error
from protonet.tables.columns.parsing import blank_missing, find_gaps
from protonet.tables.delimited import GAPS, is_number
from protonet.tables.formats import PICTURE, Raw, Source, find_near, open_source

#: Names that a column of classes often has, in lower case.
CLASS_NAMES = frozenset(
    {"label", "class", "target", "y", "species", "category", "type", "kind", "group", "outcome", "result", "status"}
    | {"diagnosis", "survived", "quality", "grade", "churn", "default"}
)
#: A column without gaps looks like one of classes if it has at most so many values, of so many rows each on average.
MOST_VALUES, LEAST_ROWS = 50, 3
#: Columns that look like classes and are named, at the most.
MOST_GUESSES = 4
#: Numbers that name columns are a count, or a scale such as wavelengths: they rise by steps of about one size.
LIKE_STEPS = 2
HEADERLESS = "The first line looks like a row: if it is one, put a line of names above it. "


class Wanted(NamedTuple):
    """What a table is read for."""

    label: str  #: The name of the column of classes, in a file that names its columns.
    labelled: bool = True  #: Are the classes wanted? If not, their column may be missing, ...
    columns: tuple[str, ...] | None = None  #: The names of the features, in the order wanted; None for all.
    width: int | None = None  #: How many columns of features there must be; None for any number.
    beside: tuple[str, ...] = ()  #: Columns that are read as text beside: a row's group, its name.
    ignored: tuple[str, ...] = ()  #: Columns that are no features, where the table has them.
    partly: bool = False  #: May rows lack a class? Then a column of that name is read as text, "" for no class.
    skip_broken: bool = False  #: Are pictures that cannot be decoded left out? If not, they are an error.
    typed: bool = False  #: Did a person name ``columns`` and ``ignored``? If not, they are a model's.
    sheet: str | None = None  #: Of an Excel workbook; None for the first.
    everything: bool = False  #: Are all columns read beside, whatever else they are?
    drop_unlabelled: bool = False  #: Are rows without a class left out, where classes are wanted?
    missing: frozenset[str] = GAPS  #: The texts, in lower case, that are missing labels or cells.
    learned: bool = False  #: Are rows learned from? Then blank ones are left out, as where classes are wanted.


class Block(NamedTuple):
    """Some rows."""

    columns: list[np.ndarray]  #: The features' cells, (b,) each, as in `protonet.tables.formats.Raw`.
    labels: np.ndarray  #: The classes (b,), numbers or strings; (0,) for none.
    beside: tuple[np.ndarray, ...]  #: The columns that are wanted beside, strings (b,).
    rows: Sequence[int]  #: Where in the file each row is.
    numbers: Sequence[int]  #: Of each row in the table, from 0, those that are left out counted as well.
    uninformative: np.ndarray | None = None  #: (b,) bool: rows in which no cell says anything; None if unknown.

    def take(self, rows: np.ndarray) -> Block:
        """Return the rows of these numbers (m,)."""
        columns, beside = [each[rows] for each in self.columns], tuple(each[rows] for each in self.beside)
        labels = self.labels[rows] if len(self.labels) else self.labels
        places, numbers = ([each[row] for row in rows.tolist()] for each in (self.rows, self.numbers))
        uninformative = None if self.uninformative is None else self.uninformative[rows]
        return Block(columns, labels, beside, places, numbers, uninformative)


class Table(NamedTuple):
    """An open table: the names of its features, if they have any, and its rows, to be read once."""

    columns: tuple[str, ...] | None
    blocks: Iterator[Block]
    place: str  #: What a message calls a row, with its number to be put in.
    notes: list[str]  #: What a person should be told about how it is read; it may grow as rows are read.
    unused: tuple[str, ...] = ()  #: Columns that are there, and not wanted.
    rows: int | None = None  #: How many there are, those without a class among them; None where that is not known yet.
    beside: tuple[str, ...] = ()  #: The names of the columns that are read beside.
    semicolons: bool = False  #: As in `protonet.tables.formats.Source`.

    def name_column(self, number: int) -> str:
        """Return what a message calls a column of features."""
        return f"column {number}" if self.columns is None else to_printable(self.columns[number])


def open_table(path: Path, wanted: Wanted, labels: Path | None = None) -> Table:
    """Open a table. Its header and its first rows are checked now, the others as they are read.

    Args:
        path: A file that `protonet.tables.formats.open_source` opens. Those that name their columns are matched by
            name; NPZ holds ``x`` (n, ...) and ``y`` (n,); NPY holds rows (n, ...) alone. Of an NPZ file all rows are in
            memory at once, of the others a block.
        wanted: What it is read for.
        labels: An NPY file of the classes (n,), beside one of rows.

    Returns:
        The table. It has at least one row.

    Raises:
        MissingPackageError: A package that reads such files is missing.
        InputError: No such file, no column of a name that is wanted, no row, a row of another length or without a
            class; the message says where.
    """
    if labels is not None and path.suffix.lower() != ".npy":
        raise_input_error(
            "--labels", "come with an NPY file of rows", path, "Leave it out: that file holds its classes."
        )
    if wanted.labelled and labels is None and path.suffix.lower() == ".npy":
        raise_input_error(
            "--labels", "name the file of the classes", f"none beside {path}", "Save them with numpy.save."
        )
    labelled, skip_broken = wanted.labelled, wanted.skip_broken
    names = {*(wanted.columns or ()), *wanted.beside, *([wanted.label] if labelled else [])}
    source = open_source(
        path, labels, label=wanted.label, labelled=labelled, skip_broken=skip_broken, names=names, sheet=wanted.sheet
    )
    if source.header is None:
        asked = (*wanted.beside, *((wanted.columns or ()) + wanted.ignored if wanted.typed else ()))
        if asked:
            got = f"{path}, which names none, and {list_names(asked)}"
            raise_input_error("path", "name its columns to choose among them", got, "Save it as CSV or Parquet.")
        _check_width(path, source.width, wanted)
        chosen: list[str] | None = None
        features, unused = list(range(source.width)), list[str]()
        beside = {f"column {number}": number for number in features} if wanted.everything else {}
        label = source.width if wanted.labelled else None
    else:
        chosen, unused = _choose_columns(path, source, wanted)
        number = {name: column for column, name in enumerate(source.header)}
        features = [number[name] for name in chosen]
        beside = {name: number[name] for name in (filter(None, source.header) if wanted.everything else wanted.beside)}
        label = number[wanted.label] if wanted.labelled else number.get(wanted.label) if wanted.partly else None
        if (wanted.columns is None or wanted.typed) and (values := find_values(source.header)):
            source.notes.append(f"look at: columns are named {list_names(values)}. {HEADERLESS}".rstrip())
    source.notes.extend(["the unnamed column is left out"] if "" in unused else [])
    read = source.read([*features, *beside.values(), *([] if label is None else [label])])
    blocks = _split_blocks(source, read, len(features), len(beside), wanted)
    first = next(blocks, None)
    if first is None:
        raise_input_error("path", "have at least one row", f"none in {path}", "Add rows.")
    left = tuple(name for name in unused if name and name not in beside)
    columns = None if chosen is None else tuple(chosen)
    kept = left, source.rows, tuple(beside), source.semicolons
    return Table(columns, chain([first], blocks), source.place, source.notes, *kept)


def read_table(path: Path, wanted: Wanted, labels: Path | None = None) -> tuple[Table, Block]:
    """Read a whole table with its classes; return the table and all of its rows.

    Raises:
        MissingPackageError: As in `open_table`.
        InputError: As in `open_table`.
    """
    table = open_table(path, wanted, labels)
    blocks = list(table.blocks)
    columns, beside = (
        [np.concatenate(parts) for parts in zip(*some, strict=True)]
        for some in ([block.columns for block in blocks], [block.beside for block in blocks])
    )
    rows = [row for block in blocks for row in block.rows]
    numbers = [number for block in blocks for number in block.numbers]
    return table, Block(columns, np.concatenate([block.labels for block in blocks]), tuple(beside), rows, numbers)


def _choose_columns(file: Path, source: Source, wanted: Wanted) -> tuple[list[str], list[str]]:
    """Return the names of the columns that are wanted as features, in that order, and of those that are not wanted."""
    header = source.header or []
    path = f"{file}{source.part}"
    bell = HEADERLESS * bool(find_values(header))
    twice = [name for name, times in Counter(header).items() if times > 1]
    if twice and twice != [""]:
        raise_input_error(
            "path", "name each column once", f"{list_names(twice)} twice in {path}", f"{bell}Rename or drop one."
        )
    if twice:
        got = f"none for {header.count('')} columns of {path}"
        raise_input_error("path", "name every column", got, "Name them; one alone would be left out as an index.")
    if wanted.labelled and wanted.label not in header:
        raise_input_error(
            "path",
            f"have a column {wanted.label}",
            f"{path} with {list_names(header)}",
            bell + _guess_label(source, wanted.label),
        )
    for name in wanted.beside:
        if name not in header:
            raise_input_error(
                "path", f"have a column {name}", f"{path} with {list_names(header)}", f"{bell}Name one that it has."
            )
    others = {"", wanted.label, *wanted.beside, *wanted.ignored}
    features = [name for name in header if name not in others]
    if wanted.typed:
        _check_typed("--columns", wanted.columns or (), path, features)
        _check_typed("--drop", wanted.ignored, path, header)
    if wanted.columns is not None:
        missing = [name for name in wanted.columns if name not in set(features)]
        if missing:
            spare = [name for name in header if name not in wanted.columns]
            pairs = {name: near for name in missing if (near := find_near(name, spare))}
            meant = ", ".join(
                f"{to_printable(near)} for {to_printable(name)}" for name, near in list(pairs.items())[:MOST_GUESSES]
            )
            remedy = "Name the columns as in the table that the model was fitted to."
            remedy = f"Did you mean {meant}? {remedy}" if meant else remedy
            if missing == [PICTURE]:
                remedy = "The model was fitted to pictures: pass a folder of them."
            raise_input_error(
                "path", "have the model's columns", f"{path} without {list_names(missing)}", bell + remedy
            )
        features = list(wanted.columns)
    if not features:
        raise_input_error(
            "path", "have columns beside the classes", f"{path} with {list_names(header)}", "Add features."
        )
    used = {*features, *wanted.beside, *wanted.ignored, wanted.label}
    return features, [name for name in header if name not in used]


def find_values(header: Sequence[str]) -> list[str]:
    """Return the names of columns that are numbers such as a row has, if they are no count and no scale."""
    values = [name for name in header if is_number(name)]
    numbers = [float(name.replace(",", ".")) for name in values]
    steps = [after - before for before, after in pairwise(numbers)]
    rising = bool(steps) and 0 < max(steps) <= LIKE_STEPS * min(steps)
    whole = all(number.is_integer() for number in numbers)
    return [] if (rising and (whole or len(steps) > 1)) or (whole and len(values) < 2) else values


def _check_typed(argument: str, names: Sequence[str], path: str, known: Sequence[str]) -> None:
    """Raise an InputError that names the nearest of the known columns, if an option names one that is not known."""
    if strange := [name for name in names if name not in known]:
        got = f"{list_names(strange)}, and {path} has {list_names([name for name in known if name])}"
        near = find_near(strange[0], known)
        remedy = f"Did you mean {to_printable(near)}?" if near else "Name those that it has."
        raise_input_error(argument, "name columns of the table", got, remedy)


def _guess_label(source: Source, wanted: str) -> str:
    """Return what to do about a missing column of classes: the nearest name, and the columns that look like one."""
    header = source.header or []
    near = find_near(wanted, header)
    block = next(source.read(range(len(header))), None)
    likely = []
    for number, (name, cells) in enumerate(zip(header, block.columns if block else [], strict=False)):
        values = len(set(cells.tolist()))
        if (
            name
            and 2 <= values <= min(MOST_VALUES, len(cells) / LEAST_ROWS)
            and not read_labels(blank_missing(cells))[1].any()
        ):
            likely.append((name != near, name.lower() not in CLASS_NAMES, values, -number, name))
    found = ", ".join(
        f"{to_printable(name)} ({values} values)" for *_, values, _, name in sorted(likely)[:MOST_GUESSES]
    )
    meant = f"Did you mean {to_printable(near)}? " if near else ""
    return f"{meant}Pass --label NAME{f'; these look like classes: {found}' if found else ''}."


def _check_width(path: Path, width: int, wanted: Wanted) -> None:
    """Raise an InputError if a table has no features, or another number of them than is wanted."""
    if width == 0 or wanted.width not in {None, width}:
        remedy = "Pass the features that the model was fitted to." if wanted.width else "Add features."
        raise_input_error("path", f"have {wanted.width or 'some'} features per row", f"{width} in {path}", remedy)


def list_names(names: Sequence[str]) -> str:
    """Return the first of several names, in quotes where they are more than a word."""
    shown = ", ".join(name if name.isidentifier() else repr(name[:50]) for name in names[:5]) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _split_blocks(source: Source, blocks: Iterator[Raw], features: int, beside: int, wanted: Wanted) -> Iterator[Block]:
    """Yield rows with features, classes and what is wanted beside; raise an InputError where a class is missing.

    Where classes are wanted or rows learned from, rows of empty cells alone are left out: they tell nothing.
    """
    first = n_blank = n_dropped = 0
    counts = {"label": Counter[str](), "cell": Counter[str]()}  # of missing values, by their text
    for columns, rows in blocks:
        labels, missing = np.empty(0, np.str_), np.empty(0, bool)
        read = [blank_missing(cells, wanted.missing) for cells in columns[:features]]
        if len(columns) > features + beside:
            labels, missing = read_labels(blank_missing(columns[-1], wanted.missing))
            _count_missing(counts["label"], columns[-1], wanted.missing)
        for cells, own in zip(columns, read, strict=False):
            if cells is not own:
                _count_missing(counts["cell"], cells, wanted.missing)
        kept = np.ones(len(rows), bool)
        if wanted.learned or (wanted.labelled and missing.any()):
            kept = ~np.logical_and.reduce([*map(_find_blank, columns)])
            n_blank += len(kept) - int(kept.sum())
        if wanted.partly:
            labels = np.where(missing, "", labels.astype(np.str_))
        elif wanted.drop_unlabelled:
            n_dropped += int((missing & kept).sum())
            kept &= ~missing if len(missing) else True
        elif missing.any() and (missing & kept).any():
            lacking = np.flatnonzero(missing & kept).tolist()
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            got = f"none in {', '.join(source.place.format(rows[row]) for row in lacking[:3])}{more}"
            raise_input_error(
                "path",
                "name the class of every row",
                got,
                "Fill it in, or leave the row out: evaluate --drop-unlabelled.",
            )
        texts = tuple(name_cells(cells) for cells in columns[features : features + beside])
        block = Block(read, labels, texts, rows, range(first, first + len(rows)))
        first += len(rows)
        if kept.any():
            yield block if kept.all() else block.take(np.flatnonzero(kept))
    if n_dropped:
        source.notes.append(f"{n_dropped} row{'s' * (n_dropped > 1)} without a class left out (--drop-unlabelled)")
    if n_blank:
        source.notes.append(f"{n_blank} row{'s' if n_blank > 1 else ''} of empty cells left out")

    if wanted.typed and (wanted.labelled or wanted.learned):
        source.notes.extend(_describe_missing(counts))


def _count_missing(counts: Counter[str], cells: np.ndarray, missing: frozenset[str]) -> None:
    """Add how often each missing value that is not empty is among cells (n,)."""
    if cells.dtype.kind == "O":
        counts.update(cell for cell in cells.tolist() if cell and cell.lower() in missing)


def _describe_missing(counts: Mapping[str, Counter[str]]) -> list[str]:
    """Return a line, or none, about missing values that are not empty."""
    found = []
    for noun, own in counts.items():
        texts = ", ".join(f"{to_printable(text)!r} {n:,}" for text, n in own.most_common(MOST_GUESSES))
        found += [f"{own.total()} {noun}{'s' * (own.total() > 1)} ({texts})"] * bool(own)
    return [f"read as missing: {' and '.join(found)}; --missing-values changes the list"] if found else []


def _find_blank(cells: np.ndarray) -> np.ndarray:
    """Return which cells (n,) of any kind are empty, (n,) bool; unlike gaps, of which some are words."""
    return np.asarray(cells == "") if cells.dtype.kind == "O" else find_gaps(cells)


def read_labels(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return classes (b,), whole numbers or strings, and which of them are missing, (b,) bool.

    Floating numbers that are all whole are whole numbers; other ones are kept for `check_classes` to refuse.
    """
    if cells.dtype.kind == "O":
        return cells.astype(np.str_), find_gaps(cells)
    if cells.dtype.kind == "M":
        return cells.astype("datetime64[s]").astype(np.str_), np.isnat(cells)
    if cells.dtype.kind == "f":
        missing = np.isnan(cells)
        filled = np.where(missing, 0, cells)
        whole = bool((filled == np.rint(filled)).all()) and bool((np.abs(filled) < 2**53).all())
        return filled.astype(np.int64) if whole else filled, missing
    return cells.astype(np.str_) if cells.dtype.kind == "b" else cells, np.zeros(len(cells), bool)


def name_cells(cells: np.ndarray) -> np.ndarray:
    """Return cells (b,) of any kind as text (b,) to be shown: a row's name, its group; a gap is empty."""
    if cells.dtype.kind not in "fM":
        return cells.astype(np.str_)
    names, gaps = read_labels(cells)
    return np.where(gaps, "", names.astype(np.str_))
