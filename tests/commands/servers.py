"""Real servers in processes of their own, and what asks them."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "token-of-the-tests"


@dataclass
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    port: int

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] = {},
        token: str = TOKEN,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Return the status, the body and the headers of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        own = {"Authorization": f"Bearer {token}"} if token else {}
        content = body.encode() if isinstance(body, str) else body
        try:
            connection.request(method, path, content, {**own, **headers})
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def ask_json(self, method: str, path: str, value: object = None) -> Any:
        """Return what an answer of JSON holds, once it is known that all went well."""
        body = None if value is None else json.dumps(value)
        status, content, _ = self.ask(method, path, body, {"Content-Type": "application/json"})
        assert status == 200, content
        return json.loads(content)

    def refuse(self, method: str, path: str, body: bytes | str | None = None, **more: Any) -> tuple[int, str]:
        """Return the status and the line of an answer that refuses."""
        status, content, _ = self.ask(method, path, body, **more)
        line = json.loads(content)["error"]
        assert isinstance(line, str)
        assert line.isprintable()
        return status, line

    def end(self) -> tuple[int, str]:
        """Send SIGTERM; return the exit code and what it said on stderr."""
        self.process.terminate()
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@contextmanager
def serve(*arguments: object, env: Mapping[str, str] = {}) -> Iterator[Server]:
    """Start a command that listens; end it where it still runs."""
    more = {"PROTONET_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "protonet", *map(str, arguments), "--port", "0"],
        env={**os.environ, **more, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=" + TOKEN, line)
        assert found, (line, process.stderr and process.stderr.read())
        yield Server(process, int(found[1]))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
