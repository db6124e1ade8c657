"""The one way to write a file: whole or not at all."""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

if sys.platform != "win32":
    import fcntl


def cache_folder() -> Path:
    """Return ``$PROTONET_CACHE``; without it, ``protonet`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("PROTONET_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "protonet")


def write_whole(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name in its folder first, then rename it: a crash leaves the old one.

    Args:
        path: Of the file, in a folder that exists. Through a link, what it points to is written. What is no plain
            file (a pipe, a device) is written to as it is.
        write: Writes the content to the file that it is given. What it raises leaves the old file, and no other.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            write(file)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with _enter_folder(path):
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text as UTF-8, as `write_whole` does."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write a value as JSON, as `write_whole` does. A list of whole numbers is one line.

    Raises:
        OSError: The file cannot be written.
        ValueError: A number is not finite.
    """
    text = json.dumps(value, indent=1, allow_nan=False)
    write_text(path, re.sub(r"\[\n[\d\s,]+\]", lambda found: "".join(found[0].split()), text) + "\n")


def clear_folder(folder: Path) -> None:
    """Remove what killed writers left in a folder and those in it, but for folders where somebody is writing."""
    for temporary in folder.rglob(f".*.{'[0-9a-f]' * 8}.tmp"):
        with _enter_folder(temporary.with_name(temporary.name[1:-13])):
            pass


@contextmanager
def _enter_folder(path: Path) -> Iterator[None]:
    """Remove what killed writers of the file left, be one of its living writers, and settle its name on the disk.

    Writers share a lock on the folder. Who can have it alone knows that nobody is writing: what is there is left over.
    """
    if sys.platform == "win32":  # an open file cannot be removed there, so what can be is left over
        _remove_leftovers(path)
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # somebody is writing, or the file system knows no locks
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_leftovers(path)
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        yield
        with suppress(OSError):  # not every file system can
            os.fsync(folder)
    finally:
        os.close(folder)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of a file, those that can be."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError):
            temporary.unlink()
