"""Scores of optimizers, and their Markdown tables.

A score is the ratio of tuned AdamW's steps to those of the optimizer within a horizon.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.optimizer_bench.runs import Baseline, Baselines
from analysis.optimizer_bench.workload import STEPS_PER_VALIDATION, LossCurve
from analysis.optimizer_bench.workloads import FILE_ROLE, WORKLOADS_BY_ROLE, get_groups
from protonet.ui.text import format_table

#: Maximal score of a miss, its decay (a factor of e per tenth of the remaining distance), and the minimal score.
MAX_PARTIAL_SCORE, GAP_STEEPNESS, MIN_PARTIAL_SCORE = 0.7, 10.0, 0.05
BOOTSTRAP_SAMPLES = 2000
#: Workload name, role, family and kind; horizon (``steps``); geometric mean over seeds (``ratio``); for each seed the
#: ratio, the first step at the target (None: a miss) and whether it diverged; for misses, the gap of the best smoothed
#: loss to the target in percent (``gaps``, None for a hit or no loss); ratios against ``easier`` baselines by name, if
#: any; and milliseconds per step.
Row = dict[str, Any]
#: Summary of the rows of one role and horizon: ``role``, ``steps``, ``ratio``, their geometric mean, its 95 %
#: ``interval`` (None for one seed), the mean for each of the ``kinds`` and against each ``easier`` baseline that all
#: rows have, the ``worst`` row and family, and the workloads that ``diverged`` on any seed.
Summary = dict[str, Any]
#: An optimizer's ``name``, ``config``, ``rows`` and ``summaries``. A peer has ``rates`` instead of the config: for each
#: horizon its ``best`` learning rate, and each rate's geometric mean on the first seed (``means``). A candidate has the
#: ``changed`` quantity and its ``factor``.
ReportEntry = dict[str, Any]
ROLE_TITLES = {role: f"{role.capitalize()} workloads" for role in WORKLOADS_BY_ROLE}
ROLE_TITLES[FILE_ROLE] = "Workloads of the file"
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


def truncate_curve(curve: LossCurve, target: float, max_steps: int) -> LossCurve:
    """Return the curve of a run up to the step that reaches a target, or up to a horizon."""
    hit = curve.first_step_below(target)
    end = max_steps if hit is None else min(hit, max_steps)
    losses = curve.losses[: end // STEPS_PER_VALIDATION + 1]
    return curve._replace(losses=losses, diverged=curve.diverged and len(losses) <= end // STEPS_PER_VALIDATION)


def compute_step_ratio(curve: LossCurve, baseline: Mapping[str, Any]) -> float:
    """Compute the ratio of AdamW's steps to those of a run; a run that misses the target gets a partial score."""
    target = baseline["target"]
    curve = truncate_curve(curve, target, baseline["max_steps"])
    if curve.diverged:
        return MIN_PARTIAL_SCORE
    hit = curve.first_step_below(target)
    if hit is not None:
        return float(baseline["steps"] / hit)
    left = (curve.losses[-1] - target) / (baseline["initial"] - target)
    return max(MIN_PARTIAL_SCORE, MAX_PARTIAL_SCORE * math.exp(-GAP_STEEPNESS * max(0.0, left)))


def compute_loss_gap(curve: LossCurve, baseline: Mapping[str, Any]) -> float | None:
    """Compute the gap of a run's best loss to the target, in percent of the target; None if it is reached."""
    target = baseline["target"]
    losses = truncate_curve(curve, target, baseline["max_steps"]).losses[1:]
    best = min(losses, default=-math.inf)
    return None if best <= target else 100 * (best - target) / abs(target) if target else math.inf


def score_workload(name: str, curves: Sequence[LossCurve], baseline: Mapping[str, Any]) -> Row:
    """Compute a workload's row at its baseline's horizon, from the runs of its seeds."""
    target, max_steps = baseline["target"], baseline["max_steps"]
    seen = [truncate_curve(curve, target, max_steps) for curve in curves]
    ratios = [compute_step_ratio(curve, baseline) for curve in seen]
    return {
        "workload": name,
        **get_groups(name)._asdict(),
        "steps": max_steps,
        "ratio": statistics.geometric_mean(ratios),
        "ratios": ratios,
        "easier": {
            easier: statistics.geometric_mean(compute_step_ratio(curve, baseline | entry) for curve in curves)
            for easier, entry in baseline.get("easier", {}).items()
        },
        "hits": [curve.first_step_below(target) for curve in seen],
        "diverged": [curve.diverged for curve in seen],
        "gaps": [compute_loss_gap(curve, baseline) for curve in seen],
        "step_ms": statistics.fmean(curve.step_ms for curve in seen),
    }


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """Summarize the rows of each role and horizon; all workloads have equal weight."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["role"], row["steps"]), []).append(row)
    return [{"role": role, "steps": steps, **_summarise(group)} for (role, steps), group in groups.items()]


def _summarise(rows: Sequence[Row]) -> Summary:
    """Compute means, intervals and worst cases of the rows of one role and horizon."""
    worst = min(rows, key=lambda row: float(row["ratio"]))
    families = average_ratios_by(rows, "family")
    worst_family = min(families, key=families.__getitem__)
    return {
        "ratio": statistics.geometric_mean(row["ratio"] for row in rows),
        "kinds": average_ratios_by(rows, "kind"),
        "easier": {
            name: statistics.geometric_mean(row["easier"][name] for row in rows)
            for name in rows[0]["easier"]
            if all(name in row["easier"] for row in rows)
        },
        "interval": bootstrap_interval([row["ratios"] for row in rows]) if len(rows[0]["ratios"]) > 1 else None,
        "worst": worst["workload"],
        "worst_ratio": worst["ratio"],
        "worst_family": worst_family,
        "worst_family_ratio": families[worst_family],
        "diverged": [row["workload"] for row in rows if any(row["diverged"])],
    }


def average_ratios_by(rows: Sequence[Row], key: str) -> dict[Any, float]:
    """Compute the geometric mean of the ratios for each value of a key, such as the family."""
    values = dict.fromkeys(row[key] for row in rows)
    return {value: statistics.geometric_mean(row["ratio"] for row in rows if row[key] == value) for value in values}


def bootstrap_interval(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Compute the 95 % interval of the geometric mean of ratios (workloads, seeds), resampling seeds per workload."""
    logs = np.log(ratios)  # (workloads, seeds)
    drawn = np.random.default_rng(0).integers(logs.shape[1], size=(BOOTSTRAP_SAMPLES, *logs.shape))
    means = np.take_along_axis(logs[None], drawn, axis=2).mean((1, 2))  # (resamples,)
    low, high = np.exp(np.quantile(means, [0.025, 0.975])).tolist()
    return low, high


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
            text += f"{_tabulate_rows(rows, selected)}\n{first['name']}: {_format_summary(summary)}\n\n"
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


def _format_summary(summary: Summary) -> str:
    """Format the summary of a role and horizon as a sentence."""
    interval = f" ({_format_interval(summary)})" if summary["interval"] else ""
    text = "geometric mean {ratio:.2f}{interval}, worst {worst} {worst_ratio:.2f}, worst family {worst_family} "
    parts = [(text + "{worst_family_ratio:.2f}").format(**summary | {"interval": interval})]
    parts += [f"{name} {ratio:.2f}" for name, ratio in summary["kinds"].items()]
    parts += [f"against {EASIER_BASELINE_TITLES[name]} {ratio:.2f}" for name, ratio in summary["easier"].items()]
    return f"{', '.join(parts)}, not finite: {', '.join(summary['diverged']) or 'none'}."


def _tabulate_entries(entries: Sequence[ReportEntry], key: Mapping[str, Any]) -> str:
    """Format a table with a line per optimizer at a role and horizon, the best optimizer first."""
    names = [row["workload"] for row in _select(entries[0]["rows"], key)]
    lines = []
    selected: list[tuple[ReportEntry, Summary]] = [(entry, _select(entry["summaries"], key)[0]) for entry in entries]
    for entry, summary in sorted(selected, key=lambda pair: -float(pair[1]["ratio"])):
        rows = _select(entry["rows"], key)
        line = [entry["name"], f"{entry['rates'][str(key['steps'])]['best']:g}" if "rates" in entry else ""]
        line += [f"{row['ratio']:.2f}" for row in rows]
        line += [f"{summary['ratio']:.2f}", _format_interval(summary), f"{summary['worst_ratio']:.2f}"]
        lines.append([*line, f"{sum(row['step_ms'] for row in rows) / len(rows):.2f}"])
    return format_table(["optimizer", "rate", *names, "mean", "95 %", "worst", "ms"], lines)


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
