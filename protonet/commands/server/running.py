"""A server on a socket: it says where it listens, and ends when all that was asked is answered."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from protonet._text import to_printable
from protonet.commands.server.guard import Door, read_name
from protonet.errors import raise_input_error

#: What this machine is called by itself.
HERE = ("localhost", "127.0.0.1", "::1")
#: The environment variable of the token, and connections at a time.
VARIABLE, CONNECTIONS = "PROTONET_TOKEN", 1024
#: Seconds that connections have to be closed by those who ask, once the end has come, before they are closed.
CLOSING = 1.0


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: There is no such address here, or another program has it.
    """
    try:
        family = socket.getaddrinfo(host or "none", port, type=socket.SOCK_STREAM)[0][0]  # "" would be all addresses
        listening = socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, UnicodeError) as error:
        got = to_printable(f"{host}:{port} ({getattr(error, 'strerror', None) or 'no name'})")
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            raise_input_error("--port", "be free for this command", got, "Pass another one; 0 is any that is free.")
        raise_input_error("--host", "be an address of this machine", got, "Pass 127.0.0.1, or 0.0.0.0 for all of them.")
    # Else an answer's second part waits 40 ms for the first one's receipt: asyncio does it for its own sockets.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def make_door(host: str, names: list[str], most_bytes: int, **limits: float) -> Door:
    """Return a door with a token, by the environment or drawn; the host that was named is one of its names."""
    for name in names:
        if read_name(name) != name.lower():
            raise_input_error(
                "--names", "be names that are asked for, without a port", repr(to_printable(name)), "Name others."
            )
    token = os.environ.get(VARIABLE) or secrets.token_urlsafe(24)
    known = {name.lower() for name in (*HERE, host, *names)} - {"0.0.0.0", "::"}
    return Door(token, known, most_bytes, **limits)  # type: ignore[arg-type]


def run_server(app: Any, door: Door, listening: socket.socket, what: str) -> None:
    """Answer until SIGTERM or Ctrl-C; then what was asked, and no more.

    Args:
        app: What answers, as ASGI has it.
        door: Who may ask.
        listening: The socket.
        what: What is printed before the address.
    """
    import uvicorn  # noqa: PLC0415 - optional

    class Server(uvicorn.Server):
        """One that tells those who keep a connection, once it is to end."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for server in self.servers:
                server.close()
            door.closing, until = True, time.monotonic() + CLOSING
            while self.server_state.connections and time.monotonic() < until:
                await asyncio.sleep(0.02)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=int(door.seconds) + 1,
    )
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    print(f"{what}: http://{name}:{port}/?token={quote(door.token, safe='')}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more after the end
    with suppress(KeyboardInterrupt), listening:
        Server(config).run([listening])
    print("ended: all that was asked is answered", file=sys.stderr)
