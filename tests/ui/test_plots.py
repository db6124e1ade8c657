"""The plot of a model: every name is there, in order, on paper and under no point, whatever the names are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from protonet.ui.plots import (
    MAX_LABEL_LENGTH,
    draw_plot,
    make_figure,
    name_class,
    note_numbered_classes,
    project,
    select_fonts,
)

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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


def draw(classes: Sequence[str | int], *, held_out: bool = True) -> tuple[Figure, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5 * len(classes)) % len(classes)
    logits = torch.randn(len(labels), len(classes), generator=generator)
    rows = "rows of a file with a long name " * 5 + BIRD
    figure = make_figure(
        logits, labels, classes, rows, select_fonts("".join(map(str, classes)) + rows), held_out=held_out
    )
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    return figure, logits


@pytest.mark.parametrize("classes", [MANY, ODD, ["a", "b"]])
def test_all_text_is_on_paper_and_the_legend_under_no_point(classes: list[str | int]) -> None:
    figure, _ = draw(classes)
    embedding, confusion = figure.axes
    legend = embedding.get_legend()
    assert legend is not None
    assert not legend.get_window_extent().overlaps(embedding.get_window_extent())
    paper = figure.bbox
    title = figure._suptitle  # type: ignore[attr-defined]
    texts = [title, *(axes.title for axes in figure.axes), *legend.get_texts(), *confusion.get_xticklabels()]
    for text in [*texts, *confusion.get_yticklabels()]:
        box = text.get_window_extent()
        assert paper.x0 <= box.x0 < box.x1 <= paper.x1, text.get_text()
        assert paper.y0 <= box.y0 < box.y1 <= paper.y1, text.get_text()


def test_names_and_rows_are_in_natural_order() -> None:
    shuffled = [*MANY[9:], *MANY[:9]]
    figure, logits = draw(shuffled)
    assert [text.get_text() for text in figure.axes[1].get_yticklabels()] == MANY
    labels = torch.arange(len(logits)) % len(shuffled)
    fractions = torch.tensor(figure.axes[1].images[0].get_array())
    for given, used in ((0, 3), (12, 5), (19, 19)):
        rows = labels == shuffled.index(MANY[given])
        expected = (logits[rows].argmax(dim=1) == shuffled.index(MANY[used])).double().mean()
        assert float(fractions[given, used]) == pytest.approx(float(expected))
    points = torch.tensor(figure.axes[0].collections[2].get_offsets())
    torch.testing.assert_close(points.double(), project(logits)[labels == shuffled.index("k3")])


def test_classes_without_a_font_are_labelled_by_index() -> None:
    fonts = select_fonts(BIRD + "a")
    have = any(ord(BIRD) in item for item in fonts.values())
    assert name_class(BIRD, 4, fonts) == (BIRD if have else "(no. 4)")
    assert next(iter(fonts)) == "DejaVu Sans"
    assert len(select_fonts("abc")) == 1
    assert name_class("x" * 99, 0, fonts) == "x" * (MAX_LABEL_LENGTH - 1) + "…"
    assert name_class("$a$", 0, fonts) == r"\$a\$"


def test_a_note_lists_the_class_indices() -> None:
    fonts = {"letters": frozenset(range(32, 127))}
    classes = ["b10", BIRD, "b9", "\N{LATIN SMALL LETTER E WITH ACUTE}"]
    order = ["b9", "b10", classes[3], BIRD]
    assert [name_class(item, index, fonts) for index, item in enumerate(order, 1)][2:] == ["(no. 3)", "(no. 4)"]
    assert (
        note_numbered_classes(classes, fonts)
        == f"no font here has the names of these classes: no. 3 is {order[2]}, no. 4 is {BIRD}"
    )
    assert note_numbered_classes(["a", 7], fonts) is None
    assert note_numbered_classes([BIRD, *MANY], fonts) is None  # so many are not named


def test_a_plot_is_written_with_one_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = ["a", "\N{EGYPTIAN HIEROGLYPH A001}", "b"]
    have = any(ord(classes[1]) in item for item in select_fonts(classes[1]).values())
    for quiet in (False, True):
        draw_plot(tmp_path / "p.png", torch.eye(3), torch.arange(3), classes, "rows", quiet=quiet)
        output = f"note: no font here has the names of these classes: no. 3 is {classes[1]}\n"
        assert capsys.readouterr().err == output * (not have and not quiet)


def test_rows_that_were_fitted_to_have_no_confusion() -> None:
    figure, _ = draw(["a", "b", "c"], held_out=False)
    assert len(figure.axes) == 1


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_plot_is_written_without_a_warning(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p.{suffix}"
    draw_plot(path, torch.eye(len(ODD)), torch.arange(len(ODD)), ODD, f"rows {BIRD}")
    assert path.stat().st_size > 1000
