"""Read and write model files without torch.

A model file is a ZIP archive of ``config.json`` and ``model.safetensors``, which is small. Or it is a file of
safetensors with the config in its metadata, which other programs can read.
"""

from __future__ import annotations

import io
import json
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from protonet._io import JsonDict
from protonet.files.metadata import TrainingMetadata

CONFIG_ENTRY, TENSORS_ENTRY = "config.json", "model.safetensors"
#: Version of the file format. It is incremented by each change that an older protonet could not read.
FORMAT_VERSION = 16
#: Maximum decompressed size of each entry in bytes, and maximum compression ratio.
MAX_ENTRY_SIZES, MAX_COMPRESSION_RATIO = {CONFIG_ENTRY: 2**28, TENSORS_ENTRY: 2**32}, 2000
#: The time stamp of entries, which is constant so that files of equal models are equal.
ENTRY_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
#: The entry of the metadata of a file of safetensors that holds the config.
METADATA_ENTRY = "protonet"
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


class FormatVersionError(ValueError):
    """The format version of a model file is not `FORMAT_VERSION`, so that the file cannot be read."""


def encode_config(config: JsonDict) -> str:
    """Encode the config of a model file as JSON."""
    return json.dumps({"version": FORMAT_VERSION, **config}, allow_nan=False)


def write_archive(config: JsonDict, tensors: bytes) -> bytes:
    """Serialize a model archive of a config and of tensors, serialized by safetensors, and return its bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in ((CONFIG_ENTRY, encode_config(config).encode()), (TENSORS_ENTRY, tensors)):
            entry = zipfile.ZipInfo(name, ENTRY_TIMESTAMP)
            entry.create_system = 3  # on every platform
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_LZMA)
    return buffer.getvalue()


def read_config(path: Path) -> JsonDict:
    """Read the config of a model file without its tensors.

    Raises:
        FormatVersionError: The file has another format version.
        ValueError: The file is not a model file, or is damaged.
    """
    with _open_model_file(path) as (config, _):
        return config


def read_model_file(source: Path | bytes) -> tuple[JsonDict, bytes]:
    """Read a model file, or its content: its config and, serialized by safetensors, its tensors.

    Errors are those of `read_config`.
    """
    with _open_model_file(source) as (config, read_tensors):
        return config, read_tensors()


@contextmanager
def _open_model_file(source: Path | bytes) -> Iterator[tuple[JsonDict, Callable[[], bytes]]]:
    """Read the config of a model file, or of its content, within a context; also return a function for the tensors."""
    if isinstance(source, Path) and not source.resolve(strict=True).is_file():  # opening a pipe would block
        raise ValueError("not a file")
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        start, stored = file.read(9), file.seek(0, io.SEEK_END)
        if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < stored:
            if stored > MAX_ENTRY_SIZES[TENSORS_ENTRY]:
                raise ValueError(f"a file of {stored} bytes, too many to read")
            file.seek(8)
            config = _parse_metadata(file.read(int.from_bytes(start[:8], "little")))
            file.seek(0)
            yield config, file.read
        elif start.startswith(b"PK\3\4"):
            with _open_archive(file, stored) as archive:
                yield _parse_config(archive.read(CONFIG_ENTRY)), partial(archive.read, TENSORS_ENTRY)
        else:
            raise ValueError("not a ZIP archive, or a truncated one")


@contextmanager
def _open_archive(file: BinaryIO, stored: int) -> Iterator[zipfile.ZipFile]:
    """Open a model archive of ``stored`` bytes within a context.

    Raises:
        ValueError: An entry is missing or unknown, or is so large that it cannot be read safely.
    """
    file.seek(max(0, stored - _END_OF_DIRECTORY.size))
    end = file.read()
    if len(end) < _END_OF_DIRECTORY.size or not end.startswith(b"PK\5\6"):
        raise ValueError("not a ZIP archive, or a truncated one")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if names != [CONFIG_ENTRY, TENSORS_ENTRY] or entries[0].header_offset != 0:
                raise ValueError(f"an archive of other entries than {CONFIG_ENTRY} and {TENSORS_ENTRY}")
            for entry in entries:
                credible = MAX_COMPRESSION_RATIO * min(entry.compress_size, stored)
                if entry.file_size > min(MAX_ENTRY_SIZES[entry.filename], credible):
                    raise ValueError(f"an entry {entry.filename} of {entry.file_size} bytes, too many to read")
            yield archive
    except _DECOMPRESSION_ERRORS as error:
        raise ValueError(f"damaged: {error}") from error


def _parse_metadata(header: bytes) -> JsonDict:
    """Parse the config in the header of a file of safetensors; errors as in `read_config`."""
    if len(header) > MAX_ENTRY_SIZES[CONFIG_ENTRY]:
        raise ValueError(f"a header of {len(header)} bytes, too many to read")
    entries = json.loads(header)
    metadata = entries.get("__metadata__") if isinstance(entries, dict) else None
    config = metadata.get(METADATA_ENTRY) if isinstance(metadata, dict) else None
    if not isinstance(config, str):
        raise ValueError("a file of safetensors without a model")
    return _parse_config(config.encode())


def _parse_config(content: bytes) -> JsonDict:
    """Parse the config of a model file; errors as in `read_config`."""
    config = json.loads(content)
    json.dumps(config, ensure_ascii=False, allow_nan=False).encode()  # raises for NaN and for invalid Unicode
    version = config.get("version") if isinstance(config, dict) else None
    if type(version) is not int:
        raise ValueError("a config without a version")
    if version != FORMAT_VERSION:
        raise FormatVersionError(f"of version {version}, by protonet {config.get('library')!r:.20}")
    return dict(config)


def check_entry_types(config: JsonDict) -> None:
    """Raise a ValueError if a config entry that ``protonet info`` shows is missing or has an unexpected type."""

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
    valid = valid and isinstance(config.get("folds"), list)
    valid = valid and {"columns", "column_summaries", "library"} <= config.keys()
    if not (valid and type(library) in {str, type(None)}):
        raise ValueError("a config with entries of other types")
    TrainingMetadata.from_json(config.get("metadata"))
