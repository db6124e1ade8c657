"""A column of categories: one number for each level, rare ones and gaps among them, of variance 1 together."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from protonet._text import to_printable
from protonet.tables.columns.kind import Column
from protonet.tables.columns.parsing import BOOLEANS, write_cells
from protonet.tables.delimited import GAPS
from protonet.views.view import Graph, Stored, expect


@dataclass(frozen=True)
class CategoryRules:
    """Which levels have a number of their own."""

    few: int = 5  #: Up to so many levels, each has one.
    least: int = 2  #: Of more, those that so many rows have: one row tells nothing of others.
    most: int = 64  #: The most frequent ones, at most.


CATEGORIES = CategoryRules()
#: How an ONNX graph, which cannot fold case, expects a level or a gap to be spelled.
SPELLINGS = (str, str.lower, str.upper, str.capitalize, str.title, lambda text: text.replace("nan", "NaN"))
_WHOLE = re.compile(r"(?<=\d)\.0+$")


@dataclass(frozen=True)
class Category(Column):
    """A column of categories.

    Args:
        levels: The cells that have a number, gaps being "".
        counts: Of each, in the rows of fit.
        rows: Of fit.
    """

    levels: tuple[str, ...]
    counts: tuple[int, ...]
    rows: int
    kind: ClassVar[str] = "category"
    most_strange: ClassVar[float] = 1.0  #: There may always be new ones.

    @classmethod
    def fit(cls, cells: np.ndarray) -> Category:
        """Fit to cells (n,)."""
        levels, counts = np.unique(write_cells(cells).astype(str), return_counts=True)
        if len(levels) > CATEGORIES.few:
            kept = np.flatnonzero(counts >= min(CATEGORIES.least, counts.max()))
            kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[: CATEGORIES.most]])
            levels, counts = levels[kept], counts[kept]
        return cls(tuple(levels.tolist()), tuple(counts.tolist()), len(cells))

    @property
    def parts(self) -> tuple[str, ...]:
        """The levels; of two that are all there is, the second."""
        return tuple(f"={level}" if level else " missing" for level in (self.levels[1:] if self._pair else self.levels))

    @property
    def _pair(self) -> bool:
        """Whether there are two levels and no other rows: one number tells both."""
        return len(self.levels) == 2 and sum(self.counts) == self.rows

    @property
    def rare(self) -> float:
        """The share of the rows of fit whose cells had no number of their own."""
        return 1 - sum(self.counts) / self.rows

    @property
    def strange(self) -> str:
        """What people read of a new category."""
        return "a category that fit never saw"

    def _table(self) -> np.ndarray:
        """Return the numbers (levels + 1, parts) float32 of each level, and of all others.

        Others are none of the levels, where there were some in fit; where there were none, they are as the mean, 0.
        """
        shares = np.array(self.counts) / self.rows
        hot = np.eye(len(shares) + 1, len(shares)) - shares
        if sum(self.counts) == self.rows:
            hot[-1] = 0.0
        variances = shares * (1 - shares)
        if self._pair:
            hot, variances = hot[:, 1:], variances[1:]
        return (hot / (math.sqrt(variances.sum()) or 1.0)).astype(np.float32)

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32."""
        numbers: np.ndarray = self._table()[self._find_places(cells)]
        return numbers

    def _find_places(self, cells: np.ndarray) -> np.ndarray:
        """Return the places (n,) of cells among the levels, in another spelling if need be, -1 for others."""
        places = self._spellings() | {_fold(level): place for place, level in reversed(list(enumerate(self.levels)))}
        exact = {level: place for place, level in enumerate(self.levels)}
        texts = write_cells(cells)
        found = {cell: exact.get(cell, places.get(_fold(cell), -1)) for cell in set(texts)}
        return np.fromiter((found[cell] for cell in texts), np.int64, len(cells))

    def _spellings(self) -> dict[str, int]:
        """Return the places of levels by other spellings: yes and no, and codes that lost their zeros in front."""
        there = {place: _fold(level) for place, level in enumerate(self.levels) if level}
        values = {place: BOOLEANS.get(level) for place, level in there.items()}
        if sorted(map(str, values.values())) == ["0", "1"]:
            meant = {value: place for place, value in values.items()}
            return {text: meant[value] for text, value in BOOLEANS.items()}
        if not all(map(str.isdecimal, there.values())):
            return {}
        short = {place: level.lstrip("0") or "0" for place, level in there.items()}
        unique = Counter(short.values())
        return {text: place for place, text in short.items() if unique[text] == 1}

    def describe_respelled(self, cells: np.ndarray) -> str:
        """Return the first cell that `_spellings` knows alone, and its level."""
        known, spellings = {_fold(level) for level in self.levels}, self._spellings()
        others = (cell for cell in dict.fromkeys(write_cells(cells)) if _fold(cell) not in known)
        found = next((cell for cell in others if _fold(cell) in spellings), None)
        return (
            ""
            if found is None
            else f"{to_printable(found)!r} is {to_printable(self.levels[spellings[_fold(found)]])!r}"
        )

    def find_strange(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) fit never saw: none is known to be so where some levels have no number."""
        all_known = sum(self.counts) == self.rows
        return np.asarray(self.find_others(cells) & (write_cells(cells) != "") & all_known)

    def find_others(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) have no number of their own: rare ones, and such as fit never saw."""
        return self._find_places(cells) < 0

    def tell(self) -> str:
        """Return the kind and its levels."""
        names = [to_printable(level) if level else "missing" for level in self.levels[:4]]
        names += ["..."] * (len(self.levels) > 4) + ["others"] * (sum(self.counts) < self.rows)
        return f"category: {', '.join(names)}"

    def describe(self) -> dict[str, Any]:
        """Return the levels and how many rows have each."""
        return {"levels": list(self.levels), "counts": list(self.counts), "rows": self.rows}

    @classmethod
    def restore(cls, stored: Stored) -> Category:
        """Build the column again."""
        levels, counts = stored.names("levels"), stored.entry("counts", list)
        rows = stored.whole("rows", 2**53, low=1)
        expect(len(counts) == len(levels) and all(type(each) is int and each > 0 for each in counts), "no counts")
        expect(sum(counts) <= rows, "more rows of some levels than there are")
        return cls(levels, tuple(counts), rows)

    def add_to_graph(self, graph: Graph, cells: str) -> str:
        """Add the column: of text, gaps being "" or what else `protonet.tables.delimited.GAPS` lists."""
        table = self._table()
        known = {level: level for level in self.levels if level}
        gaps = dict.fromkeys(GAPS, "") if "" in self.levels else {}
        spelled = {write(text): level for text, level in (gaps | known).items() for write in SPELLINGS} | known
        keys = list(spelled)
        places = [self.levels.index(spelled[key]) for key in keys]
        place = graph.look_up(cells, keys, places, len(table) - 1)
        return graph.add("Gather", table, graph.add("Squeeze", place, np.array([1])), axis=0)


def _fold(level: str) -> str:
    """Return what spellings of a level have in common: letters of any case, and whole numbers with and without .0."""
    return _WHOLE.sub("", level.casefold())
