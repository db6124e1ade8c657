"""The interface of fitted columns: all that the rest of the library needs to know about them.

A column type is a frozen class. Its instances are fitted columns, with everything that turns the cells of new rows into
features, and never with a label. To add a type, write one file with such a class, list it in
`protonet.tables.columns.encoding.COLUMN_CLASSES`, and detect it in `protonet.tables.columns.inference`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import ClassVar

import numpy as np

from protonet.embeddings.representation import Record, Representation
from protonet.tables.columns.parsing import format_cells, is_missing
from protonet.views.config import Stored
from protonet.views.view import Graph

OpenRepresentation = Callable[[Record], Representation]  #: Opens the representation that a model file names.


class FittedColumn(ABC):
    """A fitted column. Its cells are an array (n,) of stripped text (object), numbers, or datetime64."""

    kind: ClassVar[str]  #: The name of the type in model files, messages and options.
    modality: ClassVar[str | None] = None  #: Input of the representations that can embed it: "text", "picture" or None.
    may_be_group: ClassVar[bool] = True  #: Whether its values may identify groups of rows, such as persons.
    max_invalid_fraction: ClassVar[float] = 0.5  #: Maximum fraction of new cells that `is_invalid` may select.
    dominates: ClassVar[bool] = False  #: Whether other columns need views of their own to have an influence beside it.

    @property
    @abstractmethod
    def feature_suffixes(self) -> tuple[str, ...]:
        """A suffix for each of its features: the feature's name is the column's name and the suffix."""

    @property
    def plain(self) -> bool:
        """Whether it holds numbers without missing values, which may be used unchanged."""
        return False

    @property
    def rare_fraction(self) -> float:
        """The fraction of training cells that `is_rare_or_unknown` selects."""
        return 0.0

    @property
    def block_sizes(self) -> list[int]:
        """Sizes of the blocks of features that are rescaled together."""
        return [len(self.feature_suffixes)]

    @property
    def standalone_sizes(self) -> list[int]:
        """Sizes of the blocks of features that views may use alone."""
        return []

    @property
    def record(self) -> Record | None:
        """The record of the pretrained representation that embeds it, if any."""
        return None

    def attach(self, open_representation: OpenRepresentation, *, show_progress: bool) -> FittedColumn:
        """Return the column with its representation opened, if it has one."""
        return self

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray | None:
        """Embed class names (n,) as the first features of the column; None if it has no text encoder."""
        return None

    def preparse(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to a form that is faster to read repeatedly."""
        return cells

    def to_numeric(self, cells: np.ndarray) -> np.ndarray | None:
        """Return cells (n,) as float64 with a meaningful order, NaN if missing; None for unordered columns."""
        return None

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Return cells (n,) as floats with missing values filled in, or as texts for unordered columns."""
        return format_cells(cells).astype(str)

    @abstractmethod
    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return the features (n, features) float32, with a total variance of about 1 over the training rows."""

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Return a mask (n,) bool of non-missing cells of another type, or of unknown categories."""
        return np.zeros(len(cells), bool)

    def is_rare_or_unknown(self, cells: np.ndarray) -> np.ndarray:
        """Return a mask (n,) bool of the cells whose category has no feature: rare and unknown ones."""
        return np.zeros(len(cells), bool)

    def is_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Return a mask (n,) bool of the cells that are missing, or encoded as missing."""
        numeric = self.to_numeric(cells)
        missing = is_missing(cells) | self.is_invalid(cells) if numeric is None else np.isnan(numeric)
        return np.asarray(missing, bool)

    def describe_other_spelling(self, cells: np.ndarray) -> str:
        """Describe the first of cells (n,) that is recognized only in another spelling; "" if there is none."""
        return ""

    @property
    def invalid_reason(self) -> str:
        """The message about cells that `is_invalid` selects."""
        return f"not a {self.kind}, treated as missing"

    @abstractmethod
    def summary(self) -> str:
        """Return a one-line summary for users."""

    def format_value(self, value: float) -> str:
        """Format a value of `to_numeric` for users."""
        return f"{value:.4g}"

    def describe(self) -> dict[str, object]:
        """Return all fields but the tensors, as JSON values."""
        values = {name: value for name, value in self._values().items() if not isinstance(value, np.ndarray)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the tensors by name, float32."""
        return {name: value for name, value in self._values().items() if isinstance(value, np.ndarray)}

    def _values(self) -> dict[str, object]:
        """The values of the fields."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]

    @classmethod
    @abstractmethod
    def restore(cls, stored: Stored) -> FittedColumn:
        """Restore a column from an untrusted description and its tensors; a ValueError says what is invalid."""

    def add_to_graph(self, graph: Graph, cells: str) -> tuple[str, str] | None:
        """Add the column to an ONNX graph, given the name of its cells (n, 1): DOUBLE, NaN if missing, or STRING.

        Returns the names of the features (n, features) FLOAT and of the mask (n, 1) BOOL of `is_uninformative`; None
        for types that ONNX does not support: dates, texts and pictures.
        """
        return None


def missing_indicator(missing: np.ndarray, fraction: float) -> list[np.ndarray]:
    """Return a list with the standardized missing-value indicator (n,).

    Args:
        missing: (n,) bool.
        fraction: The fraction of missing values in the training rows. If it is 0 or 1, the list is empty.
    """
    return [(missing - fraction) / math.sqrt(fraction * (1 - fraction))] if 0 < fraction < 1 else []


def missing_indicator_suffix(fraction: float) -> tuple[str, ...]:
    """Return the feature suffixes of `missing_indicator`."""
    return (" missing",) if 0 < fraction < 1 else ()


def format_missing_fraction(fraction: float) -> str:
    """Format the fraction of missing values for a summary: ", 12 % missing", or nothing for 0."""
    return f", {100 * fraction:.2g} % missing" if fraction else ""
