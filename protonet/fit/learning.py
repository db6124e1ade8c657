"""Learning curve: accuracy with fewer rows, and its extrapolation to more rows."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.fit.cross_validation import CrossValidation, fit_fold_model, make_folds, predict_held_out
from protonet.fit.search import FitProgress, ignore_progress
from protonet.fit.solver import Solution, preserve_torch_state
from protonet.metrics import EvaluationSample

#: Maximum number of times that the training set is halved, and minimum mean number of rows per class after it.
MAX_TRAINING_SET_HALVINGS, MIN_CURVE_ROWS_PER_CLASS = 3, 2.0
#: Number of bootstrap samples of the groups for the interval of the expected accuracy.
N_BOOTSTRAP_SAMPLES = 500


class LearningCurve(NamedTuple):
    """Whether each held-out row is classified correctly by models that are trained on fewer and on more rows."""

    rows_per_class: list[float]  #: The sizes of the training sets, ascending, as mean numbers of rows per class.
    correct: Tensor  #: (sizes, held_out) bool: whether the model of each size classifies each held-out row correctly.

    @classmethod
    def from_correctness(cls, correct: dict[float, Tensor]) -> LearningCurve:
        """Build a curve from a dict: from training rows per class to the correctness (held_out,) bool of each row."""
        return cls(sorted(correct), torch.stack([correct[size] for size in sorted(correct)]))


class ExpectedAccuracy(NamedTuple):
    """Expected accuracy of a model that is fitted to more rows from the same distribution."""

    accuracy: float  #: In [0, 1].
    interval: tuple[float, float]
    """95 % interval for the sampling of held-out rows. It does not include the uncertainty of the power law. It is at
    least as wide as the binomial interval, since resampling rows without an error would give a single point."""


def measure_learning_curve(
    solution: Solution, cv: CrossValidation, *, deadline: float = math.inf, progress: FitProgress = ignore_progress
) -> LearningCurve:
    """Measure the held-out accuracy of models that are fitted to 1/8, 1/4, 1/2 and all of the training rows.

    The largest size is that of the cross-validation ``cv``, whose results are reused. The deadline is a value of
    ``time.monotonic()``. A size whose folds are not all finished by then is left out.
    """
    training_set, folds = solution.training_set, make_folds(solution.training_set)
    labels, classes, is_class_name = (
        training_set.rows.labels,
        training_set.rows.num_classes,
        training_set.rows.is_class_name,
    )
    is_class_name = torch.zeros_like(labels, dtype=torch.bool) if is_class_name is None else is_class_name
    full_size = sum(len(fold.train) for fold in folds) / len(folds) / classes
    correct = {full_size: predict_held_out(cv).argmax(dim=1) == cv.labels}
    halves = (0.5**halving for halving in range(1, MAX_TRAINING_SET_HALVINGS + 1))
    fractions = [half for half in halves if half * full_size >= MIN_CURVE_ROWS_PER_CLASS]
    with preserve_torch_state():
        for step, fraction in enumerate(fractions):
            progress(f"with {fraction:.1%} of the rows", step / len(fractions))
            generator, rows, fold_correct = torch.Generator().manual_seed(0), 0, []
            for fold in folds:
                if time.monotonic() >= deadline:
                    return LearningCurve.from_correctness(correct)
                samples = subsample_rows(labels, fold.train[~is_class_name[fold.train]], fraction, generator)
                some = torch.cat([samples, is_class_name.nonzero().flatten()]).sort().values
                network = fit_fold_model(solution, some, fold.held_out, deadline)
                with torch.no_grad():
                    logits = network(training_set.original_features(fold.held_out))
                fold_correct.append(logits.argmax(dim=1) == labels[fold.held_out])
                rows += len(samples)
            correct[rows / len(folds) / classes] = torch.cat(fold_correct)
    return LearningCurve.from_correctness(correct)


def subsample_rows(labels: Tensor, rows: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Sample a fraction in (0, 1] of the rows of each class, at least one row of each.

    ``labels`` (n,) are the classes of all rows, and ``rows`` (m,) the indices of the rows to sample from. Returns the
    ascending indices of the sampled rows.
    """
    order = rows[torch.randperm(len(rows), generator=generator)]
    order = order[labels[order].argsort(stable=True)]
    count = torch.bincount(labels[order])
    rank = torch.arange(len(order)) - (count.cumsum(dim=0) - count)[labels[order]]
    return order[rank < (fraction * count[labels[order]]).ceil()].sort().values


def extrapolate_accuracy(
    curve: LearningCurve, sample: EvaluationSample, rows_per_class: float
) -> ExpectedAccuracy | None:
    """Extrapolate a learning curve to ``rows_per_class`` training rows per class with a power law.

    The expected error rate is that of the largest measured size, times a power of the ratio of the numbers of rows. The
    exponent is fitted to the logarithms of the error rates. ``sample`` has the weights and groups of the held-out rows.
    Returns None if the curve has fewer than three sizes.

    Source: Cortes, Jackel, Solla, Vapnik and Denker, "Learning curves: asymptotic values and rate of convergence"
        (1993). The interval: Efron, "Bootstrap methods: another look at the jackknife" (1979), and
        `protonet.metrics.EvaluationSample`.
    """
    if len(curve.correct) < 3:
        return None
    generator = torch.Generator().manual_seed(0)
    groups = int(sample.groups.max()) + 1
    resamples = torch.randint(groups, (N_BOOTSTRAP_SAMPLES, groups), generator=generator)
    times = torch.stack(
        [torch.ones(groups), *(torch.bincount(resample, minlength=groups) for resample in resamples)]
    ).double()
    times = times[:, sample.groups] * sample.weights  # (1 + resamples, held_out)
    wrong = times @ (~curve.correct).double().T  # (1 + resamples, sizes)
    totals = times.sum(dim=1, keepdim=True)
    errors = (wrong + 0.5) / (totals + 1)  # positive, for the logarithm
    position = torch.tensor(curve.rows_per_class, dtype=torch.float64).log()
    position = position - position.mean()
    slope = ((errors.log() @ position) / position.square().sum()).clamp_max(0)
    expected = 1 - wrong[:, -1] / totals[:, 0] * (rows_per_class / curve.rows_per_class[-1]) ** slope
    low, high = expected[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    lower, upper = sample.accuracy_interval(curve.correct[-1].double(), float(expected[0]))
    return ExpectedAccuracy(float(expected[0]), (min(low, lower), max(high, upper)))
