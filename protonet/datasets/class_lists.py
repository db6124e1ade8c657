"""The class lists of the usual benchmarks by name, so that plain folders can be split and a wrong copy is told.

They are facts from their authors' files: names of classes, which say where they are from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from protonet.datasets.dataset import SIDES, Dataset
from protonet.datasets.layouts import Layout, choose_layout, give
from protonet.datasets.pictures import Found, Pictures, load_pictures
from protonet.embeddings.pictures.images import list_folders, list_images
from protonet.errors import raise_input_error

PREFIX = "meta-"  #: Of the lists of Meta-Dataset, which `load_meta_dataset` reads.
ENOUGH = 0.9  #: A folder with this share of a list's classes is meant to have all of them.
SIDE = 84  #: Pixels per side that Meta-Dataset takes.


@dataclass(frozen=True)
class ClassList:
    """The classes of a benchmark, by side."""

    of: str  #: What it is.
    source: str  #: The repository that the list is from, at which commit, and the file.
    pictures: Mapping[str, int]  #: Of each side of `SIDES`.
    sha256: str  #: Of a line ``side<tab>class`` for each class, sides in their order, classes in that of their names.
    base: tuple[str, ...]
    validation: tuple[str, ...]
    novel: tuple[str, ...]
    children: Mapping[str, str]  #: Of each node of a hierarchy, the nodes and classes below, with blanks between.

    @property
    def side_of(self) -> dict[str, str]:
        """The side of each class."""
        return {name: side for side in SIDES for name in getattr(self, side)}


@cache
def read_class_lists() -> dict[str, ClassList]:
    """Return all class lists by name; those of Meta-Dataset begin with ``meta-``."""
    written = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {
        name: ClassList(**{"children": {}, **entry, **{side: tuple(entry[side]) for side in SIDES}})
        for name, entry in written.items()
    }


def tell_class_lists() -> str:
    """Return all class lists with counts, hashes and sources, as text for people."""
    lines = []
    for name, known in read_class_lists().items():
        counts = ", ".join(
            f"{len(getattr(known, side))} {side} ({known.pictures[side]:,} pictures)"
            for side in SIDES
            if known.pictures[side]
        )
        lines += [f"{name}: {known.of}", f"  {counts}", f"  sha256 {known.sha256}", f"  {known.source}", ""]
    return "\n".join(lines)


def simplify(name: str) -> str:
    """Return a class's name as different copies have it: without marks and blanks, in small letters."""
    return re.sub(r"[\W_]", "", name).lower()


def find_listed(key: str, root: Path, folders: tuple[str, ...] = ("",)) -> Layout | None:
    """Find ``root/CLASS/*.png`` of all classes of a list, which says their sides; other classes are left out.

    Args:
        key: The list's name.
        root: The folder.
        folders: In ``root``, that may hold the folders of classes; those of several that do are taken together.
    """
    known = read_class_lists()[key]
    sides = {simplify(label): (label, side) for label, side in known.side_of.items()}
    held = [
        {simplify(each.name): each for each in list_folders(root / part)} for part in folders if (root / part).is_dir()
    ]
    held = [own for own in held if len(own.keys() & sides.keys()) >= ENOUGH * len(sides)]
    if not held:
        return None
    pictures: list[Path] = []
    labels: list[str] = []
    for own in held:
        missing = [label for place, (label, _) in sides.items() if place not in own]
        if missing:
            got = f"{root} without {len(missing)}, such as {missing[0]!r}"
            raise_input_error("root", f"hold the {len(sides)} classes of {known.of}", got, "Get all of them.")
        for place, (label, _) in sides.items():
            found = list_images("root", own[place])
            pictures += found
            labels += [label] * len(found)
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
    return load_pictures(find_meta_dataset(key, root), size)


def find_meta_dataset(key: str, root: str | Path) -> Found:
    """Find the pictures of one of Meta-Dataset's data sets; errors are as in `load_meta_dataset`."""
    known = read_class_lists()[key]
    layout = partial(find_listed, key, folders=("", "train", "images"))
    return choose_layout("load_meta_dataset", root, SIDE, [layout], f"a folder for each class of {known.of}")


def tell_difference(text: str, counts: Mapping[tuple[str, str], int]) -> list[str]:
    """Return a line that tells how a data set differs from the benchmark that it is said to be; none where it is equal.

    Args:
        text: What it was called, ``KIND:ROOT`` of the kind of a list; of another one nothing is known.
        counts: Its pictures by class and side. Where no class has a name of the list, classes are only counted.
    """
    key, colon, _ = text.partition(":")
    known = read_class_lists().get(key)
    if known is None or not colon:
        return []
    own = {simplify(name): side for name, side in counts}
    listed = {simplify(name): (name, side) for name, side in known.side_of.items()}
    named = bool(own.keys() & listed.keys())
    wrong = []
    for side in SIDES:
        sizes = [count for (_, where), count in counts.items() if where == side]
        missing = [
            name for place, (name, where) in listed.items() if named and where == side and own.get(place) != side
        ]
        n_listed = len(getattr(known, side))
        if len(sizes) != n_listed or missing:
            such = f" ({len(missing)} of them missing, such as {missing[0]})" if missing else ""
            wrong.append(f"{len(sizes)} of {n_listed} {side} classes{such}")
        elif sum(sizes) != known.pictures[side]:
            wrong.append(f"{sum(sizes):,} of {known.pictures[side]:,} {side} pictures")
    return [f"This is not {known.of}, as papers have it: {', '.join(wrong)}."] if wrong else []
