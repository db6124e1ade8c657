"""Tune AdamW strictly on each workload: the baselines of the optimizer bench, kept in a JSON file.

Learning rates are tried up and down until the best one is interior, at each horizon of the schedule, and weight decay
and betas are tried beside it, all on one seed. The best setting of each horizon then runs on every seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from tqdm import tqdm

from analysis.optimizer_bench import loading
from analysis.optimizer_bench.runs import Run, Setting, run_bench
from analysis.optimizer_bench.workload import Curve
from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_columns
from protonet._checks import fail
from protonet._writing import write_whole

PROG = "analysis optimizer-tune"
SEEDS = (0, 1, 2)  #: The first one decides on settings, all of them make the baseline.
#: First and second factor of the search for a learning rate, and its bounds.
COARSE, FINE, RATES = 3.0, 1.7, (1e-6, 10.0)
WEIGHT_DECAYS = (0.0, 0.1, 1.0)
BETAS = ((0.9, 0.99), (0.9, 0.95), (0.95, 0.999), (0.8, 0.999))
HORIZONS = (1.0, 0.6, 0.35, 0.0)  #: Shares of the steps at whose end a cosine reaches 0; 0 is a constant rate.
COLUMNS = {
    "workload": "{name}",
    "target": "{target:.4g}",
    "steps": "{steps:,}",
    "learning rate": "{lr:.2g}",
    "weight decay": "{weight_decay:g}",
    "betas": "{betas[0]:g}, {betas[1]:g}",
    "horizon": "{schedule}",
}


def add_options(parser: StudyParser) -> None:
    """Add the workloads, and where baselines are kept."""
    parser.add_whole("--max-steps", 1000, "steps of every run", low=10)
    parser.add_output("--baselines", "baselines, to which these are added", loading.BASELINES)
    loading.add_workloads(parser)


def run(options: argparse.Namespace) -> Report:
    """Tune AdamW on each workload, and add its baseline to the file at once."""
    path = options.baselines
    baselines = loading.read_baselines(path) if path.exists() else {}
    workloads = loading.pick_workloads(options)
    for name, file in workloads.items():
        baselines[name] = tune_workload(name, file, max_steps=options.max_steps, state=options.state)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(baseline)}" for name, baseline in baselines.items())
        write_whole(path, lambda file, text=f"{{\n{lines}\n}}\n": file.write(text.encode()))  # type: ignore[misc]
    rows = [baselines[name] | baselines[name]["setting"] | {"name": name} for name in workloads]
    for row in rows:
        row["schedule"] = f"cosine, {row['horizon']:g}" if row["horizon"] else "constant"
    return Report(rows, format_columns(COLUMNS, rows))


def tune_workload(name: str, file: Path | None, *, max_steps: int, state: Path) -> loading.Baseline:
    """Return a workload's baseline, or raise an InputError where there is no loss that AdamW can bring down."""
    fingerprint = loading.take_fingerprint(name, file)
    if not math.isfinite(fingerprint):
        fail(PROG, "--workloads", "have a finite loss before training", f"{fingerprint} of {name}", "Mend it.")
    with tqdm(desc=name, unit="run", dynamic_ncols=True) as bar:

        @functools.cache
        def train(setting: Setting, seed: int) -> Curve:
            bar.set_postfix_str(f"lr {setting.lr:.2g}, seed {seed}")
            run = Run(name, file, seed, max_steps, setting)
            curve = run_bench([run], state, quiet=True)[run]
            bar.update()
            return curve

        baseline = tune(train)
    if not baseline["target"] < baseline["initial"]:
        fail(PROG, "--workloads", "have what AdamW can train", name, "Leave it out, or mend it.")
    return baseline | {"max_steps": max_steps, "fingerprint": fingerprint}


def tune(measure: Callable[[Setting, int], Curve]) -> loading.Baseline:
    """Return the baseline, but for what describes the workload.

    ``measure`` trains by a setting and a seed, and is asked for the same pair again and again.
    """

    def best(settings: Iterable[Setting]) -> Setting:
        return min(settings, key=lambda setting: _least(measure(setting, SEEDS[0])))

    def climb(setting: Setting, factor: float) -> Setting:
        """Go to the rate whose neighbours are both worse."""
        while True:
            rates = [setting.lr / factor, setting.lr, setting.lr * factor]
            tried = best(setting._replace(lr=rate) for rate in rates if RATES[0] <= rate <= RATES[1])
            if tried == setting:
                return setting
            setting = tried

    tuned = climb(climb(Setting(), COARSE), FINE)
    tuned = best([tuned, *(tuned._replace(betas=betas) for betas in BETAS)])
    tuned = best([tuned, *(tuned._replace(weight_decay=decay) for decay in WEIGHT_DECAYS)])
    finalists = [climb(tuned._replace(horizon=horizon), FINE) for horizon in HORIZONS]
    curves = {setting: [measure(setting, seed) for seed in SEEDS] for setting in finalists}
    setting = min(finalists, key=lambda each: max(map(_least, curves[each])))
    target = max(map(_least, curves[setting]))
    hits = {each: [curve.first_hit(target) for curve in curves[each]] for each in finalists}
    medians = {each: statistics.median(hit or math.inf for hit in hits[each]) for each in finalists}
    fastest = min(finalists, key=medians.__getitem__)
    losses = zip(*(curve.losses for curve in curves[setting]), strict=True)
    return {
        "target": target,
        "steps": int(medians[fastest]),
        "initial": statistics.fmean(curve.losses[0] for curve in curves[setting]),
        "setting": setting._asdict(),
        "fastest": fastest._asdict(),
        "hits": hits[fastest],
        "curve": [float(f"{statistics.fmean(each):.5g}") for each in losses],
    }


def _least(curve: Curve) -> float:
    """Return the best smoothed loss of a run, infinite if it diverged."""
    return math.inf if curve.diverged else min(curve.losses[1:], default=math.inf)
