"""One figure of an evaluation: accuracies, paired differences, and one episode seen in two dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protonet._checks import optional_packages
from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import support_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_figure(path: Path, summary: Mapping[str, Any], episode: Episodes, query_labels: torch.Tensor) -> None:
    """Draw accuracies, by shot where shots vary; paired differences of several methods; and one episode.

    Args:
        path: Where to; a suffix that matplotlib knows, such as .png, .pdf or .svg.
        summary: As of `protonet.episodes.report.summarize`.
        episode: A batch of one episode.
        query_labels: (1, n_queries), -1 for open classes.

    Raises:
        ImportError: matplotlib is missing; the message says how to install it.
    """
    with optional_packages("protonet.episodes"):
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    several = len(summary["methods"]) > 1
    size = max(4.6, 0.42 * len(summary["methods"]))  # inches: a line of text a method
    figure = Figure(figsize=((size + 0.6) * (2 + several), size), layout="constrained")
    axes = figure.subplots(1, 2 + several, squeeze=False)[0]
    _draw_accuracies(axes[0], summary["methods"])
    if several:
        _draw_differences(axes[1], summary)
    _draw_episode(axes[-1], episode, query_labels[0])
    figure.savefig(path, dpi=120)


def _draw_accuracies(axes: Axes, methods: Mapping[str, Any]) -> None:
    """Draw accuracy by shot with bands, or one bar a method where there is one number of shots."""
    shots = [int(count) for count in next(iter(methods.values()))["by_shot"]]
    if len(shots) > 1:
        for name, own in methods.items():
            values = [
                math.nan if each["accuracy"] is None else 100 * each["accuracy"] for each in own["by_shot"].values()
            ]
            halves = [100 * (each["half_width"] or 0.0) for each in own["by_shot"].values()]
            axes.plot(shots, values, label=name, marker="o", markersize=3)
            low = [max(0.0, value - half) for value, half in zip(values, halves, strict=True)]
            high = [min(100.0, value + half) for value, half in zip(values, halves, strict=True)]
            axes.fill_between(shots, low, high, alpha=0.2)
        axes.set(xlabel="shots", ylabel="accuracy, %", title="accuracy by shot, 95 % bands", xticks=shots)
        axes.legend(fontsize=8)
        return
    names = sorted(methods, key=lambda name: float(methods[name]["accuracy"]))
    values = [100 * methods[name]["accuracy"] for name in names]
    halves = [100 * (methods[name]["half_width"] or 0.0) for name in names]
    axes.errorbar(values, range(len(names)), xerr=halves, fmt="o", capsize=3)
    axes.set(xlabel="accuracy, %", title="accuracy, 95 % intervals", yticks=range(len(names)), yticklabels=names)
    axes.grid(axis="x", alpha=0.3)


def _draw_differences(axes: Axes, summary: Mapping[str, Any]) -> None:
    """Draw a heat map of paired differences, the row's accuracy less the column's; stars where p (Holm) < 0.05."""
    names = sorted(summary["methods"], key=lambda name: -float(summary["methods"][name]["accuracy"]))
    grid = torch.zeros(len(names), len(names), dtype=torch.float64)
    sure = torch.zeros(len(names), len(names), dtype=torch.bool)
    for pair in summary["comparisons"]:
        row, column = names.index(pair["first"]), names.index(pair["second"])
        grid[row, column], grid[column, row] = 100 * pair["difference"], -100 * pair["difference"]
        sure[row, column] = sure[column, row] = pair["p_holm"] < 0.05
    most = max(1.0, float(grid.abs().max()))
    image = axes.imshow(grid.numpy(), cmap="RdBu", vmin=-most, vmax=most)
    axes.figure.colorbar(image, ax=axes, shrink=0.8, label="points")
    for row in range(len(names)):
        for column in range(len(names)):
            if row != column:
                text = f"{float(grid[row, column]):+.1f}{'*' * int(sure[row, column])}"
                dark = abs(float(grid[row, column])) > 0.6 * most
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title("row less column (* p < 0.05, Holm)")


def _draw_episode(axes: Axes, episode: Episodes, query_labels: torch.Tensor) -> None:
    """Draw an episode's rows and prototypes along the two directions of most variance between prototypes."""
    prototypes = support_means(episode)[0].double()
    centre = prototypes.mean(dim=0)
    directions = torch.linalg.svd(prototypes - centre, full_matrices=False).Vh[:2]  # (at most 2, dim)
    if len(directions) < 2:  # a single feature
        directions = torch.cat([directions, torch.zeros_like(directions)])

    def place(rows: torch.Tensor) -> Any:
        return (directions @ (rows.double() - centre).T).numpy()  # (2, n)

    colours = [f"C{label}" if label >= 0 else "grey" for label in query_labels.tolist()]
    x, y = place(episode.query[0])
    axes.scatter(x, y, c=colours, s=14, alpha=0.6, label="query" + ", open ones grey" * ("grey" in colours))
    x, y = place(episode.support[0])
    colours = [f"C{label}" for label in episode.support_labels[0].tolist()]
    # Over the prototypes: a class's only support row is its prototype.
    axes.scatter(x, y, c=colours, marker="s", s=30, edgecolors="white", linewidths=0.6, zorder=3, label="support")
    x, y = place(prototypes)
    axes.scatter(x, y, c=[f"C{c}" for c in range(len(x))], marker="*", s=220, edgecolors="black", label="prototype")
    axes.set(title="the first episode, along its prototypes", xticks=[], yticks=[])
    axes.legend(fontsize=8)
