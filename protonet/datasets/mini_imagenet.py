"""mini-ImageNet: 100 classes of 600 photographs, split by the lists that come with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from protonet.datasets.class_lists import detect_listed_classes
from protonet.datasets.dataset import Dataset
from protonet.datasets.layouts import choose_layout, detect_csv, detect_folders, detect_pickles
from protonet.datasets.pictures import ImageSet, load_pictures

LAYOUTS = (
    detect_csv,
    detect_pickles("mini-imagenet-cache-{}.pkl"),
    detect_pickles("miniImageNet_category_split_{}.pickle", "train_phase_train", "val", "test"),
    detect_folders,
    partial(detect_listed_classes, "mini-imagenet", folders=("", "images")),
)


def load_mini_imagenet(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load mini-ImageNet, in one of the forms that it is published in.

    They are ``root/images/*.jpg`` with ``train.csv``, ``val.csv`` and ``test.csv`` (columns ``filename`` and
    ``label``); ``root/mini-imagenet-cache-train.pkl``, ``-val.pkl`` and ``-test.pkl``;
    ``root/miniImageNet_category_split_train_phase_train.pickle``, ``..._val.pickle`` and ``..._test.pickle``; or
    folders of classes in ``root/train``, ``val`` and ``test``; or of all classes in ``root``. Their classes are base,
    validation and novel, by Ravi's list where none is there.

    Args:
        root: The folder.
        size: Pixels per side to resize pictures to, >= 1; None for the 84 of the papers.

    Returns:
        As `protonet.datasets.pictures.load_pictures`: 1.3 GB on the disk at 84 x 84, and hardly any in memory.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: The folder has none of these forms, a file is missing or cannot be read, a list has no images, or a
            class is in two lists.

    Source: Vinyals et al., "Matching networks for one shot learning" (2016), sec. 4.1.2, https://arxiv.org/abs/1606.04080;
        split: Ravi and Larochelle, "Optimization as a model for few-shot learning" (2017), sec. 5.1. Pickles: Ren et
        al. (2018), https://arxiv.org/abs/1803.00676; Gidaris and Komodakis (2018), https://arxiv.org/abs/1804.09458.
    """
    return load_pictures(locate_mini_imagenet(root), size)


def locate_mini_imagenet(root: str | Path) -> ImageSet:
    """Find mini-ImageNet's pictures; errors are as in `load_mini_imagenet`."""
    expected = "train.csv, val.csv, test.csv and images, the pickles of one of its releases, or train, val and test"
    return choose_layout("load_mini_imagenet", root, 84, LAYOUTS, expected)
