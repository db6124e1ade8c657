"""Arrays kept on disk: written whole or not at all, made again when a file is not what it should be."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from protonet._writing import write_whole

Arrays = dict[str, np.ndarray]


def cache_folder() -> Path:
    """Return ``$PROTONET_CACHE``, or else ``protonet`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("PROTONET_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "protonet")


def cached_arrays(name: str, version: int, key: Any, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of an earlier call with the same key, or make and keep them.

    A file that is truncated, foreign or from another version is made again, with one line on stderr; so is
    one that cannot be written, which is no error.

    Args:
        name: What is kept; it opens the file's name.
        version: Raised whenever ``make`` gives other arrays for the same key.
        key: What the arrays depend on: anything that JSON can write.
        make: Makes the arrays; none may be called "version".
    """
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = cache_folder() / f"{name}-{digest[:16]}.npz"
    stamp = f"{name} {version} {digest}"
    if path.exists():
        try:
            return _read(path, stamp)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f"protonet: {path} is made again: {reason}", file=sys.stderr)
    arrays = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: np.savez_compressed(file, stamp=np.array(stamp), **arrays))  # type: ignore[arg-type]
    except OSError as error:
        print(f"protonet: {path} is not kept: {error.strerror}", file=sys.stderr)
    return arrays


def _read(path: Path, stamp: str) -> Arrays:
    """Return the arrays of a file with this stamp; raise a ValueError or what numpy and zipfile raise if not."""
    with path.open("rb") as opened:
        file = np.load(opened, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile) or "stamp" not in file.files:
            raise ValueError("not a file of this library")
        if str(file["stamp"]) != stamp:
            raise ValueError("it is from another version")
        return {name: file[name] for name in file.files if name != "stamp"}
