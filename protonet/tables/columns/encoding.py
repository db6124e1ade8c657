"""The encoding of a table: what each of its columns is, and the features that they become."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet.tables.columns.category import Category
from protonet.tables.columns.date import Date
from protonet.tables.columns.embedded import EmbeddedText
from protonet.tables.columns.kind import Column
from protonet.tables.columns.number import Number
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.text import Text
from protonet.views.view import Stored, expect

#: Every kind of column, by its name in model files.
KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (Number, Category, Date, Text, EmbeddedText, Picture)}


@dataclass(frozen=True)
class Encoding:
    """Columns as they were fitted, at least one.

    Where all are numbers without gaps, they stay as they are: that some columns vary more than others is what a person
    has said by not scaling them. Otherwise each column has a variance of about 1.
    """

    columns: tuple[Column, ...]

    @property
    def plain(self) -> bool:
        """Whether all columns are numbers without gaps."""
        return all(column.plain for column in self.columns)

    @property
    def told(self) -> list[str] | None:
        """What each column was taken for; None where all are numbers without gaps."""
        return None if self.plain else [column.tell() for column in self.columns]

    @property
    def sizes(self) -> list[int]:
        """How many features each column becomes."""
        return [1] * len(self.columns) if self.plain else [len(column.parts) for column in self.columns]

    @property
    def blocks(self) -> Tensor | None:
        """Which column each feature (dim,) comes from, for `protonet.views.view.Rows`; None where each is one.

        The parts of a picture and of a text count as columns of their own, and so does each number of a network of
        pictures.
        """
        sizes = self.sizes if self.plain else [size for column in self.columns for size in column.blocks]
        return None if max(sizes) == 1 else torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first feature of what views may take alone, and the one behind the last.

        Such are the parts of pictures; and beside texts that are read, these, and the columns between them: what others
        have learned must not drown them.
        """
        found: list[tuple[int, int]] = []
        runs = any(column.drowns for column in self.columns) and len(self.columns) > 1
        first = start = 0
        for column, size in zip(self.columns, self.sizes, strict=True):
            own = column.alone if runs or not column.drowns else []
            if runs and own:
                found += [(start, first)] * (first > start)
                start = first + size
            ends = [first + sum(own[:place]) for place in range(len(own) + 1)]
            found += itertools.pairwise(ends)
            first += size
        return found + [(start, first)] * (runs and first > start)

    def find_features(self, number: int) -> range:
        """Return which features come from a column, given its number."""
        first = sum(self.sizes[:number])
        return range(first, first + self.sizes[number])

    def encode(self, cells: Sequence[np.ndarray]) -> np.ndarray:
        """Return the features (n, sum of ``sizes``) of the columns' cells, (n,) each.

        They are float32; of numbers alone, as they are, float64 where these may have more digits.
        """
        if not self.plain:
            parts = [column.encode(each) for column, each in zip(self.columns, cells, strict=True)]
            return np.concatenate(parts, axis=1)
        return self.stack([column.fill(each) for column, each in zip(self.columns, cells, strict=True)])

    def find_uninformative(self, cells: Sequence[np.ndarray]) -> np.ndarray:
        """Return which rows (n,) bool have no cell that says anything, given the columns' cells, (n,) each."""
        uninformative = np.ones(len(cells[0]), bool)
        # Few rows are left behind the first column: texts, which take longest, come last.
        for column, each in sorted(zip(self.columns, cells, strict=True), key=lambda pair: pair[0].read_by is not None):
            rows = np.flatnonzero(uninformative)
            if not len(rows):
                break
            uninformative[rows] = column.find_uninformative(each[rows])
        return uninformative

    @staticmethod
    def stack(columns: Sequence[np.ndarray]) -> np.ndarray:
        """Return columns of numbers (n,) side by side: float32, or float64 where one may have more digits."""
        exact = any(each.dtype.itemsize > (4 if each.dtype.kind == "f" else 2) for each in columns)
        return np.stack(columns, axis=1).astype(np.float64 if exact else np.float32)

    def describe(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Return what JSON can hold of it, and tensors by name."""
        described = [{"kind": column.kind, **column.describe()} for column in self.columns]
        tensors = {
            f"{number}.{name}": torch.from_numpy(values)
            for number, column in enumerate(self.columns)
            for name, values in column.tensors().items()
        }
        return described, tensors

    @classmethod
    def restore(cls, described: Any, tensors: Mapping[str, Tensor]) -> Encoding:
        """Build again what `describe` describes.

        Raises:
            ValueError: It is no encoding; the reason in a few words.
        """
        expect(isinstance(described, list) and bool(described), "an encoding without columns")
        left, columns = dict(tensors), []
        for number, description in enumerate(described):
            stored = Stored(description, left, f"{number}.")
            kind = KINDS.get(stored.entry("kind", str))
            if kind is None:
                raise ValueError("a column of an unknown kind")
            columns.append(kind.restore(stored))
        expect(not left, "tensors that belong to no column")
        return cls(tuple(columns))
