"""The ASGI application that both servers share: access, limits, errors as JSON, the access log."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TextIO
from urllib.parse import parse_qs, quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protonet._text import to_printable
from protonet.errors import USER_ERRORS, raise_input_error
from protonet.ui.command_line import report_bug

#: Headers of every answer.
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
POLICY, NO_CONTENT = b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"
JSON, HTML, CSV = "application/json", "text/html; charset=utf-8", "text/csv; charset=utf-8"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "[::1]")
#: Environment variables of the token, and of a second one that is accepted while clients change theirs.
TOKEN, SECOND_TOKEN = "PROTONET_TOKEN", "PROTONET_TOKEN_2"
#: Paths that need no token.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
#: The messages in place of Starlette's plain texts.
PLAIN = {
    400: "`Host` must be a name of this server, or one of --allowed-hosts.",
    404: "There is no such path: /docs lists those that there are.",
    405: "This path takes another method.",
}
#: The accepted identifiers of requests.
REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")


class Error(msgspec.Struct):
    """The body of every error response."""

    error: str


@dataclass
class AccessPolicy:
    """Access and limits.

    Args:
        tokens: The accepted tokens: as a bearer, or in the address (``?token=``).
        hosts: The accepted names in ``Host``: this refuses pages that map their own name to this address.
        max_body: Bytes of a request's body.
        max_requests: Requests that are answered at a time.
        timeout: Seconds for an answer.
        origins: The origins of other servers whose pages may send requests.
        access_log: Where a line per request is written; None for nowhere.
        shown: Whether the token is printed, because no environment variable sets it.
    """

    tokens: Sequence[str]
    hosts: Collection[str]
    max_body: int
    max_requests: int = 128
    timeout: float = 30.0
    origins: Sequence[str] = ()
    access_log: TextIO | None = None
    shown: bool = False
    active: int = field(default=0, init=False)  #: Requests that are being answered.
    closing: bool = field(default=False, init=False)  #: Whether connections are not kept.

    @property
    def query(self) -> str:
        """The end of the printed address."""
        return f"?token={quote(self.tokens[0], safe='')}" if self.shown else ""


def make_policy(host: str, names: Sequence[str], max_body: int, **limits: Any) -> AccessPolicy:
    """Make the policy of a server that listens at a host, with tokens of the environment, or a random one."""
    for name in names:
        if not re.fullmatch(r"[^\s/:@\[\]]+|\[?[0-9a-fA-F:]+\]?", name):
            raise_input_error("allowed_hosts", "be host names without a port", repr(to_printable(name)), "Pass names.")
    tokens = [token for token in map(os.environ.get, (TOKEN, SECOND_TOKEN)) if token]
    hosts = {name.lower() for name in (*LOCAL_HOSTS, host, *names)} - {"0.0.0.0", "::"}
    return AccessPolicy(tokens or [secrets.token_urlsafe(24)], hosts, max_body, shown=not tokens, **limits)


def create_app(
    policy: AccessPolicy,
    routes: Sequence[BaseRoute],
    observe: Callable[[str, int, float], None] = lambda path, status, seconds: None,
) -> ASGIApp:
    """Create the application.

    Args:
        policy: Who may ask.
        routes: What answers.
        observe: Is called with the path, the status and the seconds of each answer.
    """
    app: ASGIApp = AccessMiddleware(Router(routes, redirect_slashes=False), policy)
    app = TrustedHostMiddleware(app, list(policy.hosts), www_redirect=False)
    app = RequestMiddleware(app, policy, observe)
    if policy.origins:
        headers, methods = ["Authorization", "X-Request-Id"], ["GET", "POST"]
        app = CORSMiddleware(app, policy.origins, methods, headers, expose_headers=["X-Request-Id"])
    return app  # not `Starlette`, whose two layers for errors would cost a tenth of a request


@dataclass
class RequestMiddleware:
    """Give each request an id, a deadline and a line of the log, and turn what fails into JSON."""

    app: ASGIApp
    policy: AccessPolicy
    observe: Callable[[str, int, float], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started, task, status, size, expired = time.perf_counter(), asyncio.current_task(), 0, 0, False
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8).encode()

        def expire() -> None:
            nonlocal expired
            expired = True
            task.cancel()  # type: ignore[union-attr]

        async def respond(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                headers = message["headers"]
                if message["status"] in PLAIN and (b"content-type", b"text/plain; charset=utf-8") in headers:
                    allow = {name.decode(): value.decode() for name, value in headers if name == b"allow"}
                    raise HTTPException(message["status"], PLAIN[message["status"]], allow)
                status = message["status"]
                headers += [*HEADERS, (b"x-request-id", request_id)]
                if not any(name == POLICY for name, _ in headers):
                    headers.append((POLICY, NO_CONTENT))
                if self.policy.closing:
                    headers.append((b"connection", b"close"))
            else:
                size += len(message.get("body", b""))
            await send(message)

        timer = asyncio.get_running_loop().call_later(self.policy.timeout, expire)  # `wait_for` takes a task more
        error: Exception | None = None
        try:
            await self.app(scope, receive, respond)
        except asyncio.CancelledError:
            if not expired:
                raise
            line = f"The answer must be ready within {self.policy.timeout:g} s; it was not. Send less, or later."
            error = HTTPException(503, line, {"retry-after": "1"})
        except ClientDisconnect:
            return
        except Exception as caught:
            error = caught
        finally:
            timer.cancel()
        if error is not None and not status:
            await error_response(error)(scope, receive, respond)
        seconds = time.perf_counter() - started
        self.observe(scope["path"], status, seconds)
        if self.policy.access_log is not None:
            entry = {
                "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                "id": request_id.decode(),
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "bytes": size,
                "seconds": round(seconds, 6),
            }
            self.policy.access_log.write(msgspec.json.encode(entry).decode() + "\n")


@dataclass
class AccessMiddleware:
    """Refuse what the policy does not allow, before the body is read, and a body beyond its bound."""

    app: ASGIApp
    policy: AccessPolicy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, and pass it on."""
        policy, is_open, size = self.policy, scope["path"] in OPEN_PATHS, 0
        headers = dict(reversed(scope["headers"]))
        self.check(headers, scope["query_string"], is_open=is_open)
        if is_open:
            await self.app(scope, receive, send)
            return
        if policy.active >= policy.max_requests:
            line = f"At most {policy.max_requests} requests are answered at a time. Try again later."
            raise HTTPException(429, line, {"retry-after": "1"})

        async def receive_part() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > policy.max_body:
                raise HTTPException(413, f"`body` must have at most {policy.max_body:,} bytes; got more.")
            return message

        policy.active += 1
        try:
            await self.app(scope, receive_part, send)
        finally:
            policy.active -= 1

    def check(self, headers: dict[bytes, bytes], query: bytes, *, is_open: bool) -> None:
        """Raise an HTTPException unless a request has a token and a body that may be read."""
        host, origin = headers.get(b"host", b"").lower().decode("latin-1"), headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in (
            f"http://{host}",
            f"https://{host}",  # behind TLS
            *self.policy.origins,
        ):
            raise HTTPException(403, "`Origin` must be this server, or one of --cors-origins.")
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = parse_qs(query).get(b"token", [b""])[0] if b"token=" in query else b""
        if not is_open and not any(hmac.compare_digest(given, token.encode()) for token in self.policy.tokens):
            line = "`token` must be that of the server, as ?token=... or a bearer."
            raise HTTPException(401, line, {"www-authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20 or int(length) > self.policy.max_body:
            got = to_printable(length[:20].decode("latin-1"))
            raise HTTPException(413, f"`body` must have at most {self.policy.max_body:,} bytes; got {got}.")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HTTPException(415, "`body` must not be compressed; got another content-encoding than identity.")


def error_response(error: Exception) -> Response:
    """Make the answer that says in one line what went wrong."""
    status, headers = 500, None
    if isinstance(error, HTTPException):
        status, line, headers = error.status_code, error.detail, error.headers
    elif isinstance(error, USER_ERRORS):
        status, line = 400, str(error)
    elif isinstance(error, OSError):
        status, line = 507, f"The disk must take what is written; got {error.strerror or type(error).__name__}."
    else:
        line = report_bug("protonet", error)
        print(line, file=sys.stderr)
    return json_response(Error(" ".join(line.split())), status, headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make an answer of JSON."""
    return Response(msgspec.json.encode(value) + b"\n", status, headers, JSON)


def html_response(page: str, policy: str) -> Response:
    """Make an answer of a page and its content security policy."""
    return Response(page, headers={POLICY.decode(): policy}, media_type=HTML)
