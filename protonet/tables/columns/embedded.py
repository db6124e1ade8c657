"""Columns that a representation reads: its embedding, and a column of free text with it beside what words tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from protonet.representations.opening import reopen
from protonet.representations.representation import Record, Representation
from protonet.tables.columns.kind import Column, Find
from protonet.tables.columns.parsing import write_cells
from protonet.tables.columns.text import Text
from protonet.views.view import Stored, expect

#: What the words are multiplied with, beside an embedding, and all of a text that is beside other columns; see
#: docs/decisions/representations.md.
WORDS, BESIDE = 0.5, 0.3


@dataclass(frozen=True, eq=False)
class Embedded:
    """The embedding of a column's cells, of a total variance of 1 over the rows of fit.

    Args:
        record: What embeds them.
        mean: (width,) of the rows of fit, subtracted.
        scale: > 0, what is divided by.
        representation: It itself, which no model file holds.
        shown: Whether progress is shown.
        typed: As of the representation, to find it again; no model file holds it.
    """

    record: Record
    mean: np.ndarray
    scale: float
    representation: Representation | None = field(default=None, repr=False)
    shown: bool = False
    typed: str = ""

    @classmethod
    def fit(cls, representation: Representation, items: Sequence[Any], *, shown: bool) -> Embedded:
        """Fit to the items (n,) that are there, texts or paths of pictures."""
        rows = representation.embed(items, shown=shown).astype(np.float64)
        mean = rows.mean(axis=0) if len(rows) else np.zeros(representation.record.width)
        scale = math.sqrt(float(np.square(rows - mean).sum(axis=1).mean())) if len(rows) else 0.0
        mean = mean.astype(np.float32)
        return cls(representation.record, mean, scale or 1.0, representation, shown, representation.typed)

    def encode(self, items: Sequence[Any]) -> np.ndarray:
        """Return (n, width) float32; empty texts are what the mean is: zeros.

        Raises:
            InputError: A picture cannot be read, or an embedding is not finite.
        """
        rows = self._open().embed(items, shown=self.shown)
        x = (rows - self.mean) / np.float32(self.scale)
        if self.record.takes == "text":
            x[[not text.strip() for text in items]] = 0
        return np.asarray(x, np.float32)

    def find_unread(self, texts: Sequence[str]) -> np.ndarray:
        """Return which texts (n,) bool the network reads nothing of."""
        return ~self._open().find_read(texts)

    def join(self, texts: Sequence[str]) -> np.ndarray | None:
        """Return texts (n, width) float32 as items of a joint network, at their usual length; None of another one."""
        read = self._open().join
        if read is None:
            return None
        rows = read(texts)
        usual = math.sqrt(float(np.square(self.mean).sum()) + self.scale**2)  # root mean square of the rows of fit
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / norms * usual / self.scale, np.float32)

    def _open(self) -> Representation:
        """Return the network, which a copy, a pickle and a file lack."""
        return self.representation or reopen(self.record, [self.typed] if self.typed else None)

    def attach(self, find: Find, *, shown: bool) -> Embedded:
        """Return it with its representation."""
        representation = find(self.record)
        return replace(self, representation=representation, shown=shown, typed=representation.typed)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the network out."""
        return {**vars(self), "representation": None}

    def describe(self) -> dict[str, Any]:
        """Return the record and the scale."""
        return {"representation": self.record.describe(), "scale": float(self.scale)}

    @classmethod
    def restore(cls, stored: Stored) -> Embedded:
        """Build it again from a description that may say anything, without what no file holds."""
        record = Record.restore(Stored(stored.entry("representation", dict), {}))
        scale = stored.number("scale", 1e-30)
        return cls(record, stored.take("centre", record.width).numpy(), scale)


@dataclass(frozen=True, eq=False)
class EmbeddedText(Column):
    """A column of free text: its embedding, and beside it the directions of its words.

    Args:
        embedded: The embedding.
        words: The words and parts of words; there may be no directions.
        share: What all of it is multiplied with: less than 1 beside other columns, which it would drown.
    """

    embedded: Embedded
    words: Text
    share: float = 1.0
    kind: ClassVar[str] = "embedded text"
    takes: ClassVar[str | None] = "text"
    drowns: ClassVar[bool] = True

    @classmethod
    def fit(
        cls,
        cells: np.ndarray,
        representation: Representation,
        *,
        shown: bool = False,
        words: Text | None = None,
        alone: bool = True,
    ) -> EmbeddedText:
        """Fit to cells (n,), of the only column or of one beside others; their words may have been fitted already."""
        present = [text for text in write_cells(cells).tolist() if text.strip()]
        embedded = Embedded.fit(representation, present, shown=shown)
        return cls(embedded, Text.fit(cells) if words is None else words, 1.0 if alone else BESIDE)

    @property
    def parts(self) -> tuple[str, ...]:
        """The numbers of the embedding, and the words' directions."""
        return (*(f" meaning {number + 1}" for number in range(self.embedded.record.width)), *self.words.parts)

    @property
    def blocks(self) -> list[int]:
        """How many features count as one thing where features are made alike."""
        sizes = [self.embedded.record.width, len(self.words.parts)]
        return [size for size in sizes if size]

    @property
    def alone(self) -> list[int]:
        """How many features each part has that views may take alone, where there are other columns."""
        return [len(self.parts)]

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32.

        Raises:
            InputError: An embedding is not finite.
        """
        cells = write_cells(cells)
        meaning, words = self.embedded.encode(cells.tolist()), self.words.encode(cells)
        return np.concatenate([meaning, np.float32(WORDS) * words], axis=1) * np.float32(self.share)

    def find_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) bool neither the network nor the words say anything of."""
        cells = write_cells(cells)
        return np.asarray(self.embedded.find_unread(cells.tolist()) & self.words.find_uninformative(cells))

    @property
    def read_by(self) -> Record:
        """What embeds it."""
        return self.embedded.record

    def attach(self, find: Find, *, shown: bool) -> EmbeddedText:
        """Return the column with its representation."""
        return replace(self, embedded=self.embedded.attach(find, shown=shown))

    def read_names(self, texts: np.ndarray) -> np.ndarray:
        """Return what classes are called (n,) as the first of the features, here all of them."""
        return self.encode(texts)

    def tell(self) -> str:
        """Return what people read of it."""
        words = f", and {self.words.tell().removeprefix('text: ')}" if self.words.parts else ""
        return f"text by {self.embedded.record.tell()}{words}"

    def describe(self) -> dict[str, Any]:
        """Return what embeds, and the words."""
        return self.embedded.describe() | self.words.describe() | {"share": self.share}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the rest."""
        return {"centre": self.embedded.mean, **self.words.tensors()}

    @classmethod
    def restore(cls, stored: Stored) -> EmbeddedText:
        """Build the column again, without what no file holds."""
        embedded = Embedded.restore(stored)
        expect(embedded.record.takes == "text", "a column of text that takes none")
        share = stored.number("share", 1e-3, 1.0)
        return cls(embedded, Text.restore(stored), share)
