"""Progress bars appear on terminals, and leave pipes and log files alone."""

from __future__ import annotations

import sys

import pytest

from protonet._io import progress_bar


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_bars_are_shown_on_terminals_only(
    terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress_bar(total=2, unit="row", delay=0, shown=shown) as bar:
        bar.update(1)
    assert ("1/2" in capsys.readouterr().err) == (terminal and shown)
