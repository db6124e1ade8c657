"""The columns that views read: without constants and copies of other columns, each with a canonical sign.

Predictions then do not depend on whether a column counts upwards or downwards, or how often it occurs. Cosines and
distances do not depend on signs anyway, but forests, the transformer and MLPs do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.views.shifts import FeatureOrder, detect_feature_order

#: Maximum number of columns; more features are rather an embedding, of which each one is an arbitrary direction.
MAX_SELECTED_COLUMNS = 64


class ColumnSelection(NamedTuple):
    """The features that views read, and their signs."""

    indices: Tensor  #: (m,) int64, ascending: the selected ones of all features.
    signs: Tensor  #: (m,) float32, 1 or -1: the factor of each selected feature.

    def apply(self, x: Tensor) -> Tensor:
        """Select features of rows x (n, dim), and multiply them by the signs: (n, m)."""
        return x[:, self.indices] * self.signs

    def to(self, device: torch.device) -> ColumnSelection:
        """Return the selection with its tensors on a device."""
        return ColumnSelection(self.indices.to(device), self.signs.to(device))

    def select_span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the span among the selected features of those that lie in a span of all features."""
        first, last = torch.searchsorted(self.indices, torch.tensor([start, stop])).tolist()
        return int(first), int(last)


def select_columns(
    x: Tensor, labels: Tensor, weights: Tensor | None = None, column_indices: Tensor | None = None
) -> ColumnSelection | None:
    """Select the features of a table without constants and copies; None if the features are no columns of a table.

    Args:
        x: (n, dim) float32 features of rows, in any order.
        labels: (n,) int64 classes of the rows.
        weights: (n,) float64 sample weights > 0, or None for equal ones.
        column_indices: (dim,) int64, ascending from 0: the column of each feature; None if each one is a column.

    The features of an image, a series or of more than ``MAX_SELECTED_COLUMNS`` columns are all used as they are. The
    signs of a number and its missing indicator make their skewness positive; categories keep theirs.
    """
    dim = x.shape[1]
    blocks = torch.arange(dim) if column_indices is None else column_indices
    sizes = torch.bincount(blocks)
    if len(sizes) > 2 * MAX_SELECTED_COLUMNS or (column_indices is None and detect_feature_order(x) != FeatureOrder()):
        return None
    values, row_weights = x.double(), torch.full_like(labels, 1 / len(labels), dtype=torch.float64)
    if weights is not None:
        row_weights = weights / weights.sum()
    mean, square = row_weights @ values, row_weights @ values.square()
    deviation = (row_weights @ (values - mean).square()).sqrt()
    varies = deviation > 1e-6 * square.sqrt()
    z = (values - mean) / torch.where(varies, deviation, 1.0)
    signs = torch.where((sizes <= 2)[blocks], _compute_signs(z, labels, row_weights), 1.0)
    oriented = (x * signs + 0.0).numpy()  # -0.0 becomes 0.0, whose bytes differ
    columns, seen = np.split(oriented, sizes.cumsum(dim=0)[:-1].tolist(), axis=1), set[bytes]()
    kept = torch.zeros(len(sizes), dtype=torch.bool)
    for index, (column, is_used) in enumerate(zip(columns, varies.split(sizes.tolist()), strict=True)):
        content = column.tobytes()
        kept[index] = bool(is_used.any())
        if kept[index] and content in seen:  # rows of weight 2 count as one row that occurs twice
            distinct = np.unique(np.column_stack([labels.numpy(), oriented]), axis=0, return_index=True)[1]
            kept[index] = not _is_unlikely_by_chance(column[distinct], labels.numpy()[distinct])
        seen.add(content)
    indices = kept[blocks].nonzero()[:, 0]
    if not 0 < int(kept.sum()) <= MAX_SELECTED_COLUMNS:
        return None
    return ColumnSelection(indices, signs[indices])


def _compute_signs(z: Tensor, labels: Tensor, row_weights: Tensor) -> Tensor:
    """Compute signs (dim,) float32, by which the skewness of standardised columns z (n, dim) is positive.

    The sign of a symmetric column is that of its correlation with the class index, which is positive. Rows have the
    weights ``row_weights`` (n,), which sum to 1.
    """
    min_skewness = 1e-6  # below it, the sign of the skewness is due to rounding
    skewness, correlation = row_weights @ z.pow(3), (row_weights * labels) @ z
    direction = torch.where(skewness.abs() > min_skewness, skewness, correlation)
    return torch.where(direction < 0, -1.0, 1.0).to(torch.float32)


def _is_unlikely_by_chance(column: np.ndarray, labels: np.ndarray) -> bool:
    """Test whether another column with the values of ``column`` (n, features) in each class would hardly be equal.

    Two columns of few values, such as "yes" and "no", may be equal in few rows without being copies.
    """
    max_chance = 1e-6
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, len(labels) + 1)))])
    values = np.unique(column, axis=0, return_inverse=True)[1].reshape(-1)
    per_class = [np.bincount(values[labels == label]) for label in np.unique(labels)]
    chance = sum(log_factorials[counts].sum() - log_factorials[counts.sum()] for counts in per_class)
    return bool(chance < np.log(max_chance))
