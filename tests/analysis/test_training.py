"""The study of the recipe: the command end to end on a small case, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.solver import training


def test_the_table_has_a_row_for_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "DATASETS", ("iris",))
    monkeypatch.setattr(training, "LENGTH", 30)
    monkeypatch.setattr(training, "STEPS", (3, 10))
    path = tmp_path / "table.md"
    outputs = ["--state", str(tmp_path / "state.jsonl"), "--markdown", str(path)]
    assert main(["training", "--splits", "1", *outputs]) == 0
    printed = capsys.readouterr().out
    for name in (*training.VARIANTS, *training.OPTIMIZERS):
        assert f"| {name} " in printed
    assert path.read_text(encoding="utf-8").startswith(printed)
    default = next(line for line in printed.splitlines() if line.startswith("| default "))
    assert float(default.split("|")[2]) > 80


def test_a_wrong_argument_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["training", "--splits", "0"]) == 2
    assert (
        capsys.readouterr().err
        == "analysis training: `--splits` must be a whole number >= 1; got '0'. Pass a number such as 1.\n"
    )
