"""The tables of few-shot methods on glyphs and synthetic classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.episodes import methods
from analysis.episodes.methods import ACCURACY, COMPARED, EVALUATED, UNBALANCED

KINDS, OVER = ("half_width", "p_value", "p_holm"), ("classes", "episodes")


def summary(names: tuple[str, ...], **accuracies: float) -> dict[str, Any]:
    accuracy_of = {name: accuracies.get(name.replace("-", "_"), 0.5) for name in names}
    pairs = [
        {
            "first": a,
            "second": b,
            "difference": accuracy_of[a] - accuracy_of[b],
            **{f"{kind}_{of}": 0.01 if kind == "half_width" else p for kind in KINDS for of in OVER},
        }
        for position, a in enumerate(names)
        for b in names[position + 1 :]
        for p in [0.001 if accuracy_of[a] != accuracy_of[b] else 1.0]
    ]
    return {
        "methods": {n: {"accuracy": v, "half_width_episodes": 0.002} for n, v in accuracy_of.items()},
        "comparisons": pairs,
    }


def test_tables_of_methods() -> None:
    summaries = {experiment.title: summary(experiment.methods, ridge=0.75) for experiment in ACCURACY}
    summaries |= {
        experiment.title: summary(COMPARED, protonet_cosine=0.8, tim=0.7, ilpc=0.9) for experiment in UNBALANCED
    }
    text = methods.tabulate(summaries, 10)
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
    broken = methods.Experiment("broken", ("--dataset", str(tmp_path / "absent.npz")), ("protonet",))
    monkeypatch.setattr(methods, "ENCODERS", {})
    monkeypatch.setattr(methods, "ACCURACY", (broken,))
    assert main(["episodes", "--state", str(tmp_path / "state.jsonl")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("analysis episodes: `broken` must run; got ")
    assert "absent.npz" in error
    assert main(["episodes", "--episodes", "1"]) == 2
