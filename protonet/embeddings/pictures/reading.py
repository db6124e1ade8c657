"""Image files and folders of pictures: classes and files in a folder, paths as text, and pixels, decoded in threads."""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn, TypeVar

import numpy as np

from protonet._io import progress_bar
from protonet._text import plural, shorten_list
from protonet.errors import optional_packages, raise_input_error

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
if TYPE_CHECKING:
    from PIL.Image import Image

Outcome = TypeVar("Outcome")
#: Usual folder names of each split of a data set. A prefix of ``SPLIT_PREFIXES`` may precede them.
SPLIT_FOLDER_NAMES = {
    "train": ("train", "training"),
    "valid": ("valid", "val", "validation", "dev", "eval", "evaluation"),
    "test": ("test", "testing", "holdout", "hold-out", "hold_out", "heldout", "held-out", "held_out"),
    "unlabelled": ("unlabelled", "unlabeled"),
}
SPLIT_PREFIXES = ("meta-", "meta_")


class PictureListing(NamedTuple):
    """The pictures below a folder, in the order of their names."""

    paths: list[Path]
    labels: list[str] | None
    """The name of the class of each picture, "" if it has none. None if there are no class folders."""
    notes: list[str]  #: Messages to the user about skipped files.


def is_picture_path(path: Path) -> bool:
    """Test whether a path is a folder, or a file with the suffix of a picture."""
    return path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES


def contains_pictures(folder: Path) -> bool | None:
    """Test whether a folder holds pictures (True) rather than Parquet files (False); None if it holds neither."""
    suffixes = {path.suffix.lower() for path in folder.rglob("*")}
    if ".parquet" in suffixes:
        return False
    return True if suffixes & IMAGE_SUFFIXES else None


class _FolderFiles(NamedTuple):
    """The visible files below a folder, in the order of their names."""

    pictures: list[Path]  #: Files with the suffix of a picture.
    other_files: list[Path]  #: All other files.


def list_pictures(path: Path, *, require_labels: bool) -> PictureListing:
    """List the pictures of a folder with or without a folder for each class, or a single picture.

    Hidden files and folders, and those that operating systems add, are skipped. Other files without the suffix of a
    picture are counted in a note, as are empty class folders. If ``require_labels``, each picture must have a class:
    pictures beside class folders are left out, and folders of the parts of a data set or without a picture are errors.
    """
    if path.is_file():
        if require_labels:
            constraint = "be a folder with a folder for each class"
            raise_input_error("path", constraint, path_to_text(path), "Pass the folder.")
        return PictureListing([path], None, [])
    if not path.is_dir():
        raise_input_error("path", "be a file or folder that exists", path_to_text(path), "")
    loose, loose_others = _list_folder_files(path.iterdir(), path)
    files = {folder: _list_folder_files(folder.rglob("*"), folder) for folder in list_visible_folders(path)}
    others = [*loose_others, *(other for listed in files.values() for other in listed.other_files)]
    if not files and (require_labels or not loose):
        got = f"{path_to_text(path)} with {len(loose)} pictures and no folder"
        must = "hold one folder for each class" if require_labels else "hold pictures"
        remedy = _format_table_advice(others) or "Put the pictures of each class in a folder of its own."
        raise_input_error("path", must, f"{got}{_format_suffix_counts(others, path)}", remedy)
    notes = _warn_empty_class_folders(path, files) if require_labels else []
    pictures = [("", picture) for picture in loose] * (not require_labels)
    pictures += [(path_to_text(folder.name), picture) for folder in files for picture in files[folder].pictures]
    if not pictures:
        got = f"{path_to_text(path)} without one{_format_suffix_counts(others, path)}"
        remedy = _format_table_advice(others) or f"Their names end in {', '.join(sorted(IMAGE_SUFFIXES))}."
        raise_input_error("path", "hold pictures", got, remedy)
    paths = [picture for _, picture in pictures]
    notes += [f"left out: {len(loose)} pictures beside the class folders"] * (require_labels and bool(loose))
    empty = [path_to_text(folder.name) for folder, listed in files.items() if not listed.pictures]
    if require_labels and empty:
        notes.append(f"left out: {plural(len(empty), 'class folder')} without a file: {shorten_list(empty)}")
    if others:
        total = len(others) + len(loose) + sum(len(listed.pictures) for listed in files.values())
        notes.append(f"not read: {len(others)} of {plural(total, 'file')}{_format_suffix_counts(others, path)}")
    names = [picture.relative_to(path) for picture in paths]
    escaped = [path_to_text(name) for name in names if path_to_text(name) != str(name)]
    if escaped:
        notes.append(f"{plural(len(escaped), 'path')} not in UTF-8, written with escapes: {shorten_list(escaped)}")
    return PictureListing(paths, [name for name, _ in pictures] if files else None, notes)


def _list_folder_files(paths: Iterable[Path], folder: Path) -> _FolderFiles:
    """List the visible files among paths below a folder."""
    visible = [path for path in paths if not any(map(is_hidden, path.relative_to(folder).parts))]
    files = _FolderFiles([], [])
    for path in sorted(path for path in visible if path.is_file()):
        (files.pictures if path.suffix.lower() in IMAGE_SUFFIXES else files.other_files).append(path)
    return files


def _warn_empty_class_folders(path: Path, files: Mapping[Path, _FolderFiles]) -> list[str]:
    """Return warnings about class folders without pictures; raise an InputError if all are empty or are splits."""
    notes = list[str]()
    filled = [folder for folder, listed in files.items() if listed.pictures]
    parts = {folder: part for folder in filled if (part := _get_split(folder.name)) and list_visible_folders(folder)}
    if len(set(parts.values())) > 1:
        first = min(parts, key=lambda folder: [*SPLIT_FOLDER_NAMES].index(parts[folder]))
        names, option = ", ".join(path_to_text(folder.name) for folder in parts), f"--split {path_to_text(first.name)}"
        if len(parts) == len(filled):
            got = f"{names} in {path_to_text(path)}, which look like a split of a data set"
            raise_input_error("path", "hold one folder for each class", got, f"Pass {option}.")
        notes.append(f"warning: {names} look like a split of a data set, and are read as classes; {option} reads one")
    unread = [folder for folder, listed in files.items() if listed.other_files and not listed.pictures]
    if unread:
        others = _format_suffix_counts(files[unread[0]].other_files, path)
        got = f"none in {shorten_list(map(path_to_text, unread), 1)}{others}"
        remedy = _format_table_advice(files[unread[0]].other_files) or "Add one, or remove the folder."
        raise_input_error("path", "have a picture in every class folder", got, remedy)
    return notes


def _format_table_advice(others: Sequence[Path]) -> str:
    """Format the advice that texts belong in a table, if all files are texts; "" otherwise."""
    is_text = bool(others) and all(other.suffix.lower() == ".txt" for other in others)
    return "Texts go into a table: a column of texts, and one of labels." if is_text else ""


def _get_split(name: str) -> str | None:
    """Look up the split of a data set that a folder name denotes, such as "train" for "training"; None if no split."""
    lower = name.lower()
    for prefix in SPLIT_PREFIXES:
        lower = lower.removeprefix(prefix)
    return next((part for part, names in SPLIT_FOLDER_NAMES.items() if lower in names), None)


def locate_split_folder(path: Path, split: str) -> Path:
    """Locate the folder of a split of a data set, such as ``train``, by its name or a usual synonym."""
    folders = list_visible_folders(path)
    named = [folder for folder in folders if folder.name.lower() == split.lower()]
    synonyms = [folder for folder in folders if _get_split(folder.name) == _get_split(split) is not None]
    if not named and not synonyms:
        got = f"{split}; {path_to_text(path)} has {shorten_list(path_to_text(folder.name) for folder in folders)}"
        remedy = "Leave it out, or name one of these."
        raise_input_error("--split", "name a folder in that of the pictures", got, remedy)
    return (named or synonyms)[0]


def _format_suffix_counts(files: Sequence[Path], folder: Path) -> str:
    """Format the number of files of each suffix, with an example; "" for no file."""
    kinds: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        kinds[path_to_text(file.suffix.lower()) or "without extension"].append(file)
    ordered = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    texts = [f"{len(paths)} {kind} ({path_to_text(paths[0].relative_to(folder))})" for kind, paths in ordered]
    return f": {shorten_list(texts)}" if files else ""


def read_pixels(path: Path, height: int, width: int, *, grey: bool = False) -> np.ndarray:
    """Read the pixels of a picture: (3, height, width) uint8, or (1, height, width) if ``grey``."""
    return resize_picture(open_rgb(path, max(height, width)), height, width, grey=grey)


def resize_picture(image: Image, height: int, width: int, *, grey: bool = False) -> np.ndarray:
    """Stretch or shrink a picture to pixels (3, height, width) uint8, or (1, height, width) if ``grey``."""
    image = image.convert("L") if grey else image
    pixels = np.array(image.resize((width, height)), np.uint8)  # bicubic
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def open_rgb(path: Path, min_side: int | None = None) -> Image:
    """Open and decode a picture in RGB, as `decode_image` does, but raise an InputError if it cannot be read."""
    try:
        return decode_image(path, min_side).convert("RGB")
    except UNREADABLE_IMAGE_ERRORS as error:
        raise_unreadable_picture(path, error)


def make_blank_picture() -> Image:
    """Create a black picture of 32 x 32 pixels, as a trial input for a network."""
    from PIL import Image  # noqa: PLC0415 - optional

    return Image.new("RGB", (32, 32))


def raise_unreadable_picture(path: Path, error: Exception, *, n_others: int = 0) -> NoReturn:
    """Raise an InputError for a picture that cannot be read; the message adds the number of others, ``n_others``."""
    got = f"{path_to_text(path)} ({describe_image_error(error)})" + (f" and {n_others} more" if n_others else "")
    remedy = "Replace or remove that file. In a folder of pictures, --skip-broken leaves it out."
    raise_input_error("path", "hold pictures that can be read", got, remedy)


def detect_broken_pictures(paths: Sequence[Path]) -> list[bool]:
    """List for each picture whether it is broken, that is, whether its file cannot be decoded."""
    return [isinstance(result, Exception) for result in _hash_pictures(paths)]


def warn_duplicate_pictures(paths: Sequence[Path], labels: Sequence[str], *, show_progress: bool = False) -> list[str]:
    """Return a warning about equal pictures with different labels; an empty list if there are none.

    A picture with the label "" has no label. ``show_progress`` says whether to show a progress bar. Raises an
    InputError for a picture that cannot be decoded.
    """
    digests: dict[bytes, dict[str, Path]] = defaultdict(dict)  # the first picture of each class, by its pixels
    broken: list[tuple[Path, Exception]] = []
    for path, label, result in zip(paths, labels, _hash_pictures(paths, show_progress=show_progress), strict=True):
        if isinstance(result, Exception):
            broken.append((path, result))
        elif label:
            digests[result].setdefault(label, path)
    if broken:
        raise_unreadable_picture(*broken[0], n_others=len(broken) - 1)
    same = [pictures for pictures in digests.values() if len(pictures) > 1]
    texts = [" = ".join(map(path_to_text, pictures.values())) for pictures in same]
    return [f"warning: {plural(len(same), 'picture')} in more than one class: {shorten_list(texts)}"] if same else []


def _hash_pictures(paths: Sequence[Path], *, show_progress: bool = False) -> list[bytes | Exception]:
    """Compute the SHA-256 of size and pixels of each picture (large JPEGs at a smaller size), or its exception."""
    require_pillow()

    # Pixels per side to which JPEGs are reduced before they are compared. Decoding takes 30 ms then, and 150 ms
    # otherwise.
    duplicate_check_side_pixels = 512

    def hash_picture(path: Path) -> bytes | Exception:
        try:
            image = decode_image(path, duplicate_check_side_pixels).convert("RGB")
        except UNREADABLE_IMAGE_ERRORS as error:
            return error
        return hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()

    results = []
    with item_progress_bar(len(paths), "picture", shown=show_progress) as bar:
        for result in map_in_threads(hash_picture, paths, os.cpu_count() or 1):
            results.append(result)
            bar.update()
    return results


def require_pillow() -> None:
    """Raise a MissingPackageError if Pillow is missing."""
    with optional_packages("pictures"):
        import PIL.Image  # noqa: F401, PLC0415 - optional


def map_pictures(
    paths: Sequence[Path],
    height: int,
    width: int,
    function: Callable[[Tensor], Tensor],
    *,
    grey: bool = False,
    show_progress: bool = False,
) -> Tensor:
    """Apply a function to the pixels of pictures, in batches and threads; return the concatenated outputs.

    The pixels of a batch are (b, 3, height, width) uint8, or (b, 1, height, width) if ``grey``.
    """
    import torch  # noqa: PLC0415 - commands look for pictures before it is there

    def apply_to_part(part: Sequence[Path]) -> Tensor:
        pixels = np.stack([read_pixels(path, height, width, grey=grey) for path in part])
        with torch.no_grad():
            return function(torch.from_numpy(pixels))

    # Number of pictures that a thread reads before the next ones are assigned to it.
    pictures_per_thread_task = 32
    step = pictures_per_thread_task
    parts = [paths[first : first + step] for first in range(0, len(paths), step)]
    outputs, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # in each thread of the pool
    try:
        with item_progress_bar(len(paths), "picture", shown=show_progress) as bar:
            for output in map_in_threads(apply_to_part, parts, threads):
                outputs.append(output)
                bar.update(len(output))
    finally:
        torch.set_num_threads(threads)
    return torch.cat(outputs)


def map_in_threads(function: Callable[[Any], Outcome], items: Sequence[Any], n_threads: int) -> Iterator[Outcome]:
    """Yield the results of a function for items, in their order; after an error or Ctrl-C, no further item is begun."""
    with ThreadPoolExecutor(n_threads) as pool:
        try:
            yield from pool.map(function, items)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def item_progress_bar(count: int, unit: str, *, shown: bool) -> Any:
    """Create a progress bar for ``count`` items on stderr, which is hidden unless ``shown``."""
    return progress_bar(total=count, unit=unit, leave=False, shown=shown)


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
    except MemoryError as error:
        raise ValueError("more pixels than there is memory for") from error


def count_pixels(file: Path | BinaryIO) -> int:
    """Read the number of pixels of an image file from its header; return 0 if `decode_image` could not open it."""
    from PIL import Image  # noqa: PLC0415 - optional

    try:
        with Image.open(file, formats=_list_decoded_formats()) as image:
            return image.width * image.height
    except (*UNREADABLE_IMAGE_ERRORS, Image.DecompressionBombError, RuntimeError, MemoryError):
        return 0


@lru_cache(maxsize=1)
def _list_decoded_formats() -> tuple[str, ...]:
    """List the formats that this Pillow decodes; keep its TIFF decoder from writing to stderr."""
    import PIL  # noqa: PLC0415 - optional
    from PIL import Image, features  # noqa: PLC0415

    Image.init()
    # libtiff describes damaged files on stderr, several lines for each, beside the error that is raised.
    for library in Path(PIL.__file__).parents[1].glob("pillow.libs/libtiff-*.so*"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(str(library)).TIFFSetErrorHandler(None)
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
