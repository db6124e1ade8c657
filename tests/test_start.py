"""Commands: Ctrl-C while their packages are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from solution.pack import ROOT


@pytest.mark.parametrize("module", ["analysis.contest", "analysis.robustness", "analysis.scale", "solution.pack"])
def test_interrupted_import(module: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    code = f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
    code += f"runpy.run_module({module!r}, run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", f"{module}: interrupted\n")
