"""The time of an optimizer's step beside AdamW's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.optimizer_bench.step_time import CASES


def test_a_slower_optimizer_has_a_larger_ratio(tmp_path: Path) -> None:
    code = (
        "import time, torch\nclass CustomOptimizer(torch.optim.AdamW):\n    def step(self):\n        super().step()\n"
    )
    ratios: list[float] = []
    for extra in ("", "        while time.process_time() < self.end: pass\n"):
        wait = code.replace("        super()", "        self.end = time.process_time() + 0.02\n        super()")
        file = tmp_path / f"slow{len(ratios)}.py"
        file.write_text(wait + extra)
        given = ["--optimizer", str(file), "--case", "16 of 64 x 64", "--steps", "2", "--turns", "3"]
        assert main(["optimizer-time", *given, "--json", str(tmp_path / "out.json")]) == 0
        (row,) = json.loads((tmp_path / "out.json").read_text())
        assert row["ms"] > 0
        assert row["name"] in CASES
        ratios.append(row["ratio"])
    assert ratios[1] > 3 * ratios[0]


def test_an_unknown_network_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizer-time", "--optimizer", "protonet/optimizer.py", "--case", "large"]) == 2
    assert capsys.readouterr().err.startswith("analysis optimizer-time: `--case` must be")
