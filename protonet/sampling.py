"""Draw N-way K-shot episodes as index tensors, a whole batch of them at once.

`sample_episodes` takes a generator, for training; experiments draw by `protonet.episodes.draws`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from protonet._checks import check_int, fail


class ClassIndex(NamedTuple):
    """Rows grouped by class: class c owns ``rows[start[c] : start[c] + size[c]]``."""

    rows: Tensor
    start: Tensor
    size: Tensor

    def take(self, classes: Tensor) -> ClassIndex:
        """Return the index of some classes alone, (n,) int64, numbered anew in that order."""
        return ClassIndex(self.rows, self.start[classes], self.size[classes])


def index_classes(labels: Tensor) -> ClassIndex:
    """Group row numbers by label.

    Args:
        labels: (n,) int64; the distinct values in ascending order become classes 0, 1, ...

    Returns:
        The index: ``rows`` (n,), ``start`` and ``size`` (classes,), int64.
    """
    _, inverse, size = torch.unique(labels, return_inverse=True, return_counts=True)
    return ClassIndex(torch.argsort(inverse, stable=True), size.cumsum(0) - size, size)


def sample_episodes(
    index: ClassIndex, *, n_way: int, n_shot: int, n_query: int, n_episodes: int, generator: torch.Generator
) -> Tensor:
    """Draw episodes: classes without replacement, then rows of each class without replacement.

    A class with fewer than ``n_shot + n_query`` rows is cycled through, so that with a single sample a class the
    query is the support row again (to be told apart by augmentation).

    Args:
        index: Rows by class, from ``index_classes``.
        n_way: Classes an episode, in [1, number of classes].
        n_shot: Support rows a class, >= 1.
        n_query: Query rows a class, >= 0.
        n_episodes: Episodes to draw, >= 0.
        generator: The source of all randomness.

    Returns:
        (n_episodes, n_way, n_shot + n_query) int64 row numbers, support first along the last axis. The episode's
        own label of a row is its position along ``n_way``.

    Raises:
        TypeError: A count is not a whole number.
        ValueError: A count outside its range, or more ways than classes.

    Source: Vinyals et al., "Matching networks for one shot learning" (2016), sec. 2.2.
    """
    name = "sample_episodes"
    n_way, n_shot = check_int(name, "n_way", n_way, low=1), check_int(name, "n_shot", n_shot, low=1)
    n_query, n_episodes = check_int(name, "n_query", n_query, low=0), check_int(name, "n_episodes", n_episodes, low=0)
    n_classes = len(index.size)
    if n_way > n_classes:
        fail(name, "n_way", f"be at most the number of classes ({n_classes})", n_way, "Ask for fewer ways.")
    keys = torch.rand(n_episodes, n_classes, generator=generator, dtype=torch.float32)
    classes = keys.argsort(dim=1)[:, :n_way]  # (episodes, way)
    uniform = torch.rand(n_episodes, n_way, n_shot + n_query, generator=generator, dtype=torch.float64)
    return index.rows[index.start[classes][..., None] + draw_distinct(uniform, index.size[classes])]


def draw_distinct(uniform: Tensor, count: Tensor) -> Tensor:
    """Turn uniform numbers into draws without replacement; when all are drawn, a new round begins.

    Args:
        uniform: (..., slots) in [0, 1).
        count: (...) int64, >= 1, how many there are to draw from.

    Returns:
        (..., slots) int64 in [0, count): each slot's draw hangs on the slots up to it alone.
    """
    shape, slots, count = uniform.shape, uniform.shape[-1], count.reshape(-1).int()
    left = count - torch.arange(slots, dtype=torch.int32)[:, None] % count  # (slots, n)
    free = (uniform.reshape(-1, slots).T * left).int().minimum(left - 1)  # how many that are free come before
    # This round's draws in ascending order, the k-th less k: a free one comes after all those that it is not below.
    none = torch.iinfo(torch.int32).max
    taken = torch.full((slots + 1, len(count)), none, dtype=torch.int32)
    taken[0] = -none
    passed = torch.empty_like(free)
    ends = (left == 1).any(dim=1).tolist()
    for slot in range(slots):
        earlier, later = taken[: slot + 1], taken[1 : slot + 2]
        torch.sum(earlier <= free[slot], dim=0, dtype=torch.int32, out=passed[slot])
        torch.minimum(later, torch.maximum(earlier - 1, free[slot]), out=later)  # insert it
        if ends[slot]:
            later[:, left[slot] == 1] = none
    return (free + passed - 1).T.long().reshape(shape)
