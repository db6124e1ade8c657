"""Load sets of pictures in the layouts that authors publish: folders by class, lists, and packed files.

Pictures are decoded once, stored as uint8 in a cached file, and memory-mapped from this file.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import torch

from protonet._io import cache_folder, write_atomically
from protonet._validation import check_int
from protonet.datasets.dataset import SIDE_ALIASES, SPLIT_SIDES, Dataset, make_dataset
from protonet.datasets.features import load_pickle
from protonet.datasets.files import memory_map_array, write_npz
from protonet.embeddings.pictures import reading
from protonet.errors import InputError, optional_packages, raise_input_error
from protonet.tables.formats.arrays import ARRAY_READ_ERRORS

if TYPE_CHECKING:
    from PIL.Image import Image


class RotatedPicture(NamedTuple):
    """A picture that is to be rotated anticlockwise when it is opened."""

    path: Path  #: The picture's file.
    quarter_turns: int  #: The number of quarter turns (90 degrees), 1 to 3.


#: A picture in one of four forms: the path of its file, the path with a rotation, the content of an image file as
#: bytes, or its pixels (height, width, 3) uint8.
ImageSource = Path | RotatedPicture | bytes | np.ndarray


class LabelledPictures(NamedTuple):
    """The n pictures of a data set with their classes and, if there is a split, their sides of the split."""

    pictures: Sequence[ImageSource]  #: The n pictures, most of them not yet read from their files.
    labels: Sequence[str]  #: For each picture the name of its class.
    #: For each picture the side of the split that its class is on, one of ``SPLIT_SIDES``; None without a split.
    sides: Sequence[str] | None = None

    def with_sides(self, side_of: Mapping[str, str]) -> LabelledPictures:
        """Return a copy with the side of each picture; ``side_of`` maps a class to its side of the split."""
        return self._replace(sides=[side_of[label] for label in self.labels])


#: A pair: all files of a data set of pictures, and a function that returns the pictures with their classes and sides.
PictureLayout = tuple[Sequence[Path], Callable[[], LabelledPictures]]
#: The names of the sides in most authors' file names, in the order of ``SPLIT_SIDES``.
PUBLISHED_SIDE_NAMES = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """A set of pictures on the disk that is not read yet: the files, and a function to read the pictures."""

    cache_name: str  #: The beginning of the name of the cached file.
    root: Path  #: The folder that has the pictures.
    #: All files of the set, pictures last. If the name, size or time of a file changes, the cached file is made again.
    files: Sequence[Path]
    read_pictures: Callable[[], LabelledPictures]
    """Function that returns the pictures with their classes; it reads lists and packed files if needed."""
    image_side: int  #: Pixels per side that the authors of the data set resize pictures to.
    is_grey: bool = False  #: Whether pictures have one grey channel instead of red, green and blue.
    is_ink: bool = False  #: Whether grey pictures are drawings on white paper, of which 1 is to be ink and 0 paper.
    cache_variant: str = ""  #: Distinguishes data sets made from the same files; part of the cached file's name.

    @property
    def is_packed(self) -> bool:
        """Whether the files are pickles or archives that each hold many pictures, not one image file per picture."""
        return self.files[-1].suffix.lower() not in reading.IMAGE_SUFFIXES


def load_pictures(image_set: ImageSet, size: int | None = None) -> Dataset:
    """Load pictures as a data set, each resized to ``size`` pixels per side; None takes ``image_set.image_side``.

    Pictures are read from a cached file, which is first created if it is missing or if the set's files have changed.

    Returns:
        One row per picture: uint8 pixels in the order of channels, height and width, see `Dataset.get_rows`. Rows are
        memory-mapped from the cached file, or in memory if this file cannot be written.

    Raises:
        InputError: A file is missing, or is not a picture.
    """
    side = image_set.image_side if size is None else check_int("size", size, low=1)
    shape = (1 if image_set.is_grey else 3, side, side)
    # The version of decoding and resizing. Increase it whenever their pixels change, so that cached files are made
    # again.
    picture_cache_version = 1
    stamp = hash_file_stamps(image_set, f"{picture_cache_version} {side} {image_set.cache_variant}".rstrip())
    root_hash = hashlib.sha256(os.fsencode(image_set.root.resolve())).hexdigest()[:16]
    name = f"{image_set.cache_name}-{image_set.cache_variant}".rstrip("-")
    path = cache_folder() / f"{name}-{side}-{root_hash}.npz"
    cached = _read_picture_cache(path, stamp, shape) if path.exists() else None
    return _fill_picture_cache(image_set, path, stamp, shape) if cached is None else cached


def hash_file_stamps(image_set: ImageSet, settings: str) -> str:
    """Hash name, size and modification time of each file of the set, and the text ``settings``, to detect changes.

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
    """Open a picture as an image of Pillow; JPEGs may be reduced to ``min_side`` pixels per side while decoding."""
    from PIL import Image  # noqa: PLC0415 - optional

    if isinstance(picture, np.ndarray):
        return Image.fromarray(picture)
    if isinstance(picture, RotatedPicture):
        turns = (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)
        return open_picture(picture.path, min_side).transpose(turns[picture.quarter_turns - 1])
    return reading.open_image("root", picture if isinstance(picture, Path) else io.BytesIO(picture), min_side)


def _read_picture_cache(path: Path, stamp: str, shape: tuple[int, int, int]) -> Dataset | None:
    """Memory-map the pictures of a cached file; None if it is damaged, or has another ``stamp`` (hash of the files)."""
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
    """Decode pictures, write them to the cached file ``path``, and memory-map it; keep them in memory if this fails."""
    with optional_packages("pictures"):
        from PIL import Image  # noqa: PLC0415 - optional
    pictures, labels, sides = image_set.read_pictures()
    data = make_dataset("root", torch.empty(len(pictures), 0), labels, sides)._replace(shape=shape)
    side = shape[1]
    resample = Image.Resampling.BOX if image_set.is_grey else Image.Resampling.LANCZOS

    def decode(picture: ImageSource) -> np.ndarray:
        if isinstance(picture, np.ndarray) and picture.shape[:2] == (side, side) and not image_set.is_grey:
            return picture.transpose(2, 0, 1)
        image = open_picture(picture).convert("L" if image_set.is_grey else "RGB")
        pixels = np.asarray(image if image.size == (side, side) else image.resize((side, side), resample), np.uint8)
        if not image_set.is_grey:
            return pixels.transpose(2, 0, 1)
        return 255 - pixels[None] if image_set.is_ink else pixels[None]

    pictures_per_block = 256  # how many pictures are decoded before they are written together
    max_decode_threads = 8  # at most this many threads decode pictures

    def decode_blocks() -> Iterator[np.ndarray]:
        threads = min(max_decode_threads, os.cpu_count() or 1)
        with reading.item_progress_bar(len(pictures), "picture", shown=True) as bar:
            for start in range(0, len(pictures), pictures_per_block):
                block = pictures[start : start + pictures_per_block]
                yield np.stack(list(reading.map_in_threads(decode, block, threads)))
                bar.update(min(pictures_per_block, len(pictures) - start))

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
    for start, block in zip(range(0, len(pictures), pictures_per_block), decode_blocks(), strict=True):
        rows[start : start + len(block)] = block
    return data._replace(x=torch.from_numpy(rows).flatten(1))


def join_sides(parts: Sequence[LabelledPictures | None]) -> LabelledPictures:
    """Join the pictures of the base, the validation and the novel side into one set that has a side for each picture.

    ``parts`` has one entry per side, in this order; None is a side without pictures. If files number the classes of
    each side from 0, two sides share a number: both classes then get their side's name as a prefix.
    """
    present = [(side, part) for side, part in zip(SPLIT_SIDES, parts, strict=True) if part is not None]
    n_sides = Counter(name for _, part in present for name in set(part.labels))
    pictures, labels, sides = [], [], []
    for side, part in present:
        pictures += list(part.pictures)
        labels += [f"{side} {name}" if n_sides[name] > 1 and name.isdecimal() else name for name in part.labels]
        sides += [side] * len(part.labels)
    return LabelledPictures(pictures, labels, sides)


def detect_class_folders(root: Path) -> PictureLayout | None:
    """Find pictures in ``root/SIDE/CLASS/*.png``; return None if there are no such folders.

    The folders of the sides are found by `detect_split_folders`, such as ``train`` or ``meta-train``.
    """
    folders = detect_split_folders(root)
    if folders is None:
        return None
    parts = [list_pictures_by_class(folders[side]) if side in folders else None for side in SPLIT_SIDES]
    return make_picture_layout(join_sides(parts))


def detect_split_folders(root: Path) -> dict[str, Path] | None:
    """Find the folder of each side of a split, such as ``root/train`` or ``root/meta-val``; return the folders by side.

    Returns None if ``root`` has another folder, or if the base or the novel side has no folder.
    """
    folders: dict[str, Path] = {}
    for folder in reading.list_visible_folders(root):
        side = folder.name.lower().removeprefix("meta-")
        side = SIDE_ALIASES.get(side, side)
        if side not in SPLIT_SIDES or not reading.list_visible_folders(folder):
            return None  # the folder may be a class that is named like a side
        folders[side] = folder
    return folders if {"base", "novel"} <= set(folders) else None


def list_pictures_by_class(root: Path) -> LabelledPictures:
    """List the pictures ``root/CLASS/*.png`` with their classes, without a split; both are sorted by name."""
    folders = reading.list_visible_folders(root)
    if not folders:
        raise_input_error("root", "hold one folder per class", f"{root} without any", "Pass the folder above them.")
    return list_class_pictures((folder, folder.name) for folder in folders)


def list_class_pictures(folders: Iterable[tuple[Path, str]]) -> LabelledPictures:
    """List the pictures in ``folders``, pairs (folder, class); raise an InputError for a folder without pictures."""
    pairs = [(picture, label) for folder, label in folders for picture in reading.list_images("root", folder)]
    return LabelledPictures([picture for picture, _ in pairs], [label for _, label in pairs])


def detect_split_lists(
    folder: Path, lists: Sequence[Path], read: Callable[[Path], LabelledPictures]
) -> PictureLayout | None:
    """Find the pictures of a split from ``lists``, one file for each side in the order of ``SPLIT_SIDES``.

    ``read`` reads one list. Returns None if ``folder`` or the first list does not exist, and raises an InputError if a
    list cannot be read.
    """
    if not lists[0].is_file() or not folder.is_dir():
        return None
    parts = []
    for path in lists:
        try:
            parts.append(read(path))
        except InputError:
            raise
        except (OSError, ValueError, TypeError, LookupError, AttributeError, csv.Error) as error:
            raise_unreadable_list(path, type(error).__name__)
    return make_picture_layout(join_sides(parts), *lists)


def detect_csv_lists(root: Path) -> PictureLayout | None:
    """Find the pictures of ``root/images`` in the lists ``train.csv``, ``val.csv``, ``test.csv``; None without lists.

    The lists are in ``root`` and have the columns filename and label. If a filename has a folder, as in
    ``001.Black_footed_Albatross/1.jpg``, the folder is the class, not the label.
    """

    def read(path: Path) -> LabelledPictures:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        first = rows[0] if rows else ["nothing"]
        rows = rows[first == ["filename", "label"] :]
        if not rows or not all(len(row) == 2 and all(row) and "." in row[0] for row in rows):
            got = f"{path} with {', '.join(first)}"
            remedy = "Fill both columns in every line."
            raise_input_error("root", "have columns filename and label in every list", got, remedy)
        labels = [file.rpartition("/")[0] or label for file, label in rows]
        return LabelledPictures([root / "images" / file for file, _ in rows], labels)

    return detect_split_lists(root / "images", [root / f"{side}.csv" for side in PUBLISHED_SIDE_NAMES], read)


def detect_json_lists(root: Path) -> PictureLayout | None:
    """Find the pictures of ``root/images`` in ``base.json``, ``val.json``, ``novel.json``; None without these lists.

    The lists are in ``root``. Their entry ``image_names`` has paths on the authors' machine. Only the last two parts of
    a path are used: the class and the file.
    """

    def read(path: Path) -> LabelledPictures:
        names = json.loads(path.read_text(encoding="utf-8"))["image_names"]
        pairs = [image.replace("\\", "/").split("/")[-2:] for image in names]
        pictures = [root / "images" / folder / file for folder, file in pairs]
        return LabelledPictures(pictures, [folder for folder, _ in pairs])

    return detect_split_lists(root / "images", [root / f"{side}.json" for side in ("base", "val", "novel")], read)


def make_split_list_detector(folder: str, pattern: str) -> Callable[[Path], PictureLayout | None]:
    """Make a function that finds pictures ``root/folder/CLASS/*.png``, with a list of classes for each side of a split.

    The path of a list is ``pattern`` below ``root``, with one of ``PUBLISHED_SIDE_NAMES`` for the braces. A line of a
    list begins with a class; a comma and anything else may follow. The function returns None if ``folder`` or the first
    list does not exist.
    """

    def detect(root: Path) -> PictureLayout | None:
        def read(path: Path) -> LabelledPictures:
            lines = path.read_text(encoding="utf-8").splitlines()
            classes = [line.split(",")[0].strip() for line in lines if line.strip()]
            missing = [label for label in classes if not (root / folder / label).is_dir()]
            if missing or not classes:
                raise_unreadable_list(path, f"no folder {root / folder / missing[0]}" if missing else "empty")
            return list_class_pictures((root / folder / label, label) for label in classes)

        return detect_split_lists(root / folder, [root / pattern.format(side) for side in PUBLISHED_SIDE_NAMES], read)

    return detect


def make_pickle_detector(pattern: str, *sides: str) -> Callable[[Path], PictureLayout | None]:
    """Make a function that finds pickles of pictures, one for each side of a split, or returns None.

    The braces of ``pattern`` stand for one of ``sides``, or of ``PUBLISHED_SIDE_NAMES``.
    """

    def detect(root: Path) -> PictureLayout | None:
        files = [root / pattern.format(side) for side in sides or PUBLISHED_SIDE_NAMES]
        if not all_files_exist(files):
            return None
        return files, lambda: join_sides([_read_pickle(path) for path in files])

    return detect


def _read_pickle(path: Path) -> LabelledPictures:
    """Read pictures and classes from a pickled dictionary of ``image_data`` and ``class_dict``, or data and labels."""
    content = load_pickle("root", path)
    content = content if isinstance(content, dict) else {}
    if isinstance(by_class := content.get("class_dict"), dict) and "image_data" in content:
        images = check_images(path, content["image_data"])
        labels = [""] * len(images)
        for label, rows in by_class.items():
            for row in rows:
                if not -1 < row < len(images):
                    raise_unreadable_list(path, f"picture {row} of {len(images)}")
                labels[row] = str(label)
        if not all(labels):
            raise_unreadable_list(path, f"picture {labels.index('')} in no class")
        return LabelledPictures(list(images), labels)
    images = check_images(path, content.get("data"))
    return LabelledPictures(list(images), check_labels(path, content.get("labels"), len(images)))


def detect_tiered_imagenet(root: Path) -> PictureLayout | None:
    """Find tiered-ImageNet's packed pictures in ``root``; return None without them.

    For each SIDE of ``PUBLISHED_SIDE_NAMES`` they are in ``SIDE_images_png.pkl`` or ``SIDE_images.npz``, and their
    labels in ``SIDE_labels.pkl``.
    """
    images = [root / f"{side}_images_png.pkl" for side in PUBLISHED_SIDE_NAMES]
    if not images[0].is_file():
        images = [root / f"{side}_images.npz" for side in PUBLISHED_SIDE_NAMES]
    labels = [root / f"{side}_labels.pkl" for side in PUBLISHED_SIDE_NAMES]
    files = [*images, *labels]
    if not all_files_exist(files):
        return None
    return files, lambda: join_sides(list(map(_read_tiered_imagenet, images, labels)))


def _read_tiered_imagenet(images: Path, labels: Path) -> LabelledPictures:
    """Read one split of tiered-ImageNet: its pictures from ``images``, and their classes from ``labels``."""
    pictures: list[ImageSource]
    if images.suffix == ".npz":
        pictures = list(check_images(images, _read_npz_images(images)))
    else:
        content = load_pickle("root", images)
        if not isinstance(content, list) or not all(isinstance(picture, (np.ndarray, bytes)) for picture in content):
            raise_unreadable_list(images, f"a {type(content).__name__}, not a list of PNG files")
        pictures = [picture if isinstance(picture, bytes) else picture.tobytes() for picture in content]
    entries = load_pickle("root", labels)
    entries = entries if isinstance(entries, dict) else {}
    classes = check_labels(labels, entries.get("label_specific", entries.get("labels")), len(pictures))
    words = entries.get("label_specific_str")
    if isinstance(words, list) and all(label.isdecimal() and int(label) < len(words) for label in classes):
        # Two synsets may have the same words; their numbers make the names differ.
        names = [text if words.count(text) == 1 else f"{text} {synset}" for synset, text in enumerate(words)]
        classes = [names[int(label)] for label in classes]
    return LabelledPictures(pictures, classes)


def _read_npz_images(path: Path) -> np.ndarray | None:
    """Return the array ``images`` of an NPZ file, memory-mapped if possible; None if the file has no such array."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if "images" not in file.files:
                return None
            mapped = memory_map_array(path, ("uint8",), "images")
            return np.asarray(file["images"]) if mapped is None else mapped[0].numpy()
    except ARRAY_READ_ERRORS as error:
        raise_unreadable_list(path, type(error).__name__)


def all_files_exist(files: Sequence[Path]) -> bool:
    """Test whether all files exist; False if the first file does not, so that the folder has another layout.

    If only later files are missing, the data set is incomplete: an InputError names the missing file.
    """
    missing = [path for path in files if not path.is_file()]
    if missing and missing[0] != files[0]:
        raise_input_error("root", "hold the pictures and labels of all sides", f"no {missing[0]}", "Get all of them.")
    return not missing


def check_images(path: Path, images: object) -> np.ndarray:
    """Return ``images`` of the file ``path``; raise an InputError unless they are (n, height, width, 3) uint8."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        got = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else "none"
        must = "hold pictures, (n, height, width, 3) uint8"
        raise_input_error("root", must, f"{got} in {path}", "Get the file again.")
    return np.asarray(images)


def check_labels(path: Path, labels: object, n: int) -> list[str]:
    """Return the ``labels`` of the file ``path`` as texts; raise an InputError unless there are ``n`` of them."""
    if not isinstance(labels, (list, tuple, np.ndarray)) or len(labels) != n:
        got = f"{len(labels)} in {path}" if hasattr(labels, "__len__") else f"none in {path}"
        raise_input_error("root", f"have a label of each of {n} pictures", got, "Get the file again.")
    return [str(label) for label in (labels.tolist() if isinstance(labels, np.ndarray) else labels)]


def raise_unreadable_list(path: Path, got: str) -> NoReturn:
    """Raise an InputError about a list or a file of pictures that cannot be read; ``got`` is the reason."""
    raise_input_error("root", "hold lists and pictures that can be read", f"{path} ({got})", "Get the file again.")


def make_picture_layout(pictures: LabelledPictures, *lists: Path) -> PictureLayout:
    """Make the `PictureLayout` of pictures, one per file; ``lists`` are the files that assign classes to sides."""
    paths = [picture for picture in pictures.pictures if isinstance(picture, Path)]
    return [*lists, *paths], lambda: pictures
