"""`Dataset`: rows of features, the class of each row and, if the classes are split, the side of each class."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._text import shorten_list
from protonet._validation import check_int, check_labels
from protonet.errors import raise_input_error

#: One name per row: the name of the row's class, or the name of the side of the split that the class is on.
RowLabels = Sequence[str] | np.ndarray
#: The sides of a split by class: methods learn from base classes, settings are chosen on validation classes, and novel
#: classes give the final scores.
SPLIT_SIDES = ("base", "validation", "novel")
#: Maps other names of sides, which are common in files, to the names of ``SPLIT_SIDES``.
SIDE_ALIASES = {"train": "base", "val": "validation", "valid": "validation", "test": "novel"}
BYTES_PER_CHECK = 2**26  #: How many bytes of features `check_finite` checks at a time.


class Dataset(NamedTuple):
    """A data set: rows of features, the class of each row and, if there is a split, the side of each class."""

    #: Features (n, dim), float32. Features that are memory-mapped from a file (see `load_npz`) may have another
    #: floating dtype, and must not be written to. Pixels may be uint8 in [0, 255]: `get_rows` divides them by 255.
    x: Tensor
    y: Tensor  #: Labels (n,), int64, in [0, num_classes); every class has a row.
    class_names: tuple[str, ...]  #: One name per class.
    #: For each class its side of the split, one of ``SPLIT_SIDES``; None if the classes are not split.
    sides: tuple[str, ...] | None = None
    memory_map: mmap.mmap | None = None  #: The memory-mapped file that holds ``x``; None if ``x`` is in memory.
    #: (channels, height, width) if each row is a picture or the feature maps of a convolutional network, flattened in
    #: this order of the axes; None for other rows.
    shape: tuple[int, int, int] | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def has_feature_maps(self) -> bool:
        """Whether each row holds feature maps of a convolutional network, that is, has more channels than a picture."""
        max_picture_channels = 3  # pictures have at most this many channels
        return self.shape is not None and self.shape[0] > max_picture_channels

    @property
    def has_float_array_in_memory(self) -> bool:
        """Whether ``x`` is in memory and floating, so that its rows can be used without `get_rows`."""
        return self.memory_map is None and self.x.is_floating_point()

    def select_classes(self, class_ids: Sequence[int]) -> Dataset:
        """Copy the rows of some classes. The copy numbers these classes 0, 1, ... in the order of ``class_ids``.

        Args:
            class_ids: Different whole numbers in [0, num_classes).

        Returns:
            A data set of the rows of these classes, in the same order as in this data set.

        Raises:
            InputError: A class is named twice or does not exist.
        """
        ids = torch.as_tensor(list(class_ids), dtype=torch.int64)
        check_labels("class_ids", ids, n=len(ids), num_classes=self.num_classes)
        if len(ids.unique()) < len(ids):
            raise_input_error("class_ids", "name each class once", f"{ids.tolist()}", "Drop the repetitions.")
        renumbered = torch.full((self.num_classes,), -1).index_copy_(0, ids, torch.arange(len(ids)))
        rows = renumbered[self.y] >= 0  # (n,)
        sides = None if self.sides is None else tuple(self.sides[c] for c in class_ids)
        names = tuple(self.class_names[c] for c in class_ids)
        return Dataset(self.x[rows], renumbered[self.y[rows]], names, sides, shape=self.shape)

    def get_rows(self, rows: Tensor) -> Tensor:
        """Copy rows by their indices.

        If ``x`` is memory-mapped, the memory of the file is released on the way. Memory then holds hardly more than
        the copies.

        Args:
            rows: Indices (k,) of rows of ``x``, int64 in [0, n), in any order.

        Returns:
            Features (k, dim) in the order of ``rows`` and of the dtype of ``x``; float32 in [0, 1] if ``x`` is uint8.
        """
        if self.has_float_array_in_memory:
            return self.x.index_select(0, rows)
        dtype = self.x.dtype if self.x.is_floating_point() else torch.float32
        copied = self.x.new_empty(len(rows), self.x.shape[1], dtype=dtype)
        # How many rows of a memory-mapped file are read before memory is released. The operating system may keep a
        # few megabytes of the file in memory for each row that is read.
        mapped_rows_per_read = 32
        for piece, target in zip(rows.split(mapped_rows_per_read), copied.split(mapped_rows_per_read), strict=True):
            target.copy_(self.x.index_select(0, piece))
            self.release_memory()
        return copied if self.x.is_floating_point() else copied.div_(255)

    def release_memory(self) -> None:
        """Free the memory that a memory-mapped ``x`` takes. The operating system reads the file again when needed.

        Does nothing if ``x`` is in memory.
        """
        if self.memory_map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.memory_map.madvise(mmap.MADV_DONTNEED)


def split_classes(data: Dataset, seed: int) -> Dataset:
    """Split the classes at random. The new split replaces an earlier one.

    Args:
        data: Rows of at least 4 classes.
        seed: >= 0. A class's side depends only on the seed and on the names of the classes.

    Returns:
        The same rows with new ``sides``: 25 % of the classes are novel (at least 2), 15 % are validation classes (at
        least 1), and the others are base classes.

    Raises:
        InputTypeError: The seed is not a number.
        InputError: There are fewer than 4 classes, or the seed is below 0.
    """
    seed = check_int("seed", seed, low=0)
    n = data.num_classes
    if n < 4:
        raise_input_error("data", "have at least 4 classes", n, "Add classes, or do without a split.")
    n_novel, n_validation = max(2, round(0.25 * n)), max(1, round(0.15 * n))
    ranked = sorted(data.class_names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    sides = ["novel"] * n_novel + ["validation"] * n_validation + ["base"] * (n - n_novel - n_validation)
    side_of = dict(zip(ranked, sides, strict=True))
    return data._replace(sides=tuple(side_of[name] for name in data.class_names))


def make_dataset(argument: str, x: Tensor, labels: RowLabels, sides: RowLabels | None = None) -> Dataset:
    """Make a data set from rows ``x`` (n, ...), the label (n,) of each row and perhaps the side (n,) of its class.

    Rows are flattened and converted to float32. Classes are numbered by their sorted labels: texts alphabetically,
    integers in ascending order. An InputError about ``argument`` is raised for rows that are not finite, missing labels
    or sides, fewer than two classes, or a class on two sides.
    """
    x = x.flatten(1).float()  # (n, dim)
    check_finite(argument, x)
    if len(labels) != len(x):
        got = f"{len(labels)} for {len(x)} rows"
        raise_input_error(argument, "have one label per row", got, "Give both the same length.")
    names, y = np.unique(np.asarray(labels), return_inverse=True)  # (num_classes,), (n,)
    if len(names) < 2:
        raise_input_error(argument, "have at least 2 classes", len(names), "Add rows of another class.")
    return assign_sides(argument, Dataset(x, torch.from_numpy(y), tuple(map(str, names))), sides)


def assign_sides(argument: str, data: Dataset, sides: RowLabels | None) -> Dataset:
    """Return the data set with the side of each class, which is the side that all rows of the class have.

    ``sides`` (n,) has a name of ``SPLIT_SIDES`` or ``SIDE_ALIASES`` for each row; if it is None, ``data`` is returned.
    An InputError about ``argument`` is raised for other names, and for a class on two sides.
    """
    if sides is None:
        return data
    if len(sides) != len(data.y):
        got = f"{len(sides)} for {len(data.y)} rows"
        raise_input_error(argument, "have one side per row", got, "Give both the same length.")
    side_of: dict[int, str] = {}
    for c, text in sorted(set(zip(data.y.tolist(), map(str, sides), strict=True))):
        side = SIDE_ALIASES.get(text.lower(), text.lower())
        if side not in SPLIT_SIDES:
            remedy = f"Rename it; {', '.join(SIDE_ALIASES)} are accepted, too."
            raise_input_error(argument, f"have only sides {', '.join(SPLIT_SIDES)}", repr(text), remedy)
        if side_of.setdefault(c, side) != side:
            got = f"class {data.class_names[c]} on {side_of[c]} and {side}"
            raise_input_error(argument, "keep every class on one side", got, "Split by class, not by row.")
    return data._replace(sides=tuple(side_of.values()))


def check_finite(argument: str, x: Tensor, release: Callable[[], None] = lambda: None) -> None:
    """Raise an InputError about ``argument`` that lists the rows of ``x`` (n, dim) with NaN or infinity, if any.

    Rows are checked in blocks of about ``BYTES_PER_CHECK``. ``release`` is called after each block: it may free the
    memory of a memory-mapped ``x``.
    """
    step = max(1, BYTES_PER_CHECK // max(1, x.shape[1] * x.element_size()))
    bad: list[int] = []
    for start in range(0, len(x), step):
        finite = x[start : start + step].isfinite().all(dim=1)  # (rows,)
        bad += (start + (~finite).nonzero().flatten()).tolist()
        release()
    if bad:
        got = f"NaN or infinity in {len(bad)} of {len(x)} rows: {shorten_list(bad, 3)}"
        raise_input_error(argument, "be finite", got, "Drop or impute those rows (counted from 0).")
