"""The file of a person's answers: every one is on the disk before the next row is shown."""

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
    """Rows with the classes that a person gave them, a line of CSV each, as ``fit`` and ``update`` read them.

    A line is one write, which the disk has before `add` returns. What was cut off within a line, by a machine that lost
    its power, was no answer yet, and is removed.

    Args:
        path: The file; what it holds already is taken up.
        header: The names of the columns, that of the classes last.
        classes: What may stand there; None for anything but nothing.

    Attributes:
        rows: Each answer so far, in order: the cells, the class last.

    Raises:
        OSError: The file cannot be written.
        InputError: It holds something else, or another command has it open.
    """

    def __init__(self, path: Path, header: Sequence[str], classes: Sequence[str] | None) -> None:
        self.path, self.header = path, list(header)
        self.rows: list[list[str]] = []
        self._ends: list[int] = []  # of the header, and of each answer
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
        """Put an answer on the disk: the cells of a row, and its class."""
        self._write([*cells, name])
        self.rows.append([*cells, name])

    def undo(self) -> list[str]:
        """Take the last answer back, from the disk as well; return it."""
        self._ends.pop()
        os.ftruncate(self._file, self._ends[-1])
        os.fsync(self._file)
        return self.rows.pop()

    def _write(self, cells: list[str]) -> None:
        """Append a line, and wait until the disk has it."""
        line = format_csv([cells]).encode()
        end = self._ends[-1] if self._ends else 0
        try:
            os.lseek(self._file, end, os.SEEK_SET)
            written = os.write(self._file, line)
            while written < len(line):  # a disk that is nearly full
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError:  # what a shorter line would leave of this one is no answer
            os.ftruncate(self._file, end)
            raise
        self._ends.append(end + len(line))

    def change(self, rows: Sequence[list[str]]) -> None:
        """Put other answers in the place of all, whole or not at all."""
        lines = [format_csv([row]).encode() for row in [self.header, *rows]]
        write_whole(self.path, lambda file: file.write(b"".join(lines)))
        os.close(self._file)  # of the old file, whose lock nobody waits for
        self._file = os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        _lock(self.path, self._file)
        self.rows, self._ends = [list(row) for row in rows], list(accumulate(map(len, lines)))

    def _read(self, path: Path, header: list[str], classes: Sequence[str] | None) -> None:
        """Take up the answers of a file, but for what was cut off at its end."""
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:  # a letter may be cut in two
            lines = file.readlines()
        ends = list(accumulate(len(line.encode(errors="surrogateescape")) for line in lines))
        reader = csv.reader(lines)
        for cells in reader:
            row = list(map(unescape_formula, cells))
            at_end = reader.line_num == len(lines)
            cut = at_end and (not lines[-1].endswith("\n") or (bool(self._ends) and len(row) != len(header)))
            if not self._ends and not (cut and format_csv([header]).startswith("".join(lines))) and row != header:
                _refuse(path, f"columns {', '.join(row)[:200]}")
            if cut:
                return
            known = bool(row) and (bool(row[-1]) if classes is None else row[-1] in classes)
            if self._ends and (len(row) != len(header) or not known):
                _refuse(path, f"{row[-1] if row else ''!r} as the class in line {reader.line_num}")
            if self._ends:
                self.rows.append(row)
            self._ends.append(ends[reader.line_num - 1])


def _lock(path: Path, file: int) -> None:
    """Raise an InputError if another command has an open file of answers; be the one that has it."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise_input_error(
            "--output", "be written by one command at a time", f"{path}, which another one writes", "End that."
        )
    except OSError:  # a file system without locks
        return


def _refuse(path: Path, got: str) -> NoReturn:
    """Raise an InputError: the file is another one."""
    must = "be a new file, or one of answers for this table and these classes"
    raise_input_error(
        "--output", must, f"{path} with {got}", "Pass another path, or the table and classes of that file."
    )
