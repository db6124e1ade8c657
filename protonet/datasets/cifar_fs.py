"""CIFAR-FS: the 100 classes of CIFAR-100, 600 pictures each, split by class."""

from __future__ import annotations

from pathlib import Path

from protonet.datasets._images import list_images
from protonet.datasets.dataset import Dataset
from protonet.datasets.layouts import PARTS, Layout, choose_layout, find_folders, find_pickles, refuse_list
from protonet.datasets.pictures import Found, Pictures, join_sides, load_pictures

SPLIT = Path("splits", "bertinetto")  #: The folder of the lists of classes.


def load_cifar_fs(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load CIFAR-FS, in one of the forms that it is published in.

    They are ``root/data/CLASS/*.png`` with ``root/splits/bertinetto/train.txt``, ``val.txt`` and ``test.txt``, lists of
    classes; ``root/CIFAR_FS_train.pickle``, ``..._val.pickle`` and ``..._test.pickle``; or folders of classes in
    ``root/meta-train``, ``meta-val`` and ``meta-test``. Their classes are base, validation and novel.

    Args:
        root: The folder, or one with a folder ``cifar100`` of that form.
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
    return load_pictures(find_cifar_fs(root), size)


def find_cifar_fs(root: str | Path) -> Found:
    """Find CIFAR-FS's pictures; errors are as in `load_cifar_fs`."""
    root = Path(root)
    home = root / "cifar100" if (root / "cifar100").is_dir() else root
    layouts = (_find_lists, find_pickles("CIFAR_FS_{}.pickle"), find_folders)
    wanted = f"data/CLASS/*.png and {SPLIT}/train.txt, CIFAR_FS_train.pickle, or meta-train, meta-val and meta-test"
    return choose_layout("load_cifar_fs", home, 32, layouts, wanted)


def _find_lists(name: str, root: Path) -> Layout | None:
    """Find the folders of all classes, and lists of those of each side."""
    lists = [root / SPLIT / f"{part}.txt" for part in PARTS]
    if not lists[0].is_file() or not (root / "data").is_dir():
        return None
    parts, paths = [], []
    for path in lists:
        try:
            classes = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            refuse_list(name, path, type(error).__name__)
        missing = [label for label in classes if not (root / "data" / label).is_dir()]
        if missing:
            refuse_list(name, path, f"no folder {root / 'data' / missing[0]}")
        own = {label: list_images(name, "root", root / "data" / label) for label in classes}
        paths += [image for images in own.values() for image in images]
        labels = [label for label, images in own.items() for _ in images]
        parts.append(Pictures([image for images in own.values() for image in images], labels, None))
    return [*lists, *paths], lambda: join_sides(parts)
