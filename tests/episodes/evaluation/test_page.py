"""The report of an evaluation for the browser: it shows the figures of ``--json``, and loads nothing."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet.episodes.__main__ import main
from protonet.episodes.evaluation.evaluate import EpisodeScores
from protonet.episodes.evaluation.page import compute_class_accuracies
from tests.browser import Browser, check_looks, every
from tests.episodes.command_cases import Command

EVIL = "<img src=x onerror=alert(1)>"
PLAIN = "--way 3 --query 4 --episodes 60 --method protonet simpleshot bd-cspn"
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
    for name, more in (("plain", PLAIN), ("more", MORE)):
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
    others = {field.name: accuracy for field in fields(EpisodeScores) if field.name not in ("by_shot", "bins")}
    scores = {"m": EpisodeScores(by_shot=accuracy[:, None], **others, bins=torch.zeros(15, 3))}
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
    assert [item for item, _ in result] == ["methods", "pairs", "episodes", "shots", "classes", "sampled", "data"]
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
    fractions = np.array(results["right"][order[0]]) / np.array(results["queries"])
    median = browser.ask("document.querySelector('#episodes tbody tr').cells[3].innerText")
    assert median == f"{100 * np.median(fractions):.1f} %"
    bars = browser.ask("document.querySelector('#episodes tbody svg').querySelectorAll('rect').length")
    assert bars == len(np.unique(np.minimum(fractions * 40 // 1, 39)))
    hard = browser.ask(every("#classes tbody tr", "+each.cells[4].innerText"))
    assert sorted(hard) == sorted(item["episodes"] for item in results["by_class"] if item["episodes"] >= 20)
