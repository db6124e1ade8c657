"""Detection of exactly equal rows of a data set, which let a query be a copy of a row that a method has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.datasets.dataset import Dataset
from protonet.ui.text import count

BYTES = 2**24  #: Bytes of rows that are compared at a time.
WORD = 8  #: Bytes of an int64.
MAX_GROUPS_NAMED = 5  #: Classes that a line names, at the most.


def group_equal_rows(x: Tensor, release: Callable[[], None] = lambda: None) -> Tensor:
    """Assign each row to a group of exactly equal rows; -0.0 equals 0.0.

    Args:
        x: (n, dim) of any dtype.
        release: Called after each read of some rows, to free the memory of a mapped file.

    Returns:
        (n,) int64, the group of each row.
    """
    n, width = len(x), x.shape[1] * x.element_size()
    if not n:
        return torch.empty(0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (-(-width // WORD),), generator=generator) | 1
    size = max(1, BYTES // max(1, width))

    def take(rows: slice | Tensor) -> Tensor:
        """Return some rows as bytes, in whole words: (rows, words) int64."""
        block = x[rows].clone()
        release()
        block = block + 0.0 if block.is_floating_point() else block
        return F.pad(block.view(torch.uint8), (0, -width % WORD)).view(torch.int64)

    def hash_words(words: Tensor) -> Tensor:
        """Return a hash of each row; the shift makes floats of few digits, which differ in high bits alone, differ."""
        return ((words ^ (words >> 32)) * factors).sum(dim=1)

    hashes = torch.cat([hash_words(take(slice(start, start + size))) for start in range(0, n, size)])
    groups: Tensor
    _, groups, counts = hashes.unique(return_inverse=True, return_counts=True)
    first = torch.empty_like(counts).scatter_reduce_(0, groups, torch.arange(n), "amin", include_self=False)
    maybe = ((counts[groups] > 1) & (first[groups] != torch.arange(n))).nonzero().flatten()
    for rows in maybe.split(size) if len(maybe) else ():
        other = (take(rows) != take(first[groups[rows]])).any(dim=1)
        groups[rows[other]] = n + rows[other]  # of one hash by chance
    return groups


def describe_duplicates(data: Dataset, class_ids: Tensor) -> Iterator[str]:
    """Yield lines on rows of the evaluated classes that are exactly equal to other rows of a data set.

    Args:
        data: The data set, with the rows of all sides of its split.
        class_ids: (classes,) int64, those that are evaluated.
    """
    pairs, counts = (group_equal_rows(data.x, data.release) * data.num_classes + data.y).unique(return_counts=True)
    classes, (_, group) = pairs % data.num_classes, (pairs // data.num_classes).unique(return_inverse=True)
    inside = torch.isin(classes, class_ids)  # (pairs of equal rows and a class of them,)
    n_inside = torch.bincount(group[inside], minlength=len(pairs))[group]  # classes with such rows
    n_outside = torch.bincount(group[~inside], minlength=len(pairs))[group]

    def describe(chosen: Tensor) -> str:
        return f"{count(int(counts[chosen].sum()), 'row')} of {name(chosen)}"

    def name(chosen: Tensor) -> str:
        return _name_classes([data.class_names[c] for c in classes[chosen].unique().tolist()])

    if bool((copied := inside & (counts > 1)).any()):
        yield f"Equal to another row of its class, so queries may be copies of support rows: {describe(copied)}."
    if bool((other := inside & (n_inside > 1)).any()):
        yield f"Exactly equal to a row of another evaluated class: {describe(other)}."
    if bool((seen := inside & (n_outside > 0)).any()):
        where = name(~inside & (n_inside > 0))
        yield f"Exactly equal to a row that is not evaluated, of {where}: {describe(seen)}."


def _name_classes(names: Sequence[str]) -> str:
    """Return the names of classes, the first few of many."""
    more = f" and {len(names) - MAX_GROUPS_NAMED} more" if len(names) > MAX_GROUPS_NAMED else ""
    return f"{count(len(names), 'class')} ({', '.join(names[:MAX_GROUPS_NAMED])}{more})"
