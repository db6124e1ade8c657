"""Fits of commands in the process of the tests compare few views."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protonet.fit import solver
from protonet.fit.search import ModelSearch
from protonet.views.forest import ForestFamily
from protonet.views.mlp import MLPFamily
from protonet.views.tabular_transformer import TabularTransformerFamily
from tests.strategies import PLAIN

#: The search of users, and one with linear views and kernels.
FAST_SEARCH = ModelSearch()
KERNELS = FAST_SEARCH.without_family(ForestFamily).without_family(MLPFamily).without_family(TabularTransformerFamily)


@pytest.fixture(scope="package", autouse=True)
def linear_views() -> Iterator[None]:
    """Let fits compare linear views only: what commands do with a model does not depend on its views."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
        yield


@pytest.fixture
def kernel_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fits also compare kernels, in a test that depends on their accuracy."""
    monkeypatch.setattr(solver, "DEFAULT_SEARCH", KERNELS)
