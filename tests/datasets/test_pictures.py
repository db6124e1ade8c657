"""Sets of pictures are decoded once, mapped from the cached file, and decoded again if a file changes."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from protonet.datasets import load_mini_imagenet
from protonet.datasets.pictures import (
    ImageSet,
    LabelledPictures,
    join_sides,
    list_pictures_by_class,
    load_pictures,
    make_layout,
    open_picture,
)
from tests.datasets.trees import draw_classes, make_folders, paint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "data")


def find(root: Path, size: int = 6) -> ImageSet:
    files, read = make_layout(list_pictures_by_class(root))
    return ImageSet(name="load_some", root=root, files=files, read=read, size=size)


def test_pixels_equal_pillows(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name, shape in (("a", (30, 40, 3)), ("b", (90, 70, 3))):
        (tmp_path / name).mkdir(parents=True)
        Image.fromarray(generator.integers(0, 256, shape, np.uint8)).save(tmp_path / name / "1.png")
    data = load_pictures(find(tmp_path), 12)
    assert (data.shape, data.class_names, data.y.tolist(), data.sides) == ((3, 12, 12), ("a", "b"), [0, 1], None)
    for row, name in zip(data.x, "ab", strict=True):
        picture = Image.open(tmp_path / name / "1.png").resize((12, 12), Image.Resampling.LANCZOS)
        assert row.reshape(3, 12, 12).permute(1, 2, 0).numpy().tolist() == np.asarray(picture).tolist()


def test_rows_are_mapped_and_scaled_where_they_are_read(root: Path, cache: Path) -> None:
    data = load_mini_imagenet(root, size=8)
    assert data.memory_map is not None
    assert not data.is_float_in_memory
    rows = torch.tensor([13, 0, 13])
    assert torch.equal(data.get_rows(rows), data.x[rows].float() / 255)
    (saved,) = cache.iterdir()
    assert saved.name.startswith("mini_imagenet-8-")
    novel = data.select_side("novel")  # a copy in memory
    assert (novel.x.dtype, novel.shape, novel.memory_map) == (torch.uint8, (3, 8, 8), None)
    assert torch.equal(novel.get_rows(torch.arange(4)), data.get_rows(torch.arange(10, 14)))


def test_the_same_pictures_are_not_decoded_again(root: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = load_mini_imagenet(root, size=8)
    (saved,) = cache.iterdir()
    written = saved.stat().st_mtime_ns
    again = load_mini_imagenet(f"{root}/../data", size=8)
    assert saved.stat().st_mtime_ns == written
    assert torch.equal(first.x, again.x)
    assert (first.class_names, first.sides, first.y.tolist()) == (again.class_names, again.sides, again.y.tolist())
    Image.fromarray(paint("zz", 0)).save(root / "test" / "fox" / "fox0.png")
    changed = load_mini_imagenet(root, size=8)  # in the same file of the cache
    assert [path.name for path in cache.iterdir()] == [saved.name]
    assert changed.get_rows(torch.tensor([10]))[0, 0] == ord("z") / 255
    os.utime(root / "val" / "dog" / "dog0.png", ns=(1, 1))
    assert torch.equal(load_mini_imagenet(root, size=8).x, changed.x)
    (root / "val" / "dog" / "dog0.png").unlink()
    assert len(load_mini_imagenet(root, size=8).y) == 13
    assert capsys.readouterr().err == ""


def test_a_damaged_cache_file_is_recomputed(root: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = load_mini_imagenet(root, size=8).x.clone()
    (saved,) = cache.iterdir()
    np.savez(cache / "other.npz", x=np.zeros(3))
    for damaged in (saved.read_bytes()[:-200], (cache / "other.npz").read_bytes(), b""):
        saved.write_bytes(damaged)
        assert torch.equal(load_mini_imagenet(root, size=8).x, expected)
        line = capsys.readouterr().err
        assert line.startswith(f"protonet: {saved} is made again: ")
        assert line.count("\n") == 1
    assert load_mini_imagenet(root, size=8).memory_map is not None


def test_without_a_cache_rows_are_in_memory(root: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = load_mini_imagenet(root, size=8)
    (saved,) = cache.iterdir()
    saved.unlink()
    cache.rmdir()
    cache.write_text("a file")
    result = load_mini_imagenet(root, size=8)
    assert "is not kept: " in capsys.readouterr().err
    assert (result.memory_map, result.shape) == (None, (3, 8, 8))
    rows = torch.arange(14)
    assert torch.equal(result.get_rows(rows), expected.get_rows(rows))


def test_pictures_of_every_kind_are_opened(tmp_path: Path) -> None:
    pixels = paint("ab", 0, 4)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    for picture in (pixels, file.getvalue(), tmp_path / "a.png"):
        assert np.array_equal(np.asarray(open_picture(picture)), pixels)
    with pytest.raises(ValueError, match=r"^`root` must hold images that can be read; got one of a file of many \("):
        open_picture(b"nothing")
    with pytest.raises(ValueError, match=r"got .*absent\.png \(no such file\)"):
        open_picture(tmp_path / "absent.png")


def test_numeric_class_names_on_several_sides_get_the_sides_names() -> None:
    part = LabelledPictures([b"", b""], ["0", "a"], None)
    joined = join_sides([part, None, LabelledPictures([b""], ["0"], None)])
    assert joined == LabelledPictures([b"", b"", b""], ["base 0", "a", "novel 0"], ["base", "base", "novel"])


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match=r"^`root` must hold one folder per class; got .*data without any"):
        find(tmp_path / "data")
    draw_classes(tmp_path / "data", ["ant"])
    with pytest.raises(ValueError, match=r"^`root` must have at least 2 classes; got 1"):
        load_pictures(find(tmp_path / "data"))
    result = find(tmp_path / "data")
    for size, error in ((0, ValueError), ("x", TypeError)):
        with pytest.raises(error, match=r"^`size` must be a whole number >= 1"):
            load_pictures(result, size)  # type: ignore[arg-type]
    (tmp_path / "data" / "ant" / "ant0.png").unlink()
    with pytest.raises(ValueError, match=r"^`root` must hold its pictures; got no .*ant0\.png \(No such"):
        load_pictures(result)
