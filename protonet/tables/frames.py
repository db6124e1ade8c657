"""Read data frames, and encode their columns as features."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import numpy as np

from protonet._text import to_printable
from protonet.embeddings.loading import SelectedEncoders
from protonet.errors import InputTypeError, optional_packages, raise_input_error
from protonet.tables.columns import COLUMN_TYPES
from protonet.tables.columns.encoding import Encoding, InferredType, make_encoding
from protonet.tables.columns.ordered import Numeric
from protonet.tables.columns.parsing import is_missing, replace_missing_cells
from protonet.tables.columns.quantities import parse_plain_number
from protonet.tables.features import convert_to_training_formats, encode_block, fit_columns
from protonet.tables.formats import DEFAULT_ROW_FORMAT, arrow_to_numpy, make_text_array, to_native_dtype
from protonet.tables.table import make_table


class Frame(NamedTuple):
    """The rows of a data frame or an array, column by column."""

    column_names: tuple[str, ...]  #: The names of the columns; x0, x1, ... for an array.
    columns: list[np.ndarray]  #: The cells (n,) of each column; types as in `protonet.tables.formats.TableChunk`.
    categorical_names: tuple[str, ...] = ()  #: The names of the columns of a categorical type.
    data_frame: object = None  #: The original data frame; None for an array, whose columns all hold numbers.

    @property
    def is_fully_numeric(self) -> bool:
        """Whether all columns are numbers without missing values."""
        return all(cells.dtype.kind in "iuf" and not is_missing(cells).any() for cells in self.columns)

    def select_rows(self, rows: np.ndarray) -> Frame:
        """Return a frame of the rows with the given indices (m,)."""
        return self._replace(columns=[cells[rows] for cells in self.columns])


class FrameEncoding(NamedTuple):
    """The fitted columns of a data frame that are used, and a summary of all columns."""

    encoding: Encoding  #: The fitted columns that are used.
    column_indices: list[int]  #: The indices of the used columns in the frame.
    column_summaries: dict[str, str]  #: A one-line summary of every column, by name; empty for arrays.

    @property
    def used_names(self) -> tuple[str, ...] | None:
        """The names of the columns that are used; None for arrays."""
        names = list(self.column_summaries)
        return tuple(names[index] for index in self.column_indices) if names else None

    def encode(self, frame: Frame) -> np.ndarray:
        """Compute the features (n, dim) of the rows of a frame with the same columns as the fitted frame."""
        names = tuple(frame.column_names[index] for index in self.column_indices)
        columns = [frame.columns[index] for index in self.column_indices]
        table = convert_to_training_formats(make_table(columns, names), self.encoding, argument="X")
        return encode_block(table, next(table.blocks), self.encoding, "X")

    def is_uninformative(self, frame: Frame) -> np.ndarray:
        """Compute a mask (n,) bool of the rows of a frame in which all cells are uninformative, such as missing."""
        return self.encoding.is_uninformative([frame.columns[index] for index in self.column_indices])


def to_rows(x: Any, argument: str = "X") -> Any:
    """Convert rows of types that scikit-learn does not know to a frame or an array; return other rows unchanged.

    A lazy frame of Polars is collected, a ``datasets.Dataset`` becomes a frame of pandas, and n texts become an array
    (n, 1). Raises an InputError about ``argument`` for objects without rows and columns.
    """
    datasets = sys.modules.get("datasets")
    if hasattr(x, "collect_schema") and hasattr(x, "collect"):
        return x.collect()
    if datasets is not None and isinstance(x, datasets.Dataset):
        return x.to_pandas()
    is_sequence = isinstance(x, Sequence) and not isinstance(x, (str, bytes))
    has_rows = any(map(partial(hasattr, x), ("shape", "__array__", "__arrow_c_stream__")))
    if hasattr(x, "toarray"):  # a sparse matrix, which may be a dict as well
        return x
    if isinstance(x, Mapping) or not (is_sequence or has_rows):
        remedy = "Pass a data frame, an array, or a list of rows or texts."
        raise_input_error(argument, "have rows and columns", type(x).__name__, remedy, kind=InputTypeError)
    if is_sequence and len(x) and isinstance(x[0], Mapping):
        got, remedy = "a list of dicts", "Pass a frame, such as pandas.DataFrame(X)."
        raise_input_error(argument, "have rows and columns", got, remedy, kind=InputTypeError)
    is_array = hasattr(x, "__array__") and not hasattr(x, "columns")  # a frame of mixed types may be no array
    cells = x if is_sequence else np.asarray(x) if is_array and getattr(x, "ndim", 1) == 1 else np.empty(0)
    if getattr(cells, "ndim", 1) == 1 and any(isinstance(cell, str) for cell in cells):
        column = np.empty((len(cells), 1), object)
        column[:, 0] = list(cells)
        return column
    return x


def read_frame(x: Any) -> Frame | None:
    """Read the columns of a data frame of pandas, or of any library with the Arrow PyCapsule interface.

    An array or a list of rows is read as well if it holds dates, or text other than numbers. Its columns get the names
    x0, x1, and so on.

    Returns:
        The frame; None for other objects, such as arrays of numbers.

    Raises:
        InputError: The frame has no rows, duplicate column names, infinite numbers, or a column of an unsupported type.
    """
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(x, pandas.DataFrame):
        names = tuple(map(str, x.columns))
        columns = [_convert_pandas_column(name, x.iloc[:, index]) for index, name in enumerate(names)]
        categorical = [isinstance(dtype, pandas.CategoricalDtype) for dtype in x.dtypes]
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
            return None  # for example, a single column
        names = tuple(x.column_names)
        columns = [_convert_arrow_column(name, x.column(index)) for index, name in enumerate(names)]
        categorical = [pyarrow.types.is_dictionary(dtype) for dtype in x.schema.types]
    elif (cells := _text_rows_to_objects(x)) is not None:
        names = tuple(f"x{index}" for index in range(cells.shape[1]))
        columns = list(map(_convert_object_column, cells.T))
        categorical = [False] * len(names)
    else:
        return None
    if not columns:
        return None
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise_input_error("X", "name each column once", f"{to_printable(duplicate)} twice", "Rename or drop one.")
    if not len(columns[0]):
        raise_input_error("X", "have at least one row", "none", "Pass rows.")
    for name, cells in zip(names, columns, strict=True):
        if cells.dtype.kind == "f" and np.isinf(cells).any():
            row = int(np.argmax(np.isinf(cells)))
            got = f"{cells[row]} in {to_printable(name)}, {DEFAULT_ROW_FORMAT.format(row)}"
            raise_input_error("X", "have finite numbers, or missing ones", got, "Fill it in, or leave it out.")
    categories = tuple(name for name, is_category in zip(names, categorical, strict=True) if is_category)
    return Frame(names, columns, categories, x)


def require_numeric_frame(frame: Frame | None) -> None:
    """Raise an InputError if a frame has text other than numbers and booleans; do nothing if there is no frame."""
    for name, cells in () if frame is None else zip(frame.column_names, frame.columns, strict=True):
        texts = cells if cells.dtype.kind == "O" else ()
        other = (cell for cell in texts if cell not in {"", "True", "False"} and math.isnan(parse_plain_number(cell)))
        if (cell := next(other, None)) is not None:
            got = f"{to_printable(cell)[:50]!r} in {to_printable(name)}"
            raise_input_error("X", "hold numbers, as the rows of fit did", got, "Correct it, or fit again.")


def make_array_frame(x: np.ndarray) -> Frame:
    """Convert numbers (n, dim) to a frame with the column names x0, x1, ... of scikit-learn."""
    return Frame(tuple(f"x{index}" for index in range(x.shape[1])), list(x.T))


def _text_rows_to_objects(x: object) -> np.ndarray | None:
    """Convert an array or a list of rows with text or dates to objects (n, columns); return None for other inputs."""
    if isinstance(x, list) and x and all(isinstance(row, (list, tuple)) and len(row) == len(x[0]) for row in x):
        x = np.array(x, object)
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "OUSMm" or x.ndim != 2:
        return None
    if x.dtype.kind in "Mm":
        x = x.astype(f"{x.dtype.kind}8[us]")  # other units become integers
    x = x.astype(object)
    is_other = any(_is_text_or_date(cell) for cell in x.flat)
    return x if is_other and not any(isinstance(cell, (dict, list)) for cell in x.flat) else None


def _is_text_or_date(cell: object) -> bool:
    """Test whether a cell is a date, a time, a missing value of pandas, or text other than a number."""
    if isinstance(cell, (str, bytes)):
        return math.isnan(parse_plain_number(cell if isinstance(cell, str) else cell.decode(errors="replace")))
    return isinstance(cell, (date, time, timedelta, np.datetime64, np.timedelta64)) or _is_pandas_missing_value(cell)


def _is_pandas_missing_value(cell: object) -> bool:
    """Test whether a cell is ``pandas.NA`` or ``pandas.NaT``."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and (cell is pandas.NA or cell is pandas.NaT)


def _convert_object_column(cells: np.ndarray) -> np.ndarray:
    """Convert objects (n,) of any type to numbers, if all are numbers or missing, or else to text."""
    values = list(map(_simplify_cell, cells))
    if all(value is None or (isinstance(value, Real) and not isinstance(value, bool)) for value in values):
        return np.array(values, np.float64)
    texts = ("" if value is None else str(value).strip() for value in values)
    return replace_missing_cells(make_text_array(texts, len(values)))


def _simplify_cell(cell: Any) -> Any:
    """Convert a missing value to None, a duration to seconds, and bytes to text; return other cells unchanged."""
    if isinstance(cell, bytes):
        return cell.decode(errors="replace")
    if _is_pandas_missing_value(cell) or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if isinstance(cell, (np.datetime64, np.timedelta64)):
        cell = cell.astype(f"{cell.dtype.kind}8[us]").item()  # None for NaT
    return cell.total_seconds() if isinstance(cell, timedelta) else cell


def _convert_pandas_column(name: str, column: Any) -> np.ndarray:
    """Convert a pandas series (n,) to a type of `TableChunk.columns`; ``name`` is its name in error messages."""
    if str(column.dtype).startswith("period"):
        column = column.dt.to_timestamp()
    kind, missing = column.dtype.kind, column.isna().to_numpy()
    if kind == "c":
        got = f"{column.dtype} in {to_printable(name)}"
        raise_input_error("X", "have columns of real numbers", got, "Split it in two.")
    if kind == "m":
        return np.asarray(column.dt.total_seconds().to_numpy(np.float64, na_value=np.nan))
    if kind == "M":
        return np.asarray(column.to_numpy("datetime64[us]", na_value=np.datetime64("NaT")))
    if kind in "iuf":
        if isinstance(column.dtype, np.dtype):
            return to_native_dtype(column.to_numpy())
        if kind == "f" or missing.any():
            return np.asarray(column.to_numpy(np.float64, na_value=np.nan))
        return np.asarray(column.to_numpy(np.int64 if kind == "i" else np.uint64))
    cells = column.astype(object).to_numpy()
    if any(isinstance(cell, (list, tuple, dict, set, np.ndarray)) for cell in cells):
        _raise_unsupported_column_type(f"lists or the like in {to_printable(name)}")
    values = zip(cells.tolist(), missing.tolist(), strict=True)
    texts = ("" if gone else str(value).strip() for value, gone in values)
    return replace_missing_cells(make_text_array(texts, len(missing)))


def _convert_arrow_column(name: str, column: Any) -> np.ndarray:
    """Convert a chunked Arrow array (n,) to a type of `TableChunk.columns`; ``name`` is its name in error messages."""
    import pyarrow  # noqa: PLC0415 - optional

    try:
        chunks = column.chunks or [pyarrow.array([], column.type)]
        return replace_missing_cells(np.concatenate([arrow_to_numpy(chunk) for chunk in chunks]))
    except pyarrow.ArrowException:
        return _raise_unsupported_column_type(f"{column.type} in {to_printable(name)}")


def _raise_unsupported_column_type(got: str) -> NoReturn:
    """Raise an InputError about a column of an unsupported type, which ``got`` describes."""
    raise_input_error("X", "have columns of numbers, dates and text", got, "Leave that column out.")


def fit_frame_columns(
    frame: Frame, kinds: Mapping[str, str] | None, selection: SelectedEncoders, labels: np.ndarray | None = None
) -> FrameEncoding:
    """Fit a column of the inferred type, or of that in ``kinds``, to each column of a frame, and drop useless columns.

    The columns of arrays, and frames of numbers without missing values, are used unchanged, even if one is a row index.
    Raises an InputError if no column can be used, or if ``kinds`` does not match the columns.
    """
    kinds = _validate_column_types(frame, kinds)
    if frame.data_frame is None or (frame.is_fully_numeric and not kinds):
        inferred = [InferredType(Numeric.fit(cells)) for cells in frame.columns]
    else:
        columns = dict(zip(frame.column_names, frame.columns, strict=True))
        kinds = {name: "category" for name in frame.categorical_names if _has_repeated_level(columns[name])} | kinds
        hint, argument = "column_kinds keeps it", "column_kinds"
        fitted = fit_columns(columns, kinds, keep_hint=hint, argument=argument, selection=selection, labels=labels)
        inferred = list(fitted.values())
    encoding = make_encoding(column for column, *_ in inferred if column is not None)
    used = iter(encoding.columns)
    summaries = [f"dropped: {reason}" if column is None else next(used).summary() for column, reason, _ in inferred]
    summary = {} if frame.data_frame is None else dict(zip(frame.column_names, summaries, strict=True))
    indices = [index for index, (column, *_) in enumerate(inferred) if column is not None]
    if not indices:
        got = "; ".join(f"{to_printable(name)} {text}" for name, text in summary.items())[:500]
        raise_input_error("X", "have a column of use", got, "Add features, or say what they hold: column_kinds.")
    return FrameEncoding(encoding, indices, summary)


def _validate_column_types(frame: Frame, kinds: Mapping[str, str] | None) -> dict[str, str]:
    """Validate the column types that the caller has set, and return them as a dict; empty for None."""
    if kinds is None:
        return {}
    if not isinstance(kinds, Mapping):
        must, remedy = "be a dict of names and kinds, or None", 'For example, pass {"name": "category"}.'
        raise_input_error("column_kinds", must, type(kinds).__name__, remedy, kind=InputTypeError)
    if kinds and frame.data_frame is None:
        got = "an array, whose columns have no names"
        raise_input_error("column_kinds", "come with a data frame", got, "Pass a frame.")
    for name, kind in kinds.items():
        if kind not in COLUMN_TYPES:
            must = f"name kinds of {', '.join(COLUMN_TYPES)}"
            raise_input_error("column_kinds", must, f"{kind!r} for {name}", "Pick one of them.")
    return dict(kinds)


def _has_repeated_level(cells: np.ndarray) -> bool:
    """Test whether cells (n,) have two or more distinct values, and at least one of these occurs in several rows."""
    counts = Counter(cells.tolist())
    return len(counts) > 1 and max(counts.values()) > 1


def to_dense(x: object) -> np.ndarray:
    """Convert rows (n, dim) to a dense array; rows that are not sparse become contiguous, writable float64."""
    return x.toarray() if hasattr(x, "toarray") else np.require(x, np.float64, ["C", "W"])


def iterate_dense_blocks(matrices: Sequence[Any], max_rows: int) -> Iterator[np.ndarray]:
    """Yield the rows of arrays and sparse matrices as dense arrays of at most ``max_rows`` rows."""
    for matrix in matrices:
        for start in range(0, matrix.shape[0], max_rows):
            yield to_dense(matrix[start : start + max_rows])


def describe_frame_columns(encoding: FrameEncoding | None, label: str) -> dict[str, Any]:
    """Describe a frame's columns as fields of `protonet.files.metadata.TrainingMetadata`; only the label for arrays."""
    summary = {} if encoding is None else encoding.column_summaries
    used = () if encoding is None else encoding.used_names or ()
    while label in summary:  # commands need distinct names
        label += "_"
    dropped = tuple(name for name in summary if name not in used)
    return {"label_column": label, "dropped_columns": dropped, "column_descriptions": summary}


def restore_frame_encoding(
    encoding: Encoding | None, used_names: tuple[str, ...] | None, summaries: Mapping[str, str]
) -> FrameEncoding | None:
    """Restore the fitted columns of a frame from a model file; None without an encoding.

    ``used_names`` are the names of the used columns, None for arrays. ``summaries`` has the summary of each
    column by name, or is empty.
    """
    if encoding is None:
        return None
    if used_names is None:
        return FrameEncoding(encoding, list(range(len(encoding.columns))), {})
    if not set(used_names) <= set(summaries):  # a file of a command
        summaries = {name: column.summary() for name, column in zip(used_names, encoding.columns, strict=True)}
    indices = {name: index for index, name in enumerate(summaries)}
    return FrameEncoding(encoding, [indices[name] for name in used_names], dict(summaries))
