"""Fixtures of the tests of embeddings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest


@pytest.fixture
def offline(embedding_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error for any use of the network, and cache embeddings in a temporary folder."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
