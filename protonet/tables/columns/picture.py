"""Columns of paths of pictures, encoded by a pretrained network and by fixed image descriptors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder
from protonet.embeddings.pictures.descriptors import PICTURE_SIDE, compute_descriptors, descriptor_part_sizes
from protonet.embeddings.pictures.reading import map_pictures, require_pillow, text_to_path
from protonet.tables.columns.base import EncoderLoader, FittedColumn
from protonet.tables.columns.text import ColumnEmbedding
from protonet.views.config import UntrustedComponent, raise_unless

#: Version of the image descriptors. Increase it if `protonet.embeddings.pictures.descriptors` computes other values.
DESCRIPTOR_VERSION = 1


@dataclass(frozen=True)
class Picture(FittedColumn):
    """A fitted column of picture paths. Its features are an embedding, if there is a network, and image descriptors."""

    #: The number of features of each image descriptor.
    descriptor_sizes: tuple[int, ...] = field(default_factory=lambda: tuple(descriptor_part_sizes().values()))
    #: Side length in pixels to which pictures are resized for the descriptors.
    picture_side: int = PICTURE_SIDE
    #: The embedding by a pretrained network. Its features precede the descriptors. None if there is no network.
    embedding: ColumnEmbedding | None = field(default=None, compare=False)
    show_progress: bool = field(default=False, compare=False, repr=False)  #: Whether to show a progress bar.
    column_type: ClassVar[str] = "picture"
    modality: ClassVar[str | None] = "picture"
    may_be_group: ClassVar[bool] = False

    @classmethod
    def fit(cls, cells: np.ndarray, encoder: PretrainedEncoder | None, *, show_progress: bool = False) -> Picture:
        """Fit a column of pictures at paths (n,), by image descriptors and, unless it is None, a pretrained encoder."""
        if encoder is None:
            return cls(show_progress=show_progress)
        embedding = ColumnEmbedding.fit(encoder, _to_paths(cells), show_progress=show_progress)
        return cls(embedding=embedding, show_progress=show_progress)

    @property
    def embedding_width(self) -> int:
        """The number of dimensions of the embedding; 0 if there is none."""
        return 0 if self.embedding is None else self.embedding.record.width

    @property
    def feature_name_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature's name: a space and the index of the feature."""
        return tuple(f" {index}" for index in range(self.embedding_width + sum(self.descriptor_sizes)))

    @property
    def feature_block_sizes(self) -> list[int]:
        """The number of features of each block: 1 for each dimension of the embedding, then each descriptor's size."""
        return [1] * self.embedding_width + list(self.descriptor_sizes)

    @property
    def standalone_feature_block_sizes(self) -> list[int]:
        """The size of each block that a feature map (view) may use alone: the embedding, if any; each descriptor."""
        return [*[self.embedding_width] * bool(self.embedding_width), *self.descriptor_sizes]

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32 of the pictures at paths (n,)."""
        require_pillow()
        paths = _to_paths(cells)
        if not paths:
            return np.empty((0, len(self.feature_name_suffixes)), np.float32)
        descriptors = map_pictures(
            paths, self.picture_side, self.picture_side, compute_descriptors, show_progress=self.show_progress
        ).numpy()
        if self.embedding is None:
            return descriptors
        return np.concatenate([self.embedding.encode(paths), descriptors], axis=1)

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray | None:
        """Embed class names (n,) as pictures, (n, width) float32, by a joint network such as CLIP; None without one."""
        return None if self.embedding is None else self.embedding.encode_class_names(texts.tolist())

    @property
    def encoder_record(self) -> EncoderRecord | None:
        """The record that identifies the pretrained network; None if there is none."""
        return None if self.embedding is None else self.embedding.record

    def with_loaded_encoder(self, load_encoder: EncoderLoader, *, show_progress: bool) -> Picture:
        """Return a copy of the column with its pretrained network loaded; return the column itself if it has none."""
        if self.embedding is None:
            return self
        embedding = self.embedding.with_loaded_encoder(load_encoder, show_progress=show_progress)
        return replace(self, embedding=embedding, show_progress=show_progress)

    def summary(self) -> str:
        """Summarize the network and the number of descriptor features in one line, for users."""
        network = "" if self.embedding is None else f"by {self.embedding.record.summary()}, and "
        side, n_features = self.picture_side, sum(self.descriptor_sizes)
        return f"pictures, {network}{n_features:,} features of {side} x {side} pixels"

    def stored_values(self) -> dict[str, object]:
        """Return the settings of the descriptors and of the embedding as JSON values."""
        settings = {"sizes": list(self.descriptor_sizes), "side": self.picture_side, "version": DESCRIPTOR_VERSION}
        return settings | ({} if self.embedding is None else self.embedding.stored_values())

    def stored_arrays(self) -> dict[str, np.ndarray]:
        """Return a dict with the mean of the embedding as "centre"; an empty dict if there is no embedding."""
        return {} if self.embedding is None else {"centre": self.embedding.mean}

    @classmethod
    def restore(cls, stored: UntrustedComponent) -> Picture:
        """Restore the column from the untrusted entries of a model file. Its network is not loaded yet."""
        sizes, side = stored.get_entry("sizes", list), stored.get_int("side", 2**15)
        embedding = ColumnEmbedding.restore(stored) if "representation" in stored.description else None
        same = tuple(sizes) == tuple(descriptor_part_sizes().values()) and side == PICTURE_SIDE
        version = stored.get_entry("version", int)
        raise_unless(same and version == DESCRIPTOR_VERSION, "features of pictures of another version")
        takes_pictures = embedding is None or embedding.record.modality == "picture"
        raise_unless(takes_pictures, "a picture column whose encoder does not take pictures")
        return cls(tuple(sizes), side, embedding)


def _to_paths(cells: np.ndarray) -> list[Path]:
    """Convert cells (n,) of text to a list of n paths."""
    return [text_to_path(str(cell)) for cell in cells.tolist()]
