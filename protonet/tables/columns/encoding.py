"""Encode the rows of a table as features, by a fitted column for each column of the table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.category import Category
from protonet.tables.columns.ordered import Date, Numeric
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.text import EmbeddedText, Text
from protonet.views.config import UntrustedComponent, raise_unless

#: The class of every column type, by its name in model files.
COLUMN_CLASSES: dict[str, type[FittedColumn]] = {
    cls.kind: cls for cls in (Numeric, Category, Date, Text, EmbeddedText, Picture)
}


def list_fitted_columns(encoding: Encoding | None, count: int) -> Sequence[FittedColumn]:
    """List the fitted columns of an encoding; without one, ``count`` columns of numbers that are used unchanged."""
    return [Numeric("plain", 0.0, 0.0, 1.0, 0.0)] * count if encoding is None else encoding.columns


@dataclass(frozen=True)
class Encoding:
    """Encodes the rows of a table as features, by one or more fitted columns.

    If all columns are numbers without missing values, they are used unchanged, because their variances may have a
    meaning for the user. Otherwise each column is encoded with a variance of the order of 1.
    """

    columns: tuple[FittedColumn, ...]  #: The fitted columns, in the order of the table.

    @property
    def is_fully_numeric(self) -> bool:
        """Whether all columns are numbers without missing values."""
        return all(column.is_fully_numeric for column in self.columns)

    @property
    def summary(self) -> list[str] | None:
        """A one-line summary of each column; None if all columns are plain numbers without missing values."""
        summaries = [column.summary() for column in self.columns]
        return None if set(summaries) == {Numeric.kind} else summaries

    @property
    def column_sizes(self) -> list[int]:
        """The number of features of each column."""
        return (
            [1] * len(self.columns)
            if self.is_fully_numeric
            else [len(column.feature_suffixes) for column in self.columns]
        )

    @property
    def feature_blocks(self) -> Tensor | None:
        """The index (dim,) of the block to which each feature belongs; None if each feature is a block of its own.

        Feature maps (views) scale all features of a block by one factor. A block is a column or, for texts and
        pictures, a part of the column: the embedding of a text, its words, or an image descriptor.
        """
        sizes = (
            self.column_sizes
            if self.is_fully_numeric
            else [size for column in self.columns for size in column.block_sizes]
        )
        return None if max(sizes) == 1 else torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))

    @property
    def standalone_ranges(self) -> list[tuple[int, int]]:
        """The ranges [start, end) of features that a feature map (view) may use without the other features.

        The embedding of a picture column is such a range, and so is each of its descriptors. If a table has embedded
        texts and other columns, the ranges also include each of these texts, and the columns between two of them. The
        embeddings of the texts would outweigh the other columns in a view of all features.
        """
        spans: list[tuple[int, int]] = []
        split = any(column.dominates for column in self.columns) and len(self.columns) > 1
        first = run_start = 0
        for column, size in zip(self.columns, self.column_sizes, strict=True):
            standalone = column.standalone_sizes if split or not column.dominates else []
            if split and standalone:
                spans += [(run_start, first)] * (first > run_start)
                run_start = first + size
            spans += itertools.pairwise(itertools.accumulate(standalone, initial=first))
            first += size
        return spans + [(run_start, first)] * (split and first > run_start)

    def feature_range(self, index: int) -> range:
        """Return the indices of the features of column ``index``, as a range."""
        first = sum(self.column_sizes[:index])
        return range(first, first + self.column_sizes[index])

    def encode(self, cells: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the features (n, sum of ``sizes``) of rows, given the cells (n,) of each column.

        The features are float32. If all columns are used unchanged, and float32 may have too few digits for them, the
        features are float64.
        """
        pairs = list(zip(self.columns, cells, strict=True))
        if self.is_fully_numeric:
            return self.stack_numeric_columns([column.comparable_values(values) for column, values in pairs])
        return np.concatenate([column.encode(values) for column, values in pairs], axis=1)

    def is_uninformative(self, cells: Sequence[np.ndarray]) -> np.ndarray:
        """Compute a mask (n,) bool of the rows in which all cells are uninformative, such as missing.

        Args:
            cells: The cells (n,) of each column.
        """
        uninformative = np.ones(len(cells[0]), bool)
        # Embedded columns come last: they are slow, and few rows remain.
        pairs = sorted(zip(self.columns, cells, strict=True), key=lambda pair: pair[0].record is not None)
        for column, values in pairs:
            rows = np.flatnonzero(uninformative)
            if not len(rows):
                break
            uninformative[rows] = column.is_uninformative(values[rows])
        return uninformative

    @staticmethod
    def stack_numeric_columns(columns: Sequence[np.ndarray]) -> np.ndarray:
        """Stack columns of numbers (n,) to features (n, columns), float64 if float32 may have too few digits."""
        exact = any(values.dtype.itemsize > (4 if values.dtype.kind == "f" else 2) for values in columns)
        return np.stack(columns, axis=1).astype(np.float64 if exact else np.float32)

    def describe_columns(self) -> tuple[list[dict[str, object]], dict[str, Tensor]]:
        """Describe the columns for a model file.

        Returns:
            A list with a dict of JSON values for each column, and a dict of all tensors. The names of the tensors begin
            with the index of their column.
        """
        described = [{"kind": column.kind, **column.describe()} for column in self.columns]
        tensors = {
            f"{index}.{name}": torch.from_numpy(values)
            for index, column in enumerate(self.columns)
            for name, values in column.tensors().items()
        }
        return described, tensors

    @classmethod
    def restore(cls, described: Any, tensors: Mapping[str, Tensor]) -> Encoding:
        """Restore an encoding from an untrusted result of `describe`; raise a ValueError if it is invalid."""
        raise_unless(isinstance(described, list) and bool(described), "an encoding without columns")
        remaining, columns = dict(tensors), []
        for index, description in enumerate(described):
            stored = UntrustedComponent(description, remaining, f"{index}.")
            column_class = COLUMN_CLASSES.get(stored.get_entry("kind", str))
            if column_class is None:
                raise ValueError("a column of an unknown kind")
            columns.append(column_class.restore(stored))
        raise_unless(not remaining, "tensors that belong to no column")
        return cls(tuple(columns))
