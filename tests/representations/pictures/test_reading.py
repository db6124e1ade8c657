"""Pictures from files: which there are, and what they are decoded to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from protonet import InputError
from protonet.representations.pictures.reading import (
    are_pictures,
    find_broken,
    list_pictures,
    map_pictures,
    read_pixels,
)
from tests.representations.pictures.cases import draw, write_folders


def test_a_folder_is_listed_by_class_in_the_order_of_names(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "root", each=2)
    (root / "disc" / "deep").mkdir()
    draw("disc", 9).save(root / "disc" / "deep" / "9.png")
    draw("disc", 9).save(root / "disc" / ".hidden.png")
    draw("disc", 8).save(root / "loose.png")
    (root / "cross" / "notes.txt").write_text("no picture")
    found = list_pictures(root, labelled=True)
    names = [path.relative_to(root).as_posix() for path in found.paths]
    assert names == ["cross/0.png", "cross/1.png", "disc/0.jpg", "disc/1.jpg", "disc/deep/9.png"]
    assert found.classes == ["cross"] * 2 + ["disc"] * 3
    assert found.notes == ["left out: 1 pictures beside the class folders"]
    everything = list_pictures(root, labelled=False)
    assert everything.classes == ["", *found.classes]
    flat = list_pictures(root / "cross", labelled=False)
    assert [path.name for path in flat.paths] == ["0.png", "1.png"]
    assert flat.classes is None
    with pytest.raises(InputError, match="must be a file or folder that exists"):
        list_pictures(tmp_path / "none.png", labelled=False)
    assert are_pictures(tmp_path)
    assert are_pictures(Path("a.JPEG"))
    assert not are_pictures(Path("a.csv"))


@pytest.mark.parametrize(
    ("made", "labelled", "message"),
    [
        ((), True, "`path` must hold one folder for each class"),
        (("a/0.png", "b/"), True, "`path` must have a picture in every class folder; got none in .*b"),
        (("a/0.txt", "b/0.png"), True, "`path` must have a picture in every class folder; got none in .*a"),
        ((), False, "`path` must hold pictures"),
        (("a/",), False, "`path` must hold pictures"),
    ],
)
def test_a_folder_without_what_it_needs_is_refused(
    tmp_path: Path, made: tuple[str, ...], labelled: bool, message: str
) -> None:
    for name in made:
        path = tmp_path / name
        if name.endswith("/"):
            path.mkdir()
            continue
        path.parent.mkdir(exist_ok=True)
        draw("disc", 0).save(path, "PNG")
    with pytest.raises(InputError, match=message):
        list_pictures(tmp_path, labelled=labelled)


def test_every_mode_is_decoded_as_people_see_it(tmp_path: Path) -> None:
    colour = np.zeros((6, 4, 3), np.uint8)
    colour[:3] = (200, 40, 90)
    plain = Image.fromarray(colour)
    plain.save(tmp_path / "plain.png")
    plain.quantize(4).save(tmp_path / "palette.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held upright
    plain.rotate(90, expand=True).save(tmp_path / "turned.png", exif=turned)
    clear = np.dstack([colour, np.where(np.arange(6)[:, None] < 3, 255, 0) * np.ones((1, 4))]).astype(np.uint8)
    Image.fromarray(clear, "RGBA").save(tmp_path / "clear.png")
    Image.fromarray(colour[..., 0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    expected = colour.transpose(2, 0, 1)
    for name in ("plain", "palette", "turned"):
        np.testing.assert_array_equal(read_pixels(tmp_path / f"{name}.png", 6, 4), expected, name)
    np.testing.assert_array_equal(read_pixels(tmp_path / "clear.png", 6, 4)[:, 3:], 255)
    np.testing.assert_array_equal(read_pixels(tmp_path / "deep.png", 6, 4), np.stack([expected[0]] * 3))
    assert read_pixels(tmp_path / "plain.png", 8, 5, grey=True).shape == (1, 8, 5)
    large = draw("disc", 3, side=640)
    large.save(tmp_path / "large.jpg", quality=95)
    large.save(tmp_path / "large.png")
    jpeg, png = (read_pixels(tmp_path / f"large.{suffix}", 64, 64).astype(int) for suffix in ("jpg", "png"))
    assert np.abs(jpeg - png).mean() < 4


def test_broken_pictures_are_named(tmp_path: Path) -> None:
    write_folders(tmp_path / "root", each=2)
    whole, broken = tmp_path / "root/disc/0.jpg", tmp_path / "root/cross/0.png"
    broken.write_bytes(broken.read_bytes()[:80])
    text = tmp_path / "root/cross/text.png"
    text.write_text("no picture")
    assert find_broken([whole, broken, text, tmp_path / "none.png"]) == [False, True, True, True]
    for path in (broken, text):
        with pytest.raises(InputError, match=rf"got .*{path.name} \(.*--skip-broken"):
            read_pixels(path, 8, 8)


@pytest.mark.parametrize("threads", [1, 2])
def test_pictures_come_in_their_order_whatever_the_threads(tmp_path: Path, threads: int) -> None:
    root = write_folders(tmp_path / "root", each=3)
    paths = list_pictures(root, labelled=True).paths * 12
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = map_pictures(paths, 4, 5, lambda x: x.float().flatten(1))
        assert torch.get_num_threads() == threads
        (root / "disc/2.jpg").write_text("")
        with pytest.raises(InputError, match=r"2\.jpg"):
            map_pictures(paths, 4, 5, lambda x: x.float().flatten(1))
    finally:
        torch.set_num_threads(before)
    kept = list(paths[:5])
    expected = np.stack([read_pixels(path, 4, 5).reshape(-1) for path in kept])
    np.testing.assert_array_equal(found[:5].numpy(), expected)
