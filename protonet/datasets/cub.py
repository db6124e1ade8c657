"""CUB-200-2011: 200 species of birds, some 60 photographs each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from protonet.datasets.class_lists import find_listed
from protonet.datasets.dataset import Dataset
from protonet.datasets.layouts import Layout, choose_layout, find_csv, find_folders, find_json, refuse_list
from protonet.datasets.pictures import Found, Pictures, load_pictures

HOME = "CUB_200_2011"  #: The folder that the archive unpacks to.


def load_cub(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load CUB-200-2011: ``root/images/CLASS/*.jpg``, ``images.txt`` and ``image_class_labels.txt``.

    The split is that of ``base.json``, ``val.json`` and ``novel.json`` of Chen et al., or of ``train.csv``, ``val.csv``
    and ``test.csv`` (columns ``filename`` and ``label``) beside ``images``, where they are there. Otherwise it is the
    rule of Chen et al.: in the order of the classes' names every other one is base, and the others are validation and
    novel in turn. Folders of classes in ``root/train``, ``val`` and ``test``, or of all in ``root``, will do as well.

    Args:
        root: The archive's folder ``CUB_200_2011``, or the one above it.
        size: Pixels per side to resize pictures to, >= 1; None for the 84 of the papers. Pictures are not cropped.

    Returns:
        As `protonet.datasets.pictures.load_pictures`: 0.25 GB on the disk at 84 x 84.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: The folder has none of these forms, or a file is missing or cannot be read.

    Source: Wah et al., "The Caltech-UCSD Birds-200-2011 dataset" (2011). Split: Chen et al., "A closer look at few-shot
        classification" (2019), sec. 4.1, https://arxiv.org/abs/1904.04232.
    """
    return load_pictures(find_cub(root), size)


def find_cub(root: str | Path) -> Found:
    """Find CUB's pictures; errors are as in `load_cub`."""
    root = Path(root)
    home = root / HOME if (root / HOME).is_dir() else root
    listed = partial(find_listed, "cub", folders=("images", ""))
    layouts = (find_json, find_csv, _find_archive, find_folders, listed)
    return choose_layout("load_cub", home, 84, layouts, "images, images.txt and image_class_labels.txt")


def _find_archive(root: Path) -> Layout | None:
    """Find the archive's lists, and split classes by the rule of Chen et al."""
    lists = [root / "images.txt", root / "image_class_labels.txt"]
    if not all(path.is_file() for path in lists):
        return None
    files, classes = ({row[0]: row[1] for row in _read_pairs(path)} for path in lists)
    if files.keys() != classes.keys():
        refuse_list(lists[1], f"{len(classes)} labels of {len(files)} pictures")
    labels = [file.partition("/")[0] for file in files.values()]
    side_of = {
        label: "base" if number % 2 == 0 else "validation" if number % 4 == 1 else "novel"
        for number, label in enumerate(sorted(set(labels)))
    }
    number_of: dict[str, str] = {}
    for key, label in zip(files, labels, strict=True):
        if number_of.setdefault(label, classes[key]) != classes[key]:
            refuse_list(lists[1], f"folder {label} of classes {number_of[label]} and {classes[key]}")
    paths = [root / "images" / file for file in files.values()]
    found = Pictures(paths, labels, [side_of[label] for label in labels])
    return [*lists, *paths], lambda: found


def _read_pairs(path: Path) -> list[list[str]]:
    """Return the lines of a list, each of a number and a value."""
    try:
        rows = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        refuse_list(path, type(error).__name__)
    if not rows or any(len(row) != 2 for row in rows):
        refuse_list(path, "a line without a number and a value" if rows else "empty")
    return rows
