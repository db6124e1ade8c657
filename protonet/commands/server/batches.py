"""Rows of several requests are classified together: what waits as a batch ends is the next one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from protonet.commands.models import classify
from protonet.commands.predict import name_classes
from protonet.errors import USER_ERRORS, rename_argument
from protonet.files import Model
from protonet.network import PrototypeNetwork

#: Rows of a batch: more are no faster, and keep others waiting.
MOST_ROWS = 1024
#: Seconds that a batch may take where requests are read; one that takes longer has a thread, which costs more.
SHORT = 0.02

#: What rows are: the class and the probability of each, "" for an unknown one, and their logits (n, num_classes).
Judged = tuple[list[tuple[str, str]], Tensor]


class Waiting(NamedTuple):
    """The rows of one request."""

    model: Model
    x: np.ndarray  #: (n, dim).
    threshold: float | None  #: The score up to which a row is unknown.
    answer: asyncio.Future[Judged]
    kind: tuple[object, ...]  #: Those of one kind may be in a batch.
    uninformative: np.ndarray  #: (n,) bool: rows in which no cell says anything.


@dataclass
class Batches:
    """What classifies, one batch at a time."""

    queue: deque[Waiting] = field(default_factory=deque)
    done: int = 0  #: How many batches there were.
    _pace: WeakKeyDictionary[PrototypeNetwork, float] = field(default_factory=WeakKeyDictionary)
    """Seconds of a row of the last batch."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _task: asyncio.Task[None] | None = None

    async def classify(
        self, model: Model, x: np.ndarray, threshold: float | None, uninformative: np.ndarray | None = None
    ) -> Judged:
        """Return what rows (n, dim) are, of which some may be without information.

        Raises:
            InputError: As `protonet.commands.models.classify`.
        """
        answer: asyncio.Future[Judged] = asyncio.get_running_loop().create_future()
        kind = (id(model), x.dtype, threshold)
        uninformative = np.zeros(len(x), bool) if uninformative is None else uninformative
        self.queue.append(Waiting(model, x, threshold, answer, kind, uninformative))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Classify until nothing waits."""
        loop = asyncio.get_running_loop()
        while self.queue:
            waiting = 0
            while waiting < len(self.queue) < MOST_ROWS:  # as long as more comes, which costs less in one batch
                waiting = len(self.queue)
                for _ in range(2):  # what has come is read, and then put into the queue
                    await asyncio.sleep(0)
            batch = [self.queue.popleft()]
            rows = len(batch[0].x)
            while self.queue and batch[0].kind == self.queue[0].kind and rows + len(self.queue[0].x) <= MOST_ROWS:
                batch.append(self.queue.popleft())
                rows += len(batch[-1].x)
            batch = [each for each in batch if not each.answer.done()]  # of some the time was over
            if not batch:
                continue
            started, network = time.perf_counter(), batch[0].model.network
            if rows * self._pace.get(network, 1.0) < SHORT:
                found = classify_batch(batch)
            else:
                found = await loop.run_in_executor(self._thread, classify_batch, batch)
            self._pace[network] = (time.perf_counter() - started) / rows
            self.done += 1
            for each, judged in zip(batch, found, strict=True):
                if each.answer.done():
                    continue
                if isinstance(judged, Exception):
                    each.answer.set_exception(judged)
                else:
                    each.answer.set_result(judged)
        self._task = None


def classify_batch(batch: list[Waiting]) -> list[Judged | Exception]:
    """Return what each request's rows are, or what is wrong with it: one does not spoil the others' answers."""
    model, sizes = batch[0].model, [len(each.x) for each in batch]
    try:
        uninformative = np.concatenate([each.uninformative for each in batch])
        logits = classify(model, np.concatenate([each.x for each in batch]), uninformative)
        named = name_classes(list(map(str, model.classes)), logits, batch[0].threshold)
    except USER_ERRORS as error:
        if len(batch) > 1:
            return [classify_batch([each])[0] for each in batch]
        return [rename_argument(error, "body")]
    except Exception as error:  # told by whoever asked, as a bug
        return [error for _ in batch]
    parts = zip(np.cumsum(sizes).tolist(), sizes, logits.split(sizes), strict=True)
    return [(named[end - size : end], part) for end, size, part in parts]
