"""Reports of evaluations: tables, files, plots, and the page for the browser."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.stats import ttest_rel

from protonet._io import write_json
from protonet.episodes.__main__ import main
from protonet.episodes.evaluation import report
from protonet.episodes.evaluation.evaluate import EpisodeScores, evaluate
from protonet.episodes.evaluation.report import compute_class_accuracies
from protonet.episodes.evaluation.several import rank_methods
from protonet.episodes.methods import METHODS
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.sampling import index_classes
from tests.browser import Browser, check_looks, every
from tests.episodes.cases import Command
from tests.strategies import seeds

LABELS = torch.arange(120) % 6
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))[LABELS]
X = X + torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
NAMES = ("protonet", "ridge", "soft-kmeans")
PLAIN = EpisodeConfig(way=(3, 3), query=4)
OPEN = EpisodeConfig(way=(3, 3), shot=(1, 3), query=4, n_open_classes=1)


def classes_of(setting: EpisodeConfig, n_episodes: int = 40) -> torch.Tensor:
    return setting.count_classes_and_queries(index_classes(LABELS), seed=0, n_episodes=n_episodes)[0]


@cache
def score(setting: EpisodeConfig, n_episodes: int = 40) -> dict[str, EpisodeScores]:
    return evaluate(X, index_classes(LABELS), {name: METHODS[name] for name in NAMES}, setting, episodes=n_episodes)


def test_the_summary_agrees_with_the_scores() -> None:
    scores = score(OPEN)
    summary = report.summarize(scores, OPEN.shot, {"n_open_classes": 1})
    assert summary.n_episodes == 40
    assert summary.settings == {"n_open_classes": 1}
    ridge = summary.methods["ridge"]
    assert math.isclose(ridge.accuracy.mean, float(scores["ridge"].accuracy.mean()))
    assert math.isclose(ridge.accuracy_by_shot[2].mean, float(scores["ridge"].accuracy_by_shot[:, 1].nanmean()))
    for measure in ("auroc", "fpr95", "oscr"):
        assert math.isclose(ridge.further_measures[measure].mean, float(getattr(scores["ridge"], measure).mean()))
    assert len(summary.comparisons) == 3


def test_the_table_shows_the_summary() -> None:
    summary = report.summarize(score(PLAIN), (1, 1), {}, classes_of(PLAIN))
    lines, note = (part.splitlines() for part in report.format_report(summary).split("\n\n"))
    assert "Holm for 3 pairs" in note[0]
    assert [line.split("|")[1].strip() for line in lines[2:]] == summary.methods_by_accuracy
    best = lines[2].split("|")
    accuracy = summary.methods[best[1].strip()].accuracy.mean
    assert best[2].strip().startswith(f"{100 * accuracy:.2f} ±")
    assert [cell.strip() for cell in lines[0].split("|")[2:6]] == [
        *("accuracy, % ±classes ±episodes", f"behind {best[1].strip()}"),
        *("p over classes (Holm)", "p over episodes (Holm)"),
    ]
    assert best[3].strip() == best[4].strip() == best[5].strip() == ""
    pair = next(p for p in summary.comparisons if {p.first, p.second} == {best[1].strip(), "ridge"})
    row = next(line for line in lines[2:] if "ridge" in line).split("|")
    shown = [abs(pair.difference), pair.half_width_classes, pair.half_width_episodes]
    assert row[3].strip() == " ±".join(f"{100 * fraction:.2f}" for fraction in shown)
    assert [row[4].strip(), row[5].strip()] == [f"{pair.get_p_value(over):.2g}" for over in ("classes", "episodes")]
    assert pair.half_width_classes > pair.half_width_episodes
    assert "AUROC" not in lines[0]


def test_intervals_over_episodes_alone_and_p_values_that_underflow() -> None:
    summary = report.summarize(score(PLAIN), (1, 1), {})
    assert "apply to new episodes of these classes: those for new classes need" in report.format_report(summary)
    summary = replace(summary, comparisons=[replace(pair, p_holm_episodes=0.0) for pair in summary.comparisons])
    assert report.format_report(summary).count("<1e-300") == 2


def test_written_files_hold_the_summary(tmp_path: Path) -> None:
    summary = report.summarize(score(OPEN, 150), OPEN.shot, {"seed": 0}, classes_of(OPEN, 150))
    write_json(tmp_path / "a.json", summary.to_dict())
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == summary.to_dict()
    paths = {"latex": tmp_path / "a.tex", "markdown": tmp_path / "a.md"}
    report.write_tables(paths, report.format_summary_tables(summary))
    assert report.format_report(summary).startswith((tmp_path / "a.md").read_text(encoding="utf-8"))
    assert (tmp_path / "a.tex").read_text(encoding="utf-8").count(r"\begin{tabular}") == 2


@pytest.mark.parametrize("n_methods", [1, 3])
def test_the_plot_is_not_blank(tmp_path: Path, n_methods: int) -> None:
    from matplotlib.image import imread

    config = OPEN if n_methods > 1 else PLAIN
    summary = report.summarize(dict(list(score(config).items())[:n_methods]), config.shot, {})
    report.write_accuracy_figure(tmp_path / "a.png", {"": summary, "again": summary})
    pixels = imread(tmp_path / "a.png")
    assert float(pixels.std()) > 0.05  # it is not blank
    assert pixels.shape[1] == 2 * 504


def test_latex_escapes_text_and_sets_numbers_in_math_mode() -> None:
    cells = [["x & y", "-1.5 ±0.2"], ["<1e-300", "{\\}~^#$"], ["tim:a=1", "2.2e-07"]]
    cells += [["9.5 ±3 ±1.5 (1.5)", "9 (2)"], ["", "± <"]]
    expected = r"""\begin{tabular}{lr}
  \toprule
  a\_b & 50 \% \\
  \midrule
  x \& y & $-1.5 \pm 0.2$ \\
  $<1 \times 10^{-300}$ & \{\textbackslash{}\}\textasciitilde{}\textasciicircum{}\#\$ \\
  tim:a=1 & $2.2 \times 10^{-7}$ \\
  $9.5 \pm 3 \pm 1.5$ (1.5) & $9$ (2) \\
   & $\pm$ $<$ \\
  \bottomrule
\end{tabular}
"""
    assert report.format_latex_table(["a_b", "50 %"], cells) == expected


def rank_slowly(accuracies: dict[str, torch.Tensor]) -> dict[str, float]:
    """Rank as Meta-Dataset's notebook does, with a paired test."""
    left, following = list(accuracies), 1
    ranks: dict[str, float] = {}
    while left:
        best = max(left, key=lambda name: float(accuracies[name].mean()))
        tied = [best]
        for name in left:
            p_value = 1.0 if name == best else float(ttest_rel(accuracies[best], accuracies[name]).pvalue)
            if name != best and not p_value < 0.05:
                tied.append(name)
        shared = following + (len(tied) - 1) / 2
        following += len(tied)
        ranks |= dict.fromkeys(tied, shared)
        left = [name for name in left if name not in tied]
    return ranks


@settings(max_examples=10)
@given(seed=seeds)
def test_ranks_equal_a_slow_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    means = 0.05 * torch.randint(4, (6, 1), generator=generator)
    rows = means + 0.1 * torch.randn(6, 20, generator=generator, dtype=torch.float64)
    accuracies = dict(zip("abcdef", rows, strict=True))
    ranks = rank_methods(accuracies)
    assert ranks == rank_slowly(accuracies)
    assert sum(ranks.values()) == 21


def test_table_by_shot_and_of_open_classes() -> None:
    summary = report.summarize(score(OPEN, 150), OPEN.shot, {"n_open_classes": 1}, classes_of(OPEN, 150))
    first, second, _ = report.format_report(summary).split("\n\n")
    header = [cell.strip() for cell in first.splitlines()[0].split("|")]
    assert header[-4:-1] == ["AUROC of open classes, %", "FPR at 95 %, %", "OSCR, %"]
    assert "| 1-shot" in second
    assert second.count("±") == 2 + 2 * 9


EVIL = "<img src=x onerror=alert(1)>"
PLAIN_RUN = "--way 3 --query 4 --episodes 60 --method protonet simpleshot bd-cspn"
MORE = "--way 2-3 --shot 1-2 --unequal --query 3 --n-open-classes 1 --imbalance 2 --episodes 50"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the reports and figures of two evaluations: a plain one, and one that has every section of a report."""
    folder = tmp_path_factory.mktemp("page")
    generator = torch.Generator().manual_seed(0)
    labels = np.array([EVIL, "漢字", "b" * 80, "d", "e", "f", "g"])[np.arange(140) % 7]
    centres = torch.randn(7, 8, generator=generator)
    x = centres[torch.arange(140) % 7] + torch.randn(140, 8, generator=generator)
    np.savez(folder / "x.npz", x=x.numpy(), y=labels)
    for name, more in (("plain", PLAIN_RUN), ("more", MORE)):
        arguments = f"--dataset {folder}/x.npz {more} --report {folder}/{name}.html --json {folder}/{name}.json"
        assert main(arguments.split()) == 0
    return folder


@pytest.mark.parametrize("name", ["plain", "more"])
def test_the_page_holds_the_results_and_no_name_is_markup(made: Path, name: str) -> None:
    text = (made / f"{name}.html").read_text(encoding="utf-8")
    (metrics,) = re.findall(r'<script[^>]*id="metrics"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert json.loads(metrics) == json.loads((made / f"{name}.json").read_text(encoding="utf-8"))
    assert not re.search("<(img|link|iframe)", text)
    assert "default-src &#39;none&#39;" in text


def test_classes_agree_with_a_loop() -> None:
    accuracy = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64)
    class_mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]], dtype=torch.bool)
    matrices = {"accuracy_by_shot": accuracy[:, None], "confidence_bins": torch.zeros(15, 3)}
    scores = {"m": EpisodeScores(**{field.name: accuracy for field in fields(EpisodeScores)} | matrices)}
    rates = {"a": 0.25, "b": 0.75, "c": 0.5}
    expected = [{"name": name, "episodes": 2, "accuracy": {"m": rate}} for name, rate in rates.items()]
    assert compute_class_accuracies(scores, class_mask, ["a", "b", "c", "d"]) == expected


def test_a_single_method_and_a_single_episode(made: Path, command: Command, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    command(f"--dataset {made}/x.npz --episodes 1 --query 3 --method protonet --report {page}")
    text = page.read_text(encoding="utf-8")
    assert 'id="pairs"' not in text
    assert "too few for a table" in text


def test_appearance_and_results_in_a_browser(made: Path, browser: Browser) -> None:
    results: Any = json.loads((made / "more.json").read_text(encoding="utf-8"))
    check_looks(browser, made / "more.html")
    result = browser.ask(every("main section", "[each.id, each.innerText.length]"))
    assert [item for item, _ in result] == ["methods", "pairs", "shots", "classes", "sampled", "data"]
    assert min(size for _, size in result) > 100
    order = sorted(results["methods"], key=lambda item: -results["methods"][item]["accuracy"])
    shown = browser.ask(every("#methods tbody tr", "[each.cells[0].innerText, each.cells[1].innerText]"))
    assert shown == [[item, f"{100 * results['methods'][item]['accuracy']:.2f} %"] for item in order]
    shown = browser.ask(every("#pairs tbody tr", "[each.cells[0].innerText, each.cells[1].innerText]"))
    leads = {}
    for item in results["comparisons"]:
        first, second = (item["first"], item["second"])[:: -1 if item["difference"] < 0 else 1]
        leads[f"{first} over {second}"] = f"+{100 * abs(item['difference']):.2f}"
    assert dict(shown) == leads
    hard = browser.ask(every("#classes tbody tr", "+each.cells[4].innerText"))
    assert sorted(hard) == sorted(item["episodes"] for item in results["by_class"] if item["episodes"] >= 20)
