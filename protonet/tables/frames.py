"""Data frames: what their columns hold, as `protonet.tables.formats.Raw` has the columns of files, and as features."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.errors import InputTypeError, optional_packages, raise_input_error
from protonet.representations.opening import Selection
from protonet.tables.columns import NAMES
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import blank_missing, find_gaps, read_plain
from protonet.tables.columns.recognise import Verdict
from protonet.tables.features import check_kinds, encode_block, take_columns
from protonet.tables.formats import COUNTED, from_arrow, to_numbers, to_text
from protonet.tables.spelling import detect_spelling
from protonet.tables.table import Block, Table


class Frame(NamedTuple):
    """Rows with named columns."""

    names: tuple[str, ...]
    columns: list[np.ndarray]  #: (n,) each, as in `protonet.tables.formats.Raw`.
    categorical: tuple[str, ...] = ()  #: The columns whose type says that they hold categories.
    native: Any = None  #: What it was read from, or None for an array: every column of that holds numbers.

    @property
    def plain(self) -> bool:
        """Whether all columns are numbers without gaps."""
        return all(cells.dtype.kind in "iuf" and not find_gaps(cells).any() for cells in self.columns)

    def take(self, rows: np.ndarray) -> Frame:
        """Return the rows of these numbers (m,)."""
        return self._replace(columns=[cells[rows] for cells in self.columns])


class Taken(NamedTuple):
    """What the columns of a frame were taken for."""

    encoding: Encoding  #: Of the columns that are used.
    places: list[int]  #: Where in the frame each of these is.
    told: dict[str, str]  #: By the name of every column, what people read of it; of an array, none.


def read_frame(x: Any) -> Frame | None:
    """Read a data frame: of pandas, or of anything with the Arrow PyCapsule interface, such as Polars.

    An array, or a list of rows, that holds text other than numbers is one, too; its columns are x0, x1 ...

    Args:
        x: Anything.

    Returns:
        The frame, or None for what is none, or has no column.

    Raises:
        MissingPackageError: It is not of pandas, it does not hold numbers alone, and pyarrow is missing.
        InputError: No row; two columns of one name; a column of lists, of complex or of infinite numbers.
    """
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(x, pandas.DataFrame):
        names = tuple(map(str, x.columns))
        columns = [_from_pandas(name, x.iloc[:, place]) for place, name in enumerate(names)]
        chosen = [isinstance(each, pandas.CategoricalDtype) for each in x.dtypes]
    elif hasattr(x, "__arrow_c_stream__"):
        try:
            with optional_packages("parquet"):
                import pyarrow  # noqa: PLC0415 - optional
        except ImportError:
            if hasattr(x, "__array__") and np.asarray(x).dtype.kind in "iuf":
                return None
            raise
        try:
            x = pyarrow.table(x)
        except (TypeError, ValueError):
            return None  # a single column, say
        names = tuple(x.column_names)
        columns = [_from_arrow(name, x.column(place)) for place, name in enumerate(names)]
        chosen = [pyarrow.types.is_dictionary(each) for each in x.schema.types]
    elif (cells := _find_texts(x)) is not None:
        names, columns = tuple(f"x{place}" for place in range(cells.shape[1])), list(map(_from_objects, cells.T))
        chosen = [False] * len(names)
    else:
        return None
    if not columns:
        return None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise_input_error("X", "name each column once", f"{to_printable(twice)} twice", "Rename or drop one.")
    if not len(columns[0]):
        raise_input_error("X", "have at least one row", "none", "Pass rows.")
    for name, cells in zip(names, columns, strict=True):
        if cells.dtype.kind == "f" and np.isinf(cells).any():
            first = int(np.argmax(np.isinf(cells)))
            got = f"{cells[first]} in {to_printable(name)}, {COUNTED.format(first)}"
            raise_input_error("X", "have finite numbers, or gaps", got, "Fill it in, or leave it out.")
    return Frame(names, columns, tuple(name for name, each in zip(names, chosen, strict=True) if each), x)


def name_columns(rows: np.ndarray) -> Frame:
    """Return an array (n, dim) of numbers as a frame, its columns named as scikit-learn names them."""
    return Frame(tuple(f"x{place}" for place in range(rows.shape[1])), list(rows.T))


def _find_texts(x: Any) -> np.ndarray | None:
    """Return an array (n, columns) of objects with text in it that is no number, or None for anything else."""
    if isinstance(x, list) and x and all(isinstance(row, (list, tuple)) and len(row) == len(x[0]) for row in x):
        x = np.array(x, object)
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "OU" or x.ndim != 2:
        return None
    is_text = any(isinstance(cell, str) and math.isnan(read_plain(cell)) for cell in x.flat)
    return x.astype(object) if is_text and not any(isinstance(cell, (dict, list)) for cell in x.flat) else None


def _from_objects(cells: np.ndarray) -> np.ndarray:
    """Return cells (n,) of any type as `protonet.tables.formats.Raw` has them; None and NaN are missing."""
    values = [None if cell is None or (isinstance(cell, float) and math.isnan(cell)) else cell for cell in cells]
    if all(value is None or (isinstance(value, Real) and not isinstance(value, bool)) for value in values):
        return np.array(values, np.float64)
    return blank_missing(to_text(("" if value is None else str(value).strip() for value in values), len(values)))


def _from_pandas(name: str, column: Any) -> np.ndarray:
    """Return a pandas series (n,) as `protonet.tables.formats.Raw` has it."""
    if str(column.dtype).startswith("period"):
        column = column.dt.to_timestamp()
    kind, gaps = column.dtype.kind, column.isna().to_numpy()
    if kind == "c":
        raise_input_error(
            "X", "have columns of real numbers", f"{column.dtype} in {to_printable(name)}", "Split it in two."
        )
    if kind == "m":
        return np.asarray(column.dt.total_seconds().to_numpy(np.float64, na_value=np.nan))
    if kind == "M":
        return np.asarray(column.to_numpy("datetime64[us]", na_value=np.datetime64("NaT")))
    if kind in "iuf":
        if isinstance(column.dtype, np.dtype):
            return to_numbers(column.to_numpy())
        if kind == "f" or gaps.any():
            return np.asarray(column.to_numpy(np.float64, na_value=np.nan))
        return np.asarray(column.to_numpy(np.int64 if kind == "i" else np.uint64))
    cells = column.astype(object).to_numpy()
    if any(isinstance(cell, (list, tuple, dict, set, np.ndarray)) for cell in cells):
        must = "have columns of numbers, dates and text"
        raise_input_error("X", must, f"lists or the like in {to_printable(name)}", "Leave that column out.")
    values = zip(cells.tolist(), gaps.tolist(), strict=True)
    return blank_missing(to_text(("" if gap else str(value).strip() for value, gap in values), len(gaps)))


def _from_arrow(name: str, column: Any) -> np.ndarray:
    """Return a chunked Arrow array (n,) as `protonet.tables.formats.Raw` has it."""
    import pyarrow  # noqa: PLC0415 - optional

    try:
        return blank_missing(
            np.concatenate([from_arrow(chunk) for chunk in column.chunks or [pyarrow.array([], column.type)]])
        )
    except pyarrow.ArrowException:
        must = "have columns of numbers, dates and text"
        return raise_input_error("X", must, f"{column.type} in {to_printable(name)}", "Leave that column out.")


def take_frame(frame: Frame, kinds: Mapping[str, str] | None, selection: Selection) -> Taken:
    """Take each column of a frame for something, as `protonet.tables.features.choose_features` does.

    All columns are used as they are where they are numbers without gaps, and in arrays; others are taken for what the
    columns of files are, and left out where they number the rows.

    Args:
        frame: The rows.
        kinds: By a column's name, what the caller says that it holds, of `protonet.tables.columns.NAMES`.
        selection: What embeds texts and pictures.

    Raises:
        InputTypeError: The kinds are no mapping.
        InputError: An unknown kind; a column of that name is not there, or holds something else; no column is of use.
    """
    kinds = _check_kinds(frame, kinds)
    if frame.native is None or (frame.plain and not kinds):
        verdicts = [Verdict(Number.fit(cells), "") for cells in frame.columns]
    else:
        columns = dict(zip(frame.names, frame.columns, strict=True))
        kinds = {name: "category" for name in frame.categorical if _repeats(columns[name])} | kinds
        keep, argument = "column_kinds keeps it", "column_kinds"
        verdicts = list(take_columns(columns, kinds, keep=keep, argument=argument, selection=selection).values())
    found = [f"left out: {each.reason}" if each.column is None else each.column.tell() for each in verdicts]
    told = {} if frame.native is None else dict(zip(frame.names, found, strict=True))
    places = [place for place, verdict in enumerate(verdicts) if verdict.column is not None]
    if not places:
        got = "; ".join(f"{to_printable(name)} {text}" for name, text in told.items())[:500]
        raise_input_error("X", "have a column of use", got, "Add features, or say what they hold: column_kinds.")
    encoding = Encoding(tuple(verdict.column for verdict in verdicts if verdict.column is not None))
    return Taken(encoding, places, told)


def encode_frame(frame: Frame, taken: Taken) -> np.ndarray:
    """Return the features (n, features) of a frame, as `protonet.tables.columns.encoding.Encoding.encode` gives them.

    Raises:
        InputError: As `protonet.tables.features.check_kinds` and `encode_block`.
    """
    columns = [frame.columns[place] for place in taken.places]
    table = Table(tuple(frame.names[place] for place in taken.places), iter(()), COUNTED, [])
    block = Block(columns, np.empty(0), (), range(len(columns[0])), range(len(columns[0])))
    block = detect_spelling(table, block, taken.encoding).apply(block, taken.encoding)
    check_kinds(table, block, taken.encoding, "X")
    return encode_block(table, block, taken.encoding, "X")


def find_uninformative(rows: Any, taken: Taken | None) -> Tensor:
    """Return which rows (n,) bool of a frame have no cell that says anything; none of an array without gaps."""
    if not isinstance(rows, Frame) or taken is None:
        return torch.zeros(rows.shape[0], dtype=torch.bool)
    return torch.from_numpy(taken.encoding.find_uninformative([rows.columns[place] for place in taken.places]))


def _check_kinds(frame: Frame, kinds: Mapping[str, str] | None) -> dict[str, str]:
    """Return the kinds that the caller gives, none for None."""
    if kinds is None:
        return {}
    if not isinstance(kinds, Mapping):
        remedy = 'Pass {"name": "category"}, say.'
        raise_input_error(
            "column_kinds", "be a dict of names and kinds, or None", type(kinds).__name__, remedy, kind=InputTypeError
        )
    if kinds and frame.native is None:
        raise_input_error(
            "column_kinds", "come with a data frame", "an array, whose columns have no names", "Pass a frame."
        )
    for name, kind in kinds.items():
        if kind not in NAMES:
            raise_input_error(
                "column_kinds", f"name kinds of {', '.join(NAMES)}", f"{kind!r} for {name}", "Pick one of them."
            )
    return dict(kinds)


def _repeats(cells: np.ndarray) -> bool:
    """Return whether there are two levels or more, and two rows of one of them: otherwise they are no categories."""
    counts = Counter(cells.tolist())
    return len(counts) > 1 and max(counts.values()) > 1


def make_dense(X: Any) -> np.ndarray:
    """Return rows as an array that torch may have: dense, float64, and not read-only."""
    return X.toarray() if hasattr(X, "toarray") else np.require(X, np.float64, ["C", "W"])


def split_dense(parts: Sequence[Any], size: int) -> Iterator[np.ndarray]:
    """Yield rows of arrays or sparse matrices, made dense, so many at a time."""
    for part in parts:
        for first in range(0, part.shape[0], size):
            yield make_dense(part[first : first + size])


def restore_taken(
    encoding: Encoding | None, used: tuple[str, ...] | None, told: Any
) -> tuple[Taken | None, list[str] | None]:
    """Return what a model's columns were taken for, and the names of all that fit was given, if they had any."""
    if encoding is None:
        return None, None if used is None else list(used)
    if used is None:
        return Taken(encoding, list(range(len(encoding.columns))), {}), None
    if not isinstance(told, dict) or not set(used) <= set(told):
        told = {name: column.tell() for name, column in zip(used, encoding.columns, strict=True)}
    names = list(told)
    return Taken(encoding, [names.index(name) for name in used], {name: str(told[name]) for name in names}), names
