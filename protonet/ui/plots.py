"""A plot of a model: a map of the rows, and the confusion matrix."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protonet._text import to_printable
from protonet._writing import write_atomically
from protonet.errors import optional_packages
from protonet.metrics import measure
from protonet.ui.text import order_naturally

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Maximal numbers of named classes and of drawn rows.
MAX_LEGEND_NAMES, MAX_DRAWN_POINTS = 20, 5000
#: Maximal lengths of a class name and of the title.
MAX_LABEL_LENGTH, MAX_TITLE_LENGTH = 20, 70
#: Bins of the histogram of two classes.
COSINE_BINS = 48
#: A font that draws a box for every character.
BOXES = "Last Resort"
#: Marks of classes; they differ once the colours are used up.
MARKS = "os^Dv"


def draw_plot(
    path: Path,
    logits: Tensor,
    labels: Tensor,
    classes: Sequence[str | int],
    rows: str,
    *,
    held_out: bool = True,
    quiet: bool = False,
) -> None:
    """Draw the map and the confusion matrix of rows; classes without a font are numbered, with a note on stderr.

    Args:
        path: A path with a suffix that matplotlib knows, such as .png, .pdf or .svg.
        logits: (n, num_classes), n >= 1.
        labels: (n,) int64.
        classes: The names of the classes.
        rows: A description of the rows for the title.
        held_out: Whether the model was not fitted to the rows; otherwise the confusion matrix is left out.
        quiet: Print no note.

    Raises:
        MissingPackageError: matplotlib is missing; the message says how to install it.
        OSError: The file cannot be written.
    """
    with optional_packages():
        fonts = select_fonts(set("".join(map(to_printable, classes)) + to_printable(rows)))
        figure = make_figure(logits, labels, classes, rows, fonts, held_out=held_out)
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:].lower(), dpi=120))
    if not quiet and (note := note_numbered_classes(classes, fonts)):
        print(f"note: {note}", file=sys.stderr)


def make_figure(
    logits: Tensor,
    labels: Tensor,
    classes: Sequence[str | int],
    rows: str,
    fonts: Mapping[str, frozenset[int]],
    *,
    held_out: bool,
) -> Figure:
    """Make the figure of `draw_plot` in the fonts of `select_fonts`, with classes in natural order."""
    from matplotlib import rc_context  # noqa: PLC0415 - optional
    from matplotlib.figure import Figure  # noqa: PLC0415

    size = min(12.0, max(4.6, 0.3 * len(classes)))  # inches
    order = order_naturally(classes)
    names = [name_class(classes[label], rank, fonts) for rank, label in enumerate(order, 1)]
    confusion, ranks = measure(logits, labels).confusion[order][:, order], torch.tensor(order).argsort()[labels]
    with rc_context({"font.family": list(fonts)}):
        figure = Figure(figsize=(2.2 * size if held_out else 1.3 * size, size + 0.9), layout="constrained")
        axes = figure.subplots(1, 1 + held_out, squeeze=False)[0]
        _draw_embedding(axes[0], project(logits), ranks, names)
        if held_out:
            _draw_confusion(axes[1], confusion, names)
        title = rows if len(rows) <= MAX_TITLE_LENGTH else rows[: MAX_TITLE_LENGTH - 1] + "…"
        figure.suptitle(_write(title, fonts), fontsize=11)
    return figure


def select_fonts(characters: Iterable[str]) -> dict[str, frozenset[int]]:
    """Select few installed fonts that together have the characters, as far as possible.

    Returns:
        The code points of each font by its name; matplotlib's default font first.
    """
    from matplotlib import font_manager, ft2font  # noqa: PLC0415 - optional

    def read(path: str) -> frozenset[int]:
        with suppress(OSError, RuntimeError):  # such as those of coloured pictures
            return frozenset(ft2font.FT2Font(path).get_charmap())
        return frozenset()

    default = "DejaVu Sans"
    fonts = {default: read(font_manager.findfont(default))}
    missing = set(map(ord, characters)) - fonts[default]
    others = {font.name: font.fname for font in font_manager.fontManager.ttflist} if missing else {}
    candidates = {name: read(path) for name, path in sorted(others.items()) if not name.startswith((default, BOXES))}
    while missing and candidates:
        best = max(candidates, key=lambda name: len(candidates[name] & missing))
        if not candidates[best] & missing:
            break
        fonts[best] = candidates.pop(best)
        missing -= fonts[best]
    return fonts


def name_class(name: str | int, rank: int, fonts: Mapping[str, frozenset[int]]) -> str:
    """Format a class name for the plot: truncated, or its rank from 1 if no font has its characters."""
    text = to_printable(name)
    if not _is_drawn(text, fonts):
        return f"(no. {rank})"
    return _write(text if len(text) <= MAX_LABEL_LENGTH else text[: MAX_LABEL_LENGTH - 1] + "…", fonts)


def note_numbered_classes(classes: Sequence[str | int], fonts: Mapping[str, frozenset[int]]) -> str | None:
    """Format a note of the classes that are numbered; None if all names are drawn."""
    few = len(classes) <= MAX_LEGEND_NAMES
    texts = [to_printable(classes[label]) for label in order_naturally(classes)] if few else []
    lost = [f"no. {rank} is {text}" for rank, text in enumerate(texts, 1) if not _is_drawn(text, fonts)]
    return f"no font here has the names of these classes: {', '.join(lost)}" if lost else None


def _is_drawn(text: str, fonts: Mapping[str, frozenset[int]]) -> bool:
    return set(map(ord, text)) <= frozenset().union(*fonts.values())


def _write(text: str, fonts: Mapping[str, frozenset[int]]) -> str:
    """Escape a text for matplotlib, with "?" for characters that no font has."""
    known = frozenset().union(*fonts.values())
    return "".join(char if ord(char) in known else "?" for char in to_printable(text)).replace("$", r"\$")


def project(logits: Tensor) -> Tensor:
    """Project rows to the plane, (n, 2) float64 in [-1, 1], by the two directions in which their logits vary most.

    Logits are used because the networks of folds have embeddings of their own. Up to two classes have one direction
    only: then the rows are stacked, as in a histogram.

    Args:
        logits: (n, num_classes), n >= 1.
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


def _draw_embedding(axes: Axes, points: Tensor, labels: Tensor, names: Sequence[str]) -> None:
    """Draw points (n, 2), one colour and mark per class; the legend is below, where no point is."""
    from matplotlib import colormaps  # noqa: PLC0415 - optional

    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    some = slice(None, None, -(-len(points) // MAX_DRAWN_POINTS))
    points, labels = points[some], labels[some]
    for label, name in enumerate(names):
        x, y = points[labels == label].T.numpy()
        text, mark = name if len(names) <= MAX_LEGEND_NAMES else None, MARKS[label // len(colours) % len(MARKS)]
        axes.scatter(x, y, s=14, alpha=0.7, color=colours[label % len(colours)], marker=mark, label=text)
    if len(names) <= MAX_LEGEND_NAMES:
        columns = max(1, min(len(names), 72 // (6 + max(map(len, names)))))
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=columns, frameon=False)
    axes.set(xticks=[], yticks=[])
    axes.set_title("map of the rows", fontsize=10)


def _draw_confusion(axes: Axes, confusion: Tensor, names: Sequence[str]) -> None:
    """Draw the confusion matrix, normalized by rows."""
    fractions = confusion / confusion.sum(dim=1, keepdim=True).clamp_min(1)
    axes.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
    axes.set_title("confusion matrix\nlabels down, predictions across", fontsize=10)
    if len(names) > MAX_LEGEND_NAMES:
        return
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for row, column in confusion.nonzero().tolist():
        colour = "white" if fractions[row, column] > 0.6 else "black"
        axes.text(column, row, str(int(confusion[row, column])), ha="center", va="center", fontsize=7, color=colour)
