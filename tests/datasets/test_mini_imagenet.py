"""mini-ImageNet's lists: the order of rows, and the one line for each thing that is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from protonet.datasets import load_mini_imagenet
from tests.datasets.trees import make_csv


def test_rows_are_in_the_order_of_the_lists(tmp_path: Path) -> None:
    lines = (make_csv(tmp_path) / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join(lines[::-1][:-1]))  # nor is the header needed
    data = load_mini_imagenet(tmp_path, size=4)
    assert [data.class_names[label] for label in data.y.tolist()][:6] == ["cat", "cat", "bee", "bee", "ant", "ant"]
    assert data.sides == ("base", "base", "base", "validation", "validation", "novel", "novel")


def test_errors(tmp_path: Path) -> None:
    make_csv(tmp_path)
    (tmp_path / "images" / "dog0.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"^`root` must hold images that can be read; got .*dog0\.jpg"):
        load_mini_imagenet(tmp_path)
    (tmp_path / "images" / "dog1.jpg").unlink()
    with pytest.raises(ValueError, match=r"`root` must hold its pictures; got no .*dog1\.jpg \(No such file"):
        load_mini_imagenet(tmp_path)
    (tmp_path / "val.csv").unlink()
    with pytest.raises(ValueError, match=r"hold lists and pictures that can be read; got .*val\.csv \(FileNotFound"):
        load_mini_imagenet(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filename,label\nant0.jpg,ant\n", r"keep every class on one side; got class ant on base and validation"),
        ("file,label\ndog0.jpg,dog\n", r"have columns filename and label in every list; got .*with file, label"),
        ("filename,label\ndog0.jpg\n", "have columns filename and label"),
        ("filename,label\n", "have columns filename and label"),
        ("", r"have columns filename and label .* with nothing"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str, message: str) -> None:
    (make_csv(tmp_path) / "val.csv").write_text(text)
    with pytest.raises(ValueError, match=f"^`root` must {message}"):
        load_mini_imagenet(tmp_path)
