"""Limits of Excel workbooks, which are not trusted, and cells of sheets that openpyxl does not read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from lzma import LZMAError
from typing import Any, BinaryIO
from zipfile import ZipFile

from protonet._text import plural
from protonet.errors import raise_input_error

#: Further exceptions that openpyxl raises for damaged workbooks.
EXCEL_READ_ERRORS = (LZMAError, AttributeError, AssertionError, StopIteration)
#: Matches column, first and last row of a merged cell in the XML of a sheet.
_MERGED_CELL = re.compile(rb'mergeCell ref="([A-Z]{1,3})(\d{1,7}):[A-Z]+(\d{1,7})"')
#: Matches a formula without a value, not even "".
FORMULA_WITHOUT_VALUE = re.compile(rb'<c (?![^<>]*t="str")[^<>]*><f[^<>]*>[^<]*</f>(?:<v ?/>|<v></v>)?</c>')
#: Limits of Excel: rows and columns of a sheet, and characters of a cell.
#: Source: https://support.microsoft.com/office/1672b34d-7043-467e-8e27-269d656771c3 (specifications and limits)
MAX_EXCEL_ROWS, MAX_EXCEL_COLUMNS, MAX_EXCEL_CHARACTERS = 2**20, 2**14, 2**15 - 1


def check_workbook_parts(file: BinaryIO) -> None:
    """Raise an InputError if a workbook, which is a ZIP archive, would take too much time or memory to parse."""
    # Bytes of all parts, as for the text of a model file; their ratio to the stored ones is 25 for equal cells. Any
    # number of sheets may name the same part, and openpyxl begins to parse it for each. Its time for a number format is
    # quadratic; Excel allows 255 characters, which are written in up to six each.
    max_bytes, max_ratio, max_sheets, max_format = 2**28, 100, 1000, 6 * 255
    with ZipFile(file) as archive:
        parts = archive.infolist()
        size, stored = sum(part.file_size for part in parts), sum(part.compress_size for part in parts)
        if size > max_bytes or any(part.file_size > max_ratio * part.compress_size for part in parts):
            must = f"have parts of at most {max_bytes:,} bytes, each compressed to 1/{max_ratio} at most"
            raise_input_error("path", must, f"{size:,} from {stored:,} bytes", "Save the sheet as CSV.")
        n_sheets = longest = 0
        for part in parts:
            if part.filename.endswith(("workbook.xml", "styles.xml")):
                xml = archive.read(part)
                n_sheets += len(re.findall(rb"<(?:\w+:)?sheet\s", xml))
                longest = max([longest, *map(len, re.findall(rb"formatCode\s*=\s*(\"[^\"]*|'[^']*)", xml))])
        if n_sheets > max_sheets or longest > max_format:
            must = f"have at most {max_sheets:,} sheets, and number formats of at most 255 characters"
            raise_input_error("path", must, "more", "Save the sheet as CSV.")


def iterate_shown_rows(sheet: Any) -> Iterator[tuple[object, ...]]:
    """Yield the cells of each row of a sheet of openpyxl as Excel shows them: percentages, and codes such as 00123."""
    from openpyxl.styles.numbers import BUILTIN_FORMATS  # noqa: PLC0415 - optional

    custom = dict(enumerate(sheet.parent._number_formats, 164))  # Excel numbers its own formats up to 163
    codes = {style.numFmtId: (BUILTIN_FORMATS | custom).get(style.numFmtId, "") for style in sheet.parent._cell_styles}
    percents = {number for number, code in codes.items() if "%" in code}
    widths = {number: len(code) for number, code in codes.items() if re.fullmatch("00+", code)}
    if not percents and not widths:  # most workbooks; values alone are read faster
        yield from sheet.iter_rows(values_only=True)
        return

    def show(cell: Any) -> object:
        value, number = cell.value, getattr(cell, "style_array", None) and cell.style_array.numFmtId
        if type(value) not in {int, float} or (number not in percents and number not in widths):
            return value
        return f"{100 * value:.12g}%" if number in percents else f"{value:0{widths[number]}.0f}"

    for row in sheet.iter_rows():
        yield tuple(map(show, row))


def read_excel_rows(rows: Iterable[tuple[object, ...]], max_cells: int) -> list[Sequence[object]]:
    """Read the rows of a sheet, () for blank ones; raise an InputError if it is beyond the limits of Excel.

    ``max_cells`` includes blank cells, as two filled cells may be as far apart as the corners of a sheet.
    """
    max_characters = 2**28  # of all cells, which may share a text
    lines: list[Sequence[object]] = []
    n_read = n_characters = width = number = 0
    for number, line in enumerate(rows, 1):
        if number > MAX_EXCEL_ROWS or len(line) > MAX_EXCEL_COLUMNS:
            must = f"have at most {MAX_EXCEL_ROWS:,} rows and {MAX_EXCEL_COLUMNS:,} columns"
            raise_input_error("path", must, f"a cell beyond them in row {number:,}", "Save the sheet as CSV.")
        if not line:
            continue
        n_read += len(line)
        if any(map(has_content, line)):
            lines += [()] * (number - 1 - len(lines))
            lines.append([*line])
            width = max(width, len(line))
            lengths = [len(cell) for cell in line if isinstance(cell, str)]
            n_characters += sum(lengths)
            if max(lengths, default=0) > MAX_EXCEL_CHARACTERS or n_characters > max_characters:
                must = f"have at most {MAX_EXCEL_CHARACTERS:,} characters in a cell, and {max_characters:,} in all"
                raise_input_error("path", must, f"more in row {number:,}", "Save the sheet as CSV.")
        if max(n_read, len(lines) * width) > max_cells:
            must = f"have at most {max_cells:,} cells, with blank ones between others"
            remedy = "Delete the rows and columns beyond the table, or save the sheet as CSV."
            raise_input_error("path", must, f"more up to row {number:,}", remedy)
    return lines + [()] * (number - len(lines))


def fill_merged_cells(lines: list[Sequence[object]], xml: bytes, max_cells: int) -> list[str]:
    """Copy the value of each merged cell in the ``xml`` of a sheet to all of its ``lines``; return a list of a note.

    Raises an InputError for more than ``max_cells`` cells, since merged cells of an invalid sheet may overlap.
    """
    from openpyxl.utils import column_index_from_string  # noqa: PLC0415 - optional

    n_filled = n_added = 0
    for letters, first, last in _MERGED_CELL.findall(xml):
        column, rows = column_index_from_string(letters.decode()) - 1, range(int(first), min(int(last), len(lines)))
        value = lines[rows.start - 1][column : column + 1] if rows else ()
        if not any(map(has_content, value)):
            continue
        n_filled += len(rows)
        n_added += sum(max(0, column + 1 - len(lines[row])) for row in rows)
        if n_filled + n_added > max_cells:
            raise_input_error("path", f"have at most {max_cells:,} merged cells", "more", "Save the sheet as CSV.")
        for row in rows:
            cells = line if isinstance(line := lines[row], list) else [*line]
            cells += [None] * (column + 1 - len(cells))
            cells[column], lines[row] = value[0], cells
    return [f"{plural(n_filled, 'cell')} filled from merged cells above"] * (n_filled > 0)


def has_content(cell: object) -> bool:
    """Test whether an Excel cell has content, which may be an error value."""
    return cell is not None and not (isinstance(cell, str) and not cell.strip())
