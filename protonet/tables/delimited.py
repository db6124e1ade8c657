"""Stream the rows of delimited text. Encoding, separator and header are determined before the first row is read.

Comments and titles are above the header. Every line below the header is a row, even if all its cells are empty. Blank
lines are skipped.
"""

from __future__ import annotations

import csv
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from lzma import LZMAError
from pathlib import Path
from typing import BinaryIO, NoReturn
from zipfile import BadZipFile

from protonet._text import escape_control_chars, join_digit_groups, plural, to_printable, unescape_formula
from protonet.errors import raise_input_error, raise_missing_file
from protonet.tables.encodings import detect_encoding, open_bytes

_EXPONENT = r"(?:[eE][-+]?\d+)?"
# Groups of thousands, or of lakhs as in India. The first group never begins with 0: "0,205" has a decimal comma.
_COMMA_GROUPED_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3})"
POINT_GROUPED_DIGITS = r"(?:[1-9]\d{0,2}(?:\.\d{3})+|[1-9]\d?(?:\.\d{2})+\.\d{3})"
POINT_NUMBER_PATTERN = re.compile(rf"[-+]?(?:{_COMMA_GROUPED_DIGITS}(?:\.\d*)?|\d+\.?\d*|\.\d+)" + _EXPONENT)
COMMA_NUMBER_PATTERN = re.compile(rf"[-+]?(?:{POINT_GROUPED_DIGITS}(?:,\d*)?|\d+,?\d*|,\d+)" + _EXPONENT)
MAX_LINE_CHARS = 2**26  #: Maximum characters of a line, so that a file without line ends does not fill the memory.
#: Maximum characters of a cell; the default limit of the csv module is too small for long texts.
MAX_CELL_CHARS = 2**24
#: Separators of cells and their names. The first wins among those that split the first rows equally well: commas are
#: more often part of a number or a text than semicolons are.
DELIMITERS = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas"}
#: The separator for tables of one column, whose cells may contain any of the others: a character that no text contains.
NO_DELIMITER = "\uffff"
#: Maximum number of comment lines that are searched for a header, and of rows above a header of a single cell.
MAX_COMMENT_LINES, MAX_TITLE_ROWS = 10_000, 10
#: The note to the user that names the separator, unless it is a comma.
DELIMITER_NOTE = "cells are separated by {}"
#: The note to the user that names an encoding that was guessed.
ENCODING_NOTE = "the file is not UTF-8: read as {}; `encoding` names another encoding"
N_LAYOUT_DETECTION_ROWS = 100  #: Number of rows from which the separator and the header are detected.
#: Matches the first line of files that declare their separator for Excel, such as "sep=;".
EXCEL_DELIMITER_LINE = re.compile(r'"?sep=([^"\w\s]|\t)"?')
#: Matches the sign before a quoted cell that keeps spreadsheets from reading a number, as in ="007".
_EXCEL_TEXT_CELL_PREFIX = re.compile(r"(?:(?<=[\t;|,])|^)=(?=\"[^\"]*\"(?:[\t;|,]|\s*$))")
#: Matches rules of tables for people, without spaces around them: |---|:-:|, +===+===+, ---+---, and "--- ---".
_RULE_LINE = re.compile(
    r"\|(?:\s*:?-+:?\s*\|)+|\+(?:[-=]{2,}\+)+|\|?:?[-=]{2,}:?(?:\s*[|+]\s*:?[-=]{2,}:?)+\|?"
    r"|[-=]{3,}(?:[,;\t ]+[-=]{3,})+"
)
#: Minimum rows below the header, cells per row and columns of numbers of text that is split at spaces.
MIN_SPACED_ROWS, MIN_SPACED_CELLS, MIN_SPACED_NUMERIC_COLUMNS = 4, 3, 2
#: Error values of spreadsheets, in lower case.
SPREADSHEET_ERRORS = frozenset(
    {"#n/a", "#div/0!", "#name?", "#null!", "#num!", "#ref!", "#value!", "#getting_data", "#spill!", "#calc!"}
    | {"#field!", "#blocked!", "#connect!", "#unknown!", "#python!", "#busy!", "#external!"}
)
#: Texts that mean a missing label or cell, in any letter case, besides empty cells and ``SPREADSHEET_ERRORS``.
DEFAULT_MISSING_VALUES = ("NA", "N/A", "n.a.", "<NA>", "NaN", "NaT", "null", "None", "missing", "?", "-", "--", ".")
#: All texts that mean "missing", in lower case.
MISSING_TEXTS = SPREADSHEET_ERRORS | {"", *map(str.lower, DEFAULT_MISSING_VALUES)}
#: Members of ``MISSING_TEXTS`` that are class names in a column of labels, such as "none" beside "mild" and "severe".
CLASS_NAME_TEXTS = frozenset({"none", "missing"})


def parse_missing_texts(values: Iterable[str]) -> frozenset[str]:
    """Return the texts that mean "missing", in lower case: those of the user, "", and error values of spreadsheets."""
    return SPREADSHEET_ERRORS | {"", *(value.strip().lower() for value in values)}


def read_delimited_rows(
    path: Path,
    notes: list[str] | None = None,
    *,
    names: Collection[str] = (),
    text_column: str | None = None,
    has_header: bool = True,
    encoding: str | None = None,
    usual_encoding: str | None = None,
) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of delimited text, beginning with the header.

    Cells are separated by commas, semicolons, tabs or bars, the same in the whole file, and may be quoted; or by
    spaces, if rows have equally many cells and some columns are numbers; or each line is one cell. Text is UTF-8,
    UTF-16, UTF-32 with a byte order mark, or of an encoding that is guessed.

    Above the header, lines that start with ``#`` are comments, and rows of fewer cells are titles. Below the header,
    every line is a row, even a line of separators only. Blank lines are skipped, as by `pandas.read_csv`, and so are
    the rules of Markdown and text tables, such as ``|---|---|``.

    Control characters are escaped, line ends within cells become line feeds, and the apostrophe that
    `protonet._text.escape_formula` puts before a formula is removed.

    Args:
        path: The file; "-" is the standard input.
        notes: Notes for the user are added to this list: before the header is yielded, how the file is read; after the
            last row, the number of blank lines.
        names: Names of expected columns, which help to detect the separator and the header.
        text_column: The name of the only column, if the file may be a list of texts with one text per line. If it has
            no separators, and no header with this name, it is such a list. This name is then yielded as the header, at
            line 0.
        has_header: Whether the first row names the columns. Otherwise, the names "1", "2" and so on are yielded as the
            header, at line 0.
        encoding: The encoding of the text; None to detect it.
        usual_encoding: The encoding of an earlier file, which is preferred if the text is not Unicode.

    Raises:
        InputError: The file cannot be read, its rows have different numbers of cells, or a second table begins.
    """
    text, notes = None, [] if notes is None else notes
    try:
        with open_bytes(path) as file:
            text = _TextFile(path, file, encoding, usual_encoding)
            delimiter, lines_above, layout_notes, header = _detect_layout(text, names, text_column, has_header)
            notes += [ENCODING_NOTE.format(text.encoding)] * text.is_encoding_guessed
            notes += layout_notes
            with closing(text.read_records(delimiter, lines_above)) as records:
                yield from _iterate_checked_rows(path, text, records, notes, header)
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except csv.Error as error:
        line, after_quote = text.line if text else 1, NO_DELIMITER in str(error)
        reason = "text behind a closing quote" if after_quote else error
        raise_input_error("path", "be a CSV file", f"{path} ({reason} in line {line})", "Correct that line.")
    except (OSError, EOFError, zlib.error, LZMAError, BadZipFile, RuntimeError, UnicodeError) as error:
        got = f"{path} ({type(error).__name__})"
        raise_input_error("path", "be a CSV file that can be read", got, "Save it as UTF-8.")


class _TextFile:
    """A text file with a given or a detected encoding, which can be read repeatedly from its start."""

    def __init__(self, path: Path, file: BinaryIO, encoding: str | None = None, usual: str | None = None) -> None:
        self.file = file
        self.line = 0  #: The number of the last line that was read.
        self.row_start = 0  #: The number of the line on which the last row begins.
        self.is_blank = False  #: Whether the last row is a line of spaces, without quotes or separators.
        self._row_ended = True  #: Whether the last line ends a row, rather than continues within a quoted cell.
        self._has_apostrophe = False  #: Whether the last row has an apostrophe, which may escape a formula.
        self.n_rules = 0  #: The number of skipped lines such as ``|---|---|``.
        detected = detect_encoding(path, file, encoding, usual)
        self.start, self.encoding, self.is_encoding_guessed, self.has_control_chars = detected

    def read_lines(self, skip: int = 0) -> Generator[str, None, None]:
        """Yield the lines below the first ``skip`` lines; raise a csv.Error for binary data or an endless line."""
        self.file.seek(self.start)
        self.line, self._row_ended, self.n_rules = 0, True, 0
        text = io.TextIOWrapper(self.file, self.encoding)
        try:
            while line := text.readline(MAX_LINE_CHARS + 1):
                self.line += 1
                if "\0" in line or len(line) > MAX_LINE_CHARS:
                    raise csv.Error("binary data" if "\0" in line else "no end of the line")
                if self._row_ended and line[0] in "|+-=: " and _RULE_LINE.fullmatch(line.strip()):
                    self.n_rules += 1
                elif self.line > skip:
                    self.row_start, self._row_ended = self.line if self._row_ended else self.row_start, False
                    self._has_apostrophe |= "'" in line
                    self.is_blank = line.isspace()
                    line = _EXCEL_TEXT_CELL_PREFIX.sub("", line) if '="' in line else line
                    yield escape_control_chars(line) if self.has_control_chars else line
        finally:
            text.detach()  # otherwise it closes the file

    def read_records(self, delimiter: str, skip: int) -> Generator[list[str], None, None]:
        """Yield the cells of each row below the first ``skip`` lines; blank lines are empty lists."""
        with closing(self.read_lines(skip)) as lines:
            csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL_CHARS))
            stripped = (f"{line.rstrip()}\n" for line in lines) if delimiter == " " else lines
            for cells in csv.reader(stripped, delimiter=delimiter, skipinitialspace=True, strict=True):
                may_have_formula, self._has_apostrophe, self._row_ended = self._has_apostrophe, False, True
                self.is_blank = self.is_blank and len(cells) < 2
                yield [unescape_formula(cell.strip()) for cell in cells] if may_have_formula else cells

    def read_first_rows(self, delimiter: str, skip: int) -> tuple[list[tuple[int, list[str]]], bool]:
        """Parse the first non-empty rows below the first ``skip`` lines.

        Returns:
            The line number and the cells of at most ``N_LAYOUT_DETECTION_ROWS`` rows, and whether all could be parsed.
        """
        rows: list[tuple[int, list[str]]] = []
        try:
            with closing(self.read_records(delimiter, skip)) as records:
                stripped = ((self.row_start, list(map(str.strip, cells))) for cells in records)
                rows.extend(islice((row for row in stripped if any(row[1])), N_LAYOUT_DETECTION_ROWS))
        except csv.Error:
            return rows, False
        return rows, True


def _detect_layout(
    text: _TextFile, names: Collection[str], text_column: str | None, has_header: bool
) -> tuple[str, int, list[str], list[str] | None]:
    """Detect the separator, the number of lines to skip, notes, and the header if it is not the next line."""
    skip, declared = 0, None
    comments: list[tuple[int, str]] = []  # they may contain single quotes: each line is parsed by itself
    with closing(text.read_lines()) as lines:
        for line in islice(lines, MAX_COMMENT_LINES):
            if text.line == 1 and (declared := EXCEL_DELIMITER_LINE.fullmatch(line.rstrip("\n"))):
                pass
            elif line[0] == "#":
                comments.append((text.line, line))
            elif line.strip():
                break
            skip = text.line

    def try_delimiter(delimiter: str) -> tuple[list[tuple[int, list[str]]], int, tuple[bool, bool, int, float]]:
        """Parse the first rows with a separator; return the rows, the index of the header, and a score to maximize."""
        sample, readable = text.read_first_rows(delimiter, skip)
        split = csv.reader((line for _, line in comments), delimiter=delimiter, quoting=csv.QUOTE_NONE)
        rows = [
            (line, [unescape_formula(cell.strip()) for cell in cells])
            for (line, _), cells in zip(comments, split, strict=True)
        ]
        rows += sample
        header = (
            locate_header([cells for _, cells in rows], names, certain=declared is not None)
            if has_header
            else min(len(comments), len(rows) - 1)
        )
        widths = [len(cells) for _, cells in rows[header:]] or [0]
        has_names = bool(rows and names) and set(names) <= set(rows[header][1])
        equal_widths = readable and widths[0] > 1 and len(set(widths)) == 1
        n_cells = math.inf if delimiter == NO_DELIMITER else sum(widths)
        return rows, header, (has_names, equal_widths, widths[0], n_cells)

    candidates = [declared[1]] if declared else [*DELIMITERS, NO_DELIMITER]
    layouts = {delimiter: try_delimiter(delimiter) for delimiter in candidates}
    delimiter = max(layouts, key=lambda candidate: layouts[candidate][2])
    if not declared and delimiter == NO_DELIMITER:
        spaced_rows, spaced_header, (has_names, *_) = layouts[" "] = try_delimiter(" ")
        head, *below = [cells for _, cells in spaced_rows[spaced_header:]] or [[]]
        numbered = not has_header and set(names) <= {str(1 + column) for column in range(len(head))}
        if (len(names) > 1 and (has_names or numbered)) or _are_spaced_columns(head, below, has_header=has_header):
            delimiter = " "
    rows, header, (has_names, equal_widths, width, _) = layouts[delimiter]
    cells = [row for _, row in rows]
    is_named = bool(declared) or has_names or (bool(rows) and cells[header] == [text_column])
    # Texts have commas and semicolons, in different numbers. One column may be all that is expected.
    is_list = width == 1 or set(names) == {text_column} or (delimiter in {",", ";"} and not equal_widths)
    if text_column is not None and rows and is_list and not is_named:
        notes = [f"each line is a text of column {to_printable(text_column)}, also the first: there is no header"]
        add_title_notes(notes, [[line] for _, line in comments])
        return NO_DELIMITER, skip, notes, [text_column]
    name = "spaces" if delimiter == " " else DELIMITERS.get(delimiter, repr(delimiter))
    notes = [DELIMITER_NOTE.format(name)] if delimiter != "," and width > 1 else []
    if not has_header:
        add_title_notes(notes, cells[: len(comments)])
        return delimiter, skip, notes, [str(1 + column) for column in range(width)]
    add_title_notes(notes, cells[:header])
    if rows and _have_row_names(cells[header], cells[header + 1 :], names):
        return delimiter, rows[header][0], notes, ["", *cells[header]]
    return delimiter, rows[header][0] - 1 if rows else skip, notes, None


def _are_spaced_columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, has_header: bool) -> bool:
    """Test whether first rows of a file, split at spaces, are columns and not texts, which differ in their length."""
    if len(rows) < MIN_SPACED_ROWS or len(rows[0]) < MIN_SPACED_CELLS or len({len(cells) for cells in rows}) > 1:
        return False
    fits = len(header) == len(rows[0]) and (not has_header or _could_be_column_names(header))
    columns = ([cell for cell in column if cell.lower() not in MISSING_TEXTS] for column in zip(*rows, strict=True))
    n_numeric = sum(bool(cells) and all(map(is_decimal_number, cells)) for cells in columns)
    return (fits or _have_row_names(header, rows)) and n_numeric >= MIN_SPACED_NUMERIC_COLUMNS


def _have_row_names(header: Sequence[str], rows: Sequence[Sequence[str]], names: Collection[str] = ()) -> bool:
    """Test whether each row begins with a name for which the header has no cell, as R writes tables by default.

    The header has the expected ``names`` then, or the first row has a number or a missing value. Otherwise that row is
    the header, and what seems to be the header is a title.
    """
    if not rows or any(len(cells) != len(header) + 1 for cells in rows) or not any(cells[-1] for cells in rows):
        return False
    is_row = any(is_decimal_number(cell) or cell.lower() in MISSING_TEXTS for cell in rows[0])
    row_names = [cells[0] for cells in rows]
    is_header = _could_be_column_names(header) and (is_row or (bool(names) and set(names) <= set(header)))
    return is_header and all(row_names) and len(set(row_names)) == len(row_names)


def locate_header(rows: Sequence[Sequence[str]], names: Collection[str] = (), *, certain: bool = True) -> int:
    """Locate the header among the first rows of a table, which may begin with comments and titles; return its index.

    The header is the row with the expected ``names``. Without such a row, it is the last comment if that has column
    names, such as "#,name,weight" or the comment that numpy.savetxt writes, or else the first row below comments and
    titles. If the separator is not ``certain``, the rows may be texts with commas.
    """
    n_comments = next((index for index, cells in enumerate(rows) if not _is_comment(cells)), 0)
    max_title_cells = 0
    for index, cells in enumerate(rows):
        n_filled = sum(map(bool, cells))
        is_wider = n_filled > max_title_cells or (n_filled == 1 and index <= MAX_TITLE_ROWS)
        if names and set(names) <= set(cells) and (not index or (_could_be_column_names(cells) and is_wider)):
            return index
        max_title_cells = max_title_cells if index < n_comments else max(max_title_cells, n_filled)
    if n_comments and _is_commented_header(rows[n_comments - 1], rows[n_comments:]):
        return n_comments - 1
    return n_comments + _count_titles(rows[n_comments:], certain=certain)


def _is_commented_header(comment: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Test whether a comment has names as cells, and is the header rather than the first of the rows ``below``."""
    first, *others = below
    if len(comment) != len(first):
        return False
    if len(first) > 1 and any(map(is_decimal_number, first)):
        return True
    above_values = (
        bool(others) and all(len(row) > column and is_decimal_number(row[column]) for row in others)
        for column in range(len(first))
    )
    is_unspaced = " " not in comment[0] and "".join(comment) != "#"
    return is_unspaced and _could_be_column_names(comment) and not any(above_values)


def _count_titles(rows: Sequence[Sequence[str]], *, certain: bool) -> int:
    """Count the titles above the header among the first rows of a table; 0 if the first row is the header.

    The header is the first row with the most frequent number of cells. The rows above it are titles if it consists of
    names, and one of two conditions is met. Either each title is one cell followed by separators. Or there are numbers
    below the names, and at most one title has several cells.

    If the separator is not ``certain``, the lines may be texts with commas. Then the second condition also requires
    that all rows below the header have the same number of cells, and either three cells or two numbers.
    """
    width_counts = Counter(len(cells) for cells in rows if len(cells) > 1)
    width = max(width_counts, key=lambda width: (width_counts[width], width), default=0)
    wide = (index for index, cells in enumerate(rows) if len(cells) == width and sum(map(bool, cells)) > 1)
    header = next(wide, 0)
    titles, below = rows[:header], rows[header + 1 :]
    if not titles or not below or len(below[0]) != width or not _could_be_column_names(rows[header]):
        return 0
    long_titles = [cells for cells in titles if sum(map(bool, cells)) > 1]
    if not long_titles and all(len(cells) == width and cells[0] for cells in titles):
        return header
    n_numeric = sum(map(is_decimal_number, below[0]))
    no_numbers = not any(is_decimal_number(cell) for cells in long_titles for cell in cells)
    narrow = len(long_titles) <= 1 and no_numbers and all(len(cells) < width for cells in long_titles)
    is_table = certain or (all(len(cells) == width for cells in below) and (n_numeric > 1 or width > 2))
    return header if narrow and n_numeric and is_table else 0


def _is_comment(cells: Sequence[str]) -> bool:
    """Test whether a row is a comment: its first cell starts with "#"."""
    return cells[0][:1] == "#"


def _iterate_checked_rows(
    path: Path, text: _TextFile, records: Iterator[list[str]], notes: list[str], header: list[str] | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of the header and of each row; raise an InputError for rows that misfit."""
    is_first_row = header is None
    header = header or next((cells for cells in records if not text.is_blank), None)
    if header is None:
        return
    header_line = text.row_start if is_first_row else 0
    yield header_line, header
    width, numeric = len(header), None
    quoted = repr(to_printable(", ".join(filter(None, header))[:50]))
    header_hint = f"If the header, line {header_line} ({quoted}), is a title, drop it." if is_first_row else ""
    n_blank = n_blank_before = usual_blank = 0  # blank lines: in total, before this row, and below the header

    def raise_second_table(reason: str) -> NoReturn:
        remedy = f"Save each table in its own file, without other lines. {header_hint}"
        raise_input_error("path", "hold one table", f"{reason} of {path}", remedy)

    for cells in records:
        line = text.row_start
        if text.is_blank:
            n_blank, n_blank_before = n_blank + 1, n_blank_before + 1
            continue
        if len(cells) == width + 1 and not cells[-1].strip():  # a separator behind the last cell
            del cells[-1]
        if len(cells) == width - 1 and not header[-1].strip():  # a separator behind the last name
            cells.append("")
        if len(cells) != width:
            following = next((cells for cells in records if not text.is_blank), None)
            same_width_follows = following is not None and len(following) == len(cells) and not _is_comment(cells)
            if n_blank_before or same_width_follows:
                raise_second_table(f"rows of {width} cells, and of {len(cells)} from line {line}")
            remedy = "Comments stand above the header: remove it." if _is_comment(cells) else "Correct that line."
            got = f"{len(cells)} in line {line}"
            raise_input_error("path", f"have {width} cells per row", got, f"{remedy} {header_hint}")
        if any(map(str.strip, cells)):
            if width > 1 and is_first_row and cells == header:
                raise_second_table(f"the header again in line {line}")
            if numeric is None:
                numeric = [column for column, cell in enumerate(cells) if is_decimal_number(cell)]
                usual_blank = n_blank_before
            mostly_numeric = 2 * len(numeric) >= width > 1
            if n_blank_before > usual_blank and mostly_numeric and _is_second_header(cells, numeric):
                raise_second_table(f"another header after an empty line in line {line}")
            n_blank_before = 0
        yield line, cells
    notes += [f"{plural(n_blank, 'empty line')} below the header skipped"] * (n_blank > 0)
    notes += [f"{plural(text.n_rules, 'rule line')} such as |---|---| skipped"] * (text.n_rules > 0)


def add_title_notes(notes: list[str], rows: Sequence[Sequence[str]]) -> None:
    """Add notes about the ``rows`` above the header, which are comments and titles, to the notes for the user."""
    titles = [next(filter(None, cells)) for cells in rows if not _is_comment(cells)]
    n_comments, several = len(rows) - len(titles), len(titles) > 1
    if n_comments:
        notes.append(f"{n_comments} comment line{'s' * (n_comments > 1)} (#) skipped")
    if titles:
        first = f"{to_printable(titles[0][:50])!r}{' ...' * several}"
        notes.append(f"{len(titles)} row{'s' * several} above the header skipped: {first}")


def is_decimal_number(cell: str) -> bool:
    """Test whether a cell is a number with a decimal point or comma, perhaps in groups of three digits."""
    text = join_digit_groups(cell)
    return (POINT_NUMBER_PATTERN.fullmatch(text) or COMMA_NUMBER_PATTERN.fullmatch(text)) is not None


def _could_be_column_names(cells: Sequence[str]) -> bool:
    """Test whether cells may be column names: different ones, none of them a number."""
    filled = [cell for cell in cells if cell]
    return len(set(filled)) == len(filled) and not any(map(is_decimal_number, filled))


def _is_second_header(cells: list[str], numeric_columns: list[int]) -> bool:
    """Test whether a row may be a second header: it has only names, even in the ``numeric_columns``."""
    names = [cell.strip() for cell in cells]
    replaced = [names[column].lower() for column in numeric_columns]
    return all(names) and _could_be_column_names(names) and MISSING_TEXTS.isdisjoint(replaced)
