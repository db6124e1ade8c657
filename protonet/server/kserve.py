"""KServe's inference protocol, version 2, over REST: health, metadata, and predictions from tensors.

Source: https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protonet._text import to_printable
from protonet.errors import DISTRIBUTION, installed_version, raise_input_error
from protonet.files import Model
from protonet.server.app import json_response
from protonet.server.batching import Result
from protonet.server.hot_model import HotModel
from protonet.server.parsing import (
    MAX_ROWS,
    Rows,
    check_count,
    decode_json,
    describe_columns,
    encode,
    picture_columns,
    to_column,
)
from protonet.server.schemas import (
    OUTPUTS,
    InferRequest,
    InferResponse,
    Live,
    ModelMetadata,
    Ready,
    ServerMetadata,
    Tensor,
    TensorMetadata,
)

REQUEST = msgspec.json.Decoder(InferRequest)
#: The types of the outputs.
OUTPUT_TYPES = ("BYTES", "FP64", "FP64")
#: Types of tensors that are read.
DATATYPES = (
    "BOOL",
    "BYTES",
    *(f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)),
    "FP32",
    "FP64",
)


@dataclass
class InferApi:
    """The routes of the protocol.

    Args:
        get: Gets a model by name.
        check_ready: Raises an HTTPException if the server stops.
        classify: Classifies the rows of a request for a model.
    """

    get: Callable[[str], HotModel]
    check_ready: Callable[[], None]
    classify: Callable[[str, Model, Rows, float | None], Awaitable[Result]]

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v2/models/{name}/infer", self.infer, methods=["POST"]),
            Route("/v2", self.server_metadata),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/models/{name}", self.model_metadata),
            Route("/v2/models/{name}/ready", self.model_ready),
        ]

    async def live(self, _: Request) -> Response:
        """Say that the process is alive."""
        return json_response(Live())

    async def ready(self, _: Request) -> Response:
        """Say that requests are taken."""
        self.check_ready()
        return json_response(Ready())

    async def model_ready(self, request: Request) -> Response:
        """Respond if the model exists."""
        self.get(request.path_params["name"])
        return await self.ready(request)

    async def server_metadata(self, _: Request) -> Response:
        """Describe the server."""
        return json_response(ServerMetadata("protonet", installed_version(DISTRIBUTION) or "0", []))

    async def model_metadata(self, request: Request) -> Response:
        """Describe a model: one input per column, or one for all if the columns have no names."""
        name = request.path_params["name"]
        model = self.get(name).model
        columns = model.encoding.columns if model.encoding is not None else ()
        inputs = [
            TensorMetadata(column, [-1], "FP64" if not columns or columns[at].kind == "number" else "BYTES")
            for at, (column, _) in enumerate(describe_columns(model))
        ] or [TensorMetadata("x", [-1, int(model.network.encoder.input_dim)], "FP64")]  # type: ignore[arg-type]
        shapes = ([-1], [-1], [-1, len(model.classes)])
        outputs = list(map(TensorMetadata, OUTPUTS, shapes, OUTPUT_TYPES))
        return json_response(ModelMetadata(name, "protonet", inputs, outputs))

    async def infer(self, request: Request) -> Response:
        """Predict the classes of rows that come as tensors."""
        name = request.path_params["name"]
        model = self.get(name).model
        if "inference-header-content-length" in request.headers:
            raise HTTPException(400, "`body` must be JSON: the binary tensor extension is not supported.")
        body = decode_json(await request.body(), REQUEST)
        rows = parse_tensors(model, body.inputs)
        named, logits = await self.classify(name, model, rows, None)
        probabilities = [[float(f"{value:.6g}") for value in row] for row in logits.softmax(dim=1).tolist()]
        n, k = len(named), len(model.classes)
        data: list[list[Any]] = [
            [label for label, _ in named],
            [float(value) for _, value in named],
            [p for row in probabilities for p in row],
        ]
        outputs = list(map(Tensor, OUTPUTS, ([n], [n], [n, k]), OUTPUT_TYPES, data))
        if body.outputs:
            names = [output.name for output in body.outputs]
            if not set(names) <= set(OUTPUTS):
                raise_input_error(
                    "outputs", f"be of {', '.join(OUTPUTS)}", ", ".join(map(to_printable, names))[:80], "Name those."
                )
            outputs = [outputs[OUTPUTS.index(name)] for name in names]
        return json_response(InferResponse(name, outputs, body.id))


def parse_tensors(model: Model, inputs: list[Tensor]) -> Rows:
    """Parse rows from one tensor of all columns, or one per column.

    Raises:
        InputError: Tensors that do not fit the model.
    """
    if any(picture_columns(model)):
        raise_input_error(
            "inputs", "be for a model without pictures", "one with pictures", "Send them to /models/NAME/predict."
        )
    names = list(model.columns or ())
    width = len(names) or int(model.network.encoder.input_dim)  # type: ignore[arg-type]
    by_name = {tensor.name: tensor for tensor in inputs}
    if len(inputs) == 1 and len(inputs[0].shape) == 2 and (width > 1 or inputs[0].name not in names):
        (tensor,) = inputs
        if tensor.shape[1] != width:
            raise_input_error(
                "inputs", f"have shape [rows, {width}]", tensor.shape, "Send all columns of the model, in its order."
            )
        cells = read_data(tensor)
        columns = [cells[at::width] for at in range(width)]
    else:
        missing = [name for name in names if name not in by_name]
        if missing or not names or len(by_name) < len(inputs):
            got = ", ".join(to_printable(name) for name in by_name)[:80] or "none"
            expected = ", ".join(names)[:200] or f"one tensor of shape [rows, {width}]"
            raise_input_error("inputs", f"hold each of {expected} once", got, "Ask /v2/models/NAME for its inputs.")
        columns = [read_data(by_name[name]) for name in names]
        if {len(column) for column in columns} != {len(columns[0])} or any(len(by_name[n].shape) > 2 for n in names):
            raise_input_error(
                "inputs", "have shape [rows] or [rows, 1], each the same rows", "others", "Send one cell per row."
            )
    if not columns or not columns[0]:
        raise_input_error("inputs", "hold rows", "none", "Send one at least.")
    check_count(len(columns[0]))
    return encode(model, [to_column(column) for column in columns], len(columns[0]))


def read_data(tensor: Tensor) -> list[Any]:
    """Return the elements of a tensor, flat; NaN cannot be sent, null is a missing value.

    Raises:
        InputError: An unknown type, or data of another type or shape.
    """
    if tensor.datatype not in DATATYPES:
        raise_input_error(
            "datatype", f"be one of {', '.join(DATATYPES)}", to_printable(tensor.datatype)[:20], "Convert the tensor."
        )
    data = tensor.data
    for _ in tensor.shape:
        if data and all(isinstance(item, list) for item in data):
            data = [cell for item in data for cell in item]
    kinds: tuple[type, ...] = {"BOOL": (bool,), "BYTES": (str,)}.get(tensor.datatype, (int, float))
    wrong = [
        cell
        for cell in data
        if cell is not None and (not isinstance(cell, kinds) or (kinds[0] is int and isinstance(cell, bool)))
    ]
    size = math.prod(tensor.shape) if len(tensor.shape) <= 2 else -1
    if size != len(data) or wrong or (tensor.shape and tensor.shape[0] > MAX_ROWS):
        got = f"{len(data)} elements" + (f", such as {to_printable(wrong[0])[:20]!r}" if wrong else "")
        raise_input_error(
            "data",
            f"be {tensor.datatype} of shape {tensor.shape[:8]}",
            f"{got} in {to_printable(tensor.name)[:40]}",
            "Correct it.",
        )
    return data
