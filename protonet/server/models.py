"""The models of the server: files are read again when they are replaced, and concurrent requests share batches."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from protonet.commands.predict import predict_classes
from protonet.errors import UserError, raise_input_error, rename_argument
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.server.parsing import Rows

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
        except (UserError, OSError) as error:
            self.failures += 1
            message = " ".join(str(error).split())
            print(f"protonet serve: {message} The previous model stays in use.", file=sys.stderr)


def open_models(paths: Sequence[Path], representation: Sequence[str] | None) -> dict[str, HotModel]:
    """Read models, by the names of their files without the suffix."""
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


#: Rows of a batch: more are no faster, and delay others.
MAX_BATCH_ROWS = 1024
#: Seconds that a batch may take on the event loop; a longer one runs in a thread, which costs more.
MAX_SECONDS = 0.02

#: The class and the probability of each row, "" for an unknown one, and the logits (n, num_classes).
Classified = tuple[list[tuple[str, str]], Tensor]


class Pending(NamedTuple):
    """The rows of one request."""

    model: TablePipeline
    rows: Rows
    threshold: float | None  #: The score up to which a row is unknown.
    result: asyncio.Future[Classified]
    key: tuple[object, ...]  #: Requests of one key may share a batch.


@dataclass
class Batcher:
    """Classifies one batch at a time."""

    batches: int = 0  #: How many there were.
    _queue: deque[Pending] = field(default_factory=deque)
    _seconds: WeakKeyDictionary[PrototypeNetwork, float] = field(default_factory=WeakKeyDictionary)
    """Per row, of the last batch."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _task: asyncio.Task[None] | None = None

    async def classify(self, model: TablePipeline, rows: Rows, threshold: float | None) -> Classified:
        """Classify the rows of a request."""
        result: asyncio.Future[Classified] = asyncio.get_running_loop().create_future()
        self._queue.append(Pending(model, rows, threshold, result, (id(model), rows.x.dtype, threshold)))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await result

    async def _run(self) -> None:
        """Classify until nothing is pending."""
        loop, queue = asyncio.get_running_loop(), self._queue
        while queue:
            pending = 0
            while pending < len(queue) < MAX_BATCH_ROWS:  # as long as more arrives: one batch costs less than two
                pending = len(queue)
                for _ in range(2):  # a request is read, and then put into the queue
                    await asyncio.sleep(0)
            batch = [queue.popleft()]
            rows = len(batch[0].rows.x)
            while queue and batch[0].key == queue[0].key and rows + len(queue[0].rows.x) <= MAX_BATCH_ROWS:
                batch.append(queue.popleft())
                rows += len(batch[-1].rows.x)
            batch = [item for item in batch if not item.result.done()]  # some may have timed out
            if not batch:
                continue
            started, network = time.perf_counter(), batch[0].model.network
            if rows * self._seconds.get(network, 1.0) < MAX_SECONDS:
                results = classify_batch(batch)
            else:
                results = await loop.run_in_executor(self._thread, classify_batch, batch)
            self._seconds[network] = (time.perf_counter() - started) / rows
            self.batches += 1
            for item, result in zip(batch, results, strict=True):
                if item.result.done():
                    continue
                if isinstance(result, Exception):
                    item.result.set_exception(result)
                else:
                    item.result.set_result(result)
        self._task = None


def classify_batch(batch: list[Pending]) -> list[Classified | Exception]:
    """Classify the rows of each request; return an error only for the requests that cause it."""
    model, sizes = batch[0].model, [len(item.rows.x) for item in batch]
    try:
        x = np.concatenate([item.rows.x for item in batch])
        logits = model.predict_logits(x, np.concatenate([item.rows.uninformative for item in batch]))
        named = predict_classes(list(map(str, model.classes)), logits, batch[0].threshold)
    except UserError as error:
        if len(batch) > 1:
            return [classify_batch([item])[0] for item in batch]
        return [rename_argument(error, "body")]
    except Exception as error:  # answered as a bug
        return [error for _ in batch]
    parts = zip(np.cumsum(sizes).tolist(), sizes, logits.split(sizes), strict=True)
    return [(named[end - size : end], part) for end, size, part in parts]
