"""A server that reads a request and answers 200 with nothing: what HTTP alone costs, on the same stack as ``serve``."""

from __future__ import annotations

from typing import Any

from protonet.server.app import make_policy
from protonet.server.connections import open_socket, run_server


async def answer(_: Any, receive: Any, send: Any) -> None:
    """Answer one request, as ASGI has it."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


if __name__ == "__main__":
    run_server(answer, make_policy("127.0.0.1", [], 0), open_socket("127.0.0.1", 0), "nothing at")
