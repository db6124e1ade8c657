"""Progress bars appear on terminals, and leave pipes and log files alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from protonet._io import progress_bar

PACKAGE = Path(__file__).resolve().parents[1] / "protonet"


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_bars_are_shown_on_terminals_only(
    terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress_bar(total=2, unit="row", delay=0, shown=shown) as bar:
        bar.update(1)
    assert ("1/2" in capsys.readouterr().err) == (terminal and shown)


def test_all_bars_come_from_one_helper() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom | ast.Import):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert "tqdm" not in modules or path.name == "_io.py", path
