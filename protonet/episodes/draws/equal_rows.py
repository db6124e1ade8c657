"""Rows of a data set that are exactly equal: a query among them may be one that a method has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.datasets.dataset import Dataset
from protonet.ui.text import count

BYTES = 2**24  #: Bytes of rows that are compared at a time.
WORD = 8  #: Bytes of an int64.
NAMED = 5  #: Classes that a line names, at the most.


def number_equal(x: Tensor, release: Callable[[], None] = lambda: None) -> Tensor:
    """Number rows so that those that are exactly equal share a number; -0.0 is 0.0.

    Args:
        x: (n, dim) of any dtype.
        release: Called after each read of some rows, to free the memory of a mapped file.

    Returns:
        (n,) int64.
    """
    n, width = len(x), x.shape[1] * x.element_size()
    if not n:
        return torch.empty(0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (-(-width // WORD),), generator=generator) | 1
    size = max(1, BYTES // max(1, width))

    def take(rows: slice | Tensor) -> Tensor:
        """Return some rows as bytes, in whole words: (rows, words) int64."""
        taken = x[rows].clone()
        release()
        taken = taken + 0.0 if taken.is_floating_point() else taken
        return F.pad(taken.view(torch.uint8), (0, -width % WORD)).view(torch.int64)

    def hash_words(words: Tensor) -> Tensor:
        """Return a number for each row, with overflow; numbers of few digits differ in their high bits alone."""
        return ((words ^ (words >> 32)) * factors).sum(dim=1)

    hashes = torch.cat([hash_words(take(slice(start, start + size))) for start in range(0, n, size)])
    numbers: Tensor
    _, numbers, counts = hashes.unique(return_inverse=True, return_counts=True)
    first = torch.empty_like(counts).scatter_reduce_(0, numbers, torch.arange(n), "amin", include_self=False)
    maybe = ((counts[numbers] > 1) & (first[numbers] != torch.arange(n))).nonzero().flatten()
    for rows in maybe.split(size) if len(maybe) else ():
        other = (take(rows) != take(first[numbers[rows]])).any(dim=1)
        numbers[rows[other]] = n + rows[other]  # of one hash by chance
    return numbers


def list_equal(data: Dataset, class_ids: Tensor) -> Iterator[str]:
    """Yield lines on rows of the evaluated classes that are exactly equal to other rows of a data set.

    Args:
        data: The data set, with the rows of all sides of its split.
        class_ids: (classes,) int64, those that are evaluated.
    """
    pairs, counts = (number_equal(data.x, data.release) * data.num_classes + data.y).unique(return_counts=True)
    classes, (_, group) = pairs % data.num_classes, (pairs // data.num_classes).unique(return_inverse=True)
    inside = torch.isin(classes, class_ids)  # (pairs of equal rows and a class of them,)
    n_inside = torch.bincount(group[inside], minlength=len(pairs))[group]  # classes with such rows
    n_outside = torch.bincount(group[~inside], minlength=len(pairs))[group]

    def tell(chosen: Tensor) -> str:
        return f"{count(int(counts[chosen].sum()), 'row')} of {name(chosen)}"

    def name(chosen: Tensor) -> str:
        return _name_classes([data.class_names[c] for c in classes[chosen].unique().tolist()])

    if bool((copied := inside & (counts > 1)).any()):
        yield f"Exactly equal to another row of its class, so that a query may be a support row's copy: {tell(copied)}."
    if bool((other := inside & (n_inside > 1)).any()):
        yield f"Exactly equal to a row of another evaluated class: {tell(other)}."
    if bool((seen := inside & (n_outside > 0)).any()):
        where = name(~inside & (n_inside > 0))
        yield f"Exactly equal to a row that is not evaluated, of {where}: {tell(seen)}."


def _name_classes(names: Sequence[str]) -> str:
    """Return the names of classes, the first few of many."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{count(len(names), 'class')} ({', '.join(names[:NAMED])}{more})"
