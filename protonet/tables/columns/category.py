"""Columns of categories, encoded one-hot with a total variance of 1; missing values are a category.

Categories with a known order, such as answers from "never" to "always", have their rank as a further feature.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from protonet._text import to_printable
from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.parsing import BOOLEAN_SPELLINGS, format_cells
from protonet.tables.columns.scales import SCALES, score_answer
from protonet.tables.delimited import MISSING_TEXTS
from protonet.views.config import UntrustedComponent, raise_unless
from protonet.views.onnx_graph import OnnxGraph

#: Functions that convert a level to the spellings that an ONNX graph accepts. The graph cannot ignore the letter case.
ONNX_SPELLINGS = (str, str.lower, str.upper, str.capitalize, str.title, lambda text: text.replace("nan", "NaN"))
#: Factor of the features of levels beside their rank, of which they should not hide the order.
ORDERED_LEVEL_WEIGHT = np.float32(0.3)
_TRAILING_ZERO_FRACTION = re.compile(r"(?<=\d)\.0+$")


#: In columns of at most this many levels, each level gets a feature, however rare it is.
MAX_LEVELS_ALWAYS_ENCODED = 10
#: Minimum number of training rows of a level with a feature, in columns of more levels.
MIN_ROWS_PER_LEVEL = 2
#: Maximum number of levels with a feature; the most frequent levels are used.
CATEGORY_MAX_LEVELS = 64


@dataclass(frozen=True)
class Category(FittedColumn):
    """A fitted column of categories, encoded one-hot."""

    #: The categories that have a feature, in ascending order. The level "" is that of missing values.
    levels: tuple[str, ...]
    level_counts: tuple[int, ...] = field(metadata={"key": "counts"})  #: The number of training rows of each level.
    n_rows: int = field(metadata={"key": "rows"})  #: The number of training rows.
    order: str = ""  #: The one of ``SCALES`` that orders the categories; "" if they have no known order.
    column_type: ClassVar[str] = "category"
    max_invalid_fraction: ClassVar[float] = 1.0  #: Unknown categories are never an error.

    @classmethod
    def fit(cls, cells: np.ndarray, order: str = "") -> Category:
        """Fit a column of categories to cells (n,) of any type; each distinct text of a cell is a category."""
        levels, counts = np.unique(format_cells(cells).astype(str), return_counts=True)
        if len(levels) > MAX_LEVELS_ALWAYS_ENCODED:
            frequent = np.flatnonzero(counts >= min(MIN_ROWS_PER_LEVEL, counts.max()))
            top = np.sort(frequent[np.argsort(-counts[frequent], kind="stable")[:CATEGORY_MAX_LEVELS]])
            levels, counts = levels[top], counts[top]
        return cls(tuple(levels.tolist()), tuple(counts.tolist()), len(cells), order)

    @property
    def feature_name_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature's name, such as "=red" for a level; a column of two levels has one feature."""
        levels = self.levels[1:] if self._is_binary else self.levels
        return (*[" rank"] * bool(self.order), *(f"={level}" if level else " missing" for level in levels))

    @property
    def _has_all_levels(self) -> bool:
        """Whether each category of the training rows has a feature."""
        return sum(self.level_counts) == self.n_rows

    @property
    def _is_binary(self) -> bool:
        """Whether the training rows have exactly two categories, so that one feature is enough."""
        return len(self.levels) == 2 and self._has_all_levels

    @property
    def rare_fraction(self) -> float:
        """The fraction of training rows whose category has no feature."""
        return 1 - sum(self.level_counts) / self.n_rows

    @property
    def invalid_reason(self) -> str:
        """The phrase by which messages explain an invalid cell: the category is unknown."""
        return "a category that fit never saw"

    def _level_features(self) -> np.ndarray:
        """Compute scaled features (levels + 1, features) of each level; the last row is that of other categories."""
        fractions = np.array(self.level_counts) / self.n_rows
        one_hot = np.eye(len(fractions) + 1, len(fractions)) - fractions
        if self._has_all_levels:
            one_hot[-1] = 0.0
        variances = fractions * (1 - fractions)
        if self._is_binary:
            one_hot, variances = one_hot[:, 1:], variances[1:]
        features = (one_hot / (math.sqrt(variances.sum()) or 1.0)).astype(np.float32)
        if not self.order:
            return features
        return np.concatenate([self._ranks([*self.levels, ""])[:, None], ORDERED_LEVEL_WEIGHT * features], axis=1)

    def _ranks(self, cells: Sequence[str]) -> np.ndarray:
        """Compute the standardized rank (n,) float32 of cells (n,) among the levels; 0 for those that have none.

        Answers that no training row has are between the levels beside them, or one rank beyond all levels.
        """
        scores = np.array([score_answer(self.order, level) for level in self.levels])
        known = np.unique(scores[~np.isnan(scores)])
        places = np.arange(-1.0, len(known) + 1)
        known = np.concatenate([[np.nextafter(known[0], -math.inf)], known, [np.nextafter(known[-1], math.inf)]])
        rows = np.interp(np.repeat(scores, self.level_counts), known, places)
        values = np.interp([score_answer(self.order, cell) for cell in cells], known, places)
        standardized = (values - np.nanmean(rows)) / (np.nanstd(rows) or 1.0)
        return np.asarray(np.nan_to_num(standardized, nan=0.0), np.float32)

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the centred and scaled one-hot features (n, features) float32 of cells (n,), behind the rank."""
        indices = self._level_indices(cells)
        features: np.ndarray = self._level_features()[indices]
        if self.order and (indices < 0).any():  # an answer that no training row has is still in its place
            features[indices < 0, 0] = self._ranks(format_cells(cells[indices < 0]).tolist())
        return features

    def _level_indices(self, cells: np.ndarray) -> np.ndarray:
        """Compute the index (n,) int64 of the level of each cell, in any known spelling; -1 for other categories."""
        normalized = {_normalize_level(level): index for index, level in reversed(list(enumerate(self.levels)))}
        others = self._other_spellings()
        exact = {level: index for index, level in enumerate(self.levels)}
        texts = format_cells(cells)

        def find_level(cell: str) -> int:
            text = _normalize_level(cell)
            return exact.get(cell, normalized.get(text, others.get(text, others.get(_strip_leading_zeros(text), -1))))

        indices = {cell: find_level(cell) for cell in set(texts)}
        return np.fromiter((indices[cell] for cell in texts), np.int64, len(cells))

    def _other_spellings(self) -> dict[str, int]:
        """Map other spellings of the levels to their indices: words for yes and no, or codes without leading zeros."""
        normalized = {index: _normalize_level(level) for index, level in enumerate(self.levels) if level}
        booleans = {index: BOOLEAN_SPELLINGS.get(level) for index, level in normalized.items()}
        if sorted(map(str, booleans.values())) == ["0", "1"]:
            level_of = {value: index for index, value in booleans.items()}
            return {text: level_of[value] for text, value in BOOLEAN_SPELLINGS.items()}
        if not all(map(str.isdecimal, normalized.values())):
            return {}
        stripped = {index: _strip_leading_zeros(level) for index, level in normalized.items()}
        counts = Counter(stripped.values())
        return {text: index for index, text in stripped.items() if counts[text] == 1}

    def describe_other_spelling(self, cells: np.ndarray) -> str:
        """Describe the first cell that is another spelling of a level, as "'7' is '007'"; "" if there is none."""
        known, spellings = {_normalize_level(level) for level in self.levels}, self._other_spellings()
        for cell in dict.fromkeys(format_cells(cells)):
            text = _normalize_level(cell)
            index = spellings.get(text, spellings.get(_strip_leading_zeros(text)))
            if text not in known and index is not None:
                return f"{to_printable(cell)!r} is {to_printable(self.levels[index])!r}"
        return ""

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the non-missing cells with an unknown category.

        If rare categories of the training rows have no feature, unknown ones are treated like them: no cell is invalid.
        """
        return np.asarray(self.is_rare_or_unknown(cells) & (format_cells(cells) != "") & self._has_all_levels)

    def is_rare_or_unknown(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the cells whose category has neither a feature nor a rank."""
        unknown: np.ndarray = self._level_indices(cells) < 0
        if self.order:
            rows = np.flatnonzero(unknown)
            texts = format_cells(cells[rows])
            unknown[rows] = [math.isnan(score_answer(self.order, text)) for text in texts]
        return unknown

    def summary(self) -> str:
        """Summarize the first levels of the column in one line, for users."""
        levels = sorted(self.levels, key=lambda level: score_answer(self.order, level)) if self.order else self.levels
        names = [to_printable(level)[:50] if level else "missing" for level in levels[:4]]
        names += ["..."] * (len(self.levels) > 4) + ["others"] * (not self._has_all_levels)
        return f"category{' in order' * bool(self.order)}: {', '.join(names)}"

    @classmethod
    def restore(cls, stored: UntrustedComponent) -> Category:
        """Restore the column from the untrusted entries of a model file."""
        levels, counts = stored.get_strings("levels"), stored.get_entry("counts", list)
        rows = stored.get_int("rows", 2**53, low=1)
        positive = all(type(count) is int and count > 0 for count in counts)
        raise_unless(len(counts) == len(levels) and positive, "no counts")
        raise_unless(sum(counts) <= rows, "more rows of some levels than there are")
        order = stored.get_entry("order", str)
        raise_unless(order in {"", *SCALES}, "categories in an unknown order")
        return cls(levels, tuple(counts), rows, order)

    def add_to_graph(self, graph: OnnxGraph, cells: str) -> tuple[str, str]:
        """Add the one-hot encoding to an ONNX graph, in which any of ``MISSING_TEXTS`` is a missing value."""
        features, other = self._level_features(), len(self.levels)
        rows = {level: index for index, level in enumerate(self.levels)}
        if "" not in rows:  # a missing value has the features of other categories
            rows[""], features = other + 1, np.concatenate([features, features[-1:]])
        uninformative_mask = np.zeros(len(features), bool)
        uninformative_mask[rows[""]], uninformative_mask[other] = True, self._has_all_levels
        exact = {level: level for level in self.levels if level}
        spellings = {
            spell(text): level
            for text, level in (dict.fromkeys(MISSING_TEXTS, "") | exact).items()
            for spell in ONNX_SPELLINGS
        } | exact
        index = graph.look_up(cells, list(spellings), [rows[level] for level in spellings.values()], other)
        return (
            graph.add("Gather", features, graph.add("Squeeze", index, np.array([1])), axis=0),
            graph.add("Gather", uninformative_mask, index, axis=0),
        )


def _normalize_level(level: str) -> str:
    """Convert a level to lower case, and remove a fraction of zeros: "3.0" becomes "3"."""
    return _TRAILING_ZERO_FRACTION.sub("", level.casefold())


def _strip_leading_zeros(level: str) -> str:
    """Remove the leading zeros of a level of digits only, as programs may lose or add them; keep other levels."""
    return (level.lstrip("0") or "0") if level.isdecimal() else level
