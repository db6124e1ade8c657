"""Training episodes of the tabular transformer: tables of one size with labelled and new rows, encoded as cells.

Tables are synthetic here: a family samples numbers (tables, rows, columns) and classes (tables, rows), given the number
of classes of each table. The numbers are then converted to columns of mixed types.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.views.tabular_transformer import MAX_ABS_Z_SCORE, N_NUMERIC_CHANNELS, RANK_SCALE
from protonet.views.transformer import N_CELL_CHANNELS, N_CLASS_CODES

#: Numbers of activation functions and of waves in a smooth function; depth of a tree, modes of a class, regions.
N_ACTIVATIONS, N_SMOOTH_WAVES, MAX_TREE_DEPTH, MAX_CLASS_MODES, MAX_REGIONS = 9, 48, 6, 8, 32

SampledTables = tuple[Tensor, Tensor]  #: Values (tables, rows, columns) and classes (tables, rows).
#: Samples tables: (generator, tables, rows, columns, classes of each table).
TableGenerator = Callable[[torch.Generator, int, int, int, Tensor], SampledTables]
MAX_CATEGORY_LEVELS = 12  #: Maximal number of levels of a category.
N_REPEATED_ROWS = 4  #: New rows that repeat labelled rows, so that the transformer learns to copy their class.


def sample_tables(generator: torch.Generator, tables: int, rows: int, columns: int, max_classes: int) -> SampledTables:
    """Generate synthetic tables: values (tables, rows, columns) and 2 to ``max_classes`` classes (tables, rows)."""
    drawn = torch.randint(len(TABLE_FAMILIES), (tables,), generator=generator)
    values, classes = [], []
    counts = torch.bincount(drawn, minlength=len(TABLE_FAMILIES)).tolist()
    for family, count in zip(TABLE_FAMILIES, counts, strict=True):
        if not count:
            continue
        more = 2 + (_uniform(generator, count) * (max_classes - 1)).long()
        n_classes = torch.where(_uniform(generator, count) < 0.4, 2, more).clamp_max(max_classes)
        x, y = family(generator, count, rows, columns, n_classes)
        corrupted = _corrupt_tables(generator, torch.nan_to_num(x), y, n_classes)
        values.append(corrupted[0])
        classes.append(corrupted[1])
    return torch.cat(values), torch.cat(classes)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    """Sample numbers from [0, 1)."""
    return torch.rand(shape, generator=generator)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Sample standard normal numbers."""
    return torch.randn(shape, generator=generator)


def _integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    """Sample integers from [0, high)."""
    return torch.randint(high, shape, generator=generator)


def _sample_classes(generator: torch.Generator, n_classes: Tensor, *shape: int) -> Tensor:
    """Sample classes (tables, *shape) uniformly over the classes of each table."""
    drawn = _integers(generator, 2**20, len(n_classes), *shape)
    return drawn % n_classes.view(-1, *[1] * len(shape))


def _standardise(z: Tensor) -> Tensor:
    """Standardize each column of ``z`` (tables, rows, columns) over the rows of its table."""
    z = z - z.mean(dim=1, keepdim=True)
    return z / (z.std(dim=1, keepdim=True) + 1e-6)


def _rank(z: Tensor) -> Tensor:
    """Compute the ranks of rows, from 0, in each column of ``z`` (tables, rows, columns)."""
    return z.argsort(dim=1).argsort(dim=1)


def _activate_columns(z: Tensor, function_index: Tensor) -> Tensor:
    """Apply an activation function to each column, given its index; 0 is the identity."""
    curves = (torch.tanh(z), z.clamp_min(0), torch.sin(2 * z), z.abs(), z.square().clamp_max(9), (z > 0).float())
    bent = z
    for index, curve in enumerate((*curves, z.clamp(-4, 3).exp(), torch.exp(-z.square())), 1):
        bent = torch.where(function_index == index, curve, bent)
    return bent


def _sample_root_variables(generator: torch.Generator, tables: int, rows: int, columns: int) -> Tensor:
    """Sample root variables of causal models (tables, rows, columns): normal, uniform, heavy-tailed or clustered."""
    shape = (tables, rows, columns)
    z = _normal(generator, *shape)
    kind = _integers(generator, 5, tables, 1, columns)
    centres, cluster = 2 * _normal(generator, tables, columns, 4), _integers(generator, 4, *shape)
    clustered = centres.gather(2, cluster.transpose(1, 2)).transpose(1, 2) + 0.4 * z
    chi = sum(_normal(generator, *shape).square() for _ in range(3)) / 3
    drawn = torch.where(kind == 1, 3.4 * _uniform(generator, *shape) - 1.7, z)
    drawn = torch.where(kind == 2, z / torch.as_tensor(chi).sqrt().clamp_min(0.2), drawn)
    return torch.where(kind == 3, clustered, drawn)


def _bin_scores(generator: torch.Generator, score: Tensor, n_classes: Tensor, is_balanced: Tensor) -> Tensor:
    """Bin scores (tables, rows) into classes at random thresholds; ``is_balanced`` tables have similar frequencies."""
    weight = -_uniform(generator, len(score), N_CLASS_CODES).clamp_min(1e-9).log()
    weight = torch.where(is_balanced[:, None], 1 + 0.2 * weight, 0.5 + weight)
    weight = weight * (torch.arange(N_CLASS_CODES) < n_classes[:, None])
    thresholds = (weight.cumsum(1) / weight.sum(dim=1, keepdim=True))[:, :-1]
    classes = (_rank(score)[:, :, None] / score.shape[1] >= thresholds[:, None]).sum(dim=2)
    return torch.minimum(classes, (n_classes - 1)[:, None])


def _make_causal_tables(
    generator: torch.Generator, tables: int, rows: int, columns: int, n_classes: Tensor
) -> SampledTables:
    """Generate tables by a structural causal model, whose nodes become columns; one or more nodes give the class."""
    width, wild = max(columns + 4, 12), 0.8 * _uniform(generator, tables, 1, 1)
    z = _sample_root_variables(generator, tables, rows, 2 + int(_integers(generator, max(2, width // 3) - 1, 1)) + 1)
    layers = []
    for _ in range(int(_integers(generator, 3, 1)) + 2):
        shape = (tables, z.shape[2], width)
        weight, uniform = _normal(generator, *shape), _uniform(generator, *shape)
        weight = weight * (uniform < 0.15 * math.exp(math.log(1 / 0.15) * float(_uniform(generator, 1))))
        weight = weight / (weight.square().sum(dim=1, keepdim=True).sqrt() + 0.3)
        tame = _integers(generator, 3, tables, 1, width)
        any_kind = _integers(generator, N_ACTIVATIONS, tables, 1, width)
        kind = torch.where(_uniform(generator, tables, 1, width) < wild, any_kind, tame)
        shift = 0.5 * wild * _normal(generator, tables, 1, width)
        z = _standardise(_activate_columns(_standardise(z @ weight) + shift, kind))
        noise = 0.35 * _uniform(generator, tables, 1, width) * _uniform(generator, tables, 1, 1)
        layers.append(z := z + noise * _normal(generator, tables, rows, width))
    nodes = torch.cat(layers, dim=2)
    order = _uniform(generator, tables, nodes.shape[2]).argsort(dim=1)[:, None].expand(nodes.shape)
    nodes = nodes.gather(2, order)
    x, others = nodes[:, :, :columns], nodes[:, :, columns:]
    score = others[:, :, 0] + others[:, :, 1] * (_uniform(generator, tables, 1) < 0.5)
    rivals = _standardise(others[:, :, 1 : 1 + N_CLASS_CODES])
    absent = torch.arange(rivals.shape[2]) >= n_classes[:, None, None]
    largest = rivals.masked_fill(absent, -9.0).argmax(dim=2)
    one = (_uniform(generator, tables) < 0.75) | (n_classes > rivals.shape[2])
    is_balanced = _uniform(generator, tables) < 0.7
    return x, torch.where(one[:, None], _bin_scores(generator, score, n_classes, is_balanced), largest)


def _make_class_conditional_tables(
    generator: torch.Generator, tables: int, rows: int, columns: int, n_classes: Tensor
) -> SampledTables:
    """Generate columns given the class, with different locations and scales; some classes have several modes."""
    y = _sample_classes(generator, n_classes, rows)
    cumulative = _uniform(generator, tables, N_CLASS_CODES) * (torch.arange(N_CLASS_CODES) < n_classes[:, None])
    cumulative = (cumulative / cumulative.sum(dim=1, keepdim=True)).cumsum(1)
    skewed = (_uniform(generator, tables, rows)[:, :, None] > cumulative[:, None]).sum(dim=2)
    uneven = _uniform(generator, tables, 1) < 0.4
    y = torch.where(uneven, torch.minimum(skewed, (n_classes - 1)[:, None]), y)
    modes = 1 + (_integers(generator, MAX_CLASS_MODES, tables, 1) * (_uniform(generator, tables, 1) < 0.35))
    component = MAX_CLASS_MODES * y + _integers(generator, 2**20, tables, rows) % modes
    component = component[:, :, None].expand(tables, rows, columns)
    useful = (_uniform(generator, tables, 1, columns) < _uniform(generator, tables, 1, 1) ** 0.7).float()
    strength = torch.exp(0.7 * _normal(generator, tables, 1, columns)) * (0.5 + 2 * _uniform(generator, tables, 1, 1))
    mean = _normal(generator, tables, MAX_CLASS_MODES * N_CLASS_CODES, columns) * useful * strength
    differs = useful * (_uniform(generator, tables, 1, 1) < 0.4)
    wider = useful * (_uniform(generator, tables, 1, 1) < 0.2)  # a class is wider than another in all columns: a ring
    mean = mean * torch.where(wider.bool() & (_uniform(generator, tables, 1, 1) < 0.7), 0.2, 1.0)
    logarithm = differs * _normal(generator, tables, MAX_CLASS_MODES * N_CLASS_CODES, columns)
    spread = torch.exp(0.7 * (logarithm + wider * _normal(generator, tables, MAX_CLASS_MODES * N_CLASS_CODES, 1)))
    turn = _normal(generator, tables, columns, columns) * 1.5 / math.sqrt(columns)
    turn = turn * _uniform(generator, tables, 1, 1) * (_uniform(generator, tables, 1, 1) < 0.5)
    noise = _sample_root_variables(generator, tables, rows, columns) @ (torch.eye(columns) + turn)
    return mean.gather(1, component) + spread.gather(1, component) * noise, y


def _make_threshold_tables(
    generator: torch.Generator, tables: int, rows: int, columns: int, n_classes: Tensor
) -> SampledTables:
    """Generate classes from thresholds on a few columns: by the box that they form, or by a weighted sum over them."""
    x = _sample_root_variables(generator, tables, rows, columns)
    turn = 0.4 * _normal(generator, tables, columns, columns) * (_uniform(generator, tables, 1, 1) < 0.4)
    x = x @ (torch.eye(columns) + turn)
    used = (1 + _integers(generator, 3, tables)).clamp_max(columns)
    order = _uniform(generator, tables, columns).argsort(dim=1)
    column = order.gather(1, _sample_classes(generator, used, MAX_TREE_DEPTH))
    value = x.gather(2, column[:, None].expand(tables, rows, MAX_TREE_DEPTH))
    threshold = ((0.2 + 0.6 * _uniform(generator, tables, 1, MAX_TREE_DEPTH)) * (rows - 1)).long()
    above = value > value.sort(dim=1).values.gather(1, threshold)
    depth = 1 + torch.minimum(*(_integers(generator, MAX_TREE_DEPTH, tables) for _ in range(2)))
    above = above & (torch.arange(MAX_TREE_DEPTH) < depth[:, None])[:, None]
    box = (above * 2 ** torch.arange(MAX_TREE_DEPTH)).sum(dim=2)
    decided = _sample_classes(generator, n_classes, 2**MAX_TREE_DEPTH).gather(1, box)
    score = (above * _normal(generator, tables, 1, MAX_TREE_DEPTH)).sum(dim=2) + 0.1 * _normal(generator, tables, rows)
    summed = _bin_scores(generator, score, n_classes, _uniform(generator, tables) < 0.7)
    return x, torch.where(_uniform(generator, tables, 1) < 0.6, decided, summed)


def _make_smooth_tables(
    generator: torch.Generator, tables: int, rows: int, columns: int, n_classes: Tensor
) -> SampledTables:
    """Generate classes as the argmax of smooth or linear functions of a few columns, or of projections of columns."""
    x, inner = _sample_root_variables(generator, tables, rows, columns), min(columns, 6)
    dense = _normal(generator, tables, columns, inner)
    dense = dense * (_uniform(generator, tables, columns, 1) < 0.1 + 0.9 * _uniform(generator, tables, 1, 1))
    chosen = _uniform(generator, tables, columns).argsort(dim=1)[:, None, :inner]
    single = torch.zeros(tables, columns, inner).scatter_(1, chosen, 1.0) * _normal(generator, tables, 1, inner)
    use = torch.where(_uniform(generator, tables, 1, 1) < 0.5, dense, single)
    z = _standardise(x @ use) * (_uniform(generator, tables, 1, inner) < 0.45)
    rate = _normal(generator, tables, inner, N_SMOOTH_WAVES) * (0.1 + 0.9 * _uniform(generator, tables, 1, 1))
    waves = torch.cos(z @ rate + 6.3 * _uniform(generator, tables, 1, N_SMOOTH_WAVES))
    smooth = waves @ _normal(generator, tables, N_SMOOTH_WAVES, N_CLASS_CODES)
    linear = z @ _normal(generator, tables, inner, N_CLASS_CODES) + 0.5 * _normal(generator, tables, 1, N_CLASS_CODES)
    score = torch.where(_uniform(generator, tables, 1, 1) < 0.5, smooth, linear)
    return x, score.masked_fill(torch.arange(N_CLASS_CODES) >= n_classes[:, None, None], -99.0).argmax(dim=2)


def _make_interaction_tables(
    generator: torch.Generator, tables: int, rows: int, columns: int, n_classes: Tensor
) -> SampledTables:
    """Generate classes from interactions of two or three columns: order, ratio, product, radius, or categories."""
    x = _sample_root_variables(generator, tables, rows, columns)
    order = _uniform(generator, tables, columns).argsort(dim=1)
    triples = order[:, [position % columns for position in range(3)]][:, None].expand(tables, rows, 3)
    a, b, c = x.gather(2, triples).unbind(2)
    ways = (a - b, a * b, a / (b.abs() + 0.2), (a - b).abs(), torch.maximum(a, b), a * b.sign())
    more = ((a.round() - b.round()).abs(), torch.where(c > 0, a, b), a + b, a.abs())
    radial = (a.square() + b.square() + c.square(), torch.atan2(a, b), a.sign() * b.sign() * c)
    scores = torch.stack([*ways, *more, *radial], dim=1)
    score = scores[torch.arange(tables), _integers(generator, scores.shape[1], tables)]
    noisy = score + 0.05 * _normal(generator, tables, rows)
    cut = _bin_scores(generator, noisy, n_classes, _uniform(generator, tables) < 0.6)
    levels = 2 + _integers(generator, 3, tables, 1)
    first, second = (_rank(z) * levels // rows for z in (a, b))
    third = (_rank(c) * 2 // rows) * (_uniform(generator, tables, 1) < 0.5)
    decided = _sample_classes(generator, n_classes, 64).gather(1, (first * 4 + second) * 2 + third)
    return x, torch.where(_uniform(generator, tables, 1) < 0.6, cut, decided)


def _make_region_tables(
    generator: torch.Generator, tables: int, rows: int, columns: int, n_classes: Tensor
) -> SampledTables:
    """Generate classes that are regions: a row has the class of the nearest centre, by distance in 1 to 4 columns."""
    x = _sample_root_variables(generator, tables, rows, columns)
    used = (_uniform(generator, tables, columns).argsort(dim=1) <= _integers(generator, 4, tables, 1)).float()[:, None]
    regions = min(rows, MAX_REGIONS)
    distance = torch.cdist(x * used, x[:, :regions] * used)
    absent = torch.arange(regions) > 2 + _integers(generator, MAX_REGIONS, tables, 1)
    nearest = distance.masked_fill(absent[:, None], math.inf).argmin(dim=2)
    return x, _sample_classes(generator, n_classes, regions).gather(1, nearest)


#: Generators of synthetic tables; the probability of each is proportional to how often it is listed.
TABLE_FAMILIES: tuple[TableGenerator, ...] = (
    *(_make_causal_tables, _make_class_conditional_tables) * 2,
    *(
        _make_class_conditional_tables,
        _make_threshold_tables,
        _make_smooth_tables,
        _make_interaction_tables,
        _make_region_tables,
    ),
)


def _corrupt_tables(generator: torch.Generator, x: Tensor, y: Tensor, n_classes: Tensor) -> tuple[Tensor, Tensor]:
    """Corrupt tables like real data: noise columns, copied columns, skewed scales, measurement noise, wrong labels."""
    tables, rows, columns = x.shape
    x = _standardise(x)
    some = _uniform(generator, tables, 1) < 0.35
    noise = _uniform(generator, tables, columns) < 0.6 * _uniform(generator, tables, 1) * some
    shuffled = x.gather(1, _uniform(generator, tables, rows).argsort(dim=1)[:, :, None].expand(x.shape))
    x = torch.where(noise[:, None], shuffled, x)
    copied = _uniform(generator, tables, columns) < 0.15 * (_uniform(generator, tables, 1) < 0.3)
    source = _integers(generator, columns, tables, columns)[:, None].expand(x.shape)
    x = torch.where(copied[:, None], x.gather(2, source) + 0.1 * _normal(generator, *x.shape), x)
    kind = _integers(generator, 5, tables, 1, columns) + 1
    kind = kind * (_uniform(generator, tables, 1, columns) < 0.5 * _uniform(generator, tables, 1, 1))
    tail = (x.clamp(-4, 4) * (0.3 + 1.5 * _uniform(generator, tables, 1, 1))).exp()
    bent = x
    curves = (tail, x**3, torch.tanh(2 * x), x.clamp_min(-0.3), x.sign() * x.abs().sqrt())
    for index, curve in enumerate(curves, 1):
        bent = torch.where(kind == index, curve, bent)
    loud = 0.4 * _uniform(generator, tables, 1, columns) * _uniform(generator, tables, 1, 1) ** 2
    rate = 0.25 * _uniform(generator, tables, 1) ** 2 * (_uniform(generator, tables, 1) < 0.3)
    wrong = _uniform(generator, tables, rows) < rate
    y = torch.where(wrong, _sample_classes(generator, n_classes, rows), y)
    return _standardise(bent) + loud * _normal(generator, *x.shape), y


class ColumnBatch(NamedTuple):
    """Numeric and categorical columns of several tables, with masks of missing and categorical cells."""

    values: Tensor  #: (tables, rows, columns) float32: the numbers, with missing values filled in.
    is_missing: Tensor  #: (tables, rows, columns) bool: whether a value is missing.
    is_category: Tensor  #: (tables, 1, columns) bool: whether the column is categorical.
    level: Tensor  #: (tables, rows, columns) int64 < MAX_CATEGORY_LEVELS: the levels of categories.


class Episodes(NamedTuple):
    """A batch of tables of the same size, whose first rows are labelled; the other rows are to be classified."""

    cells: Tensor  #: (tables, rows, columns, N_CELL_CHANNELS).
    classes: Tensor  #: (tables, rows) int64 < N_CLASS_CODES.
    is_class_labelled: Tensor  #: (tables, rows) bool: whether some labelled row has the class of the row.


def sample_episodes(
    generator: torch.Generator, tables: int, n_labelled: int, n_new: int, columns: int, min_class_rows: int
) -> Episodes:
    """Sample episodes of synthetic tables, with at least ``min_class_rows`` labelled rows per class on average."""
    rows = 2 * n_labelled + n_new
    max_classes = min(N_CLASS_CODES, max(2, n_labelled // min_class_rows))
    x, y = sample_tables(generator, tables, rows, columns, max_classes)
    counts = F.one_hot(y, N_CLASS_CODES).sum(dim=1).float()
    balanced = torch.rand(tables, 1, generator=generator) < 0.65  # classes are balanced, or as frequent as in the table
    chosen = torch.multinomial(torch.where(balanced, 1 / counts.gather(1, y), 1.0), n_labelled, generator=generator)
    others = torch.ones(tables, rows).scatter_(1, chosen, 0.0)
    new_rows = torch.multinomial(others, n_new - N_REPEATED_ROWS, generator=generator)
    again = chosen[:, torch.randint(n_labelled, (N_REPEATED_ROWS,), generator=generator)]
    order = torch.cat([chosen, new_rows, again], dim=1)
    x = x.gather(1, order[:, :, None].expand(*order.shape, columns))
    names = torch.rand(tables, N_CLASS_CODES, generator=generator).argsort(dim=1)
    columns_of_tables = _mix_column_types(generator, x, n_labelled)
    return encode_cells(generator, columns_of_tables, names.gather(1, y.gather(1, order)), n_labelled)


def _mix_column_types(generator: torch.Generator, x: Tensor, n_labelled: int) -> ColumnBatch:
    """Convert numbers (tables, rows, columns) to columns of mixed types, some rounded, binary or with gaps."""
    tables, rows, columns = x.shape
    uniform = functools.partial(_uniform, generator)
    one, per_column = (tables, 1, 1), (tables, 1, columns)
    plain = uniform(*per_column) > uniform(*one) * (uniform(*one) < 0.6)
    sort, few = uniform(*per_column), uniform(*per_column)
    rank = x.argsort(dim=1).argsort(dim=1) / rows
    several = torch.randint(2, MAX_CATEGORY_LEVELS + 1, per_column, generator=generator)
    levels = torch.where(uniform(*per_column) < 0.5, 2, several)
    level = torch.floor(rank ** (0.4 + 1.6 * few) * levels)
    is_category, steps, binary = ~plain & (sort < 0.55), ~plain & (sort >= 0.55) & (sort < 0.8), ~plain & (sort >= 0.8)
    two = is_category & (levels == 2)
    values = torch.where(steps, torch.where(few < 0.5, level, torch.floor(x * (1 + 2 * few))), x)
    values = torch.where(binary, (rank > 0.1 + 0.8 * few).float(), torch.where(two, level, values))
    is_category = is_category & ~two
    gaps = (uniform(*per_column) < 0.6 * uniform(*one)) & (uniform(*one) < 0.35) & ~is_category
    reason = torch.randn(x.shape, generator=generator)  # gaps may depend on the value
    reason = reason + x * torch.randn(per_column, generator=generator) * (uniform(*per_column) < 0.5)
    is_missing = gaps & (reason > 0.3 + 1.8 * uniform(*per_column))
    values = torch.where(is_missing, values[:, :n_labelled].median(dim=1, keepdim=True).values, values)
    return ColumnBatch(values, is_missing, is_category, level.long().clamp(0, MAX_CATEGORY_LEVELS - 1))


def encode_cells(generator: torch.Generator, columns: ColumnBatch, classes: Tensor, n_labelled: int) -> Episodes:
    """Encode cells like `protonet.views.tabular_transformer.CellEncoder`, for several tables, with random codes."""
    values, is_missing, is_category, level = columns
    shape = (len(values), values.shape[2], MAX_CATEGORY_LEVELS, N_CELL_CHANNELS - N_NUMERIC_CHANNELS)
    codes = torch.randn(shape, generator=generator)
    fraction = F.one_hot(level[:, :n_labelled], MAX_CATEGORY_LEVELS).float().mean(dim=1)  # (tables, columns, levels)
    spread = (fraction * (1 - fraction)).sum(dim=2).clamp_min(1e-4).sqrt()[..., None, None]
    codes = (codes - (fraction[..., None] * codes).sum(dim=2, keepdim=True)) / spread
    chosen = level.transpose(1, 2)[..., None].expand(*level.transpose(1, 2).shape, N_CELL_CHANNELS - N_NUMERIC_CHANNELS)
    encoded = codes.gather(2, chosen).transpose(1, 2)
    ranks = RANK_SCALE * _rank_among_labelled(values, n_labelled)
    scaled, missing = _scale_columns(values, n_labelled), _scale_columns(is_missing.float(), n_labelled)
    numeric = torch.stack([scaled, ranks, missing], dim=3)
    numeric, encoded = numeric.masked_fill(is_category[..., None], 0), encoded.masked_fill(~is_category[..., None], 0)
    is_class_labelled = mask_labelled_classes(classes, n_labelled).gather(1, classes)
    return Episodes(torch.cat([numeric, encoded], dim=3), classes, is_class_labelled)


def mask_labelled_classes(classes: Tensor, n_labelled: int) -> Tensor:
    """Compute a mask of the classes with a labelled row, (tables, N_CLASS_CODES) bool, from classes (tables, rows)."""
    return F.one_hot(classes[:, :n_labelled], N_CLASS_CODES).sum(dim=1) > 0


def _scale_columns(values: Tensor, n_labelled: int) -> Tensor:
    """Standardize columns by mean and standard deviation of their labelled rows; clip values to MAX_ABS_Z_SCORE."""
    mean = values[:, :n_labelled].mean(dim=1, keepdim=True)
    deviation = values[:, :n_labelled].std(dim=1, keepdim=True, correction=0)
    z = torch.where(deviation > 1e-6, (values - mean) / deviation.clamp_min(1e-6), 0.0)
    return z.clamp(-MAX_ABS_Z_SCORE, MAX_ABS_Z_SCORE)


def _rank_among_labelled(values: Tensor, n_labelled: int) -> Tensor:
    """Compute, for each cell, the fraction of labelled rows with smaller values minus the fraction with larger ones."""
    ordered = values[:, :n_labelled].transpose(1, 2).contiguous().sort(dim=2).values
    columnwise = values.transpose(1, 2).contiguous()
    below, up_to = (torch.searchsorted(ordered, columnwise, right=right) for right in (False, True))
    return ((below + up_to) / n_labelled - 1).transpose(1, 2)
