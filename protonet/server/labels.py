"""Labels of rows: their CSV file, written label by label, rows that are added, and the network fitted to the labels."""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import os
import re
import sys
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import numpy as np
import torch
from starlette.exceptions import HTTPException
from torch import Tensor

from protonet._io import write_atomically, write_text
from protonet._text import escape_control_chars, to_printable, unescape_formula
from protonet.commands.data import UnlabelledTable
from protonet.embeddings.pictures.images import SUFFIXES, UNREADABLE_IMAGE, describe_error, open_plain, path_to_text
from protonet.errors import raise_input_error
from protonet.fit.active import Standardised, Suggestion, suggest_rows
from protonet.fit.solver import solve_problem
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.tables.delimited import MISSING_TEXTS
from protonet.tables.features import encode_block
from protonet.tables.formats import text_array
from protonet.tables.table import make_table
from protonet.ui.text import format_csv

if sys.platform != "win32":
    import fcntl

#: The number of typical rows per class to label before uncertainty is used.
TYPICAL_ROWS_PER_CLASS = 2
#: The maximal number of characters of a class name.
MAX_CLASS_NAME_LENGTH = 100
#: The similarity (`difflib.SequenceMatcher.ratio`) from which a new class name is taken for a misspelling.
MIN_NAME_SIMILARITY = 0.85
#: The time limit of a refit, s.
REFIT_TIME_LIMIT = 5.0


class LabelFile:
    """Labelled rows in a CSV file that ``fit`` and ``update`` read; one command at a time may open it.

    Each row is one write, which is synced to disk before `add` returns. An incomplete last line, after a power failure,
    is removed. A lazy file is created by the first row.
    """

    def __init__(self, path: Path, header: Sequence[str], classes: Sequence[str] | None, *, lazy: bool = False) -> None:
        self.path, self.header = path, list(header)  # the label is the last column
        self.classes = classes  #: The allowed labels; None for any non-empty text.
        self.rows: list[list[str]] = []  #: The rows so far, in order: the cells, then the label.
        self._file = -1
        if not lazy or path.exists():
            self._open()

    def _open(self) -> None:
        """Open the file, and read its rows."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            _lock(self.path, self._file)
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
        """Append a row and its label to the file."""
        if self._file < 0:
            self._open()
        self._append_line([*cells, name])
        self.rows.append([*cells, name])

    def _append_line(self, cells: list[str]) -> None:
        """Append a line and sync it to disk."""
        line = format_csv([cells]).encode()
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            written = os.write(self._file, line)
            while written < len(line):  # short writes of a nearly full disk
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError:  # remove an incomplete line
            os.ftruncate(self._file, end)
            raise

    def replace_rows(self, rows: Sequence[list[str]]) -> None:
        """Replace all rows atomically."""
        write_text(self.path, format_csv([self.header, *rows]))
        os.close(self._file)  # of the old file and its lock
        self._file = os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        _lock(self.path, self._file)
        self.rows = [list(row) for row in rows]

    def _read(self) -> int:
        """Read the rows of the file, without an incomplete last line; return the bytes of the complete lines."""
        header, size, end = self.header, 0, 0
        with self.path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:  # may end in a character
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


def _lock(path: Path, file: int) -> None:
    """Lock a file, or raise an InputError if another command has locked it."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise_input_error(
            "output", "be written by one command at a time", f"{path}, in use by another", "Stop that command."
        )
    except OSError:  # the file system does not support locks
        return


def _raise_format_error(path: Path, got: str) -> NoReturn:
    """Raise an InputError for a file of another table."""
    must = "be a new file, or labelled rows of this table and these classes"
    raise_input_error("output", must, f"{path} with {got}", "Pass another path, or that file's table and classes.")


def parse_classes(text: str | None, model: TablePipeline | None) -> list[str]:
    """Parse the names of the classes; the default are the model's, or none."""
    known = [] if model is None else list(map(str, model.classes))
    names = known if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name.lower() in MISSING_TEXTS or names.count(name) > 1:
            must = "be different names, not a missing value"
            raise_input_error("classes", must, repr(name), "Separate other names by commas.")
        if known and name not in known:
            got = f"{name!r}, and it knows {', '.join(known[:10])}{' ...' if len(known) > 10 else ''}"
            remedy = "Name those, or leave out --model; protonet update adds classes afterwards."
            raise_input_error("classes", "be classes that the model knows", got, remedy)
    return names


def check_class(name: object, known: Sequence[str]) -> str:
    """Validate the name of a class, and strip spaces."""
    text = name.strip() if isinstance(name, str) else ""
    if text in known:
        return text
    if text.lower() in MISSING_TEXTS or len(text) > MAX_CLASS_NAME_LENGTH or not text.isprintable():
        must = f"be a printable name of up to {MAX_CLASS_NAME_LENGTH} characters that is no missing value"
        raise_input_error("name", must, repr(text[:40]), "Type another one.")
    return text


def find_similar(name: str, known: Sequence[str]) -> str | None:
    """Find the class that a new name may be a misspelling of; None if it is a class, or unlike all of them."""
    name = name.strip()
    if name in known:
        return None
    folded = {other.casefold(): other for other in known if re.findall(r"\d+", other) == re.findall(r"\d+", name)}
    matches = difflib.get_close_matches(name.casefold(), folded, 1, MIN_NAME_SIMILARITY)
    return folded[matches[0]] if matches else None


class LabelSession:
    """A labelling session: the rows and their cells, the labels so far, and the network fitted to them.

    Each answer is assigned to a row with equal cells: of several, to the first one without a label in the table.
    """

    def __init__(
        self,
        rows: UnlabelledTable,
        cells: list[list[str]],
        classes: list[str],
        model: TablePipeline | None,
        answers: LabelFile,
    ) -> None:
        self.rows, self.cells, self.classes, self.label_file = rows, cells, classes, answers
        self.names = classes if model is None else list(map(str, model.classes))
        self.skipped: set[int] = set()
        self._fitted, self._learned = None if model is None else model.network, list[tuple[int, int]]()
        self._refits = model is None
        rows_of: dict[tuple[str, ...], list[int]] = {}
        for row in sorted(range(len(cells)), key=lambda row: (bool(rows.known[row]), row), reverse=True):
            rows_of.setdefault(tuple(cells[row]), []).append(row)
        self.labelled: list[int] = []  #: The index of each labelled row.
        for *values, name in answers.rows:
            if not rows_of.get(tuple(values)):
                got = f"a label {name!r} of a row that is not in it"
                raise_input_error("table", "be the table of the labels", got, "Pass another --output.")
            self.labelled.append(rows_of[tuple(values)].pop())
        self.network: PrototypeNetwork | None = None  #: The result of `learn`.

    @property
    def labels(self) -> dict[int, str]:
        """The label of each labelled row, in the order of the answers."""
        return {row: label for row, (*_, label) in zip(self.labelled, self.label_file.rows, strict=True)}

    def update_network(self, *, anew: bool = False) -> None:
        """Update the network: new labels move the prototypes or, without a model and if ``anew``, all are refitted."""
        self.network = self.fit_network(self.list_labelled(), len(self.names), anew=anew)

    def replace_rows(self, rows: UnlabelledTable) -> None:
        """Replace the features of the same rows, and discard the network."""
        self.rows, self.network, self._fitted, self._learned = rows, None, None, []

    def list_labelled(self) -> list[tuple[int, int]]:
        """List the row and the class index of each label."""
        return [(row, self.names.index(label)) for row, label in self.labels.items()]

    def fit_network(self, answers: list[tuple[int, int]], num_classes: int, *, anew: bool) -> PrototypeNetwork | None:
        """Fit or update a network; None until two classes have labels."""
        x = self.rows.x[[row for row, _ in answers]]
        y = torch.tensor([label for _, label in answers], dtype=torch.int64)
        fitted = self._fitted
        merged = fitted is None or len(fitted.counts) > num_classes
        if self._refits and (anew or merged or self._learned != answers[: len(self._learned)]):
            self._fitted, self._learned = None, answers
            if len(y.unique()) > 1:
                encoding = self.rows.encoding
                blocks = None if encoding is None else encoding.blocks
                self._fitted = fit_answers(x, y, num_classes, blocks)
        network, first = deepcopy(self._fitted), len(self._learned)
        if network is not None and len(y) > first:
            network.add_samples(x[first:], y[first:], num_classes=num_classes)
        return network

    def list_unlabelled(self) -> Tensor:
        """List the rows (n,) int64 without a label that were not skipped."""
        left = ~self.rows.known
        left[[*self.labelled, *self.skipped]] = False
        return left.nonzero().flatten()

    def suggest(self, n: int, left: Tensor | None = None) -> list[Suggestion]:
        """Choose at least ``n`` rows to label next: first typical ones, then the most informative ones."""
        left, first = (
            self.list_unlabelled() if left is None else left,
            TYPICAL_ROWS_PER_CLASS * len(self.classes) - len(self.labelled),
        )
        if not len(left):
            return []
        network = None if self._refits and first > 0 else self.network
        n = min(len(left), n if network is not None else max(n, first))
        return suggest_rows(network, self.rows.x, n, list(map(to_printable, self.names)), rows=left)

    def add_label(self, row: int, name: str) -> None:
        """Save a label."""
        self.label_file.add(self.cells[row], name)
        self.labelled.append(row)

    def change_label(self, row: int, name: str | None) -> None:
        """Change the label of a row, or remove it."""
        at, rows = self.labelled.index(row), list(self.label_file.rows)
        rows[at : at + 1] = [] if name is None else [[*self.cells[row], name]]
        self.label_file.replace_rows(rows)
        if name is None:
            del self.labelled[at]

    def skip(self, row: int) -> None:
        """Skip a row in this session."""
        self.skipped.add(row)


@torch.no_grad()
def embed(x: Tensor, network: PrototypeNetwork | None) -> Tensor:
    """Compute the embeddings (n, dim) of features; without a network, standardize the features."""
    space = Standardised(x) if network is None else network
    return torch.cat([space.embed(batch) for batch in x.split(4096)])


def fit_answers(x: Tensor, y: Tensor, num_classes: int, blocks: Tensor | None) -> PrototypeNetwork:
    """Fit a network in closed form to labelled rows (n, dim) of two or more classes (n,)."""
    metadata = {"num_classes": num_classes}
    return solve_problem([(x, y)], None, metadata, REFIT_TIME_LIMIT, "fast", blocks=blocks).network


#: Maximal numbers of added rows, and of characters of a text.
MAX_ADDED_ROWS, MAX_TEXT_LENGTH = 10_000, 20_000


@dataclass
class Uploads:
    """The rows that were added to a table; threads of requests that timed out may still add some."""

    rows: LabelFile  #: Their file: the cells of each, and "added".
    table: Path
    column: int | None  #: The index of the cell that a text or the path of a picture fills; None if none can be added.
    pictures: bool  #: Whether pictures are added; otherwise texts.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cells(self) -> list[list[str]]:
        """The cells of the rows."""
        return [cells for *cells, _ in self.rows.rows]

    @property
    def folder(self) -> Path:
        """The folder of the pictures, beside the labels."""
        return self.rows.path.with_suffix("")

    def add_texts(self, text: str, known: set[str]) -> list[list[str]]:
        """Save the lines of a text as rows, but for empty and ``known`` ones; return their cells."""
        self._require(pictures=False)
        lines = [escape_control_chars(line.strip()) for line in text.splitlines()]
        lines = [line for line in dict.fromkeys(lines) if line and line not in known]
        longest = max(map(len, lines), default=0)
        if longest > MAX_TEXT_LENGTH or len(lines) + len(self.rows.rows) > MAX_ADDED_ROWS:
            must = f"have at most {MAX_ADDED_ROWS:,} lines of at most {MAX_TEXT_LENGTH:,} characters"
            raise_input_error("text", must, f"{len(lines):,} lines, one of {longest:,}", "Shorten it.")
        return self._save(lines)

    def add_picture(self, name: str, content: bytes, known: set[str]) -> list[list[str]]:
        """Save a picture under a safe name as a row, unless it is there already; return its cells, if any."""
        self._require(pictures=True)
        if self.folder.resolve().is_relative_to(self.table.resolve()):
            raise HTTPException(409, "Pictures cannot be added inside of the folder of the table: pass another -o.")
        from PIL import Image  # noqa: PLC0415 - optional

        try:
            open_plain(io.BytesIO(content))
            with Image.open(io.BytesIO(content)) as image:
                suffix = f".{image.format}".lower().replace("mpo", "jpeg")  # several JPEGs, the first of which is read
            if suffix not in SUFFIXES:
                raise ValueError(f"in the format {image.format}")
        except UNREADABLE_IMAGE as error:
            raise_input_error("body", "be a picture that can be read", describe_error(error), "Leave it out.")
        stem = re.sub(r"[^\w-]+", "-", Path(name.replace("\\", "/")).stem)[:40].strip("-") or "picture"
        path = self.folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
        if path_to_text(path) in known:
            return []
        self.folder.mkdir(exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
        return self._save([path_to_text(path)])

    def _save(self, texts: Sequence[str]) -> list[list[str]]:
        """Append rows to the file, but for those that an interrupted request has saved; return their cells."""
        column = self.column or 0
        rows = [[text if index == column else "" for index in range(len(self.rows.header) - 1)] for text in texts]
        with self._lock:
            there = {cells[column] for cells in self.cells}
            for cells in rows:
                if cells[column] not in there:
                    self.rows.add(cells, "added")
        return rows

    def _require(self, *, pictures: bool) -> None:
        """Raise an HTTPException unless rows of a kind can be added."""
        kind = "pictures" if pictures else "texts"
        if self.column is None or self.pictures is not pictures:
            raise HTTPException(409, f"Rows can be added if {kind} are the only feature of the table.")
        if len(self.rows.rows) >= MAX_ADDED_ROWS:
            raise HTTPException(409, f"At most {MAX_ADDED_ROWS:,} rows can be added.")


def extend_rows(rows: UnlabelledTable, header: Sequence[str], cells: Sequence[Sequence[str]]) -> UnlabelledTable:
    """Append rows of cells, named by a header, to the features of a table, by its encoding."""
    n, start = len(cells), len(rows.x)
    if not n:
        return rows
    indices = [header.index(name) for name in rows.columns or header]
    columns = [text_array([line[index] for line in cells], n) for index in indices]
    table = make_table(columns, rows.columns, rows.table.position_format)
    x = torch.from_numpy(np.ascontiguousarray(encode_block(table, next(table.blocks), rows.encoding)))
    empty = np.zeros(n, bool) if rows.encoding is None else rows.encoding.is_uninformative(columns)
    return replace(
        rows,
        x=torch.cat([rows.x, x]),
        known=torch.cat([rows.known, torch.zeros(n, dtype=torch.bool)]),
        positions=[*rows.positions, *range(start, start + n)],
        labels=[*rows.labels, *[""] * n] if len(rows.labels) else rows.labels,
        uninformative=torch.cat([rows.uninformative, torch.from_numpy(empty)]),
    )
