"""Files of every format, compared with pandas, pyarrow and openpyxl; untidy, invalid and damaged files."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from zipfile import ZipFile

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from protonet._text import unescape_formula
from protonet.datasets import load_csv
from protonet.errors import InputError
from protonet.tables.formats import open_table_source
from protonet.tables.formats import source as table_source
from protonet.tables.formats.source import TableSource
from protonet.tables.table import ReadSpec, read_table
from tests.strategies import EXAMPLES

COLUMNS = ("a", "b", "c")
#: Text of cells with and without characters that csv.writer has to quote.
CELLS = st.text(st.sampled_from('ab1 ,;|\t"\n\r.é€') | st.characters(exclude_categories=["C"]), max_size=6)
ROWS = st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=8)


BYTES = st.binary(max_size=6) | st.sampled_from([b"\0", b"\n", b'"', b",", b"\r", b"nan", b"1e999", b"\xff\xfe", b"_"])
#: Relative position, number of removed bytes, and inserted bytes.
DAMAGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12) | st.just(10**6), BYTES), min_size=1, max_size=4)


def corrupt(content: bytes, damages: Sequence[tuple[float, int, bytes]]) -> bytes:
    for where, gone, put in damages:
        at = round(where * len(content))
        content = content[:at] + put + content[at + gone :]
    return content


def read(source: TableSource, *indices: int) -> tuple[list[list[Any]], list[int]]:
    """Read columns of a file, by default all, and the positions of its rows."""
    columns: list[list[Any]] = [[] for _ in indices or range(source.n_columns)]
    positions: list[int] = []
    for chunk in source.read_chunks(indices or range(source.n_columns)):
        assert [len(column) for column in chunk.columns] == [len(chunk.positions)] * len(columns)
        for values, column in zip(columns, chunk.columns, strict=True):
            values.extend(column.tolist())
        positions += chunk.positions
    return columns, positions


def write(folder: Path, content: str | bytes, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize(("delimiter", "end"), [(",", "\n"), (";", "\r\n"), ("\t", "\n"), ("|", "\r")])
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
@example(rows=[["1,5", "é", 'x "y"'], ["a\nb", "#", ";"], ["", " ", "€"]])
@example(rows=[["#N/A", "1", "2"], ["", " ", ""], ["# x", "#", "'=1"], ["", "", ""], ["", "", ""]])
def test_text_round_trips(delimiter: str, end: str, encoding: str, rows: list[list[str]], tmp_path: Path) -> None:
    text = io.StringIO()
    broken = any(char in cell for row in rows for cell in row for char in "\r\n")  # not always quoted by csv.writer
    quoting: Literal[0, 1] = csv.QUOTE_ALL if broken else csv.QUOTE_MINIMAL
    csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=quoting).writerows([COLUMNS, *rows])
    content = text.getvalue().encode(encoding, "replace")
    assume(encoding != "cp1252" or not re.search(rb"[\xc2-\xf4][\x80-\xbf]", content))  # also valid UTF-8
    came = [[cell.encode(encoding, "replace").decode(encoding).strip() for cell in row] for row in rows]
    expected = [[unescape_formula(cell.replace("\r\n", "\n").replace("\r", "\n")) for cell in row] for row in came]
    for name in ("table.csv", "table.tsv.gz"):
        path = write(tmp_path, gzip.compress(content) if name.endswith("gz") else content, name)
        source = open_table_source(path, encoding="cp1252" if encoding == "cp1252" else None)
        assert (source.header, source.n_columns, source.position_format) == ([*COLUMNS], 3, "line {}")
        assert list(zip(*read(source)[0], strict=True)) == list(map(tuple, expected))


LINES, LINE = "{} empty lines below the header skipped", "1 empty line below the header skipped"
SPACES = "cells are separated by spaces"
TABS = "cells are separated by tabs"
TITLES = "2 rows above the header skipped: 'Report' ..."
SALES = "2 rows above the header skipped: 'Sales 2024' ..."
TITLE = "1 row above the header skipped: 'A title'"


def test_headers_and_rows_of_untidy_files(tmp_path: Path) -> None:
    cases: list[tuple[str, str, list[str], list[str]]] = [
        ("a;b\n1,5;2,5\n", "a b", ["1,5 2,5"], ["cells are separated by semicolons"]),
        ("a, b\n1, x\n2, y\n", "a b", ["1 x", "2 y"], []),
        ('a, b\n1, "x, y"\n', "a b", ["1 x,_y"], []),
        ("a\tb,c\n1\t2,5\n", "a b,c", ["1 2,5"], ["cells are separated by tabs"]),
        ("# of, old\n#\n\na,b\n# x,5\n1,2\n#3,4\n", "a b", ["#_x 5", "1 2", "#3 4"], ["2 comment lines (#) skipped"]),
        ('a,b\n1,"x\n# y"\n#N/A,z\n', "a b", ["1 x\n#_y", "#N/A z"], []),
        ("#,name\n1,x\n#2,y\n", "# name", ["1 x", "#2 y"], []),
        ("# one\n# a;b\n1;2\n", "#_a b", ["1 2"], ["cells are separated by semicolons", "1 comment line (#) skipped"]),
        ("a,b\n\n1,x\n\n \ny,2\n\n", "a b", ["1 x", "y 2"], [LINES.format(4)]),
        ("a,b\n,\n1,x\n , \ny,2\n,\n\n,\n", "a b", [" ", "1 x", " ", "y 2", " ", " "], [LINE]),
        ("a\tb\nx\ty\n\t\n \t \n", "a b", ["x y", " ", " "], ["cells are separated by tabs"]),
        ("a,b\r\r\nx,1\r\r\ny,NA\r\r\nz,u\r\r\n", "a b", ["x 1", "y NA", "z u"], [LINES.format(4)]),
        ("a\n\nx, y\n\ny\n\n\n", "a", ["x,_y", "y"], [LINES.format(4)]),
        ("a\n\nx; y\n\na\n&lt;|&gt;\t\n\n", "a", ["x;_y", "a", "&lt;|&gt;"], [LINES.format(3)]),
        ('a\n""\nx,y\n""\n', "a", ["", "x,y", ""], []),
        ("sep=;\na;b\n1;2,5\n", "a b", ["1 2,5"], ["cells are separated by semicolons"]),
        ("sep=:\na:b\n1;2:3\n", "a b", ["1;2 3"], ["cells are separated by ':'"]),
        ("Sales\n\na,b\n1,2\n3,4\n", "a b", ["1 2", "3 4"], ["1 row above the header skipped: 'Sales'"]),
        (",a\nr,x\ns,y\n", " a", ["r x", "s y"], []),
        ('"a","b"\n"1","x",2\n"2","y",3\n', " a b", ["1 x 2", "2 y 3"], []),
        ("# R\na\tb\nu\t1\tx\nv\t2\ty\n", " a b", ["u 1 x", "v 2 y"], [TABS, "1 comment line (#) skipped"]),
        ("a,b,\n1,2\n3,4\n", "a b ", ["1 2 ", "3 4 "], []),
        ("text\nhello, you\nbye, 5\nsee, 6\n", "text", ["hello,_you", "bye,_5", "see,_6"], []),
        ("text\nred, green, 5\none\n", "text", ["red,_green,_5", "one"], []),
        ("#id,colour,shape\na1,red,square\nb2,red,round\n", "#id colour shape", ["a1 red square", "b2 red round"], []),
        ("# made by hand, us\nid,x\na,1\nb,2\n", "id x", ["a 1", "b 2"], ["1 comment line (#) skipped"]),
        ("#id,x\na,b\nc,1\nd,2\n", "a b", ["c 1", "d 2"], ["1 comment line (#) skipped"]),
        ("#text\nhello you\nbye, 5\n", "#text", ["hello_you", "bye,_5"], []),
        ("# by hand\n#\ntext\nhello you\n", "text", ["hello_you"], ["2 comment lines (#) skipped"]),
        ("Report,,\nAuthor: me,,\na,b,c\nx,y,z\nu,,w\n", "a b c", ["x y z", "u  w"], [TITLES]),
        ("Sales 2024, all regions\nQ1 to Q4\na,b,c\nx,1,z\ny,2,w\n", "a b c", ["x 1 z", "y 2 w"], [SALES]),
        ("a b c\n" + "x  1 2\n y 3 4 \n" * 3, "a b c", ["x 1 2", "y 3 4"] * 3, [SPACES]),
        ('"a" "b"\n' + "".join(f'"{n}" 1 2\n' for n in "pqrst"), " a b", [f"{n} 1 2" for n in "pqrst"], [SPACES]),
        ("a b c\n" + "one two 3\n" * 5, "a_b_c", ["one_two_3"] * 5, []),
        ("a b \np 1 NA \npp 2 3\nq 1 NA \nqq 2 3\n", " a b", ["p 1 NA", "pp 2 3", "q 1 NA", "qq 2 3"], [SPACES]),
        ("win 3 2\nlose 1 4\n" * 3, "win_3_2", ["lose_1_4"] + ["win_3_2", "lose_1_4"] * 2, []),
        ("match result\n" + "win 3 2\n" * 5, "match_result", ["win_3_2"] * 5, []),
        ('"a","b"\n"1",NA,"x"\n"2",3,"y"\n', " a b", ["1 NA x", "2 3 y"], []),
        ("A title, old\na,b,c\n1,2,3\n3,4,5\n", "a b c", ["1 2 3", "3 4 5"], [TITLE]),
        ("a,b\n1,2\x1b[2J\x1a\n", "a b", ["1 2\\x1b[2J\\x1a"], []),
        ("a,b\n'=1,'-x\n-3.5,''@\nisn't,'\n", "a b", ["=1 -x", "-3.5 '@", "isn't '"], []),
    ]
    for text, header, rows, notes in cases:
        for encoding in ("utf-8", "utf-16"):
            source = open_table_source(write(tmp_path, text.encode(encoding)))
            assert [name.replace(" ", "_") for name in source.header or []] == header.split(" "), text
            cells = zip(*read(source)[0], strict=True)
            assert [" ".join(cell.replace(" ", "_") for cell in row) for row in cells] == rows, text
            assert source.notes == notes, text


def test_a_list_of_texts_has_no_header(tmp_path: Path) -> None:
    def read_texts(content: str, name: str = "t.txt", **options: Any) -> tuple[list[str] | None, list[str], list[str]]:
        source = open_table_source(write(tmp_path, content, name), **options)
        chunks = list(source.read_chunks(range(source.n_columns)))
        return source.header, [str(row[0]) for row in zip(*chunks[0].columns, strict=True)], source.notes

    texts = ["the train was late", "she scored, at last, a goal", "bread; and soup"]
    content = "\n".join(texts) + "\n"
    for order in (content, "\n".join(texts[::-1])):
        for names, column in (((), "text"), (("title",), "title"), (("label",), "text")):
            header, cells, notes = read_texts(order, names=names, text_column=column)
            assert (header, sorted(cells)) == ([column], sorted(texts)), names
            assert len(notes) == 1, names
            assert column in notes[0], names
    assert read_texts("go, now\ncome, soon\n", names={"text"})[1] == ["go, now", "come, soon"]
    assert read_texts("# by hand\n\nyes\nno\n")[1] == ["yes", "no"]
    spec = ReadSpec(label_column="kind", require_labels=False, columns=("title",))
    _, block = read_table(write(tmp_path, content, "t.txt"), spec)  # of a model of one column
    assert (block.columns[0].tolist(), list(block.positions)) == (texts, [1, 2, 3])
    # A header, or cells.
    assert read_texts("title\n" + content, names={"title"}, text_column="title") == (["title"], texts, [])
    assert read_texts("text\n" + content) == (["text"], texts, [])
    assert read_texts("a,b\n1,2\n")[0] == ["a", "b"]
    assert read_texts("a\tb\nx\ty\n")[0] == ["a", "b"]
    assert read_texts("b,text\n1,2\n", names={"text"})[0] == ["b", "text"]
    assert read_texts("one\ntwo\n", "t.csv")[:2] == (["one"], ["two"])


def test_a_model_of_numbered_columns_reads_a_row_with_spaces(tmp_path: Path) -> None:
    spec = ReadSpec(label_column="4", require_labels=False, columns=("1", "2", "3"), no_header=True)
    _, block = read_table(write(tmp_path, "1.2  0.3 r\n", "new.data"), spec)
    assert [column.tolist() for column in block.columns] == [["1.2"], ["0.3"], ["r"]]


def test_encodings_are_noted_and_shared_with_load_csv(tmp_path: Path) -> None:
    source = open_table_source(write(tmp_path, "größe;“b”\n1;Ä\n".encode("cp1252")))
    assert (source.header, read(source)[0]) == (["größe", "“b”"], [["1"], ["Ä"]])
    assert source.notes[0] == "the file is not UTF-8: read as cp1252; `encoding` names another encoding"
    data = load_csv(write(tmp_path, gzip.compress("# x\na; label;b\n1;é;2\n\n;;\n3; e;4\n".encode("utf-16"))))
    assert (data.x.tolist(), data.class_names) == ([[1, 2], [3, 4]], ("e", "é"))


def test_positions_are_first_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", 8)  # one row at a time
    text = '# one\n"a\n\nx",b\n1,2\n\n\n"3\n# no comment\n",4\n5,"\n6"\n'
    source = open_table_source(write(tmp_path, text))
    assert source.header == ["a x", "b"]
    assert read(source, 1, 0) == ([["2", "4", "6"], ["1", "3\n# no comment", "5"]], [5, 8, 11])
    with pytest.raises(ValueError, match=r"have 2 cells per row; got 3 in line 2\."):
        read(open_table_source(write(tmp_path, 'a,b\n1,"\n\n2",3\n4,5\n')))


PACKED = gzip.compress(b"a,b\n1,2\n", mtime=0)  # constant: it is part of test names


def test_invalid_text_is_refused(tmp_path: Path) -> None:
    many = "".join(f"{row},x,2\n" for row in range(120))
    cases: list[tuple[str | bytes, str]] = [
        ("a,b\n1,2\n3,4,5\n6,7\n", r"have 2 cells per row; got 3 in line 3\. Correct that line"),
        ('a\n"x" y\n', r"be a CSV file; got .* \(text behind a closing quote in line 2\)"),
        (f"a,b\n{many}5,6\n", r"have 3 cells per row; got 2 in line 122\. Correct that line\."),
        ("A title, old\na,b,c\nx,y,z\n", "hold one table; got rows of 2 cells, and of 3 from line 2 of "),
        ("a,b\n1,x,2\n1,y,3\n", "hold one table; got rows of 2 cells, and of 3 from line 2 of "),
        ("a,b\n1,2\n\nx,y,z\n3,4,5\n", "hold one table; got rows of 2 cells, and of 3 from line 4 of "),
        ("a,b\n1,2\nx,y,z\n3,4,5\n", "hold one table; got rows of 2 cells, and of 3 from line 3 of "),
        ("a,b\n1,2\n# x\n3,4\n", r"have 2 cells per row; got 1 in line 3\. Comments stand above the header"),
        ("Sales, all\nyear, old\na,b,c\n1,2,3\n3,4,5\n", r"hold one table; .* header, line 1 \('Sales, all'\), is a"),
        ("a,b\n1,2\na,b\n3,4\n", "hold one table; got the header again in line 3 of "),
        ("a,b\n1,2\n\nc,d\n3,4\n", "hold one table; got another header after an empty line in line 4 of .*Save each"),
        (b"\xef\xbb\xbfa,b\n1,\xe9\n", r"be a CSV file that can be read; got .* \(no UTF-8 in line 2\)\. Save it as"),
        ("é,b\n1,ö\n".encode() + b"2,\xe9\n", r"be a CSV file that can be read; got .* \(no UTF-8 in line 3\)"),
        (b"a,b\n1,\x81\2\n", r"be a CSV file that can be read; got .* \(no text in line 2\)"),
        ("a,b\n1,2\n".encode("utf-16") + b"\0\xd8\n\0", r"be a CSV file that can be read; got .* \(no UTF-16-LE in"),
        (PACKED[:-9], r"be a CSV file that can be read; got .* \(EOFError\)"),
        (PACKED[:-8] + bytes(8), r"be a CSV file that can be read; got .* \(BadGzipFile\)"),
        (b"\x1f\x8b", r"be a CSV file that can be read; got .* \(EOFError\)"),
    ]
    for content, message in cases:
        with pytest.raises(InputError, match=f"^`path` must {message}"):
            read(open_table_source(write(tmp_path, content)))


def test_late_damage_is_detected_before_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protonet.tables.encodings.BYTES_PER_DECODING", 1000)
    content = "a,b\n" + "1,é\n" * 5000
    path = write(tmp_path, content.encode() + b"2,\xe9\n")
    with pytest.raises(InputError, match="no UTF-8 in line 5002"):
        open_table_source(path)
    ascii_first = content.replace("é", "e").encode() + "2,Ä\n".encode("latin-1")
    columns, positions = read(open_table_source(write(tmp_path, ascii_first)))
    assert (columns[1][-1], positions[-1]) == ("Ä", 5002)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    given = gzip.compress("a;b\n1;é\n2;y\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    source = open_table_source(Path("-"))
    assert (source.header, source.notes) == (["a", "b"], ["cells are separated by semicolons"])
    assert read(source, 1, 0)[0] == [["é", "y"], ["1", "2"]]


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_arrays_are_views_with_labels_last(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", 8)
    x, y = np.arange(30, dtype=">i2").reshape(5, 2, 3), np.array([" p", "q", "", "p", "q"])
    path, labels = tmp_path / f"x{suffix}", None
    if suffix == ".npz":
        np.savez(path, x=x, y=y)
    else:
        np.save(path, x)
        labels = tmp_path / "y.npy"
        np.save(labels, y)
    source = open_table_source(path, labels, require_labels=True)
    assert (source.header, source.n_columns, source.position_format) == (None, 6, "row {} (counted from 0)")
    columns, positions = read(source, 6, 1, 0)
    assert columns == [["p", "q", "", "p", "q"], x[:, 0, 1].tolist(), x[:, 0, 0].tolist()]
    assert positions == list(range(5))
    for kind, native in (("bool", "uint8"), ("int8", "int8"), ("longdouble", "float64")):
        np.save(tmp_path / "x.npy", x[:, 0].astype(kind))
        block = next(open_table_source(tmp_path / "x.npy").read_chunks([1]))
        assert block.columns[0].dtype == native
    flags, letters = [True, False, True, False, True], [b"a", b"b", b"a", b"b", b"a"]
    for labels_of_any_type, texts in ((flags, ["True", "False"]), (letters, ["a", "b"])):
        np.save(tmp_path / "y.npy", labels_of_any_type)
        assert read(open_table_source(tmp_path / "x.npy", tmp_path / "y.npy"), 3)[0] == [[*texts, *texts, texts[0]]]


NEW, OLD = datetime(2020, 1, 2), datetime(1970, 1, 1)
#: For each type: the values in the file, and as they are read, with their dtype.
PARQUET: dict[str, tuple[list[Any], list[Any], str]] = {
    "string": ([" a", "b ", None], ["a", "b", ""], "O"),
    "large_string": (["a", "a", None], ["a", "a", ""], "O"),
    "binary": ([b"a", "é".encode(), None], ["a", "é", ""], "O"),
    "null": ([None, None, None], ["", "", ""], "O"),
    "bool": ([True, False, None], ["True", "False", ""], "O"),
    "uint64": ([1, 2**64 - 1, 3], [1, 2**64 - 1, 3], "uint64"),
    "int32": ([1, None, 3], [1, np.nan, 3], "float64"),
    "float16": ([np.float16(0.5), None, np.float16(2)], [0.5, np.nan, 2], "float16"),
    "date32": ([date(2020, 1, 2), None, date(1, 1, 1)], [NEW, None, datetime(1, 1, 1)], "M8[us]"),
    "time32[s]": ([time(1, 2, 3), None, time(0)], [OLD.replace(hour=1, minute=2, second=3), None, OLD], "M8[us]"),
    "duration[ms]": ([timedelta(seconds=1.5), None, timedelta(1)], [1.5, np.nan, 86400], "float64"),
}


def test_parquet_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", 20)
    table = {kind: pa.array(values, kind) for kind, (values, _, _) in PARQUET.items()}
    table["decimal"] = pa.array([Decimal("1.50"), None, Decimal(2)], pa.decimal128(10, 2))
    zone = timezone(timedelta(hours=2))
    table["zone"] = pa.array([datetime(2020, 1, 1, tzinfo=zone), None, None], pa.timestamp("ns", "Europe/Rome"))
    table["category"] = pa.array(["x ", None, "y"]).dictionary_encode()
    expected = {kind: (values, dtype) for kind, (_, values, dtype) in PARQUET.items()}
    expected["decimal"] = [1.5, np.nan, 2], "float64"
    expected["zone"] = [datetime(2019, 12, 31, 22), None, None], "M8[us]"
    expected["category"] = ["x", "", "y"], "O"
    parquet.write_table(pa.table(table), tmp_path / "x.parquet")
    source = open_table_source(tmp_path / "x.parquet")
    assert source.header == [*table]
    blocks = list(source.read_chunks(range(source.n_columns)))
    assert [list(block.positions) for block in blocks] == [[0], [1], [2]]
    for column, (name, (values, dtype)) in enumerate(expected.items()):
        got = np.concatenate([block.columns[column] for block in blocks])
        # a chunk of integers without missing values keeps its dtype
        assert {block.columns[column].dtype for block in blocks} <= {np.dtype(dtype), np.dtype("int32")}, name
        np.testing.assert_equal(got.tolist(), values, name)


def test_parquet_columns_are_read_by_name(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    parquet = pytest.importorskip("pyarrow.parquet")
    frame = pandas.DataFrame({"a.b": [0.5, 1.5], "a": ["x", None]}, index=[7, 3])
    frame.to_parquet(tmp_path / "x.parquet")
    source = open_table_source(tmp_path / "x.parquet")
    assert source.header == ["a.b", "a", ""]
    assert read(source, 1, 0)[0] == [["x", ""], [0.5, 1.5]]
    parquet.write_table(pa.table([pa.array([1]), pa.array(["x"])], names=["a", "a"]), tmp_path / "twice.parquet")
    source = open_table_source(tmp_path / "twice.parquet")
    assert (source.header, read(source, 1)[0]) == (["a", "a"], [["x"]])
    nested = pa.table({"a": [["x"], ["y"]], "b": [1, 2], "c": pa.array([2**62] * 2, pa.timestamp("ms"))})
    parquet.write_table(nested, tmp_path / "nested.parquet")
    assert read(open_table_source(tmp_path / "nested.parquet"), 1)[0] == [[1, 2]]
    for column, message in ((0, "got list<.* in column a "), (2, r"got timestamp\[.*\] in column c ")):
        with pytest.raises(InputError, match=f"^`path` must be a Parquet file of numbers.*; {message}"):
            read(open_table_source(tmp_path / "nested.parquet"), column)


@pytest.mark.parametrize("width", [-1, 3])
def test_lists_of_numbers_in_parquet_are_columns(tmp_path: Path, width: int) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [None, [1.0, 2.0, 3.0], [4.0, 5.0, None]] * 400
    table = pa.table({"name": ["x"] * 1200, "e": pa.array(rows, pa.list_(pa.float32(), width)), "label": ["a"] * 1200})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=500)
    source = open_table_source(tmp_path / "x.parquet")
    assert source.header == ["name", "e_0", "e_1", "e_2", "label"]
    labels, last, first = read(source, 4, 3, 1)[0]
    assert set(labels) == {"a"}
    np.testing.assert_array_equal(first, [np.nan, 1.0, 4.0] * 400)
    np.testing.assert_array_equal(last, [np.nan, 3.0, np.nan] * 400)
    parquet.write_table(pa.table({"e": [[1, 2], [3]]}), tmp_path / "odd.parquet")
    message = r"^`path` must be .* lists of equally many numbers .*; got list<.* in column e "
    with pytest.raises(InputError, match=message):
        read(open_table_source(tmp_path / "odd.parquet"), 0)


def test_excel_cells_are_read_as_they_are_shown(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    rows = [(0.125, 0.5, 7, 1.5, "a"), (0.3, 1, 123, 2, "b"), (None, 0.25, None, 3.25, "c")]
    formats = ("0.0%", "0%", "00000", "0.00", "General")
    book = openpyxl.Workbook()
    book.active.append(["share", "builtin", "code", "size", "kind"])
    for row, cells in enumerate(rows, 2):
        for column, (cell, number_format) in enumerate(zip(cells, formats, strict=True), 1):
            book.active.cell(row, column, cell).number_format = number_format
    book.save(tmp_path / "shown.xlsx")
    (chunk,) = open_table_source(tmp_path / "shown.xlsx").read_chunks(range(5))
    assert [cells.tolist() for cells in chunk.columns] == [
        ["12.5%", "30%", ""],
        ["50%", "100%", "25%"],
        ["00007", "00123", ""],
        [1.5, 2.0, 3.25],
        ["a", "b", "c"],
    ]


def write_excel(path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Data"
    rows = [
        ["A title"],
        [],
        [None, "by hand"],
        [None, "n", " x ", "kind", "day", "mixed", "yes", "took"],
        [],
        [0, 1, 0.5, " p ", datetime(2020, 1, 2, 3), 1, True, timedelta(hours=37, seconds=131)],
        [1, 2, None, "q", date(2020, 1, 3), "'=two", False, time(9, 16, 54)],
        [2, 3, "#N/A", None, None, 2.5, None],
        ["#N/A"],
        [None, " "],
    ]
    for row in rows:
        sheet.append(row)
    book.create_sheet("More")
    book.save(path)


def test_excel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    write_excel(tmp_path / "x.xlsx")
    monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", 8)
    source = open_table_source(tmp_path / "x.xlsx")
    assert source.header == ["", "n", "x", "kind", "day", "mixed", "yes", "took"]
    assert source.position_format == "row {}"
    assert source.notes == [
        "sheet 'Data'; `sheet` names another one: 'More'",
        "2 rows above the header skipped: 'A title' ...",
        "1 blank row at the end skipped",
    ]
    columns, positions = read(source)
    expected = [
        *([np.nan, 0, 1, 2, np.nan], [np.nan, 1, 2, 3, np.nan], [np.nan, 0.5, np.nan, np.nan, np.nan]),
        ["", "p", "q", "", ""],
        [None, datetime(2020, 1, 2, 3), datetime(2020, 1, 3), None, None],
        *(["", "1", "=two", "2.5", ""], ["", "True", "False", "", ""]),
        [np.nan, 133331, 33414, np.nan, np.nan],  # durations in seconds
    ]
    np.testing.assert_equal(columns, expected)
    assert positions == [5, 6, 7, 8, 9]
    assert open_table_source(tmp_path / "x.xlsx", sheet="More").header == []
    with pytest.raises(InputError, match=r"^`sheet` must name a sheet of .*; got 'no'\. It has 'Data', 'More'"):
        open_table_source(tmp_path / "x.xlsx", sheet="no")
    with pytest.raises(InputError, match=r"got 'mroe'\. Did you mean 'More'\? It has 'Data', 'More'"):
        open_table_source(tmp_path / "x.xlsx", sheet="mroe")
    with pytest.raises(InputError, match=r"^`sheet` must come with a workbook or a database"):
        open_table_source(Path("x.csv"), sheet="no")
    book = openpyxl.Workbook()
    for row in (["n", "kind"], [1, "p"], [None], ["n", "kind"], [2, "q"]):
        book.active.append(row)
    book.save(tmp_path / "twice.xlsx")
    with pytest.raises(InputError, match=r"hold one table; got the header again in row 4 of "):
        open_table_source(tmp_path / "twice.xlsx")
    book = openpyxl.Workbook()
    for word in ("word", "other", "word"):
        book.active.append([word])
    book.save(tmp_path / "words.xlsx")
    assert read(open_table_source(tmp_path / "words.xlsx"), 0)[0] == [["other", "word"]]
    book = openpyxl.Workbook()
    table: list[list[object]] = [["A title"], ["kind", "n", "twice"], ["p", 1, "=2*B3"], [None, 2, "=2*B4"]]
    for line in [*table, [], ["q", 4], [None, 5]]:
        book.active.append(line)
    for cells in ("A1:C1", "A3:A5", "A6:A7"):
        book.active.merge_cells(cells)
    book.save(tmp_path / "merged.xlsx")
    with ZipFile(tmp_path / "merged.xlsx") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    sheet = "xl/worksheets/sheet1.xml"
    with ZipFile(tmp_path / "merged.xlsx", "w") as archive:
        for name, part in (parts | {sheet: parts[sheet].replace(b'r="C3"', b'r="C3" t="str"')}).items():
            archive.writestr(name, part)  # C3 is the empty text, as Excel writes it
    source = open_table_source(tmp_path / "merged.xlsx")
    assert read(source, 0)[0] == [["p", "p", "p", "q", "q"]]
    assert source.notes[:2] == [
        "3 cells filled from merged cells above",
        "1 formula without a value: save the workbook in a spreadsheet",
    ]
    (tmp_path / "bad.xlsx").write_bytes(b"PK")
    for name, message in (
        ("bad.xlsx", "`path` must be a workbook that can be read; got .*Bad"),
        ("no.xlsx", "no such file"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            open_table_source(tmp_path / name)


def write_valid(folder: Path, suffix: str) -> bytes:
    path = folder / f"whole{suffix}"
    if suffix == ".xlsx":
        write_excel(path)
    elif suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        columns = {"a": [1.5, None] * 20, "b": ["x", "é"] * 20, "c": [True, None] * 20}
        pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)
    elif suffix == ".npz":
        np.savez(path, x=np.arange(20.0).reshape(10, 2), y=["p", "q"] * 5)
    elif suffix == ".npy":
        np.save(path, np.arange(20.0).reshape(10, 2))
    else:
        text = "# by hand\na;b;kind\n" + '1,5;"x\ny";é\n\n2; z ;ö\n' * 20
        path.write_bytes(gzip.compress(text.encode("utf-16")) if suffix.endswith("gz") else text.encode())
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet", ".xlsx", ".npz", ".npy"])
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(damages=DAMAGES, random=st.none() | st.binary(max_size=200))
@example(damages=[], random=b"PK\x03\x04")  # the start of an archive, which NumPy would leave open
def test_damaged_files_are_read_or_refused_in_one_line(
    suffix: str, damages: list[tuple[float, int, bytes]], random: bytes | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    valid = folder / f"whole{suffix}"
    content = corrupt(valid.read_bytes() if valid.exists() else write_valid(folder, suffix), damages)
    path = write(folder, content if random is None else random, f"damaged{suffix}")
    message = "`path` must "
    try:
        source = open_table_source(path)
        columns, positions = read(source)
        assert len(columns) == source.n_columns == len(source.header or columns)
        assert all(len(column) == len(positions) for column in columns)
    except InputError as error:
        message = str(error)
    assert message.startswith("`path` must ")
    assert message.isprintable()
