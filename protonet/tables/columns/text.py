"""A column of free text: the directions in which the rows' words and parts of words differ most."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from protonet.tables.columns.parsing import write_cells
from protonet.views.view import Graph, Stored

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(frozen=True)
class TextRules:
    """What is counted in a text."""

    sizes: tuple[int, ...] = (3, 4, 5)  #: Characters of a part of a word; its ends are one each.
    least: int = 2  #: Rows that have to share a part.
    most: int = 4096  #: Parts, those that most rows have.
    rows: int = 4096  #: Rows that are looked at, spread over all.
    share: float = 0.25  #: Of the rows, how many directions there are, ...
    rank: int = 24  #: ... and at most so many.


TEXTS = TextRules()


@dataclass(frozen=True, eq=False)
class Text:
    """A column of free text.

    Args:
        grams: The words and parts of words that count, in lower case.
        scales: (grams,) what each is worth: the rarer, the more.
        basis: (grams, parts) the directions.
        mean: (parts,) of the rows of fit.

    Source: Manning, Raghavan and Schuetze, "Introduction to Information Retrieval" (2008), sec. 6.4 (weights) and 18.4
        (directions by singular values).
    """

    grams: tuple[str, ...]
    scales: np.ndarray
    basis: np.ndarray
    mean: np.ndarray
    kind: ClassVar[str] = "text"

    @classmethod
    def fit(cls, cells: np.ndarray) -> Text:
        """Fit to cells (n,); there may be no parts, where no two rows share a part of a word."""
        cells = np.sort(write_cells(cells))  # their order leaves no trace, also where directions are as wide as others
        cells = cells[:: -(-len(cells) // TEXTS.rows)]
        counted = list(map(count_grams, cells))
        rows_with = Counter(gram for own in counted for gram in own)
        # What all rows have tells them apart by how often.
        differs = {
            gram for gram, rows in rows_with.items() if len({own[gram] for own in counted}) > 1 or rows < len(cells)
        }
        shared = [(-rows, gram) for gram, rows in rows_with.items() if rows >= TEXTS.least and gram in differs]
        grams = tuple(sorted(gram for _, gram in sorted(shared)[: TEXTS.most]))
        scales = np.array([1 + math.log(len(cells) / rows_with[gram]) for gram in grams], np.float32)
        empty = np.zeros((len(grams), 0)), np.zeros(0)
        x = cls(grams, scales, *empty)._weigh(cells).toarray()
        mean = x.mean(axis=0)
        values, left = np.linalg.eigh((x - mean) @ (x - mean).T / len(x))
        rank = min(TEXTS.rank, max(1, round(TEXTS.share * len(x))), int((values > 1e-9).sum()))
        values, left = values[::-1][:rank], left[:, ::-1][:, :rank]
        basis = (x - mean).T @ left / np.sqrt(values * len(x)) / math.sqrt(values.sum() or 1.0)
        return cls(grams, scales, basis.astype(np.float32), (mean @ basis).astype(np.float32))

    @property
    def parts(self) -> tuple[str, ...]:
        """The directions, the widest first."""
        return tuple(f" text {number + 1}" for number in range(len(self.mean)))

    @cached_property
    def _places(self) -> dict[str, int]:
        """The place of each part of a word."""
        return {gram: place for place, gram in enumerate(self.grams)}

    def _weigh(self, cells: np.ndarray) -> sparse.csr_matrix:
        """Return rows (n, grams) of unit norm, or of zeros."""
        from scipy import sparse  # noqa: PLC0415 - slow to import

        ends, places, values = [0], [], []
        for cell in cells:
            for gram, number in count_grams(cell).items():
                place = self._places.get(gram)
                if place is not None:
                    places.append(place)
                    values.append((1 + math.log(number)) * self.scales[place])
            ends.append(len(places))
        x = sparse.csr_matrix((values, places, ends), shape=(len(cells), len(self.grams)))
        norms = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
        return sparse.diags(1 / np.where(norms > 0, norms, 1.0)) @ x

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32."""
        return np.asarray(self._weigh(write_cells(cells)) @ self.basis - self.mean, np.float32)

    def find_strange(self, cells: np.ndarray) -> np.ndarray:
        """Return False: anything is text."""
        return np.zeros(len(cells), bool)

    def tell(self) -> str:
        """Return the kind and its size."""
        return f"text: {len(self.mean)} directions of {len(self.grams)} words and parts of words"

    def describe(self) -> dict[str, Any]:
        """Return the words and parts of words."""
        return {"grams": list(self.grams)}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the rest."""
        return {"scales": self.scales, "basis": self.basis, "mean": self.mean}

    @classmethod
    def restore(cls, stored: Stored) -> Text:
        """Build the column again."""
        grams, mean = stored.names("grams"), stored.take("mean", None)
        scales, basis = stored.take("scales", len(grams)), stored.take("basis", len(grams), len(mean))
        return cls(grams, *(tensor.numpy() for tensor in (scales, basis, mean)))

    def add_to_graph(self, graph: Graph, cells: str) -> None:
        """Return None: ONNX has no such parts of words."""


def count_grams(text: str) -> Counter[str]:
    """Count the words of a text, with a space at both ends, and the parts of those words."""
    found: Counter[str] = Counter()
    for bare in re.findall(r"\w+", text.lower()):
        word = f" {bare} "
        found[word] += 1
        for size in TEXTS.sizes:
            if size < len(word):
                found.update(word[first : first + size] for first in range(len(word) - size + 1))
    return found
