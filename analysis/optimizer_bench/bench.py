"""The number of steps to the loss of tuned AdamW, on each workload, at each of several horizons.

A configuration with total_steps gets each horizon and runs once for each; without it, one run of a workload and
seed is evaluated at all of them. With --rates, at other learning rates too; with --horizon-factors, with another
total_steps than the true one; with --compare, other libraries' optimizers, each at its best shared learning rate. A run
on validation workloads is a look: it is logged in analysis/results/optimizer_looks.md.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from analysis.optimizer_bench import report, runs
from analysis.optimizer_bench.report import ReportEntry
from analysis.optimizer_bench.runs import PEERS, Baseline, CandidateOptimizer, Curves, TrainingRun
from analysis.optimizer_bench.workloads import WORKLOADS_BY_ROLE, get_groups
from analysis.shared.runner import StudyParser, StudyReport, parse_integers, parse_names
from protonet.errors import install_command, raise_input_error
from protonet.ui.command_line import parse_finite_number
from solution.pack import ROOT

VALIDATION_LOG = ROOT / "analysis/results/optimizer_looks.md"
VALIDATION_ROLE = "validation"  #: The role whose evaluations are logged.
Optimizers = Mapping[int, CandidateOptimizer]  #: The candidate at each horizon.


class EvaluationGrid(NamedTuple):
    """The workloads, baselines, seeds and horizons of an evaluation."""

    workloads: Mapping[str, Path | None]  #: File of each workload; None for a built-in one.
    baselines: runs.Baselines
    seeds: Sequence[int]  #: Seeds of the runs; a peer's learning rate is chosen on the first one.
    horizons: Sequence[int]  #: Horizons, ascending.

    @property
    def roles(self) -> list[str]:
        """The roles of the workloads, such as "visible" and "validation", without repetition."""
        return list(dict.fromkeys(get_groups(name).role for name in self.workloads))

    def get_baseline(self, name: str, steps: int) -> Baseline:
        """Return the baseline of a workload at a horizon."""
        return self.baselines[name][str(steps)]

    def list_runs(self, optimizers: Optimizers, seeds: Sequence[int]) -> list[TrainingRun]:
        """List the runs of optimizers; a run ends at its last horizon, or when it reaches all targets."""
        listed = []
        for optimizer in dict.fromkeys(optimizers.values()):
            steps = [horizon for horizon, other in optimizers.items() if other == optimizer]
            for name, file in self.workloads.items():
                baselines = [self.get_baseline(name, horizon) for horizon in steps]
                baselines += [easier for baseline in baselines for easier in baseline.get("easier", {}).values()]
                target = min(baseline["target"] for baseline in baselines)
                listed += [TrainingRun(name, file, seed, max(steps), optimizer, target) for seed in seeds]
        return listed

    def set_horizons(self, candidate: CandidateOptimizer, factor: float = 1.0) -> Optimizers:
        """Return the candidate for each horizon; total_steps in its configuration becomes factor x horizon."""
        if json.loads(candidate.config).get("total_steps") is None:
            return dict.fromkeys(self.horizons, candidate)
        return {steps: candidate.with_settings(total_steps=round(factor * steps)) for steps in self.horizons}

    def score(self, optimizers: Optimizers, curves: Curves) -> ReportEntry:
        """Compute a row of scores for each role, horizon and workload, in this order, and their summaries."""
        rows = []
        for role in self.roles:
            for steps, optimizer in optimizers.items():
                for name in (name for name in self.workloads if get_groups(name).role == role):
                    seen = [curves[optimizer, name, seed] for seed in self.seeds]
                    rows.append(report.score_workload(name, seen, self.get_baseline(name, steps)))
        return {"rows": rows, "summaries": report.summarise(rows)}

    def average_first(self, candidate: CandidateOptimizer, curves: Curves, steps: int) -> float:
        """Compute the geometric mean of a candidate's ratios at a horizon on the first seed."""
        seen = {name: curves[candidate, name, self.seeds[0]] for name in self.workloads}
        ratios = (report.compute_step_ratio(seen[name], self.get_baseline(name, steps)) for name in seen)
        return statistics.geometric_mean(ratios)


def add_options(parser: StudyParser) -> None:
    """Add the options: the optimizers, workloads, horizons and seeds."""
    parser.add_argument("--optimizer", metavar="FILE", help="Python file of a class CustomOptimizer(params, **config)")
    parser.add_argument("--config", metavar="FILE", help="its config, a JSON object (default: none)")
    parser.add_option("--rates", None, "factors on its learning rate to run as well, with commas", _parse_factors)
    parser.add_option("--horizon-factors", None, "factors of further runs on total_steps, with commas", _parse_factors)
    known = f"of {', '.join(PEERS)} (no NAMES: all)"
    parser.add_argument("--compare", nargs="?", const=",".join(PEERS), metavar="NAMES", help=known)
    parser.add_option("--steps", "1000", "horizons, with commas", runs.parse_horizons)
    roles = f"of {', '.join(WORKLOADS_BY_ROLE)}: whose workloads to run (default: visible)"
    parser.add_option("--roles", None, roles, partial(parse_names, known=WORKLOADS_BY_ROLE))
    runs.add_workload_options(parser, "those of --roles")
    path = str(runs.BASELINES_FILE)
    parser.add_argument("--baselines", default=path, metavar="PATH", help=f"default: {path}")
    parser.add_option("--seeds", "0,1,2", "seeds, with commas", partial(parse_integers, low=0))
    parser.add_int_option("--jobs", os.cpu_count() or 1, "processes")


def _parse_factors(option: str, text: str) -> list[float]:
    """Parse a comma-separated list of factors > 0, without 1; raise an InputError for others."""
    factors = [parse_finite_number(option, part, low=0.0) for part in text.split(",")]
    return [factor for factor in dict.fromkeys(factors) if factor != 1]


def run(options: argparse.Namespace) -> StudyReport:
    """Run the optimizer, and optionally peers, and report the ratios of AdamW's steps to theirs."""
    peers = [] if options.compare is None else parse_names("--compare", options.compare, PEERS)
    missing = [library for library in runs.LIBRARIES if find_spec(library) is None]
    if peers and missing:
        remedy = f"Run {install_command('peers')}."
        raise_input_error("--compare", f"have {', '.join(missing)}", "none installed", remedy)
    if options.optimizer is None and not peers:
        raise_input_error("--optimizer", "be a Python file", "none", "Pass one, or --compare.")
    if options.roles is not None and options.workloads is not None:
        raise_input_error("--roles", "come without --workloads", ",".join(options.roles), "Names are of any role.")
    baselines = json.loads(Path(options.baselines).read_text(encoding="utf-8"))
    workloads = runs.select_workloads(options, options.roles or ["visible"])
    grid = EvaluationGrid(workloads, baselines, options.seeds, sorted(options.steps))
    variants: dict[tuple[str, float], Optimizers] = {}
    candidate = None
    if options.optimizer is not None:
        candidate = runs.load_candidate(options.optimizer, options.config)
        variants["nothing", 1.0] = grid.set_horizons(candidate)
        for factor in options.rates or ():
            variants["rate", factor] = grid.set_horizons(runs.scale_learning_rate(candidate, factor))
        for factor in options.horizon_factors or ():
            variants["horizon", factor] = grid.set_horizons(candidate, factor)
    check_baselines(grid)
    entries = run_all_optimizers(grid, variants, peers, options.state, options.jobs)
    if VALIDATION_ROLE in grid.roles:
        log_validation(candidate, peers, grid, entries[0])
    return StudyReport(entries, report.format_tables(entries, grid.baselines))


def check_baselines(grid: EvaluationGrid) -> None:
    """Raise an InputError for missing baselines; warn on stderr if a workload differs from that of its baseline."""
    missing = {
        name: [n for n in grid.horizons if str(n) not in grid.baselines.get(name, {})] for name in grid.workloads
    }
    missing = {name: steps for name, steps in missing.items() if steps}
    if missing:
        got = "; ".join(f"none of {name} at {', '.join(map(str, steps))}" for name, steps in missing.items())
        steps = ",".join(map(str, sorted(set(chain(*missing.values())), key=lambda n: (n != 1000, n))))
        remedy = f"Run python -m analysis optimizer-tune --steps {steps} --workloads {','.join(missing)} first."
        raise_input_error("--baselines", "have every workload", got, remedy)
    for name, path in grid.workloads.items():
        result = runs.compute_fingerprint(name, path)
        recorded = {grid.get_baseline(name, steps)["fingerprint"] for steps in grid.horizons}
        if recorded != {result}:
            print(
                f"{name} differs from what its baseline was made with: loss {result:g} before training, not "
                f"{', '.join(f'{loss:g}' for loss in recorded)}; another Python or torch has other data or weights. "
                "Tune it here.",
                file=sys.stderr,
            )


def run_all_optimizers(
    grid: EvaluationGrid, variants: Mapping[tuple[str, float], Optimizers], peers: Sequence[str], state: Path, jobs: int
) -> list[ReportEntry]:
    """Run and score the variants of a candidate, and peers at their best learning rate.

    The learning rate of a peer is chosen for each horizon, on the first seed of all workloads.
    """
    settings: dict[str, dict[float, CandidateOptimizer]] = {}
    for peer in peers:
        rates = PEERS[peer].learning_rates
        settings[peer] = {lr: CandidateOptimizer(peer, json.dumps({"lr": lr})) for lr in rates}
    first = [run for optimizers in variants.values() for run in grid.list_runs(optimizers, grid.seeds)]
    for by_rate in settings.values():
        first += [run for peer in by_rate.values() for run in grid.list_runs(grid.set_horizons(peer), grid.seeds[:1])]
    curves = runs.train_all(first, state, jobs)
    means: dict[str, dict[int, dict[float, float]]] = {}  # by peer, horizon and learning rate
    for peer, by_rate in settings.items():
        means[peer] = {n: {lr: grid.average_first(by_rate[lr], curves, n) for lr in by_rate} for n in grid.horizons}
    chosen = {
        peer: {n: settings[peer][max(rates, key=rates.__getitem__)] for n, rates in by_horizon.items()}
        for peer, by_horizon in means.items()
    }
    more = [run for optimizers in chosen.values() for run in grid.list_runs(optimizers, grid.seeds[1:])]
    curves |= runs.train_all(more, state, jobs) if more else {}
    entries: list[ReportEntry] = []
    for (changed, factor), optimizers in variants.items():
        last = optimizers[grid.horizons[-1]]
        entry = {"name": last.name, "config": json.loads(last.config), "changed": changed, "factor": factor}
        entries.append(entry | grid.score(optimizers, curves))
    for peer, optimizers in chosen.items():
        rates_of = {
            f"{n}": {"best": max(rates, key=rates.__getitem__), "means": {f"{lr}": mean for lr, mean in rates.items()}}
            for n, rates in means[peer].items()
        }
        entries.append({"name": peer, **grid.score(optimizers, curves), "rates": rates_of})
    return entries


def log_validation(
    candidate: CandidateOptimizer | None, peers: Sequence[str], grid: EvaluationGrid, entry: ReportEntry
) -> None:
    """Append a line about an evaluation on validation workloads to the log in ``VALIDATION_LOG``."""
    name, config = ", ".join(peers), ""
    if candidate is not None and candidate.file is not None:
        name, config = hashlib.sha256(candidate.file.read_bytes()).hexdigest()[:8], f"`{candidate.config}`"
    means = "; ".join(f"{part['role']} {part['steps']:,}: {part['ratio']:.2f}" for part in entry["summaries"])
    lists = (", ".join(map(str, values)) for values in (grid.roles, grid.horizons, grid.seeds))
    cells = [datetime.date.today().isoformat(), *lists, name, config, means]
    with VALIDATION_LOG.open("a", encoding="utf-8") as file:
        file.write(f"| {' | '.join(cells)} |\n")
