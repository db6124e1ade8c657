"""What every data set is: rows, their classes, the classes' names and, where there is one, a split by class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._checks import check_features, check_labels, describe, fail

#: The sides of a split by class: to learn from, to choose settings on, to be judged on.
SIDES = ("base", "validation", "novel")


class Dataset(NamedTuple):
    """Labelled rows.

    Attributes:
        x: Features of shape (n, dim), float32.
        y: Labels of shape (n,), int64, in [0, num_classes); every class has a row.
        class_names: One name a class.
        sides: For each class one of ``SIDES``, or None without a split by class.
    """

    x: Tensor
    y: Tensor
    class_names: tuple[str, ...]
    sides: tuple[str, ...] | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def take_classes(self, class_ids: Sequence[int]) -> Dataset:
        """Return the rows of some classes, renumbered 0, 1, ... in the order given.

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
        """Return the rows of the classes on one side of the split.

        Args:
            side: One of ``SIDES``.

        Raises:
            ValueError: There is no split, or no class on that side.
        """
        if self.sides is None or side not in self.sides:
            got = f"{side!r} of {sorted(set(self.sides or ())) or 'no split'}"
            fail("take_side", "side", "be a side that has classes", got, "Pick another side or more classes.")
        return self.take_classes([c for c, own in enumerate(self.sides) if own == side])


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
        sides: The side of each row, (n,), or None; the rows of a class must be on the same one.

    Raises:
        ValueError: Another number of labels or sides than rows, fewer than two classes, NaN or infinity, an
            unknown side, a class on two sides.
    """
    x = check_features(function, argument, x).float()
    for name, values in (("label", labels), ("side", labels if sides is None else sides)):
        if len(values) != len(x):
            got = f"{len(values)} for {len(x)} rows"
            fail(function, argument, f"have one {name} a row", got, "Give both the same length.")
    names, y = np.unique(np.asarray(labels), return_inverse=True)  # (num_classes,), (n,)
    if len(names) < 2:
        fail(function, argument, "have at least 2 classes", f"{len(names)}", "Add rows of another class.")
    data = Dataset(x, torch.from_numpy(y), tuple(map(str, names)))
    if sides is None:
        return data
    pairs = set(zip(y.tolist(), map(str, sides), strict=True))
    unknown = sorted({side for _, side in pairs} - set(SIDES))
    if unknown:
        fail(function, argument, f"have sides {', '.join(SIDES)} alone", f"{unknown[:3]}", "Rename them.")
    if len(pairs) > len(names):
        got = f"{len(pairs) - len(names)} too many"
        fail(function, argument, "keep every class on one side", got, "Split by class, not by row.")
    return data._replace(sides=tuple(side for _, side in sorted(pairs)))


@contextmanager
def optional_packages(function: str, install: str = 'pip install "protonet[analysis]"') -> Iterator[None]:
    """Turn a missing package into an ImportError of one line that names the command that installs it."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        got = "none of that name"
        raise ImportError(describe(function, package, "be installed", got, f"Run {install}.")) from None
