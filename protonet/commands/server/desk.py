"""The desk of those who label in a browser: who is asked for which row, and what is learned behind their backs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from protonet._checks import refuse, show
from protonet.commands.answers import Answers
from protonet.commands.label import Session
from protonet.commands.server.guard import RequestError
from protonet.files import Model
from protonet.fit.active import Standardised
from protonet.network import PrototypeNetwork
from protonet.tables.table import NO_CLASS
from protonet.ui.command_line import report_bug
from protonet.ui.plots import project

#: Rows that are chosen at a time, so that nobody waits for more to be chosen.
AHEAD = 20
#: Answers after which all is fitted anew, without a model.
ANEW = 5
#: Seconds after which a row that somebody was asked for, and did not answer, is asked of others.
PATIENCE = 600.0
#: Classes that are offered on keys, labelled rows that are shown beside, and rows of the map, at the most.
MOST_LIKELY, NEAREST, MOST_POINTS = 9, 3, 100_000
#: Characters of a cell that are shown, and of the name of a class.
MOST_CELL, LONGEST = 2000, 100


@dataclass
class Lease:
    """A row that somebody is asked for."""

    row: int
    reason: str
    since: float


@dataclass
class Desk:
    """What is asked of whom. All of it but `learn` is called by one thread.

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
    _embedding: Tensor | None = None

    def __post_init__(self) -> None:
        cells = [tuple(row) for row in self.session.cells]
        flagged = {tuple(own) for *own, _ in self.flags.rows}
        self.session.skipped |= {row for row, own in enumerate(cells) if own in flagged}
        self.session.learn(anew=True)
        self._look(self.session.network)
        self._queue = [(each.row, each.reason) for each in self.session.choose(AHEAD)]

    def start(self) -> None:
        """Learn in the background from now on."""
        threading.Thread(target=self._learn_on, daemon=True, name="learning").start()

    def ask(self, who: str) -> dict[str, Any]:
        """Return the row that somebody is asked for: the same until it is answered."""
        now = time.monotonic()
        lease = self._leases.get(who)
        if lease is None or not self._is_free(lease.row):
            self._leases.pop(who, None)
            self._leases = {tab: each for tab, each in self._leases.items() if now - each.since < PATIENCE}
            taken = {each.row for each in self._leases.values()}
            with self._lock:
                self._queue = [each for each in self._queue if self._is_free(each[0])]
                waiting = [each for each in self._queue if each[0] not in taken]
            if not waiting:  # more is asked than was chosen: any row will do
                left = [row for row in self.session.list_left()[: len(taken) + 1].tolist() if row not in taken]
                waiting = [(row, "the next one") for row in left[:1]]
            if not waiting:
                return self.tell() | {"row": None}
            lease = self._leases[who] = Lease(*waiting[0], now)
        lease.since = now
        return self.tell() | {"reason": lease.reason} | self.describe(lease.row)

    def answer(self, who: str, row: int, name: str) -> None:
        """Keep the class of a row.

        Raises:
            RequestError: There is no such row, or somebody else was faster.
            OSError: The disk takes no more: nothing is kept.
        """
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
        self._settle(who)

    def skip(self, who: str, row: int) -> None:
        """Ask for another row."""
        with self._lock:
            self.session.skip(self._check_open(row))
        self._leases.pop(who, None)

    def flag(self, who: str, row: int) -> None:
        """Note on the disk that a row is strange, and ask for another one."""
        if self._check_open(row) not in self.session.skipped:
            self.flags.add(self.session.cells[row], "flagged")
        self.skip(who, row)

    def take_back(self, who: str, row: int) -> None:
        """Ask again for a row that was answered, skipped or flagged."""
        own = self.session.cells[self._check(row)]
        kept = [each for each in self.flags.rows if each[:-1] != own]
        if len(kept) < len(self.flags.rows):
            self.flags.change(kept)
        with self._lock:
            self.session.skipped.discard(row)
            if row in self.session.done:
                self.session.change(row, None)
        self._leases[who] = Lease(row, "taken back", time.monotonic())
        self._settle(None)

    def mend(self, row: int, name: str) -> None:
        """Give a row that was answered another class."""
        name = check_class(name, self.session.names)
        if self._check(row) not in self.session.done:
            raise RequestError(409, f"`row` must be one that was answered; got {row}.")
        if name not in self.session.names:
            raise RequestError(400, f"`name` must be a class that there is; got {show(name)!r}.")
        with self._lock:
            self.session.change(row, name)
        self._settle(None)

    def leave(self, who: str) -> None:
        """Let others be asked for what somebody was asked for."""
        self._leases.pop(who, None)

    def tell(self) -> dict[str, Any]:
        """Return how far it is."""
        counts = dict.fromkeys(self.session.names, 0)
        for told in self.session.answers.rows:
            counts[told[-1]] += 1
        left = len(self.session.list_left())
        own = {"answered": len(self.session.done), "left": left, "flagged": len(self.flags.rows)}
        return own | {"classes": [{"name": name, "rows": rows} for name, rows in counts.items()]}

    @torch.no_grad()
    def describe(self, row: int) -> dict[str, Any]:
        """Return a row, the classes that it may be, the likeliest first, and the labelled rows that it is like."""
        network, names = self.session.network, self.session.names
        likely: list[dict[str, Any]] = [{"name": name, "probability": None} for name in names]
        if network is not None:
            shares = network(self.session.rows.x[[row]])[0].softmax(dim=0)
            told = dict(zip(names, shares.tolist(), strict=False))
            likely = [{"name": name, "probability": told.get(name)} for name in names]
            likely.sort(key=lambda each: -(each["probability"] or 0.0))
        near: list[dict[str, Any]] = []
        if self._embedding is not None and self.session.done:
            near = self.find_near(self._embedding[row], leave_out=row)
        return {"row": row, "cells": self.show_cells(row), "likely": likely[:MOST_LIKELY], "near": near}

    def find_near(self, embedding: Tensor, *, leave_out: int = -1) -> list[dict[str, Any]]:
        """Return the labelled rows whose embedding is nearest to one (dim,)."""
        if self._embedding is None:
            return []
        with self._lock:
            pairs = zip(self.session.done, self.session.answers.rows, strict=True)
            given = {row: told[-1] for row, told in pairs if row != leave_out}
        done = list(given)
        apart = torch.linalg.vector_norm(self._embedding[done] - embedding, dim=1) if done else torch.zeros(0)
        order = apart.argsort(stable=True)[:NEAREST].tolist()
        return [{"row": done[at], "name": given[done[at]], "cells": self.show_cells(done[at])} for at in order]

    def show_cells(self, row: int) -> list[str]:
        """Return the cells of a row, cut where they are long."""
        return [cell[:MOST_CELL] for cell in self.session.cells[row]]

    @torch.no_grad()
    def draw_map(self) -> dict[str, Any]:
        """Return where all rows lie, in [-1, 1], what they are taken for, and which are labelled."""
        network, session = self.session.network, self.session
        if network is None:
            raise RequestError(409, "`map` must be learned first; it takes answers of two classes, and a moment.")
        step = -(-len(session.cells) // MOST_POINTS)
        rows = torch.arange(0, len(session.cells), step)
        logits = torch.cat([network(part) for part in session.rows.x[rows].split(4096)])
        points = project(logits)
        points = torch.cat([points, torch.zeros_like(points)], dim=1)[:, :2]
        points = points / points.abs().amax().clamp_min(1e-12)
        with self._lock:
            given = dict(session.list_answers())
        labelled = [given.get(row, -1) for row in rows.tolist()]
        places = [[round(each, 3) for each in axis] for axis in points.T.tolist()]
        taken = logits.argmax(dim=1).tolist()
        own = {"row": rows.tolist(), "x": places[0], "y": places[1], "taken": taken, "given": labelled}
        return own | {"names": list(session.names)}

    @torch.no_grad()
    def judge(self, x: Tensor) -> dict[str, Any]:
        """Return the classes that one row (1, dim) may be, whether it is unlike all, and the labelled rows near it."""
        network = self.session.network
        if network is None:
            raise RequestError(409, "`model` must be learned first; it takes answers of two classes, and a moment.")
        logits = network(x)[0]
        shares = logits.softmax(dim=0).tolist()
        likely = [{"name": name, "probability": share} for name, share in zip(self.session.names, shares, strict=False)]
        likely.sort(key=lambda each: -float(str(each["probability"])))
        some = self.session.rows.x[:: -(-len(self.session.cells) // 1024)]
        farther = float((network(some).amax(dim=1) > logits.amax()).double().mean())
        near = self.find_near(network.embed(x)[0])
        return {"likely": likely[:MOST_LIKELY], "near": near, "farther": farther}

    def make_model(self) -> Model:
        """Return what is learned so far as a model."""
        rows, network = self.session.rows, self.session.network
        if network is None:
            raise RequestError(409, "`model` must be learned first; it takes answers of two classes, and a moment.")
        return Model(network, tuple(self.session.names), rows.columns, {}, {}, rows.encoding)

    def _is_free(self, row: int) -> bool:
        """Return whether a row may be asked for."""
        return row not in self.session.skipped and row not in self.session.done

    def _check_open(self, row: int) -> int:
        """Return the number of a row that nobody has answered."""
        if self._check(row) in self.session.done:
            raise RequestError(409, f"`row` must be free; got {row}, which somebody has answered. Look at it again.")
        return row

    def _check(self, row: int) -> int:
        """Return the number of a row that there is."""
        if not 0 <= row < len(self.session.cells) or self.session.rows.known[row]:
            raise RequestError(404, f"`row` must be one without a class in the table; got {row}.")
        return row

    def _settle(self, who: str | None) -> None:
        """Forget what somebody was asked for, and let what has changed be learned."""
        if who is not None:
            self._leases.pop(who, None)
        self.version += 1
        self._changed.set()

    def _look(self, network: PrototypeNetwork | None) -> None:
        """Embed all rows."""
        x = self.session.rows.x
        space = Standardised(x) if network is None else network
        with torch.no_grad():
            self._embedding = torch.cat([space.embed(part) for part in x.split(4096)])

    def _learn_on(self) -> None:
        """Learn from what has changed, again and again."""
        fitted = len(self.session.done)
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                with self._lock:
                    answers, left = self.session.list_answers(), self.session.list_left()
                anew = abs(len(answers) - fitted) >= ANEW
                network = self.session.make_network(answers, anew=anew)
                fitted = len(answers) if anew else fitted
                self._look(network)
                self.session.network = network
                chosen = [(each.row, each.reason) for each in self.session.choose(AHEAD, left)]
                with self._lock:
                    self._queue = chosen
            except Exception as error:  # the old network answers; nothing that was answered is lost
                print(report_bug("protonet page", error), file=sys.stderr)


def check_class(name: object, known: Sequence[str]) -> str:
    """Return the name of a class, without spaces around it.

    Raises:
        InputError: It means that there is none, or cannot be shown.
    """
    text = name.strip() if isinstance(name, str) else ""
    if text in known:
        return text
    if text.lower() in NO_CLASS or len(text) > LONGEST or not text.isprintable():
        refuse("name", f"be a name of up to {LONGEST} letters that means a class", repr(text[:40]), "Type another one.")
    return text
