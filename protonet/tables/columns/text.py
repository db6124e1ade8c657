"""A column of free text: the directions in which the rows' words and parts of words differ most."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from protonet.tables.columns.kind import Column
from protonet.tables.columns.parsing import write_cells
from protonet.views.view import Stored

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(frozen=True)
class TextRules:
    """What is counted in a text; chosen on sets that docs/decisions/texts.md names."""

    sizes: tuple[int, ...] = (2, 3, 4, 5)  #: Characters of a part of a word; its ends are one each.
    pairs: bool = True  #: Whether two words that follow one another count as a word, too.
    least: int = 1  #: Rows that have to have it: of few rows, what one alone has may be what new ones share with it.
    common: int = 2  #: Rows that have to share something, for there to be anything at all.
    most: int = 16384  #: Words, and as many parts of words, those that most rows have; or fewer, so that ...
    rows: int = 4096  #: Rows that are looked at, spread over all.
    rank: int = 512  #: Directions, at the most ...
    share: float = 1.0  #: ... and this share of the rows.
    numbers: float = 4e6  #: ... they and as many directions as rows allow are so many numbers, which a file holds.
    apart: bool = True  #: Whether words, and parts of words, are of unit norm each by itself.
    power: float = 0.25  #: Of the variance along a direction, which its coordinate keeps: 1 all of it, 0 none.


TEXTS = TextRules()
#: The same beside other columns, which many directions would drown, and in older files.
FEW = TextRules(
    (3, 4, 5), pairs=False, least=2, most=4096, rank=24, share=0.25, numbers=math.inf, apart=False, power=1.0
)


@dataclass(frozen=True, eq=False)
class Text(Column):
    """A column of free text.

    Args:
        grams: The words and parts of words that count, in lower case.
        scales: (grams,) what each is worth: the rarer, the more.
        basis: (grams, parts) the directions.
        mean: (parts,) of the rows of fit.
        apart: Whether words, and parts of words, are of unit norm each by itself; False in older model files.

    Source: Manning, Raghavan and Schuetze, "Introduction to Information Retrieval" (2008), sec. 6.4 (weights) and 18.4
        (directions by singular values).
    """

    grams: tuple[str, ...]
    scales: np.ndarray
    basis: np.ndarray
    mean: np.ndarray
    apart: bool = True
    kind: ClassVar[str] = "text"
    takes: ClassVar[str | None] = "text"

    @classmethod
    def fit(cls, cells: np.ndarray, *, beside: bool = False) -> Text:
        """Fit to cells (n,), of the only column or of one beside others.

        There may be no parts, where no two rows share a part of a word.
        """
        rules = FEW if beside else TEXTS
        cells = np.sort(write_cells(cells))  # their order leaves no trace, also where directions are as wide as others
        cells = cells[:: max(1, -(-len(cells) // rules.rows))]
        counted = [count_grams(cell, rules.sizes, pairs=rules.pairs) for cell in cells]
        rows_with = Counter(gram for own in counted for gram in own)
        most_often, least_often = Counter[str](), Counter[str]()  # of the rows that have it
        for own in counted:
            for gram, number in own.items():
                most_often[gram] = max(most_often[gram], number)
                least_often[gram] = min(least_often[gram] or number, number)
        # What all rows have tells them apart by how often.
        shared = [
            (-rows, gram)
            for gram, rows in rows_with.items()
            if rows >= rules.least and (rows < len(cells) or most_often[gram] > least_often[gram])
        ]
        if not any(-rows >= rules.common for rows, _ in shared):
            shared = []
        rank = min(rules.rank, max(1, round(rules.share * len(cells))))
        most = int(min(rules.most, rules.numbers / 2 / rank))
        kinds = (True, False) if rules.apart else (None,)
        chosen = [sorted(each for each in shared if kind in {None, is_word(each[1])})[:most] for kind in kinds]
        grams = tuple(sorted(gram for part in chosen for _, gram in part))
        scales = np.array([1 + math.log(len(cells) / rows_with[gram]) for gram in grams], np.float32)
        if not grams:
            return cls(grams, scales, np.zeros((0, 0), np.float32), np.zeros(0, np.float32), rules.apart)
        x = cls(grams, scales, np.zeros((len(grams), 0)), np.zeros(0), rules.apart)._weigh(cells)
        mean = np.asarray(x.mean(axis=0)).ravel()
        centred = _centre_gram(x, mean)
        values, left = np.linalg.eigh(centred / len(cells))
        rank = min(rank, int((values > 1e-9).sum()))
        values, left = values[::-1][:rank], left[:, ::-1][:, :rank]
        directions = x.T @ left - mean[:, None] * left.sum(axis=0)  # (grams, rank)
        kept = values**rules.power
        basis = directions / np.sqrt(values * len(cells)) * np.sqrt(kept / np.where(values > 0, values, 1))
        basis /= math.sqrt(kept.sum() or 1.0)
        return cls(grams, scales, basis.astype(np.float32), (mean @ basis).astype(np.float32), rules.apart)

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
        rules = TEXTS if self.apart else FEW
        for cell in cells:
            for gram, number in count_grams(cell, rules.sizes, pairs=rules.pairs).items():
                place = self._places.get(gram)
                if place is not None:
                    places.append(place)
                    values.append((1 + math.log(number)) * self.scales[place])
            ends.append(len(places))
        x = sparse.csr_matrix((values, places, ends), shape=(len(cells), len(self.grams)))
        if not self.apart:
            return _shorten(x)
        words = np.array([is_word(gram) for gram in self.grams], np.float64)
        some = [_shorten(x @ sparse.diags(each)) for each in (words, 1 - words)]
        return _shorten(some[0] + some[1])

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32."""
        return np.asarray(self._weigh(write_cells(cells)) @ self.basis - self.mean, np.float32)

    def find_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) bool have no known word and no known part of one."""
        return np.asarray(self._weigh(write_cells(cells)).getnnz(axis=1) == 0)

    def tell(self) -> str:
        """Return the kind and its size."""
        return f"text: {len(self.mean)} directions of {len(self.grams)} words and parts of words"

    def describe(self) -> dict[str, Any]:
        """Return the words and parts of words."""
        return {"grams": list(self.grams), "apart": self.apart}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the rest."""
        return {"scales": self.scales, "basis": self.basis, "mean": self.mean}

    @classmethod
    def restore(cls, stored: Stored) -> Text:
        """Build the column again."""
        grams, mean = stored.names("grams"), stored.take("mean", None)
        apart = stored.entry("apart", bool) if "apart" in stored.description else False
        scales, basis = stored.take("scales", len(grams)), stored.take("basis", len(grams), len(mean))
        return cls(grams, scales.numpy(), basis.numpy(), mean.numpy(), apart)


def _shorten(x: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return rows at unit norm; zeros stay zeros."""
    from scipy import sparse  # noqa: PLC0415 - slow to import

    norms = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
    return sparse.diags(1 / np.where(norms > 0, norms, 1.0)) @ x


def _centre_gram(x: sparse.csr_matrix, mean: np.ndarray) -> np.ndarray:
    """Return the products (n, n) of rows less their mean (grams,), which keeps the rows sparse."""
    products = (x @ x.T).toarray()
    along = np.asarray(x @ mean).ravel()
    return np.asarray(products - along[:, None] - along[None, :] + mean @ mean)


def is_word(gram: str) -> bool:
    """Return whether it is a whole word, with a space at both ends."""
    return len(gram) > 2 and gram[0] == gram[-1] == " "


def count_grams(text: str, sizes: tuple[int, ...] = TEXTS.sizes, *, pairs: bool = False) -> Counter[str]:
    """Count the words of a text, with a space at both ends, the parts of those words, and perhaps pairs of words."""
    found: Counter[str] = Counter()
    words = [f" {bare} " for bare in re.findall(r"\w+", text.lower())]
    for word in words:
        found[word] += 1
        for size in sizes:
            if size < len(word):
                found.update(word[first : first + size] for first in range(len(word) - size + 1))
    found.update(first + second for first, second in pairwise(words) if pairs)
    return found
