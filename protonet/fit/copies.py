"""Rows that stand more than once: equal ones become one of their weight, and near-equal ones are held out together.

A model that has seen a row knows its copy: held out apart from each other, copies would pay for learning by heart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protonet.losses import CHUNK
from protonet.views.view import Rows


@dataclass(frozen=True)
class CopyRules:
    """Which rows are copies."""

    near: tuple[float, ...] = (1e-2, 1e-4, 1e-6)
    """Distance of two copies, at the most: root mean square over the features, in their standard deviations. In few
    features, rows that have nothing in common come so near: then the next one is tried."""
    chance: float = 5.0
    """Copies are this many times as many as values of independent features give: of few yes-or-no answers, rows are
    equal without being copies."""
    directions: int = 4  #: Random projections that are compared first ...
    reach: float = 4.0  #: ... in which copies are this many of those distances apart, at the most ...
    ahead: int = 16  #: ... and this many rows, in the order of the first.
    rounding: float = 1e-6  #: Equal rows are kept in a model file, and come back, within this share of each value.
    constant: float = 1e-6  #: A feature that varies by less than this share of its root mean square is constant.


COPIES = CopyRules()


def find_copies(x: Tensor) -> Tensor | None:
    """Group rows that are equal, or nearly, unless that is what chance gives.

    Args:
        x: (n, dim) float32.

    Returns:
        The number of each row's group (n,) int64, that of its first row; None if each is alone.
    """
    n = len(x)
    deviation = x.std(dim=0, correction=0)
    varies = deviation > COPIES.constant * x.square().mean(dim=0).sqrt()
    unit = torch.where(varies, 1 / deviation, 0.0) / max(1, int(varies.sum())) ** 0.5
    generator = torch.Generator().manual_seed(0)
    projected = x @ (unit[:, None] * torch.randn(x.shape[1], COPIES.directions, generator=generator, dtype=x.dtype))
    order = projected[:, 0].argsort(stable=True)
    ordered = projected[order]
    first, second = [order[:0]], [order[:0]]
    for ahead in range(1, min(COPIES.ahead, n - 1) + 1):
        apart = (ordered[ahead:] - ordered[:-ahead]).abs().amax(dim=1)
        near = (apart <= COPIES.reach * COPIES.near[0]).nonzero().flatten()
        first.append(order[near])
        second.append(order[near + ahead])
    pairs = torch.stack([torch.cat(first), torch.cat(second)])  # (2, pairs) that may be copies
    chunks = (
        ((x[one] - x[other]) * unit).square().sum(dim=1).sqrt()
        for one, other in zip(pairs[0].split(CHUNK), pairs[1].split(CHUNK), strict=True)
    )
    distance = torch.cat([projected[:0, 0], *chunks])
    for near_enough in COPIES.near:
        close = distance <= near_enough
        if not bool(close.any()):
            return None
        if int(close.sum()) > COPIES.chance * _expect_pairs(x[:, varies] / deviation[varies], near_enough):
            return _connect(torch.arange(n), pairs[:, close])
    return None


def _expect_pairs(z: Tensor, near: float) -> float:
    """Return how many pairs of rows (n, dim) would agree if their features were independent."""
    expected = len(z) ** 2 / 2
    for column in z.T:
        values = column.sort().values
        above = torch.searchsorted(values, values + near, right=True) - torch.searchsorted(values, values - near)
        expected *= float(above.double().mean()) / len(z)
    return expected


def _connect(groups: Tensor, pairs: Tensor) -> Tensor:
    """Return groups (n,), those that one of the pairs (2, m) of rows connects made one."""
    while True:
        least = groups[pairs].amin(dim=0)
        joined = groups
        for rows in pairs:
            joined = joined.scatter_reduce(0, groups[rows], least, "amin")
        joined = joined[joined]
        if torch.equal(joined, groups):
            return groups
        groups = joined


def find_equal(x: Tensor, known: Tensor, origin: Tensor) -> Tensor:
    """Return which (n,) bool rows x (n, dim) are equal to one of the known ones (m, dim), rounding aside.

    Each is compared with the two that are next to it in a random direction.

    Args:
        x: The rows, of any real dtype.
        known: The others, which were kept in float32, less the origin.
        origin: (dim,) of them.
    """
    if not len(known):
        return torch.zeros(len(x), dtype=torch.bool)
    x, known = x.double() - origin, known.double() - origin
    deviation = known.std(dim=0, correction=0)
    direction = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    direction = torch.where(deviation > 0, direction / deviation, 0.0)
    places, order = (known @ direction).sort()
    above = torch.searchsorted(places, x @ direction)
    beside = (order[(above + step).clamp(0, len(known) - 1)] for step in (-1, 0))
    first, second = (torch.isclose(x, known[rows], rtol=COPIES.rounding, atol=0).all(dim=1) for rows in beside)
    return first | second


def hash_rows(x: Tensor) -> Tensor:
    """Return a number (n,) int64 for each row x (n, dim), equal for equal rows in float32, else hardly ever.

    Of a million different rows some two are alike by chance in one case of 10^7.

    Source: multilinear hashing, Carter and Wegman, "Universal classes of hash functions" (1979), of bits mixed as by
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    bits = (x.float() + 0.0).view(torch.int32).long()  # -0 is 0
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ (bits >> shift)) * factor
    bits ^= bits >> 31
    factors = torch.randint(-(2**63), 2**63 - 1, (x.shape[1],), generator=torch.Generator().manual_seed(0))
    return (bits * (factors | 1)).sum(dim=1)


def pool_copies(rows: Rows) -> tuple[Rows, int, Tensor | None, Tensor]:
    """Make rows that are equal, and of one class, one row of their weight; group those that are nearly so.

    Args:
        rows: Sorted by class, then by their bytes. Their groups, if any, are numbers below n.

    Returns:
        The rows; how many of them are equal to an earlier one, or nearly; of groups that were given, the number
        (groups,) that each has now; and the number (n,) that each row has now.
    """
    copies, groups, numbers = find_copies(rows.features), rows.groups, None
    if groups is not None:
        numbers = torch.arange(int(groups.max()) + 1)
    if copies is None:
        return rows, 0, numbers, torch.arange(len(rows.labels))
    n, alone = len(copies), torch.arange(len(copies))
    repeated = n - len(copies.unique())
    if groups is not None and numbers is not None:  # copies join the groups that they are in
        first = torch.full_like(numbers, n).scatter_reduce_(0, groups, alone, "amin")
        copies = _connect(copies, torch.stack([alone, first[groups]]))
        numbers = copies[first]
    same = (rows.features[1:] == rows.features[:-1]).all(dim=1) & (rows.labels[1:] == rows.labels[:-1])
    if rows.described is not None:
        same &= rows.described[1:] == rows.described[:-1]
    new = torch.cat([torch.tensor([True]), ~same])
    places = new.cumsum(dim=0) - 1
    weights = torch.bincount(places, rows.weights).to(torch.float64)
    rows = rows._replace(groups=copies).take(new)
    if groups is None and len(copies.unique()) == len(rows.labels):  # what is equal is one row, and nothing is near it
        rows = rows._replace(groups=None)
    return rows._replace(weights=weights), repeated, numbers, places
