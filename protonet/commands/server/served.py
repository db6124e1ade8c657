"""Models that are served: read again when their file is replaced, without a request that waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from protonet.commands.models import attach, read_model
from protonet.errors import USER_ERRORS, raise_input_error
from protonet.files import Model

#: Seconds between looks at the files.
EVERY = 0.25


@dataclass
class Served:
    """A model in a file."""

    path: Path
    representation: Sequence[str] | None  #: What reads its texts and pictures, as a person types it.
    stamp: tuple[int, ...] = ()  #: Of the file that was read last, ...
    reloads: int = 0  #: ... how often that was another one than before, ...
    failures: int = 0  #: ... and how often it was none.
    model: Model = field(init=False)

    def __post_init__(self) -> None:
        self.stamp = self.look()
        self.model = self.read()

    def look(self) -> tuple[int, ...]:
        """Return what changes as the file is replaced; nothing where there is none."""
        try:
            found = self.path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> Model:
        """Read the file; what reads its texts and pictures keeps nothing of what it is asked."""
        return attach(read_model(self.path), self.representation, shown=False, kept=False)

    def refresh(self) -> None:
        """Read the file again if it is another one; where it is no model, the old one stays, with a line on stderr."""
        stamp = self.look()
        if not stamp or stamp == self.stamp:
            return
        self.stamp = stamp
        try:
            self.model = self.read()
            self.reloads += 1
        except (*USER_ERRORS, OSError) as error:
            self.failures += 1
            message = " ".join(str(error).split())
            print(f"protonet serve: {message} The previous model stays in use.", file=sys.stderr)


def open_models(paths: Sequence[str], representation: Sequence[str] | None) -> dict[str, Served]:
    """Return the models by their names, those of their files.

    Raises:
        InputError: A file is no model, or two have one name.
    """
    found: dict[str, Served] = {}
    for path in map(Path, paths):
        if path.stem in found:
            raise_input_error("model", "have a name of its own", f"{path.name} twice", "Rename a file.")
        found[path.stem] = Served(path, representation)
    return found


@contextmanager
def watch_files(models: Sequence[Served]) -> Iterator[None]:
    """Look at the files in a thread, until it is left."""
    ended = Event()

    def look() -> None:
        while not ended.wait(EVERY):
            for served in models:
                served.refresh()

    thread = Thread(target=look, daemon=True, name="watching")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
