"""The optimizer bench: scores against oracles, baselines, the journal, peers, errors of one line."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis.__main__ import main
from analysis.optimizer_bench import apart, runs
from analysis.optimizer_bench.loading import BASELINES, load_python, read_baselines
from analysis.optimizer_bench.peers import PEERS
from analysis.optimizer_bench.runs import Candidate, Run, do
from analysis.optimizer_bench.score import bootstrap, rate, score_workload, summarise
from analysis.optimizer_bench.workload import Curve
from analysis.optimizer_bench.workloads import WORKLOADS
from solution.pack import ROOT

WORKLOAD_FILE = """
import torch
from torch import nn
from analysis.optimizer_bench.workload import Workload, initial_weights

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])

def build(seed):
    with initial_weights(seed):
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
    def __init__(self, params, lr=0.1, noise=0.0, crash=False):
        super().__init__(params, lr)
        self.noise, self.crash = noise, crash

    def step(self, closure=None):
        if self.crash:
            torch.linalg.cholesky(torch.zeros(2, 2))
        for p in self.param_groups[0]["params"]:
            p.grad += self.noise * torch.randn_like(p)
        return super().step(closure)
"""
BASELINE: dict[str, Any] = {"target": 1.0, "steps": 60, "initial": 5.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with workloads, their baselines and an optimizer."""
    path = tmp_path_factory.mktemp("bench")
    (path / "workloads.py").write_text(WORKLOAD_FILE)
    (path / "optimizer.py").write_text(OPTIMIZER_FILE)
    (path / "config.json").write_text('{"lr": 0.2}')
    assert (
        main(["optimizer-tune", "--max-steps", "20", *options(path), "--baselines", str(path / "baselines.json")]) == 0
    )
    return path


def options(folder: Path, state: str = "state.jsonl") -> list[str]:
    file = ["--workload-file", str(folder / "workloads.py"), "--workloads", "tiny,small"]
    return [*file, "--state", str(folder / state)]


def run(folder: Path, *more: str, state: str = "state.jsonl") -> int:
    given = ["--optimizer", str(folder / "optimizer.py"), "--baselines", str(folder / "baselines.json")]
    return main(["optimizer-bench", *given, *options(folder, state), "--jobs", "1", *more])


def curve(*losses: float, diverged: bool = False) -> Curve:
    return Curve(list(losses), diverged)


def test_rate() -> None:
    assert rate(curve(5, 3, 1, 2), BASELINE) == 60 / 20
    assert rate(curve(0.5, 3, 2, 0.9), BASELINE) == 60 / 30  # nothing is reached before training
    assert rate(curve(5, 3, 1.4), BASELINE) == pytest.approx(0.7 * math.exp(-1))
    assert rate(curve(5, 1 + 1e-9), BASELINE) == pytest.approx(0.7)
    assert rate(curve(5, 3), BASELINE) == rate(curve(5, 0.5, diverged=True), BASELINE) == 0.05


def test_summary() -> None:
    seeds = [curve(5, 1)._replace(step_ms=1.0), curve(5, 2, 1)._replace(step_ms=3.0)]
    good = score_workload("good", seeds, BASELINE)
    assert good["ratio"] == pytest.approx(math.sqrt(6 * 3))
    assert (good["hits"], good["step_ms"]) == ([10, 20], 2.0)
    bad = score_workload("bad", [curve(5, diverged=True), curve(5, 5)], BASELINE)
    summary = summarise([good, bad])
    assert summary["ratio"] == pytest.approx(math.sqrt(math.sqrt(18) * 0.05))
    assert (summary["worst"], summary["diverged"]) == ("bad", ["bad"])
    assert summary["interval"][0] < summary["ratio"] < summary["interval"][1]
    assert summarise([score_workload("one", seeds[:1], BASELINE)])["interval"] is None


def test_bootstrap_is_the_enumeration() -> None:
    logs = np.log(ratios := [[1.0, 2.0, 1.5], [0.5, 0.7, 3.0]])
    draws = list(itertools.product(range(3), repeat=3))
    means = [(a[list(i)].mean() + b[list(j)].mean()) / 2 for a, b in [logs] for i in draws for j in draws]
    assert bootstrap(ratios) == pytest.approx(np.exp(np.quantile(means, [0.025, 0.975])), rel=0.03)
    assert bootstrap(ratios) == bootstrap(ratios)
    assert bootstrap((3 * np.array(ratios)).tolist()) == pytest.approx([3 * end for end in bootstrap(ratios)])
    assert bootstrap([[2.0, 2.0], [8.0, 8.0]]) == pytest.approx((4, 4))


def test_committed_baselines_name_every_workload() -> None:
    baselines = read_baselines(ROOT / BASELINES)
    assert set(baselines) == {*WORKLOADS, *apart.WORKLOADS}
    for baseline in baselines.values():
        assert baseline["target"] < baseline["initial"]
        assert 0 < baseline["steps"] <= baseline["max_steps"]


def test_baselines(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "baselines.json"
    was = path.read_text()
    baseline = json.loads(was)["tiny"]
    assert list(json.loads(was)) == ["tiny", "small"]
    assert baseline["curve"][0] == pytest.approx(baseline["initial"], rel=1e-4)
    assert baseline["fingerprint"] == float(f"{load_python('', folder / 'workloads.py').build(0).val_loss():.4g}")
    monkeypatch.setattr(runs, "do", None)  # all is in the journal
    assert main(["optimizer-tune", "--max-steps", "20", *options(folder), "--baselines", str(path)]) == 0
    assert path.read_text() == was
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {name: folder / f"out.{ending}" for name, ending in [("json", "json"), ("plot", "png")]}
    more = ["--config", str(folder / "config.json"), *(f"--{name}={path}" for name, path in outputs.items())]
    assert run(folder, *more) == 0
    captured = capsys.readouterr()
    assert "Workloads of the file" in captured.out
    assert "Visible" not in captured.out
    assert "before training" not in captured.err
    assert outputs["plot"].read_bytes()[:4] == b"\x89PNG"
    (entry,) = json.loads(outputs["json"].read_text())
    assert [row["workload"] for row in entry["apart_rows"]] == ["tiny", "small"]
    assert entry["config"] == {"lr": 0.2}
    monkeypatch.setattr(runs, "do", None)
    assert run(folder, *more) == 0
    assert capsys.readouterr().out == captured.out


def test_interrupted_run_continues(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Run] = []

    def stop(run: Run) -> Curve:
        done.append(run)
        if len(done) == 4:
            raise KeyboardInterrupt
        return do(run)

    monkeypatch.setattr(runs, "do", stop)
    assert run(folder, state="stopped.jsonl") == 130
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("analysis optimizer-bench: interrupted; 3 of 6 runs are kept in ")
    assert run(folder, state="stopped.jsonl") == 0
    assert len(done) == 6 + 1
    (folder / "other.json").write_text('{"lr": 0.05}')
    assert run(folder, "--config", str(folder / "other.json"), "--seeds", "0", state="stopped.jsonl") == 0
    assert len(done) == 7 + 2  # other settings are other runs


def test_two_processes_find_the_same(folder: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        path = folder / f"jobs{jobs}.json"
        more = ["--json", str(path), "--seeds", "5", "--jobs", jobs]
        assert run(folder, *more, state=f"jobs{jobs}.jsonl") == 0
        found.append([row["ratios"] for row in json.loads(path.read_text())[0]["apart_rows"]])
    assert found[0] == found[1]


def test_other_data_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baselines = json.loads((folder / "baselines.json").read_text())
    baselines["small"]["fingerprint"] = 12.34
    (folder / "other.json").write_text(json.dumps(baselines))
    assert run(folder, "--baselines", str(folder / "other.json")) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "before training" in line]
    assert len(lines) == 1
    assert lines[0].startswith("small differs from what its baseline was made with: ")


def test_randomness_is_the_seeds(folder: Path) -> None:
    before = torch.get_rng_state()
    candidate = Candidate("optimizer", '{"noise": 0.1}', folder / "optimizer.py")
    curves = [do(Run("tiny", folder / "workloads.py", seed, 30, candidate, -math.inf)).losses for seed in (0, 0, 1)]
    assert curves[0] == curves[1] != curves[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("config", ['{"lr": 1e30}', '{"crash": true}'])
def test_divergence(folder: Path, config: str) -> None:
    candidate = Candidate("optimizer", config, folder / "optimizer.py")
    assert do(Run("tiny", folder / "workloads.py", 0, 30, candidate, 0.0)).diverged


def test_peers_take_their_best_rate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "peers.json"
    given = ["--baselines", str(folder / "baselines.json"), "--compare", "adamw,schedule-free", "--json", str(path)]
    assert main(["optimizer-bench", *given, *options(folder), "--jobs", "1"]) == 0
    for entry in json.loads(path.read_text()):
        best = max(entry["rates"], key=entry["rates"].get)
        assert json.loads(best) == entry["config"]
        assert len(entry["rates"]) == len(PEERS[entry["name"]].rates)
    out = capsys.readouterr().out
    assert out.index("| optimizer") < out.index("| schedule-free")
    assert "only step() is called" in out.lower()


ERRORS = [
    (["--optimizer", "{f}/missing.py"], "`--optimizer` must be a Python file that can be imported; got "),
    (["--optimizer", "solution/custom_optimizer.py"], "`--optimizer` must be a file that exists; got "),
    (["--optimizer", "{f}/workloads.py"], "`--optimizer` must hold a class CustomOptimizer; got none in "),
    (["--config", "{f}/list.json"], "`--config` must hold a JSON object; got a list in "),
    (["--config", "{f}/optimizer.py"], "`--config` must be a readable JSON file; got "),
    (["--config", "{f}/unknown.json"], "`--config` must be what CustomOptimizer takes; got TypeError: "),
    (["--baselines", "{f}/missing.json"], "`--baselines` must be a readable JSON file; got "),
    (["--baselines", "{f}/empty.json"], "`--baselines` must have every workload; got none of tiny. Run python -m "),
    (["--baselines", "{f}/list.json"], "`--baselines` must hold what tune writes; got "),
    (["--workloads", "tiny,huge"], "`--workloads` must be of gpt, "),
    (["--workload-file", "{f}/optimizer.py"], "`--workload-file` must hold a dictionary WORKLOADS; got "),
    (["--workload-file", "{f}/taken.py"], "`--workload-file` must have names of its own; got gpt."),
    (["--seeds", "0,x"], "`--seeds` must be a whole number >= 0; got 'x'"),
    (["--jobs", "0"], "`--jobs` must be a whole number >= 1; got '0'"),
    (["--compare", "sgd"], "`--compare` must be of adamw, "),
    (["--plot", "x.txt"], "`--plot` must end in .png, .pdf, .svg; got 'x.txt'"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_errors(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    texts = {
        "list.json": "[1]",
        "empty.json": "{}",
        "unknown.json": '{"size": 1}',
        "taken.py": 'WORKLOADS = {"gpt": 1}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    assert run(folder, *(argument.format(f=folder) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"analysis optimizer-bench: {message}")
    assert captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer-bench"], "`--optimizer` must be a Python file; got none."),
        (["optimizer-bench", "--compare", "--plot", "x.png"], "`--plot` must come with --optimizer"),
        (["optimizer-tune", "--max-steps", "5"], "`--max-steps` must be a whole number >= 10; got '5'"),
    ],
)
def test_other_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"analysis {arguments[0]}: {message}")


def test_the_optimizers_old_path_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizer-bench", "--optimizer", "solution/custom_optimizer.py"]) == 2
    said = capsys.readouterr().err
    assert "custom_optimizer.py. Pass protonet/optimizer.py: python -m solution.pack makes" in said
    assert said.count("\n") == 1


def test_workloads_that_cannot_be_tuned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = WORKLOAD_FILE.replace("Y = X @", "Y = float('nan') * X @").replace("tiny", "lost")
    (folder / "lost.py").write_text(text)
    given = [
        "--workload-file",
        str(folder / "lost.py"),
        "--workloads",
        "lost",
        "--baselines",
        str(folder / "lost.json"),
    ]
    assert main(["optimizer-tune", *given, "--state", str(folder / "state.jsonl")]) == 2
    assert "`--workloads` must have a finite loss before training; got nan of lost" in capsys.readouterr().err
