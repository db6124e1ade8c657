"""Data sets in a folder of the user: tables of texts with classes, and pictures in a folder per class; their splits."""

from __future__ import annotations

import csv
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protonet.errors import raise_input_error

#: Columns of a table of texts.
TEXT, CLASS = "text", "class"
#: Maximum number of unlabelled rows for training from class names alone.
MAX_UNLABELLED = 1000


class ItemDataset(NamedTuple):
    """A data set of texts or pictures."""

    modality: str  #: "text" or "picture".
    cells: list[str]  #: (n,) texts, or paths of pictures.
    classes: tuple[str, ...]  #: Class names in ascending order.
    labels: np.ndarray  #: (n,) int64 indices of classes.
    digest: str  #: Hash of the data set; of a picture, its name and size are hashed.

    @property
    def names(self) -> list[str]:
        """The class name of each cell."""
        return [self.classes[label] for label in self.labels]


class RowSplit(NamedTuple):
    """Indices of the rows of a split, in the order in which they are written to files."""

    labelled: np.ndarray  #: Training rows with their classes.
    unlabelled: np.ndarray  #: Training rows without classes.
    test_rows: np.ndarray  #: Test rows.


def list_data_sets(folder: Path) -> dict[str, Path]:
    """List the paths of the data sets of a folder by name, tables first; raise an InputError if there are none."""
    tables = sorted(folder.glob("*.csv"))
    folders = sorted(path for path in folder.glob("*") if any(picture.is_dir() for picture in path.glob("*")))
    if not tables and not folders:
        must = f"hold tables .csv with columns {TEXT} and {CLASS}, or folders of pictures by class"
        raise_input_error("folder", must, folder, "Pass another one.")
    return {path.name if path.is_dir() else path.stem: path for path in (*tables, *folders)}


@cache
def read_items(path: Path) -> ItemDataset:
    """Read a data set; raise an InputError if a column is missing, or for fewer than two classes."""
    if path.is_dir():
        paths = sorted(picture for picture in path.glob("*/*") if picture.is_file())
        cells, names = list(map(str, paths)), [picture.parent.name for picture in paths]
        content = "\0".join(f"{picture.relative_to(path)} {picture.stat().st_size}" for picture in paths)
    else:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if not {TEXT, CLASS} <= set(reader.fieldnames or ()):
                must = f"hold tables with columns {TEXT} and {CLASS}"
                raise_input_error("folder", must, path.name, "Rename its columns.")
            rows = list(reader)
        cells, names = [row[TEXT] for row in rows], [row[CLASS] for row in rows]
        content = "\0".join([*cells, *names])
    classes, labels = np.unique(names, return_inverse=True)
    if len(classes) < 2:
        remedy = "Remove it, or name others with --sets."
        raise_input_error("folder", "hold sets of two classes or more", path.name, remedy)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return ItemDataset("picture" if path.is_dir() else "text", cells, tuple(classes.tolist()), labels, digest)


def split_items(items: ItemDataset, shots: int, seed: int, tests: int) -> RowSplit:
    """Split a set into training and test rows, half of each class.

    There are at most ``shots`` >= 0 labelled rows per class, and at most ``tests`` test rows. These are the same for
    any number of shots; the rows of fewer shots are a subset of those of more.
    """
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(np.flatnonzero(items.labels == c)) for c in range(len(items.classes))]
    first = [order[: -(-len(order) // 2)] for order in orders]
    remaining = [order[len(half) :] for order, half in zip(orders, first, strict=True)]
    judged = generator.permutation(np.concatenate(remaining))[:tests]
    unlabelled = generator.permutation(np.concatenate(first))[:MAX_UNLABELLED]
    return RowSplit(np.concatenate([half[:shots] for half in first]), unlabelled, judged)
