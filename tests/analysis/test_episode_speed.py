"""The comparison of speed: both sides classify, and the worker measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from analysis.__main__ import main
from analysis.episodes import speed
from analysis.episodes.peers import load_easyfsl, make_loader
from analysis.episodes.speed import PAIRS, compare, compare_authors, measure_growth, tabulate


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
    assert all(each["lean_ratio"] == each["lean_us"] / each["ours_us"] > 0 for each in results)
    growth = [{"episodes": 10, "seconds": 0.5, "before_mib": 100.0, "peak_mib": 1100.0}]
    text = tabulate(results, [], growth, 1)
    assert "| LaplacianShot" in text
    assert re.search(r"\| 0\.50 +\| 50000 +\| 100 +\| 1,100 +\|", text)


#: A script of the names that PT-MAP's has, which classifies by the nearest mean.
THEIRS = """
def same(rows):
    return rows

QRreduction = centerDatas = scaleEachUnitaryDatas = same

class GaussianModel:
    def __init__(self, n_ways, lam):
        self.n_ways = n_ways

    def initFromLabelledDatas(self):
        self.mus = ndatas.reshape(n_runs, n_shot + n_queries, n_ways, n_nfeat)[:, :n_shot].mean(1)

class MAP:
    def __init__(self, alpha):
        self.alpha = alpha

    def loop(self, model, n_epochs):
        nearest = (ndatas[:, :, None] - model.mus[:, None]).square().sum(dim=3).argmin(dim=2)
        right = (nearest == labels)[:, n_lsamples:].float()
        assert right.shape[1] == n_usamples
        return right.mean().item(), 0.0
"""


def test_pt_maps_script_runs_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROWS", 25)
    monkeypatch.setattr(speed, "TOGETHER", 4)
    (tmp_path / "test_standard.py").write_text(THEIRS, encoding="utf-8")
    found = compare_authors("separable", tmp_path / "test_standard.py", 1)
    assert found["theirs"] == found["ours"] == 1.0
    assert found["ratio"] == found["theirs_us"] / found["ours_us"] > 0
    assert "| separable | " in tabulate([], [found], [], 1)


def test_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROWS", 30)
    result = measure_growth(20)
    assert result["episodes"] == 20
    assert result["peak_mib"] >= result["before_mib"] > 0


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["episode-speed", "--repeats", "0"]) == 2
    assert "`--repeats` must be a whole number >= 1; got '0'" in capsys.readouterr().err
    assert main(["episode-speed", "--authors", "absent"]) == 2
    assert "`--authors` must hold PT-MAP/test_standard.py; got absent" in capsys.readouterr().err
