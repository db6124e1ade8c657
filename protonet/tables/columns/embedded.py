"""Pretrained embeddings of columns, and text columns that combine one with components of their words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from protonet.embeddings.opening import reopen
from protonet.embeddings.representation import Record, Representation
from protonet.tables.columns.base import FittedColumn, OpenRepresentation
from protonet.tables.columns.parsing import format_cells
from protonet.tables.columns.text import Text
from protonet.views.config import Stored, expect

#: Weight of the words beside an embedding, and of a text beside other columns: docs/decisions/representations.md.
WORD_WEIGHT, SECONDARY_WEIGHT = 0.5, 0.3


@dataclass(frozen=True, eq=False)
class ColumnEmbedding:
    """The embedding of a column's cells, with a total variance of 1 over the training rows.

    Args:
        record: Identifies the representation.
        mean: (width,) of the training rows, subtracted.
        scale: > 0, the divisor.
        representation: The opened representation, which model files do not store.
        show_progress: Whether to show a progress bar.
        path: The folder or file that the user opened, to open it again; model files do not store it.
    """

    record: Record
    mean: np.ndarray
    scale: float
    representation: Representation | None = field(default=None, repr=False)
    show_progress: bool = False
    path: str = ""

    @classmethod
    def fit(cls, representation: Representation, items: Sequence[Any], *, show_progress: bool) -> ColumnEmbedding:
        """Fit to the non-missing items (n,): texts, or paths of pictures."""
        rows = representation.embed(items, shown=show_progress).astype(np.float64)
        mean = rows.mean(axis=0) if len(rows) else np.zeros(representation.record.width)
        scale = math.sqrt(float(np.square(rows - mean).sum(axis=1).mean())) if len(rows) else 0.0
        mean = mean.astype(np.float32)
        return cls(representation.record, mean, scale or 1.0, representation, show_progress, representation.source)

    def encode(self, items: Sequence[Any]) -> np.ndarray:
        """Return the embeddings (n, width) float32; blank texts are zeros, as the mean.

        Raises:
            InputError: A picture cannot be read, or an embedding is not finite.
        """
        rows = self._open().embed(items, shown=self.show_progress)
        x = (rows - self.mean) / np.float32(self.scale)
        if self.record.modality == "text":
            x[[not text.strip() for text in items]] = 0
        return np.asarray(x, np.float32)

    def is_unread(self, texts: Sequence[str]) -> np.ndarray:
        """Return a mask (n,) bool of the texts in which the network knows nothing."""
        return ~self._open().contains_known_words(texts)

    def encode_class_names(self, texts: Sequence[str]) -> np.ndarray | None:
        """Embed texts (n, width) float32 with a joint network, at the norm of items; None for other networks."""
        embed_texts = self._open().embed_texts
        if embed_texts is None:
            return None
        rows = embed_texts(texts)
        norm = math.sqrt(float(np.square(self.mean).sum()) + self.scale**2)  # root mean square of the training rows
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / norms * norm / self.scale, np.float32)

    def _open(self) -> Representation:
        """Return the representation, opened again after pickling or loading."""
        return self.representation or reopen(self.record, [self.path] if self.path else None)

    def attach(self, open_representation: OpenRepresentation, *, show_progress: bool) -> ColumnEmbedding:
        """Return the embedding with its representation opened."""
        representation = open_representation(self.record)
        return replace(self, representation=representation, show_progress=show_progress, path=representation.source)

    def __getstate__(self) -> dict[str, object]:
        """Leave the representation out."""
        return {**vars(self), "representation": None}

    def describe(self) -> dict[str, object]:
        """Return the record and the scale."""
        return {"representation": self.record.describe(), "scale": float(self.scale)}

    @classmethod
    def restore(cls, stored: Stored) -> ColumnEmbedding:
        """Restore the embedding, without its representation, from an untrusted description."""
        record = Record.restore(Stored(stored.entry("representation", dict), {}))
        scale = stored.get_float("scale", 1e-30)
        return cls(record, stored.pop("centre", record.width).numpy(), scale)


@dataclass(frozen=True, eq=False)
class EmbeddedText(FittedColumn):
    """A column of free text: its embedding, and components of its words.

    Args:
        embedding: The embedding.
        words: The components of the words; there may be none.
        weight: Multiplies all features: less than 1 beside other columns, which they would dominate.
    """

    embedding: ColumnEmbedding
    words: Text
    weight: float = 1.0
    kind: ClassVar[str] = "embedded text"
    modality: ClassVar[str | None] = "text"
    dominates: ClassVar[bool] = True

    @classmethod
    def fit(
        cls,
        cells: np.ndarray,
        representation: Representation,
        *,
        show_progress: bool = False,
        words: Text | None = None,
        secondary: bool = False,
    ) -> EmbeddedText:
        """Fit to cells (n,).

        Args:
            cells: The texts.
            representation: Embeds them.
            show_progress: Whether to show a progress bar.
            words: Fitted to the cells; None to fit it now.
            secondary: Whether the table has other columns.
        """
        present = [text for text in format_cells(cells).tolist() if text.strip()]
        embedding = ColumnEmbedding.fit(representation, present, show_progress=show_progress)
        return cls(embedding, Text.fit(cells) if words is None else words, SECONDARY_WEIGHT if secondary else 1.0)

    @property
    def feature_suffixes(self) -> tuple[str, ...]:
        """The embedding, and the components of the words."""
        meanings = (f" meaning {index + 1}" for index in range(self.embedding.record.width))
        return (*meanings, *self.words.feature_suffixes)

    @property
    def block_sizes(self) -> list[int]:
        """Sizes of the embedding and of the words' components, which are rescaled separately."""
        return [size for size in (self.embedding.record.width, len(self.words.feature_suffixes)) if size]

    @property
    def standalone_sizes(self) -> list[int]:
        """The size of all features: views may use them without the other columns."""
        return [len(self.feature_suffixes)]

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return the features (n, features) float32.

        Raises:
            InputError: An embedding is not finite.
        """
        cells = format_cells(cells)
        embeddings, words = self.embedding.encode(cells.tolist()), self.words.encode(cells)
        return np.concatenate([embeddings, np.float32(WORD_WEIGHT) * words], axis=1) * np.float32(self.weight)

    def is_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Return a mask (n,) bool of the cells that neither the network nor the words know."""
        cells = format_cells(cells)
        return np.asarray(self.embedding.is_unread(cells.tolist()) & self.words.is_uninformative(cells))

    @property
    def record(self) -> Record:
        """The record of the representation."""
        return self.embedding.record

    def attach(self, open_representation: OpenRepresentation, *, show_progress: bool) -> EmbeddedText:
        """Return the column with its representation opened."""
        return replace(self, embedding=self.embedding.attach(open_representation, show_progress=show_progress))

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray:
        """Embed class names (n,) as if they were cells."""
        return self.encode(texts)

    def summary(self) -> str:
        """Return the type, the representation and the size of the words."""
        words = f", and {self.words.summary().removeprefix('text: ')}" if self.words.feature_suffixes else ""
        return f"text by {self.record.summary()}{words}"

    def describe(self) -> dict[str, object]:
        """Return the embedding, the words and the weight."""
        return self.embedding.describe() | self.words.describe() | {"share": self.weight}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the mean of the embedding and the weights of the words."""
        return {"centre": self.embedding.mean, **self.words.tensors()}

    @classmethod
    def restore(cls, stored: Stored) -> EmbeddedText:
        """Restore the column, without its representation."""
        embedding = ColumnEmbedding.restore(stored)
        expect(embedding.record.modality == "text", "a text column whose representation does not take texts")
        weight = stored.get_float("share", 1e-3, 1.0)
        return cls(embedding, Text.restore(stored), weight)
