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

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.connection = None if path is None else _connect(path)

    def read(self, digests: Sequence[str], width: int) -> dict[str, np.ndarray]:
        """Return those that there are, (width,) float32 each; none of a file that turns out to be damaged."""
        try:
            return self._read(digests, width)
        except sqlite3.Error as error:
            self._make_again(error)
            return {}

    def _read(self, digests: Sequence[str], width: int) -> dict[str, np.ndarray]:
        """Return those that there are."""
        found: dict[str, np.ndarray] = {}
        if self.connection is None:
            return found
        keys = list(dict.fromkeys(digests))
        for first in range(0, len(keys), AT_ONCE):
            part = keys[first : first + AT_ONCE]
            query = f"SELECT item, embedding FROM embeddings WHERE item IN ({','.join('?' * len(part))})"
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
            self._make_again(error)

    def _make_again(self, error: sqlite3.Error) -> None:
        """Begin a damaged file anew; where something else is wrong, nothing is kept."""
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
    """Return where embeddings are kept, unless somebody names another folder."""
    return cache_folder() / "embeddings"


@contextmanager
def open_store(folder: Path | None, key: str) -> Iterator[Store]:
    """Open the embeddings of a representation; a damaged file is made again, with a line on stderr.

    Args:
        folder: Where they are kept; None where they are not.
        key: What decides an embedding beside what it is of; "" where nobody can tell, and nothing is kept.
    """
    with closing(Store(folder / f"{key}.sqlite" if folder is not None and key else None)) as store:
        yield store


def _connect(path: Path) -> sqlite3.Connection | None:
    """Open a file of embeddings, or None where that cannot be."""
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
    """Return whether a file's content is wrong, and not its place or its lock."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


def _remove(path: Path, error: Exception) -> None:
    """Remove a damaged file, with a line on stderr."""
    print(f"protonet: {path} is made again: {error}", file=sys.stderr)
    path.unlink(missing_ok=True)
