"""Classify the rows of concurrent requests in batches, in which large requests take turns with others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
import torch
from starlette.exceptions import HTTPException

from protonet.commands import predict
from protonet.errors import UserError, rename_argument
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.server import parsing
from protonet.tables.table import RowBlock

#: Maximal rows of a batch; larger batches are no faster, and delay other requests.
MAX_BATCH_ROWS = 1024
#: Maximal expected seconds of a batch that is classified on the event loop. Slower batches run in a thread, which has
#: a higher overhead.
MAX_EVENT_LOOP_SECONDS = 0.02

#: Maximal rows of a slice of a request whose texts or pictures are encoded, and of slices that are encoded together. By
#: the default network, a short text alone takes about 30 ms of CPU time, and one of sixteen 11 ms.
ENCODED_SLICE_ROWS, MAX_ENCODED_ROWS = 16, 64

#: The results of `format_predicted_classes` for the rows of a request, and their logits (n, num_classes).
Classification = tuple[list[tuple[str, str]], torch.Tensor]


@dataclass(eq=False)
class PendingRequest:
    """The rows of a request that waits for its classification."""

    model: TablePipeline  #: The model that classifies the rows.
    rows: parsing.ParsedRows  #: The encoded rows.
    threshold: float | None  #: Rows with a score up to this value are rejected as unknown; None to reject no row.
    result: asyncio.Future[Classification]  #: Receives the result, or an exception; done if the client has gone.
    n_taken: int = 0  #: The number of rows that are in batches so far.
    parts: list[Classification] = field(default_factory=list)  #: The results of these rows.

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Requests with equal keys may share a batch."""
        return id(self.model), self.rows.x.dtype, self.threshold

    def take_rows(self, n: int) -> parsing.ParsedRows:
        """Take the next ``n`` rows, or all that are left."""
        rows = slice(self.n_taken, self.n_taken + n)
        self.n_taken = min(rows.stop, len(self.rows.x))
        return parsing.ParsedRows(self.rows.x[rows], [], self.rows.uninformative_mask[rows])

    def add_part(self, part: Classification | Exception) -> None:
        """Add the result of the rows that were taken last; an exception is the result of the request."""
        if self.result.done():
            return
        if isinstance(part, Exception):
            self.result.set_exception(part)
            return
        self.parts.append(part)
        if self.n_taken == len(self.rows.x):
            named, logits = zip(*self.parts, strict=True)
            self.result.set_result((list(chain(*named)), torch.cat(logits)))


@dataclass
class RequestBatcher:
    """Classifies the rows of concurrent requests, one batch at a time.

    New requests share a batch. The rest of a request with more rows takes turns with new requests, and with the rest of
    others, so that no request waits longer than for one batch of each.
    """

    n_batches: int = 0  #: Number of batches so far.
    _new_requests: deque[PendingRequest] = field(default_factory=deque)
    _begun_requests: deque[PendingRequest] = field(default_factory=deque)
    _seconds_per_row: WeakKeyDictionary[PrototypeNetwork, float] = field(default_factory=WeakKeyDictionary)
    """Seconds per row in the last batch of each network."""
    _executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _task: asyncio.Task[None] | None = None

    async def classify(self, model: TablePipeline, rows: parsing.ParsedRows, threshold: float | None) -> Classification:
        """Classify the rows of a request, in batches with rows of concurrent requests for the model.

        Rows with a score up to ``threshold`` are rejected as unknown; if it is None, no row is rejected. If the caller
        is cancelled, further rows are not classified.
        """
        result: asyncio.Future[Classification] = asyncio.get_running_loop().create_future()
        self._new_requests.append(PendingRequest(model, rows, threshold, result))
        if self._task is None:
            self._task = asyncio.create_task(self._classify_pending())
        return await result

    async def _classify_pending(self) -> None:
        """Classify batches until no request is pending."""
        new, begun = self._new_requests, self._begun_requests
        while new or begun:
            pending = 0
            while pending < len(new) < MAX_BATCH_ROWS:  # while requests arrive: one batch is faster than two
                pending = len(new)
                for _ in range(2):  # in one turn of the loop a request is read, in the next it is queued
                    await asyncio.sleep(0)
            for queue in (new, begun):
                await self._classify_batch(queue)
        self._task = None

    async def _classify_batch(self, queue: deque[PendingRequest]) -> None:
        """Classify a batch of rows of the first requests in a queue."""
        batch: list[tuple[PendingRequest, parsing.ParsedRows]] = []
        left = 0
        while queue and not (batch and (left == 0 or queue[0].batch_key != batch[0][0].batch_key)):
            item = queue.popleft()
            if item.result.done():  # the client has gone, the time is over, or an earlier row is wrong
                continue
            if not batch:
                # A tenth of a second at most, by the speed of the last batch, and as many rows as are worth a batch.
                speed = self._seconds_per_row.get(item.model.network, 0.0)
                left = max(MAX_BATCH_ROWS // 8, min(MAX_BATCH_ROWS, int(0.1 / max(speed, 1e-9))))
            rows = item.take_rows(left)
            left -= len(rows.x)
            batch.append((item, rows))
            if item.n_taken < len(item.rows.x):
                self._begun_requests.append(item)
        if not batch:
            return
        n_rows, started, network = sum(len(rows.x) for _, rows in batch), time.perf_counter(), batch[0][0].model.network
        # One batch after the other of a large request would take all time of the event loop.
        is_short = n_rows * self._seconds_per_row.get(network, 1.0) < MAX_EVENT_LOOP_SECONDS
        if is_short and queue is self._new_requests:
            results = classify_batch(batch)
        else:
            results = await asyncio.get_running_loop().run_in_executor(self._executor, classify_batch, batch)
        self._seconds_per_row[network] = (time.perf_counter() - started) / n_rows
        self.n_batches += 1
        for (item, _), result in zip(batch, results, strict=True):
            item.add_part(result)


def classify_batch(batch: list[tuple[PendingRequest, parsing.ParsedRows]]) -> list[Classification | Exception]:
    """Classify rows of requests in one batch; return, for each request, its result or the exception it causes."""
    request, sizes = batch[0][0], [len(rows.x) for _, rows in batch]
    try:
        x = np.concatenate([rows.x for _, rows in batch])
        logits = request.model.predict_logits(x, np.concatenate([rows.uninformative_mask for _, rows in batch]))
        named = predict.format_predicted_classes(list(map(str, request.model.classes)), logits, request.threshold)
    except UserError as error:
        if len(batch) > 1:
            return [classify_batch([item])[0] for item in batch]
        return [rename_argument(error, "body")]
    except Exception as error:  # answered as a bug
        return [error for _ in batch]
    parts = zip(np.cumsum(sizes).tolist(), sizes, logits.split(sizes), strict=True)
    return [(named[end - size : end], part) for end, size, part in parts]


@dataclass(eq=False)
class PendingSlice:
    """Some rows of a request that wait until they are encoded."""

    model: TablePipeline
    block: RowBlock
    argument: str  #: The argument that errors name.
    result: np.ndarray | Exception | None = None  #: The features (b, dim), or an error.

    @property
    def key(self) -> tuple[object, ...]:
        """Slices with equal keys may be encoded together."""
        return id(self.model), *(cells.dtype.kind for cells in self.block.columns)


@dataclass
class SliceEncoder:
    """Encodes texts and pictures of concurrent requests together, in slices in which large requests take turns.

    One thread at a time encodes the slices of all threads; the others wait, and find theirs encoded.
    """

    _pending: deque[PendingSlice] = field(default_factory=deque)
    _turn: Lock = field(default_factory=Lock)

    def encode(self, has_ended: Callable[[], bool], model: TablePipeline, block: RowBlock, argument: str) -> np.ndarray:
        """Encode the rows of a block as features (b, dim), with NaN in new gaps, until ``has_ended`` returns True.

        Raises an HTTPException then, and an InputError as `TablePipeline.encode` does.
        """
        n, is_slow = len(block.positions), any(model.column_modalities)
        step, parts = ENCODED_SLICE_ROWS if is_slow else MAX_BATCH_ROWS, list[np.ndarray]()
        for start in range(0, max(n, 1), step):
            if has_ended():
                raise HTTPException(503, "The request has ended.")
            part = block if n <= step else block.select_rows(np.arange(start, min(start + step, n)))
            item = PendingSlice(model, part, argument)
            parts.append(self._encode_in_turn(item) if is_slow and n else model.encode(part, argument, keep_gaps=True))
        return np.concatenate(parts)

    def _encode_in_turn(self, item: PendingSlice) -> np.ndarray:
        """Encode a slice together with others that wait."""
        self._pending.append(item)
        with self._turn:
            while item.result is None:
                self._encode_next()
        if isinstance(item.result, Exception):
            raise item.result
        return item.result

    def _encode_next(self) -> None:
        """Encode the first pending slices, as many as may be encoded together."""
        batch = [self._pending.popleft()]
        n_rows = len(batch[0].block.positions)
        while self._pending and n_rows < MAX_ENCODED_ROWS and self._pending[0].key == batch[0].key:
            batch.append(self._pending.popleft())
            n_rows += len(batch[-1].block.positions)
        for item, result in zip(batch, encode_slices(batch), strict=True):
            item.result = result


def encode_slices(batch: list[PendingSlice]) -> list[np.ndarray | Exception]:
    """Encode slices with equal keys together; return, for each slice, its features or the exception it causes."""
    first, sizes = batch[0], [len(item.block.positions) for item in batch]
    try:
        block = RowBlock.concatenate([item.block for item in batch])
        x = first.model.encode(block, first.argument, keep_gaps=True)
    except Exception as error:
        return [error] if len(batch) == 1 else [encode_slices([item])[0] for item in batch]
    return list(np.split(x, np.cumsum(sizes)[:-1]))
