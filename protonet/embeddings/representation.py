"""The protocol of representations: a network of others that turns texts or pictures into rows, and its record.

A *record* is what a model file keeps of it: with another network of that name, nothing is predicted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protonet.embeddings.cache import embeddings_folder, open_store
from protonet.embeddings.pictures.reading import refuse_picture, show_items
from protonet.errors import raise_input_error
from protonet.views.config import Stored, expect

#: Texts, letters of texts, and pictures whose embeddings are kept at once: an interruption costs no more.
AT_ONCE, LETTERS, PICTURES = 256, 30_000, 32
#: What a representation may take, and what a bar of progress calls it.
TAKES = ("text", "picture")
#: Widest embedding, and longest name, that a model file may ask for.
WIDEST, LONGEST = 2**16, 500


@dataclass(frozen=True)
class Record:
    """What a representation is."""

    name: str  #: What opens it: as a person types it.
    takes: str  #: One of `TAKES`.
    width: int  #: Numbers of an embedding.
    digest: str  #: SHA-256, hexadecimal, of weights, tokenizer and preparation.
    licence: str  #: Of the weights, as their maker says it; "" where nobody does.

    def tell(self) -> str:
        """Return what people read of it."""
        return f"{self.name} ({self.digest[:8]}), {self.width} numbers"

    def describe(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def restore(cls, stored: Stored) -> Record:
        """Build it again from a description that may say anything."""
        name, takes, digest, licence = (stored.entry(key, str) for key in ("name", "takes", "digest", "licence"))
        expect(takes in TAKES, "a representation of something else than texts and pictures")
        expect(name.isprintable() and len(name) <= LONGEST, "a representation without a usable name")
        return cls(name, takes, stored.get_int("width", WIDEST, low=1), digest, licence)


@dataclass(frozen=True)
class Representation:
    """A network that embeds, opened.

    Args:
        record: What it is.
        compute: From some items, texts or paths of pictures, to embeddings (n, width) float32.
        cache: The folder of embeddings; None for that in the cache's folder.
        typed: The folder or file that it was opened from, as a person typed it; "" for another one.
        join: Of a joint network of pictures and texts, from texts to embeddings (n, width) beside those of pictures;
            None for another network.
        kept: Whether the cache keeps embeddings: not of what others send.
        reads: From texts to which of them (n,) bool hold something that the network knows; None if that is unknown.
    """

    record: Record
    compute: Callable[[Sequence[Any]], np.ndarray]
    cache: Path | None = None
    typed: str = ""
    join: Callable[[Sequence[str]], np.ndarray] | None = None
    kept: bool = True
    reads: Callable[[Sequence[str]], np.ndarray] | None = None

    def find_read(self, texts: Sequence[str]) -> np.ndarray:
        """Return which texts (n,) bool hold something that the network knows."""
        if self.reads is None or not texts:
            return np.array([bool(text.strip()) for text in texts], bool)
        return self.reads([text.encode(errors="replace").decode() for text in texts])

    def embed(self, items: Sequence[Any], *, shown: bool = False) -> np.ndarray:
        """Return the embeddings (n, width) float32 of texts, or of paths of pictures.

        Equal ones are computed once, and those that the cache has are read. Progress is shown after a second.

        Raises:
            InputError: A picture cannot be read, or an embedding is not finite.
        """
        texts = self.record.takes == "text"
        if texts:  # half of a pair of code units is no character
            items = [each.encode(errors="replace").decode() for each in items]
        digests = [hash_text(each) if texts else hash_file(each) for each in items]
        folder = (self.cache or embeddings_folder()) if self.kept else None
        with open_store(folder, self.record.digest[:16]) as store:
            found = store.read(digests, self.record.width)
            first = dict(zip(reversed(digests), reversed(items), strict=True))
            missing = [digest for digest in dict.fromkeys(digests) if digest not in found]
            if texts:  # those of one length at a time: none waits for a longer one
                missing.sort(key=lambda digest: len(first[digest]))
            with show_items(len(missing), self.record.takes, shown=shown) as bar:
                for part in _split(missing, [len(first[digest]) for digest in missing] if texts else None):
                    computed = self._check([first[digest] for digest in part])
                    found |= dict(zip(part, computed, strict=True))
                    store.write(part, computed)
                    bar.update(len(part))
        rows = [found[digest] for digest in digests]
        return np.stack(rows) if rows else np.empty((0, self.record.width), np.float32)

    def _check(self, items: Sequence[Any]) -> np.ndarray:
        """Return the embeddings of some items, which must be finite."""
        rows = np.asarray(self.compute(items), np.float32)
        if not np.isfinite(rows).all():
            at = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
            raise_input_error(
                "representation", "give finite numbers", f"others for {str(items[at])[:80]}", "Pass another one."
            )
        return rows


def _split(digests: Sequence[str], letters: Sequence[int] | None) -> Iterator[list[str]]:
    """Yield parts that take some seconds each: of so many texts of so many letters, or of so many pictures."""
    part: list[str] = []
    total = 0
    for number, digest in enumerate(digests):
        own = 0 if letters is None else letters[number]
        full = len(part) >= (min(AT_ONCE, PICTURES) if letters is None else AT_ONCE)
        if part and (full or total + own > LETTERS):
            yield part
            part, total = [], 0
        part.append(digest)
        total += own
    if part:
        yield part


def hash_text(text: str) -> str:
    """Return the SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal.

    Raises:
        InputError: It cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        refuse_picture(path, error)


def hash_files(paths: Sequence[Path], *more: str) -> str:
    """Return the SHA-256, hexadecimal, of files' contents in their order, and of more that decides an embedding."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while part := file.read(1 << 22):
                digest.update(part)
        digest.update(b"\0")
    digest.update("\0".join(more).encode())
    return digest.hexdigest()
