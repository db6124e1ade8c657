"""Image files: listing of folders, decoding, and conversion of paths to text."""

from __future__ import annotations

import io
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from protonet.errors import raise_input_error

if TYPE_CHECKING:
    from PIL.Image import Image

#: Suffixes of image files; files with other suffixes are not read.
IMAGE_SUFFIXES = {
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp"),
    *(".pbm", ".pgm", ".ppm", ".pnm", ".avif", ".jp2", ".j2k", ".jpx"),
}

#: Formats that are decoded, whatever a file's suffix. EPS is not, since its decoder runs another program.
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000")

#: Exceptions of `decode_image` for files that are not images, are damaged, or have too many pixels.
UNREADABLE_IMAGE_ERRORS = (OSError, SyntaxError, ValueError)

#: Files and folders that operating systems and archivers add, in lower case.
SYSTEM_FILE_NAMES = {"__macosx", "@eadir", "thumbs.db", "desktop.ini"}

#: Usual maximum values of float and 32-bit pixels: 1, and the maxima of cameras with 8 to 16 bits.
USUAL_PIXEL_MAXIMA = (1, *(2**bits - 1 for bits in (8, 10, 12, 14, 16)))
#: Two fractions of one of ``USUAL_PIXEL_MAXIMA``: by how much interpolated pixels may exceed the limit, and how large
#: the brightest pixel must be at least.
MAX_PIXEL_OVERSHOOT, MIN_BRIGHTEST_PIXEL = 0.1, 1 / 16

_CONTROL_CHARACTERS = re.compile("[\0-\x1f\x7f-\x9f]")
_ESCAPED_BYTE = re.compile(rb"\\x(?!00)([0-9a-f]{2})")


def path_to_text(path: str | Path) -> str:
    r"""Convert a path to UTF-8 text, with other bytes and control characters as ``\xNN``; see `text_to_path`."""
    text = str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return _CONTROL_CHARACTERS.sub(lambda match: "".join(f"\\x{byte:02x}" for byte in match[0].encode()), text)


def text_to_path(text: str) -> Path:
    r"""Convert a text of `path_to_text` back to a path, unless there is a file whose name is the text itself."""
    if "\\x" not in text or os.path.lexists(text):
        return Path(text)
    name = _ESCAPED_BYTE.sub(lambda match: bytes.fromhex(match[1].decode()), text.encode("utf-8", "surrogateescape"))
    return Path(name.decode("utf-8", "surrogateescape"))


def is_hidden(name: str) -> bool:
    """Test whether a file or folder of this name is hidden, or added by an operating system or archiver."""
    return name.startswith(".") or name.lower() in SYSTEM_FILE_NAMES


def list_visible_folders(folder: Path) -> list[Path]:
    """List the visible folders in a folder in sorted order; none if the folder does not exist."""
    return sorted(entry for entry in folder.glob("*") if not is_hidden(entry.name) and entry.is_dir())


def list_images(argument: str, folder: Path) -> list[Path]:
    """List the image files of a class's folder, sorted, without hidden ones; raise an InputError if there is none.

    ``argument`` is the name of the folder's argument in the error message.
    """
    with os.scandir(folder) as entries:  # a million pictures: a Path for each question takes ten times as long
        names = sorted(entry.name for entry in entries if entry.is_file() and not is_hidden(entry.name))
    paths = [path for path in map(folder.joinpath, names) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not paths:
        raise_input_error(argument, "have an image in every class", f"none in {folder}", "Add one or remove it.")
    return paths


def open_image(argument: str, file: Path | BinaryIO, min_side: int | None = None) -> Image:
    """Open and decode an image as `decode_image` does, but raise an InputError if it cannot be read."""
    try:
        return decode_image(file, min_side)
    except UNREADABLE_IMAGE_ERRORS as error:
        name = path_to_text(file) if isinstance(file, Path) else "one of a file of many"
        got = f"{name} ({describe_image_error(error)})"
        raise_input_error(argument, "hold images that can be read", got, "Replace that file.")


def decode_image(path: Path | BinaryIO, min_side: int | None = None) -> Image:
    """Open and decode an image file, rotated as its metadata say, with 8 bits per channel, without transparency.

    A JPEG of more than twice ``min_side`` pixels per side may be decoded at a smaller size, which is faster. Raises one
    of ``UNREADABLE_IMAGE_ERRORS`` for a file that is not an image, or damaged.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415 - optional

    try:
        with Image.open(path, formats=_list_decoded_formats()) as image:
            if min_side is not None:
                image.draft(None, (min_side, min_side))
            scaled = image.format == "TIFF" and image.mode in {"F", "I"}
            upright = ImageOps.exif_transpose(image)
            return _scale_to_8_bits(upright) if scaled else _convert_to_8_bits(upright)
    except Image.DecompressionBombError as error:
        raise ValueError(f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels") from error
    except RuntimeError as error:  # the AVIF decoder, of damaged files
        raise ValueError(str(error)) from error


@lru_cache(maxsize=1)
def _list_decoded_formats() -> tuple[str, ...]:
    """List the formats that this Pillow decodes."""
    from PIL import Image, features  # noqa: PLC0415 - optional

    Image.init()
    return (*IMAGE_FORMATS, "AVIF") if "avif" in features.modules and features.check("avif") else IMAGE_FORMATS


def describe_image_error(error: Exception) -> str:
    """Describe in a few words why an image cannot be read."""
    from PIL import UnidentifiedImageError  # noqa: PLC0415 - optional

    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, UnidentifiedImageError):
        return f"damaged, or none of {', '.join(_list_decoded_formats())}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


def convert_to_png(path: Path, side: int) -> bytes:
    """Convert an image file to PNG of at most ``side`` pixels per side; raise the errors of `decode_image`."""
    image, file = decode_image(path, side).convert("RGB"), io.BytesIO()
    image.thumbnail((side, side))
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _convert_to_8_bits(image: Image) -> Image:
    """Decode an image, convert 16-bit grey to 8 bits, and replace transparency by a white background."""
    from PIL import Image  # noqa: PLC0415 - optional

    if image.mode.startswith("I"):  # 16 bits of grey, which convert would clip
        return Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image.load()
    return image


def _scale_to_8_bits(image: Image) -> Image:
    """Convert an image of float or 32-bit pixels to 8 bits, by a usual maximum or else the range of its pixels."""
    from PIL import Image  # noqa: PLC0415 - optional

    pixels = np.asarray(image, np.float64)
    low, high = float(pixels.min()), float(pixels.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("pixels that are not finite")
    limit = next((limit for limit in USUAL_PIXEL_MAXIMA if high <= (1 + MAX_PIXEL_OVERSHOOT) * limit), None)
    nominal = limit is not None and low >= -MAX_PIXEL_OVERSHOOT * limit and high >= MIN_BRIGHTEST_PIXEL * limit
    black, white = (0.0, float(limit or 0)) if nominal else (low, high)
    scaled = (pixels - black) / ((white - black) or 1.0) * 255
    return Image.fromarray(scaled.round().clip(0, 255).astype(np.uint8))
