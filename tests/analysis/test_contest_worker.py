"""The contest's evaluator: its rules, and a process that sees no other package."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from analysis.contest import worker
from analysis.contest.trial import judge
from analysis.contest.worker import ALLOWED, _OnlyAllowed, evaluate, measure_peak_memory
from protonet.datasets import Split, sample_family
from solution.pack import ROOT

LINEAR = """
import numpy, torch

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
        model.facts = facts
        torch.nn.init.zeros_(model.weight)
        with torch.no_grad():
            model.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
        Solution.last = model
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


@pytest.fixture
def own_finders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


@pytest.mark.usefixtures("own_finders")
def test_evaluator_follows_the_contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[nn.Module] = []

    def evaluate_accuracy(model: nn.Module, _: object) -> float:
        seen.append(model)
        return 0.6

    monkeypatch.setattr(worker, "evaluate_accuracy", evaluate_accuracy)
    split = sample_three()
    result = evaluate(write_request(tmp_path, split, metadata={"num_classes": 3}))
    facts: Any = seen[0].facts
    assert facts["metadata"] == {"num_classes": 3}
    assert facts["seeds"] == [2025, 2025]
    assert facts["batches"] == [128, 22]
    assert facts["orders"][0] != split.train_y.tolist()
    assert sorted(facts["orders"][0]) == sorted(split.train_y.tolist())
    assert facts["orders"][1] == split.val_y.tolist()
    assert result["score"] == pytest.approx((0.6 - 0.2) / 0.8 * 100)


@pytest.mark.usefixtures("own_finders")
def test_accuracy_and_limit(tmp_path: Path) -> None:
    split = sample_three()
    result = evaluate(write_request(tmp_path, split))
    assert result["accuracy"] == float((split.test_y == 1).double().mean())
    assert result["parameters"] == 21
    assert result["score"] == pytest.approx((1 / 3 - 0.2) / 0.8 * 100)
    assert evaluate(write_request(tmp_path, split, param_limit=20.0))["score"] == 0
    assert evaluate(write_request(tmp_path, split, baseline_accuracy=0.9))["score"] == 0


def test_peak_memory_is_this_processs() -> None:
    held = torch.ones(100 << 18)  # 100 MiB
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    assert 100 < measure_peak_memory() <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit * 1.01
    assert len(held)


def test_only_allowed_modules_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_the_workspace.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    finder = _OnlyAllowed(tmp_path)
    for name in ("torch", "numpy", "json", "of_the_workspace"):
        assert finder.find_spec(name) is not None
    for name in ("scipy", "sklearn", "tqdm", "pytest", "protonet", "analysis", "no_such_module"):
        assert finder.find_spec(name) is None
        assert name not in ALLOWED


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
    message = "^judge: `submission` must run in the contest's process; got exit code 1. Its traceback is above.$"
    with pytest.raises(ValueError, match=message):
        judge(submission.encode(), sample_three())
    err = capfd.readouterr().err
    missing = [f"No module named '{name}'" for name in ("scipy", "sklearn", "tqdm", "protonet")]
    assert err.splitlines()[:4] == missing
    assert err.endswith("RuntimeError: the end\n")
