"""Who may ask a server: names of this machine, pages of its own, those who hold the token; and how it answers."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from protonet._text import to_printable
from protonet.errors import USER_ERRORS
from protonet.ui.command_line import report_bug

#: What every answer says: it is no other type than it claims, kept by nobody, and may load nothing.
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
#: The policy of what is no page, and the media type of most answers.
NOTHING, JSON_TYPE = "default-src 'none'; frame-ancestors 'none'", "application/json"
#: Writes JSON.
ENCODER = json.JSONEncoder(allow_nan=False)
#: The most parameters in an address.
MOST_PARAMETERS = 20


class RequestError(Exception):
    """A request that is answered by a status and one line."""

    def __init__(self, status: int, line: str, *more: tuple[str, str]) -> None:
        super().__init__(line)
        self.status, self.line, self.more = status, line, more


class Request(NamedTuple):
    """What is asked."""

    media: str  #: The type of the body, without its parameters.
    query: Mapping[str, str]  #: What the address holds behind "?", the token aside.
    body: bytes


class Answer(NamedTuple):
    """What is answered."""

    body: bytes
    media: str = JSON_TYPE
    more: tuple[tuple[str, str], ...] = ()  #: Further headers.
    status: int = 200
    policy: str = NOTHING


Handler = Callable[[Request], Awaitable[Answer]]


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

    def check(self, headers: Mapping[bytes, bytes], token: str, *, free: bool) -> None:
        """Raise `RequestError` for what may not come in.

        Args:
            headers: Of the request.
            token: In its address; "" for none.
            free: Whether it needs none.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if read_name(host) not in self.names:
            raise RequestError(400, f"`Host` must be a name of this server; got {to_printable(host)[:100]!r}.")
        origin = headers.get(b"origin", b"").lower().decode("latin-1")
        if b"origin" in headers and origin not in (f"http://{host.lower()}", f"https://{host.lower()}"):  # behind TLS
            raise RequestError(403, "`Origin` must be this server: pages of others may not ask it.")
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer if scheme.lower() == b"bearer" else token.encode(errors="replace")
        if not free and not hmac.compare_digest(given, self.token.encode()):
            line = "`token` must be the one that was printed at the start, as ?token=... or a bearer."
            raise RequestError(401, line, ("www-authenticate", "Bearer"))
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20 or int(length) > self.most_bytes:
            got = to_printable(length[:20].decode("latin-1"))
            raise RequestError(413, f"`body` must have at most {self.most_bytes:,} bytes; got {got}.")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestError(415, "`body` must not be compressed; got another content-encoding than identity.")
        if self.busy >= self.most_requests and not free:
            line = f"`requests` must be at most {self.most_requests} at a time; got more. Try again later."
            raise RequestError(429, line, ("retry-after", "1"))


@lru_cache(256)
def read_name(host: str) -> str | None:
    """Return the name in the Host of a request, in lower case; None where there is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


@dataclass
class Guard:
    """The application: lets requests in by a `Door`, and answers what goes wrong with a status and one line of JSON.

    Args:
        door: Who may ask.
        routes: What answers, by path and method; HEAD is as GET.
        free: Paths that need no token.
        count: Is told the path, the status and the seconds of each answer.
    """

    door: Door
    routes: Mapping[str, Mapping[str, Handler]]
    free: Collection[str] = ()
    count: Callable[[str, int, float], None] | None = None

    async def __call__(self, scope: Mapping[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """Answer one request, as ASGI has it."""
        started, late, task = time.perf_counter(), False, asyncio.current_task()

        def stop() -> None:
            nonlocal late
            late = True
            task.cancel()  # type: ignore[union-attr]

        timer = asyncio.get_running_loop().call_later(self.door.seconds, stop)  # `wait_for` would take another task
        try:
            answer = await self._answer(scope, receive)
        except asyncio.CancelledError:
            if not late:
                raise
            line = f"`answer` must be ready within {self.door.seconds:g} s; it was not. Send less, or try again later."
            answer = tell(RequestError(503, line, ("retry-after", "1")))
        except Exception as error:
            answer = tell(error)
        finally:
            timer.cancel()
        if answer is None:
            return
        headers = [
            *HEADERS,
            (b"content-security-policy", answer.policy.encode()),
            (b"content-type", answer.media.encode()),
            (b"content-length", str(len(answer.body)).encode()),
            *((name.encode(), value.encode()) for name, value in answer.more),
            *[(b"connection", b"close")] * self.door.closing,
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
        if self.count is not None:
            self.count(scope["path"], answer.status, time.perf_counter() - started)

    async def _answer(self, scope: Mapping[str, Any], receive: Callable[[], Any]) -> Answer | None:
        """Return the answer to a request; None where nobody is there to hear it."""
        headers, path, method = dict(reversed(scope["headers"])), scope["path"], scope["method"]
        query = read_query(scope["query_string"]) if scope["query_string"] else {}
        free = path in self.free
        self.door.check(headers, query.pop("token", ""), free=free)
        routes = self.routes.get(path)
        if routes is None:
            raise RequestError(404, f"`path` must be one of {', '.join(self.routes)}; got none of them.")
        handler = routes.get("GET" if method == "HEAD" else method)
        if handler is None:
            line = f"`method` must be {' or '.join(routes)} for this path; got {to_printable(method)[:20]}."
            raise RequestError(405, line, ("allow", ", ".join(routes)))
        self.door.busy += 1
        try:
            body, more = bytearray(), True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > self.door.most_bytes:
                    raise RequestError(413, f"`body` must have at most {self.door.most_bytes:,} bytes; got more.")
            media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
            return await handler(Request(media, query, bytes(body)))
        finally:
            self.door.busy -= 1


def read_query(text: bytes) -> dict[str, str]:
    """Return the parameters of an address.

    Raises:
        RequestError: There are too many, or one twice.
    """
    try:
        pairs = parse_qsl(text.decode("latin-1"), keep_blank_values=True, max_num_fields=MOST_PARAMETERS)
    except ValueError:
        raise RequestError(400, f"`query` must have at most {MOST_PARAMETERS} parameters; got more.") from None
    if len(dict(pairs)) < len(pairs):
        raise RequestError(400, "`query` must have each parameter once; got one twice. Leave one out.")
    return dict(pairs)


def tell(error: Exception) -> Answer:
    """Return the status and the line that say what went wrong."""
    more: tuple[tuple[str, str], ...] = ()
    if isinstance(error, RequestError):
        status, line, more = error.status, error.line, error.more
    elif isinstance(error, USER_ERRORS):
        status, line = 400, str(error)
    elif isinstance(error, OSError):
        status, line = 507, f"`disk` must take what is written; got {error.strerror or type(error).__name__}."
    else:
        status, line = 500, report_bug("protonet", error)
        print(line, file=sys.stderr)
    return send_json({"error": " ".join(line.split())})._replace(status=status, more=more)


def send_json(value: object) -> Answer:
    """Return a value as JSON."""
    return Answer(ENCODER.encode(value).encode() + b"\n")
