"""Models that are read again when their file is replaced, while requests are answered."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from protonet.errors import USER_ERRORS, raise_input_error
from protonet.pipeline import TablePipeline

#: Seconds between checks of the files.
INTERVAL = 0.25


@dataclass
class HotModel:
    """A model and the file that it is read from."""

    path: Path
    representation: Sequence[str] | None  #: What reads its texts and pictures, as a person types it.
    reloads: int = 0
    failures: int = 0  #: Replacements that were not a model.
    model: TablePipeline = field(init=False)

    def __post_init__(self) -> None:
        self._stamp = self._read_stamp()
        self.model = self._load()

    def _read_stamp(self) -> tuple[int, ...]:
        """Read the identity of the file, which changes when it is replaced; empty without a file."""
        try:
            stat = self.path.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _load(self) -> TablePipeline:
        """Read the file; the cache keeps nothing of the requests."""
        return TablePipeline.load(self.path, argument="model").attach_encoders(
            self.representation, shown=False, use_cache=False
        )

    def refresh(self) -> None:
        """Read the file again if it is another one; if it is not a model, keep the old one, with a line on stderr."""
        stamp = self._read_stamp()
        if not stamp or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.model = self._load()
            self.reloads += 1
        except (*USER_ERRORS, OSError) as error:
            self.failures += 1
            message = " ".join(str(error).split())
            print(f"protonet serve: {message} The previous model stays in use.", file=sys.stderr)


def open_models(paths: Sequence[Path], representation: Sequence[str] | None) -> dict[str, HotModel]:
    """Read models, by the names of their files without the suffix.

    Raises:
        InputError: A file is not a model, or two have the same name.
    """
    models: dict[str, HotModel] = {}
    for path in paths:
        if path.stem in models:
            raise_input_error("model", "have a name of its own", f"{path.name} twice", "Rename a file.")
        models[path.stem] = HotModel(path, representation)
    return models


@contextmanager
def reload_loop(models: Sequence[HotModel]) -> Iterator[None]:
    """Check the files in a thread, until the context is left."""
    stopped = Event()

    def run() -> None:
        while not stopped.wait(INTERVAL):
            for model in models:
                model.refresh()

    thread = Thread(target=run, daemon=True, name="reload")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
