"""The body of a request as rows of a model: JSON, CSV, NPY or a picture, by the readers and checks of files."""

from __future__ import annotations

import argparse
import base64
import binascii
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from protonet._text import escape_control_chars, to_printable
from protonet.commands.models import get_missing, list_notes, mark_uninformative, open_rows, want
from protonet.commands.server.guard import RequestError
from protonet.errors import USER_ERRORS, raise_input_error, rename_argument
from protonet.files import Model
from protonet.tables.columns.number import MOST
from protonet.tables.columns.parsing import blank_missing
from protonet.tables.features import check_kinds, encode_block
from protonet.tables.formats import to_text
from protonet.tables.spelling import detect_spelling
from protonet.tables.table import Block, Table, list_names

#: Rows of a request.
MOST_ROWS = 100_000
#: What a body may be, by its media type: the end of a file's name that stands for it.
KINDS = {
    "application/json": ".json",
    "text/csv": ".csv",
    "application/x-npy": ".npy",
    "application/octet-stream": ".npy",
    "image/*": ".png",
}
#: What a message calls a row.
PLACE = "row {} (counted from 0)"


class Rows(NamedTuple):
    """What a request asks for."""

    x: np.ndarray  #: (n, dim) float32 or float64.
    notes: list[str]  #: What a person should be told.
    uninformative: np.ndarray | None = None  #: (n,) bool: rows in which no cell says anything; None for none.


def read_body(model: Model, media: str, body: bytes) -> Rows:
    """Return the rows of a request.

    Raises:
        RequestError: Another type, or too many rows.
        InputError: What does not fit the model.
    """
    kind = KINDS.get("image/*" if media.startswith("image/") else media)
    taken = [] if model.encoding is None else [column.takes == "picture" for column in model.encoding.columns]
    if kind == ".json":
        return read_json(model, body, taken)
    if kind is None or (kind == ".png") != any(taken) or (kind == ".png" and len(taken) > 1):
        fitting = ["application/json", *(["image/*"] if taken == [True] else [] if any(taken) else list(KINDS)[1:4])]
        got = to_printable(media)[:80] or "none"
        raise RequestError(415, f"`content-type` must be one of {', '.join(fitting)} for this model; got {got}.")
    if body[:2] == b"\x1f\x8b":
        raise RequestError(415, "`body` must not be compressed; got gzip.")
    with tempfile.TemporaryDirectory(prefix="protonet-") as folder, as_body(folder):
        path = Path(folder, f"body{kind}")
        path.write_bytes(body)
        if kind == ".png":
            return encode(model, [to_text([str(path)], 1)], 1)
        return read_file(model, path)


@contextmanager
def as_body(folder: str) -> Iterator[None]:
    """Tell of files in a folder of ours, which nobody has named, as of the body that they came in."""
    try:
        yield
    except USER_ERRORS as error:
        message = str(rename_argument(error, "body"))
        for kind in KINDS.values():
            message = message.replace(f"{folder}/body{kind}", "the request")
        raise type(error)(message.replace(f"{folder}/", "row "), argument="body") from None


def read_file(model: Model, path: Path) -> Rows:
    """Return the rows of a CSV or NPY file, as ``predict`` reads them."""
    options = argparse.Namespace(table=str(path), skip_broken=False, sheet=None)
    table = open_rows(options, model, want(model, None, labelled=False))
    parts, uninformative, n = [], [], 0
    for block in table.blocks:
        n += len(block.rows)
        check_count(n)
        parts.append(encode_block(table, block, model.encoding))
        assert block.uninformative is not None  # open_rows marks them
        uninformative.append(block.uninformative)
    return Rows(np.concatenate(parts), list_notes(table), np.concatenate(uninformative))


def read_json(model: Model, body: bytes, pictured: Sequence[bool]) -> Rows:
    """Return rows of JSON: a list of them, or an object that holds it as ``rows``.

    Each is a list of cells in the order of the model's columns, or an object of them by name. A cell is a number, a
    text, true or false, or null for a gap; that of a picture is its file in base64.
    """
    rows = parse_json(body)
    rows = rows.get("rows") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not rows:
        raise_input_error("body", "hold rows", "none", 'Send {"rows": [...]}, each a list, or an object by columns.')
    check_count(len(rows))
    width = int(model.network.encoder.input_dim) if model.encoding is None else len(model.encoding.columns)  # type: ignore[arg-type]
    if isinstance(rows[0], dict):
        rows = [order_cells(row, model.columns, number) for number, row in enumerate(rows)]
    cells = None if any(pictured) else as_matrix(rows, width)
    if cells is not None and b"true" not in body and b"false" not in body:  # which NumPy takes for numbers
        plain = model.encoding is None or model.encoding.plain
        if plain and bool((np.abs(cells) <= MOST).all()):
            return Rows(cells if cells.dtype.kind == "f" else cells.astype(np.float64), [])
        return encode(model, list(cells.T), len(cells))
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width:
            got = f"{len(row) if isinstance(row, list) else name_kind(row)} in row {number}"
            raise_input_error("body", f"have {width} cells in each row", got, "Send a list, or an object by columns.")
    columns = [as_column(each) for each in zip(*rows, strict=True)]
    if not any(pictured):
        return encode(model, columns, len(rows))
    with tempfile.TemporaryDirectory(prefix="protonet-") as folder, as_body(folder):
        for number, texts in enumerate(columns):
            if pictured[number]:
                paths = [write_picture(Path(folder, f"{row}, column {number}"), cell) for row, cell in enumerate(texts)]
                columns[number] = to_text(paths, len(paths))
        return encode(model, columns, len(rows))


def encode(model: Model, columns: list[np.ndarray], n: int) -> Rows:
    """Return the features of cells (n,) of each column, checked as those of a file are."""
    columns = [blank_missing(cells, get_missing(model)) for cells in columns]
    table = Table(model.columns, iter(()), PLACE, [])
    block = Block(columns, np.empty(0, np.str_), (), range(n), range(n))
    spelling = detect_spelling(table, block, model.encoding)
    block = spelling.apply(block, model.encoding)
    table.notes.extend([*spelling.notes, *check_kinds(table, block, model.encoding, "body")])
    (block,) = mark_uninformative([block], model, table)
    return Rows(encode_block(table, block, model.encoding, "body"), table.notes, block.uninformative)


def check_count(n: int) -> None:
    """Raise `RequestError` for too many rows."""
    if n > MOST_ROWS:
        raise RequestError(413, f"`body` must have at most {MOST_ROWS:,} rows; got more. Send them in parts.")


def order_cells(row: object, columns: Sequence[str] | None, number: int) -> list[object]:
    """Return the cells of an object in the order of the columns; others than these are left out, as in a table."""
    if columns is None or not isinstance(row, dict):
        got = f"{name_kind(row)} as row {number}"
        raise_input_error("body", "have rows of one form", got, "Send lists where the model has no names of columns.")
    missing = [name for name in columns if name not in row]
    if missing:
        raise_input_error(
            "body", "have the model's columns", f"row {number} without {list_names(missing)}", "null is a gap."
        )
    return [row[name] for name in columns]


def as_matrix(rows: list[Any], width: int) -> np.ndarray | None:
    """Return rows of numbers (n, width), int64 or float64; None where there is something else."""
    try:
        cells = np.array(rows)
    except (ValueError, OverflowError):
        return None
    return cells if cells.dtype.kind in "if" and cells.shape[1:] == (width,) else None


def as_column(cells: Sequence[object]) -> np.ndarray:
    """Return the cells of a column as a table has them: numbers, NaN for a gap, or texts."""
    kinds = {type(cell) for cell in cells} - {type(None)}
    strange = kinds - {int, float, str, bool}
    if strange:
        raise_input_error("body", "hold numbers, texts and null", name_kind(strange.pop()()), "Leave it out.")
    if kinds <= {int, float}:
        if kinds == {int} and None not in cells and all(abs(cell) < 2**63 for cell in cells):  # type: ignore[arg-type]
            return np.array(cells, np.int64)
        if all(cell is None or abs(cell) <= MOST for cell in cells):  # type: ignore[arg-type]
            return np.array(cells, np.float64)
    return to_text((escape_control_chars("" if cell is None else str(cell).strip()) for cell in cells), len(cells))


def name_kind(value: object) -> str:
    """Return what JSON calls a value."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def write_picture(path: Path, cell: object) -> str:
    """Write a picture that came in base64; return its path: what came is never one."""
    try:
        path.write_bytes(base64.b64decode(cell, validate=True))  # type: ignore[arg-type]
    except (TypeError, ValueError, binascii.Error):
        got = to_printable(cell)[:20] if isinstance(cell, str) else "no text"
        raise_input_error("body", "hold pictures as base64 of their files", got, "Encode the file's bytes.")
    return str(path)


def parse_json(body: bytes) -> Any:
    """Return what JSON holds; what the fast reader does not take, Python's own does, or says why not.

    Raises:
        InputError: It is no JSON.
    """
    with suppress(ValueError, RecursionError):
        return find_reader()(body)
    try:
        return json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise_input_error("body", "be JSON", f"what is none ({str(error)[:80]})", "Send a list of rows.")


@cache
def find_reader() -> Callable[[bytes], Any]:
    """Return msgspec's reader of JSON, which is seven times as fast, or Python's where it is not installed."""
    try:
        decode: Callable[[bytes], Any] = importlib.import_module("msgspec.json").decode
    except ImportError:
        return partial(json.loads, parse_constant=refuse_constant)
    return decode


def refuse_constant(name: str) -> NoReturn:
    """Raise a ValueError for what Python's JSON knows beside JSON."""
    raise ValueError(f"{name} is no number of JSON")
