"""Scores, tables and plot: how many times fewer steps than tuned AdamW an optimizer needs, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.optimizer_bench.loading import Baseline
from analysis.optimizer_bench.workload import EVERY, Curve
from protonet._checks import optional_packages
from protonet.commands.common import format_table

#: A miss earns this much at the most, what is left falls by e with every tenth of the way that is left, to the floor.
MISS, STEEPNESS, FLOOR = 0.7, 10.0, 0.05
RESAMPLES = 2000
#: A workload's name, geometric mean (``ratio``) and each seed's ratio, first step at the target (None: a miss) and
#: whether it diverged, and milliseconds a step.
Row = dict[str, Any]
#: What rows come to: ``ratio``, their geometric mean, its 95 % ``interval`` (None for one seed), the ``worst`` row.
Summary = dict[str, Any]
#: An optimizer's ``name`` and ``config``, ``rows`` and ``summary`` of visible workloads, ``apart_rows`` and
#: ``apart_summary`` of a file's, as far as there are any. A peer's ``rates`` has the geometric means of its settings
#: on the first seed, the candidate's ``curves`` the smoothed losses of each seed, by the workload's name.
Entry = dict[str, Any]
NOTE = """
Ratio: AdamW's steps to the target, tuned for each workload, over the optimizer's; means are geometric, intervals of
95 % over seeds. A miss earns at most 0.7, a loss that is not finite 0.05. Milliseconds: one step(), CPU time.
"""
PEERS_NOTE = """
Libraries' optimizers are set by default but for the learning rate, for all workloads the best of a few on one seed.
Only step() is called: none has a schedule, and schedule-free AdamW is judged where it takes gradients.
"""


def rate(curve: Curve, baseline: Mapping[str, Any]) -> float:
    """Return AdamW's steps over a run's, or the partial credit of a run that misses the target."""
    if curve.diverged:
        return FLOOR
    hit = curve.first_hit(baseline["target"])
    if hit is not None:
        return float(baseline["steps"] / hit)
    left = (curve.losses[-1] - baseline["target"]) / (baseline["initial"] - baseline["target"])
    return max(FLOOR, MISS * math.exp(-STEEPNESS * left))


def score_workload(name: str, curves: Sequence[Curve], baseline: Mapping[str, Any]) -> Row:
    """Return a workload's row from the curves of its seeds."""
    ratios = [rate(curve, baseline) for curve in curves]
    return {
        "workload": name,
        "ratio": statistics.geometric_mean(ratios),
        "ratios": ratios,
        "hits": [curve.first_hit(baseline["target"]) for curve in curves],
        "diverged": [curve.diverged for curve in curves],
        "step_ms": statistics.fmean(curve.step_ms for curve in curves),
    }


def summarise(rows: Sequence[Row]) -> Summary:
    """Return what rows come to."""
    worst = min(rows, key=lambda row: float(row["ratio"]))
    return {
        "ratio": statistics.geometric_mean(row["ratio"] for row in rows),
        "interval": bootstrap([row["ratios"] for row in rows]) if len(rows[0]["ratios"]) > 1 else None,
        "worst": worst["workload"],
        "worst_ratio": worst["ratio"],
        "diverged": [row["workload"] for row in rows if any(row["diverged"])],
    }


def bootstrap(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean of ratios (workloads, seeds), seeds drawn again within each."""
    logs = np.log(ratios)  # (workloads, seeds)
    drawn = np.random.default_rng(0).integers(logs.shape[1], size=(RESAMPLES, *logs.shape))
    means = np.take_along_axis(logs[None], drawn, axis=2).mean((1, 2))  # (resamples,)
    low, high = np.exp(np.quantile(means, [0.025, 0.975])).tolist()
    return low, high


def tabulate(entries: Sequence[Entry], baselines: Mapping[str, Baseline]) -> str:
    """Return the tables: the first optimizer's rows if it is no peer, then all; each for either group of workloads."""
    text, first = "", entries[0]
    for prefix, title in (("", "Visible workloads"), ("apart_", "Workloads of the file")):
        if f"{prefix}rows" not in first:
            continue
        text += f"**{title}**\n\n"
        if "rates" not in first:
            text += _tabulate_rows(first[f"{prefix}rows"], baselines)
            summary = first[f"{prefix}summary"]
            interval = f" ({_format_interval(summary)})" if summary["interval"] else ""
            text += f"\n{first['name']}: geometric mean {summary['ratio']:.2f}{interval}, "
            text += f"worst {summary['worst']} {summary['worst_ratio']:.2f}, "
            text += f"not finite: {', '.join(summary['diverged']) or 'none'}.\n\n"
        if len(entries) > 1 or "rates" in first:
            text += _tabulate_entries(entries, prefix) + "\n"
    return text + NOTE.lstrip() + PEERS_NOTE.lstrip() * any("rates" in entry for entry in entries)


def _tabulate_rows(rows: Sequence[Row], baselines: Mapping[str, Baseline]) -> str:
    """Return a table with a line for each workload."""
    lines = []
    for row in rows:
        baseline = baselines[row["workload"]]
        seeds = zip(row["hits"], row["diverged"], strict=True)
        steps = ", ".join("not finite" if diverged else f"{hit:,}" if hit else "miss" for hit, diverged in seeds)
        line = [row["workload"], f"{baseline['target']:.4g}", f"{baseline['steps']:,}", steps]
        lines.append([*line, f"{row['ratio']:.2f}", f"{row['step_ms']:.2f}"])
    return format_table(["workload", "target", "AdamW's steps", "steps", "ratio", "ms"], lines)


def _tabulate_entries(entries: Sequence[Entry], prefix: str) -> str:
    """Return a table with a line for each optimizer, the best first."""
    names = [row["workload"] for row in entries[0][f"{prefix}rows"]]
    lines = []
    for entry in sorted(entries, key=lambda each: -float(each[f"{prefix}summary"]["ratio"])):
        rows, summary = entry[f"{prefix}rows"], entry[f"{prefix}summary"]
        line = [entry["name"], f"{entry['config']['lr']:g}" if "rates" in entry else ""]
        line += [f"{row['ratio']:.2f}" for row in rows]
        line += [f"{summary['ratio']:.2f}", _format_interval(summary), f"{summary['worst_ratio']:.2f}"]
        lines.append([*line, f"{sum(row['step_ms'] for row in rows) / len(rows):.2f}"])
    return format_table(["optimizer", "rate", *names, "mean", "95 %", "worst", "ms"], lines)


def _format_interval(summary: Summary) -> str:
    """Return an interval as ``low to high``, empty if there is none."""
    return "" if summary["interval"] is None else "{:.2f} to {:.2f}".format(*summary["interval"])


def plot(curves: Mapping[str, Sequence[Sequence[float]]], baselines: Mapping[str, Baseline], path: Path) -> None:
    """Draw smoothed validation losses over steps, of each workload's seeds, with the target that a run ends at."""
    with optional_packages("plot"):
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    n_columns = min(4, len(curves))
    n_rows = -(-len(curves) // n_columns)
    figure = Figure(figsize=(1 + 3 * n_columns, 0.6 + 2.6 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for axes, (name, seeds) in zip(panels, curves.items(), strict=False):
        for index, losses in enumerate([baselines[name]["curve"], *seeds]):
            style = {"color": "C1", "lw": 1} if index else {"color": "0.4", "lw": 1.5}
            label = "candidate, a line for each seed" if index else "AdamW, tuned, mean of seeds"
            steps = range(EVERY, EVERY * len(losses), EVERY)
            axes.plot(steps, losses[1:], label=label if index < 2 else None, **style)
        axes.axhline(baselines[name]["target"], color="0.7", lw=1, ls=":", label="target")
        axes.set_yscale("log")
        axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=7, which="both")
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("validation loss, smoothed", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
