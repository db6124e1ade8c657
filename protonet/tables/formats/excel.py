"""Read sheets of workbooks, which are not trusted, with the cells that openpyxl does not read."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from lzma import LZMAError
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from zipfile import ZipFile, is_zipfile

from protonet._text import closest_match, normalize_spelling, plural
from protonet.errors import UserError, optional_packages, raise_input_error, raise_missing_file
from protonet.tables import delimited
from protonet.tables.encodings import open_bytes
from protonet.tables.formats.arrays import ARRAY_READ_ERRORS
from protonet.tables.formats.source import TableSource, convert_objects, make_column_reader, object_to_text

#: The names of all sheets, the name of the sheet that is read, its rows, () for blank ones, and notes for the user.
WorkbookContent = tuple[list[str], str, list[Sequence[object]], list[str]]
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
            _raise_too_many_cells(max_cells, number)
    return lines + [()] * (number - len(lines))


def _raise_too_many_cells(max_cells: int, row: int) -> NoReturn:
    """Raise an InputError for a sheet with more than ``max_cells`` cells up to a row."""
    must = f"have at most {max_cells:,} cells, with blank ones between others"
    remedy = "Delete the rows and columns beyond the table, or save the sheet as CSV."
    raise_input_error("path", must, f"more up to row {row:,}", remedy)


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


def _read_with_openpyxl(file: BinaryIO, sheet: str | None) -> WorkbookContent:
    """Read a sheet of a workbook of Excel 2007 or later, with the percentages and codes that Excel shows."""
    with optional_packages("excel"):
        from openpyxl import load_workbook  # noqa: PLC0415 - optional

    book = load_workbook(file, read_only=True, data_only=True, keep_links=False)
    sheets = {worksheet.title: worksheet for worksheet in book.worksheets}
    title = next(iter(sheets)) if sheet is None else sheet
    lines, notes = list[Sequence[object]](), list[str]()
    if title in sheets:
        sheets[title].reset_dimensions()  # some programs write wrong ones
        with sheets[title]._get_source() as source:  # openpyxl reads merged cells with all styles only: slow
            xml = source.read()
        max_cells = max(2**20, 4 * len(xml))  # a filled cell takes 30 bytes
        lines = read_excel_rows(iterate_shown_rows(sheets[title]), max_cells)
        notes += fill_merged_cells(lines, xml, max_cells)
        if n_formulas := len(FORMULA_WITHOUT_VALUE.findall(xml)):
            notes.append(f"{plural(n_formulas, 'formula')} without a value: save the workbook in a spreadsheet")
    return list(sheets), title, lines, notes


def _read_with_calamine(file: BinaryIO, sheet: str | None) -> WorkbookContent:
    """Read a sheet of a workbook of OpenDocument, of old Excel or of binary Excel; percentages are fractions."""
    with optional_packages("excel"):
        from python_calamine import CalamineError, CalamineWorkbook  # noqa: PLC0415 - optional

    def convert(cell: object) -> object:
        # All numbers are floats, and empty cells are "".
        whole = isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53
        return int(cell) if whole else None if cell == "" else cell  # type: ignore[call-overload]

    size = file.seek(0, io.SEEK_END)
    if is_zipfile(file):
        with ZipFile(file) as archive:
            size = sum(part.file_size for part in archive.infolist())
    file.seek(0)
    max_cells = max(2**20, size)  # a cell takes several bytes, but a repeated row none
    rows: Sequence[Sequence[object]] = []
    try:
        book = CalamineWorkbook.from_filelike(file)
        title = book.sheet_names[0] if sheet is None else sheet
        if title in book.sheet_names:
            found = book.get_sheet_by_name(title)
            height, width = (index + 1 for index in found.end or (-1, -1))
            if height * width > max_cells:
                _raise_too_many_cells(max_cells, height)
            rows = found.to_python(skip_empty_area=False)
    except CalamineError as error:
        raise ValueError(str(error)) from error
    return book.sheet_names, title, read_excel_rows((tuple(map(convert, row)) for row in rows), max_cells), []


def open_workbook(path: Path, suffix: str, names: Collection[str] = (), sheet: str | None = None) -> TableSource:
    """Open a sheet of a workbook of Excel or of OpenDocument as a table; its header is located as in delimited text.

    The ``suffix`` names the format of the file, which may be the standard input.
    """
    try:
        with open_bytes(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about styles and the like, which tables do not need
            if is_zipfile(file):
                check_workbook_parts(file)
            file.seek(0)
            read = _read_with_openpyxl if suffix in {".xlsx", ".xlsm"} else _read_with_calamine
            sheets, title, lines, notes = read(file, sheet)
    except (FileNotFoundError, IsADirectoryError):
        raise_missing_file(path)
    except UserError:
        raise
    except (*ARRAY_READ_ERRORS, LZMAError, AttributeError, AssertionError, StopIteration) as error:
        got, remedy = f"{path} ({type(error).__name__})", "Save the sheet as CSV."
        raise_input_error("path", "be a workbook that can be read", got, remedy)
    if title not in sheets:
        similar = closest_match(title, list(sheets))
        remedy = f"{'' if similar is None else f'Did you mean {similar!r}? '}It has {', '.join(map(repr, sheets))}."
        raise_input_error("sheet", f"name a sheet of {path}", repr(title), remedy)
    filled = [index for index, line in enumerate(lines) if any(map(has_content, line))]  # rows with content, from 0
    first_rows = filled[: delimited.N_LAYOUT_DETECTION_ROWS]
    sample = [[object_to_text(cell) for cell in lines[index]] for index in first_rows]
    max_width = max(map(len, sample), default=0)
    sample = [cells + [""] * (max_width - len(cells)) for cells in sample]
    header_index = delimited.locate_header(sample, names)
    first, end = (filled[header_index], filled[-1] + 1) if filled else (0, 0)
    others = ", ".join(repr(name) for name in sheets if name != title)
    sheet_note = f"sheet {title!r}; `sheet` names another one: {others}" if others else ""
    notes += [sheet_note] * bool(others)
    delimited.add_title_notes(notes, sample[:header_index])
    n_blank = len(lines) - end if filled else 0
    notes += [f"{n_blank} blank row{'s' if n_blank > 1 else ''} at the end skipped"] * (n_blank > 0)
    rows = lines[first:end]
    width = max((index for row in rows for index, cell in enumerate(row, 1) if _has_valid_value(cell)), default=0)
    if width > 1 and rows[0] in rows[1:]:
        got = f"the header again in row {first + 2 + rows[1:].index(rows[0])} of {path}, sheet {title!r}"
        raise_input_error("path", "hold one table", got, "Save each table in its own sheet.")
    transposed = list(islice(zip_longest(*rows), width))
    header = [normalize_spelling(object_to_text(cells[0])) for cells in transposed]
    valid = ([cell if _has_valid_value(cell) else None for cell in cells[1:]] for cells in transposed)
    positions = range(first + 2, end + 1)  # Excel counts from 1
    return TableSource(
        header=header,
        n_columns=width,
        position_format="row {}",
        read_chunks=make_column_reader(list(map(convert_objects, valid)), positions),
        notes=notes,
        n_rows=len(positions),
        sheet_note=f" ({sheet_note})" if others else "",
    )


def _has_valid_value(cell: object) -> bool:
    """Test whether an Excel cell has content other than an error value."""
    return has_content(cell) and not (isinstance(cell, str) and cell.strip().lower() in delimited.SPREADSHEET_ERRORS)
