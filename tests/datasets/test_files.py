"""Images, NPZ files and CSV files of your own are loaded, and each fault of a file is reported in one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from protonet.datasets import load_csv, load_images, load_npz


def write_images(folder: Path, classes: dict[str, list[tuple[int, int]]]) -> None:
    generator = np.random.default_rng(0)
    for name, sizes in classes.items():
        (folder / name).mkdir(parents=True)
        for index, (height, width) in enumerate(sizes):
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


class TestImages:
    def test_rows_and_classes(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"dog": [(4, 3)] * 2, "cat": [(4, 3)], ".hidden": [(1, 1)]})
        (tmp_path / "dog" / "notes.txt").write_text("no image")
        (tmp_path / "dog" / "._0.png").write_text("no image")
        (tmp_path / "dog" / "folder.png").mkdir()
        data = load_images(tmp_path, colour=True)
        assert data.class_names == ("cat", "dog")
        assert data.y.tolist() == [0, 1, 1]
        pixels = np.asarray(Image.open(tmp_path / "dog" / "1.png"), np.float32) / 255
        torch.testing.assert_close(data.x[2], torch.from_numpy(pixels.transpose(2, 0, 1)).reshape(-1))
        assert data.shape == (3, 4, 3)
        grey = load_images(str(tmp_path))
        assert (tuple(grey.x.shape), grey.shape) == ((3, 12), (1, 4, 3))

    def test_resize(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"a": [(4, 4)], "b": [(8, 6)]})
        data = load_images(tmp_path, size=2)
        pixels = np.asarray(Image.open(tmp_path / "a" / "0.png").convert("L"), np.float64)
        means = pixels.reshape(2, 2, 2, 2).mean(axis=(1, 3)).reshape(-1) / 255
        torch.testing.assert_close(data.x[0].double(), torch.from_numpy(means), rtol=0, atol=1.01 / 255)
        with pytest.raises(ValueError, match=r"hold images of one size; got \(6, 8\) in .*0\.png after \(4, 4\)"):
            load_images(tmp_path)

    @pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
    def test_16_bits_keep_their_levels(self, tmp_path: Path, suffix: str) -> None:
        pixels = np.array([[0, 257, 30000], [40000, 65534, 65535]], np.uint16)
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            Image.fromarray(pixels).save(tmp_path / name / f"1.{suffix}")
        expected = torch.from_numpy(pixels / 65535).reshape(-1)
        for colour in (False, True):
            x = load_images(tmp_path, colour=colour).x[0].reshape(-1, 6)
            torch.testing.assert_close(x.double(), expected.expand_as(x), rtol=0, atol=0.51 / 255)

    def test_transparent_is_white(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"a": [(1, 3)], "b": [(1, 3)]})
        grey = np.array([[10, 20, 30]], np.uint8)
        for mode in ("RGBA", "LA", "P", "L"):
            image, opacity = Image.fromarray(grey).convert(mode), np.array([0.0, 1.0, 1.0])
            settings: dict[str, Any] = {"transparency": image.getpixel((0, 0))} if mode in {"P", "L"} else {}
            if not settings:
                opacity[1] = 102 / 255
                image.putalpha(Image.fromarray(opacity[None] * 255).convert("L"))
            image.save(tmp_path / "a" / "0.png", **settings)
            expected = torch.from_numpy((opacity * grey[0] + (1 - opacity) * 255) / 255)
            torch.testing.assert_close(load_images(tmp_path).x[0].double(), expected, rtol=0, atol=1.01 / 255)

    @pytest.mark.parametrize("suffix", ["png", "ppm"])
    def test_a_broken_image_is_refused(self, tmp_path: Path, suffix: str) -> None:
        write_images(tmp_path, {"a": [(9, 9)], "b": [(9, 9)]})
        buffer = io.BytesIO()
        Image.open(tmp_path / "a" / "0.png").save(buffer, "PPM" if suffix == "ppm" else "PNG")
        full = buffer.getvalue()
        length = full.find(b"IDAT") - 1
        broken = full[:length] + b"\0" + full[length + 1 :] if suffix == "png" else b"P3" + full[2:]
        (tmp_path / "b" / f"1.{suffix}").write_bytes(broken)
        with pytest.raises(ValueError, match=rf"images that can be read; got .*1\.{suffix} \(.+\)"):
            load_images(tmp_path)

    def test_errors(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"^`folder` must hold one folder per class; got .* no folder"):
            load_images(tmp_path / "absent")
        with pytest.raises(ValueError, match=r"one folder per class; got .* without any.*FOLDER/CLASS"):
            load_images(tmp_path)
        write_images(tmp_path, {"a": [(2, 2)]})
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
        with pytest.raises(ValueError, match=r"can be read; got .* \(no UTF-8 in line 2\)\. Save it as UTF-8\.$"):
            load_csv(tmp_path / "data.csv")
