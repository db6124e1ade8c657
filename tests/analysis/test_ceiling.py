"""The ceiling: its rules in the order that theory gives them, the command, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.contest import ceiling
from protonet.datasets.synthetic import sample_family


def test_knowing_the_truth_is_best_and_our_view_is_near_the_oracle() -> None:
    split = sample_family("correlated", seed=3, num_classes=32, dim=96, n_test=40)
    accuracy = ceiling.measure_draw(split)
    assert accuracy["Bayes, true covariance"] >= accuracy["sample directions, oracle gains"] - 0.5
    assert accuracy["our whitened view"] >= accuracy["sample directions, oracle gains"] - 1.5
    assert accuracy["our whitened view"] > 50


def test_a_family_without_a_known_covariance_is_an_error() -> None:
    with pytest.raises(ValueError, match="measure_draw: `split` must have a noise covariance; got None"):
        ceiling.measure_draw(sample_family("warped", seed=0, num_classes=4, dim=8))


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.md"
    outputs = ["--state", str(tmp_path / "state.jsonl"), "--markdown", str(path)]
    assert main(["ceiling", "--draws", "1", *outputs]) == 0
    made = "\nMade by `python -m analysis ceiling --draws 1`.\n"
    assert path.read_text(encoding="utf-8") == capsys.readouterr().out + made
    assert main(["ceiling", "--draws", "none"]) == 2
    assert capsys.readouterr().err.startswith("analysis ceiling: `--draws` must be a whole number >= 1; got 'none'.")
