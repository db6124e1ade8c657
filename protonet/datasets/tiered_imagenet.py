"""tiered-ImageNet: 608 classes of ImageNet, split by superclass."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from protonet.datasets.class_lists import detect_listed_classes
from protonet.datasets.dataset import Dataset
from protonet.datasets.layouts import choose_layout, detect_class_lists, detect_folders, detect_tiered
from protonet.datasets.pictures import ImageSet, load_pictures


def load_tiered_imagenet(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load tiered-ImageNet, in one of the forms that it is published in.

    They are ``root/train_images_png.pkl`` or ``train_images.npz``, with ``train_labels.pkl``, and the same of ``val``
    and ``test``; folders of classes in ``root/train``, ``val`` and ``test``; or ImageNet's own ``root/train/SYNSET``
    or ``root/SYNSET``, split by the authors' ``root/train.csv``, ``val.csv`` and ``test.csv`` where they are there,
    and by the list that we hold otherwise. Their classes are base, validation and novel.
    Pixels of NPZ files are taken in the order of colours that they are in: blue first where OpenCV wrote them.

    Args:
        root: The folder.
        size: Pixels per side to resize pictures to, >= 1; None for the 84 of the papers.

    Returns:
        As `protonet.datasets.pictures.load_pictures`: 16.5 GB on the disk at 84 x 84, and hardly any in memory, but
        for the first time, where pickles are read whole.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: The folder has none of these forms, a file is missing or cannot be read, or a class is on two sides.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 4.1,
        https://arxiv.org/abs/1803.00676.
    """
    return load_pictures(locate_tiered_imagenet(root), size)


def locate_tiered_imagenet(root: str | Path) -> ImageSet:
    """Find tiered-ImageNet's pictures; errors are as in `load_tiered_imagenet`."""
    expected = (
        "train_images_png.pkl or train_images.npz, with train_labels.pkl, folders train, val and test, or train.csv"
    )
    listed = partial(detect_listed_classes, "tiered-imagenet", folders=("train", ""))
    layouts = (detect_tiered, detect_folders, detect_class_lists("train", "{}.csv"), listed)
    return choose_layout("load_tiered_imagenet", root, 84, layouts, expected)
