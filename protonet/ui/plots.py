"""A plot of a model, ``--plot``: a map of the rows, and the confusion matrix."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from protonet._io import write_text
from protonet._text import to_printable
from protonet.metrics import measure
from protonet.ui.html import make_environment
from protonet.ui.text import order_naturally

#: Maximal numbers of named classes and of drawn rows.
MAX_LEGEND_NAMES, MAX_DRAWN_POINTS = 20, 5000
#: Maximal lengths of a class name and of the title.
MAX_LABEL_LENGTH, MAX_TITLE_LENGTH = 20, 70
#: Bins of the histogram of two classes.
COSINE_BINS = 48
#: Pixels: the margin, the width and the bottom of the map, the height of a line, and the sides of cells.
MARGIN, MAP_WIDE, MAP_END, LINE, MIN_CELL_SIDE, MAX_CELL_SIDE = 16, 480, 420, 20, 4, 60


def draw_plot(
    path: Path, logits: Tensor, labels: Tensor, classes: Sequence[str | int], rows: str, *, held_out: bool = True
) -> None:
    """Draw the map and the confusion matrix of rows as an SVG file, with classes in natural order.

    The map shows logits (n, num_classes) with labels (n,), the title describes the ``rows``. Without rows held out of
    fit, there is no confusion matrix.
    """
    order = torch.tensor(order_naturally(classes))
    ranks, points = order.argsort(), project(logits)
    some = slice(None, None, -(-len(points) // MAX_DRAWN_POINTS))
    x, y = points[some].T.tolist()
    predicted = logits.argmax(dim=1) if held_out else labels
    drawn = {"x": x, "y": y, "label": ranks[labels][some].tolist(), "predicted": ranks[predicted][some].tolist()}
    names = [_shorten(to_printable(classes[label]), MAX_LABEL_LENGTH) for label in order.tolist()]
    named = names if len(names) <= MAX_LEGEND_NAMES else []

    longest = max(map(_measure_width, named), default=0.0)
    columns = max(1, int(MAP_WIDE // (longest + 30)))
    left = MARGIN + MAP_WIDE + 30 + longest
    step = max(MIN_CELL_SIDE, min(MAX_CELL_SIDE, 360 / len(names)))
    side = step * len(names) if held_out else 0.0
    confusion = measure(logits, labels).confusion[order][:, order]
    fractions = confusion / confusion.sum(dim=1, keepdim=True).clamp_min(1)
    page = make_environment().get_template("plot.svg")
    text = page.render(
        title=_shorten(to_printable(rows), MAX_TITLE_LENGTH),
        rows=drawn,
        names=named,
        columns=columns,
        left=left,
        step=step,
        side=side,
        cells=[
            (*cell, int(confusion[cell]), float(fractions[cell])) for cell in map(tuple, confusion.nonzero().tolist())
        ],
        width=left + max(side, 320) + MARGIN if held_out else MAP_WIDE + 2 * MARGIN,
        height=MARGIN + max(MAP_END + LINE * -(-len(named) // columns), held_out * (76 + side + 0.9 * longest)),
    )
    write_text(path, text + "\n")


def _shorten(text: str, longest: int) -> str:
    """Truncate a text to a maximal length."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _measure_width(text: str) -> float:
    """Estimate the width of a text in pixels, from above: the font is chosen by the program that shows it."""
    return sum(13.0 if unicodedata.east_asian_width(char) in "WF" else 8.0 for char in text)


def project(logits: Tensor) -> Tensor:
    """Project logits (n, num_classes) to the plane, (n, 2) float64 in [-1, 1], by the two directions of most variance.

    Logits are used because the networks of folds have embeddings of their own. Up to two classes have one direction
    only: then the rows are stacked, as in a histogram.
    """
    rows = torch.where(logits > torch.finfo(logits.dtype).min, logits, 0.0).double()
    rows = rows - rows.mean(dim=1, keepdim=True)
    rows = rows - rows.mean(dim=0)
    directions = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -2:].flip(1)  # (num_classes, at most 2)
    signs = directions.sum(dim=0).sign()
    points: Tensor = rows @ (directions * torch.where(signs == 0, 1.0, signs))
    scale = points.abs().amax().clamp_min(1e-12)
    if logits.shape[1] > 2:
        return points / scale
    x = points[:, 0] / scale
    bins = ((x + 1) / 2 * COSINE_BINS).long().clamp(max=COSINE_BINS - 1)
    counts, order = bins.bincount(minlength=COSINE_BINS), bins.argsort(stable=True)
    heights = torch.empty_like(x)
    heights[order] = (torch.arange(len(x)) - (counts.cumsum(0) - counts)[bins[order]]).double()  # ranks in their bins
    return torch.stack([x, 2 * heights / counts.max().clamp_min(2).sub(1) - 1], dim=1)
