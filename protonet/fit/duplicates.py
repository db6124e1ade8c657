"""Duplicate rows: equal rows become one weighted row, and nearly equal rows are held out together.

A model that was fitted to a row knows its duplicate. In different folds, duplicates would reward overfitting.

Near-duplicates are rows whose nearest neighbours of the same class are far closer than all other rows: copies with some
noise, windows of one recording, pictures of one object. Distances do not prove a common source. So near-duplicates are
only reported; users who know the source pass it as groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protonet.losses import MAX_CHUNK_ROWS
from protonet.views.view import TrainingRows

#: Largest distances between duplicates, in root mean square of the standardised features, in the order in which they
#: are tried. If random sampling explains the close pairs at one distance, the next distance is tried.
MAX_DISTANCES = (1e-2, 1e-3, 1e-4, 1e-6, 0.0)
#: Largest group of duplicates, as a fraction of all rows. A value that more rows share is typical of the data, such as
#: the zeros of counts.
MAX_GROUP_FRACTION = 0.1
#: A group of at most this many rows is never too large.
MIN_GROUP_LIMIT = 10


def group_duplicates(x: Tensor) -> Tensor | None:
    """Group rows x (n, dim) float32 that are equal or nearly equal, unless random sampling explains their number.

    Returns a group id (n,) for each row, which is the index of the first row of its group; None if no row has a
    duplicate. A group is one row with its close neighbours, so its rows are at most twice the largest distance apart.
    """
    # A feature is constant if its standard deviation is below this times its RMS.
    max_constant_std = 1e-6
    n = len(x)
    deviation = x.std(dim=0, correction=0)
    varies = deviation > max_constant_std * x.square().mean(dim=0).sqrt()
    if n < 2 or not bool(varies.any()):
        return None
    z = x[:, varies] / (deviation[varies] * int(varies.sum()) ** 0.5)
    _, point, counts = hash_rows(z).unique(return_inverse=True, return_counts=True)  # equal rows are one point
    first = torch.full_like(counts, n).scatter_reduce_(0, point, torch.arange(n), "amin")
    points = z[first]
    pairs, distance = _list_close_pairs(points)
    for near in MAX_DISTANCES:
        group = _group_neighbours(len(points), pairs[:, distance <= near])
        size = torch.zeros_like(counts).index_add_(0, group, counts)[group]
        repeated = (size > 1) & (size <= max(MIN_GROUP_LIMIT, MAX_GROUP_FRACTION * n))
        if not bool(repeated.any()):
            continue
        chosen = repeated.nonzero().flatten()
        by_chance = _is_explained_by_density(points, counts, chosen, near) or _is_discrete(points)
        if not (by_chance if near else _is_equal_by_chance(points, counts, chosen)):
            group = torch.where(repeated, group, torch.arange(len(points)))[point]
            rows = torch.where(repeated[point], group, len(points) + torch.arange(n))
            _, index = rows.unique(return_inverse=True)
            return torch.full((n,), n).scatter_reduce_(0, index, torch.arange(n), "amin")[index]
    return None


def _list_close_pairs(points: Tensor) -> tuple[Tensor, Tensor]:
    """List pairs of points (k, dim) that may be duplicates: indices (2, m) and distances (m,)."""
    # Number of random projections that preselect pairs of rows.
    n_projections = 4
    # Largest distance of a pair along a projection, in units of MAX_DISTANCES[0].
    max_projected_distance = 4.0
    # Number of next rows, in the order of one projection, that a row is compared with.
    n_compared_rows = 16
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(points.shape[1], n_projections, generator=generator, dtype=points.dtype)
    projected = points @ directions
    order = projected[:, 0].argsort(stable=True)
    ordered = projected[order]
    first, second = [order[:0]], [order[:0]]
    for ahead in range(1, min(n_compared_rows, len(points) - 1) + 1):
        apart = (ordered[ahead:] - ordered[:-ahead]).abs().amax(dim=1)
        near = (apart <= max_projected_distance * MAX_DISTANCES[0]).nonzero().flatten()
        first.append(order[near])
        second.append(order[near + ahead])
    pairs = torch.stack([torch.cat(first), torch.cat(second)])
    chunks = pairs.split(MAX_CHUNK_ROWS, dim=1)
    return pairs, torch.cat([torch.linalg.vector_norm(points[one] - points[other], dim=1) for one, other in chunks])


def _group_neighbours(count: int, pairs: Tensor) -> Tensor:
    """Group points around centres, given pairs of neighbours (2, m); return the centre (count,) for each point.

    Source: Luby, "A simple parallel algorithm for the maximal independent set problem" (1986), algorithm B.
    """
    group = torch.arange(count)
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
    return group


#: Maximum number of nearest neighbours from which the density around a row is estimated.
MAX_NEIGHBOURS = 16


def _is_explained_by_density(points: Tensor, counts: Tensor, queries: Tensor, radius: float) -> bool:
    """Test whether the density around the points ``queries`` explains how many rows are within ``radius``.

    The density is taken within half the distance to the next point or more, since values may be on a grid.

    Source: Grassberger and Procaccia, "Measuring the strangeness of strange attractors" (1983), eq. 1.3, within the
        neighbourhood of each row.
    """
    around = _count_neighbours(points, counts, queries, radius, MAX_NEIGHBOURS)
    if not bool(around.next_distances.isfinite().all()):  # nothing to extrapolate from
        return True
    return around.is_explained_by_density((around.next_distances / 2).clamp_min(radius), around.dimension)


#: The close neighbours of a row are due to chance if there are at most this many times the expected number.
MAX_CHANCE_RATIO = 5.0


@dataclass(frozen=True)
class _LocalCounts:
    """The numbers of rows around each of m points, within a small radius and within a larger one."""

    inner_counts: Tensor  #: (m,): number of rows within the small radius.
    next_distances: Tensor  #: (m,): distance to the nearest point beyond the small radius.
    outer_radii: Tensor  #: (m,): the larger radius, which differs between points.
    outer_counts: Tensor  #: (m,): number of rows within the larger radius.
    dimension: float  #: Estimate of the intrinsic dimension of the rows.

    def expected_counts(self, radius: Tensor, dimension: float) -> Tensor:
        """Estimate the expected number (m,) of rows within ``radius`` (m,) from the number within the larger radius."""
        return self.outer_counts * (radius / self.outer_radii).pow(dimension)

    def is_explained_by_density(self, radius: Tensor, dimension: float) -> bool:
        """Test whether the density within ``radius`` (m,) predicts the counts within the smaller radius."""
        # Close pairs are due to chance if this fraction of the rows passes that test.
        explained_fraction = 0.9
        explained = self.inner_counts <= MAX_CHANCE_RATIO * self.expected_counts(radius, dimension)
        return float(explained.double().mean()) >= explained_fraction


#: Maximum number of rows whose neighbours are counted.
MAX_DENSITY_QUERIES = 512
#: Maximum number of computed distances; if necessary, fewer rows are examined.
MAX_PAIRS = 2**24


def _count_neighbours(points: Tensor, counts: Tensor, queries: Tensor, radius: float, n_nearest: int) -> _LocalCounts:
    """Count the rows within ``radius``, and within ``n_nearest`` points beyond it, around the points ``queries``."""
    max_queries = max(1, min(MAX_DENSITY_QUERIES, MAX_PAIRS // len(points)))
    queries = queries[:: -(-len(queries) // max_queries)]
    distance = torch.cdist(points[queries].double(), points.double())  # (m, k)
    distance.scatter_(1, queries[:, None], 0.0)  # without rounding errors
    beyond = distance.masked_fill(distance <= radius, torch.inf)
    radii = beyond.topk(min(n_nearest, len(points)), largest=False).values  # (m, n_nearest), ascending
    last = (radii.isfinite().sum(dim=1, keepdim=True) - 1).clamp_min(0)
    gap, inner, outer = (radii.gather(1, index)[:, 0] for index in (0 * last, last // 2, last))

    def count_within(radius: Tensor) -> Tensor:
        return ((distance <= radius[:, None] * (1 + 1e-6)) * counts).sum(dim=1).double() - 1

    count = count_within(outer)
    spread = float((outer / inner).log().sum())
    dimension = float((count / count_within(inner)).log().sum()) / spread if spread else 0.0
    return _LocalCounts(count_within(torch.full_like(gap, radius)), gap, outer, count, dimension)


def _is_equal_by_chance(points: Tensor, counts: Tensor, repeated: Tensor) -> bool:
    """Test whether chance explains that points (k, dim) occur ``counts`` times, those ``repeated`` more than once."""
    # On a fine grid, rows are equal by chance if their equal pairs are at most this many times the expected number.
    max_equal_pairs_ratio = 2.0
    # The number of these neighbours is at most the number of rows divided by this.
    min_rows_per_neighbour = 8
    # Rows are equal by chance if distinct rows occur this many times on average.
    min_mean_repetitions = 4.0
    # Largest median gap between distinct rows of a discrete table, in grid steps.
    max_discrete_gap = 2.0
    if not _is_poisson_mixture(counts):
        return False
    if int(counts.sum()) >= min_mean_repetitions * len(points):
        return True
    step, distinct = _measure_grid_steps(points)
    has_distinct = bool(distinct.any())
    finest = step[distinct] if has_distinct else step
    finest = finest[finest.isfinite()]
    without_grid = 0.0 if has_distinct else torch.inf
    grid = float(finest.square().mean().sqrt()) if len(finest) else without_grid
    neighbours = min(MAX_NEIGHBOURS, max(2, len(points) // min_rows_per_neighbour))
    everywhere, around = (
        _count_neighbours(points, counts, queries, 0.0, neighbours) for queries in (torch.arange(len(points)), repeated)
    )
    if around.is_explained_by_density(around.next_distances.clamp_max(grid) / 2, everywhere.dimension):
        return True
    gap = float(around.next_distances.median())
    if grid < gap:  # equal rows are where the density is high: count all rows
        radius = everywhere.next_distances.clamp_max(grid) / 2
        expected = float(everywhere.expected_counts(radius, everywhere.dimension).sum())
        if float(everywhere.inner_counts.sum()) <= max_equal_pairs_ratio * expected:
            return True
    return _is_discrete(points) and gap <= max_discrete_gap * float(step.nanmedian())


def _measure_grid_steps(points: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the grid spacing (dim,) of each column, NaN without a grid, and a mask (dim,) of columns without repeats.

    A column is distinct if no two points have the same value in it. The mask shows whether points could be equal by
    chance: real numbers on no grid hardly repeat.
    """
    # Maximum number of grid steps in the smallest gap between two values of a column.
    max_min_gap_steps = 5
    # Gaps of more grid steps are not tested: rounding errors of float32 add up.
    max_grid_steps = 50.0
    # Largest deviation of a gap from an integer number of grid steps, in steps.
    max_grid_error = 0.1
    gaps = points.double().sort(dim=0).values.diff(dim=0)  # (k - 1, dim)
    smallest = gaps.masked_fill(gaps == 0, torch.inf).amin(dim=0)
    step = torch.full_like(smallest, torch.nan)
    for part in range(max_min_gap_steps, 0, -1):  # the smallest gap may be some steps wide
        ratio = gaps * part / smallest
        error = torch.where(ratio < max_grid_steps, ratio - ratio.round(), 0.0).abs().amax(dim=0)
        step = torch.where(error < max_grid_error, smallest / part, step)
    return step, (gaps > 0).all(dim=0)


def _is_discrete(points: Tensor) -> bool:
    """Test whether in every column most of the points (k, dim) have the same value as another point."""
    # A table is discrete if in each column this fraction of the distinct rows shares its value with another row.
    min_discrete_fraction = 0.5
    for column in points.T:
        _, counts = column.unique(return_counts=True)
        if int(counts[counts > 1].sum()) < min_discrete_fraction * len(points):
            return False
    return True


def _is_poisson_mixture(counts: Tensor) -> bool:
    """Test whether the repetition counts (k,) of points may come from a mixture of Poisson distributions."""
    # Added to the histogram of numbers of repetitions in `_is_poisson_mixture`.
    pseudo_count = 3.0
    occurring = counts.bincount(minlength=2)[1:].double()  # index 0: values that occur once
    occurring = torch.cat([occurring, occurring.new_zeros(1)])
    k = torch.arange(2, len(occurring))
    before, here, after = occurring[:-2], occurring[1:-1], occurring[2:]
    before, after = before + pseudo_count, after + pseudo_count
    upper = MAX_CHANCE_RATIO * (k + 1) / k * before * after
    return bool((here.square() <= upper).all())


def locate_equal_rows(x: Tensor, references: Tensor, origin: Tensor) -> Tensor:
    """Look up each row of x (n, dim) in ``references`` (m, dim), where equality is up to rounding.

    Returns the index (n,) of an equal row, -1 if there is none. Reference rows were stored in float32 after the
    origin (dim,) was subtracted. A row is compared with its two neighbours along a random direction.
    """
    # Relative rounding error of rows that were saved in a model file and read again.
    rounding_error = 1e-6
    if not len(references):
        return torch.full((len(x),), -1)
    x, references = x.double() - origin, references.double() - origin
    deviation = references.std(dim=0, correction=0)
    direction = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    direction = torch.where(deviation > 0, direction / deviation, 0.0)
    projections, order = (references @ direction).sort()
    above = torch.searchsorted(projections, x @ direction)
    matches = torch.full_like(above, -1)
    for step in (-1, 0):
        rows = order[(above + step).clamp(0, len(references) - 1)]
        equal = torch.isclose(x, references[rows], rtol=rounding_error, atol=0).all(dim=1)
        matches = torch.where(equal, rows, matches)
    return matches


def hash_rows(x: Tensor) -> Tensor:
    """Compute a hash (n,) int64 of each row of x (n, dim); a million rows have a collision with probability 10^-7.

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
    """Merge equal rows of one class and one group into one weighted row, and put duplicates into one group.

    The rows must be sorted by class, with equal rows adjacent. Returns four parts: the merged rows; the number of rows
    with an earlier duplicate; the new id (groups,) of each input group, None if the rows have no groups; and for each
    input row its index (n,) among the merged rows.
    """
    duplicates, groups = group_duplicates(rows.for_views().features), rows.groups
    group_ids = None if groups is None else torch.arange(int(groups.max()) + 1)
    if duplicates is None:
        return rows, 0, group_ids, torch.arange(len(rows.labels))
    n = len(duplicates)
    repeated = n - len(duplicates.unique())
    if groups is not None and group_ids is not None:
        first = torch.full_like(group_ids, n).scatter_reduce_(0, groups, torch.arange(n), "amin")
        duplicates = _join_groups_with_duplicates(first[groups], duplicates)
        group_ids = duplicates[first]
    same = (rows.features[1:] == rows.features[:-1]).all(dim=1) & (rows.labels[1:] == rows.labels[:-1])
    same &= duplicates[1:] == duplicates[:-1]
    if rows.is_class_name is not None:
        same &= rows.is_class_name[1:] == rows.is_class_name[:-1]
    new = torch.cat([torch.tensor([True]), ~same])
    indices = new.cumsum(dim=0) - 1
    weights = torch.bincount(indices, rows.weights).to(torch.float64)
    rows = replace(rows, groups=duplicates).select(new)
    if groups is None and len(duplicates.unique()) == len(rows.labels):  # every duplicate was merged
        rows = replace(rows, groups=None)
    return replace(rows, weights=weights), repeated, group_ids, indices


def _join_groups_with_duplicates(groups: Tensor, duplicates: Tensor) -> Tensor:
    """Join groups with common duplicates, given both ids of each row (n,); too large joined groups are not joined."""
    n, joined = len(groups), groups
    while True:
        before = joined
        for ids in (duplicates, groups):
            joined = torch.full((n,), n).scatter_reduce_(0, ids, joined, "amin")[ids]
        if torch.equal(joined, before):
            break
    limit = min(2 * int(groups.bincount().max()), n / 2)
    max_size = max(MIN_GROUP_LIMIT, MAX_GROUP_FRACTION * n, limit)
    return torch.where(joined.bincount(minlength=n)[joined] <= max_size, joined, groups)


#: Near-duplicates are reported if at least this fraction of the rows has some.
MIN_NEAR_DUPLICATE_FRACTION = 1 / 3


def describe_near_duplicates(rows: TrainingRows, remedy: str) -> str | None:
    """Format a note that many rows have near-duplicates, with the option ``remedy``; None if few rows have some."""
    fraction = near_duplicate_fraction(rows)
    if fraction < MIN_NEAR_DUPLICATE_FRACTION:
        return None
    text = f"{100 * fraction:.0f} % of rows have near-duplicates in their class; if these have a common source, "
    return f"{text}pass its column with {remedy}"


#: Minimum number of examined rows; with fewer, nothing is reported.
MIN_EXAMINED_ROWS = 30
#: Maximum number of examined rows, evenly spaced.
MAX_EXAMINED_ROWS = 512


def near_duplicate_fraction(rows: TrainingRows) -> float:
    """Estimate the fraction of rows that have near-duplicates; 0 if rows are no more similar than by chance.

    In a smooth density, (d_k / d_(k + 1))^(k D) is uniform in [0, 1], where d_k is the distance to the k-th neighbour
    and D the intrinsic dimension. A row has near-duplicates if this number is improbably small for some k. Rows of one
    group are not neighbours, since they are held out together.

    Source: Facco, d'Errico, Rodriguez and Laio, "Estimating the intrinsic dimension of datasets by a minimal
        neighborhood information" (2017), eq. 3, for all k; the dimension after Levina and Bickel, "Maximum likelihood
        estimation of intrinsic dimension" (2004), eq. 8.
    """
    # Maximum numbers of near-duplicates of a row, in the order in which they are tried. For each number, the intrinsic
    # dimension is estimated from as many further neighbours.
    max_neighbours = (5, 10, 20)
    # Maximum number of computed distances; if necessary, fewer rows are examined.
    max_pairs = 2**27
    n, fraction = len(rows.labels), 0.0
    scales = [scale for scale in max_neighbours if 2 * scale < n]
    same_class = not bool((rows.labels != rows.labels[0]).any())  # clusters of one class are no evidence
    if not scales or same_class or not bool((rows.features[1:] != rows.features[:-1]).any()):
        return fraction
    count = max(MIN_EXAMINED_ROWS, min(MAX_EXAMINED_ROWS, max_pairs // n))
    queries = torch.arange(0, n, -(-n // count))
    distance, nearest = _nearest_neighbours(rows, queries, 2 * scales[-1])
    for scale in scales:
        neighbours = distance[:, : 2 * scale], nearest[:, : 2 * scale]
        fraction = max(fraction, _estimate_near_duplicate_fraction(rows, queries, *neighbours, scale))
        if fraction >= MIN_NEAR_DUPLICATE_FRACTION:
            break
    return fraction


#: Largest fraction of its class that a row and its near-duplicates may be.
MAX_CLASS_FRACTION = 0.5


def _estimate_near_duplicate_fraction(
    rows: TrainingRows, queries: Tensor, distance: Tensor, nearest: Tensor, max_neighbours: int
) -> float:
    """Estimate the fraction of rows ``queries`` (m,) with near-duplicates, from their ``nearest`` rows (m, k)."""
    # False-positive rate: fraction of the rows of a smooth density that seem to have near-duplicates.
    false_positive_rate = 0.05
    # Maximum number of rows with a near-duplicate of another class, as a fraction of the number expected by chance.
    # Copies of a row have its class; a natural cluster has rows of all classes.
    max_other_class_ratio = 0.25
    # Largest fraction of the distances to neighbours that may equal the next distance of the same row. If more are
    # equal, values are discrete, and nothing is reported.
    max_tied_distances = 0.1
    n, everywhere = len(rows.labels), queries
    sound = distance[:, -1].isfinite() & (distance[:, 0] > 0)
    distance, nearest, queries = distance[sound], nearest[sound], queries[sound]
    steps = (distance[:, 1:] / distance[:, :-1]).log()  # (queries, neighbours - 1)
    if len(queries) < MIN_EXAMINED_ROWS or float((steps == 0).double().mean()) > max_tied_distances:
        return 0.0
    k = torch.arange(1, 2 * max_neighbours)
    dimension = 1 / (steps * k)[:, max_neighbours:].mean()
    chance, index = (-steps * k * dimension).exp()[:, :max_neighbours].min(dim=1)
    n_near = index + 1  # near-duplicates of a row, if it has some
    labels = rows.labels[queries]
    class_fractions = torch.bincount(rows.labels).double()[labels] / n
    small = n_near + 1 <= MAX_CLASS_FRACTION * class_fractions * n
    has_duplicates = small & (chance * max_neighbours < false_positive_rate)
    other = rows.labels[nearest] != labels[:, None]  # (queries, neighbours)
    mixed = other.cumsum(dim=1).gather(1, index[:, None])[:, 0] > 0
    expected = float((1 - class_fractions[has_duplicates].pow(n_near[has_duplicates])).sum())
    if float(mixed[has_duplicates].sum()) > max_other_class_ratio * expected:
        has_duplicates &= False
    has_duplicates &= ~mixed
    fraction = float(has_duplicates.double().mean())
    near = has_duplicates[:, None] & (torch.arange(max_neighbours) <= index[:, None])  # (queries, max_neighbours)
    if fraction < MIN_NEAR_DUPLICATE_FRACTION:
        fraction, near = _estimate_fraction_by_gap(steps * k * dimension, ~other, class_fractions * n, max_neighbours)
    if fraction < MIN_NEAR_DUPLICATE_FRACTION:
        return fraction
    tied = _detect_tied_features(rows, queries[near.nonzero()[:, 0]], nearest[:, :max_neighbours][near])
    if not bool(tied.any()):
        return fraction
    blocks = None if rows.column_indices is None else rows.column_indices[~tied]
    rows = replace(rows, features=rows.features[:, ~tied], column_indices=blocks)
    if not bool((rows.features[1:] != rows.features[:-1]).any()):
        return 0.0
    neighbours = _nearest_neighbours(rows, everywhere, 2 * max_neighbours)
    return _estimate_near_duplicate_fraction(rows, everywhere, *neighbours, max_neighbours)


def _estimate_fraction_by_gap(gaps: Tensor, same: Tensor, sizes: Tensor, max_neighbours: int) -> tuple[float, Tensor]:
    """Estimate the fraction of rows with near-duplicates, if all have equally many; also return a mask of these."""
    # Minimum mean gap between near-duplicates and other rows, in units of a chance gap.
    min_gap_ratio = 1.5
    # Significance of gap and class agreement in `_estimate_fraction_by_gap`.
    min_standard_errors = 3.0
    n_near = 1 + int(gaps[:, :max_neighbours].mean(dim=0).argmax())
    eligible = n_near + 1 <= MAX_CLASS_FRACTION * sizes
    near = eligible[:, None] & same[:, :max_neighbours] & (torch.arange(max_neighbours) < n_near)
    count = int(eligible.sum())
    if count < MIN_EXAMINED_ROWS:
        return 0.0, near
    gap = float(gaps[eligible, n_near - 1].mean())
    inside, outside = (float(part[eligible].double().mean()) for part in (same[:, :n_near], same[:, n_near:]))
    wide = gap > max(min_gap_ratio, 1 + min_standard_errors / count**0.5)
    agree = inside - outside > min_standard_errors * (outside * (1 - outside) / count) ** 0.5
    return (inside - outside) / (1 - outside) if wide and agree else 0.0, near


def _detect_tied_features(rows: TrainingRows, first: Tensor, second: Tensor) -> Tensor:
    """Compute a mask (dim,) of the features of columns in which too many pairs of rows (pairs,) are equal."""
    # Largest fraction of the near-duplicate pairs that may be equal in a column. Rows of one date, for instance, need
    # not have one source. Columns with more equal pairs are removed, and the detection runs again.
    max_equal_cells = 0.5
    dim = rows.features.shape[1]
    blocks = torch.arange(dim) if rows.column_indices is None else rows.column_indices.unique(return_inverse=True)[1]
    differs = (rows.features[first] != rows.features[second]).float()
    differing = torch.zeros(len(first), int(blocks.max()) + 1).index_add_(1, blocks, differs) > 0
    return ((~differing).sum(dim=0) > max_equal_cells * len(first))[blocks]


def _nearest_neighbours(rows: TrainingRows, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute distances and indices, both (m, count), of the rows of other groups nearest to the rows ``queries``."""
    # Maximum number of distances in memory at once.
    max_distances_in_memory = 2**24
    deviation = rows.features.std(dim=0, correction=0)
    z = rows.features[:, deviation > 0] / deviation[deviation > 0]
    groups = torch.arange(len(z)) if rows.groups is None else rows.groups
    neighbours = [
        torch.cdist(z[some], z).masked_fill_(groups[some, None] == groups, torch.inf).topk(count, largest=False)
        for some in queries.split(max(1, max_distances_in_memory // len(z)))
    ]
    return torch.cat([part.values for part in neighbours]).double(), torch.cat([part.indices for part in neighbours])
