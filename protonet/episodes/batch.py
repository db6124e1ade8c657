"""Batches of episodes of equal sizes: what a method may see, gathered from a data set's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.episodes.draws import Draw
from protonet.sampling import ClassIndex

#: Maps row numbers (k,) int64 to features (k, dim) of any floating dtype, which the next call may overwrite.
Take = Callable[[Tensor], Tensor]
#: Factors that pack an episode's four sizes into one int64.
SIZE_FACTORS = torch.tensor([1, 2**15, 2**30, 2**46])
#: Rows that are summed at a time.
CHUNK = 8192


class Base(NamedTuple):
    """The base classes: labelled rows of other classes than the episode's, which a method may use.

    Attributes:
        take: Returns rows by number.
        by_class: The base classes' rows, by class.
        mean: (dim,) float32, of all base rows.
        class_means: (base classes, dim) float32.
    """

    take: Take
    by_class: ClassIndex
    mean: Tensor
    class_means: Tensor


class Episodes(NamedTuple):
    """A batch of episodes of equal sizes, without the queries' labels.

    Attributes:
        support: (episodes, n_support, dim) float32 or float64, the support rows of all classes.
        support_labels: (episodes, n_support) int64 in [0, n_way), each class at least once, in any order.
        query: (episodes, n_queries, dim), the dtype of ``support``, the query rows of all classes.
        n_way: Classes per episode.
        base: The base classes, or None where there are none.
    """

    support: Tensor
    support_labels: Tensor
    query: Tensor
    n_way: int
    base: Base | None = None


class Part(NamedTuple):
    """Those episodes of a draw that have equal sizes: classes, support rows, queries and open queries.

    Attributes:
        numbers: (episodes,) int64 positions in the draw.
        support: (episodes, n_support) int64 row numbers.
        support_labels: (episodes, n_support) int64.
        query: (episodes, n_queries) int64 row numbers; queries of open classes come last.
        query_labels: (episodes, n_queries) int64, -1 for queries of open classes.
        query_shots: (episodes, n_queries) int64, support rows of the query's class, 0 for queries of open classes.
        n_way: Classes per episode.
    """

    numbers: Tensor
    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor
    query_shots: Tensor
    n_way: int


def split_draw(draw: Draw) -> Iterator[Part]:
    """Yield the episodes of a draw in parts of equal sizes.

    Args:
        draw: From `protonet.episodes.draws.draw_episodes`.

    Yields:
        Parts, each episode in one of them; ``numbers`` tells which.
    """
    query = torch.cat([draw.query.flatten(1), draw.open_query.flatten(1)], dim=1)
    support = draw.support.flatten(1)
    most_way, most_shot = draw.support.shape[1:]
    shots = (draw.support >= 0).sum(dim=2)  # (episodes, most_way)
    labels = torch.arange(most_way)
    support_labels = labels.repeat_interleave(most_shot).expand(len(support), -1)
    open_shape = (len(query), draw.open_query[0].numel() if len(query) else 0)
    inside = labels.repeat_interleave(draw.query.shape[2]).expand(len(query), -1)
    query_labels = torch.cat([inside, torch.full(open_shape, -1)], dim=1)
    query_shots = shots.repeat_interleave(draw.query.shape[2], dim=1)
    query_shots = torch.cat([query_shots, torch.zeros(open_shape, dtype=torch.int64)], dim=1)
    counts = (shots > 0).sum(dim=1), shots.sum(dim=1), (draw.query >= 0).sum(dim=(1, 2)), (query >= 0).sum(dim=1)
    sizes = torch.stack(counts, dim=1)  # (episodes, 4)
    _, kinds = torch.unique(sizes @ SIZE_FACTORS, return_inverse=True)  # far faster than unique rows
    for kind in range(int(kinds.max()) + 1 if len(kinds) else 0):
        numbers = (kinds == kind).nonzero().flatten()
        n_way, n_support, _, n_query = sizes[numbers[0]].tolist()
        support_slots = _find_present(support[numbers], n_support)
        query_slots = _find_present(query[numbers], n_query)
        yield Part(
            numbers,
            support[numbers].gather(1, support_slots),
            support_labels[numbers].gather(1, support_slots),
            query[numbers].gather(1, query_slots),
            query_labels[numbers].gather(1, query_slots),
            query_shots[numbers].gather(1, query_slots),
            n_way,
        )


def _find_present(rows: Tensor, count: int) -> Tensor:
    """Return the positions (episodes, count) of those slots of ``rows`` (episodes, slots) that hold a row number."""
    if count == rows.shape[1]:
        return torch.arange(count).expand(len(rows), -1)
    return (rows >= 0).nonzero()[:, 1].reshape(len(rows), count)  # (episodes, count)


def take_from(x: Tensor) -> Take:
    """Return a function that copies rows into memory that it uses again, which is faster than new memory.

    Args:
        x: (n, dim) floating.

    Returns:
        A function from row numbers (k,) int64 to rows (k, dim) of the dtype of ``x``, valid until its next call.
    """
    memory = x.new_empty(0)

    def take(rows: Tensor) -> Tensor:
        nonlocal memory
        size = len(rows) * x.shape[1]
        if size > len(memory):
            memory = x.new_empty(size)
        return torch.index_select(x, 0, rows, out=memory[:size].view(len(rows), x.shape[1]))

    return take


def gather_episodes(take: Take, part: Part, base: Base | None = None) -> Episodes:
    """Gather the features of a part's episodes.

    Args:
        take: Returns rows by number.
        part: Episodes of equal sizes.
        base: The base classes, passed on.

    Returns:
        The episodes, float64 if the rows are, otherwise float32.
    """
    rows = torch.cat([part.support, part.query], dim=1)  # (episodes, n_support + n_queries)
    features = take(rows.flatten()).unflatten(0, rows.shape)
    features = features if features.dtype == torch.float64 else features.float()
    n_support = part.support.shape[1]
    return Episodes(features[:, :n_support], part.support_labels, features[:, n_support:], part.n_way, base)


def summarize_base(take: Take, by_class: ClassIndex) -> Base:
    """Compute the means of the base classes.

    Args:
        take: Returns rows by number.
        by_class: The base classes' rows, by class.

    Returns:
        The base classes with their means, summed in float64.
    """
    means = []
    for start, size in zip(by_class.start.tolist(), by_class.size.tolist(), strict=True):
        pieces = by_class.rows[start : start + size].split(CHUNK)
        means.append(torch.stack([take(rows).to(torch.float64).sum(dim=0) for rows in pieces]).sum(dim=0) / size)
    class_means = torch.stack(means)  # (base classes, dim)
    share = by_class.size.double() / by_class.size.sum()
    return Base(take, by_class, (share @ class_means).float(), class_means.float())
