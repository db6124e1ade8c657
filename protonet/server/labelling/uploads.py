"""Rows that users of the labelling page upload: texts and pictures are checked, saved, and added to the table."""

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
from protonet.embeddings.loading import SelectedEncoders
from protonet.embeddings.pictures import reading
from protonet.errors import raise_input_error
from protonet.server.labelling.label_file import LabelFile
from protonet.server.parsing import check_pixel_counts
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.picture import Picture
from protonet.tables.features import encode_block
from protonet.tables.formats import PICTURE_COLUMN
from protonet.tables.formats.source import make_text_array
from protonet.tables.table import RowBlock
from protonet.tables.training import TrainingTable

#: Maximal number of uploaded rows, and of characters of an uploaded text.
MAX_ADDED_ROWS, MAX_UPLOADED_CHARACTERS = 10_000, 20_000


@dataclass
class Uploads:
    """Checks and saves the texts or pictures that users of the labelling page upload as new rows of a table.

    Several threads may add rows at the same time. A thread finishes its work even if its request has timed out.
    """

    file: LabelFile  #: The file of uploaded rows, whose last column is "added".
    table_path: Path  #: The table that the rows are added to.
    content_column: int | None  #: Index of the column of texts or pictures; None if rows cannot be uploaded.
    are_pictures: bool  #: Whether rows are pictures; otherwise, texts.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def folder(self) -> Path:
        """The folder of uploaded pictures, in the same folder as the label file."""
        return self.file.path.with_suffix("")

    def add_texts(self, text: str, known_texts: set[str]) -> list[list[str]]:
        """Save each line of a text as a new row, except empty lines and ``known_texts``, the texts of the table.

        Returns the cells of each new row. Raises an InputError if there are too many lines, or a line is too long.
        """
        self._require_modality(pictures=False)
        lines = [escape_control_chars(line.strip()) for line in text.splitlines()]
        lines = [line for line in dict.fromkeys(lines) if line and line not in known_texts]
        longest = max(map(len, lines), default=0)
        if longest > MAX_UPLOADED_CHARACTERS or len(lines) + len(self.file.rows) > MAX_ADDED_ROWS:
            must = f"have at most {MAX_ADDED_ROWS:,} lines of at most {MAX_UPLOADED_CHARACTERS:,} characters"
            raise_input_error("text", must, f"{len(lines):,} lines, one of {longest:,}", "Shorten it.")
        return self._add_missing_rows(lines)

    def add_picture(self, name: str, content: bytes, known_paths: set[str]) -> list[list[str]]:
        """Save an uploaded picture in `folder`, and as a new row; return its cells in a list.

        The list is empty if the table already has the picture: the path contains a checksum of the content. ``name`` is
        the file name on the user's computer.
        """
        self._require_modality(pictures=True)
        if self.table_path.resolve() in self.folder.resolve().parents:
            raise HTTPException(409, "Pictures cannot be added inside of the folder of the table: pass another -o.")
        from PIL import Image  # noqa: PLC0415 - optional

        check_pixel_counts([io.BytesIO(content)])
        try:
            reading.decode_image(io.BytesIO(content), 1)  # a JPEG at an eighth of its size
            with Image.open(io.BytesIO(content)) as image:
                suffix = f".{image.format}".lower().replace("mpo", "jpeg")  # a file of several JPEGs
            if suffix not in reading.IMAGE_SUFFIXES:
                raise ValueError(f"in the format {image.format}")
        except reading.UNREADABLE_IMAGE_ERRORS as error:
            got = reading.describe_image_error(error)
            raise_input_error("body", "be a picture that can be read", got, "Leave it out.")
        stem = re.sub(r"[^\w-]+", "-", Path(name.replace("\\", "/")).stem)[:40].strip("-") or "picture"
        path = self.folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
        if reading.path_to_text(path) in known_paths:
            return []
        self.folder.mkdir(exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
        return self._add_missing_rows([reading.path_to_text(path)])

    def _add_missing_rows(self, texts: Sequence[str]) -> list[list[str]]:
        """Save a row for each text (or picture path) that has no row yet; return the cells of the rows of all texts."""
        column = self.content_column or 0
        rows = [[text if index == column else "" for index in range(len(self.file.header) - 1)] for text in texts]
        with self._lock:
            there = {cells[column] for cells in self.file.rows}
            for cells in rows:
                if cells[column] not in there:
                    self.file.add(cells, "added")
        return rows

    def _require_modality(self, *, pictures: bool) -> None:
        """Raise an HTTPException unless further pictures or, if not ``pictures``, further texts can be uploaded."""
        kind = "pictures" if pictures else "texts"
        if self.content_column is None or self.are_pictures is not pictures:
            raise HTTPException(409, f"Rows can be added if {kind} are the only feature of the table.")
        if len(self.file.rows) >= MAX_ADDED_ROWS:
            raise HTTPException(409, f"At most {MAX_ADDED_ROWS:,} rows can be added.")


def append_rows(table: TrainingTable, header: Sequence[str], cells: Sequence[Sequence[str]]) -> TrainingTable:
    """Return a copy of an encoded table with new rows at its end; ``header`` names the columns of ``cells``."""
    n, start, old = len(cells), len(table.x), table.rows
    if not n:
        return table
    indices = [header.index(name) for name in table.columns or header]
    columns = [make_text_array([line[index] for line in cells], n) for index in indices]
    new = RowBlock.from_columns(columns, table.columns, old.position_format)
    x = np.ascontiguousarray(encode_block(new, table.encoding))
    empty = np.zeros(n, bool) if table.encoding is None else table.encoding.is_uninformative(columns)
    positions = range(start, start + n)
    return replace(
        table,
        rows=old._replace(
            columns=[],
            positions=[*old.positions, *positions],
            row_indices=[*old.row_indices, *positions],
            labels=np.concatenate([old.labels.astype(object), make_text_array([""] * n, n)])
            if len(old.labels)
            else old.labels,
        ),
        x=torch.cat([table.x, torch.from_numpy(x)]),
        y=torch.cat([table.y, torch.full((n,), -1)]),
        uninformative_mask=torch.cat([table.uninformative_mask, torch.from_numpy(empty)]),
    )


def make_empty_picture_table(
    paths: Sequence[str], encoders: Sequence[str] | None, *, show_progress: bool
) -> TrainingTable:
    """Make a table of pictures without rows; ``paths`` are the pictures to fit its encoding to, if there are any."""
    selection = SelectedEncoders.from_names(encoders, show_progress=show_progress)
    column = Picture.fit(np.array(paths, object), selection.load_encoder("picture"), show_progress=show_progress)
    no_cells, hint = np.empty(0, object), selection.format_install_hint("picture")
    return TrainingTable(
        rows=RowBlock.from_columns([no_cells], (PICTURE_COLUMN,)),
        x=torch.from_numpy(column.encode(no_cells)),
        y=torch.zeros(0, dtype=torch.int64),
        classes=(),
        encoding=Encoding((column,)),
        uninformative_mask=torch.zeros(0, dtype=torch.bool),
        notes=[hint] if hint else [],
    )
