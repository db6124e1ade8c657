"""The number of steps to the loss of tuned AdamW, on each workload, at each of several horizons.

A configuration with total_steps gets each horizon and runs once for each; without it, one run of a workload and
seed is evaluated at all of them. With --rates, at other learning rates too; with --horizon-factors, with another
total_steps than the true one; with --compare, other libraries' optimizers, each at its best shared learning rate. A run
on validation or test workloads is a look: it is logged in analysis/results/optimizer_looks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from analysis.optimizer_bench import loading
from analysis.optimizer_bench.looks import Look, check_look, log_look
from analysis.optimizer_bench.peers import LIBRARIES, PEERS
from analysis.optimizer_bench.report import Entry, plot, tabulate
from analysis.optimizer_bench.runs import Candidate, Curves, Run, train_all
from analysis.optimizer_bench.score import Row, rate, score_workload, summarise
from analysis.optimizer_bench.tune import check_steps
from analysis.optimizer_bench.workloads import ROLES
from analysis.shared.runner import Report, StudyParser, parse_names, parse_wholes
from protonet.errors import install_command, raise_input_error

Optimizers = Mapping[int, Candidate]  #: By the horizon.


class Variant(NamedTuple):
    """A variant of a candidate, as its difference from the configuration."""

    changed: str  #: ``rate``, the learning rate, or ``horizon``, its total_steps.
    factor: float  #: Factor on the configured learning rate, or on the true horizon.


PLAIN = Variant("nothing", 1.0)


class Grid(NamedTuple):
    """Workloads, baselines, seeds and horizons."""

    workloads: Mapping[str, Path | None]  #: File of each workload; None for a built-in one.
    baselines: loading.Baselines
    seeds: Sequence[int]  #: Seeds of the runs; a peer's learning rate is chosen on the first one.
    steps: Sequence[int]  #: Horizons, ascending.

    def get_baseline(self, name: str, steps: int) -> loading.Baseline:
        """Get a workload's baseline at a horizon."""
        return self.baselines[name][str(steps)]

    def list_runs(self, optimizers: Optimizers, seeds: Sequence[int] | None = None) -> list[Run]:
        """List the runs of optimizers, each to its last horizon or until it reaches every target."""
        runs = []
        for optimizer in dict.fromkeys(optimizers.values()):
            steps = [horizon for horizon, other in optimizers.items() if other == optimizer]
            for name, file in self.workloads.items():
                baselines = [self.get_baseline(name, horizon) for horizon in steps]
                baselines += [easier for baseline in baselines for easier in baseline.get("easier", {}).values()]
                target = min(baseline["target"] for baseline in baselines)
                runs += [Run(name, file, seed, max(steps), optimizer, target) for seed in seeds or self.seeds]
        return runs

    def set_horizons(self, candidate: Candidate, factor: float = 1.0) -> Optimizers:
        """Adapt a candidate to each horizon: total_steps in its configuration is multiplied by a factor."""
        config = json.loads(candidate.config)
        if config.get("total_steps") is None:
            return dict.fromkeys(self.steps, candidate)
        configs = {steps: config | {"total_steps": round(factor * steps)} for steps in self.steps}
        return {
            steps: candidate._replace(config=json.dumps(config, sort_keys=True)) for steps, config in configs.items()
        }

    def score(self, optimizers: Optimizers, curves: Curves) -> list[Row]:
        """Compute the rows of an optimizer, one for each horizon: by role, then horizon, then workload."""
        rows = []
        for role in dict.fromkeys(map(loading.get_role, self.workloads)):
            names = [name for name in self.workloads if loading.get_role(name) == role]
            for steps, optimizer in optimizers.items():
                for name in names:
                    seen = [curves[optimizer, name, seed] for seed in self.seeds]
                    rows.append(score_workload(name, seen, self.get_baseline(name, steps)))
        return rows


def add_options(parser: StudyParser) -> None:
    """Add the optimizers and workloads."""
    parser.add_argument("--optimizer", metavar="FILE", help="Python file of a class CustomOptimizer(params, **config)")
    parser.add_argument("--config", metavar="FILE", help="its config, a JSON object (default: none)")
    parser.add("--rates", None, "factors on its learning rate to run as well, with commas", _parse_factors)
    parser.add("--horizon-factors", None, "factors of further runs on total_steps, with commas", _parse_factors)
    known = f"of {', '.join(PEERS)} (no NAMES: all)"
    parser.add_argument("--compare", nargs="?", const=",".join(PEERS), metavar="NAMES", help=known)
    parser.add("--steps", "1000", "horizons, with commas", check_steps)
    roles = f"of {', '.join(ROLES)}: whose workloads to run (default: visible)"
    parser.add("--roles", None, roles, partial(parse_names, known=ROLES))
    loading.add_workloads(parser, "those of --roles")
    add_grid(parser, "0,1,2")
    parser.add_plot("the optimizer's loss curves")


def add_grid(parser: StudyParser, seeds: str) -> None:
    """Add the baselines, seeds and processes."""
    file = str(loading.BASELINES)
    parser.add_argument("--baselines", default=file, metavar="PATH", help=f"default: {file}")
    parser.add("--seeds", seeds, "seeds, with commas", partial(parse_wholes, low=0))
    parser.add_int("--jobs", os.cpu_count() or 1, "processes")


def _parse_factors(option: str, text: str) -> list[float]:
    """Parse a comma-separated list of factors > 0, without 1; raise an InputError for others."""
    factors = list[float]()
    for part in text.split(","):
        try:
            factors.append(float(part))
        except ValueError:
            factors.append(math.nan)
        if not 0 < factors[-1] < math.inf:
            raise_input_error(option, "be numbers > 0", repr(part), "Pass factors such as 0.1,0.3,3,10.")
    return [factor for factor in dict.fromkeys(factors) if factor != 1]


def run(options: argparse.Namespace) -> Report:
    """Run the optimizer, and optionally peers, and report the ratios of AdamW's steps to theirs."""
    peers = [] if options.compare is None else parse_names("--compare", options.compare, PEERS)
    missing = [library for library in LIBRARIES if find_spec(library) is None]
    if peers and missing:
        raise_input_error(
            "--compare", f"have {', '.join(missing)}", "none installed", f"Run {install_command('peers')}."
        )
    candidate = _pick_candidate(options)
    grid = _pick_grid(options)
    variants: dict[Variant, Optimizers] = {}
    if candidate is not None:
        variants[PLAIN] = grid.set_horizons(candidate)
        variants |= {
            Variant("rate", factor): grid.set_horizons(scale(candidate, factor)) for factor in options.rates or ()
        }
        variants |= {
            Variant("horizon", factor): grid.set_horizons(candidate, factor) for factor in options.horizon_factors or ()
        }
    look = Look.at(candidate, peers, list(dict.fromkeys(map(loading.get_role, grid.workloads))))
    check_look(look, "--roles" if options.workloads is None else "--workloads")
    check_baselines(grid)
    entries = compete(grid, variants, peers, options.state, options.jobs)
    log_look(look, grid.steps, grid.seeds, _list_means(entries[0]))
    if options.plot:
        longest = {name: grid.get_baseline(name, grid.steps[-1]) for name in grid.workloads}
        plot(entries[0]["curves"], longest, options.plot)
    return Report(entries, tabulate(entries, grid.baselines))


def _list_means(entry: Entry) -> dict[tuple[str, int], float]:
    """List an optimizer's geometric means by role and horizon."""
    return {(summary["role"], summary["steps"]): summary["ratio"] for summary in entry["summaries"]}


def _pick_candidate(options: argparse.Namespace) -> Candidate | None:
    """Load the selected optimizer; None if only peers are selected."""
    if options.optimizer is None:
        for option in ("config", "rates", "horizon_factors", "plot"):
            if getattr(options, option) is not None:
                raise_input_error(
                    f"--{option.replace('_', '-')}", "come with --optimizer", "none", "Add the optimizer's file."
                )
        if options.compare is None:
            raise_input_error("--optimizer", "be a Python file", "none", "Pass one, or --compare.")
        return None
    return load_candidate(Path(options.optimizer), options.config)


def load_candidate(path: Path, config_file: str | None) -> Candidate:
    """Load an optimizer from a file, and check that it accepts the configuration."""
    path = path.resolve()
    config = {} if config_file is None else loading.read_json("--config", Path(config_file))
    if not isinstance(config, dict):
        got = f"a {type(config).__name__} in {config_file}"
        raise_input_error("--config", "hold a JSON object", got, "Write {} for no setting.")
    loading.load_optimizer(path, config)
    return Candidate(path.stem, json.dumps(config, sort_keys=True), path)


def scale(candidate: Candidate, factor: float) -> Candidate:
    """Multiply a candidate's learning rate, from the configuration or its default, by a factor."""
    if factor == 1.0 or candidate.file is None:
        return candidate
    config = json.loads(candidate.config)
    made = loading.load_optimizer(candidate.file, config)([nn.Parameter(torch.zeros(2, 2))], **config)
    lr = config.get("lr", made.defaults.get("lr"))
    if not isinstance(lr, (int, float)):
        raise_input_error("--rates", "come with a learning rate", f"an lr of {lr}", "Give --config a number lr.")
    config["lr"] = float(f"{lr * factor:.6g}")
    return candidate._replace(config=json.dumps(config, sort_keys=True))


def _pick_grid(options: argparse.Namespace) -> Grid:
    """Build the grid of selected workloads; see `loading.pick_workloads`."""
    if options.roles is not None and options.workloads is not None:
        raise_input_error("--roles", "come without --workloads", ",".join(options.roles), "Names are of any role.")
    workloads = loading.pick_workloads(options, options.roles or ["visible"])
    return Grid(workloads, loading.read_baselines(Path(options.baselines)), options.seeds, sorted(options.steps))


def check_baselines(grid: Grid) -> None:
    """Warn on stderr if workloads differ from those of their baselines; raise an InputError without baselines."""
    lacking = {name: [n for n in grid.steps if str(n) not in grid.baselines.get(name, {})] for name in grid.workloads}
    lacking = {name: steps for name, steps in lacking.items() if steps}
    if lacking:
        got = "; ".join(f"none of {name} at {', '.join(map(str, steps))}" for name, steps in lacking.items())
        steps = ",".join(map(str, sorted(set(chain(*lacking.values())), key=lambda n: (n != 1000, n))))
        remedy = f"Run python -m analysis optimizer-tune --steps {steps} --workloads {','.join(lacking)} first"
        file = any(grid.workloads[name] for name in lacking)
        raise_input_error(
            "--baselines", "have every workload", got, remedy + (", with the same file." if file else ".")
        )
    for name, path in grid.workloads.items():
        result = loading.compute_fingerprint(name, path)
        was = dict.fromkeys(grid.get_baseline(name, steps)["fingerprint"] for steps in grid.steps)
        if [*was] != [result]:
            print(
                f"{name} differs from what its baseline was made with: loss {result:g} before training, not "
                f"{', '.join(f'{loss:g}' for loss in was)}; another Python or torch has other data or weights. "
                "Tune it here.",
                file=sys.stderr,
            )


def compete(
    grid: Grid, variants: Mapping[Variant, Optimizers], peers: Sequence[str], state: Path, jobs: int
) -> list[Entry]:
    """Run a candidate with its variants and peers, each at its best learning rate, and score them.

    A peer's learning rate is chosen anew for each horizon, on the first seed of all workloads.
    """
    settings = {peer: {lr: Candidate(peer, json.dumps({"lr": lr})) for lr in PEERS[peer].rates} for peer in peers}
    runs = [run for optimizers in variants.values() for run in grid.list_runs(optimizers)]
    for by_rate in settings.values():
        runs += [run for peer in by_rate.values() for run in grid.list_runs(grid.set_horizons(peer), grid.seeds[:1])]
    curves = train_all(runs, state, jobs)
    means = {
        peer: {lr: _average_first(grid, setting, curves) for lr, setting in settings[peer].items()} for peer in peers
    }
    best = {peer: {n: max(rates, key=lambda lr: rates[lr][n]) for n in grid.steps} for peer, rates in means.items()}
    chosen = {peer: {n: settings[peer][lr] for n, lr in rates.items()} for peer, rates in best.items()}
    more = [
        run for optimizers in chosen.values() if grid.seeds[1:] for run in grid.list_runs(optimizers, grid.seeds[1:])
    ]
    curves |= train_all(more, state, jobs) if more else {}
    entries: list[Entry] = []
    for variant, optimizers in variants.items():
        rows, first = grid.score(optimizers, curves), optimizers[grid.steps[-1]]
        entry = {"name": first.name, "config": json.loads(first.config), **variant._asdict(), "rows": rows}
        entries.append(entry | {"summaries": summarise(rows)})
        if variant == PLAIN:
            entries[0]["curves"] = {
                name: [[float(f"{x:.5g}") for x in curves[first, name, seed].losses] for seed in grid.seeds]
                for name in grid.workloads
            }
    for peer, optimizers in chosen.items():
        rows = grid.score(optimizers, curves)
        result = {
            f"{n}": {"best": lr, "means": {f"{lr}": mean[n] for lr, mean in means[peer].items()}}
            for n, lr in best[peer].items()
        }
        entries.append({"name": peer, "rows": rows, "summaries": summarise(rows), "rates": result})
    return entries


def _average_first(grid: Grid, setting: Candidate, curves: Curves) -> dict[int, float]:
    """Compute a setting's geometric mean on the first seed, by horizon."""
    return {
        steps: statistics.geometric_mean(
            rate(curves[setting, name, grid.seeds[0]], grid.get_baseline(name, steps)) for name in grid.workloads
        )
        for steps in grid.steps
    }
