"""The solver, baselines and the Bayes rule on new samples of the contest's data, and the gap to the Bayes rule.

The samples have seeds of the synthetic families, never the contest's.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.contest.bayes import predict_bayes
from analysis.shared.baselines import BASELINES, pool_labelled
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import StudyParser, StudyReport, parse_integers
from analysis.shared.tables import format_mean, mean_and_error, subtract_pairs
from protonet import solve
from protonet._text import plural
from protonet.datasets import FAMILIES, Split, sample_family
from protonet.errors import install_command, raise_input_error
from protonet.ui.text import format_table
from solution.pack import library_files

OURS, BAYES = "ours", "bayes"
#: Methods beside the solver, in the order of the table: names of baselines, None for the Bayes rule.
METHODS = {
    "nearest_mean": "nearest-mean",
    "cosine": "cosine",
    "mlp": "statement-mlp",
    "lda": "lda-closed-form",
    "logistic": "logistic-by-accuracy",
    BAYES: None,
}
COMPARED_METHODS = ("cosine", "lda", "logistic")  #: The regret is the difference to the best of these methods.
TABLE_NOTE = """
Test accuracy in percent, mean over {draws} ± one standard error. In brackets: ours minus it, paired by
draw. The gap is the Bayes rule minus ours, the regret the best of cosine, LDA and logistic regression minus
ours.
"""


class MethodRun(NamedTuple):
    """A method on a draw."""

    family: str
    n_train: int
    n_val: int
    seed: int
    num_classes: int
    dim: int
    method: str
    limit: int | None  #: The parameter limit; None for methods other than the solver.


def add_options(parser: StudyParser) -> None:
    """Add the options: the families, shots, methods and draws."""
    parser.add_int_option("--draws", 5, "number of draws")
    parser.add_names_option("--family", FAMILIES, "isotropic")
    parser.add_option("--shots", "16+4", "train+val samples per class, with commas", _parse_shots)
    parser.add_option("--limits", "500000", "parameter limits, with commas", functools.partial(parse_integers, low=0))
    parser.add_names_option("--methods", METHODS)
    parser.add_int_option("--first-seed", 0, "the first draw's seed", low=0)
    parser.add_int_option("--classes", 128, "number of classes", low=2)
    parser.add_int_option("--dim", 384, "features", low=2)
    parser.add_state_options()


def run(options: argparse.Namespace) -> StudyReport:
    """Evaluate every method on every draw; logistic regression on isotropic data only if it is named."""
    needed = options.methods or METHODS
    if {"lda", "logistic"} & set(needed) and find_spec("sklearn") is None:
        remedy = f"Run {install_command('analysis')}, or leave out lda and logistic."
        raise_input_error("--methods", "have scikit-learn for lda and logistic", "none installed", remedy)
    runs = []
    seeds = range(options.first_seed, options.first_seed + options.draws)
    for family in options.family:
        methods = options.methods or [name for name in METHODS if name != "logistic" or family != "isotropic"]
        pairs: list[tuple[str, int | None]] = [(name, None) for name in methods]
        pairs += [(OURS, limit) for limit in options.limits]
        for n_train, n_val in options.shots:
            for seed in seeds:
                draw = (family, n_train, n_val, seed, options.classes, options.dim)
                runs += [MethodRun(*draw, *pair) for pair in pairs]
    rows = summarise(run_all(runs, run_method, options.state, lambda run: hash_code(run.method), unit="result"))
    return StudyReport(rows, tabulate(rows))


def hash_code(method: str) -> str:
    """Hash the code that a method's results depend on."""
    others = ("analysis/shared/baselines.py", "analysis/contest/bayes.py", "protonet/losses.py")
    return hash_sources("protonet/datasets/synthetic.py", *(library_files() if method == OURS else others))


@functools.lru_cache(maxsize=1)  # the runs of a draw follow each other
def sample_dataset(family: str, n_train: int, n_val: int, seed: int, num_classes: int, dim: int) -> Split:
    """Sample a data set of a synthetic family."""
    return sample_family(family, seed=seed, n_train=n_train, n_val=n_val, num_classes=num_classes, dim=dim)


def run_method(run: MethodRun) -> dict[str, Any]:
    """Measure accuracy in [0, 1] (None if the method does not apply), parameters and seconds of a run."""
    split = sample_dataset(*run[:6])
    started, parameters = time.perf_counter(), None
    if run.method == OURS:
        metadata = {"num_classes": run.num_classes, "input_dim": run.dim, "param_limit": run.limit}
        network = solve([(split.train_x, split.train_y)], [(split.val_x, split.val_y)], metadata)
        parameters = network.count_parameters()
        with torch.no_grad():
            predicted: Tensor | None = network(split.test_x).argmax(dim=1)
    else:
        predicted = predict_test_rows(split, run.method)
    accuracy = None if predicted is None else float((predicted == split.test_y).double().mean())
    return {"accuracy": accuracy, "parameters": parameters, "seconds": round(time.perf_counter() - started, 3)}


def predict_test_rows(split: Split, method: str) -> Tensor | None:
    """Predict the classes (n_test_rows,) int64 of the test samples; None if the method does not apply.

    Methods are fitted to the training and validation samples, except the statement's MLP: training samples only.
    """
    name = METHODS[method]
    if name is None:
        return None if split.noise_covariance is None else predict_bayes(split)
    x, y = (split.train_x, split.train_y) if method == "mlp" else pool_labelled(split)
    return torch.from_numpy(BASELINES[name].fit(x.numpy(), y.numpy())(split.test_x.numpy()).predicted)


def summarise(results: Mapping[MethodRun, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group results by family, shots and limit: accuracies in percent, and parameters and seconds of the solver."""
    rows = []
    for key, limit in dict.fromkeys((run[:3], run.limit) for run in results if run.method == OURS):
        selected = {run: result for run, result in results.items() if run[:3] == key and run.limit in {None, limit}}
        percent: dict[str, list[float]] = {OURS: []}
        for run, result in selected.items():
            if result["accuracy"] is not None:
                percent.setdefault(run.method, []).append(100 * result["accuracy"])
        ours = [result for run, result in selected.items() if run.method == OURS]
        row = {"family": key[0], "shots": f"{key[1]}+{key[2]}", "limit": limit, "percent": percent}
        rows.append(row | {name: [result[name] for result in ours] for name in ("parameters", "seconds")})
    return rows


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results of `summarise` as a Markdown table with a note."""
    used = {method for row in rows for method in row["percent"]}
    shown = {method: BASELINES[name].title for method, name in METHODS.items() if name and method in used}
    header = ["family", "train+val", "limit", "ours", "Bayes", "gap to Bayes"]
    header += [*shown.values(), "regret", "parameters", "seconds"]
    lines = []
    for row in rows:
        percent = row["percent"]
        ours, bayes = percent[OURS], percent.get(BAYES, [])
        line = [row["family"], row["shots"], f"{row['limit']:,}", format_mean(ours), format_mean(bayes)]
        line.append(format_mean(subtract_pairs(bayes, ours), sign=True))
        for method in shown:
            other = percent.get(method, [])
            difference = format_mean(subtract_pairs(ours, other), sign=True)
            line.append(f"{mean_and_error(other)[0]:.2f} ({difference})" if other else "")
        compared = [percent[method] for method in COMPARED_METHODS if method in percent]
        best: list[float] = max(compared, key=lambda values: mean_and_error(values)[0], default=[])
        line.append(format_mean(subtract_pairs(best, ours), sign=True))
        line += [f"{mean_and_error(row[name])[0]:,.{digits}f}" for name, digits in (("parameters", 0), ("seconds", 1))]
        lines.append(line)
    return format_table(header, lines) + TABLE_NOTE.format(draws=plural(len(rows[0]["seconds"]), "draw"))


def _parse_shots(option: str, text: str) -> list[tuple[int, int]]:
    """Parse pairs of training and validation samples per class from a text such as 16+4,1+1, without repetition."""
    pairs = []
    for shots in text.split(","):
        parts = shots.split("+")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) < 1:
            raise_input_error(option, "be train+val samples per class", repr(shots), "Pass for instance 16+4,1+1.")
        pairs.append((int(parts[0]), int(parts[1])))
    return list(dict.fromkeys(pairs))
