"""The interface of fitted columns, which encode the cells of a column as features.

A column type is a frozen dataclass, and a fitted column is an instance of it. Fitting uses no labels. To add a type,
write such a class, list it in `protonet.tables.columns.encoding.COLUMN_CLASSES`, and detect it in
`protonet.tables.columns.inference`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import ClassVar

import numpy as np

from protonet.embeddings.representation import Record, Representation
from protonet.tables.columns.parsing import format_cells, is_missing
from protonet.views.config import Stored
from protonet.views.view import Graph

#: Opens the pretrained representation that a record in a model file identifies.
OpenRepresentation = Callable[[Record], Representation]


class FittedColumn(ABC):
    """A fitted column. Its methods take cells (n,): stripped text (object), numbers, or datetime64."""

    kind: ClassVar[str]  #: The name of the type in model files, messages and options.
    modality: ClassVar[str | None] = None  #: "text" or "picture", if a pretrained representation can embed it.
    may_be_group: ClassVar[bool] = True  #: Whether its values may identify groups of rows, such as persons.
    max_invalid_fraction: ClassVar[float] = 0.5  #: Maximum fraction of invalid new cells; above it, they are an error.
    dominates: ClassVar[bool] = False  #: Whether its features would dominate other columns in a common view.

    @property
    @abstractmethod
    def feature_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature, which follows the name of the column in the name of the feature."""

    @property
    def plain(self) -> bool:
        """Whether the column holds numbers without missing values, which may be used unchanged."""
        return False

    @property
    def rare_fraction(self) -> float:
        """The fraction of training cells with a rare category, which has no feature."""
        return 0.0

    @property
    def block_sizes(self) -> list[int]:
        """The number of features of each block that is rescaled as a whole."""
        return [len(self.feature_suffixes)]

    @property
    def standalone_sizes(self) -> list[int]:
        """The number of features of each block that a view may use without the other columns."""
        return []

    @property
    def record(self) -> Record | None:
        """The record of the pretrained representation that embeds the column; None if there is none."""
        return None

    def attach(self, open_representation: OpenRepresentation, *, show_progress: bool) -> FittedColumn:
        """Return the column with its pretrained representation opened, if it has one."""
        return self

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray | None:
        """Embed class names (n,) to the first features of the column; None if it has no text encoder."""
        return None

    def preparse(self, cells: np.ndarray) -> np.ndarray:
        """Parse cells (n,) in advance, so that they can be encoded repeatedly in less time."""
        return cells

    def to_numeric(self, cells: np.ndarray) -> np.ndarray | None:
        """Convert cells (n,) to ordered numbers (n,) float64, NaN if missing; None for columns without an order."""
        return None

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to numbers with missing values filled in, or to text for columns without an order."""
        return format_cells(cells).astype(str)

    @abstractmethod
    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32, with a total variance of about 1 over the training rows."""

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of non-missing cells that have another type or an unknown category."""
        return np.zeros(len(cells), bool)

    def is_rare_or_unknown(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of cells with a rare or unknown category, which has no feature."""
        return np.zeros(len(cells), bool)

    def is_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of cells that are missing or encoded as missing."""
        numeric = self.to_numeric(cells)
        missing = is_missing(cells) | self.is_invalid(cells) if numeric is None else np.isnan(numeric)
        return np.asarray(missing, bool)

    def describe_other_spelling(self, cells: np.ndarray) -> str:
        """Describe the first of cells (n,) that is another spelling of a known value; "" if there is none."""
        return ""

    @property
    def invalid_reason(self) -> str:
        """The reason in messages why cells are invalid."""
        return f"not a {self.kind}, treated as missing"

    @abstractmethod
    def summary(self) -> str:
        """Summarize the type and the format of the column in one line, for users."""

    def format_value(self, value: float) -> str:
        """Format a number of `to_numeric` for users."""
        return f"{value:.4g}"

    def describe(self) -> dict[str, object]:
        """Return the fields of the column other than its arrays, by name, as JSON values."""
        values = {name: value for name, value in self._values().items() if not isinstance(value, np.ndarray)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the array fields of the column by name, float32."""
        return {name: value for name, value in self._values().items() if isinstance(value, np.ndarray)}

    def _values(self) -> dict[str, object]:
        """Return the values of all fields by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]

    @classmethod
    @abstractmethod
    def restore(cls, stored: Stored) -> FittedColumn:
        """Restore a column from the untrusted entries of a model file; raise a ValueError if they are invalid."""

    def add_to_graph(self, graph: Graph, cells: str) -> tuple[str, str] | None:
        """Add the encoding of the column to an ONNX graph.

        Args:
            graph: The graph.
            cells: The name of the input (n, 1): DOUBLE with NaN for missing values, or STRING.

        Returns:
            The names of the features (n, features) FLOAT, and of the mask (n, 1) BOOL of uninformative cells; None if
            ONNX does not support the type: dates, texts and pictures.
        """
        return None
