"""Model archives: a ZIP of ``config.json`` and ``model.safetensors``. Nothing here imports torch."""

from __future__ import annotations

import io
import json
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG, TENSORS = "config.json", "model.safetensors"
#: Raised whenever the content changes in a way that earlier readers do not understand.
VERSION = 9
#: The largest sizes that are decompressed, in bytes: of each entry, and per byte that is stored.
MAX_SIZES, MAX_RATIO = {CONFIG: 2**28, TENSORS: 2**32}, 2000
#: No clock is read: the same model gives the same bytes.
TIMESTAMP = (1980, 1, 1, 0, 0, 0)
_END = struct.Struct("<4s18s")  # of an archive without a comment
_DAMAGES = (zipfile.BadZipFile, RuntimeError, EOFError, OverflowError, lzma.LZMAError, zlib.error, struct.error)


class VersionError(ValueError):
    """A model file of another version than `VERSION`."""


def write_archive(config: Mapping[str, Any], tensors: bytes) -> bytes:
    """Return the archive of a config and of tensors that safetensors has serialized."""
    buffer = io.BytesIO()
    text = json.dumps({"version": VERSION, **config}, allow_nan=False)
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in ((CONFIG, text.encode()), (TENSORS, tensors)):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.create_system = 3  # on every platform
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_LZMA)
    return buffer.getvalue()


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a model archive; the tensors are not read.

    Raises:
        OSError: The file cannot be read.
        VersionError: A model file of another version.
        ValueError: Not a model file; the reason in a few words.
    """
    with _open(path) as archive:
        return _parse_config(archive)


def read_archive(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the config and the serialized tensors of a model archive; raise as `read_config`."""
    with _open(path) as archive:
        return _parse_config(archive), archive.read(TENSORS)


@contextmanager
def _open(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive whose entries have the expected names and sizes that may be decompressed."""
    if not path.resolve(strict=True).is_file():  # to open a pipe would be to wait
        raise ValueError("not a file")
    with path.open("rb") as file:
        start, stored = file.read(9), path.stat().st_size
        if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < stored:
            raise VersionError("of an unreleased version")
        file.seek(max(0, stored - _END.size))
        end = file.read()
        if not start.startswith(b"PK\3\4") or len(end) < _END.size or not end.startswith(b"PK\5\6"):
            raise ValueError("not a ZIP archive, or a truncated one")
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                if [entry.filename for entry in entries] != [CONFIG, TENSORS] or entries[0].header_offset != 0:
                    raise ValueError(f"an archive of other entries than {CONFIG} and {TENSORS}")
                for entry in entries:
                    most = min(MAX_SIZES[entry.filename], MAX_RATIO * min(entry.compress_size, stored))
                    if entry.file_size > most:
                        raise ValueError(f"an entry {entry.filename} of {entry.file_size} bytes, too many to read")
                yield archive
        except _DAMAGES as error:
            raise ValueError(f"damaged: {error}") from error


def _parse_config(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the config; raise a ValueError if it is not one of this version."""
    config = json.loads(archive.read(CONFIG))
    json.dumps(config, ensure_ascii=False, allow_nan=False).encode()  # no NaN, and no text that cannot be printed
    version = config.get("version") if isinstance(config, dict) else None
    if type(version) is not int:
        raise ValueError("a config without a version")
    if version != VERSION:
        raise VersionError(f"of version {version}, by protonet {config.get('library')!r:.20}")
    return dict(config)


def check_facts(config: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the entries that `info` shows have their types."""

    def are(values: Any, *kinds: type) -> bool:
        return isinstance(values, list) and all(type(each) in kinds for each in values)

    classes, columns, told, counts = (config.get(name) for name in ("classes", "columns", "told", "counts"))
    network, library = config.get("network"), config.get("library")
    numbers = [config.get("parameters"), config.get("buffer_elements")]
    numbers += [network.get("input_dim") if isinstance(network, dict) else None]
    sound = are(classes, int, str) and are(counts, int) and len(classes) == len(counts) > 0  # type: ignore[arg-type]
    sound = sound and (columns is None or are(columns, str))
    named_columns = isinstance(columns, list) and isinstance(told, list) and len(told) == len(columns)
    sound = sound and (told is None or (are(told, str) and (columns is None or named_columns)))
    sound = sound and are(numbers, int) and min(*numbers, *counts) >= 0  # type: ignore[misc]
    sound = sound and isinstance(config.get("metadata"), dict) and isinstance(config.get("folds"), list)
    if not (sound and {"columns", "told", "library"} <= config.keys() and type(library) in {str, type(None)}):
        raise ValueError("a config with entries of other types")
