"""Rows of several requests are classified together: what waits as a batch ends is the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from protonet._checks import MENDABLE
from protonet.commands.models import classify
from protonet.files import Model

#: Rows of a batch: more are no faster, and keep others waiting.
MOST_ROWS = 1024


class Waiting(NamedTuple):
    """The rows of one request."""

    model: Model
    x: np.ndarray  #: (n, dim).
    answer: asyncio.Future[Tensor]  #: Takes their logits (n, num_classes).


@dataclass
class Batches:
    """What classifies, one batch at a time, in a thread of its own."""

    queue: deque[Waiting] = field(default_factory=deque)
    done: int = 0  #: How many batches there were.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _task: asyncio.Task[None] | None = None

    async def classify(self, model: Model, x: np.ndarray) -> Tensor:
        """Return the logits (n, num_classes) of rows (n, dim).

        Raises:
            InputError: As `protonet.commands.models.classify`.
        """
        waiting = Waiting(model, x, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await waiting.answer

    async def _work(self) -> None:
        """Classify until nothing waits."""
        loop = asyncio.get_running_loop()
        while self.queue:
            batch, rows = [self.queue.popleft()], 0
            first = batch[0]
            while self.queue and rows + len(self.queue[0].x) <= MOST_ROWS and self._alike(first, self.queue[0]):
                batch.append(self.queue.popleft())
                rows += len(batch[-1].x)
            batch = [each for each in batch if not each.answer.done()]  # of some the time was over
            if not batch:
                continue
            found = await loop.run_in_executor(self._thread, classify_batch, batch)
            self.done += 1
            for waiting, logits in zip(batch, found, strict=True):
                if waiting.answer.done():
                    continue
                if isinstance(logits, Exception):
                    waiting.answer.set_exception(logits)
                else:
                    waiting.answer.set_result(logits)

    @staticmethod
    def _alike(one: Waiting, other: Waiting) -> bool:
        """Return whether two may be in a batch."""
        return one.model is other.model and one.x.dtype == other.x.dtype


def classify_batch(batch: list[Waiting]) -> list[Tensor | Exception]:
    """Return the logits of each request, or what is wrong with it: one does not spoil the others' answers."""
    model = batch[0].model
    try:
        logits = classify(model, np.concatenate([each.x for each in batch]))
        return list(logits.split([len(each.x) for each in batch]))
    except MENDABLE as error:
        return [error] if len(batch) == 1 else [classify_batch([each])[0] for each in batch]
    except Exception as error:  # told by whoever asked, as a bug
        return [error for _ in batch]
