"""`TrainingTable`: the rows of a file or a data frame as features, with their classes.

There is one way from rows to features: they are read, their labels are checked, the types of their columns are
inferred, and their cells are encoded. Warnings are collected as notes, which commands print. Nothing here imports torch
before the labels are checked, so that errors of a file are reported at once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from protonet._text import plural, to_printable
from protonet._validation import check_groups
from protonet.embeddings.pictures.reading import is_picture_path, text_to_path, warn_duplicate_pictures
from protonet.errors import raise_input_error, renamed_arguments
from protonet.tables.columns.parsing import is_missing
from protonet.tables.formats import PICTURE_COLUMN
from protonet.tables.spellings import describe_list_labels, describe_similar_names
from protonet.tables.table import (
    COMMON_LABEL_NAMES,
    MISSING_NOTE,
    ReadSpec,
    RowBlock,
    Table,
    format_names,
    open_table,
    read_table,
)

if TYPE_CHECKING:
    from torch import Tensor

    from protonet.embeddings.loading import EncoderName
    from protonet.tables.columns.encoding import Encoding

#: Maximum number of sets of equal rows with different labels, and of rows of each set, that a warning lists.
MAX_LISTED_CONTRADICTORY_ROWS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingTable:
    """Rows as features, with their classes, groups and origins, and notes for the user."""

    rows: RowBlock  #: The rows as they were read, with the columns that are used, perhaps without their cells.
    x: Tensor  #: (n, dim) float32 or float64; if n = 0, a model is fitted to class names alone.
    y: Tensor  #: (n,) int64, class indices; -1 for a row without a known class.
    classes: tuple[str, ...] | tuple[int, ...]  #: The name of each class.
    encoding: Encoding | None  #: Maps the columns to features; None if the columns are the features.
    uninformative_mask: Tensor  #: (n,) bool, rows in which each cell is missing or unknown to the encoding.
    notes: list[str] = field(default_factory=list)  #: Notes and warnings for the user, one line each.
    weights: Tensor | None = None  #: (n,) > 0, sample weights; None for equal weights.
    groups: Tensor | None = None  #: (n,) int64; rows of the same group are held out together. None without groups.
    group_names: Sequence[str] = ()  #: The names of the groups, in the order of their indices; empty without groups.
    descriptions: Sequence[str] = ()  #: A description of each class, "" for none; empty if no class has one.
    unlabelled: Iterable[Tensor] | None = None
    """Blocks (m, dim) of features of rows without a label, which are read once; None if there are none."""
    unlabelled_locations: list[str] = field(default_factory=list)
    """Where each unlabelled row is in its file, such as "line 2"; as they are read, more follow, and notes as well."""
    column_descriptions: Mapping[str, str] = field(default_factory=dict)
    """The type of each column, or the reason why it is dropped, by its name; empty for columns without names."""
    unused_columns: tuple[str, ...] = ()  #: The names of the columns that were not read.
    encoding_of_text: str | None = None  #: The encoding of the file; see `TableSource.encoding`.
    has_ids: bool = False  #: Whether the last extra column of the rows identifies them.
    has_group_columns: bool = False  #: Whether some columns seem to identify groups of related rows, such as patients.

    @cached_property
    def has_label(self) -> Tensor:
        """A mask (n,) bool of the rows whose label is not ""; no row has one if there is no column of labels."""
        import torch  # noqa: PLC0415 - see above

        labels = self.rows.labels
        return torch.from_numpy(labels.astype(str) != "" if len(labels) else np.zeros(len(self.x), bool))

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the columns that are used; None for columns without names."""
        return self.rows.names

    @property
    def dropped_columns(self) -> tuple[str, ...]:
        """The names of the columns that were read and are not used."""
        used = {*(self.columns or ())}
        return tuple(name for name in self.column_descriptions if name not in used)

    @property
    def ids(self) -> list[str] | None:
        """The identifier of each row; None if no column has identifiers."""
        return self.rows.extra_columns[-1].astype(str).tolist() if self.has_ids else None  # behind the groups

    @property
    def missing_counts(self) -> list[int]:
        """The number of missing cells of each column that is used."""
        return [int(is_missing(cells).sum()) for cells in self.rows.columns]

    @property
    def class_counts(self) -> list[int]:
        """The number of rows of each class."""
        counts: list[int] = np.bincount(self.y.numpy(), minlength=len(self.classes)).tolist()
        return counts

    def select_rows(self, rows: np.ndarray) -> TrainingTable:
        """Return a table of the rows with the given indices (m,); weights and groups are left out."""
        return replace(
            self,
            rows=self.rows.select_rows(rows),
            x=self.x[rows],
            y=self.y[rows],
            uninformative_mask=self.uninformative_mask[rows],
            weights=None,
            groups=None,
        )

    @classmethod
    def from_file(
        cls,
        path: Path,
        spec: ReadSpec,
        *,
        labels_file: Path | None = None,
        unlabelled: Path | None = None,
        descriptions: Mapping[str, str] | None = None,
        allow_many_classes: bool = False,
        encoders: Sequence[EncoderName] | None = None,
        show_progress: bool = False,
    ) -> TrainingTable:
        """Read and encode the labelled rows of a file; column types are inferred unless ``spec`` has them.

        Args:
            path: The file, or a folder of pictures.
            spec: The columns to read. ``drop_unlabelled`` drops unlabelled rows, which are else in `unlabelled`.
            labels_file: The NPY file of labels, if ``path`` is an NPY file of rows.
            unlabelled: A file of more unlabelled rows, which is read when the model is fitted.
            descriptions: The description of each class, or "", by its name, if the user names the classes. They need no
                rows then.
            allow_many_classes: Whether labels that look like numbers or identifiers are accepted.
            encoders: The pretrained encoders of texts and pictures; None for the installed ones.
            show_progress: Whether to show progress bars of encoders.

        Raises:
            InputError: The file cannot be read, its labels or groups cannot be used, no column can be used, or the
                column types or encoders do not match the columns.
        """
        table, rows, spec = _read(path, spec, labels_file)
        if descriptions and spec.label_column not in table.extra_columns:
            _check_that_no_column_has_labels(rows, descriptions)
        labels = rows.labels.astype(str) if len(rows.labels) else np.full(len(rows.positions), "")
        has_label, rest = labels != "", None
        classes, y = determine_classes(
            labels[has_label],
            spec.label_column,
            allow_many=allow_many_classes or is_picture_path(path),  # folders are classes
            described=descriptions or {},
            notes=table.notes,
        )
        for name, cells in zip(rows.names or (), rows.columns, strict=bool(rows.names)):
            if spec.column_types.get(name) == "picture":
                paths = [text_to_path(str(cell)) for cell in cells.tolist()]
                table.notes.extend(warn_duplicate_pictures(paths, labels.tolist(), show_progress=show_progress))
        if has_label.any() and not has_label.all():
            rest, rows = rows.select_rows(np.flatnonzero(~has_label)), rows.select_rows(np.flatnonzero(has_label))
        group_names, groups = np.empty(0, np.str_), None
        if spec.has_groups and has_label.any():
            check_groups("group", rows.extra_columns[0].tolist(), rows.labels.tolist())
            group_names, groups = np.unique(rows.extra_columns[0], return_inverse=True)
        result = cls.from_rows(
            table,
            rows,
            y if has_label.any() else np.zeros(len(rows.positions), np.int64),
            spec,
            keep_hint="`columns` keeps it" if spec.columns is None else None,
            groups=groups,
            encoders=encoders,
            # Words shared between texts and class names are no evidence if no row has a label.
            use_word_features=bool(has_label.any()),
            show_progress=show_progress,
        )
        result = replace(
            result,
            classes=classes,
            group_names=group_names.tolist(),
            has_ids=spec.has_ids,
            descriptions=[(descriptions or {}).get(str(name), "") for name in classes],
        )
        named = [*describe_similar_names(classes), *describe_list_labels(classes)]
        result.notes.extend(f"warning: {note}" for note in named)
        if not has_label.any():
            result, rest = result.select_rows(np.empty(0, int)), rows
        parts = [] if rest is None or spec.drop_unlabelled else [result.encode_unlabelled([rest])]
        parts += [] if unlabelled is None else [result._open_unlabelled(unlabelled, spec)]
        result = replace(result, unlabelled=chain(*parts) if parts else None)
        empty = describe_uninformative_rows(result.uninformative_mask.numpy())
        result.notes.extend([*(f"warning: {note}" for note in empty), *result.warn_contradictory_labels()])
        return result

    @classmethod
    def from_file_to_label(
        cls, path: Path, spec: ReadSpec, *, encoders: Sequence[EncoderName] | None = None, show_progress: bool = False
    ) -> TrainingTable:
        """Read and encode the rows of a file to be labelled, few or none of which have a label already.

        The table has no classes. The arguments and errors are those of `from_file`.
        """
        table, rows, spec = _read(path, spec)
        one_class = np.zeros(len(rows.positions), np.int64)
        result = cls.from_rows(
            table, rows, one_class, spec, keep_hint="", encoders=encoders, show_progress=show_progress
        )
        result.notes.extend(describe_uninformative_rows(result.uninformative_mask.numpy()))
        result.notes.extend(table.all_notes[len(table.notes) :])
        likely = [name for name in rows.names or () if name.lower() in COMMON_LABEL_NAMES and not len(rows.labels)]
        if likely:
            names = format_names(likely)
            result.notes.append(f"no column {spec.label_column}; if {names} holds the labels, pass it with `label`")
        return replace(result, y=result.y - 1)

    @classmethod
    def from_frame(
        cls,
        rows: RowBlock,
        y: np.ndarray,
        classes: tuple[str, ...],
        column_types: Mapping[str, str],
        *,
        encoders: Sequence[EncoderName] | EncoderName | None = None,
        show_progress: bool = False,
    ) -> TrainingTable:
        """Encode the rows of a data frame, or of an array with gaps, with class indices y (n,), in float64.

        The columns of arrays, and frames of numbers without missing values, are used unchanged, even if one is a row
        index. Raises an InputError about X if no column can be used, or about column_kinds if they do not match X.
        """
        spec = ReadSpec(label_column="", column_types=column_types)
        with renamed_arguments(path="X", column_type="column_kinds"):
            result = cls.from_rows(
                None, rows, y, spec, keep_hint="column_kinds keeps it", encoders=encoders, show_progress=show_progress
            )
        return replace(result, x=result.x.double(), classes=classes)

    @classmethod
    def from_rows(
        cls,
        table: Table | None,
        rows: RowBlock,
        y: np.ndarray,
        spec: ReadSpec,
        *,
        keep_hint: str | None,
        groups: np.ndarray | None = None,
        encoders: Sequence[EncoderName] | EncoderName | None = None,
        use_word_features: bool = True,
        show_progress: bool = False,
    ) -> TrainingTable:
        """Infer the column types of rows with class indices y (n,), and encode the rows.

        Rows without labels have one class for all: no column is then dropped as a copy of the label. The ``table`` from
        which the rows were read has notes about them; None for those of a frame, whose columns get no warnings.
        """
        import torch  # noqa: PLC0415 - after the labels are checked

        from protonet.embeddings.loading import SelectedEncoders  # noqa: PLC0415 - imports torch
        from protonet.tables import features  # noqa: PLC0415 - imports torch

        selection = SelectedEncoders.from_names(encoders, show_progress=show_progress)
        used, encoding, descriptions, notes = features.fit_encoding(
            rows,
            spec.column_types,
            keep_hint=keep_hint,
            selection=selection._replace(use_word_features=use_word_features),
            decimal=spec.decimal_mark,
            has_semicolons=table is not None and table.has_semicolons,
            keep_numbers=table is None,
        )
        parsed = [column.preparse(cells) for column, cells in zip(encoding.columns, used.columns, strict=True)]
        parsed_rows, group_columns = used._replace(columns=parsed), tuple[int, ...]()
        if table is not None:
            warnings, group_columns = features.detect_suspicious_columns(parsed_rows, y, encoding, groups)
            notes = [*table.notes, *notes, *warnings, *features.check_column_types(used, encoding)]
        x = features.encode_block(parsed_rows, encoding)
        encoding = encoding.with_gap_filler(x, parsed)
        return cls(
            rows=used,
            x=torch.from_numpy(np.ascontiguousarray(x)),
            y=torch.from_numpy(y),
            classes=(),
            # Arrays of numbers without gaps need no encoding.
            encoding=None if rows.names is None and encoding.is_fully_numeric else encoding,
            uninformative_mask=torch.from_numpy(encoding.is_uninformative(used.columns)),
            notes=notes,
            groups=None if groups is None else torch.from_numpy(groups),
            column_descriptions=descriptions,
            unused_columns=() if table is None else table.unused_columns,
            has_group_columns=bool(group_columns),
            encoding_of_text=None if table is None else table.encoding,
        )

    def encode_unlabelled(self, blocks: Iterable[RowBlock], file: str = "") -> Iterator[Tensor]:
        """Yield the features (m, dim) of blocks of unlabelled rows, without those that have no known cell.

        Their locations are added to `unlabelled_locations`, with the name of the ``file`` if it is another one.
        """
        import torch  # noqa: PLC0415 - after the labels are checked

        from protonet.tables import features  # noqa: PLC0415 - imports torch

        left_out, n_before, suffix = list[str](), len(self.unlabelled_locations), f" of {file}" if file else ""
        for all_columns in blocks:
            block = all_columns.select_columns(self.columns)
            empty = np.zeros(len(block.positions), bool)
            if self.encoding is not None:
                empty = self.encoding.is_uninformative(block.columns)
            left_out += map(block.format_location, np.flatnonzero(empty).tolist())
            rows = block.select_rows(np.flatnonzero(~empty))
            self.unlabelled_locations.extend(rows.format_location(row) + suffix for row in range(len(rows.positions)))
            yield torch.from_numpy(np.ascontiguousarray(features.encode_block(rows, self.encoding)))
        if left_out and file and len(self.unlabelled_locations) == n_before:
            got = f"{plural(len(left_out), 'row')} without one"
            raise_input_error("path", "have rows with a readable cell", got, "Leave it out.")
        if left_out:
            rows_left_out = f"{plural(len(left_out), 'unlabelled row')} without a readable cell left out"
            self.notes.append(f"{rows_left_out}, first {left_out[0]}{suffix}")

    def _open_unlabelled(self, path: Path, spec: ReadSpec) -> Iterator[Tensor]:
        """Open a file of unlabelled rows, and return the iterator of its features; see `encode_unlabelled`."""
        from protonet.tables import features  # noqa: PLC0415 - imports torch

        spec = ReadSpec(
            label_column=spec.label_column,
            require_labels=False,
            columns=self.columns,
            n_features=self.x.shape[1] if self.encoding is None else len(self.encoding.columns),
            ignored_columns=(*spec.extra_columns, *spec.ignored_columns, *self.unused_columns, *self.dropped_columns),
            for_training=True,
            missing_texts=spec.missing_texts,
            no_header=spec.no_header,
            encoding=spec.encoding,
            usual_encoding=self.encoding_of_text,
        )
        with renamed_arguments(path="unlabelled"):
            table = features.convert_to_training_formats(open_table(path, spec), self.encoding)

        def encode() -> Iterator[Tensor]:
            with renamed_arguments(path="unlabelled"):
                yield from self.encode_unlabelled(table.blocks, to_printable(path.name))

        return encode()

    def warn_contradictory_labels(self) -> list[str]:
        """Return a warning about equal rows with different labels, except those without information; or []."""
        rows = np.flatnonzero(~self.uninformative_mask.numpy())
        equal = defaultdict[int, list[int]](list)
        for row, values in zip(rows.tolist(), self.x.numpy()[rows] + 0.0, strict=True):  # -0.0 becomes 0.0
            equal[hash(values.tobytes())].append(row)
        labels = self.rows.labels.tolist()
        sets = [rows for rows in equal.values() if len({labels[row] for row in rows}) > 1]
        if not sets:
            return []
        shown = []
        for same in sets[:MAX_LISTED_CONTRADICTORY_ROWS]:
            some = same[:MAX_LISTED_CONTRADICTORY_ROWS]
            named = [f"{self.rows.format_location(row)} ({to_printable(labels[row])})" for row in some]
            shown.append(", ".join([*named, *["..."] * (len(same) > len(some))]))
        more = "; ..." * (len(sets) > MAX_LISTED_CONTRADICTORY_ROWS)
        total = f"{sum(map(len, sets))} rows equal rows of another class"
        return [f"warning: contradicting labels: {total}: {'; '.join(shown)}{more}"]


def _read(path: Path, spec: ReadSpec, labels_file: Path | None = None) -> tuple[Table, RowBlock, ReadSpec]:
    """Read all rows of a file, with or without labels; also return the specification by which they were read."""
    if is_picture_path(path):
        spec = replace(spec, column_types={PICTURE_COLUMN: "picture"})
    table, rows = read_table(path, replace(spec, allow_unlabelled=True, are_columns_from_user=True), labels_file)
    return table, rows, spec


def _check_that_no_column_has_labels(rows: RowBlock, classes: Collection[str]) -> None:
    """Raise an InputError if the cells of a column are class names that the user listed, so that it has the labels."""
    for name, cells in zip(rows.names or (), rows.columns, strict=bool(rows.names)):
        if cells.dtype.kind == "O" and {*cells.tolist()} - {""} <= {*classes}:
            got = f"{format_names([name])}, whose cells are classes"
            raise_input_error(
                "label", "name the column of the labels", got, f"Pass `label` {name}, or `ignored` {name}."
            )


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


#: Maximum number of classes that all have a single row, or of numbers with fractions: more are probably no classes,
#: but identifiers or measurements.
MAX_SINGLE_ROW_CLASSES = 20
#: Whole numbers are probably measurements, such as ages, if the median number of rows per class is at most this.
MAX_MEASUREMENT_ROWS_PER_CLASS = 3
#: Such whole numbers must also have more distinct values than this fraction of the rows, or a difference of the largest
#: and the smallest that is at least this multiple of the number of distinct values.
MIN_MEASUREMENT_DISTINCT_FRACTION, MIN_MEASUREMENT_RANGE_MULTIPLE = 0.5, 2


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
        remedy = "Name a column of classes; regression is not supported. Or pass `allow_many_classes`."
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


def describe_uninformative_rows(mask: np.ndarray) -> list[str]:
    """Format a note that counts the rows of a mask (n,) bool, which have no known cell; an empty list for no rows."""
    count = int(mask.sum())
    return [f"{plural(count, 'row')} without information: no cell is known"] if count else []
