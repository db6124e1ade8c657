"""Workbooks of few bytes that would take much time or memory, and damaged ones."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZipFile

import pytest

from protonet import InputError
from protonet.tables.formats import open_table_source

openpyxl = pytest.importorskip("openpyxl")
SHEET, BOOK, STYLES = "xl/worksheets/sheet1.xml", "xl/workbook.xml", "xl/styles.xml"
ROWS = [["a", "kind"], [1.5, "x"], [2.5, "y"]]


def make_parts() -> dict[str, bytes]:
    """Return the parts of a small workbook by name."""
    book, file = openpyxl.Workbook(), io.BytesIO()
    for row in ROWS:
        book.active.append(row)
    book.save(file)
    with ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_book(path: Path, parts: dict[str, bytes], compression: int = ZIP_DEFLATED) -> Path:
    with ZipFile(path, "w", compression) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return path


def add_rows(xml: str, after: str = "") -> dict[str, bytes]:
    """Return the parts of the workbook with further rows, and further elements after the rows."""
    parts = make_parts()
    more = parts[SHEET].replace(b"</sheetData>", f"{xml}</sheetData>{after}".encode())
    return parts | {SHEET: more}


def cell(reference: str) -> str:
    row = re.sub("[A-Z]", "", reference)
    return f'<row r="{row}"><c r="{reference}"><v>1</v></c></row>'


@pytest.mark.parametrize("row", [2**20 + 1, 10**7, 10**12])
def test_rows_beyond_those_of_excel_are_refused(tmp_path: Path, row: int) -> None:
    path = write_book(tmp_path / "x.xlsx", add_rows(cell(f"A{row}")))
    assert path.stat().st_size < 6000
    match = r"^`path` must have at most 1,048,576 rows and 16,384 columns; got a cell beyond them in row 1,048,577\."
    with pytest.raises(InputError, match=match):
        open_table_source(path)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (lambda: add_rows(cell("XFE9")), "16,384 columns; got a cell beyond them in row 9"),
        (lambda: add_rows(cell("B1048576")), "at most 1,048,576 cells, with blank ones between others"),
        (lambda: add_rows("".join(cell(f"XFD{row}") for row in range(9, 90))), "at most 1,048,576 cells, with blank"),
        (lambda: add_rows(" " * 10**7), "compressed to 1/100 at most; got 10,0.* bytes"),
        (
            lambda: add_rows(cell("A2000"), "<mergeCells>" + '<mergeCell ref="A2:A2000"/>' * 600 + "</mergeCells>"),
            "at most 1,048,576 merged cells; got more",
        ),
        (
            lambda: make_parts() | {BOOK: make_parts()[BOOK].replace(b"<sheet ", b"<sheet /><!--\n--><sheet " * 600)},
            "at most 1,000 sheets",
        ),
        (
            lambda: make_parts() | {STYLES: b"<numFmt formatCode='" + random.Random(0).randbytes(3000).hex().encode()},
            "number formats of at most 255 characters",
        ),
        (
            lambda: add_rows(f'<row><c t="str"><v>{random.Random(0).randbytes(20_000).hex()}</v></c></row>'),
            "at most 32,767 characters in a cell, and .*; got more in row 4",
        ),
    ],
)
def test_small_files_take_little_memory(tmp_path: Path, parts: object, match: str) -> None:
    assert callable(parts)
    path = write_book(tmp_path / "x.xlsx", parts())
    with pytest.raises(InputError, match=f"^`path` must have .*{match}"):
        open_table_source(path)


def test_formulas_are_counted_in_linear_time(tmp_path: Path) -> None:
    """A comment may hold any number of beginnings of a cell."""
    noise = "".join(f"<c {number:x}" for number in range(10**5))
    source = open_table_source(write_book(tmp_path / "x.xlsx", add_rows(f"<!--{noise}-->")))
    assert (source.header, source.n_rows) == (["a", "kind"], 2)


def test_blank_cells_far_below_are_ignored(tmp_path: Path) -> None:
    """A click at the end of a sheet leaves a styled cell in its last row."""
    path = write_book(tmp_path / "x.xlsx", add_rows('<row r="1048576"><c r="B1048576" s="0"/></row>'))
    source = open_table_source(path)
    assert source.notes == ["1048573 blank rows at the end skipped"]
    assert [len(chunk.positions) for chunk in source.read_chunks([0, 1])] == [2]


def test_mutated_workbooks_are_read_or_refused(tmp_path: Path) -> None:
    draw, valid, refused = random.Random(0), make_parts(), 0
    for _ in range(60):
        name, parts = draw.choice([SHEET, SHEET, BOOK, STYLES, "[Content_Types].xml"]), dict(valid)
        content = bytearray(parts[name])
        for _ in range(draw.randint(1, 3)):
            at = draw.choice([index for index, byte in enumerate(content) if chr(byte).isalnum()])
            content[at : at + 1] = draw.choice([b"", b"9" * 30, b"-1", b"1048577", b"<", b"&x;", b"\xff", b"1e308"])
        parts[name] = bytes(content)
        path = write_book(tmp_path / "x.xlsx", parts, draw.choice([ZIP_DEFLATED, ZIP_LZMA]))
        if draw.random() < 0.3:
            damaged = bytearray(path.read_bytes())
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
        try:
            open_table_source(path)
        except InputError:
            refused += 1
    assert 10 < refused < 60


def test_repeated_rows_of_opendocument_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    cell = '<table:table-cell office:value-type="float" office:value="1" table:number-columns-repeated="{}"/>'
    row = '<table:table-row table:number-rows-repeated="{}">{}</table:table-row>'
    names = {kind: f"urn:oasis:names:tc:opendocument:xmlns:{kind}:1.0" for kind in ("office", "table", "text")}
    spaces = " ".join(f'xmlns:{kind}="{name}"' for kind, name in names.items())
    for rows, columns, is_refused in ((200_000, 30, True), (2000, 30, False)):
        names_row = "".join(
            f"<table:table-cell office:value-type='string'><text:p>c{i}</text:p></table:table-cell>"
            for i in range(columns)
        )
        content = row.format(1, names_row) + row.format(rows - 1, cell.format(columns))
        table = f'<table:table table:name="S">{content}</table:table>'
        body = f"<office:body><office:spreadsheet>{table}</office:spreadsheet></office:body>"
        with ZipFile(tmp_path / "x.ods", "w", ZIP_DEFLATED) as archive:
            archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
            archive.writestr("META-INF/manifest.xml", "<manifest/>")
            archive.writestr("content.xml", f"<office:document-content {spaces}>{body}</office:document-content>")
        if is_refused:
            with pytest.raises(InputError, match=r"^`path` must have at most 1,048,576 cells, .* up to row 200,000\."):
                open_table_source(tmp_path / "x.ods")
        else:
            assert open_table_source(tmp_path / "x.ods").n_columns == 30
