"""Training episodes of the tabular transformer: tables of one size with labelled and new rows, encoded as cells."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.incontext.synthetic import make_batch
from protonet.views.tabular_transformer import MAX_Z, RANK_SCALE
from protonet.views.transformer import CELL_CHANNELS, CLASS_CODES

NUMERIC_CHANNELS = 3  #: Channels of a cell that encode numbers; the others encode categories.
LEVELS = 12  #: Maximal number of levels of a category.
#: New rows that repeat labelled rows, so that the transformer learns what an equal row with a label means.
COPIES = 4


class Columns(NamedTuple):
    """Columns of numbers and categories."""

    values: Tensor  #: (tables, rows, columns) float32: the numbers, with missing values filled in.
    gap: Tensor  #: (tables, rows, columns) bool: whether a value is missing.
    category: Tensor  #: (tables, 1, columns) bool: whether the column is a category.
    level: Tensor  #: (tables, rows, columns) int64 < LEVELS: the levels of categories.


class Episodes(NamedTuple):
    """A batch of tables of one size, whose first rows are labelled."""

    cells: Tensor  #: (tables, rows, columns, CELL_CHANNELS).
    classes: Tensor  #: (tables, rows) int64 < CLASS_CODES.
    known: Tensor  #: (tables, rows) bool: whether a labelled row has the class of the row.


def make_episodes(
    generator: torch.Generator, tables: int, labelled: int, new: int, columns: int, per_class: int
) -> Episodes:
    """Generate episodes of synthetic tables with about ``per_class`` or more labelled rows per class."""
    rows = 2 * labelled + new
    x, y = make_batch(generator, tables, rows, columns, min(CLASS_CODES, max(2, labelled // per_class)))
    counts = F.one_hot(y, CLASS_CODES).sum(dim=1).float()
    balanced = torch.rand(tables, 1, generator=generator) < 0.65  # classes are balanced, or as frequent as in the table
    chosen = torch.multinomial(torch.where(balanced, 1 / counts.gather(1, y), 1.0), labelled, generator=generator)
    others = torch.ones(tables, rows).scatter_(1, chosen, 0.0)
    new_rows = torch.multinomial(others, new - COPIES, generator=generator)
    again = chosen[:, torch.randint(labelled, (COPIES,), generator=generator)]
    order = torch.cat([chosen, new_rows, again], dim=1)
    x = x.gather(1, order[:, :, None].expand(*order.shape, columns))
    names = torch.rand(tables, CLASS_CODES, generator=generator).argsort(dim=1)
    columns_of_tables = _mix_column_types(generator, x, labelled)
    return read_columns(generator, columns_of_tables, names.gather(1, y.gather(1, order)), labelled)


def _mix_column_types(generator: torch.Generator, x: Tensor, labelled: int) -> Columns:
    """Convert numbers (tables, rows, columns) to mixed types: rounded, binary, categorical, with missing values."""
    tables, rows, columns = x.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    one, per_column = (tables, 1, 1), (tables, 1, columns)
    plain = uniform(*per_column) > uniform(*one) * (uniform(*one) < 0.6)
    sort, few = uniform(*per_column), uniform(*per_column)
    rank = x.argsort(dim=1).argsort(dim=1) / rows
    levels = torch.where(uniform(*per_column) < 0.5, 2, torch.randint(2, LEVELS + 1, per_column, generator=generator))
    level = torch.floor(rank ** (0.4 + 1.6 * few) * levels)
    category, steps, binary = ~plain & (sort < 0.55), ~plain & (sort >= 0.55) & (sort < 0.8), ~plain & (sort >= 0.8)
    two = category & (levels == 2)
    values = torch.where(steps, torch.where(few < 0.5, level, torch.floor(x * (1 + 2 * few))), x)
    values = torch.where(binary, (rank > 0.1 + 0.8 * few).float(), torch.where(two, level, values))
    category = category & ~two
    gaps = (uniform(*per_column) < 0.6 * uniform(*one)) & (uniform(*one) < 0.35) & ~category
    reason = torch.randn(x.shape, generator=generator)  # gaps may depend on the value
    reason = reason + x * torch.randn(per_column, generator=generator) * (uniform(*per_column) < 0.5)
    gap = gaps & (reason > 0.3 + 1.8 * uniform(*per_column))
    values = torch.where(gap, values[:, :labelled].median(dim=1, keepdim=True).values, values)
    return Columns(values, gap, category, level.long().clamp(0, LEVELS - 1))


def read_columns(generator: torch.Generator, columns: Columns, classes: Tensor, labelled: int) -> Episodes:
    """Encode the cells in batches as `protonet.views.tabular_transformer.CellEncoder` does, with random level codes."""
    values, gap, category, level = columns
    shape = (len(values), values.shape[2], LEVELS, CELL_CHANNELS - NUMERIC_CHANNELS)
    codes = torch.randn(shape, generator=generator)
    fraction = F.one_hot(level[:, :labelled], LEVELS).float().mean(dim=1)  # (tables, columns, LEVELS)
    spread = (fraction * (1 - fraction)).sum(dim=2).clamp_min(1e-4).sqrt()[..., None, None]
    codes = (codes - (fraction[..., None] * codes).sum(dim=2, keepdim=True)) / spread
    chosen = level.transpose(1, 2)[..., None].expand(*level.transpose(1, 2).shape, CELL_CHANNELS - NUMERIC_CHANNELS)
    encoded = codes.gather(2, chosen).transpose(1, 2)
    numeric = torch.stack(
        [_scale(values, labelled), RANK_SCALE * _rank(values, labelled), _scale(gap.float(), labelled)], dim=3
    )
    numeric, encoded = numeric.masked_fill(category[..., None], 0), encoded.masked_fill(~category[..., None], 0)
    known = mask_labelled_classes(classes, labelled).gather(1, classes)
    return Episodes(torch.cat([numeric, encoded], dim=3), classes, known)


def mask_labelled_classes(classes: Tensor, labelled: int) -> Tensor:
    """Test which classes have a labelled row: (tables, CLASS_CODES) bool, given the classes (tables, rows) of rows."""
    return F.one_hot(classes[:, :labelled], CLASS_CODES).sum(dim=1) > 0


def _scale(values: Tensor, labelled: int) -> Tensor:
    """Standardize columns by the mean and deviation of their labelled rows, clipped to MAX_Z."""
    mean = values[:, :labelled].mean(dim=1, keepdim=True)
    deviation = values[:, :labelled].std(dim=1, keepdim=True, correction=0)
    z = torch.where(deviation > 1e-6, (values - mean) / deviation.clamp_min(1e-6), 0.0)
    return z.clamp(-MAX_Z, MAX_Z)


def _rank(values: Tensor, labelled: int) -> Tensor:
    """Compute the fraction of labelled rows below each cell minus the fraction above it."""
    ordered = values[:, :labelled].transpose(1, 2).contiguous().sort(dim=2).values
    columnwise = values.transpose(1, 2).contiguous()
    below, up_to = (torch.searchsorted(ordered, columnwise, right=right) for right in (False, True))
    return ((below + up_to) / labelled - 1).transpose(1, 2)
