"""The comparison of speed: both sides classify, and the worker measures."""

from __future__ import annotations

import pytest
import torch

from analysis.__main__ import main
from analysis.episodes import speed
from analysis.episodes.peers import load_easyfsl, make_loader
from analysis.episodes.speed import PAIRS, compare, measure_growth, tabulate


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


def test_both_sides_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROWS", 30)
    pairs = [pair._replace(n_ours=8, n_theirs=1) for pair in PAIRS[:5]]
    results = [compare(pair, 1) for pair in pairs]
    assert [each["method"] for each in results] == [pair.name for pair in pairs]
    assert all(each["ratio"] == each["easyfsl_us"] / each["ours_us"] > 0 for each in results)
    growth = [{"episodes": 10, "seconds": 0.5, "before_mib": 100.0, "peak_mib": 1100.0}]
    text = tabulate(results, growth, 1)
    assert "| LaplacianShot" in text
    assert "| 0.50    | 50000          | 100        | 1,100    |" in text


def test_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROWS", 30)
    result = measure_growth(20)
    assert result["episodes"] == 20
    assert result["peak_mib"] >= result["before_mib"] > 0


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["episode-speed", "--repeats", "0"]) == 2
    assert "`--repeats` must be a whole number >= 1; got '0'" in capsys.readouterr().err
