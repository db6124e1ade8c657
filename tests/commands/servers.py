"""Real servers in separate processes, and their clients."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from tests.processes import start_command

TOKEN = "token-of-the-tests"
#: The line that a server prints when it listens.
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/$")


@dataclass
class Server:
    """A server that runs."""

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


def start_load(port: int, path: str, body: str, **limits: float) -> subprocess.Popen[str]:
    """Start the load generator; its limits are connections, seconds (``limit``) and requests."""
    headers = f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    settings = {"port": port, "path": path, "headers": headers, "body": body}
    settings |= {"connections": 50, "limit": 10**6, "requests": 10**9, **limits}
    command = [sys.executable, str(Path(__file__).with_name("load.py"))]
    load = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert load.stdin
    load.stdin.write(json.dumps(settings))
    load.stdin.close()
    load.stdin = None
    return load


def finish(load: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a load generator; return its measurements."""
    return dict(json.loads(load.communicate(timeout=600)[0]))
