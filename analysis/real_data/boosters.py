"""The solver beside LightGBM, CatBoost and AutoGluon-Tabular, as they are set by default, on the same splits.

The peers run in an environment of their own, whose interpreter is --peers:
python -m venv PEERS; PEERS/bin/pip install "autogluon.tabular[lightgbm,catboost,xgboost]"
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.real_data.booster_worker import CORES, PACKAGES, TIME_LIMIT
from analysis.real_data.robustness import DATA, Run, fit_ours, judge, list_runs, load_split
from analysis.real_data.sets import DATASETS
from analysis.shared.baselines import Outcome
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import Report, StudyParser, check_python, parse_wholes
from analysis.shared.tables import format_mean
from protonet._checks import refuse
from protonet.ui.text import count, format_table
from solution.pack import library_files

WORKER = Path(__file__).with_name("booster_worker.py")
INSTALL = 'Run PEERS/bin/pip install "autogluon.tabular[lightgbm,catboost,xgboost]": it brings all three.'
NAMES = {"ours": "ours", "lightgbm": "LightGBM", "catboost": "CatBoost", "autogluon": "AutoGluon-Tabular"}
#: CatBoost's time grows with classes x features x labelled rows; a fit of more is left out, for it takes a minute of
#: CPU time and, on many classes of pixels, an hour.
MOST_VALUES = 100_000
#: The rows for AutoGluon-Tabular, of the first split; chosen by name before anything was measured.
TEN_ROWS = {
    **{"iris": 5, "text": 5, "JapaneseVowels": 5},
    **{"wine": 10, "digits": 10, "GunPoint": 10, "OSULeaf": 10},
    **{"breast_cancer": 20, "spectra": 20, "ArrowHead": 20},
}
LONGEST = 1800.0  #: Seconds of wall time after which a peer counts as failed on a split.
SMALLEST = 1e-12  #: A probability below this counts as this in the log-loss.
QUANTITIES = ("accuracy", "log_loss", "calibration_error", "cpu_seconds", "wall_seconds")
NOTE = f"""
Test accuracy in percent, mean over the splits ± one standard error. The splits are those of `robustness`. Ours is the
default `solve`, on one thread; the peers have their defaults on {CORES} cores, seeds included. LightGBM's ask for 20
rows in a leaf, so that it cannot split fewer than 40 rows and gives all rows the same probabilities. CatBoost is left
out (–) where classes x features x labelled rows are more than {MOST_VALUES:,}: a fit would take a minute to an hour.
AutoGluon-Tabular is measured on ten rows, chosen by name beforehand, on the first split alone, with its default
presets, which know no limit of time: it got {TIME_LIMIT:.0f} seconds a fit. Its models are those of its installation
without deep learning.
"""
MEANS = f"""
Means over the rows that a peer was measured on, and ours on the same splits: accuracy in percent, log-loss in nats
(a probability counts as at least {SMALLEST:.0e}), calibration error in points over 15 bins, seconds of the fit without
imports. "Ahead" are the rows where ours has the higher accuracy, and the lower log-loss.
"""

Row = dict[str, Any]


def add_options(parser: StudyParser) -> None:
    """Add what to measure, and the peers' interpreter."""
    parser.add_names("--datasets", DATASETS)
    parser.add_names("--methods", NAMES)
    parser.add("--shots", "5,10,20", "labelled samples per class", functools.partial(parse_wholes, low=1))
    parser.add_whole("--splits", 2, "splits of each data set")
    parser.add("--peers", None, "interpreter of the peers' environment", check_python)
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Do every run, and compare ours with each peer where both were measured."""
    methods = list(dict.fromkeys(["ours", *(options.methods or NAMES)]))
    versions = find_versions(options.peers, methods[1:])
    listed = list(list_runs(options.datasets or list(DATASETS), options.shots, options.splits, methods))
    runs = [each for each in listed if is_measured(each)]
    if not runs:
        got = f"none at {options.shots} shots"
        refuse("--datasets", "have rows enough for a split", got, "Pass fewer shots or other data sets.")

    def code(each: Run) -> list[str]:
        return hash_code(each.method, versions)

    rows = summarise(run_all(runs, functools.partial(run_method, peers=options.peers), options.state, code))
    return Report({"versions": versions, "rows": rows}, tabulate(rows, methods, versions))


def find_versions(peers: str | None, methods: Sequence[str]) -> dict[str, str]:
    """Return the versions of the peers' packages, or raise an InputError if one is not installed."""
    if not methods:
        return {}
    if peers is None:
        refuse("--peers", "be the interpreter of an environment with the peers", "none", INSTALL)
    ended = subprocess.run([peers, "-I", str(WORKER)], capture_output=True, text=True, check=False)
    if ended.returncode:
        refuse("--peers", "be a Python with numpy", (ended.stderr.splitlines() or [peers])[-1], INSTALL)
    versions = json.loads(ended.stdout)
    for method in methods:
        if versions[method] is None:
            refuse("--peers", f"have {PACKAGES[method]}", "none installed", INSTALL)
    return {method: versions[method] for method in methods}


def is_measured(run: Run) -> bool:
    """Return whether a method is measured on a split: the rules for CatBoost and AutoGluon-Tabular."""
    if run.method == "autogluon":
        return run.seed == 0 and TEN_ROWS.get(run.dataset) == run.shots
    split = load_split(*run[:3])
    assert split is not None, "list_runs leaves these out"
    return run.method != "catboost" or split.num_classes * split.train_x.numel() <= MOST_VALUES


def hash_code(method: str, versions: Mapping[str, str]) -> list[str]:
    """Return what decides a method's results: a hash of the code, and a peer's version."""
    if method == "ours":
        return [hash_sources(*DATA, *library_files())]
    return [hash_sources(*DATA, "analysis/real_data/booster_worker.py"), versions[method]]


def run_method(run: Run, peers: str | None) -> dict[str, Any]:
    """Return a method's `QUANTITIES` on a split or, for a peer that failed, ``error`` with its last words."""
    split = load_split(*run[:3])
    assert split is not None, "list_runs leaves these out"
    rows = split.test_x.numpy()
    if run.method == "ours":
        cpu, wall = time.process_time(), time.perf_counter()
        predictor = fit_ours(split.train_x.numpy(), split.train_y.numpy())
        seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        outcome = predictor(rows)
    else:
        assert peers is not None, "find_versions has checked it"
        try:
            arrays = fit_peer(peers, run.method, split.train_x.numpy(), split.train_y.numpy(), rows)
        except (ChildProcessError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
        shares = arrays["probabilities"]
        outcome = Outcome(shares.argmax(axis=1), np.log(shares.clip(SMALLEST)))
        seconds = {name: float(arrays[name]) for name in ("cpu", "wall")}
    return judge(outcome, split.test_y) | {f"{name}_seconds": round(value, 4) for name, value in seconds.items()}


def fit_peer(peers: str, method: str, x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Fit a peer in its environment, in an empty folder; return what the worker writes.

    Raises:
        ChildProcessError: The peer failed; the message has the last line that it wrote.
        subprocess.TimeoutExpired: It took longer than `LONGEST`.
    """
    threads = {"OMP_NUM_THREADS": str(CORES), "OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait use no CPU time
    with tempfile.TemporaryDirectory() as folder:
        data, result = Path(folder, "data.npz"), Path(folder, "result.npz")
        np.savez(data, train_x=x, train_y=y, test_x=rows)
        command = [peers, "-I", str(WORKER), method, str(data), str(result)]
        ended = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | threads,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
            start_new_session=True,  # out of reach of Ctrl-C: it ends from here, without a traceback
        )
        if ended.returncode:
            last = (ended.stderr.splitlines() or ["nothing on stderr"])[-1]
            raise ChildProcessError(f"exit code {ended.returncode}, {last}")
        with np.load(result) as arrays:
            return dict(arrays)


def summarise(results: Mapping[Run, Mapping[str, Any]]) -> list[Row]:
    """Gather the results by data set and shots: for each method, those of its splits by seed."""
    rows: dict[tuple[str, int], Row] = {}
    for run, result in results.items():
        row = rows.setdefault(run[:2], {"dataset": run.dataset, "shots": run.shots, "results": {}})
        row["results"].setdefault(run.method, {})[run.seed] = result
    return list(rows.values())


def pair(row: Row, method: str, quantity: str) -> tuple[list[float], list[float]]:
    """Return a quantity of a method and of ours, on the splits where the method did not fail."""
    theirs, ours = row["results"].get(method, {}), row["results"]["ours"]
    seeds = [seed for seed, result in theirs.items() if "error" not in result]
    return [theirs[seed][quantity] for seed in seeds], [ours[seed][quantity] for seed in seeds]


def tabulate(rows: Sequence[Row], methods: Sequence[str], versions: Mapping[str, str]) -> str:
    """Return the Markdown: accuracy row by row, means where a peer was measured, and every failure."""
    titles = {method: f"{NAMES[method]} {versions.get(method, '')}".strip() for method in methods}
    lines = [[row["dataset"], str(row["shots"]), *(_show(row, method) for method in methods)] for row in rows]
    text = format_table(["data set", "shots", *titles.values()], lines) + NOTE
    lines = [line for method in methods[1:] for line in _compare(rows, method, titles[method])]
    if lines:
        header = ["method", "rows", "failed splits", "accuracy", "log-loss", "calibration error"]
        header += ["CPU seconds", "wall seconds", "ahead in accuracy", "ahead in log-loss"]
        text += MEANS + "\n" + format_table(header, lines)
    failures = [
        [row["dataset"], str(row["shots"]), str(seed), titles[method], result["error"].replace("|", "/")]
        for row in rows
        for method, found in row["results"].items()
        for seed, result in found.items()
        if "error" in result
    ]
    if failures:
        text += f"\nFailed: {count(len(failures), 'fit')}.\n\n"
        text += format_table(["data set", "shots", "split", "method", "what it said last"], failures)
    return text


def _show(row: Row, method: str) -> str:
    """Return a method's accuracy in a row, "failed" where it has none, and "–" where it was left out."""
    if method not in row["results"]:
        return "–"
    return format_mean([100 * accuracy for accuracy in pair(row, method, "accuracy")[0]]) or "failed"


def _compare(rows: Sequence[Row], method: str, title: str) -> list[list[str]]:
    """Return a line for a peer, and one for ours on the same splits."""
    found = [result for row in rows for result in row["results"].get(method, {}).values()]
    failed = sum("error" in result for result in found)
    shared = [row for row in rows if pair(row, method, "accuracy")[0]]
    lines = [[title, str(len(shared)), str(failed)], ["ours, there", str(len(shared)), ""]]
    if not shared:
        return [[*lines[0], *[""] * 7]]
    means = {}  # of each quantity: (2, rows), theirs and ours
    for quantity in QUANTITIES:
        pairs = [[statistics.fmean(side) for side in pair(row, method, quantity)] for row in shared]
        means[quantity] = np.array(pairs).T
    for side, line in enumerate(lines):
        accuracy, log_loss, error, cpu, wall = (float(means[quantity][side].mean()) for quantity in QUANTITIES)
        line += [f"{100 * accuracy:.2f}", f"{log_loss:.3f}", f"{100 * error:.2f}", f"{cpu:.2f}", f"{wall:.2f}"]
    leads = means["accuracy"][1] - means["accuracy"][0], means["log_loss"][0] - means["log_loss"][1]
    lines[0] += ["", ""]
    lines[1] += [f"{int((lead > 0).sum())} of {len(shared)}" for lead in leads]
    return lines
