"""Servers and commands in forked processes, clients that send requests, and requests with and without sense."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch

from protonet.__main__ import main

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["protonet.server.labelling.api", "protonet.server.prediction_api"])


def run_command(arguments: Sequence[str], environment: Mapping[str, str], outputs: Sequence[Connection]) -> None:
    """Run a command in a new process with a new session, the given environment and outputs, and one thread."""
    os.setsid()
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    for stream, connection in enumerate(outputs, 1):
        os.dup2(connection.fileno(), stream)
        connection.close()
    sys.exit(main(arguments))


@contextmanager
def start_command(
    *arguments: object, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[BaseProcess, TextIO, TextIO]]:
    """Start a command, which is killed at the end of the context, and return its process, stdout and stderr."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    readers, writers = zip(*(PROCESSES.Pipe(duplex=False) for _ in range(2)), strict=True)
    process = PROCESSES.Process(target=run_command, args=([*map(str, arguments)], settings, writers))
    process.start()
    for writer in writers:
        writer.close()
    with ExitStack() as stack:
        files = [os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader in readers]
        output, errors = map(stack.enter_context, files)
        for reader in readers:
            reader.close()
        stack.callback(process.join)
        stack.callback(process.kill)
        yield process, output, errors


TOKEN = "token-of-the-tests"
#: Matches the end of the line that a server prints when it listens.
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/$")


@dataclass
class Server:
    """A running server."""

    process: BaseProcess
    port: int
    line: str  #: Its first line, with the address.
    errors: TextIO  #: Its stderr.

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] = {},
        token: str = TOKEN,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Send a request; return the status, the body and the headers of the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        authorization = {"Authorization": f"Bearer {token}"} if token else {}
        content = body.encode() if isinstance(body, str) else body
        try:
            connection.request(method, path, content, {**authorization, **headers})
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def ask_json(self, method: str, path: str, value: object = None) -> Any:
        """Send a request, and parse the JSON of a successful response."""
        body = None if value is None else json.dumps(value)
        status, content, _ = self.ask(method, path, body, {"Content-Type": "application/json"})
        assert status == 200, content
        return json.loads(content)

    def refuse(self, method: str, path: str, body: bytes | str | None = None, **more: Any) -> tuple[int, str]:
        """Send a request that is refused; return the status and the message."""
        status, content, _ = self.ask(method, path, body, **more)
        line = json.loads(content)["error"]
        assert isinstance(line, str)
        assert line.isprintable()
        return status, line

    def act(self, action: str, tab: str = "one", **arguments: Any) -> Any:
        """Send an action of the labelling page; return its answer."""
        return self.ask_json("POST", f"/api/{action}", {"tab": tab, **arguments})

    def refuse_action(self, action: str, tab: str = "one", **arguments: Any) -> tuple[int, str]:
        """Send an action of the labelling page that is refused; return the status and the message."""
        return self.refuse("POST", f"/api/{action}", json.dumps({"tab": tab, **arguments}))

    def measure(self) -> tuple[float, float]:
        """Measure the CPU time in seconds and the resident memory in MiB."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1])
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds, pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def end(self) -> tuple[int, str]:
        """Send SIGTERM; return the exit code and stderr."""
        self.process.terminate()
        self.process.join(60)
        assert self.process.exitcode is not None
        return self.process.exitcode, self.errors.read()


@contextmanager
def start(*arguments: object, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start a server command; kill it at the end if it still runs."""
    settings = {"PROTONET_TOKEN": TOKEN, **(environment or {})}
    with start_command(*arguments, "--port", "0", environment=settings) as (process, output, errors):
        line = output.readline()
        match = ADDRESS.search(line)
        assert match, (line, errors.read())
        yield Server(process, int(match[1]), line, errors)


def wait_for_job(server: Server) -> dict[str, Any]:
    """Return the state of the jobs once none is running."""
    while (state := server.ask_json("GET", "/api/jobs"))["running"]:
        time.sleep(0.1)
    return dict(state)


def ask_until_refused(server: Server, path: str, body: str) -> Counter[str]:
    """Send requests on one connection after the other until the server accepts none; count responses by status.

    A request whose connection ends without a response counts as "lost".
    """
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    counts = Counter[str]()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    while True:
        if connection.sock is None:
            try:
                connection.connect()
            except OSError:
                return counts
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            counts[str(response.status)] += 1
        except (OSError, http.client.HTTPException):
            counts["lost"] += 1
            connection.close()


def make_requests(
    seed: int, n: int, paths: Sequence[str], token: str
) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Yield requests of all sorts: methods, paths with and without sense, headers and bodies of noise."""
    draw = random.Random(seed)
    parts = ["..", "%2e%2e", "etc", "passwd", "models", "predict", "", "%00", "a" * 300, "é", "?", "token=x", "//", "%"]
    media = ["application/json", "text/csv", "application/x-npy", "image/png", "multipart/form-data; boundary=x", "x"]
    bodies = [b"", b"{}", b"[[", b"[" * 3000, b"null", b"a,b\n1", b'{"row": -1}', b'{"rows":[[1e999]]}']
    bodies += [b"\x1f\x8b\x08", b"\x93NUMPY\x01\x00v\x00{", b"\x89PNG\r\n\x1a\n"]
    bodies += [b'{"rows":[{"\\ud800":null}]}', b'{"rows":[["\\ud800"]]}']
    for _ in range(n):
        path = draw.choice([*paths, "/" + "/".join(draw.choices(parts, k=draw.randint(1, 6)))])
        noise = bytes(draw.randrange(256) for _ in range(draw.randint(0, 60)))
        headers = {"Content-Type": draw.choice(media)}
        if draw.random() < 0.3:
            headers["Authorization"] = draw.choice(["Bearer x", "Bearer", "Basic x", f"Bearer {token}"])
        if draw.random() < 0.2:
            headers["Host"] = draw.choice(["evil.example", "127.0.0.1:1@evil.example", "[::1", "", "localhost.evil"])
        if draw.random() < 0.2:
            headers["Origin"] = draw.choice(["http://evil.example", "null", "file://"])
        safe = path.encode("ascii", "ignore").decode().replace(" ", "")
        yield draw.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS"]), safe, draw.choice([*bodies, noise]), headers
