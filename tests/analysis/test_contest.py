"""The contest: the trial, the modules that its process may import, and new draws of the data."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis.__main__ import main
from analysis.contest import draws
from analysis.contest.draws import SOLVER, MethodRun, summarise, tabulate
from analysis.contest.trial import evaluate_submission
from analysis.contest.worker import evaluate, measure_peak_memory
from protonet import solve
from protonet.datasets import Split, sample_family
from solution.pack import ROOT
from tests.analysis.conftest import Made, read_cells

LINEAR = """
import json, numpy, torch

class Solution:
    def solve(self, train_loader, val_loader, metadata=None):
        batches = list(train_loader)
        facts = {
            "metadata": metadata,
            "seeds": [torch.initial_seed(), int(numpy.random.get_state()[1][0])],
            "batches": [len(y) for _, y in batches],
            "orders": [torch.cat([y for _, y in loader]).tolist() for loader in (batches, val_loader)],
        }
        model = torch.nn.Linear(6, 3)
        torch.nn.init.zeros_(model.weight)
        with torch.no_grad():
            model.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
        with open(__file__ + ".json", "w") as file:
            json.dump(facts, file)
        return model
"""


def sample_three(n_train: int = 50) -> Split:
    return sample_family("isotropic", seed=1, n_train=n_train, n_val=2, n_test=5, num_classes=3, dim=6)


def write_request(folder: Path, split: Split, **changes: object) -> dict[str, Any]:
    parts = {f"{part}_{side}": getattr(split, f"{part}_{side}") for part in ("train", "val", "test") for side in "xy"}
    np.savez(folder / "data.npz", **{name: tensor.numpy() for name, tensor in parts.items()})
    (folder / "solution.py").write_text(LINEAR)
    request = {"solution": str(folder / "solution.py"), "data": str(folder / "data.npz"), "metadata": None}
    return request | {"param_limit": 21.0, "baseline_accuracy": 0.2} | changes


def test_evaluator_follows_the_contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    split = sample_three()
    result = evaluate(write_request(tmp_path, split, metadata={"num_classes": 3}))
    facts = json.loads((tmp_path / "solution.py.json").read_text())
    assert facts["metadata"] == {"num_classes": 3}
    assert facts["seeds"] == [2025, 2025]
    assert facts["batches"] == [128, 22]
    assert facts["orders"][0] != split.train_y.tolist()
    assert sorted(facts["orders"][0]) == sorted(split.train_y.tolist())
    assert facts["orders"][1] == split.val_y.tolist()
    assert result["accuracy"] == float((split.test_y == 1).double().mean())
    assert result["parameters"] == 21
    assert result["score"] == pytest.approx((1 / 3 - 0.2) / 0.8 * 100)
    assert evaluate(write_request(tmp_path, split, param_limit=20.0))["score"] == 0
    assert evaluate(write_request(tmp_path, split, baseline_accuracy=0.9))["score"] == 0


def test_peak_memory_is_this_processs() -> None:
    memory = torch.ones(100 << 18)  # 100 MiB
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    assert 100 < measure_peak_memory() <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit * 1.01
    assert len(memory)


def test_failing_submission_sees_no_other_package(capfd: pytest.CaptureFixture[str]) -> None:
    submission = f"""
import sys
sys.path.append({str(ROOT)!r})
for name in ("scipy", "sklearn", "tqdm", "protonet"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
raise RuntimeError("the end")
"""
    message = "^`submission` must run in the contest's process; got exit code 1. Its traceback is above.$"
    with pytest.raises(ValueError, match=message):
        evaluate_submission(submission.encode(), sample_three())
    err = capfd.readouterr().err
    missing = [f"No module named '{name}'" for name in ("scipy", "sklearn", "tqdm", "protonet")]
    assert err.splitlines()[:4] == missing
    assert err.endswith("RuntimeError: the end\n")


def test_public_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["contest", "--config", "agentics", "--single-file", "--json", str(tmp_path / "new" / "out.json")]) == 0
    result = json.loads((tmp_path / "new" / "out.json").read_text())
    assert 0.3 < result["accuracy"] < 0.6
    assert result["parameters"] <= 500_000
    assert result["submission"] == "single file"
    line = capsys.readouterr().out
    assert line.startswith(f"accuracy {result['accuracy']:.4f}  score ")
    assert line.count("\n") == 1


def test_draws_of_every_limit_and_method(make_report: Callable[[str], Made]) -> None:
    rows = make_report("contest-draws").rows
    assert [(row["family"], row["limit"]) for row in rows] == [("isotropic", 0), ("class_noise", 0)]
    assert set(rows[0]["percent"]) == {SOLVER, "nearest_mean", "cosine", "mlp", "lda", "bayes"}
    assert set(rows[1]["percent"]) == {SOLVER, "nearest_mean", "cosine", "mlp", "lda", "logistic"}
    assert rows[0]["parameters"] == [0]
    split = sample_family("class_noise", seed=0, n_train=2, n_val=1, num_classes=4, dim=16)
    train, val = [(split.train_x, split.train_y)], [(split.val_x, split.val_y)]
    network = solve(train, val, {"num_classes": 4, "input_dim": 16, "param_limit": 0})
    accuracy = float((network(split.test_x).argmax(dim=1) == split.test_y).double().mean())
    assert (rows[1]["percent"][SOLVER], rows[1]["parameters"]) == ([100 * accuracy], [network.count_parameters()])
    assert draws._parse_shots("", "2+1,1+1,2+1") == [(2, 1), (1, 1)]


def test_statistics() -> None:
    accuracies = {"cosine": [0.5, 0.7], "lda": [0.9, 0.6], "bayes": [0.9, 0.9], SOLVER: [0.8, 0.9]}
    results = {
        MethodRun("nuisance", 16, 4, seed, 128, 384, method, 9 if method == SOLVER else None): {
            "accuracy": accuracies[method][seed],
            "parameters": 1000 + seed,
            "seconds": 1.0,
        }
        for method in accuracies
        for seed in (0, 1)
    }
    header, _, row = read_cells(tabulate(summarise(results)))
    assert header[3:] == [
        *("ours", "Bayes", "gap to Bayes", "raw cosine"),
        *("shrunken LDA", "regret", "parameters", "seconds"),
    ]
    assert row == [
        *("nuisance", "16+4", "9", "85.00 ±5.00", "90.00 ±0.00", "+5.00 ±5.00"),
        *("60.00 (+25.00 ±5.00)", "75.00 (+10.00 ±20.00)", "-10.00 ±20.00", "1,000", "1.0"),
    ]
