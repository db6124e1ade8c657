"""Load data sets by name or path, also of base classes and of texts, and normalise rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet import datasets
from protonet._validation import check_type
from protonet.datasets.benchmarks import PICTURE_LOCATORS
from protonet.datasets.dataset import SPLIT_SIDES, Dataset, make_dataset, split_classes
from protonet.datasets.features import FEATURE_READERS
from protonet.datasets.pictures import (
    ImageSet,
    detect_class_folders,
    detect_split_folders,
    list_pictures_by_class,
    load_pictures,
    make_picture_layout,
)
from protonet.datasets.synthetic import FAMILIES, sample_family
from protonet.errors import raise_input_error, renamed_arguments
from protonet.sampling import index_classes, list_class_rows
from protonet.ui.command_line import check_known_name

#: The size of data sets of synthetic families: classes, rows per class, features per row.
SYNTHETIC_DATASET_SIZES = {"num_classes": 64, "n_train": 100, "dim": 64}
FOLDER_IMAGE_SIZE = 84  #: The default side of a folder's images in colour, in pixels, as in papers.


def load_source(text: str | Path, *, split_seed: int | None = None, image_size: int | None = None) -> Dataset:
    """Load a data set by name or path.

    Args:
        text: One of

            - ``glyphs``: `load_glyphs` with 3 images per font face, so at least 24 images per class;
            - ``digits``: `load_digits`;
            - ``synthetic:<family>``: 64 classes of 100 rows and 64 features (see `FAMILIES`). 5-way 1-shot, class means
              reach 94 % accuracy on ``isotropic``, 64 % on ``warped``, 46 % on ``subclusters``, and hardly more than
              chance on ``correlated`` and ``nuisance``, whose noise can be learned from other classes;
            - ``<kind>:<root>``, with a kind of ``PICTURE_LOCATORS``: published data sets of pictures, see
              `load_benchmark`;
            - the path of an NPZ file, ``*.npz``: `load_npz`;
            - the path of features of another program, ``*.npy``, ``*.pt``, ``*.plk`` and others: `load_features`;
            - the path of a table, ``*.csv``, with a column ``label``: `load_csv`;
            - a folder of images by class, ``<root>/CLASS/*.png``: grey, at 28 x 28 pixels; with an ``image_size`` in
              colour, like ``PICTURE_LOCATORS``;
            - a folder with such folders in ``train``, ``val`` and ``test``, in colour, at 84 x 84 pixels.
        split_seed: Seed of a random split by class (`split_classes`), for data without a split; None for no split.
        image_size: Pixels per side to resize pictures to; None for the sizes above, or the sizes that the authors use.

    Returns:
        The data set. Rows of pictures are uint8 in a mapped file; `Dataset.get_rows` returns them in [0, 1].

    Raises:
        MissingPackageError: A package that the data need is missing.
        InputError: The text is unknown, the data cannot be loaded or split, or ``split_seed`` is given for data that
            have a split.
    """
    check_type("text", text, (str, Path), "the name or the path of a data set")
    text = str(text)
    max_image_size = 1024  # the largest side of pictures, in pixels
    if image_size is not None and image_size > max_image_size:
        got = f"{image_size}"
        raise_input_error("image_size", f"be at most {max_image_size}", got, "Pass a number of pixels such as 84.")
    data = _load_by_name(text, image_size)
    if image_size is not None and (data.shape is None or data.shape[1:] != (image_size, image_size)):
        got = f"{image_size} for {text}"
        raise_input_error("image_size", "come with pictures to resize", got, "Leave it out.")
    if split_seed is None:
        return data
    if data.sides is not None:
        counts = Counter(data.sides)
        sides = ", ".join(f"{counts[side]} {side}" for side in SPLIT_SIDES if counts[side])
        got = f"{split_seed} for {text}, which has {sides} classes"
        remedy = "Leave it out; to draw another split, remove the split from the data."
        raise_input_error("split_seed", "be left out for data that have a split by class", got, remedy)
    return split_classes(data, split_seed)


def is_same_source(text: str, other: str) -> bool:
    """Test whether two names or paths refer to the same data set, even if the paths are written differently."""

    def resolve(name: str) -> str:
        kind, colon, root = name.partition(":")
        if colon and kind in PICTURE_LOCATORS:
            return f"{kind}:{Path(root).resolve()}"
        return str(Path(name).resolve()) if Path(name).exists() else name

    return resolve(text) == resolve(other)


def load_base_dataset(text: str, *, dim: int, image_size: int | None = None) -> Dataset:
    """Load a data set whose classes serve as base classes; an InputError is raised unless it has ``dim`` features.

    ``text`` is a name or path as in `load_source`.
    """
    with renamed_arguments(text="base", path="base"):
        data = _load_by_name(text, image_size)
    if data.x.shape[1] != dim:
        got = f"{data.x.shape[1]} of {text}"
        raise_input_error("base", f"have {dim} features per row, as the data", got, "Pass features of one backbone.")
    return data


def load_class_texts(text: str, *, dim: int, names: Sequence[str]) -> torch.Tensor:
    """Load text embeddings, one for each class: the embedding of a text that names the class, such as by CLIP.

    Several embeddings of a class (from several prompts) are scaled to unit norm and averaged.

    Args:
        text: A data set as for `load_source`, whose rows are embeddings of texts, and whose classes include ``names``.
        dim: The number of features that embeddings must have.
        names: The names of the classes.

    Returns:
        The embeddings (len(names), dim) float32 of unit norm, in the order of ``names``.

    Raises:
        InputError: The data set cannot be loaded, has another number of features, or lacks a class.
    """
    with renamed_arguments(text="texts", path="texts"):
        data = _load_by_name(text)
    if data.x.shape[1] != dim:
        got = f"{data.x.shape[1]} of {text}"
        remedy = "Pass texts of the images' backbone."
        raise_input_error("texts", f"have {dim} features per row, as the data", got, remedy)
    missing = [name for name in names if name not in data.class_names]
    if missing:
        got = f"none for {len(missing)} of {len(names)}, such as {missing[0]!r}"
        raise_input_error("texts", "have a text of each class, by name", got, "Name them as the data does.")
    index = index_classes(data.y)
    class_ids = torch.tensor([data.class_names.index(name) for name in names])
    texts_of = (data.get_rows(rows) for rows in list_class_rows(index.select_classes(class_ids)))
    return F.normalize(torch.stack([F.normalize(prompts.float(), dim=1).mean(dim=0) for prompts in texts_of]), dim=1)


def locate_pictures(text: str) -> ImageSet | None:
    """Locate the pictures that ``text`` names, without reading them; return None if it names no pictures.

    The text is ``KIND:ROOT`` with a kind of ``PICTURE_LOCATORS``, or a folder of pictures by class. Pictures are RGB.
    """
    kind, _, root = text.partition(":")
    if kind in PICTURE_LOCATORS and root:
        return PICTURE_LOCATORS[kind](root)
    path = Path(text)
    if not text or not path.is_dir():  # an empty path is the current folder
        return None
    files, read = detect_class_folders(path) or make_picture_layout(list_pictures_by_class(path))
    return ImageSet(cache_name="source", root=path, files=files, read_pictures=read, image_side=FOLDER_IMAGE_SIZE)


def _load_by_name(text: str, image_size: int | None = None) -> Dataset:
    """Load a data set by name or path, without a random split; arguments are as in `load_source`."""
    kind, colon, given = text.partition(":")
    # Images of each character per font face, each distorted by another random map: at least 24 images per class.
    glyph_copies = 3
    by_name: dict[str, Callable[[], Dataset]] = {
        "glyphs": lambda: datasets.load_glyphs(copies=glyph_copies),
        "digits": datasets.load_digits,
    }
    if text in by_name:
        return by_name[text]()
    if kind == "synthetic" and colon:
        family = check_known_name("synthetic:", given, FAMILIES)
        split = sample_family(family, seed=0, n_val=0, n_test=1, **SYNTHETIC_DATASET_SIZES)
        return make_dataset("text", split.train_x, split.train_y.numpy())
    path = Path(text)
    if path.suffix.lower() == ".npz":
        return datasets.load_npz(path, memory_map=True)
    if path.suffix.lower() == ".csv":
        return datasets.load_csv(path)
    if path.suffix.lower() in FEATURE_READERS:
        return datasets.load_features(path)
    pictures = locate_pictures(text)
    is_source = pictures is not None and pictures.cache_name == "source"
    grey_image_size = 28  # the default side of a folder's grey images, in pixels, as of glyphs
    if pictures is not None and is_source and image_size is None and detect_split_folders(path) is None:
        pictures = replace(pictures, image_side=grey_image_size, is_grey=True, cache_variant="grey")
    if pictures is None:
        names = [*by_name, *(f"synthetic:{family}" for family in FAMILIES)]
        names += [f"{other}:<root>" for other in PICTURE_LOCATORS]
        near = get_close_matches(text.lower(), names)
        listed = ", ".join([*near, *(name for name in names if name not in near)])
        remedy = f"Did you mean {near[0]}?" if near else "Pass a listed name, or a path that exists."
        suffixes = ", ".join(f"*{suffix}" for suffix in (".npz", *FEATURE_READERS, ".csv"))
        constraint = f"be one of {listed}, {suffixes} or a folder of images by class"
        raise_input_error("text", constraint, repr(text), remedy)
    return load_pictures(pictures, image_size)


def normalize_rows(rows: Tensor, kind: str, mean: Tensor | None = None) -> Tensor:
    """Scale each of n rows to a fixed norm, after subtraction of a mean if ``kind`` requires it.

    Rows that cannot be scaled become zeros: rows of zeros and, for "z", rows of equal features.

    Args:
        rows: The rows, (n, dim).
        kind: "l2", "cl2" or "z", see ``ROW_NORMALIZATIONS``.
        mean: (dim,), the mean of the base classes' rows, which "cl2" subtracts; None for "l2" and "z".

    Returns:
        The normalised rows (n, dim), float64 if ``rows`` are, otherwise float32.

    Source: l2 and cl2, Wang et al., "SimpleShot" (2019), sec. 3, https://arxiv.org/abs/1911.04623; z, Fei et al.,
        "Z-score normalization, hubness, and few-shot learning" (2021), ICCV.
    """
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if kind == "z":
        centred = rows - rows.mean(dim=1, keepdim=True)
        lost = centred.abs().amax(dim=1) <= 8 * torch.finfo(rows.dtype).eps * rows.abs().amax(dim=1)  # rounding errors
        rows = centred.masked_fill(lost[:, None], 0)
    elif mean is not None:
        rows = rows - mean.to(rows.dtype)
    unit: Tensor = F.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny ** 0.5)
    return rows.shape[1] ** 0.5 * unit if kind == "z" else unit
