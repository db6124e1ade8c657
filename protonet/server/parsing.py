"""Parse the bodies of requests into rows for a model, with the same readers and checks as for files.

A body is JSON, CSV, NPY, a picture or a form, or holds tensors of version 2 of KServe's inference protocol over REST.

Source: https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeVar

import msgspec
import numpy as np
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from protonet._io import JsonDict, temporary_server_folder
from protonet._text import escape_control_chars, to_printable
from protonet.embeddings.pictures.reading import count_pixels
from protonet.errors import UserError, raise_input_error, rename_argument
from protonet.pipeline import MAX_FEATURE_TO_TRAINING_SCALE, TablePipeline
from protonet.server.app import JSON_TYPE
from protonet.tables.columns.ordered import MAX_FLOAT32
from protonet.tables.columns.parsing import is_missing, is_missing_or_missing_word, replace_missing_cells
from protonet.tables.features import convert_to_training_formats
from protonet.tables.formats.source import make_text_array
from protonet.tables.table import RowBlock, Table, describe_unused_columns, format_names

#: Maximal rows of a request.
MAX_REQUEST_ROWS = 100_000
#: Suffix of the temporary file that the body of a request is written to, by the body's media type.
BODY_SUFFIXES = {
    JSON_TYPE: ".json",
    "text/csv": ".csv",
    "application/x-npy": ".npy",
    "application/octet-stream": ".npy",
    "image/*": ".png",
}
#: Media type of a form that uploads a file.
MULTIPART_TYPE = "multipart/form-data"
#: For each data type of tensors in KServe's protocol, the Python types of its JSON elements, and its NumPy type.
KSERVE_DATATYPES: dict[str, tuple[tuple[type, ...], np.dtype[Any]]] = {
    "BOOL": ((bool,), np.dtype("?")),
    "BYTES": ((str,), np.dtype(object)),
    **{f"INT{8 * size}": ((int,), np.dtype(f"<i{size}")) for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": ((int,), np.dtype(f"<u{size}")) for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": ((int, float), np.dtype(f"<f{size}")) for size in (4, 8)},
}

#: A cell of a row in JSON; None is a missing value.
JsonCell = int | float | str | bool | None
#: A row in JSON: a list of cells in the order of the model's columns, or a dict of cells by column name.
JsonRow = list[JsonCell] | dict[str, JsonCell]
T = TypeVar("T")


class PredictRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request for predictions. Each row is a list of cells, or an object of cells by column name (see `JsonRow`)."""

    rows: list[JsonRow]


class Tensor(msgspec.Struct, omit_defaults=True):
    """A tensor of KServe's protocol; ``data`` is a flat list, or has nested lists that follow ``shape``.

    In the extension for binary data, ``data`` is absent, and the parameter "binary_data_size" is its number of bytes.
    """

    name: str
    shape: list[Annotated[int, msgspec.Meta(ge=0, le=2**31)]]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: JsonDict | msgspec.UnsetType = msgspec.UNSET


class OutputName(msgspec.Struct):
    """The name of an output tensor that a KServe request selects."""

    name: str
    parameters: JsonDict | msgspec.UnsetType = msgspec.UNSET


class InferRequest(msgspec.Struct):
    """A KServe request for predictions.

    ``inputs`` is one tensor of shape [rows, columns], or one tensor of shape [rows] or [rows, 1] for each column name.
    """

    inputs: list[Tensor]
    id: str | msgspec.UnsetType = msgspec.UNSET
    parameters: JsonDict | msgspec.UnsetType = msgspec.UNSET
    outputs: list[OutputName] | msgspec.UnsetType = msgspec.UNSET


class ParsedRows(NamedTuple):
    """The rows of a request, encoded as features for a model."""

    x: np.ndarray  #: (n, dim) float32 or float64.
    notes: list[str]  #: Warnings for the user, such as missing values.
    uninformative_mask: np.ndarray  #: (n,) bool: whether a row has no information, for example only empty cells.


JSON_REMEDY = "Send an object; a missing value is null, not NaN."
#: Decodes the JSON body of a request for predictions: an object with rows, or a plain list of rows.
ROWS_DECODER: msgspec.json.Decoder[PredictRequest | list[JsonRow]] = msgspec.json.Decoder(
    PredictRequest | list[JsonRow]
)


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a JSON body; raise an InputError if it is not of the decoder's type."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise_input_error("body", "be of the documented form", str(error)[:200], "Correct it.")
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError, letters that are not UTF-8
        raise_input_error("body", "be JSON", f"something else ({str(error)[:80]})", JSON_REMEDY)


def parse_media_type(header: str) -> str:
    """Return the media type in a content-type header, without its parameters."""
    return header.partition(";")[0].strip().lower()


async def read_upload(request: Request) -> tuple[str, bytes]:
    """Read the media type and the bytes of a request's body or, if the body is a form, of the file in the form."""
    media = parse_media_type(request.headers.get("content-type", ""))
    if media != MULTIPART_TYPE:
        return media, await request.body()
    try:
        async with request.form(max_files=1, max_fields=1) as form:
            file = next(iter(form.values()), None)
            if file is None or len(form) > 1:
                raise HTTPException(400, "`body` must hold one file.")
            if isinstance(file, str):  # a form field without a file name
                return JSON_TYPE, file.encode()
            kinds = {suffix: media for media, suffix in reversed(BODY_SUFFIXES.items()) if "*" not in media}
            media, suffix = parse_media_type(file.content_type or ""), Path(file.filename or "").suffix.lower()
            return kinds.get(suffix, media) if media in {"", "application/octet-stream"} else media, await file.read()
    except MultiPartException as error:
        raise HTTPException(400, f"`body` must be a form of one file ({error.message[:80]}).") from None


def list_content_types(model: TablePipeline) -> list[str]:
    """List the media types that a model accepts as the body of a request, except the media type of forms."""
    if model.has_pictures:
        return [JSON_TYPE, *["image/*"] * (len(model.column_modalities) == 1)]
    return list(BODY_SUFFIXES)[:4]


def compute_max_column_magnitudes(model: TablePipeline) -> list[float]:
    """Compute the maximal absolute value that requests may have in each column: a multiple of its training scale."""
    limit = float(model.network.encoder.scale) * MAX_FEATURE_TO_TRAINING_SCALE  # type: ignore[arg-type]
    plain = model.encoding is None or model.encoding.is_fully_numeric
    # Slightly below the limit, because standardized numbers are rounded.
    scales = [1.0 if plain else getattr(column, "scale", 1.0) * (1 - 2**-20) for column in model.fitted_columns]
    return [min(limit * scale, MAX_FLOAT32) for scale in scales]


#: A function that encodes rows as features (b, dim), as `TablePipeline.encode` does: of a model, a block of rows, and
#: the argument that errors name.
BlockEncoder = Callable[[TablePipeline, RowBlock, str], np.ndarray]


def parse_body(
    model: TablePipeline, media_type: str, body: bytes, encode: BlockEncoder = TablePipeline.encode
) -> ParsedRows:
    """Parse the body of a request, of media type ``media_type``, into rows for a model.

    Raises an HTTPException if the model does not accept the media type, and an InputError if the rows are wrong.
    """
    kind = "image/*" if media_type.startswith("image/") else media_type
    if kind == JSON_TYPE:
        return parse_json_rows(model, body, encode)
    if kind not in list_content_types(model):
        kinds = ", ".join([*list_content_types(model), MULTIPART_TYPE])
        line = f"`content-type` must be one of {kinds} for this model; got {to_printable(media_type)[:80] or None}."
        raise HTTPException(415, line)
    if body[:2] == b"\x1f\x8b":
        raise HTTPException(415, "`body` must not be compressed; got gzip.")
    with temporary_server_folder() as folder, hide_temporary_paths(folder):
        path = folder / f"body{BODY_SUFFIXES[kind]}"
        path.write_bytes(body)
        if kind == "image/*":
            check_pixel_counts([path])
            return encode_columns(model, [make_text_array([str(path)], 1)], encode)
        return parse_table_file(model, path, encode)


@contextmanager
def hide_temporary_paths(folder: Path) -> Iterator[None]:
    """Replace paths in a temporary folder, in messages of InputErrors in the context, by "the request" or the row."""
    try:
        yield
    except UserError as error:
        message = str(rename_argument(error, "body"))
        for suffix in BODY_SUFFIXES.values():
            message = message.replace(f"{folder}/body{suffix}", "the request")
        raise type(error)(message.replace(f"{folder}/", "row "), argument="body") from None


def parse_table_file(model: TablePipeline, path: Path, encode: BlockEncoder) -> ParsedRows:
    """Parse the rows of a CSV or NPY file in the same way as the command ``predict``."""
    table = model.open_table(path, model.new_row_spec)
    rows = RowBlock.concatenate(list(table.blocks))
    check_row_count(len(rows.positions))
    assert rows.uninformative_mask is not None  # open_table marks them
    notes = [*table.all_notes, *format_missing_notes(model, rows.columns)]
    return ParsedRows(encode(model, rows, "path"), notes, rows.uninformative_mask)


def parse_json_rows(model: TablePipeline, body: bytes, encode: BlockEncoder) -> ParsedRows:
    """Parse the rows of a JSON body; cells of a picture column are the contents of files in base64."""
    request = decode_json(body, ROWS_DECODER)
    rows = request.rows if isinstance(request, PredictRequest) else request
    if not rows:
        raise_input_error("body", "hold rows", "none", 'Send {"rows": [...]}, each a list, or an object by column.')
    check_row_count(len(rows))
    unused = {name for row in rows if isinstance(row, dict) for name in row}.difference(model.columns or ())
    parsed = _parse_cells(model, body, rows, encode)
    return parsed._replace(notes=[describe_unused_columns(sorted(unused)), *parsed.notes]) if unused else parsed


def _parse_cells(model: TablePipeline, body: bytes, rows: list[JsonRow], encode: BlockEncoder) -> ParsedRows:
    """Parse the rows of a JSON ``body``, each a list of cells in the order of the columns, or a dict by column."""
    pictures = [modality == "picture" for modality in model.column_modalities]
    width = len(pictures)
    if any(isinstance(row, dict) for row in rows):
        rows = [order_row_cells(row, model.columns, index) for index, row in enumerate(rows)]
    cells = None if any(pictures) else rows_to_matrix(rows, width)
    if cells is not None and b"true" not in body and b"false" not in body:  # NumPy reads booleans as numbers
        if (model.encoding is None or model.encoding.is_fully_numeric) and bool((np.abs(cells) <= MAX_FLOAT32).all()):
            x = cells if cells.dtype.kind == "f" else cells.astype(np.float64)
            return ParsedRows(x, [], np.zeros(len(x), bool))
        return encode_columns(model, list(cells.T), encode)
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width:
            got = f"{len(row) if isinstance(row, list) else 'an object'} in row {index}"
            raise_input_error("body", f"have {width} cells in each row", got, "Send a list, or an object by column.")
    columns = [cells_to_column([row[index] for row in rows]) for index in range(width)]  # type: ignore[index]
    if not any(pictures):  # a temporary folder would take most of the time of a request
        return encode_columns(model, columns, encode)
    with temporary_server_folder() as folder, hide_temporary_paths(folder):
        for index, texts in enumerate(columns):
            if pictures[index]:
                paths = [write_picture(folder / f"{row}, column {index}", cell) for row, cell in enumerate(texts)]
                columns[index] = make_text_array(map(str, paths), len(paths))
                check_pixel_counts(paths)
        return encode_columns(model, columns, encode)


def parse_tensors(
    model: TablePipeline, inputs: list[Tensor], encode: BlockEncoder = TablePipeline.encode
) -> ParsedRows:
    """Parse the rows of a KServe request from one tensor for all columns, or from one tensor per column."""
    if model.has_pictures:
        remedy = "Send them to /models/NAME/predict."
        raise_input_error("inputs", "be for a model without pictures", "one with pictures", remedy)
    names, width = list(model.columns or ()), len(model.column_modalities)
    given = {tensor.name: tensor for tensor in inputs}
    if len(inputs) == 1 and len(inputs[0].shape) == 2 and (width > 1 or inputs[0].name not in names):
        if inputs[0].shape[1] != width:
            remedy = "Send all columns of the model, in its order."
            raise_input_error("inputs", f"have shape [rows, {width}]", inputs[0].shape, remedy)
        cells = flatten_tensor(inputs[0])
        columns = [cells[index::width] for index in range(width)]
    else:
        if not names or sorted(names) != sorted(tensor.name for tensor in inputs):
            got = ", ".join(map(to_printable, given))[:80] or "none"
            expected = ", ".join(names)[:200] or f"one tensor of shape [rows, {width}]"
            raise_input_error("inputs", f"hold each of {expected} once", got, "Ask /v2/models/NAME for its inputs.")
        columns = [flatten_tensor(given[name]) for name in names]
        if len(set(map(len, columns))) > 1:
            must = "have shape [rows] or [rows, 1], each the same rows"
            raise_input_error("inputs", must, "others", "Send one cell per row.")
    if not columns[0]:
        raise_input_error("inputs", "hold rows", "none", "Send one at least.")
    check_row_count(len(columns[0]))
    return encode_columns(model, list(map(cells_to_column, columns)), encode)


INFER_DECODER = msgspec.json.Decoder(InferRequest)


def decode_infer_request(body: bytes, json_size: str | None) -> InferRequest:
    """Decode the body of a KServe request: JSON, which the data of its binary tensors may follow, in their order.

    ``json_size`` is the header ``Inference-Header-Content-Length``, the number of bytes of the JSON; None for all.

    Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
    """
    size = len(body) if json_size is None else int(json_size) if re.fullmatch(r"[0-9]{1,12}", json_size) else -1
    if not 0 <= size <= len(body):
        must = "be the number of bytes of the JSON in the body"
        raise_input_error("inference-header-content-length", must, to_printable(str(json_size))[:20], "Correct it.")
    request, data = decode_json(body[:size], INFER_DECODER), body[size:]
    for tensor in request.inputs:
        n_bytes = None if tensor.parameters is msgspec.UNSET else tensor.parameters.get("binary_data_size")
        if n_bytes is None and tensor.data is not msgspec.UNSET:
            continue
        if type(n_bytes) is not int or not 0 <= n_bytes <= len(data) or tensor.data is not msgspec.UNSET:
            got, remedy = to_printable(tensor.name)[:40], "Send one of both."
            raise_input_error("inputs", "each have data, or binary_data_size bytes after the JSON", got, remedy)
        tensor.data, data = decode_binary_tensor(tensor, data[:n_bytes]), data[n_bytes:]
    if data:
        raise_input_error("body", "end with the data of its binary tensors", f"{len(data)} bytes more", "Correct it.")
    return request


def decode_binary_tensor(tensor: Tensor, data: bytes) -> list[JsonCell]:
    """Decode the elements of a binary tensor: numbers in little endian, or texts after their number of bytes."""
    _, dtype = KSERVE_DATATYPES.get(tensor.datatype, ((), np.dtype(object)))
    try:
        if dtype.kind != "O":
            return list(np.frombuffer(data, dtype).tolist())
        texts, start = list[JsonCell](), 0
        while start < len(data):
            (n,) = struct.unpack_from("<I", data, start)
            text = data[start + 4 : start + 4 + n]
            start += 4 + n
            if start > len(data):
                raise ValueError("a text is cut off")
            texts.append(text.decode())
        return texts
    except (ValueError, struct.error) as error:
        got = f"{to_printable(str(error))[:60]} in {to_printable(tensor.name)[:40]}"
        return raise_input_error("body", f"hold {to_printable(tensor.datatype)[:20]} data", got, "Correct it.")


def encode_binary_tensor(tensor: Tensor) -> bytes:
    """Encode the elements of a tensor of numbers or texts; the inverse of `decode_binary_tensor`."""
    _, dtype = KSERVE_DATATYPES[tensor.datatype]
    if dtype.kind != "O":
        return np.array(tensor.data, dtype).tobytes()
    texts = [text.encode() for text in tensor.data or ()]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def flatten_tensor(tensor: Tensor) -> list[JsonCell]:
    """Return the elements of a tensor as a flat list; raise an InputError if they contradict its data type or shape."""
    if tensor.datatype not in KSERVE_DATATYPES:
        got = to_printable(tensor.datatype)[:20]
        raise_input_error("datatype", f"be one of {', '.join(KSERVE_DATATYPES)}", got, "Convert the tensor.")
    (kinds, dtype), data = KSERVE_DATATYPES[tensor.datatype], list(tensor.data or ())
    for _ in tensor.shape:
        if data and all(isinstance(item, list) for item in data):
            data = [cell for item in data for cell in item]
    wrong = [cell for cell in data if cell is not None and type(cell) not in kinds]
    if dtype.kind in "iu" and not wrong:
        range_ = np.iinfo(dtype)
        wrong = [cell for cell in data if cell is not None and not range_.min <= cell <= range_.max]
    size = math.prod(tensor.shape) if len(tensor.shape) in {1, 2} else -1
    if size != len(data) or wrong or tensor.shape[0] > MAX_REQUEST_ROWS:
        got = f"{len(data)} elements" + (f", such as {to_printable(wrong[0])[:20]!r}" if wrong else "")
        got += f" in {to_printable(tensor.name)[:40]}"
        raise_input_error("data", f"be {tensor.datatype} of shape {tensor.shape[:8]}", got, "Correct it.")
    return data


def encode_columns(model: TablePipeline, columns: list[np.ndarray], encode: BlockEncoder) -> ParsedRows:
    """Encode columns of cells, arrays (n,), as features, with the same checks as for the rows of a file."""
    columns = [replace_missing_cells(cells, model.missing_texts) for cells in columns]
    for index, (cells, limit) in enumerate(zip(columns, compute_max_column_magnitudes(model), strict=True)):
        size = np.abs(cells) if cells.dtype.kind in "iuf" else np.zeros(1)
        if ((size > limit) & (size <= MAX_FLOAT32)).any():  # larger ones are refused with their position
            must = f"have numbers of at most {limit:.6g} in column {index} (counted from 0)"
            raise_input_error("body", must, "others", "Correct or drop the row.")
    table = Table(blocks=iter([RowBlock.from_columns(columns, model.columns)]))
    table = convert_to_training_formats(table, model.encoding, argument="body")
    table.notes.extend(format_missing_notes(model, columns))
    (block,) = model.mark_uninformative(table)
    assert block.uninformative_mask is not None
    return ParsedRows(encode(model, block, "body"), table.notes, block.uninformative_mask)


def format_missing_notes(model: TablePipeline, columns: Sequence[np.ndarray]) -> list[str]:
    """Format the number of missing cells per column as a list of at most one note; empty if columns have no names."""
    counts = []
    for name, column, cells in zip(model.columns or (), model.fitted_columns, columns, strict=False):
        test = is_missing_or_missing_word if column.column_type in {"number", "numbers", "date"} else is_missing
        if missing := int(test(cells).sum()):
            counts.append(f"{missing} of {len(cells)} in {to_printable(name)}")
    return [f"missing values: {', '.join(counts)}"] if counts else []


def check_row_count(n: int) -> None:
    """Raise an HTTPException if ``n``, the number of rows of a request, is too large."""
    if n > MAX_REQUEST_ROWS:
        raise HTTPException(413, f"`body` must have at most {MAX_REQUEST_ROWS:,} rows; got more. Send them in parts.")


def order_row_cells(row: JsonRow, columns: Sequence[str] | None, row_number: int) -> list[JsonCell]:
    """Return the cells of a row in the order of the columns, without cells of other columns.

    A list is returned unchanged. ``row_number`` is the index of the row in error messages.
    """
    if not isinstance(row, dict):
        return row
    if columns is None:
        got, remedy = f"an object as row {row_number}", "Send lists: columns have no names."
        raise_input_error("body", "have lists as rows", got, remedy)
    missing = [name for name in columns if name not in row]
    if missing:
        got = f"row {row_number} without {format_names(missing)}"
        raise_input_error("body", "have the model's columns", got, "Send null for a missing cell.")
    return [row[name] for name in columns]


def rows_to_matrix(rows: Sequence[JsonRow], width: int) -> np.ndarray | None:
    """Convert rows of numbers to an array (n, width), int64 or float64; return None if a cell is not a number."""
    parts = []
    for start in range(0, len(rows), 1024):  # NumPy holds the interpreter's lock for each part
        try:
            parts.append(np.array(rows[start : start + 1024]))
        except (ValueError, OverflowError):
            return None
        if parts[-1].dtype.kind not in "if" or parts[-1].shape[1:] != (width,):
            return None
    return np.concatenate(parts)


def cells_to_column(cells: Sequence[JsonCell]) -> np.ndarray:
    """Convert the cells of a column to an array (n,) of numbers, NaN if missing, or of texts if one is not a number."""
    kinds = {type(cell) for cell in cells} - {type(None)}
    if kinds <= {int, float}:
        if kinds == {int} and None not in cells and all(abs(cell) < 2**63 for cell in cells):  # type: ignore[arg-type]
            return np.array(cells, np.int64)
        if all(cell is None or abs(cell) <= MAX_FLOAT32 for cell in cells):  # type: ignore[arg-type]
            return np.array(cells, np.float64)
    texts = (escape_control_chars("" if cell is None else str(cell).strip()) for cell in cells)
    return make_text_array(texts, len(cells))


def check_pixel_counts(pictures: Sequence[Path | BinaryIO]) -> None:
    """Raise an InputError if a picture of a request, or all of them together, would take too much memory or time."""
    # A pixel takes up to 20 bytes while it is decoded, and a PNG of a single colour a thousandth of a byte per pixel.
    max_pixels, max_total = 25_000_000, 100_000_000
    counts = list(map(count_pixels, pictures))
    if max(counts, default=0) > max_pixels or sum(counts) > max_total:
        must = f"hold pictures of at most {max_pixels:,} pixels each, and {max_total:,} together"
        raise_input_error("body", must, f"{max(counts):,}, and {sum(counts):,} together", "Send smaller ones.")


def write_picture(path: Path, cell: str) -> Path:
    """Decode a picture in base64 into a file, and return the path of the file; the cell is never used as a path."""
    try:
        path.write_bytes(base64.b64decode(cell, validate=True))
    except (TypeError, ValueError, binascii.Error):
        got = to_printable(cell)[:20] if isinstance(cell, str) else "a number"
        raise_input_error("body", "hold pictures as base64 of their files", got, "Encode the file's bytes.")
    return path
