"""Near-duplicates: rows whose nearest neighbours of the same class are far closer than all others.

Examples are copies of a row with some noise, windows of one recording, or pictures of one object. In different folds
they reward overfitting, as equal rows would (see `protonet.fit.duplicates`), but the distances do not prove a common
source. So they are reported, and users who know the source name it as groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protonet.views.view import TrainingRows


@dataclass(frozen=True)
class NearDuplicateRules:
    """Thresholds of the detection; tests/fit/test_near_duplicates.py has tables with and without near-duplicates."""

    max_neighbours: int = 5  #: Maximum number of near-duplicates of a row.
    neighbours: int = 10  #: Number of nearest neighbours; the farther half gives the intrinsic dimension.
    chance: float = 0.05
    """False-positive rate: fraction of the rows of a smooth density that seem to have near-duplicates."""
    min_fraction: float = 1 / 3  #: Near-duplicates are reported if this fraction of the rows has some ...
    min_rows: int = 30  #: ... and at least this many rows are examined.
    max_mixed: float = 0.25
    """Limit of the near-duplicates of another class, as a fraction of those expected by chance. Natural clusters hold
    all classes; copies of a row hold its own."""
    max_class_fraction: float = 0.5
    """Largest fraction of its class that a row and its near-duplicates may be: a class may be a cluster."""
    min_gap: float = 1.5  #: Minimum mean gap beyond near-duplicates, in units of the gap by chance, ...
    deviations: float = 3.0
    """... and standard errors above it. Neighbours before the gap must agree in class by as many more."""
    max_ties: float = 0.1
    """If more distances than this fraction equal the next one, values are discrete, and nothing is reported."""
    max_tied: float = 0.5
    """Largest fraction of near-duplicate pairs that may be equal in a column. Rows of one date, for instance, need not
    have one source. Such columns are removed, and the detection runs again."""
    max_queries: int = 512  #: Maximum number of rows examined, at equal steps.
    max_pairs: int = 2**27  #: Maximum number of distances, which lowers the number of rows examined.
    chunk_size: int = 2**24  #: Distances in memory at once.


NEAR_DUPLICATES = NearDuplicateRules()


def near_duplicate_fraction(rows: TrainingRows) -> float:
    """Estimate the fraction of rows that have near-duplicates.

    For a smooth density, let the ratio be the distance to the k-th neighbour over the distance to the next one. This
    ratio to the power of k times the intrinsic dimension is uniform in [0, 1]. A row has near-duplicates if the power
    is improbably small for some k. Neighbours of a row's own group do not count: they are held out together.

    Args:
        rows: Labelled rows.

    Returns:
        Fraction in [0, 1]; 0 if rows are no more similar than by chance.

    Source: Facco, d'Errico, Rodriguez and Laio, "Estimating the intrinsic dimension of datasets by a minimal
        neighborhood information" (2017), eq. 3, for all k; the dimension after Levina and Bickel, "Maximum likelihood
        estimation of intrinsic dimension" (2004), eq. 8.
    """
    n = len(rows.labels)
    if n <= NEAR_DUPLICATES.neighbours or not bool((rows.features[1:] != rows.features[:-1]).any()):
        return 0.0
    queries = torch.arange(
        0, n, -(-n // max(NEAR_DUPLICATES.min_rows, min(NEAR_DUPLICATES.max_queries, NEAR_DUPLICATES.max_pairs // n)))
    )
    distance, nearest = _nearest_neighbours(rows, queries)
    sound = distance[:, -1].isfinite() & (distance[:, 0] > 0)
    distance, nearest, queries = distance[sound], nearest[sound], queries[sound]
    steps = (distance[:, 1:] / distance[:, :-1]).log()  # (queries, neighbours - 1)
    if len(queries) < NEAR_DUPLICATES.min_rows or float((steps == 0).double().mean()) > NEAR_DUPLICATES.max_ties:
        return 0.0
    k = torch.arange(1, NEAR_DUPLICATES.neighbours)
    dimension = 1 / (steps * k)[:, NEAR_DUPLICATES.max_neighbours :].mean()
    chance, index = (-steps * k * dimension).exp()[:, : NEAR_DUPLICATES.max_neighbours].min(dim=1)
    n_near = index + 1  # near-duplicates of a row, if it has some
    labels = rows.labels[queries]
    class_fractions = torch.bincount(rows.labels).double()[labels] / n
    has_duplicates = (chance * NEAR_DUPLICATES.max_neighbours < NEAR_DUPLICATES.chance) & (
        n_near + 1 <= NEAR_DUPLICATES.max_class_fraction * class_fractions * n
    )
    other = rows.labels[nearest] != labels[:, None]  # (queries, neighbours)
    mixed = other.cumsum(dim=1).gather(1, index[:, None])[:, 0] > 0
    expected = float((1 - class_fractions[has_duplicates].pow(n_near[has_duplicates])).sum())
    if float(mixed[has_duplicates].sum()) > NEAR_DUPLICATES.max_mixed * expected:
        has_duplicates &= False
    has_duplicates &= ~mixed
    fraction = float(has_duplicates.double().mean())
    near = has_duplicates[:, None] & (
        torch.arange(NEAR_DUPLICATES.max_neighbours) <= index[:, None]
    )  # (queries, max_neighbours)
    if fraction < NEAR_DUPLICATES.min_fraction:
        fraction, near = _compare_agreement(steps * k * dimension, ~other, class_fractions * n)
    if fraction < NEAR_DUPLICATES.min_fraction:
        return fraction
    tied = _detect_tied(rows, queries[near.nonzero()[:, 0]], nearest[:, : NEAR_DUPLICATES.max_neighbours][near])
    if not bool(tied.any()):
        return fraction
    blocks = None if rows.blocks is None else rows.blocks[~tied]
    return near_duplicate_fraction(rows._replace(features=rows.features[:, ~tied], blocks=blocks))


def _compare_agreement(gaps: Tensor, same: Tensor, sizes: Tensor) -> tuple[float, Tensor]:
    """Estimate the fraction of rows with near-duplicates from all rows together.

    With noise, few rows are significant one by one. Together they are, if two conditions hold. After the same number of
    neighbours, the gaps of all rows are wide on average. And neighbours before that gap agree in class far more often
    than those after it.

    Args:
        gaps: (queries, neighbours - 1): gap after each neighbour, exponential with a mean of 1 for a smooth density.
        same: (queries, neighbours) bool: whether the neighbour is of the row's class.
        sizes: (queries,) number of rows of its class.

    Returns:
        The fraction, 0 if the gaps are not wide; and a mask (queries, max_neighbours) of the probable near-duplicates.
    """
    n_near = 1 + int(gaps[:, : NEAR_DUPLICATES.max_neighbours].mean(dim=0).argmax())
    eligible = n_near + 1 <= NEAR_DUPLICATES.max_class_fraction * sizes
    near = (
        eligible[:, None]
        & same[:, : NEAR_DUPLICATES.max_neighbours]
        & (torch.arange(NEAR_DUPLICATES.max_neighbours) < n_near)
    )
    count = int(eligible.sum())
    if count < NEAR_DUPLICATES.min_rows:
        return 0.0, near
    gap = float(gaps[eligible, n_near - 1].mean())
    inside, outside = (float(part[eligible].double().mean()) for part in (same[:, :n_near], same[:, n_near:]))
    wide = gap > max(NEAR_DUPLICATES.min_gap, 1 + NEAR_DUPLICATES.deviations / count**0.5)
    agree = inside - outside > NEAR_DUPLICATES.deviations * (outside * (1 - outside) / count) ** 0.5
    return (inside - outside) / (1 - outside) if wide and agree else 0.0, near


def _detect_tied(rows: TrainingRows, first: Tensor, second: Tensor) -> Tensor:
    """Detect features of columns in which too many of the pairs are equal.

    Args:
        rows: Training rows.
        first: (pairs,) int64, index of one row of each pair.
        second: (pairs,) int64, index of the other row.

    Returns:
        (dim,) bool.
    """
    dim = rows.features.shape[1]
    blocks = torch.arange(dim) if rows.blocks is None else rows.blocks.unique(return_inverse=True)[1]
    differs = (rows.features[first] != rows.features[second]).float()
    differing = torch.zeros(len(first), int(blocks.max()) + 1).index_add_(1, blocks, differs) > 0
    return ((~differing).sum(dim=0) > NEAR_DUPLICATES.max_tied * len(first))[blocks]


def _nearest_neighbours(rows: TrainingRows, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Compute distances (m, neighbours) float64, ascending, and indices of the nearest neighbours of query rows (m,).

    Features are divided by their standard deviations.
    """
    deviation = rows.features.std(dim=0, correction=0)
    z = rows.features[:, deviation > 0] / deviation[deviation > 0]
    groups = torch.arange(len(z)) if rows.groups is None else rows.groups
    neighbours = [
        torch.cdist(z[some], z)
        .masked_fill_(groups[some, None] == groups, torch.inf)
        .topk(NEAR_DUPLICATES.neighbours, largest=False)
        for some in queries.split(max(1, NEAR_DUPLICATES.chunk_size // len(z)))
    ]
    return torch.cat([part.values for part in neighbours]).double(), torch.cat([part.indices for part in neighbours])
