"""A learning curve: how often the model is right with fewer rows, and what more rows are expected to give."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.fit.crossfit import Crossfit, make_folds, predict_held_out
from protonet.fit.networks import fit_choice
from protonet.fit.search import Progress, ignore
from protonet.fit.solver import Solution, untouched_globals
from protonet.metrics import Sample

#: How often the rows are halved at the most, and the fewest rows per class, on average, that are fitted to.
HALVINGS, FEWEST = 3, 2.0
#: How often groups are drawn again for the interval of what is expected.
DRAWS = 500


class Curve(NamedTuple):
    """Sizes, ascending, and of each which held-out rows are right."""

    per_class: list[float]  #: Rows per class that were fitted to, the mean over classes.
    right: Tensor  #: (sizes, judged) bool.


class Outlook(NamedTuple):
    """Expected accuracy with more rows of the same kind."""

    accuracy: float  #: A share of 1.
    #: 95 %, from the sampling of held-out rows; the fit of the power law is not included. It contains the interval
    #: of a fraction of as many rows: without an error, resampling alone would give a point.
    interval: tuple[float, float]


def draw_curve(
    solution: Solution, crossed: Crossfit, *, deadline: float = math.inf, progress: Progress = ignore
) -> Curve:
    """Fit what was chosen again to a half, a quarter and an eighth of each fold's rows, and judge it on the fold.

    Args:
        solution: As `protonet.fit.crossfit.crossfit` had it.
        crossed: What that made of it; at least one row was held out.
        deadline: ``time.monotonic()`` after which nothing more is fitted. A size without all of its folds is left out.
        progress: Called with the size that begins and the fraction of finished fits.

    Returns:
        The curve, whose last size is that of the crossfit. At each size, the views are those selected on all rows.
    """
    problem, folds = solution.problem, make_folds(solution.problem)
    labels, classes = problem.rows.labels, problem.rows.num_classes
    is_class_name = problem.rows.is_class_name
    is_class_name = torch.zeros_like(labels, dtype=torch.bool) if is_class_name is None else is_class_name
    full_size = sum(len(fold.train) for fold in folds) / len(folds) / classes
    correct = {full_size: predict_held_out(crossed).argmax(dim=1) == crossed.labels}
    fractions = [
        fraction for fraction in (0.5**halving for halving in range(1, HALVINGS + 1)) if fraction * full_size >= FEWEST
    ]
    with untouched_globals():
        for step, fraction in enumerate(fractions):
            progress(f"with {fraction:.1%} of the rows", step / len(fractions))
            generator, rows, right = torch.Generator().manual_seed(problem.rows.seed), 0, []
            for fold in folds:
                if time.monotonic() >= deadline:
                    return Curve(sorted(correct), torch.stack([correct[size] for size in sorted(correct)]))
                samples = thin_rows(labels, fold.train[~is_class_name[fold.train]], fraction, generator)
                some = torch.cat([samples, is_class_name.nonzero().flatten()]).sort().values
                choice = solution.choose_without(fold.held_out)
                network = fit_choice(problem._replace(rows=problem.rows.select(some)), choice, deadline)
                with torch.no_grad():
                    logits = network(problem.features_as_they_came(fold.held_out))
                right.append(logits.argmax(dim=1) == labels[fold.held_out])
                rows += len(samples)
            correct[rows / len(folds) / classes] = torch.cat(right)
    return Curve(sorted(correct), torch.stack([correct[size] for size in sorted(correct)]))


def thin_rows(labels: Tensor, rows: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return a share of each class's rows, drawn at random, at least one.

    Args:
        labels: (n,) int64.
        rows: (m,) int64, the numbers of those to draw from.
        share: In (0, 1].
        generator: Draws them.

    Returns:
        (at most m,) int64, ascending.
    """
    order = rows[torch.randperm(len(rows), generator=generator)]
    order = order[labels[order].argsort(stable=True)]
    count = torch.bincount(labels[order])
    rank = torch.arange(len(order)) - (count.cumsum(dim=0) - count)[labels[order]]
    return order[rank < (share * count[labels[order]]).ceil()].sort().values


def expect_more(curve: Curve, sample: Sample, per_class: float) -> Outlook | None:
    """Compute the expected accuracy with more rows, if errors go on to fall as a power of their number.

    Args:
        curve: Of `draw_curve`.
        sample: The held-out rows.
        per_class: How many rows there will be per class, the mean over classes.

    Returns:
        The last size's error times a power of how many times its rows these are, fitted to the logarithms; None of
        fewer than three sizes.

    Source: Cortes, Jackel, Solla, Vapnik and Denker, "Learning curves: asymptotic values and rate of convergence"
        (1993). The interval: Efron, "Bootstrap methods: another look at the jackknife" (1979),
        and `protonet.metrics.Sample`.
    """
    if len(curve.right) < 3:
        return None
    generator = torch.Generator().manual_seed(0)
    groups = int(sample.groups.max()) + 1
    drawn = torch.randint(groups, (DRAWS, groups), generator=generator)
    times = torch.stack(
        [torch.ones(groups), *(torch.bincount(resample, minlength=groups) for resample in drawn)]
    ).double()
    times = times[:, sample.groups] * sample.weights  # (1 + draws, judged)
    wrong = times @ (~curve.right).double().T  # (1 + draws, sizes)
    totals = times.sum(dim=1, keepdim=True)
    errors = (wrong + 0.5) / (totals + 1)  # none is 0
    position = torch.tensor(curve.per_class, dtype=torch.float64).log()
    position = position - position.mean()
    slope = ((errors.log() @ position) / position.square().sum()).clamp_max(0)
    expected = 1 - wrong[:, -1] / totals[:, 0] * (per_class / curve.per_class[-1]) ** slope
    low, high = expected[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    lower, upper = sample.interval(curve.right[-1].double(), float(expected[0]))
    return Outlook(float(expected[0]), (min(low, lower), max(high, upper)))
