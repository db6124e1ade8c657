"""Fits with and without redundant columns: accuracy on new rows, and the coverage of the held-out interval.

A column is redundant if others determine it: another unit, a power, a logarithm, a sine, a sum. Each synthetic problem
is fitted to the columns that determine its classes, and again with the redundant columns beside them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from analysis.shared.runner import StudyParser, StudyReport, hash_sources, run_all
from analysis.shared.tables import format_mean
from protonet.fit.cross_validation import cross_validate, measure_cross_validation
from protonet.fit.search import EFFORTS
from protonet.fit.solver import fit_solution
from protonet.metrics import wilson_interval
from protonet.ui.command_line import check_known_name
from protonet.ui.text import format_table
from solution.pack import library_files

NEW_ROWS = 20_000  #: New rows on which a network is evaluated.
MAX_NOISE = 0.15  #: The largest fraction of rows whose class is random.
TABLE_NOTE = """
Accuracies in percent on {new:,} new rows at effort {effort}, with {low:,} to {high:,} training rows; the classes of up
to {noise:.0f} % of the rows are random. Covered: problems where the accuracy on new rows lies in the 95 % interval that
fit reports, with that fraction's own 95 % interval; below and above: problems where it lies outside. ± one standard
error over problems.
"""


class SyntheticProblem(NamedTuple):
    """One synthetic problem; further seeds are further problems."""

    kind: str
    seed: int
    rows: tuple[int, int]  #: The limits of the number of training rows.
    effort: str


class ProblemColumns(NamedTuple):
    """The columns of a problem."""

    needed: list[np.ndarray]  #: (n,) each; they determine the classes.
    redundant: list[np.ndarray]  #: (n,) each; the needed ones determine them.
    score: np.ndarray  #: (n,), whose quantiles separate the classes.


def make_units(rng: np.random.Generator, n: int) -> ProblemColumns:
    """Make a temperature in two or three units; classes are stripes."""
    celsius = rng.normal(15, 10, n).round(2)
    units = [(1.8 * celsius + 32).round(2), (celsius + 273.15).round(1)]
    return ProblemColumns([celsius], units[: rng.integers(1, 3)], np.sin(celsius / rng.uniform(1, 4)))


def make_powers(rng: np.random.Generator, n: int) -> ProblemColumns:
    """Make a positive number, its square and its logarithm; classes are stripes or a threshold."""
    x = np.exp(rng.normal(0, 0.6, n))
    score = np.sin(rng.uniform(2, 8) * np.log(x)) if rng.random() < 0.5 else x
    return ProblemColumns([x], [x**2, np.log(x)][: rng.integers(1, 3)], score)


def make_hours(rng: np.random.Generator, n: int) -> ProblemColumns:
    """Make a time of day, whole or not, with its sine and cosine; classes are periods of the day."""
    hour = rng.uniform(0, 24, n)
    hour = hour if rng.random() < 0.5 else np.floor(hour)
    angle = 2 * np.pi * hour / 24
    score = np.sin(angle * rng.integers(1, 4) + rng.uniform(0, 6))
    return ProblemColumns([hour], [np.sin(angle), np.cos(angle)], score)


def make_combinations(rng: np.random.Generator, n: int) -> ProblemColumns:
    """Make three numbers and up to three of their linear combinations; classes are stripes, or interactions."""
    x = rng.normal(size=(n, 3))
    combinations = x @ rng.normal(size=(3, rng.integers(1, 4)))
    score = np.sin(rng.uniform(0.5, 2) * x[:, 0]) + (rng.random() < 0.5) * x[:, 1] * x[:, 2]
    return ProblemColumns(list(x.T), list(combinations.round(3).T), score)


def make_counts(rng: np.random.Generator, n: int) -> ProblemColumns:
    """Make two counts, their total and a rate; classes depend on the difference, or on the remainder of the total."""
    counts = rng.poisson(rng.uniform(2, 20), (n, 2)).astype(float)
    total = counts.sum(axis=1)
    remainder = total % rng.integers(2, 5)
    score = remainder if rng.random() < 0.3 else counts[:, 0] - counts[:, 1] + rng.normal(0, 0.5, n)
    return ProblemColumns(list(counts.T), [total, counts[:, 0] / (total + 1)], score)


def make_curves(rng: np.random.Generator, n: int) -> ProblemColumns:
    """Make a number with its noisy square and its absolute value, beside noise; classes are stripes."""
    x = rng.uniform(-3, 3, n)
    redundant = [x**2 + rng.normal(0, 0.01, n), np.abs(x)]
    return ProblemColumns([x, rng.normal(size=n)], redundant, np.sin(rng.uniform(1, 4) * x))


PROBLEM_KINDS: Mapping[str, Callable[[np.random.Generator, int], ProblemColumns]] = {
    make.__name__.removeprefix("make_"): make
    for make in (make_units, make_powers, make_hours, make_combinations, make_counts, make_curves)
}


def add_options(parser: StudyParser) -> None:
    """Add the kinds and the number of problems, their rows, and the effort."""
    parser.add_names_option("--kinds", tuple(PROBLEM_KINDS))
    parser.add_int_option("--problems", 34, "problems of each kind")
    parser.add_int_option("--first", 1000, "the seed of the first problem", low=0)
    parser.add_int_option("--min-rows", 500, "the fewest training rows", low=100)
    parser.add_int_option("--max-rows", 6000, "the most training rows", low=100)
    parser.add_option("--effort", "fast", "of the fits", partial(check_known_name, known_names=EFFORTS))
    parser.add_int_option("--jobs", 1, "problems at the same time")
    parser.add_state_options()


def run(options: argparse.Namespace) -> StudyReport:
    """Fit to all problems, and tabulate."""
    limits = (options.min_rows, max(options.min_rows, options.max_rows))
    seeds = range(options.first, options.first + options.problems)
    kinds = options.kinds or PROBLEM_KINDS
    runs = [SyntheticProblem(kind, seed, limits, options.effort) for seed in seeds for kind in kinds]
    code = hash_sources("analysis/solver/redundant.py", *library_files())
    results = run_all(runs, measure_run, options.state, lambda _: code, unit="problem", jobs=options.jobs)
    return StudyReport([[*run, result] for run, result in results.items()], tabulate(results))


def measure_run(run: SyntheticProblem) -> dict[str, Any]:
    """Fit with and without the redundant columns; compute the accuracies, and the interval with them."""
    needed, features, labels, rows = make_problem(run)
    solution = fit_solution([(features[:rows], labels[:rows])], effort=run.effort)
    held_out = measure_cross_validation(cross_validate(solution))
    alone = fit_solution([(needed[:rows], labels[:rows])], effort=run.effort).network

    @torch.no_grad()
    def compute_accuracy(network: torch.nn.Module, x: torch.Tensor) -> float:
        return float((network(x[rows:]).argmax(dim=1) == labels[rows:]).double().mean())

    return {
        "rows": rows,
        "accuracy": compute_accuracy(solution.network, features),
        "accuracy_without": compute_accuracy(alone, needed),
        "held_out": held_out.accuracy,
        "interval": held_out.interval,
    }


def make_problem(run: SyntheticProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Sample a problem: the needed columns, all columns, labels, and the number of training rows, which come first."""
    rng = np.random.default_rng([list(PROBLEM_KINDS).index(run.kind), run.seed])
    rows = round(float(np.exp(rng.uniform(*np.log(run.rows)))))
    columns = PROBLEM_KINDS[run.kind](rng, rows + NEW_ROWS)
    classes = int(rng.integers(2, 4))
    labels = np.digitize(columns.score, np.quantile(columns.score, np.arange(1, classes) / classes))
    random = rng.random(len(labels)) < rng.uniform(0, MAX_NOISE)
    labels = np.where(random, rng.integers(0, classes, len(labels)), labels)
    labels = np.unique(labels, return_inverse=True)[1]
    needed = torch.tensor(np.stack(columns.needed, axis=1), dtype=torch.float32)
    redundant = torch.tensor(np.stack(columns.redundant, axis=1), dtype=torch.float32)
    return needed, torch.cat([needed, redundant], dim=1), torch.from_numpy(labels), rows


def tabulate(results: Mapping[SyntheticProblem, Mapping[str, Any]]) -> str:
    """Tabulate accuracies and coverage by kind, and over all kinds."""
    lines = []
    for kind in (*dict.fromkeys(run.kind for run in results), "all"):
        chosen = [result for run, result in results.items() if kind in (run.kind, "all")]
        new = [100 * result["accuracy"] for result in chosen]
        changes = [100 * (result["accuracy"] - result["accuracy_without"]) for result in chosen]
        bias = [100 * (result["held_out"] - result["accuracy"]) for result in chosen]
        below = sum(result["accuracy"] < result["interval"][0] for result in chosen)
        above = sum(result["accuracy"] > result["interval"][1] for result in chosen)
        covered = 1 - (below + above) / len(chosen)
        low, high = (100 * end for end in wilson_interval(covered, len(chosen)))
        means = [f"{statistics.fmean(new):.1f}", format_mean(changes, sign=True), f"{min(changes):+.2f}"]
        line = [kind, str(len(chosen)), *means, format_mean(bias, sign=True)]
        lines.append([*line, f"{100 * covered:.1f} [{low:.1f}, {high:.1f}]", f"{below}, {above}"])
    header = ["redundant columns", "problems", "accuracy with them", "change by them, mean", "worst"]
    run = next(iter(results))
    note = TABLE_NOTE.format(new=NEW_ROWS, effort=run.effort, low=run.rows[0], high=run.rows[1], noise=100 * MAX_NOISE)
    return format_table([*header, "held out less new", "covered, %", "below, above"], lines) + note
