"""Batches of N-way K-shot episodes, sampled as row indices.

Training uses `sample_episodes`, which takes a generator. Experiments use `protonet.episodes.samplers`, where
every episode has a number and can be sampled without the episodes before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from protonet._validation import check_int, check_type
from protonet.errors import raise_input_error


class ClassIndex(NamedTuple):
    """Row indices grouped by class: those of class c are the ``class_counts[c]`` ones from ``class_starts[c]`` on."""

    row_indices: Tensor  #: (n,) int64: indices of the rows of class 0, then of class 1, and so on.
    class_starts: Tensor  #: (num_classes,) int64: position in ``row_indices`` of the first row of each class.
    class_counts: Tensor  #: (num_classes,) int64: number of rows of each class.

    def select_classes(self, classes: Tensor) -> ClassIndex:
        """Build the index of selected classes (k,) int64, distinct, which become classes 0 to k - 1 in this order."""
        return ClassIndex(self.row_indices, self.class_starts[classes], self.class_counts[classes])


def index_classes(labels: Tensor) -> ClassIndex:
    """Build a `ClassIndex`, which lists the row indices of each class.

    Args:
        labels: (n,) int64; the distinct values in ascending order become classes 0, 1, ...

    Raises:
        InputTypeError: The labels are not a tensor.
    """
    check_type("labels", labels, Tensor, "a tensor of labels, such as torch.as_tensor(y)")
    _, inverse, size = torch.unique(labels, return_inverse=True, return_counts=True)
    return ClassIndex(torch.argsort(inverse, stable=True), size.cumsum(0) - size, size)


def list_class_rows(index: ClassIndex) -> list[Tensor]:
    """List, for each class, the indices of its rows as a tensor (n_rows,) int64; inverse of `index_class_rows`."""
    starts, sizes = index.class_starts.tolist(), index.class_counts.tolist()
    return [index.row_indices[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def index_class_rows(class_rows: list[Tensor]) -> ClassIndex:
    """Build a `ClassIndex` from a list that has, for each class, the indices of its rows (n_rows,) int64."""
    size = torch.tensor(list(map(len, class_rows)))
    return ClassIndex(torch.cat(class_rows), size.cumsum(0) - size, size)


def sample_episodes(
    index: ClassIndex, *, n_way: int, n_shot: int, n_query: int, n_episodes: int, generator: torch.Generator
) -> Tensor:
    """Sample episodes: classes without replacement, then rows of each class without replacement.

    If a class has fewer than ``n_shot + n_query`` rows, each is drawn once before any is drawn again. The query of a
    class with a single row thus is its support row.

    Args:
        index: The rows of each class.
        n_way: Number of classes per episode, from 1 to the number of classes.
        n_shot: Number of support rows per class, >= 1.
        n_query: Number of query rows per class, >= 0.
        n_episodes: Number of episodes, >= 0.
        generator: The source of random numbers, on the CPU.

    Returns:
        Row indices (n_episodes, n_way, n_shot + n_query) int64. The support rows of a class precede its queries. The
        label of a row within its episode is its index along the second axis.

    Raises:
        InputTypeError: A count is not an integer.
        InputError: A count is outside its range.

    Source: Vinyals et al., "Matching networks for one shot learning" (2016), sec. 2.2. https://arxiv.org/abs/1606.04080
    """
    n_way, n_shot = check_int("n_way", n_way, low=1), check_int("n_shot", n_shot, low=1)
    n_query, n_episodes = check_int("n_query", n_query, low=0), check_int("n_episodes", n_episodes, low=0)
    n_classes = len(index.class_counts)
    if n_way > n_classes:
        raise_input_error("n_way", f"be at most the number of classes ({n_classes})", n_way, "Ask for fewer classes.")
    keys = torch.rand(n_episodes, n_classes, generator=generator, dtype=torch.float32)
    classes = keys.argsort(dim=1)[:, :n_way]  # (n_episodes, n_way)
    uniform = torch.rand(n_episodes, n_way, n_shot + n_query, generator=generator, dtype=torch.float64)
    offsets = draw_without_replacement(uniform, index.class_counts[classes])
    return index.row_indices[index.class_starts[classes][..., None] + offsets]


def draw_without_replacement(uniform: Tensor, n_items: Tensor) -> Tensor:
    """Convert uniform random numbers to draws of items without replacement.

    A draw depends only on its random number and on the earlier ones. Once all items are drawn, each can be drawn again.

    Args:
        uniform: (..., slots) in [0, 1): one random number for each draw.
        n_items: (...) integers >= 1: the number of items to draw from.

    Returns:
        (..., slots) int64: the index of the drawn item, below ``n_items``.
    """
    shape, slots, n_items = uniform.shape, uniform.shape[-1], n_items.reshape(-1).int()  # count: (n,)
    left = n_items - torch.arange(slots, dtype=torch.int32)[:, None] % n_items  # (slots, n), items not yet drawn
    # A draw is the item with ``free`` undrawn items before it.
    free = (uniform.reshape(len(n_items), slots).T * left).int().minimum(left - 1)  # (slots, n)
    # The round's draws in ascending order, the k-th (from 0) minus k: as many undrawn items come before it.
    none = torch.iinfo(torch.int32).max
    drawn = torch.full((slots + 1, len(n_items)), none, dtype=torch.int32)
    drawn[0] = -none
    passed = torch.empty_like(free)
    ends = (left == 1).any(dim=1).tolist()
    for slot in range(slots):
        earlier, later = drawn[: slot + 1], drawn[1 : slot + 2]
        torch.sum(earlier <= free[slot], dim=0, dtype=torch.int32, out=passed[slot])
        torch.minimum(later, torch.maximum(earlier - 1, free[slot]), out=later)  # insert the draw in order
        if ends[slot]:
            later[:, left[slot] == 1] = none
    return (free + passed - 1).T.long().reshape(shape)  # (..., slots)
