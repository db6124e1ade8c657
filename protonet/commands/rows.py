"""Read the table of ``fit`` by its options, and parse the options that name column types and classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from protonet._text import normalize_spelling
from protonet.commands.options import FitOptions
from protonet.errors import raise_input_error, renamed_arguments
from protonet.tables import DEFAULT_LABEL_COLUMN
from protonet.tables.columns import COLUMN_TYPES
from protonet.tables.columns.parsing import format_cells
from protonet.tables.delimited import MISSING_TEXTS, parse_missing_texts
from protonet.tables.formats import open_table_source
from protonet.tables.spellings import detect_respellings, format_respellings
from protonet.tables.table import ReadSpec, format_names
from protonet.tables.training import TrainingTable
from protonet.ui.command_line import check_known_name
from protonet.ui.options import path_exists

#: The names of the columns of a table of classes; the second is optional.
CLASS_COLUMN, DESCRIPTION_COLUMN = "class", "description"


def read_training_table(options: FitOptions) -> TrainingTable:
    """Read and encode the table of ``fit``; errors of its labels are raised before torch is imported."""
    label, types = options.label or DEFAULT_LABEL_COLUMN, parse_column_types(options.column_type)
    chosen = {"ignored": options.drop, "columns": options.columns or (), "column_type": types}
    for argument, names in {**chosen, "group": [options.group], "id": [options.id]}.items():
        if label in names:
            raise_input_error(argument, "name another column than that of the labels", repr(label), "Leave it out.")
    missing = options.missing_values
    descriptions = {} if options.classes is None else read_class_descriptions(options.classes)
    spec = ReadSpec(
        label_column=label,
        require_labels=not descriptions or options.label is not None,
        for_training=bool(descriptions),
        columns=None if options.columns is None else tuple(options.columns),
        extra_columns={name: role for role in ("group", "id") if (name := getattr(options, role)) is not None},
        has_groups=options.group is not None,
        has_ids=options.id is not None,
        ignored_columns=tuple(options.drop),
        column_types=types,
        drop_unlabelled=options.drop_unlabelled,
        skip_broken=options.skip_broken,
        sheet=options.sheet,
        missing_texts=MISSING_TEXTS if missing is None else parse_missing_texts(missing.split(",")),
        decimal_mark=options.decimal_mark,
        no_header=options.no_header,
        encoding=options.encoding,
    )
    return TrainingTable.from_file(
        options.table,
        spec,
        labels_file=options.labels_file,
        unlabelled=options.unlabelled,
        descriptions=descriptions,
        allow_many_classes=options.allow_many_classes,
        encoders=options.representation,
        show_progress=not options.quiet,
    )


def check_class_spellings(names: Iterable[object], known_classes: Sequence[str | int], remedy: str) -> None:
    """Raise an InputError, which ends with the remedy, if names are other spellings of known classes."""
    if respellings := detect_respellings(names, known_classes):
        raise_input_error("table", "spell known classes as the model does", format_respellings(respellings), remedy)


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
