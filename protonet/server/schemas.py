"""Types of the requests and responses of ``serve``, and the OpenAPI document that is derived from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, get_type_hints
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from protonet._io import JsonDict
from protonet.errors import DISTRIBUTION_NAME, installed_version
from protonet.pipeline import TablePipeline
from protonet.server.app import CSV_TYPE, JSON_TYPE, TOKEN_FREE_PATHS, Error
from protonet.server.parsing import MULTIPART_TYPE, Tensor, compute_max_column_magnitudes

#: The version of the package.
SERVER_VERSION = installed_version(DISTRIBUTION_NAME) or "0"


class PredictQuery(
    Struct, forbid_unknown_fields=True, rename={"return_probabilities": "proba", "false_rejection_rate": "unknown"}
):
    """Query parameters of a request for predictions."""

    return_probabilities: Literal[0, 1] = 0  #: 1 to return the probabilities of all classes.
    false_rejection_rate: Annotated[float, Meta(gt=0, lt=1)] | UnsetType = UNSET
    """Fraction of rows of known classes that may be rejected as unknown; UNSET to reject no row."""
    token: str = ""  #: The access token, if it is not in a header.


class Prediction(Struct, rename={"label": "class"}):
    """The most probable class of a row; or ``unknown``, without a probability, if the row is unlike every class."""

    label: str
    probability: float | None
    probabilities: dict[str, float] | UnsetType = UNSET


class PredictResponse(Struct):
    """The prediction of each row, and notes about the rows, such as the number of missing values."""

    model: str
    predictions: list[Prediction]
    notes: list[str] | UnsetType = UNSET


class Column(Struct, rename={"column_type": "kind"}):
    """The name of a column of a model, and the type of its cells."""

    name: str
    column_type: str


class ModelInfo(Struct, rename={"n_features": "features", "held_out_metrics": "held_out", "n_reloads": "reloads"}):
    """A description of a model: its classes, columns, accepted media types and cross-validation metrics."""

    name: str
    classes: list[str]
    columns: list[Column]
    n_features: int  #: Number of features after the columns are encoded.
    content_types: list[str]  #: Accepted media types of a body.
    held_out_metrics: JsonDict | None  #: Metrics of the cross-validation, if the model was cross-validated.
    n_reloads: int  #: How often the model's file was replaced and loaded again.


class ModelList(Struct):
    """The models of the server."""

    models: list[ModelInfo]


class TensorMetadata(Struct):
    """Name, shape and data type of an input or output tensor; -1 in the shape is the number of rows."""

    name: str
    shape: list[int]
    datatype: str


class InferResponse(Struct):
    """Response to a KServe request, with output tensors: predicted classes, their probabilities, all probabilities."""

    model_name: str
    outputs: list[Tensor]
    id: str | UnsetType = UNSET
    model_version: str | UnsetType = UNSET


class ServerMetadata(Struct):
    """The server's metadata in KServe's protocol."""

    name: str
    version: str
    extensions: list[str]


class ModelMetadata(Struct):
    """A model's metadata in KServe's protocol."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfig(Struct):
    """Name, data type and dimensions of a tensor in a model's configuration; -1 is the number of rows."""

    name: str
    data_type: str
    dims: list[int]


class ModelConfig(Struct, rename={"inputs": "input", "outputs": "output"}):
    """A model's configuration in Triton's extension of KServe's protocol; the shapes include the rows (size 0)."""

    name: str
    platform: str
    max_batch_size: int
    inputs: list[TensorConfig]
    outputs: list[TensorConfig]


class Live(Struct):
    """Whether the server is alive."""

    live: bool = True


class Ready(Struct):
    """Whether the server, or a model, is ready."""

    ready: bool = True


#: Data types of the output tensors in KServe's protocol, by the tensors' names.
OUTPUT_DATATYPES = {"class": "BYTES", "probability": "FP64", "probabilities": "FP64"}
#: Names of the data types of tensors in a model's configuration.
CONFIG_DATATYPES = {"BYTES": "TYPE_STRING", "FP64": "TYPE_FP64"}
#: By HTTP error status, a description, and whether the error can occur on paths that need no token.
ERROR_STATUS_DESCRIPTIONS = {
    "400": ("The request does not fit", True),
    "401": ("No token, or a wrong one", False),
    "403": ("A page of another origin", True),
    "404": ("No such path or model", True),
    "405": ("Another method is needed", True),
    "413": ("The body is too large", True),
    "415": ("The body is of another type", True),
    "429": ("Too many requests at a time", False),
    "431": ("The head of the request is too large", False),
    "503": ("No answer in time, or the server stops", True),
}
#: Regular expressions of example CSV cells, by the type in the JSON schema of the cell; dates are under ``anyOf``.
EXAMPLE_CELL_PATTERNS = {
    "number": "-?[0-9]{1,6}",
    "string": "[0-9A-Za-z]{0,9}",
    "anyOf": "20[0-9]{2}-(0[1-9]|1[0-2])-[01][1-9]",
}
#: JSON types that are accepted in a cell of a text or category column.
CELL_JSON_TYPES = ["string", "number", "boolean", "null"]


def build_openapi(models: Mapping[str, TablePipeline], gets: Mapping[str, Callable[..., Struct | str]]) -> JsonDict:
    """Build the OpenAPI 3.1 document of a server, given its models and the handlers of GET requests by path.

    The docstring and return type of a handler describe its response.
    """
    results = {path: get_type_hints(get)["return"] for path, get in gets.items()}
    types = list(dict.fromkeys([Error, PredictResponse, InferResponse, *results.values()]))
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    content = {kind: {JSON_TYPE: {"schema": schema}} for kind, schema in zip(types, references, strict=True)}
    content[str] = {"text/plain": {"schema": {"type": "string"}}}

    def operation(name: str, summary: str, result: JsonDict, *, secured: bool = True) -> JsonDict:
        errors = {
            status: {"description": text, "content": content[Error]}
            for status, (text, always) in ERROR_STATUS_DESCRIPTIONS.items()
            if secured or always
        }
        responses = {"200": {"description": "Success", "content": result}, **errors}
        return {"operationId": name, "summary": summary, "security": [{"bearer": []}] * secured, "responses": responses}

    paths: JsonDict = {}
    names = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": list(models)}}
    for path, get in gets.items():
        summary, secured = str(get.__doc__).partition(".")[0], path not in TOKEN_FREE_PATHS
        described = operation(re.sub(r"\W+", "_", path).strip("_"), summary, content[results[path]], secured=secured)
        paths[path] = {"get": described, **({"parameters": [names]} if "{name}" in path else {})}
    predictions = content[PredictResponse] | {CSV_TYPE.partition(";")[0]: {"schema": {"type": "string"}}}
    for name, model in models.items():
        safe, text = re.sub(r"\W", "_", name), f"of {name}: {', '.join(map(str, model.classes))}"[:300]
        parameters: list[JsonDict] = [{"name": "proba", "in": "query", "schema": {"enum": [0, 1]}}]
        if limits := false_rejection_limits(model):
            schema = {"type": "number", "minimum": limits[0], "maximum": limits[1]}
            parameters.append({"name": "unknown", "in": "query", "schema": schema})
        body = {"required": True, "content": make_body_schemas(model)}
        post = operation(f"predict_{safe}", f"Predict classes {text}", predictions)
        paths[f"/models/{quote(name)}/predict"] = {"post": post | {"parameters": parameters, "requestBody": body}}
        if not model.has_pictures:
            body = {"required": True, "content": {JSON_TYPE: {"schema": make_infer_schema(model)}}}
            infer = operation(f"infer_{safe}", f"Predict classes {text} (KServe)", content[InferResponse])
            paths[f"/v2/models/{quote(name)}/infer"] = {"post": infer | {"requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "protonet serve", "version": SERVER_VERSION},
        "security": [{"bearer": []}],
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def false_rejection_limits(model: TablePipeline) -> tuple[float, float] | None:
    """Compute the minimal and the maximal false-rejection rate that the number of a model's held-out rows allows.

    The rate is the query parameter ``unknown``. Return None if the model has no scores of held-out rows.
    """
    n = len(model.metadata.known_scores)
    return (1 / (n + 1), n / (n + 1)) if n else None


def make_object_schema(**properties: object) -> JsonDict:
    """Make the JSON schema of an object whose properties are all required."""
    return {"type": "object", "required": list(properties), "properties": properties}


def make_array_schema(*items: JsonDict) -> JsonDict:
    """Make the JSON schema of an array of fixed length, given the schema of each item."""
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def make_body_schemas(model: TablePipeline) -> JsonDict:
    """Make the JSON schema of each kind of request body that a model accepts, by media type."""
    columns, cells = summarize_model_columns(model), make_cell_schemas(model)
    row = make_array_schema(*cells)
    if columns:
        named = {name: cell | {"description": columns[name]} for name, cell in zip(columns, cells, strict=True)}
        row = {"anyOf": [row, make_object_schema(**named) | {"additionalProperties": {"type": CELL_JSON_TYPES}}]}
    rows = make_object_schema(rows={"type": "array", "items": row, "minItems": 1})
    form = {
        "schema": make_object_schema(file=rows) | {"additionalProperties": False},
        "encoding": {"file": {"contentType": JSON_TYPE}},
    }
    content: JsonDict = {JSON_TYPE: {"schema": rows}, MULTIPART_TYPE: form}
    binary = {"schema": {"type": "string", "format": "binary"}}
    if model.column_modalities == ["picture"]:
        content["image/*"] = binary
    elif not columns:
        content["application/x-npy"] = binary
    elif not model.has_pictures:
        line = ",".join(EXAMPLE_CELL_PATTERNS["anyOf" if "anyOf" in cell else cell["type"][0]] for cell in cells)
        text = {"type": "string", "pattern": f"^{','.join(map(re.escape, columns))}\n({line}\n)+$"}
        content[CSV_TYPE.partition(";")[0]] = {"schema": text}
    return content


def make_infer_schema(model: TablePipeline) -> JsonDict:
    """Make the JSON schema of a KServe request for predictions of one row.

    It is an example: for several rows, a schema cannot relate the length of ``data`` to ``shape``.
    """
    text, inputs = {"type": ["string", "null"]}, list_input_tensors(model)
    cells = [text if cell == {"type": CELL_JSON_TYPES} else cell for cell in make_cell_schemas(model)]
    tensors = []
    for index, tensor in enumerate(inputs):
        named = len(tensor.shape) == 1
        items = cells[index : index + 1] if named else cells
        types = ["BYTES"] if tensor.datatype == "BYTES" else ["FP32", "FP64"]
        shapes = [[1], [1, 1]] if named else [[1, len(cells)]]
        name: JsonDict = {"const": tensor.name} if named else {"type": "string"}
        data = make_array_schema(*items)
        schema = make_object_schema(name=name, shape={"enum": shapes}, datatype={"enum": types}, data=data)
        schema["properties"] |= {"parameters": {"type": "object"}}
        tensors.append(schema)
    request = make_object_schema(inputs=make_array_schema(*tensors))
    output = make_object_schema(name={"enum": list(OUTPUT_DATATYPES)})
    request["properties"] |= {"id": {"type": "string"}, "parameters": {"type": "object"}}
    request["properties"] |= {"outputs": {"type": "array", "items": output}}
    return request | {"description": "One row, as an example: the first number of each shape is that of the rows."}


def list_input_tensors(model: TablePipeline) -> list[TensorMetadata]:
    """List a model's input tensors in KServe's protocol: one per column, or a single one if columns have no names."""
    inputs = [
        TensorMetadata(name, [-1], "FP64" if column.column_type == "number" else "BYTES")
        for name, column in zip(model.columns or (), model.fitted_columns, strict=False)
    ]
    return inputs or [TensorMetadata("x", [-1, len(model.column_modalities)], "FP64")]


def make_cell_schemas(model: TablePipeline) -> list[JsonDict]:
    """Make the JSON schema of a cell for each column of a model, in order."""
    cells: list[JsonDict] = []
    number = {"type": ["number"] if model.encoding is None else ["number", "null"]}
    date = {"anyOf": [{"type": ["string", "null"], "format": "date"}, {"const": ""}]}
    picture = {"type": "string", "contentEncoding": "base64", "format": "picture"}
    for column, limit in zip(model.fitted_columns, compute_max_column_magnitudes(model), strict=True):
        schemas: JsonDict = {"number": number | {"minimum": -limit, "maximum": limit}, "date": date, "picture": picture}
        cells.append(schemas.get(column.modality or column.column_type, {"type": CELL_JSON_TYPES}))
    return cells


def summarize_model_columns(model: TablePipeline) -> dict[str, str]:
    """Return the summary of each column's type by column name; the dict is empty if the columns have no names."""
    return {name: column.summary() for name, column in zip(model.columns or (), model.fitted_columns, strict=False)}
