"""The command, for all tests that run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.episodes.command_cases import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)
