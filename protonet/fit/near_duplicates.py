"""Rows that come from one source without saying so: many have twins, of their class and far nearer than all others.

Examples are copies of a row with some noise, windows of one recording, or pictures of one thing. In different folds
they reward overfitting, as equal rows would (see `protonet.fit.duplicates`), but they are too far apart to be certain.
So they are reported, and users who know the source name it as groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protonet.views.view import TrainingRows


@dataclass(frozen=True)
class NearDuplicateRules:
    """When rows have twins; tests/fit/test_near_duplicates.py has tables with and without them."""

    most: int = 5  #: Maximum number of twins of a row.
    reach: int = 10  #: Neighbours, whose farther half gives the dimension of the data.
    chance: float = 0.05  #: Fraction of the rows of a smooth density that seem to have twins, ...
    share: float = 1 / 3  #: ... and where this share of the rows does, of so many rows at least, they have some, ...
    least: int = 30
    mixed: float = 0.25
    """... unless more of them have twins of another class than this part of what chance would give: clusters of a
    feature of the world are of all classes, copies of a row are of its own."""
    whole: float = 0.5  #: Largest fraction of its class that a row and its twins may be: a class may be a cluster.
    wide: float = 1.5  #: Beyond near-duplicates, gaps are on average this many times as wide as by chance, ...
    deviations: float = 3.0  #: ... and by this many standard errors. So much more often neighbours agree in class.
    ties: float = 0.1  #: If more distances than this are equal to the next one, values are few: there is no result.
    tied: float = 0.5
    """Largest fraction of twins that may be equal in a column: one day of a date is no source, nor is one value of
    another column. Such columns are removed, and twins are searched again."""
    queries: int = 512  #: Rows that are looked at, at equal distances, ...
    pairs: int = 2**27  #: ... and fewer, where all their distances to the others would be more than this.
    at_once: int = 2**24  #: Distances that are in memory.


NEAR_DUPLICATES = NearDuplicateRules()


def near_duplicate_fraction(rows: TrainingRows) -> float:
    """Return the share of rows that have twins: a few others of their class, nearer by far than all after them.

    If a density is smooth, the ratio of the distances to the k-th and to the next neighbour, to the power of k times
    the dimension, is uniform in [0, 1]. Neighbours of a row's own group do not count: they are held out together.

    Args:
        rows: Labelled rows.

    Returns:
        A share of 1; 0 where rows are no more alike than by chance.

    Source: Facco, d'Errico, Rodriguez and Laio, "Estimating the intrinsic dimension of datasets by a minimal
        neighborhood information" (2017), eq. 3, for all k; the dimension after Levina and Bickel, "Maximum likelihood
        estimation of intrinsic dimension" (2004), eq. 8.
    """
    n = len(rows.labels)
    if n <= NEAR_DUPLICATES.reach or not bool((rows.features[1:] != rows.features[:-1]).any()):
        return 0.0
    queries = torch.arange(
        0, n, -(-n // max(NEAR_DUPLICATES.least, min(NEAR_DUPLICATES.queries, NEAR_DUPLICATES.pairs // n)))
    )
    distance, nearest = _nearest_neighbours(rows, queries)
    sound = distance[:, -1].isfinite() & (distance[:, 0] > 0)
    distance, nearest, queries = distance[sound], nearest[sound], queries[sound]
    steps = (distance[:, 1:] / distance[:, :-1]).log()  # (queries, reach - 1)
    if len(queries) < NEAR_DUPLICATES.least or float((steps == 0).double().mean()) > NEAR_DUPLICATES.ties:
        return 0.0
    k = torch.arange(1, NEAR_DUPLICATES.reach)
    dimension = 1 / (steps * k)[:, NEAR_DUPLICATES.most :].mean()
    chance, index = (-steps * k * dimension).exp()[:, : NEAR_DUPLICATES.most].min(dim=1)
    n_near = index + 1  # per row, if it has any
    labels = rows.labels[queries]
    class_fractions = torch.bincount(rows.labels).double()[labels] / n
    has_duplicates = (chance * NEAR_DUPLICATES.most < NEAR_DUPLICATES.chance) & (
        n_near + 1 <= NEAR_DUPLICATES.whole * class_fractions * n
    )
    other = rows.labels[nearest] != labels[:, None]  # (queries, reach)
    mixed = other.cumsum(dim=1).gather(1, index[:, None])[:, 0] > 0
    expected = float((1 - class_fractions[has_duplicates].pow(n_near[has_duplicates])).sum())
    if float(mixed[has_duplicates].sum()) > NEAR_DUPLICATES.mixed * expected:
        has_duplicates &= False
    has_duplicates &= ~mixed
    fraction = float(has_duplicates.double().mean())
    near = has_duplicates[:, None] & (torch.arange(NEAR_DUPLICATES.most) <= index[:, None])  # (queries, most)
    if fraction < NEAR_DUPLICATES.share:
        fraction, near = _compare_agreement(steps * k * dimension, ~other, class_fractions * n)
    if fraction < NEAR_DUPLICATES.share:
        return fraction
    tied = _detect_tied(rows, queries[near.nonzero()[:, 0]], nearest[:, : NEAR_DUPLICATES.most][near])
    if not bool(tied.any()):
        return fraction
    blocks = None if rows.blocks is None else rows.blocks[~tied]
    return near_duplicate_fraction(rows._replace(features=rows.features[:, ~tied], blocks=blocks))


def _compare_agreement(gaps: Tensor, same: Tensor, sizes: Tensor) -> tuple[float, Tensor]:
    """Return which fraction of rows have near-duplicates that single distances do not separate from other rows.

    With noise, few rows are conspicuous by themselves. All of them are, if their gaps are wide on average after the
    same number of neighbours, and neighbours before that gap agree in class far more often than those after it.

    Args:
        gaps: (queries, reach - 1): after each neighbour, exponential with a mean of 1 for a smooth density.
        same: (queries, reach): which neighbours are of the row's class.
        sizes: (queries,) rows of its class.

    Returns:
        The fraction, 0 if the gaps are not wide; and which neighbours (queries, most) are likely duplicates.
    """
    n_near = 1 + int(gaps[:, : NEAR_DUPLICATES.most].mean(dim=0).argmax())
    eligible = n_near + 1 <= NEAR_DUPLICATES.whole * sizes
    near = eligible[:, None] & same[:, : NEAR_DUPLICATES.most] & (torch.arange(NEAR_DUPLICATES.most) < n_near)
    count = int(eligible.sum())
    if count < NEAR_DUPLICATES.least:
        return 0.0, near
    gap = float(gaps[eligible, n_near - 1].mean())
    inside, outside = (float(part[eligible].double().mean()) for part in (same[:, :n_near], same[:, n_near:]))
    wide = gap > max(NEAR_DUPLICATES.wide, 1 + NEAR_DUPLICATES.deviations / count**0.5)
    agree = inside - outside > NEAR_DUPLICATES.deviations * (outside * (1 - outside) / count) ** 0.5
    return (inside - outside) / (1 - outside) if wide and agree else 0.0, near


def _detect_tied(rows: TrainingRows, first: Tensor, second: Tensor) -> Tensor:
    """Return which features (dim,) are of a column in which too many pairs of rows (pairs,), by number, are equal."""
    dim = rows.features.shape[1]
    blocks = torch.arange(dim) if rows.blocks is None else rows.blocks.unique(return_inverse=True)[1]
    differs = (rows.features[first] != rows.features[second]).float()
    differing = torch.zeros(len(first), int(blocks.max()) + 1).index_add_(1, blocks, differs) > 0
    return ((~differing).sum(dim=0) > NEAR_DUPLICATES.tied * len(first))[blocks]


def _nearest_neighbours(rows: TrainingRows, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distances (m, reach) float64, ascending, of some rows (m,) to their neighbours, and their numbers.

    Features are compared in their standard deviations.
    """
    deviation = rows.features.std(dim=0, correction=0)
    z = rows.features[:, deviation > 0] / deviation[deviation > 0]
    groups = torch.arange(len(z)) if rows.groups is None else rows.groups
    neighbours = [
        torch.cdist(z[some], z)
        .masked_fill_(groups[some, None] == groups, torch.inf)
        .topk(NEAR_DUPLICATES.reach, largest=False)
        for some in queries.split(max(1, NEAR_DUPLICATES.at_once // len(z)))
    ]
    return torch.cat([part.values for part in neighbours]).double(), torch.cat([part.indices for part in neighbours])
