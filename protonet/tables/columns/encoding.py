"""The encoding of a table by its fitted columns."""

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
from protonet.views.config import Stored, expect

#: The class of every column type, by its name in model files.
COLUMN_CLASSES: dict[str, type[FittedColumn]] = {
    cls.kind: cls for cls in (Numeric, Category, Date, Text, EmbeddedText, Picture)
}


def list_columns(encoding: Encoding | None, count: int) -> Sequence[FittedColumn]:
    """List the fitted columns of an encoding, or ``count`` columns of plain numbers if there is no encoding."""
    return [Numeric("plain", 0.0, 0.0, 1.0, 0.0)] * count if encoding is None else encoding.columns


@dataclass(frozen=True)
class Encoding:
    """Encodes the rows of a table as features, by one or more fitted columns.

    If all columns are numbers without missing values, they are used unchanged: users who do not scale their columns may
    rely on their variances. Otherwise each column is encoded with a variance of about 1.
    """

    columns: tuple[FittedColumn, ...]

    @property
    def plain(self) -> bool:
        """Whether all columns are numbers without missing values."""
        return all(column.plain for column in self.columns)

    @property
    def summary(self) -> list[str] | None:
        """A one-line summary of each column; None if all are numbers without missing values."""
        return None if self.plain else [column.summary() for column in self.columns]

    @property
    def sizes(self) -> list[int]:
        """The number of features of each column."""
        return [1] * len(self.columns) if self.plain else [len(column.feature_suffixes) for column in self.columns]

    @property
    def blocks(self) -> Tensor | None:
        """The index (dim,) of the block of each feature; None if each feature is a block.

        A block is rescaled as a whole: a column, a kind of picture descriptor, the embedding or the words of a text.
        """
        sizes = self.sizes if self.plain else [size for column in self.columns for size in column.block_sizes]
        return None if max(sizes) == 1 else torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The ranges [start, end) of features that a view may use without the others.

        These are the standalone blocks of pictures. If there are embedded texts beside other columns, they are also
        each of these texts and each run of columns between them, so that the embeddings do not dominate.
        """
        spans: list[tuple[int, int]] = []
        split = any(column.dominates for column in self.columns) and len(self.columns) > 1
        first = run_start = 0
        for column, size in zip(self.columns, self.sizes, strict=True):
            standalone = column.standalone_sizes if split or not column.dominates else []
            if split and standalone:
                spans += [(run_start, first)] * (first > run_start)
                run_start = first + size
            spans += itertools.pairwise(itertools.accumulate(standalone, initial=first))
            first += size
        return spans + [(run_start, first)] * (split and first > run_start)

    def feature_range(self, index: int) -> range:
        """Return the range of the features of the column with an index."""
        first = sum(self.sizes[:index])
        return range(first, first + self.sizes[index])

    def encode(self, cells: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the features (n, sum of ``sizes``) of the cells (n,) of each column.

        They are float32; numbers that are used unchanged are float64 if float32 has too few digits for them.
        """
        pairs = list(zip(self.columns, cells, strict=True))
        if self.plain:
            return self.stack([column.comparable_values(values) for column, values in pairs])
        return np.concatenate([column.encode(values) for column, values in pairs], axis=1)

    def is_uninformative(self, cells: Sequence[np.ndarray]) -> np.ndarray:
        """Compute a mask (n,) bool of rows without an informative cell, from the cells (n,) of each column."""
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
    def stack(columns: Sequence[np.ndarray]) -> np.ndarray:
        """Stack columns of numbers (n,) to features (n, columns), float64 if float32 may have too few digits."""
        exact = any(values.dtype.itemsize > (4 if values.dtype.kind == "f" else 2) for values in columns)
        return np.stack(columns, axis=1).astype(np.float64 if exact else np.float32)

    def describe(self) -> tuple[list[dict[str, object]], dict[str, Tensor]]:
        """Describe the columns by JSON values and by tensors by name, for a model file."""
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
        expect(isinstance(described, list) and bool(described), "an encoding without columns")
        remaining, columns = dict(tensors), []
        for index, description in enumerate(described):
            stored = Stored(description, remaining, f"{index}.")
            column_class = COLUMN_CLASSES.get(stored.entry("kind", str))
            if column_class is None:
                raise ValueError("a column of an unknown kind")
            columns.append(column_class.restore(stored))
        expect(not remaining, "tensors that belong to no column")
        return cls(tuple(columns))
