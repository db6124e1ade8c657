"""Tables in all formats: equal rows, matched columns, and error messages."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protonet.errors import InputError
from protonet.tables.columns.parsing import replace_missing_cells
from protonet.tables.formats import source as table_source
from protonet.tables.table import (
    ReadSpec,
    RowBlock,
    convert_cells_to_text,
    format_names,
    list_number_like_names,
    open_table,
    parse_labels,
    read_table,
)
from tests.strategies import write_columns

KIND = ReadSpec(label_column="kind")
Write = Callable[[Path, np.ndarray, list[str]], tuple[Path, Path | None]]


def write_csv(folder: Path, x: np.ndarray, labels: list[str]) -> tuple[Path, None]:
    write_columns(folder / "table.CSV", {"a": x[:, 0].tolist(), "kind": labels, "b": x[:, 1].tolist()})
    return folder / "table.CSV", None


def write_npz(folder: Path, x: np.ndarray, labels: list[str]) -> tuple[Path, None]:
    np.savez(folder / "table.npz", x=x, y=np.array(labels))
    return folder / "table.npz", None


def write_npy(folder: Path, x: np.ndarray, labels: list[str]) -> tuple[Path, Path]:
    np.save(folder / "x.npy", np.asfortranarray(x))
    np.save(folder / "y.npy", np.array(labels).astype(bytes))
    return folder / "x.npy", folder / "y.npy"


def write_parquet(folder: Path, x: np.ndarray, labels: list[str]) -> tuple[Path, None]:
    pa = pytest.importorskip("pyarrow")
    columns = {"a": x[:, 0], "kind": pa.array(labels).dictionary_encode(), "b": x[:, 1]}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), folder / "table.parquet")
    return folder / "table.parquet", None


@pytest.mark.parametrize("write", [write_csv, write_npz, write_npy, write_parquet])
@pytest.mark.parametrize("cells", [1, 7, 2**20])
def test_all_formats_and_block_sizes_give_the_same_rows(
    write: Write, cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", cells)
    x = np.random.default_rng(0).standard_normal((11, 2))
    labels = [f"class {row % 3}" for row in range(11)]
    path, other = write(tmp_path, x, labels)
    _, block = read_table(path, KIND, other)
    assert np.array_equal(to_floats(block), x)
    assert block.labels.tolist() == labels
    assert block.names == (("a", "b") if path.suffix.lower() in {".csv", ".parquet"} else None)
    blocks = list(open_table(path, replace(KIND, require_labels=False, n_features=2)).blocks)
    assert np.array_equal(np.concatenate([to_floats(part) for part in blocks]), x)
    assert [row for part in blocks for row in part.positions] == list(block.positions)
    assert [index for part in blocks for index in part.row_indices] == list(block.row_indices) == list(range(11))
    assert not any(len(part.labels) for part in blocks)


def to_floats(block: RowBlock) -> np.ndarray:
    """Convert the cells of a block to floats (b, columns), missing values to 0."""
    return np.stack([np.where(cells == "", 0, cells).astype(float) for cells in block.columns], axis=1)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "table.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, 'b, a ,"kind"\r\n1,2,x\r\n,,\r\n 3 ,4e1," y, z "\r\n')
    spec = ReadSpec(label_column="kind", require_labels=False, columns=("a", "b"), n_features=2)
    assert [to_floats(block).tolist() for block in open_table(path, spec).blocks] == [[[2, 1], [0, 0], [40, 3]]]
    table, block = read_table(path, KIND)
    assert block.labels.tolist() == ["x", "y, z"]  # blank rows are dropped if labels are required
    assert table.notes == ["1 blank row dropped"]
    optional_labels = ReadSpec(label_column="kind", require_labels=False, allow_unlabelled=True)
    assert read_table(path, optional_labels)[1].labels.tolist() == ["x", "", "y, z"]
    path_without_labels = write(tmp_path, "a,kind,id\n1,7,p\n2,,q\n3, NA,r\n4,none,s\n5,NaN,t\n")
    _, block = read_table(path_without_labels, replace(optional_labels, extra_columns={"id": "id"}))
    assert block.labels.tolist() == ["7", "", "", "", ""]
    for header, missing in (("a,c\n", "b. Name the columns as in the table"), ("a\n", "b")):
        with pytest.raises(
            InputError, match=rf"^`path` must have the model's columns; got .*table\.csv without {missing}"
        ):
            open_table(write(tmp_path, header), spec)
    umlauts = ReadSpec(label_column="kind", columns=("Gr\u00f6\u00dfe",))
    assert read_table(write(tmp_path, "Gro\u0308\u00dfe,kind\n1,x\n"), umlauts)[1].names == umlauts.columns
    with pytest.raises(InputError, match=r"^`label` must name another column than the features; got a\."):
        open_table(write(tmp_path, "a,b\n1,2\n"), replace(spec, label_column="a"))
    path = write(tmp_path, "\ufeffa,b\n1,2\n")
    assert read_table(path, optional_labels)[1].labels.tolist() == []
    assert [to_floats(block).tolist() for block in open_table(path, spec).blocks] == [[[1, 2]]]
    table, block = read_table(write(tmp_path, ",a,kind\n0,1,x\n1,5,y\n"), KIND)
    assert (block.names, table.unused_columns, table.notes) == (("a",), (), ["1 unnamed column is not used"])
    assert block.columns[0].tolist() == ["1", "5"]


def test_invalid_csv_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str | bytes, str]] = [
        ("a,b\n1,2\n", r"name a column of the table; got kind, and .*table\.csv has a, b\. Name the column"),
        ("", "have a header and rows; got .*, which is empty"),
        ("kind\nx\n", "have columns beside the classes; got .* with kind"),
        ("kind,a,kind\nx,2,x\n", r"name each column once; got kind twice in .*\. Rename or drop one"),
        ("7,1,1,kind\n1,2,3,x\n", r"name each column once; got '1' twice in .*\. .*pass `no_header`"),
        ("a,kind\n", "have at least one row; got none in "),
        ("\nold, new\n2\n1,x\n", r"have 2 cells .* in line 3\. .*If the header, line 2 \('old, new'\), is a title"),
        ("a,kind\n1,x\n2, \n", r"name the class of every row; got none in line 3\. Fill it in"),
        ("a,kind\n" + 5 * "1,NA\n", "name the class of every row; got none in line 2, line 3, line 4 and 2 more"),
        ('a,kind\n1,"x\n2,y\n', r"be a CSV file; got .*table\.csv \(unexpected end of data in line 3\)"),
        ("a,kind\n1,x\0\n", r"be a CSV file; got .* \(binary data in line 2\)"),
        ("a" * 1000, "be a CSV file; got .*no end of the line"),
    ]
    for text, message in cases:
        monkeypatch.setattr("protonet.tables.delimited.MAX_LINE_CHARS", 500)  # so that no line fills the memory
        with pytest.raises(InputError, match=f"^`(path|label)` must {message}"):
            read_table(write(tmp_path, text), KIND)


def test_repeated_columns_are_renamed_as_by_pandas(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,a,a.1,,a,,kind\n1,2,3,4,5,6,7,x\n")
    table, block = read_table(path, KIND)
    assert block.names == ("a", "b", "a.2", "a.1", "a.3")
    assert [cells[0] for cells in block.columns] == list("12346")
    assert table.notes[0].startswith("columns with the same name: a;")


def test_files_without_a_header(tmp_path: Path) -> None:
    for text in ("5,1.5,red\n7,2,blue\n5,1.5,red\n", "# comment, of two cells\n5;1.5;red\n7;2;blue\n5;1.5;red\n"):
        path = write(tmp_path, text)
        _, block = read_table(path, ReadSpec(label_column="3", no_header=True))
        assert block.names == ("1", "2")
        assert block.labels.tolist() == ["red", "blue", "red"]
        assert to_floats(block).tolist() == [[5, 1.5], [7, 2], [5, 1.5]]
        assert list(block.positions) == [position + text.startswith("#") for position in (1, 2, 3)]
    with pytest.raises(InputError, match=r"^`path` must have a header and rows; got .*, which is empty"):
        read_table(write(tmp_path, ""), ReadSpec(label_column="3", no_header=True))
    np.save(tmp_path / "x.npy", np.eye(3))
    with pytest.raises(InputError, match=r"^`no_header` must come with delimited text"):
        open_table(tmp_path / "x.npy", ReadSpec(label_column="3", require_labels=False, no_header=True))


def test_long_cells(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)  # the default
    long = "x" * 140_000
    _, block = read_table(write(tmp_path, f"a,b,kind\n{long},{long},z\n"), KIND)
    assert [len(cells[0]) for cells in block.columns] == [len(long)] * 2


def test_invalid_arrays_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[object, str]] = [
        (np.ones(3), r"`path` must hold real numbers of shape \(n, dim\); got float64 \(3,\)"),
        (np.array([["a"]]), r"`path` must hold real numbers of shape \(n, dim\); got <U1"),
        (np.array([[None]]), r"`path` must be an NPY file of numbers or strings; got .*ValueError"),
        (np.ones((2, 3)), "`path` must have 2 features per row; got 3 in .*x.npy"),
        (np.ones((0, 2)), "`path` must have one label per row; got 2 for 0 rows"),
    ]
    for x, message in cases:
        np.save(tmp_path / "x.npy", np.asarray(x))
        np.save(tmp_path / "y.npy", ["a", "b"])
        with pytest.raises(InputError, match=f"^{message}"):
            read_table(tmp_path / "x.npy", replace(KIND, n_features=2), tmp_path / "y.npy")


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 2)))
    (tmp_path / "y.npy").write_bytes((tmp_path / "x.npz").read_bytes())
    (tmp_path / "z.npy").write_bytes(b"")
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    np.save(tmp_path / "float.npy", np.ones(2))
    np.save(tmp_path / "names.npy", ["a", "b"])
    np.save(tmp_path / "empty.npy", np.ones((0, 2), int))
    np.save(tmp_path / "x.npy", np.ones((2, 2)))
    for name, labels, message in (
        ("table.doc", None, r"`path` must end in \.csv, .*\.xlsx.*\.parquet.*; got "),
        ("x.npz", None, "`path` must hold an array y"),
        ("x.npz", "y.npy", "`labels` must come with an NPY file of rows"),
        ("x.npy", None, "`labels` must name the file of the classes; got none beside"),
        ("x.npy", "none.npy", "no such file"),
        ("x.npy", "y.npy", "`labels` must be an NPY file of numbers or strings"),
        ("x.npy", "float.npy", "`labels` must be integers or strings; got float64"),
        ("empty.npy", "empty.npy", "`path` must have at least one row"),
        ("z.npy", "names.npy", "`path` must be an NPY file of numbers or strings; got .*ValueError"),
        ("none.csv", None, "no such file"),
        ("p.parquet", None, "`path` must be a Parquet file of numbers.*; got .*ArrowInvalid"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            read_table(tmp_path / name, KIND, None if labels is None else tmp_path / labels)


def repeat_line(header: str, line: Callable[[int], str], n: int = 12) -> str:
    return "\n".join([header, *map(line, range(n))]) + "\n"


HINT = "These look like classes: "


def test_label_columns_are_suggested(tmp_path: Path) -> None:
    many = repeat_line("a,b,KIND1,c,d,e", lambda n: f"{n // 4},{n % 3},{n % 4},{n % 2},{n % 2},{n % 3}")
    survived = repeat_line("Survived,Class,Sex,Age", lambda n: f"{n % 2},{n % 3},{'mf'[n % 2]},{n}.5")
    species = repeat_line("x,Species,flag", lambda n: f"{n}.5,{'uvw'[n % 3]},{n % 2}")
    cases: list[tuple[str, str, str]] = [
        ("a,b\n1,2\n", "kind", "Name the column of the classes."),
        (species, "kind", f"{HINT}Species (3 values), flag (2 values)."),
        # a missing value, the similar name first
        (many + 6 * ",,1,,1,1\n", "kind", f"Did you mean KIND1? {HINT}KIND1 (4 values), d (2 values), e (3 values)."),
        (survived, "survive", f". Did you mean Survived? {HINT}Survived (2 values), Class (3 values), Sex (2 values)."),
    ]
    for text, label, guess in cases:
        with pytest.raises(InputError) as caught:
            read_table(write(tmp_path, text), ReadSpec(label_column=label))
        assert str(caught.value).endswith(guess), text


def test_labels_of_any_type() -> None:
    cases: list[tuple[np.ndarray, list[object], list[int]]] = [
        (np.array(["a", "", "N/a", "NaN", "none"], object), ["a", "", "", "", ""], [1, 2, 3, 4]),
        (np.array([3, 1]), [3, 1], []),
        (np.array([3.0, np.nan, 1.0]), [3, 0, 1], [1]),
        (np.array([3.5, np.nan]), [3.5, 0.0], [1]),
        (np.array([2.0**60]), [2.0**60], []),
        (np.array([True, False]), ["True", "False"], []),
        (np.array(["2020-01-02", "NaT"], "datetime64[us]"), ["2020-01-02T00:00:00", "NaT"], [1]),
    ]
    for cells, labels, missing in cases:
        parsed, missing_mask = parse_labels(replace_missing_cells(cells))
        assert parsed.tolist() == labels, cells
        assert np.flatnonzero(missing_mask).tolist() == missing, cells
        assert parsed.dtype.kind in "iufU", cells
    assert convert_cells_to_text(np.array([3.0, np.nan, 0.0])).tolist() == ["3", "", "0"]  # a missing value is not 0
    assert convert_cells_to_text(np.array(["P 1", ""], object)).tolist() == ["P 1", ""]
    assert format_names(["a", "b c", *"defgh"]) == "a, 'b c', d, e, f and 2 more"


def test_grouped_digits_among_column_names() -> None:
    assert list_number_like_names(["1,234,567", "5", "x"]) == ["1,234,567", "5"]
    assert list_number_like_names(["1'234.5", "-2.5", "x"]) == ["1'234.5", "-2.5"]
    assert not list_number_like_names(["x", "900", "1,000", "1,100"])  # a scale
    assert not list_number_like_names(["400,5", "401,0", "401,5"])


def test_separators_behind_the_last_cell(tmp_path: Path) -> None:
    for text in ("a,kind\n1,x,\n2,y, \n", "a,kind\n1,x\n2,y,\n"):
        _, block = read_table(write(tmp_path, text), KIND)
        assert (block.columns[0].tolist(), block.labels.tolist()) == (["1", "2"], ["x", "y"])
    with pytest.raises(InputError, match=r"have 2 cells per row; got 3 in line 3|hold one table"):
        read_table(write(tmp_path, "a,kind\n1,x\n2,y,z\n"), KIND)


def test_columns_and_cells_as_spreadsheets_export_them(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    text = '"Weight\n(kg)";"a  b";kind;;\n="007";"=""x""";x;;\n="1,5";<a href="b">;="y";;\n;;;;\n'
    path.write_text(text, encoding="utf-8")
    table, block = read_table(path, replace(KIND, for_training=True))
    assert block.names == ("Weight (kg)", "a b")
    assert "2 unnamed columns are not used" in table.notes
    assert [cells.tolist() for cells in block.columns] == [["007", "1,5"], ['="x"', '<a href="b">']]
    assert block.labels.tolist() == ["x", "y"]
