"""Cross-validation folds: rows are stratified by class, and rows of one group stay together."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Fold(NamedTuple):
    """A fold of cross-validation: the indices of its training rows and of its held-out rows."""

    train: Tensor  #: (n,) int64: indices of the rows to fit to.
    held_out: Tensor  #: (m,) int64: indices of the rows to evaluate on, disjoint from ``train``.

    def to(self, device: torch.device) -> Fold:
        """Return the fold with its indices on a device."""
        return Fold(self.train.to(device), self.held_out.to(device))


#: Default number of folds.
DEFAULT_N_FOLDS = 5
#: Maximum number of rows of several folds: with more, one fold holds out some of the rows.
MAX_FOLDED_ROWS = 16384
#: Maximum number of rows times number of classes of several folds.
MAX_COSINES = 1 << 24
#: Maximum number of rows that a single fold holds out.
MAX_HELD_OUT_ROWS = 4096


def split_folds(
    labels: Tensor,
    num_classes: int,
    *,
    partition: int = 0,
    max_folds: int = DEFAULT_N_FOLDS,
    groups: Tensor | None = None,
    is_class_name: Tensor | None = None,
) -> list[Fold]:
    """Split rows randomly into cross-validation folds that are stratified by class.

    The result depends only on the arguments, including the order of the rows. A class with a single row or group is
    never held out. With many rows or classes, there is a single fold, which holds out some of the rows.

    Args:
        labels: (n,) int64 in [0, num_classes).
        num_classes: The number of classes.
        partition: The seed of the random split.
        max_folds: The maximum number of folds, >= 0.
        groups: (n,) int64: rows of one group are in the same fold. If None, rows are independent.
        is_class_name: (n,) bool: whether a row is the embedding of a class name. Such rows are never held out.

    Returns:
        The folds. The list is empty if no class has two rows (or two groups), or if ``max_folds`` is 0.
    """
    if is_class_name is not None:
        samples, others = (~is_class_name).nonzero().flatten(), is_class_name.nonzero().flatten()
        sample_groups = None if groups is None else groups[samples]
        part = labels[samples]
        split = split_folds(part, num_classes, partition=partition, max_folds=max_folds, groups=sample_groups)
        return [Fold(torch.cat([samples[fold.train], others]).sort().values, samples[fold.held_out]) for fold in split]
    if not len(labels):
        return []
    first = torch.full((num_classes,), len(labels)).scatter_reduce_(0, labels, torch.arange(len(labels)), "amin")
    labels = first.argsort(stable=True).argsort()[labels]  # by first appearance: indices of classes do not matter
    generator = torch.Generator().manual_seed(partition)
    if groups is not None:
        return _split_groups(labels, num_classes, groups, generator, max_folds)
    n = len(labels)
    order = torch.randperm(n, generator=generator)
    order = order[labels[order].argsort(stable=True)]
    count = torch.bincount(labels, minlength=num_classes)
    start = (count.cumsum(0) - count)[labels[order]]
    rank = torch.arange(n) - start  # (n,) position within the class
    several = count[labels[order]] > 1
    if not max_folds or not bool(several.any()):
        return []
    if n > MAX_FOLDED_ROWS or n * num_classes > MAX_COSINES:
        held_out = max(256, min(MAX_HELD_OUT_ROWS, MAX_COSINES // num_classes))
        is_held_out = several & (rank % max(max_folds, math.ceil(n / held_out)) == 0)
        extra = is_held_out.nonzero().flatten()
        is_held_out[extra[torch.randperm(len(extra), generator=generator)[held_out:]]] = False
        return [Fold(order[~is_held_out].sort().values, order[is_held_out].sort().values)]
    folds = min(max_folds, int(count.max()))
    part = torch.where(several, (rank + start) % folds, -1)  # the offset spreads remainders over the folds
    return [Fold(order[part != k].sort().values, order[part == k].sort().values) for k in range(folds)]


def _split_groups(
    labels: Tensor, num_classes: int, groups: Tensor, generator: torch.Generator, max_folds: int
) -> list[Fold]:
    """Split rows into folds; each group (n,), the largest first, joins the fold with the fewest rows of its classes."""
    n, (_, group, size) = len(labels), groups.unique(return_inverse=True, return_counts=True)
    pairs, count = (group * num_classes + labels).unique(return_counts=True)  # a group and a class in it
    pair_group, pair_class = pairs // num_classes, pairs % num_classes
    folds = min(max_folds, int(torch.bincount(pair_class).max()))
    if folds < 2:
        return []
    order = torch.randperm(len(size), generator=generator)
    part = torch.full_like(size, -1)  # (groups,): the fold that holds the group out
    if n > MAX_FOLDED_ROWS or n * num_classes > MAX_COSINES:
        held_out = max(256, min(MAX_HELD_OUT_ROWS, MAX_COSINES // num_classes, n // max_folds))
        part[order[size[order].cumsum(dim=0) <= held_out]] = 0
    else:
        order = order[size[order].argsort(descending=True, stable=True)]
        fractions = (count / torch.bincount(labels)[pair_class]).tolist()
        # For each group, its classes, and the fraction of the rows of each class that are in the group.
        classes_of: list[list[tuple[int, float]]] = [[] for _ in size]
        for index, label, fraction in zip(pair_group.tolist(), pair_class.tolist(), fractions, strict=True):
            classes_of[index].append((label, fraction))
        filled = [[0.0] * num_classes for _ in range(folds)]
        rows = [0] * folds
        for index in order.tolist():
            overlap = [sum(fraction * fold[label] for label, fraction in classes_of[index]) for fold in filled]
            best = min(range(folds), key=lambda k: (overlap[k], rows[k]))
            part[index], rows[best] = best, rows[best] + int(size[index])
            for label, fraction in classes_of[index]:
                filled[best][label] += fraction
    # Every fold is fitted to all classes: of a class whose groups are all in one fold, one group stays in training.
    first_fold, last_fold = (
        torch.full((num_classes,), start).scatter_reduce_(0, pair_class, part[pair_group], how)
        for start, how in ((folds, "amin"), (-1, "amax"))
    )
    in_one_fold = (first_fold == last_fold)[pair_class] & (part[pair_group] >= 0)
    first = torch.full((num_classes,), len(size))
    first = first.scatter_reduce_(0, pair_class[in_one_fold], pair_group[in_one_fold], "amin")
    part[first[first < len(size)]] = -1
    used = [k for k in range(folds) if bool((part == k).any())]
    return [Fold((part[group] != k).nonzero().flatten(), (part[group] == k).nonzero().flatten()) for k in used]
