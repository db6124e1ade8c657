"""Diagnostics by held-out rows: importance of columns, explanations of rows, and the learning curve."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from protonet._io import JsonDict
from protonet.fit.cross_validation import (
    CrossValidation,
    fit_fold_model,
    make_folds,
    measure_cross_validation,
    predict_held_out,
)
from protonet.fit.search import FitProgress, ignore_progress
from protonet.fit.solver import Solution, preserve_torch_state
from protonet.metrics import EvaluationSample
from protonet.network import PrototypeNetwork

#: Maximum number of shuffles of a column, and maximum number of predictions for all columns together. If predictions
#: would be too many, there are fewer shuffles. If one shuffle is still too much, a sample of the rows is used.
MAX_SHUFFLES, MAX_SHUFFLED_PREDICTIONS = 10, 500_000
#: Minimum number of rows for permutation importance.
MIN_IMPORTANCE_ROWS = 100
#: Number of nearest rows in an explanation, and number of held-out rows whose cells replace those of the explained row.
N_EXPLANATION_NEIGHBOURS, MAX_BACKGROUND_ROWS = 3, 50
#: Maximum number of rows that are embedded at once.
EMBEDDING_BATCH_SIZE = 1024


class PermutationImportance(NamedTuple):
    """Permutation importance of one column: how log-loss and accuracy change if its cells are shuffled."""

    log_loss_rise: float  #: Increase of the mean log-loss, in nats per row.
    log_loss_interval: tuple[float, float]  #: 95 % interval of the increase.
    accuracy_fall: float  #: Decrease of the accuracy, as a fraction: 0.05 is 5 points.
    accuracy_interval: tuple[float, float]  #: 95 % interval of the decrease.


def rank_columns_by_importance(
    cv: CrossValidation,
    names: Sequence[str],
    sizes: Sequence[int],
    generator: torch.Generator,
    progress: FitProgress = ignore_progress,
    max_predictions: int | None = None,
) -> JsonDict:
    """Compute the permutation importance of each column on the held-out rows, as a JSON-compatible dict.

    Args:
        cv: The cross-validation with the held-out rows.
        names: The name of each column.
        sizes: The number of features of each column.
        generator: Generator of the sample of rows and of the shuffles.
        progress: Called with the current column and the finished fraction.
        max_predictions: Approximate number of predictions to compute; by default `MAX_SHUFFLED_PREDICTIONS`.

    Returns:
        A dict with "columns", the most important first: name, index and the fields of `PermutationImportance`. "rows"
        is the number of rows used, and "total_rows" the number of held-out rows. "accuracy" and "log_loss" are those
        without shuffling. "shuffles" is the number of shuffles of a column.

    Raises:
        FloatingPointError: The embedding of a row, original or shuffled, overflows.
    """
    total_rows = round(float(cv.weights.sum()))  # including merged duplicates
    max_predictions = MAX_SHUFFLED_PREDICTIONS if max_predictions is None else max_predictions
    rows = min(len(cv.labels), max(MIN_IMPORTANCE_ROWS, max_predictions // len(sizes)))
    drawn = torch.randperm(len(cv.labels), generator=generator)[:rows].sort().values
    sampled = {name: getattr(cv, name)[drawn] for name in ("features", "labels", "weights", "fold_index", "groups")}
    cv, shuffles = replace(cv, **sampled), min(MAX_SHUFFLES, max(1, max_predictions // (len(sizes) * rows)))
    orders = torch.stack([torch.randperm(len(cv.labels), generator=generator) for _ in range(shuffles)])
    importances = measure_permutation_importance(cv, sizes, orders, progress)
    if not all(math.isfinite(importance.log_loss_rise) for importance in importances):
        raise FloatingPointError("the embedding of a row, original or shuffled, overflows")
    metrics = measure_cross_validation(cv)
    columns: list[JsonDict] = [
        {"name": name, "index": index, **importance._asdict()}
        for index, (name, importance) in enumerate(zip(names, importances, strict=True))
    ]
    return {
        "rows": round(float(cv.weights.sum())),
        "total_rows": total_rows,
        "accuracy": metrics.accuracy,
        "log_loss": metrics.log_loss,
        "shuffles": shuffles,
        "columns": sorted(columns, key=lambda column: -column["log_loss_rise"]),
    }


def compute_row_losses_and_errors(cv: CrossValidation) -> Tensor:
    """Compute the log-loss and the error of each held-out row: (2, rows) float64.

    The first line has the log-losses in nats, the second a 1 for each misclassified row and a 0 for the others.
    """
    logits = predict_held_out(cv).double()
    losses = -logits.log_softmax(dim=1).gather(1, cv.labels[:, None])[:, 0]
    return torch.stack([losses, (logits.argmax(dim=1) != cv.labels).double()])


def measure_permutation_importance(
    cv: CrossValidation, sizes: Sequence[int], permutations: Tensor, progress: FitProgress = ignore_progress
) -> list[PermutationImportance]:
    """Measure for each column how log-loss and accuracy change if its values are shuffled among the held-out rows.

    ``sizes`` has the number of features of each column; the features of a column are shuffled together. Each line of
    ``permutations`` (shuffles, rows) is a permutation of the rows. Returns one `PermutationImportance` for each column:
    the means over the shuffles, with 95 % intervals for the sampling of groups of rows.

    The intervals depend on the influence of each row, which has two parts: the loss from the value that the row
    receives, and the loss that its own value causes in other rows. (With the first part alone, 95 % intervals of 10
    shuffles covered the true value in 85 to 87 % of simulated tables.)

    Source: Breiman, "Random forests" (2001), sec. 10; Fisher, Rudin and Dominici, "All models are wrong, but many are
        useful" (2019), sec. 3.
    """
    before, times, sample = compute_row_losses_and_errors(cv), len(permutations), cv.evaluation_sample
    relative_weights = cv.weights / cv.weights.mean()
    repeated = replace(cv, labels=cv.labels.repeat(times), fold_index=cv.fold_index.repeat(times))
    importances = []
    for column, features in enumerate(torch.arange(sum(sizes)).split(list(sizes))):
        progress(f"column {column + 1} of {len(sizes)}", column / len(sizes))
        x = cv.features.repeat(times, 1)
        x[:, features] = cv.features[:, features][permutations.flatten()]
        after = compute_row_losses_and_errors(replace(repeated, features=x)).unflatten(1, permutations.shape)
        costs = relative_weights * (after - before[:, None])  # (2, shuffles, rows)
        mean = costs.mean(dim=(1, 2))
        given = torch.zeros_like(before).index_add_(1, permutations.flatten(), costs.flatten(1)) / times
        influence = costs.mean(dim=1) - relative_weights * mean[:, None] + given - mean[:, None]
        half_widths = [sample.mean_half_width(values / relative_weights) for values in influence]
        half = torch.tensor(half_widths, dtype=torch.float64)
        (rise, fall), ends = mean.tolist(), torch.stack([mean - half, mean + half], dim=1).tolist()
        importances.append(PermutationImportance(rise, (ends[0][0], ends[0][1]), fall, (ends[1][0], ends[1][1])))
    return importances


@torch.no_grad()
def compute_column_contributions(
    network: PrototypeNetwork, row: Tensor, label: int, replacement_rows: Tensor, weights: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Compute how much each column contributes to the log-probability of a class: (columns,) float64, in nats.

    The contribution of a column is a difference: the log-probability of class ``label`` for the row (dim,), minus its
    mean if the row's value in this column is replaced by the values of the rows ``replacement_rows`` (m, dim). The mean
    is weighted by ``weights`` (m,). ``sizes`` has the number of features of each column.

    Source: Robnik-Sikonja and Kononenko, "Explaining classifications for individual instances" (2008), sec. 3.
    """

    def score(x: Tensor) -> Tensor:
        logits: Tensor = network(x)
        return logits.double().log_softmax(dim=1)[:, label]

    relative_weights, original = weights / weights.sum(), score(row[None])[0]
    contributions = []
    for features in torch.arange(sum(sizes)).split(list(sizes)):
        x = row.repeat(len(replacement_rows), 1)
        x[:, features] = replacement_rows[:, features].to(x)
        contributions.append(original - (relative_weights * score(x)).sum())
    return torch.stack(contributions)


class RowExplanation(NamedTuple):
    """Explanation of a row's class by similar held-out rows and by the contribution of each column."""

    neighbors: list[tuple[int, float]]
    """The nearest held-out rows, the nearest first: the index of each, and the cosine of its embedding to the row's."""
    contributions: Tensor  #: (columns,) float64, in nats: the result of `compute_column_contributions`.
    n_replacement_rows: int  #: Number of held-out rows whose values replaced the values of the explained row.


@torch.inference_mode()
def explain_rows(
    cv: CrossValidation,
    x: Tensor,
    labels: Sequence[int],
    sizes: Sequence[int],
    generator: torch.Generator,
    progress: FitProgress = ignore_progress,
) -> list[RowExplanation]:
    """Explain why the rows of x (n, dim) get the classes ``labels`` (n,); return one `RowExplanation` for each row.

    The held-out rows of the cross-validation are the similar rows, and the source of replaced values. ``sizes`` has the
    number of features of each column.
    """
    sample = torch.randperm(len(cv.labels), generator=generator)[:MAX_BACKGROUND_ROWS]
    others, weights = cv.features[sample], cv.weights[sample]
    cosines = embed_rows(cv.network, x) @ embed_rows(cv.network, cv.features).T
    nearest = cosines.topk(min(N_EXPLANATION_NEIGHBOURS, len(cv.labels)), dim=1)
    explanations = []
    for index, (row, label) in enumerate(zip(x, labels, strict=True)):
        progress(f"row {index + 1} of {len(x)}", index / len(x))
        neighbors = zip(nearest.indices[index].tolist(), nearest.values[index].tolist(), strict=True)
        contributions = compute_column_contributions(cv.network, row, label, others, weights, sizes)
        explanations.append(RowExplanation(list(neighbors), contributions, len(sample)))
    return explanations


@torch.no_grad()
def embed_rows(network: PrototypeNetwork, x: Tensor) -> Tensor:
    """Compute the embeddings (n, embedding_dim) of the rows of x (n, dim), in batches to limit the memory."""
    return torch.cat([network.embed(rows) for rows in x.split(EMBEDDING_BATCH_SIZE)])


#: Maximum number of times that the training set is halved, and minimum mean number of rows per class after it.
MAX_TRAINING_SET_HALVINGS, MIN_CURVE_ROWS_PER_CLASS = 3, 2.0
#: Number of bootstrap samples of the groups for the interval of the expected accuracy.
N_BOOTSTRAP_SAMPLES = 500


class LearningCurve(NamedTuple):
    """Whether each held-out row is classified correctly by models that are trained on fewer and on more rows."""

    rows_per_class: list[float]  #: The sizes of the training sets, ascending, as mean numbers of rows per class.
    is_correct: Tensor  #: (sizes, held_out) bool: whether the model of each size classifies each row correctly.

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
    labels, classes = training_set.rows.labels, training_set.rows.num_classes
    is_class_name = training_set.rows.is_class_name
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
    if len(curve.is_correct) < 3:
        return None
    generator = torch.Generator().manual_seed(0)
    groups = int(sample.groups.max()) + 1
    resamples = torch.randint(groups, (N_BOOTSTRAP_SAMPLES, groups), generator=generator)
    drawn = [torch.bincount(resample, minlength=groups) for resample in resamples]
    times = torch.stack([torch.ones(groups), *drawn]).double()
    times = times[:, sample.groups] * sample.weights  # (1 + resamples, held_out)
    wrong = times @ (~curve.is_correct).double().T  # (1 + resamples, sizes)
    totals = times.sum(dim=1, keepdim=True)
    errors = (wrong + 0.5) / (totals + 1)  # positive, for the logarithm
    position = torch.tensor(curve.rows_per_class, dtype=torch.float64).log()
    position = position - position.mean()
    slope = ((errors.log() @ position) / position.square().sum()).clamp_max(0)
    expected = 1 - wrong[:, -1] / totals[:, 0] * (rows_per_class / curve.rows_per_class[-1]) ** slope
    low, high = expected[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    lower, upper = sample.accuracy_interval(curve.is_correct[-1].double(), float(expected[0]))
    return ExpectedAccuracy(float(expected[0]), (min(low, lower), max(high, upper)))
