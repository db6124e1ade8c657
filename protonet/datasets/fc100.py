"""FC100: the 100 classes of CIFAR-100, 600 pictures each, split by superclass."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from protonet.datasets.class_lists import detect_listed_classes
from protonet.datasets.dataset import Dataset
from protonet.datasets.layouts import choose_layout, detect_folders, detect_pickles
from protonet.datasets.pictures import ImageSet, load_pictures


def load_fc100(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load FC100, in one of the forms that it is published in.

    They are ``root/FC100_train.pickle``, ``FC100_val.pickle`` and ``FC100_test.pickle``, or folders of classes in
    ``root/train``, ``val`` and ``test``; or CIFAR-100 as folders of all its classes in ``root``, ``data``, or ``train``
    and ``test``, whose pictures are taken together. Their classes are base, validation and novel.

    Args:
        root: The folder.
        size: Pixels per side to resize pictures to, >= 1; None for their own 32.

    Returns:
        As `protonet.datasets.pictures.load_pictures`: 0.2 GB on the disk at 32 x 32.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: The folder has none of these forms, a file is missing or cannot be read, or a class is on two sides.

    Source: Oreshkin, Rodríguez and Lacoste, "TADAM: task dependent adaptive metric for improved few-shot learning"
        (2018), sec. 4.1, https://arxiv.org/abs/1805.10123. Pickles: Lee et al. (2019), https://arxiv.org/abs/1904.03758.
    """
    return load_pictures(locate_fc100(root), size)


def locate_fc100(root: str | Path) -> ImageSet:
    """Find FC100's pictures; errors are as in `load_fc100`."""
    expected = "FC100_train.pickle, FC100_val.pickle and FC100_test.pickle, or folders train, val and test"
    listed = partial(detect_listed_classes, "fc100", folders=("", "data", "train", "test"))
    return choose_layout("load_fc100", root, 32, (detect_pickles("FC100_{}.pickle"), listed, detect_folders), expected)
