"""Folders of pictures, their decoded pixels, and hand-made features: invariances and oracles."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features
from torch import Tensor

from protonet import InputError
from protonet.embeddings.pictures import descriptors
from protonet.embeddings.pictures.descriptors import (
    BATCH_SIZE,
    CELLS_PER_SIDE,
    DESCRIPTOR_PART_SCALES,
    N_FILTER_ORIENTATIONS,
    N_FILTER_SCALES,
    PICTURE_SIDE,
    compute_descriptors,
    descriptor_part_sizes,
    morlet_filter_spectra,
)
from protonet.embeddings.pictures.reading import (
    IMAGE_SUFFIXES,
    detect_broken_pictures,
    is_picture_path,
    list_pictures,
    locate_split_folder,
    map_pictures,
    path_to_text,
    read_pixels,
    text_to_path,
    warn_duplicate_pictures,
)
from tests.embeddings.cases import draw, write_folders


def test_a_folder_is_listed_by_class_in_the_order_of_names(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "root", per_class=2)
    (root / "disc" / "deep").mkdir()
    draw("disc", 9).save(root / "disc" / "deep" / "9.png")
    draw("disc", 9).save(root / "disc" / ".hidden.png")
    draw("disc", 8).save(root / "loose.png")
    (root / "cross" / "notes.txt").write_text("no picture")
    result = list_pictures(root, require_labels=True)
    names = [path.relative_to(root).as_posix() for path in result.paths]
    assert names == ["cross/0.png", "cross/1.png", "disc/0.jpg", "disc/1.jpg", "disc/deep/9.png"]
    assert result.labels == ["cross"] * 2 + ["disc"] * 3
    assert result.notes == [
        "left out: 1 pictures beside the class folders",
        "not read: 1 of 7 files: 1 .txt (cross/notes.txt)",
    ]
    everything = list_pictures(root, require_labels=False)
    assert everything.labels == ["", *result.labels]
    flat = list_pictures(root / "cross", require_labels=False)
    assert [path.name for path in flat.paths] == ["0.png", "1.png"]
    assert flat.labels is None
    with pytest.raises(InputError, match="must be a file or folder that exists"):
        list_pictures(tmp_path / "none.png", require_labels=False)
    assert is_picture_path(tmp_path)
    assert is_picture_path(Path("a.JPEG"))
    assert not is_picture_path(Path("a.csv"))


def test_a_folder_without_pictures_or_classes_is_refused(tmp_path: Path) -> None:
    for index, (made, labelled, message) in enumerate(
        (
            ("", True, "`path` must hold one folder for each class"),
            ("a/x b/__MACOSX/0.png", True, "`path` must hold pictures"),
            ("a/0.txt b/0.png", True, r"`path` must have a picture in every class folder; got none in .*a: 1 \.txt"),
            ("a/0 b/0.png c/1.heic", True, "got none in .*a and 1 more: 1 without extension"),
            ("train/a/0.png train/b/0.png Val/c/0.png", True, "look like a split .* Pass --split train"),
            ("train/a/0.png train/b/0.png eval/a/0.png", True, "look like a split .* Pass --split train"),
            ("holdout/a/0.png train/a/0.png", True, "holdout, train .* split .* Pass --split train"),
            ("train/a/0.png unlabelled/a/0.png test/a/0.png", True, "look like a split .* Pass --split train"),
            ("valid/a/0.png test/a/0.png test/b/0.png", True, "look like a split .* Pass --split valid"),
            ("train/a/0.png test/a/0.png", True, "look like a split .* Pass --split train"),
            ("meta-train/a/0.png meta-test/b/0.png", True, "look like a split .* Pass --split meta-train"),
            ("", False, "`path` must hold pictures"),
        )
    ):
        root = tmp_path / str(index)
        root.mkdir()
        for name in made.split():
            (root / name).parent.mkdir(exist_ok=True, parents=True)
            if not name.endswith("x"):
                draw("disc", 0).save(root / name, "PNG")
        with pytest.raises(InputError, match=message):
            list_pictures(root, require_labels=labelled)


@pytest.mark.parametrize("labelled", [True, False])
def test_system_files_and_empty_folders_are_skipped(tmp_path: Path, labelled: bool) -> None:
    root = write_folders(tmp_path, per_class=2)
    for name in ("__MACOSX/disc/._0.jpg", "__MACOSX/0.png", "disc/@eaDir/0.png", "disc/Thumbs.db", "empty/.DS_Store"):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_bytes(b"no picture")
    (root / "bare" / "deep").mkdir(parents=True)
    result = list_pictures(root, require_labels=labelled)
    assert result.labels == ["cross"] * 2 + ["disc"] * 2
    assert result.notes == ["left out: 2 class folders without a file: bare, empty"] * labelled


def test_a_split_is_recognised_by_its_folders(tmp_path: Path) -> None:
    for part in ("Training", "val", "other"):
        write_folders(tmp_path / part, per_class=1)
    assert locate_split_folder(tmp_path, "train").name == "Training"
    assert locate_split_folder(tmp_path, "valid").name == locate_split_folder(tmp_path, "validation").name == "val"
    assert locate_split_folder(tmp_path, "other").name == "other"
    with pytest.raises(InputError, match=r"got test; .* has Training, other, val"):
        locate_split_folder(tmp_path, "test")
    listing = list_pictures(tmp_path, require_labels=True)
    assert set(listing.labels or []) == {"Training", "val", "other"}
    (note,) = listing.notes
    assert note.startswith("warning: Training, val look like a split")
    (tmp_path / "other").rename(tmp_path / "Training" / "other")
    with pytest.raises(InputError, match=r"Training, val in .* look like a split"):
        list_pictures(tmp_path, require_labels=True)


def test_skipped_files_are_counted_by_type(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "root", per_class=1)
    for name in ("disc/a.heic", "disc/b.HEIC", "cross/c.svg", "cross/d"):
        (root / name).write_bytes(b"another format")
    for suffix in IMAGE_SUFFIXES:
        draw("disc", 0).save(root / "disc" / f"x{suffix}", "PNG")
    result = list_pictures(root, require_labels=True)
    assert len(result.paths) == 2 + len(IMAGE_SUFFIXES)
    (note,) = result.notes
    assert f"4 of {6 + len(IMAGE_SUFFIXES)} files" in note
    for text in ("2 .heic (disc/a.heic)", "1 .svg (cross/c.svg)", "1 without extension (cross/d)"):
        assert text in note


@pytest.mark.skipif(sys.platform in {"darwin", "win32"}, reason="file names are Unicode there")
def test_names_that_are_not_utf8_become_text_and_paths_again(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "root", per_class=1)
    names = [b"caf\xe9", b"tab\t\x1b[1m", b"\xc2\x9f", b"plain \\x41", "größe".encode()]
    for name in names:
        draw("disc", 1).save(root / "disc" / os.fsdecode(name + b".png"))
    (root / "cross").rename(root / os.fsdecode(b"kr\xe4he"))
    result = list_pictures(root, require_labels=True)
    texts = [path_to_text(path) for path in result.paths]
    assert all(text.encode().decode().isprintable() for text in texts)
    assert len(set(texts)) == len(names) + 2
    assert [text_to_path(text) for text in texts] == result.paths
    assert set(result.labels or []) == {"disc", "kr\\xe4he"}
    assert any("4 paths not in UTF-8" in note for note in result.notes)


def test_every_colour_mode_is_decoded(tmp_path: Path) -> None:
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
    for mode in ("LA", "P", "L"):
        image = Image.new("L", (4, 6), 200).convert(mode)
        image.putalpha(0) if mode == "LA" else image.info.update(transparency=image.getpixel((0, 0)))
        image.save(tmp_path / "clear.png")
        np.testing.assert_array_equal(read_pixels(tmp_path / "clear.png", 6, 4), 255, mode)
    assert read_pixels(tmp_path / "plain.png", 8, 5, grey=True).shape == (1, 8, 5)
    large = draw("disc", 3, side=640)
    large.save(tmp_path / "large.jpg", quality=95)
    large.save(tmp_path / "large.png")
    jpeg, png = (read_pixels(tmp_path / f"large.{suffix}", 64, 64).astype(int) for suffix in ("jpg", "png"))
    assert np.abs(jpeg - png).mean() < 4


@pytest.mark.parametrize("suffix", ["jfif", "jp2", "avif"])
def test_further_formats_are_decoded(tmp_path: Path, suffix: str) -> None:
    if suffix == "avif" and "avif" not in features.modules:
        pytest.skip("Pillow before 11.3")
    picture = draw("cross", 4)
    path = tmp_path / f"x.{suffix}"
    picture.save(path, {"jfif": "JPEG", "jp2": "JPEG2000", "avif": "AVIF"}[suffix], quality=95)
    assert is_picture_path(path)
    assert np.abs(read_pixels(path, 40, 40).astype(int) - np.asarray(picture).transpose(2, 0, 1)).mean() < 8
    path.write_bytes(path.read_bytes()[:-200])
    assert detect_broken_pictures([path]) == [True]


def read_tiff(path: Path, pixels: np.ndarray) -> np.ndarray:
    """Write pixels as TIFF and read them again."""
    Image.fromarray(pixels).save(path)
    grey: np.ndarray = read_pixels(path, *pixels.shape, grey=True)[0].astype(float)
    return grey


def test_float_and_wide_pixels_are_scaled_by_their_range(tmp_path: Path) -> None:
    path, grey = tmp_path / "x.tif", np.asarray(draw("disc", 5).convert("L"), float)
    for dtype, limit in ((np.float32, 1), (np.float32, 2**12 - 1), (np.int32, 255), (np.int32, 2**16 - 1)):
        for brightness in (1, 1.05):  # resampling overshoots
            result = read_tiff(path, (grey / 255 * limit * brightness).astype(dtype))
            np.testing.assert_allclose(result, (grey * brightness).clip(0, 255), atol=1)
    grey = ((grey - grey.min()) / np.ptp(grey) * 255).round()
    for low, high in ((-1, 1), (0, 1e-3), (2, 9), (0, 1e9)):  # other ranges are stretched
        np.testing.assert_allclose(read_tiff(path, (low + (high - low) * grey / 255).astype(np.float32)), grey, atol=1)
        assert not read_tiff(path, np.full((8, 8), low, np.float32)).any(), low
    with pytest.raises(InputError, match=r"x\.tif \(pixels that are not finite\)"):
        read_tiff(path, np.full((8, 8), np.nan, np.float32))


def test_a_damaged_tiff_writes_nothing_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The error names the file; libtiff alone would add a line for each damaged strip."""
    path = tmp_path / "x.tif"
    draw("disc", 5).convert("1").save(path, compression="group4")
    content = path.read_bytes()
    for start in range(8, 60):
        path.write_bytes(content[:start] + bytes(3) + content[start + 3 :])
        detect_broken_pictures([path])
    assert capfd.readouterr().err == ""


def test_equal_pixels_in_two_classes_are_reported(tmp_path: Path) -> None:
    root = write_folders(tmp_path, per_class=3)
    with Image.open(root / "disc" / "0.jpg") as decoded:
        decoded.save(root / "cross" / "other.bmp")
    (root / "cross" / "twin.png").write_bytes((root / "cross" / "1.png").read_bytes())
    paths, classes, _ = list_pictures(root, require_labels=True)
    assert classes is not None
    (note,) = warn_duplicate_pictures(paths, classes)
    assert note.startswith("warning: 1 picture in more than one class")
    assert f"{root / 'cross' / 'other.bmp'} = {root / 'disc' / '0.jpg'}" in note
    assert not warn_duplicate_pictures(paths, [""] * len(paths))
    turned = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))  # equal bytes, another shape
    turned.save(tmp_path / "a.png")
    Image.frombytes("L", (3, 4), turned.tobytes()).save(tmp_path / "b.png")
    assert not warn_duplicate_pictures([tmp_path / "a.png", tmp_path / "b.png"], ["a", "b"])
    (root / "disc" / "1.jpg").write_bytes(b"")
    with pytest.raises(InputError, match=r"1\.jpg \(.*--skip-broken"):
        warn_duplicate_pictures(paths, classes)


def test_broken_pictures_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folders(tmp_path / "root", per_class=2)
    full, broken = tmp_path / "root/disc/0.jpg", tmp_path / "root/cross/0.png"
    broken.write_bytes(broken.read_bytes()[:80])
    text = tmp_path / "root/cross/text.png"
    text.write_text("no picture")
    assert detect_broken_pictures([full, broken, text, tmp_path / "none.png"]) == [False, True, True, True]
    for path in (broken, text):
        with pytest.raises(InputError, match=rf"got .*{path.name} \(.*--skip-broken"):
            read_pixels(path, 8, 8)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    with pytest.raises(InputError, match=r"0\.jpg \(more than 1,400 pixels\)"):
        warn_duplicate_pictures([full], ["disc"])


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_order(tmp_path: Path, threads: int) -> None:
    root = write_folders(tmp_path / "root", per_class=3)
    paths = list_pictures(root, require_labels=True).paths * 12
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = map_pictures(paths, 4, 5, lambda x: x.float().flatten(1))
        assert torch.get_num_threads() == threads
        (root / "disc/2.jpg").write_text("")
        with pytest.raises(InputError, match=r"2\.jpg"):
            map_pictures(paths, 4, 5, lambda x: x.float().flatten(1))
    finally:
        torch.set_num_threads(before)
    saved = list(paths[:5])
    expected = np.stack([read_pixels(path, 4, 5).reshape(-1) for path in saved])
    np.testing.assert_array_equal(result[:5].numpy(), expected)


def read(kind: str, seed: int) -> Tensor:
    pixels = np.asarray(draw(kind, seed, PICTURE_SIDE)).transpose(2, 0, 1)
    return torch.from_numpy(pixels.copy())


def take(features: Tensor, name: str) -> Tensor:
    names = list(DESCRIPTOR_PART_SCALES)
    part: Tensor = features.split(list(descriptor_part_sizes().values()), dim=1)[names.index(name)]
    return part


def test_features_of_a_picture_do_not_depend_on_the_batch() -> None:
    pixels = torch.stack([read("disc", index) for index in range(BATCH_SIZE + 2)])
    pixels[0] = 255
    full = compute_descriptors(pixels)
    assert full.shape == (len(pixels), sum(descriptor_part_sizes().values()))
    assert full.dtype == torch.float32
    assert bool(full.isfinite().all())
    torch.testing.assert_close(compute_descriptors(pixels[-1:]), full[-1:], rtol=1e-5, atol=1e-5)


def test_grey_pictures_have_no_hue_and_colours_do_not_change_the_outline() -> None:
    grey = read("cross", 0).float().mean(dim=0).round().byte().expand(3, -1, -1)[None]
    red = torch.stack([grey[0, 0], grey[0, 1] // 2, grey[0, 2] // 2])[None]
    first, second = compute_descriptors(grey), compute_descriptors(red)
    assert float(take(first, "hues").abs().max()) < 1e-4 < float(take(second, "hues").max())
    near = torch.nn.functional.cosine_similarity(take(first, "outline"), take(second, "outline"))
    assert float(near) > 0.98


def test_texture_features_are_invariant_to_rotation() -> None:
    pixels = read("cross", 1)[None]
    pixels[:, :, : PICTURE_SIDE // 2] = 0
    after = pixels.rot90(1, dims=(2, 3))
    first, second = compute_descriptors(pixels), compute_descriptors(after)
    for name, error in (("texture", 0.02), ("figure", 0.05), ("colours", 1e-5), ("hues", 1e-5), ("neighbours", 0.05)):
        before, after = take(first, name), take(second, name)
        assert float((before - after).norm() / before.norm()) < error, name
    assert float((take(first, "outline") - take(second, "outline")).norm()) > 0.5


def test_responses_are_those_of_a_slow_convolution() -> None:
    grey = torch.rand(1, PICTURE_SIDE, PICTURE_SIDE, generator=torch.Generator().manual_seed(0))
    first, second = descriptors._scattering_coefficients(grey)
    spectrum, filters = torch.fft.fft2(grey), morlet_filter_spectra()
    response = torch.fft.ifft2(spectrum * filters[1, 3]).abs()
    expected = torch.nn.functional.adaptive_avg_pool2d(response, CELLS_PER_SIDE).flatten()
    result = first.view(N_FILTER_SCALES, N_FILTER_ORIENTATIONS, -1)[1, 3]
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    # of the second scale, turned by 2, to the first one's at 3: the means are over every other pixel
    finer = torch.fft.ifft2(spectrum * filters[0, 3]).abs()
    again = torch.fft.ifft2(torch.fft.fft2(finer) * filters[1, 5]).abs()[:, ::2, ::2].mean()
    torch.testing.assert_close(second[0, 0, 2, 3], again, rtol=1e-4, atol=1e-6)


def test_neighbours_of_a_light_spot_are_counted() -> None:
    grey = torch.zeros(1, PICTURE_SIDE, PICTURE_SIDE)
    grey[0, 20, 20] = 1.0
    fractions = descriptors._binary_pattern_histograms(grey)[0, :10].square() * PICTURE_SIDE**2
    # eight pixels have the spot beside them, one brighter neighbour or two where it lies between two
    assert float(fractions[0]) == pytest.approx(PICTURE_SIDE**2 - 8, abs=0.6)
    assert float(fractions[1:4].sum()) >= 7.5
