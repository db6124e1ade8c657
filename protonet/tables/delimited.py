"""Tables of text, row by row: encoding, separator and header are settled for a whole file before its first row.

What is a row is settled here for every format that people type into: comments and titles stand above the header, every
line below it is a row, also where its cells are empty, but for lines without anything.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, NamedTuple, NoReturn, cast

from protonet._text import escape_control_chars, to_printable, unescape_formula
from protonet.errors import raise_input_error, raise_missing_file

LONGEST = 2**26  #: Most characters in a line of a table: a file without line ends must not fill the memory.
#: What may stand between cells. Of those that cut the first rows equally well the first is taken: commas are more often
#: part of a number or of a text than semicolons are.
DELIMITERS = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas"}
#: Between the cells of a table of one column, which may hold any of the others: a character that no text has.
ALONE = "\uffff"
#: Lines of comments that are looked at for a header, and rows of one cell that may stand above a header of one.
MOST_COMMENTS, MOST_TITLES = 10_000, 10
#: The note that says so, unless they are commas.
SEPARATED = "cells are separated by {}"
SAMPLE = 100  #: Rows that settle what stands between cells, and where the header is.
#: The line by which Excel is told what stands between cells.
TOLD = re.compile(r'"?sep=([^"\w\s]|\t)"?')
CHUNK = 2**22  #: Bytes that are looked at at a time.
DECLARED = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
#: Bytes that are no text in Windows-1252, as surrogates where they are above ASCII.
NO_TEXT = re.compile("[\0-\x08\x0e-\x1f\udc81\udc8d\udc8f\udc90\udc9d]")
ESCAPED = re.compile("[\udc80-\udcff]")
#: An apostrophe that may guard a cell, and control characters, as UTF-8 has them.
GUARD_BYTES = re.compile(rb"'[\s']*(?:[=+@-]|\xef\xbc[\x8b\x8d\x9d\xa0])")
CONTROL_BYTES = re.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
#: Characters of a cell, at the most: the csv module's own limit is that of a short book's chapter.
LONGEST_CELL = 2**24
#: What a spreadsheet shows where there is no value, in lower case.
ERRORS = frozenset(
    {"#n/a", "#div/0!", "#name?", "#null!", "#num!", "#ref!", "#value!", "#getting_data", "#spill!", "#calc!"}
    | {"#field!", "#blocked!", "#connect!", "#unknown!", "#python!", "#busy!", "#external!"}
)
#: What stands for a missing label or cell in any letter case, beside empty cells and ``ERRORS``; `--missing-values`.
MISSING_VALUES = ("NA", "N/A", "n.a.", "<NA>", "NaN", "NaT", "null", "None", "missing", "?", "-", "--", ".")
#: All of them, in lower case.
GAPS = ERRORS | {"", *map(str.lower, MISSING_VALUES)}


def read_rows(
    path: Path, notes: list[str] | None = None, *, names: Collection[str] = ()
) -> Iterator[tuple[int, list[str]]]:
    """Read a table of text row by row, the header first.

    Cells stand between commas, semicolons, tabs or bars, the same in the whole file, and may be quoted; or each line is
    one cell. Text is UTF-8, UTF-16 with its mark, or else Windows-1252, which holds Latin-1. Lines that start with
    ``#`` above the header are comments; so are titles above it, rows of fewer cells. Below it every line is a row, one
    of separators alone too; only empty lines are not, as for `pandas.read_csv`.

    Control characters come as escapes, the ends of lines within cells as ``\\n``, and the apostrophe that
    `protonet._text.escape_formula` puts before a formula is removed.

    Args:
        path: The file, which may be compressed by gzip; "-" for the standard input.
        notes: Takes what a person should be told: of how the file is read before the header is yielded, of empty lines
            behind the last row.
        names: Columns that the table should have, which tell the separator and the header where these could be several.

    Yields:
        The number of the line on which it begins, from 1, and the cells of each row.

    Raises:
        InputError: The file does not exist or cannot be read, a row has not as many cells as the header, or another
            table follows.
    """
    text, notes = None, [] if notes is None else notes
    try:
        with _open_bytes(path) as file:
            text = _Text(file, _survey(path, file))
            delimiter, above, found = _find_layout(text, names)
            notes += ["it is not UTF-8: read as Latin-1 (Windows-1252)"] * (text.survey.encoding == "cp1252") + found
            with closing(text.read_records(delimiter, above)) as records:
                yield from _check_rows(path, text, records, notes)
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except csv.Error as error:
        at, alone = text.line if text else 1, repr(ALONE) in str(error)
        what = "text behind a closing quote" if alone else error
        raise_input_error("path", "be a CSV file", f"{path} ({what} in line {at})", "Mend it.")
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        got = f"{path} ({type(error).__name__})"
        raise_input_error("path", "be a CSV file that can be read", got, "Save it as UTF-8.")


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


class Survey(NamedTuple):
    """What the whole file tells before its first row is read."""

    start: int  #: Where its text begins.
    encoding: str
    controls: bool  #: Whether there may be control characters, ...
    guards: bool  #: ... and marks that keep a cell from being a formula: looking for them takes time.


def _survey(path: Path, file: BinaryIO) -> Survey:
    """Look at a whole file.

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
    lines, good, bad, edge = 1, 0, 0, b""
    controls = guards = encoding != "utf-8"  # which has no bytes to look for
    first_bad = first_binary = 0  # their lines

    def refuse_text(what: str, line: int) -> NoReturn:
        raise_input_error(
            "path", "be a CSV file that can be read", f"{path} ({what} in line {line})", "Save it as UTF-8."
        )

    for chunk in chain(iter(partial(file.read, CHUNK), b""), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            refuse_text("no UTF-16", lines + error.object[: error.start].decode(encoding, "ignore").count("\n"))
        if not text.isascii():
            whole, kept = (len(text.encode("utf-8", errors)) for errors in ("surrogateescape", "ignore"))
            good += kept - (len(text) - (whole - kept))
            bad += whole - kept
            if whole > kept:
                found, binary = ESCAPED.search(text), NO_TEXT.search(text)
                first_bad = first_bad or lines + text.count("\n", 0, found.start() if found else 0)
                first_binary = first_binary or (lines + text.count("\n", 0, binary.start()) if binary else 0)
        looked, edge = edge + chunk, chunk[-8:]  # what is sought may begin in one chunk and end in the next
        controls = controls or CONTROL_BYTES.search(looked) is not None
        guards = guards or GUARD_BYTES.search(looked) is not None
        lines += text.count("\n")
    if bad and (mark or good >= bad):
        refuse_text("no UTF-8", first_bad)
    if bad and first_binary:
        refuse_text("neither UTF-8 nor Latin-1", first_binary)
    return Survey(len(mark), "cp1252" if bad else encoding, controls, guards)


class _Text:
    """The text of a file, which can be read again from its start."""

    def __init__(self, file: BinaryIO, survey: Survey) -> None:
        self.file, self.survey = file, survey
        self.line = 0  #: The number of the last line that was read.
        self.row = 0  #: The number of the line on which the last row begins.
        self.bare = False  #: Has the last line nothing but spaces, not even quotes or what stands between cells?
        self._whole = True  #: Was that the end of a row? If not, the next line begins in a quoted cell.

    def read_lines(self, above: int = 0) -> Generator[str, None, None]:
        """Yield the lines below the first ones; raise a csv.Error at one that no table can have."""
        self.file.seek(self.survey.start)
        self.line, self._whole = 0, True
        text = io.TextIOWrapper(self.file, self.survey.encoding)
        try:
            while line := text.readline(LONGEST + 1):
                self.line += 1
                if "\0" in line or len(line) > LONGEST:
                    raise csv.Error("binary data" if "\0" in line else "no end of the line")
                if self.line > above:
                    self.row, self._whole = self.line if self._whole else self.row, False
                    line = escape_control_chars(line) if self.survey.controls else line
                    self.bare = line.isspace()
                    yield line
        finally:
            text.detach()  # else it would close the file

    def read_records(self, delimiter: str, above: int) -> Generator[list[str], None, None]:
        """Yield the cells of each row; those of an empty line are []."""
        with closing(self.read_lines(above)) as lines:
            csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
            for cells in csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True):
                self._whole = True
                self.bare = self.bare and len(cells) < 2
                yield [unescape_formula(cell.strip()) for cell in cells] if self.survey.guards else cells

    def sample(self, delimiter: str, above: int) -> tuple[list[tuple[int, list[str]]], bool]:
        """Return the first rows with any cell, each with the line on which it begins, and whether they can be read."""
        rows: list[tuple[int, list[str]]] = []
        try:
            with closing(self.read_records(delimiter, above)) as records:
                stripped = ((self.row, list(map(str.strip, cells))) for cells in records)
                rows.extend(islice((row for row in stripped if any(row[1])), SAMPLE))
        except csv.Error:
            return rows, False
        return rows, True


def _find_layout(text: _Text, names: Collection[str]) -> tuple[str, int, list[str]]:
    """Return what stands between cells, how many lines stand above the header, and notes on these."""
    above, told = 0, None
    comments: list[tuple[int, str]] = []  # which may hold quotes that are none: they are read a line at a time
    with closing(text.read_lines()) as lines:
        for line in islice(lines, MOST_COMMENTS):
            if text.line == 1 and (told := TOLD.fullmatch(line.rstrip("\n"))):
                pass
            elif line[0] == "#":
                comments.append((text.line, line))
            elif line.strip():
                break
            above = text.line

    def look(delimiter: str) -> tuple[list[tuple[int, list[str]]], int, tuple[bool, bool, int, float]]:
        """Return the first rows, with their lines, which of them is the header, and how good that is."""
        below, readable = text.sample(delimiter, above)
        split = csv.reader((line for _, line in comments), delimiter=delimiter, quoting=csv.QUOTE_NONE)
        rows = [
            (at, [unescape_formula(cell.strip()) for cell in cells])
            for (at, _), cells in zip(comments, split, strict=True)
        ]
        rows += below
        header = find_header([cells for _, cells in rows], names, certain=told is not None)
        widths = [len(cells) for _, cells in rows[header:]] or [0]
        named = bool(rows and names) and set(names) <= set(rows[header][1])
        agree = readable and widths[0] > 1 and len(set(widths)) == 1
        return rows, header, (named, agree, widths[0], math.inf if delimiter == ALONE else sum(widths))

    looks = {each: look(each) for each in ([told[1]] if told else [*DELIMITERS, ALONE])}
    delimiter = max(looks, key=lambda each: looks[each][2])
    rows, header, (_, _, width, _) = looks[delimiter]
    between = DELIMITERS.get(delimiter, repr(delimiter))
    notes = [SEPARATED.format(between)] if delimiter != "," and width > 1 else []
    note_titles(notes, [cells for _, cells in rows[:header]])
    return delimiter, rows[header][0] - 1 if rows else above, notes


def find_header(rows: Sequence[Sequence[str]], names: Collection[str] = (), *, certain: bool = True) -> int:
    """Return which of the first rows of a table is its header: the first one below comments and titles.

    The header is where the names are that it should have. Otherwise it is the last comment if that names the columns:
    "#,name,weight", or what numpy.savetxt writes; or it is below titles.

    Args:
        rows: Of cells without spaces around them, "" for none.
        names: Columns that the table should have.
        certain: Is it known what stands between cells?
    """
    comments = next((number for number, cells in enumerate(rows) if not _is_comment(cells)), 0)
    most = 0  # cells of a title so far
    for number, cells in enumerate(rows):
        full = sum(map(bool, cells))
        fits = not number or (_are_names(cells) and (full > most or (full == 1 and number <= MOST_TITLES)))
        if fits and names and set(names) <= set(cells):
            return number
        most = most if number < comments else max(most, full)
    if comments and _is_commented_header(rows[comments - 1], rows[comments:]):
        return comments - 1
    return comments + _count_titles(rows[comments:], certain=certain)


def _is_commented_header(comment: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return whether a comment names the columns of the rows below it, rather than the first of these.

    It does above numbers. Without these it does if it looks like names, "#id", unlike "# by hand", and if the first row
    has no name above numbers.
    """
    first, *others = below
    if len(comment) != len(first):
        return False
    if len(first) > 1 and any(map(is_number, first)):
        return True
    above = (bool(others) and all(len(row) > at and is_number(row[at]) for row in others) for at in range(len(first)))
    return " " not in comment[0] and "".join(comment) != "#" and _are_names(comment) and not any(above)


def _count_titles(rows: Sequence[Sequence[str]], *, certain: bool) -> int:
    """Return how many of some rows are titles above the header.

    The header is the first row of as many cells as most rows have. What is above it are titles if it holds names, and
    if each has one cell, followed by separators, or if there are numbers below names, and no title but one has several
    cells. Where the lines may also be texts in one column, and commas part of these, all rows have to have as many
    cells: three or more, or two numbers.
    """
    widths = Counter(len(cells) for cells in rows if len(cells) > 1)
    width = max(widths, key=lambda each: (widths[each], each), default=0)
    at = next((number for number, cells in enumerate(rows) if len(cells) == width and sum(map(bool, cells)) > 1), 0)
    titles, below = rows[:at], rows[at + 1 :]
    if not titles or not below or len(below[0]) != width or not _are_names(rows[at]):
        return 0
    several = [cells for cells in titles if sum(map(bool, cells)) > 1]
    if not several and all(len(cells) == width and cells[0] for cells in titles):
        return at
    numbers = sum(map(is_number, below[0]))
    narrow = len(several) <= 1 and all(len(cells) < width and not any(map(is_number, cells)) for cells in several)
    constant = all(len(cells) == width for cells in below)
    return at if narrow and numbers and (certain or (constant and (numbers > 1 or width > 2))) else 0


def _is_comment(cells: Sequence[str]) -> bool:
    """Return whether a row above the header is a comment."""
    return cells[0][:1] == "#"


def _check_rows(
    path: Path, text: _Text, records: Iterator[list[str]], notes: list[str]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line and the cells of each row; raise an InputError at one of another table."""
    header = next((cells for cells in records if not text.bare), None)
    if header is None:
        return
    yield text.row, header
    width, numeric = len(header), None
    title = (
        f"If the header, line {text.row} ({to_printable(', '.join(filter(None, header))[:50])!r}), is a title, drop it."
    )
    n_empty = empty = usual = 0  # empty lines: all of them, since the last row, and below the header

    def refuse_table(what: str) -> NoReturn:
        remedy = f"Save each table as a file of its own, without what is no row. {title}"
        raise_input_error("path", "hold one table", f"{what} of {path}", remedy)

    for cells in records:
        line = text.row
        if text.bare:
            n_empty, empty = n_empty + 1, empty + 1
            continue
        if len(cells) != width:
            following = next((cells for cells in records if not text.bare), None)
            if empty or (following is not None and len(following) == len(cells) and cells[0][:1] != "#"):
                refuse_table(f"rows of {width} cells, and of {len(cells)} from line {line}")
            remedy = "Comments stand above the header: remove it." if cells[0][:1] == "#" else "Mend that line."
            raise_input_error(
                "path", f"have {width} cells per row", f"{len(cells)} in line {line}", f"{remedy} {title}"
            )
        if any(map(str.strip, cells)):
            if width > 1 and cells == header:
                refuse_table(f"the header again in line {line}")
            if numeric is None:
                numeric, usual = [column for column, cell in enumerate(cells) if is_number(cell)], empty
            if empty > usual and 2 * len(numeric) >= width > 1 and _is_header(cells, numeric):
                refuse_table(f"another header after an empty line in line {line}")
            empty = 0
        yield line, cells
    if n_empty:
        notes.append(f"{n_empty} empty line{'s' if n_empty > 1 else ''} below the header: no row{'s' * (n_empty > 1)}")


def note_titles(notes: list[str], rows: Sequence[Sequence[str]]) -> None:
    """Add what stood above the header, if anything."""
    titles = [next(filter(None, cells)) for cells in rows if not _is_comment(cells)]
    comments, several = len(rows) - len(titles), len(titles) > 1
    notes += [f"{comments} comment line{'s' * (comments > 1)} (#) left out"] * (comments > 0)
    if titles:
        first = f"{to_printable(titles[0][:50])!r}{' ...' * several}"
        notes.append(f"{len(titles)} row{'s' * several} above the header left out: {first}")


def is_number(cell: str) -> bool:
    """Return whether a cell is a number, with a point or a comma."""
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True


def _are_names(cells: Sequence[str]) -> bool:
    """Return whether cells may be the names of columns: different ones, none of them a number."""
    full = [cell for cell in cells if cell]
    return len(set(full)) == len(full) and not any(map(is_number, full))


def _is_header(cells: list[str], numeric: list[int]) -> bool:
    """Do cells name columns, some of which held numbers so far?"""
    names = [cell.strip() for cell in cells]
    return all(names) and _are_names(names) and all(names[column].lower() not in GAPS for column in numeric)
