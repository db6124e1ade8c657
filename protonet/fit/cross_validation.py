"""Cross-validation: the selection and the fit are repeated without each fold, and evaluated on that fold.

A *fold model* is a network that is fitted to all rows except one fold. Fold models estimate the accuracy of the network
of all rows, the scores of new rows of known classes, and the effect of samples that are added later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.fit.duplicates import group_duplicates, locate_equal_rows
from protonet.fit.networks import fit_selected_model, get_encoder
from protonet.fit.search import FitProgress, ignore_progress, split_training_rows
from protonet.fit.solver import Solution, preserve_torch_state
from protonet.fit.training_set import TrainingSet, to_input_units
from protonet.losses import class_means, multiply_by_weights
from protonet.metrics import EvaluationSample, Metrics, compute_metrics, refit_variance_factor, score_known_class
from protonet.network import PrototypeNetwork
from protonet.selection.folds import Fold
from protonet.views.config import raise_unless
from protonet.views.linear import shrink_covariance
from protonet.views.view import TrainingRows

#: With fewer rows per class, scores depend noticeably on the size of the training set.
MIN_STABLE_ROWS_PER_CLASS = 20
#: Number of cross-validations that are averaged in `repeat_cross_validation`; see docs/benchmarks/archive.md.
DEFAULT_N_REPEATS = 3
#: Names of the tensors of a cross-validation in a model file, and the fields of `CrossValidation` that hold them.
CROSS_VALIDATION_TENSORS = {"features": "features", "labels": "labels", "weights": "weights", "fold": "fold_index"}
CROSS_VALIDATION_TENSORS |= {"groups": "groups", "offset": "known_score_offset", "gain": "accuracy_gain"}


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossValidation:
    """The result of cross-validation: the network of all rows, the fold models, and the held-out rows.

    A *fold model* is a network that is fitted to all rows except one fold. The rows of all folds are the held-out rows.
    """

    network: PrototypeNetwork  #: The network that is fitted to all rows.
    fold_models: tuple[PrototypeNetwork, ...]
    """The fold models, one for each fold; empty if no class has two rows."""
    features: Tensor
    """(held_out, dim) features of the held-out rows, in input units. They are float32, or float64 if float32 would lose
    digits."""
    labels: Tensor  #: (held_out,) int64: class index of each held-out row.
    weights: Tensor
    """(held_out,) float64: number of input rows that each held-out row stands for, since equal rows are merged."""
    fold_index: Tensor  #: (held_out,) int64: index in ``fold_models`` of the model that was fitted without the row.
    groups: Tensor
    """(held_out,) int64: group id of each row, as in ``protonet.fit.solver.Solution.merged_groups``. Rows with the same
    id are near-duplicates or belong to one group of the input, and were held out together. Rows without a group have
    -1."""
    known_score_offset: Tensor
    """0-d float64: how much higher the network of all rows scores new rows of known classes than the fold models do, on
    average; see `protonet.metrics.calibrate_known_scores`."""
    accuracy_gain: Tensor
    """(2,) float64. First: estimated accuracy of the network of all rows minus the accuracy of the fold models. Second:
    standard error of this difference."""

    @property
    def evaluation_sample(self) -> EvaluationSample:
        """The weights and groups of the held-out rows, for confidence intervals of the network of all rows."""
        sample = EvaluationSample.with_defaults(len(self.labels), self.weights, self.groups)
        if len(self.fold_models) < 2:  # a single model is evaluated
            return sample
        factor = refit_variance_factor(sample.n_effective_groups, len(self.labels.unique()))
        gain, error = self.accuracy_gain.tolist()
        return sample._replace(variance_factor=factor, accuracy_gain=gain, accuracy_gain_error=error)


def cross_validate(
    solution: Solution, *, deadline: float = math.inf, progress: FitProgress = ignore_progress
) -> CrossValidation:
    """Cross-validate a solution: select views and fit a network without each fold.

    The folds differ from those of the selection. Single views are not evaluated again: for each fold, views are
    selected by their out-of-fold results on the other rows. The network of the solution is moved to the CPU and becomes
    part of the result. After the deadline, training takes no further step.

    Source: cross-fitting, Stone, "Cross-validatory choice and assessment of statistical predictions" (1974).
    """
    training_set, rows, labels = solution.training_set, solution.training_set.rows, solution.training_set.rows.labels
    folds = make_folds(training_set)
    models: list[PrototypeNetwork] = []
    with preserve_torch_state():
        for index, fold_rows in enumerate(folds):
            progress(f"fold {index + 1} of {len(folds)}", index / (len(folds) + 1))
            models.append(fit_fold_model(solution, *fold_rows, deadline))
        progress("pairs of folds", len(folds) / (len(folds) + 1))
        offset, gain = _estimate_offset_and_gain(solution, folds, models, deadline)
    held_out_rows = torch.cat([labels[:0], *(held_out for _, held_out in folds)])
    sizes = torch.tensor([len(held_out) for _, held_out in folds], dtype=torch.int64)
    groups = torch.full_like(held_out_rows, -1) if rows.groups is None else rows.groups[held_out_rows]
    return CrossValidation(
        network=solution.network.cpu(),
        fold_models=tuple(models),
        features=training_set.original_features(held_out_rows),
        labels=labels[held_out_rows],
        weights=rows.sample_counts[held_out_rows] / training_set.rows_per_sample,
        fold_index=torch.arange(len(folds)).repeat_interleave(sizes),
        groups=groups,
        known_score_offset=offset,
        accuracy_gain=gain,
    )


def cross_validation_tensors(cv: CrossValidation) -> dict[str, Tensor]:
    """Collect the held-out rows of a cross-validation as tensors by name, for a model file.

    The features are stored as "rows", scaled as in the buffers of the networks, since equal bytes compress well. If
    scaling would lose digits, they are stored as "features", in input units.
    """
    tensors = {name: getattr(cv, field) for name, field in CROSS_VALIDATION_TENSORS.items()}
    encoder = get_encoder(cv.network)
    rows = ((cv.features - encoder.origin) / encoder.scale).float()
    if torch.equal(to_input_units(rows, encoder.origin, encoder.scale), cv.features):
        del tensors["features"]
        tensors["rows"] = rows
    return tensors


def restore_cross_validation(
    network: PrototypeNetwork, fold_models: Sequence[PrototypeNetwork], tensors: Mapping[str, Tensor]
) -> CrossValidation:
    """Restore a cross-validation from the content of a model file: its networks and tensors.

    ``network`` is the network of all rows. The tensors, as
    `cross_validation_tensors` returns them, are not trusted: a ValueError is raised for one that is missing or invalid.
    """
    available, encoder = dict(tensors), get_encoder(network)
    if "rows" in available:
        rows = available["rows"]
        sound = rows.ndim == 2 and rows.shape[1] == encoder.input_dim and rows.dtype == torch.float32
        raise_unless(sound, "held-out rows of another shape or type")
        available["features"] = to_input_units(rows, encoder.origin, encoder.scale)
    raise_unless(CROSS_VALIDATION_TENSORS.keys() <= available.keys(), "no held-out rows")
    x, labels, weights, fold, groups, offset, gain = (available[name] for name in CROSS_VALIDATION_TENSORS)
    shapes = x.shape == (len(labels), encoder.input_dim) and offset.shape == () and gain.shape == (2,)
    shapes = shapes and labels.shape == weights.shape == fold.shape == groups.shape and labels.ndim == 1
    types = x.dtype in {torch.float32, torch.float64} and {labels.dtype, fold.dtype, groups.dtype} == {torch.int64}
    types = types and {weights.dtype, offset.dtype, gain.dtype} == {torch.float64}
    raise_unless(shapes and types, "held-out rows of another shape or type")
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (x, weights, offset, gain))
    raise_unless(finite and bool((weights > 0).all()), "held-out rows that are not finite, or have no weight")
    for values, high in ((labels, len(network.counts)), (fold, len(fold_models))):
        raise_unless(bool(((values >= 0) & (values < high)).all()), "held-out rows of no class or no fold")
    fields = {field: available[name] for name, field in CROSS_VALIDATION_TENSORS.items()}
    return CrossValidation(network=network, fold_models=tuple(fold_models), **fields)


def make_folds(training_set: TrainingSet, repeat: int = 0) -> list[Fold]:
    """Split a training set into folds for cross-validation, each with the indices of training and held-out rows.

    `cross_validate` uses the folds of ``repeat`` 0. Each other ``repeat`` gives another partition of the rows.
    """
    return split_training_rows(training_set.rows, 1 + repeat)


def fit_fold_model(solution: Solution, rows: Tensor, held_out: Tensor, deadline: float) -> PrototypeNetwork:
    """Fit a network to some rows of the training set of a solution, for an evaluation on held-out rows.

    ``rows`` (m,) are the indices of the rows to fit to. ``held_out`` (k,) are the indices of the held-out rows, and the
    selection of views does not use them. After the deadline, training takes no further step.
    """
    training_set = solution.training_set
    return fit_selected_model(
        replace(training_set, rows=training_set.rows.select(rows)), solution.select_without_rows(held_out), deadline
    )


def _estimate_offset_and_gain(
    solution: Solution, folds: list[Fold], models: list[PrototypeNetwork], deadline: float
) -> tuple[Tensor, Tensor]:
    """Estimate ``known_score_offset`` and ``accuracy_gain`` of `CrossValidation` from fits without a second fold.

    Scores and accuracy are approximately linear in the reciprocal of the number of rows, and are extrapolated to all
    rows.
    """
    training_set, labels = solution.training_set, solution.training_set.rows.labels
    few = len(labels) < MIN_STABLE_ROWS_PER_CLASS * len(labels.unique())
    offsets, gains, row_weights = ([torch.zeros(0, dtype=torch.float64)] for _ in range(3))
    pairs = len(folds) // 2 if len(folds) > 2 else 0  # one of an odd number has no partner
    for one in range(0, 2 * pairs, 1 if few else 2):
        fitted = folds[one].train[~torch.isin(folds[one].train, folds[one ^ 1].held_out)]
        network = fit_fold_model(solution, fitted, folds[one].held_out, deadline)
        if time.monotonic() >= deadline:
            break  # the network may not be complete
        rows = folds[one].held_out[network.has_samples[labels[folds[one].held_out]]]
        parts, x = (models[one], network), training_set.original_features(rows)
        logits = [part(x).detach() for part in parts]
        scored = zip(parts, logits, strict=True)
        more, fewer = (_score_known_class_at_reference(*pair, solution.network) for pair in scored)
        offsets.append(more - fewer)
        right = [(part.argmax(dim=1) == labels[rows]).double() for part in logits]
        gains.append(right[0] - right[1])
        row_weights.append(training_set.rows.sample_counts[rows].double())
    offset, gain, weights = torch.cat(offsets), torch.cat(gains), torch.cat(row_weights)
    if not len(gain):
        return offset.sum(), gain.new_zeros(2)
    weights /= weights.sum()
    mean = (weights * gain).sum()
    error = torch.linalg.vector_norm(weights * (gain - mean))
    factor = 1 - 2 / len(folds)  # of the reciprocals of the numbers of rows
    return factor * offset.mean() * few, factor * torch.stack([mean, error])


@torch.no_grad()
def predict_held_out(cv: CrossValidation) -> Tensor:
    """Compute the logits (held_out, num_classes) of the held-out rows.

    Each row is classified by the fold model that was fitted without this row.
    """
    logits = cv.network.sums.new_empty(len(cv.labels), len(cv.network.counts))
    for fold, network in enumerate(cv.fold_models):
        rows = cv.fold_index == fold
        logits[rows] = network(cv.features[rows])
    return logits


@torch.no_grad()
def score_known_class_of_held_out_rows(cv: CrossValidation) -> Tensor:
    """Compute the score (held_out,) float64 of each held-out row: how likely it belongs to a known class.

    The fold model that was fitted without the row embeds it. The score is that of
    `protonet.metrics.score_known_class`, with the temperature and the class offsets of the network of all rows.
    """
    scores = torch.zeros(len(cv.labels), dtype=torch.float64)
    for fold, network in enumerate(cv.fold_models):
        rows = cv.fold_index == fold
        scores[rows] = _score_known_class_at_reference(network, network(cv.features[rows]), cv.network)
    return scores


def _score_known_class_at_reference(network: PrototypeNetwork, logits: Tensor, reference: PrototypeNetwork) -> Tensor:
    """Compute known-class scores (n,) of logits (n, num_classes), at the temperature and offsets of ``reference``."""
    cosines = (logits - network.offsets) * network.temperature
    return score_known_class(network.mask_logits(cosines / reference.temperature + reference.offsets))


def measure_cross_validation(cv: CrossValidation) -> Metrics:
    """Compute the cross-validated accuracy, log-loss and other metrics: those of fold models on the held-out rows."""
    return compute_metrics(predict_held_out(cv), cv.labels, cv.evaluation_sample)


def repeat_cross_validation(
    solution: Solution,
    cv: CrossValidation,
    n_repeats: int = DEFAULT_N_REPEATS,
    *,
    deadline: float = math.inf,
    progress: FitProgress = ignore_progress,
) -> Tensor:
    """Average the class probabilities of held-out rows over repeated cross-validations.

    Returns the logarithms (held_out, num_classes) float64 of the mean probabilities. ``cv`` is the first of
    ``n_repeats`` cross-validations. If there is only one fold, since rows are many, nothing is repeated. A repeat that
    the deadline interrupts is discarded.

    Source: repeated cross-validation, Burman, "A comparative study of ordinary cross-validation, v-fold
        cross-validation and the repeated learning-testing methods" (1989).
    """
    training_set, held_out = solution.training_set, [rows for _, rows in make_folds(solution.training_set)]
    total, count = predict_held_out(cv).double().softmax(dim=1), 1
    with preserve_torch_state():
        for repeat in range(1, n_repeats if len(held_out) > 1 else 1):
            progress(f"cross-fit {repeat + 1} of {n_repeats}", (repeat - 1) / (n_repeats - 1))
            probabilities = torch.full((len(training_set.rows.labels), total.shape[1]), math.nan, dtype=torch.float64)
            for fold in make_folds(training_set, repeat):
                if time.monotonic() >= deadline:
                    return (total / count).log()
                network = fit_fold_model(solution, *fold, deadline)
                with torch.no_grad():
                    logits = network(training_set.original_features(fold.held_out))
                probabilities[fold.held_out] = logits.double().softmax(dim=1)
            probabilities = probabilities[torch.cat(held_out)]
            total += torch.where(probabilities.isnan(), total / count, probabilities)  # NaN: held out by no fold
            count += 1
    return (total / count).log()


def held_out_indices(training_set: TrainingSet) -> Tensor:
    """Compute for each input row (n,) its index int64 among the held-out rows of a `CrossValidation`.

    Input rows are in the order of the loaders. The index is -1 for a row that is never held out, or that is not in the
    sample if rows are many. Equal rows that were merged have the same index.
    """
    indices = torch.full_like(training_set.rows.labels, -1)
    held_out = [rows for _, rows in make_folds(training_set)]
    if held_out:
        indices[torch.cat(held_out)] = torch.arange(sum(map(len, held_out)))
    return torch.where(training_set.row_indices < 0, -1, indices[training_set.row_indices])


#: Name of the baseline of `score_class_frequencies`.
MOST_FREQUENT_CLASS = "most frequent class"


def score_class_frequencies(counts: Tensor, rows: int) -> Tensor:
    """Score rows by the class frequencies alone, as a baseline that always predicts the most frequent class.

    ``counts`` (num_classes,) are the numbers of samples of the classes, and ``rows`` is the number of rows to score.
    Returns the same scores for each row: (rows, num_classes) float64.
    """
    return counts.double().expand(rows, -1)


def predict_baselines(training_set: TrainingSet) -> dict[str, Tensor]:
    """Score the held-out rows by two baselines, each fitted to the rows of the other folds.

    Returns a dict from the names "raw cosine" and "LDA" to scores (held_out, num_classes); it is empty if no row is
    held out. The scores are not calibrated: only their order is meaningful.
    """
    rows, folds, scores = training_set.rows, make_folds(training_set), dict[str, Tensor]()
    for name, score in (("raw cosine", score_cosine_to_means), ("LDA", score_lda)) if folds else ():
        parts = [score(rows.select(fold.train), rows.features[fold.held_out]) for fold in folds]
        scores[name] = torch.cat(parts)
    return scores


def score_cosine_to_means(rows: TrainingRows, queries: Tensor) -> Tensor:
    """Compute the cosine of each query (m, dim) to each class mean: (m, num_classes) float64.

    The class means are those of the training rows, scaled to norm 1. Features are used as they are.
    """
    unit = F.normalize(rows.features.double(), dim=1)
    means, _ = class_means(unit, rows.labels, rows.num_classes, rows.class_balanced_weights)
    return F.normalize(queries.double(), dim=1) @ F.normalize(means, dim=1).T


def score_lda(rows: TrainingRows, queries: Tensor) -> Tensor:
    """Score queries (m, dim) by linear discriminant analysis with a shrunken covariance, fitted to training rows.

    Returns scores (m, num_classes) float64: log-posteriors up to a constant per query. The score of a class without
    training rows is minus infinity.

    Source: Fisher, "The use of multiple measurements in taxonomic problems" (1936); see `shrink_covariance`.
    """
    x, weights = rows.features.double(), rows.class_balanced_weights
    means, counts = class_means(x, rows.labels, rows.num_classes, weights)
    degrees = len(x) - int((counts > 0).sum())
    residuals = multiply_by_weights(x - means[rows.labels], None if weights is None else weights.sqrt())
    basis, variances, residual_variance = shrink_covariance(residuals, degrees)
    constant = float(residual_variance) == 0 and len(variances) > 0  # directions outside the basis have no variance
    off = 0.0 if constant else 1 / math.sqrt(float(residual_variance) or 1.0)

    def whiten(x: Tensor) -> Tensor:
        return off * x + ((x @ basis) * (variances.rsqrt() - off)) @ basis.T

    return counts.log() - torch.cdist(whiten(queries.double()), whiten(means)).square() / 2


def add_samples_to_folds(
    cv: CrossValidation, features: Tensor, labels: Tensor, num_classes: int, groups: Tensor | None = None
) -> None:
    """Add labelled samples to the prototypes of the network of all rows and of the fold models, in place.

    `predict_held_out` then shows the effect on the held-out rows. To keep this evaluation fair, a fold model gets no
    sample that is a duplicate or near-duplicate of one of its held-out rows, or is in the same group. ``groups`` (n,)
    are ids as in ``cv.groups``, -1 without a group. Raises the errors of `PrototypeNetwork.add_samples`.
    """
    known = len(cv.network.counts)
    cv.network.add_samples(features, labels, num_classes=num_classes)
    n_held_out, copies = len(cv.labels), _group_duplicates(cv, features)
    for fold, network in enumerate(cv.fold_models):
        held_out = cv.fold_index == fold
        unrelated = ~torch.isin(copies[n_held_out:], copies[:n_held_out][held_out])
        if groups is not None:
            unrelated &= (groups < 0) | ~torch.isin(groups, cv.groups[held_out])
        network.arrange_classes(torch.cat([torch.arange(known), torch.full((num_classes - known,), -1)]))
        if bool(unrelated.any()):
            network.add_samples(features[unrelated], labels[unrelated])


def is_held_out_row(cv: CrossValidation, features: Tensor) -> Tensor:
    """Compute a mask (n,) bool of the rows that equal a held-out row of the cross-validation up to rounding."""
    return locate_equal_rows(features, cv.features, get_encoder(cv.network).origin) >= 0


def detect_label_conflicts(cv: CrossValidation, features: Tensor, labels: Tensor) -> Tensor:
    """Compute for each labelled row (n, dim) the class (n,) of an equal held-out row of another class; -1 for none."""
    contradicting = torch.full_like(labels, -1)
    matched = is_held_out_row(cv, features)
    for label in labels[matched].unique().tolist():
        rows, others = (matched & (labels == label)).nonzero().flatten(), cv.labels != label
        indices = locate_equal_rows(features[rows], cv.features[others], get_encoder(cv.network).origin)
        contradicting[rows[indices >= 0]] = cv.labels[others][indices[indices >= 0]]
    return contradicting


def _group_duplicates(cv: CrossValidation, features: Tensor) -> Tensor:
    """Compute group ids (held_out + n,) of held-out rows and rows of features (n, dim), equal for duplicates."""
    rows = torch.cat([cv.features.double(), features.double()])
    encoder = get_encoder(cv.network)
    groups = group_duplicates(((rows - encoder.origin) / encoder.scale).float())
    return torch.arange(len(rows)) if groups is None else groups


def balanced_class_weights(labels: Tensor) -> Tensor:
    """Compute sample weights (n,) float64 that sum to the same number in each class, for labels (n,) int64.

    The mean weight is 1.

    Source: King and Zeng, "Logistic regression in rare events data" (2001), eq. 8.
    """
    rows = torch.bincount(labels)
    return (len(labels) / (int((rows > 0).sum()) * rows.double()))[labels]


def restore_row_counts(
    cv: CrossValidation, labels: Tensor, weights: Tensor, name_counts: Tensor | None = None
) -> CrossValidation:
    """Undo class weights after training: weights become numbers of rows again, and networks change in place.

    Metrics are then computed for unweighted rows, and a sample that is added to a prototype later counts as a training
    row. ``labels`` (n,) and ``weights`` (n,) are those of all input rows. ``name_counts`` (num_classes,) is the number
    of samples that the name of each class counts as.
    """
    class_weights = torch.ones(len(cv.network.counts), dtype=torch.float64).scatter_(0, labels, weights)
    counts = (cv.weights / class_weights[cv.labels]).round()
    rows = torch.bincount(labels, minlength=len(class_weights))
    rows = rows if name_counts is None else rows + name_counts
    set_sample_counts(cv.network, rows)
    for fold, network in enumerate(cv.fold_models):
        held_out = cv.fold_index == fold
        n_held_out = torch.bincount(cv.labels[held_out], counts[held_out], minlength=len(rows)).long()
        set_sample_counts(network, rows - n_held_out)
    return replace(cv, weights=counts)


def set_sample_counts(network: PrototypeNetwork, counts: Tensor) -> None:
    """Set the number of samples (num_classes,) int64 of each prototype of a network, in place.

    The prototypes do not change; a larger count makes the effect of later samples smaller.
    """
    network.set_sums(network.sums * (counts / network.counts.clamp_min(1))[:, None], counts)
