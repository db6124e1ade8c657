"""AdamW's baselines: tuned once a workload, kept in a JSON file with what tells whether they still fit."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from analysis.optimizer_bench.bench import Run, measure
from analysis.optimizer_bench.loading import PROG, read_json, take_fingerprint
from analysis.optimizer_bench.running import Curve
from analysis.optimizer_bench.tuning import SEEDS, Setting, tune
from protonet._checks import fail
from protonet._writing import write_whole
from protonet.commands.common import format_table

#: Fields of `tuning.Baseline` and the workload's fingerprint, ``max_steps``, and ``curve``: the mean over seeds of the
#: smoothed losses that made the target.
Baseline = dict[str, Any]
NEEDED = {"target", "steps", "initial", "max_steps", "fingerprint", "curve"}


def tune_workload(name: str, file: Path | None, *, max_steps: int, state: Path) -> Baseline:
    """Tune AdamW on a workload, continuing from a journal, with a progress bar on stderr.

    Args:
        name: The workload's.
        file: The file that it is in, or None for a visible one.
        max_steps: Of every run.
        state: The journal.

    Raises:
        ValueError: There is no loss that AdamW can bring down.
    """
    fingerprint = take_fingerprint(name, file)
    if not math.isfinite(fingerprint):
        fail(PROG, "--workloads", "have a finite loss before training", f"{fingerprint} of {name}", "Mend it.")
    with tqdm(desc=name, unit="run", dynamic_ncols=True) as bar:

        @functools.cache
        def train(setting: Setting, seed: int) -> Curve:
            bar.set_postfix_str(f"lr {setting.lr:.2g}, seed {seed}")
            run = Run(name, file, seed, max_steps, setting)
            ((_, outcome),) = measure([run], state, 1)
            bar.update()
            return outcome.curve

        baseline = tune(train)
    if not baseline.target < baseline.initial:
        fail(PROG, "--workloads", "have what AdamW can train", name, "Leave it out, or mend it.")
    curves = [train(baseline.setting, seed).losses for seed in SEEDS]
    curve = [float(f"{statistics.fmean(losses):.5g}") for losses in zip(*curves, strict=True)]
    facts = {"max_steps": max_steps, "fingerprint": fingerprint, "curve": curve}
    settings = {which: getattr(baseline, which)._asdict() for which in ("setting", "fastest")}
    return baseline._asdict() | settings | facts


def read_baselines(argument: str, path: Path) -> dict[str, Baseline]:
    """Return what `tune` wrote, by the workload's name.

    Raises:
        ValueError: The file cannot be read, or holds something else.
    """
    baselines = read_json(argument, path)
    whole = isinstance(baselines, dict) and all(
        isinstance(baseline, dict) and baseline.keys() >= NEEDED for baseline in baselines.values()
    )
    if not whole:
        fail(PROG, argument, "hold what tune writes", str(path), f"Make it with python -m {PROG} tune.")
    found: dict[str, Baseline] = baselines
    return found


def write_baselines(path: Path, baselines: Mapping[str, Baseline]) -> None:
    """Write baselines, a line each."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(baseline)}" for name, baseline in baselines.items())
    write_whole(path, lambda file: file.write(f"{{\n{lines}\n}}\n".encode()))


def tabulate_baselines(baselines: Mapping[str, Baseline]) -> str:
    """Return a table with a line a workload."""
    header = ["workload", "target", "steps", "learning rate", "weight decay", "betas", "horizon"]
    lines = []
    for name, baseline in baselines.items():
        setting = Setting(**baseline["setting"])
        betas = ", ".join(f"{beta:g}" for beta in setting.betas)
        horizon = f"cosine, {setting.horizon:g}" if setting.horizon else "constant"
        line = [name, f"{baseline['target']:.4g}", f"{baseline['steps']:,}", f"{setting.lr:.2g}"]
        lines.append([*line, f"{setting.weight_decay:g}", betas, horizon])
    return format_table(header, lines)
