"""The CSV file of labelled rows, written to disk label by label."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from protonet._text import unescape_formula
from protonet._writing import write_whole
from protonet.errors import raise_input_error
from protonet.ui.text import format_csv

if sys.platform != "win32":
    import fcntl


class Answers:
    """Labelled rows in a CSV file that ``fit`` and ``update`` read.

    Each row is one write, which is synced to disk before `add` returns. An incomplete last line, after a power failure,
    is removed.

    Args:
        path: The file; existing rows are kept.
        header: The names of the columns; the label is the last.
        classes: The allowed labels; None for any non-empty text.

    Attributes:
        rows: The rows so far, in order: the cells, then the label.

    Raises:
        OSError: The file cannot be written.
        InputError: The file has other content, or another command has it open.
    """

    def __init__(self, path: Path, header: Sequence[str], classes: Sequence[str] | None) -> None:
        self.path, self.header = path, list(header)
        self.rows: list[list[str]] = []
        self._ends: list[int] = []  # byte offsets of the ends of the header and of each row
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            _lock(path, self._file)
            self._read(path, list(header), classes)
            os.ftruncate(self._file, self._ends[-1] if self._ends else 0)
            if not self._ends:
                self._write(list(header))
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def add(self, cells: Sequence[str], name: str) -> None:
        """Append a row and its label to the file."""
        self._write([*cells, name])
        self.rows.append([*cells, name])

    def undo(self) -> list[str]:
        """Remove the last row from the file and return it."""
        self._ends.pop()
        os.ftruncate(self._file, self._ends[-1])
        os.fsync(self._file)
        return self.rows.pop()

    def _write(self, cells: list[str]) -> None:
        """Append a line and sync it to disk."""
        line = format_csv([cells]).encode()
        end = self._ends[-1] if self._ends else 0
        try:
            os.lseek(self._file, end, os.SEEK_SET)
            written = os.write(self._file, line)
            while written < len(line):  # short writes of a nearly full disk
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError:  # remove an incomplete line
            os.ftruncate(self._file, end)
            raise
        self._ends.append(end + len(line))

    def change(self, rows: Sequence[list[str]]) -> None:
        """Replace all rows atomically."""
        lines = [format_csv([row]).encode() for row in [self.header, *rows]]
        write_whole(self.path, lambda file: file.write(b"".join(lines)))
        os.close(self._file)  # of the old file and its lock
        self._file = os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        _lock(self.path, self._file)
        self.rows, self._ends = [list(row) for row in rows], list(accumulate(map(len, lines)))

    def _read(self, path: Path, header: list[str], classes: Sequence[str] | None) -> None:
        """Read the rows of an existing file, without an incomplete last line."""
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:  # a character may be incomplete
            lines = file.readlines()
        ends = list(accumulate(len(line.encode(errors="surrogateescape")) for line in lines))
        reader = csv.reader(lines)
        for cells in reader:
            row = list(map(unescape_formula, cells))
            at_end = reader.line_num == len(lines)
            cut = at_end and (not lines[-1].endswith("\n") or (bool(self._ends) and len(row) != len(header)))
            if not self._ends and not (cut and format_csv([header]).startswith("".join(lines))) and row != header:
                _raise_other_file(path, f"columns {', '.join(row)[:200]}")
            if cut:
                return
            known = bool(row) and (bool(row[-1]) if classes is None else row[-1] in classes)
            if self._ends and (len(row) != len(header) or not known):
                _raise_other_file(path, f"{row[-1] if row else ''!r} as the class in line {reader.line_num}")
            if self._ends:
                self.rows.append(row)
            self._ends.append(ends[reader.line_num - 1])


def _lock(path: Path, file: int) -> None:
    """Lock a file, or raise an InputError if another command has locked it."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise_input_error(
            "--output", "be written by one command at a time", f"{path}, in use by another", "Stop that command."
        )
    except OSError:  # the file system does not support locks
        return


def _raise_other_file(path: Path, got: str) -> NoReturn:
    """Raise an InputError for a file of another table."""
    must = "be a new file, or labelled rows of this table and these classes"
    raise_input_error("--output", must, f"{path} with {got}", "Pass another path, or that file's table and classes.")
