"""Commands: Ctrl-C while their packages are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import protonet
from solution.pack import ROOT


def run(tmp_path: Path, imported: str, source: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command where an import runs another source."""
    (tmp_path / f"{imported}.py").write_text(source)
    code = f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    ("command", "imported"),
    [
        *[("analysis contest", "torch"), ("analysis robustness", "torch")],
        *[("analysis", "argparse"), ("solution.pack", "argparse")],
        *[("protonet fit", "torch"), ("protonet predict", "torch")],
        *[("protonet.episodes", "torch"), ("protonet.episodes train", "torch")],
    ],
)
def test_interrupted_import(command: str, imported: str, tmp_path: Path) -> None:
    ended = run(tmp_path, imported, "raise KeyboardInterrupt", *command.split())
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", f"{command}: interrupted\n")


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    ended = run(tmp_path, "torch", "raise RuntimeError", "protonet", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "python -m protonet fit train.csv" in ended.stdout
    ended = run(tmp_path, "torch", "raise RuntimeError", "protonet", "fitt")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("protonet: `command` must be one of fit")


def test_public_names_are_there_when_they_are_asked_for() -> None:
    assert set(protonet.__all__) <= set(dir(protonet))
    for name in protonet.__all__:
        assert getattr(protonet, name).__module__.startswith("protonet.")
    with pytest.raises(AttributeError, match="module 'protonet' has no attribute 'solv'"):
        protonet.solv  # noqa: B018 - to ask is the test
