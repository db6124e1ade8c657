"""Fits of commands in the process of the tests compare few views."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protonet.fit.search import EFFORTS
from protonet.views.forest import ForestFamily
from protonet.views.mlp import MLPFamily
from protonet.views.tabular_transformer import TabularTransformerFamily
from tests.strategies import PLAIN

#: A search with linear views and kernels.
KERNELS = EFFORTS["fast"].without_family(ForestFamily).without_family(MLPFamily)
KERNELS = KERNELS.without_family(TabularTransformerFamily)


@pytest.fixture(scope="package", autouse=True)
def linear_views() -> Iterator[None]:
    """Let ``--effort fast`` compare linear views only: what commands do with a model does not depend on its views."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EFFORTS, "fast", PLAIN)
        yield


@pytest.fixture
def kernel_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``--effort fast`` also compare kernels, in a test that depends on their accuracy."""
    monkeypatch.setitem(EFFORTS, "fast", KERNELS)
