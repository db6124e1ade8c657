"""The HTML report: its numbers are those of ``--json``, and text of tables is never markup.

In a real Chromium it works by keyboard, dark and light, on a phone, without network and without an error.
"""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protonet import report
from protonet.tables.table import RowBlock
from protonet.tables.training import TrainingTable
from protonet.ui.html import make_template_environment
from tests.browser import Browser, check_looks, every
from tests.commands.cases import FAST, Run, do
from tests.strategies import blobs, write_columns

EVIL = "<script>alert(1)</script>"
NAMES = (EVIL, '"><img src=x onerror=alert(2)>', "\N{CJK UNIFIED IDEOGRAPH-9CE5}" * 30, "k10", "k2", "a b" * 60)
COMMANDS = ("fit", "evaluate")


def write_table(path: Path, rows: int = 8) -> Path:
    x, y = blobs(0, classes=len(NAMES), rows=rows, dim=4, noise=1.2)
    columns = {name: [f"{value:.3g}" for value in x[:, at]] for at, name in enumerate(["a", EVIL, "c", "d"])}
    columns["a"] = ["" if index % 9 == 0 else cell for index, cell in enumerate(columns["a"])]
    names = {"name": [f"<b>{index}</b>" for index in range(len(y))]}
    write_columns(path, {**names, **columns, "kind": [NAMES[label] for label in y]})
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the reports and the JSON results of ``fit`` and ``evaluate``."""
    folder = tmp_path_factory.mktemp("page")
    table, model, more = write_table(folder / "t.csv"), folder / "m.safetensors", folder / "more.csv"
    outputs = {name: ["--report", folder / f"{name}.html", "--json", folder / f"{name}.json"] for name in COMMANDS}
    do("fit", table, *FAST, "--id", "name", "-o", model, *outputs["fit"])
    more.write_text(table.read_text(encoding="utf-8") + "<b>x</b>,1,2,3,4,<i>new</i>\n", encoding="utf-8")
    do("evaluate", model, more, *outputs["evaluate"])
    return folder


def read_results(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


class Page(HTMLParser):
    """The tags, attributes and texts of a report."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data


@pytest.mark.parametrize("name", COMMANDS)
def test_page_is_inert_and_contains_the_results(made: Path, name: str) -> None:
    text = (made / f"{name}.html").read_text(encoding="utf-8")
    page = Page(text)
    assert json.loads(page.texts["metrics"]) == read_results(made, name)
    assert page.tags.count("script") == 2
    assert not {"img", "b", "i", "link", "iframe"} & set(page.tags)
    assert not [key for key, _ in page.attributes if key.startswith("on") or key in {"src", "style"}]
    links = [value or "" for key, value in page.attributes if key in {"href", "xlink:href"}]
    assert all(re.match(r"#|data:text/csv;", link) for link in links)
    policy = next(value for key, value in page.attributes if key == "content" and value and "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "alert(1)</script>" not in text.replace("&lt;", "<")[: text.index("<body")]


def test_results_of_fit(made: Path) -> None:
    metrics = read_results(made, "fit")
    classes, rows = [item["name"] for item in metrics["classes"]], metrics["predictions"]
    with (made / "t.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert [rows["id"][at] for at in range(3)] == ["<b>0</b>", "<b>1</b>", "<b>2</b>"]
    assert [classes[label] for label in rows["label"]] == [row["kind"] for row in table]
    assert rows["location"][0] == "line 2"
    confusion = np.zeros((len(classes), len(classes)), int)
    np.add.at(confusion, (rows["label"], rows["predicted"]), 1)
    assert confusion.tolist() == metrics["confusion"]
    assert metrics["accuracy"] == pytest.approx(np.trace(confusion) / len(table))
    assert metrics["accuracy"] == metrics["baselines"][0]["accuracy"] == metrics["learning"]["points"][-1]["accuracy"]
    assert sum(item["rows"] for item in metrics["reliability"]) == len(table)
    assert sum(item["rows"] * item["accuracy"] for item in metrics["reliability"]) == pytest.approx(np.trace(confusion))
    assert metrics["data"]["columns"][0] == {"name": "a", "type": "number", "missing": 6}
    assert {item["name"] for item in metrics["importance"]["columns"]} == {"a", EVIL, "c", "d"}
    shown = dict(zip(rows["columns"], rows["cells"], strict=True))
    assert shown["a"][1] == table[1]["a"]
    for item in metrics["suspects"]:
        assert classes[item["label"]] == table[item["index"]]["kind"]
        assert item["suggested"] != item["label"]
        assert (item["score"] > 0) == (item["suggested_probability"] > item["label_probability"])
    scores = [item["score"] for item in metrics["suspects"]]
    assert scores == sorted(scores, reverse=True)
    assert metrics["wrong_labels"] == sum(score > 0 for score in scores)


def test_results_of_evaluate(made: Path, run: Run) -> None:
    metrics = read_results(made, "evaluate")
    alone, _ = run.read_json("evaluate", made / "m.safetensors", made / "more.csv")
    assert metrics == {**metrics, **alone}
    assert metrics["data"]["rows"] == len(metrics["predictions"]["index"]) + 1 == 49
    assert metrics["unknown"]["classes"] == {"<i>new</i>": 1}


def test_unavailable_sections_are_omitted(tmp_path: Path, run: Run) -> None:
    """Fit to one row per class, so that no row is held out, and with a time limit that passes at once."""
    table, page = tmp_path / "t.csv", tmp_path / "r.html"
    fit = ["fit", table, *FAST, "--drop", "name", "--report", page]
    write_table(table, rows=1)
    metrics, _ = run.read_json(*fit)
    assert "cross-validation is not possible" in page.read_text(encoding="utf-8")
    assert "accuracy" not in metrics
    write_table(table)
    metrics, _ = run.read_json(*fit, "--time-limit", "0.001")
    assert metrics["importance"] is None
    assert len(metrics["learning"]["points"]) == 1
    assert "The time limit was reached" in page.read_text(encoding="utf-8")


def test_rows_keep_their_indices_and_equal_rows_count_once(tmp_path: Path, run: Run) -> None:
    """Fit to a table with dropped unlabelled rows and with repeated rows."""
    table, page = write_table(tmp_path / "t.csv", rows=12), tmp_path / "r.html"
    header, *lines = table.read_text(encoding="utf-8").splitlines()
    lines = [f"<b>x</b>,1,2,3,4,{end}" for end in ("", "NA")] + lines + lines[:12]
    table.write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    result, _ = run.read_json("fit", table, *FAST, "--id", "name", "--drop-unlabelled", "--report", page)
    names = [row["name"] for row in csv.DictReader(lines, header.split(","))]
    rows = result["predictions"]
    assert rows["index"] == list(range(2, len(lines)))
    assert [names[row] for row in rows["index"]] == rows["id"]
    assert [f"line {row + 2}" for row in rows["index"]] == rows["location"]
    assert all(names[item["index"]] == item["id"] for item in result["suspects"])
    distinct = len(set(lines[2:])) / len(NAMES)
    assert result["learning"]["twice"]["per_class"] == 2 * distinct == 24
    output = Page(page.read_text(encoding="utf-8")).texts["strong"]
    assert output.startswith("With twice as many labels, 24 distinct rows per class, the predicted accuracy is about")


@settings(max_examples=40)
@given(st.text(), st.text())
def test_text_is_never_markup(text: str, attribute: str) -> None:
    template = make_template_environment().from_string('<p title="{{ attribute }}">{{ text }}</p>')
    page = Page(template.render(text=text, attribute=attribute))
    assert (page.tags, [key for key, _ in page.attributes]) == (["p"], ["title"])
    written = "".join(item if item.isprintable() else item.encode("unicode_escape").decode() for item in text)
    assert page.texts.get("p", "") == written


def make_rows(n: int, classes: int = 3) -> tuple[TrainingTable, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(n, classes, generator=generator), torch.arange(n) % classes
    cells = [np.arange(n) * 1.5, np.array([f"t{index}" for index in range(n)], object)]
    table = TrainingTable(
        rows=RowBlock.from_columns(cells, ("u", "v")),
        x=torch.zeros(n, 1),
        y=labels,
        classes=tuple(range(classes)),
        encoding=None,
        uninformative_mask=torch.zeros(n, dtype=torch.bool),
    )
    return table, logits


def test_many_rows_are_sampled_with_the_suspicious_labels() -> None:
    rows, logits = make_rows(5000)
    result, suspects = report.collect_predictions(rows, logits, [1, 0]), report.rank_suspicious_labels(rows, logits)
    assert result["total"] == 5000
    assert len(result["index"]) <= 2000
    assert result["index"] == sorted(set(result["index"]))
    assert {item["index"] for item in suspects} <= set(result["index"])
    assert result["columns"] == ["v", "u"]
    assert result["cells"][0] == [f"t{index}" for index in result["index"]]
    p = logits.double().softmax(dim=1)
    assert result["probability"] == pytest.approx(p.amax(dim=1)[result["index"]].tolist(), abs=1e-6)


def test_bins_of_probability_are_those_of_a_loop() -> None:
    rows, logits = make_rows(300)
    p, predicted = logits.double().softmax(dim=1).max(dim=1)
    for item in report.compute_reliability(logits, rows.y):
        inside = (p > item["low"]) & (p <= item["high"])
        assert item["rows"] == int(inside.sum())
        assert item["confidence"] == pytest.approx(float(p[inside].mean()))
        assert item["accuracy"] == pytest.approx(float((predicted == rows.y)[inside].double().mean()))


@pytest.mark.parametrize("name", COMMANDS)
def test_layout_and_results_in_a_browser(made: Path, browser: Browser, name: str) -> None:
    metrics = read_results(made, name)
    check_looks(browser, made / f"{name}.html")
    sections = ["accuracy", "suspects", "confusion", "classes", "map", "reliability", "columns"]
    sections += ["learning", "views", "data"]
    actual = browser.ask(every("main section", "[each.id, each.innerText.length]"))
    expected = [item for item in sections if name == "fit" or item not in {"learning", "views"}]
    assert [item for item, _ in actual] == expected
    assert min(size for _, size in actual) > 100
    assert browser.ask("document.querySelector('.tiles dd').innerText") == f"{100 * metrics['accuracy']:.1f} %"
    cells = every("#confusion td button", "[+each.dataset.given, +each.dataset.taken, +each.innerText]")
    shown = np.zeros_like(np.array(metrics["confusion"]))
    for given_class, used, rows in browser.ask(cells):
        shown[given_class, used] = rows
    assert shown.tolist() == metrics["confusion"]
    assert browser.ask("document.querySelectorAll('#points path').length") == len(metrics["predictions"]["index"])
    result = browser.ask(every("#columns tbody tr", "[each.cells[0].innerText, each.cells[1].innerText]"))
    assert result == [[item["name"], f"{item['log_loss_rise']:+.3f}"] for item in metrics["importance"]["columns"]]
    names = browser.ask(every(".legend button", "each.innerText"))
    assert names[:2] == [NAMES[1], EVIL]
    assert names.index("k2") < names.index("k10")


def test_keyboard_in_a_browser(made: Path, browser: Browser) -> None:
    browser.look()
    browser.open(made / "fit.html")
    metrics = read_results(made, "fit")
    seen: list[str] = []
    where = "document.activeElement.closest('section')?.id ?? document.activeElement.tagName"
    for _ in range(60):
        browser.press("Tab")
        seen.append(browser.ask(where))
        if seen[-1] == "BODY":
            break
    order = [item for item in seen if item not in {"A", "BODY"}]
    indices = browser.ask(every("main section", "each.id"))
    assert list(dict.fromkeys(order)) == indices  # as on the page, each section once
    assert len(seen) < 40, "one stop for the confusion, one for the map, one for the legend"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    browser.ask("document.querySelector('#confusion td button').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    cell = browser.ask("[+document.activeElement.dataset.given, +document.activeElement.dataset.taken]")
    browser.press("Enter")
    assert browser.ask(outline) != "none"
    rows = metrics["predictions"]
    expected = [at for at in range(len(rows["index"])) if [rows["label"][at], rows["predicted"][at]] == cell]
    listed = browser.ask(every("#behind li strong", "each.innerText"))
    assert listed == [f"{rows['id'][at]} ({rows['location'][at]})" for at in expected]
    assert len(listed) == metrics["confusion"][cell[0]][cell[1]] > 0
    browser.ask("document.getElementById('points').focus()")
    browser.press("ArrowRight")
    first = min(range(len(rows["x"])), key=lambda at: rows["x"][at])
    shown = browser.ask("document.getElementById('told').innerText")
    assert shown.startswith(f"{rows['id'][first]} ({rows['location'][first]})")
    browser.ask("document.querySelector('.legend button').focus()")
    browser.press("Enter")
    chosen = browser.ask("+document.activeElement.dataset.number")
    assert browser.ask("document.querySelectorAll('#points .on').length") == rows["label"].count(chosen)
    assert browser.errors == []


@pytest.mark.parametrize("num_classes", [1, 2, 3, 5])
def test_rows_are_projected_to_the_plane(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, num_classes, generator=generator, dtype=torch.float64)
    points = report.project_logits(logits)
    assert points.shape == (40, 2)
    assert float(points.abs().amax()) <= 1 + 1e-9
    if num_classes > 2:  # principal components of the centred logits, up to signs and scale
        centred = logits - logits.mean(dim=1, keepdim=True)
        u, s, _ = torch.linalg.svd(centred - centred.mean(dim=0), full_matrices=False)
        expected = (u * s)[:, :2]
        scale = expected.abs().amax()
        torch.testing.assert_close(points.abs(), (expected / scale).abs())
