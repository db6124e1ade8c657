"""Read the table of ``fit`` before torch is imported, and check its class names and labels."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from protonet._text import normalize_spelling, to_printable
from protonet._validation import check_groups
from protonet.commands.options import FitOptions
from protonet.embeddings.pictures.reading import is_picture_path, text_to_path, warn_duplicate_pictures
from protonet.errors import raise_input_error, renamed_arguments
from protonet.tables import DEFAULT_LABEL_COLUMN
from protonet.tables.columns import COLUMN_TYPES
from protonet.tables.columns.parsing import format_cells
from protonet.tables.delimited import parse_missing_texts
from protonet.tables.formats import PICTURE_COLUMN, open_table_source
from protonet.tables.spellings import detect_respellings, format_respellings
from protonet.tables.table import MISSING_NOTE, ReadSpec, RowBlock, Table, format_names, read_table
from protonet.ui.command_line import check_known_name
from protonet.ui.options import path_exists

#: Maximum number of sets of equal rows with different labels, and of rows of each set, that a warning lists.
MAX_LISTED_CONTRADICTORY_ROWS = 3
#: The form of integer labels in text files.
_INTEGER_PATTERN = re.compile(r"0|-?[1-9]\d{0,17}")


def parse_integer_labels(labels: np.ndarray) -> np.ndarray:
    """Convert labels (n,) to integers if every label is an integer; otherwise convert all of them to text.

    Classes are sorted, and integers sort 2 before 10.
    """
    if labels.dtype.kind in "iu":
        return labels
    texts = labels.astype(str)
    return texts.astype(np.int64) if all(map(_INTEGER_PATTERN.fullmatch, np.unique(texts).tolist())) else texts


def check_class_spellings(names: Iterable[object], known_classes: Sequence[str | int], remedy: str) -> None:
    """Raise an InputError, which ends with the remedy, if names are other spellings of known classes."""
    if respellings := detect_respellings(names, known_classes):
        raise_input_error("table", "spell known classes as the model does", format_respellings(respellings), remedy)


def warn_contradictory_labels(x: np.ndarray, labels: Sequence[str | int], locations: Sequence[str]) -> list[str]:
    """Return a warning about equal rows of ``x`` (n, dim) with different labels; an empty list if there are none.

    ``locations`` (n,) say where each row is in its file, such as "line 2".
    """
    equal: dict[int, list[int]] = {}
    for row, values in enumerate(x + 0.0):  # -0.0 becomes 0.0
        equal.setdefault(hash(values.tobytes()), []).append(row)
    sets = [rows for rows in equal.values() if len({labels[row] for row in rows}) > 1]
    if not sets:
        return []
    total = sum(map(len, sets))
    shown = []
    for rows in sets[:MAX_LISTED_CONTRADICTORY_ROWS]:
        named = [f"{locations[row]} ({to_printable(labels[row])})" for row in rows[:MAX_LISTED_CONTRADICTORY_ROWS]]
        shown.append(", ".join([*named, *["..."] * (len(rows) > MAX_LISTED_CONTRADICTORY_ROWS)]))
    more = "; ..." * (len(sets) > MAX_LISTED_CONTRADICTORY_ROWS)
    return [f"warning: contradicting labels: {total} rows equal rows of another class: {'; '.join(shown)}{more}"]


#: Maximum number of classes that all have a single row, or of numbers with fractions: more are probably no classes,
#: but identifiers or measurements.
MAX_SINGLE_ROW_CLASSES = 20
#: Whole numbers are probably measurements, such as ages, if the median number of rows per class is at most this.
MAX_MEASUREMENT_ROWS_PER_CLASS = 3
#: Such whole numbers must also have more distinct values than this fraction of the rows, or a difference of the largest
#: and the smallest that is at least this multiple of the number of distinct values.
MIN_MEASUREMENT_DISTINCT_FRACTION, MIN_MEASUREMENT_RANGE_MULTIPLE = 0.5, 2

#: The names of the columns of a table of classes; the second is optional.
CLASS_COLUMN, DESCRIPTION_COLUMN = "class", "description"


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRows:
    """The rows of the table of ``fit`` with their labels, classes and groups, which have been checked."""

    table: Table  #: The table that was read, with its notes.
    labelled_block: RowBlock  #: The labelled rows; all rows if none is labelled.
    unlabelled_block: RowBlock | None
    """The unlabelled rows of a partly labelled table; None if all or no rows have labels."""
    column_types: Mapping[str, str]  #: The types of columns that the user set, by name.
    classes: tuple[str, ...] | tuple[int, ...]  #: The names of the classes, in ascending order.
    labels: np.ndarray  #: (n,) int64, class indices.
    group_names: np.ndarray  #: (groups,) str, the names of the groups in ascending order; empty without groups.
    groups: np.ndarray | None  #: (n,) int64, the index in ``group_names`` of each row's group; None without groups.
    reading_seconds: float  #: The time that reading took, in seconds.
    descriptions: list[str]  #: The description of each class; "" for a class without one.

    @property
    def is_fully_unlabelled(self) -> bool:
        """Whether no row has a label, so that the classes come from the option ``--classes``."""
        return not len(self.labels)


def read_table_rows(options: FitOptions) -> TableRows:
    """Read the table of ``fit``, and the classes of ``--classes``; raise an InputError if they are unusable."""
    started = time.monotonic()
    label = options.label or DEFAULT_LABEL_COLUMN
    types = get_column_types(options.table, parse_column_types(options.column_type))
    extra = {name: option for option, name in (("group", options.group), ("id", options.id)) if name is not None}
    chosen = {"ignored": options.drop, "columns": options.columns or (), "column_type": types}
    for argument, names in {**chosen, "group": [options.group], "id": [options.id]}.items():
        if label in names:
            raise_input_error(argument, "name another column than that of the labels", repr(label), "Leave it out.")
    described = {} if options.classes is None else read_class_descriptions(options.classes)
    spec = ReadSpec(
        label_column=label,
        require_labels=not described or options.label is not None,
        for_training=bool(described),
        columns=None if options.columns is None else tuple(options.columns),
        extra_columns=extra,
        ignored_columns=tuple(options.drop),
        allow_unlabelled=True,
        skip_broken=options.skip_broken,
        are_columns_from_user=True,
        sheet=options.sheet,
        no_header=options.no_header,
    )
    if options.missing_values is not None:
        spec = replace(spec, missing_texts=parse_missing_texts(options.missing_values.split(",")))
    table, block = read_table(options.table, spec, options.labels_file)
    for name, cells in zip(table.columns or (), block.columns, strict=bool(table.columns)) if described else ():
        is_text = label not in table.extra_columns and cells.dtype.kind == "O"
        if is_text and set(cells.tolist()) - {""} <= described.keys():
            got = f"{format_names([name])}, whose cells are classes of {options.classes}"
            remedy = f"Pass --label {name}, or --drop {name}."
            raise_input_error("label", "name the column of the labels", got, remedy)
    if not len(block.labels):  # no column of labels
        block = block._replace(labels=np.full(len(block.positions), ""))
    missing, all_labels = block.labels == "", block.labels.astype(str).tolist()
    unlabelled, labels = None, block.labels[~missing]
    if missing.all():
        # One class for all: no column is then dropped as a copy of the label.
        block = block._replace(labels=np.zeros(len(block.positions), np.int64))
    elif missing.any():
        unlabelled = None if options.drop_unlabelled else block.select_rows(np.flatnonzero(missing))
    are_folders = is_picture_path(options.table)
    allow_many = options.allow_many_classes or are_folders  # folders are classes
    classes, indices = determine_classes(labels, label, allow_many=allow_many, described=described, notes=table.notes)
    for name, cells in zip(table.columns or (), block.columns, strict=bool(table.columns)):
        if types.get(name) == "picture":
            paths = [text_to_path(str(cell)) for cell in cells.tolist()]
            table.notes.extend(warn_duplicate_pictures(paths, all_labels, show_progress=not options.quiet))
    if missing.any() and not missing.all():
        block = block.select_rows(np.flatnonzero(~missing))
    group_names, groups = np.empty(0, np.str_), None
    if options.group is not None and len(labels):
        check_groups("group", block.extra_columns[0].tolist(), block.labels.tolist())
        group_names, groups = np.unique(block.extra_columns[0], return_inverse=True)
    return TableRows(
        table=table,
        labelled_block=block,
        unlabelled_block=unlabelled,
        column_types=types,
        classes=classes,
        labels=indices,
        group_names=group_names,
        groups=groups,
        reading_seconds=time.monotonic() - started,
        descriptions=[described.get(str(name), "") for name in classes],
    )


def get_column_types(table: Path, types: Mapping[str, str]) -> Mapping[str, str]:
    """Return the column types that the user set, by name; the column of a folder of pictures has the type "picture"."""
    return {PICTURE_COLUMN: "picture"} if is_picture_path(table) else types


def parse_column_types(texts: Sequence[str]) -> dict[str, str]:
    """Parse texts ``NAME=TYPE`` to a dict of column types by name."""
    types = {}
    for text in texts:
        name, equals, column_type = text.rpartition("=")
        if not equals:
            remedy = f"Pass for example {text or 'NAME'}=category."
            raise_input_error("column_type", "be NAME=TYPE", repr(text), remedy)
        types[normalize_spelling(name)] = check_known_name("column_type", column_type, COLUMN_TYPES)
    return types


def read_class_descriptions(path: Path) -> dict[str, str]:
    """Read the description of each class, or "", by its name, from the option ``--classes``.

    The option is a table with the columns ``class`` and, optionally, ``description``; or class names that are separated
    by commas.
    """
    if "," in str(path) and not path_exists(path):
        return _validate_class_names([name.strip() for name in str(path).split(",")], path)
    with renamed_arguments(path="classes"):
        source = open_table_source(path, names={CLASS_COLUMN}, text_column=CLASS_COLUMN)
        header = source.header or []
        indices = [header.index(name) for name in (CLASS_COLUMN, DESCRIPTION_COLUMN) if name in header]
        blocks = [block.columns for block in source.read_chunks(indices)] if CLASS_COLUMN in header else []
    if CLASS_COLUMN not in header:
        got = f"{path} with {format_names(header)}"
        remedy = f"Name the columns {CLASS_COLUMN} and {DESCRIPTION_COLUMN}."
        raise_input_error("classes", f"have a column {CLASS_COLUMN}", got, remedy)
    columns = [format_cells(np.concatenate(parts)).tolist() for parts in zip(*blocks, strict=True)]
    names = _validate_class_names(columns[0] if columns else [], path)
    return dict(zip(names, columns[1], strict=True)) if len(columns) > 1 else names


def _validate_class_names(names: Sequence[str], path: Path) -> dict[str, str]:
    """Return a dict of class names without descriptions (""); raise an InputError if names are missing or repeated."""
    if not names:
        raise_input_error("classes", "name classes", f"{path} without rows", "Add a row for each class.")
    if "" in names:
        got, remedy = f"{path} with an empty name", "Fill it in, or remove the row."
        raise_input_error("classes", "name a class in each row", got, remedy)
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise_input_error("classes", "name each class once", f"{repeated[0]!r} repeatedly", "Remove the repetitions.")
    return dict.fromkeys(names, "")


def determine_classes(
    labels: np.ndarray, label: str, *, allow_many: bool, described: Collection[str] = (), notes: Sequence[str] = ()
) -> tuple[tuple[str, ...] | tuple[int, ...], np.ndarray]:
    """Determine the classes of labels (n,); raise an InputError if the labels look like identifiers or measurements.

    Many classes with few rows each need ``allow_many``. The described classes of ``--classes`` need no rows. The
    ``notes`` of the table say in the error of a single class which labels are read as missing.

    Returns:
        The class names in ascending order, and the class index (n,) int64 of each row.
    """
    n, allow_many = len(labels), allow_many or bool(described)
    if described:
        labels = np.concatenate([labels.astype(str), np.array(list(described), str)])
    names, indices = np.unique(parse_integer_labels(labels), return_inverse=True)
    indices = indices[:n]
    rows = np.bincount(indices, minlength=len(names))
    classes = tuple(names.tolist() if names.dtype.kind in "iu" else map(str, names.tolist()))
    if len(classes) < 2:
        listed = format_names(list(map(str, classes))) if classes else "no label"
        got = listed if described else f"{listed} alone in {to_printable(label)}"
        where = "classes" if described else "table"
        missing = [f" ({note})" for note in notes if note.startswith(MISSING_NOTE) and "label" in note]
        raise_input_error(where, "have at least 2 classes", got, f"Add another one{''.join(missing)}.")
    dubious = None
    if not allow_many and len(classes) > MAX_SINGLE_ROW_CLASSES:
        dubious = describe_unlikely_classes(classes, rows, to_printable(label))
    if dubious:
        remedy = "Name a column of classes with --label; regression is not supported. Or pass --allow-many-classes."
        raise_input_error("label", "name a column of classes", dubious, remedy)
    return classes, indices


def describe_unlikely_classes(classes: Sequence[str | int], class_counts: np.ndarray, label: str) -> str | None:
    """Describe why labels look like identifiers or measurements; return None if they look like classes.

    ``class_counts`` (num_classes,) has the number of rows of each class.
    """
    if class_counts.max() == 1:
        return f"{len(classes)} classes in {label}, 1 row per class"
    try:
        values = [float(name) for name in classes]
    except ValueError:
        return None
    got = f"numbers, such as {to_printable(classes[-1])}, in {label}"
    if any(value % 1 for value in values):
        return f"{len(classes)} {got}"
    wide = (
        max(values) - min(values) >= MIN_MEASUREMENT_RANGE_MULTIPLE * len(values)
        or len(values) > MIN_MEASUREMENT_DISTINCT_FRACTION * class_counts.sum()
    )
    few = np.median(class_counts) <= MAX_MEASUREMENT_ROWS_PER_CLASS
    if not wide or not few:
        return None
    return f"{len(classes)} whole {got}, most with {MAX_MEASUREMENT_ROWS_PER_CLASS} rows or fewer"
