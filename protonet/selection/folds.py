"""Cross-validation folds: rows are stratified by class, and rows of one group stay together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class FoldRules:
    """Number and size of folds. The bounds limit time and memory; see analysis/results/scale.md."""

    count: int = 5  #: Default number of folds.
    max_rows: int = 16384  #: With more rows, a single held-out part replaces the folds ...
    max_cosines: int = 1 << 24  #: ... and with more cosines of rows and classes.
    held_out: int = 4096  #: Maximal number of rows of a single held-out part.


FOLDS = FoldRules()


class Fold(NamedTuple):
    """Indices of the rows to fit on, and of the rows to evaluate on."""

    train: Tensor  #: (n,) int64.
    held_out: Tensor  #: (m,) int64, disjoint from ``train``.

    def to(self, device: torch.device) -> Fold:
        """Move the indices to a device."""
        return Fold(self.train.to(device), self.held_out.to(device))


def split_folds(
    labels: Tensor,
    num_classes: int,
    *,
    partition: int = 0,
    max_folds: int = FOLDS.count,
    groups: Tensor | None = None,
    is_class_name: Tensor | None = None,
) -> list[Fold]:
    """Split rows into folds stratified by class.

    The folds follow from the order of the rows: rows in canonical order always have the same folds. ``partition``
    numbers random partitions. Rows of one of the ``groups`` (n,) stay in one fold. Rows that are names of classes,
    ``is_class_name`` (n,) bool, are never held out. A single fold holds out a part of many rows or classes. There is
    none if no class has two rows, or if ``max_folds`` is 0. A class with a single row or group is in the training rows
    of every fold, with all rows of that group.
    """
    if is_class_name is not None:
        samples, others = (~is_class_name).nonzero().flatten(), is_class_name.nonzero().flatten()
        sample_groups = None if groups is None else groups[samples]
        split = split_folds(
            labels[samples], num_classes, partition=partition, max_folds=max_folds, groups=sample_groups
        )
        return [Fold(torch.cat([samples[fold.train], others]).sort().values, samples[fold.held_out]) for fold in split]
    if not len(labels):
        return []
    first = torch.full((num_classes,), len(labels)).scatter_reduce_(0, labels, torch.arange(len(labels)), "amin")
    labels = first.argsort(stable=True).argsort()[labels]  # by first appearance: names of classes do not matter
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
    if n > FOLDS.max_rows or n * num_classes > FOLDS.max_cosines:
        held_out = max(256, min(FOLDS.held_out, FOLDS.max_cosines // num_classes))
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
    """Split groups (n,) as `split_folds` does: the largest first, each into the fold with the fewest of its classes."""
    n, (_, group, size) = len(labels), groups.unique(return_inverse=True, return_counts=True)
    pairs, count = (group * num_classes + labels).unique(return_counts=True)  # of a group and a class in it
    pair_group, pair_class = pairs // num_classes, pairs % num_classes
    folds = min(max_folds, int(torch.bincount(pair_class).max()))
    if folds < 2:
        return []
    order = torch.randperm(len(size), generator=generator)
    part = torch.full_like(size, -1)  # (groups,): the fold that holds it out
    if n > FOLDS.max_rows or n * num_classes > FOLDS.max_cosines:
        held_out = max(256, min(FOLDS.held_out, FOLDS.max_cosines // num_classes, n // max_folds))
        part[order[size[order].cumsum(dim=0) <= held_out]] = 0
    else:
        order = order[size[order].argsort(descending=True, stable=True)]
        fractions = (count / torch.bincount(labels)[pair_class]).tolist()
        classes_of: list[list[tuple[int, float]]] = [[] for _ in size]  # of each group, with fractions of their rows
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
