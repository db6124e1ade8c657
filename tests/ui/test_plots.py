"""The plot of a model: every name is there, in order, on paper and under no point, whatever the names are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from protonet.ui.plots import MAX_LABEL_LENGTH, draw_plot, project
from tests.browser import Browser, every

BIRD = "\N{CJK UNIFIED IDEOGRAPH-9CE5}"
MANY = [f"k{label}" for label in range(1, 21)]
ODD: list[str | int] = [
    BIRD,
    "a $very$ long name of a class that goes on and on",
    "\N{CYRILLIC SMALL LETTER ZHE}",
    "<b>",
    "two\nlines",
    7,
]
SVG = "{http://www.w3.org/2000/svg}"


def draw(path: Path, classes: Sequence[str | int], *, held_out: bool = True) -> tuple[Tensor, Tensor]:
    """Draw a plot; return the logits and the labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5 * len(classes)) % len(classes)
    logits = torch.randn(len(labels), len(classes), generator=generator)
    draw_plot(path, logits, labels, classes, "rows of a file with a long name " * 5 + BIRD, held_out=held_out)
    return logits, labels


def texts(path: Path, parent: str = "") -> list[str]:
    """List the texts of a plot, or of the elements of one name."""
    return [element.text or "" for element in ElementTree.parse(path).iterfind(f".//{parent}{SVG}text")]


@pytest.mark.parametrize("classes", [MANY, ODD, ["a", "b"]])
def test_all_text_is_on_paper_and_the_legend_under_no_point(
    classes: list[str | int], tmp_path: Path, browser: Browser
) -> None:
    path = tmp_path / "p.svg"
    draw(path, classes)
    browser.open(path)
    box = "(({left, top, right, bottom}) => [left, top, right, bottom])(each.getBoundingClientRect())"
    ((*_, width, height),) = browser.ask(every('rect[width="100%"]', box))
    shown: list[Any] = browser.ask(every("text", box))
    for left, top, right, bottom in shown:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    lowest = max(bottom for *_, bottom in browser.ask(every(".map path", box)))
    assert lowest < min(top for _, top, *_ in browser.ask(every("g", box)))
    assert len(texts(path)) >= 2 + 3 * len(classes)
    assert browser.errors == []


def test_names_and_rows_are_in_natural_order(tmp_path: Path) -> None:
    shuffled, path = [*MANY[9:], *MANY[:9]], tmp_path / "p.svg"
    logits, labels = draw(path, shuffled)
    assert texts(path, f"{SVG}g/") == MANY
    order = torch.tensor([shuffled.index(name) for name in MANY])
    expected = torch.zeros(20, 20, dtype=torch.int64)
    expected.index_put_((order.argsort()[labels], order.argsort()[logits.argmax(dim=1)]), torch.tensor(1), True)
    cells = [cell for cell in ElementTree.parse(path).iter(f"{SVG}rect") if cell.get("class") == "cell"]
    shown = torch.zeros(20, 20, dtype=torch.float64)
    left = min(float(cell.get("x", "")) for cell in cells)
    for cell in cells:
        row, column = float(cell.get("y", "")) - 60, float(cell.get("x", "")) - left
        shown[round(row / 18), round(column / 18)] = float(cell.get("fill-opacity", ""))
    torch.testing.assert_close(shown, expected / expected.sum(dim=1, keepdim=True).double(), atol=1e-3, rtol=0)
    marks = [path for path in ElementTree.parse(path).iter(f"{SVG}path") if path.get("data-row")]
    wrong = {int(mark.get("data-row", "")) for mark in marks if "wrong" in mark.get("class", "")}
    assert wrong == set((logits.argmax(dim=1) != labels).nonzero().flatten().tolist())
    first = next(mark for mark in marks if mark.get("data-row") == "0")
    assert first.get("class", "").startswith(f"c{MANY.index('k10') % 10}")


def test_names_are_escaped_and_truncated(tmp_path: Path) -> None:
    draw(tmp_path / "p.svg", ODD)
    names = texts(tmp_path / "p.svg", f"{SVG}g/")
    assert {"<b>", "two\\nlines", BIRD, "7"} < set(names)
    assert max(map(len, names)) == MAX_LABEL_LENGTH


def test_many_classes_have_no_names(tmp_path: Path) -> None:
    draw(tmp_path / "p.svg", [f"k{label}" for label in range(21)])
    assert len(texts(tmp_path / "p.svg")) == 3


def test_rows_that_were_fitted_to_have_no_confusion(tmp_path: Path) -> None:
    draw(tmp_path / "p.svg", ["a", "b", "c"], held_out=False)
    text = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert "confusion" not in text
    assert 'wrong"' not in text


@pytest.mark.parametrize("num_classes", [1, 2, 3, 5])
def test_rows_are_projected_to_the_plane(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, num_classes, generator=generator, dtype=torch.float64)
    points = project(logits)
    assert points.shape == (40, 2)
    assert float(points.abs().amax()) <= 1 + 1e-9
    if num_classes > 2:  # principal components of the centred logits, up to signs and scale
        centred = logits - logits.mean(dim=1, keepdim=True)
        u, s, _ = torch.linalg.svd(centred - centred.mean(dim=0), full_matrices=False)
        expected = (u * s)[:, :2]
        scale = expected.abs().amax()
        torch.testing.assert_close(points.abs(), (expected / scale).abs())
