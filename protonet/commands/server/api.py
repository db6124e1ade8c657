"""What ``serve`` answers: predictions, its health, its figures, and a page that says how to ask."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from protonet._checks import as_typed, find_version, refuse, show
from protonet.commands.models import find_sizes
from protonet.commands.predict import choose_threshold
from protonet.commands.server.batches import Batches
from protonet.commands.server.guard import (
    JSON_TYPE,
    Answer,
    Door,
    Guard,
    Handler,
    Request,
    RequestError,
    send_json,
    send_page,
)
from protonet.commands.server.reading import KINDS, read_body
from protonet.commands.server.served import Served
from protonet.files import Model
from protonet.ui.page.document import format_plain
from protonet.ui.page.markup import Markup, join, name_class, table, tag

#: Bytes of a body that is read at once, without a thread: there it would wait for others.
SMALL = 2**16
#: Upper ends of the histogram of seconds.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: The media type of figures.
FIGURES_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: What the address of a request for predictions may hold.
PARAMETERS = ("proba", "unknown")


@dataclass
class Figures:
    """What was counted since the start."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)  #: Requests, by model and status.
    rows: Counter[str] = field(default_factory=Counter)  #: Rows that were classified, by model.
    bins: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0  #: Seconds of all requests.


class Api:
    """What answers.

    Args:
        models: By name.
        door: Who may ask.
    """

    def __init__(self, models: dict[str, Served], door: Door) -> None:
        self.models, self.door = models, door
        self.batches, self.figures = Batches(), Figures()
        self.readers = ThreadPoolExecutor(2)
        self.paths = {f"/models/{name}/predict": name for name in models}

    def make_app(self) -> Guard:
        """Return the application."""
        told = {"/": self.show_page, "/healthz": self.tell_health, "/metrics": self.tell_figures}
        told["/openapi.json"] = self.describe
        routes: dict[str, dict[str, Handler]] = {path: {"GET": handler} for path, handler in told.items()}
        routes |= {path: {"POST": self.make_predict(name)} for path, name in self.paths.items()}
        return Guard(self.door, routes, free=("/healthz",), count=self.count)

    def count(self, path: str, status: int, seconds: float) -> None:
        """Count an answer, if it was asked for predictions."""
        if path.endswith("/predict"):
            self.figures.statuses[self.paths.get(path, ""), status] += 1
            self.figures.total += seconds
            self.figures.bins[bisect_left(SECONDS, seconds)] += 1

    def make_predict(self, name: str) -> Handler:
        """Return what classifies the rows of a request for a model."""
        served = self.models[name]

        async def predict(request: Request) -> Answer:
            model = served.model
            threshold, everything = read_parameters(model, request.query) if request.query else (None, False)
            if request.media == JSON_TYPE and len(request.body) <= SMALL and not _is_read(model):
                rows = read_body(model, request.media, request.body)
            else:
                loop = asyncio.get_running_loop()
                rows = await loop.run_in_executor(self.readers, read_body, model, request.media, request.body)
            named, logits = await self.batches.classify(model, rows.x, threshold)
            self.figures.rows[name] += len(named)
            told: list[dict[str, Any]] = [
                {"class": own, "probability": float(share) if share else None} for own, share in named
            ]
            if everything:
                names = list(map(str, model.classes))
                for each, shares in zip(told, logits.softmax(dim=1).tolist(), strict=True):
                    each["probabilities"] = {own: float(f"{p:.6g}") for own, p in zip(names, shares, strict=True)}
            return send_json({"model": name, "predictions": told, **({"notes": rows.notes} if rows.notes else {})})

        return predict

    async def tell_health(self, _: Request) -> Answer:
        """Say that it answers, until it is to end."""
        if self.door.closing:
            raise RequestError(503, "`server` must be running; got its end. Ask another one.")
        return send_json({"status": "ok"})

    async def tell_figures(self, _: Request) -> Answer:
        """Return what was counted, in Prometheus' text form."""
        return Answer(format_figures(self).encode(), FIGURES_TYPE)

    async def describe(self, _: Request) -> Answer:
        """Return the description of all addresses, as OpenAPI has it."""
        return send_json(describe_api({name: served.model for name, served in self.models.items()}))

    async def show_page(self, _: Request) -> Answer:
        """Return a page for people."""
        return send_page(*format_models({name: served.model for name, served in self.models.items()}))


def read_parameters(model: Model, query: Mapping[str, str]) -> tuple[float | None, bool]:
    """Return the score up to which a row is unknown, and whether all probabilities are asked for.

    Raises:
        InputError: There is another parameter, or a value that is none, or the model cannot tell what is unknown.
    """
    for name in query:
        if name not in PARAMETERS:
            refuse("query", f"be of {' and '.join(PARAMETERS)}", repr(show(name)[:20]), "Leave it out.")
    proba = query.get("proba", "0")
    if proba not in {"0", "1"}:
        refuse("proba", "be 0 or 1", repr(show(proba)[:20]), "Pass 1 for the probabilities of all classes.")
    if "unknown" not in query:
        return None, proba == "1"
    try:
        rate = float(query["unknown"])
    except ValueError:
        refuse("unknown", "be a number between 0 and 1", repr(query["unknown"][:20]), "Pass one such as 0.05.")
    with as_typed(**{"--unknown": "unknown"}):
        return choose_threshold(model, rate), proba == "1"


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
