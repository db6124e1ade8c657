"""Count an optimizer's steps to the loss of tuned AdamW, on each workload, at several horizons (numbers of steps).

A configuration with total_steps runs once for each horizon; without it, one run of a workload and seed is evaluated at
all horizons. Each run on validation workloads is logged in analysis/results/optimizer_looks.md.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.optimizer_bench import runs
from analysis.optimizer_bench.runs import Baseline, Baselines, CandidateOptimizer, LossCurves, TrainingRun
from analysis.optimizer_bench.workload import STEPS_PER_VALIDATION, LossCurve
from analysis.optimizer_bench.workloads import FILE_WORKLOAD_ROLE, WORKLOADS_BY_ROLE, get_groups
from analysis.shared.runner import StudyReport, int_option, list_option, names_option, parse_integers
from protonet.errors import raise_input_error
from protonet.ui.options import option, same_option
from protonet.ui.text import format_table
from solution.pack import ROOT

#: Score of a run that misses the target: its maximum, its decay per fraction of the loss that is left, its minimum.
MAX_PARTIAL_SCORE, GAP_STEEPNESS, MIN_PARTIAL_SCORE = 0.7, 10.0, 0.05
N_BOOTSTRAP_SAMPLES = 2000
#: Scores on a workload: its name, role, family and kind; horizon (``steps``); geometric mean over seeds (``ratio``);
#: for each seed the ratio, the first step at the target (None: a miss) and whether it diverged; for misses, the gap of
#: the best smoothed loss to the target in percent (``gaps``, None for a hit or no loss); ratios against ``easier``
#: baselines by name, if any; and milliseconds per step.
WorkloadScores = dict[str, Any]
#: Summary of the rows of one role and horizon: ``role``, ``steps``, ``ratio``, their geometric mean, its 95 %
#: ``interval`` (None for one seed), the mean for each of the ``kinds`` and against each ``easier`` baseline that all
#: rows have, the ``worst`` row and family, and the workloads that ``diverged`` on any seed.
ScoreSummary = dict[str, Any]
#: Results of an optimizer: its ``name``, ``config``, ``rows`` and ``summaries``.
OptimizerReport = dict[str, Any]
ROLE_TITLES = {role: f"{role.capitalize()} workloads" for role in WORKLOADS_BY_ROLE}
ROLE_TITLES[FILE_WORKLOAD_ROLE] = "Workloads of the file"
EASIER_BASELINE_TITLES = {"coarse": "a coarse ladder of AdamWs", "shared": "one AdamW for all"}
RATIO_NOTE = """
Ratio: AdamW's steps to the target, tuned for each workload and horizon, over the optimizer's; means are geometric,
intervals of 95 % over seeds. A miss earns at most 0.7, a loss that is not finite 0.05. Short of the target: of misses,
the best smoothed loss. Milliseconds: one step(), CPU time.
"""
VALIDATION_LOG_FILE = ROOT / "analysis/results/optimizer_looks.md"
VALIDATION_ROLE = "validation"  #: The role whose evaluations are logged.
CandidateByHorizon = Mapping[int, CandidateOptimizer]  #: The candidate, with its configuration at each horizon.


def truncate_curve(curve: LossCurve, target: float, max_steps: int) -> LossCurve:
    """Return the loss curve up to the first step that reaches a target, or up to ``max_steps``."""
    hit = curve.first_step_below(target)
    end = max_steps if hit is None else min(hit, max_steps)
    losses = curve.losses[: end // STEPS_PER_VALIDATION + 1]
    return curve._replace(losses=losses, diverged=curve.diverged and len(losses) <= end // STEPS_PER_VALIDATION)


def compute_step_ratio(curve: LossCurve, baseline: Mapping[str, Any]) -> float:
    """Compute the ratio of AdamW's steps to a run's steps to the target; a run that misses it gets a partial score."""
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
    """Compute a run's best loss minus the target, in percent of the target; None if the target is reached."""
    target = baseline["target"]
    losses = truncate_curve(curve, target, baseline["max_steps"]).losses[1:]
    best = min(losses, default=-math.inf)
    return None if best <= target else 100 * (best - target) / abs(target) if target else math.inf


def score_workload(name: str, curves: Sequence[LossCurve], baseline: Mapping[str, Any]) -> WorkloadScores:
    """Compute an optimizer's scores on a workload at the baseline's horizon, from one loss curve per seed."""
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


def summarise(rows: Sequence[WorkloadScores]) -> list[ScoreSummary]:
    """Summarize scores for each role and horizon; all workloads have equal weight."""
    groups: dict[tuple[str, int], list[WorkloadScores]] = {}
    for row in rows:
        groups.setdefault((row["role"], row["steps"]), []).append(row)
    return [{"role": role, "steps": steps, **_summarise_group(group)} for (role, steps), group in groups.items()]


def _summarise_group(rows: Sequence[WorkloadScores]) -> ScoreSummary:
    """Compute means, intervals and worst cases of the scores of one role and horizon."""
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


def average_ratios_by(rows: Sequence[WorkloadScores], key: str) -> dict[Any, float]:
    """Compute the geometric mean of the ratios of the rows with each value of ``key``, such as the family."""
    values = dict.fromkeys(row[key] for row in rows)
    return {value: statistics.geometric_mean(row["ratio"] for row in rows if row[key] == value) for value in values}


def bootstrap_interval(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Compute the 95 % bootstrap interval of the geometric mean of ratios (workloads, seeds), by resampling seeds."""
    logs = np.log(ratios)  # (workloads, seeds)
    drawn = np.random.default_rng(0).integers(logs.shape[1], size=(N_BOOTSTRAP_SAMPLES, *logs.shape))
    means = np.take_along_axis(logs[None], drawn, axis=2).mean((1, 2))  # (resamples,)
    low, high = np.exp(np.quantile(means, [0.025, 0.975])).tolist()
    return low, high


def format_tables(entry: OptimizerReport, baselines: Baselines) -> str:
    """Format a table of the scores by workload for each role and horizon."""
    text = ""
    for summary in entry["summaries"]:
        key = {name: summary[name] for name in ("role", "steps")}
        rows = [row for row in entry["rows"] if key.items() <= row.items()]
        text += f"**{ROLE_TITLES[summary['role']]}, {summary['steps']:,} steps**\n\n"
        selected = {row["workload"]: baselines[row["workload"]][str(summary["steps"])] for row in rows}
        text += f"{_tabulate_workloads(rows, selected)}\n{entry['name']}: {_format_summary(summary)}\n\n"
        coarse = ", ".join(name for name, baseline in selected.items() if baseline.get("coarse"))
        text += f"AdamW by the coarse ladder alone, which is easier: {coarse}.\n\n" if coarse else ""
    return text + RATIO_NOTE.lstrip()


def _tabulate_workloads(rows: Sequence[WorkloadScores], baselines: Mapping[str, Baseline]) -> str:
    """Format a table with a line per workload: the steps of AdamW and of the optimizer to the target."""
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


def _format_summary(summary: ScoreSummary) -> str:
    """Format the summary of a role and horizon as a sentence."""
    interval = " ({:.2f} to {:.2f})".format(*summary["interval"]) if summary["interval"] else ""
    text = "geometric mean {ratio:.2f}{interval}, worst {worst} {worst_ratio:.2f}, worst family {worst_family} "
    parts = [(text + "{worst_family_ratio:.2f}").format(**summary | {"interval": interval})]
    parts += [f"{name} {ratio:.2f}" for name, ratio in summary["kinds"].items()]
    parts += [f"against {EASIER_BASELINE_TITLES[name]} {ratio:.2f}" for name, ratio in summary["easier"].items()]
    return f"{', '.join(parts)}, not finite: {', '.join(summary['diverged']) or 'none'}."


class EvaluationGrid(NamedTuple):
    """The workloads, baselines, seeds and horizons of an evaluation."""

    workloads: Mapping[str, Path | None]  #: File of each workload by name; None for a built-in workload.
    baselines: runs.Baselines
    seeds: Sequence[int]  #: Seeds of the runs.
    horizons: Sequence[int]  #: Numbers of steps at which optimizers are evaluated, ascending.

    @property
    def roles(self) -> list[str]:
        """The roles of the workloads, such as "visible" and "validation", without repetition."""
        return list(dict.fromkeys(get_groups(name).role for name in self.workloads))

    def get_baseline(self, name: str, steps: int) -> Baseline:
        """Return the baseline of a workload at a horizon."""
        return self.baselines[name][str(steps)]

    def list_runs(self, optimizers: CandidateByHorizon) -> list[TrainingRun]:
        """List the training runs of a candidate; a run ends at the last horizon, or when it reaches all targets."""
        listed = []
        for optimizer in dict.fromkeys(optimizers.values()):
            steps = [horizon for horizon, other in optimizers.items() if other == optimizer]
            for name, file in self.workloads.items():
                baselines = [self.get_baseline(name, horizon) for horizon in steps]
                baselines += [easier for baseline in baselines for easier in baseline.get("easier", {}).values()]
                target = min(baseline["target"] for baseline in baselines)
                listed += [TrainingRun(name, file, seed, max(steps), optimizer, target) for seed in self.seeds]
        return listed

    def candidates_by_horizon(self, candidate: CandidateOptimizer) -> CandidateByHorizon:
        """Return the candidate at each horizon; a ``total_steps`` in its configuration is set to the horizon."""
        if json.loads(candidate.config).get("total_steps") is None:
            return dict.fromkeys(self.horizons, candidate)
        return {steps: candidate.with_settings(total_steps=steps) for steps in self.horizons}

    def score(self, optimizers: CandidateByHorizon, curves: LossCurves) -> OptimizerReport:
        """Compute the scores on each workload at each horizon from loss curves, and their summaries."""
        rows = []
        for role in self.roles:
            for steps, optimizer in optimizers.items():
                for name in (name for name in self.workloads if get_groups(name).role == role):
                    seen = [curves[optimizer, name, seed] for seed in self.seeds]
                    rows.append(score_workload(name, seen, self.get_baseline(name, steps)))
        return {"rows": rows, "summaries": summarise(rows)}


@dataclass(frozen=True, kw_only=True)
class Options(runs.WorkloadOptions):
    """The options of the study."""

    optimizer: str = option("Python file of a class CustomOptimizer(params, **config)", metavar="FILE", required=True)
    config: str | None = option("its config, a JSON object (default: none)", metavar="FILE")
    steps: Sequence[int] = list_option("horizons", "1000", runs.parse_horizons)
    roles: Sequence[str] | None = names_option(WORKLOADS_BY_ROLE, known_text="visible")
    workloads: str | None = same_option(
        runs.WorkloadOptions, "workloads", help="names, also of --workload-file (default: those of --roles)"
    )
    baselines: str = option(f"default: {runs.BASELINES_FILE}", str(runs.BASELINES_FILE), metavar="PATH")
    seeds: Sequence[int] = list_option("seeds", "0,1,2", partial(parse_integers, low=0))
    jobs: int = int_option("processes", os.cpu_count() or 1)


def run(options: Options) -> StudyReport:
    """Run the optimizer; report the ratios of AdamW's steps to its steps."""
    if options.roles is not None and options.workloads is not None:
        raise_input_error("--roles", "come without --workloads", ",".join(options.roles), "Names are of any role.")
    baselines = json.loads(Path(options.baselines).read_text(encoding="utf-8"))
    workloads = runs.select_workloads(options, options.roles or ["visible"])
    grid = EvaluationGrid(workloads, baselines, options.seeds, sorted(options.steps))
    candidate = runs.load_candidate(options.optimizer, options.config)
    optimizers = grid.candidates_by_horizon(candidate)
    check_baselines(grid)
    curves = runs.train_candidates(grid.list_runs(optimizers), options.state, options.jobs)
    last = optimizers[grid.horizons[-1]]
    entry = {"name": last.name, "config": json.loads(last.config), **grid.score(optimizers, curves)}
    if VALIDATION_ROLE in grid.roles:
        log_validation(candidate, grid, entry)
    return StudyReport([entry], format_tables(entry, grid.baselines))


def check_baselines(grid: EvaluationGrid) -> None:
    """Raise an InputError for missing baselines; warn on stderr about workloads that changed since their baselines."""
    absent = {name: [n for n in grid.horizons if str(n) not in grid.baselines.get(name, {})] for name in grid.workloads}
    missing = {name: steps for name, steps in absent.items() if steps}
    if missing:
        got = "; ".join(f"none of {name} at {', '.join(map(str, steps))}" for name, steps in missing.items())
        steps = ",".join(map(str, sorted(set(chain(*missing.values())), key=lambda n: (n != 1000, n))))
        remedy = f"Run python -m analysis optimizer-tune --steps {steps} --workloads {','.join(missing)} first."
        raise_input_error("--baselines", "have every workload", got, remedy)
    for name, path in grid.workloads.items():
        result = runs.compute_fingerprint(name, path)
        recorded = {grid.get_baseline(name, steps)["fingerprint"] for steps in grid.horizons}
        if recorded != {result}:
            text = f"{name} differs from what its baseline was made with: loss {result:g} before training, not "
            text += f"{', '.join(f'{loss:g}' for loss in recorded)}; another Python or torch has other data or weights."
            print(f"{text} Tune it here.", file=sys.stderr)


def log_validation(candidate: CandidateOptimizer, grid: EvaluationGrid, entry: OptimizerReport) -> None:
    """Append a line about an evaluation on validation workloads to the log in ``VALIDATION_LOG_FILE``."""
    digest = hashlib.sha256(candidate.file.read_bytes()).hexdigest()[:8]
    means = "; ".join(f"{part['role']} {part['steps']:,}: {part['ratio']:.2f}" for part in entry["summaries"])
    lists = (", ".join(map(str, values)) for values in (grid.roles, grid.horizons, grid.seeds))
    cells = [datetime.date.today().isoformat(), *lists, digest, f"`{candidate.config}`", means]
    with VALIDATION_LOG_FILE.open("a", encoding="utf-8") as file:
        file.write(f"| {' | '.join(cells)} |\n")
