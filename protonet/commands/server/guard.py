"""Who may ask a server: names of this machine, pages of its own, those who hold the token; and how it says no."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from protonet._checks import MENDABLE, name_entry, show
from protonet.ui.command_line import report_bug

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: What every answer says: it is no other type than it claims, kept by nobody, and may load nothing.
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


class RequestError(Exception):
    """A request that is answered by a status and one line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


@dataclass
class Door:
    """What a server lets in.

    Args:
        token: What a request must hold: in its address (``?token=``), or as a bearer.
        names: What the machine may be called in the Host of a request, in lower case; others come by way of pages that
            give their own name to an address of this machine.
        most_bytes: Of a request's body.
        most_requests: That are answered at a time.
        seconds: That an answer may take.
    """

    token: str
    names: Collection[str]
    most_bytes: int
    most_requests: int = 128
    seconds: float = 30.0
    busy: int = 0  #: Requests that are being answered.
    closing: bool = False  #: Whether no connection is kept.

    def check(self, scope: Scope, headers: dict[str, str], *, free: bool) -> None:
        """Raise `RequestError` for what may not come in; ``free`` is what needs no token."""
        host = headers.get("host", "")
        if read_name(host) not in self.names:
            raise RequestError(400, f"`Host` must be a name of this server; got {show(host)[:100]!r}.")
        origin = headers.get("origin", f"http://{host}").lower()
        if origin not in {f"{scheme}://{host.lower()}" for scheme in ("http", "https")}:  # a proxy may have TLS
            raise RequestError(403, "`Origin` must be this server: pages of others may not ask it.")
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer if scheme.lower() == "bearer" else given
        if not free and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise RequestError(401, "`token` must be the one that was printed at the start, as ?token=... or a bearer.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 20 or int(length) > self.most_bytes:
            raise RequestError(413, f"`body` must have at most {self.most_bytes:,} bytes; got {length[:20]}.")
        if self.busy >= self.most_requests and not free:
            raise RequestError(429, f"`requests` must be at most {self.most_requests} at a time. Try again later.")


def read_name(host: str) -> str | None:
    """Return the name in the Host of a request, in lower case; None where there is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class Guard:
    """Lets requests in by a `Door`, and answers what goes wrong with a status and one line of JSON.

    Args:
        app: What answers.
        door: Who may ask.
        free: Paths that need no token.
    """

    def __init__(self, app: ASGIApp, door: Door, free: Collection[str] = ()) -> None:
        self.app, self.door, self.free = app, door, free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        started, size = False, 0

        async def take() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.door.most_bytes:
                raise RequestError(413, f"`body` must have at most {self.door.most_bytes:,} bytes; got more.")
            return message

        async def give(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = {name for name, _ in message["headers"]}
                more = HEADERS | ({"connection": "close"} if self.door.closing else {})
                pairs = [(name.encode(), value.encode()) for name, value in more.items() if name.encode() not in own]
                message = {**message, "headers": [*message["headers"], *pairs]}
            await send(message)

        scope["app"] = self  # so that what no route answers is raised, too
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
            self.door.check(scope, headers, free=scope["path"] in self.free)
            self.door.busy += 1
            try:
                await asyncio.wait_for(self.app(scope, take, give), self.door.seconds)
            finally:
                self.door.busy -= 1
        except Exception as error:
            status, line = tell(error, self.door.seconds)
            if status and not started:
                await give(_start(status, line))
                await send({"type": "http.response.body", "body": line})


def tell(error: Exception, seconds: float) -> tuple[int, bytes]:
    """Return the status and the line that say what went wrong; 0 where nobody is there to hear it."""
    from starlette.exceptions import HTTPException  # noqa: PLC0415 - optional
    from starlette.requests import ClientDisconnect  # noqa: PLC0415

    if isinstance(error, ClientDisconnect):
        return 0, b""
    if isinstance(error, RequestError):
        status, line = error.status, error.line
    elif isinstance(error, HTTPException):
        status, line = error.status_code, f"`path` must be one of this server; got none: {error.detail}."
    elif isinstance(error, asyncio.TimeoutError):
        status, line = 503, f"`answer` must be ready within {seconds:g} s; it was not. Send less, or try again later."
    elif isinstance(error, MENDABLE):
        status, line = 400, str(name_entry(error, ""))
    elif isinstance(error, OSError):
        status, line = 507, f"`disk` must take what is written; got {error.strerror or type(error).__name__}."
    else:
        status, line = 500, report_bug("protonet", error)
        print(line, file=sys.stderr)
    return status, json.dumps({"error": " ".join(line.split())}).encode() + b"\n"


def _start(status: int, line: bytes) -> dict[str, Any]:
    """Return the head of an answer that is one line of JSON."""
    headers = {"content-type": "application/json", "content-length": str(len(line))}
    headers |= {"retry-after": "1"} if status in {429, 503} else {}
    headers |= {"www-authenticate": "Bearer"} if status == 401 else {}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}
