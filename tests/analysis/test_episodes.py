"""Studies of few-shot methods: their tables, and easyfsl in the same run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.__main__ import main
from analysis.episodes import methods, speed
from analysis.episodes.methods import ACCURACY, COMPARED, EVALUATED, UNBALANCED
from analysis.episodes.peers import load_easyfsl, make_loader

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


def test_easyfsls_loader_draws_episodes() -> None:
    labels = torch.arange(60) % 6
    x = torch.nn.functional.one_hot(labels, 6).float()
    episodes = list(make_loader(x, labels, n_way=3, n_shot=2, n_query=4, n_tasks=5))
    assert len(episodes) == 5
    for support, support_labels, query, query_labels, class_ids in episodes:
        assert (len(support), len(query)) == (6, 12)
        assert len(class_ids) == 3
        classifier = load_easyfsl("methods.prototypical_networks").PrototypicalNetworks()
        classifier.process_support_set(support, support_labels)
        assert torch.equal(classifier(query).argmax(dim=1), query_labels)


def test_both_sides_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(speed, "ROWS", 30)
    pairs = [pair._replace(n_ours=8, n_theirs=1) for pair in speed.PAIRS[:5]]
    results = [speed.compare(pair, 1) for pair in pairs]
    assert [result["method"] for result in results] == [pair.name for pair in pairs]
    assert all(result["ratio"] == result["easyfsl_us"] / result["ours_us"] > 0 for result in results)
    assert all(result["lean_ratio"] == result["lean_us"] / result["ours_us"] > 0 for result in results)
    result = speed.measure_growth(20)
    assert result["episodes"] == 20
    assert result["peak_mib"] >= result["before_mib"] > 0
    growth = [{"episodes": 10, "seconds": 0.5, "before_mib": 100.0, "peak_mib": 1100.0}]
    text = speed.tabulate(results, growth, 1)
    assert "| LaplacianShot" in text
    assert re.search(r"\| 0\.50 +\| 50000 +\| 100 +\| 1,100 +\|", text)
