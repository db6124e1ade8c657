"""Labels of the labelling page: their CSV file, the session that fits a network to them, and uploaded rows."""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import os
import re
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

import numpy as np
import torch
from starlette.exceptions import HTTPException
from torch import Tensor

from protonet._io import lock_open_file, open_locked, write_atomically
from protonet._text import escape_control_chars, to_printable, unescape_formula
from protonet.commands.data import TableToLabel
from protonet.embeddings.pictures import reading
from protonet.errors import raise_input_error
from protonet.fit.active import Standardiser, Suggestion, suggest_rows
from protonet.fit.solver import fit_solution
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.server.parsing import check_pixel_counts
from protonet.tables.features import encode_block
from protonet.tables.formats import make_text_array
from protonet.tables.table import list_missing_label_texts, make_table
from protonet.ui.text import format_csv

#: Number of typical rows per class that are suggested first, before uncertain rows.
TYPICAL_ROWS_PER_CLASS = 2
#: Maximal number of characters of a class name.
MAX_CLASS_NAME_LENGTH = 100
#: Minimal similarity (`difflib.SequenceMatcher.ratio`) of a new name to a class name to count as its misspelling.
MIN_CLASS_NAME_SIMILARITY = 0.85
#: Time limit of a refit in seconds.
MAX_REFIT_SECONDS = 5.0


class LabelFile:
    """A CSV file of labelled rows that is safe against crashes; the commands ``fit`` and ``update`` can read it.

    `add` returns after the row is synced to disk. Opening the file removes an incomplete last line, which a power
    failure may leave, and locks the file against other processes. With ``lazy``, a missing file is created by the first
    `add`.
    """

    def __init__(self, path: Path, header: Sequence[str], classes: Sequence[str] | None, *, lazy: bool = False) -> None:
        self.path, self.header = path, list(header)  # the last column is the label
        self.classes = classes  #: The allowed labels; None for any non-empty text.
        self.rows: list[list[str]] = []  #: The cells of each row, followed by its label.
        self._file = -1
        if not lazy or path.exists():
            self._open()

    def _open(self) -> None:
        """Open and lock the file, read its rows, and write the header if the file is new."""
        try:
            self._file = open_locked(self.path, os.O_RDWR | os.O_CREAT, wait=False)
        except BlockingIOError:
            must, got = "be written by one command at a time", f"{self.path}, in use by another"
            raise_input_error("output", must, got, "Stop that command.")
        try:
            size = self._read()
            os.ftruncate(self._file, size)
            if not size:
                self._append_line(self.header)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> LabelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file >= 0:
            os.close(self._file)

    def add(self, cells: Sequence[str], name: str) -> None:
        """Append the cells of a row and its label ``name`` to the file."""
        if self._file < 0:
            self._open()
        self._append_line([*cells, name])
        self.rows.append([*cells, name])

    def _append_line(self, cells: list[str]) -> None:
        """Append a line to the file, and sync the file to disk; remove the line again if the disk is full."""
        line = format_csv([cells]).encode()
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            written = os.write(self._file, line)
            while written < len(line):  # short writes of a nearly full disk
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:  # remove an incomplete line
            os.ftruncate(self._file, end)
            error.filename = str(self.path)
            raise

    def replace_rows(self, rows: Sequence[list[str]]) -> None:
        """Replace all rows of the file atomically."""
        new = -1

        def write(file: BinaryIO) -> None:
            nonlocal new
            file.write(format_csv([self.header, *rows]).encode())
            new = os.dup(file.fileno())
            lock_open_file(new, wait=False)  # before another process can find the file under its name

        try:
            write_atomically(self.path, write)
        except BaseException:
            if new >= 0:
                os.close(new)
            raise
        os.close(self._file)  # also unlocks the old file
        self._file = new
        self.rows = [list(row) for row in rows]

    def _read(self) -> int:
        """Append the complete lines of the file to `rows`, and return the total size of these lines in bytes."""
        header, size, end = self.header, 0, 0
        errors = "surrogateescape"  # the file may end within a character
        with self.path.open(encoding="utf-8", errors=errors, newline="") as file:
            lines = file.readlines()
        reader = csv.reader(lines)
        for cells in reader:
            row, is_header, start, end = list(map(unescape_formula, cells)), not end, end, reader.line_num
            fits = len(row) == len(header)
            cut = end == len(lines) and (not lines[-1].endswith("\n") or not (is_header or fits))
            if is_header and row != header and not (cut and format_csv([header]).startswith("".join(lines))):
                _raise_format_error(self.path, f"columns {', '.join(row)[:200]}")
            if cut:
                break
            known = bool(row) and (bool(row[-1]) if self.classes is None else row[-1] in self.classes)
            if not is_header and not (fits and known):
                _raise_format_error(self.path, f"{row[-1] if row else ''!r} as the class in line {end}")
            self.rows += [] if is_header else [row]
            size += len("".join(lines[start:end]).encode(errors="surrogateescape"))
        return size


def _raise_format_error(path: Path, got: str) -> NoReturn:
    """Raise an InputError because an output file belongs to another table or classes; ``got`` describes its content."""
    must = "be a new file, or labelled rows of this table and these classes"
    raise_input_error("output", must, f"{path} with {got}", "Pass another path, or that file's table and classes.")


def parse_classes(text: str | None, model: TablePipeline | None) -> list[str]:
    """Parse a comma-separated list of class names; raise an InputError if the model does not know one of them.

    If the text is None, return the classes of the model or, without a model, an empty list.
    """
    known = [] if model is None else list(map(str, model.classes))
    names = known if text is None else [name.strip() for name in text.split(",")]
    missing_texts = list_missing_label_texts(names)
    for name in names:
        if name.lower() in missing_texts or names.count(name) > 1:
            must = "be different names, not a missing value"
            raise_input_error("classes", must, repr(name), "Separate other names by commas.")
        if known and name not in known:
            got = f"{name!r}, and it knows {', '.join(known[:10])}{' ...' if len(known) > 10 else ''}"
            remedy = "Name those, or leave out --model; protonet update adds classes afterwards."
            raise_input_error("classes", "be classes that the model knows", got, remedy)
    return names


def validate_class_name(name: object, classes: Sequence[str]) -> str:
    """Return a class name without surrounding spaces.

    Raises an InputError unless the name is in ``classes``, or is printable, short enough and not a missing value like
    NA.
    """
    text = name.strip() if isinstance(name, str) else ""
    if text in classes:
        return text
    is_missing = text.lower() in list_missing_label_texts([*classes, text])
    if is_missing or len(text) > MAX_CLASS_NAME_LENGTH or not text.isprintable():
        must = f"be a printable name of up to {MAX_CLASS_NAME_LENGTH} characters that is no missing value"
        raise_input_error("name", must, repr(text[:40]), "Type another one.")
    return text


def get_similar_class(name: str, classes: Sequence[str]) -> str | None:
    """Return the known class that a name may misspell.

    Return None if the name is itself in ``classes``, or is not similar to any of them.
    """
    name = name.strip()
    if name in classes:
        return None
    folded = {other.casefold(): other for other in classes if re.findall(r"\d+", other) == re.findall(r"\d+", name)}
    matches = difflib.get_close_matches(name.casefold(), folded, 1, MIN_CLASS_NAME_SIMILARITY)
    return folded[matches[0]] if matches else None


class LabelSession:
    """A labelling session: a table, the labels of its rows, and the network that is fitted to the labels.

    The label file has cells, but no row indices. Each line belongs to a row of the table with equal cells. If several
    rows have equal cells, their lines belong to the first of these rows; rows with labels in the table come last.

    Args:
        rows: The features of all rows of the table.
        cells: The texts of the cells of each row.
        classes: The class names to start with. With a model, the names of its classes are used instead.
        model: The model that labels update; None to fit a network to the labels alone.
        answers: The label file.
    """

    def __init__(
        self,
        rows: TableToLabel,
        cells: list[list[str]],
        classes: list[str],
        model: TablePipeline | None,
        label_file: LabelFile,
    ) -> None:
        self.rows, self.cells, self.classes, self.label_file = rows, cells, classes, label_file
        self.names = classes if model is None else list(map(str, model.classes))
        self.skipped: set[int] = set()
        # Each renaming since the start: old and new name, index of the old one, and, after a merge, its rows.
        self._renames: list[tuple[str, str, int, set[int] | None]] = []
        self._fitted, self._learned = None if model is None else model.network, list[tuple[int, int]]()
        self._refits = model is None
        rows_of: dict[tuple[str, ...], list[int]] = {}
        for row in sorted(range(len(cells)), key=lambda row: (bool(rows.has_label[row]), row), reverse=True):
            rows_of.setdefault(tuple(cells[row]), []).append(row)
        self.labelled: list[int] = []  #: Indices of the labelled rows, in the order of the label file.
        for *values, name in label_file.rows:
            if not rows_of.get(tuple(values)):
                got = f"a label {name!r} of a row that is not in it"
                raise_input_error("table", "be the table of the labels", got, "Pass another --output.")
            self.labelled.append(rows_of[tuple(values)].pop())
        self.network: PrototypeNetwork | None = None  #: The network fitted last; None before two classes have labels.

    @property
    def labels(self) -> dict[int, str]:
        """The label of each labelled row by its index, in the order of the label file."""
        return {row: label for row, (*_, label) in zip(self.labelled, self.label_file.rows, strict=True)}

    def update_network(self, *, refit: bool = False) -> None:
        """Update the network with new labels, by `fit_network`."""
        self.network = self.fit_network(self.list_label_indices(), len(self.names), refit=refit)

    def replace_rows(self, rows: TableToLabel) -> None:
        """Replace the features of all rows, and discard the network."""
        self.rows, self.network, self._fitted, self._learned = rows, None, None, []

    def list_label_indices(self) -> list[tuple[int, int]]:
        """List the pair (row index, class index) of each label, in the order of the label file."""
        return [(row, self.names.index(label)) for row, label in self.labels.items()]

    def fit_network(self, labels: list[tuple[int, int]], num_classes: int, *, refit: bool) -> PrototypeNetwork | None:
        """Return a network that is fitted to labels, by adding them to the prototypes of the last fit, or by a new fit.

        The labels are pairs (row index, class index). ``refit`` has no effect on an initial model; without one, a
        change of earlier labels or classes also needs a new fit. Returns a copy, or None before two classes have
        labels.
        """
        x = self.rows.x[[row for row, _ in labels]]
        y = torch.tensor([label for _, label in labels], dtype=torch.int64)
        fitted = self._fitted
        merged = fitted is None or len(fitted.counts) > num_classes
        if self._refits and (refit or merged or self._learned != labels[: len(self._learned)]):
            self._fitted, self._learned = None, labels
            if len(y.unique()) > 1:
                encoding = self.rows.encoding
                column_indices = None if encoding is None else encoding.feature_block_indices
                self._fitted = fit_network_to_labels(x, y, num_classes, column_indices)
        network, first = deepcopy(self._fitted), len(self._learned)
        if network is not None and len(y) > first:
            network.add_samples(x[first:], y[first:], num_classes=num_classes)
        return network

    def list_unlabelled_rows(self) -> Tensor:
        """Return the indices (n,) int64 of the rows that are neither labelled nor skipped."""
        left = ~self.rows.has_label
        left[[*self.labelled, *self.skipped]] = False
        return left.nonzero().flatten()

    def suggest(self, n: int, candidates: Tensor | None = None) -> list[Suggestion]:
        """Suggest ``n`` rows to label next: at first typical rows of the table, later the most informative rows.

        Fewer rows are returned if fewer remain, and more until the first typical rows are labelled. ``candidates`` (m,)
        are the indices of unlabelled rows; None to compute them. Uninformative rows are not suggested.
        """
        candidates = self.list_unlabelled_rows() if candidates is None else candidates
        candidates = candidates[~self.rows.uninformative_mask[candidates]]
        first = TYPICAL_ROWS_PER_CLASS * len(self.classes) - len(self.labelled)
        if not len(candidates):
            return []
        network = None if self._refits and first > 0 else self.network
        n = min(len(candidates), n if network is not None else max(n, first))
        return suggest_rows(network, self.rows.x, n, list(map(to_printable, self.names)), unlabelled_rows=candidates)

    def add_class(self, name: str) -> None:
        """Append a name to the list of classes, unless the list has it."""
        if name not in self.names:
            self.names.append(name)

    def add_label(self, row: int, name: str) -> None:
        """Add the label of a row to the file."""
        self.label_file.add(self.cells[row], name)
        self.labelled.append(row)

    def change_label(self, row: int, name: str | None) -> None:
        """Change the label of a row in the file; None removes the label."""
        at, rows = self.labelled.index(row), list(self.label_file.rows)
        rows[at : at + 1] = [] if name is None else [[*self.cells[row], name]]
        self.label_file.replace_rows(rows)
        if name is None:
            del self.labelled[at]

    def rename_class(self, old: str, new: str) -> bool:
        """Rename a class in all labels; if the new name is a class, merge the two; return whether they were merged."""
        merged, names, labels = new in self.names, self.names, self.labels
        self._set_names([new if name == old else name for name in labels.values()])
        rows = {row for row, name in labels.items() if name == old} if merged else None
        self._renames.append((old, new, names.index(old), rows))
        names[:] = [new if name == old else name for name in names if not (merged and name == old)]
        return merged

    def undo_rename(self, old: str, new: str) -> bool:
        """Undo the last renaming of class ``old`` to ``new``; return False if there was none, or ``new`` is gone."""
        index = next((at for at, entry in reversed([*enumerate(self._renames)]) if entry[:2] == (old, new)), None)
        if index is None or new not in self.names:
            return False
        *_, place, merged_rows = self._renames.pop(index)
        is_old = [name == new and (merged_rows is None or row in merged_rows) for row, name in self.labels.items()]
        self._set_names([old if back else name for back, name in zip(is_old, self.labels.values(), strict=True)])
        others = [name for name in self.names if name != old and (merged_rows is not None or name != new)]
        self.names[:] = [*others[:place], old, *others[place:]]
        return True

    def _set_names(self, names: Sequence[str]) -> None:
        """Replace the label of each row in the file."""
        lines = zip(self.label_file.rows, names, strict=True)
        self.label_file.replace_rows([[*cells, name] for (*cells, _), name in lines])


@torch.no_grad()
def embed_or_standardize(x: Tensor, network: PrototypeNetwork | None) -> Tensor:
    """Compute the embeddings (n, dim) of rows (n, features) by a network; if it is None, standardize the features."""
    space = Standardiser(x) if network is None else network
    return torch.cat([space.embed(batch) for batch in x.split(4096)])


def fit_network_to_labels(x: Tensor, y: Tensor, num_classes: int, column_indices: Tensor | None) -> PrototypeNetwork:
    """Fit a network to rows (n, dim) and class indices (n,) of at least two classes.

    ``column_indices`` (dim,) has the index of the column that each feature encodes; None if features are columns.
    """
    metadata = {"num_classes": num_classes}
    return fit_solution([(x, y)], None, metadata, MAX_REFIT_SECONDS, column_indices=column_indices).network


#: Maximal number of uploaded rows, and of characters of an uploaded text.
MAX_ADDED_ROWS, MAX_UPLOADED_CHARACTERS = 10_000, 20_000


@dataclass
class UploadedRows:
    """The texts or pictures that users of the labelling page upload as new rows of a table.

    Several threads may add rows at the same time. A thread finishes its work even if its request has timed out.
    """

    file: LabelFile  #: The file of uploaded rows, whose last column is "added".
    table_path: Path  #: The table that the rows are added to.
    content_column: int | None  #: Index of the column of texts or pictures; None if rows cannot be uploaded.
    are_pictures: bool  #: Whether rows are pictures; otherwise, texts.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cells(self) -> list[list[str]]:
        """The cells of each uploaded row."""
        return [cells for *cells, _ in self.file.rows]

    @property
    def folder(self) -> Path:
        """The folder of uploaded pictures, in the same folder as the label file."""
        return self.file.path.with_suffix("")

    def add_texts(self, text: str, known_texts: set[str]) -> list[list[str]]:
        """Save each line of a text as a new row, except empty lines and ``known_texts``, the texts of the table.

        Returns the cells of each new row. Raises an InputError if there are too many lines, or a line is too long.
        """
        self._require_modality(pictures=False)
        lines = [escape_control_chars(line.strip()) for line in text.splitlines()]
        lines = [line for line in dict.fromkeys(lines) if line and line not in known_texts]
        longest = max(map(len, lines), default=0)
        if longest > MAX_UPLOADED_CHARACTERS or len(lines) + len(self.file.rows) > MAX_ADDED_ROWS:
            must = f"have at most {MAX_ADDED_ROWS:,} lines of at most {MAX_UPLOADED_CHARACTERS:,} characters"
            raise_input_error("text", must, f"{len(lines):,} lines, one of {longest:,}", "Shorten it.")
        return self._add_missing_rows(lines)

    def add_picture(self, name: str, content: bytes, known_paths: set[str]) -> list[list[str]]:
        """Save an uploaded picture in `folder`, and as a new row; return its cells in a list.

        The list is empty if the table already has the picture: the path contains a checksum of the content. ``name`` is
        the file name on the user's computer.
        """
        self._require_modality(pictures=True)
        if self.table_path.resolve() in self.folder.resolve().parents:
            raise HTTPException(409, "Pictures cannot be added inside of the folder of the table: pass another -o.")
        from PIL import Image  # noqa: PLC0415 - optional

        check_pixel_counts([io.BytesIO(content)])
        try:
            reading.decode_image(io.BytesIO(content), 1)  # a JPEG at an eighth of its size
            with Image.open(io.BytesIO(content)) as image:
                suffix = f".{image.format}".lower().replace("mpo", "jpeg")  # a file of several JPEGs
            if suffix not in reading.IMAGE_SUFFIXES:
                raise ValueError(f"in the format {image.format}")
        except reading.UNREADABLE_IMAGE_ERRORS as error:
            got = reading.describe_image_error(error)
            raise_input_error("body", "be a picture that can be read", got, "Leave it out.")
        stem = re.sub(r"[^\w-]+", "-", Path(name.replace("\\", "/")).stem)[:40].strip("-") or "picture"
        path = self.folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
        if reading.path_to_text(path) in known_paths:
            return []
        self.folder.mkdir(exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
        return self._add_missing_rows([reading.path_to_text(path)])

    def _add_missing_rows(self, texts: Sequence[str]) -> list[list[str]]:
        """Save a row for each text (or picture path) that has no row yet; return the cells of the rows of all texts."""
        column = self.content_column or 0
        rows = [[text if index == column else "" for index in range(len(self.file.header) - 1)] for text in texts]
        with self._lock:
            there = {cells[column] for cells in self.cells}
            for cells in rows:
                if cells[column] not in there:
                    self.file.add(cells, "added")
        return rows

    def _require_modality(self, *, pictures: bool) -> None:
        """Raise an HTTPException unless further pictures or, if not ``pictures``, further texts can be uploaded."""
        kind = "pictures" if pictures else "texts"
        if self.content_column is None or self.are_pictures is not pictures:
            raise HTTPException(409, f"Rows can be added if {kind} are the only feature of the table.")
        if len(self.file.rows) >= MAX_ADDED_ROWS:
            raise HTTPException(409, f"At most {MAX_ADDED_ROWS:,} rows can be added.")


def append_rows(rows: TableToLabel, header: Sequence[str], cells: Sequence[Sequence[str]]) -> TableToLabel:
    """Return a copy of an encoded table with new rows at its end; ``header`` names the columns of ``cells``."""
    n, start = len(cells), len(rows.x)
    if not n:
        return rows
    indices = [header.index(name) for name in rows.columns or header]
    columns = [make_text_array([line[index] for line in cells], n) for index in indices]
    table = make_table(columns, rows.columns, rows.table.position_format)
    x = torch.from_numpy(np.ascontiguousarray(encode_block(table, next(table.blocks), rows.encoding)))
    empty = np.zeros(n, bool) if rows.encoding is None else rows.encoding.is_uninformative(columns)
    return replace(
        rows,
        x=torch.cat([rows.x, x]),
        has_label=torch.cat([rows.has_label, torch.zeros(n, dtype=torch.bool)]),
        positions=[*rows.positions, *range(start, start + n)],
        labels=[*rows.labels, *[""] * n] if len(rows.labels) else rows.labels,
        uninformative_mask=torch.cat([rows.uninformative_mask, torch.from_numpy(empty)]),
    )
