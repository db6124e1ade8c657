"""Classes of unequal size: what naming the most frequent one gives stands beside every figure, and --balanced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from protonet.__main__ import main
from protonet.files import load_model
from protonet.fit.crossfit import predict_held, unpack
from protonet.metrics import measure, measure_classes
from tests.strategies import write_columns

FAST = ("--label", "kind", "--effort", "fast", "-q")


def make_table(path: Path, shift: float, *, rows: int = 200, rare: int = 10, seed: int = 0) -> str:
    """Write rows of two classes, some of a rare one, a shift in two of four columns of noise apart."""
    rng = np.random.default_rng(seed)
    kinds = np.arange(rows) < rare
    x = rng.normal(size=(rows, 4)) + shift * kinds[:, None] * np.array([1, 1, 0, 0])
    columns = {f"x{number}": column.tolist() for number, column in enumerate(x.T)}
    return write_columns(path, {**columns, "kind": np.where(kinds, "a rare one", "usual").tolist()})


def test_a_model_that_names_one_class_is_seen_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, model = make_table(tmp_path / "t.csv", 0.0), str(tmp_path / "m.safetensors")
    told, page = tmp_path / "f.json", tmp_path / "f.html"
    assert main(["fit", table, *FAST, "-o", model, "--json", str(told), "--report", str(page)]) == 0
    said, figures = capsys.readouterr().out, json.loads(told.read_text())
    own, frequent = figures["baselines"][:2]
    assert [own["name"], frequent["name"]] == ["this model", "most frequent class"]
    assert (frequent["accuracy"], frequent["balanced_accuracy"]) == (0.95, 0.5)
    assert own["balanced_accuracy"] == figures["balanced_accuracy"] < 0.6
    assert own["accuracy"] - frequent["lead"] == pytest.approx(0.95)
    assert re.search(r"\| most frequent class \| 95.00 +\| \[\d\d.\d\d, 9\d.\d\d\] \| 50.00 +\| [+-]\d.\d\d ±", said)
    assert "Balanced is the mean over classes" in page.read_text(encoding="utf-8")
    assert "most frequent class" in page.read_text(encoding="utf-8")

    assert main(["evaluate", model, table, "--json", str(told), "-q"]) == 0
    said, figures = capsys.readouterr().out, json.loads(told.read_text())
    balanced = f"balanced accuracy {100 * figures['balanced_accuracy']:.2f} %"
    assert said.splitlines()[1] == f"{balanced}; the most frequent class of fit, usual, alone: 95.00 %"
    assert figures["baselines"][1]["accuracy"] == 0.95

    assert main(["info", model]) == 0
    assert ", the most frequent class alone 95.00 %, log-loss" in capsys.readouterr().out


def test_balanced_lets_a_rare_class_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table(tmp_path / "t.csv", 1.5)
    fresh, told = make_table(tmp_path / "u.csv", 1.5, rows=1000, rare=500, seed=1), tmp_path / "f.json"
    right = {}
    for options in ([], ["--balanced"]):
        path = tmp_path / f"m{len(options)}.safetensors"
        assert main(["fit", table, *FAST, "-o", str(path), *options]) == 0
        said = capsys.readouterr().out
        assert ("every class counts alike" in said) == bool(options)
        assert "| most frequent class | 95.00 " in said  # of the rows as they are, whatever they weigh
        assert "200 rows in 5 folds" in said
        model = load_model(path, held=True)
        crossed = unpack(model.network, model.metadata["folds"], model.held)
        assert model.network.counts.tolist() == model.metadata["samples"] == [10, 190]
        assert [network.counts.sum() for network in crossed.folds] == [160] * 5
        assert torch.equal(crossed.weights, torch.ones(200, dtype=torch.float64))
        metrics = measure(predict_held(crossed), crossed.labels)
        assert metrics.accuracy == model.metadata["held_out"]["accuracy"]
        assert model.metadata["held_out"]["balanced_accuracy"] == measure_classes(metrics.confusion).balanced_accuracy
        assert main(["evaluate", str(path), fresh, "--json", str(told), "-q"]) == 0
        right[len(options)] = json.loads(told.read_text())["balanced_accuracy"]
        capsys.readouterr()
    assert right[1] > right[0] + 0.1  # 12 standard errors of 1,000 rows


def test_with_balanced_the_lead_is_of_balanced_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, model, told = make_table(tmp_path / "t.csv", 1.5), str(tmp_path / "m.safetensors"), tmp_path / "f.json"
    page = tmp_path / "f.html"
    for options, measured in ([], "accuracy"), (["--balanced"], "balanced_accuracy"):
        outputs = ["--json", str(told), "--report", str(page)]
        assert main(["fit", table, *FAST, "-o", model, *outputs, *options]) == 0
        heading = f"this model's {'balanced ' * bool(options)}lead, points"
        assert heading in capsys.readouterr().out
        assert heading.replace("'", "&#x27;") in page.read_text(encoding="utf-8")
        for command in ([], ["evaluate", model, table, "--json", str(told), "-q"]):
            assert not command or main(command) == 0
            own, *others = json.loads(told.read_text())["baselines"]
            for other in others:
                assert other["lead"] == pytest.approx(own[measured] - other[measured])
                assert other["compared_by"] == measured
        capsys.readouterr()


def test_balanced_changes_nothing_where_classes_are_alike(tmp_path: Path) -> None:
    table, paths = make_table(tmp_path / "t.csv", 1.5, rows=40, rare=20), [tmp_path / f"{name}" for name in "ab"]
    for path, options in zip(paths, ([], ["--balanced"]), strict=True):
        assert main(["fit", table, *FAST, "-o", f"{path}.safetensors", *options]) == 0
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    plain, balanced = (load_model(f"{path}.safetensors").network(x) for path in paths)
    assert torch.equal(plain, balanced)
