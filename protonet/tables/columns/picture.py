"""A column of pictures' paths: our own fixed features of them, or the embeddings of a backbone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from protonet._checks import refuse
from protonet.representations.pictures.descriptors import RULES, describe_pictures, list_sizes
from protonet.representations.pictures.files import Backbone, Preprocessing, hash_file, open_backbone
from protonet.representations.pictures.reading import map_pictures, need_pillow
from protonet.views.view import Graph, Stored, expect

#: Of the features; to be raised whenever `protonet.representations.pictures.descriptors` gives other ones.
VERSION = 1


@dataclass(frozen=True)
class Picture:
    """A column of pictures.

    Args:
        sizes: How many features each part has; parts count as one thing each.
        side: Pixels per side that pictures are brought to, for features of our own.
        preprocessing: How pictures are brought to a backbone, and which one; None for features of our own.
        backbone: The backbone itself, which no model file holds.
        shown: Whether progress is shown.
    """

    sizes: tuple[int, ...] = field(default_factory=lambda: tuple(list_sizes().values()))
    side: int = RULES.side
    preprocessing: Preprocessing | None = None
    backbone: Backbone | None = field(default=None, compare=False, repr=False)
    shown: bool = field(default=False, compare=False, repr=False)
    kind: ClassVar[str] = "picture"

    @classmethod
    def of(cls, backbone: Backbone, *, shown: bool = False) -> Picture:
        """Return the column for a backbone."""
        return cls((backbone.width,), 0, backbone.preprocessing, backbone, shown)

    @property
    def parts(self) -> tuple[str, ...]:
        """A number for each feature."""
        return tuple(f" {number}" for number in range(sum(self.sizes)))

    @property
    def blocks(self) -> list[int]:
        """How many features count as one thing where features are made alike: those of a part, each of a backbone."""
        return list(self.sizes) if self.preprocessing is None else [1] * sum(self.sizes)

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32.

        Raises:
            InputError: A picture cannot be read, or its embedding is not finite.
        """
        need_pillow()
        paths = [Path(str(cell)) for cell in cells.tolist()]
        if not paths:
            return np.empty((0, sum(self.sizes)), np.float32)
        if self.preprocessing is None:
            return map_pictures(paths, self.side, self.side, describe_pictures, shown=self.shown).numpy()
        assert self.backbone is not None, "attach gives it"
        return self.backbone.embed(paths, shown=self.shown)

    def attach(self, backbone: str | Path | None) -> Picture:
        """Return the column with its backbone, which no model file holds.

        Args:
            backbone: A file, or None for none.

        Raises:
            InputError: It is another backbone than in fit, or none is given where one is needed, or the other way
                round.
        """
        settings = self.preprocessing
        if settings is None:
            if backbone is not None:
                refuse("--backbone", "be left out: the model has features of its own", backbone, "Leave it out.")
            return self
        asked = f"be that of fit, {settings.tell()}"
        if backbone is None:
            refuse("--backbone", asked, "none", f"Pass --backbone {settings.file}.")
        path = Path(backbone)
        if path.is_file() and (digest := hash_file(path)) != settings.digest:
            refuse("--backbone", asked, f"{path} ({digest[:8]})", "Pass that file, or fit again.")
        size = settings.height, settings.width
        opened = open_backbone(path, size=size, mean=settings.mean, std=settings.std)
        return replace(self, backbone=opened)

    def find_strange(self, cells: np.ndarray) -> np.ndarray:
        """Return none: what is no picture is an error."""
        return np.zeros(len(cells), bool)

    def tell(self) -> str:
        """Return what people read of it."""
        if self.preprocessing is None:
            return f"pictures, {sum(self.sizes):,} features of {self.side} x {self.side} pixels"
        return f"pictures, {sum(self.sizes):,} features by {self.preprocessing.tell()}"

    def describe(self) -> dict[str, Any]:
        """Return sizes and settings."""
        own = None if self.preprocessing is None else self.preprocessing.describe()
        return {"sizes": list(self.sizes), "side": self.side, "version": VERSION, "backbone": own}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return none."""
        return {}

    @classmethod
    def restore(cls, stored: Stored) -> Picture:
        """Build the column again, without what no file holds."""
        sizes, side = stored.entry("sizes", list), stored.whole("side", 2**15)
        expect(bool(sizes) and all(type(each) is int and 0 < each < 2**24 for each in sizes), "no sizes of pictures")
        described = stored.description.get("backbone")
        if described is None:
            same = tuple(sizes) == tuple(list_sizes().values()) and side == RULES.side
            expect(same and stored.entry("version", int) == VERSION, "features of pictures of another version")
            return cls(tuple(sizes), side)
        expect(len(sizes) == 1 and side == 0, "a backbone beside features")
        return cls(tuple(sizes), 0, Preprocessing.restore(Stored(described, {})))

    def add_to_graph(self, graph: Graph, cells: str) -> None:
        """Add nothing: ONNX reads no files."""
        return
