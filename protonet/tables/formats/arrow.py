"""Read Parquet and Feather files by pyarrow, and convert Arrow arrays to NumPy arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from protonet._text import normalize_spelling
from protonet.errors import optional_packages, raise_input_error, raise_missing_file
from protonet.tables.formats.arrays import ARRAY_READ_ERRORS
from protonet.tables.formats.source import TableChunk, TableSource, cell_to_text, make_text_array, rows_per_chunk


class ReadBatches(Protocol):
    """A function that yields Arrow batches of at most ``n_rows`` rows, of all columns or of those with given names."""

    def __call__(self, n_rows: int, /, *, columns: Sequence[str] | None) -> Iterator[Any]:
        """Yield the batches."""


def open_arrow(path: Path, name: str) -> TableSource:
    """Open a file of the format ``name``, "Parquet" or "Feather", as a table.

    Lists of equally many numbers, such as embeddings, become one column per number. The unnamed index of a data frame
    becomes an unnamed column.
    """
    with optional_packages("parquet"):
        from pyarrow import ArrowException, feather, parquet  # noqa: PLC0415 - optional

    @contextmanager
    def report_errors(subject: object) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError):
            raise_missing_file(path)
        except (*ARRAY_READ_ERRORS, ArrowException) as error:
            got = f"{subject} ({type(error).__name__})"
            remedy = f"Leave out other columns; pandas writes such files: to_{name.lower()}(path)."
            raise_input_error(
                "path", f"be a {name} file of numbers, lists of equally many numbers and text", got, remedy
            )

    read_batches: ReadBatches
    with report_errors(path):
        if name == "Parquet":
            file = parquet.ParquetFile(path, buffer_size=2**20)
            schema, n_rows, read_batches = file.schema_arrow, file.metadata.num_rows, file.iter_batches
        else:
            table = feather.read_table(path)
            schema, n_rows, read_batches = table.schema, table.num_rows, partial(_split_table, table)
        fields = list(schema)
        widths = [_find_list_width(read_batches, field) for field in fields]
    distinct = len({field.name for field in fields}) == len(fields)
    # The field of each column, and its index in the lists of the field.
    columns_of = [(index, element) for index, width in enumerate(widths) for element in range(width or 1)]

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        used = list(dict.fromkeys(columns_of[index][0] for index in indices))
        start, names = 0, [fields[index].name for index in used]
        with report_errors(path):
            batches = read_batches(rows_per_chunk(len(columns_of)), columns=names if distinct and names else None)
        while True:
            with report_errors(path):
                batch = next(batches, None)
            if batch is None:
                return
            cells = dict[int, Sequence[np.ndarray] | np.ndarray]()
            for index in used:
                values, width = batch.column(fields[index].name if distinct else index), widths[index]
                with report_errors(f"{values.type} in column {fields[index].name}"):
                    cells[index] = [arrow_to_numpy(values)] if width is None else _split_lists(values, width)
            columns = [cells[field][element] for field, element in (columns_of[index] for index in indices)]
            yield TableChunk(columns, range(start, start + len(batch)))
            start += len(batch)

    names = ["" if re.fullmatch(r"__index_level_\d+__", field.name) else field.name for field in fields]
    header = [
        normalize_spelling(names[index] if widths[index] is None else f"{names[index]}_{element}")
        for index, element in columns_of
    ]
    return TableSource(header=header, n_columns=len(header), read_chunks=read_chunks, n_rows=n_rows)


def _split_table(table: Any, n_rows: int, columns: Sequence[str] | None) -> Iterator[Any]:
    """Split an Arrow table, or the named columns of it, into batches of at most ``n_rows`` rows."""
    return iter((table if columns is None else table.select(columns)).to_batches(max_chunksize=n_rows))


def _find_list_width(read_batches: ReadBatches, field: Any) -> int | None:
    """Find how many numbers the first list in a field of a file has; None for fields of other types."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    dtype, types = field.type, pa.types
    if not (types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)):
        return None
    if not (types.is_floating(dtype.value_type) or types.is_integer(dtype.value_type)):
        return None
    if types.is_fixed_size_list(dtype):
        return int(dtype.list_size) or None
    rows = (batch.column(0)[0] for batch in read_batches(1, columns=[field.name]))
    return len(next((row for row in rows if row.is_valid), ())) or None


def _split_lists(values: Any, width: int) -> np.ndarray:
    """Convert an Arrow array (b,) of lists of ``width`` numbers to numbers (width, b); missing lists become NaN.

    Raises an ArrowException if a list has another length.
    """
    import pyarrow as pa  # noqa: PLC0415 - optional

    if (values.drop_null().value_lengths().to_numpy() != width).any():
        raise pa.ArrowInvalid("lists of different lengths")
    numbers = arrow_to_numpy(values.flatten()).reshape(-1, width)  # without missing lists
    if values.null_count:
        present, numbers = numbers, np.full((len(values), width), np.nan)
        numbers[values.is_valid().to_numpy(zero_copy_only=False)] = present
    return np.ascontiguousarray(numbers.T)


def arrow_to_numpy(values: Any) -> np.ndarray:
    """Convert an Arrow array (b,) to a type of `TableChunk.columns`; raise an ArrowException for nested types."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    types, dtype = pa.types, values.type
    safe = getattr(dtype, "unit", "") != "ns"  # nanoseconds are rounded; otherwise lost digits are an error
    if isinstance(values, pa.ExtensionArray):
        return arrow_to_numpy(values.storage)
    if types.is_dictionary(dtype):
        return _decode_dictionary(map(str, arrow_to_numpy(values.dictionary).tolist()), values.indices)
    if types.is_null(dtype):
        return make_text_array([""] * len(values), len(values))
    if types.is_boolean(dtype):
        return _decode_dictionary(["False", "True"], values.cast(pa.int8()))
    if types.is_binary(dtype) or types.is_large_binary(dtype) or types.is_fixed_size_binary(dtype):
        dtype, values = pa.string(), values.cast(pa.binary()).cast(pa.string())
    if types.is_string(dtype) or types.is_large_string(dtype) or dtype == pa.string_view():
        encoded = values.dictionary_encode()  # creates each distinct text once
        return _decode_dictionary(map(cell_to_text, encoded.dictionary.to_pylist()), encoded.indices)
    if (types.is_integer(dtype) and values.null_count) or types.is_decimal(dtype):
        return _arrow_numbers_to_numpy(values.cast(pa.float64(), safe=False))
    if types.is_integer(dtype) or types.is_floating(dtype):
        return _arrow_numbers_to_numpy(values)
    if types.is_duration(dtype):
        microseconds = values.cast(pa.duration("us"), safe=safe).cast(pa.int64())
        return _arrow_numbers_to_numpy(microseconds.cast(pa.float64())) / 1e6
    if types.is_time(dtype):
        values = values.cast(pa.time64("us"), safe=safe).cast(pa.int64())
    elif not types.is_timestamp(dtype) and not types.is_date(dtype):
        raise pa.ArrowTypeError(f"{dtype} is nested")
    return _arrow_numbers_to_numpy(values.cast(pa.timestamp("us"), safe=safe))


def _decode_dictionary(texts: Iterable[str], indices: Any) -> np.ndarray:
    """Look up Arrow indices (b,) in a list of texts; return the texts (b,), "" for a null index."""
    dictionary = [*texts, ""]
    filled = indices.cast("int64").fill_null(len(dictionary) - 1)
    return np.asarray(make_text_array(dictionary, len(dictionary))[_arrow_numbers_to_numpy(filled)])


def _arrow_numbers_to_numpy(values: Any) -> np.ndarray:
    """Convert an Arrow array (b,) of numbers or times to a NumPy array; nulls become NaN or NaT."""
    return np.asarray(values.to_numpy(zero_copy_only=False))
