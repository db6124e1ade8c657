"""NPZ files (mapped or not), CSV files and digits are loaded; each fault of a file is reported in one line."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import datasets

from protonet.datasets import Dataset, load_csv, load_digits, load_npz
from protonet.datasets import dataset as dataset_module
from protonet.datasets.dataset import make_dataset
from protonet.datasets.files import write_npz
from protonet.errors import MissingPackageError


class TestNpz:
    def save(self, folder: Path, **arrays: object) -> Path:
        path = folder / "data.npz"
        np.savez(path, **{name: np.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]
        return path

    def test_integers_keep_their_order(self, tmp_path: Path) -> None:
        x = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
        data = load_npz(self.save(tmp_path, x=x, y=[[10], [-1], [9], [10]]))
        assert data.x.tolist() == x.reshape(4, 6).tolist()
        assert (data.y.tolist(), data.class_names) == ([2, 0, 1, 2], ("-1", "9", "10"))

    def test_split_under_other_names(self, tmp_path: Path) -> None:
        split = ["train", "TRAIN", "Base", "val", "valid", "Validation", "test", "novel"]
        data = load_npz(self.save(tmp_path, x=np.eye(8), y=[0, 0, *range(1, 7)], split=split))
        assert data.sides == ("base",) * 2 + ("validation",) * 3 + ("novel",) * 2

    def test_other_files_and_wrong_shapes_are_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.eye(2))
        with pytest.raises(ValueError, match=r"be an NPZ file; got .*x\.npy"):
            load_npz(tmp_path / "x.npy")
        assert load_npz(self.save(tmp_path, x=np.eye(8), y=range(8), maps=[2, 2, 2])).shape == (2, 2, 2)
        for maps in ([2, 2], [2, 2, 3], [-2, -2, 2], ["2", "2", "2"]):
            with pytest.raises(ValueError, match=r"^`maps` must be channels, height and width of a row; got"):
                load_npz(self.save(tmp_path, x=np.eye(8), y=range(8), maps=maps))


class TestCsv:
    def test_columns_and_label(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv"
        path.write_text('a,kind,b\n1,x,2.5\n\n-3,"y, z",4e1\n', encoding="utf-8-sig")
        data = load_csv(path, label="kind")
        assert data.x.tolist() == [[1, 2.5], [-3, 40]]
        assert (data.y.tolist(), data.class_names) == ([0, 1], ("x", "y, z"))

    def test_errors(self, tmp_path: Path) -> None:
        cases: list[tuple[str, str]] = [
            ("a,b\n1,2\n", "have one column label and columns of numbers; got .* with a, b\\. "),
            ("", "have one column label .* with nothing"),
            ("a,label\n1,x\n2\n", "have 2 cells per row; got 1 in line 3"),
            ("a,label\n1,x\ntwo,y\n", "hold numbers beside the label; got 'two' in line 3"),
            ("a,label\n1,x\n,y\nnan,y\n", "be finite; got NaN or infinity in 2 of 3 rows: 1, 2. "),
            ("a,label\n", "have at least 2 classes; got 0"),
        ]
        for text, message in cases:
            path = tmp_path / "data.csv"
            path.write_text(text)
            with pytest.raises(ValueError, match=f"^`path` must {message}") as caught:
                load_csv(path)
            assert "label=" not in str(caught.value)  # the command line does not have this argument

    def test_unreadable_files_are_refused(self, tmp_path: Path) -> None:
        for absent in (tmp_path / "absent.csv", tmp_path):
            with pytest.raises(ValueError, match=rf"^no such file: {absent}$"):
                load_csv(absent)
        (tmp_path / "data.csv").write_bytes("ä,label\n".encode() + b"1,\xff\n")
        with pytest.raises(ValueError, match=r"can be read; got .* \(no UTF-8 in line 2\)\. Save it as UTF-8, or"):
            load_csv(tmp_path / "data.csv")


SPLIT = "`split` must keep every class on one side; got class b on base and novel"


def make_rows(n: int = 12, *, dtype: str = "float32", shape: tuple[int, ...] = (5,)) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, *shape)).astype(dtype)


@pytest.mark.parametrize(("dtype", "x_last"), [("float16", False), ("float32", True), ("float64", False)])
def test_a_mapped_file_equals_a_loaded_one(tmp_path: Path, dtype: str, x_last: bool) -> None:
    arrays = {"x": make_rows(dtype=dtype, shape=(2, 3)), "y": np.arange(12) % 3, "split": ["base", "novel", "base"] * 4}
    np.savez(tmp_path / "f.npz", **dict(sorted(arrays.items(), reverse=x_last)))  # type: ignore[arg-type]
    np.savez_compressed(tmp_path / "packed.npz", **arrays)  # type: ignore[arg-type]
    data = load_npz(tmp_path / "f.npz", memory_map=True)
    loaded = load_npz(str(tmp_path / "packed.npz"), memory_map=True)
    assert data.memory_map is not None
    load_npz(tmp_path / "f.npz").x.div_(2)  # a copy, which can be changed
    assert loaded.memory_map is None
    assert data.x.numpy().tobytes() == arrays["x"].tobytes()  # type: ignore[attr-defined]
    assert torch.equal(data.x.float(), loaded.x)
    assert torch.equal(data.y, loaded.y)
    assert (data.class_names, data.sides) == (loaded.class_names, loaded.sides)
    rows = torch.tensor([11, 0, 5, 5]).repeat(100)
    assert torch.equal(data.get_rows(rows), data.x[rows])
    assert torch.equal(data.get_rows(rows).float(), loaded.get_rows(rows))
    data.release_memory()
    assert torch.equal(data.x.float(), loaded.x)
    selected = data.select_classes([1])
    assert selected.memory_map is None
    assert torch.equal(selected.x.float(), loaded.select_classes([1]).x)
    loaded.release_memory()


def test_arrays_that_cannot_be_mapped_are_loaded(tmp_path: Path) -> None:
    whole = np.arange(60, dtype=np.int32).reshape(12, 5)
    for x in (make_rows(dtype=">f4"), np.asfortranarray(make_rows()), whole, make_rows(dtype="longdouble")):
        for save in (np.savez, np.savez_compressed):
            save(tmp_path / "f.npz", x=x, y=np.arange(12) % 2)
            data = load_npz(tmp_path / "f.npz", memory_map=True)
            assert (data.memory_map, data.x.dtype) == (None, torch.float32), save
            assert data.x.tolist() == x.astype(np.float32).tolist(), save


@pytest.mark.parametrize("piece", [8, 2**26])
def test_rows_with_nan_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(dataset_module, "BYTES_PER_CHECK", piece)
    x = make_rows(30)
    x[[3, 17, 20, 21, 29], [0, 1, 2, 3, 4]] = [np.nan, np.inf, -np.inf, np.nan, np.nan]
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "f.npz", x=x, y=np.arange(30) % 2)
        message = "^`x` must be finite; got NaN or infinity in 5 of 30 rows: 3, 17, 20 and 2 more. Drop"
        with pytest.raises(ValueError, match=message):
            load_npz(tmp_path / "f.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.eye(2)}, r"`path` must hold an array y; got .*f\.npz with x\. .*numpy\.savez"),
        ({"y": np.arange(2)}, "`path` must hold an array x"),
        ({"x": np.eye(2), "y": np.array([0, "a"], object)}, "`path` must hold no object arrays"),
        ({"x": np.array([[1, None]], object), "y": [0]}, "`path` must hold no object arrays"),
        ({"x": np.eye(2), "y": np.arange(3)}, "`x` must have one label per row; got 3 for 2 rows"),
        ({"x": np.eye(2), "y": np.ones(2)}, "`y` must be integers or strings; got float64"),
        ({"x": np.eye(2), "y": [1, 1]}, "`x` must have at least 2 classes; got 1"),
        ({"x": np.ones(2), "y": [0, 1]}, r"`x` must be real, of shape \(n, dim\); got float64 \(2,\)"),
        ({"x": np.empty((0, 3)), "y": np.empty(0, int)}, "`x` must have at least 2 classes; got 0"),
        ({"x": np.eye(2), "y": [0, 1], "split": ["base", "x"]}, "`split` must have only sides .*; got 'x'. .* train"),
        ({"x": np.eye(3), "y": list("bab"), "split": ["novel", "base", "base"]}, SPLIT),
        ({"x": np.eye(2), "y": list("ab"), "split": np.array([b"a", b"\xff"])}, r"`split` must be UTF-8 if it is by"),
        ({"x": np.eye(2), "y": [0, 1], "split": ["base"]}, "`split` must have one side per row; got 1 for 2"),
        ({"x": np.eye(2), "y": np.array([b"a", b"\xff"])}, r"`y` must be UTF-8 if it is bytes; got b'\\xff'"),
        ({"x": [[1.0], [np.nan]], "y": [0, 1]}, "`x` must be finite; got NaN or infinity in 1 of 2 rows: 1. "),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    np.savez(tmp_path / "f.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{message}"):
        load_npz(tmp_path / "f.npz")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    for absent in (path, tmp_path):
        with pytest.raises(ValueError, match=rf"^no such file: {absent}$"):
            load_npz(absent)
    np.savez(path, x=make_rows(), y=np.arange(12) % 2)
    full = path.read_bytes()
    for damaged, expected_message in (
        (b"", " that can be read; got .*EOFError"),
        (b"something else", "; got"),
        (full[:300], " that can be read; got .*BadZip"),
        (full[:-30], ""),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"^`path` must be an NPZ file{expected_message}"):
            load_npz(path)


def read_resident() -> int:
    """Return how many bytes of files are in this process's memory."""
    result = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert result is not None
    return 1024 * int(result[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reports resident memory on Linux alone")
def test_memory_is_released(tmp_path: Path) -> None:
    x = np.zeros((2**17, 64), np.float32)  # 32 MiB
    np.savez(tmp_path / "f.npz", x=x, y=np.arange(len(x)) % 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_npz(tmp_path / "f.npz", memory_map=True)
    before = read_resident()
    data.x.sum()
    assert read_resident() - before > 2**24
    data.release_memory()
    assert read_resident() - before < 2**22
    data.get_rows(torch.arange(len(x)).flip(0))
    assert read_resident() - before < 2**22


def test_rows_are_written_a_few_at_a_time(tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
    more = {"y": np.arange(10) // 5, "split": np.array(["base"] * 5 + ["novel"] * 5)}
    with (tmp_path / "a.npz").open("wb") as file:
        write_npz(file, x.shape, "float32", (x[start : start + 3] for start in range(0, 10, 3)), more)
    with np.load(tmp_path / "a.npz") as result:
        assert result["x"].tolist() == x.tolist()
        assert (result["x"].dtype, result["split"].tolist()) == (np.float32, more["split"].tolist())
    data = load_npz(tmp_path / "a.npz", memory_map=True)
    assert data.memory_map is not None
    assert torch.equal(data.x, torch.from_numpy(x).flatten(1))
    assert data.sides == ("base", "novel")


def test_digits_equal_scikit_learns() -> None:
    data = load_digits()
    x, y = datasets.load_digits(return_X_y=True)
    assert (tuple(data.x.shape), data.x.dtype, data.y.dtype) == ((1797, 64), torch.float32, torch.int64)
    torch.testing.assert_close(data.x.double() * 16, torch.from_numpy(x))
    assert data.y.tolist() == y.tolist()
    assert data.class_names == tuple("0123456789")
    assert data.num_classes == 10
    assert data.sides is None


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # what Python does for a package that is not there
    line = r"`sklearn` must be installed\. "
    with pytest.raises(MissingPackageError, match=line + r'Run pip install -e "\.\[analysis\]"\.$'):
        load_digits()


def small() -> Dataset:
    sides = ["novel", "base", "novel", "base", "validation"]
    return make_dataset("x", torch.arange(10.0).reshape(5, 2), ["b", "a", "b", "a", "c"], sides)


def test_select_classes_renumbers() -> None:
    part = small().select_classes([2, 1])
    assert part.x.tolist() == [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]
    assert part.y.tolist() == [1, 1, 0]
    assert (part.class_names, part.sides) == (("c", "b"), ("validation", "novel"))


def test_wrong_selections_are_refused() -> None:
    for classes, message in (([0, 0], "name each class once; got .0, 0."), ([3], r"be in \[0, 3\); got 3")):
        with pytest.raises(ValueError, match=f"^`class_ids` must .*{message}"):
            small().select_classes(classes)
