"""Arrays cached on disk: files are written whole or not at all, and made again where they are damaged or outdated."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from protonet._io import cache_folder, write_atomically

Arrays = dict[str, np.ndarray]


def cached_arrays(name: str, version: int, key: Any, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays by name of an earlier call with the same key, or make and cache them.

    A file that is damaged, of another program or of another version is made again, with one line on stderr. A cache
    that cannot be written is no error either, but one line on stderr. The file's name begins with ``name``, ``key``
    (that JSON can write) is everything that the arrays depend on, and no array may be called "stamp".
    """
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = cache_folder() / f"{name}-{digest[:16]}.npz"
    stamp = f"{name} {version} {digest}"
    if path.exists():
        try:
            stored_stamp, arrays = _read(path)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:  # what numpy and zipfile raise
            reason = " ".join(str(error).split()) or type(error).__name__
        else:
            if stored_stamp == stamp:
                return arrays
            reason = "not a file of this library" if stored_stamp is None else "it is from another version"
        print(f"protonet: {path} is made again: {reason}", file=sys.stderr)
    arrays = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: np.savez_compressed(file, stamp=np.array(stamp), **arrays))  # type: ignore[arg-type]
    except OSError as error:
        print(f"protonet: {path} is not kept: {error.strerror}", file=sys.stderr)
    return arrays


def _read(path: Path) -> tuple[str | None, Arrays]:
    """Return the stamp of a file, None where it has none, and its arrays; raise what numpy and zipfile raise."""
    with path.open("rb") as opened:
        file = np.load(opened, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile) or "stamp" not in file.files:
            return None, {}
        return str(file["stamp"]), {name: file[name] for name in file.files if name != "stamp"}
