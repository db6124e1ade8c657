"""Imbalanced classes: results beside those of the most frequent class, and ``fit --balanced``."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from protonet.files import load_model
from protonet.fit.cross_validation import predict_held_out, restore_cross_validation
from protonet.metrics import measure, measure_classes
from tests.commands.cases import FAST, Run
from tests.strategies import write_columns


def make_table(path: Path, shift: float, *, rows: int = 100, rare: int = 5, seed: int = 0) -> str:
    """Write a table of a rare and a usual class, which differ by a shift in two of four columns of noise."""
    rng = np.random.default_rng(seed)
    kinds = np.arange(rows) < rare
    x = rng.normal(size=(rows, 4)) + shift * kinds[:, None] * np.array([1, 1, 0, 0])
    columns = {f"x{index}": column.tolist() for index, column in enumerate(x.T)}
    return write_columns(path, {**columns, "kind": np.where(kinds, "a rare one", "usual").tolist()})


def test_a_model_of_one_predicted_class_is_reported(tmp_path: Path, run: Run) -> None:
    table, model = make_table(tmp_path / "t.csv", 0.0), tmp_path / "m.safetensors"
    results, output = run.read_json("fit", table, *FAST, "-o", model)
    ours, frequent = results["baselines"][:2]
    assert [ours["name"], frequent["name"]] == ["this model", "most frequent class"]
    assert (frequent["accuracy"], frequent["balanced_accuracy"]) == (0.95, 0.5)
    assert ours["balanced_accuracy"] == results["balanced_accuracy"] < 0.6
    assert ours["accuracy"] - frequent["difference"] == pytest.approx(0.95)
    assert "warning: the model is not more accurate than the most frequent class\n" in output
    assert re.search(r"\| most frequent class \| 95.00 +\| \[\d\d.\d\d, 9\d.\d\d\] \| 50.00 +\| [+-]\d.\d\d ±", output)
    results, output = run.read_json("evaluate", model, table)
    balanced = f"balanced accuracy {100 * results['balanced_accuracy']:.2f} %"
    assert output.splitlines()[1] == f"{balanced}; baseline, always usual (the most frequent class of fit): 95.00 %"
    assert results["baselines"][1]["accuracy"] == 0.95
    assert ", baseline (most frequent class) 95.00 %, log-loss" in run("info", model)


def test_balanced_fit_compares_balanced_accuracy(tmp_path: Path, run: Run) -> None:
    table = make_table(tmp_path / "t.csv", 1.5)
    fresh, right = make_table(tmp_path / "u.csv", 1.5, rows=1000, rare=500, seed=1), []
    for options, measured in ([], "accuracy"), (["--balanced"], "balanced_accuracy"):
        path = tmp_path / f"{measured}.safetensors"
        fitted, output = run.read_json("fit", table, *FAST, "-o", path, *options)
        assert ("all classes have equal weight" in output) == bool(options)
        assert ("the model is not more accurate" in output) == (fitted["baselines"][1]["difference"] <= 0)
        assert "| most frequent class | 95.00 " in output  # of the rows as they are, whatever they weigh
        assert "5-fold cross-validation on 100 rows" in output
        assert f"{'balanced ' * bool(options)}difference to baseline, points" in output
        model = load_model(path, for_update=True)
        cv = restore_cross_validation(model.network, model.folds, model.update_state)
        assert model.network.counts.tolist() == model.metadata["samples"] == [5, 95]
        assert [network.counts.sum() for network in cv.folds] == [80] * 5
        assert torch.equal(cv.weights, torch.ones(100, dtype=torch.float64))
        metrics = measure(predict_held_out(cv), cv.labels)
        assert metrics.accuracy == model.metadata["held_out"]["accuracy"]
        assert model.metadata["held_out"]["balanced_accuracy"] == measure_classes(metrics.confusion).balanced_accuracy
        for results in (fitted, run.read_json("evaluate", path, table)[0]):
            ours, *others = results["baselines"]
            for other in others:
                assert other["difference"] == pytest.approx(ours[measured] - other[measured])
                assert other["compared_by"] == measured
        right.append(run.read_json("evaluate", path, fresh)[0]["balanced_accuracy"])
    assert right[1] > right[0] + 0.05  # 4 standard errors of 1,000 rows
