from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.cases import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return Run(capsys, tmp_path)
