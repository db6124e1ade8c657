"""mini-ImageNet: 100 classes of 600 photographs, split by the lists that come with it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch

from protonet._checks import check_int, fail
from protonet.datasets._images import read_image
from protonet.datasets.dataset import SIDES, Dataset, make_dataset

LISTS = ("train.csv", "val.csv", "test.csv")  # in the order of SIDES


def load_mini_imagenet(root: str | Path, *, size: int = 28, colour: bool = True) -> Dataset:
    """Load mini-ImageNet: ``root/images/*.jpg`` and ``root/train.csv``, ``val.csv`` and ``test.csv``.

    The lists have the columns ``filename`` and ``label``; their classes are base, validation and novel. The whole data
    set takes 0.6 GB at 28 x 28 pixels in colour, and 5 GB at the 84 x 84 of the papers; for these, better save a
    backbone's features as an NPZ file.

    Args:
        root: The folder with the lists and ``images``.
        size: Pixels per side to resize the images to, >= 1.
        colour: Keep red, green and blue; otherwise images are turned grey.

    Returns:
        Rows of ``size * size`` (times 3, channels last) values in [0, 1], in the order of the lists.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: A list or one of its images is missing or cannot be read, a list lacks a column or has no images, or
            a class is in two lists.

    Source: Vinyals et al., "Matching networks for one shot learning" (2016), sec. 4.1.2, https://arxiv.org/abs/1606.04080;
        split: Ravi and Larochelle, "Optimization as a model for few-shot learning" (2017), sec. 5.1.
    """
    root = Path(root)
    size = check_int("load_mini_imagenet", "size", size, low=1)
    images: list[tuple[Path, str, str]] = []
    side_of: dict[str, str] = {}
    for name, side in zip(LISTS, SIDES, strict=True):
        for filename, label in _read_list(root / name):
            path = root / "images" / filename
            if not path.is_file():
                fail("load_mini_imagenet", "root", f"hold the images of {name}", f"no {path}", "Unpack all images.")
            if side_of.setdefault(label, side) != side:
                got = f"{label} in {name} and {LISTS[SIDES.index(side_of[label])]}"
                fail("load_mini_imagenet", "root", "have every class in one list", got, "Split by class, not by image.")
            images.append((path, label, side))
    paths, labels, sides = zip(*images, strict=True)
    rows = [read_image("load_mini_imagenet", "root", path, size=size, colour=colour).reshape(-1) for path in paths]
    x = torch.from_numpy(np.stack(rows)).float().div_(255)  # (n, dim)
    return make_dataset("load_mini_imagenet", "root", x, labels, sides)


def _read_list(path: Path) -> list[tuple[str, str]]:
    """Return the file names and labels of a list."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file)
            header = ", ".join(lines.fieldnames or ()) or "nothing"
            pairs = [(line.get("filename") or "", line.get("label") or "") for line in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        got = f"{path} ({type(error).__name__})"
        fail("load_mini_imagenet", "root", f"hold lists {', '.join(LISTS)} that can be read", got, "Check the path.")
    if not pairs or not all(map(all, pairs)):
        constraint, remedy = "have columns filename and label in every list", "Fill both columns in every line."
        fail("load_mini_imagenet", "root", constraint, f"{path} with {header}", remedy)
    return pairs
