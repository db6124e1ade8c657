"""Files that other programs write: JSON, SQLite, ARFF, Feather, OpenDocument, ZIP archives, and unknown ones."""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pytest
from scipy.io import arff

from protonet.errors import InputError
from protonet.tables.formats import open_table_source
from protonet.tables.formats.source import TableSource

FRAME = pd.DataFrame({"x": [1.5, 2.0, np.nan], "n": [1, 2, 3], "soil": ["clay", None, "größe"]})
EXPECTED = [[1.5, 2.0, np.nan], [1, 2, 3], ["clay", "", "größe"]]


def read(source: TableSource) -> tuple[list[list[Any]], list[int]]:
    (chunk,) = source.read_chunks(range(source.n_columns))
    return [column.tolist() for column in chunk.columns], list(chunk.positions)


def write_sqlite(path: Path, **tables: pd.DataFrame) -> Path:
    with closing(sqlite3.connect(path)) as database:
        for name, frame in tables.items():
            frame.to_sql(name, database, index=False)
    return path


def test_tables_of_other_programs_equal_the_frame(tmp_path: Path) -> None:
    FRAME.to_json(tmp_path / "a.json", orient="records")
    FRAME.to_json(tmp_path / "b.jsonl", orient="records", lines=True)
    FRAME.to_feather(tmp_path / "c.feather")
    write_sqlite(tmp_path / "d.sqlite", plants=FRAME)
    (tmp_path / "e.json.gz").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    with ZipFile(tmp_path / "f.zip", "w") as archive:
        archive.write(tmp_path / "b.jsonl", "folder/b.jsonl")
        archive.writestr("__MACOSX/b.jsonl", "")
    for path in sorted(tmp_path.iterdir()):
        source = open_table_source(path)
        assert (source.header, source.n_rows, source.notes) == ([*FRAME], 3, []), path
        columns, positions = read(source)
        np.testing.assert_equal(columns, EXPECTED)
        assert positions == ([1, 2, 3] if path.name in {"b.jsonl", "f.zip"} else [0, 1, 2])
    FRAME.to_csv(tmp_path / "g.csv.zip", index=False)
    assert open_table_source(tmp_path / "g.csv.zip").header == [*FRAME]


def test_texts_with_line_separators_of_unicode_are_read(tmp_path: Path) -> None:
    records = [{"text": f"a{separator}b", "n": 1} for separator in ("\u2028", "\u2029", "\u0085", " ")]
    lines = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (tmp_path / "x.jsonl").write_bytes(f"{lines}\r\n".encode())
    source = open_table_source(tmp_path / "x.jsonl")
    assert source.n_rows == 4


def test_one_row_of_embeddings_and_huge_integers_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"v": [1, 2.5], "n": 3}]')
    (tmp_path / "y.jsonl").write_text('{"v": [1, 2.5], "n": 3}\n')
    for name in ("x.json", "y.jsonl"):
        source = open_table_source(tmp_path / name)
        assert (source.n_columns, source.n_rows) == (3, 1)
    (tmp_path / "z.json").write_text(json.dumps([{"n": 10**400}, {"n": 2}]))
    assert read(open_table_source(tmp_path / "z.json"))[0] == [[str(10**400), "2"]]


def test_archives_that_cannot_be_unpacked_are_refused(tmp_path: Path) -> None:
    for name, changes in {"password.csv.zip": {6: 1}, "deflate64.csv.zip": {8: 9}}.items():
        with ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("x.csv", "a,b\n1,2\n")
        content = bytearray((tmp_path / name).read_bytes())
        for start, shift in ((0, 0), (content.index(b"PK\1\2"), 2)):  # of the file, and in the directory
            for at, value in changes.items():
                content[start + at + shift] = value
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=r"^`path` must be a CSV file that can be read; got .*zip \("):
            open_table_source(tmp_path / name)


def test_errors_of_records_name_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"a": 1}]')
    (tmp_path / "x.arff").write_text("@relation x\n@attribute a numeric\n")
    for name in ("x.json", "x.arff"):
        with pytest.raises(InputError, match=r"^`encoding` must name an encoding; got 'bogus'\."):
            open_table_source(tmp_path / name, encoding="bogus")
    with pytest.raises(InputError, match=r"got .*x\.arff \(StopIteration\)"):
        open_table_source(tmp_path / "x.arff")
    path = write_sqlite(tmp_path / "x.sqlite", a=FRAME)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE a")
        database.commit()
    with pytest.raises(InputError, match=r"^`path` must be a database with tables; got .*x\.sqlite, which has none\."):
        open_table_source(path)


def test_json_lists_of_numbers_become_columns(tmp_path: Path) -> None:
    records = [{"text": "a", "v": [1, 2.5]}, {"v": [3, 4.0], "b": True}, {"text": 7, "v": None}]
    (tmp_path / "x.json").write_text(json.dumps(records))
    source = open_table_source(tmp_path / "x.json")
    assert source.header == ["text", "v_0", "v_1", "b"]
    np.testing.assert_equal(read(source)[0], [["a", "", "7"], [1, 3, np.nan], [2.5, 4, np.nan], ["", "True", ""]])


def test_arff_equals_scipy(tmp_path: Path) -> None:
    text = "@relation r\n@attribute x numeric\n@attribute soil {clay,'rich peat'}\n@attribute d date 'yyyy-MM-dd'\n"
    (tmp_path / "x.arff").write_text(f"{text}@data\n1.5,'rich peat',2024-02-03\n?,?,2024-02-04\n")
    columns, _ = read(open_table_source(tmp_path / "x.arff"))
    rows, _ = arff.loadarff(tmp_path / "x.arff")
    np.testing.assert_equal(columns[0], rows["x"].tolist())
    assert columns[1] == ["rich peat", ""]
    assert np.array_equal(np.array(columns[2], "datetime64[us]"), rows["d"])


def test_a_table_of_a_database_is_named_like_a_sheet(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "x.db", plants=FRAME, soils=FRAME[["n"]])
    assert open_table_source(path, sheet="soils").header == ["n"]
    with pytest.raises(InputError, match=r"^`sheet` must name a table of .*; got none\. It has plants, soils\.$"):
        open_table_source(path)
    with pytest.raises(InputError, match=r"got 'plant'\. Did you mean 'plants'\?"):
        open_table_source(path, sheet="plant")


def make_ods_cell(cell: object) -> str:
    kind = "'string'>" if isinstance(cell, str) else f"'float' office:value='{cell}'>"
    return f"<table:table-cell office:value-type={kind}<text:p>{cell}</text:p></table:table-cell>"


def test_opendocument_is_read_by_calamine(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    names = {name: f"urn:oasis:names:tc:opendocument:xmlns:{name}:1.0" for name in ("office", "table", "text")}
    declared = " ".join(f"xmlns:{name}='{address}'" for name, address in names.items())
    rows: list[list[object]] = [["x", "kind"], [2, "oak"], [2.5, "elm"]]
    cells = "".join(f"<table:table-row>{''.join(map(make_ods_cell, row))}</table:table-row>" for row in rows)
    body = f"<office:body><office:spreadsheet><table:table table:name='A'>{cells}</table:table>"
    content = f"<office:document-content {declared}>{body}</office:spreadsheet></office:body></office:document-content>"
    with ZipFile(tmp_path / "x.ods", "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("META-INF/manifest.xml", "<manifest/>")
        archive.writestr("content.xml", content)
    source = open_table_source(tmp_path / "x.ods")
    assert source.header == ["x", "kind"]
    assert read(source) == ([[2, 2.5], ["oak", "elm"]], [2, 3])
    (tmp_path / "bad.xls").write_bytes(b"no workbook")
    with pytest.raises(InputError, match=r"^`path` must be a workbook that can be read; got .*bad\.xls"):
        open_table_source(tmp_path / "bad.xls")


def test_a_workbook_from_the_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FRAME.to_excel(tmp_path / "x.xlsx", index=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "x.xlsx").read_bytes())))
    source = open_table_source(Path("-"))
    np.testing.assert_equal(read(source)[0], EXPECTED)


def test_other_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    FRAME.to_json(tmp_path / "columns.json")
    (tmp_path / "damaged.json").write_text('[{"a": 1},')
    (tmp_path / "nested.json").write_text('[{"a": {"b": 1}}, {"a": 2}]')
    (tmp_path / "x.db").write_bytes(b"no database, but long enough to have a header" * 9)
    (tmp_path / "x.arff").write_text("@relation r\n@attribute s string\n@data\na\n")
    with ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.csv", "a\n1\n")
        archive.writestr("b.csv", "a\n1\n")
    with ZipFile(tmp_path / "book.zip", "w") as archive:
        archive.writestr("a.xlsx", "")
    (tmp_path / "bad.zip").write_bytes(b"PK\3\4")
    for name, message in (
        ("columns.json", r"`path` must be a list of objects.*python -c .*pandas\.read_json\("),
        ("damaged.json", r"`path` must be a list of objects, or one object per line; got .*JSONDecodeError"),
        ("nested.json", r"`path` must have cells of text, numbers or equally many numbers; got others in column a"),
        ("x.db", r"`path` must be a SQLite database that can be read; got .*not a database"),
        ("none.db", "no such file"),
        ("x.arff", r"`path` must be a dense ARFF file .*CSVSaver"),
        ("two.zip", r"`path` must hold one file, if it is a ZIP archive; got 2 in .*: a\.csv, b\.csv\. Unpack it"),
        ("book.zip", r"`path` must hold a file of text, if it is a ZIP archive; got a \.xlsx file"),
        ("bad.zip", r"`path` must be a ZIP archive that can be read; got .*BadZipFile"),
        ("x.dta", r"`path` must end in .*python -c .*pandas\.read_stata\(.*x\.csv"),
        ("x.rds", r"`path` must end in .*Rscript -e .*readRDS"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            open_table_source(tmp_path / name)
