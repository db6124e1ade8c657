"""Tune AdamW on each workload at each horizon: the baselines of the benchmark, stored in a JSON file.

On one seed, learning rates are tried up and down until the best rate is not at the end of the range, then weight decay,
betas and the end of the schedule. The best settings with a cosine, with a constant rate and of the coarse search below
then run on every seed. The first horizon is searched in full; others start from the best setting of an earlier horizon.

Two easier baselines show the effect of this search: a coarse grid of rates, each three times the next lower rate, with
two weight decays and a cosine; and one AdamW for all workloads. With --coarse, only the coarse grid is searched, for
horizons at which the full search takes too long.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from analysis.optimizer_bench import runs
from analysis.optimizer_bench.runs import AdamWSetting, Baseline, TrainingRun
from analysis.optimizer_bench.workload import LossCurve
from analysis.shared.runner import StudyReport, hash_sources, int_option, list_option, run_all
from protonet._io import write_atomically
from protonet.errors import raise_input_error
from protonet.ui.options import option
from protonet.ui.text import format_table

SEEDS = (0, 1, 2)  #: Settings are chosen on the first seed; baselines are measured on all seeds.
#: Factors between learning rates in the coarse and in the fine search, and bounds of learning rates.
COARSE_RATE_FACTOR, FINE_RATE_FACTOR, LEARNING_RATE_RANGE = 3.0, 1.7, (1e-6, 10.0)
WEIGHT_DECAYS = (0.0, 0.1, 1.0)
CANDIDATE_BETAS = ((0.9, 0.99), (0.9, 0.95), (0.95, 0.999), (0.8, 0.999))
COARSE_WEIGHT_DECAYS = (0.01, 0.1)
SOURCE_FILE = "analysis/optimizer_bench/tune.py"
TABLE_COLUMNS = {
    "workload": "{name}",
    "of": "{max_steps:,}",
    "target": "{target:.4g}",
    "steps": "{steps:,}",
    "learning rate": "{lr:.2g}",
    "weight decay": "{weight_decay:g}",
    "betas": "{betas[0]:g}, {betas[1]:g}",
    "horizon": "{schedule}",
}


class TuningTask(NamedTuple):
    """The tuning of AdamW on one workload at several horizons."""

    workload: str
    workload_file: Path | None  #: File of the workload; None if built in.
    horizons: tuple[int, ...]  #: Numbers of training steps, in the order of the search.
    start_setting: AdamWSetting | None  #: The best setting at another horizon.
    journal: Path  #: The journal of finished runs, from which an interrupted tuning resumes.
    is_coarse: bool = False  #: Whether only the coarse grid of learning rates is searched.


@dataclass(frozen=True, kw_only=True)
class Options(runs.WorkloadOptions):
    """The options of the study."""

    steps: Sequence[int] = list_option("horizons in the order of the search", "1000,300,5000", runs.parse_horizons)
    jobs: int = int_option("processes; each tunes another workload", os.cpu_count() or 1)
    coarse: bool = option("try the coarse ladder alone, and make it the baseline", False)
    baselines: Path = option(
        f"baselines, to which these are added (default: {runs.BASELINES_FILE})",
        runs.BASELINES_FILE,
        metavar="PATH",
        suffixes=("",),
    )


def run(options: Options) -> StudyReport:
    """Tune AdamW on each workload, and add the baselines to the file."""
    path, files = options.baselines, runs.select_workloads(options)
    baselines: runs.Baselines = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    tasks = []
    for name, workload_file in files.items():
        known = next((baseline["setting"] for baseline in baselines.get(name, {}).values()), None)
        start = known and AdamWSetting(**known | {"betas": tuple(known["betas"])})
        tasks.append(TuningTask(name, workload_file, tuple(options.steps), start, options.state, options.coarse))
    tuned = run_all(tasks, tune_workload, options.state, _list_baseline_inputs, unit="workload", jobs=options.jobs)
    for task, result in tuned.items():
        if not all(baseline["target"] < baseline["initial"] for baseline in result.values()):
            raise_input_error("--workloads", "have what AdamW can train", task.workload, "Leave it out, or mend it.")
        known = baselines.get(task.workload, {}) | result
        baselines[task.workload] = dict(sorted(known.items(), key=lambda item: int(item[0])))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(baseline)}" for name, baseline in baselines.items())
    write_atomically(path, lambda workload_file: workload_file.write(f"{{\n{lines}\n}}\n".encode()))
    rows = [baseline | baseline["setting"] | {"name": name} for name in files for baseline in baselines[name].values()]
    for row in rows:
        row["schedule"] = f"cosine, {row['horizon']:g}" if row["horizon"] else "constant"
    cells = [[cell.format(**row) for cell in TABLE_COLUMNS.values()] for row in rows]
    return StudyReport(rows, format_table(list(TABLE_COLUMNS), cells))


def _list_baseline_inputs(task: TuningTask) -> list[object]:
    """List the hashes that identify the inputs of a tuning in the journal: workload, settings and code."""
    run = TrainingRun(task.workload, task.workload_file, SEEDS[0], task.horizons[0], AdamWSetting())
    return [*runs.identify_run(run), hash_sources(SOURCE_FILE)]


def tune_workload(task: TuningTask) -> dict[str, Baseline]:
    """Tune AdamW on a workload; return the baseline of each horizon."""
    code = _list_baseline_inputs(task)[:-1]  # a run does not depend on the code of the search

    @functools.cache
    def train(setting: AdamWSetting, seed: int, max_steps: int) -> LossCurve:
        run = TrainingRun(task.workload, task.workload_file, seed, max_steps, setting)
        return LossCurve(*run_all([run], runs.train_adamw, task.journal, lambda _: code, quiet=True)[run])

    result = {}
    start = task.start_setting
    for max_steps in task.horizons:
        measure = functools.partial(train, max_steps=max_steps)
        if task.is_coarse:
            baseline = make_baseline(measure, [search_coarse_grid(measure)]) | {"coarse": True}
        else:
            baseline, start = tune_adamw(measure, start)
        fingerprint = runs.compute_fingerprint(task.workload, task.workload_file)
        result[str(max_steps)] = baseline | {"max_steps": max_steps, "fingerprint": fingerprint}
    return result


TrainSetting = Callable[[AdamWSetting, int], LossCurve]  #: Trains with a setting and a seed, once for each pair.


def tune_adamw(measure: TrainSetting, start: AdamWSetting | None = None) -> tuple[Baseline, AdamWSetting]:
    """Tune AdamW on a workload at one horizon; return the baseline, and a setting to start from at other horizons.

    Args:
        measure: Trains with a setting and a seed.
        start: The best setting at another horizon; its betas are kept.
    """
    if start is None:
        tuned = search_learning_rate(measure, AdamWSetting(), COARSE_RATE_FACTOR)
        tuned = search_learning_rate(measure, tuned, FINE_RATE_FACTOR)
        tuned = choose_setting(measure, [tuned, *(tuned._replace(betas=betas) for betas in CANDIDATE_BETAS)])
    else:
        tuned = search_learning_rate(measure, start._replace(horizon=1.0), FINE_RATE_FACTOR)
    tuned = choose_setting(measure, [tuned, *(tuned._replace(weight_decay=decay) for decay in WEIGHT_DECAYS)])
    # Fractions of the steps after which a cosine schedule reaches 0; 0 is a constant learning rate.
    candidate_horizons = (1.0, 0.6, 0.35, 0.0)
    ends = [tuned._replace(horizon=horizon) for horizon in candidate_horizons]
    # A constant rate must be lower.
    ends = [choose_setting(measure, ends[:-1]), search_learning_rate(measure, ends[-1], FINE_RATE_FACTOR)]
    finalists = sorted(ends, key=lambda setting: _min_smoothed_loss(measure(setting, SEEDS[0])))
    ladder = search_coarse_grid(measure)
    others = {"coarse": ladder, "shared": AdamWSetting()}
    easier = {name: select_setting(measure, [setting])[0] for name, setting in others.items()}
    # The full search may miss the optimum of the coarse grid.
    return make_baseline(measure, [*finalists, ladder]) | {"easier": easier}, finalists[0]


def choose_setting(measure: TrainSetting, settings: Iterable[AdamWSetting]) -> AdamWSetting:
    """Choose the AdamW setting with the lowest loss on the first seed, by training with each."""
    return min(settings, key=lambda setting: _min_smoothed_loss(measure(setting, SEEDS[0])))


def search_learning_rate(measure: TrainSetting, setting: AdamWSetting, factor: float) -> AdamWSetting:
    """Multiply or divide the learning rate by a factor until the loss is lowest; return the setting with this rate."""
    while True:
        rates = [setting.lr / factor, setting.lr, setting.lr * factor]
        low, high = LEARNING_RATE_RANGE
        tried = choose_setting(measure, [setting._replace(lr=rate) for rate in rates if low <= rate <= high])
        if tried == setting:
            return setting
        setting = tried


def search_coarse_grid(measure: TrainSetting) -> AdamWSetting:
    """Search the learning rate on the coarse grid, then the weight decay; return the best setting."""
    rung = search_learning_rate(measure, AdamWSetting(), COARSE_RATE_FACTOR)
    return choose_setting(measure, [rung._replace(weight_decay=decay) for decay in COARSE_WEIGHT_DECAYS])


def make_baseline(measure: TrainSetting, finalists: Sequence[AdamWSetting]) -> Baseline:
    """Make a baseline from the best of several settings (``finalists``); it includes the loss before training."""
    strict, curves = select_setting(measure, finalists)
    return strict | {"initial": statistics.fmean(curve.losses[0] for curve in curves)}


def select_setting(measure: TrainSetting, finalists: Sequence[AdamWSetting]) -> tuple[Baseline, list[LossCurve]]:
    """Select the setting with the lowest loss on its worst seed; return its baseline and its loss curves."""
    curves = {setting: [measure(setting, seed) for seed in SEEDS] for setting in finalists}
    setting = min(finalists, key=lambda finalist: max(map(_min_smoothed_loss, curves[finalist])))
    target = max(map(_min_smoothed_loss, curves[setting]))
    hits = {finalist: [curve.first_step_below(target) for curve in curves[finalist]] for finalist in finalists}
    medians = {finalist: statistics.median(hit or math.inf for hit in hits[finalist]) for finalist in finalists}
    fastest = min(finalists, key=medians.__getitem__)
    return {
        "target": target,
        "steps": int(medians[fastest]),
        "setting": setting._asdict(),
        "fastest": fastest._asdict(),
        "hits": hits[fastest],
    }, curves[setting]


def _min_smoothed_loss(curve: LossCurve) -> float:
    """Compute the minimum smoothed loss of a run after its start; infinite if it diverged."""
    return math.inf if curve.diverged else min(curve.losses[1:], default=math.inf)
