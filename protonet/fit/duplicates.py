"""Duplicate rows: equal ones become one row of their weight, and near-equal ones are held out together.

A model that has seen a row knows its duplicate. In different folds, duplicates would reward overfitting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protonet.losses import CHUNK
from protonet.views.view import TrainingRows


@dataclass(frozen=True)
class DuplicateRules:
    """Thresholds of duplicates; tests/fit/test_duplicates.py has tables with and without them."""

    max_distances: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-6, 0.0)
    """Largest distance of duplicates: root mean square over the features, in their standard deviations. If chance
    explains the pairs at one distance, the next one is tried."""
    chance: float = 5.0
    """Chance explains the neighbours of a row if there are at most this many times the expected number."""
    explained: float = 0.9  #: Pairs are due to chance if it explains this fraction of the rows that have neighbours.
    shared: float = 0.5
    """A table is discrete if in each column this fraction of the distinct rows share their value. Then equal rows are
    due to chance."""
    smoothing: float = 3.0
    """Added to the numbers of values that occur equally often, which vary by chance; see `_is_sampled`."""
    neighbours: int = 16  #: Rows beyond the maximum distance from which the expected number is extrapolated.
    max_fraction: float = 0.1
    """Largest fraction of the rows in one group. A value that more rows share belongs to the distribution, as the zeros
    of counts do."""
    min_limit: int = 10  #: A group of this many rows is never too large.
    max_queries: int = 512  #: Maximum number of rows whose neighbours are counted.
    max_pairs: int = 2**24  #: Maximum number of distances, which lowers the number of these rows.
    directions: int = 4  #: Number of random projections that are compared first.
    reach: float = 4.0  #: In the projections, duplicates are at most this many maximum distances apart.
    window: int = 16  #: Each row is compared with this many rows that follow in the order of the first projection.
    rounding: float = 1e-6  #: Relative rounding error of rows that were saved in a model file and read again.
    constant: float = 1e-6
    """A feature is constant if its standard deviation is below this fraction of its root mean square."""


DUPLICATES = DuplicateRules()


def group_duplicates(x: Tensor) -> Tensor | None:
    """Group rows that are equal or nearly equal, unless chance explains their number.

    A group holds the near neighbours of one of its rows. Groups are not chained: rows of one group are at most twice
    the largest distance apart.

    Args:
        x: (n, dim) float32.

    Returns:
        The group of each row, as the index of the group's first row, (n,) int64; None if no row has a duplicate.
    """
    n = len(x)
    deviation = x.std(dim=0, correction=0)
    varies = deviation > DUPLICATES.constant * x.square().mean(dim=0).sqrt()
    if n < 2 or not bool(varies.any()):
        return None
    z = x[:, varies] / (deviation[varies] * int(varies.sum()) ** 0.5)
    _, point, counts = hash_rows(z).unique(return_inverse=True, return_counts=True)  # equal rows are one point
    first = torch.full_like(counts, n).scatter_reduce_(0, point, torch.arange(n), "amin")
    points = z[first]
    pairs, distance = _list_close_pairs(points)
    for near in DUPLICATES.max_distances:
        group = _group_neighbours(len(points), pairs[:, distance <= near])
        size = torch.zeros_like(counts).index_add_(0, group, counts)[group]
        repeated = (size > 1) & (size <= max(DUPLICATES.min_limit, DUPLICATES.max_fraction * n))
        if not bool(repeated.any()):
            continue
        chosen = repeated.nonzero().flatten()
        if not (_follows_density(points, counts, chosen, near) or _is_discrete(points)) or (
            not near and not _is_sampled(counts)
        ):
            group = torch.where(repeated, group, torch.arange(len(points)))[point]
            rows = torch.where(repeated[point], group, len(points) + torch.arange(n))
            _, index = rows.unique(return_inverse=True)
            return torch.full((n,), n).scatter_reduce_(0, index, torch.arange(n), "amin")[index]
    return None


def _list_close_pairs(points: Tensor) -> tuple[Tensor, Tensor]:
    """List pairs (2, m) of points (k, dim) that may be duplicates, and their distances (m,)."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(points.shape[1], DUPLICATES.directions, generator=generator, dtype=points.dtype)
    projected = points @ directions
    order = projected[:, 0].argsort(stable=True)
    ordered = projected[order]
    first, second = [order[:0]], [order[:0]]
    for ahead in range(1, min(DUPLICATES.window, len(points) - 1) + 1):
        apart = (ordered[ahead:] - ordered[:-ahead]).abs().amax(dim=1)
        near = (apart <= DUPLICATES.reach * DUPLICATES.max_distances[0]).nonzero().flatten()
        first.append(order[near])
        second.append(order[near + ahead])
    pairs = torch.stack([torch.cat(first), torch.cat(second)])
    chunks = pairs.split(CHUNK, dim=1)
    return pairs, torch.cat([torch.linalg.vector_norm(points[one] - points[other], dim=1) for one, other in chunks])


def _group_neighbours(count: int, pairs: Tensor) -> Tensor:
    """Group points with their neighbours: (count,) int64, the index of the point at the centre of the group.

    The centres are a maximal independent set of the graph: in random order, a point without a group becomes a centre.

    Source: Luby, "A simple parallel algorithm for the maximal independent set problem" (1986), algorithm B.
    """
    group, points = torch.arange(count), torch.arange(count)
    rank = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    edges = torch.cat([pairs, pairs.flip(0)], dim=1)
    free = torch.ones(count, dtype=torch.bool)
    while edges.shape[1]:
        best = rank.scatter_reduce(0, edges[0], rank[edges[1]], "amin")  # in each point's neighbourhood
        centre = free & (best == rank)
        assigned = edges[:, centre[edges[0]]]
        group = group.scatter(0, assigned[1], assigned[0])
        free &= ~centre
        free[assigned[1]] = False
        edges = edges[:, free[edges].all(dim=0)]
    return torch.where(group == points, points, group)


def _follows_density(points: Tensor, counts: Tensor, chosen: Tensor, near: float) -> bool:
    """Test whether the density of the data explains the number of rows within a distance of the chosen points.

    Within a distance d of a row, a density of intrinsic dimension D has rows in proportion to d^D. Both the number and
    D come from the nearest points beyond ``near``, so that dependent columns count once. Values on a grid count as if
    they filled half of the gap to the next one.

    Args:
        points: (k, dim), all different.
        counts: (k,) rows at each point.
        chosen: (m,) indices of points that have other rows within ``near``.
        near: Distance.

    Source: Grassberger and Procaccia, "Measuring the strangeness of strange attractors" (1983), eq. 1.3, within the
        neighbourhood of each row.
    """
    max_queries = max(1, min(DUPLICATES.max_queries, DUPLICATES.max_pairs // len(points)))
    chosen = chosen[:: -(-len(chosen) // max_queries)]
    distance = torch.cdist(points[chosen].double(), points.double())  # (m, k)
    distance.scatter_(1, chosen[:, None], 0.0)  # without rounding errors
    beyond = distance.masked_fill(distance <= near, torch.inf)
    radii = beyond.topk(min(DUPLICATES.neighbours, len(points)), largest=False).values  # (m, neighbours), ascending
    last = radii.isfinite().sum(dim=1, keepdim=True) - 1
    if bool((last < 0).any()):  # nothing to extrapolate from
        return True
    gap, inner, outer = (radii.gather(1, index)[:, 0] for index in (0 * last, last // 2, last))

    def count_within(radius: Tensor) -> Tensor:
        return ((distance <= radius[:, None] * (1 + 1e-6)) * counts).sum(dim=1).double() - 1

    ratio = count_within(outer) / count_within(inner)
    spread = float((outer / inner).log().sum())
    dimension = float(ratio.log().sum()) / spread if spread else 0.0
    expected = count_within(outer) * ((gap / 2).clamp_min(near) / outer).pow(dimension)
    observed = count_within(torch.full_like(gap, near))
    return float((observed <= DUPLICATES.chance * expected).double().mean()) >= DUPLICATES.explained


def _is_discrete(points: Tensor) -> bool:
    """Test whether most of the distinct points (k, dim) share their value with another one in every column."""
    for column in points.T:
        _, counts = column.unique(return_counts=True)
        if int(counts[counts > 1].sum()) < DUPLICATES.shared * len(points):
            return False
    return True


def _is_sampled(counts: Tensor) -> bool:
    """Test whether independent samples of some distribution can repeat with these counts (k,).

    A count is a mixture of Poisson distributions: if m_k values occur k times, k! m_k is log-convex in k. If a table
    holds each row twice, there are many pairs, but hardly any single rows or triples.
    """
    occurring = counts.bincount(minlength=2)[1:].double()  # index 0: values that occur once
    occurring = torch.cat([occurring, occurring.new_zeros(1)])
    k = torch.arange(2, len(occurring))
    before, here, after = occurring[:-2], occurring[1:-1], occurring[2:]
    upper = DUPLICATES.chance * (k + 1) / k * (before + DUPLICATES.smoothing) * (after + DUPLICATES.smoothing)
    return bool((here.square() <= upper).all())


def match_rows(x: Tensor, known: Tensor, origin: Tensor) -> Tensor:
    """Test which rows x (n, dim) equal one of the known rows (m, dim) up to rounding: (n,) bool.

    Each row is compared with its two neighbours along a random direction.

    Args:
        x: Rows of any real dtype.
        known: Rows that were stored in float32, less the origin.
        origin: (dim,) of the known rows.
    """
    if not len(known):
        return torch.zeros(len(x), dtype=torch.bool)
    x, known = x.double() - origin, known.double() - origin
    deviation = known.std(dim=0, correction=0)
    direction = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    direction = torch.where(deviation > 0, direction / deviation, 0.0)
    projections, order = (known @ direction).sort()
    above = torch.searchsorted(projections, x @ direction)
    adjacent = (order[(above + step).clamp(0, len(known) - 1)] for step in (-1, 0))
    first, second = (torch.isclose(x, known[rows], rtol=DUPLICATES.rounding, atol=0).all(dim=1) for rows in adjacent)
    return first | second


def hash_rows(x: Tensor) -> Tensor:
    """Hash rows x (n, dim), as float32, to (n,) int64.

    The probability of a collision among a million different rows is 10^-7.

    Source: multilinear hashing, Carter and Wegman, "Universal classes of hash functions" (1979), of bits mixed as by
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    bits = (x.float() + 0.0).view(torch.int32).long()  # turns -0.0 into 0.0
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ (bits >> shift)) * factor
    bits ^= bits >> 31
    factors = torch.randint(-(2**63), 2**63 - 1, (x.shape[1],), generator=torch.Generator().manual_seed(0))
    return (bits * (factors | 1)).sum(dim=1)


def merge_duplicates(rows: TrainingRows) -> tuple[TrainingRows, int, Tensor | None, Tensor]:
    """Merge equal rows of one class and one group into one weighted row; group duplicates.

    Args:
        rows: Sorted by class, equal rows adjacent. Group ids, if any, are below n.

    Returns:
        The rows; the number of rows that have an earlier duplicate; the new id of each input group (groups,), None
        without groups; and the new index (n,) of each row.
    """
    duplicates, groups, group_ids = group_duplicates(rows.features), rows.groups, None
    if groups is not None:
        group_ids = torch.arange(int(groups.max()) + 1)
    if duplicates is None:
        return rows, 0, group_ids, torch.arange(len(rows.labels))
    n = len(duplicates)
    repeated = n - len(duplicates.unique())
    if groups is not None and group_ids is not None:
        first = torch.full_like(group_ids, n).scatter_reduce_(0, groups, torch.arange(n), "amin")
        duplicates = _join_groups(first[groups], duplicates)
        group_ids = duplicates[first]
    same = (rows.features[1:] == rows.features[:-1]).all(dim=1) & (rows.labels[1:] == rows.labels[:-1])
    same &= duplicates[1:] == duplicates[:-1]
    if rows.is_class_name is not None:
        same &= rows.is_class_name[1:] == rows.is_class_name[:-1]
    new = torch.cat([torch.tensor([True]), ~same])
    indices = new.cumsum(dim=0) - 1
    weights = torch.bincount(indices, rows.weights).to(torch.float64)
    rows = rows._replace(groups=duplicates).select(new)
    if groups is None and len(duplicates.unique()) == len(rows.labels):  # every duplicate was merged
        rows = rows._replace(groups=None)
    return rows._replace(weights=weights), repeated, group_ids, indices


def _join_groups(groups: Tensor, duplicates: Tensor) -> Tensor:
    """Join groups (n,) that share duplicates (n,), unless the joined group would hold a large fraction of the rows.

    Groups and duplicates are identified by the index of their first row.
    """
    n, joined = len(groups), groups
    while True:
        before = joined
        for ids in (duplicates, groups):
            joined = torch.full((n,), n).scatter_reduce_(0, ids, joined, "amin")[ids]
        if torch.equal(joined, before):
            break
    max_size = max(DUPLICATES.min_limit, DUPLICATES.max_fraction * n, min(2 * int(groups.bincount().max()), n / 2))
    return torch.where(joined.bincount(minlength=n)[joined] <= max_size, joined, groups)
