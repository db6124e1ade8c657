"""Tables of text, row by row: encoding, separator and comments are settled for a whole file before its first row."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import shutil
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, NoReturn, cast

from protonet._checks import fail

LONGEST = 2**26  #: Most characters in a line of a table: a file without line ends must not fill the memory.
#: What may stand between cells. Of those that cut the first rows equally well the first is taken: commas are more often
#: part of a number or of a text than semicolons are.
DELIMITERS = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas"}
SAMPLE = 100  #: Rows that settle what stands between cells.
CHUNK = 2**22  #: Bytes that are looked at at a time.
DECLARED = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
#: Bytes that are no text in Windows-1252, as surrogates where they are above ASCII.
NO_TEXT = re.compile("[\0-\x08\x0e-\x1f\udc81\udc8d\udc8f\udc90\udc9d]")
ESCAPED = re.compile("[\udc80-\udcff]")
GAPS = {"", "?", "-", ".", "na", "n/a", "nan", "null", "none", "missing"}


def read_rows(function: str, path: Path, notes: list[str] | None = None) -> Iterator[tuple[int, list[str]]]:
    """Read a table of text row by row, the header first; empty lines and comments are left out.

    Cells stand between commas, semicolons, tabs or bars, the same in the whole file, and may be quoted. Text is UTF-8,
    UTF-16 with its mark, or else Windows-1252, which holds Latin-1. Lines that start with ``#`` before the header are
    comments, and so are those between rows, unless the header starts with it as well or most of the first rows do.

    Args:
        function: The function or command that asks, for messages.
        path: The file, which may be compressed by gzip; "-" for the standard input.
        notes: Takes what a person should be told about how the file is read, before the header is yielded.

    Yields:
        The number of the line on which it begins, from 1, and the cells of each row.

    Raises:
        InputError: The file does not exist or cannot be read, a row has not as many cells as the header, or another
            table follows.
    """
    text = None
    try:
        with _open_bytes(path) as file:
            start, encoding, n_comments = _survey(function, path, file)
            text = _Text(file, start, encoding)
            (delimiter, skipped, comments), more = _find_layout(text, n_comments)
            if encoding == "cp1252":
                more.insert(0, "it is not UTF-8: read as Latin-1 (Windows-1252)")
            if notes is not None:
                notes.extend(more)
            with closing(text.read_records(delimiter, skipped, comments=comments)) as records:
                yield from _check_rows(function, path, text, records)
    except (FileNotFoundError, IsADirectoryError):
        fail(function, "path", "be a file that exists", path, "")
    except csv.Error as error:
        at = text.line if text else 1
        fail(function, "path", "be a CSV file", f"{path} ({error} in line {at})", "Mend it.")
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        got = f"{path} ({type(error).__name__})"
        fail(function, "path", "be a CSV file that can be read", got, "Save it as UTF-8.")


@contextmanager
def _open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file, or the standard input, to be read more than once; what is compressed comes decompressed."""
    with ExitStack() as stack:
        piped = path == Path("-")
        file: BinaryIO = sys.stdin.buffer if piped else stack.enter_context(path.open("rb"))
        if piped or not file.seekable():
            copy = cast(BinaryIO, stack.enter_context(TemporaryFile()))
            shutil.copyfileobj(file, copy)
            file = copy
        file.seek(0)
        if file.read(2) == b"\x1f\x8b":
            file.seek(0)
            file = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))
        yield file


def _survey(function: str, path: Path, file: BinaryIO) -> tuple[int, str, int]:
    """Return where the text of a file begins, its encoding, and the number of lines that start with ``#``.

    The whole file is looked at: decoding takes a second or two per GB, a tenth of what reading cells does, and no row
    is read before the encoding is certain. Text is UTF-8 if it says so, or if more of its bytes above ASCII fit into
    UTF-8 than do not: then those that do not are damage, and an error.
    """
    file.seek(0)
    head = file.read(3)
    mark = next((mark for mark in DECLARED if head.startswith(mark)), b"")
    encoding = DECLARED.get(mark, "utf-8")
    file.seek(len(mark))
    decoder = codecs.getincrementaldecoder(encoding)("strict" if encoding != "utf-8" else "surrogateescape")
    lines, comments, good, bad, last = 1, 0, 0, 0, "\n"
    first_bad = first_binary = 0  # their lines

    def refuse(what: str, line: int) -> NoReturn:
        fail(function, "path", "be a CSV file that can be read", f"{path} ({what} in line {line})", "Save it as UTF-8.")

    for chunk in chain(iter(partial(file.read, CHUNK), b""), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            refuse("no UTF-16", lines + error.object[: error.start].decode(encoding, "ignore").count("\n"))
        if not text.isascii():
            whole, kept = (len(text.encode("utf-8", errors)) for errors in ("surrogateescape", "ignore"))
            good += kept - (len(text) - (whole - kept))
            bad += whole - kept
            if whole > kept:
                found, binary = ESCAPED.search(text), NO_TEXT.search(text)
                first_bad = first_bad or lines + text.count("\n", 0, found.start() if found else 0)
                first_binary = first_binary or (lines + text.count("\n", 0, binary.start()) if binary else 0)
        comments += (last + text).count("\n#")
        lines += text.count("\n")
        last = text[-1:] or last
    if bad and (mark or good >= bad):
        refuse("no UTF-8", first_bad)
    if bad and first_binary:
        refuse("neither UTF-8 nor Latin-1", first_binary)
    return len(mark), "cp1252" if bad else encoding, comments


class _Text:
    """The text of a file, which can be read again from its start."""

    def __init__(self, file: BinaryIO, start: int, encoding: str) -> None:
        self.file, self.start, self.encoding = file, start, encoding
        self.line = 0  #: The number of the last line that was read.
        self.row = 0  #: The number of the line on which the last row begins.
        self._whole = True  #: Was that the end of a row? If not, the next line begins in a quoted cell.

    def read_lines(self, skipped: int = 0, *, comments: bool = False) -> Generator[str, None, None]:
        """Yield the lines after those skipped, without comments; raise a csv.Error at one that no table can have."""
        self.file.seek(self.start)
        self.line, self._whole = 0, True
        text = io.TextIOWrapper(self.file, self.encoding, newline="")
        try:
            while line := text.readline(LONGEST + 1):
                self.line += 1
                if "\0" in line or len(line) > LONGEST:
                    raise csv.Error("binary data" if "\0" in line else "no end of the line")
                if self.line > skipped and not (comments and self._whole and line[0] == "#"):
                    self.row, self._whole = self.line if self._whole else self.row, False
                    yield line
        finally:
            text.detach()  # else it would close the file

    def read_records(self, delimiter: str, skipped: int, *, comments: bool) -> Generator[list[str], None, None]:
        """Yield the cells of each row; those of an empty line are []."""
        with closing(self.read_lines(skipped, comments=comments)) as lines:
            for cells in csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True):
                self._whole = True
                yield cells

    def sample(self, delimiter: str, skipped: int, *, comments: bool) -> tuple[list[list[str]], bool]:
        """Return the first rows and whether they can be read."""
        rows: list[list[str]] = []
        try:
            with closing(self.read_records(delimiter, skipped, comments=comments)) as records:
                rows.extend(islice(filter(_is_full, records), SAMPLE))
        except csv.Error:
            return rows, False
        return rows, True


def _is_full(cells: list[str]) -> bool:
    return cells not in ([], [""])


def _find_layout(text: _Text, n_comments: int) -> tuple[tuple[str, int, bool], list[str]]:
    """Return what stands between cells, how many lines to skip and whether comments follow; and notes on these."""
    skipped, leading, last, last_at = 0, 0, "", 0
    with closing(text.read_lines()) as lines:
        for line in lines:
            if line[0] == "#":
                leading, last, last_at = leading + 1, line, text.line
            elif line.strip():
                break
            skipped = text.line

    def judge(delimiter: str) -> tuple[bool, int, int]:
        rows, readable = text.sample(delimiter, skipped, comments=True)
        width = len(rows[0]) if rows else 0
        return readable and width > 1 and all(len(row) == width for row in rows), width, sum(map(len, rows))

    delimiter = max(DELIMITERS, key=judge)
    rows, _ = text.sample(delimiter, skipped, comments=False)
    width = len(rows[0]) if rows else 0
    # The last comment is the header if it fits above numbers: "#,name,weight", or what numpy.savetxt writes.
    titled = leading > 0 and width > 1 and last.count(delimiter) == width - 1 and any(map(_is_number, rows[0]))
    marked = sum(row[0].startswith("#") and len(row) == width for row in rows[1:])
    comments = not titled and 2 * marked <= len(rows) - 1
    left_out = n_comments if comments else leading - titled
    notes = [f"cells are separated by {DELIMITERS[delimiter]}"] if delimiter != "," and width > 1 else []
    if left_out:
        notes.append(f"{left_out} comment line{'s' if left_out > 1 else ''} (#) left out")
    if marked and not comments and not titled:
        notes.append("lines that start with # are rows")
    return (delimiter, last_at - 1 if titled else skipped, comments), notes


def _check_rows(
    function: str, path: Path, text: _Text, records: Iterator[list[str]]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line and the cells of each row; raise an InputError at one of another table."""
    header = next(filter(_is_full, records), None)
    if header is None:
        return
    yield text.row, header
    width, after_gap, numeric = len(header), False, None

    def refuse(what: str) -> NoReturn:
        fail(function, "path", "hold one table", f"{what} of {path}", "Save each table as a file of its own.")

    for cells in records:
        line = text.row
        if len(cells) != width:
            if not _is_full(cells):
                after_gap = True
                continue
            following = next(filter(_is_full, records), None)
            if after_gap or (following is not None and len(following) == len(cells)):
                refuse(f"rows of {width} cells, and of {len(cells)} from line {line}")
            fail(function, "path", f"have {width} cells per row", f"{len(cells)} in line {line}", "Mend that line.")
        if cells == header:
            refuse(f"the header again in line {line}")
        if numeric is None:
            numeric = [column for column, cell in enumerate(cells) if _is_number(cell)]
        if after_gap and numeric and _is_header(cells, numeric):
            refuse(f"another header after an empty line in line {line}")
        after_gap = False
        yield line, cells


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True


def _is_header(cells: list[str], numeric: list[int]) -> bool:
    """Do cells name columns, some of which held numbers so far?"""
    names = [cell.strip() for cell in cells]
    distinct = len(set(names)) == len(names) and not any(name == "" or _is_number(name) for name in names)
    return distinct and all(names[column].lower() not in GAPS for column in numeric)
