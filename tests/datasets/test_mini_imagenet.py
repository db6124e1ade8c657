"""mini-ImageNet: rows and sides of a small tree, and the one line for each thing that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from protonet.datasets import load_mini_imagenet

LISTS = {"train": ("n03", "n01"), "val": ("n02",), "test": ("n05", "n04")}


def make_tree(root: Path) -> Path:
    """Make lists and images of one colour, three a class."""
    (root / "images").mkdir()
    for number, (name, labels) in enumerate(LISTS.items()):
        lines = ["filename,label"]
        for label in labels:
            for image in range(3):
                lines.append(f"{label}{image}.jpg,{label}")
                colour = np.array([50 * number, 10 * int(label[1:]), 60 * image], np.uint8)
                Image.fromarray(np.tile(colour, (20, 16, 1))).save(root / "images" / f"{label}{image}.jpg", quality=100)
        (root / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return root


def test_rows_and_sides(tmp_path: Path) -> None:
    data = load_mini_imagenet(str(make_tree(tmp_path)), size=4)
    assert (tuple(data.x.shape), data.x.dtype) == ((15, 48), torch.float32)
    assert data.class_names == ("n01", "n02", "n03", "n04", "n05")
    assert data.sides == ("base", "validation", "base", "novel", "novel")
    assert data.y.tolist() == [2, 2, 2, 0, 0, 0, 1, 1, 1, 4, 4, 4, 3, 3, 3]
    colour = torch.tensor([100.0, 40.0, 120.0]).repeat(16)  # the last image of n04
    torch.testing.assert_close(255 * data.x[-1], colour, rtol=0, atol=3)
    assert load_mini_imagenet(tmp_path, colour=False).x.shape == (15, 784)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^load_mini_imagenet: `root` must hold lists .*train\.csv \(FileNotFound"):
        load_mini_imagenet(tmp_path)
    make_tree(tmp_path)
    with pytest.raises(TypeError, match="`size` must be a whole number >= 1"):
        load_mini_imagenet(tmp_path, size="x")  # type: ignore[arg-type]
    (tmp_path / "images" / "n020.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"hold images that can be read; got .*n020\.jpg"):
        load_mini_imagenet(tmp_path)
    (tmp_path / "images" / "n021.jpg").unlink()
    with pytest.raises(ValueError, match=r"`root` must hold the images of val\.csv; got no .*n021\.jpg\. "):
        load_mini_imagenet(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filename,label\nn010.jpg,n01\n", r"have every class in one list; got n01 in val\.csv and train\.csv"),
        ("file,label\nn020.jpg,n02\n", r"have columns filename and label in every list; got .*with file, label"),
        ("filename,label\nn020.jpg\n", "have columns filename and label"),
        ("filename,label\n", "have columns filename and label"),
        ("", r"have columns filename and label .* with nothing"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str, message: str) -> None:
    (make_tree(tmp_path) / "val.csv").write_text(text)
    with pytest.raises(ValueError, match=f"^load_mini_imagenet: `root` must {message}"):
        load_mini_imagenet(tmp_path)
