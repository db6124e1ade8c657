"""Requests and responses as types, and the OpenAPI document that is derived from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from protonet._checks import find_version
from protonet.files import Model
from protonet.server.app import CSV, JSON, Error
from protonet.server.parsing import MULTIPART, content_types, describe_columns
from protonet.tables.columns.number import MOST


class PredictQuery(Struct, forbid_unknown_fields=True):
    """Parameters of a prediction."""

    proba: Literal[0, 1] = 0
    unknown: Annotated[float, Meta(ge=0, le=1)] | None = None
    token: str = ""


class Prediction(Struct, rename={"label": "class"}):
    """The likeliest class of a row; ``unknown``, without a probability, for a row that is unlike every class."""

    label: str
    probability: float | None
    probabilities: dict[str, float] | UnsetType = UNSET


class PredictResponse(Struct):
    """A prediction for each row, and notes about the rows that a person should read."""

    model: str
    predictions: list[Prediction]
    notes: list[str] | UnsetType = UNSET


class Status(Struct):
    """Whether the server is alive, or ready."""

    status: Literal["ok"] = "ok"


class Column(Struct):
    """A column of a model and what it holds."""

    name: str
    kind: str


class ModelInfo(Struct):
    """What a model is, and what it takes."""

    name: str
    classes: list[str]
    columns: list[Column]
    features: int
    content_types: list[str]
    held_out: dict[str, Any] | None
    reloads: int


class ModelList(Struct):
    """The models of the server."""

    models: list[ModelInfo]


class Tensor(Struct, omit_defaults=True):
    """A tensor of KServe's protocol: its data flat, or nested as its shape."""

    name: str
    shape: list[Annotated[int, Meta(ge=0, le=2**31)]]
    datatype: str
    data: list[Any] | UnsetType = UNSET
    parameters: dict[str, Any] | UnsetType = UNSET


class OutputName(Struct):
    """An output that is asked for."""

    name: str
    parameters: dict[str, Any] | UnsetType = UNSET


class InferRequest(Struct):
    """One input for all columns, [rows, columns], or one for each column, [rows] or [rows, 1], by its name."""

    inputs: list[Tensor]
    id: str | UnsetType = UNSET
    parameters: dict[str, Any] | UnsetType = UNSET
    outputs: list[OutputName] | UnsetType = UNSET


class InferResponse(Struct):
    """The class, its probability and the probabilities of all classes, in the model's order."""

    model_name: str
    outputs: list[Tensor]
    id: str | UnsetType = UNSET


class ServerMetadata(Struct):
    """The server, as KServe's protocol has it."""

    name: str
    version: str
    extensions: list[str]


class ModelMetadata(Struct):
    """A model, as KServe's protocol has it."""

    name: str
    platform: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class Live(Struct):
    """Whether the server is alive."""

    live: bool = True


class Ready(Struct):
    """Whether the server, or a model, is ready."""

    ready: bool = True


#: Operations without a body: path, operation, summary, response, whether a token is needed.
READS: tuple[tuple[str, str, str, type[Struct] | str, bool], ...] = (
    ("/healthz", "health", "Whether the server is alive", Status, False),
    ("/readyz", "readiness", "Whether the server takes requests", Status, False),
    ("/metrics", "metrics", "Metrics in the text format of Prometheus", "text/plain", True),
    ("/models", "list_models", "All models", ModelList, True),
    ("/models/{name}", "get_model", "One model", ModelInfo, True),
    ("/v2", "server_metadata", "The server (KServe)", ServerMetadata, True),
    ("/v2/health/live", "server_live", "Whether the server is alive (KServe)", Live, False),
    ("/v2/health/ready", "server_ready", "Whether the server takes requests (KServe)", Ready, False),
    ("/v2/models/{name}", "model_metadata", "One model (KServe)", ModelMetadata, True),
    ("/v2/models/{name}/ready", "model_ready", "Whether a model is ready (KServe)", Ready, True),
)
#: Error statuses beside those that every operation with a token may have.
ERRORS = {
    "400": "The request does not fit",
    "401": "No token, or a wrong one",
    "403": "A page of another origin",
    "404": "No such path or model",
    "405": "Another method is needed",
    "413": "The body is too large",
    "415": "The body is of another type",
    "429": "Too many requests at a time",
    "431": "The head of the request is too large",
    "503": "No answer in time, or the server stops",
}


def openapi(models: Mapping[str, Model]) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of a server of models."""
    types = [
        Error,
        PredictResponse,
        InferRequest,
        InferResponse,
        *{each[3] for each in READS if each[3] != "text/plain"},
    ]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refs = dict(zip(types, references, strict=True))
    error = {"content": {JSON: {"schema": refs[Error]}}}
    errors = {status: {"description": text, **error} for status, text in ERRORS.items()}

    def operation(name: str, summary: str, content: dict[str, Any], *, secured: bool = True) -> dict[str, Any]:
        responses = {"200": {"description": "Success", "content": content}, **errors}
        if not secured:
            responses = {
                status: responses[status] for status in ("200", "400", "403", "404", "405", "413", "415", "503")
            }
        return {"operationId": name, "summary": summary, "security": [{"bearer": []}] * secured, "responses": responses}

    paths: dict[str, Any] = {}
    names = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": list(models)}}
    for path, name, summary, result, secured in READS:
        content = (
            {result: {"schema": {"type": "string"}}} if isinstance(result, str) else {JSON: {"schema": refs[result]}}
        )
        get = operation(name, summary, content, secured=secured)
        paths[path] = {"get": get, **({"parameters": [names]} if "{name}" in path else {})}
    parameters = [
        {"name": "proba", "in": "query", "schema": {"type": "integer", "enum": [0, 1]}},
        {"name": "unknown", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": 1}},
    ]
    results = {JSON: {"schema": refs[PredictResponse]}, CSV.partition(";")[0]: {"schema": {"type": "string"}}}
    for name, model in models.items():
        safe, text = re.sub(r"\W", "_", name), f"of {name}: {', '.join(map(str, model.classes))}"[:300]
        rejects = "scores" not in model.metadata  # then no threshold is known
        post = operation(f"predict_{safe}", f"Predict classes {text}", results)
        post |= {"parameters": parameters[: 1 if rejects else 2], "requestBody": body(request_content(model))}
        paths[f"/models/{quote(name)}/predict"] = {"post": post}
        infer = operation(f"infer_{safe}", f"Predict classes {text} (KServe)", {JSON: {"schema": refs[InferResponse]}})
        infer["requestBody"] = body({JSON: {"schema": refs[InferRequest]}})
        paths[f"/v2/models/{quote(name)}/infer"] = {"post": infer}
    return {
        "openapi": "3.1.0",
        "info": {"title": "protonet serve", "version": find_version("protonet") or "0"},
        "security": [{"bearer": []}],
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def body(content: dict[str, Any]) -> dict[str, Any]:
    """Describe a required body."""
    return {"required": True, "content": content}


def request_content(model: Model) -> dict[str, Any]:
    """Describe the bodies that a model takes, by media type."""
    kinds = dict(describe_columns(model))
    cells = [cell_schema(model, number) for number in range(len(kinds) or int(model.network.encoder.input_dim))]  # type: ignore[arg-type]
    listed: dict[str, Any] = {"type": "array", "prefixItems": cells, "minItems": len(cells), "maxItems": len(cells)}
    if len(cells) > 64 and not kinds:
        listed = {**listed, "items": cells[0]}
        del listed["prefixItems"]
    named = {name: {**cell, "description": kind} for (name, kind), cell in zip(kinds.items(), cells, strict=False)}
    row = {"anyOf": [listed, *[{"type": "object", "required": list(named), "properties": named}] * bool(named)]}
    rows = {"type": "array", "items": row, "minItems": 1}
    binary: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
    content = dict.fromkeys(content_types(model), binary)
    content[JSON] = {"schema": {"type": "object", "required": ["rows"], "properties": {"rows": rows}}}
    file = {"type": "object", "required": ["file"], "properties": {"file": binary["schema"]}}
    return {**content, MULTIPART: {"schema": file}}


def cell_schema(model: Model, number: int) -> dict[str, Any]:
    """Describe the cells of a column."""
    column = None if model.encoding is None else model.encoding.columns[number]
    limits = {"minimum": -MOST, "maximum": MOST}
    if column is None:
        return {"type": "number", **limits}
    if column.takes == "picture":
        return {"type": "string", "contentEncoding": "base64"}
    if column.kind == "number":
        return {"type": ["number", "null"], **limits}
    return {"type": ["string", "null"]}
