"""The optimizer bench: baselines, horizons, roles and looks, errors of one line, the time of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from analysis.__main__ import main
from analysis.optimizer_bench import bench, runs, step_time, tune
from analysis.optimizer_bench.runs import BASELINES_FILE, CandidateOptimizer, TrainingRun, import_file, train_candidate
from analysis.optimizer_bench.workload import LossCurve
from analysis.optimizer_bench.workloads import GROUPS_OF_WORKLOAD, WORKLOADS, WorkloadGroups
from solution.pack import ROOT
from tests.analysis.conftest import read_cells

WORKLOAD_FILE = """
import torch
from torch import nn
from analysis.optimizer_bench.workload import Workload, seed_initial_weights

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])

def build(seed):
    with seed_initial_weights(seed):
        model = nn.Linear(4, 1)
    generator = torch.Generator().manual_seed(seed)
    def train_loss():
        rows = torch.randint(48, (8,), generator=generator)
        return (model(X[rows]) - Y[rows]).square().mean()
    return Workload(model, train_loss, lambda: (model(X[48:]) - Y[48:]).square().mean())

WORKLOADS = {"tiny": build, "small": build}
"""
OPTIMIZER_FILE = """
import torch

class CustomOptimizer(torch.optim.SGD):
    def __init__(self, params, lr=0.1, noise=0.0, crash=0, total_steps=None):
        super().__init__(params, lr)
        self.noise, self.crash, self.steps = noise, crash, 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == self.crash:
            torch.linalg.cholesky(torch.zeros(2, 2))
        for p in self.param_groups[0]["params"]:
            p.grad += self.noise * torch.randn_like(p)
        return super().step(closure)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with workloads, their baselines and an optimizer."""
    path = tmp_path_factory.mktemp("bench")
    (path / "workloads.py").write_text(WORKLOAD_FILE)
    (path / "optimizer.py").write_text(OPTIMIZER_FILE)
    (path / "config.json").write_text('{"lr": 0.2}')
    given = [*TUNED, *options(path), "--jobs", "1", "--baselines", str(path / "baselines.json")]
    assert main(["optimizer-tune", *given]) == 0
    return path


@pytest.fixture
def house(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Let the bench have a tiny workload of each role, with baselines; return where looks are logged."""
    roles = {"seen": "visible", "tuned": "tuning", "kept": "validation"}
    build = import_file(folder / "workloads.py").build
    groups = {name: WorkloadGroups(role, role, role) for name, role in roles.items()}
    baseline = json.loads((folder / "baselines.json").read_text())["tiny"]
    (tmp_path / "baselines.json").write_text(json.dumps(dict.fromkeys(roles, baseline)))
    (tmp_path / "looks.md").write_text("| date |\n")
    monkeypatch.setattr(bench, "VALIDATION_LOG_FILE", tmp_path / "looks.md")
    known = mock.patch.dict(WORKLOADS, dict.fromkeys(roles, build), clear=True)
    with known, mock.patch.dict(GROUPS_OF_WORKLOAD, groups, clear=True):
        yield tmp_path / "looks.md"


TUNED = ["--steps", "20,10"]


def options(folder: Path, state: str = "state.jsonl") -> list[str]:
    file = ["--workload-file", str(folder / "workloads.py"), "--workloads", "tiny,small"]
    return [*file, "--state", str(folder / state)]


def run(folder: Path, *more: str, state: str = "state.jsonl") -> int:
    given = ["--optimizer", str(folder / "optimizer.py"), "--baselines", str(folder / "baselines.json")]
    return main(["optimizer-bench", *given, *options(folder, state), "--steps", "20", "--jobs", "1", *more])


def look(folder: Path, house: Path, *more: str) -> int:
    """Run the bench on its own workloads."""
    given = ["--baselines", str(house.parent / "baselines.json"), "--state", str(house.parent / "state.jsonl")]
    optimizer = ["--optimizer", str(folder / "optimizer.py")]
    return main(["optimizer-bench", *optimizer, *given, "--steps", "20", "--seeds", "0", "--jobs", "1", *more])


def test_committed_baselines_are_of_the_benchs_workloads() -> None:
    for name, baselines in json.loads((ROOT / BASELINES_FILE).read_text()).items():
        assert name in WORKLOADS
        for steps, baseline in baselines.items():
            assert baseline["target"] < baseline["initial"]
            assert 0 < baseline["steps"] <= baseline["max_steps"] == int(steps)


def test_baselines(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "baselines.json"
    was = path.read_text()
    baselines = json.loads(was)
    assert [*baselines] == ["tiny", "small"]
    assert [[*by_steps] for by_steps in baselines.values()] == [["10", "20"]] * 2
    for steps, baseline in baselines["tiny"].items():
        assert baseline["max_steps"] == int(steps)
        assert baseline["fingerprint"] == float(f"{import_file(folder / 'workloads.py').build(0).val_loss():.4g}")
    monkeypatch.setattr(tune, "tune_workload", None)  # all is in the journal
    assert main(["optimizer-tune", *TUNED, *options(folder), "--baselines", str(folder / "again.json")]) == 0
    assert json.loads((folder / "again.json").read_text()) == baselines
    monkeypatch.undo()
    (folder / "few.json").write_text(json.dumps({"tiny": {"20": baselines["tiny"]["20"]}, "other": baselines["small"]}))
    few = ["--steps", "10", *options(folder, "few.jsonl"), "--workloads", "tiny"]
    assert main(["optimizer-tune", *few, "--baselines", str(folder / "few.json")]) == 0
    added = json.loads((folder / "few.json").read_text())  # horizons are added to the file
    assert [*added["tiny"]] == ["10", "20"]
    assert (added["tiny"]["20"], added["other"]) == (baselines["tiny"]["20"], baselines["small"])
    assert added["tiny"]["10"]["setting"]["betas"] == baselines["tiny"]["20"]["setting"]["betas"]  # its search's start
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4 + 2 + 2


def test_run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--config", str(folder / "config.json"), "--json", str(folder / "out.json")]
    assert run(folder, *more) == 0
    captured = capsys.readouterr()
    assert "**Workloads of the file, 20 steps**" in captured.out
    assert "Visible" not in captured.out
    assert "before training" not in captured.err
    (entry,) = json.loads((folder / "out.json").read_text())
    rows = [(row["workload"], row["role"], row["steps"]) for row in entry["rows"]]
    assert rows == [("tiny", "file", 20), ("small", "file", 20)]
    assert entry["config"] == {"lr": 0.2}
    monkeypatch.setattr(runs, "train_candidate", None)  # all is in the journal
    baselines = json.loads((folder / "baselines.json").read_text())
    baselines["small"]["20"]["fingerprint"] = 12.34
    (folder / "other.json").write_text(json.dumps(baselines))
    assert run(folder, *more, "--baselines", str(folder / "other.json")) == 0
    again = capsys.readouterr()
    assert again.out == captured.out
    assert "small differs from what its baseline was made with: " in again.err


def test_a_run_is_of_its_seed_and_keeps_losses_before_divergence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def try_config(config: str, seed: int = 0) -> LossCurve:
        candidate = CandidateOptimizer("optimizer", config, folder / "optimizer.py")
        return train_candidate(TrainingRun("tiny", folder / "workloads.py", seed, 40, candidate))

    before = torch.get_rng_state()
    noisy = [try_config('{"noise": 0.1}', seed).losses for seed in (0, 0, 1)]
    assert noisy[0] == noisy[1] != noisy[2]
    assert torch.equal(torch.get_rng_state(), before)
    fine, far, crashed = map(try_config, ("{}", '{"lr": 1e30}', '{"crash": 25}'))
    assert far.diverged
    assert crashed.diverged
    assert ", seed 0: _LinAlgError(" in capsys.readouterr().err
    assert crashed.losses == fine.losses[:3]  # of 0, 10 and 20 steps
    assert not fine.diverged


def test_one_run_is_judged_at_every_horizon(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baselines = json.loads((folder / "baselines.json").read_text())
    for baseline in baselines.values():
        baseline["20"]["target"] = 1e-9  # no run ends early
    (folder / "hard.json").write_text(json.dumps(baselines))
    rows: dict[str, Any] = {}
    state = folder / "horizons.jsonl"
    for steps in ("20,10", "10"):
        given = ["--baselines", str(folder / "hard.json"), "--json", str(folder / "rows.json")]
        assert run(folder, *given, "--steps", steps, state=state.name) == 0
        (entry,) = json.loads((folder / "rows.json").read_text())
        rows[steps] = [{**row, "step_ms": 0} for row in entry["rows"]]
        assert [summary["steps"] for summary in entry["summaries"]] == sorted(map(int, steps.split(",")))
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert len([line for line in lines if line["run"][3] == 20]) == 6  # a workload and seed runs once
    assert [row for row in rows["20,10"] if row["steps"] == 10] == rows["10"]
    assert "**Workloads of the file, 10 steps**" in capsys.readouterr().out


def test_roles(folder: Path, house: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def list_rows(*more: str) -> list[tuple[str, str]]:
        assert look(folder, house, *more, "--json", str(tmp_path / "rows.json")) == 0
        return [(row["workload"], row["role"]) for row in json.loads((tmp_path / "rows.json").read_text())[0]["rows"]]

    assert list_rows() == [("seen", "visible")]
    assert list_rows("--roles", "tuning,visible") == [("seen", "visible"), ("tuned", "tuning")]
    assert house.read_text() == "| date |\n"
    assert "**Tuning workloads, 20 steps**" in capsys.readouterr().out


def test_looks_at_held_out_families_are_logged(folder: Path, house: Path) -> None:
    assert look(folder, house, "--roles", "validation,visible") == 0
    _, ours = read_cells(house.read_text())
    assert ours[1:4] == ["visible, validation", "20", "0"]
    assert (len(ours[4]), ours[5]) == (8, "`{}`")
    assert ours[6].startswith("visible 20: ")
    assert "; validation 20: " in ours[6]


def test_optimizers_with_total_steps_get_the_horizon(folder: Path, house: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"lr": 0.01, "total_steps": 10000}')
    given = ["--config", str(tmp_path / "config.json"), "--json", str(tmp_path / "out.json")]
    assert look(folder, house, *given, "--steps", "10,20") == 0
    (entry,) = json.loads((tmp_path / "out.json").read_text())
    assert [row["steps"] for row in entry["rows"]] == [10, 20]
    entries = [json.loads(line) for line in (tmp_path / "state.jsonl").read_text().splitlines()]
    ran = [(run[3], json.loads(run[4][1])["total_steps"]) for run in (entry["run"] for entry in entries)]
    assert ran == [(10, 10), (20, 20)]


ERRORS = [
    ("--optimizer {f}/missing.py", "`--optimizer` must hold a class CustomOptimizer that takes --config; got "),
    ("--optimizer {f}/workloads.py", "`--optimizer` must hold a class CustomOptimizer that takes --config; got "),
    ("--config {f}/unknown.json", "`--optimizer` must hold a class CustomOptimizer that takes --config; got "),
    ("--config {f}/list.json", "`--config` must hold a JSON object; got "),
    ("--config {f}/optimizer.py", "`--config` must hold a JSON object; got "),
    ("--baselines {f}/empty.json", "`--baselines` must have every workload; got none of tiny at 20; none of small"),
    ("--workloads tiny,huge", "`--workloads` must be of gpt, "),
    ("--workload-file {f}/optimizer.py", "`--workload-file` must hold a dictionary WORKLOADS; got "),
    ("--workload-file {f}/taken.py", "`--workload-file` must have names of its own; got gpt."),
]


def test_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"list.json": "[1]", "empty.json": "{}", "unknown.json": '{"size": 1}'}
    for name, text in (texts | {"taken.py": "WORKLOADS = {'gpt': 1}"}).items():
        (folder / name).write_text(text)
    for arguments, message in ERRORS:
        assert run(folder, *arguments.format(f=folder).split()) == 2, arguments
        captured = capsys.readouterr()
        assert captured.err.startswith(f"analysis optimizer-bench: {message}"), arguments
        assert captured.err.count("\n") == 1, arguments
        assert not captured.out, arguments


SLOW = """
import time
from torch.optim import AdamW

class CustomOptimizer(AdamW):
    def step(self, closure=None):
        end = time.process_time() + 0.02
        while time.process_time() < end: pass
        return super().step(closure)
"""


@pytest.mark.parametrize("case", ["teacher", "16 of 64 x 64"])
def test_the_time_of_a_step_is_measured_beside_adamws(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "N_UNTIMED_STEPS", 1)
    (folder / "slow.py").write_text(SLOW)
    given = ["--optimizer", str(folder / "slow.py"), "--case", case, "--steps", "1", "--turns", "2"]
    assert main(["optimizer-time", *given, "--json", str(folder / "out.json")]) == 0
    (row,) = json.loads((folder / "out.json").read_text())
    assert row["state"] == 1
    assert row["ratio"] > 3
    assert row["ms"] > 20
