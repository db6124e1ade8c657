"""Images in folders: lists of them, and their pixels."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from protonet.errors import optional_packages, raise_input_error

if TYPE_CHECKING:
    from PIL.Image import Image

#: Files with other suffixes are ignored.
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}

#: What is decoded, whatever a file's name says: nothing that runs another program, as EPS does.
FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "TIFF", "WEBP", "PPM")

#: What Pillow raises for a file that is no image, or damaged; and for one with too many pixels, by `open_plain`.
UNREADABLE_IMAGE = (OSError, SyntaxError, ValueError)


def list_folders(folder: Path) -> list[Path]:
    """List the folders in a folder in sorted order, without hidden ones; none if there is no such folder."""
    return sorted(entry for entry in folder.glob("[!.]*") if entry.is_dir())


def list_images(argument: str, folder: Path) -> list[Path]:
    """List the images in a class's folder in sorted order, without hidden ones; raise an InputError without any."""
    with os.scandir(folder) as entries:  # a million pictures: a Path for each question takes ten times as long
        names = sorted(entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))
    paths = [path for path in map(folder.joinpath, names) if path.suffix.lower() in SUFFIXES]
    if not paths:
        raise_input_error(argument, "have an image in every class", f"none in {folder}", "Add one or remove it.")
    return paths


def read_image(argument: str, path: Path, *, size: int | None, colour: bool) -> np.ndarray:
    """Read an image's pixels: (height, width) uint8, or (height, width, 3) in colour, otherwise turned grey.

    It is resized to ``size`` pixels per side, each the mean of the area that it covers; None keeps its own size.
    Transparent images are put on white; 16 bits are scaled to 8. A MissingPackageError is raised without Pillow, an
    InputError if the file is not an image, or damaged.
    """
    with optional_packages(install="pip install pillow"):
        from PIL import Image  # noqa: PLC0415 - optional
    try:
        pixels = open_plain(path).convert("RGB" if colour else "L")
    except UNREADABLE_IMAGE as error:
        got = f"{path} ({type(error).__name__})"
        raise_input_error(argument, "hold images that can be read", got, "Replace that file.")
    if size is not None:
        pixels = pixels.resize((size, size), Image.Resampling.BOX)
    return np.asarray(pixels, np.uint8)


def open_plain(path: Path | BinaryIO, least: int | None = None) -> Image:
    """Open and decode an image's file, the way up that its camera says, of 8 bits per channel, without transparency.

    A JPEG of more than twice ``least`` pixels per side may come smaller, which is read faster. What Pillow raises for a
    file that is no image, or damaged, is one of ``UNREADABLE_IMAGE``.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415 - optional

    try:
        with Image.open(path, formats=FORMATS) as image:
            if least is not None:
                image.draft(None, (least, least))
            return _make_plain(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:
        raise ValueError("too many pixels") from error


def draw_plain(path: Path, side: int) -> bytes:
    """Return an image's file as PNG of at most so many pixels per side; raises as `open_plain`."""
    image, file = open_plain(path, side).convert("RGB"), io.BytesIO()
    image.thumbnail((side, side))
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _make_plain(image: Image) -> Image:
    """Return a decoded image of 8 bits per channel, without transparency unless it had 16 bits of grey."""
    from PIL import Image  # noqa: PLC0415 - optional

    if image.mode.startswith("I"):  # 16 bits of grey, which convert would clip
        return Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image.load()
    return image
