"""The bench's figure: a panel a workload, the candidate's seeds against AdamW's best setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis.optimizer_bench.baselines import Baseline
from analysis.optimizer_bench.running import EVERY
from protonet._checks import optional_packages

COLUMNS = 4


def plot(curves: Mapping[str, Sequence[Sequence[float]]], baselines: Mapping[str, Baseline], path: Path) -> None:
    """Draw smoothed validation losses over steps, with the target that a candidate's run ends at.

    Args:
        curves: The candidate's of each seed, by the workload's name.
        baselines: At least these workloads'.
        path: Where the figure goes; the name's ending says in which format.

    Raises:
        ImportError: matplotlib is missing.
    """
    with optional_packages("plot"):
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    n_columns = min(COLUMNS, len(curves))
    n_rows = -(-len(curves) // n_columns)
    figure = Figure(figsize=(1 + 3 * n_columns, 0.6 + 2.6 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for axes, (name, seeds) in zip(panels, curves.items(), strict=False):
        for index, losses in enumerate([baselines[name]["curve"], *seeds]):
            style = {"color": "C1", "lw": 1} if index else {"color": "0.4", "lw": 1.5}
            label = "candidate, a line a seed" if index else "AdamW, tuned, mean of seeds"
            steps = range(EVERY, EVERY * len(losses), EVERY)
            axes.plot(steps, losses[1:], label=label if index < 2 else None, **style)
        axes.axhline(baselines[name]["target"], color="0.7", lw=1, ls=":", label="target")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=7, which="both")
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("validation loss, smoothed", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
