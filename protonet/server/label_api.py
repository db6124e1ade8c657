"""``protonet page``: the labelling page, and the API that its script uses."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from protonet._text import escape_control_chars
from protonet.commands.answers import Answers
from protonet.commands.content import columns_to_dicts
from protonet.commands.data import ColumnOverrides, UnlabelledTable, read_cells, read_unlabelled
from protonet.commands.label import Session, parse_classes
from protonet.commands.models import attach_encoders, collect_notes, get_label_column, open_model
from protonet.commands.rows import parse_column_types
from protonet.embeddings.pictures.images import UNREADABLE_IMAGE, draw_plain, path_to_text, text_to_path
from protonet.embeddings.pictures.reading import refuse_picture
from protonet.errors import raise_input_error, renamed_arguments
from protonet.server.app import AccessPolicy, create_app, html_response, json_response, make_policy
from protonet.server.connections import open_socket, run_server
from protonet.server.jobs import JobRunner
from protonet.server.label_queue import LabelQueue
from protonet.server.parsing import decode_json, parse_rows, read_upload
from protonet.tables.columns import COLUMN_TYPES
from protonet.tables.columns.parsing import blank_missing, count_missing_cells
from protonet.tables.formats import text_array
from protonet.ui.page.document import format_desk
from protonet.ui.text import count

#: Bytes of a body: a picture to try.
MAX_BODY = 32 * 2**20
#: Pixels per side of a picture that is shown.
SIDE = 640
#: Columns that are listed, and rows that are listed or labelled together, at most.
MAX_COLUMNS, MAX_ROWS = 400, 200
#: What a person may say of a column: its kind, or that it is not a feature; "" for nothing. Pictures are left out, as
#: every file that a cell names would be read for whoever has the page.
CHOICES = ("", *(name for name in COLUMN_TYPES if name != "picture"), "drop", "group")

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Action(Struct):
    """What the page asks for: a tab, and what the action is about."""

    tab: Annotated[str, Meta(max_length=64)]
    row: int | None = None
    rows: Annotated[list[int], Meta(max_length=MAX_ROWS)] | None = None
    name: str | None = None
    column: str | None = None
    said: str | None = None
    what: Literal["look", "take"] | None = None


ACTION = msgspec.json.Decoder(Action)


@dataclass
class LabelApi:
    """The routes of the page.

    Args:
        queue: The rows and the answers.
        jobs: Fits and predictions.
        policy: Access and limits.
        title: Of the page.
        picture: The number of the cell that holds a picture's path; None if there is none.
        representation: What reads texts and pictures, as a person types it.
        read_again: Reads the features of the table, given what a person says of columns; None if a model says it.
    """

    queue: LabelQueue
    jobs: JobRunner
    policy: AccessPolicy
    title: str
    picture: int | None
    representation: list[str] | None
    read_again: Callable[[ColumnOverrides], UnlabelledTable] | None
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))

    def create_app(self) -> ASGIApp:
        """Create the application."""
        queue = self.queue
        changes: dict[str, Callable[[Action], object]] = {
            "next": lambda action: None,
            "answer": lambda action: queue.answer(action.tab, require_row(action), action.name or ""),
            "skip": lambda action: queue.skip(action.tab, require_row(action)),
            "flag": lambda action: queue.flag(action.tab, require_row(action)),
            "undo": lambda action: queue.undo(action.tab, require_row(action)),
            "mend": lambda action: queue.relabel(require_row(action), action.name or ""),
            "mark": lambda action: queue.label_many(action.tab, self.require_rows(action), action.name),
        }
        posts: dict[str, Handler] = {f"/api/{name}": self.change(change) for name, change in changes.items()}
        posts |= {"/api/leave": self.leave, "/api/rows": self.list_rows, "/api/columns": self.choose_columns}
        posts |= {"/api/try": self.try_row, "/api/jobs": self.start_job}
        gets: dict[str, Handler] = {"/": self.page, "/api/state": self.state, "/api/map": self.map_rows}
        gets |= {"/api/jobs": self.list_jobs, "/picture": self.show_picture, "/take": self.download}
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        return create_app(self.policy, routes + [Route(path, handler) for path, handler in gets.items()])

    def change(self, change: Callable[[Action], object]) -> Handler:
        """Make a handler that changes something, and answers with the next row."""

        async def handle(request: Request) -> Response:
            action = await read_action(request)
            change(action)
            return json_response(self.queue.next_item(action.tab))

        return handle

    async def page(self, _: Request) -> Response:
        """Return the page."""
        return html_response(*format_desk(self.title))

    async def state(self, _: Request) -> Response:
        """Return what seldom changes: the cells, the columns, the notes."""
        rows, header = self.queue.rows, list(self.queue.header)
        names = list(rows.columns or header)
        takes = [column.modality for column in rows.encoding.columns] if rows.encoding else []
        return json_response(
            {
                "header": header,
                "picture": self.picture,
                "columns": await self.run(self.describe_columns) if len(header) <= MAX_COLUMNS else [],
                "choices": CHOICES if self.read_again is not None and rows.columns is not None else [],
                "used": names,
                "texts": self.picture is None and len(names) == 1 and bool(takes),
                "notes": [*collect_notes(rows.table), *rows.notes],
                "table": self.jobs.table,
                "commands": self.jobs.command_lines(),
                "python": self.jobs.python_lines(),
            }
        )

    def describe_columns(self) -> list[dict[str, Any]]:
        """Return the name of each column, its kind, its missing cells, and what a person says of it."""
        rows, header, said = self.queue.rows, list(self.queue.header), self.jobs.columns
        names, cells = list(rows.columns or header), self.queue.session.cells
        missing = {
            name: count_missing_cells(blank_missing(text_array([row[at] for row in cells], len(cells))))
            for at, name in enumerate(header)
        }
        used = {
            each["name"]: each for each in columns_to_dicts(names, rows.encoding, [missing[name] for name in names])
        }
        choices = {**said.types, **dict.fromkeys(said.dropped, "drop")}
        choices |= {} if said.group is None else {said.group: "group"}
        unused = [{"name": name, "type": "not used", "missing": missing[name]} for name in header if name not in used]
        return [{**column, "said": choices.get(column["name"], "")} for column in [*used.values(), *unused]]

    async def choose_columns(self, request: Request) -> Response:
        """Read a column as another kind, drop it, or hold its equal cells out together, and fit again."""
        action = await read_action(request)
        name, choice, said = str(action.column), str(action.said), self.jobs.columns
        if self.read_again is None:
            raise HTTPException(409, "`columns` must be as the model has them; got another choice. Leave out -m.")
        if name not in self.queue.header:
            raise_input_error("column", "be one of the table", escape_control_chars(name)[:40], "Load the page again.")
        if choice not in CHOICES:
            raise_input_error(
                "said",
                f"be one of {', '.join(CHOICES[1:])}, or nothing",
                escape_control_chars(choice)[:20],
                "Choose one.",
            )
        pictures = self.picture is not None and name == self.queue.header[self.picture]
        if pictures and choice:
            raise HTTPException(
                409, f"`column` must be another one than that of the pictures; got {escape_control_chars(name)[:40]}."
            )
        kinds = {other: kind for other, kind in said.types.items() if other != name or pictures}
        dropped = tuple(other for other in said.dropped if other != name) + (name,) * (choice == "drop")
        group = name if choice == "group" else None if said.group == name else said.group
        if choice not in {"", "drop", "group"}:
            kinds[name] = choice
        columns, read_again = ColumnOverrides(kinds, dropped, group), self.read_again
        with renamed_arguments(**{"--column-type": "column", "--drop": "column", "path": "columns"}):
            rows = await self.run(lambda: read_again(columns))
        self.jobs.columns = columns
        self.queue.replace_rows(rows)
        return await self.state(request)

    async def leave(self, request: Request) -> Response:
        """Give the row of a tab to others."""
        self.queue.release((await read_action(request)).tab)
        return json_response({})

    def require_rows(self, action: Action) -> list[int]:
        """Return the row numbers of an action."""
        rows, n = action.rows, len(self.queue.session.cells)
        if rows is None or not all(0 <= row < n for row in rows):
            raise_input_error("rows", f"be up to {MAX_ROWS} numbers of rows", "something else", "Load the page again.")
        return rows

    async def list_rows(self, request: Request) -> Response:
        """Return the cells of some rows."""
        rows = self.require_rows(await read_action(request))
        return json_response([{"row": row, "cells": self.queue.show_cells(row)} for row in rows])

    async def map_rows(self, _: Request) -> Response:
        """Return where all rows lie on the map."""
        return json_response(await self.run(self.queue.map_rows))

    async def list_jobs(self, _: Request) -> Response:
        """Return the metrics, and the files that were made."""
        jobs = self.jobs
        keys = ("accuracy", "interval", "balanced_accuracy", "confusion", "classes", "suspects", "places", "data")
        metrics = None if jobs.metrics is None else {key: jobs.metrics.get(key) for key in keys}
        state = {"running": jobs.running, "error": jobs.error, "ready": jobs.ready(), "figures": metrics}
        if metrics is not None and (rows := (jobs.metrics or {}).get("predictions")):
            metrics["rows"] = {key: rows[key] for key in ("index", "label", "predicted", "probability")}
        return json_response(state | {"fresh": jobs.version == self.queue.version, **self.queue.progress()})

    async def start_job(self, request: Request) -> Response:
        """Start a job."""
        kind = (await read_action(request)).what
        if kind is None:
            raise_input_error("what", "be look or take", "nothing", "Load the page again.")
        self.jobs.start(kind, self.queue.version, list(self.queue.session.done))
        return await self.list_jobs(request)

    async def try_row(self, request: Request) -> Response:
        """Classify a row that is sent."""
        learned = self.queue.build_model()
        model = await self.run(lambda: attach_encoders(learned, self.representation, shown=False, kept=False))
        media, body = await read_upload(request)
        rows = await self.run(lambda: parse_rows(model, media, body))
        if len(rows.x) != 1:
            raise_input_error("body", "hold one row", len(rows.x), "Send one.")
        result = await self.run(lambda: self.queue.try_row(model, torch.from_numpy(rows.x)))
        return json_response(result | {"notes": rows.notes})

    async def show_picture(self, request: Request) -> Response:
        """Return a picture of the table, decoded and drawn anew."""
        row, cells = request.query_params.get("row", ""), self.queue.session.cells
        if self.picture is None or not row.isdecimal() or len(row) > 9 or int(row) >= len(cells):
            raise HTTPException(404, "`row` must be one with a picture; got another one. Load the page again.")
        path = text_to_path(cells[int(row)][self.picture])
        try:
            return Response(await self.run(lambda: draw_plain(path, SIDE)), media_type="image/png")
        except UNREADABLE_IMAGE as error:
            refuse_picture(path, error)

    async def download(self, request: Request) -> Response:
        """Return a file that was made, or the answers."""
        name = request.query_params.get("file", "")
        path, media = (self.jobs.answers, "text/csv") if name == "labelled" else self.jobs.locate(name)
        title = "labelled.csv" if name == "labelled" else path.name
        headers = {"content-disposition": f'attachment; filename="{title}"'}
        return Response(await self.run(path.read_bytes), headers=headers, media_type=media)

    async def run(self, work: Callable[[], T]) -> T:
        """Call a function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


async def read_action(request: Request) -> Action:
    """Read the action of a request."""
    return decode_json(await request.body(), ACTION)


def require_row(action: Action) -> int:
    """Return the row number of an action."""
    if action.row is None:
        raise_input_error("row", "be a whole number", "nothing", "Load the page again.")
    return action.row


def run(options: argparse.Namespace) -> None:
    """Answer a browser until SIGTERM or Ctrl-C.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        OSError: The answers cannot be written.
        InputError: Arguments, a model, a table or a file of answers that do not fit.
    """
    policy = make_policy(options.host, options.allowed_hosts, MAX_BODY, timeout=120.0)
    listening = open_socket(options.host, options.port)
    model = None if options.model is None else open_model(options, argument="--model")
    classes = [] if model is None and options.classes is None else parse_classes(options.classes, model)
    label = get_label_column(options.label, model)
    columns = ColumnOverrides(parse_column_types(options.column_type), tuple(options.drop), options.group)
    rows = read_unlabelled(options, model, label, columns)
    header, cells = read_cells(options, model, label)
    output, flags = options.outputs["output"], options.outputs["flags"]
    with Answers(output, [*header, label], None) as answers, Answers(flags, [*header, "flag"], ["flagged"]) as flagged:
        session = Session(rows, cells, classes, model, answers)
        names = dict.fromkeys(row[-1] for row in answers.rows)
        session.names.extend(name for name in names if name not in session.names)
        takes = [column.modality for column in rows.encoding.columns] if rows.encoding else []
        picture = header.index((rows.columns or ())[takes.index("picture")]) if "picture" in takes else None
        shared = [] if options.representation is None else ["--representation", *options.representation]
        shared += [] if options.sheet is None else ["--sheet", options.sheet]
        if picture is not None:  # `fit` sees only the paths in the answers
            columns = columns._replace(types={header[picture]: "picture", **columns.types})
        jobs = JobRunner(output, options.table, label, options.model, columns, shared)
        read_again = None if model is not None else lambda said: read_unlabelled(options, None, label, said)
        queue, title = LabelQueue(session, flagged, header), path_to_text(Path(options.table).name)
        api = LabelApi(queue, jobs, policy, title, picture, options.representation, read_again)
        status = f"{count(len(cells), 'row')}, {count(len(answers.rows), 'answer')} in {output}; label at"
        with queue.learning(), jobs.folder:
            run_server(api.create_app(), policy, listening, status)
    print(f"{count(len(answers.rows), 'answer')} in {output}: the same command goes on, and fit and update take them")
