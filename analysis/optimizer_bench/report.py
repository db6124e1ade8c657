"""The bench's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.optimizer_bench.baselines import Baseline
from analysis.optimizer_bench.compare import Contender
from analysis.optimizer_bench.scoring import Row, Summary
from protonet.commands.common import format_table

NOTE = """
Ratio: AdamW's steps to the target, tuned for each workload, over the optimizer's; means are geometric, intervals of
95 % over seeds. A miss earns at most 0.7, a loss that is not finite 0.05. Milliseconds: one step(), CPU time.
"""
PEERS_NOTE = """
Libraries' optimizers are set by default but for the learning rate, for all workloads the best of a few on one seed.
Only step() is called: none has a schedule, and schedule-free AdamW is judged where it takes gradients.
"""


def tabulate(contenders: Sequence[Contender], baselines: Mapping[str, Baseline]) -> str:
    """Return the tables: the first contender's rows if it is no peer, then all contenders; each for either group."""
    text = ""
    first = contenders[0]
    for prefix, title in (("", "Visible workloads"), ("apart_", "Workloads of the file")):
        if f"{prefix}rows" not in first:
            continue
        text += f"**{title}**\n\n"
        if "ladder" not in first:
            text += _tabulate_rows(first[f"{prefix}rows"], baselines)
            text += f"\n{first['name']}: {_describe(first[f'{prefix}summary'])}\n\n"
        if len(contenders) > 1 or "ladder" in first:
            text += _tabulate_contenders(contenders, prefix) + "\n"
    return text + NOTE.lstrip() + PEERS_NOTE.lstrip() * any("ladder" in contender for contender in contenders)


def _tabulate_rows(rows: Sequence[Row], baselines: Mapping[str, Baseline]) -> str:
    """Return a table with a line a workload."""
    lines = []
    for row in rows:
        baseline = baselines[row["workload"]]
        seeds = zip(row["hits"], row["diverged"], strict=True)
        steps = ", ".join("not finite" if diverged else f"{hit:,}" if hit else "miss" for hit, diverged in seeds)
        line = [row["workload"], f"{baseline['target']:.4g}", f"{baseline['steps']:,}", steps]
        lines.append([*line, f"{row['ratio']:.2f}", f"{row['step_ms']:.2f}"])
    return format_table(["workload", "target", "AdamW's steps", "steps", "ratio", "ms"], lines)


def _describe(summary: Summary) -> str:
    """Return one sentence of what rows come to."""
    interval = _format_interval(summary)
    text = f"geometric mean {summary['ratio']:.2f}{f' ({interval})' if interval else ''}, "
    text += f"worst {summary['worst']} {summary['worst_ratio']:.2f}, "
    return text + f"not finite: {', '.join(summary['diverged']) or 'none'}."


def _tabulate_contenders(contenders: Sequence[Contender], prefix: str) -> str:
    """Return a table with a line an optimizer, the best first."""
    names = [row["workload"] for row in contenders[0][f"{prefix}rows"]]
    lines = []
    for contender in sorted(contenders, key=lambda each: -float(each[f"{prefix}summary"]["ratio"])):
        rows, summary = contender[f"{prefix}rows"], contender[f"{prefix}summary"]
        line = [contender["name"], f"{contender['config']['lr']:g}" if "ladder" in contender else ""]
        line += [f"{row['ratio']:.2f}" for row in rows]
        line += [f"{summary['ratio']:.2f}", _format_interval(summary), f"{summary['worst_ratio']:.2f}"]
        lines.append([*line, f"{sum(row['step_ms'] for row in rows) / len(rows):.2f}"])
    return format_table(["optimizer", "rate", *names, "mean", "95 %", "worst", "ms"], lines)


def _format_interval(summary: Summary) -> str:
    """Return an interval as ``low to high``, empty if there is none."""
    return "" if summary["interval"] is None else "{:.2f} to {:.2f}".format(*summary["interval"])
