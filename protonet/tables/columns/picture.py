"""A column of pictures' paths: our own fixed features of them, and beside them the embedding of a network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from protonet.representations.pictures.descriptors import RULES, describe_pictures, list_sizes
from protonet.representations.pictures.files import Preprocessing
from protonet.representations.pictures.images import text_to_path
from protonet.representations.pictures.reading import map_pictures, need_pillow
from protonet.representations.representation import Record, Representation
from protonet.tables.columns.embedded import Embedded
from protonet.tables.columns.kind import Column, Find
from protonet.views.view import Stored, expect

#: Of the features; to be raised whenever `protonet.representations.pictures.descriptors` gives other ones.
VERSION = 1


@dataclass(frozen=True)
class Picture(Column):
    """A column of pictures.

    Args:
        sizes: How many features each part of our own has; parts count as one thing each. None in older model files
            that have a network.
        side: Pixels per side that pictures are brought to, for features of our own.
        embedded: What a network makes of them, before our own features; None for these alone.
        shown: Whether progress is shown.
    """

    sizes: tuple[int, ...] = field(default_factory=lambda: tuple(list_sizes().values()))
    side: int = RULES.side
    embedded: Embedded | None = field(default=None, compare=False)
    shown: bool = field(default=False, compare=False, repr=False)
    kind: ClassVar[str] = "picture"
    takes: ClassVar[str | None] = "picture"
    names_sources: ClassVar[bool] = False

    @classmethod
    def fit(cls, cells: np.ndarray, representation: Representation | None, *, shown: bool = False) -> Picture:
        """Fit to the paths (n,) of pictures."""
        if representation is None:
            return cls(shown=shown)
        return cls(embedded=Embedded.fit(representation, _list_paths(cells), shown=shown), shown=shown)

    @property
    def width(self) -> int:
        """Numbers of the embedding."""
        return 0 if self.embedded is None else self.embedded.record.width

    @property
    def parts(self) -> tuple[str, ...]:
        """A number for each feature."""
        return tuple(f" {number}" for number in range(self.width + sum(self.sizes)))

    @property
    def blocks(self) -> list[int]:
        """How many features count as one thing where features are made alike: each of a network, those of a part."""
        return [1] * self.width + list(self.sizes)

    @property
    def alone(self) -> list[int]:
        """How many features each part has that views may take alone."""
        if not self.sizes:
            return []
        return [*[self.width] * bool(self.width), *self.sizes]

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32.

        Raises:
            InputError: A picture cannot be read, or its embedding is not finite.
        """
        need_pillow()
        paths = _list_paths(cells)
        if not paths:
            return np.empty((0, len(self.parts)), np.float32)
        found = [] if self.embedded is None else [self.embedded.encode(paths)]
        if self.sizes:
            found.append(map_pictures(paths, self.side, self.side, describe_pictures, shown=self.shown).numpy())
        return np.concatenate(found, axis=1)

    def read_names(self, texts: np.ndarray) -> np.ndarray | None:
        """Return what classes are called (n,) as the first of the features; None where no joint network reads them."""
        return None if self.embedded is None else self.embedded.join(texts.tolist())

    @property
    def read_by(self) -> Record | None:
        """What embeds it, beside our own features."""
        return None if self.embedded is None else self.embedded.record

    def attach(self, find: Find, *, shown: bool) -> Picture:
        """Return the column with its representation."""
        if self.embedded is None:
            return self
        return replace(self, embedded=self.embedded.attach(find, shown=shown), shown=shown)

    def tell(self) -> str:
        """Return what people read of it."""
        own = f"{sum(self.sizes):,} features of {self.side} x {self.side} pixels"
        told = [] if self.embedded is None else [f"by {self.embedded.record.tell()}"]
        return f"pictures, {', and '.join([*told, *[own] * bool(self.sizes)])}"

    def describe(self) -> dict[str, Any]:
        """Return sizes and what embeds."""
        more = {} if self.embedded is None else self.embedded.describe()
        return {"sizes": list(self.sizes), "side": self.side, "version": VERSION, **more}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the mean of the embedding."""
        return {} if self.embedded is None else {"centre": self.embedded.mean}

    @classmethod
    def restore(cls, stored: Stored) -> Picture:
        """Build the column again, without what no file holds."""
        sizes, side = stored.entry("sizes", list), stored.whole("side", 2**15)
        expect(all(type(size) is int and 0 < size < 2**24 for size in sizes), "no sizes of pictures")
        described = stored.description.get("backbone")
        if described is not None:
            expect(len(sizes) == 1 and side == 0, "a backbone beside features")
            return cls((), 0, _restore_backbone(described, sizes[0]))
        embedded = Embedded.restore(stored) if "representation" in stored.description else None
        if embedded is None or sizes:
            same = tuple(sizes) == tuple(list_sizes().values()) and side == RULES.side
            expect(same and stored.entry("version", int) == VERSION, "features of pictures of another version")
        expect(embedded is None or embedded.record.takes == "picture", "a column of pictures that takes none")
        return cls(tuple(sizes), side, embedded)


def _list_paths(cells: np.ndarray) -> list[Path]:
    """Return cells (n,) as paths."""
    return [text_to_path(str(cell)) for cell in cells.tolist()]


def _restore_backbone(described: Any, width: int) -> Embedded:
    """Return what older model files say of a network: its embedding as it is, without features of our own."""
    settings = Preprocessing.restore(Stored(described, {}))
    record = Record(settings.write(), "picture", width, settings.hash(), "")
    return Embedded(record, np.zeros(width, np.float32), 1.0)
