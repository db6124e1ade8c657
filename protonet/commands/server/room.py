"""What ``page`` answers: the page, and what its script asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from protonet._checks import as_typed, clean, refuse
from protonet.commands.content import list_columns
from protonet.commands.data import Taken, Unlabelled
from protonet.commands.models import attach, list_notes
from protonet.commands.server.desk import Desk
from protonet.commands.server.guard import Answer, Door, Guard, Handler, Request, RequestError, send_json
from protonet.commands.server.jobs import Jobs
from protonet.commands.server.reading import parse_json, read_body
from protonet.representations.pictures.images import UNREADABLE_IMAGE, draw_plain, text_to_path
from protonet.representations.pictures.reading import refuse_picture
from protonet.tables.columns import NAMES
from protonet.tables.columns.parsing import count_gaps
from protonet.tables.formats import to_text
from protonet.ui.page.document import format_desk

#: Pixels per side of a picture that is shown.
SIDE = 640
#: Columns that are listed, and rows that are listed or marked at a time, at the most.
MOST_COLUMNS, MOST_ROWS = 400, 200
#: What a person may say of a column: what it holds, or that it is no feature; "" for nothing. Not that it holds
#: pictures: whoever has the page would have any file read that a cell names.
CHOICES = ("", *(name for name in NAMES if name != "picture"), "drop", "group")

Change = Callable[[str, Mapping[str, Any]], object]


@dataclass
class Room:
    """What answers.

    Args:
        desk: What is asked.
        jobs: What takes long.
        door: Who may ask.
        title: Of the page.
        picture: The number of the cell that holds a picture's path; None where there is none.
        representation: What reads texts and pictures, as a person types it.
        reread: Returns the features of the table, given what a person says of columns; None where a model says it.
    """

    desk: Desk
    jobs: Jobs
    door: Door
    title: str
    picture: int | None
    representation: Sequence[str] | None
    reread: Callable[[Taken], Unlabelled] | None
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))

    def make_app(self) -> Guard:
        """Return the application."""
        desk = self.desk
        changes: dict[str, Change] = {
            "next": lambda who, told: None,
            "answer": lambda who, told: desk.answer(who, _read_row(told), told.get("name", "")),
            "skip": lambda who, told: desk.skip(who, _read_row(told)),
            "flag": lambda who, told: desk.flag(who, _read_row(told)),
            "undo": lambda who, told: desk.take_back(who, _read_row(told)),
            "mend": lambda who, told: desk.mend(_read_row(told), told.get("name", "")),
            "mark": lambda who, told: desk.mark(who, self.read_rows(told), told.get("name")),
        }
        posted = {name: self.make_change(change) for name, change in changes.items()}
        posted |= {"leave": self.leave, "rows": self.list_rows, "columns": self.choose_columns}
        posted["try"] = self.attempt
        routes: dict[str, dict[str, Handler]] = {f"/api/{name}": {"POST": handler} for name, handler in posted.items()}
        routes |= {"/": {"GET": self.show_page}, "/api/state": {"GET": self.tell_state}}
        routes |= {"/api/map": {"GET": self.draw_map}, "/picture": {"GET": self.show_picture}}
        routes |= {"/api/jobs": {"GET": self.tell_jobs, "POST": self.start_job}, "/take": {"GET": self.take}}
        return Guard(self.door, routes)

    def make_change(self, change: Change) -> Handler:
        """Return what changes something, and answers with the next question."""

        async def answer(request: Request) -> Answer:
            who, told = read_told(request)
            change(who, told)
            return send_json(self.desk.ask(who))

        return answer

    async def show_page(self, _: Request) -> Answer:
        """Return the page."""
        page, policy = format_desk(self.title)
        return Answer(page.encode(), "text/html; charset=utf-8", policy=policy)

    async def tell_state(self, _: Request) -> Answer:
        """Return what seldom changes: the cells, the columns, the notes."""
        rows, header = self.desk.rows, list(self.desk.header)
        names = list(rows.columns or header)
        takes = [column.takes for column in rows.encoding.columns] if rows.encoding else []
        return send_json(
            {
                "header": header,
                "picture": self.picture,
                "columns": await self.run(self.list_columns) if len(header) <= MOST_COLUMNS else [],
                "choices": CHOICES if self.reread is not None and rows.columns is not None else [],
                "used": names,
                "texts": self.picture is None and len(names) == 1 and bool(takes),
                "notes": [*list_notes(rows.table), *rows.told],
                "table": self.jobs.table,
                "commands": self.jobs.list_commands(),
                "python": self.jobs.list_python(),
            }
        )

    def list_columns(self) -> list[dict[str, Any]]:
        """Return of each column its name, what it is taken for, how many gaps it has, and what a person says of it."""
        rows, header, taken = self.desk.rows, list(self.desk.header), self.jobs.taken
        names, cells = list(rows.columns or header), self.desk.session.cells
        gaps = {name: count_gaps(to_text([row[at] for row in cells], len(cells))) for at, name in enumerate(header)}
        own = {each["name"]: each for each in list_columns(names, rows.encoding, [gaps[name] for name in names])}
        said = {**taken.kinds, **dict.fromkeys(taken.dropped, "drop")}
        said |= {} if taken.group is None else {taken.group: "group"}
        unused = [{"name": name, "kind": "not used", "gaps": gaps[name]} for name in header if name not in own]
        return [{**each, "said": said.get(each["name"], "")} for each in [*own.values(), *unused]]

    async def choose_columns(self, request: Request) -> Answer:
        """Take a column for something else, leave it out, or hold its equal cells out together, and learn anew."""
        _, told = read_told(request)
        name, said, taken = str(told.get("column")), str(told.get("said")), self.jobs.taken
        if self.reread is None:
            raise RequestError(409, "`columns` must be as the model has them; got another choice. Leave out -m.")
        if name not in self.desk.header:
            refuse("column", "be one of the table", clean(name)[:40], "Load the page again.")
        if said not in CHOICES:
            refuse("said", f"be one of {', '.join(CHOICES[1:])}, or nothing", clean(said)[:20], "Choose one.")
        pictures = self.picture is not None and name == self.desk.header[self.picture]
        if pictures and said != "":
            raise RequestError(409, f"`column` must be another one than that of the pictures; got {clean(name)[:40]}.")
        kinds = {own: kind for own, kind in taken.kinds.items() if own != name or pictures}
        dropped = tuple(own for own in taken.dropped if own != name)
        group = None if taken.group == name else taken.group
        if said == "drop":
            dropped = (*dropped, name)
        elif said == "group":
            group = name
        elif said:
            kinds[name] = said
        taken, reread = Taken(kinds, dropped, group), self.reread
        with as_typed(**{"--column": "column", "--drop": "column", "path": "columns"}):
            rows = await self.run(lambda: reread(taken))
        self.jobs.taken = taken
        self.desk.take_rows(rows)
        return await self.tell_state(request)

    async def leave(self, request: Request) -> Answer:
        """Let others be asked for what a tab was asked for."""
        who, _ = read_told(request)
        self.desk.leave(who)
        return send_json({})

    def read_rows(self, told: Mapping[str, Any]) -> list[int]:
        """Return the numbers of some rows."""
        rows, n = told.get("rows"), len(self.desk.session.cells)
        known = isinstance(rows, list) and all(type(row) is int and 0 <= row < n for row in rows)
        if not isinstance(rows, list) or not known or len(rows) > MOST_ROWS:
            refuse("rows", f"be up to {MOST_ROWS} numbers of rows", "something else", "Load the page again.")
        return rows

    async def list_rows(self, request: Request) -> Answer:
        """Return the cells of some rows."""
        _, told = read_told(request)
        return send_json([{"row": row, "cells": self.desk.show_cells(row)} for row in self.read_rows(told)])

    async def draw_map(self, _: Request) -> Answer:
        """Return where all rows lie."""
        return send_json(await self.run(self.desk.draw_map))

    async def tell_jobs(self, _: Request) -> Answer:
        """Return the figures, and what may be taken."""
        jobs = self.jobs
        keys = ("accuracy", "interval", "balanced_accuracy", "confusion", "classes", "suspects", "places", "data")
        figures = None if jobs.figures is None else {key: jobs.figures.get(key) for key in keys}
        own = {"running": jobs.running, "error": jobs.error, "ready": jobs.list_ready(), "figures": figures}
        if figures is not None and (every := (jobs.figures or {}).get("each_row")):
            figures["rows"] = {key: every[key] for key in ("row", "label", "predicted", "probability")}
        return send_json(own | {"fresh": jobs.version == self.desk.version, **self.desk.tell()})

    async def start_job(self, request: Request) -> Answer:
        """Begin a job."""
        _, told = read_told(request)
        if told.get("what") not in ("look", "take"):
            refuse("what", "be look or take", "something else", "Load the page again.")
        self.jobs.start(told["what"], self.desk.version, list(self.desk.session.done))
        return await self.tell_jobs(request)

    async def attempt(self, request: Request) -> Answer:
        """Judge a row that somebody brings."""
        own = self.desk.make_model()
        model = await self.run(lambda: attach(own, self.representation, shown=False, kept=False))
        rows = await self.run(lambda: read_body(model, request.media, request.body))
        if len(rows.x) != 1:
            refuse("body", "hold one row", len(rows.x), "Send one.")
        judged = await self.run(lambda: self.desk.judge(model, torch.from_numpy(rows.x)))
        return send_json(judged | {"notes": rows.notes})

    async def show_picture(self, request: Request) -> Answer:
        """Return a picture of the table, decoded and drawn anew."""
        row, cells = request.query.get("row", ""), self.desk.session.cells
        if self.picture is None or not row.isdecimal() or len(row) > 9 or int(row) >= len(cells):
            raise RequestError(404, "`row` must be one with a picture; got another one. Load the page again.")
        path = text_to_path(cells[int(row)][self.picture])
        try:
            return Answer(await self.run(lambda: draw_plain(path, SIDE)), "image/png")
        except UNREADABLE_IMAGE as error:
            refuse_picture(path, error)

    async def take(self, request: Request) -> Answer:
        """Return a file that was made, or the answers."""
        name = request.query.get("file", "")
        path, media = (self.jobs.answers, "text/csv") if name == "labelled" else self.jobs.find(name)
        title = "labelled.csv" if name == "labelled" else path.name
        more = (("content-disposition", f'attachment; filename="{title}"'),)
        return Answer(await self.run(path.read_bytes), media, more)

    async def run(self, work: Callable[[], Any]) -> Any:
        """Return what a function returns, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, work)


def read_told(request: Request) -> tuple[str, Mapping[str, Any]]:
    """Return who asks, and what.

    Raises:
        InputError: It is something else.
    """
    told = parse_json(request.body)
    if not isinstance(told, dict) or not isinstance(who := told.get("tab"), str) or len(who) > 64:
        refuse("body", "be a JSON object with a tab", "something else", "Load the page again.")
    return who, told


def _read_row(told: Mapping[str, Any]) -> int:
    """Return the number of a row."""
    row = told.get("row")
    if type(row) is not int:
        refuse("row", "be a whole number", clean(str(row))[:20], "Load the page again.")
    return row
