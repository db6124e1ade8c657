"""Which row to label next, for several people at once, while a thread learns from their answers."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from starlette.exceptions import HTTPException
from torch import Tensor

from protonet._text import to_printable
from protonet.commands.answers import Answers
from protonet.commands.data import UnlabelledTable
from protonet.commands.explain import COLUMNS, SAMPLE
from protonet.commands.label import Session, check_class, embed
from protonet.commands.models import get_column_names, get_column_sizes
from protonet.files import Model
from protonet.fit.importance import measure_support
from protonet.network import PrototypeNetwork
from protonet.ui.command_line import report_bug
from protonet.ui.plots import project

#: Rows that are chosen ahead, so that no client waits.
AHEAD = 20
#: Answers after which the network is fitted again, if there is no model.
REFIT_INTERVAL = 5
#: Seconds after which a row that a client has not answered goes to others.
LEASE_SECONDS = 600.0
#: Classes that are offered, similar rows that are shown, and rows of the map, at most.
MAX_LIKELY, MAX_NEAR, MAX_POINTS = 9, 3, 100_000
#: Characters of a cell that are shown.
MAX_CELL = 2000


@dataclass
class Lease:
    """A row that a client is labelling."""

    row: int
    reason: str
    since: float


@dataclass
class LabelQueue:
    """Rows to label. All methods but `learning` are called by one thread.

    Args:
        session: What was answered; its network is that of the last `learn`.
        flags: Rows that somebody found strange: these are not asked for again.
        header: Names of the cells.
    """

    session: Session
    flags: Answers
    header: Sequence[str]
    version: int = 0  #: How often answers have changed.
    _leases: dict[str, Lease] = field(default_factory=dict)
    _queue: list[tuple[int, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False
    _embedding: Tensor | None = None
    _rows: UnlabelledTable | None = None  #: Other features of the same rows, until they are learned from.

    def __post_init__(self) -> None:
        cells = [tuple(row) for row in self.session.cells]
        flagged = {tuple(own) for *own, _ in self.flags.rows}
        self.session.skipped |= {row for row, own in enumerate(cells) if own in flagged}
        self.session.learn(anew=True)
        self._embedding = embed(self.session.rows, self.session.network)
        self._queue = [(each.row, each.reason) for each in self.session.choose(AHEAD)]

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Learn in the background, until it is left; what is being learned then is waited for."""
        thread = threading.Thread(target=self._learn_loop, name="learning")
        thread.start()
        try:
            yield
        finally:
            self._ended = True
            self._changed.set()
            thread.join()

    def next_item(self, client: str) -> dict[str, Any]:
        """Return the row that a client is to label: the same until it is answered."""
        now = time.monotonic()
        lease = self._leases.get(client)
        if lease is None or not self._is_free(lease.row):
            self._leases.pop(client, None)
            self._leases = {tab: each for tab, each in self._leases.items() if now - each.since < LEASE_SECONDS}
            taken = {each.row for each in self._leases.values()}
            with self._lock:
                self._queue = [each for each in self._queue if self._is_free(each[0])]
                waiting = [each for each in self._queue if each[0] not in taken]
            if not waiting:  # more is asked than was chosen: any row will do
                left = [row for row in self.session.list_left()[: len(taken) + 1].tolist() if row not in taken]
                waiting = [(row, "the next one") for row in left[:1]]
            if not waiting:
                return self.progress() | {"row": None}
            lease = self._leases[client] = Lease(*waiting[0], now)
        lease.since = now
        return self.progress() | {"reason": lease.reason} | self.describe(lease.row)

    def answer(self, client: str, row: int, name: str) -> None:
        """Keep the class of a row; raise a HTTPException where somebody was faster, an OSError on a full disk."""
        name = check_class(name, self.session.names)
        done = self.session.done
        if row in done and self.session.answers.rows[done.index(row)][-1] == name:
            return  # asked again, as the answer to the answer was lost
        self._check_open(row)
        with self._lock:
            self.session.keep(row, name)
            if name not in self.session.names:
                self.session.names.append(name)
            self.session.skipped.discard(row)
        self._settle(client)

    def skip(self, client: str, row: int) -> None:
        """Ask for another row."""
        with self._lock:
            self.session.skip(self._check_open(row))
        self._leases.pop(client, None)

    def flag(self, client: str, row: int) -> None:
        """Note on the disk that a row is strange, and ask for another one."""
        if not self._is_flagged(self._check_open(row)):
            self.flags.add(self.session.cells[row], "flagged")
        self.skip(client, row)

    def undo(self, client: str, row: int) -> None:
        """Ask again for a row that was answered, skipped or flagged."""
        own = self.session.cells[self._check(row)]
        kept = [each for each in self.flags.rows if each[:-1] != own]
        if len(kept) < len(self.flags.rows):
            self.flags.change(kept)
        with self._lock:
            self.session.skipped.discard(row)
            if row in self.session.done:
                self.session.change(row, None)
        self._leases[client] = Lease(row, "taken back", time.monotonic())
        self._settle(None)

    def relabel(self, row: int, name: str) -> None:
        """Give a row that was answered another class."""
        name = check_class(name, self.session.names)
        if self._check(row) not in self.session.done:
            raise HTTPException(409, f"`row` must be one that was answered; got {row}.")
        if name not in self.session.names:
            raise HTTPException(400, f"`name` must be a class that there is; got {to_printable(name)!r}.")
        with self._lock:
            self.session.change(row, name)
        self._settle(None)

    def label_many(self, client: str, rows: Sequence[int], name: str | None) -> int:
        """Give several rows a class, or flag them, where nobody has answered or flagged them; return how many.

        Raises:
            HTTPException: There is no such row; none is marked after it.
            OSError: As `answer`.
        """
        free = [row for row in rows if self._check(row) not in self.session.done and not self._is_flagged(row)]
        for row in free:
            if name is None:
                self.flag(client, row)
            else:
                self.answer(client, row, name)
        return len(free)

    def release(self, client: str) -> None:
        """Let others be asked for what somebody was asked for."""
        self._leases.pop(client, None)

    def progress(self) -> dict[str, Any]:
        """Count answers, rows left and classes."""
        counts = dict.fromkeys(self.session.names, 0)
        for told in self.session.answers.rows:
            counts[told[-1]] += 1
        left = len(self.session.list_left())
        own = {"answered": len(self.session.done), "left": left, "flagged": len(self.flags.rows)}
        return own | {"classes": [{"name": name, "rows": rows} for name, rows in counts.items()]}

    @torch.no_grad()
    def describe(self, row: int) -> dict[str, Any]:
        """Return a row, the classes that it may be, the likeliest first, and the labelled rows that it is like."""
        names = self.session.names
        with self._lock:
            network, x, embedding = self.session.network, self.session.rows.x[[row]], self._embedding
        likely: list[dict[str, Any]] = [{"name": name, "probability": None} for name in names]
        if network is not None:
            shares = network(x)[0].softmax(dim=0)
            told = dict(zip(names, shares.tolist(), strict=False))
            likely = [{"name": name, "probability": told.get(name)} for name in names]
            likely.sort(key=lambda each: -(each["probability"] or 0.0))
        near = [] if embedding is None else self.nearest_labelled(embedding[row], leave_out=row)
        return {"row": row, "cells": self.show_cells(row), "likely": likely[:MAX_LIKELY], "near": near}

    def nearest_labelled(self, embedding: Tensor, *, leave_out: int = -1) -> list[dict[str, Any]]:
        """Return the labelled rows whose embedding is nearest to one (dim,)."""
        with self._lock:
            pairs = zip(self.session.done, self.session.answers.rows, strict=True)
            given, others = {row: told[-1] for row, told in pairs if row != leave_out}, self._embedding
        if others is None or not given or others.shape[1] != len(embedding):
            return []
        done = list(given)
        order = torch.linalg.vector_norm(others[done] - embedding, dim=1).argsort(stable=True)[:MAX_NEAR].tolist()
        return [{"row": done[at], "name": given[done[at]], "cells": self.show_cells(done[at])} for at in order]

    def show_cells(self, row: int) -> list[str]:
        """Return the cells of a row, cut where they are long."""
        return [cell[:MAX_CELL] for cell in self.session.cells[row]]

    @torch.no_grad()
    def map_rows(self) -> dict[str, Any]:
        """Return where all rows lie, in [-1, 1], what they are taken for, and which are labelled."""
        network, rows = self._require_network("map")
        shown = torch.arange(0, len(rows.x), -(-len(rows.x) // MAX_POINTS))
        logits = torch.cat([network(part) for part in rows.x[shown].split(4096)])
        points = project(logits)
        points = torch.cat([points, torch.zeros_like(points)], dim=1)[:, :2]
        points = points / points.abs().amax().clamp_min(1e-12)
        with self._lock:
            given = dict(self.session.list_answers())
        labelled = [given.get(row, -1) for row in shown.tolist()]
        places = [[round(each, 3) for each in axis] for axis in points.T.tolist()]
        taken = logits.argmax(dim=1).tolist()
        own = {"row": shown.tolist(), "x": places[0], "y": places[1], "taken": taken, "given": labelled}
        return own | {"names": list(self.session.names)}

    @torch.no_grad()
    def try_row(self, model: Model, x: Tensor) -> dict[str, Any]:
        """Return what one row (1, dim) is for a model of `build_model`, and why.

        Returns:
            The classes that it may be, which share of the rows is farther from every class, the labelled rows near it,
            and by how much each of several columns speaks for the likeliest class, as ``explain`` tells it.
        """
        with self._lock:
            own, done = self.session.rows.x, self.session.done[-SAMPLE:]
        names, sizes = get_column_names(model), get_column_sizes(model)
        logits = model.network(x)[0]
        shares, order = (each.tolist() for each in logits.softmax(dim=0).sort(descending=True, stable=True))
        pairs = zip(order[:MAX_LIKELY], shares, strict=False)
        likely = [{"name": model.classes[at], "probability": share} for at, share in pairs]
        some = own[:: -(-len(own) // 1024)]
        farther = float((model.network(some).amax(dim=1) > logits.amax()).double().mean())
        support: list[dict[str, Any]] = []
        if len(sizes) > 1:
            found = measure_support(model.network, x[0], order[0], own[done], torch.ones(len(done)), sizes)
            places = found.abs().argsort(descending=True, stable=True)[:COLUMNS].tolist()
            support = [{"name": names[at], "support": float(found[at])} for at in places]
        near = self.nearest_labelled(model.network.embed(x)[0])
        return {"likely": likely, "near": near, "farther": farther, "support": support}

    def build_model(self) -> Model:
        """Return what is learned so far as a model."""
        network, rows = self._require_network("model")
        names = tuple(self.session.names[: len(network.counts)])
        return Model(network, names, rows.columns, {}, {}, rows.encoding)

    @property
    def rows(self) -> UnlabelledTable:
        """The features that are learned from, or are to be."""
        return self._rows or self.session.rows

    def replace_rows(self, rows: UnlabelledTable) -> None:
        """Learn from other features of the same rows."""
        self._rows = rows
        self._settle(None)

    def _require_network(self, what: str) -> tuple[PrototypeNetwork, UnlabelledTable]:
        """Return what is learned so far, and the rows that it is for; raise a HTTPException where nothing is."""
        with self._lock:
            network, rows = self.session.network, self.session.rows
        if network is None:
            line = f"`{what}` must be learned first; got nothing yet. It takes answers of two classes, and a moment."
            raise HTTPException(409, line)
        return network, rows

    def _is_flagged(self, row: int) -> bool:
        """Return whether somebody has found a row strange."""
        return [*self.session.cells[row], "flagged"] in self.flags.rows

    def _is_free(self, row: int) -> bool:
        """Return whether a row may be asked for."""
        return row not in self.session.skipped and row not in self.session.done

    def _check_open(self, row: int) -> int:
        """Return the number of a row that nobody has answered."""
        if self._check(row) in self.session.done:
            raise HTTPException(409, f"`row` must be free; got {row}, which somebody has answered. Look at it again.")
        return row

    def _check(self, row: int) -> int:
        """Return the number of a row that there is."""
        if not 0 <= row < len(self.session.cells) or self.session.rows.known[row]:
            raise HTTPException(404, f"`row` must be one without a class in the table; got {row}.")
        return row

    def _settle(self, client: str | None) -> None:
        """Forget what somebody was asked for, and let what has changed be learned."""
        if client is not None:
            self._leases.pop(client, None)
        self.version += 1
        self._changed.set()

    def _learn_loop(self) -> None:
        """Learn from what has changed, again and again."""
        fitted = len(self.session.done)
        while True:
            self._changed.wait()
            if self._ended:
                return
            self._changed.clear()
            try:
                if (rows := self._rows) is not None:
                    fitted, embedding = 0, embed(rows, None)
                    with self._lock:
                        self.session.replace_rows(rows)
                        self._embedding, self._rows = embedding, None if self._rows is rows else self._rows
                with self._lock:
                    answers, left = self.session.list_answers(), self.session.list_left()
                anew = abs(len(answers) - fitted) >= REFIT_INTERVAL
                network = self.session.make_network(answers, anew=anew)
                fitted = len(answers) if anew else fitted
                embedding = embed(self.session.rows, network)
                with self._lock:
                    self.session.network, self._embedding = network, embedding
                chosen = [(each.row, each.reason) for each in self.session.choose(AHEAD, left)]
                with self._lock:
                    self._queue = chosen
            except Exception as error:  # the old network answers; nothing that was answered is lost
                print(report_bug("protonet page", error), file=sys.stderr)
