"""``protonet serve``: predictions over HTTP, descriptions of models, health, metrics and documentation.

A replaced model file is loaded again, and rows of concurrent requests are classified together.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, TextIO, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np
import torch
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from protonet._io import read_stamp, remove_stale_server_folders
from protonet._text import plural, to_printable
from protonet.commands import predict
from protonet.commands.options import ServeOptions
from protonet.errors import UserError, raise_input_error
from protonet.pipeline import TablePipeline
from protonet.server import app, parsing, schemas
from protonet.server.access import AccessPolicy, make_access_policy
from protonet.server.batches import MAX_BATCH_ROWS, MAX_ENCODED_ROWS, Classification, RequestBatcher, SliceEncoder
from protonet.ui.html import format_page
from protonet.ui.text import format_csv

ParsedT = TypeVar("ParsedT")
#: The version of each model in KServe's protocol: the file that was loaded last.
MODEL_VERSION = "1"


@dataclass
class ReloadableModel:
    """A served model, which is loaded again when its file is replaced (hot reload)."""

    path: Path  #: The file of the model.
    representation: Sequence[str] | None  #: Names of the encoders of texts and pictures, as typed by the user.
    n_reloads: int = 0  #: How often the file was loaded again.
    n_failed_reloads: int = 0  #: How often the file was replaced by one that is not a model.
    model: TablePipeline = field(init=False)  #: The model that was loaded last.

    def __post_init__(self) -> None:
        self._stamp = read_stamp(self.path)
        self.model = self._load()

    def _load(self) -> TablePipeline:
        """Load the model; its encoders do not cache the texts and pictures of requests."""
        model = TablePipeline.load(self.path, argument="model")
        model = model.with_loaded_encoders(self.representation, show_progress=False, use_cache=False)
        for column in model.fitted_columns:
            if column.modality == "text" and column.encoder_record is not None:
                column.encode(np.array(["a"], object))  # the network is loaded now, and not by the first request
        return model

    def reload_if_replaced(self) -> None:
        """Load the file again if it was replaced; if that fails, keep the previous model and print a line on stderr."""
        stamp = read_stamp(self.path)
        if not stamp or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.model = self._load()
            self.n_reloads += 1
        except (UserError, OSError) as error:
            self.n_failed_reloads += 1
            message = " ".join(str(error).split())
            print(f"protonet serve: {message} The previous model stays in use.", file=sys.stderr)


def load_models(paths: Sequence[Path], representation: Sequence[str] | None) -> dict[str, ReloadableModel]:
    """Load models, and return them by name; the name of a model is the name of its file without suffix."""
    models: dict[str, ReloadableModel] = {}
    for path in paths:
        if path.stem in models:
            raise_input_error("model", "have a name of its own", f"{path.name} twice", "Rename a file.")
        models[path.stem] = ReloadableModel(path, representation)
    return models


@contextmanager
def reload_in_background(models: Sequence[ReloadableModel]) -> Iterator[None]:
    """Check in a thread whether model files were replaced, and reload them, until the context is left."""
    stopped = Event()

    # Number of seconds between two checks whether model files were replaced.
    reload_check_seconds = 0.25

    def check_files() -> None:
        while not stopped.wait(reload_check_seconds):
            for model in models:
                model.reload_if_replaced()

    thread = Thread(target=check_files, daemon=True, name="reload")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(1)  # it may be loading a model


#: Maximal bytes of a JSON body that is parsed on the event loop. Larger ones are parsed in a thread of their own, so
#: that small ones do not wait for them.
MAX_EVENT_LOOP_BODY_BYTES = 2**16
#: A function of the parameters in the path of a GET request that returns the content of the response.
GetHandler = Callable[..., msgspec.Struct | str]


class PredictionApi:
    """The routes of the command ``serve``: predictions, descriptions of models, health, metrics and documentation."""

    def __init__(self, models: dict[str, ReloadableModel], policy: AccessPolicy) -> None:
        self.models, self.policy = models, policy
        self.batcher, self.parsers, self.large_parsers = RequestBatcher(), ThreadPoolExecutor(2), ThreadPoolExecutor(1)
        # As many threads as slices may be encoded together: each waits with the slice of one request.
        self.encoder, self.encoding_parsers = SliceEncoder(), ThreadPoolExecutor(MAX_ENCODED_ROWS)
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("protonet_requests", "Requests for predictions", ["model", "status"], registry=registry)
        self.rows = Counter("protonet_rows", "Rows classified", ["model"], registry=registry)
        self.seconds = Histogram("protonet_request_seconds", "Seconds of a request for predictions", registry=registry)
        active = Gauge("protonet_requests_in_progress", "Requests that are being answered", registry=registry)
        active.set_function(lambda: policy.n_active_requests)
        registry.register(self)

    def create_app(self) -> ASGIApp:
        """Create the ASGI application of all routes."""
        routes = [
            Route("/models/{name}/predict", self.predict, methods=["POST"]),
            Route("/v2/models/{name}/infer", self.infer, methods=["POST"]),
            Route("/v2/models/{name}/versions/{version}/infer", self.infer, methods=["POST"]),
            *(Route(path, make_handler(read)) for path, read in self.documented_handlers.items()),
            *(
                Route(path.replace("{name}", "{name}/versions/{version}"), make_handler(read))
                for path, read in self.documented_handlers.items()
                if path.startswith("/v2/models/")
            ),
            Route("/openapi.json", make_handler(self.get_openapi)),
            Route("/docs", make_handler(self.show_documentation)),
            Route("/", make_handler(self.show_overview)),
        ]
        return app.create_app(self.policy, routes, self.record_response)

    @property
    def documented_handlers(self) -> dict[str, GetHandler]:
        """The handlers of the GET requests that the OpenAPI document describes, by path."""
        return {
            "/healthz": self.get_liveness,
            "/readyz": self.get_readiness,
            "/metrics": self.get_metrics,
            "/models": self.list_models,
            "/models/{name}": self.get_model,
            "/v2": self.get_server_metadata,
            "/v2/health/live": self.get_liveness,
            "/v2/health/ready": self.get_readiness,
            "/v2/models/{name}": self.get_model_metadata,
            "/v2/models/{name}/config": self.get_model_config,
            "/v2/models/{name}/ready": self.get_model_readiness,
        }

    def record_response(self, path: str, status: int, seconds: float) -> None:
        """Add the status and the duration of a response to the metrics, if its request was for predictions."""
        *_, name, action = path.rsplit("/", 2)
        if action in {"predict", "infer"}:
            self.requests.labels(name if name in self.models else "", status).inc()
            self.seconds.observe(seconds)

    def collect(self) -> list[CounterMetricFamily]:
        """Return counters of batches, reloads and failed reloads; the registry calls this when metrics are read."""
        batches = CounterMetricFamily("protonet_batches", "Batches classified", value=self.batcher.n_batches)
        reloads = CounterMetricFamily("protonet_reloads", "Model files read again", labels=["model"])
        failures = CounterMetricFamily("protonet_reload_failures", "Files that were not a model", labels=["model"])
        for name, hot in self.models.items():
            reloads.add_metric([name], hot.n_reloads)
            failures.add_metric([name], hot.n_failed_reloads)
        return [batches, reloads, failures]

    def get_model_by_name(self, name: str) -> ReloadableModel:
        """Return the model with a name; raise an HTTPException if no model has the name."""
        if name not in self.models:
            line = f"`model` must be one of {', '.join(self.models)}; got {to_printable(name)[:40]!r}."
            raise HTTPException(404, line)
        return self.models[name]

    async def classify(
        self, name: str, model: TablePipeline, rows: parsing.ParsedRows, threshold: float | None
    ) -> Classification:
        """Classify the rows of a request in a batch with concurrent requests, and count the rows in the metrics."""
        result = await self.batcher.classify(model, rows, threshold)
        self.rows.labels(name).inc(len(result[0]))
        return result

    async def predict(self, request: Request) -> Response:
        """Answer a request for predictions with the class of each row, as JSON or CSV."""
        name = request.path_params["name"]
        model = self.get_model_by_name(name).model
        query = parse_query(request)
        threshold = get_rejection_threshold(model, query.false_rejection_rate)
        media, body = await parsing.read_upload(request)
        fast = media == app.JSON_TYPE and not any(model.column_modalities)  # texts and pictures take long
        rows = await self.parse(request, body, model, partial(parsing.parse_body, model, media, body), fast=fast)
        result = await self.classify(name, model, rows, threshold)
        spec = predict.PredictionOutputSpec(threshold, bool(query.return_probabilities), has_row_numbers=False)
        is_csv = "text/csv" in request.headers.get("accept", "")
        return await self.answer(rows, partial(format_answer, name, model, spec, result, rows.notes, is_csv=is_csv))

    async def parse(
        self,
        request: Request,
        body: bytes,
        model: TablePipeline,
        parse: Callable[[parsing.BlockEncoder], ParsedT],
        *,
        fast: bool,
    ) -> ParsedT:
        """Parse the body of a request: at once if that takes little time and is ``fast``, else in a thread.

        ``parse`` is called with the function that encodes the rows for the model.
        """
        request.scope["ends_with_client"] = True
        is_large = len(body) > MAX_EVENT_LOOP_BODY_BYTES
        if fast and not is_large:
            return parse(TablePipeline.encode)
        has_ended = Event()
        try:
            small_parsers = self.encoding_parsers if any(model.column_modalities) else self.parsers
            executor = self.large_parsers if is_large else small_parsers
            encode = partial(self.encoder.encode, has_ended.is_set)
            return await asyncio.get_running_loop().run_in_executor(executor, parse, encode)
        finally:
            has_ended.set()

    async def infer(self, request: Request) -> Response:
        """Answer a KServe request for predictions, whose rows are tensors, with output tensors."""
        name = request.path_params["name"]
        model = self.get_model_by_name(name).model
        self.check_version(request.path_params.get("version", MODEL_VERSION))
        body, json_size = await request.body(), request.headers.get("inference-header-content-length")

        def parse(encode: parsing.BlockEncoder) -> tuple[parsing.InferRequest, parsing.ParsedRows]:
            decoded = parsing.decode_infer_request(body, json_size)
            return decoded, parsing.parse_tensors(model, decoded.inputs, encode)

        decoded, rows = await self.parse(request, body, model, parse, fast=not any(model.column_modalities))
        answer = partial(format_infer_answer, name, model, decoded, await self.classify(name, model, rows, None))
        return await self.answer(rows, answer)

    async def answer(self, rows: parsing.ParsedRows, format_answer: Callable[[], Response]) -> Response:
        """Format the answer to a request: at once if it has few rows, else in a thread."""
        if len(rows.x) <= MAX_BATCH_ROWS:
            return format_answer()
        return await asyncio.get_running_loop().run_in_executor(self.large_parsers, format_answer)

    def get_liveness(self) -> schemas.Live:
        """Check that the process is alive."""
        return schemas.Live()

    def get_readiness(self) -> schemas.Ready:
        """Check that the server accepts requests; 503 while it stops."""
        if self.policy.is_stopping:
            raise HTTPException(503, "The server stops.", {"retry-after": "1"})
        return schemas.Ready()

    def get_metrics(self) -> str:
        """Get the metrics in the text format of Prometheus."""
        return generate_latest(self.registry).decode()

    def list_models(self) -> schemas.ModelList:
        """List all models."""
        return schemas.ModelList(list(map(self.get_model, self.models)))

    def get_model(self, name: str) -> schemas.ModelInfo:
        """Describe one model."""
        hot = self.get_model_by_name(name)
        model = hot.model
        return schemas.ModelInfo(
            name,
            list(map(str, model.classes)),
            [schemas.Column(name, kind) for name, kind in schemas.summarize_model_columns(model).items()],
            int(model.network.encoder.input_dim),  # type: ignore[arg-type]
            parsing.list_content_types(model),
            model.metadata.cross_validation,
            hot.n_reloads,
        )

    def get_server_metadata(self) -> schemas.ServerMetadata:
        """Describe the server (KServe)."""
        extensions = ["binary_tensor_data", "model_configuration"]
        return schemas.ServerMetadata("protonet", schemas.SERVER_VERSION, extensions)

    def check_version(self, version: str) -> None:
        """Raise an HTTPException unless a version of a model exists: a file has one version."""
        if version != MODEL_VERSION:
            raise HTTPException(404, f"`version` must be {MODEL_VERSION}; got {to_printable(version)[:20]!r}.")

    def get_model_metadata(self, name: str, version: str = MODEL_VERSION) -> schemas.ModelMetadata:
        """Describe the inputs and outputs of a model (KServe)."""
        self.check_version(version)
        model = self.get_model_by_name(name).model
        shapes = [-1], [-1], [-1, len(model.classes)]
        outputs = list(map(schemas.TensorMetadata, schemas.OUTPUT_DATATYPES, shapes, schemas.OUTPUT_DATATYPES.values()))
        return schemas.ModelMetadata(name, [MODEL_VERSION], "protonet", schemas.list_input_tensors(model), outputs)

    def get_model_config(self, name: str, version: str = MODEL_VERSION) -> schemas.ModelConfig:
        """Describe the configuration of a model (KServe's extension by Triton)."""
        metadata = self.get_model_metadata(name, version)
        inputs, outputs = (
            [
                schemas.TensorConfig(tensor.name, schemas.CONFIG_DATATYPES[tensor.datatype], tensor.shape)
                for tensor in part
            ]
            for part in (metadata.inputs, metadata.outputs)
        )
        return schemas.ModelConfig(name, metadata.platform, 0, inputs, outputs)

    def get_model_readiness(self, name: str, version: str = MODEL_VERSION) -> schemas.Ready:
        """Check that a model takes requests (KServe)."""
        self.check_version(version)
        self.get_model_by_name(name)
        return self.get_readiness()

    def get_openapi(self) -> dict[str, object]:
        """Build the OpenAPI document."""
        return schemas.build_openapi({name: hot.model for name, hot in self.models.items()}, self.documented_handlers)

    def show_overview(self) -> Response:
        """Build an HTML page of the models, with their columns, classes and a request to copy."""
        examples = {name: format_curl_example(name, hot.model) for name, hot in self.models.items()}
        values = {"models": self.list_models().models, "examples": examples}
        return app.html_response(*format_page("served.html", "protonet serve", values))

    def show_documentation(self) -> Response:
        """Build an HTML page that shows the OpenAPI document."""
        return app.html_response(*format_page("api.html", "API", self.get_openapi()))


def make_handler(get_content: Callable[..., object]) -> Callable[[Request], Awaitable[Response]]:
    """Make the handler of a GET request from a function that returns the content of the response.

    The function gets the parameters in the path. It returns a response, a text for Prometheus, or a value for JSON.
    """

    async def handle(request: Request) -> Response:
        value = get_content(**request.path_params)
        if isinstance(value, str):
            return Response(value, headers={"content-type": CONTENT_TYPE_LATEST})
        return value if isinstance(value, Response) else app.json_response(value)

    return handle


def format_answer(
    name: str,
    model: TablePipeline,
    spec: predict.PredictionOutputSpec,
    classification: Classification,
    notes: list[str],
    *,
    is_csv: bool,
) -> Response:
    """Format the classes of the rows of a request as CSV, as the command ``predict`` does, or else as JSON."""
    named, logits = classification
    probabilities = format_probabilities(logits) if spec.has_all_probabilities else []
    if is_csv:
        lines = [[*pair, *more] for pair, more in zip(named, probabilities or [[]] * len(named), strict=True)]
        return Response(predict.format_csv_header(model, spec, []) + format_csv(lines), media_type=app.CSV_TYPE)
    classes = list(map(str, model.classes))
    predictions = [schemas.Prediction(label, float(value) if value else None) for label, value in named]
    for prediction, row in zip(predictions, probabilities, strict=False):
        prediction.probabilities = dict(zip(classes, map(float, row), strict=True))
    return app.json_response(schemas.PredictResponse(name, predictions, notes or msgspec.UNSET))


def format_infer_answer(
    name: str, model: TablePipeline, request: parsing.InferRequest, classification: Classification
) -> Response:
    """Format the classes of the rows of a KServe request as output tensors."""
    named, logits = classification
    probabilities = [float(value) for row in format_probabilities(logits) for value in row]
    data: list[list[Any]] = [[label for label, _ in named], [float(value) for _, value in named], probabilities]
    shapes = [len(named)], [len(named)], [len(named), len(model.classes)]
    outputs = list(map(parsing.Tensor, schemas.OUTPUT_DATATYPES, shapes, schemas.OUTPUT_DATATYPES.values(), data))
    outputs, binary = select_outputs(request, outputs), b""
    by_default = get_parameter(request, "binary_data_output")
    requested = {output.name: get_parameter(output, "binary_data", by_default) for output in request.outputs or ()}
    for output in outputs:
        if requested.get(output.name, by_default) is True:
            content = parsing.encode_binary_tensor(output)
            output.data, output.parameters = msgspec.UNSET, {"binary_data_size": len(content)}
            binary += content
    response = schemas.InferResponse(name, outputs, request.id, MODEL_VERSION)
    if not binary:
        return app.json_response(response)
    head = msgspec.json.encode(response)
    headers = {"inference-header-content-length": str(len(head))}
    return Response(head + binary, headers=headers, media_type="application/octet-stream")


def get_parameter(item: parsing.InferRequest | parsing.OutputName, name: str, default: object = None) -> object:
    """Return a parameter of a KServe request, or of an output that it names."""
    return default if item.parameters is msgspec.UNSET else item.parameters.get(name, default)


def select_outputs(request: parsing.InferRequest, outputs: list[parsing.Tensor]) -> list[parsing.Tensor]:
    """Select the output tensors that a request names; if it names none, return all of ``outputs``."""
    names = [output.name for output in request.outputs or ()]
    if not set(names) <= set(schemas.OUTPUT_DATATYPES):
        got = ", ".join(map(to_printable, names))[:80]
        raise_input_error("outputs", f"be of {', '.join(schemas.OUTPUT_DATATYPES)}", got, "Name those.")
    by_name = {output.name: output for output in outputs}
    return [by_name[name] for name in names] or outputs


def parse_query(request: Request) -> schemas.PredictQuery:
    """Parse the query parameters of a request for predictions; raise an InputError if one is repeated or wrong."""
    pairs = request.query_params.multi_items()
    values = dict(pairs)
    if len(values) < len(pairs):
        raise_input_error("query", "have each parameter once", "one twice", "Leave one out.")
    try:
        return msgspec.convert(values, schemas.PredictQuery, strict=False)
    except msgspec.ValidationError as error:
        raise_input_error("query", "hold proba=0 or 1, and unknown in (0, 1)", str(error)[:200], "Correct it.")


def get_rejection_threshold(model: TablePipeline, false_rejection_rate: float | msgspec.UnsetType) -> float | None:
    """Return the score at and below which rows are rejected as unknown, for a false-rejection rate; None for UNSET."""
    if false_rejection_rate is msgspec.UNSET:
        return None
    limits = schemas.false_rejection_limits(model)
    if limits and not limits[0] <= false_rejection_rate <= limits[1]:
        must, remedy = f"be in [{limits[0]:.2g}, {limits[1]:.6g}]", "There are too few held-out rows for others."
        raise_input_error("unknown", must, false_rejection_rate, remedy)
    return predict.choose_rejection_threshold(model, false_rejection_rate)


def format_probabilities(logits: torch.Tensor) -> list[list[str]]:
    """Format the softmax of logits (n, num_classes) with six significant digits, as the command ``predict`` does."""
    return [[f"{value:.6g}" for value in row] for row in logits.softmax(dim=1).tolist()]


def format_curl_example(name: str, model: TablePipeline) -> str:
    """Format a curl command that requests a prediction from a model."""
    row = dict.fromkeys(model.columns or ()) or [0] * len(model.n_features_per_column)
    body = json.dumps({"rows": [row]}, ensure_ascii=False).replace("'", r"'\''")
    headers = "-H 'Authorization: Bearer TOKEN' -H 'Content-Type: application/json'"
    return f"curl -X POST 'ADDRESS/models/{quote(name)}/predict?proba=1' {headers} -d '{body}'"


def open_access_log(path: str | None) -> TextIO | None:
    """Open a file to append the access log to; ``-`` is stderr, and None opens no file."""
    if path is None or path == "-":
        return sys.stderr if path else None
    return Path(path).open("a", 1, encoding="utf-8")  # a buffer of one line


def run(options: ServeOptions) -> None:
    """Serve predictions of the models until SIGTERM or Ctrl-C."""
    models = load_models(options.models, options.representation)
    if not any(hot.model.has_pretrained_encoder for hot in models.values()):
        torch.set_num_threads(1)  # as in predict; several threads slow small batches down
    policy = replace(
        make_access_policy(options.host, options.allowed_hosts, options.max_megabytes * 2**20),
        max_requests=options.max_requests,
        response_timeout_seconds=options.timeout,
        allowed_origins=[origin.rstrip("/").lower() for origin in options.cors_origins],
        access_log=open_access_log(options.access_log),
        drain_seconds=1.0,
    )
    listening = app.open_listening_socket(options.host, options.port)
    remove_stale_server_folders()
    status = f"{plural(len(models), 'model')} at"
    with reload_in_background(list(models.values())):
        app.run_server(PredictionApi(models, policy).create_app(), policy, listening, status)
