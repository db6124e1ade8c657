"""Load sets of pictures: they are decoded once, stored as uint8 in a cached file, and memory-mapped from this file."""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from protonet._io import cache_folder, write_atomically
from protonet._validation import check_int
from protonet.datasets.dataset import SPLIT_SIDES, Dataset, make_dataset
from protonet.datasets.files import memory_map_array, write_npz
from protonet.embeddings.pictures.images import IMAGE_SUFFIXES, open_image
from protonet.embeddings.pictures.reading import item_progress_bar, map_in_threads
from protonet.errors import optional_packages, raise_input_error
from protonet.tables.arrays import ARRAY_READ_ERRORS

if TYPE_CHECKING:
    from PIL.Image import Image


class RotatedPicture(NamedTuple):
    """A picture that is to be rotated anticlockwise when it is opened."""

    path: Path  #: The picture's file.
    quarter_turns: int  #: The number of quarter turns (90 degrees), 1 to 3.


#: A picture in one of four forms: the path of its file, the path with a rotation, the content of an image file as
#: bytes, or its pixels (height, width, 3) uint8.
ImageSource = Path | RotatedPicture | bytes | np.ndarray
#: The version of decoding and resizing. Increase it whenever their pixels change, so that cached files are made again.
PICTURE_CACHE_VERSION = 1
PICTURES_PER_BLOCK = 256  #: How many pictures are decoded before they are written together.
MAX_DECODE_THREADS = 8  #: At most this many threads decode pictures.


class LabelledPictures(NamedTuple):
    """The n pictures of a data set, with their classes."""

    pictures: Sequence[ImageSource]  #: The n pictures, most of them not yet read from their files.
    labels: Sequence[str]  #: For each picture the name of its class.
    #: For each picture the side of the split that its class is on, one of ``SPLIT_SIDES``; None without a split.
    sides: Sequence[str] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """A set of pictures that was found on the disk, not yet read."""

    name: str  #: The name of the cached file begins with this name.
    root: Path  #: The folder that has the pictures.
    #: All files of the set, pictures last. If the name, size or time of a file changes, the cached file is made again.
    files: Sequence[Path]
    read: Callable[[], LabelledPictures]
    """Returns the pictures with their classes. Reads lists and packed files if needed."""
    size: int  #: Pixels per side that the authors of the data set resize pictures to.
    #: Whether pictures are drawings with one grey channel, 1 being ink, instead of red, green and blue.
    grey: bool = False
    variant: str = ""  #: Distinguishes data sets made from the same files; part of the cached file's name.

    @property
    def is_packed(self) -> bool:
        """Whether the files are pickles or archives that each hold many pictures, not one image file per picture."""
        return self.files[-1].suffix.lower() not in IMAGE_SUFFIXES


def load_pictures(image_set: ImageSet, size: int | None = None) -> Dataset:
    """Load pictures as a data set, each resized to ``size`` pixels per side; None takes ``image_set.size``.

    The pictures are read from the cached file, which is made first if there is none or if the set's files have changed.

    Returns:
        One row per picture: uint8 pixels in the order of channels, height and width, see `Dataset.get_rows`. Rows are
        memory-mapped from the cached file, or in memory if this file cannot be written.

    Raises:
        InputError: A file is missing, or is no picture.
    """
    side = image_set.size if size is None else check_int("size", size, low=1)
    shape = (1 if image_set.grey else 3, side, side)
    stamp = hash_file_stamps(image_set, f"{PICTURE_CACHE_VERSION} {side} {image_set.variant}".rstrip())
    root_hash = hashlib.sha256(os.fsencode(image_set.root.resolve())).hexdigest()[:16]
    name = f"{image_set.name}-{image_set.variant}".rstrip("-")
    path = cache_folder() / f"{name}-{side}-{root_hash}.npz"
    cached = _read_picture_cache(path, stamp, shape) if path.exists() else None
    return _fill_picture_cache(image_set, path, stamp, shape) if cached is None else cached


def hash_file_stamps(image_set: ImageSet, settings: str) -> str:
    """Hash the name, size and time of each file of the set, to detect changes, together with the text ``settings``.

    An InputError names a file that is missing.
    """
    digest = hashlib.sha256(f"{settings}\n".encode())
    for path in image_set.files:
        try:
            state = path.stat()
        except OSError as error:
            raise_input_error("root", "hold its pictures", f"no {path} ({error.strerror})", "Unpack all of them.")
        name = os.fsencode(path).removeprefix(os.fsencode(image_set.root))
        digest.update(b"%b\0%d\0%d\n" % (name, state.st_size, state.st_mtime_ns))
    return digest.hexdigest()


def open_picture(picture: ImageSource, min_side: int | None = None) -> Image:
    """Open and decode a picture as an image of Pillow; ``min_side`` is as in `open_image`."""
    from PIL import Image  # noqa: PLC0415 - optional

    if isinstance(picture, np.ndarray):
        return Image.fromarray(picture)
    if isinstance(picture, RotatedPicture):
        turns = (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)
        return open_picture(picture.path, min_side).transpose(turns[picture.quarter_turns - 1])
    return open_image("root", picture if isinstance(picture, Path) else io.BytesIO(picture), min_side)


def _read_picture_cache(path: Path, stamp: str, shape: tuple[int, int, int]) -> Dataset | None:
    """Memory-map the pictures of a cached file; return None if it is damaged or outdated, so of another ``stamp``.

    The ``stamp`` is the hash of the set's files that was stored with the pictures, see `hash_file_stamps`.
    """
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if str(file["stamp"]) != stamp:
                return None
            y, names, sides = (file[name] for name in ("y", "names", "sides"))
        x, mapping = memory_map_array(path, ("uint8",)) or (None, None)
        if x is not None and (x := x.flatten(1)).shape == (len(y), int(np.prod(shape))):
            side_names = tuple(map(str, sides)) if len(sides) else None
            return Dataset(x, torch.from_numpy(y), tuple(map(str, names)), side_names, mapping, shape)
        reason = "it is not as it was written"
    except ARRAY_READ_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
    print(f"protonet: {path} is made again: {reason}", file=sys.stderr)
    return None


def _fill_picture_cache(image_set: ImageSet, path: Path, stamp: str, shape: tuple[int, int, int]) -> Dataset:
    """Decode pictures, write them to the cached file ``path``, and memory-map it; keep them in memory if that fails."""
    with optional_packages("pictures"):
        from PIL import Image  # noqa: PLC0415 - optional
    pictures, labels, sides = image_set.read()
    data = make_dataset("root", torch.empty(len(pictures), 0), labels, sides)._replace(shape=shape)
    side = shape[1]
    resample = Image.Resampling.BOX if image_set.grey else Image.Resampling.LANCZOS

    def decode(picture: ImageSource) -> np.ndarray:
        if isinstance(picture, np.ndarray) and picture.shape[:2] == (side, side) and not image_set.grey:
            return picture.transpose(2, 0, 1)
        image = open_picture(picture).convert("L" if image_set.grey else "RGB")
        pixels = np.asarray(image if image.size == (side, side) else image.resize((side, side), resample), np.uint8)
        return 255 - pixels[None] if image_set.grey else pixels.transpose(2, 0, 1)  # the paper is white

    def decode_blocks() -> Iterator[np.ndarray]:
        threads = min(MAX_DECODE_THREADS, os.cpu_count() or 1)
        with item_progress_bar(len(pictures), "picture", shown=True) as bar:
            for start in range(0, len(pictures), PICTURES_PER_BLOCK):
                yield np.stack(list(map_in_threads(decode, pictures[start : start + PICTURES_PER_BLOCK], threads)))
                bar.update(min(PICTURES_PER_BLOCK, len(pictures) - start))

    more = {"stamp": np.array(stamp), "y": data.y.numpy(), "names": np.array(data.class_names)}
    more["sides"] = np.array(data.sides or (), str)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: write_npz(file, (len(pictures), *shape), "uint8", decode_blocks(), more))
    except OSError as error:
        print(f"protonet: {path} is not kept: {error.strerror}", file=sys.stderr)
    else:
        cached = _read_picture_cache(path, stamp, shape)
        if cached is not None:
            return cached
    rows = np.empty((len(pictures), *shape), np.uint8)
    for start, block in zip(range(0, len(pictures), PICTURES_PER_BLOCK), decode_blocks(), strict=True):
        rows[start : start + len(block)] = block
    return data._replace(x=torch.from_numpy(rows).flatten(1))


def join_sides(parts: Sequence[LabelledPictures | None]) -> LabelledPictures:
    """Join the pictures of the base, the validation and the novel side into one set that has a side for each picture.

    ``parts`` has one entry per side, in this order; None is a side without pictures. Files may number the classes of
    each side from 0. Two sides then share a number, and both classes get the name of their side before the number.
    """
    present = [(side, part) for side, part in zip(SPLIT_SIDES, parts, strict=True) if part is not None]
    n_sides = Counter(name for _, part in present for name in set(part.labels))
    pictures, labels, sides = [], [], []
    for side, part in present:
        pictures += list(part.pictures)
        labels += [f"{side} {name}" if n_sides[name] > 1 and name.isdecimal() else name for name in part.labels]
        sides += [side] * len(part.labels)
    return LabelledPictures(pictures, labels, sides)
