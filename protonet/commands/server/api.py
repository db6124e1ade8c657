"""What ``serve`` answers: predictions, its health, its figures, and a page that says how to ask."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from protonet._checks import as_typed, find_version, refuse
from protonet.commands.models import find_sizes
from protonet.commands.predict import choose_threshold, name_classes
from protonet.commands.server.batches import Batches
from protonet.commands.server.guard import Door, Guard, RequestError
from protonet.commands.server.reading import KINDS, Rows, read_body, read_media
from protonet.commands.server.served import Served, watch_files
from protonet.files import Model
from protonet.ui.page.document import format_plain
from protonet.ui.page.markup import Markup, join, name_class, table, tag

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Bytes of a body that is read at once, without a thread: there it would wait for others.
SMALL = 2**16
#: Upper ends of the histogram of seconds.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: The media types of figures and of answers.
FIGURES_TYPE, JSON_TYPE = "text/plain; version=0.0.4; charset=utf-8", "application/json"


@dataclass
class Figures:
    """What was counted since the start."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)  #: Requests, by model and status.
    rows: Counter[str] = field(default_factory=Counter)  #: Rows that were classified, by model.
    bins: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0  #: Seconds of all requests.

    def add(self, seconds: float) -> None:
        """Count a request that took so long."""
        self.total += seconds
        self.bins[sum(seconds > end for end in SECONDS)] += 1


class Api:
    """The application.

    Args:
        models: By name.
        door: Who may ask.
    """

    def __init__(self, models: dict[str, Served], door: Door) -> None:
        self.models, self.door = models, door
        self.batches, self.figures = Batches(), Figures()
        self.readers = ThreadPoolExecutor(2)

    def make_app(self) -> ASGIApp:
        """Return the application, behind its guard."""
        from starlette.responses import Response  # noqa: PLC0415 - optional
        from starlette.routing import Route, Router  # noqa: PLC0415

        self.respond = Response
        routes = [
            Route("/", self.show_page),
            Route("/healthz", self.tell_health),
            Route("/metrics", self.tell_figures),
            Route("/openapi.json", self.describe),
            Route("/models/{name}/predict", self.predict, methods=["POST"]),
        ]

        @asynccontextmanager
        async def live(_: object) -> AsyncIterator[None]:
            watching = asyncio.create_task(watch_files(list(self.models.values()), ThreadPoolExecutor(1)))
            yield
            watching.cancel()

        return Guard(_Counting(Router(routes, lifespan=live), self), self.door, free=("/healthz",))

    async def predict(self, request: Request) -> Response:
        """Classify the rows of a request."""
        name = request.path_params["name"]
        if name not in self.models:
            raise RequestError(404, f"`model` must be one of {', '.join(self.models)}; got another one.")
        model, query = self.models[name].model, request.query_params
        media = read_media(request)
        body = await request.body()
        if media == JSON_TYPE and len(body) <= SMALL and not _is_read(model):
            rows = read_body(model, media, body)
        else:
            rows = await asyncio.get_running_loop().run_in_executor(self.readers, read_body, model, media, body)
        threshold = find_threshold(model, query["unknown"]) if "unknown" in query else None
        answer = await self.classify(model, rows, threshold, everything=query.get("proba", "0") not in {"", "0"})
        self.figures.rows[name] += len(rows.x)
        return self.respond(json.dumps({"model": name, **answer}), media_type=JSON_TYPE)

    async def classify(self, model: Model, rows: Rows, threshold: float | None, *, everything: bool) -> dict[str, Any]:
        """Return predictions as JSON has them."""
        names, logits = list(map(str, model.classes)), await self.batches.classify(model, rows.x)
        found: list[dict[str, Any]] = [
            {"class": name, "probability": float(share) if share else None}
            for name, share in name_classes(names, logits, threshold)
        ]
        if everything:
            for each, shares in zip(found, logits.softmax(dim=1).tolist(), strict=True):
                each["probabilities"] = {own: float(f"{p:.6g}") for own, p in zip(names, shares, strict=True)}
        return {"predictions": found, **({"notes": rows.notes} if rows.notes else {})}

    async def tell_health(self, _: Request) -> Response:
        """Say that it answers, until it is to end."""
        if self.door.closing:
            raise RequestError(503, "`server` must be running; it ends.")
        return self.respond('{"status": "ok"}\n', media_type=JSON_TYPE)

    async def tell_figures(self, _: Request) -> Response:
        """Return what was counted, in Prometheus' text form."""
        return self.respond(format_figures(self), headers={"content-type": FIGURES_TYPE})

    async def describe(self, _: Request) -> Response:
        """Return the description of all addresses, as OpenAPI has it."""
        text = json.dumps(describe_api({name: served.model for name, served in self.models.items()}))
        return self.respond(text, media_type=JSON_TYPE)

    async def show_page(self, _: Request) -> Response:
        """Return a page for people."""
        text, policy = format_models({name: served.model for name, served in self.models.items()})
        return self.respond(text, media_type="text/html", headers={"content-security-policy": policy})


class _Counting:
    """Counts requests for predictions: their status and seconds."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self.app, self.api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/predict"):
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        name = scope["path"].split("/")[2:3] if scope["path"].startswith("/models/") else []
        name = name[0] if name and name[0] in self.api.models else ""
        try:
            await self.app(scope, receive, send)
            status = 200
        except asyncio.CancelledError:  # the time is over
            status = 503
            raise
        except Exception as error:
            status = getattr(error, "status", getattr(error, "status_code", 400 if hasattr(error, "fault") else 500))
            raise
        finally:
            self.api.figures.statuses[name, status] += 1
            self.api.figures.add(time.perf_counter() - started)


def find_threshold(model: Model, text: str) -> float:
    """Return the score of ``unknown=RATE`` in an address.

    Raises:
        InputError: It is no rate, or the model cannot tell.
    """
    try:
        rate = float(text)
    except ValueError:
        refuse("unknown", "be a number between 0 and 1", repr(text[:20]), "Pass one such as 0.05.")
    with as_typed(**{"--unknown": "unknown"}):
        return choose_threshold(model, rate)


def _is_read(model: Model) -> bool:
    """Return whether reading the rows of a model takes long: texts and pictures."""
    return model.encoding is not None and any(column.takes for column in model.encoding.columns)


def format_figures(api: Api) -> str:
    """Return what was counted.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    lines: list[str] = []

    def add(name: str, kind: str, text: str, values: Sequence[tuple[str, float]]) -> None:
        lines.extend([f"# HELP protonet_{name} {text}", f"# TYPE protonet_{name} {kind}"])
        lines.extend(f"protonet_{name}{labels} {value}" for labels, value in values)

    def name_it(name: str, **more: object) -> str:
        pairs = {"model": name.replace("\\", r"\\").replace('"', r"\""), **more}
        return "{" + ",".join(f'{key}="{value}"' for key, value in pairs.items()) + "}"

    figures, models = api.figures, api.models
    counted = [(name_it(name, status=status), n) for (name, status), n in sorted(figures.statuses.items())]
    add("requests_total", "counter", "Requests for predictions.", counted)
    add("rows_total", "counter", "Rows that were classified.", [(name_it(name), figures.rows[name]) for name in models])
    add("batches_total", "counter", "Batches that they were classified in.", [("", api.batches.done)])
    add("reloads_total", "counter", "Models read again.", [(name_it(name), models[name].reloads) for name in models])
    failed = [(name_it(name), models[name].failures) for name in models]
    add("reload_failures_total", "counter", "Files that were no model.", failed)
    add("requests_in_progress", "gauge", "Requests that are being answered.", [("", api.door.busy)])
    total, bins = 0, []
    for end, n in zip([*map(str, SECONDS), "+Inf"], figures.bins, strict=True):
        total += n
        bins.append((f'_bucket{{le="{end}"}}', total))
    values = [*bins, ("_sum", figures.total), ("_count", total)]
    add("request_seconds", "histogram", "Seconds of requests for predictions.", values)
    return "\n".join(lines) + "\n"


def list_columns(model: Model) -> list[tuple[str, str]]:
    """Return the name and the kind of each column of a model; none where they have no names."""
    columns = () if model.encoding is None else model.encoding.columns
    return [(name, columns[at].tell() if columns else "number") for at, name in enumerate(model.columns or ())]


def describe_api(models: dict[str, Model]) -> dict[str, Any]:
    """Return the description of a server of models, as OpenAPI 3.1 has it."""
    cell = {"type": ["number", "string", "boolean", "null"]}
    failures = {"400": "What does not fit.", "401": "No token.", "413": "Too large.", "415": "Another type."}
    failures |= {"429": "Too many at a time.", "503": "Too slow, or ending."}
    prediction = {
        "type": "object",
        "required": ["class", "probability"],
        "properties": {
            "class": {"type": "string"},
            "probability": {"type": ["number", "null"]},
            "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
        },
    }
    answer = {
        "type": "object",
        "required": ["model", "predictions"],
        "properties": {
            "model": {"type": "string"},
            "predictions": {"type": "array", "items": prediction},
            "notes": {"type": "array", "items": {"type": "string"}},
        },
    }
    paths: dict[str, Any] = {}
    for name, model in models.items():
        width = len(find_sizes(model))
        listed = {"type": "array", "items": cell, "minItems": width, "maxItems": width}
        named = {own: {**cell, "description": kind} for own, kind in list_columns(model)}
        by_name = {"type": "object", "required": list(named), "properties": named}
        rows = {"type": "array", "minItems": 1, "items": {"anyOf": [listed, *[by_name] * bool(named)]}}
        content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in KINDS}
        content[JSON_TYPE] = {"schema": {"type": "object", "required": ["rows"], "properties": {"rows": rows}}}
        paths[f"/models/{quote(name)}/predict"] = {
            "post": {
                "summary": f"Classify rows: {', '.join(map(str, model.classes))}"[:300],
                "parameters": [
                    {"name": "unknown", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": 1}},
                    {"name": "proba", "in": "query", "schema": {"type": "integer", "enum": [0, 1]}},
                ],
                "requestBody": {"required": True, "content": content},
                "responses": {
                    "200": {"description": "A class for each row.", "content": {JSON_TYPE: {"schema": answer}}},
                    **{status: {"description": text} for status, text in failures.items()},
                },
            }
        }
    for path, summary in (("/healthz", "Whether it answers."), ("/metrics", "Figures, as Prometheus reads them.")):
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "Yes."}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "protonet serve", "version": find_version("protonet") or "0"},
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{"bearer": []}],
        "paths": paths,
    }


def format_models(models: dict[str, Model]) -> tuple[str, str]:
    """Return the page that says how to ask, and its policy."""
    sections = [
        tag(
            "section",
            tag("h2", name_class(name)),
            tag("p", f"POST /models/{quote(name)}/predict"),
            tag("p", "Classes: ", join(_between(", ", map(name_class, model.classes)))),
            table(["column", "kind"], [(name_class(own), kind) for own, kind in list_columns(model)], "Columns"),
            *(tag("p", tag("code", line)) for line in _make_example(name, model)),
        )
        for name, model in models.items()
    ]
    intro = tag("p", "Rows come as JSON, CSV, NPY or a picture. ", tag("code", "/openapi.json"), " describes it all.")
    return format_plain("protonet serve", [tag("section", intro), *sections])


def _between(text: str, children: Any) -> list[Markup | str]:
    """Return children with a text between them."""
    found = [part for child in children for part in (text, child)]
    return found[1:]


def _make_example(name: str, model: Model) -> list[str]:
    """Return the lines of a command that asks."""
    row: Any = {own: None for own, _ in list_columns(model)} or [0] * len(find_sizes(model))
    body = json.dumps({"rows": [row]}, ensure_ascii=False).replace("'", r"'\''")
    return [
        f"curl -X POST 'ADDRESS/models/{quote(name)}/predict?proba=1' \\",
        "-H 'Authorization: Bearer TOKEN' -H 'Content-Type: application/json' \\",
        f"-d '{body}'",
    ]
