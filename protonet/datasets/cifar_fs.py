"""CIFAR-FS: the 100 classes of CIFAR-100, 600 pictures each, split by class."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from protonet.datasets.class_lists import detect_listed_classes
from protonet.datasets.dataset import Dataset
from protonet.datasets.layouts import choose_layout, detect_class_lists, detect_folders, detect_pickles
from protonet.datasets.pictures import ImageSet, load_pictures

SPLIT = "splits/bertinetto/{}.txt"  #: The lists of classes.


def load_cifar_fs(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load CIFAR-FS, in one of the forms that it is published in.

    They are ``root/data/CLASS/*.png`` with ``root/splits/bertinetto/train.txt``, ``val.txt`` and ``test.txt``, lists of
    classes; ``root/CIFAR_FS_train.pickle``, ``..._val.pickle`` and ``..._test.pickle``; or folders of classes in
    ``root/meta-train``, ``meta-val`` and ``meta-test``; or CIFAR-100 as folders of all its classes in ``root`` or
    ``data``, or in ``train`` and ``test``, which are taken together. Their classes are base, validation and novel.

    Args:
        root: The folder, or one with such a folder ``cifar100``.
        size: Pixels per side to resize pictures to, >= 1; None for their own 32.

    Returns:
        As `protonet.datasets.pictures.load_pictures`: 0.2 GB on the disk at 32 x 32.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: The folder has none of these forms, a file is missing or cannot be read, or a class is on two sides.

    Source: Bertinetto et al., "Meta-learning with differentiable closed-form solvers" (2019), sec. 4.1,
        https://arxiv.org/abs/1805.08136. Pickles: Lee et al. (2019), https://arxiv.org/abs/1904.03758.
    """
    return load_pictures(locate_cifar_fs(root), size)


def locate_cifar_fs(root: str | Path) -> ImageSet:
    """Find CIFAR-FS's pictures; errors are as in `load_cifar_fs`."""
    root = Path(root)
    home = root / "cifar100" if (root / "cifar100").is_dir() else root
    listed = partial(detect_listed_classes, "cifar-fs", folders=("", "data", "train", "test"))
    layouts = (detect_class_lists("data", SPLIT), detect_pickles("CIFAR_FS_{}.pickle"), listed, detect_folders)
    expected = (
        f"data/CLASS/*.png and {SPLIT.format('train')}, CIFAR_FS_train.pickle, or meta-train, meta-val and meta-test"
    )
    return choose_layout("load_cifar_fs", home, 32, layouts, expected)
