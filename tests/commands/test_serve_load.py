"""Large requests beside small ones, clients that leave, and the end of the server during a request."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from starlette.exceptions import HTTPException

from protonet.errors import InputError
from protonet.pipeline import TablePipeline
from protonet.server.batches import (
    MAX_BATCH_ROWS,
    MAX_ENCODED_ROWS,
    PendingSlice,
    RequestBatcher,
    SliceEncoder,
    encode_slices,
)
from protonet.server.parsing import ParsedRows
from protonet.tables.formats.source import make_text_array
from protonet.tables.table import RowBlock
from tests.commands.cases import fit_model
from tests.commands.servers import TOKEN, Server, start

pytest.importorskip("uvicorn", reason="it listens")
N_ROWS = 100_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two numbers and a word."""
    table = tmp_path_factory.mktemp("load") / "table.csv"
    lines = [f"{row % 7},{(row % 2) * 3 + row / 9},{'ab'[row % 2]},{'ant' if row % 2 else 'bee'}" for row in range(40)]
    table.write_text("\n".join(["x,z,word,kind", *lines, ""]), encoding="utf-8")
    return fit_model(table)


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    with start("serve", path) as server:
        yield server


def make_body(n: int) -> str:
    return json.dumps([[row % 7, row % 5, "ab"[row % 2]] for row in range(n)])


def make_rows(model: TablePipeline, n: int) -> ParsedRows:
    dim = int(model.network.encoder.input_dim)  # type: ignore[arg-type]
    x = np.random.default_rng(0).normal(size=(n, dim)).astype(np.float32)
    return ParsedRows(x, [], np.zeros(n, bool))


def test_small_requests_are_answered_between_slices_of_large_ones(path: Path) -> None:
    model, ended = TablePipeline.load(path), list[str]()
    large, small = make_rows(model, 5 * MAX_BATCH_ROWS), make_rows(model, 3)

    async def ask() -> int:
        batcher = RequestBatcher()

        async def classify(name: str, rows: ParsedRows) -> None:
            named, logits = await batcher.classify(model, rows, None)
            ended.append(name)
            assert len(named) == len(logits) == len(rows.x)
            assert torch.equal(logits, model.predict_logits(rows.x))

        async def classify_later() -> None:
            while batcher.n_batches < 2:
                await asyncio.sleep(0)
            await classify("small", small)

        await asyncio.gather(classify("large", large), classify("other large", large), classify_later())
        return batcher.n_batches

    assert asyncio.run(ask()) >= 11
    assert ended == ["small", "large", "other large"]


def test_rows_of_a_cancelled_request_are_not_classified(path: Path) -> None:
    model = TablePipeline.load(path)

    async def ask() -> list[int]:
        batcher = RequestBatcher()
        task = asyncio.create_task(batcher.classify(model, make_rows(model, 50 * MAX_BATCH_ROWS), None))
        while batcher.n_batches < 2:
            await asyncio.sleep(0)
        task.cancel()
        await batcher.classify(model, make_rows(model, 1), None)
        before = batcher.n_batches
        await batcher.classify(model, make_rows(model, 1), None)
        return [before, batcher.n_batches]

    before, after = asyncio.run(ask())
    assert before <= 5
    assert after == before + 1


def make_block(columns: list[np.ndarray]) -> RowBlock:
    return RowBlock.from_columns(columns, ("x", "z", "word"), "row {}")


def make_cells(n: int, seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [
        draw.normal(size=n),
        draw.normal(size=n),
        make_text_array([str(word) for word in draw.choice(["a", "b"], n)], n),
    ]


def test_texts_of_concurrent_requests_are_encoded_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder of texts takes little longer for ten of them than for one."""
    model, encoder, sizes = TablePipeline.load(path), SliceEncoder(), list[int]()
    one_by_one, all_wait = TablePipeline.encode, Barrier(20)
    monkeypatch.setattr(TablePipeline, "column_modalities", property(lambda self: ["text"] * 3))  # they are slow

    def encode(self: TablePipeline, block: RowBlock, argument: str = "path", *, keep_gaps: bool = False) -> np.ndarray:
        sizes.append(len(block.positions))
        time.sleep(0.05)
        return one_by_one(self, block, argument, keep_gaps=keep_gaps)

    monkeypatch.setattr(TablePipeline, "encode", encode)

    def ask(index: int) -> bool:
        block = make_block(make_cells(100 if index == 0 else 1, index))
        all_wait.wait()
        x = encoder.encode(lambda: False, model, block, "body")
        return np.array_equal(x, one_by_one(model, block))

    with ThreadPoolExecutor(20) as pool:
        assert all(pool.map(ask, range(20)))
    assert sum(sizes) == 100 + 19
    assert max(sizes) <= MAX_ENCODED_ROWS
    assert len(sizes) <= 10  # 7 slices of the large request, and the 19 small ones with them
    with pytest.raises(HTTPException, match="has ended"):
        encoder.encode(lambda: True, model, make_block(make_cells(1, 0)), "body")


def test_an_error_is_that_of_its_request(path: Path) -> None:
    model = TablePipeline.load(path)
    wrong = make_cells(2, 1)
    wrong[0][1] = np.inf
    slices = [PendingSlice(model, make_block(cells), "body") for cells in (make_cells(3, 0), wrong, make_cells(1, 2))]
    first, error, last = encode_slices(slices)
    assert isinstance(error, InputError)
    assert str(error).startswith("`body` must have finite numbers; got 'inf' in x, row 1")
    for item, x in ((slices[0], first), (slices[2], last)):
        assert isinstance(x, np.ndarray)
        assert np.array_equal(x, model.encode(item.block))


def test_small_requests_do_not_wait_for_a_large_one(server: Server) -> None:
    """Twenty small requests are answered before one of 100,000 rows that was sent before them."""
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.ask_json, "POST", "/models/model/predict", json.loads(make_body(N_ROWS)))
        time.sleep(0.2)
        for _ in range(20):
            assert server.ask_json("POST", "/models/model/predict", [[1, 2, "a"]])["predictions"]
        assert not large.done()
        assert len(large.result()["predictions"]) == N_ROWS


def test_the_request_of_a_client_that_left_ends(server: Server) -> None:
    body = make_body(60_000).encode()
    head = f"POST /models/model/predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(0.1)
    metrics = ""
    while "protonet_requests_in_progress 1.0" not in metrics:  # that of the metrics
        metrics = server.ask("GET", "/metrics")[1].decode()
    assert 'protonet_rows_total{model="model"}' not in metrics
    assert 'protonet_requests_total{model="model",status="503"} 8.0' in metrics
    seconds = server.measure()[0]
    time.sleep(0.5)
    assert server.measure()[0] - seconds < 0.3  # all threads are idle


def test_connections_are_accepted_while_the_server_drains(server: Server) -> None:
    server.process.terminate()
    statuses = Counter[int]()
    try:
        while True:
            statuses[server.ask("GET", "/readyz", token="")[0]] += 1
            assert server.ask_json("POST", "/models/model/predict", [[1, 2, "a"]])["predictions"]
    except (ConnectionError, http.client.RemoteDisconnected):
        pass
    assert statuses[503] >= 5
    server.process.join(5)
    assert server.process.exitcode == 0
    assert server.errors.read() == "server stopped; pending requests were answered\n"


def test_the_server_ends_within_five_seconds(path: Path) -> None:
    """Requests that take longer get an answer that says so."""
    with start("serve", path, "--timeout", 60) as server, ThreadPoolExecutor(9) as pool:
        body, headers = make_body(90_000), {"Content-Type": "application/json"}
        asked = [pool.submit(server.ask, "POST", "/models/model/predict?proba=1", body, headers) for _ in range(9)]
        time.sleep(1)
        server.process.terminate()
        server.process.join(5)
        assert server.process.exitcode == 0
        statuses = Counter(item.result()[0] for item in asked)
        assert statuses.keys() <= {200, 503}
        assert server.errors.read() == f"server stopped; {statuses[503]} requests took too long\n"
