"""Coverage of the confidence intervals that fit reports, on thousands of new rows of synthetic tasks.

The constants of `protonet.metrics.IntervalRules` were chosen on the family "clusters"; the family "others" is held out.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.prior.synthetic import draw
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_mean
from protonet.fit.crossfit import crossfit, measure_held_out
from protonet.fit.search import EFFORTS
from protonet.fit.solver import solve_problem
from protonet.metrics import Metrics, measure, wilson_interval
from protonet.ui.command_line import check_name
from protonet.ui.text import format_table
from solution.pack import library_files

FAMILIES, KINDS = ("clusters", "others"), ("rows", "groups", "copies")
#: Rows that the model is judged on, about, and groups of them; the most rows of a group of "others".
FRESH, FRESH_GROUPS, MAX_GROUP_SIZE = 2000, 500, 12
NOTE = """
Mean over problems of 20 to 200 rows and 2 to 10 classes at effort {effort}; covered are those where the 95 % interval
that fit reports contains the model's result on some thousand fresh rows, of fresh groups, with the share's own 95 %
interval. Copies are near-equal rows, one to five of each, without a group column. "As if alone" is the accuracy's
interval if each row counted as one and each network were the final one. Biases are held-out less fresh, ± one
standard error. The intervals' settings were chosen on "clusters"; "others" are the tasks of the prior's study, and
are held out.
"""


class Run(NamedTuple):
    """One synthetic problem."""

    family: str
    kind: str
    seed: int
    effort: str


class Made(NamedTuple):
    """Training rows, and new rows of the same classes."""

    x: Tensor  #: (n, dim) float32.
    labels: Tensor  #: (n,) int64.
    groups: Tensor | None  #: (n,) int64, if somebody says so.
    fresh_x: Tensor  #: (m, dim) float32.
    fresh_labels: Tensor  #: (m,) int64.


def add_options(parser: StudyParser) -> None:
    """Add the families, kinds and numbers of problems."""
    parser.add_names("--families", FAMILIES)
    parser.add_names("--kinds", KINDS)
    parser.add_int("--problems", 100, "problems of each family and kind")
    parser.add("--effort", "fast", "of the fit", partial(check_name, known=EFFORTS))
    parser.add_int("--jobs", 1, "problems at the same time")
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Execute the runs, and compute the coverage."""
    runs = [
        Run(family, kind, seed, options.effort)
        for seed in range(options.problems)
        for family in options.families or FAMILIES
        for kind in options.kinds or KINDS
    ]
    code = hash_sources("analysis/solver/coverage.py", "analysis/prior/synthetic.py", *library_files())
    results = run_all(runs, measure_run, options.state, lambda _: code, unit="problem", jobs=options.jobs)
    return Report([[*run, result] for run, result in results.items()], tabulate(results, options.effort))


def measure_run(run: Run) -> dict[str, Any]:
    """Compute the reported metrics, and the true metrics on new rows."""
    made = make_problem(run)
    solution = solve_problem([(made.x, made.labels)], effort=run.effort, groups=made.groups)
    crossed = crossfit(solution)
    with torch.no_grad():
        fresh = measure(solution.network(made.fresh_x), made.fresh_labels)
    result: dict[str, Any] = {"rows": len(made.labels), "classes": int(made.labels.max()) + 1}
    result |= {"fresh": list_quantities(fresh), "held": None}
    if len(crossed.labels):
        held_out = measure_held_out(crossed)
        result["groups"] = crossed.sample.effective_groups
        result["held"] = list_quantities(held_out)
        result["intervals"] = [held_out.interval, held_out.log_loss_interval, held_out.calibration_interval]
        result["alone"] = wilson_interval(held_out.accuracy, float(crossed.weights.sum()))
    return result


def list_quantities(metrics: Metrics) -> list[float]:
    """List the metrics that have an interval."""
    return [metrics.accuracy, metrics.log_loss, metrics.calibration_error]


def make_problem(run: Run) -> Made:
    """Sample a problem."""
    rng = np.random.default_rng([FAMILIES.index(run.family), KINDS.index(run.kind), run.seed])
    n = _draw_size(rng, 20, 200)
    make = _make_clusters if run.family == "clusters" else _make_others
    x, y, groups, fresh_x, fresh_y = make(run.kind, n, rng)
    classes = np.unique(y)
    known = np.isin(fresh_y, classes)
    return Made(
        torch.tensor(x, dtype=torch.float32),
        torch.from_numpy(np.searchsorted(classes, y)),
        torch.from_numpy(groups) if run.kind == "groups" else None,
        torch.tensor(fresh_x[known], dtype=torch.float32),
        torch.from_numpy(np.searchsorted(classes, fresh_y[known])),
    )


def _draw_size(rng: np.random.Generator, low: float, high: float) -> int:
    """Sample an integer between two, log-uniformly."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def _make_clusters(kind: str, n: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sample one cluster per class; groups shift their rows, and hold one class or all."""
    classes, dim = int(rng.integers(2, 11)), _draw_size(rng, 2, 40)
    n = max(n, 2 * classes + 2)
    centres = rng.normal(size=(classes, dim)) * _draw_size(rng, 60, 500) / 100 / math.sqrt(2) / dim**0.25
    mixing = rng.normal(size=(dim, dim)) / math.sqrt(dim) if rng.random() < 0.5 else np.eye(dim)
    proportions = rng.dirichlet(np.full(classes, 5.0)) if rng.random() < 0.5 else np.full(classes, 1 / classes)
    heavy, crossed, apart = rng.random() < 0.3, rng.random() < 0.35, float(np.exp(rng.uniform(-1.2, 0.7)))
    uneven, per_group = rng.uniform(0, 1), n / _draw_size(rng, max(2 * classes, 5), max(2 * classes + 1, n / 1.5))

    def draw_noise(m: int) -> np.ndarray:
        return (rng.normal(size=(m, dim)) * (rng.standard_t(4, size=(m, 1)) if heavy else 1.0)) @ mixing

    def draw_groups(m: int) -> tuple[np.ndarray, ...]:
        sizes = 1 + rng.poisson(max(0.0, per_group - 1) * np.exp(uneven * rng.normal(size=m) - uneven**2 / 2))
        of_group, shifts = rng.choice(classes, size=m, p=proportions), apart * draw_noise(m)
        groups = np.repeat(np.arange(m), sizes)
        y = rng.choice(classes, size=len(groups), p=proportions) if crossed else of_group[groups]
        return centres[y] + shifts[groups] + draw_noise(len(y)), y, groups

    def draw_rows(m: int) -> tuple[np.ndarray, ...]:
        y = rng.choice(classes, size=m, p=proportions)
        return centres[y] + draw_noise(m), y, np.arange(m)

    if kind == "groups":
        return *draw_groups(round(n / per_group)), *draw_groups(FRESH_GROUPS)[:2]
    rows = draw_rows(n if kind == "rows" else max(2 * classes + 2, n // 3))
    if kind == "copies":
        rows = _copy(rows[0], rows[1], rng.integers(1, 6, size=len(rows[1])), 1e-3, rng)
    return *rows, *draw_rows(FRESH)[:2]


def _make_others(kind: str, n: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sample a task of the prior's study; rows of a group are noisy copies of one of its rows."""
    sizes = np.ones(n, int)
    if kind != "rows":
        sizes = np.minimum(rng.geometric(1 / rng.uniform(1.5, 6), size=n), MAX_GROUP_SIZE if kind == "groups" else 5)
        sizes = sizes[: max(12, int(np.searchsorted(sizes.cumsum(), n)))]
    _, x, y = draw(len(sizes) + FRESH, rng)
    several = np.bincount(y[: len(sizes)], minlength=y.max() + 1)[y] > 1  # a class that is there once is never judged
    if len(np.unique(y[: len(sizes)][several[: len(sizes)]])) < 2:
        return _make_others(kind, n, rng)
    chosen, later = np.flatnonzero(several[: len(sizes)]), len(sizes) + np.flatnonzero(several[len(sizes) :])
    near = {"rows": 0.0, "groups": float(rng.uniform(0.1, 1)), "copies": 1e-3}[kind]
    rows = _copy(x[chosen], y[chosen], sizes[chosen], near, rng)
    if kind != "groups":
        return *rows, x[later], y[later]
    return *rows, *_copy(x[later], y[later], rng.permutation(np.resize(sizes, len(later))), near, rng)[:2]


def _copy(
    x: np.ndarray, y: np.ndarray, times: np.ndarray, near: float, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Repeat rows by counts (n,), with noise of some standard deviations; also return the index of the original."""
    groups = np.repeat(np.arange(len(x)), times)
    return x[groups] + near * x.std(axis=0) * rng.normal(size=(len(groups), x.shape[1])), y[groups], groups


def tabulate(results: Mapping[Run, Mapping[str, Any]], effort: str) -> str:
    """Tabulate the coverage by family and kind, and over all of a family."""
    lines = []
    for family in dict.fromkeys(run.family for run in results):
        kinds = [*dict.fromkeys(run.kind for run in results if run.family == family), "all"]
        for kind in kinds:
            selected = [
                result
                for run, result in results.items()
                if run.family == family and kind in (run.kind, "all") and result["held"]
            ]
            lines.append([family, kind, str(len(selected)), *_summarise(selected)])
    quantities = [("right", "points"), ("log-loss", "nats"), ("calibration", "points")]
    header = ["family", "kind", "problems", "right as if alone, covered, %"]
    for name, unit in quantities:
        header += [f"{name} covered, %", f"bias, {unit}", f"interval's width, {unit}"]
    return format_table(header, lines) + NOTE.format(effort=effort)


def _summarise(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the cells of a line, for at least two results."""
    cells = [_format_covered([result["alone"][0] <= result["fresh"][0] <= result["alone"][1] for result in results])]
    for column, factor in enumerate((100.0, 1.0, 100.0)):
        fresh = [result["fresh"][column] for result in results]
        ends = [result["intervals"][column] for result in results]
        bias = [factor * (result["held"][column] - value) for result, value in zip(results, fresh, strict=True)]
        width = factor * statistics.fmean(high - low for low, high in ends)
        digits = 1 if factor > 1 else 3
        cells += [
            _format_covered([low <= value <= high for (low, high), value in zip(ends, fresh, strict=True)]),
            format_mean(bias, digits=digits, sign=True),
            f"{width:.{digits}f}",
        ]
    return cells


def _format_covered(covered: Sequence[bool]) -> str:
    """Format the fraction of intervals that contain the true value, with its own interval."""
    low, high = wilson_interval(statistics.fmean(covered), len(covered))
    return f"{100 * statistics.fmean(covered):.1f} [{100 * low:.1f}, {100 * high:.1f}]"
