"""Nothing that reads texts or pictures may ask the network."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest


@pytest.fixture
def offline(embedding_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error where somebody asks the network, and keep embeddings in a folder of the test's own."""

    def refuse(*_: object) -> None:
        raise AssertionError("somebody asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
