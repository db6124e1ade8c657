"""Stratified folds over labelled rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: Folds by default.
FOLDS = 5
#: Above this many rows, or (row, class) cosines, one held-out part stands for all folds ...
MANY_ROWS, MANY_COSINES = 16384, 1 << 25
#: ... of at most this many rows.
HELD_OUT = 4096


class Fold(NamedTuple):
    """Row numbers to fit on and to judge on."""

    fit: Tensor
    judge: Tensor


def split_folds(labels: Tensor, num_classes: int, generator: torch.Generator, *, most: int = FOLDS) -> list[Fold]:
    """Split rows into folds stratified by class.

    Args:
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        generator: Shuffles the rows of each class.
        most: Folds, where rows and classes are few enough.

    Returns:
        Up to ``most`` folds; one held-out part where rows or classes are many; none if no class has two rows, or if
        none are asked for.
        A class with a single row is always fitted on and never judged.
    """
    n = len(labels)
    order = torch.randperm(n, generator=generator)
    order = order[labels[order].argsort(stable=True)]
    count = torch.bincount(labels, minlength=num_classes)
    start = (count.cumsum(0) - count)[labels[order]]
    rank = torch.arange(n) - start  # (n,) position within the class
    several = count[labels[order]] > 1
    if not most or not bool(several.any()):
        return []
    if n > MANY_ROWS or n * num_classes > MANY_COSINES:
        held_out = max(256, min(HELD_OUT, MANY_COSINES // num_classes))
        judged = several & (rank % max(2, math.ceil(n / held_out)) == 0)
        extra = judged.nonzero().flatten()
        judged[extra[torch.randperm(len(extra), generator=generator)[held_out:]]] = False
        return [Fold(order[~judged].sort().values, order[judged].sort().values)]
    folds = min(most, int(count.max()))
    part = torch.where(several, (rank + start) % folds, -1)  # the offset spreads remainders over the folds
    return [Fold(order[part != k].sort().values, order[part == k].sort().values) for k in range(folds)]
