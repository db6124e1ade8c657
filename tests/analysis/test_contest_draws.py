"""New draws: the table, what it says, and how it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.contest import draws
from analysis.contest.draws import OURS, Cell, hash_code, run_cell, summarise, tabulate
from analysis.shared.journal import hash_sources
from protonet import solve
from protonet.datasets import sample_family

SMALL = ["--classes", "4", "--dim", "16", "--shots", "2+1", "--limits", "0,30"]


def run_draws(folder: Path, *arguments: str) -> int:
    fixed = [*SMALL, "--state", str(folder / "state.jsonl"), "--markdown", str(folder / "table.md")]
    return main(["contest-draws", "--draws", "2", *fixed, *arguments])


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    families = ("--family", "isotropic,class_noise", "--json", str(tmp_path / "rows.json"))
    assert run_draws(tmp_path, *families) == 0
    captured = capsys.readouterr()
    made = "--draws 2 --family isotropic,class_noise --shots 2+1 --limits 0,30 --first-seed 0 --classes 4 --dim 16"
    expected = f"{captured.out}\nMade by `python -m analysis contest-draws {made}`.\n"
    assert (tmp_path / "table.md").read_text() == expected
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[tuple[str, int | None]] = []

    def run_cell(cell: Cell) -> dict[str, Any]:
        if len(run) == 5:
            run.append(("interrupt", None))
            raise KeyboardInterrupt
        run.append((cell.method, cell.limit))
        return {"accuracy": len(run) / 100, "parameters": 0, "seconds": 0.0}

    monkeypatch.setattr(draws, "run_cell", run_cell)
    some = ("--methods", "cosine,mlp")
    assert run_draws(tmp_path, *some) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    kept = f"analysis contest-draws: interrupted; 5 of 8 results are kept in {tmp_path / 'state.jsonl'}."
    assert last == f"{kept} The same command continues."
    with (tmp_path / "state.jsonl").open("a") as file:
        file.write('5\n{}\n{"run": 5}\n{"run": ["iso')  # no entries, and a line that was cut off
    assert run_draws(tmp_path, *some) == 0
    assert run[6:] == [("mlp", None), (OURS, 0), (OURS, 30)]
    assert run_draws(tmp_path, *some) == 0
    assert len(run) == 9
    monkeypatch.setattr(draws, "hash_code", lambda method: "new" if method == OURS else hash_code(method))
    assert run_draws(tmp_path, *some) == 0
    assert {method for method, _ in run[9:]} == {OURS}
    assert run_draws(tmp_path, *some, "--fresh") == 0
    assert len(run) == 9 + 4 + 8


def test_values_given_twice_count_once(tmp_path: Path) -> None:
    twice = ("--family", "isotropic,isotropic", "--methods", "cosine,cosine", "--json", str(tmp_path / "rows.json"))
    assert run_draws(tmp_path, *twice, "--shots", "2+1,1+1,2+1", "--limits", "0,00") == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["shots"], row["limit"]) for row in rows] == [("2+1", 0), ("1+1", 0)]
    assert len((tmp_path / "state.jsonl").read_text().splitlines()) == 2 * 2 * 2


def test_code_is_the_baselines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_code("lda"), hash_code(OURS)
    assert hash_code("cosine") == before[0] != before[1]
    monkeypatch.setattr("analysis.shared.journal.find_version", lambda package: "another")
    hash_sources.cache_clear()
    assert hash_code("lda") != before[0]
    assert hash_code(OURS) != before[1]
    hash_sources.cache_clear()


def test_result_is_the_solvers() -> None:
    result = run_cell(Cell("isotropic", 2, 1, 5, 4, 16, OURS, 300))
    split = sample_family("isotropic", seed=5, n_train=2, n_val=1, num_classes=4, dim=16)
    train, val = [(split.train_x, split.train_y)], [(split.val_x, split.val_y)]
    network = solve(train, val, {"num_classes": 4, "input_dim": 16, "param_limit": 300})
    accuracy = float((network(split.test_x).argmax(dim=1) == split.test_y).double().mean())
    assert result["accuracy"] == accuracy
    assert result["parameters"] == network.count_parameters()


def test_statistics() -> None:
    share = {"cosine": [0.5, 0.7], "lda": [0.9, 0.6], "bayes": [0.9, 0.9], OURS: [0.8, 0.9]}
    results = {
        Cell("nuisance", 16, 4, seed, 128, 384, method, 9 if method == OURS else None): {
            "accuracy": share[method][seed],
            "parameters": 1000 + seed,
            "seconds": 1.0,
        }
        for method in share
        for seed in (0, 1)
    }
    lines = tabulate(summarise(results)).splitlines()
    header, row = ([cell.strip() for cell in lines[i].split("|")[1:-1]] for i in (0, 2))
    assert dict(zip(header, row, strict=True)) == {
        "family": "nuisance",
        "train+val": "16+4",
        "limit": "9",
        "ours": "85.00 ±5.00",
        "Bayes": "90.00 ±0.00",
        "gap to Bayes": "+5.00 ±5.00",
        "raw cosine": "60.00 (+25.00 ±5.00)",
        "shrunken LDA": "75.00 (+10.00 ±20.00)",
        "regret": "-10.00 ±20.00",
        "parameters": "1,000",
        "seconds": "1.0",
    }
    assert "mean over 2 draws" in lines[4]
