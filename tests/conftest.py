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

#: Tests, by parts of their names, that need more than torch 2.2 to 2.5 have.
NEEDS_NEWER_TORCH = {
    "float16": "kernels for float16 on the CPU",
    "wrapping": "named parameters of optimizers",
    "grad_scaler": "torch.amp.GradScaler",
    "two_processes": "FSDP2",
    "another_device": "tensors that report another device",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that the installed torch is too old for."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):
        return
    for item in items:
        for part, needed in NEEDS_NEWER_TORCH.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} lacks {needed}"))


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
