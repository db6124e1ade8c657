"""The class lists of the usual benchmarks by name, so that plain folders can be split and wrong copies are detected.

They are facts from their authors' files: names of classes, which say where they are from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from protonet.datasets.dataset import SPLIT_SIDES, Dataset
from protonet.datasets.layouts import Layout, choose_layout, give
from protonet.datasets.pictures import ImageSet, Pictures, load_pictures
from protonet.embeddings.pictures.images import list_folders, list_images
from protonet.errors import raise_input_error

PREFIX = "meta-"  #: Prefix of the lists of Meta-Dataset, which `load_meta_dataset` reads.
MIN_CLASS_FRACTION = 0.9  #: A folder with this share of a list's classes is meant to have all of them.
META_DATASET_SIZE = 84  #: Pixels per side that Meta-Dataset takes.


@dataclass(frozen=True)
class ClassList:
    """The classes of a benchmark, by side."""

    of: str  #: A description.
    source: str  #: The repository that the list is from, at which commit, and the file.
    pictures: Mapping[str, int]  #: Numbers of pictures by side of `SPLIT_SIDES`.
    sha256: str  #: SHA-256 of lines ``side<tab>class``, by side, then by the name of the class.
    base: tuple[str, ...]
    validation: tuple[str, ...]
    novel: tuple[str, ...]
    children: Mapping[str, str]  #: For each node of a hierarchy, the nodes and classes below, separated by blanks.

    @property
    def side_of(self) -> dict[str, str]:
        """The side of each class."""
        return {name: side for side in SPLIT_SIDES for name in getattr(self, side)}


@cache
def read_class_lists() -> dict[str, ClassList]:
    """Return all class lists by name; those of Meta-Dataset begin with ``meta-``."""
    written = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {
        name: ClassList(**{"children": {}, **entry, **{side: tuple(entry[side]) for side in SPLIT_SIDES}})
        for name, entry in written.items()
    }


def format_class_lists() -> str:
    """Return all class lists with counts, hashes and sources, as text for people."""
    lines = []
    for name, known in read_class_lists().items():
        counts = ", ".join(
            f"{len(getattr(known, side))} {side} ({known.pictures[side]:,} pictures)"
            for side in SPLIT_SIDES
            if known.pictures[side]
        )
        lines += [f"{name}: {known.of}", f"  {counts}", f"  sha256 {known.sha256}", f"  {known.source}", ""]
    return "\n".join(lines)


def simplify(name: str) -> str:
    """Return a class's name as different copies have it: without marks and blanks, in small letters."""
    return re.sub(r"[\W_]", "", name).lower()


def detect_listed_classes(key: str, root: Path, folders: tuple[str, ...] = ("",)) -> Layout | None:
    """Find ``root/CLASS/*.png`` of all classes of a list, which says their sides; other classes are left out.

    Args:
        key: The list's name.
        root: The folder.
        folders: In ``root``, that may hold the folders of classes; those of several that do are taken together.
    """
    known = read_class_lists()[key]
    sides = {simplify(label): (label, side) for label, side in known.side_of.items()}
    folders_by_part = [
        {simplify(folder.name): folder for folder in list_folders(root / part)}
        for part in folders
        if (root / part).is_dir()
    ]
    folders_by_part = [
        folders_of
        for folders_of in folders_by_part
        if len(folders_of.keys() & sides.keys()) >= MIN_CLASS_FRACTION * len(sides)
    ]
    if not folders_by_part:
        return None
    pictures: list[Path] = []
    labels: list[str] = []
    for folders_of in folders_by_part:
        missing = [label for key_of_class, (label, _) in sides.items() if key_of_class not in folders_of]
        if missing:
            got = f"{root} without {len(missing)}, such as {missing[0]!r}"
            raise_input_error("root", f"hold the {len(sides)} classes of {known.of}", got, "Get all of them.")
        for key_of_class, (label, _) in sides.items():
            images = list_images("root", folders_of[key_of_class])
            pictures += images
            labels += [label] * len(images)
    side_of = known.side_of
    return give(Pictures(pictures, labels, [side_of[label] for label in labels]))


def load_meta_dataset(key: str, root: str | Path, *, size: int | None = None) -> Dataset:
    """Load one of Meta-Dataset's data sets from plain folders, ``root/CLASS/*.jpg``, with its split by class.

    Args:
        key: The name of its list, such as ``meta-dtd``; `read_class_lists` has all. ImageNet is ``root/train/SYNSET``
            or ``root/SYNSET``.
        root: The folder. Names of folders are those of the list, whatever their marks: ``F-16A/B`` may be ``F-16A_B``.
        size: Pixels per side to resize pictures to, >= 1; None for 84.

    Returns:
        As `protonet.datasets.pictures.load_pictures`.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: There is no such list, a class of it is missing, or a file cannot be read.

    Source: Triantafillou et al., "Meta-Dataset: a dataset of datasets for learning to learn from few examples" (2020),
        https://arxiv.org/abs/1903.03096, and the lists of its code.
    """
    keys = [name for name in read_class_lists() if name.startswith(PREFIX)]
    if key not in keys:
        raise_input_error("key", f"be one of {', '.join(keys)}", repr(key), "Pick a listed one.")
    return load_pictures(locate_meta_dataset(key, root), size)


def locate_meta_dataset(key: str, root: str | Path) -> ImageSet:
    """Find the pictures of one of Meta-Dataset's data sets; errors are as in `load_meta_dataset`."""
    known = read_class_lists()[key]
    layout = partial(detect_listed_classes, key, folders=("", "train", "images"))
    return choose_layout(
        "load_meta_dataset", root, META_DATASET_SIZE, [layout], f"a folder for each class of {known.of}"
    )


def describe_difference(text: str, counts: Mapping[tuple[str, str], int]) -> list[str]:
    """Describe in one line how a data set differs from the benchmark of its name; no line if they are equal.

    Args:
        text: The name of the data set, ``KIND:ROOT``; only kinds with a class list are compared.
        counts: Its pictures by class and side. If no class name is in the list, only numbers are compared.
    """
    key, colon, _ = text.partition(":")
    known = read_class_lists().get(key)
    if known is None or not colon:
        return []
    side_by_name = {simplify(name): side for name, side in counts}
    listed = {simplify(name): (name, side) for name, side in known.side_of.items()}
    named = bool(side_by_name.keys() & listed.keys())
    wrong = []
    for side in SPLIT_SIDES:
        sizes = [count for (_, where), count in counts.items() if where == side]
        missing = [
            name
            for key_of_class, (name, where) in listed.items()
            if named and where == side and side_by_name.get(key_of_class) != side
        ]
        n_listed = len(getattr(known, side))
        if len(sizes) != n_listed or missing:
            such = f" ({len(missing)} of them missing, such as {missing[0]})" if missing else ""
            wrong.append(f"{len(sizes)} of {n_listed} {side} classes{such}")
        elif sum(sizes) != known.pictures[side]:
            wrong.append(f"{sum(sizes):,} of {known.pictures[side]:,} {side} pictures")
    return [f"This is not {known.of}, as papers have it: {', '.join(wrong)}."] if wrong else []
