"""The interface of fitted columns: all that the rest of the library needs to know about them.

A column type is a frozen class. Its instances are fitted columns, with everything that turns the cells of new rows into
features, and never with a label. To add a type, write one file with such a class, list it in
`protonet.tables.columns.encoding.COLUMN_CLASSES`, and detect it in `protonet.tables.columns.inference`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from protonet.embeddings.representation import Record, Representation
from protonet.tables.columns.parsing import format_cells, is_missing, is_missing_or_word
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


@dataclass(frozen=True)
class OrderedColumn(FittedColumn):
    """A column of numbers or times: standardized, with missing values replaced and marked by an indicator."""

    format: str  #: How cells are written.
    median: float  #: Replaces missing values.
    mean: float  #: Mean of the training rows, with missing values replaced.
    scale: float  #: Their standard deviation, or 1 if that is 0.
    missing: float  #: The fraction of missing values.

    @abstractmethod
    def to_numeric(self, cells: np.ndarray) -> np.ndarray:
        """Parse cells (n,) to float64, NaN if missing or of another format."""

    @staticmethod
    def fit_statistics(values: np.ndarray, usable: np.ndarray) -> tuple[float, float, float, float]:
        """Compute median, mean, scale and missing fraction of values (n,); those not ``usable`` count as missing."""
        median = float(np.median(values[usable])) if usable.any() else 0.0
        filled = np.where(usable, values, median)
        mean = float(filled.mean())
        return median, mean, float((filled - mean).std()) or 1.0, float(np.isnan(values).mean())

    @property
    def feature_suffixes(self) -> tuple[str, ...]:
        """The value, and whether it is missing."""
        return ("", " missing") if 0 < self.missing < 1 else ("",)

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return the features (n, features) float32, standardized in float64; infinite beyond float32."""
        values = self.to_numeric(cells)
        missing = np.isnan(values)
        filled = np.where(missing, self.median, values)
        with np.errstate(over="ignore"):
            features = [(filled - self.mean) / self.scale, *self.further_features(filled)]
            if 0 < self.missing < 1:
                features.append((missing - self.missing) / math.sqrt(self.missing * (1 - self.missing)))
            return np.stack(features, axis=1).astype(np.float32)

    def further_features(self, filled: np.ndarray) -> list[np.ndarray]:
        """List further features (n,) of values (n,) without missing ones."""
        return []

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Return a mask (n,) bool of non-missing cells that are not of the format."""
        unparsed: np.ndarray = np.isnan(self.to_numeric(cells))
        return unparsed & ~is_missing_or_word(cells) if unparsed.any() else unparsed

    @property
    def missing_note(self) -> str:
        """The fraction of missing values for a summary: ", 12 % missing", or nothing for 0."""
        return f", {100 * self.missing:.2g} % missing" if self.missing else ""

    @staticmethod
    def restore_statistics(stored: Stored) -> tuple[float, float, float, float]:
        """Restore the result of `fit_statistics`."""
        median, mean = stored.get_float("median"), stored.get_float("mean")
        return median, mean, stored.get_float("scale", math.ulp(0.0)), stored.get_float("missing", 0, 1)
