"""Draw the figures of README and the guides into docs/_static.

Run ``python docs/make_figures.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]


class Palette(NamedTuple):
    """Colours of a figure on a light or a dark page."""

    blue: str
    orange: str
    green: str
    red: str
    grey: str
    text: str
    page: str


LIGHT = Palette("#1f5fa8", "#d97706", "#2e7d32", "#b3261e", "#6b7280", "black", "white")
DARK = Palette("#7fb2ee", "#f5a742", "#7cc47f", "#f2867e", "#a3abb8", "#e6e6e6", "#131416")  # furo's dark page
#: Data sets whose features are in an order, such as pixels and time series, where pattern views lead by far.
ORDERED = ("glyphs", "OSULeaf", "BasicMotions", "PickupGesture")
METHODS = {
    "left-out": ("protonet", LIGHT.blue),
    "trees": ("extra trees", LIGHT.green),
    "svm": ("RBF SVM", LIGHT.orange),
    "logistic": ("logistic regression", LIGHT.red),
    "cosine": ("cosine to class means", LIGHT.grey),
}


def draw_idea(colours: Palette) -> Figure:
    """Draw how a row becomes an embedding, and how prototypes classify it."""
    figure = Figure(figsize=(9, 2.9))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 90), ylim=(0, 29), aspect="equal")
    axes.set_axis_off()
    _box(axes, 1, 10.5, 15, 8, "a row: numbers,\ntext, a picture", colours.grey)
    views = ("linear maps", "kernels", "patterns", "decision forest", "tabular transformer", "small MLP")
    for index, name in enumerate(views):
        top = 23.2 - 4 * index
        _box(axes, 24, top, 17, 3.2, name, colours.blue)
        _arrow(axes, colours, (16.4, 14.5), (23.6, top + 1.6))
        _arrow(axes, colours, (41.4, top + 1.6), (47.6, 14.5))
    heading = "views, weighted by cross-validation"
    axes.text(32.5, 27.5, heading, ha="center", va="center", fontsize=8, color=colours.blue)
    _box(axes, 48, 10.5, 11, 8, "embedding\nof length 1", colours.grey)
    _arrow(axes, colours, (59.4, 14.5), (61.9, 14.5))
    centre = np.array([73.0, 14.5])
    axes.add_patch(Circle(tuple(centre), 10.5, fill=False, color=colours.grey, linewidth=1))
    classes = ((65, "class A", colours.orange), (-40, "class B", colours.green), (140, "new class", colours.red))
    for angle, label, colour in classes:
        _spread_class(axes, centre, angle, label, colour)
    query = centre + 10.5 * _direction(38)
    _arrow(axes, colours, tuple(centre), tuple(query))
    axes.text(*(centre + 12.2 * _direction(36)), "?", fontsize=11, ha="center", va="center")
    axes.text(73, 1.3, "the nearest prototype (star) by cosine", ha="center", va="center", fontsize=8)
    return figure


def draw_accuracy(rows: list[dict[str, Any]]) -> Figure:
    """Draw the mean accuracy against labels per class, beside baselines, for ordered features and for others."""
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    shots = (1, 2, 5, 10)  # not every set has 20 labels per class
    full = {row["dataset"] for row in rows if row["shots"] == shots[-1]}
    panels = (
        ([name for name in sorted(full) if name not in ORDERED], "tables, digits, text, spectra, series"),
        ([name for name in sorted(full) if name in ORDERED], "letters, shapes and motions"),
    )
    for axes, (names, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        for key, (label, colour) in METHODS.items():
            means = [
                np.mean([np.mean(r["percent"][key]) for r in rows if r["shots"] == k and r["dataset"] in names])
                for k in shots
            ]
            axes.plot(
                shots, means, "o-", color=colour, label=label, linewidth=2 if key == "left-out" else 1, markersize=4
            )
        axes.set_xscale("log")
        axes.set_xticks(shots, [str(k) for k in shots])
        axes.minorticks_off()
        axes.set(xlabel="labels per class", title=f"{len(names)} sets: {title}")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean accuracy, %")
    figure.axes[0].legend(fontsize=7, frameon=False, loc="lower right")
    return figure


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    style = "round,pad=0.1,rounding_size=0.8"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fill=False, edgecolor=colour))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


def _arrow(axes: Axes, colours: Palette, start: tuple[float, ...], end: tuple[float, ...]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=7, color=colours.grey, linewidth=0.8))


def _direction(degrees: float) -> np.ndarray:
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))])


def _spread_class(axes: Axes, centre: np.ndarray, angle: float, label: str, colour: str) -> None:
    """Draw three samples of a class on the circle, and their prototype."""
    for offset in (-13, 2, 11):
        axes.plot(*(centre + 10.5 * _direction(angle + offset)), ".", color=colour, markersize=5)
    axes.plot(*(centre + 10.5 * _direction(angle)), "*", color=colour, markersize=10)
    position = centre + 13 * _direction(angle)
    side = "left" if position[0] > centre[0] else "right"
    axes.text(*position, label, color=colour, fontsize=8, ha=side, va="center")


def main() -> None:
    """Write the figures as SVG, the same bytes each time."""
    mpl.rcParams["svg.hashsalt"] = "protonet"
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["font.family"] = "sans-serif"
    rows = json.loads((ROOT / "analysis" / "results" / "robustness.json").read_text(encoding="utf-8"))
    _save(draw_accuracy(rows), "accuracy", LIGHT)
    for name, colours in (("idea", LIGHT), ("idea-dark", DARK)):
        with mpl.rc_context({"text.color": colours.text}):
            _save(draw_idea(colours), name, colours)


def _save(figure: Figure, name: str, colours: Palette) -> None:
    path = ROOT / "docs" / "_static" / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None}, facecolor=colours.page)


if __name__ == "__main__":
    main()
