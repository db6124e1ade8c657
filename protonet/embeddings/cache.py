"""A persistent cache of embeddings by the content of texts and pictures: one SQLite file per representation."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from protonet._io import cache_folder

#: Keys per query: older versions of SQLite limit the number of variables in a statement.
KEYS_PER_QUERY = 500


class Store:
    """Embeddings in a file, by the digest of their item. Writes are transactions. Without a path, nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.connection = None if path is None else _connect(path)

    def read(self, digests: Sequence[str], width: int) -> dict[str, np.ndarray]:
        """Read the stored embeddings (width,) float32 by digest; a damaged file is recreated, and has none."""
        try:
            return self._read(digests, width)
        except sqlite3.Error as error:
            self._recreate(error)
            return {}

    def _read(self, digests: Sequence[str], width: int) -> dict[str, np.ndarray]:
        """Read the stored embeddings."""
        embeddings: dict[str, np.ndarray] = {}
        if self.connection is None:
            return embeddings
        keys = list(dict.fromkeys(digests))
        for first in range(0, len(keys), KEYS_PER_QUERY):
            batch = keys[first : first + KEYS_PER_QUERY]
            query = f"SELECT item, embedding FROM embeddings WHERE item IN ({','.join('?' * len(batch))})"
            for key, content in self.connection.execute(query, batch):
                if len(content) == 4 * width:
                    embeddings[key] = np.frombuffer(content, "<f4")
        return embeddings

    def write(self, digests: Sequence[str], rows: np.ndarray) -> None:
        """Store embeddings in one transaction; errors are printed and ignored."""
        if self.connection is None:
            return
        pairs = [(digest, row.astype("<f4").tobytes()) for digest, row in zip(digests, rows, strict=True)]
        try:
            with self.connection:
                self.connection.executemany("INSERT OR REPLACE INTO embeddings VALUES (?, ?)", pairs)
        except sqlite3.Error as error:
            self._recreate(error)

    def _recreate(self, error: sqlite3.Error) -> None:
        """Recreate a damaged file; on other errors, stop storing embeddings."""
        self.close()
        if self.path is not None and _is_damage(error):
            _remove(self.path, error)
            self.connection = _connect(self.path)
            return
        print(f"protonet: embeddings are not kept: {error}", file=sys.stderr)

    def close(self) -> None:
        """Close the file."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None


def embeddings_folder() -> Path:
    """Locate the default folder of embeddings."""
    return cache_folder() / "embeddings"


@contextmanager
def open_store(folder: Path | None, key: str) -> Iterator[Store]:
    """Open the embeddings of a representation; a damaged file is recreated, with a message on stderr.

    Args:
        folder: The folder of the file; None to store nothing.
        key: A digest of the representation; "" if it is unknown, to store nothing.
    """
    with closing(Store(folder / f"{key}.sqlite" if folder is not None and key else None)) as store:
        yield store


def _connect(path: Path) -> sqlite3.Connection | None:
    """Open a file of embeddings; None if that fails."""
    create = "CREATE TABLE IF NOT EXISTS embeddings (item TEXT PRIMARY KEY, embedding BLOB)"
    for last in (False, True):
        connection = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=60, check_same_thread=False)
            connection.execute(create)
            connection.execute("SELECT COUNT(*) FROM embeddings").fetchone()
            return connection
        except (sqlite3.Error, OSError) as error:
            if connection is not None:
                connection.close()
            if _is_damage(error) and not last:
                _remove(path, error)
                continue
            print(f"protonet: {path} is not kept: {error}; PROTONET_CACHE names another folder", file=sys.stderr)
            break
    return None


def _is_damage(error: Exception) -> bool:
    """Test whether an error is due to the content of a file, and not to its folder or a lock."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


def _remove(path: Path, error: Exception) -> None:
    """Remove a damaged file, with a message on stderr."""
    print(f"protonet: {path} is made again: {error}", file=sys.stderr)
    path.unlink(missing_ok=True)
