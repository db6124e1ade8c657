"""Published image benchmarks of few-shot learning, read from the folders, lists or pickles of their releases.

Each loader takes the folder of the release, and the pixels per side to resize pictures to: an int >= 1, or None for the
size of the papers. That is 84; 32 for CIFAR-FS and FC100; 28 for Omniglot. The result is that of
`protonet.datasets.pictures.load_pictures`, hardly any of it in memory. On the disk, mini-ImageNet takes 1.3 GB,
tiered-ImageNet 16.5 GB (its pickles are read whole, once), CIFAR-FS and FC100 0.2 GB, and CUB 0.25 GB.

A loader raises a MissingPackageError without Pillow, and an InputTypeError if the size is not a number. It raises an
InputError if the folder has none of the published forms, a file is missing or cannot be read, or a class is on two
sides.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from protonet.datasets.class_lists import detect_listed_classes
from protonet.datasets.dataset import Dataset
from protonet.datasets.layouts import (
    Layout,
    choose_layout,
    detect_class_lists,
    detect_csv,
    detect_folders,
    detect_json,
    detect_pickles,
    detect_tiered,
    refuse_list,
)
from protonet.datasets.pictures import ImageSet, ImageSource, Pictures, Rotated, load_pictures
from protonet.embeddings.pictures.images import list_folders, list_images
from protonet.errors import raise_input_error

MINI_IMAGENET_LAYOUTS = (
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

    Source: Vinyals et al., "Matching networks for one shot learning" (2016), sec. 4.1.2, https://arxiv.org/abs/1606.04080;
        split: Ravi and Larochelle, "Optimization as a model for few-shot learning" (2017), sec. 5.1. Pickles: Ren et
        al. (2018), https://arxiv.org/abs/1803.00676; Gidaris and Komodakis (2018), https://arxiv.org/abs/1804.09458.
    """
    return load_pictures(locate_mini_imagenet(root), size)


def locate_mini_imagenet(root: str | Path) -> ImageSet:
    """Locate mini-ImageNet's pictures; errors are as in `load_mini_imagenet`."""
    expected = "train.csv, val.csv, test.csv and images, the pickles of one of its releases, or train, val and test"
    return choose_layout("load_mini_imagenet", root, 84, MINI_IMAGENET_LAYOUTS, expected)


def load_tiered_imagenet(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load tiered-ImageNet, in one of the forms that it is published in.

    They are ``root/train_images_png.pkl`` or ``train_images.npz``, with ``train_labels.pkl``, and the same of ``val``
    and ``test``; folders of classes in ``root/train``, ``val`` and ``test``; or ImageNet's own ``root/train/SYNSET``
    or ``root/SYNSET``, split by the authors' ``root/train.csv``, ``val.csv`` and ``test.csv`` where they are there,
    and by the list that we hold otherwise. Their classes are base, validation and novel.
    Pixels of NPZ files are taken in the order of colours that they are in: blue first where OpenCV wrote them.

    Source: Ren et al., "Meta-learning for semi-supervised few-shot classification" (2018), sec. 4.1,
        https://arxiv.org/abs/1803.00676.
    """
    return load_pictures(locate_tiered_imagenet(root), size)


def locate_tiered_imagenet(root: str | Path) -> ImageSet:
    """Locate tiered-ImageNet's pictures; errors are as in `load_tiered_imagenet`."""
    expected = (
        "train_images_png.pkl or train_images.npz, with train_labels.pkl, folders train, val and test, or train.csv"
    )
    listed = partial(detect_listed_classes, "tiered-imagenet", folders=("train", ""))
    layouts = (detect_tiered, detect_folders, detect_class_lists("train", "{}.csv"), listed)
    return choose_layout("load_tiered_imagenet", root, 84, layouts, expected)


CIFAR_FS_SPLIT = "splits/bertinetto/{}.txt"  #: The lists of classes.


def load_cifar_fs(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load CIFAR-FS, in one of the forms that it is published in.

    They are ``root/data/CLASS/*.png`` with ``root/splits/bertinetto/train.txt``, ``val.txt`` and ``test.txt``, lists of
    classes; ``root/CIFAR_FS_train.pickle``, ``..._val.pickle`` and ``..._test.pickle``; or folders of classes in
    ``root/meta-train``, ``meta-val`` and ``meta-test``; or CIFAR-100 as folders of all its classes in ``root`` or
    ``data``, or in ``train`` and ``test``, which are taken together. Their classes are base, validation and novel.

    Source: Bertinetto et al., "Meta-learning with differentiable closed-form solvers" (2019), sec. 4.1,
        https://arxiv.org/abs/1805.08136. Pickles: Lee et al. (2019), https://arxiv.org/abs/1904.03758.
    """
    return load_pictures(locate_cifar_fs(root), size)


def locate_cifar_fs(root: str | Path) -> ImageSet:
    """Locate CIFAR-FS's pictures; errors are as in `load_cifar_fs`."""
    root = Path(root)
    home = root / "cifar100" if (root / "cifar100").is_dir() else root
    listed = partial(detect_listed_classes, "cifar-fs", folders=("", "data", "train", "test"))
    layouts = (detect_class_lists("data", CIFAR_FS_SPLIT), detect_pickles("CIFAR_FS_{}.pickle"), listed, detect_folders)
    expected = (
        f"data/CLASS/*.png and {CIFAR_FS_SPLIT.format('train')}, CIFAR_FS_train.pickle, "
        "or meta-train, meta-val and meta-test"
    )
    return choose_layout("load_cifar_fs", home, 32, layouts, expected)


def load_fc100(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load FC100, in one of the forms that it is published in.

    They are ``root/FC100_train.pickle``, ``FC100_val.pickle`` and ``FC100_test.pickle``, or folders of classes in
    ``root/train``, ``val`` and ``test``; or CIFAR-100 as folders of all its classes in ``root``, ``data``, or ``train``
    and ``test``, whose pictures are taken together. Their classes are base, validation and novel.

    Source: Oreshkin, Rodríguez and Lacoste, "TADAM: task dependent adaptive metric for improved few-shot learning"
        (2018), sec. 4.1, https://arxiv.org/abs/1805.10123. Pickles: Lee et al. (2019), https://arxiv.org/abs/1904.03758.
    """
    return load_pictures(locate_fc100(root), size)


def locate_fc100(root: str | Path) -> ImageSet:
    """Locate FC100's pictures; errors are as in `load_fc100`."""
    expected = "FC100_train.pickle, FC100_val.pickle and FC100_test.pickle, or folders train, val and test"
    listed = partial(detect_listed_classes, "fc100", folders=("", "data", "train", "test"))
    return choose_layout("load_fc100", root, 32, (detect_pickles("FC100_{}.pickle"), listed, detect_folders), expected)


CUB_FOLDER = "CUB_200_2011"  #: The folder that the archive unpacks to.


def load_cub(root: str | Path, *, size: int | None = None) -> Dataset:
    """Load CUB-200-2011: ``root/images/CLASS/*.jpg``, ``images.txt`` and ``image_class_labels.txt``.

    The split is that of ``base.json``, ``val.json`` and ``novel.json`` of Chen et al., or of ``train.csv``, ``val.csv``
    and ``test.csv`` (columns ``filename`` and ``label``) beside ``images``, where they are there. Otherwise it is the
    rule of Chen et al.: in the order of the classes' names every other one is base, and the others are validation and
    novel in turn. Folders of classes in ``root/train``, ``val`` and ``test``, or of all in ``root``, will do as well.
    The folder is ``CUB_200_2011`` of the archive, or the one above it. Pictures are not cropped.

    Source: Wah et al., "The Caltech-UCSD Birds-200-2011 dataset" (2011). Split: Chen et al., "A closer look at few-shot
        classification" (2019), sec. 4.1, https://arxiv.org/abs/1904.04232.
    """
    return load_pictures(locate_cub(root), size)


def locate_cub(root: str | Path) -> ImageSet:
    """Locate CUB's pictures; errors are as in `load_cub`."""
    root = Path(root)
    home = root / CUB_FOLDER if (root / CUB_FOLDER).is_dir() else root
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


BACKGROUND, EVALUATION = "images_background", "images_evaluation"
VALIDATION_FRACTION = 0.2  #: The least share of the background's characters that are for validation. Our own choice.


def load_omniglot(root: str | Path, *, size: int | None = None, rotations: bool = False) -> Dataset:
    """Load Omniglot: ``root/images_background/ALPHABET/character01/*.png`` and ``root/images_evaluation/...``.

    The background's alphabets are base, except for the last ones by name: as many of these as are needed for a fifth
    of its characters are for validation. The evaluation's alphabets are novel.

    Args:
        root: The folder with both folders, or with a folder ``omniglot-py`` that has them.
        size: Pixels per side to resize the drawings of 105 x 105 pixels to.
        rotations: Whether each character turned by 90, 180 and 270 degrees is a further class, on the character's side
            of the split: 6,492 classes instead of 1,623.

    Returns:
        Rows of one channel, ink being 1, and classes "ALPHABET/characterNN", with "rot090" and so on behind it if they
        are turned.

    Source: Lake, Salakhutdinov and Tenenbaum, "Human-level concept learning through probabilistic program induction"
        (2015). https://github.com/brendenlake/omniglot. Rotations: Santoro et al., "Meta-learning with memory-augmented
        neural networks" (2016), sec. 4.1; Snell et al. (2017), sec. 3.1.
    """
    return load_pictures(locate_omniglot(root, rotations=rotations), size)


def locate_omniglot(root: str | Path, *, rotations: bool = False) -> ImageSet:
    """List Omniglot's drawings; arguments and errors are as in `load_omniglot`."""
    root = Path(root)
    home = root / "omniglot-py" if (root / "omniglot-py").is_dir() else root
    background, evaluation = (_list_characters(home / part) for part in (BACKGROUND, EVALUATION))
    side_of = dict.fromkeys(background, "base") | dict.fromkeys(evaluation, "novel")
    n_validation = 0
    for alphabet in sorted({folder.parent for folder in background}, reverse=True)[:-1]:
        if n_validation >= VALIDATION_FRACTION * len(background):
            break
        characters = [folder for folder in background if folder.parent == alphabet]
        side_of |= dict.fromkeys(characters, "validation")
        n_validation += len(characters)
    paths: list[Path] = []
    drawings: list[ImageSource] = []
    labels, sides = [], []
    for folder, side in side_of.items():
        images = list_images("root", folder)
        paths += images
        name = f"{folder.parent.name}/{folder.name}"
        for quarters in range(4 if rotations else 1):
            drawings += [Rotated(path, quarters) if quarters else path for path in images]
            labels += [f"{name} rot{90 * quarters:03}" if quarters else name] * len(images)
            sides += [side] * len(images)
    pictures = Pictures(drawings, labels, sides)
    variant = "rotations" if rotations else ""
    return ImageSet("load_omniglot", home, paths, lambda: pictures, size=28, grey=True, variant=variant)


def _list_characters(folder: Path) -> list[Path]:
    """List the folders of characters in a folder of alphabets; raise an InputError if there are none."""
    characters = [character for alphabet in list_folders(folder) for character in list_folders(alphabet)]
    if not characters:
        constraint = f"hold {BACKGROUND}/ALPHABET/CHARACTER/*.png and {EVALUATION}/... (or omniglot-py with both)"
        got = f"{folder} without characters" if folder.is_dir() else f"no folder {folder}"
        raise_input_error("root", constraint, got, "Unpack both archives of Omniglot there.")
    return characters
