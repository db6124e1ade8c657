"""Studies of few-shot methods: their tables, authors' code and easyfsl's, on repositories made up here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.__main__ import main
from analysis.episodes import authors, methods, speed
from analysis.episodes.authors import PAIRS, Pair, Source, interleave
from analysis.episodes.methods import ACCURACY, COMPARED, EVALUATED, UNBALANCED
from analysis.episodes.peers import load_easyfsl, make_loader
from protonet.episodes.draws.batch import summarize_base, take_from
from protonet.sampling import index_classes

KINDS, OVER = ("half_width", "p_value", "p_holm"), ("classes", "episodes")


def summary(names: tuple[str, ...], **accuracies: float) -> dict[str, Any]:
    own = {name: accuracies.get(name.replace("-", "_"), 0.5) for name in names}
    pairs = [
        {
            "first": a,
            "second": b,
            "difference": own[a] - own[b],
            **{f"{kind}_{of}": 0.01 if kind == "half_width" else p for kind in KINDS for of in OVER},
        }
        for position, a in enumerate(names)
        for b in names[position + 1 :]
        for p in [0.001 if own[a] != own[b] else 1.0]
    ]
    return {"methods": {n: {"accuracy": v, "half_width_episodes": 0.002} for n, v in own.items()}, "comparisons": pairs}


def test_tables_of_methods() -> None:
    summaries = {each.title: summary(each.methods, ridge=0.75) for each in ACCURACY}
    summaries |= {each.title: summary(COMPARED, protonet_cosine=0.8, tim=0.7, ilpc=0.9) for each in UNBALANCED}
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


#: A method of the interface of PADDLE's repository: the nearest mean, plus a log file as theirs.
PADDLE = """
import torch
import requests
from src.utils import half


class PADDLE:
    def __init__(self, model, device, log_file, args):
        open(log_file, "w").close()
        self.way, self.steps = args.n_ways, args.iter

    def run_task(self, task_dic, shot):
        support, query = (half(task_dic[name].cuda()) for name in ("x_s", "x_q"))
        assert task_dic["y_s"][0, :, 0].tolist() == list(range(self.way)) * shot
        means = support.unflatten(1, (shot, self.way)).mean(dim=1)
        right = torch.cdist(query, means).argmin(dim=2) == task_dic["y_q"][..., 0]
        return {"acc": right.float().mean(dim=1, keepdim=True).numpy()}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write their repository, and let the study have small features and one pair."""
    source = tmp_path / "PADDLE" / "src"
    (source / "methods").mkdir(parents=True)
    (source / "methods" / "__init__.py").write_text(PADDLE, encoding="utf-8")
    (source / "utils.py").write_text("def half(x):\n    return x / 2\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(12).repeat_interleave(30)
    x = torch.randn(12, 8, generator=generator)[labels] + torch.randn(360, 8, generator=generator)
    index = index_classes(labels)
    made = Source(take_from(x), index, summarize_base(take_from(x), index))
    monkeypatch.setattr(authors, "KINDS", {"small": lambda: made})
    monkeypatch.setattr(authors, "PAIRS", (Pair("PADDLE", "PADDLE", "protonet"), Pair("PT-MAP", "Absent", "pt-map")))
    return tmp_path


def test_ours_and_theirs_see_the_same_episodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["episode-authors", "--authors", str(folder), "--episodes", "20", "--state", str(folder / "s.jsonl")])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    line = next(line for line in captured.out.splitlines() if line.startswith("| PADDLE "))
    assert line.count(", +0.00 ±0.00 (100.0 %)") == 2
    assert "PT-MAP" not in captured.out  # whose repository is not there
    assert (folder / "PADDLE" / "src" / "utils.py").exists()


def test_rows_come_one_of_each_class_at_a_time() -> None:
    labels = torch.tensor([[4, 0, 1, 3, 2, 2, 3, 1, 0, 4]])
    rows = 10 * labels[..., None] + torch.arange(10)[:, None]
    assert interleave(rows, labels)[0, :, 0].tolist() == [1, 12, 24, 33, 40, 8, 17, 25, 36, 49]


def test_the_table_leaves_out_what_is_no_number() -> None:
    places = [f"{kind}, {shot}-shot" for kind in authors.KINDS for shot in (1, 5)]
    numbers = [[0.5, 0.7], [0.6, 0.7], [0.9, 0.8], [1.0, 1.0], [0.9, 0.8]]
    found = {f"{pair.name}, {place}": numbers for pair in PAIRS for place in places}
    found["PT-MAP, conv, 1-shot"] = [[0.5, 0.7], [float("nan"), 0.7], *numbers[2:]]
    found["alpha-AM, conv, 1-shot"] = [*numbers[:3], [0.9, 1.0], [1.0, 1.0]]
    lines = authors.tabulate(PAIRS, list(authors.KINDS), found, 2).splitlines()
    row = next(line for line in lines if line.startswith("| PT-MAP "))
    assert row.count("65.00, -5.00 ±63.53 (85.0 %)") == 5
    assert sum(line.count("(85.0 %; 95.0 %; 100.0 %)") for line in lines if line.startswith("| alpha-AM ")) == 1
    lines = authors.tabulate(PAIRS[:1], ["pixels"], found, 20).splitlines()
    assert lines[-1].startswith("| TIM-GD (2) ")


def test_code_that_fails_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "PADDLE" / "src" / "utils.py").write_text("1 / 0\n", encoding="utf-8")
    arguments = ["--authors", str(folder), "--episodes", "20", "--state", str(folder / "s.jsonl")]
    assert main(["episode-authors", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "`--authors` must hold PADDLE as it was published; got ZeroDivisionError: division by zero" in error


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
    assert [each["method"] for each in results] == [pair.name for pair in pairs]
    assert all(each["ratio"] == each["easyfsl_us"] / each["ours_us"] > 0 for each in results)
    assert all(each["lean_ratio"] == each["lean_us"] / each["ours_us"] > 0 for each in results)
    result = speed.measure_growth(20)
    assert result["episodes"] == 20
    assert result["peak_mib"] >= result["before_mib"] > 0
    growth = [{"episodes": 10, "seconds": 0.5, "before_mib": 100.0, "peak_mib": 1100.0}]
    text = speed.tabulate(results, [], growth, 1)
    assert "| LaplacianShot" in text
    assert re.search(r"\| 0\.50 +\| 50000 +\| 100 +\| 1,100 +\|", text)


#: A script of the names that PT-MAP's has, which classifies by the nearest mean.
PT_MAP = """
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
    (tmp_path / "test_standard.py").write_text(PT_MAP, encoding="utf-8")
    found = speed.compare_authors("separable", tmp_path / "test_standard.py", 1)
    assert found["theirs"] == found["ours"] == 1.0
    assert found["ratio"] == found["theirs_us"] / found["ours_us"] > 0
    assert "| separable | " in speed.tabulate([], [found], [], 1)
