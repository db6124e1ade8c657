"""The HTTP server of ``serve`` and ``page``: access checks, limits, errors as JSON, the access log and the socket.

The limits on connections and on the head of a request apply before the application sees the request.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hmac
import logging
import re
import secrets
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from urllib.parse import parse_qs

import httptools
import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from protonet._text import plural, to_printable
from protonet.errors import UserError, raise_input_error
from protonet.server.access import AccessPolicy
from protonet.ui.command_line import write_bug_report

#: Headers of every response.
RESPONSE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
#: Name of the header of the content security policy, and its value for responses that are not pages.
POLICY_HEADER, NO_CONTENT_POLICY = b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"
#: Media types of bodies.
JSON_TYPE, HTML_TYPE, CSV_TYPE = "application/json", "text/html; charset=utf-8", "text/csv; charset=utf-8"
#: Paths that need no token.
TOKEN_FREE_PATHS = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
#: Error messages that replace those of Starlette, by HTTP status.
STATUS_MESSAGES = {
    400: "`Host` must be a name of this server, or one of --allowed-hosts.",
    404: "There is no such path.",
    405: "This path takes another method.",
}
#: Matches values of the header ``X-Request-Id`` that are accepted from clients.
REQUEST_ID_PATTERN = re.compile(rb"[\w.:/+=-]{1,128}")


class Error(msgspec.Struct):
    """The body of every error response."""

    error: str


def create_app(
    policy: AccessPolicy,
    routes: Sequence[BaseRoute],
    record_response: Callable[[str, int, float], None] = lambda path, status, seconds: None,
) -> ASGIApp:
    """Create an ASGI application from routes, with the access checks, limits and access log of a policy.

    ``record_response`` is called with the path, the status and the duration in seconds of each response.
    """
    app: ASGIApp = AccessMiddleware(Router(routes, redirect_slashes=False), policy)
    app = TrustedHostMiddleware(app, list(policy.allowed_hosts), www_redirect=False)
    app = RequestMiddleware(app, policy, record_response)
    if policy.allowed_origins:
        headers, methods = ["Authorization", "X-Request-Id"], ["GET", "POST"]
        app = CORSMiddleware(app, policy.allowed_origins, methods, headers, expose_headers=["X-Request-Id"])
    return app  # not `Starlette`, whose two layers for errors would cost a tenth of a request


@dataclass
class RequestMiddleware:
    """ASGI middleware that sets a request's id and time limit, writes the access log, and returns errors as JSON."""

    app: ASGIApp
    policy: AccessPolicy
    record_response: Callable[[str, int, float], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request within the policy's time limit, and write it to the access log."""
        started, task, status, size, end_line = time.perf_counter(), asyncio.current_task(), 0, 0, ""
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if REQUEST_ID_PATTERN.fullmatch(given) else secrets.token_hex(8).encode()

        def end(line: str) -> None:
            nonlocal end_line
            end_line = line
            task.cancel()  # type: ignore[union-attr]

        async def respond(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                headers = message["headers"]
                if message["status"] in STATUS_MESSAGES and (b"content-type", b"text/plain; charset=utf-8") in headers:
                    allow = {name.decode(): value.decode() for name, value in headers if name == b"allow"}
                    raise HTTPException(message["status"], STATUS_MESSAGES[message["status"]], allow)
                status = message["status"]
                headers += [*RESPONSE_HEADERS, (b"x-request-id", request_id)]
                if not any(name == POLICY_HEADER for name, _ in headers):
                    headers.append((POLICY_HEADER, NO_CONTENT_POLICY))
                if self.policy.is_closing:
                    headers.append((b"connection", b"close"))
            else:
                size += len(message.get("body", b""))
            await send(message)

        loop, timeout = asyncio.get_running_loop(), self.policy.response_timeout_seconds
        line = f"The answer must be ready within {timeout:g} s; it was not. Send less, or later."
        timer = loop.call_later(timeout, end, line)  # `wait_for` takes a task more
        scope["end"] = end  # for `LimitedProtocol.connection_lost`
        self.policy.running_requests.add(end)
        error: Exception | None = None
        try:
            check_repeated_headers(scope["headers"])
            await self.app(scope, receive, respond)
        except asyncio.CancelledError:
            if not end_line:
                raise
            error = HTTPException(503, end_line, {"retry-after": "1"})
        except ClientDisconnect:
            return
        except Exception as caught:
            error = caught
        finally:
            timer.cancel()
            self.policy.running_requests.discard(end)
        if error is not None and not status:
            await error_response(error)(scope, receive, respond)
        seconds = time.perf_counter() - started
        self.record_response(scope["path"], status, seconds)
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


def check_repeated_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise an HTTPException if a header that decides on a request is repeated: a proxy may have read the other one."""
    names = [name for name, _ in headers]
    for name in (b"host", b"origin", b"authorization", b"content-length", b"content-type", b"content-encoding"):
        if names.count(name) > 1:
            raise HTTPException(400, f"`{name.decode().title()}` must be given once; got it {names.count(name)} times.")


@dataclass
class AccessMiddleware:
    """ASGI middleware that rejects requests that the policy does not allow, and bodies that are too large."""

    app: ASGIApp
    policy: AccessPolicy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the headers of a request and the number of active requests, then pass the request on."""
        policy, is_open, size = self.policy, scope["path"] in TOKEN_FREE_PATHS, 0
        headers = dict(reversed(scope["headers"]))
        self.check_headers(headers, scope["query_string"], needs_no_token=is_open)
        if is_open:
            await self.app(scope, receive, send)
            return
        if policy.n_active_requests >= policy.max_requests:
            line = f"At most {policy.max_requests} requests are answered at a time. Try again later."
            raise HTTPException(429, line, {"retry-after": "1"})

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > policy.max_body_bytes:
                raise HTTPException(413, f"`body` must have at most {policy.max_body_bytes:,} bytes; got more.")
            return message

        policy.n_active_requests += 1
        try:
            await self.app(scope, receive_limited, send)
        finally:
            policy.n_active_requests -= 1

    def check_headers(self, headers: dict[bytes, bytes], query: bytes, *, needs_no_token: bool) -> None:
        """Raise an HTTPException unless origin, token, length and encoding of a request are allowed by the policy."""
        host, origin = headers.get(b"host", b"").lower().decode("latin-1"), headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in (
            f"http://{host}",
            f"https://{host}",  # behind TLS
            *self.policy.allowed_origins,
        ):
            raise HTTPException(403, "`Origin` must be this server, or one of --cors-origins.")
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = parse_qs(query).get(b"token", [b""])[0] if b"token=" in query else b""
        if not needs_no_token and not any(hmac.compare_digest(given, token.encode()) for token in self.policy.tokens):
            line = "`token` must be that of the server, as ?token=... or a bearer."
            raise HTTPException(401, line, {"www-authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20 or int(length) > self.policy.max_body_bytes:
            got = to_printable(length[:20].decode("latin-1"))
            raise HTTPException(413, f"`body` must have at most {self.policy.max_body_bytes:,} bytes; got {got}.")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HTTPException(415, "`body` must not be compressed; got another content-encoding than identity.")


def error_response(error: Exception) -> Response:
    """Make the JSON response to an exception, with an HTTP status and a message of one line."""
    status, headers = 500, None
    if isinstance(error, HTTPException):
        status, line, headers = error.status_code, error.detail, error.headers
    elif isinstance(error, UserError):
        status, line = 400, str(error)
    elif isinstance(error, OSError):
        got = f"{error.strerror or type(error).__name__} for {to_printable(error.filename or 'a temporary file')}"
        status, line = 507, f"The disk must take what is written; got {got}."
    else:
        line = write_bug_report("protonet", error)
        print(line, file=sys.stderr)
    return json_response(Error(" ".join(line.split())), status, headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a response whose body is a value as JSON."""
    return Response(msgspec.json.encode(value) + b"\n", status, headers, JSON_TYPE)


def html_response(page: str, policy: str) -> Response:
    """Make a response whose body is an HTML page; ``policy`` is the page's content security policy."""
    return Response(page, headers={POLICY_HEADER.decode(): policy}, media_type=HTML_TYPE)


#: Maximal number of connections. A further one is accepted after the connection that was idle longest is closed.
MAX_CONNECTIONS = 1024
#: Maximal bytes of the head of a request (its first line and headers), and of the trailers after a chunked body.
MAX_HEAD_BYTES = 2**16
#: Maximal seconds until the head of a request has arrived.
MAX_HEAD_SECONDS = 10.0
#: Seconds after SIGTERM until requests without an answer get an error, and the server exits soon after.
MAX_CLOSING_SECONDS = 4.0


class ConnectionState(ServerState):
    """The state that all connections share: the open connections, and the connections that are idle.

    A connection is idle until the head of a request has arrived, and again after the response. ``idle`` maps each
    idle connection to the time at which it became idle, in seconds of the event loop's clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle = OrderedDict[LimitedProtocol, float]()  # the longest idle first

    def close_idle_connections(self, now: float) -> None:
        """Close the connections that have been idle for `MAX_HEAD_SECONDS` seconds or more at the time ``now``."""
        while self.idle:
            connection, since = next(iter(self.idle.items()))
            if now - since < MAX_HEAD_SECONDS:
                return
            connection.close_idle_connection()


class LimitedProtocol(HttpToolsProtocol):
    """An HTTP/1.1 connection with limits on the size and arrival time of a request's head, and with errors as JSON."""

    server_state: ConnectionState

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many, close the connection that has been idle for the longest time."""
        super().connection_made(transport)
        self.reading_head, self.head_bytes, self.rejected = True, 0, False
        idle = self.server_state.idle
        if len(self.connections) > MAX_CONNECTIONS:
            if not idle:
                self.reject(503, f"All {MAX_CONNECTIONS} connections are in use. Try again later.")
                return
            idle.popitem(last=False)[0].transport.abort()
        idle[self] = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; reject the request if its head or its trailers are too large."""
        if self.rejected:  # the bytes are read, so that the client gets the response and no reset
            return
        counted = self.reading_head
        super().data_received(data)
        if counted and self.reading_head:
            self.head_bytes += len(data)
            if self.head_bytes > MAX_HEAD_BYTES:
                self.reject_large_head()

    def on_message_begin(self) -> None:
        """Start counting the bytes of a request's head."""
        super().on_message_begin()
        self.reading_head, self.head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Start the application on a request whose head is complete, unless the head is too large."""
        self.reading_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self.reject_large_head()
            raise httptools.HttpParserError
        self.server_state.idle.pop(self, None)
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Start counting bytes: after the header of the last chunk, the bytes are trailers."""
        self.reading_head, self.head_bytes = True, 0
        self.headers = []  # takes the trailers, which the application does not see

    def on_body(self, body: bytes) -> None:
        """Stop counting bytes of the head, and pass on bytes of the body."""
        self.reading_head = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete, so that the next bytes are not counted as part of a request head."""
        self.reading_head = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Add the connection to the idle connections, unless another request has arrived."""
        pipelined = bool(self.pipeline)
        super().on_response_complete()
        if not pipelined:
            self.server_state.idle[self] = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a closed connection from the idle ones, and end its request if only the client needed the answer."""
        self.server_state.idle.pop(self, None)
        if self.cycle is not None and not self.cycle.response_complete:
            scope: Scope = {**self.cycle.scope}
            if "ends_with_client" in scope:
                scope["end"]("The client has closed the connection.")
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error as JSON."""
        self.reject(400, "The request must be HTTP/1.1.")

    def reject_large_head(self) -> None:
        """Reject a request whose head or trailers are too large."""
        self.reject(431, f"The head of a request, or its trailers, must have at most {MAX_HEAD_BYTES:,} bytes.")

    def close_idle_connection(self) -> None:
        """Close an idle connection; if a part of a request has arrived, send an error first."""
        self.server_state.idle.pop(self, None)
        if self.head_bytes and not self.rejected:
            self.reject(408, f"The head of a request must arrive within {MAX_HEAD_SECONDS:g} s.")
        else:
            self.transport.abort()

    def reject(self, status: int, message: str) -> None:
        """Send an error as JSON; the connection is closed when the client closes it, or after `MAX_HEAD_SECONDS`."""
        if self.rejected:
            return
        self.rejected = True
        if self.cycle is not None and not self.cycle.response_complete:  # the application must not write after this
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = msgspec.json.encode(Error(message)) + b"\n"
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        with suppress(OSError, RuntimeError):
            self.transport.write_eof()
        self.server_state.idle[self] = self.loop.time()


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; raise an InputError if the address or the port cannot be used."""
    try:
        family = socket.getaddrinfo(host or "none", port, type=socket.SOCK_STREAM)[0][0]  # "" would be all addresses
        listening_socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        got = to_printable(f"{host}:{port} ({getattr(error, 'strerror', None) or 'no name'})")
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            raise_input_error("port", "be free for this command", got, "Pass another one; 0 is any that is free.")
        raise_input_error("host", "be an address of this machine", got, "Pass 127.0.0.1, or 0.0.0.0 for all of them.")
    # As asyncio sets it for its own sockets; otherwise the second packet of a response waits 40 ms for the first.
    listening_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening_socket


class Server(uvicorn.Server):
    """A uvicorn server that closes idle connections and, when it stops, asks clients to close their connections."""

    def __init__(self, config: uvicorn.Config, policy: AccessPolicy) -> None:
        super().__init__(config)
        self.server_state: ConnectionState = ConnectionState()
        self.policy = policy
        self.n_unanswered = 0  #: Number of requests that got an error because the server stopped.

    async def on_tick(self, counter: int) -> bool:
        """Close connections that have been idle for too long; uvicorn calls this method ten times a second."""
        self.server_state.close_idle_connections(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, stop accepting connections, answer pending requests, and end those that take too long.

        In the drain period, load balancers see that the server is not ready, and send new requests elsewhere.
        """
        policy, started, connections = self.policy, time.monotonic(), self.server_state.connections
        policy.is_stopping = True
        while not self.force_exit and time.monotonic() < started + policy.drain_seconds:
            await asyncio.sleep(0.02)
        policy.is_closing = True  # not earlier, since clients would open new connections up to the last moment
        for server in self.servers:
            server.close()
        # Clients that keep connections open get a second to close them, so that none of their requests is lost.
        while not self.force_exit and time.monotonic() < started + MAX_CLOSING_SECONDS:
            if not connections or (
                not policy.running_requests and time.monotonic() > started + policy.drain_seconds + 1
            ):
                break
            await asyncio.sleep(0.02)
        self.n_unanswered = len(policy.running_requests)
        for end in list(policy.running_requests):
            end("The server stops. Send the request to another one, or later.")
        await super().shutdown(sockets)


def increase_open_file_limit() -> None:
    """Increase the limit on open files to twice `MAX_CONNECTIONS`, as far as the system allows."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 - not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * MAX_CONNECTIONS, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run_server(app: ASGIApp, policy: AccessPolicy, listening_socket: socket.socket, title: str) -> None:
    """Print the title and the address of a server, and run the server until SIGTERM or Ctrl-C."""
    increase_open_file_limit()
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # the response describes the error
    gc.collect()
    gc.freeze()  # else each full collection visits all of torch, 100 ms in which no request is answered
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,  # after `Server.shutdown` has waited
    )
    host, port = listening_socket.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    server = Server(config, policy)
    # uvicorn has a handler while it runs, and raises the signal once more after the end.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    print(f"{title}: http://{name}:{port}/{policy.address_query}", flush=True)
    # A thread that parses a large request holds the interpreter's lock for at most this time, s, before it passes it on
    # to the thread that answers the others; the default is 5 ms, which each reading and each writing would wait for.
    sys.setswitchinterval(0.0005)
    with suppress(KeyboardInterrupt), listening_socket:
        server.run([listening_socket])
    late = f"{plural(server.n_unanswered, 'request')} took too long"
    pending = late if server.n_unanswered else "pending requests were answered"
    print(f"server stopped; {pending}", file=sys.stderr)
