"""The interface of fitted columns, which encode the cells of a column as features.

A column type is a frozen dataclass, and a fitted column is an instance of it. Fitting uses no labels. To add a type,
write such a class, and list it in `protonet.tables.columns.encoding.COLUMN_CLASSES` and, by its name, in
`protonet.tables.columns.COLUMN_TYPES`, from which options, messages and the page take it. In
`protonet.tables.columns.encoding`, let `infer_column_type` detect it, and let `fit_column_as` fit it on request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import ClassVar

import numpy as np

from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder
from protonet.tables.columns.parsing import format_cells, is_missing
from protonet.views.config import UntrustedComponent
from protonet.views.onnx_graph import OnnxGraph

#: Function that loads the pretrained encoder that a record of a model file identifies.
EncoderLoader = Callable[[EncoderRecord], PretrainedEncoder]


class FittedColumn(ABC):
    """Base class of the fitted columns of a table. A fitted column encodes cells as numeric features.

    The methods take cells (n,) of one of three types: text without surrounding spaces (object), numbers or datetime64.
    """

    column_type: ClassVar[str]  #: Name of the column type, such as "number", in model files, messages and options.
    #: "text" or "picture" if a pretrained network of this modality can embed the cells; None for other types.
    modality: ClassVar[str | None] = None
    #: Whether rows with equal cells may belong together, as the rows of one person do.
    may_be_group: ClassVar[bool] = True
    #: Maximum fraction of cells in new rows that `is_invalid` marks; a larger fraction is an error.
    max_invalid_fraction: ClassVar[float] = 0.5
    #: Whether the features would outweigh those of other columns in the same feature map (view).
    outweighs_other_columns: ClassVar[bool] = False

    @property
    @abstractmethod
    def feature_name_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature's name, such as " missing"; the name of the column precedes it."""

    @property
    def is_fully_numeric(self) -> bool:
        """Whether the training cells are numbers without missing values, so that they may be used without scaling."""
        return False

    @property
    def rare_fraction(self) -> float:
        """The fraction of training cells whose category is too rare to have a feature; 0 for other column types."""
        return 0.0

    @property
    def feature_block_sizes(self) -> list[int]:
        """The number of features of each block, in order. Feature maps scale all features of a block by one factor."""
        return [len(self.feature_name_suffixes)]

    @property
    def standalone_feature_block_sizes(self) -> list[int]:
        """The number of features of each block that a feature map (view) may use alone; empty if there is none."""
        return []

    @property
    def encoder_record(self) -> EncoderRecord | None:
        """The record that identifies the pretrained network of the column; None if no network embeds its cells."""
        return None

    def with_loaded_encoder(self, load_encoder: EncoderLoader, *, show_progress: bool) -> FittedColumn:
        """Return a copy of the column with its pretrained network loaded, or the column itself if it has none."""
        return self

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray | None:
        """Embed class names (n,) like cells, as the column's first features (n, width); None without a text encoder."""
        return None

    def preparse(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to a form (n,) that the other methods process faster, such as text to numbers."""
        return cells

    def to_numeric(self, cells: np.ndarray) -> np.ndarray | None:
        """Convert cells (n,) to float64 that can be ordered, NaN if missing; None for column types without an order."""
        return None

    def comparable_values(self, cells: np.ndarray) -> np.ndarray:
        """Convert cells (n,) to values (n,) that can be sorted: numbers, the median for missing ones, or text."""
        return format_cells(cells).astype(str)

    @abstractmethod
    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute features (n, features) float32 of cells (n,), whose variances in training sum to the order of 1."""

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the non-missing cells that have another type or category than in training."""
        return np.zeros(len(cells), bool)

    def is_rare_or_unknown(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the cells whose category has no feature: rare or absent in the training rows."""
        return np.zeros(len(cells), bool)

    def is_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the cells that are missing, or that `encode` treats as missing."""
        numeric = self.to_numeric(cells)
        missing = is_missing(cells) | self.is_invalid(cells) if numeric is None else np.isnan(numeric)
        return np.asarray(missing, bool)

    def describe_other_spelling(self, cells: np.ndarray) -> str:
        """Describe the first cell that spells a value otherwise than in training, as "'yes' is 1"; "" if none does."""
        return ""

    @property
    def invalid_reason(self) -> str:
        """The phrase by which messages explain an invalid cell, such as "not a number, treated as missing"."""
        return f"not a {self.column_type}, treated as missing"

    @abstractmethod
    def summary(self) -> str:
        """Summarize the type and the format of the column in one line, for users."""

    def format_value(self, value: float) -> str:
        """Format a number that `to_numeric` returned as text for users."""
        return f"{value:.4g}"

    def stored_values(self) -> dict[str, object]:
        """Return the JSON values that a model file stores of the column, as a dict by key; arrays are not included."""
        values = {name: value for name, value in self._field_values().items() if not isinstance(value, np.ndarray)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def stored_arrays(self) -> dict[str, np.ndarray]:
        """Return the float32 arrays that a model file stores of the column, as a dict by key."""
        return {name: value for name, value in self._field_values().items() if isinstance(value, np.ndarray)}

    def _field_values(self) -> dict[str, object]:
        """Return all fields as a dict of values by their keys in model files."""
        return {entry.metadata.get("key", entry.name): getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]

    @classmethod
    @abstractmethod
    def restore(cls, stored: UntrustedComponent) -> FittedColumn:
        """Restore a column from the untrusted entries of a model file; raise a ValueError if they are invalid."""

    def add_to_graph(self, graph: OnnxGraph, cells: str) -> tuple[str, str] | None:
        """Add the encoding of the column to an ONNX graph; return None for types that ONNX does not support.

        ``cells`` is the name of the graph input (n, 1): DOUBLE with NaN for missing values, or STRING. Returns the
        names of the features (n, features) FLOAT, and of the mask (n, 1) BOOL of uninformative cells.
        """
        return None
