"""What ``page`` answers: the page, and what its script asks for."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protonet._checks import clean, refuse
from protonet.commands.content import list_columns
from protonet.commands.models import attach, list_notes
from protonet.commands.server.desk import Desk
from protonet.commands.server.guard import Door, Guard, RequestError
from protonet.commands.server.jobs import Jobs
from protonet.commands.server.reading import read_body, read_media
from protonet.representations.pictures.images import UNREADABLE_IMAGE, open_plain
from protonet.representations.pictures.reading import refuse_picture
from protonet.tables.columns.parsing import count_gaps
from protonet.ui.page.document import format_desk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

#: Pixels per side of a picture that is shown.
SIDE = 640


@dataclass
class Room:
    """The application of ``page``.

    Args:
        desk: What is asked.
        jobs: What takes long.
        door: Who may ask.
        title: Of the page.
        picture: The number of the cell that holds a picture's path; None where there is none.
        representation: What reads texts and pictures, as a person types it.
    """

    desk: Desk
    jobs: Jobs
    door: Door
    title: str
    picture: int | None
    representation: Sequence[str] | None
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))

    def make_app(self) -> ASGIApp:
        """Return the application, behind its guard."""
        from starlette.responses import Response  # noqa: PLC0415 - optional
        from starlette.routing import Route, Router  # noqa: PLC0415

        self.respond = Response
        changes: dict[str, Callable[[str, Mapping[str, Any]], None]] = {
            "next": lambda who, told: None,
            "answer": lambda who, told: self.desk.answer(who, _read_row(told), told.get("name", "")),
            "skip": lambda who, told: self.desk.skip(who, _read_row(told)),
            "flag": lambda who, told: self.desk.flag(who, _read_row(told)),
            "undo": lambda who, told: self.desk.take_back(who, _read_row(told)),
        }

        def make_change(change: Callable[[str, Mapping[str, Any]], None]) -> Callable[[Request], Any]:
            async def answer(request: Request) -> Response:
                who, told = await self.read(request)
                change(who, told)
                return self.send(self.desk.ask(who))

            return answer

        routes = [
            Route("/", self.show_page),
            Route("/api/state", self.tell_state),
            *(Route(f"/api/{name}", make_change(change), methods=["POST"]) for name, change in changes.items()),
            Route("/api/mend", self.mend, methods=["POST"]),
            Route("/api/leave", self.leave, methods=["POST"]),
            Route("/api/map", self.draw_map),
            Route("/api/rows", self.list_rows, methods=["POST"]),
            Route("/api/jobs", self.tell_jobs),
            Route("/api/jobs", self.start_job, methods=["POST"]),
            Route("/api/try", self.attempt, methods=["POST"]),
            Route("/picture/{row:int}", self.show_picture),
            Route("/take/{name}", self.take),
        ]

        @asynccontextmanager
        async def live(_: object) -> AsyncIterator[None]:
            self.desk.start()
            yield
            self.jobs.folder.cleanup()

        return Guard(Router(routes, lifespan=live), self.door)

    def send(self, value: object) -> Response:
        """Return JSON."""
        return self.respond(json.dumps(value, allow_nan=False), media_type="application/json")

    async def read(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Return who asks, and what."""
        try:
            told = json.loads(await request.body())
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or not isinstance(who := told.get("tab"), str) or len(who) > 64:
            refuse("body", "be a JSON object with a tab", "something else", "Load the page again.")
        return who, told

    async def show_page(self, _: Request) -> Response:
        """Return the page."""
        text, policy = format_desk(self.title)
        return self.respond(text, media_type="text/html", headers={"content-security-policy": policy})

    async def tell_state(self, _: Request) -> Response:
        """Return what does not change: the cells, the columns, the notes."""
        rows = self.desk.session.rows
        names = list(rows.columns or self.desk.header)
        own = [[row[self.desk.header.index(name)] for row in self.desk.session.cells] for name in names]
        gaps = [count_gaps(_as_objects(cells)) for cells in own]
        kinds = list_columns(names, rows.encoding, gaps) if len(names) < 400 else []
        takes = [column.takes for column in rows.encoding.columns] if rows.encoding else []
        state: dict[str, Any] = {
            "header": list(self.desk.header),
            "picture": self.picture,
            "columns": kinds,
            "used": names,
        }
        state |= {"texts": self.picture is None and len(names) == 1 and bool(takes), "label": self.jobs.label}
        state |= {"notes": [*list_notes(rows.table), *rows.told], "output": str(self.jobs.answers)}
        return self.send(
            state | {"table": self.jobs.table, "commands": self.jobs.list_commands(), "python": self.jobs.list_python()}
        )

    async def mend(self, request: Request) -> Response:
        """Give a row that was answered another class."""
        _, told = await self.read(request)
        self.desk.mend(_read_row(told), told.get("name", ""))
        return self.send(self.desk.tell())

    async def leave(self, request: Request) -> Response:
        """Let others be asked for what a tab was asked for."""
        who, _ = await self.read(request)
        self.desk.leave(who)
        return self.send({})

    async def list_rows(self, request: Request) -> Response:
        """Return the cells of some rows."""
        _, told = await self.read(request)
        wanted = told.get("rows")
        n = len(self.desk.session.cells)
        if not isinstance(wanted, list) or not all(type(row) is int and 0 <= row < n for row in wanted[:200]):
            refuse("rows", "be numbers of rows", "something else", "Load the page again.")
        return self.send([{"row": row, "cells": self.desk.show_cells(row)} for row in wanted[:200]])

    async def draw_map(self, _: Request) -> Response:
        """Return where all rows lie."""
        return self.send(await self.run(self.desk.draw_map))

    async def tell_jobs(self, _: Request) -> Response:
        """Return the figures, and what may be taken."""
        jobs = self.jobs
        keys = ("accuracy", "interval", "balanced_accuracy", "confusion", "classes", "suspects", "places", "data")
        figures = None if jobs.figures is None else {key: jobs.figures.get(key) for key in keys}
        own = {"running": jobs.running, "error": jobs.error, "ready": sorted(jobs.ready), "figures": figures}
        if figures is not None and (every := (jobs.figures or {}).get("each_row")):
            figures["rows"] = {key: every[key] for key in ("row", "label", "predicted", "probability")}
        return self.send(own | {"fresh": jobs.version == self.desk.version, **self.desk.tell()})

    async def start_job(self, request: Request) -> Response:
        """Begin a job."""
        _, told = await self.read(request)
        if told.get("what") not in {"look", "take"}:
            refuse("what", "be look or take", "something else", "Load the page again.")
        self.jobs.start(told["what"], self.desk.version, list(self.desk.session.done))
        return await self.tell_jobs(request)

    async def attempt(self, request: Request) -> Response:
        """Judge a row that somebody brings."""
        model, body = self.desk.make_model(), await request.body()
        model = await self.run(lambda: attach(model, self.representation, shown=False, kept=False))
        media = read_media(request)
        rows = await self.run(lambda: read_body(model, media, body))
        if len(rows.x) != 1:
            refuse("body", "hold one row", len(rows.x), "Send one.")
        judged = await self.run(lambda: self.desk.judge(torch.from_numpy(rows.x)))
        return self.send(judged | {"notes": rows.notes})

    async def show_picture(self, request: Request) -> Response:
        """Return a picture of the table, decoded and drawn anew."""
        row, cells = request.path_params["row"], self.desk.session.cells
        if self.picture is None or not 0 <= row < len(cells):
            raise RequestError(404, "`row` must be one with a picture.")
        path = Path(cells[row][self.picture])
        return self.respond(await self.run(lambda: draw_picture(path)), media_type="image/png")

    async def take(self, request: Request) -> Response:
        """Return a file that was made, or the answers."""
        name = request.path_params["name"]
        path, media = (self.jobs.answers, "text/csv") if name == "labelled" else self.jobs.find(name)
        headers = {
            "content-disposition": f'attachment; filename="{"labelled.csv" if name == "labelled" else path.name}"'
        }
        return self.respond(await self.run(path.read_bytes), media_type=media, headers=headers)

    async def run(self, work: Callable[[], Any]) -> Any:
        """Return what a function returns, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, work)


def draw_picture(path: Path) -> bytes:
    """Return a picture's file as PNG, at most `SIDE` pixels per side.

    Raises:
        InputError: It cannot be read.
    """
    try:
        image = open_plain(path, SIDE).convert("RGB")
        image.thumbnail((SIDE, SIDE))
    except UNREADABLE_IMAGE as error:
        refuse_picture(path, error)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _read_row(told: Mapping[str, Any]) -> int:
    """Return the number of a row."""
    row = told.get("row")
    if type(row) is not int:
        refuse("row", "be a whole number", clean(str(row))[:20], "Load the page again.")
    return row


def _as_objects(cells: list[str]) -> Any:
    """Return texts as the cells of a column."""
    from protonet.tables.formats import to_text  # noqa: PLC0415

    return to_text(cells, len(cells))
