"""The optimizer bench: baselines, horizons, roles, errors, times; scores against oracles; rules of workloads."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from analysis.__main__ import main
from analysis.optimizer_bench import bench, runs, step_time, tune
from analysis.optimizer_bench.bench import (
    bootstrap_interval,
    compute_loss_gap,
    compute_step_ratio,
    format_tables,
    score_workload,
    summarise,
)
from analysis.optimizer_bench.runs import BASELINES_FILE, CandidateOptimizer, TrainingRun, import_file, train_candidate
from analysis.optimizer_bench.workload import (
    LossCurve,
    Workload,
    compute_validation_loss,
    cut_windows,
    hold_out,
    read_stdlib_sources,
    shuffled_batches,
)
from analysis.optimizer_bench.workloads import GROUPS_OF_WORKLOAD, WORKLOADS, WORKLOADS_BY_ROLE, WorkloadGroups, streams
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
    monkeypatch.setattr(step_time, "N_GRADIENTS_TIMED", 1)
    (folder / "slow.py").write_text(SLOW)
    (folder / "bench.json").write_text(json.dumps([{"rows": [{"workload": case, "ratio": 2.0}]}]))
    given = ["--optimizer", str(folder / "slow.py"), "--case", case, "--steps", "1", "--turns", "3"]
    given += ["--bench", str(folder / "bench.json"), "--json", str(folder / "out.json")]
    assert main(["optimizer-time", *given]) == 0
    (row,) = json.loads((folder / "out.json").read_text())
    assert row["state"] == 1
    assert row["ms"] > 20
    # A ratio of steps of 2, divided by the ratio of the CPU times of a gradient and a step.
    time = (row["gradient_ms"] + row["adamw_ms"]) / (row["gradient_ms"] + row["ms"])
    assert row["plain_cpu_time"] == pytest.approx(2 * time)


BASELINE: dict[str, Any] = {"target": 1.0, "steps": 60, "initial": 5.0, "max_steps": 100}


def curve(*losses: float, diverged: bool = False, **more: Any) -> LossCurve:
    return LossCurve(list(losses), diverged, **more)


#: Losses of a run, the horizon, and what the run earns: AdamW takes 60 steps to a loss of 1 from 5.
RATES: list[tuple[LossCurve, int, float]] = [
    (curve(5, 3, 1, 2), 100, 60 / 20),  # a hit ends it, whatever comes later
    (curve(5, 3, 0.9, diverged=True), 100, 60 / 20),
    (curve(0.5, 3, 2, 0.9), 100, 60 / 30),  # nothing is reached before training
    (curve(5, 3, 1.4), 100, 0.7 * math.exp(-1)),
    (curve(5, 1 + 1e-9), 100, 0.7),
    (curve(5, 3), 100, 0.05),
    (curve(5, 1.5, diverged=True), 100, 0.05),
    (curve(diverged=True), 100, 0.05),
    (curve(5, 3, 2, 1.4, 0.9), 10, 0.05),  # a horizon hides what comes later
    (curve(5, 3, 2, 1.4, 0.9), 20, 0.7 * math.exp(-2.5)),
    (curve(5, 3, 2, 1.4, 0.9), 30, 0.7 * math.exp(-1)),
    (curve(5, 3, 2, 1.4, 0.9), 40, 1.5),
    (curve(5, 3, 2, diverged=True), 20, 0.7 * math.exp(-2.5)),  # its loss at 30 steps was not finite, or before
    (curve(5, 3, 2, diverged=True), 30, 0.05),
]


def test_rate() -> None:
    for losses, steps, expected in RATES:
        assert compute_step_ratio(losses, BASELINE | {"max_steps": steps}) == pytest.approx(expected), expected


def test_gaps_are_of_the_best_loss_within_the_horizon() -> None:
    assert compute_loss_gap(curve(0.1, 3, 1.2, 1.5), BASELINE) == pytest.approx(20)
    assert compute_loss_gap(curve(5, 3, 1.2, 1.1), BASELINE | {"max_steps": 20}) == pytest.approx(20)
    assert compute_loss_gap(curve(5, 3, 1), BASELINE) is None
    assert compute_loss_gap(curve(5, diverged=True), BASELINE) is None
    assert compute_loss_gap(curve(5, 2, diverged=True), BASELINE) == pytest.approx(100)
    assert compute_loss_gap(curve(5, -1, -1.5), BASELINE | {"target": -2.0}) == pytest.approx(25)


def test_workloads_have_equal_weight_and_the_worst_family_is_reported() -> None:
    rows = [
        score_workload(name, [curve(*[5] * rank, 1)], BASELINE | {"max_steps": steps})
        for steps in (100, 200)
        for name, rank in (("cnn", 1), ("vit", 3), ("gpt", 2), ("labels", 4))
    ]
    first, second, *_ = summaries = summarise(rows)
    assert [(summary["role"], summary["steps"]) for summary in summaries] == [
        *(("visible", 100), ("tuning", 100)),
        *(("visible", 200), ("tuning", 200)),
    ]
    assert first["ratio"] == pytest.approx((6 * 2 * 3) ** (1 / 3))
    assert (first["worst"], first["worst_family"]) == ("vit", "language")  # vision has sqrt(12)
    assert first["worst_family_ratio"] == pytest.approx(3)
    assert first["interval"] is None  # of a single seed
    assert second["ratio"] == pytest.approx(1.5)


def test_tables() -> None:
    trials = [curve(5, 1, step_ms=1.0), curve(5, 3, 1.004, step_ms=3.0)]
    rows = [score_workload("gpt", trials, BASELINE), score_workload("labels", [curve(5, diverged=True)] * 2, BASELINE)]
    entry = {"name": "ours", "config": {}, "rows": rows, "summaries": summarise(rows)}
    text = format_tables(entry, {name: {"100": BASELINE} for name in ("gpt", "labels")})
    lines = read_cells(text)
    assert ["gpt", "language", "1", "60", "10, miss", "2.04", "0.4 %", "2.00"] in lines
    assert ["labels", "noise", "1", "60", "not finite, not finite", "0.05", "", "0.00"] in lines
    assert "**Visible workloads, 100 steps**" in text
    assert "ours: geometric mean 0.05 (0.05 to 0.05), worst labels 0.05, worst family noise 0.05, " in text
    assert "not finite: labels.\n" in text


def test_bootstrap_is_the_enumeration() -> None:
    logs = np.log(ratios := [[1.0, 2.0, 1.5], [0.5, 0.7, 3.0]])
    draws = list(itertools.product(range(3), repeat=3))
    means = [(a[list(i)].mean() + b[list(j)].mean()) / 2 for a, b in [logs] for i in draws for j in draws]
    assert bootstrap_interval(ratios) == pytest.approx(np.exp(np.quantile(means, [0.025, 0.975])), rel=0.03)
    assert bootstrap_interval(ratios) == bootstrap_interval(ratios)
    tripled = bootstrap_interval((3 * np.array(ratios)).tolist())
    assert tripled == pytest.approx([3 * end for end in bootstrap_interval(ratios)])
    assert bootstrap_interval([[2.0, 2.0], [8.0, 8.0]]) == pytest.approx((4, 4))


BATCHES, STEPS, RATE = 2, 30, 3e-3
LEARNING_RATES = {"cnn": 1e-2}  #: AdamW's rate for what learns nothing in so few steps at ``RATE``.


def generate(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def take(workload: Workload) -> list[float]:
    """Return the first losses of a workload, whose weights do not move."""
    return [float(workload.train_loss().detach()) for _ in range(BATCHES)]


@pytest.mark.parametrize(
    "name", [next(iter(builds)) for families in WORKLOADS_BY_ROLE.values() for builds in families.values()]
)
def test_a_workload_keeps_to_the_rules(name: str) -> None:
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    first, same, other = (WORKLOADS[name](seed) for seed in (0, 0, 1))
    weights = copy.deepcopy(first.model.state_dict())
    for key, value in same.model.state_dict().items():
        assert torch.equal(value, weights[key])
    assert any(not torch.equal(value, weights[key]) for key, value in other.model.state_dict().items())
    loss = compute_validation_loss(first.model, first.val_loss)
    assert np.isfinite(loss)
    losses = take(first)
    assert take(same) == losses
    other.model.load_state_dict(weights)
    assert take(other) != losses  # with the same weights: its batches are others
    for workload in (first, other):
        workload.model.load_state_dict(weights)  # batches may have moved buffers
        assert compute_validation_loss(workload.model, workload.val_loss) == loss
        assert workload.model.training
    optimizer = torch.optim.AdamW(first.model.parameters(), LEARNING_RATES.get(name, RATE))
    trained = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch_loss = first.train_loss()
        batch_loss.backward()
        optimizer.step()
        trained.append(float(batch_loss.detach()))
    assert all(parameter.grad is not None for parameter in first.model.parameters())
    early, late = np.mean(trained[:5]), np.mean(trained[-5:])
    assert late < early or compute_validation_loss(first.model, first.val_loss) < loss
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]


def list_rows(batch: object) -> list[tuple[float, ...]]:
    """Return the rows of a stream's batch, of its tensors side by side."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    rows = torch.cat([part.view(len(part), -1).double() for part in parts], 1).tolist()
    return [*map(tuple, rows)]


@pytest.mark.parametrize("name", [name for name, build in WORKLOADS.items() if build.__module__ == streams.__name__])
def test_rows_of_a_stream_never_come_again(name: str) -> None:
    task = inspect.unwrap(WORKLOADS[name])()
    stream = task.batch_stream(generate(3))
    rows = [row for batch in (next(stream), next(stream), task.validation_batch) for row in list_rows(batch)]
    assert len({*rows}) > 0.98 * len(rows)  # those of few symbols may, by chance


def test_every_workload_has_one_role_family_and_kind() -> None:
    assert len(WORKLOADS) == sum(len(builds) for families in WORKLOADS_BY_ROLE.values() for builds in families.values())
    assert GROUPS_OF_WORKLOAD.keys() == WORKLOADS.keys()
    assert all(groups.family in WORKLOADS_BY_ROLE[groups.role] for groups in GROUPS_OF_WORKLOAD.values())


def test_rows_are_seen_once_before_any_again_and_those_held_out_never() -> None:
    train, validation = hold_out(torch.arange(20), 7)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(20))
    stream = shuffled_batches(train, 4, lambda rows, generator: (rows, torch.rand(1, generator=generator)))(generate(3))
    batches = [next(stream)[0] for _ in range(6)]
    for epoch in (batches[:3], batches[3:]):
        assert len(torch.cat(epoch).unique()) == 12
        assert set(torch.cat(epoch).tolist()) < set(train.tolist())


def test_windows_of_text_do_not_overlap_and_modules_are_held_out() -> None:
    assert cut_windows(torch.arange(10), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cut_windows(torch.arange(10), 2, 3).tolist() == [[0, 1], [4, 5], [8, 9]]
    train, validation = read_stdlib_sources()
    assert not train.keys() & validation.keys()
    assert len(validation) > 10
