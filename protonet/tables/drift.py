"""Columns that are far from what was fitted: another unit, a shift, gaps alone, categories that were never seen.

What fit saw of each column is kept in the model file; rows that come later are compared with it as they are read, and
what is far away is told, a line for each column. Predictions do not change.

A column is named where both hold:

- **It is far**: most rows lie outside the fitted range, or are gaps, or of other categories, where at least that much
  fewer were in fit; or all rows lie in an interval that few rows of any class were in; or any row lies beyond the
  fitted range by many times its width, in a column without long tails.
- **It is no accident**: such rows drawn like those of fit would do so in one table of a hundred at most, whatever the
  column's distribution: Fisher's exact test of the two shares, and the range of a sample, each for all columns together
  (Bonferroni). New rows may all be of one class, so that only as many rows of fit count as a class has on average; the
  least and the largest of them count as outside themselves. How far a single row lies out has no such bound, and
  where the fitted range is many times as wide as the middle half of the rows, as in long tails, it says little.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.kind import Column
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import find_gaps
from protonet.tables.table import Block, Table


@dataclass(frozen=True)
class DriftRules:
    """When a column is far from what was fitted; analysis of false alarms: tests/tables/test_drift.py."""

    steps: tuple[int, int] = (16, 64)
    """Quantiles that are kept of a column, less one: as many as a quarter divides, ..."""
    kept: int = 2**17  #: ... for so many of all columns.
    at_once: int = 2**16  #: Numbers whose quantiles are found together: each column alone would cost more.
    rows: int = 4096  #: Rows of a block that are looked at, at equal distances.
    share: float = 0.5  #: Of the rows, by how many more than in fit are strange.
    few: float = 0.5  #: Of the rows of the smallest class, how many at most lie where all new rows lie.
    widths: float = 100.0  #: Of the fitted range, beyond it, from which on a single row is told ...
    tails: float = 6.0  #: ... where the range is at most so many times as wide as the middle half of the rows, ...
    enough: int = 16  #: ... and a class has so many on average: fewer tell nothing of tails.
    chance: float = 0.01  #: Tables of rows like those of fit in which any column is named, at most.
    most: int = 1000  #: Rows that a test counts: of more, a thousand in the same shares.


DRIFT = DriftRules()


def describe_columns(cells: Sequence[np.ndarray], encoding: Encoding | None, class_rows: Sequence[int]) -> Any:
    """Return what fit saw of columns, as JSON can hold it, for `Watch`.

    Args:
        cells: (n,) of each column.
        encoding: Fitted to them, or None where they are features as they are.
        class_rows: The number of rows of each class that has some.
    """
    columns: list[dict[str, Any]] = []
    whole: list[tuple[dict[str, Any], np.ndarray]] = []
    steps = sorted([*DRIFT.steps, DRIFT.kept // (4 * len(cells)) * 4])[1]
    for column, values in zip(list_columns(encoding, len(cells)), cells, strict=True):
        numbers = column.read_numbers(values)
        gaps = find_gaps(values) if numbers is None else np.isnan(numbers)
        columns.append({"gaps": float(gaps.mean())})
        if numbers is not None and not gaps.any():
            whole.append((columns[-1], numbers))
        elif numbers is not None and not gaps.all():
            columns[-1]["quantiles"] = _find_quantiles(numbers[~gaps, None], steps)[0]
        if len(whole) * len(values) >= DRIFT.at_once:  # one column after another takes as long as many of few rows do
            _take_quantiles(whole, steps)
    _take_quantiles(whole, steps)
    per_class = sum(class_rows) // len(class_rows)
    return {"columns": columns, "per_class": per_class, "smallest": min(class_rows) / max(1, sum(class_rows))}


def _take_quantiles(whole: list[tuple[dict[str, Any], np.ndarray]], steps: int) -> None:
    """Write the quantiles of columns without gaps to what is seen of them, and empty the list."""
    if whole:
        found = _find_quantiles(np.stack([numbers for _, numbers in whole], axis=1), steps)
        for (seen, _), quantiles in zip(whole, found, strict=True):
            seen["quantiles"] = quantiles
        whole.clear()


def _find_quantiles(numbers: np.ndarray, steps: int) -> list[list[float]]:
    """Return quantiles at equal distances of each column of numbers (n, columns), short but for both ends."""
    found = np.quantile(numbers, np.linspace(0, 1, steps + 1), axis=0).T
    inner = [[float(f"{quantile:.5g}") for quantile in each] for each in found[:, 1:-1].tolist()]
    rounded = np.clip(inner, found[:, :1], found[:, -1:])
    return np.concatenate([found[:, :1], rounded, found[:, -1:]], axis=1).tolist()  # type: ignore[no-any-return]


def list_columns(encoding: Encoding | None, count: int) -> Sequence[Column]:
    """Return the columns of an encoding, or so many of numbers where there is none."""
    return [Number("plain", 0.0, 0.0, 1.0, 0.0)] * count if encoding is None else encoding.columns


@dataclass
class Tally:
    """What came in a column until now."""

    rows: int = 0
    gaps: int = 0
    outside: int = 0  #: Of a column with an order.
    wild: int = 0  #: Of them: those that are told even where there is a single one ...
    wildest: float = math.nan  #: ... and the last of these.
    others: int = 0  #: Of categories: those without a number of their own.
    least: float = math.inf
    largest: float = -math.inf


@dataclass
class Watch:
    """Looks at rows as they pass.

    Args:
        seen: Of `describe_columns`, from a file that is not trusted; of anything else nothing is told.
        encoding: As there.
        count: How many columns there are.
    """

    seen: Any
    encoding: Encoding | None
    count: int
    tallies: list[Tally] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.seen if _is_sound(self.seen, self.count) else None
        self.tallies = [Tally() for _ in range(self.count if self.seen else 0)]

    def look(self, block: Block) -> None:
        """Take some rows into account."""
        columns = list_columns(self.encoding, self.count)
        step = -(-len(block.rows) // DRIFT.rows)
        for place, tally in enumerate(self.tallies):
            column, cells = columns[place], block.columns[place][::step]
            numbers = column.read_numbers(cells)
            gaps = find_gaps(cells) if numbers is None else np.isnan(numbers)
            tally.rows += len(cells)
            tally.gaps += int(gaps.sum())
            quantiles = self.seen["columns"][place].get("quantiles")
            tally.others += int((column.find_others(cells) & ~gaps).sum())
            if numbers is not None and quantiles and not gaps.all():
                there = numbers[~gaps]
                beyond = np.maximum(quantiles[0] - there, there - quantiles[-1])
                wild = there[beyond > _find_reach(quantiles)]
                tally.outside += int((beyond > 0).sum())
                tally.wild += len(wild)
                tally.wildest = wild[-1] if len(wild) else tally.wildest
                tally.least, tally.largest = min(tally.least, there.min()), max(tally.largest, there.max())

    def tell(self, table: Table) -> list[str]:
        """Return a line for each column that is far from what was fitted."""
        columns = list_columns(self.encoding, self.count)
        found = []
        for place, (column, tally) in enumerate(zip(columns, self.tallies, strict=False)):
            if reason := self._find_reason(column, tally, self.seen["columns"][place]):
                found.append(f"look at: {table.name_column(place)} is far from what was fitted: {reason}")
        return found

    def _find_reason(self, column: Column, tally: Tally, seen: Mapping[str, Any]) -> str:
        """Return why a column is far away, or "" where it is not."""
        there = tally.rows - tally.gaps
        if self._is_far(tally.gaps, tally.rows, seen["gaps"]):
            return f"most of its cells are gaps, where {_write_share(seen['gaps'])} were in fit"
        # Where all categories have a number, `check_kinds` names those that have none.
        if (rare := column.rare) and self._is_far(tally.others, there, rare):
            return f"most rows have categories that were rare or unknown, where {100 * rare:.2g} % had"
        if "quantiles" not in seen or tally.least > tally.largest:  # no number came
            return ""
        low, *_, high = seen["quantiles"]
        per_class = self.seen["per_class"]
        if self._is_far(tally.outside, there, min(2, per_class) / per_class, least=0.0):
            return f"most rows lie outside {column.write(low)} to {column.write(high)}; another unit?"
        share = _find_share(np.array(seen["quantiles"]), tally.least, tally.largest)
        relative = share / self.seen["smallest"]
        if relative < DRIFT.few and there * relative ** (there - 1) < DRIFT.chance / self.count:
            ends = dict.fromkeys(column.write(end) for end in (tally.least, tally.largest))
            where = f"{'lie within' if len(ends) > 1 else 'are'} {' to '.join(ends)}"
            few = f"at most {_write_share(share)}" if share else "none"
            return f"all rows {where}, where {few} were in fit; another unit?"
        if tally.wild and per_class >= DRIFT.enough:
            some = "1 row lies" if tally.wild == 1 else f"{tally.wild} rows lie"
            span = f"{column.write(low)} to {column.write(high)}"
            return f"{some} far beyond {span}, such as {column.write(tally.wildest)}; another unit?"
        return ""

    def _is_far(self, strange: int, rows: int, share: float, least: float | None = None) -> bool:
        """Return whether more rows are strange than a share of the rows of fit, by much, and not by accident.

        Args:
            strange: How many are.
            rows: Of how many.
            share: Of the rows of fit.
            least: The share that is taken from that of the new rows, where it is another one.
        """
        if not rows or strange / rows - (share if least is None else least) < DRIFT.share:
            return False
        n = self.seen["per_class"]
        if rows > DRIFT.most:
            strange, rows = strange * DRIFT.most // rows, DRIFT.most
        return compare_shares(strange, rows, math.ceil(share * n), n) < DRIFT.chance / self.count


def watch_blocks(blocks: Iterator[Block], watch: Watch, table: Table) -> Iterator[Block]:
    """Yield blocks as they are; add to the table's notes, behind the last, what is far from what was fitted."""
    for block in blocks:
        watch.look(block)
        yield block
    table.notes.extend(watch.tell(table))


def compare_shares(k: int, m: int, k0: int, n: int) -> float:
    """Return how likely k strange rows or more of m are, where k0 of n are and all are drawn from the same.

    Source: Fisher, "The logic of inductive inference" (1935).
    """

    def log_choose(of: int, taken: int) -> float:
        return math.lgamma(of + 1) - math.lgamma(taken + 1) - math.lgamma(of - taken + 1)

    strange, whole = k + k0, log_choose(n + m, m)
    terms = (
        log_choose(strange, j) + log_choose(n + m - strange, m - j) - whole
        for j in range(k, min(m, strange) + 1)
        if m - j <= n + m - strange
    )
    return min(1.0, sum(map(math.exp, terms)))


def _find_share(quantiles: np.ndarray, low: float, high: float) -> float:
    """Return at most which share of the rows, of which quantiles at equal distances are known, lies in an interval."""
    steps = len(quantiles) - 1
    before = max(0, int(np.searchsorted(quantiles, low, side="left")) - 1)
    return (min(steps, int(np.searchsorted(quantiles, high, side="right"))) - before) / steps


def _find_reach(quantiles: Sequence[float]) -> float:
    """Return how far beyond the range of a column, given quantiles at equal distances, a single row is told."""
    width, quarter = quantiles[-1] - quantiles[0], len(quantiles) // 4
    half = quantiles[-1 - quarter] - quantiles[quarter]
    return DRIFT.widths * width if 0 < width <= DRIFT.tails * half else math.inf


def _write_share(share: float) -> str:
    """Return a share in per cent, or that there is none."""
    return f"{100 * share:.2g} %" if share else "none"


def _is_sound(seen: Any, count: int) -> bool:
    """Return whether something that came out of a file is what `describe_columns` returns of so many columns."""
    if not isinstance(seen, dict) or not isinstance(seen.get("columns"), list) or len(seen["columns"]) != count:
        return False
    per_class, smallest = seen.get("per_class"), seen.get("smallest")
    if type(per_class) is not int or per_class < 1 or type(smallest) is not float or not 0 < smallest <= 1:
        return False
    for each in seen["columns"]:
        if not isinstance(each, dict) or type(each.get("gaps")) is not float or not 0 <= each["gaps"] <= 1:
            return False
        quantiles = each.get("quantiles", [0.0, 0.0])
        if not isinstance(quantiles, list) or len(quantiles) < 2 or not all(type(q) is float for q in quantiles):
            return False
        if quantiles != sorted(quantiles):
            return False
    return True
