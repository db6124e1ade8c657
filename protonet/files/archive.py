"""Read and write model archives: ZIP files of ``config.json`` and ``model.safetensors``, without torch."""

from __future__ import annotations

import io
import json
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from protonet._io import JsonDict

CONFIG, TENSORS = "config.json", "model.safetensors"
#: Version of the file format, which is incremented by every change that earlier versions cannot read.
FORMAT_VERSION = 12
#: Maximum decompressed size of each entry in bytes, and maximum compression ratio.
MAX_SIZES, MAX_RATIO = {CONFIG: 2**28, TENSORS: 2**32}, 2000
#: The time stamp of entries, which is constant so that files of equal models are equal.
TIMESTAMP = (1980, 1, 1, 0, 0, 0)
_END_OF_DIRECTORY = struct.Struct("<4s18s")  # of an archive without a comment
_DECOMPRESSION_ERRORS = (
    zipfile.BadZipFile,
    RuntimeError,
    EOFError,
    OverflowError,
    lzma.LZMAError,
    zlib.error,
    struct.error,
)


class VersionError(ValueError):
    """The file has another format version than `FORMAT_VERSION`."""


def write_archive(config: JsonDict, tensors: bytes) -> bytes:
    """Serialize a model archive of a config and of tensors that are serialized by safetensors; return its bytes."""
    buffer = io.BytesIO()
    text = json.dumps({"version": FORMAT_VERSION, **config}, allow_nan=False)
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in ((CONFIG, text.encode()), (TENSORS, tensors)):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.create_system = 3  # on every platform
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_LZMA)
    return buffer.getvalue()


def read_config(path: Path) -> JsonDict:
    """Read the config of a model archive; raise a VersionError for another version, a ValueError for another file."""
    with _open_archive(path) as archive:
        return _parse_config(archive)


def read_archive(path: Path) -> tuple[JsonDict, bytes]:
    """Read the config and the serialized tensors of a model archive; errors as in `read_config`."""
    with _open_archive(path) as archive:
        return _parse_config(archive), archive.read(TENSORS)


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a model archive; raise a ValueError unless it has the two entries, of sizes that can be read safely."""
    if not path.resolve(strict=True).is_file():  # opening a pipe would block
        raise ValueError("not a file")
    with path.open("rb") as file:
        start, stored = file.read(9), path.stat().st_size
        if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < stored:
            raise VersionError("of an unreleased version")
        file.seek(max(0, stored - _END_OF_DIRECTORY.size))
        end = file.read()
        if not start.startswith(b"PK\3\4") or len(end) < _END_OF_DIRECTORY.size or not end.startswith(b"PK\5\6"):
            raise ValueError("not a ZIP archive, or a truncated one")
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                if [entry.filename for entry in entries] != [CONFIG, TENSORS] or entries[0].header_offset != 0:
                    raise ValueError(f"an archive of other entries than {CONFIG} and {TENSORS}")
                for entry in entries:
                    max_size = min(MAX_SIZES[entry.filename], MAX_RATIO * min(entry.compress_size, stored))
                    if entry.file_size > max_size:
                        raise ValueError(f"an entry {entry.filename} of {entry.file_size} bytes, too many to read")
                yield archive
        except _DECOMPRESSION_ERRORS as error:
            raise ValueError(f"damaged: {error}") from error


def _parse_config(archive: zipfile.ZipFile) -> JsonDict:
    """Parse the config of an archive; raise a VersionError for another format version, or a ValueError if invalid."""
    config = json.loads(archive.read(CONFIG))
    json.dumps(config, ensure_ascii=False, allow_nan=False).encode()  # raises for NaN and for invalid Unicode
    version = config.get("version") if isinstance(config, dict) else None
    if type(version) is not int:
        raise ValueError("a config without a version")
    if version != FORMAT_VERSION:
        raise VersionError(f"of version {version}, by protonet {config.get('library')!r:.20}")
    return dict(config)


def check_entry_types(config: JsonDict) -> None:
    """Raise a ValueError unless the config entries that ``protonet info`` shows have the expected types."""

    def is_list(values: object, *types: type) -> bool:
        return isinstance(values, list) and all(type(value) in types for value in values)

    classes, columns, counts = (config.get(name) for name in ("classes", "columns", "counts"))
    summaries, network, library = (config.get(name) for name in ("column_summaries", "network", "library"))
    sizes = [config.get("parameters"), config.get("buffer_elements")]
    sizes += [network.get("input_dim") if isinstance(network, dict) else None]
    valid = is_list(classes, int, str) and is_list(counts, int)
    valid = valid and len(classes) == len(counts) > 0  # type: ignore[arg-type]
    valid = valid and (columns is None or is_list(columns, str))
    if summaries is not None:
        valid = valid and is_list(summaries, str) and (columns is None or len(columns) == len(summaries))
    valid = valid and is_list(sizes, int) and min(*sizes, *counts) >= 0  # type: ignore[misc]
    valid = valid and isinstance(config.get("metadata"), dict) and isinstance(config.get("folds"), list)
    valid = valid and {"columns", "column_summaries", "library"} <= config.keys()
    if not (valid and type(library) in {str, type(None)}):
        raise ValueError("a config with entries of other types")


def subtract_name_samples(counts: Sequence[int], classes: Sequence[str | int], named: object) -> list[int]:
    """Subtract the samples that class names count as from the sample count of each class.

    Args:
        counts: The number of samples of each class.
        classes: The name of each class.
        named: The entry of a model file with the named classes and their weight, which may be missing or invalid.
    """
    if not isinstance(named, dict) or not isinstance(named.get("classes"), list):
        return list(counts)
    weight = named.get("weight")
    less = round(weight) if isinstance(weight, float) and 0 <= weight < 2**31 else 0
    return [max(0, rows - less * (name in named["classes"])) for name, rows in zip(classes, counts, strict=True)]
