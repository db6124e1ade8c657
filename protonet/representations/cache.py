"""Embeddings that were computed before, by the contents of what they are of: a file for each representation."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from protonet._writing import cache_folder

#: Keys that are looked up at once: SQLite takes no more variables in a statement of old.
AT_ONCE = 500


class Store:
    """Embeddings in a file, by a digest of what they are of; each part is there whole or not at all."""

    def __init__(self, connection: sqlite3.Connection | None) -> None:
        self.connection = connection

    def read(self, digests: Sequence[str], width: int) -> dict[str, np.ndarray]:
        """Return those that there are, (width,) float32 each."""
        found: dict[str, np.ndarray] = {}
        if self.connection is None:
            return found
        keys = list(dict.fromkeys(digests))
        for first in range(0, len(keys), AT_ONCE):
            part = keys[first : first + AT_ONCE]
            query = f"SELECT picture, embedding FROM embeddings WHERE picture IN ({','.join('?' * len(part))})"
            for key, content in self.connection.execute(query, part):
                if len(content) == 4 * width:
                    found[key] = np.frombuffer(content, "<f4")
        return found

    def write(self, digests: Sequence[str], rows: np.ndarray) -> None:
        """Add some at once; where that fails, they are not kept."""
        if self.connection is None:
            return
        pairs = [(digest, row.astype("<f4").tobytes()) for digest, row in zip(digests, rows, strict=True)]
        try:
            with self.connection:
                self.connection.executemany("INSERT OR REPLACE INTO embeddings VALUES (?, ?)", pairs)
        except sqlite3.Error as error:
            print(f"protonet: embeddings are not kept: {error}", file=sys.stderr)
            self.connection = None


def embeddings_folder() -> Path:
    """Return where embeddings are kept, unless somebody names another folder."""
    return cache_folder() / "embeddings"


@contextmanager
def open_store(folder: Path | None, key: str) -> Iterator[Store]:
    """Open the embeddings of a representation; a damaged file is made again, with a line on stderr.

    Args:
        folder: Where they are kept; None where they are not.
        key: What decides an embedding beside what it is of; "" where nobody can tell, and nothing is kept.
    """
    connection = None if folder is None or not key else _connect(folder, folder / f"{key}.sqlite")
    if connection is None:
        yield Store(None)
        return
    with closing(connection):
        yield Store(connection)


def _connect(folder: Path, path: Path) -> sqlite3.Connection | None:
    """Open a file of embeddings, or None where that cannot be."""
    create = "CREATE TABLE IF NOT EXISTS embeddings (picture TEXT PRIMARY KEY, embedding BLOB)"
    for last in (False, True):
        connection = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=60, check_same_thread=False)
            connection.execute(create)
            connection.execute("SELECT COUNT(*) FROM embeddings").fetchone()
            return connection
        except (sqlite3.Error, OSError) as error:
            if connection is not None:
                connection.close()
            damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            if damaged and not last:
                print(f"protonet: {path} is made again: {error}", file=sys.stderr)
                path.unlink(missing_ok=True)
                continue
            print(f"protonet: {path} is not kept: {error}", file=sys.stderr)
            break
    return None
