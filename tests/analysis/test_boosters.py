"""The study of boosters: which splits each peer gets, what the worker says, the tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import log_loss

from analysis.__main__ import main
from analysis.real_data.booster_worker import FITS, PACKAGES, find_versions, measure_cpu, spread, work
from analysis.real_data.boosters import (
    INSTALL,
    MOST_VALUES,
    NAMES,
    TEN_ROWS,
    WORKER,
    fit_peer,
    is_measured,
    pair,
    run_method,
    summarise,
    tabulate,
)
from analysis.real_data.robustness import Run, load_split
from analysis.real_data.sets import DATASETS
from tests.analysis.conftest import read_cells

FAST = ["boosters", "--datasets", "iris", "--shots", "5", "--splits", "1"]
MISSING = [method for method, version in find_versions().items() if version is None]
RESULT = {"accuracy": 0.75, "log_loss": 0.5, "calibration_error": 0.125, "cpu_seconds": 2.0, "wall_seconds": 1.0}


def test_ours_is_timed_and_judged() -> None:
    result = run_method(Run("iris", 5, 0, "ours"), None)
    assert set(result) == set(RESULT)
    assert 0.8 < result["accuracy"] <= 1
    assert result["cpu_seconds"] > 0


def test_worker_imports_nothing_of_the_repository(tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(WORKER)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == find_versions()
    assert set(FITS) == set(PACKAGES) == set(NAMES) - {"ours"}


def test_classes_that_a_peer_left_out_have_no_probability() -> None:
    shares = np.array([[0.25, 0.75], [1.0, 0.0]])
    assert spread(np.array(["2", "0"]), shares, 3).tolist() == [[0.75, 0.0, 0.25], [0.0, 0.0, 1.0]]
    assert spread(np.array([0, 1]), shares, 2).tolist() == shares.tolist()


def test_cpu_time_counts_processes_that_ended() -> None:
    before = measure_cpu()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    assert measure_cpu() > before


def test_rules_name_what_is_measured() -> None:
    assert len(TEN_ROWS) == 10
    assert set(TEN_ROWS) < set(DATASETS)
    assert set(TEN_ROWS.values()) == {5, 10, 20}
    assert is_measured(Run("wine", 10, 0, "autogluon"))
    assert not any(is_measured(Run("wine", *rest, "autogluon")) for rest in ((10, 1), (5, 0)))
    for shots in (5, 10, 20):
        split = load_split("digits", shots, 1)
        assert split is not None
        values = split.num_classes * split.train_x.shape[1] * len(split.train_y)
        assert is_measured(Run("digits", shots, 1, "catboost")) == (values <= MOST_VALUES) == (shots < 20)
        assert is_measured(Run("digits", shots, 1, "lightgbm"))


@pytest.mark.skipif(not MISSING, reason="all peers are installed")
def test_a_peer_that_fails_is_a_result() -> None:
    result = run_method(Run("iris", 5, 0, MISSING[0]), sys.executable)
    module = PACKAGES[MISSING[0]].partition(".")[0]
    assert result == {"error": f"exit code 1, ModuleNotFoundError: No module named '{module}'"}


@pytest.mark.parametrize("method", ["lightgbm", "catboost"])
def test_peer_is_itself(method: str, tmp_path: Path) -> None:
    pytest.importorskip(method)
    split = load_split("iris", 20, 0)
    assert split is not None
    x, y, rows = split.train_x.numpy(), split.train_y.numpy(), split.test_x.numpy()
    arrays = fit_peer(sys.executable, method, x, y, rows)
    classes, shares = FITS[method](x, y)(rows)
    np.testing.assert_allclose(arrays["probabilities"], spread(classes, shares, 3))
    result = run_method(Run("iris", 20, 0, method), sys.executable)
    assert result["log_loss"] == pytest.approx(log_loss(split.test_y, shares))
    np.savez(tmp_path / "data.npz", train_x=x, train_y=y, test_x=rows)
    work(method, str(tmp_path / "data.npz"), str(tmp_path / "result.npz"))
    with np.load(tmp_path / "result.npz") as written:
        assert set(written) == {"probabilities", "wall", "cpu"}


def test_tables_pair_the_splits_and_name_failures() -> None:
    results: dict[Run, dict[str, Any]] = {
        Run("iris", 5, seed, "ours"): RESULT | {"accuracy": accuracy, "log_loss": 0.25}
        for seed, accuracy in ((0, 0.9), (1, 0.7))
    }
    results[Run("iris", 5, 0, "lightgbm")] = {"error": "exit code 1, a | b"}
    results[Run("iris", 5, 1, "lightgbm")] = RESULT
    results[Run("wine", 5, 0, "ours")] = RESULT
    results[Run("wine", 5, 0, "lightgbm")] = {"error": "none"}
    rows = summarise(results)
    assert pair(rows[0], "lightgbm", "accuracy") == ([0.75], [0.7])
    text = tabulate(rows, ["ours", "lightgbm", "catboost"], {"lightgbm": "4"})
    tables = read_cells(text)
    assert tables[2:4] == [["iris", "5", "80.00 ±10.00", "75.00", "–"], ["wine", "5", "75.00", "failed", "–"]]
    assert tables[6:8] == [
        ["LightGBM 4", "1", "2", "75.00", "0.500", "12.50", "2.00", "1.00", "", ""],
        ["ours, there", "1", "", "70.00", "0.250", "12.50", "2.00", "1.00", "0 of 1", "1 of 1"],
    ]
    assert tables[8] == ["CatBoost", "0", "0", *[""] * 7]
    assert tables[-2:] == [
        ["iris", "5", "0", "LightGBM 4", "exit code 1, a / b"],
        ["wine", "5", "0", "LightGBM 4", "none"],
    ]
    assert "Failed: 2 fits" in text


@pytest.mark.skipif(not MISSING, reason="all peers are installed")
def test_missing_package_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--methods", MISSING[0], "--peers", sys.executable, "--state", str(tmp_path / "state")]
    assert main([*FAST, *options]) == 2
    line = f"analysis boosters: `--peers` must have {PACKAGES[MISSING[0]]}; got none installed. {INSTALL}\n"
    assert capsys.readouterr().err == line
