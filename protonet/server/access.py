"""Rules of access to a server: tokens, host names and limits on requests."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TextIO
from urllib.parse import quote

from protonet._text import to_printable
from protonet.errors import raise_input_error

#: Names of this machine, which every server accepts in the header ``Host``.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "[::1]")
#: Environment variables of the access token, and of a second one, which is accepted while clients move to a new token.
TOKEN_VARIABLES = "PROTONET_TOKEN", "PROTONET_TOKEN_2"


@dataclass
class AccessPolicy:
    """The rules of access to a server, its limits on requests, and the number of active requests."""

    tokens: Sequence[str]  #: Accepted tokens, sent as a bearer or in the address (``?token=``).
    allowed_hosts: Collection[str]
    """Accepted values of the header ``Host``; other values are rejected against DNS rebinding."""
    max_body_bytes: int  #: Maximal number of bytes of a request's body.
    max_requests: int = 128  #: Maximal number of requests that are answered at a time.
    response_timeout_seconds: float = 30.0  #: Maximal number of seconds until a response is ready.
    allowed_origins: Sequence[str] = ()  #: Origins of other servers whose pages may send requests (CORS).
    access_log: TextIO | None = None  #: The file that gets a line of JSON per request; None for no log.
    is_token_printed: bool = False  #: Whether the printed address has the token, because the token is random.
    drain_seconds: float = 0.0
    """Seconds after SIGTERM in which connections are accepted, while ``/readyz`` answers 503."""
    n_active_requests: int = field(default=0, init=False)  #: Number of requests that are being answered.
    running_requests: set[Callable[[str], None]] = field(default_factory=set, init=False)
    """Functions that end the requests that are being answered with an error, given its message."""
    is_stopping: bool = field(default=False, init=False)  #: Whether the server is about to stop, and thus not ready.
    is_closing: bool = field(default=False, init=False)  #: Whether it also closes each connection after the response.

    @property
    def address_query(self) -> str:
        """The query part of the printed address: the token if it is printed, otherwise empty."""
        return f"?token={quote(self.tokens[0], safe='')}" if self.is_token_printed else ""


def make_access_policy(host: str, allowed_hosts: Sequence[str], max_body_bytes: int) -> AccessPolicy:
    """Make the access policy of a server that listens on ``host`` and also accepts the host names ``allowed_hosts``.

    The tokens come from the environment variables `TOKEN_VARIABLES`; if both are empty, a random token is generated.
    """
    for name in allowed_hosts:
        if not re.fullmatch(r"[^\s/:@\[\]]+|\[?[0-9a-fA-F:]+\]?", name):
            raise_input_error("allowed_hosts", "be host names without a port", repr(to_printable(name)), "Pass names.")
    tokens = [token for token in map(os.environ.get, TOKEN_VARIABLES) if token]
    hosts = {name.lower() for name in (*LOCAL_HOSTS, host, *allowed_hosts)} - {"0.0.0.0", "::"}
    return AccessPolicy(tokens or [secrets.token_urlsafe(24)], hosts, max_body_bytes, is_token_printed=not tokens)
