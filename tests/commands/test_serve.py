"""The command ``serve``: a real server beside ``predict``, what it refuses, models that are replaced, its end."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import os
import socket
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from protonet import InputError
from protonet.pipeline import TablePipeline
from protonet.server.access import AccessPolicy, make_access_policy
from protonet.server.app import MAX_CONNECTIONS, create_app
from protonet.server.batches import RequestBatcher
from protonet.server.parsing import ParsedRows
from tests.commands.cases import FAST, Run, do
from tests.commands.servers import TOKEN, Server, ask_until_refused, make_requests, start
from tests.strategies import blobs

pytest.importorskip("uvicorn", reason="it listens")
Image = pytest.importorskip("PIL.Image", reason="it reads pictures")
JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of a mixed table, of arrays and of pictures."""
    folder = tmp_path_factory.mktemp("serve")
    draw = np.random.default_rng(0)
    lines = [["size", "city", "kind"]]
    for row in range(36):
        kind = row % 2
        size = f"{draw.normal(3 * kind):.3f}" if row % 7 else ""
        lines.append([size, ["Rome", "Oslo", "Bern"][(row + kind) % 3], ["ant", "bee"][kind]])
    with (folder / "mixed.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    x, y = blobs(0, classes=3, rows=20, dim=5, noise=0.7)
    np.savez(folder / "arrays.npz", x=x.numpy(), y=y.numpy())
    np.save(folder / "rows.npy", x.numpy())
    for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        (folder / "pictures" / name).mkdir(parents=True)
        for index in range(4):
            noise = draw.integers(0, 40, (24, 24, 3))
            pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{index}.png")
    do("fit", folder / "mixed.csv", *FAST, "-o", folder / "mixed.safetensors")
    do("fit", folder / "arrays.npz", "-o", folder / "arrays.safetensors")
    pictures = ["--representation", "none", "-o", folder / "pictures.safetensors"]
    do("fit", folder / "pictures", *pictures)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    models = [folder / f"{name}.safetensors" for name in ("mixed", "arrays", "pictures")]
    with start("serve", *models, "--max-megabytes", 1) as server:
        yield server
        assert server.end() == (0, "server stopped; pending requests were answered\n")


def post(server: Server, model: str, body: bytes | str, media: str, query: str = "") -> list[dict[str, object]]:
    status, content, _ = server.ask("POST", f"/models/{model}/predict{query}", body, {"Content-Type": media})
    assert status == 200, content
    result: list[dict[str, object]] = json.loads(content)["predictions"]
    return result


def test_responses_equal_predict(server: Server, folder: Path, run: Run) -> None:
    model, table = folder / "mixed.safetensors", folder / "mixed.csv"
    result = run.read_rows("predict", model, table, "--proba", "--unknown", "0.4")
    expected: list[dict[str, object]] = [
        {
            "class": row["class"],
            "probability": float(row["probability"]) if row["probability"] else None,
            "probabilities": {name: pytest.approx(float(row[f"P({name})"]), abs=2e-6) for name in ("ant", "bee")},
        }
        for row in result
    ]
    for item in expected:
        item["probability"] = item["probability"] and pytest.approx(item["probability"], abs=2e-6)
    text = table.read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text)))
    cells = [{"size": float(row["size"]) if row["size"] else None, "city": row["city"]} for row in rows]
    query = "?proba=1&unknown=0.4"
    assert post(server, "mixed", text, CSV, query) == expected
    assert post(server, "mixed", json.dumps(cells), JSON, query) == expected
    lists = json.dumps({"rows": [[*item.values()] for item in cells]})
    assert post(server, "mixed", lists, JSON, query) == expected
    assert [post(server, "mixed", json.dumps([cell]), JSON, query)[0] for cell in cells[:9]] == expected[:9]
    assert {"unknown"} < {str(item["class"]) for item in expected}
    rows_npy = (folder / "rows.npy").read_bytes()
    expected = [
        {"class": row["class"], "probability": pytest.approx(float(row["probability"]), abs=2e-6)}
        for row in run.read_rows("predict", folder / "arrays.safetensors", folder / "rows.npy")
    ]
    assert post(server, "arrays", rows_npy, NPY) == expected
    assert post(server, "arrays", json.dumps(np.load(folder / "rows.npy").tolist()), JSON) == expected
    picture = folder / "pictures" / "red" / "0.png"
    assert post(server, "pictures", picture.read_bytes(), "image/png")[0]["class"] == "red"
    coded = [{"picture": base64.b64encode(item.read_bytes()).decode()} for item in (folder / "pictures").rglob("*.png")]
    assert [item["class"] for item in post(server, "pictures", json.dumps(coded), JSON)] == [
        item.parent.name for item in (folder / "pictures").rglob("*.png")
    ]


def test_the_openapi_document_is_true(server: Server, tmp_path: Path) -> None:
    """Requests that are generated from the document are accepted if it says so, and answered as it says."""
    pytest.importorskip("schemathesis", reason="it generates requests")
    hooks = """
import base64, io, schemathesis
from hypothesis import strategies
from PIL import Image

def draw(side):
    file = io.BytesIO()
    Image.new("RGB", (side, side), (side, 30, 90)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()

schemathesis.openapi.format("picture", strategies.integers(1, 40).map(draw))
"""
    (tmp_path / "hooks.py").write_text(hooks, encoding="utf-8")
    document = f"http://127.0.0.1:{server.port}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", document, "-n", "3", "--seed", "1", "--no-color"]
    command += ["-H", f"Authorization: Bearer {TOKEN}", "--generation-database", "none"]
    variables = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, check=False)
    assert done.returncode == 0, done.stdout[-5000:]


def make_bomb(side: int = 50_000) -> bytes:
    """Return a PNG of a few bytes that says it has as many pixels per side."""
    parts = [(b"IHDR", side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"), (b"IDAT", zlib.compress(b"\0"))]
    sums = ((kind + data, zlib.crc32(kind + data)) for kind, data in parts)
    chunks = ((len(part) - 4).to_bytes(4, "big") + part + crc.to_bytes(4, "big") for part, crc in sums)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def pictures_of(*contents: bytes) -> str:
    return json.dumps([[base64.b64encode(content).decode()] for content in contents])


def make_pickle() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}], object), allow_pickle=True)
    return file.getvalue()


def test_what_does_not_fit(server: Server) -> None:
    cases: list[tuple[str, str, bytes | str, int, str]] = [
        ("other", JSON, "[]", 404, "`model` must be one of mixed, arrays, pictures; got 'other'"),
        ("mixed", JSON, "[[", 400, "`body` must be JSON"),
        ("mixed", JSON, "[[NaN, 1]]", 400, "`body` must be JSON"),
        ("mixed", JSON, "[" * 100_000, 400, "`body` must be"),
        ("mixed", JSON, '{"rows": []}', 400, "`body` must hold rows"),
        (
            "mixed",
            JSON,
            '{"rows": [[1, "Rome"]], "proba": 1}',
            400,
            "`body` must be of the documented form; got Object c",
        ),
        ("mixed", JSON, "[[1]]", 400, "`body` must have 2 cells in each row; got 1 in row 0"),
        ("mixed", JSON, '[{"size": 1}]', 400, "`body` must have the model's columns; got row 0 without city"),
        ("mixed", JSON, '[[[], "Rome"]]', 400, "`body` must be of the documented form"),
        ("mixed", JSON, '[[1.9e19, "Rome"]]', 400, "`body` must have numbers of at most"),
        ("mixed", JSON, '[["wide", "Rome"]]', 400, "`body` must have columns of the same types as in training"),
        ("arrays", JSON, "[[1, 2, 3, 4, null]]", 400, "`body` must have finite numbers"),
        ("arrays", JSON, "[[1, 2, 3, 4, 1e39]]", 400, "`body` must have numbers of at most 3.4e"),
        ("arrays", JSON, "[[1e38, -1e38, 1e38, 1e38, 1e38]]", 400, "`body` must have numbers of the scale"),
        ("arrays", JSON, "[null]", 400, "`body` must be of the documented form"),
        ("arrays", JSON, '[{"a": 1}]', 400, "`body` must have lists as rows"),
        ("arrays", NPY, make_pickle(), 400, "the request"),
        ("arrays", NPY, b"\x93NUMPY", 400, "`body` must be an NPY file"),
        ("arrays", "text/plain", "1", 415, "`content-type` must be one of application/json, text/csv"),
        ("mixed", CSV, b"\x1f\x8b\x08", 415, "`body` must not be compressed"),
        ("mixed", CSV, "size\n1\n", 400, "`body` must have the model's columns; got the request without city"),
        ("mixed", CSV, "n\n" * 100_001, 400, "must have the model's columns"),
        ("pictures", CSV, "picture\n/etc/passwd\n", 415, "`content-type` must be one of application/json, image/*"),
        ("pictures", "image/png", make_bomb(), 400, "got the request (more than 178,956,970 pixels)"),
        (
            "pictures",
            "image/png",
            make_bomb(13_000),
            400,
            "of at most 25,000,000 pixels each, and 100,000,000 together",
        ),
        ("pictures", JSON, pictures_of(make_bomb(5001)), 400, "got 25,010,001, and 25,010,001 together"),
        ("pictures", JSON, pictures_of(*[make_bomb(4900)] * 5), 400, "got 24,010,000, and 120,050,000 together"),
        ("pictures", "image/png", b"%!PS-Adobe-3.0 EPSF-3.0", 400, "must hold pictures that can be read"),
        ("pictures", JSON, '[{"picture": "/etc/passwd"}]', 400, "must hold pictures"),
        ("pictures", JSON, '[{"picture": 7}]', 400, "must hold pictures as base64"),
        ("mixed", JSON, "[" + "[1,2]," * 200_000 + "[1,2]]", 413, "`body` must have at most 1,048,576 bytes"),
        ("arrays", JSON, "[" + "[]," * 100_000 + "[]]", 413, "`body` must have at most 100,000 rows"),
    ]
    for model, media, body, status, line in cases:
        result = server.refuse("POST", f"/models/{model}/predict", body, headers={"Content-Type": media})
        assert result[0] == status, result
        assert line in result[1], line
        assert "/tmp" not in result[1], line


def test_a_large_picture_takes_little_memory(folder: Path) -> None:
    """A PNG of 27 megapixels is refused before it is decoded, which takes 500 MB."""
    file = io.BytesIO()
    Image.new("RGBA", (5200, 5200), (200, 30, 30, 99)).save(file, "PNG", compress_level=1)
    with start("serve", folder / "pictures.safetensors") as server:
        seconds, memory = server.measure()
        status, line = server.refuse(
            "POST", "/models/pictures/predict", file.getvalue(), headers={"Content-Type": "image/png"}
        )
        assert (status, "got 27,040,000" in line) == (400, True)
        after = server.measure()
        assert after[0] - seconds < 0.5
        assert after[1] - memory < 100


def test_unauthorized_requests_and_invalid_addresses_are_refused(server: Server) -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"headers": {"Host": "evil.example"}}, 400, "`Host` must be a name of this server"),
        ({"headers": {"Host": "[::1"}}, 400, "`Host` must be a name of this server"),
        ({"headers": {"Origin": "http://evil.example"}}, 403, "`Origin` must be this server"),
        ({"headers": {"Origin": "null"}}, 403, "`Origin` must be this server"),
        ({"token": ""}, 401, "`token` must be that of the server"),
        ({"token": "x"}, 401, "`token` must be that of the server"),
    ]
    for more, status, line in cases:
        result = server.refuse("GET", "/metrics", **more)
        assert (result[0], line in result[1]) == (status, True), result
    proxied = {"Host": "LOCALHOST:8000", "Origin": "https://localhost:8000"}  # behind TLS
    assert server.ask("GET", "/metrics", headers=proxied)[0] == 200
    for query in ("unknown=x", "unknown=2", "proba=maybe", "proba=2", "probas=1", "proba=1&proba=0"):
        result = server.refuse("POST", f"/models/mixed/predict?{query}", "[[1, null]]", headers={"Content-Type": JSON})
        must = "have each parameter once" if "&" in query else "hold"
        assert (result[0], result[1].startswith(f"`query` must {must}")) == (400, True), result
    zipped = {"Content-Type": JSON, "Content-Encoding": "gzip"}
    assert server.refuse("POST", "/models/mixed/predict", "[[1, null]]", headers=zipped)[0] == 415
    assert server.refuse("GET", "/models/mixed/predict")[0] == 405
    status, content, headers = server.ask("HEAD", "/metrics")
    assert (status, content) == (200, b"")
    assert int(headers["content-length"]) > 100


def test_an_invalid_request_does_not_fail_the_rest_of_its_batch(folder: Path) -> None:
    model = TablePipeline.load(folder / "arrays.safetensors")
    x = np.load(folder / "rows.npy")
    sizes = [3, 1, 4]

    async def ask() -> tuple[list[Any], int]:
        batches = RequestBatcher()
        parts = np.split(x[:8], np.cumsum(sizes)[:-1])
        parts.insert(1, np.full((1, 5), 1e38, np.float32))
        rows = [ParsedRows(part, [], np.zeros(len(part), bool)) for part in [*parts, x[8:9].astype(np.float64)]]
        suggested = [batches.classify(model, part, None) for part in rows]
        return await asyncio.gather(*suggested, return_exceptions=True), batches.n_batches

    (first, spoiled, second, third, other), done = asyncio.run(ask())
    assert isinstance(spoiled, InputError)
    assert "`body` must have numbers of the scale" in str(spoiled)
    assert done == 2  # those of another type are a batch of their own
    logits = torch.cat([first[1], second[1], third[1], other[1]])
    assert torch.equal(logits[:8], model.predict_logits(x[:8]))
    torch.testing.assert_close(logits, model.predict_logits(x[:9]), check_dtype=False, rtol=1e-4, atol=1e-4)
    assert [len(named) for named, _ in (first, second, third, other)] == [*sizes, 1]


async def ask_app(app: ASGIApp, *parts: bytes, path: str = "/") -> tuple[int, dict[bytes, bytes], bytes]:
    """Return the status, the headers and the body of what an application answers to a body in parts."""
    left, sent = list(parts) or [b""], list[Message]()

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", b"bearer " + TOKEN.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    head, content = sent
    return head["status"], dict(head["headers"]), content["body"]


def test_limits_and_errors_have_a_status_and_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    policy = AccessPolicy([TOKEN], {"localhost"}, max_body_bytes=10, max_requests=1, response_timeout_seconds=0.05)
    counted = list[int]()

    async def echo(request: Request) -> Response:
        body = await request.body()
        await asyncio.sleep(0 if body == b"short" else 10)
        return Response(body, headers={"x": "y"})

    async def fill(_: Request) -> Response:
        raise OSError(28, "No space left on device")

    async def fail(_: Request) -> Response:
        raise RuntimeError("a bug\nof two lines")

    handlers = {"/": echo, "/fill": fill, "/fail": fail}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]
    app = create_app(policy, routes, lambda path, status, seconds: counted.append(status))

    async def ask() -> None:
        status, headers, body = await ask_app(app, b"sh", b"ort")
        assert (status, headers[b"x"], body, headers[b"content-length"]) == (200, b"y", b"short", b"5")
        for parts, path, expected, line in (
            ((b"long",), "/", 503, "must be ready within 0.05 s"),
            ((b"12345", b"678901"), "/", 413, "`body` must have at most 10 bytes"),
            ((), "/fill", 507, "No space left on device"),
            ((), "/fail", 500, "RuntimeError"),
            ((), "/none", 404, "no such path"),
        ):
            status, headers, body = await ask_app(app, *parts, path=path)
            assert (status, line in json.loads(body)["error"]) == (expected, True), body
            assert json.loads(body)["error"].isprintable()
            assert (headers.get(b"retry-after") == b"1") == (status == 503)
            assert headers[b"x-content-type-options"] == b"nosniff"
        result = await asyncio.gather(ask_app(app, b"short"), ask_app(app, b"short"))
        assert sorted(status for status, *_ in result) == [200, 429]
        policy.is_closing = True
        assert (await ask_app(app, b"short"))[1][b"connection"] == b"close"
        assert policy.n_active_requests == 0

    asyncio.run(ask())
    assert counted[:6] == [200, 503, 413, 507, 500, 404]
    assert sorted(counted[6:8]) == [200, 429]
    assert "RuntimeError" in capsys.readouterr().err


def test_random_requests_never_fail_the_server(server: Server) -> None:
    models = ["/models/mixed/predict", "/models/pictures/predict", "/models/../../etc/passwd"]
    paths = ["/", "/healthz", "/metrics", *models]
    for method, path, body, headers in make_requests(0, 100, paths, TOKEN):
        status, content, _ = server.ask(method, path, body, headers, token="")
        assert 200 <= status < 500, (status, content, method, path, body)
        assert b"Traceback" not in content
        assert b"root:" not in content
    assert server.ask("GET", "/healthz", token="")[0] == 200


def test_metadata_endpoints(server: Server) -> None:
    status, page, headers = server.ask("GET", f"/?token={TOKEN}", token="")
    assert status == 200
    assert b"/models/mixed/predict?proba=1" in page
    assert b"<script" not in page
    assert headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    described = server.ask_json("GET", "/openapi.json")
    named = described["paths"]["/models/mixed/predict"]["post"]["requestBody"]["content"][JSON]["schema"]
    assert set(named["properties"]["rows"]["items"]["anyOf"][1]["properties"]) == {"size", "city"}
    contents = {
        name: set(described["paths"][f"/models/{name}/predict"]["post"]["requestBody"]["content"])
        for name in ("mixed", "pictures")
    }
    assert not any(media.startswith("image/") for media in contents["mixed"])
    assert contents["pictures"] == {JSON, "image/*", "multipart/form-data"}
    operations = [item for path in described["paths"].values() for key, item in path.items() if key != "parameters"]
    assert len({item["operationId"] for item in operations}) == len(operations)
    assert described["paths"]["/healthz"]["get"]["security"] == []
    assert described["paths"]["/metrics"]["get"]["security"] == [{"bearer": []}]
    assert all("Error" in str(item["responses"]["404"]) for item in operations)
    docs = server.ask("GET", "/docs")[1].decode()
    assert all(item["operationId"] in docs for item in operations)
    assert "<script" not in docs
    metrics = server.ask("GET", "/metrics")[1].decode()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    count = float(values["protonet_request_seconds_count"])
    assert float(values['protonet_request_seconds_bucket{le="+Inf"}']) == count
    statuses = [float(n) for name, n in values.items() if name.startswith("protonet_requests_total{")]
    assert sum(statuses) == count
    assert values['protonet_reloads_total{model="mixed"}'] == "0.0"
    listed = server.ask_json("GET", "/models")["models"]
    assert [item["name"] for item in listed] == ["mixed", "arrays", "pictures"]
    assert listed[0] == server.ask_json("GET", "/models/mixed")
    assert server.refuse("GET", "/models/none")[0] == 404
    assert server.ask("GET", "/readyz", token="")[0] == 200


def test_models_are_reloaded_and_the_server_stops_under_load(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "arrays.safetensors"
    full = (folder / "arrays.safetensors").read_bytes()
    path.write_bytes(full)
    with start("serve", path) as server, ThreadPoolExecutor(8) as clients:
        request = ("/models/arrays/predict", "[[1, 2, 3, 4, 5]]")
        loads = [clients.submit(ask_until_refused, server, *request) for _ in range(8)]
        metrics = ""
        for index in range(200):  # the file is replaced by one that is no model, then by models
            new = tmp_path / "new"
            new.write_bytes(full if index else b"no model")
            new.replace(path)
            metrics = server.ask("GET", "/metrics")[1].decode()
            failed = 'reload_failures_total{model="arrays"} 1.0' in metrics
            if failed and 'reloads_total{model="arrays"} 2.0' in metrics:
                break
            time.sleep(0.1 if index else 0.3)
        code, output = server.end()
        counts = sum((load.result() for load in loads), Counter[str]())
    assert code == 0
    assert 'reloads_total{model="arrays"} 2.0' in metrics
    assert "must be a model file" in output
    assert output.endswith("The previous model stays in use.\nserver stopped; pending requests were answered\n")
    assert counts.keys() == {"200"}  # none was lost


def test_command_errors(folder: Path, tmp_path: Path, run: Run) -> None:
    model = folder / "mixed.safetensors"
    assert "`model` must have a name of its own; got mixed.safetensors twice" in run("serve", model, model, code=2)
    assert "`--port` must be a whole number in [0, 65535]" in run("serve", model, "--port", "70000", code=2)
    assert "`--host` must be an address of this machine" in run("serve", model, "--host", "192.0.2.1", code=2)
    assert "`--allowed-hosts` must be host names" in run("serve", model, "--allowed-hosts", "host:80", code=2)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        assert "`--port` must be free for this command" in run("serve", model, "--port", port, code=2)
    assert "no such file" in run("serve", tmp_path / "none.safetensors", code=2)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def receive_all(connection: socket.socket) -> bytes:
    """Return all that comes until the other end closes."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


HEAD = f"POST /models/mixed/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nConnection: close\r\n"
ALLOWED, CHUNKED = f"Authorization: Bearer {TOKEN}\r\n", "Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "rest", "status"),
    [
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * 2**24, 431),
        (f"{HEAD}{CHUNKED}2\r\n[]\r\n0\r\nX-A: ", b"a" * 2**24, 431),
        (f"{HEAD}{ALLOWED}{CHUNKED}2\r\n[]\r\n0\r\nX-A: ", b"A: b\r\n" * 2**21, 431),
        (f'{HEAD}{ALLOWED}{CHUNKED}6\r\n[[1, "\r\n7\r\nRome"]]\r\n0\r\n', b"Origin: http://other\r\n\r\n", 200),
        ("no HTTP\r\n\r\n", b"", 400),
        ("GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"", 400),
    ],
    ids=["long head", "long trailers", "many trailers", "trailers", "no HTTP", "no host"],
)
def test_heads_and_trailers_are_limited(server: Server, request_: str, rest: bytes, status: int) -> None:
    seconds, memory = server.measure()
    with connect(server) as connection:
        connection.sendall(request_.encode() + rest)
        answer = receive_all(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f" {status} ".encode() in answer, answer
    if status != 200 and b" 401 " not in head:
        assert b"application/json" in head
        assert ("65,536 bytes" in json.loads(body)["error"]) == (status == 431)
    after, memory_after = server.measure()
    assert after - seconds <= 0.5  # without a bound, a minute
    assert memory_after - memory <= 20


def test_idle_connections_are_closed(server: Server) -> None:
    idle = [connect(server) for _ in range(MAX_CONNECTIONS + 100)]
    try:
        started = time.monotonic()
        assert server.ask("GET", "/healthz", token="")[0] == 200
        assert time.monotonic() - started < 1
        closed = 0
        for connection in idle:
            connection.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                closed += connection.recv(1) == b""
        assert closed >= 100  # the oldest
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
    finally:
        for connection in idle:
            connection.close()


def test_rows_have_the_same_digits_in_every_batch(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("mixed", "arrays", "pictures"):
        model = TablePipeline.load(folder / f"{name}.safetensors")
        x = draw.normal(size=(300, int(model.network.encoder.input_dim))).astype(np.float32)  # type: ignore[arg-type]
        full = model.predict_logits(x)
        for _ in range(8):
            rows = draw.integers(0, len(x), int(draw.integers(1, 40)))
            assert torch.equal(model.predict_logits(x[rows]), full[rows])


def test_missing_invisible_and_unused_cells_get_a_note(server: Server) -> None:
    def notes(cells: object, media: str = JSON) -> str:
        body = cells if isinstance(cells, str) else json.dumps(cells)
        status, content, _ = server.ask("POST", "/models/mixed/predict", body, {"Content-Type": media})
        assert status == 200, content
        return " ".join(json.loads(content).get("notes", []))

    full: list[object] = [1, "Rome"]
    assert notes([full, full]) == ""
    assert "missing values: 1 of 2 in size" in notes([[None, "Rome"], full])
    for cell in ("\u200b", "\ufeff"):
        assert "in size, row 0" in notes([[cell, "Rome"], full, full])
    assert notes([["\u200b5", "Rome"], full, full]) == ""  # the number is plain
    assert "missing values: 1 of 2 in size, 1 of 2 in city" in notes("size,city\n,Rome\n1,\n", CSV)
    unused = "1 column of the table not used: colour"
    assert notes({"rows": [{"size": 1, "city": "Rome", "colour": "red"}]}) == unused
    assert notes("size,city,colour\n1,Rome,red\n", CSV) == unused


def test_forms_are_accepted_and_csv_is_returned(server: Server, folder: Path, tmp_path: Path) -> None:
    table = (folder / "mixed.csv").read_bytes()
    media = b'Content-Disposition: form-data; name="file"; filename="mixed.csv"\r\nContent-Type: text/csv\r\n\r\n'
    form = b"--x\r\n" + media + table + b"\r\n--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Accept": "text/csv"}
    status, content, answered = server.ask("POST", "/models/mixed/predict?proba=1", form, headers)
    assert (status, answered["content-type"]) == (200, "text/csv; charset=utf-8"), content
    predicted = tmp_path / "predicted.csv"
    model = folder / "mixed.safetensors"
    do("predict", model, folder / "mixed.csv", "--proba", "-o", predicted)
    assert content == predicted.read_bytes()
    part = b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--\r\n"
    for bad in (b"--x--\r\n", b"", b"noise", part, form[:-5] + form):
        assert server.refuse("POST", "/models/mixed/predict", bad, headers=headers)[0] == 400
    field = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n[[1, "Rome"]]\r\n--x--\r\n'
    assert server.ask("POST", "/models/mixed/predict", field, headers)[0] == 200


def test_kserve_inference(server: Server, folder: Path) -> None:
    x = np.load(folder / "rows.npy")[:3]
    expected = post(server, "arrays", json.dumps(x.tolist()), JSON, "?proba=1")

    def infer(model: str, *inputs: Mapping[str, object], **more: object) -> Any:
        return server.ask_json("POST", f"/v2/models/{model}/infer", {"inputs": list(inputs), **more})

    tensor: dict[str, object] = {"name": "x", "shape": [3, 5], "datatype": "FP32"}
    answers = [infer("arrays", tensor | {"data": data}, id="7") for data in (x.tolist(), x.flatten().tolist())]
    assert answers[0] == answers[1]
    assert answers[0]["id"] == "7"
    outputs = {item["name"]: item for item in answers[0]["outputs"]}
    assert outputs["class"]["data"] == [item["class"] for item in expected]
    assert outputs["probability"]["data"] == [item["probability"] for item in expected]
    assert outputs["probabilities"]["shape"] == [3, 3]
    size = {"name": "size", "shape": [1], "datatype": "FP64", "data": [1.5]}
    city = {"name": "city", "shape": [1, 1], "datatype": "BYTES", "data": [["Rome"]]}
    alone = infer("mixed", city, size, outputs=[{"name": "class"}])["outputs"]
    assert [item["name"] for item in alone] == ["class"]
    assert alone[0]["data"] == [post(server, "mixed", '[[1.5, "Rome"]]', JSON)[0]["class"]]
    for model, inputs, line in (
        ("arrays", [tensor | {"data": [1.0]}], "`data` must be FP32 of shape"),
        ("arrays", [tensor | {"datatype": "INT8", "data": [1000] * 15}], "`data` must be INT8 of shape"),
        ("arrays", [tensor | {"datatype": "UINT16", "data": [-1] * 15}], "`data` must be UINT16 of shape"),
        ("arrays", [tensor | {"datatype": "INT64", "data": [0.5] * 15}], "`data` must be INT64 of shape"),
        ("arrays", [tensor], "`inputs` must each have data, or binary_data_size"),
        ("arrays", [tensor | {"datatype": "FP99", "data": []}], "`datatype` must be one of"),
        ("arrays", [tensor | {"shape": [3, 4], "data": [0] * 12}], "`inputs` must have shape"),
        ("mixed", [size], "`inputs` must hold each of size, city once"),
        ("mixed", [], "`inputs` must"),
        ("mixed", [size, city, size | {"name": "other"}], "`inputs` must hold each of size, city once"),
        ("pictures", [tensor | {"data": []}], "without pictures"),
    ):
        status, output = server.refuse("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": inputs}))
        assert (status, line in output) == (400, True), output
    metadata = server.ask_json("GET", "/v2/models/mixed")
    assert [(item["name"], item["datatype"]) for item in metadata["inputs"]] == [("size", "FP64"), ("city", "BYTES")]
    assert server.ask("GET", "/v2/health/ready", token="")[0] == 200
    assert server.ask_json("GET", "/v2/models/mixed/ready") == {"ready": True}
    assert server.refuse("GET", "/v2/models/none")[0] == 404


def test_kserve_binary_tensors_versions_and_configuration(server: Server, folder: Path) -> None:
    x = np.load(folder / "rows.npy")[:3]
    tensor: dict[str, object] = {"name": "x", "shape": [3, 5], "datatype": "FP32"}
    path = "/v2/models/arrays/versions/1/infer"
    expected = server.ask_json("POST", path, {"inputs": [tensor | {"data": x.tolist()}]})
    assert expected["model_version"] == "1"

    def infer(model: str, head: object, *data: bytes, size: int | str | None = None) -> tuple[int, bytes, str]:
        text = json.dumps(head).encode()
        headers = {"Inference-Header-Content-Length": str(len(text) if size is None else size)}
        body = text + b"".join(data)
        status, content, answered = server.ask("POST", f"/v2/models/{model}/infer", body, headers)
        return status, content, answered.get("inference-header-content-length", "")

    binary = tensor | {"parameters": {"binary_data_size": x.nbytes}}
    status, content, _ = infer("arrays", {"inputs": [binary]}, x.astype("<f4").tobytes())
    assert (status, json.loads(content)) == (200, expected)
    for more in (
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": item["name"], "parameters": {"binary_data": True}} for item in expected["outputs"]]},
    ):
        status, content, size = infer("arrays", {"inputs": [binary], **more}, x.astype("<f4").tobytes())
        head, rest = json.loads(content[: int(size)]), content[int(size) :]
        assert status == 200
        for output, full in zip(head["outputs"], expected["outputs"], strict=True):
            n = output["parameters"]["binary_data_size"]
            data, rest = rest[:n], rest[n:]
            if full["datatype"] == "FP64":
                assert np.frombuffer(data, "<f8").tolist() == full["data"]
            else:
                texts = [len(text).to_bytes(4, "little") + text.encode() for text in full["data"]]
                assert data == b"".join(texts)
        assert rest == b""
    number, city = np.array([1.5], "<f8").tobytes(), (4).to_bytes(4, "little") + b"Rome"
    columns = [
        {"name": "size", "shape": [1], "datatype": "FP64", "parameters": {"binary_data_size": 8}},
        {"name": "city", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 8}},
    ]
    status, content, _ = infer("mixed", {"inputs": columns}, number, city)
    (label, *_) = json.loads(content)["outputs"]
    assert label["data"] == [post(server, "mixed", '[[1.5, "Rome"]]', JSON)[0]["class"]]
    for head, data, length, line in (
        ({"inputs": [binary]}, x.tobytes()[:-1], None, "`inputs` must each have data, or binary_data_size"),
        ({"inputs": [binary]}, x.tobytes() + b"1", None, "`body` must end with the data of its binary tensors"),
        ({"inputs": [binary]}, x.tobytes(), "-1", "`inference-header-content-length` must be the number of bytes"),
        ({"inputs": [binary]}, x.tobytes(), 10**6, "`inference-header-content-length` must be the number of bytes"),
        ({"inputs": [binary | {"datatype": "BYTES"}]}, b"\xff" * 60, None, "`body` must hold BYTES data"),
    ):
        status, content, _ = infer("arrays", head, data, size=length)
        assert (status, line in json.loads(content)["error"]) == (400, True), content
    assert server.ask_json("GET", "/v2")["extensions"] == ["binary_tensor_data", "model_configuration"]
    for place in ("mixed", "mixed/versions/1"):
        assert server.ask_json("GET", f"/v2/models/{place}")["versions"] == ["1"]
        config = server.ask_json("GET", f"/v2/models/{place}/config")
        assert [(item["name"], item["data_type"], item["dims"]) for item in config["input"]] == [
            ("size", "TYPE_FP64", [-1]),
            ("city", "TYPE_STRING", [-1]),
        ]
        assert server.ask_json("GET", f"/v2/models/{place}/ready") == {"ready": True}
    assert server.refuse("GET", "/v2/models/mixed/versions/2")[0] == 404
    assert server.refuse("POST", "/v2/models/mixed/versions/2/infer", '{"inputs": []}')[0] == 404


@pytest.mark.parametrize("name", ["Host", "Authorization", "Content-Type"])
def test_repeated_headers_are_refused(server: Server, name: str) -> None:
    values = {"Host": "localhost", "Authorization": f"Bearer {TOKEN}", "Content-Type": JSON}
    lines = [f"{header}: {value}" for header, value in [*values.items(), (name, values[name])]]
    with connect(server) as connection:
        head = "\r\n".join(["POST /models/mixed/predict HTTP/1.1", *lines, "Content-Length: 2", "Connection: close"])
        connection.sendall(f"{head}\r\n\r\n[]".encode())
        answer = receive_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert f"`{name}` must be given once; got it 2 times." in answer.decode()


def test_tokens_origins_and_the_access_log(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, page = tmp_path / "access.log", "https://app.example.org"
    monkeypatch.setenv("PROTONET_TOKEN_2", "second")
    with start("serve", folder / "arrays.safetensors", "--access-log", log, "--cors-origins", page) as server:
        for token, status in ((TOKEN, 200), ("second", 200), ("third", 401)):
            assert server.ask("GET", "/models", token=token)[0] == status
        asked = {"Origin": page, "Access-Control-Request-Method": "POST"}
        asked |= {"Access-Control-Request-Headers": "authorization"}
        status, _, headers = server.ask("OPTIONS", "/models/arrays/predict", headers=asked, token="")
        assert (status, headers["access-control-allow-origin"]) == (200, page)
        _, _, headers = server.ask("GET", "/models", headers={"Origin": page, "X-Request-Id": "a-1"})
        assert (headers["access-control-allow-origin"], headers["x-request-id"]) == (page, "a-1")
        assert server.ask("GET", "/models", headers={"Origin": "https://evil.example"})[0] == 403
        server.ask("GET", f"/models?token={TOKEN}", token="")
        assert server.end()[0] == 0
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 401, 200, 403, 200]
    assert lines[3]["id"] == "a-1"
    assert TOKEN not in log.read_text(encoding="utf-8")


def test_a_token_is_printed_only_if_it_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTONET_TOKEN", raising=False)
    drawn = make_access_policy("127.0.0.1", [], 1)
    assert drawn.tokens[0] in drawn.address_query
    monkeypatch.setenv("PROTONET_TOKEN", "given")
    given = make_access_policy("127.0.0.1", [], 1)
    assert (given.tokens, given.address_query) == (["given"], "")
