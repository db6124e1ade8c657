"""CSV files of labelled rows, which are safe against crashes."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

from protonet._io import lock_open_file, open_locked, write_atomically
from protonet._text import unescape_formula
from protonet.errors import raise_input_error
from protonet.ui.text import format_csv


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
