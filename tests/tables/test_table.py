"""A person's table: what is read of each format, in one order, and the one line for each thing that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protonet._checks import InputError
from protonet.tables import formats
from protonet.tables.table import Wanted, _parse_numbers, open_table, read_table

KIND = Wanted("kind")
Write = Callable[[Path, np.ndarray, list[str]], tuple[Path, Path | None]]


def write_csv(folder: Path, x: np.ndarray, labels: list[str]) -> tuple[Path, None]:
    lines = [f"{row[0]!r},{label},{row[1]!r}" for row, label in zip(x.tolist(), labels, strict=True)]
    (folder / "table.CSV").write_text("\n".join(["a,kind,b", *lines]), encoding="utf-8")
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
def test_every_format_gives_the_same_rows_whatever_the_blocks(
    write: Write, cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "CELLS", cells)
    x = np.random.default_rng(0).standard_normal((11, 2))
    labels = [f"class {row % 3}" for row in range(11)]
    path, other = write(tmp_path, x, labels)
    table, block = read_table("cmd", path, KIND, other)
    assert block.x.dtype == np.float64  # more digits than float32 has are for whoever centres them
    assert np.array_equal(block.x, x)
    assert block.labels.tolist() == labels
    assert table.columns == (("a", "b") if path.suffix.lower() in {".csv", ".parquet"} else None)
    blocks = list(open_table("cmd", path, KIND._replace(labelled=False, dim=2)).blocks)
    assert np.array_equal(np.concatenate([each.x for each in blocks]), block.x)
    assert not any(len(each.labels) for each in blocks)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "table.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, 'b, a ,"kind"\r\n1,2,x\r\n\r\n 3 ,4e1," y, z "\r\n')
    wanted = Wanted("kind", labelled=False, columns=("a", "b"), dim=2)
    assert [block.x.tolist() for block in open_table("cmd", path, wanted).blocks] == [[[2, 1], [40, 3]]]
    assert read_table("cmd", path, KIND)[1].labels.tolist() == ["x", "y, z"]
    path = write(tmp_path, "\ufeffa,b\n1,2\n")
    assert [block.x.tolist() for block in open_table("cmd", path, wanted).blocks] == [[[1, 2]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"have a column kind; got .*table\.csv with a, b\. Pass --label with the name"),
        ("a:kind\n1:2\n", "have a column kind; got .* with 'a:kind'"),
        ("", "have a column kind; got .* with nothing"),
        ("a,b,c,d,e,f,g\n", "have a column kind; got .* with a, b, c, d, e and 2 more"),
        ("kind\nx\n", "have columns of numbers; got .* with kind"),
        ("a,a,b,kind\n1,2,3,x\n", r"name each column once; got a twice in .*\. Rename or drop one"),
        (",a,kind\n0,1,x\n", "name every column; got none for column 1 of .*an index is no feature"),
        ("a,kind\n", "have at least one row; got none in "),
        ("a,kind\n1,x\n2\n", "have 2 cells per row; got 1 in line 3"),
        (
            "a,b,kind\n1,2,x\n\n3,,y\n",
            "have a finite number in every cell; got an empty cell in column b, line 4. Fill it in",
        ),
        ("a,b,kind\n1,2,x\n3,red,y\n", ".* in every cell; got 'red' in column b, line 3"),
        ("a,b,kind\n1,2,x\n1_000,3,y\n", ".* in every cell; got '1_000' in column a, line 3"),
        ("a,kind\nnan,x\n", ".* in every cell; got 'nan' in column a, line 2"),
        (
            "a,kind\n1e39,x\n",
            r"have numbers of at most 3\.4e\+38 in absolute value; got '1e39' in column a, line 2\. Rescale",
        ),
        ("a,kind\n1,x\n2, \n", "name the class of every row; got none in line 3"),
        ('a,kind\n1,"x\n2,y\n', r"be a CSV file; got .*table\.csv \(unexpected end of data in line 3\)"),
        ("a,kind\n1,x\0\n", r"be a CSV file; got .* \(binary data in line 2\)"),
        (b"\x89PNG\r\n\x1a\n", "be a CSV file that can be read; got .*neither UTF-8 nor Latin-1 in line 2.*UTF-8"),
        ("a,kind\n1,äö\n2,".encode() + b"\xff\n", "be a CSV file that can be read; got .*no UTF-8 in line 3"),
        ("a,kind\n1,x\n".encode("utf-16")[:-1], "be a CSV file that can be read; got .*no UTF-16 in line"),
        ("a,kind\n1,x\n".encode("utf-16-le"), "be a CSV file; got .*binary data"),
    ],
)
def test_csv_that_cannot_be_read(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=f"^cmd: `path` must {message}"):
        read_table("cmd", write(tmp_path, text), KIND)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protonet.datasets.delimited.LONGEST", 100)
    with pytest.raises(InputError, match=r"be a CSV file; got .*no end of the line"):
        read_table("cmd", write(tmp_path, "a" * 1000), KIND)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a,c\n", r"have the model's columns; got .*table\.csv without b\. Name the columns as in the table"),
        ("a,b,c,kind\n", "have the model's columns; got .* with c more"),
        ("a\n", "have the model's columns; got .* without b"),
    ],
)
def test_other_columns_than_the_models(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^cmd: `path` must {message}"):
        open_table("cmd", write(tmp_path, header), Wanted("kind", labelled=False, columns=("a", "b"), dim=2))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones(3), r"`path` must hold real numbers of shape \(n, dim\); got float64 \(3,\)"),
        (np.ones((2, 3), complex), r"`path` must hold real numbers of shape \(n, dim\); got complex128"),
        (np.array([["a"]]), r"`path` must hold real numbers of shape \(n, dim\); got <U1"),
        (np.array([[None]]), r"`path` must be an NPY file of numbers or strings; got .*ValueError"),
        (np.ones((2, 3)), "`path` must have 2 features per row; got 3 in .*x.npy"),
        (np.ones((0, 2)), "`path` must have one label per row; got 2 for 0 rows"),
        (
            [[0, 1], [0, np.inf]],
            r"`path` must have a finite number in every cell; got inf in column 1, row 1 \(counted",
        ),
        (np.ones((3, 2)), "`path` must have one label per row; got 2 for 3 rows"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, x: object, message: str) -> None:
    np.save(tmp_path / "x.npy", np.asarray(x))
    np.save(tmp_path / "y.npy", ["a", "b"])
    with pytest.raises(InputError, match=f"^cmd: {message}"):
        read_table("cmd", tmp_path / "x.npy", KIND._replace(dim=2), tmp_path / "y.npy")


def test_files_of_another_kind(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 2)))
    (tmp_path / "y.npy").write_bytes((tmp_path / "x.npz").read_bytes())
    (tmp_path / "z.npy").write_bytes(b"")
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    np.save(tmp_path / "float.npy", np.ones(2))
    np.save(tmp_path / "names.npy", ["a", "b"])
    np.save(tmp_path / "empty.npy", np.ones((0, 2), int))
    np.save(tmp_path / "x.npy", np.ones((2, 2)))
    for name, labels, message in (
        ("table.doc", None, r"`path` must end in \.csv, .*\.npz, \.npy, \.parquet, \.xlsx; got "),
        ("x.npz", None, "`path` must hold an array y"),
        ("x.npz", "y.npy", "`--labels` must come with an NPY file of rows"),
        ("x.npy", None, "`--labels` must name the file of the classes; got none beside"),
        ("x.npy", "none.npy", "`--labels` must be a file that exists"),
        ("x.npy", "y.npy", "`--labels` must be an NPY file of numbers or strings"),
        ("x.npy", "float.npy", "`--labels` must be integers or strings; got float64"),
        ("empty.npy", "empty.npy", "`path` must have at least one row"),
        ("z.npy", "names.npy", "`path` must be an NPY file of numbers or strings; got .*EOFError"),
        ("none.csv", None, "`path` must be a file that exists"),
        ("none.parquet", None, "`path` must be a file that exists"),
        ("p.parquet", None, "`path` must be a Parquet file of numbers and text; got .*ArrowInvalid"),
    ):
        with pytest.raises(InputError, match=f"^cmd: {message}"):
            read_table("cmd", tmp_path / name, KIND, None if labels is None else tmp_path / labels)


def test_parquet_names_columns_and_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "table.parquet"
    for columns, message in (
        ({"a": [1, 2], "b": ["x", "y"], "kind": [0, 1]}, "every cell; got 'x' in column b, row 0"),
        ({"a": [1, None], "kind": [0, 1]}, r"every cell; got nan in column a, row 1 \(counted from 0\)"),
        ({"a": [1, 2], "kind": ["x", None]}, r"class of every row; got none in row 1 \(counted"),
    ):
        parquet.write_table(pa.table(columns), path)
        with pytest.raises(InputError, match=f"^cmd: `path` must .*{message}"):
            read_table("cmd", path, KIND)
    parquet.write_table(pa.table({"a": [1, 0], "kind": [7, 10]}), path)
    assert read_table("cmd", path, KIND)[1].labels.tolist() == [7, 10]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_numbers_are_read_as_they_were_written(values: list[float]) -> None:
    for cells in (map(repr, values), (f" {value:.17g} " for value in values)):
        assert _parse_numbers(np.array([*cells], object)).tolist() == values
