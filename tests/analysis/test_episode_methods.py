"""The study of few-shot methods: its tables, from summaries as the command writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.episodes import methods as episodes
from analysis.episodes.methods import ACCURACY, COMPARED, EVALUATED, UNBALANCED, tabulate


def summary(methods: tuple[str, ...], **accuracies: float) -> dict[str, Any]:
    own = {name: accuracies.get(name.replace("-", "_"), 0.5) for name in methods}
    pairs = [
        {"first": a, "second": b, "difference": own[a] - own[b], "half_width": 0.01, "p_value": p, "p_holm": p}
        for position, a in enumerate(methods)
        for b in methods[position + 1 :]
        for p in [0.001 if own[a] != own[b] else 1.0]
    ]
    return {"methods": {n: {"accuracy": v, "half_width": 0.002} for n, v in own.items()}, "comparisons": pairs}


def test_tables() -> None:
    summaries = {each.title: summary(each.methods, ridge=0.75) for each in ACCURACY}
    summaries |= {each.title: summary(COMPARED, protonet_cosine=0.8, tim=0.7, ilpc=0.9) for each in UNBALANCED}
    text = tabulate(summaries, 10)
    first, second = text.split("## Queries")
    assert next(line for line in first.splitlines() if line.startswith("| ridge")).count("75.00 ±0.20") == len(ACCURACY)
    assert sum(line.startswith("| ") for line in first.splitlines()) == len(EVALUATED) + 1
    lines = {line.split("|")[1].strip(): line for line in second.splitlines() if line.startswith("| ")}
    assert lines["tim"].count("(**-10.00 ±1.00**)") == 3
    assert lines["ilpc"].count("(+10.00 ±1.00)") == 3
    assert "(" not in lines["protonet-cosine"]


def test_a_command_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = episodes.Experiment("broken", ("--dataset", str(tmp_path / "absent.npz")), ("protonet",))
    monkeypatch.setattr(episodes, "ENCODERS", {})
    monkeypatch.setattr(episodes, "ACCURACY", (broken,))
    assert main(["episodes", "--state", str(tmp_path / "state.jsonl")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("analysis episodes: `broken` must run; got ")
    assert "absent.npz" in error
    assert main(["episodes", "--episodes", "1"]) == 2
