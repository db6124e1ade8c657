"""torch's own checks of optimizers, made of `CustomOptimizer` in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = Path(__file__).with_name("torch_optimizer_suite.py")
MISSING = importlib.util.find_spec("expecttest") is None or not hasattr(torch, "accelerator")


@pytest.mark.skipif(
    MISSING, reason="torch's test library needs expecttest; its interface is that of torch 2.6 or later"
)
def test_the_checks_that_torch_makes_of_its_optimizers_pass() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUITE.parent.parent), *sys.path])}
    environment.pop("CI", None)  # where it is set, torch writes XML reports with a package that we do not need
    ended = subprocess.run(
        [sys.executable, str(SUITE)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    count = re.search(r"^Ran (\d+) tests", ended.stderr, re.MULTILINE)
    assert count is not None, ended.stderr
    assert int(count[1]) >= 37
    assert "skipped" not in ended.stderr
