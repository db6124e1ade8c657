"""What every data set is: rows, their classes, the classes' names and, where there is one, a split by class."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._checks import check_int, check_labels, fail

#: The sides of a split by class: to learn from, to choose settings on, to be judged on.
SIDES = ("base", "validation", "novel")
#: What else the sides are called in files.
ALIASES = {"train": "base", "val": "validation", "valid": "validation", "test": "novel"}
#: Bytes of features that are checked at a time.
CHUNK = 2**26
#: Rows of a mapped file that are read at a time: for each, systems keep up to some megabytes around it.
ROWS_AT_ONCE = 32


class Dataset(NamedTuple):
    """Labelled rows.

    Attributes:
        x: Features of shape (n, dim), float32; of a mapped file (see `map_npz`) any floating dtype, and not to be
            written to.
        y: Labels of shape (n,), int64, in [0, num_classes); every class has a row.
        class_names: One name a class.
        sides: For each class one of ``SIDES``, or None without a split by class.
        mapping: The file that ``x`` lies in, if it is mapped.
    """

    x: Tensor
    y: Tensor
    class_names: tuple[str, ...]
    sides: tuple[str, ...] | None = None
    mapping: mmap.mmap | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def take_classes(self, class_ids: Sequence[int]) -> Dataset:
        """Return a copy of the rows of some classes, renumbered 0, 1, ... in the order given.

        Args:
            class_ids: Different whole numbers in [0, num_classes).

        Raises:
            ValueError: A class comes twice or does not exist.
        """
        ids = torch.as_tensor(list(class_ids), dtype=torch.int64)
        check_labels("take_classes", "class_ids", ids, n=len(ids), num_classes=self.num_classes)
        if len(ids.unique()) < len(ids):
            fail("take_classes", "class_ids", "name each class once", f"{ids.tolist()}", "Drop the repetitions.")
        renumbered = torch.full((self.num_classes,), -1).index_copy_(0, ids, torch.arange(len(ids)))
        rows = renumbered[self.y] >= 0  # (n,)
        sides = None if self.sides is None else tuple(self.sides[c] for c in class_ids)
        names = tuple(self.class_names[c] for c in class_ids)
        return Dataset(self.x[rows], renumbered[self.y[rows]], names, sides)

    def take_side(self, side: str) -> Dataset:
        """Return a copy of the rows of the classes on one side of the split.

        Args:
            side: One of ``SIDES``.

        Raises:
            ValueError: There is no split, or no class on that side.
        """
        if self.sides is None or side not in self.sides:
            got = f"{side!r} of {sorted(set(self.sides or ())) or 'no split'}"
            fail("take_side", "side", "be a side that has classes", got, "Pick another side or more classes.")
        return self.take_classes([c for c, own in enumerate(self.sides) if own == side])

    def take_rows(self, rows: Tensor) -> Tensor:
        """Return a copy of some rows, in little memory beside it even if the file is mapped.

        Args:
            rows: (k,) int64 in [0, n), in any order.

        Returns:
            (k, dim), the dtype of ``x``.
        """
        if self.mapping is None:
            return self.x.index_select(0, rows)
        taken = self.x.new_empty(len(rows), self.x.shape[1])
        for piece, place in zip(rows.split(ROWS_AT_ONCE), taken.split(ROWS_AT_ONCE), strict=True):
            place.copy_(self.x.index_select(0, piece))
            self.release()
        return taken

    def release(self) -> None:
        """Give back the memory of a mapped file's pages, which are read again when needed; else do nothing."""
        if self.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


def split_classes(data: Dataset, seed: int) -> Dataset:
    """Return the same rows with their classes split at random, whatever the split was before.

    Args:
        data: At least 4 classes.
        seed: >= 0. A class's side hangs on it and on the names of the classes alone.

    Returns:
        The data with a quarter of the classes novel, at least 2; 15 % for validation, at least 1; the others base.

    Raises:
        TypeError: The seed is not a number.
        ValueError: Fewer than 4 classes, or a seed below 0.
    """
    seed = check_int("split_classes", "seed", seed, low=0)
    n = data.num_classes
    if n < 4:
        fail("split_classes", "data", "have at least 4 classes", n, "Add classes, or do without a split.")
    n_novel, n_validation = max(2, round(0.25 * n)), max(1, round(0.15 * n))
    ranked = sorted(data.class_names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    sides = ["novel"] * n_novel + ["validation"] * n_validation + ["base"] * (n - n_novel - n_validation)
    side_of = dict(zip(ranked, sides, strict=True))
    return data._replace(sides=tuple(side_of[name] for name in data.class_names))


def make_dataset(
    function: str,
    argument: str,
    x: Tensor,
    labels: Sequence[str] | np.ndarray,
    sides: Sequence[str] | np.ndarray | None = None,
) -> Dataset:
    """Return the data set of rows with named classes, which are numbered in the order of their names.

    Args:
        function: The public function's name, for messages.
        argument: The argument that the rows came from, for messages.
        x: Rows of shape (n, ...), any real dtype.
        labels: The class of each row, (n,): strings, or integers, which keep their order.
        sides: As in `assign_sides`.

    Raises:
        ValueError: Another number of labels than rows, fewer than two classes, NaN or infinity, or as in
            `assign_sides`.
    """
    x = x.flatten(1).float()  # (n, dim)
    check_finite(function, argument, x)
    if len(labels) != len(x):
        got = f"{len(labels)} for {len(x)} rows"
        fail(function, argument, "have one label a row", got, "Give both the same length.")
    names, y = np.unique(np.asarray(labels), return_inverse=True)  # (num_classes,), (n,)
    if len(names) < 2:
        fail(function, argument, "have at least 2 classes", f"{len(names)}", "Add rows of another class.")
    data = Dataset(x, torch.from_numpy(y), tuple(map(str, names)))
    return assign_sides(function, argument, data, sides)


def assign_sides(function: str, argument: str, data: Dataset, sides: Sequence[str] | np.ndarray | None) -> Dataset:
    """Return the data with the side of each class that its rows tell.

    Args:
        function: The public function's name, for messages.
        argument: The argument that the sides came from, for messages.
        data: n rows.
        sides: The side of each row, (n,): one of ``SIDES`` or ``ALIASES`` in any case, the same for all rows of a
            class; or None, which leaves the data as they are.

    Raises:
        ValueError: Another number of sides than rows, an unknown side, a class on two sides.
    """
    if sides is None:
        return data
    if len(sides) != len(data.y):
        got = f"{len(sides)} for {len(data.y)} rows"
        fail(function, argument, "have one side a row", got, "Give both the same length.")
    side_of: dict[int, str] = {}
    for c, text in sorted(set(zip(data.y.tolist(), map(str, sides), strict=True))):
        side = ALIASES.get(text.lower(), text.lower())
        if side not in SIDES:
            remedy = f"Rename it; {', '.join(ALIASES)} will do too."
            fail(function, argument, f"have sides {', '.join(SIDES)} alone", repr(text), remedy)
        if side_of.setdefault(c, side) != side:
            got = f"class {data.class_names[c]} on {side_of[c]} and {side}"
            fail(function, argument, "keep every class on one side", got, "Split by class, not by row.")
    return data._replace(sides=tuple(side_of.values()))


def check_finite(function: str, argument: str, x: Tensor, release: Callable[[], None] = lambda: None) -> None:
    """Raise a ValueError that names the first rows with NaN or infinity, if there are any.

    Args:
        function: The public function's name, for the message.
        argument: The argument that the rows came from, for the message.
        x: (n, dim), any floating dtype.
        release: Called after each piece, to give back memory.
    """
    step = max(1, CHUNK // max(1, x.shape[1] * x.element_size()))
    bad: list[int] = []
    for start in range(0, len(x), step):
        finite = x[start : start + step].isfinite().all(dim=1)  # (rows,)
        bad += (start + (~finite).nonzero().flatten()).tolist()
        release()
    if bad:
        rows = ", ".join(map(str, bad[:3])) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        got = f"NaN or infinity in {len(bad)} of {len(x)} rows: {rows}"
        fail(function, argument, "be finite", got, "Drop or impute those rows (counted from 0).")
