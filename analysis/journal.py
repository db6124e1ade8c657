"""A journal of finished results: one JSON line each, written at once, so that an interrupted study continues.

Every line carries a hash of the code that made it, so that results of other versions are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protonet._checks import find_version
from solution.pack import ROOT

#: Packages whose versions decide results.
PACKAGES = ("numpy", "scipy", "scikit-learn", "torch")


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal, in order, without lines that are no entry; none if there is no file."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # it was cut off
            continue
        if isinstance(entry, dict):
            yield entry


def append_journal(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry on a line of its own, even if the last one was cut off."""
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(entry).encode() + b"\n")


def hash_sources(*paths: str) -> str:
    """Return a hash of source files, by their paths below the repository, and of the packages' versions."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    versions = {package: find_version(package) for package in PACKAGES}
    return hashlib.sha256(json.dumps([texts, versions], sort_keys=True).encode()).hexdigest()[:16]
