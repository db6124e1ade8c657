"""Requests and responses as types, and the OpenAPI document that is derived from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from protonet.commands.models import MAX_SCALE
from protonet.errors import DISTRIBUTION, installed_version
from protonet.files import Model
from protonet.server.app import CSV, JSON, Error
from protonet.server.parsing import MULTIPART, describe_columns, picture_columns
from protonet.tables.columns.numeric import MAX_FLOAT32


class PredictQuery(Struct, forbid_unknown_fields=True):
    """Parameters of a prediction."""

    proba: Literal[0, 1] = 0
    unknown: Annotated[float, Meta(gt=0, lt=1)] | UnsetType = UNSET
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
    """A model and its inputs."""

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
    data: list[Any]
    parameters: dict[str, Any] | UnsetType = UNSET


class TensorMetadata(Struct):
    """A tensor of a model; -1 in its shape is the number of rows."""

    name: str
    shape: list[int]
    datatype: str


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
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Live(Struct):
    """Whether the server is alive."""

    live: bool = True


class Ready(Struct):
    """Whether the server, or a model, is ready."""

    ready: bool = True


#: Outputs of KServe's protocol.
OUTPUTS = ("class", "probability", "probabilities")
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
        *{operation[3] for operation in READS if operation[3] != "text/plain"},
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
    results = {JSON: {"schema": refs[PredictResponse]}, CSV.partition(";")[0]: {"schema": {"type": "string"}}}
    for name, model in models.items():
        safe, text = re.sub(r"\W", "_", name), f"of {name}: {', '.join(map(str, model.classes))}"[:300]
        parameters: list[dict[str, Any]] = [{"name": "proba", "in": "query", "schema": {"enum": [0, 1]}}]
        if limits := unknown_limits(model):
            schema = {"type": "number", "minimum": limits[0], "maximum": limits[1]}
            parameters.append({"name": "unknown", "in": "query", "schema": schema})
        post = operation(f"predict_{safe}", f"Predict classes {text}", results)
        post |= {"parameters": parameters, "requestBody": body(request_content(model))}
        paths[f"/models/{quote(name)}/predict"] = {"post": post}
        infer = operation(f"infer_{safe}", f"Predict classes {text} (KServe)", {JSON: {"schema": refs[InferResponse]}})
        infer["requestBody"] = body({JSON: {"schema": infer_schema(model)}})
        paths[f"/v2/models/{quote(name)}/infer"] = {"post": infer}
    return {
        "openapi": "3.1.0",
        "info": {"title": "protonet serve", "version": installed_version(DISTRIBUTION) or "0"},
        "security": [{"bearer": []}],
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def unknown_limits(model: Model) -> tuple[float, float] | None:
    """Return the least and the largest ``unknown`` that held-out rows resolve; None without such rows."""
    scores = model.metadata.get("scores")
    n = len(scores) if isinstance(scores, list) else 0
    return (1 / (n + 1), n / (n + 1)) if n else None


def body(content: dict[str, Any]) -> dict[str, Any]:
    """Describe a required body."""
    return {"required": True, "content": content}


def request_content(model: Model) -> dict[str, Any]:
    """Describe the bodies that a model takes, by media type."""
    columns, pictures = dict(describe_columns(model)), picture_columns(model)
    cells = cell_schemas(model)
    listed: dict[str, Any] = {"type": "array", "prefixItems": cells, "minItems": len(cells), "maxItems": len(cells)}
    if not columns:
        listed = {"type": "array", "items": cells[0], "minItems": len(cells), "maxItems": len(cells)}
    named = {name: {**cell, "description": kind} for (name, kind), cell in zip(columns.items(), cells, strict=False)}
    row = {"anyOf": [listed, *[{"type": "object", "required": list(named), "properties": named}] * bool(named)]}
    rows = {
        "type": "object",
        "required": ["rows"],
        "properties": {"rows": {"type": "array", "items": row, "minItems": 1}},
    }
    file = {"type": "object", "required": ["file"], "properties": {"file": rows}}
    form = {"schema": file, "encoding": {"file": {"contentType": JSON}}}
    content: dict[str, Any] = {JSON: {"schema": rows}, MULTIPART: form}
    if columns and not any(pictures):
        header = ",".join(map(re.escape, columns))
        line = ",".join("-?[0-9]{1,6}" if cell["type"] != ["string", "null"] else "[0-9A-Za-z]{0,9}" for cell in cells)
        content[CSV.partition(";")[0]] = {"schema": {"type": "string", "pattern": f"^{header}\n({line}\n)+$"}}
    elif not columns:
        content["application/x-npy"] = {"schema": {"type": "string", "format": "binary"}}
    if pictures == [True]:
        content["image/*"] = {"schema": {"type": "string", "format": "binary"}}
    return content


def infer_schema(model: Model) -> dict[str, Any]:
    """Describe a request of KServe's protocol for one row; a schema cannot tie the data's size to the shape."""
    cells = cell_schemas(model)
    numbers = all(cell["type"] != ["string", "null"] for cell in cells)
    types = sorted({str(cell["type"]) for cell in cells})
    item = cells[0] if len(types) == 1 else {"type": ["number", "null"]}
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"type": "string"},
            "shape": {
                "type": "array",
                "prefixItems": [{"const": 1}, {"const": len(cells)}],
                "minItems": 2,
                "maxItems": 2,
            },
            "datatype": {"enum": ["FP32", "FP64"] if numbers else ["BYTES"]},
            "data": {"type": "array", "items": item, "minItems": len(cells), "maxItems": len(cells)},
            "parameters": {"type": "object"},
        },
    }
    output = {"type": "object", "required": ["name"], "properties": {"name": {"enum": list(OUTPUTS)}}}
    return {
        "type": "object",
        "description": "One row, as an example: [rows, columns] is the shape of several, or a tensor for each column.",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "inputs": {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
            "outputs": {"type": "array", "items": output},
        },
    }


def cell_schemas(model: Model) -> list[dict[str, Any]]:
    """Describe the cells of each column: texts, and how far numbers may be from those of fit."""
    encoder = model.network.encoder
    far = float(encoder.scale) * MAX_SCALE  # type: ignore[arg-type]
    if model.encoding is None:
        limit = min(far, MAX_FLOAT32)
        return [{"type": "number", "minimum": -limit, "maximum": limit}] * int(encoder.input_dim)  # type: ignore[arg-type]
    cells: list[dict[str, Any]] = []
    for column in model.encoding.columns:
        limit = min(far * getattr(column, "scale", 1.0), MAX_FLOAT32)
        number = {"type": "number" if column.plain else ["number", "null"], "minimum": -limit, "maximum": limit}
        text: dict[str, Any] = {"type": ["string", "null"]}
        picture = {"type": "string", "contentEncoding": "base64"}
        cells.append(picture if column.modality == "picture" else number if column.kind == "number" else text)
    return cells
