"""Methods on few-shot splits of real data: what each run gives, and a journal to continue from."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from analysis.classics import CLASSICS, Fit, Outcome, Predictor
from analysis.journal import append_journal, hash_sources, read_journal
from analysis.realdata import load_real, split_shots
from protonet.datasets import Split
from protonet.fit.candidates import Search
from protonet.fit.solver import solve
from protonet.views.mlp import Recipe
from solution.pack import library_files

#: The sources that decide the data sets and their splits.
DATA = ("analysis/realdata.py", *(f"protonet/datasets/{name}.py" for name in ("dataset", "digits", "glyphs")))
BINS = 15


def fit_ours(
    x: np.ndarray, y: np.ndarray, effort: str | Search = "default", metadata: dict[str, Any] | None = None
) -> Predictor:
    """Fit the prototype network."""
    network = solve([(torch.from_numpy(x).float(), torch.from_numpy(y))], None, metadata, effort=effort)

    def predict(rows: np.ndarray) -> Outcome:
        with torch.no_grad():
            logits = network(torch.from_numpy(rows).float())  # (n, num_classes)
        return Outcome(logits.argmax(dim=1).numpy(), logits.double().log_softmax(dim=1).numpy())

    return predict


#: Ours, with less effort and without its parts: results last as long as the library's sources do.
OURS: dict[str, Fit] = {
    "ours": fit_ours,
    "fast": partial(fit_ours, effort="fast"),
    "raw": partial(fit_ours, metadata={"param_limit": 0}),
    "no-selection": partial(fit_ours, effort=Search(folds=0)),
    "no-moves": partial(fit_ours, effort=Search(moves=False)),
    "no-episodes": partial(fit_ours, effort=Search(recipe=Recipe(episodic=0.0))),
    "no-cross-entropy": partial(fit_ours, effort=Search(recipe=Recipe(cross_entropy=0.0))),
}
METHODS: dict[str, Fit] = OURS | CLASSICS


class Run(NamedTuple):
    """One method on one split."""

    dataset: str
    shots: int
    seed: int
    method: str


#: accuracy, seconds and, where there are probabilities, log_loss and calibration_error of each run.
Results = dict[Run, dict[str, float]]


def list_runs(datasets: Sequence[str], shots: Sequence[int], n_splits: int, methods: Sequence[str]) -> Iterator[Run]:
    """Yield every run that its data set has rows for, those of one split one after another.

    A data set whose package is missing is left out, with one line on stderr.
    """
    for name in datasets:
        try:
            data = load_real(name)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        for n in shots:
            if split_shots(data, n, 0) is not None:  # the same for every seed
                yield from (Run(name, n, seed, method) for seed in range(n_splits) for method in methods)


def hash_code(method: str) -> str:
    """Return a hash of the code that decides a method's results."""
    classics = ("analysis/classics.py", "protonet/losses.py")
    return hash_sources(*DATA, *(library_files() if method in OURS else classics))


def measure(runs: Sequence[Run], journal: Path) -> Results:
    """Do every run that the journal does not have, with a progress bar on stderr.

    Args:
        runs: What to do; see `list_runs`.
        journal: The JSON-lines file; made if need be, appended to.

    Returns:
        The results of all runs.

    Raises:
        KeyboardInterrupt: Ctrl-C; what is finished is in the journal.
    """
    codes = {method: hash_code(method) for method in {run.method for run in runs}}
    wanted = {json.dumps([run, codes[run.method]]): run for run in runs}
    results = Results()
    for entry in read_journal(journal):
        key = json.dumps([entry.get("run"), entry.get("code")])
        if key in wanted and "result" in entry:
            results[wanted[key]] = entry["result"]
    missing = [run for run in runs if run not in results]
    split, drawn = None, None
    bar = tqdm(missing, initial=len(results), total=len(runs), unit="run", dynamic_ncols=True)
    try:
        with bar:
            for run in bar:
                bar.set_postfix_str(f"{run.dataset} {run.shots} {run.method}")
                if split is None or drawn != run[:3]:
                    split, drawn = split_shots(load_real(run.dataset), run.shots, run.seed), run[:3]
                assert split is not None, "list_runs leaves these out"
                results[run] = run_method(METHODS[run.method], split)
                append_journal(journal, {"run": run, "code": codes[run.method], "result": results[run]})
    except KeyboardInterrupt:
        kept = f"interrupted; {len(results)} of {len(runs)} runs are kept in {journal}"
        raise KeyboardInterrupt(f"{kept}. The same command continues.") from None
    return {run: results[run] for run in runs}  # in this order, whatever the journal has


def run_method(fit: Fit, split: Split) -> dict[str, Any]:
    """Return a method's accuracy on a split, its seconds to fit and, if it has probabilities, how good they are."""
    x, test_x = split.train_x.double().numpy(), split.test_x.double().numpy()
    truth = split.test_y.numpy()
    started = time.perf_counter()
    predictor = fit(x, split.train_y.numpy())
    seconds = time.perf_counter() - started
    predicted, log_probabilities = predictor(test_x)
    result = {"accuracy": float((predicted == truth).mean()), "seconds": round(seconds, 4)}
    if log_probabilities is not None:
        result["log_loss"] = -float(log_probabilities[np.arange(len(truth)), truth].mean())
        result["calibration_error"] = calibration_error(log_probabilities, truth)
    return result


def calibration_error(log_probabilities: np.ndarray, truth: np.ndarray, bins: int = BINS) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy over bins.

    Args:
        log_probabilities: (n, num_classes).
        truth: Labels (n,), int64.
        bins: Bins of confidence, of equal width.

    Returns:
        The error, in [0, 1].

    Source: Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks" (2017), eq. 3.
    """
    confidence = np.exp(log_probabilities.max(axis=1))  # (n,)
    right = log_probabilities.argmax(axis=1) == truth  # (n,)
    which = np.clip(np.ceil(confidence * bins) - 1, 0, bins - 1).astype(int)  # (n,): right-closed bins
    gaps = np.bincount(which, right - confidence, bins)  # (bins,)
    return float(np.abs(gaps).sum() / len(truth))
