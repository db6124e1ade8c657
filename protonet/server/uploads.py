"""Rows that are added on the labelling page: texts and pictures, kept beside the file of the labels."""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from starlette.exceptions import HTTPException

from protonet._io import write_atomically
from protonet._text import escape_control_chars
from protonet.commands.data import UnlabelledTable
from protonet.embeddings.pictures.images import UNREADABLE_IMAGE, describe_error, open_plain, path_to_text
from protonet.errors import raise_input_error
from protonet.server.labels import Answers
from protonet.tables.features import encode_block
from protonet.tables.formats import text_array
from protonet.tables.table import RowBlock

#: Maximal numbers of added rows, and of characters of a text.
MAX_ADDED, MAX_TEXT = 10_000, 20_000
#: The suffixes of files of pictures, by the format that they really have.
UPLOAD_SUFFIXES = {
    "PNG": ".png",
    "JPEG": ".jpg",
    "MPO": ".jpg",
    "BMP": ".bmp",
    "GIF": ".gif",
    "TIFF": ".tiff",
    "WEBP": ".webp",
}


@dataclass
class Uploads:
    """The rows that were added to a table.

    Args:
        rows: Their file: the cells of each, and "added".
        table: The path of the table.
        column: The index of the cell that a text or the path of a picture fills; None if rows cannot be added.
        pictures: Whether pictures are added; otherwise texts.
    """

    rows: Answers
    table: Path
    column: int | None
    pictures: bool
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cells(self) -> list[list[str]]:
        """The cells of the rows."""
        return [cells for *cells, _ in self.rows.rows]

    @property
    def folder(self) -> Path:
        """The folder of the pictures, beside the labels."""
        return self.rows.path.with_suffix("")

    def add_texts(self, text: str, known: set[str]) -> list[list[str]]:
        """Save the lines of a text as rows, but for empty and ``known`` ones; return their cells.

        Raises:
            HTTPException: The table does not have texts as its only feature.
            InputError: There are too many lines, or one is too long.
            OSError: The disk is full.
        """
        self._require(pictures=False)
        lines = [escape_control_chars(line.strip()) for line in text.splitlines()]
        lines = [line for line in dict.fromkeys(lines) if line and line not in known]
        longest = max(map(len, lines), default=0)
        if longest > MAX_TEXT or len(lines) + len(self.rows.rows) > MAX_ADDED:
            must = f"have at most {MAX_ADDED:,} lines of at most {MAX_TEXT:,} characters"
            raise_input_error("text", must, f"{len(lines):,} lines, one of {longest:,}", "Shorten it.")
        return self._save(lines)

    def add_picture(self, name: str, content: bytes, known: set[str]) -> list[list[str]]:
        """Save a picture under a safe name as a row, unless it is there already; return its cells, if any.

        Raises:
            HTTPException: The table does not have pictures as its only feature.
            InputError: It cannot be decoded.
            OSError: The disk is full.
        """
        self._require(pictures=True)
        if self.folder.resolve().is_relative_to(self.table.resolve()):
            raise HTTPException(409, "Pictures cannot be added inside of the folder of the table: pass another -o.")
        from PIL import Image  # noqa: PLC0415 - optional

        try:
            open_plain(io.BytesIO(content))
            with Image.open(io.BytesIO(content)) as image:
                suffix = UPLOAD_SUFFIXES.get(str(image.format), "")
            if not suffix:
                raise ValueError(f"none of {', '.join(UPLOAD_SUFFIXES)}")
        except UNREADABLE_IMAGE as error:
            raise_input_error("body", "be a picture that can be read", describe_error(error), "Leave it out.")
        stem = re.sub(r"[^\w-]+", "-", Path(name.replace("\\", "/")).stem)[:40].strip("-") or "picture"
        path = self.folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
        with self._lock:
            if path_to_text(path) in known:
                return []
            self.folder.mkdir(exist_ok=True)
            write_atomically(path, lambda file: file.write(content))
            return self._save([path_to_text(path)])

    def _save(self, texts: Sequence[str]) -> list[list[str]]:
        """Append rows to the file, but for those that an interrupted request has saved; return their cells."""
        column = self.column or 0
        rows = [[text if index == column else "" for index in range(len(self.rows.header) - 1)] for text in texts]
        there = {cells[column] for cells in self.cells}
        for cells in rows:
            if cells[column] not in there:
                self.rows.add(cells, "added")
        return rows

    def _require(self, *, pictures: bool) -> None:
        """Raise an HTTPException unless rows of a kind can be added."""
        kind = "pictures" if pictures else "texts"
        if self.column is None or self.pictures is not pictures:
            raise HTTPException(409, f"Rows can be added if {kind} are the only feature of the table.")
        if len(self.rows.rows) >= MAX_ADDED:
            raise HTTPException(409, f"At most {MAX_ADDED:,} rows can be added.")


def extend_rows(rows: UnlabelledTable, header: Sequence[str], cells: Sequence[Sequence[str]]) -> UnlabelledTable:
    """Append rows to the features of a table, by its encoding.

    Args:
        rows: The features of the table.
        header: The names of the cells.
        cells: The cells of the new rows.

    Raises:
        InputError: A picture cannot be read.
    """
    n, start = len(cells), len(rows.x)
    if not n:
        return rows
    indices = [header.index(name) for name in rows.columns or header]
    columns = [text_array([line[index] for line in cells], n) for index in indices]
    block = RowBlock(columns, np.empty(0, np.str_), (), range(n), range(n))
    x = torch.from_numpy(np.ascontiguousarray(encode_block(rows.table, block, rows.encoding)))
    empty = np.zeros(n, bool) if rows.encoding is None else rows.encoding.is_uninformative(columns)
    return replace(
        rows,
        x=torch.cat([rows.x, x]),
        known=torch.cat([rows.known, torch.zeros(n, dtype=torch.bool)]),
        positions=[*rows.positions, *range(start, start + n)],
        labels=[*rows.labels, *[""] * n] if len(rows.labels) else rows.labels,
        uninformative=torch.cat([rows.uninformative, torch.from_numpy(empty)]),
    )
