"""Your own files: what is read, and the one line for each thing that is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from protonet.datasets import load_csv, load_images, load_npz


def write_images(folder: Path, classes: dict[str, list[tuple[int, int]]]) -> None:
    generator = np.random.default_rng(0)
    for name, sizes in classes.items():
        (folder / name).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes):
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


class TestImages:
    def test_rows_and_classes(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"dog": [(4, 3)] * 2, "cat": [(4, 3)], ".hidden": [(1, 1)]})
        (tmp_path / "dog" / "notes.txt").write_text("no image")
        data = load_images(tmp_path, colour=True)
        assert data.class_names == ("cat", "dog")
        assert data.y.tolist() == [0, 1, 1]
        pixels = np.asarray(Image.open(tmp_path / "dog" / "1.png"), np.float32) / 255
        torch.testing.assert_close(data.x[2], torch.from_numpy(pixels.reshape(-1)))
        assert tuple(load_images(str(tmp_path)).x.shape) == (3, 12)

    def test_resize(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"a": [(4, 4)], "b": [(8, 6)]})
        data = load_images(tmp_path, size=2)
        pixels = np.asarray(Image.open(tmp_path / "a" / "0.png").convert("L"), np.float64)
        means = pixels.reshape(2, 2, 2, 2).mean(axis=(1, 3)).reshape(-1) / 255
        torch.testing.assert_close(data.x[0].double(), torch.from_numpy(means), rtol=0, atol=1.01 / 255)
        with pytest.raises(ValueError, match=r"hold images of one size; got \(6, 8\) in .*0\.png after \(4, 4\)"):
            load_images(tmp_path)

    def test_errors(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"^load_images: `folder` must hold one folder a class; got .* no folder"):
            load_images(tmp_path / "absent")
        with pytest.raises(ValueError, match=r"one folder a class; got .* without any.*FOLDER/CLASS"):
            load_images(tmp_path)
        write_images(tmp_path, {"a": [(2, 2)]})
        with pytest.raises(ValueError, match="have at least 2 classes; got 1"):
            load_images(tmp_path)
        (tmp_path / "b").mkdir()
        with pytest.raises(ValueError, match=r"have an image in every class; got none in .*b"):
            load_images(tmp_path)
        (tmp_path / "b" / "x.png").write_bytes((tmp_path / "a" / "0.png").read_bytes()[:40])
        with pytest.raises(ValueError, match=r"images that can be read; got .*x\.png"):
            load_images(tmp_path)
        with pytest.raises(ValueError, match="`size` must be a whole number >= 1; got 0"):
            load_images(tmp_path, size=0)


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

    def test_split_by_class(self, tmp_path: Path) -> None:
        x = np.eye(3)
        data = load_npz(self.save(tmp_path, x=x, y=["b", "a", "b"], split=["novel", "base", "novel"]))
        assert data.sides == ("base", "novel")
        with pytest.raises(ValueError, match="keep every class on one side; got 1 too many"):
            load_npz(self.save(tmp_path, x=x, y=["b", "a", "b"], split=["novel", "base", "base"]))
        with pytest.raises(ValueError, match=r"have sides base, validation, novel alone; got .'test'."):
            load_npz(self.save(tmp_path, x=x, y=["b", "a", "b"], split=["base", "test", "base"]))
        with pytest.raises(ValueError, match="have one side a row; got 2 for 3 rows"):
            load_npz(self.save(tmp_path, x=x, y=["b", "a", "b"], split=["base", "novel"]))

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"x": np.eye(2)}, r"`path` must hold an array y; got .*data\.npz with x\. .*numpy\.savez"),
            ({"y": [0, 1]}, "`path` must hold an array x"),
            ({"x": np.eye(2), "y": np.array([0, "a"], object)}, "`path` must hold no object arrays"),
            ({"x": np.array([[1, None]], object), "y": [0]}, "`path` must hold no object arrays"),
            ({"x": np.ones(2), "y": [0, 1]}, r"`x` must be real, of shape \(n, dim\); got float64 \(2,\)"),
            ({"x": np.eye(2), "y": [0.0, 1.0]}, "`y` must be integers or strings; got float64"),
            ({"x": np.eye(2), "y": [0, 1, 1]}, "`x` must have one label a row; got 3 for 2 rows"),
            ({"x": np.eye(2), "y": [1, 1]}, "`x` must have at least 2 classes; got 1"),
            ({"x": [[1.0], [np.nan]], "y": [0, 1]}, "`x` must be finite; got NaN or infinity in 1 of 2 rows: 1. "),
            ({"x": np.empty((0, 3)), "y": np.empty(0, int)}, "`x` must have at least 2 classes; got 0"),
        ],
    )
    def test_errors(self, tmp_path: Path, arrays: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=f"^load_npz: {message}"):
            load_npz(self.save(tmp_path, **arrays))

    def test_not_an_npz(self, tmp_path: Path) -> None:
        path = self.save(tmp_path, x=np.eye(9), y=range(9))
        path.write_bytes(path.read_bytes()[:300])
        with pytest.raises(ValueError, match=r"^load_npz: `path` must be an NPZ file that can be read; got .*BadZip"):
            load_npz(path)
        path.write_bytes(b"something else")
        with pytest.raises(ValueError, match=r"^load_npz: `path` must be an NPZ file; got"):
            load_npz(path)
        path.write_bytes(b"")
        with pytest.raises(ValueError, match="EOFError"):
            load_npz(path)
        np.save(tmp_path / "x.npy", np.eye(2))
        with pytest.raises(ValueError, match=r"be an NPZ file; got .*x\.npy"):
            load_npz(tmp_path / "x.npy")
        with pytest.raises(ValueError, match="FileNotFoundError"):
            load_npz(tmp_path / "absent.npz")


class TestCsv:
    def test_columns_and_label(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv"
        path.write_text('a,kind,b\n1,x,2.5\n\n-3,"y, z",4e1\n', encoding="utf-8-sig")
        data = load_csv(path, label="kind")
        assert data.x.tolist() == [[1, 2.5], [-3, 40]]
        assert (data.y.tolist(), data.class_names) == ([0, 1], ("x", "y, z"))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,b\n1,2\n", "have one column label and columns of numbers; got .* with a, b"),
            ("", "have one column label .* with nothing"),
            ("label\nx\n", "have one column label"),
            ("a,label\n1,x\n2\n", "have 2 cells a row; got 1 in line 3"),
            ("a,label\n1,x\ntwo,y\n", "hold numbers beside the label; got 'two' in line 3"),
            ("a,label\n1,x\n,y\nnan,y\n", "be finite; got NaN or infinity in 2 of 3 rows: 1, 2. "),
            ("a,label\n", "have at least 2 classes; got 0"),
        ],
    )
    def test_errors(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "data.csv"
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^load_csv: `path` must {message}"):
            load_csv(path)

    def test_unreadable(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"be a CSV file that can be read; got .*FileNotFoundError"):
            load_csv(tmp_path / "absent.csv")
        (tmp_path / "data.csv").write_bytes(b"a,label\n\xff\xfe,x\n")
        with pytest.raises(ValueError, match="UnicodeDecodeError"):
            load_csv(tmp_path / "data.csv")
