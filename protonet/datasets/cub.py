"""CUB-200-2011: 200 species of birds, some 60 photographs each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from protonet.datasets.class_lists import detect_listed_classes
from protonet.datasets.dataset import Dataset
from protonet.datasets.layouts import Layout, choose_layout, detect_csv, detect_folders, detect_json, refuse_list
from protonet.datasets.pictures import ImageSet, Pictures, load_pictures

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
    return load_pictures(locate_cub(root), size)


def locate_cub(root: str | Path) -> ImageSet:
    """Find CUB's pictures; errors are as in `load_cub`."""
    root = Path(root)
    home = root / HOME if (root / HOME).is_dir() else root
    listed = partial(detect_listed_classes, "cub", folders=("images", ""))
    layouts = (detect_json, detect_csv, _find_archive, detect_folders, listed)
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
        label: "base" if position % 2 == 0 else "validation" if position % 4 == 1 else "novel"
        for position, label in enumerate(sorted(set(labels)))
    }
    label_of: dict[str, str] = {}
    for key, label in zip(files, labels, strict=True):
        if label_of.setdefault(label, classes[key]) != classes[key]:
            refuse_list(lists[1], f"folder {label} of classes {label_of[label]} and {classes[key]}")
    paths = [root / "images" / file for file in files.values()]
    pictures = Pictures(paths, labels, [side_of[label] for label in labels])
    return [*lists, *paths], lambda: pictures


def _read_pairs(path: Path) -> list[list[str]]:
    """Return the lines of a list, each of a number and a value."""
    try:
        rows = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        refuse_list(path, type(error).__name__)
    if not rows or any(len(row) != 2 for row in rows):
        refuse_list(path, "a line without a number and a value" if rows else "empty")
    return rows
