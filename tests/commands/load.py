"""A load generator in a process of its own: connections that ask one after the other, over plain sockets."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import Any


class Connection(asyncio.Protocol):
    """Asks, and asks again once it is answered; where the server closes it, `ask_on` opens another one."""

    def __init__(self, request: bytes, result: dict[str, Any], until: float, max_requests: int) -> None:
        self.request, self.result, self.until, self.max_requests = request, result, until, max_requests
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Ask for the first time."""
        self.transport, self.held, self.waiting = transport, b"", False
        self.ask()

    def ask(self) -> None:
        """Send the next request, while there is to be one."""
        self.started = time.perf_counter()
        self.waiting = self.started < self.until and len(self.result["seconds"]) < self.max_requests
        if self.waiting:
            self.transport.write(self.request)
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take an answer, or a part of it, and ask again."""
        self.held += data
        head, end, body = self.held.partition(b"\r\n\r\n")
        head = head.lower()
        if not end or len(body) < int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            return
        if head.startswith(b"http/1.1 200"):
            self.result["seconds"].append(time.perf_counter() - self.started)
        else:
            self.result["failed"] += 1
            self.result["line"] = body.decode()
        self.held, self.waiting = b"", False
        if b"connection: close" in head:
            self.transport.close()
        else:
            self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note whether an answer was awaited."""
        self.result["lost"] += self.waiting
        self.ended.set_result(None)


async def ask_on(port: int, request: bytes, result: dict[str, Any], until: float, max_requests: int) -> None:
    """Ask until the end, on one connection after the other."""
    while time.perf_counter() < until and len(result["seconds"]) < max_requests:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(request, result, until, max_requests), "127.0.0.1", port
            )
        except OSError:  # no request was sent
            result["refused"] += 1
            await asyncio.sleep(0.01)
        else:
            await connection.ended


async def load(settings: dict[str, Any]) -> dict[str, Any]:
    """Ask over so many connections for so many seconds, or so many requests; return what came of it."""
    body, port = settings["body"].encode(), settings["port"]
    head = f"POST {settings['path']} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{settings['headers']}"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    result: dict[str, Any] = {"seconds": [], "lost": 0, "refused": 0, "failed": 0, "line": None}
    started = time.perf_counter()
    until = started + settings["limit"]
    asks = [ask_on(port, request, result, until, settings["requests"]) for _ in range(settings["connections"])]
    await asyncio.gather(*asks)
    result |= {"elapsed": time.perf_counter() - started, "cpu": time.process_time()}
    ordered = sorted(result.pop("seconds"))
    fractions = (0.5, 0.95, 0.99, 1.0)
    indices = {str(fraction): min(len(ordered) - 1, int(fraction * len(ordered))) for fraction in fractions if ordered}
    return result | {"answered": len(ordered), "quantiles": {fraction: ordered[at] for fraction, at in indices.items()}}


if __name__ == "__main__":
    with suppress(ImportError):  # a third of the work
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    print(json.dumps(asyncio.run(load(json.loads(sys.stdin.read())))))
