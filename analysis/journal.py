"""A journal of finished results: one JSON line each, written at once, so that an interrupted study continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_journal(path: Path) -> Iterator[Any]:
    """Yield the entries of a journal, in order, without lines that were cut off; none if there is no file."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def append_journal(path: Path, entry: Any) -> None:
    """Append an entry on a line of its own, even if the last one was cut off."""
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(entry).encode() + b"\n")
