"""The header of a model file: what the file is, as JSON. Nothing here imports torch, so that `info` answers at once."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: The name of the entry, in the file's metadata, that says as JSON what the file is.
FORMAT = "protonet.model"
#: Raised whenever what is written changes; those from OLDEST on are read.
VERSION, OLDEST = 8, 4
#: What the names of tensors begin with that are held for later, and are no part of the network.
HELD = "held."
#: A header of more characters is compressed, behind this mark; and as many bytes it may be at the most.
LONG, DEFLATED, MOST = 4096, "deflated ", 2**28
#: What torch calls the types of tensors that a model has, by what safetensors does.
TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "U8": "uint8",
    "BOOL": "bool",
}


class DamagedError(ValueError):
    """A model file whose bytes are not those that were written."""


def write_header(header: Mapping[str, Any]) -> str:
    """Return a header and its checksum as text, compressed where it is long."""
    text = json.dumps({**header, "checksum": sum_header(header)})
    return text if len(text) <= LONG else DEFLATED + base64.b64encode(zlib.compress(text.encode())).decode()


def parse_header(text: str | None) -> dict[str, Any]:
    """Return a header with a version; raise a ValueError if it is none."""
    if text is None:
        raise ValueError("of something else")
    text = str(text)
    if text.startswith(DEFLATED):
        try:
            content = base64.b64decode(text.removeprefix(DEFLATED), validate=True)
            text = zlib.decompressobj().decompress(content, MOST).decode()
        except zlib.error as error:
            raise ValueError("a header that is not compressed") from error
    header = json.loads(text)
    json.dumps(header, ensure_ascii=False, allow_nan=False).encode()  # no NaN, and no text that could not be printed
    if not isinstance(header, dict) or type(header.get("version")) is not int:
        raise ValueError("a header without a version")
    return header


def take_checksum(header: dict[str, Any]) -> None:
    """Take the checksum out of a header; raise a ValueError if it is a wrong one."""
    if header.pop("checksum", None) != sum_header(header):
        raise ValueError("damaged: a wrong checksum")


def sum_header(header: Mapping[str, Any]) -> str:
    """Return a checksum of a header without its own."""
    return hashlib.sha256(json.dumps(header).encode()).hexdigest()


def sum_part(tensors: Mapping[str, tuple[str, Sequence[int], bytes | memoryview]], part: str) -> str:
    """Return a checksum of the tensors of one part, `HELD` or "" for the network.

    Args:
        tensors: By name: type as torch calls it, shape, bytes.
        part: What the names of its tensors begin with.
    """
    digest = hashlib.sha256()
    for name, (dtype, shape, content) in sorted(tensors.items()):
        if name.startswith(HELD) == bool(part):
            digest.update(f"{name} torch.{dtype} {tuple(shape)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def read_whole(path: Path) -> dict[str, Any]:
    """Return the header of a whole model file of this version, checksums of all bytes looked at.

    It says what whoever wrote the file says: whether the tensors make that network, only `load_model` looks.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such file, or one whose header says something odd.
        DamagedError: It is one, and damaged.
    """
    if not path.is_file():  # to open a pipe would be to wait
        raise ValueError("no file")
    content = memoryview(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(bytes(content[8:start]))
    if not isinstance(entries, dict) or not isinstance(about := entries.pop("__metadata__", None), dict):
        raise ValueError("of something else")
    header = parse_header(about.get(FORMAT))
    take_checksum(header)
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']}")
    tensors = {}
    for name, entry in entries.items():
        first, stop = (start + offset for offset in entry["data_offsets"])
        tensors[name] = TYPES[entry["dtype"]], entry["shape"], content[first:stop]
    if any(sum_part(tensors, part) != expected for part, expected in header["checksums"].items()):
        raise DamagedError("damaged: a wrong checksum")
    return header


def is_sound(header: Mapping[str, Any]) -> bool:
    """Return whether what a header says for whoever reads it alone is of its kind."""

    def are(values: Any, *kinds: type) -> bool:
        return isinstance(values, list) and all(type(each) in kinds for each in values)

    classes, columns, told, counts = (header.get(name) for name in ("classes", "columns", "told", "counts"))
    structure, library = header.get("structure"), header.get("library")
    numbers = [header.get("parameters"), header.get("buffer_elements")]
    numbers += [structure.get("input_dim")] if isinstance(structure, dict) else [None]
    named = are(classes, int, str) and are(counts, int) and len(classes) == len(counts) > 0  # type: ignore[arg-type]
    kinds = columns is None or (are(columns, str) and (told is None or (are(told, str) and len(told) == len(columns))))
    whole = named and are(numbers, int) and min(*numbers, *counts) >= 0  # type: ignore[misc]
    there = {"columns", "told", "library"} <= header.keys()
    return there and kinds and whole and isinstance(header.get("metadata"), dict) and type(library) in {str, type(None)}
