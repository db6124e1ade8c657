"""Fixtures of tests that run ``python -m protonet.episodes``."""

from __future__ import annotations

from pathlib import Path

import pytest

from protonet.episodes.training.tasks import ValidationScore
from tests.episodes.cases import Command


@pytest.fixture
def no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``train`` write an encoder although it is worse than the raw features, as it is after a few steps."""
    baseline = ValidationScore(0, 0.0, 0.0)
    monkeypatch.setattr("protonet.episodes.training.train.score_best_raw_method", lambda *_: ("protonet", baseline))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)
