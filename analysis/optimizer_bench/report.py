"""Markdown tables of the optimizer benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.optimizer_bench.runs import FILE_ROLE, Baseline, Baselines
from analysis.optimizer_bench.score import Row, Summary, average_ratios_by
from analysis.optimizer_bench.workloads import WORKLOADS_BY_ROLE
from protonet.ui.text import format_table

#: An optimizer's ``name``, ``config``, ``rows`` and ``summaries``. A peer has ``rates`` instead of the config: for each
#: horizon its ``best`` learning rate, and each rate's geometric mean on the first seed (``means``). A candidate has the
#: ``changed`` quantity and its ``factor``.
ReportEntry = dict[str, Any]
ROLE_TITLES = {role: f"{role.capitalize()} workloads" for role in WORKLOADS_BY_ROLE} | {
    FILE_ROLE: "Workloads of the file"
}
EASIER_BASELINE_TITLES = {"coarse": "a coarse ladder of AdamWs", "shared": "one AdamW for all"}
RATIO_NOTE = """
Ratio: AdamW's steps to the target, tuned for each workload and horizon, over the optimizer's; means are geometric,
intervals of 95 % over seeds. A miss earns at most 0.7, a loss that is not finite 0.05. Short of the target: of misses,
the best smoothed loss. Milliseconds: one step(), CPU time.
"""
PEERS_NOTE = """
Libraries' optimizers are set by default but for the learning rate. It is the best of a few on the first seed, for each
horizon, on all of these workloads together: an advantage that the optimizer judged here does not have. Only step() is
called: none has a schedule, and schedule-free AdamW is judged where it takes gradients.
"""
VARIANTS_NOTE = """
Change: of the geometric mean, against the configuration's learning rate with total_steps equal to the true horizon.
"""


def format_tables(entries: Sequence[ReportEntry], baselines: Baselines) -> str:
    """Format the tables: for each role and horizon the candidate's rows, if any, and all optimizers' means."""
    text = ""
    variants = [entry for entry in entries if "factor" in entry]
    peers = [entry for entry in entries if "rates" in entry]
    first, compared = entries[0], [*variants[:1], *peers]
    for summary in first["summaries"]:
        key = {name: summary[name] for name in ("role", "steps")}
        rows = _select(first["rows"], key)
        text += f"**{ROLE_TITLES[summary['role']]}, {summary['steps']:,} steps**\n\n"
        if "factor" in first:
            selected = {row["workload"]: baselines[row["workload"]][str(summary["steps"])] for row in rows}
            text += f"{_tabulate_rows(rows, selected)}\n{first['name']}: {_format_summary(summary, rows)}\n\n"
            coarse = ", ".join(name for name, baseline in selected.items() if baseline.get("coarse"))
            text += f"AdamW by the coarse ladder alone, which is easier: {coarse}.\n\n" if coarse else ""
        if peers:
            text += _tabulate_entries(compared, key) + "\n"
    if len(variants) > 1:
        text += f"**Other learning rates and values of total_steps**\n\n{_tabulate_variants(variants)}\n"
    text += RATIO_NOTE.lstrip() + PEERS_NOTE.lstrip() * bool(peers)
    return text + VARIANTS_NOTE.lstrip() * (len(variants) > 1)


def _select(rows: Sequence[Mapping[str, Any]], key: Mapping[str, object]) -> list[Any]:
    """Select the rows, or summaries, that match a key."""
    return [row for row in rows if key.items() <= row.items()]


def _tabulate_rows(rows: Sequence[Row], baselines: Mapping[str, Baseline]) -> str:
    """Format a table with a line per workload: AdamW's steps and those of the optimizer."""
    lines = []
    for row in rows:
        baseline = baselines[row["workload"]]
        seeds = zip(row["hits"], row["diverged"], strict=True)
        steps = ", ".join("not finite" if diverged else f"{hit:,}" if hit else "miss" for hit, diverged in seeds)
        line = [row["workload"], row["family"], f"{baseline['target']:.4g}", f"{baseline['steps']:,}", steps]
        gaps = ", ".join(f"{gap:.2g} %" for gap in row["gaps"] if gap is not None)
        lines.append([*line, f"{row['ratio']:.2f}", gaps, f"{row['step_ms']:.2f}"])
    header = ["workload", "family", "target", "AdamW's steps", "steps", "ratio", "short of the target", "ms"]
    return format_table(header, lines)


def _format_summary(summary: Summary, rows: Sequence[Row]) -> str:
    """Format the summary of a role and horizon as a sentence."""
    interval = f" ({_format_interval(summary)})" if summary["interval"] else ""
    parts = [
        f"geometric mean {summary['ratio']:.2f}{interval}",
        f"worst {summary['worst']} {summary['worst_ratio']:.2f}",
    ]
    parts.append(f"worst family {summary['worst_family']} {summary['worst_family_ratio']:.2f}")
    parts += [f"{name} {ratio:.2f}" for name, ratio in summary["kinds"].items()]
    parts += [f"against {EASIER_BASELINE_TITLES[name]} {ratio:.2f}" for name, ratio in summary["easier"].items()]
    return f"{', '.join(parts)}, not finite: {', '.join(summary['diverged']) or 'none'}.{_format_errors(rows)}"


def _format_errors(rows: Sequence[Row]) -> str:
    """Format the first exception of each workload on which the optimizer raised one; "" for none."""
    raised = {row["workload"]: next(filter(None, row["raised"]), None) for row in rows}
    message = "; ".join(f"{name} ({text})" for name, text in raised.items() if text is not None)
    return message and f" Raised on {message}."


def _tabulate_entries(entries: Sequence[ReportEntry], key: Mapping[str, Any]) -> str:
    """Format a table with a line per optimizer at a role and horizon, the best optimizer first."""
    names = [row["workload"] for row in _select(entries[0]["rows"], key)]
    lines, notes = [], ""
    selected: list[tuple[ReportEntry, Summary]] = [(entry, _select(entry["summaries"], key)[0]) for entry in entries]
    for entry, summary in sorted(selected, key=lambda pair: -float(pair[1]["ratio"])):
        rows = _select(entry["rows"], key)
        line = [entry["name"], f"{entry['rates'][str(key['steps'])]['best']:g}" if "rates" in entry else ""]
        line += [f"{row['ratio']:.2f}" for row in rows]
        line += [f"{summary['ratio']:.2f}", _format_interval(summary), f"{summary['worst_ratio']:.2f}"]
        lines.append([*line, f"{sum(row['step_ms'] for row in rows) / len(rows):.2f}"])
        message = _format_errors(rows)
        notes += f"\n{entry['name']}:{message}\n" if message else ""
    return format_table(["optimizer", "rate", *names, "mean", "95 %", "worst", "ms"], lines) + notes


def _format_interval(summary: Summary) -> str:
    """Format an interval as ``low to high``; "" for none."""
    return "" if summary["interval"] is None else "{:.2f} to {:.2f}".format(*summary["interval"])


def _tabulate_variants(entries: Sequence[ReportEntry]) -> str:
    """Format a table with a line per variant of a candidate; the first entry is the candidate as configured."""
    means = average_ratios_by(entries[0]["rows"], "steps")
    lines = []
    for entry in entries:
        line = [f"{entry['changed']} x {entry['factor']:g}" if entry is not entries[0] else "as configured"]
        for steps, mean in average_ratios_by(entry["rows"], "steps").items():
            change = 100 * (mean / means[steps] - 1)
            line += [f"{mean:.2f}", f"{round(change, 1) + 0.0:+.1f} %"]
        worst = min(entry["rows"], key=lambda row: float(row["ratio"]))
        diverged = dict.fromkeys(row["workload"] for row in entry["rows"] if any(row["diverged"]))
        message = f"{worst['workload']} {worst['ratio']:.2f} (of {worst['steps']:,})"
        lines.append([*line, message, ", ".join(diverged) or "none"])
    headings = [text for steps in means for text in (f"{steps:,} steps", "change")]
    return format_table(["variant", *headings, "worst", "not finite"], lines)
