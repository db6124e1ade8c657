"""One plot of a model: the embedding of rows in two dimensions, and which classes are taken for which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protonet._checks import optional_packages
from protonet._writing import write_whole
from protonet.metrics import measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Most classes that are named one by one, and most rows that are drawn.
MOST_NAMES, MOST_ROWS = 20, 5000


def draw_plot(path: Path, logits: Tensor, labels: Tensor, classes: Sequence[str | int], rows: str) -> None:
    """Draw the embedding and the confusion of rows.

    Args:
        path: Where to; a suffix that matplotlib knows, such as .png, .pdf or .svg.
        logits: (n, num_classes), n >= 1.
        labels: (n,) int64.
        classes: Their names.
        rows: What the rows are, for the title.

    Raises:
        MissingPackageError: matplotlib is missing; the message says how to install it.
        OSError: The file cannot be written.
    """
    with optional_packages("draw_plot"):
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    size = min(12.0, max(4.6, 0.3 * len(classes)))  # inches
    figure = Figure(figsize=(2.2 * size, size), layout="constrained")
    embedding, confusion = figure.subplots(1, 2)
    _draw_embedding(embedding, project(logits), labels, classes)
    _draw_confusion(confusion, measure(logits, labels).confusion, classes)
    figure.suptitle(rows)
    write_whole(path, lambda file: figure.savefig(file, format=path.suffix[1:].lower(), dpi=120))


def project(logits: Tensor) -> Tensor:
    """Return rows (n, 2) along the two directions in which their cosines to the prototypes vary most.

    The networks of folds embed each in a space of its own; what these have in common is where the prototypes are.

    Args:
        logits: (n, num_classes), n >= 1.
    """
    seen = logits > torch.finfo(logits.dtype).min
    rows = torch.where(seen, logits, 0.0).double()
    rows = rows - rows.mean(dim=1, keepdim=True)
    rows = rows - rows.mean(dim=0)
    directions = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -2:].flip(1)  # (num_classes, at most 2)
    signs = directions.sum(dim=0).sign()
    points: Tensor = rows @ (directions * torch.where(signs == 0, 1.0, signs))
    return points


def _draw_embedding(axes: Axes, points: Tensor, labels: Tensor, classes: Sequence[str | int]) -> None:
    """Draw points (n, 2), one colour per class."""
    from matplotlib import colormaps  # noqa: PLC0415 - optional

    colours = colormaps["tab20" if len(classes) > 10 else "tab10"].colors  # type: ignore[attr-defined]
    some = slice(None, None, -(-len(points) // MOST_ROWS))
    points, labels = points[some], labels[some]
    for number, name in enumerate(classes):
        x, y = points[labels == number].T.numpy()
        text = str(name).replace("$", r"\$") if len(classes) <= MOST_NAMES else None
        axes.scatter(x, y, s=14, alpha=0.7, color=colours[number % len(colours)], label=text)
    if len(classes) <= MOST_NAMES:
        axes.legend(fontsize=8)
    axes.set(title="the embedding, seen from the prototypes", xticks=[], yticks=[])


def _draw_confusion(axes: Axes, confusion: Tensor, classes: Sequence[str | int]) -> None:
    """Draw the share of each class's rows (down) that is taken for each class (across)."""
    shares = confusion / confusion.sum(dim=1, keepdim=True).clamp_min(1)
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(title="rows of a class (down), by prediction (across)", xticks=[], yticks=[])
    if len(classes) > MOST_NAMES:
        return
    names = [str(name).replace("$", r"\$") for name in classes]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for row, column in confusion.nonzero().tolist():
        colour = "white" if shares[row, column] > 0.6 else "black"
        axes.text(column, row, str(int(confusion[row, column])), ha="center", va="center", fontsize=7, color=colour)
