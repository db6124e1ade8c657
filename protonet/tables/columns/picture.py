"""Columns of paths of pictures, encoded by a pretrained network and by fixed image descriptors."""

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

#: Version of the descriptors, incremented if `protonet.embeddings.pictures.descriptors` computes other ones.
DESCRIPTOR_VERSION = 1


@dataclass(frozen=True)
class Picture(FittedColumn):
    """A column of paths of pictures."""

    #: Number of descriptors of each kind.
    sizes: tuple[int, ...] = field(default_factory=lambda: tuple(list_sizes().values()))
    side: int = DESCRIPTORS.side  #: Side length in pixels to which pictures are resized for the descriptors.
    #: The embedding by a network, whose features precede the descriptors; None for descriptors only.
    embedding: ColumnEmbedding | None = field(default=None, compare=False)
    show_progress: bool = field(default=False, compare=False, repr=False)  #: Whether to show a progress bar.
    kind: ClassVar[str] = "picture"
    modality: ClassVar[str | None] = "picture"
    may_be_group: ClassVar[bool] = False

    @classmethod
    def fit(cls, cells: np.ndarray, representation: Representation | None, *, show_progress: bool = False) -> Picture:
        """Fit a column of pictures to their paths (n,); None for no pretrained network."""
        if representation is None:
            return cls(show_progress=show_progress)
        embedding = ColumnEmbedding.fit(representation, _to_paths(cells), show_progress=show_progress)
        return cls(embedding=embedding, show_progress=show_progress)

    @property
    def embedding_width(self) -> int:
        """The number of dimensions of the embedding; 0 if there is none."""
        return 0 if self.embedding is None else self.embedding.record.width

    @property
    def feature_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature: its index."""
        return tuple(f" {index}" for index in range(self.embedding_width + sum(self.sizes)))

    @property
    def block_sizes(self) -> list[int]:
        """The number of features of each block that is rescaled as a whole: dimensions, and kinds of descriptors."""
        return [1] * self.embedding_width + list(self.sizes)

    @property
    def standalone_sizes(self) -> list[int]:
        """The number of features of the embedding, if there is one, and of each kind of descriptor."""
        return [*[self.embedding_width] * bool(self.embedding_width), *self.sizes]

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32 of the pictures at paths (n,)."""
        need_pillow()
        paths = _to_paths(cells)
        if not paths:
            return np.empty((0, len(self.feature_suffixes)), np.float32)
        descriptors = map_pictures(paths, self.side, self.side, describe_pictures, shown=self.show_progress).numpy()
        if self.embedding is None:
            return descriptors
        return np.concatenate([self.embedding.encode(paths), descriptors], axis=1)

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray | None:
        """Embed class names (n,) by a network of pictures and texts; None if there is no such network."""
        return None if self.embedding is None else self.embedding.encode_class_names(texts.tolist())

    @property
    def record(self) -> Record | None:
        """The record of the pretrained network; None if there is none."""
        return None if self.embedding is None else self.embedding.record

    def attach(self, open_representation: OpenRepresentation, *, show_progress: bool) -> Picture:
        """Return the column with its pretrained network opened, if it has one."""
        if self.embedding is None:
            return self
        embedding = self.embedding.attach(open_representation, show_progress=show_progress)
        return replace(self, embedding=embedding, show_progress=show_progress)

    def summary(self) -> str:
        """Summarize the network and the number of descriptors in one line."""
        network = "" if self.embedding is None else f"by {self.embedding.record.summary()}, and "
        return f"pictures, {network}{sum(self.sizes):,} features of {self.side} x {self.side} pixels"

    def describe(self) -> dict[str, object]:
        """Return the settings of the descriptors and of the embedding as JSON values."""
        embedding = {} if self.embedding is None else self.embedding.describe()
        return {"sizes": list(self.sizes), "side": self.side, "version": DESCRIPTOR_VERSION, **embedding}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the mean of the embedding by the name of its tensor."""
        return {} if self.embedding is None else {"centre": self.embedding.mean}

    @classmethod
    def restore(cls, stored: Stored) -> Picture:
        """Restore the column, without its network, from the untrusted entries of a model file."""
        sizes, side = stored.entry("sizes", list), stored.get_int("side", 2**15)
        embedding = ColumnEmbedding.restore(stored) if "representation" in stored.description else None
        same = tuple(sizes) == tuple(list_sizes().values()) and side == DESCRIPTORS.side
        version = stored.entry("version", int)
        expect(same and version == DESCRIPTOR_VERSION, "features of pictures of another version")
        takes_pictures = embedding is None or embedding.record.modality == "picture"
        expect(takes_pictures, "a picture column whose representation does not take pictures")
        return cls(tuple(sizes), side, embedding)


def _to_paths(cells: np.ndarray) -> list[Path]:
    """Convert cells (n,) to a list of paths."""
    return [text_to_path(str(cell)) for cell in cells.tolist()]
