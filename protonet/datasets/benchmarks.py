"""Published picture data sets of few-shot learning, read from the folders, lists or pickles of their releases.

`load_benchmark` reads them by name; the guide (docs/how-to/few-shot-data.md) lists the names and the layouts of files.
The cached pixels take 1.3 GB on the disk for mini-ImageNet, 16.5 GB for tiered-ImageNet (whose pickles are first read
into memory), 0.2 GB each for CIFAR-FS and FC100, and 0.25 GB for CUB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from protonet._text import shorten_list
from protonet.datasets.dataset import SPLIT_SIDES, Dataset
from protonet.datasets.pictures import (
    ImageSet,
    ImageSource,
    LabelledPictures,
    PictureLayout,
    RotatedPicture,
    detect_class_folders,
    detect_csv_lists,
    detect_json_lists,
    detect_tiered_imagenet,
    list_class_pictures,
    load_pictures,
    make_pickle_detector,
    make_picture_layout,
    make_split_list_detector,
    raise_unreadable_list,
)
from protonet.embeddings.pictures.reading import list_images, list_visible_folders
from protonet.errors import raise_input_error


@dataclass(frozen=True)
class ClassList:
    """The classes on each side of a benchmark's split, and the list's source: an entry of ``class_lists.json``."""

    #: The name and the source of the benchmark, such as "CUB-200-2011, the split of Chen et al. (2019)".
    benchmark: str
    source: str  #: The repository, the commit and the file that the list was taken from.
    pictures: Mapping[str, int]  #: The number of pictures on each side of ``SPLIT_SIDES``.
    sha256: str  #: SHA-256 of the lines ``side<tab>class``, sorted by side, then by class.
    base: tuple[str, ...]  #: The names of the base classes.
    validation: tuple[str, ...]  #: The names of the validation classes.
    novel: tuple[str, ...]  #: The names of the novel classes.
    #: The hierarchy of the classes, such as WordNet's: for each node its children (nodes and classes), separated by
    #: blanks. Empty for most benchmarks.
    children: Mapping[str, str]

    @property
    def side_of(self) -> dict[str, str]:
        """The side of the split ("base", "validation" or "novel") of each class, by the name of the class."""
        return {name: side for side in SPLIT_SIDES for name in getattr(self, side)}


@cache
def read_class_lists() -> dict[str, ClassList]:
    """Read the class lists of all known benchmarks from ``class_lists.json``, by the benchmark's name."""
    entries = json.loads(Path(__file__).with_name("class_lists.json").read_text(encoding="utf-8"))
    return {
        name: ClassList(**{"children": {}, **entry, **{side: tuple(entry[side]) for side in SPLIT_SIDES}})
        for name, entry in entries.items()
    }


def format_class_lists() -> str:
    """Format an overview of all class lists as text: the counts of classes and pictures, the hash and the source."""
    lines = []
    for name, known in read_class_lists().items():
        present = [side for side in SPLIT_SIDES if known.pictures[side]]
        counts = ", ".join(f"{len(getattr(known, s))} {s} ({known.pictures[s]:,} pictures)" for s in present)
        lines += [f"{name}: {known.benchmark}", f"  {counts}", f"  sha256 {known.sha256}", f"  {known.source}", ""]
    return "\n".join(lines)


def simplify_class_name(name: str) -> str:
    """Reduce a class's name to letters and digits in lower case, because copies of a data set spell it differently."""
    return re.sub(r"[\W_]", "", name).lower()


def make_class_list_detector(key: str, *subfolders: str) -> Callable[[Path], PictureLayout | None]:
    """Make a function that finds the pictures ``root/SUBFOLDER/CLASS/*.png`` of the classes on the class list ``key``.

    The function takes ``root``, and returns a `PictureLayout` with the split of the list; or None if no subfolder (""
    is ``root`` itself) has most of the classes. An InputError is raised if it has most classes but not all. Pictures of
    several subfolders are joined, and classes that are not on the list are left out.
    """
    # A folder that has at least this fraction of the classes of a list is taken for that data set, and must then have
    # all.
    min_present_class_fraction = 0.9

    def detect(root: Path) -> PictureLayout | None:
        known = read_class_lists()[key]
        label_of = {simplify_class_name(label): label for label in known.side_of}
        every = [list_visible_folders(root / part) for part in subfolders]
        found = [{simplify_class_name(folder.name): folder for folder in folders} for folders in every]
        min_classes = min_present_class_fraction * len(label_of)
        found = [folders for folders in found if len(folders.keys() & label_of.keys()) >= min_classes]
        if not found:
            return None
        for folders in found:
            if missing := [label for name, label in label_of.items() if name not in folders]:
                got = f"{root} without {len(missing)}, such as {missing[0]!r}"
                must = f"hold the {len(label_of)} classes of {known.benchmark}"
                raise_input_error("root", must, got, "Get all of them.")
        pictures = list_class_pictures((folders[name], label) for folders in found for name, label in label_of.items())
        return make_picture_layout(pictures.with_sides(known.side_of))

    return detect


def describe_class_list_difference(text: str, counts: Mapping[tuple[str, str], int]) -> list[str]:
    """Describe how the classes of the data set that ``text``, KIND:ROOT, names differ from the list of benchmark KIND.

    ``counts`` has the number of pictures for each pair (class, side of the split). If none of these classes is on the
    list, only the numbers of classes and pictures are compared. The list is empty if nothing differs, or if ``text``
    names no known benchmark.
    """
    key, colon, _ = text.partition(":")
    known = read_class_lists().get(key)
    if known is None or not colon:
        return []
    side_by_name = {simplify_class_name(name): side for name, side in counts}
    listed = {simplify_class_name(name): (name, side) for name, side in known.side_of.items()}
    named = bool(side_by_name.keys() & listed.keys())
    wrong = []
    for side in SPLIT_SIDES:
        sizes = [count for (_, side_of_class), count in counts.items() if side_of_class == side]
        on_side = {simple: name for simple, (name, listed_side) in listed.items() if named and listed_side == side}
        missing = [name for simple, name in on_side.items() if side_by_name.get(simple) != side]
        n_listed = len(getattr(known, side))
        if len(sizes) != n_listed or missing:
            such = f" ({len(missing)} of them missing, such as {missing[0]})" if missing else ""
            wrong.append(f"{len(sizes)} of {n_listed} {side} classes{such}")
        elif sum(sizes) != known.pictures[side]:
            wrong.append(f"{sum(sizes):,} of {known.pictures[side]:,} {side} pictures")
    return [f"This is not {known.benchmark}, as papers have it: {', '.join(wrong)}."] if wrong else []


class Benchmark:
    """A published benchmark: the pixels per side to which papers resize its pictures, and the layouts of its files.

    ``expected`` describes the layouts in words. ``layouts`` are functions that each look for one layout in a folder,
    and return None if it is not there. ``folder`` is a folder in the authors' archive: users may pass it or its parent.
    """

    def __init__(
        self, size: int, expected: str, *layouts: Callable[[Path], PictureLayout | None], folder: str = ""
    ) -> None:
        self.size, self.expected, self.layouts, self.folder = size, expected, layouts, folder


def _detect_cub_archive(root: Path) -> PictureLayout | None:
    """Find the pictures of the authors' CUB archive by its lists, and split the classes by the rule of Chen et al.

    Returns None if the lists are not there.
    """
    lists = [root / "images.txt", root / "image_class_labels.txt"]
    if not all(path.is_file() for path in lists):
        return None
    files, classes = map(_read_numbered_values, lists)
    if files.keys() != classes.keys():
        raise_unreadable_list(lists[1], f"{len(classes)} labels of {len(files)} pictures")
    labels = [file.partition("/")[0] for file in files.values()]
    side_of = {
        label: "base" if position % 2 == 0 else "validation" if position % 4 == 1 else "novel"
        for position, label in enumerate(sorted(set(labels)))
    }
    label_of: dict[str, str] = {}
    for key, label in zip(files, labels, strict=True):
        if label_of.setdefault(label, classes[key]) != classes[key]:
            raise_unreadable_list(lists[1], f"folder {label} of classes {label_of[label]} and {classes[key]}")
    paths = [root / "images" / file for file in files.values()]
    return make_picture_layout(LabelledPictures(paths, labels).with_sides(side_of), *lists)


def _read_numbered_values(path: Path) -> dict[str, str]:
    """Read a file whose lines are a number and a value; return the values by number; both are texts."""
    try:
        rows = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise_unreadable_list(path, type(error).__name__)
    if not rows or any(len(row) != 2 for row in rows):
        raise_unreadable_list(path, "a line without a number and a value" if rows else "empty")
    return dict(rows)


BENCHMARKS = {
    "mini-imagenet": Benchmark(
        84,
        "train.csv, val.csv, test.csv and images, the pickles of one of its releases, or train, val and test",
        detect_csv_lists,
        make_pickle_detector("mini-imagenet-cache-{}.pkl"),
        make_pickle_detector("miniImageNet_category_split_{}.pickle", "train_phase_train", "val", "test"),
        detect_class_folders,
        make_class_list_detector("mini-imagenet", "", "images"),
    ),
    "tiered-imagenet": Benchmark(
        84,
        "train_images_png.pkl or train_images.npz, with train_labels.pkl, folders train, val and test, or train.csv",
        detect_tiered_imagenet,
        detect_class_folders,
        make_split_list_detector("train", "{}.csv"),
        make_class_list_detector("tiered-imagenet", "train", ""),
    ),
    "cub": Benchmark(
        84,
        "images, images.txt and image_class_labels.txt",
        detect_json_lists,
        detect_csv_lists,
        _detect_cub_archive,
        detect_class_folders,
        make_class_list_detector("cub", "images", ""),
        folder="CUB_200_2011",
    ),
    "cifar-fs": Benchmark(
        32,
        "data/CLASS/*.png and splits/bertinetto/train.txt, CIFAR_FS_train.pickle, or meta-train and so on",
        make_split_list_detector("data", "splits/bertinetto/{}.txt"),
        make_pickle_detector("CIFAR_FS_{}.pickle"),
        make_class_list_detector("cifar-fs", "", "data", "train", "test"),
        detect_class_folders,
        folder="cifar100",
    ),
    "fc100": Benchmark(
        32,
        "FC100_train.pickle, FC100_val.pickle and FC100_test.pickle, or folders train, val and test",
        make_pickle_detector("FC100_{}.pickle"),
        make_class_list_detector("fc100", "", "data", "train", "test"),
        detect_class_folders,
    ),
}


def locate_benchmark(key: str, root: str | Path) -> ImageSet:
    """Find the pictures of a published benchmark in the folder ``root``, in the first published layout that matches.

    ``key`` is a key of ``BENCHMARKS`` or the name of a class list of Meta-Dataset. Without a layout, an InputError is
    raised.
    """
    name, benchmark = key.replace("-", "_"), BENCHMARKS.get(key)
    if benchmark is None:
        layout, expected = make_class_list_detector(key, "", "train", "images"), read_class_lists()[key].benchmark
        name, benchmark = "meta_dataset", Benchmark(84, f"a folder for each class of {expected}", layout)
    root = Path(root)
    root = root / benchmark.folder if (root / benchmark.folder).is_dir() else root
    detected = next(filter(None, (layout(root) for layout in benchmark.layouts)), None)
    if detected is None:
        names = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
        got = f"{root} with {shorten_list(names, 4) or 'nothing'}" if root.is_dir() else f"no folder {root}"
        remedy = "Pass the folder that its authors' archive unpacks to."
        raise_input_error("root", f"hold {benchmark.expected}", got, remedy)
    return ImageSet(cache_name=name, root=root, files=detected[0], read_pictures=detected[1], image_side=benchmark.size)


OMNIGLOT_BACKGROUND, OMNIGLOT_EVALUATION = "images_background", "images_evaluation"  #: The two folders of Omniglot.


def locate_omniglot(root: str | Path, *, rotations: bool = False) -> ImageSet:
    """Find the images of Omniglot, which are grey with ink at 255, without reading them.

    A class is a character, named "ALPHABET/characterNN". The characters of ``images_evaluation`` are novel classes, and
    those of ``images_background`` base classes, except for the last alphabets by name, which are validation classes: as
    many alphabets as together have a fifth of the characters.

    With ``rotations``, the rotations of each character by 90, 180 and 270 degrees are three further classes on its side
    of the split, whose names end in " rot090" and so on: 6,492 classes instead of 1,623. ``root`` has both folders, or
    a folder ``omniglot-py`` that has both.
    """
    root = Path(root)
    home = root / "omniglot-py" if (root / "omniglot-py").is_dir() else root
    background = _list_omniglot_characters(home / OMNIGLOT_BACKGROUND)
    evaluation = _list_omniglot_characters(home / OMNIGLOT_EVALUATION)
    side_of = dict.fromkeys(background, "base") | dict.fromkeys(evaluation, "novel")
    n_validation = 0
    # At least this fraction of the characters in the folder ``OMNIGLOT_BACKGROUND`` is for validation. Our own
    # choice.
    omniglot_validation_fraction = 0.2
    for alphabet in sorted({folder.parent for folder in background}, reverse=True)[:-1]:
        if n_validation >= omniglot_validation_fraction * len(background):
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
            drawings += [RotatedPicture(path, quarters) if quarters else path for path in images]
            labels += [f"{name} rot{90 * quarters:03}" if quarters else name] * len(images)
            sides += [side] * len(images)
    pictures = LabelledPictures(drawings, labels, sides)
    variant = "rotations" if rotations else ""
    return ImageSet(
        cache_name="omniglot",
        root=home,
        files=paths,
        read_pictures=lambda: pictures,
        image_side=28,
        is_grey=True,
        is_ink=True,
        cache_variant=variant,
    )


def _list_omniglot_characters(folder: Path) -> list[Path]:
    """List the folders ``folder/ALPHABET/CHARACTER``; raise an InputError if there are none."""
    characters = [path for alphabet in list_visible_folders(folder) for path in list_visible_folders(alphabet)]
    if not characters:
        constraint = f"hold {OMNIGLOT_BACKGROUND}/ALPHABET/CHARACTER/*.png and {OMNIGLOT_EVALUATION}/..."
        got = f"{folder} without characters" if folder.is_dir() else f"no folder {folder}"
        raise_input_error("root", constraint, got, "Unpack both archives there, or in omniglot-py.")
    return characters


#: For each published picture data set, a function that finds its pictures in a folder.
PICTURE_LOCATORS: Mapping[str, Callable[[str | Path], ImageSet]] = {
    **{key: partial(locate_benchmark, key) for key in BENCHMARKS},
    **{key: partial(locate_benchmark, key) for key in read_class_lists() if key.startswith("meta-")},
    "omniglot": locate_omniglot,
    "omniglot-rotations": partial(locate_omniglot, rotations=True),
}


def load_benchmark(key: str, root: str | Path, *, size: int | None = None) -> Dataset:
    """Load a published picture data set with its split by class, in any of its published layouts.

    Args:
        key: ``mini-imagenet``, ``tiered-imagenet``, ``cub``, ``cifar-fs``, ``fc100``, ``omniglot``,
            ``omniglot-rotations``, or a data set of Meta-Dataset such as ``meta-dtd``.
        root: The folder that the authors' archive unpacks to, or the folder of the classes. A class's folder has its
            name on the class list, except for case and punctuation: ``F-16A/B`` may be ``F-16A_B``.
        size: Pixels per side to resize pictures to, >= 1; None for the size of the papers: 84, 32 for CIFAR-100, 28
            for Omniglot.

    Returns:
        A data set of uint8 pixels, memory-mapped from a cached file (see `protonet.datasets.pictures.load_pictures`).
        Classes of train, val and test are base, validation and novel. Pictures of CUB are not cropped. The channels of
        tiered-ImageNet's NPZ files are not reordered: blue is first if OpenCV wrote the file.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: There is no such data set, the folder has none of its layouts, a file is missing or cannot be read,
            or a class is on two sides of the split.

    Source: mini-ImageNet, Vinyals et al. (2016), https://arxiv.org/abs/1606.04080, split of Ravi and Larochelle (2017),
        pickles of Ren et al. (2018) and Gidaris and Komodakis (2018), https://arxiv.org/abs/1804.09458;
        tiered-ImageNet, Ren et al. (2018), https://arxiv.org/abs/1803.00676; CIFAR-FS, Bertinetto et al. (2019),
        https://arxiv.org/abs/1805.08136; FC100, Oreshkin et al. (2018), https://arxiv.org/abs/1805.10123; pickles of
        both, Lee et al. (2019), https://arxiv.org/abs/1904.03758; CUB-200-2011, Wah et al. (2011), split of Chen et al.
        (2019), https://arxiv.org/abs/1904.04232; Omniglot, Lake et al. (2015), https://github.com/brendenlake/omniglot,
        rotations of Santoro et al. (2016) and Snell et al. (2017), sec. 3.1; Meta-Dataset, Triantafillou et al. (2020),
        https://arxiv.org/abs/1903.03096.
    """
    if key not in PICTURE_LOCATORS:
        raise_input_error("key", f"be one of {', '.join(PICTURE_LOCATORS)}", repr(key), "Pick a listed one.")
    return load_pictures(PICTURE_LOCATORS[key](root), size)
