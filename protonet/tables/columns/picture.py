"""Columns of picture paths: the embedding of a pretrained network, and fixed image descriptors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from protonet.embeddings.pictures.descriptors import DESCRIPTORS, describe_pictures, list_sizes
from protonet.embeddings.pictures.images import text_to_path
from protonet.embeddings.pictures.reading import map_pictures, need_pillow
from protonet.embeddings.representation import Record, Representation
from protonet.tables.columns.base import FittedColumn, OpenRepresentation
from protonet.tables.columns.text import ColumnEmbedding
from protonet.views.config import Stored, expect

#: Raise it whenever `protonet.embeddings.pictures.descriptors` computes other descriptors.
DESCRIPTOR_VERSION = 1


@dataclass(frozen=True)
class Picture(FittedColumn):
    """A column of pictures."""

    #: Number of descriptors of each kind.
    sizes: tuple[int, ...] = field(default_factory=lambda: tuple(list_sizes().values()))
    side: int = DESCRIPTORS.side  #: Side length in pixels to which pictures are resized for the descriptors.
    #: The embedding of a network, which precedes the descriptors; None for descriptors only.
    embedding: ColumnEmbedding | None = field(default=None, compare=False)
    show_progress: bool = field(default=False, compare=False, repr=False)  #: Whether to show a progress bar.
    kind: ClassVar[str] = "picture"
    modality: ClassVar[str | None] = "picture"
    may_be_group: ClassVar[bool] = False

    @classmethod
    def fit(cls, cells: np.ndarray, representation: Representation | None, *, show_progress: bool = False) -> Picture:
        """Fit to the paths (n,) of pictures."""
        if representation is None:
            return cls(show_progress=show_progress)
        embedding = ColumnEmbedding.fit(representation, _to_paths(cells), show_progress=show_progress)
        return cls(embedding=embedding, show_progress=show_progress)

    @property
    def embedding_width(self) -> int:
        """The width of the embedding, or 0."""
        return 0 if self.embedding is None else self.embedding.record.width

    @property
    def feature_suffixes(self) -> tuple[str, ...]:
        """The index of each feature."""
        return tuple(f" {index}" for index in range(self.embedding_width + sum(self.sizes)))

    @property
    def block_sizes(self) -> list[int]:
        """Features of the embedding are rescaled one by one, descriptors by kind."""
        return [1] * self.embedding_width + list(self.sizes)

    @property
    def standalone_sizes(self) -> list[int]:
        """Sizes of the embedding and of each kind of descriptor."""
        return [*[self.embedding_width] * bool(self.embedding_width), *self.sizes]

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32."""
        need_pillow()
        paths = _to_paths(cells)
        if not paths:
            return np.empty((0, len(self.feature_suffixes)), np.float32)
        descriptors = map_pictures(paths, self.side, self.side, describe_pictures, shown=self.show_progress).numpy()
        if self.embedding is None:
            return descriptors
        return np.concatenate([self.embedding.encode(paths), descriptors], axis=1)

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray | None:
        """Embed class names (n,) with a joint network; None for other networks."""
        return None if self.embedding is None else self.embedding.encode_class_names(texts.tolist())

    @property
    def record(self) -> Record | None:
        """The record of the network, if any."""
        return None if self.embedding is None else self.embedding.record

    def attach(self, open_representation: OpenRepresentation, *, show_progress: bool) -> Picture:
        """Return the column with its network opened."""
        if self.embedding is None:
            return self
        embedding = self.embedding.attach(open_representation, show_progress=show_progress)
        return replace(self, embedding=embedding, show_progress=show_progress)

    def summary(self) -> str:
        """Return the network and the number of descriptors."""
        network = "" if self.embedding is None else f"by {self.embedding.record.summary()}, and "
        return f"pictures, {network}{sum(self.sizes):,} features of {self.side} x {self.side} pixels"

    def describe(self) -> dict[str, object]:
        """Return the sizes and the embedding."""
        embedding = {} if self.embedding is None else self.embedding.describe()
        return {"sizes": list(self.sizes), "side": self.side, "version": DESCRIPTOR_VERSION, **embedding}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the mean of the embedding."""
        return {} if self.embedding is None else {"centre": self.embedding.mean}

    @classmethod
    def restore(cls, stored: Stored) -> Picture:
        """Restore the column, without its representation."""
        sizes, side = stored.entry("sizes", list), stored.get_int("side", 2**15)
        embedding = ColumnEmbedding.restore(stored) if "representation" in stored.description else None
        same = tuple(sizes) == tuple(list_sizes().values()) and side == DESCRIPTORS.side
        version = stored.entry("version", int)
        expect(same and version == DESCRIPTOR_VERSION, "features of pictures of another version")
        takes_pictures = embedding is None or embedding.record.modality == "picture"
        expect(takes_pictures, "a picture column whose representation does not take pictures")
        return cls(tuple(sizes), side, embedding)


def _to_paths(cells: np.ndarray) -> list[Path]:
    """Return cells (n,) as paths."""
    return [text_to_path(str(cell)) for cell in cells.tolist()]
