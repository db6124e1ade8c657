"""Fits of commands in the process of the tests compare few views."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protonet.fit.search import EFFORTS
from tests.strategies import PLAIN

FAST_SEARCH = EFFORTS["fast"]


@pytest.fixture(scope="package", autouse=True)
def linear_views() -> Iterator[None]:
    """Let ``--effort fast`` compare linear views only: what commands do with a model does not depend on its views."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EFFORTS, "fast", PLAIN)
        yield


@pytest.fixture
def all_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``--effort fast`` compare the views that users get, in a test that depends on their accuracy."""
    monkeypatch.setitem(EFFORTS, "fast", FAST_SEARCH)
