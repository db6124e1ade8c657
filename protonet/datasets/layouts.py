"""Find the pictures of a data set in the layouts that authors publish: folders by class, lists, and packed files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from protonet.datasets.dataset import SIDE_ALIASES, SPLIT_SIDES
from protonet.datasets.files import memory_map_array
from protonet.datasets.pictures import ImageSource, LabelledPictures, join_sides
from protonet.datasets.unpickling import load_pickle
from protonet.embeddings.pictures.images import list_images, list_visible_folders
from protonet.errors import InputError, raise_input_error
from protonet.tables.arrays import ARRAY_READ_ERRORS

#: A pair: all files of a data set of pictures, and a function that returns the pictures with their classes and sides.
Layout = tuple[Sequence[Path], Callable[[], LabelledPictures]]
#: The names of the sides in most authors' file names, in the order of ``SPLIT_SIDES``.
PUBLISHED_SIDE_NAMES = ("train", "val", "test")


def detect_folders(root: Path) -> Layout | None:
    """Find pictures in ``root/SIDE/CLASS/*.png``; return None if there are no such folders.

    The folders of the sides are those that `detect_side_folders` finds, such as ``train`` or ``meta-train``.
    """
    folders = detect_side_folders(root)
    if folders is None:
        return None
    return make_layout(
        join_sides([list_pictures_by_class(folders[side]) if side in folders else None for side in SPLIT_SIDES])
    )


def detect_side_folders(root: Path) -> dict[str, Path] | None:
    """Find the folder of each side of a split, such as ``root/train`` or ``root/meta-val``, and return it by side.

    Returns None if a folder of ``root`` is not that of a side, or if the base or the novel side has no folder.
    """
    folders: dict[str, Path] = {}
    for folder in list_visible_folders(root):
        side = folder.name.lower().removeprefix("meta-")
        side = SIDE_ALIASES.get(side, side)
        if side not in SPLIT_SIDES or not list_visible_folders(folder):
            return None  # the folder may be a class that is named like a side
        folders[side] = folder
    return folders if {"base", "novel"} <= set(folders) else None


def list_pictures_by_class(root: Path) -> LabelledPictures:
    """List the pictures ``root/CLASS/*.png`` with their classes, which are not split; both are sorted by name."""
    pictures: list[Path] = []
    labels: list[str] = []
    for folder in list_visible_folders(root):
        images = list_images("root", folder)
        pictures += images
        labels += [folder.name] * len(images)
    if not pictures:
        raise_input_error("root", "hold one folder per class", f"{root} without any", "Pass the folder above them.")
    return LabelledPictures(pictures, labels, None)


def detect_class_folders(root: Path) -> Layout:
    """Find pictures in ``root/CLASS/*.png``, without a split; raise an InputError if there are none."""
    return make_layout(list_pictures_by_class(root))


def read_split_lists(
    folder: Path, lists: Sequence[Path], read: Callable[[Path], list[tuple[Path, str]]]
) -> Layout | None:
    """Find the pictures of a split from ``lists``, one file for each side in the order of ``SPLIT_SIDES``.

    ``read`` reads one list and returns the path and the class of each picture on it. Returns None if ``folder`` or the
    first list does not exist, and raises an InputError if a list cannot be read.
    """
    if not lists[0].is_file() or not folder.is_dir():
        return None
    parts = []
    for path in lists:
        try:
            pairs = read(path)
        except InputError:
            raise
        except (OSError, ValueError, TypeError, LookupError, AttributeError, csv.Error) as error:
            raise_unreadable(path, type(error).__name__)
        parts.append(LabelledPictures([picture for picture, _ in pairs], [label for _, label in pairs], None))
    return make_layout(join_sides(parts), *lists)


def detect_csv_lists(root: Path) -> Layout | None:
    """Find the pictures of ``root/images`` that ``train.csv``, ``val.csv`` and ``test.csv`` list; None without these.

    The lists are in ``root`` and have the columns filename and label. If a filename has a folder, as in
    ``001.Black_footed_Albatross/1.jpg``, the folder is the class, not the label.
    """

    def read(path: Path) -> list[tuple[Path, str]]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        first = rows[0] if rows else ["nothing"]
        rows = rows[first == ["filename", "label"] :]
        if not rows or not all(len(row) == 2 and all(row) and "." in row[0] for row in rows):
            got = f"{path} with {', '.join(first)}"
            remedy = "Fill both columns in every line."
            raise_input_error("root", "have columns filename and label in every list", got, remedy)
        return [(root / "images" / file, file.rpartition("/")[0] or label) for file, label in rows]

    return read_split_lists(root / "images", [root / f"{side}.csv" for side in PUBLISHED_SIDE_NAMES], read)


def detect_json_lists(root: Path) -> Layout | None:
    """Find the pictures of ``root/images`` that ``base.json``, ``val.json``, ``novel.json`` list; None without these.

    The lists are in ``root``. Their entry ``image_names`` has paths on the authors' machine. Only the last two parts of
    a path are used: the class and the file.
    """

    def read(path: Path) -> list[tuple[Path, str]]:
        names = json.loads(path.read_text(encoding="utf-8"))["image_names"]
        pairs = [image.replace("\\", "/").split("/")[-2:] for image in names]
        return [(root / "images" / folder / file, folder) for folder, file in pairs]

    return read_split_lists(root / "images", [root / f"{side}.json" for side in ("base", "val", "novel")], read)


def make_split_list_detector(folder: str, pattern: str) -> Callable[[Path], Layout | None]:
    """Make a function that finds the pictures ``root/folder/CLASS/*.png`` of the classes that lists name for each side.

    The path of a list is ``pattern`` below ``root``, with one of ``PUBLISHED_SIDE_NAMES`` for the braces. A line of a
    list begins with a class; a comma and anything else may follow. The function returns None if ``folder`` or the first
    list does not exist.
    """

    def detect(root: Path) -> Layout | None:
        def read(path: Path) -> list[tuple[Path, str]]:
            lines = path.read_text(encoding="utf-8").splitlines()
            classes = [line.split(",")[0].strip() for line in lines if line.strip()]
            missing = [label for label in classes if not (root / folder / label).is_dir()]
            if missing or not classes:
                raise_unreadable(path, f"no folder {root / folder / missing[0]}" if missing else "empty")
            return [(image, label) for label in classes for image in list_images("root", root / folder / label)]

        return read_split_lists(root / folder, [root / pattern.format(side) for side in PUBLISHED_SIDE_NAMES], read)

    return detect


def make_pickle_detector(pattern: str, *sides: str) -> Callable[[Path], Layout | None]:
    """Make a function that finds pictures in one pickle for each side of a split, and returns None without the pickles.

    The path of a pickle is ``pattern`` below ``root``, with one of ``sides`` (or of ``PUBLISHED_SIDE_NAMES``) for the
    braces.
    """

    def detect(root: Path) -> Layout | None:
        files = [root / pattern.format(side) for side in sides or PUBLISHED_SIDE_NAMES]
        if not all_files_exist(files):
            return None
        return files, lambda: join_sides([_read_pickle(path) for path in files])

    return detect


def _read_pickle(path: Path) -> LabelledPictures:
    """Read pictures and their classes from a pickled dictionary in one of two published forms.

    Its keys are ``image_data`` and ``class_dict`` (indices of the pictures of each class), or ``data`` and ``labels``.
    """
    content = load_pickle("root", path)
    content = content if isinstance(content, dict) else {}
    if isinstance(by_class := content.get("class_dict"), dict) and "image_data" in content:
        images = check_images(path, content["image_data"])
        labels = [""] * len(images)
        for label, rows in by_class.items():
            for row in rows:
                if not -1 < row < len(images):
                    raise_unreadable(path, f"picture {row} of {len(images)}")
                labels[row] = str(label)
        if not all(labels):
            raise_unreadable(path, f"picture {labels.index('')} in no class")
        return LabelledPictures(list(images), labels, None)
    images = check_images(path, content.get("data"))
    return LabelledPictures(list(images), check_labels(path, content.get("labels"), len(images)), None)


def detect_tiered_imagenet(root: Path) -> Layout | None:
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
    """Read the pictures of one side of tiered-ImageNet from ``images``, and their classes from ``labels``."""
    pictures: list[ImageSource]
    if images.suffix == ".npz":
        pictures = list(check_images(images, _read_npz_images(images)))
    else:
        content = load_pickle("root", images)
        if not isinstance(content, list) or not all(isinstance(picture, (np.ndarray, bytes)) for picture in content):
            raise_unreadable(images, f"a {type(content).__name__}, not a list of PNG files")
        pictures = [picture if isinstance(picture, bytes) else picture.tobytes() for picture in content]
    entries = load_pickle("root", labels)
    entries = entries if isinstance(entries, dict) else {}
    classes = check_labels(labels, entries.get("label_specific", entries.get("labels")), len(pictures))
    words = entries.get("label_specific_str")
    if isinstance(words, list) and all(label.isdecimal() and int(label) < len(words) for label in classes):
        # Two synsets may have the same words; their numbers make the names differ.
        names = [text if words.count(text) == 1 else f"{text} {synset}" for synset, text in enumerate(words)]
        classes = [names[int(label)] for label in classes]
    return LabelledPictures(pictures, classes, None)


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
        raise_unreadable(path, type(error).__name__)


def all_files_exist(files: Sequence[Path]) -> bool:
    """Return True if all files exist, and False if the first one does not: then the folder has another layout.

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
        raise_input_error(
            "root", "hold pictures, (n, height, width, 3) uint8", f"{got} in {path}", "Get the file again."
        )
    return np.asarray(images)


def check_labels(path: Path, labels: object, n: int) -> list[str]:
    """Return the ``labels`` of the file ``path`` as texts; raise an InputError unless there are ``n`` of them."""
    if not isinstance(labels, (list, tuple, np.ndarray)) or len(labels) != n:
        got = f"{len(labels)} in {path}" if hasattr(labels, "__len__") else f"none in {path}"
        raise_input_error("root", f"have a label of each of {n} pictures", got, "Get the file again.")
    return [str(label) for label in (labels.tolist() if isinstance(labels, np.ndarray) else labels)]


def raise_unreadable(path: Path, got: str) -> NoReturn:
    """Raise an InputError about a list or a file of pictures that cannot be read; ``got`` says why."""
    raise_input_error("root", "hold lists and pictures that can be read", f"{path} ({got})", "Get the file again.")


def make_layout(pictures: LabelledPictures, *lists: Path) -> Layout:
    """Make the `Layout` of pictures that are already found, each in a file of its own.

    ``lists`` are the files that were read to find the pictures; they count as files of the data set.
    """
    paths = [picture for picture in pictures.pictures if isinstance(picture, Path)]
    return [*lists, *paths], lambda: pictures
