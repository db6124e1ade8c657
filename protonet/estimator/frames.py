"""Read data frames, and encode their columns as features."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from functools import partial
from numbers import Real
from typing import Any, NoReturn

import numpy as np

from protonet._text import to_printable
from protonet.errors import InputTypeError, optional_packages, raise_input_error
from protonet.tables.columns import COLUMN_TYPES
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.parsing import replace_missing_cells
from protonet.tables.columns.quantities import parse_plain_number
from protonet.tables.features import convert_to_training_formats, encode_block
from protonet.tables.formats.arrow import arrow_to_numpy
from protonet.tables.formats.source import DEFAULT_ROW_FORMAT, make_text_array, to_native_dtype
from protonet.tables.table import RowBlock, Table


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


def read_frame(x: Any) -> RowBlock | None:
    """Read the columns of a data frame of pandas, or of any library with the Arrow PyCapsule interface.

    An array or a list of rows is read as well if it holds dates, or text other than numbers. Its columns get the names
    x0, x1, and so on.

    Returns:
        The rows; None for other objects, such as arrays of numbers.

    Raises:
        InputError: The frame has no rows, duplicate column names, infinite numbers, or a column of an unsupported type.
    """
    x = to_arrow_table(x)
    if _is_instance(x, "pandas", "DataFrame"):
        names = tuple(map(str, x.columns))
        columns = [_convert_pandas_column(name, x.iloc[:, index]) for index, name in enumerate(names)]
    elif _is_instance(x, "pyarrow", "Table"):
        names = tuple(x.column_names)
        columns = [_convert_arrow_column(name, x.column(index)) for index, name in enumerate(names)]
    elif (cells := _text_rows_to_objects(x)) is not None:
        names = tuple(f"x{index}" for index in range(cells.shape[1]))
        columns = list(map(_convert_object_column, cells.T))
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
    return RowBlock.from_columns(columns, names)


def _is_instance(x: object, module: str, name: str) -> bool:
    """Test whether an object is an instance of a class of an optional module, which need not be imported."""
    return isinstance(x, getattr(sys.modules.get(module), name, ()))


def to_arrow_table(x: Any) -> Any:
    """Convert a frame with the Arrow PyCapsule interface, other than of pandas, to a table; return other rows as is."""
    if not hasattr(x, "__arrow_c_stream__") or _is_instance(x, "pandas", "DataFrame"):
        return x
    try:
        with optional_packages("parquet"):
            import pyarrow  # noqa: PLC0415 - optional
    except ImportError:
        if hasattr(x, "__array__") and np.asarray(x).dtype.kind in "iuf":
            return x
        raise
    try:
        return pyarrow.table(x)
    except (TypeError, ValueError):
        return x  # for example, a single column


def find_column_types(x: Any, rows: RowBlock, kinds: Mapping[str, str] | None) -> dict[str, str]:
    """Validate the column types ``kinds`` that the caller has set, and add those of categorical columns of a frame x.

    A categorical column counts as one if it has two or more distinct values, and one of these repeats.
    """
    kinds = {} if kinds is None else kinds
    if not isinstance(kinds, Mapping):
        must, remedy = "be a dict of names and kinds, or None", 'For example, pass {"name": "category"}.'
        raise_input_error("column_kinds", must, type(kinds).__name__, remedy, kind=InputTypeError)
    if kinds and rows.names is None:
        got = "an array, whose columns have no names"
        raise_input_error("column_kinds", "come with a data frame", got, "Pass a frame.")
    for name, kind in kinds.items():
        if kind not in COLUMN_TYPES:
            must = f"name kinds of {', '.join(COLUMN_TYPES)}"
            raise_input_error("column_kinds", must, f"{kind!r} for {name}", "Pick one of them.")
    are_categories: list[bool] = []
    if _is_instance(x, "pandas", "DataFrame"):
        are_categories = [_is_instance(dtype, "pandas", "CategoricalDtype") for dtype in x.dtypes]
    elif _is_instance(x, "pyarrow", "Table"):
        are_categories = list(map(sys.modules["pyarrow"].types.is_dictionary, x.schema.types))
    columns = zip(rows.names or (), rows.columns, are_categories, strict=False)
    return {name: "category" for name, cells, flag in columns if flag and _has_repeated_level(cells)} | dict(kinds)


def require_numeric_frame(frame: RowBlock | None) -> None:
    """Raise an InputError if a frame has text other than numbers and booleans; do nothing if there is no frame."""
    for name, cells in () if frame is None else zip(frame.names or (), frame.columns, strict=True):
        texts = cells if cells.dtype.kind == "O" else ()
        other = (cell for cell in texts if cell not in {"", "True", "False"} and math.isnan(parse_plain_number(cell)))
        if (cell := next(other, None)) is not None:
            got = f"{to_printable(cell)[:50]!r} in {to_printable(name)}"
            raise_input_error("X", "hold numbers, as the rows of fit did", got, "Correct it, or fit again.")


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


def encode_frame(
    rows: RowBlock,
    encoding: Encoding,
    names: Sequence[str] | None,
    fitted_names: Sequence[str],
    *,
    keep_gaps: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Encode the rows of a frame with as many columns as in training, and in the same order.

    Args:
        rows: The rows.
        encoding: The fitted columns that are used.
        names: The names of these columns in training; None for arrays, whose columns are all used.
        fitted_names: The names of all columns in training.
        keep_gaps: Whether features are NaN in gaps that training rows did not have; otherwise these are filled.

    Returns:
        The features (n, dim), and a mask (n,) bool of the rows without a known cell.
    """
    if names is not None:
        used_names = {*names}
        indices = [index for index, name in enumerate(fitted_names) if name in used_names]
        used = None if rows.names is None else tuple(rows.names[index] for index in indices)
        rows = rows._replace(columns=[rows.columns[index] for index in indices], names=used)
    table = convert_to_training_formats(Table(blocks=iter([rows])), encoding, argument="X")
    x = encode_block(next(table.blocks), encoding, "X", keep_gaps=keep_gaps)
    return x, encoding.is_uninformative(rows.columns)
