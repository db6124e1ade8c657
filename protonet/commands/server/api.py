"""What ``serve`` answers: predictions, its health, its figures, and a page that says how to ask."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from protonet._text import to_printable
from protonet.commands.models import find_sizes
from protonet.commands.predict import choose_threshold
from protonet.commands.server.batches import Batches
from protonet.commands.server.guard import JSON_TYPE, Answer, Door, Guard, Handler, Request, RequestError, send_json
from protonet.commands.server.reading import KINDS, read_body
from protonet.commands.server.served import Served
from protonet.errors import DISTRIBUTION, installed_version, raise_input_error, renamed_arguments
from protonet.files import Model
from protonet.ui.page.document import format_served

#: Bytes of a body that is read at once, without a thread: there it would wait for others.
SMALL = 2**16
#: Upper ends of the histogram of seconds.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Api:
    """What answers.

    Args:
        models: By name.
        door: Who may ask.
    """

    def __init__(self, models: dict[str, Served], door: Door) -> None:
        self.models, self.door = models, door
        self.batches, self.readers = Batches(), ThreadPoolExecutor(2)
        self.statuses = Counter[tuple[str, int]]()  #: Answers to requests for predictions, by model and status, ...
        self.bins, self.total = [0] * (len(SECONDS) + 1), 0.0  #: ... by their seconds, and all of these.
        self.rows = Counter[str]()  #: Rows that were classified, by model.
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
            self.statuses[self.paths.get(path, ""), status] += 1
            self.total += seconds
            self.bins[bisect_left(SECONDS, seconds)] += 1

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
            named, logits = await self.batches.classify(model, rows.x, threshold, rows.uninformative)
            self.rows[name] += len(named)
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
        return Answer(format_figures(self).encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def describe(self, _: Request) -> Answer:
        """Return the description of all addresses, as OpenAPI has it."""
        return send_json(describe_api({name: served.model for name, served in self.models.items()}))

    async def show_page(self, _: Request) -> Answer:
        """Return a page for people."""
        models = [(name, served.model) for name, served in self.models.items()]
        told = [(name, own.classes, list_columns(own), make_example(name, own)) for name, own in models]
        page, policy = format_served(told)
        return Answer(page.encode(), "text/html; charset=utf-8", policy=policy)


def read_parameters(model: Model, query: Mapping[str, str]) -> tuple[float | None, bool]:
    """Return the score up to which a row is unknown, and whether all probabilities are asked for.

    Raises:
        InputError: There is another parameter, or a value that is none, or the model cannot tell what is unknown.
    """
    for name in query:
        if name not in {"proba", "unknown"}:
            raise_input_error("query", "be of proba and unknown", repr(to_printable(name)[:20]), "Leave it out.")
    proba = query.get("proba", "0")
    if proba not in {"0", "1"}:
        raise_input_error(
            "proba", "be 0 or 1", repr(to_printable(proba)[:20]), "Pass 1 for the probabilities of all classes."
        )
    if "unknown" not in query:
        return None, proba == "1"
    try:
        rate = float(query["unknown"])
    except ValueError:
        raise_input_error(
            "unknown", "be a number between 0 and 1", repr(query["unknown"][:20]), "Pass one such as 0.05."
        )
    with renamed_arguments(**{"--unknown": "unknown"}):
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

    models = api.models
    counted = [(name_it(name, status=status), n) for (name, status), n in sorted(api.statuses.items())]
    add("requests_total", "counter", "Requests for predictions.", counted)
    add("rows_total", "counter", "Rows that were classified.", [(name_it(name), api.rows[name]) for name in models])
    add("batches_total", "counter", "Batches that they were classified in.", [("", api.batches.done)])
    add("reloads_total", "counter", "Models read again.", [(name_it(name), models[name].reloads) for name in models])
    failed = [(name_it(name), models[name].failures) for name in models]
    add("reload_failures_total", "counter", "Files that were no model.", failed)
    add("requests_in_progress", "gauge", "Requests that are being answered.", [("", api.door.busy)])
    total, bins = 0, []
    for end, n in zip([*map(str, SECONDS), "+Inf"], api.bins, strict=True):
        total += n
        bins.append((f'_bucket{{le="{end}"}}', total))
    values = [*bins, ("_sum", api.total), ("_count", total)]
    add("request_seconds", "histogram", "Seconds of requests for predictions.", values)
    return "\n".join(lines) + "\n"


def list_columns(model: Model) -> list[tuple[str, str]]:
    """Return the name and the kind of each column of a model; none where they have no names."""
    columns = () if model.encoding is None else model.encoding.columns
    return [(name, columns[at].tell() if columns else "number") for at, name in enumerate(model.columns or ())]


def describe_api(models: dict[str, Model]) -> dict[str, Any]:
    """Return the description of a server of models, as OpenAPI 3.1 has it."""
    text, cell = {"type": "string"}, {"type": ["number", "string", "boolean", "null"]}
    refused = {"description": "Refused, with a line that says why.", "content": {JSON_TYPE: {"schema": {}}}}

    def describe_object(required: Sequence[str], properties: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "required": list(required), "properties": properties}

    shares = {"type": "object", "additionalProperties": {"type": "number"}}
    likely = {"class": text, "probability": {"type": ["number", "null"]}, "probabilities": shares}
    predictions = {"type": "array", "items": describe_object(["class", "probability"], likely)}
    told = {"model": text, "predictions": predictions, "notes": {"type": "array", "items": text}}
    answer = {"schema": describe_object(["model", "predictions"], told)}
    parameters = [
        {"name": "unknown", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": 1}},
        {"name": "proba", "in": "query", "schema": {"type": "integer", "enum": [0, 1]}},
    ]
    responses = {"200": {"description": "A class for each row.", "content": {JSON_TYPE: answer}}, "4XX": refused}
    paths: dict[str, Any] = {}
    for name, model in models.items():
        width = len(find_sizes(model))
        listed = {"type": "array", "items": cell, "minItems": width, "maxItems": width}
        named = {own: {**cell, "description": kind} for own, kind in list_columns(model)}
        items = {"anyOf": [listed, *[describe_object(list(named), named)] * bool(named)]}
        content: dict[str, Any] = {kind: {"schema": text} for kind in KINDS}
        content[JSON_TYPE] = {"schema": describe_object(["rows"], {"rows": {"type": "array", "items": items}})}
        summary = f"Classify rows: {', '.join(map(str, model.classes))}"[:300]
        post: dict[str, Any] = {"summary": summary, "parameters": parameters}
        post |= {"requestBody": {"required": True, "content": content}, "responses": {**responses, "503": refused}}
        paths[f"/models/{quote(name)}/predict"] = {"post": post}
    for path, summary in (("/healthz", "Whether it answers."), ("/metrics", "Figures, as Prometheus reads them.")):
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "Yes."}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "protonet serve", "version": installed_version(DISTRIBUTION) or "0"},
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{"bearer": []}],
        "paths": paths,
    }


def make_example(name: str, model: Model) -> str:
    """Return a command that asks."""
    row: Any = {own: None for own, _ in list_columns(model)} or [0] * len(find_sizes(model))
    body = json.dumps({"rows": [row]}, ensure_ascii=False).replace("'", r"'\''")
    headers = "-H 'Authorization: Bearer TOKEN' -H 'Content-Type: application/json'"
    return f"curl -X POST 'ADDRESS/models/{quote(name)}/predict?proba=1' {headers} -d '{body}'"
