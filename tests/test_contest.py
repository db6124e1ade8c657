"""The simulated contest: the evaluator's rules, the clean process, the table of draws, the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from analysis import contest, contest_draws
from analysis.contest import main
from analysis.contest_draws import OURS, Cell, Grid, hash_code, measure
from analysis.contest_judge import judge
from analysis.contest_table import summarise, tabulate
from analysis.contest_worker import ALLOWED, _OnlyAllowed, evaluate, measure_peak_memory
from protonet.datasets import Split, sample_family

ROOT = Path(contest.__file__).resolve().parent.parent
SMALL = ["--classes", "4", "--dim", "16", "--shots", "2+1", "--limits", "0,30"]
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
    monkeypatch.setattr("analysis.contest_worker.evaluate_accuracy", lambda model, _: seen.append(model) or 0.6)
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
    before = measure_peak_memory()
    torch.zeros(int(before) + 200, 1 << 18)  # that many MiB
    assert measure_peak_memory() >= before + 199


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


def test_public_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["--config", "agentics", "--json", str(tmp_path / "new" / "out.json")]) == 0
    result = json.loads((tmp_path / "new" / "out.json").read_text())
    assert 0.3 < result["accuracy"] < 0.6
    assert result["parameters"] <= 500_000
    assert result["submission"] == "ZIP"
    line = capsys.readouterr().out
    assert line.startswith(f"accuracy {result['accuracy']:.4f}  score ")
    assert line.count("\n") == 1


def test_command_judges_the_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bytes] = []
    result = {"accuracy": 1.0, "score": 100.0, "parameters": 0, "seconds": 1.0, "peak_memory_mib": 1.0}
    monkeypatch.setattr(contest, "judge", lambda data, split, python: given.append(data) or result)
    monkeypatch.setattr(contest, "RESULTS", tmp_path)
    assert main(["--single-file"]) == 0
    assert main([]) == 0
    assert given[0].startswith(b'"""The submission in a single file')
    assert given[1].startswith(b"PK")
    found = {path.name: json.loads(path.read_text())["submission"] for path in tmp_path.iterdir()}
    assert found == {"contest.json": "ZIP", "contest_single_file.json": "single file"}


class TestDraws:
    def run(self, folder: Path, *arguments: str) -> int:
        fixed = [*SMALL, "--state", str(folder / "state.jsonl"), "--markdown", str(folder / "table.md")]
        return main(["--draws", "2", *fixed, *arguments])

    def test_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        families = ("--family", "isotropic,class_noise", "--json", str(tmp_path / "rows.json"))
        assert self.run(tmp_path, *families) == 0
        captured = capsys.readouterr()
        assert (tmp_path / "table.md").read_text() == captured.out
        assert "30/30" in captured.err
        rows = json.loads((tmp_path / "rows.json").read_text())
        assert [(row["family"], row["limit"]) for row in rows] == [
            (family, limit) for family in ("isotropic", "class_noise") for limit in (0, 30)
        ]
        assert set(rows[0]["percent"]) == {OURS, "nearest_mean", "cosine", "mlp", "lda", "bayes"}
        assert set(rows[2]["percent"]) == {OURS, "nearest_mean", "cosine", "mlp", "lda", "logistic"}
        assert rows[0]["parameters"] == [0, 0]
        assert all(parameters <= 30 for parameters in rows[1]["parameters"])

    def test_interrupted_table_continues(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run: list[tuple[str, int | None]] = []

        def run_method(split: Split, method: str, limit: int | None) -> dict[str, Any]:
            if len(run) == 5:
                run.append(("interrupt", None))
                raise KeyboardInterrupt
            run.append((method, limit))
            return {"accuracy": len(run) / 100, "parameters": 0, "seconds": 0.0}

        monkeypatch.setattr(contest_draws, "run_method", run_method)
        some = ("--methods", "cosine,mlp")
        assert self.run(tmp_path, *some) == 130
        last = capsys.readouterr().err.splitlines()[-1]
        kept = f"analysis.contest: interrupted; 5 of 8 results are kept in {tmp_path / 'state.jsonl'}."
        assert last == f"{kept} The same command continues."
        with (tmp_path / "state.jsonl").open("a") as file:
            file.write('{"cell": ["iso')  # a line that was cut off
        assert self.run(tmp_path, *some) == 0
        assert run[6:] == [("mlp", None), (OURS, 0), (OURS, 30)]
        assert self.run(tmp_path, *some) == 0
        assert len(run) == 9
        monkeypatch.setattr(contest_draws, "hash_code", lambda method: "new" if method == OURS else hash_code(method))
        assert self.run(tmp_path, *some) == 0
        assert {method for method, _ in run[9:]} == {OURS}
        assert self.run(tmp_path, *some, "--fresh") == 0
        assert len(run) == 9 + 4 + 8

    def test_result_is_the_solvers(self, tmp_path: Path) -> None:
        grid = Grid(["isotropic"], [(2, 1)], [300], [5], ["cosine"], num_classes=4, dim=16)
        results = measure(grid, tmp_path / "state.jsonl")
        cell = Cell("isotropic", 2, 1, 5, OURS, 300)
        assert set(results) == {cell, Cell("isotropic", 2, 1, 5, "cosine", None)}
        split = sample_family("isotropic", seed=5, n_train=2, n_val=1, num_classes=4, dim=16)
        from protonet import solve

        loaders = [[(split.train_x, split.train_y)], [(split.val_x, split.val_y)]]
        network = solve(*loaders, {"num_classes": 4, "input_dim": 16, "param_limit": 300})
        accuracy = float((network(split.test_x).argmax(dim=1) == split.test_y).double().mean())
        assert results[cell]["accuracy"] == accuracy
        assert results[cell]["parameters"] == network.count_parameters()

    def test_statistics(self) -> None:
        grid = Grid(["nuisance"], [(16, 4)], [9], [0, 1], ["cosine", "lda", "bayes"])
        share = {"cosine": [0.5, 0.7], "lda": [0.9, 0.6], "bayes": [0.9, 0.9], OURS: [0.8, 0.9]}
        results = {
            Cell("nuisance", 16, 4, seed, method, 9 if method == OURS else None): {
                "accuracy": share[method][seed],
                "parameters": 1000 + seed,
                "seconds": 1.0,
            }
            for method in share
            for seed in (0, 1)
        }
        lines = tabulate(summarise(grid, results)).splitlines()
        header, row = ([cell.strip() for cell in lines[i].split("|")[1:-1]] for i in (0, 2))
        assert dict(zip(header, row, strict=True)) == {
            "family": "nuisance",
            "train+val": "16+4",
            "limit": "9",
            "ours": "85.00 ±5.00",
            "Bayes": "90.00 ±0.00",
            "gap to Bayes": "+5.00 ±5.00",
            "cosine": "60.00 (+25.00 ±5.00)",
            "shrunken LDA": "75.00 (+10.00 ±20.00)",
            "regret": "-10.00 ±20.00",
            "parameters": "1,000",
            "seconds": "1.0",
        }
        assert "mean over 2 draws" in lines[4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--draws x", "`--draws` must be a whole number >= 1; got 'x'."),
        ("--draws 0", "`--draws` must be a whole number >= 1; got '0'."),
        ("--draws", "`arguments` must be as --help lists them; got argument --draws: expected one argument."),
        ("--bogus", "`arguments` must be as --help lists them; got unrecognized arguments: --bogus."),
        ("--fam isotropic", "`arguments` must be as --help lists them; got unrecognized arguments"),
        ("--limits 5", "`--limits` must come with --draws; got no --draws."),
        ("--draws 2 --config official", "`--config` must come without --draws; got --draws 2."),
        ("--config other", "`--config` must be one of official, agentics; got 'other'."),
        ("--python /no/python", "`--python` must be an interpreter; got '/no/python'."),
        ("--draws 1 --shots 3", "`--shots` must be train+val samples a class; got '3'."),
        ("--draws 1 --shots 0+3", "`--shots` must be train+val samples a class; got '0+3'."),
        ("--draws 1 --limits 1e3", "`--limits` must be a whole number >= 0; got '1e3'."),
        ("--draws 1 --family f", "`--family` must be one of isotropic, "),
        ("--draws 1 --methods f", "`--methods` must be one of nearest_mean, "),
        ("--draws 1 --classes 1", "`--classes` must be a whole number >= 2; got '1'."),
        ("--draws 1 --state /", "`--state` must be a file that can be written; got / (Is a directory)."),
        ("--json /dev/null/x", "`--json` must be a file that can be written; got /dev/null/x"),
    ],
)
def test_command_errors(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"analysis.contest: {message}")
    assert captured.err.count("\n") == 1


def test_missing_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest, "find_spec", lambda name: None)
    assert main(["--draws", "1", "--state", str(tmp_path / "s")]) == 2
    expected = "analysis.contest: `--methods` must have scikit-learn for lda and logistic; got none installed. "
    expected += 'Run pip install "protonet[analysis]", or leave out lda and logistic.\n'
    assert capsys.readouterr().err == expected


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--draws" in capsys.readouterr().out
