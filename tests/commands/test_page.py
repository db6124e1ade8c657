"""The report in the browser: its figures are those of --json, and nothing that came from outside is markup in it.

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

from protonet.commands.content import EvaluatedRows, collect_predictions, compute_reliability, rank_suspicious_labels
from protonet.ui.page.html import Markup, tag
from protonet.ui.text import order_naturally
from tests.browser import Browser, check_looks, every
from tests.commands.cases import FAST, Run, do
from tests.strategies import blobs, write_columns

EVIL = "<script>alert(1)</script>"
NAMES = (EVIL, '"><img src=x onerror=alert(2)>', "\N{CJK UNIFIED IDEOGRAPH-9CE5}" * 30, "k10", "k2", "a b" * 60)
COMMANDS = ("fit", "evaluate")


def write_table(path: Path, rows: int = 8) -> Path:
    x, y = blobs(0, classes=len(NAMES), rows=rows, dim=4, noise=1.2)
    columns = {
        name: [f"{value:.3g}" for value in cells] for name, cells in zip(["a", EVIL, "c", "d"], x.T, strict=True)
    }
    columns["a"] = ["" if number % 9 == 0 else cell for number, cell in enumerate(columns["a"])]
    names = {"name": [f"<b>{number}</b>" for number in range(len(y))]}
    write_columns(path, {**names, **columns, "kind": [NAMES[label] for label in y]})
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the reports and the figures of a fit and of an evaluation."""
    folder = tmp_path_factory.mktemp("page")
    table, model, more = write_table(folder / "t.csv"), folder / "m.safetensors", folder / "more.csv"
    outputs = {name: ["--report", folder / f"{name}.html", "--json", folder / f"{name}.json"] for name in COMMANDS}
    do("fit", table, *FAST, "--id", "name", "-o", model, *outputs["fit"])
    more.write_text(table.read_text(encoding="utf-8") + "<b>x</b>,1,2,3,4,<i>new</i>\n", encoding="utf-8")
    do("evaluate", model, more, *outputs["evaluate"])
    return folder


def read_figures(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


class Page(HTMLParser):
    """What a reader of HTML makes of a report."""

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
def test_page_is_inert_and_holds_the_figures(made: Path, name: str) -> None:
    text = (made / f"{name}.html").read_text(encoding="utf-8")
    page = Page(text)
    assert json.loads(page.texts["metrics"]) == read_figures(made, name)
    assert page.tags.count("script") == 2
    assert not {"img", "b", "i", "link", "iframe"} & set(page.tags)
    assert not [key for key, _ in page.attributes if key.startswith("on") or key in {"src", "style"}]
    links = [value or "" for key, value in page.attributes if key in {"href", "xlink:href"}]
    assert all(re.match(r"#|data:text/csv;", link) for link in links)
    policy = next(value for key, value in page.attributes if key == "content" and value and "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "alert(1)</script>" not in text.replace("&lt;", "<")[: text.index("<body")]


def test_figures_of_fit(made: Path) -> None:
    figures = read_figures(made, "fit")
    classes, rows = [each["name"] for each in figures["classes"]], figures["predictions"]
    with (made / "t.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert [rows["id"][at] for at in range(3)] == ["<b>0</b>", "<b>1</b>", "<b>2</b>"]
    assert [classes[label] for label in rows["label"]] == [row["kind"] for row in table]
    assert rows["location"][0] == "line 2"
    confusion = np.zeros((len(classes), len(classes)), int)
    np.add.at(confusion, (rows["label"], rows["predicted"]), 1)
    assert confusion.tolist() == figures["confusion"]
    assert figures["accuracy"] == pytest.approx(np.trace(confusion) / len(table))
    assert figures["accuracy"] == figures["baselines"][0]["accuracy"] == figures["learning"]["points"][-1]["accuracy"]
    assert sum(each["rows"] for each in figures["reliability"]) == len(table)
    assert sum(each["rows"] * each["accuracy"] for each in figures["reliability"]) == pytest.approx(np.trace(confusion))
    assert figures["data"]["columns"][0] == {"name": "a", "type": "number", "missing": 6}
    assert {each["name"] for each in figures["importance"]["columns"]} == {"a", EVIL, "c", "d"}
    shown = dict(zip(rows["columns"], rows["cells"], strict=True))
    assert shown["a"][1] == table[1]["a"]
    for each in figures["suspects"]:
        assert classes[each["label"]] == table[each["index"]]["kind"]
        assert each["suggested"] != each["label"]
        assert (each["score"] > 0) == (each["suggested_probability"] > each["label_probability"])
    scores = [each["score"] for each in figures["suspects"]]
    assert scores == sorted(scores, reverse=True)
    assert figures["wrong_labels"] == sum(score > 0 for score in scores)


def test_figures_of_evaluate(made: Path, run: Run) -> None:
    figures = read_figures(made, "evaluate")
    alone, _ = run.read_json("evaluate", made / "m.safetensors", made / "more.csv")
    assert figures == {**figures, **alone}
    assert figures["data"]["rows"] == len(figures["predictions"]["index"]) + 1 == 49
    assert figures["unknown"]["classes"] == {"<i>new</i>": 1}


def test_what_cannot_be_told_is_left_out(tmp_path: Path, run: Run) -> None:
    """One row per class: nothing can be held out; and a time limit that is over at once."""
    table, page = tmp_path / "t.csv", tmp_path / "r.html"
    fit = ["fit", table, *FAST, "--drop", "name", "--report", page]
    write_table(table, rows=1)
    figures, _ = run.read_json(*fit)
    assert "cross-validation is not possible" in page.read_text(encoding="utf-8")
    assert "accuracy" not in figures
    write_table(table)
    figures, _ = run.read_json(*fit, "--time-limit", "0.001")
    assert figures["importance"] is None
    assert len(figures["learning"]["points"]) == 1
    assert "The time limit was reached" in page.read_text(encoding="utf-8")


def test_rows_are_the_tables_and_equal_ones_count_once(tmp_path: Path, run: Run) -> None:
    """Rows without a class are left out, and some stand twice: the rows that are told keep their numbers."""
    table, page = write_table(tmp_path / "t.csv", rows=12), tmp_path / "r.html"
    header, *lines = table.read_text(encoding="utf-8").splitlines()
    lines = [f"<b>x</b>,1,2,3,4,{end}" for end in ("", "NA")] + lines + lines[:12]
    table.write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    found, _ = run.read_json("fit", table, *FAST, "--id", "name", "--drop-unlabelled", "--report", page)
    names = [row["name"] for row in csv.DictReader(lines, header.split(","))]
    rows = found["predictions"]
    assert rows["index"] == list(range(2, len(lines)))
    assert [names[row] for row in rows["index"]] == rows["id"]
    assert [f"line {row + 2}" for row in rows["index"]] == rows["location"]
    assert all(names[each["index"]] == each["id"] for each in found["suspects"])
    distinct = len(set(lines[2:])) / len(NAMES)
    assert found["learning"]["twice"]["per_class"] == 2 * distinct == 24
    said = Page(page.read_text(encoding="utf-8")).texts["strong"]
    assert said.startswith("With twice as many labels, 24 distinct rows per class, the predicted accuracy is about")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_report_that_cannot_be_written_is_an_early_error(made: Path, tmp_path: Path, command: str, run: Run) -> None:
    (tmp_path / "file").touch()
    more = [made / "t.csv", "--label", "kind"] if command == "fit" else [made / "m.safetensors", made / "t.csv"]
    for path, said in (
        (tmp_path / "file" / "r.html", r"be a file that can be written"),
        (tmp_path / "r.pdf", r"end in \.html, \.htm"),
    ):
        error = run(command, *more, "--report", path, code=2)
        assert re.match(rf"protonet {command}: `--report` must {said}", error)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@settings(max_examples=40)
@given(st.text(), st.text())
def test_text_is_never_markup(text: str, attribute: str) -> None:
    page = Page(str(tag("p", text, title=attribute)))
    assert (page.tags, [key for key, _ in page.attributes]) == (["p"], ["title"])
    written = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    assert page.texts.get("p", "") == written


def test_markup_is_kept_and_attributes_may_be_left_out() -> None:
    assert tag("p", tag("b", "&"), None, 3, class_="x", hidden=True, title=None) == (
        '<p class="x" hidden=""><b>&amp;</b>3</p>'
    )
    assert isinstance(tag("p"), Markup)


def make_rows(n: int, classes: int = 3) -> EvaluatedRows:
    generator = torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(n, classes, generator=generator), torch.arange(n) % classes
    cells = [np.arange(n) * 1.5, np.array([f"t{number}" for number in range(n)], object)]
    return EvaluatedRows(
        logits, labels, range(n), [f"line {number + 2}" for number in range(n)], None, ["u", "v"], cells
    )


def test_many_rows_are_drawn_the_doubtful_ones_first() -> None:
    rows = make_rows(5000)
    told, suspects = collect_predictions(rows, [1, 0]), rank_suspicious_labels(rows, rows.logits)
    assert told["total"] == 5000
    assert len(told["index"]) <= 2000
    assert told["index"] == sorted(set(told["index"]))
    assert {each["index"] for each in suspects} <= set(told["index"])
    assert told["columns"] == ["v", "u"]
    assert told["cells"][0] == [f"t{number}" for number in told["index"]]
    p = rows.logits.double().softmax(dim=1)
    assert told["probability"] == pytest.approx(p.amax(dim=1)[told["index"]].tolist(), abs=1e-6)


def test_bins_of_probability_are_those_of_a_loop() -> None:
    rows = make_rows(300)
    p, predicted = rows.logits.double().softmax(dim=1).max(dim=1)
    for each in compute_reliability(rows):
        inside = (p > each["low"]) & (p <= each["high"])
        assert each["rows"] == int(inside.sum())
        assert each["confidence"] == pytest.approx(float(p[inside].mean()))
        assert each["accuracy"] == pytest.approx(float((predicted == rows.labels)[inside].double().mean()))


def test_names_are_in_the_order_in_which_people_look_for_them() -> None:
    names = ["k1", "k10", "k2", "K3", "b", "7", "70", "8"]
    assert [names[at] for at in order_naturally(names)] == ["7", "8", "70", "b", "k1", "k2", "K3", "k10"]
    assert order_naturally([10, 9, 8]) == [2, 1, 0]


@pytest.mark.parametrize("name", COMMANDS)
def test_looks_and_figures_in_a_browser(made: Path, browser: Browser, name: str) -> None:
    figures = read_figures(made, name)
    check_looks(browser, made / f"{name}.html")
    sections = ["accuracy", "suspects", "confusion", "classes", "map", "reliability", "columns"]
    sections += ["learning", "views", "data"]
    found = browser.ask(every("main section", "[each.id, each.innerText.length]"))
    assert [each for each, _ in found] == [
        each for each in sections if name == "fit" or each not in {"learning", "views"}
    ]
    assert min(size for _, size in found) > 100
    assert browser.ask("document.querySelector('.tiles dd').innerText") == f"{100 * figures['accuracy']:.1f} %"
    cells = every("#confusion td button", "[+each.dataset.given, +each.dataset.taken, +each.innerText]")
    shown = np.zeros_like(np.array(figures["confusion"]))
    for given_class, taken, rows in browser.ask(cells):
        shown[given_class, taken] = rows
    assert shown.tolist() == figures["confusion"]
    assert browser.ask("document.querySelectorAll('#points path').length") == len(figures["predictions"]["index"])
    told = browser.ask(every("#columns tbody tr", "[each.cells[0].innerText, each.cells[1].innerText]"))
    assert told == [[each["name"], f"{each['log_loss_rise']:+.3f}"] for each in figures["importance"]["columns"]]
    names = browser.ask(every(".legend button", "each.innerText"))
    assert names[:2] == [NAMES[1], EVIL]
    assert names.index("k2") < names.index("k10")


def test_keyboard_in_a_browser(made: Path, browser: Browser) -> None:
    browser.look()
    browser.open(made / "fit.html")
    figures = read_figures(made, "fit")
    seen: list[str] = []
    where = "document.activeElement.closest('section')?.id ?? document.activeElement.tagName"
    for _ in range(60):
        browser.press("Tab")
        seen.append(browser.ask(where))
        if seen[-1] == "BODY":
            break
    order = [each for each in seen if each not in {"A", "BODY"}]
    places = browser.ask(every("main section", "each.id"))
    assert list(dict.fromkeys(order)) == places  # as on the page, each section once
    assert len(seen) < 40, "one stop for the confusion, one for the map, one for the legend"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    browser.ask("document.querySelector('#confusion td button').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    cell = browser.ask("[+document.activeElement.dataset.given, +document.activeElement.dataset.taken]")
    browser.press("Enter")
    assert browser.ask(outline) != "none"
    rows = figures["predictions"]
    expected = [at for at in range(len(rows["index"])) if [rows["label"][at], rows["predicted"][at]] == cell]
    listed = browser.ask(every("#behind li strong", "each.innerText"))
    assert listed == [f"{rows['id'][at]} ({rows['location'][at]})" for at in expected]
    assert len(listed) == figures["confusion"][cell[0]][cell[1]] > 0
    browser.ask("document.getElementById('points').focus()")
    browser.press("ArrowRight")
    first = min(range(len(rows["x"])), key=lambda at: rows["x"][at])
    assert browser.ask("document.getElementById('told').innerText").startswith(
        f"{rows['id'][first]} ({rows['location'][first]})"
    )
    browser.ask("document.querySelector('.legend button').focus()")
    browser.press("Enter")
    chosen = browser.ask("+document.activeElement.dataset.number")
    assert browser.ask("document.querySelectorAll('#points .on').length") == rows["label"].count(chosen)
    assert browser.errors == []
