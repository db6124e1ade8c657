"""The listening socket and its connections: limits that hold before the application sees a request."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import time
from collections import OrderedDict
from contextlib import suppress

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from protonet._text import to_printable
from protonet.errors import raise_input_error
from protonet.server.app import AccessPolicy, Error

#: Maximal numbers of connections (the longest idle one is closed for a new one), and bytes of a request's head.
MAX_CONNECTIONS, MAX_HEAD_BYTES = 1024, 2**16
#: Seconds that a connection may take for the head of a request, and that clients get to close theirs at the end.
HEAD_SECONDS, CLOSING_SECONDS = 10.0, 1.0


class ConnectionState(ServerState):
    """The state that the connections share: those without a request, the longest idle first."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = OrderedDict[LimitedProtocol, float]()

    def expire(self, now: float) -> None:
        """Close the connections that have had no request for `HEAD_SECONDS`."""
        while self.idle:
            connection, since = next(iter(self.idle.items()))
            if now - since < HEAD_SECONDS:
                return
            connection.time_out()


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with a bound and a deadline for the head of a request, and JSON for every error."""

    server_state: ConnectionState

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many, close the longest idle one."""
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
        """Parse what has come, unless the head of the request grows beyond its bound."""
        if self.rejected:  # read on, so that the client sees the answer in place of a reset
            return
        counted = self.reading_head
        super().data_received(data)
        if counted and self.reading_head:
            self.head_bytes += len(data)
            if self.head_bytes > MAX_HEAD_BYTES:
                self.reject_head()

    def on_message_begin(self) -> None:
        """Begin to count the head."""
        super().on_message_begin()
        self.reading_head, self.head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Hand the request to the application."""
        self.reading_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self.reject_head()
            raise httptools.HttpParserError
        self.server_state.idle.pop(self, None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        pipelined = bool(self.pipeline)
        super().on_response_complete()
        if not pipelined:
            self.server_state.idle[self] = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.server_state.idle.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self.reject(400, "The request must be HTTP/1.1.")

    def reject_head(self) -> None:
        """Answer a head that is too large."""
        self.reject(431, f"The head of a request must have at most {MAX_HEAD_BYTES:,} bytes.")

    def time_out(self) -> None:
        """Close a connection that sends no request; answer first if it has begun one."""
        self.server_state.idle.pop(self, None)
        if self.head_bytes and not self.rejected:
            self.reject(408, f"The head of a request must arrive within {HEAD_SECONDS:g} s.")
        else:
            self.transport.abort()

    def reject(self, status: int, message: str) -> None:
        """Answer with an error, and close the connection once the client does, or at the deadline."""
        if self.rejected:
            return
        self.rejected = True
        body = msgspec.json.encode(Error(message)) + b"\n"
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        with suppress(OSError, RuntimeError):
            self.transport.write_eof()
        self.server_state.idle[self] = self.loop.time()


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        InputError: The address is not one of this machine, or in use.
    """
    try:
        family = socket.getaddrinfo(host or "none", port, type=socket.SOCK_STREAM)[0][0]  # "" would be all addresses
        listening = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        got = to_printable(f"{host}:{port} ({getattr(error, 'strerror', None) or 'no name'})")
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            raise_input_error("port", "be free for this command", got, "Pass another one; 0 is any that is free.")
        raise_input_error("host", "be an address of this machine", got, "Pass 127.0.0.1, or 0.0.0.0 for all of them.")
    # asyncio does this for sockets of its own; without it the second packet of an answer waits 40 ms for the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Server(uvicorn.Server):
    """A server with a deadline for idle connections, which asks clients to close theirs when it stops."""

    def __init__(self, config: uvicorn.Config, policy: AccessPolicy) -> None:
        super().__init__(config)
        self.server_state: ConnectionState = ConnectionState()
        self.policy = policy

    async def on_tick(self, counter: int) -> bool:
        """Close expired connections, ten times a second."""
        self.server_state.expire(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new connections, and answer the requests that are there."""
        for server in self.servers:
            server.close()
        self.policy.closing, deadline = True, time.monotonic() + CLOSING_SECONDS
        while self.server_state.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def raise_file_limit() -> None:
    """Allow as many open files as the connections need, if the system does."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 - not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * MAX_CONNECTIONS, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run_server(app: ASGIApp, policy: AccessPolicy, listening: socket.socket, title: str) -> None:
    """Answer requests until SIGTERM or Ctrl-C.

    Args:
        app: The ASGI application.
        policy: Its limits.
        listening: The socket.
        title: The text that is printed before the address.
    """
    raise_file_limit()
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
        timeout_graceful_shutdown=int(policy.timeout) + 1,
    )
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    print(f"{title}: http://{name}:{port}/{policy.query}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more after the end
    with suppress(KeyboardInterrupt), listening:
        Server(config, policy).run([listening])
    print("server stopped; pending requests were answered", file=sys.stderr)
