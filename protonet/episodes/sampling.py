"""Draw N-way K-shot episodes as index tensors, a whole batch of them at once."""

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
    n_query = check_int(name, "n_query", n_query, low=0)
    n_episodes = check_int(name, "n_episodes", n_episodes, low=0)
    n_classes = len(index.size)
    if n_way > n_classes:
        fail(name, "n_way", f"be at most the number of classes ({n_classes})", n_way, "Ask for fewer ways.")
    keys = torch.rand(n_episodes, n_classes, generator=generator, dtype=torch.float32)
    classes = keys.argsort(dim=1)[:, :n_way]  # (episodes, way)
    count, start = index.size[classes], index.start[classes]
    slots = n_shot + n_query
    uniform = torch.rand(n_episodes, n_way, slots, generator=generator, dtype=torch.float64)
    chosen = torch.empty(n_episodes, n_way, 0, dtype=torch.int64)
    for slot in range(slots):  # the slot-th of the rows not chosen yet; a full class starts a new round
        left = count - slot % count
        draw = (uniform[..., slot] * left).long().clamp_max(left - 1)
        round_start = (slot // count) * count  # (episodes, way)
        earlier = chosen.masked_fill(torch.arange(slot) < round_start[..., None], torch.iinfo(torch.int64).max)
        for taken in earlier.sort(dim=-1).values.unbind(-1):
            draw += (draw >= taken).long()
        chosen = torch.cat([chosen, draw[..., None]], dim=-1)
    return index.rows[start[..., None] + chosen]  # (episodes, way, shot + query)
