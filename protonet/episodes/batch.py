"""Batches of episodes: what a method may see, gathered from a data set's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.episodes.sampling import ClassIndex, Draw

#: Rows of which sums are taken at a time.
CHUNK = 8192


class Base(NamedTuple):
    """What is known of the base classes, whose labels a method may use.

    Attributes:
        x: (n, dim) rows of the whole data set, of any floating dtype.
        index: The base classes' rows in it.
        mean: (dim,) of all base rows, float32.
        class_means: (base classes, dim) float32.
    """

    x: Tensor
    index: ClassIndex
    mean: Tensor
    class_means: Tensor


class Episodes(NamedTuple):
    """A batch of episodes of equal sizes, without the queries' labels.

    Attributes:
        support: (episodes, n_support, dim) float32 or float64.
        support_labels: (episodes, n_support) int64 in [0, n_way), each class at least once, in any order.
        query: (episodes, n_queries, dim), the dtype of ``support``.
        n_way: Classes an episode.
        base: The base classes, if there are any.
    """

    support: Tensor
    support_labels: Tensor
    query: Tensor
    n_way: int
    base: Base | None = None


class Part(NamedTuple):
    """Those episodes of a draw that have equal sizes: ways, support rows, queries and open queries.

    Attributes:
        numbers: (episodes,) positions in the draw.
        support: (episodes, n_support) row numbers.
        support_labels: (episodes, n_support).
        query: (episodes, n_queries) row numbers; queries of open classes come last.
        query_labels: (episodes, n_queries), -1 for queries of open classes.
        query_shots: (episodes, n_queries) support rows of the query's class, 0 for queries of open classes.
        n_way: Classes an episode.
    """

    numbers: Tensor
    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor
    query_shots: Tensor
    n_way: int


def split_draw(draw: Draw) -> Iterator[Part]:
    """Yield the episodes of a draw in parts of equal ways, support rows and queries, in an order of their own."""
    query = torch.cat([draw.query.flatten(1), draw.open_query.flatten(1)], dim=1)
    support = draw.support.flatten(1)
    ways, most_shot = draw.support.shape[1:]
    shots = (draw.support >= 0).sum(dim=2)  # (episodes, most ways)
    labels = torch.arange(ways)
    support_labels = labels.repeat_interleave(most_shot).expand(len(support), -1)
    open_shape = (len(query), draw.open_query[0].numel() if len(query) else 0)
    inside = labels.repeat_interleave(draw.query.shape[2]).expand(len(query), -1)
    query_labels = torch.cat([inside, torch.full(open_shape, -1)], dim=1)
    query_shots = shots.repeat_interleave(draw.query.shape[2], dim=1)
    query_shots = torch.cat([query_shots, torch.zeros(open_shape, dtype=torch.int64)], dim=1)
    asked_of = (draw.query >= 0).sum(dim=(1, 2)), (query >= 0).sum(dim=1)
    sizes = torch.stack([(shots > 0).sum(dim=1), shots.sum(dim=1), *asked_of], dim=1)
    for size in sizes.unique(dim=0):
        numbers = (sizes == size).all(dim=1).nonzero().flatten()
        n_way, n_support, _, n_query = size.tolist()
        there, asked = support[numbers] >= 0, query[numbers] >= 0

        def pick(values: Tensor, mask: Tensor, width: int, numbers: Tensor = numbers) -> Tensor:
            return values[numbers][mask].reshape(len(numbers), width)

        yield Part(
            numbers,
            pick(support, there, n_support),
            pick(support_labels, there, n_support),
            pick(query, asked, n_query),
            pick(query_labels, asked, n_query),
            pick(query_shots, asked, n_query),
            n_way,
        )


def gather_episodes(x: Tensor, part: Part, base: Base | None = None, *, out: Tensor | None = None) -> Episodes:
    """Gather the features of a part's episodes.

    Args:
        x: (n, dim) rows of any floating dtype.
        part: Row numbers.
        base: The base classes, passed on.
        out: (at least episodes * rows * dim,) of the dtype of ``x``, overwritten: used memory is faster than new.

    Returns:
        The episodes, in float64 if ``x`` is, else in float32.
    """
    rows = torch.cat([part.support, part.query], dim=1)  # (episodes, n_support + n_queries)
    if out is None:
        out = torch.empty(rows.numel() * x.shape[1], dtype=x.dtype)
    features = out[: rows.numel() * x.shape[1]].view(rows.numel(), x.shape[1])
    torch.index_select(x, 0, rows.flatten(), out=features)
    features = (features if x.dtype == torch.float64 else features.float()).unflatten(0, rows.shape)
    n_support = part.support.shape[1]
    return Episodes(features[:, :n_support], part.support_labels, features[:, n_support:], part.n_way, base)


def summarize_base(x: Tensor, index: ClassIndex) -> Base:
    """Return the means of the base classes, of rows (n, dim) of any floating dtype."""
    sums = torch.zeros(len(index.size), x.shape[1], dtype=torch.float64)
    for number, (start, size) in enumerate(zip(index.start.tolist(), index.size.tolist(), strict=True)):
        for rows in index.rows[start : start + size].split(CHUNK):
            sums[number] += x.index_select(0, rows).to(torch.float64).sum(dim=0)
    mean = sums.sum(dim=0) / index.size.sum()
    return Base(x, index, mean.float(), (sums / index.size[:, None]).float())
