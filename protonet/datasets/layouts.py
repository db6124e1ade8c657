"""How authors lay out the pictures of their data sets: folders, lists, and files that hold many."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from protonet.datasets.dataset import SIDE_ALIASES, SPLIT_SIDES
from protonet.datasets.files import map_rows
from protonet.datasets.pictures import ImageSource, Pictures, join_sides
from protonet.datasets.unpickling import load_pickle
from protonet.embeddings.pictures.images import list_folders, list_images
from protonet.errors import InputError, raise_input_error
from protonet.tables.arrays import READ_ERRORS

#: The files that a set is made of, and what reads it.
Layout = tuple[Sequence[Path], Callable[[], Pictures]]
#: The names of the sides in most authors' files, in the order of ``SPLIT_SIDES``.
AUTHORS_SIDES = ("train", "val", "test")


def detect_folders(root: Path) -> Layout | None:
    """Find ``root/train/CLASS/*.png``, ``val`` and ``test`` (``val`` may be missing), or similar names."""
    folders = detect_side_folders(root)
    if folders is None:
        return None
    return give(join_sides([list_classes(folders[side]) if side in folders else None for side in SPLIT_SIDES]))


def detect_side_folders(root: Path) -> dict[str, Path] | None:
    """Return the folders of a split by class, of the base and the novel side at least; None where there are none."""
    folders: dict[str, Path] = {}
    for folder in list_folders(root):
        side = folder.name.lower().removeprefix("meta-")
        side = SIDE_ALIASES.get(side, side)
        if side not in SPLIT_SIDES or not list_folders(folder):
            return None  # perhaps a class of the same name
        folders[side] = folder
    return folders if {"base", "novel"} <= set(folders) else None


def list_classes(root: Path) -> Pictures:
    """List the pictures of ``root/CLASS/*.png``, classes and pictures in the order of their names."""
    pictures: list[Path] = []
    labels: list[str] = []
    for folder in list_folders(root):
        images = list_images("root", folder)
        pictures += images
        labels += [folder.name] * len(images)
    if not pictures:
        raise_input_error("root", "hold one folder per class", f"{root} without any", "Pass the folder above them.")
    return Pictures(pictures, labels, None)


def detect_class_folders(root: Path) -> Layout:
    """Find ``root/CLASS/*.png``."""
    return give(list_classes(root))


def read_lists(folder: Path, lists: Sequence[Path], read: Callable[[Path], list[tuple[Path, str]]]) -> Layout | None:
    """Find the pictures of a folder by lists of them and their classes, one per side; None without the first."""
    if not lists[0].is_file() or not folder.is_dir():
        return None
    parts = []
    for path in lists:
        try:
            pairs = read(path)
        except InputError:
            raise
        except (OSError, ValueError, TypeError, LookupError, AttributeError, csv.Error) as error:
            refuse_list(path, type(error).__name__)
        parts.append(Pictures([picture for picture, _ in pairs], [label for _, label in pairs], None))
    return give(join_sides(parts), *lists)


def detect_csv(root: Path) -> Layout | None:
    """Find ``root/images`` and ``root/train.csv``, ``val.csv`` and ``test.csv`` of columns filename and label.

    A file's class is the folder that its name says, such as ``001.Black_footed_Albatross/1.jpg``; otherwise its label.
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

    return read_lists(root / "images", [root / f"{part}.csv" for part in AUTHORS_SIDES], read)


def detect_json(root: Path) -> Layout | None:
    """Find ``root/images/CLASS/*.jpg`` with ``base.json``, ``val.json`` and ``novel.json``, lists of ``image_names``.

    The names are paths on the authors' machine, of whose parts only the last two are used.
    """

    def read(path: Path) -> list[tuple[Path, str]]:
        names = json.loads(path.read_text(encoding="utf-8"))["image_names"]
        pairs = [image.replace("\\", "/").split("/")[-2:] for image in names]
        return [(root / "images" / folder / file, folder) for folder, file in pairs]

    return read_lists(root / "images", [root / f"{part}.json" for part in ("base", "val", "novel")], read)


def detect_class_lists(folder: str, pattern: str) -> Callable[[Path], Layout | None]:
    """Make a layout: ``folder/CLASS/*.png``, and lists of each side's classes, before the first comma of a line."""

    def find(root: Path) -> Layout | None:
        def read(path: Path) -> list[tuple[Path, str]]:
            lines = path.read_text(encoding="utf-8").splitlines()
            classes = [line.split(",")[0].strip() for line in lines if line.strip()]
            missing = [label for label in classes if not (root / folder / label).is_dir()]
            if missing or not classes:
                refuse_list(path, f"no folder {root / folder / missing[0]}" if missing else "empty")
            return [(image, label) for label in classes for image in list_images("root", root / folder / label)]

        return read_lists(root / folder, [root / pattern.format(part) for part in AUTHORS_SIDES], read)

    return find


def detect_pickles(pattern: str, *names: str) -> Callable[[Path], Layout | None]:
    """Make a layout: a pickle for each side, of pictures and their classes."""

    def find(root: Path) -> Layout | None:
        files = [root / pattern.format(part) for part in names or AUTHORS_SIDES]
        if not files[0].is_file():
            return None
        check_files(files)
        return files, lambda: join_sides([_read_pickle(path) for path in files])

    return find


def _read_pickle(path: Path) -> Pictures:
    """Read a pickle of ``image_data`` and ``class_dict``, rows by class; or of ``data`` and ``labels``."""
    content = load_pickle("root", path)
    content = content if isinstance(content, dict) else {}
    if isinstance(by_class := content.get("class_dict"), dict) and "image_data" in content:
        images = check_images(path, content["image_data"])
        labels = [""] * len(images)
        for label, rows in by_class.items():
            for row in rows:
                if not -1 < row < len(images):
                    refuse_list(path, f"picture {row} of {len(images)}")
                labels[row] = str(label)
        if not all(labels):
            refuse_list(path, f"picture {labels.index('')} in no class")
        return Pictures(list(images), labels, None)
    images = check_images(path, content.get("data"))
    return Pictures(list(images), check_labels(path, content.get("labels"), len(images)), None)


def detect_tiered(root: Path) -> Layout | None:
    """Find ``train_images_png.pkl`` (PNG files) or ``train_images.npz``, ``train_labels.pkl``, and similar names."""
    images = [root / f"{part}_images_png.pkl" for part in AUTHORS_SIDES]
    if not images[0].is_file():
        images = [root / f"{part}_images.npz" for part in AUTHORS_SIDES]
    if not images[0].is_file():
        return None
    labels = [root / f"{part}_labels.pkl" for part in AUTHORS_SIDES]
    files = [*images, *labels]
    check_files(files)
    return files, lambda: join_sides([_read_tiered(*pair) for pair in zip(images, labels, strict=True)])


def _read_tiered(images: Path, labels: Path) -> Pictures:
    """Read a side of tiered-ImageNet."""
    pictures: list[ImageSource]
    if images.suffix == ".npz":
        pictures = list(check_images(images, _read_npz(images)))
    else:
        content = load_pickle("root", images)
        if not isinstance(content, list) or not all(isinstance(picture, (np.ndarray, bytes)) for picture in content):
            refuse_list(images, f"a {type(content).__name__}, not a list of PNG files")
        pictures = [picture if isinstance(picture, bytes) else picture.tobytes() for picture in content]
    read = load_pickle("root", labels)
    read = read if isinstance(read, dict) else {}
    raw_labels = read.get("label_specific", read.get("labels"))
    labels_of_pictures = check_labels(labels, raw_labels, len(pictures))
    names = read.get("label_specific_str")
    if isinstance(names, list) and all(label.isdecimal() and int(label) < len(names) for label in labels_of_pictures):
        # Two synsets may have the same words.
        words = [name if names.count(name) == 1 else f"{name} {index}" for index, name in enumerate(names)]
        labels_of_pictures = [words[int(label)] for label in labels_of_pictures]
    return Pictures(pictures, labels_of_pictures, None)


def _read_npz(path: Path) -> np.ndarray | None:
    """Return the array ``images`` of an NPZ file, mapped where it can be; None where there is none."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if "images" not in file.files:
                return None
            mapped = map_rows(path, ("uint8",), "images")
            return np.asarray(file["images"]) if mapped is None else mapped[0].numpy()
    except READ_ERRORS as error:
        refuse_list(path, type(error).__name__)


def check_files(files: Sequence[Path]) -> None:
    """Raise an InputError if a file of a side is missing."""
    if missing := [path for path in files if not path.is_file()]:
        raise_input_error("root", "hold the pictures and labels of all sides", f"no {missing[0]}", "Get all of them.")


def check_images(path: Path, images: object) -> np.ndarray:
    """Return pixels (n, height, width, 3) uint8; raise an InputError where they are others."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        got = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else "none"
        raise_input_error(
            "root", "hold pictures, (n, height, width, 3) uint8", f"{got} in {path}", "Get the file again."
        )
    return np.asarray(images)


def check_labels(path: Path, labels: object, n: int) -> list[str]:
    """Return the names of the classes of ``n`` pictures; raise an InputError where they are not as many."""
    if not isinstance(labels, (list, tuple, np.ndarray)) or len(labels) != n:
        got = f"{len(labels)} in {path}" if hasattr(labels, "__len__") else f"none in {path}"
        raise_input_error("root", f"have a label of each of {n} pictures", got, "Get the file again.")
    return [str(label) for label in (labels.tolist() if isinstance(labels, np.ndarray) else labels)]


def refuse_list(path: Path, got: str) -> NoReturn:
    """Raise an InputError: a file is not what it should be."""
    raise_input_error("root", "hold lists and pictures that can be read", f"{path} ({got})", "Get the file again.")


def give(pictures: Pictures, *files: Path) -> Layout:
    """Return the layout of pictures in files of their own, beside some lists."""
    paths = [picture for picture in pictures.pictures if isinstance(picture, Path)]
    return [*files, *paths], lambda: pictures
