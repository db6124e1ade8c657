"""Robustness: the runs, the statistics, the table and its plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from analysis.real_data.robustness import METHODS, Run, list_runs, run_method, summarise, tabulate
from analysis.real_data.sets import load_real, split_shots
from tests.analysis.conftest import Made, read_cells


def test_run_is_the_solvers() -> None:
    split = split_shots(load_real("iris"), 2, 0)
    assert split is not None
    result = run_method(Run("iris", 2, 0, "fast"))
    outcome = METHODS["fast"](split.train_x.double().numpy(), split.train_y.numpy())(split.test_x.double().numpy())
    assert outcome.log_probabilities is not None
    assert result["log_loss"] == pytest.approx(log_loss(split.test_y, np.exp(outcome.log_probabilities)))
    assert result["accuracy"] == float((torch.from_numpy(outcome.predicted) == split.test_y).double().mean())
    assert set(run_method(Run("iris", 2, 0, "cosine"))) == {"accuracy", "seconds"}


def test_rows_and_plot(make_report: Callable[[str], Made]) -> None:
    made = make_report("robustness")
    assert (made.folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert [(row["dataset"], row["shots"]) for row in made.rows] == [("iris", 1), ("iris", 2)]
    assert all(set(row["percent"]) == {"fast", "cosine", "knn"} for row in made.rows)
    assert all(set(row["log_loss"]) == {"fast"} for row in made.rows)


def test_statistics() -> None:
    accuracy = {"ours": [0.8, 0.9], "cosine": [0.7, 0.7], "svm": [0.9, 0.7], "knn": [0.7, 0.9]}
    results = {
        Run("iris", 5, seed, method): {"accuracy": values[seed], "seconds": 1.0 + seed}
        for method, values in accuracy.items()
        for seed in (0, 1)
    }
    for seed in (0, 1):
        results[Run("iris", 5, seed, "ours")] |= {"log_loss": 0.25, "calibration_error": 0.05}
    (row,) = rows = summarise(results)
    assert row["best"] == "svm"  # the first of the best
    cells = read_cells(tabulate(rows))
    assert cells[2][:3] == ["iris", "5", "85.00 ±5.00"]
    assert cells[2][-2:] == ["RBF SVM", "-5.00 ±15.00"]
    assert cells[3] == [
        *("method", "accuracy, %", "log-loss", "calibration error"),
        *("fit seconds", "mean regret", "worst regret"),
    ]
    assert cells[5] == ["ours", "85.00 (1.0)", "0.250", "5.00", "1.50", "-5.00", "-5.00 (iris 5)"]
    assert cells[7][:2] == ["RBF SVM", "80.00 (2.5)"]  # as good as k-NN
    assert cells[-1] == ["best baseline per data set (oracle)", "80.00", "", "", "", "+0.00", ""]
    alone = summarise({run: result for run, result in results.items() if run.method == "ours"})
    assert alone[0]["best"] is None
    assert "oracle" not in tabulate(alone)


def test_missing_package_leaves_its_sets_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aeon").mkdir()
    (tmp_path / "aeon" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)  # an aeon without data
    load_real.cache_clear()
    assert list(list_runs(["ACSF1", "iris"], [5], 1, ["cosine"])) == [Run("iris", 5, 0, "cosine")]
    line = capsys.readouterr().err
    assert line.startswith("ACSF1 is left out: `aeon` must be installed")
    assert "pip install --no-deps aeon" in line
