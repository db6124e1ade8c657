"""Settings shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.browser import CHROMIUM, Browser
from tests.commands.cases import Run

os.environ["PROTONET_REPRESENTATION"] = "none"  # installed encoders are used only if a test requests them
torch.set_num_threads(1)  # the matrices are small: two threads cost more than they bring
settings.register_profile("protonet", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("protonet")


@pytest.fixture
def embedding_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the cache of embeddings to a temporary folder of the test; return the folder."""
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embeddings"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return Run(capsys, tmp_path)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
