"""The models of ``serve``: a replaced file is loaded again, and rows of concurrent requests are classified together."""

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

from protonet.commands.predict import format_predicted_classes
from protonet.errors import UserError, raise_input_error, rename_argument
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.server.parsing import ParsedRows

#: Number of seconds between two checks whether model files were replaced.
RELOAD_CHECK_INTERVAL = 0.25


@dataclass
class HotModel:
    """A model that is loaded again when its file is replaced (hot reload)."""

    path: Path  #: The file of the model.
    representation: Sequence[str] | None  #: Names of the encoders of texts and pictures, as typed by the user.
    n_reloads: int = 0  #: How often the file was loaded again.
    n_failed_reloads: int = 0  #: How often the file was replaced by one that is not a model.
    model: TablePipeline = field(init=False)  #: The model that was loaded last.

    def __post_init__(self) -> None:
        self._stamp = self._read_stamp()
        self.model = self._load()

    def _read_stamp(self) -> tuple[int, ...]:
        """Return inode, modification time and size of the file, to detect its replacement; () if there is no file."""
        try:
            stat = self.path.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _load(self) -> TablePipeline:
        """Load the model; its encoders do not cache the texts and pictures of requests."""
        return TablePipeline.load(self.path, argument="model").attach_encoders(
            self.representation, show_progress=False, use_cache=False
        )

    def reload_if_replaced(self) -> None:
        """Load the file again if it was replaced; if that fails, keep the previous model and print a line on stderr."""
        stamp = self._read_stamp()
        if not stamp or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.model = self._load()
            self.n_reloads += 1
        except (UserError, OSError) as error:
            self.n_failed_reloads += 1
            message = " ".join(str(error).split())
            print(f"protonet serve: {message} The previous model stays in use.", file=sys.stderr)


def open_models(paths: Sequence[Path], representation: Sequence[str] | None) -> dict[str, HotModel]:
    """Load models, and return them by name: the name of the file without its suffix."""
    models: dict[str, HotModel] = {}
    for path in paths:
        if path.stem in models:
            raise_input_error("model", "have a name of its own", f"{path.name} twice", "Rename a file.")
        models[path.stem] = HotModel(path, representation)
    return models


@contextmanager
def reload_in_background(models: Sequence[HotModel]) -> Iterator[None]:
    """Check in a thread whether model files were replaced, and reload them, until the context is left."""
    stopped = Event()

    def check_files() -> None:
        while not stopped.wait(RELOAD_CHECK_INTERVAL):
            for model in models:
                model.reload_if_replaced()

    thread = Thread(target=check_files, daemon=True, name="reload")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


#: Maximal rows of a batch; larger batches are no faster, and delay other requests.
MAX_BATCH_ROWS = 1024
#: Maximal expected seconds of a batch that is classified on the event loop. Slower batches run in a thread, which has
#: a higher overhead.
MAX_EVENT_LOOP_SECONDS = 0.02

#: The result of n rows: a pair (class, probability as text) for each row, and logits (n, num_classes). A row that is
#: rejected as unknown has the class "unknown" and the probability "".
Classification = tuple[list[tuple[str, str]], Tensor]


class PendingRequest(NamedTuple):
    """The rows of a request that waits for its classification."""

    model: TablePipeline  #: The model that classifies the rows.
    rows: ParsedRows  #: The encoded rows.
    threshold: float | None  #: Rows with a score up to this value are rejected as unknown; None to reject no row.
    result: asyncio.Future[Classification]  #: Receives the result, or an exception.
    batch_key: tuple[object, ...]  #: Requests with equal keys may share a batch.


@dataclass
class RequestBatcher:
    """Classifies the rows of concurrent requests, one batch at a time."""

    n_batches: int = 0  #: Number of batches so far.
    _queue: deque[PendingRequest] = field(default_factory=deque)
    #: Seconds per row in the last batch of each network.
    _seconds_per_row: WeakKeyDictionary[PrototypeNetwork, float] = field(default_factory=WeakKeyDictionary)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _task: asyncio.Task[None] | None = None

    async def classify(self, model: TablePipeline, rows: ParsedRows, threshold: float | None) -> Classification:
        """Classify the rows of a request, in one batch with rows of concurrent requests for the model.

        Rows with a score up to ``threshold`` are rejected as unknown; if it is None, no row is rejected.
        """
        result: asyncio.Future[Classification] = asyncio.get_running_loop().create_future()
        self._queue.append(PendingRequest(model, rows, threshold, result, (id(model), rows.x.dtype, threshold)))
        if self._task is None:
            self._task = asyncio.create_task(self._classify_pending())
        return await result

    async def _classify_pending(self) -> None:
        """Classify batches until no request is pending."""
        loop, queue = asyncio.get_running_loop(), self._queue
        while queue:
            pending = 0
            while pending < len(queue) < MAX_BATCH_ROWS:  # while requests arrive: one batch is faster than two
                pending = len(queue)
                for _ in range(2):  # in one turn of the loop a request is read, in the next it is queued
                    await asyncio.sleep(0)
            batch = [queue.popleft()]
            rows = len(batch[0].rows.x)
            while queue and batch[0].batch_key == queue[0].batch_key and rows + len(queue[0].rows.x) <= MAX_BATCH_ROWS:
                batch.append(queue.popleft())
                rows += len(batch[-1].rows.x)
            batch = [item for item in batch if not item.result.done()]  # some may have timed out
            if not batch:
                continue
            started, network = time.perf_counter(), batch[0].model.network
            if rows * self._seconds_per_row.get(network, 1.0) < MAX_EVENT_LOOP_SECONDS:
                results = classify_batch(batch)
            else:
                results = await loop.run_in_executor(self._thread, classify_batch, batch)
            self._seconds_per_row[network] = (time.perf_counter() - started) / rows
            self.n_batches += 1
            for item, result in zip(batch, results, strict=True):
                if item.result.done():
                    continue
                if isinstance(result, Exception):
                    item.result.set_exception(result)
                else:
                    item.result.set_result(result)
        self._task = None


def classify_batch(batch: list[PendingRequest]) -> list[Classification | Exception]:
    """Classify the rows of requests in one batch; return, for each request, its result or the exception it causes."""
    model, sizes = batch[0].model, [len(item.rows.x) for item in batch]
    try:
        x = np.concatenate([item.rows.x for item in batch])
        logits = model.predict_logits(x, np.concatenate([item.rows.uninformative for item in batch]))
        named = format_predicted_classes(list(map(str, model.classes)), logits, batch[0].threshold)
    except UserError as error:
        if len(batch) > 1:
            return [classify_batch([item])[0] for item in batch]
        return [rename_argument(error, "body")]
    except Exception as error:  # answered as a bug
        return [error for _ in batch]
    parts = zip(np.cumsum(sizes).tolist(), sizes, logits.split(sizes), strict=True)
    return [(named[end - size : end], part) for end, size, part in parts]
