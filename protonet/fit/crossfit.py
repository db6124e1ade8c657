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

from protonet.fit.duplicates import group_duplicates, match_rows
from protonet.fit.networks import fit_choice, need_encoder
from protonet.fit.search import Progress, ignore, split_rows
from protonet.fit.solver import Solution, untouched_globals
from protonet.fit.training_set import TrainingSet, to_input_units
from protonet.losses import class_means, weigh
from protonet.metrics import Metrics, Sample, measure, refit_variance_factor, score_known
from protonet.network import PrototypeNetwork
from protonet.selection.folds import Fold
from protonet.views.config import expect
from protonet.views.linear import shrink_covariance
from protonet.views.view import TrainingRows

#: With fewer rows per class, scores depend noticeably on the size of the training set.
FEW_ROWS = 20
#: Number of cross-validations that are averaged in `repeat_held_out`; see analysis/results/mislabelled.md.
REPEATS = 3
#: The fields of `Crossfit` that are tensors, which a model file stores.
HELD_OUT_TENSORS = ("features", "labels", "weights", "fold", "groups", "offset", "gain")


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossfit:
    """The result of cross-validation: the network of all rows, the fold models, and the held-out rows."""

    whole: PrototypeNetwork  #: The network that is fitted to all rows.
    folds: tuple[PrototypeNetwork, ...]
    """The fold models, each fitted without one fold; empty if no class has two rows."""
    features: Tensor  #: (held_out, dim) input features, float32, or float64 if float32 would lose digits.
    labels: Tensor  #: (held_out,) int64.
    weights: Tensor  #: (held_out,) float64: number of merged duplicates per row.
    fold: Tensor  #: (held_out,) int64: index of the fold model that was fitted without the row.
    groups: Tensor
    """(held_out,) int64: rows with the same id were held out together, as near-duplicates or as rows of a group of
    `protonet.fit.solver.Solution`; -1 for single rows."""
    offset: Tensor
    """0-d float64: mean score of new rows by the network of all rows, minus that by the fold models; see
    `protonet.metrics.calibrate_known_scores`."""
    gain: Tensor
    """(2,) float64: estimated accuracy of the network of all rows minus that of the fold models, and its standard
    error."""

    @property
    def sample(self) -> Sample:
        """The weights and groups of the held-out rows, for confidence intervals of the network of all rows."""
        sample = Sample.of_size(len(self.labels), self.weights, self.groups)
        if len(self.folds) < 2:  # a single model is evaluated
            return sample
        factor = refit_variance_factor(sample.effective_groups, len(self.labels.unique()))
        return sample._replace(variance_factor=factor, gain=float(self.gain[0]), gain_error=float(self.gain[1]))


def crossfit(solution: Solution, *, deadline: float = math.inf, progress: Progress = ignore) -> Crossfit:
    """Cross-validate a solution: select views and fit a network without each fold.

    The folds differ from those of the selection. Single views are not evaluated again: for each fold, views are
    selected by their out-of-fold results on the other rows. The network of the solution is moved to the CPU and becomes
    part of the result. After the deadline, training takes no further step.

    Source: cross-fitting, Stone, "Cross-validatory choice and assessment of statistical predictions" (1974).
    """
    problem, rows, labels = solution.problem, solution.problem.rows, solution.problem.rows.labels
    folds = make_folds(problem)
    models: list[PrototypeNetwork] = []
    with untouched_globals():
        for index, fold_rows in enumerate(folds):
            progress(f"fold {index + 1} of {len(folds)}", index / (len(folds) + 1))
            models.append(fit_part(solution, *fold_rows, deadline))
        progress("pairs of folds", len(folds) / (len(folds) + 1))
        offset, gain = _estimate_offset_and_gain(solution, folds, models, deadline)
    held_out_rows = torch.cat([labels[:0], *(held_out for _, held_out in folds)])
    sizes = torch.tensor([len(held_out) for _, held_out in folds], dtype=torch.int64)
    groups = torch.full_like(held_out_rows, -1) if rows.groups is None else rows.groups[held_out_rows]
    return Crossfit(
        whole=solution.network.cpu(),
        folds=tuple(models),
        features=problem.original_features(held_out_rows),
        labels=labels[held_out_rows],
        weights=rows.sample_counts[held_out_rows] / problem.rows_per_sample,
        fold=torch.arange(len(folds)).repeat_interleave(sizes),
        groups=groups,
        offset=offset,
        gain=gain,
    )


def list_tensors(crossed: Crossfit) -> dict[str, Tensor]:
    """Collect the held-out rows of a crossfit as tensors by name, for a model file.

    Features are in the units of the networks, whose buffers hold the same rows, so that the file compresses well; they
    are in input units if digits would be lost.
    """
    tensors = {name: getattr(crossed, name) for name in HELD_OUT_TENSORS}
    encoder = need_encoder(crossed.whole)
    rows = ((crossed.features - encoder.origin) / encoder.scale).float()
    if torch.equal(to_input_units(rows, encoder.origin, encoder.scale), crossed.features):
        del tensors["features"]
        tensors["rows"] = rows
    return tensors


def restore_crossfit(
    network: PrototypeNetwork, folds: Sequence[PrototypeNetwork], tensors: Mapping[str, Tensor]
) -> Crossfit:
    """Restore a crossfit from networks and tensors of `list_tensors`, which are not trusted.

    Raises a ValueError for tensors that are missing or invalid.
    """
    available, encoder = dict(tensors), need_encoder(network)
    if "rows" in available:
        rows = available["rows"]
        sound = rows.ndim == 2 and rows.shape[1] == encoder.input_dim and rows.dtype == torch.float32
        expect(sound, "held-out rows of another shape or type")
        available["features"] = to_input_units(rows, encoder.origin, encoder.scale)
    expect(set(HELD_OUT_TENSORS) <= available.keys(), "no held-out rows")
    x, labels, weights, fold, groups, offset, gain = (available[name] for name in HELD_OUT_TENSORS)
    shapes = x.shape == (len(labels), encoder.input_dim) and offset.shape == () and gain.shape == (2,)
    shapes = shapes and labels.shape == weights.shape == fold.shape == groups.shape and labels.ndim == 1
    types = x.dtype in {torch.float32, torch.float64} and {labels.dtype, fold.dtype, groups.dtype} == {torch.int64}
    types = types and {weights.dtype, offset.dtype, gain.dtype} == {torch.float64}
    expect(shapes and types, "held-out rows of another shape or type")
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (x, weights, offset, gain))
    expect(finite and bool((weights > 0).all()), "held-out rows that are not finite, or have no weight")
    for values, high in ((labels, len(network.counts)), (fold, len(folds))):
        expect(bool(((values >= 0) & (values < high)).all()), "held-out rows of no class or no fold")
    return Crossfit(whole=network, folds=tuple(folds), **{name: available[name] for name in HELD_OUT_TENSORS})


def make_folds(problem: TrainingSet, repeat: int = 0) -> list[Fold]:
    """Split a training set into the folds of `crossfit`; each ``repeat`` > 0 gives other folds."""
    return split_rows(problem.rows, 1 + repeat)


def fit_part(solution: Solution, rows: Tensor, held_out: Tensor, deadline: float) -> PrototypeNetwork:
    """Fit a network to the rows with indices ``rows`` (m,), with a selection that does not use ``held_out`` (k,)."""
    problem = solution.problem
    return fit_choice(replace(problem, rows=problem.rows.select(rows)), solution.choose_without(held_out), deadline)


def _estimate_offset_and_gain(
    solution: Solution, folds: list[Fold], models: list[PrototypeNetwork], deadline: float
) -> tuple[Tensor, Tensor]:
    """Estimate the ``offset`` and the ``gain`` of `Crossfit`: how the network of all rows differs from the fold models.

    A network that is fitted without two folds is compared with the fold model without one of them, on the rows of that
    fold. Both use the same selection. The difference is extrapolated to all rows: scores and accuracy are approximately
    linear in the reciprocal of the number of rows. If rows are many, the offset is 0, and every other fold is enough
    for the gain.
    """
    problem, labels = solution.problem, solution.problem.rows.labels
    few = len(labels) < FEW_ROWS * len(labels.unique())
    offsets, gains, row_weights = ([torch.zeros(0, dtype=torch.float64)] for _ in range(3))
    pairs = len(folds) // 2 if len(folds) > 2 else 0  # one of an odd number has no partner
    for one in range(0, 2 * pairs, 1 if few else 2):
        fitted = folds[one].train[~torch.isin(folds[one].train, folds[one ^ 1].held_out)]
        network = fit_part(solution, fitted, folds[one].held_out, deadline)
        if time.monotonic() >= deadline:
            break  # the network may not be complete
        rows = folds[one].held_out[network.seen[labels[folds[one].held_out]]]
        parts, x = (models[one], network), problem.original_features(rows)
        logits = [part(x).detach() for part in parts]
        more, fewer = (_score_logits(*pair, solution.network) for pair in zip(parts, logits, strict=True))
        offsets.append(more - fewer)
        right = [(part.argmax(dim=1) == labels[rows]).double() for part in logits]
        gains.append(right[0] - right[1])
        row_weights.append(problem.rows.sample_counts[rows].double())
    offset, gain, weights = torch.cat(offsets), torch.cat(gains), torch.cat(row_weights)
    if not len(gain):
        return offset.sum(), gain.new_zeros(2)
    weights /= weights.sum()
    mean = (weights * gain).sum()
    error = torch.linalg.vector_norm(weights * (gain - mean))
    factor = 1 - 2 / len(folds)  # of the reciprocals of the numbers of rows
    return factor * offset.mean() * few, factor * torch.stack([mean, error])


@torch.no_grad()
def predict_held_out(crossed: Crossfit) -> Tensor:
    """Compute the logits (held_out, num_classes) of each held-out row by the fold model that was fitted without it."""
    logits = crossed.whole.sums.new_empty(len(crossed.labels), len(crossed.whole.counts))
    for fold, network in enumerate(crossed.folds):
        rows = crossed.fold == fold
        logits[rows] = network(crossed.features[rows])
    return logits


@torch.no_grad()
def score_held_out(crossed: Crossfit) -> Tensor:
    """Compute the score (held_out,) of each held-out row by the fold model that was fitted without it.

    The scores are those of `protonet.metrics.score_known`, at the temperature and offsets of the network of all rows.
    """
    scores = torch.zeros(len(crossed.labels), dtype=torch.float64)
    for fold, network in enumerate(crossed.folds):
        rows = crossed.fold == fold
        scores[rows] = _score_logits(network, network(crossed.features[rows]), crossed.whole)
    return scores


def _score_logits(network: PrototypeNetwork, logits: Tensor, reference: PrototypeNetwork) -> Tensor:
    """Compute the scores (n,) of logits of a network as if it had the temperature and offsets of a reference."""
    cosines = (logits - network.offsets) * network.temperature
    return score_known(network.mask_logits(cosines / reference.temperature + reference.offsets))


def measure_held_out(crossed: Crossfit) -> Metrics:
    """Compute metrics of the fold models on the held-out rows, at least one."""
    return measure(predict_held_out(crossed), crossed.labels, crossed.sample)


def repeat_held_out(
    solution: Solution,
    crossed: Crossfit,
    times: int = REPEATS,
    *,
    deadline: float = math.inf,
    progress: Progress = ignore,
) -> Tensor:
    """Average held-out probabilities over repeated cross-validations; return the logarithms of the means.

    The result (held_out, num_classes) is float64. ``crossed`` is the first cross-validation. It is not repeated if only
    a part of many rows is held out. A repeat that the deadline interrupts is discarded.

    Source: repeated cross-validation, Burman, "A comparative study of ordinary cross-validation, v-fold
        cross-validation and the repeated learning-testing methods" (1989).
    """
    problem, held_out = solution.problem, [rows for _, rows in make_folds(solution.problem)]
    total, count = predict_held_out(crossed).double().softmax(dim=1), 1
    with untouched_globals():
        for repeat in range(1, times if len(held_out) > 1 else 1):
            progress(f"cross-fit {repeat + 1} of {times}", (repeat - 1) / (times - 1))
            probabilities = torch.full((len(problem.rows.labels), total.shape[1]), math.nan, dtype=torch.float64)
            for fold in make_folds(problem, repeat):
                if time.monotonic() >= deadline:
                    return (total / count).log()
                network = fit_part(solution, *fold, deadline)
                with torch.no_grad():
                    logits = network(problem.original_features(fold.held_out))
                probabilities[fold.held_out] = logits.double().softmax(dim=1)
            probabilities = probabilities[torch.cat(held_out)]
            total += torch.where(probabilities.isnan(), total / count, probabilities)  # NaN: held out by no fold
            count += 1
    return (total / count).log()


def held_out_indices(problem: TrainingSet) -> Tensor:
    """Compute the index (n,) int64 among the held-out rows of each input row, in the order of the loaders.

    The index is -1 for a row that is never held out, or that is not in the sample of many rows. Merged duplicates share
    an index.
    """
    indices = torch.full_like(problem.rows.labels, -1)
    held_out = [rows for _, rows in make_folds(problem)]
    if held_out:
        indices[torch.cat(held_out)] = torch.arange(sum(map(len, held_out)))
    return torch.where(problem.indices < 0, -1, indices[problem.indices])


#: Name of the baseline of `score_frequent`.
FREQUENT = "most frequent class"


def score_frequent(counts: Tensor, rows: int) -> Tensor:
    """Score each of n rows by the class frequencies (num_classes,) alone: (rows, num_classes) float64."""
    return counts.double().expand(rows, -1)


def predict_baselines(problem: TrainingSet) -> dict[str, Tensor]:
    """Score held-out rows by the baselines "raw cosine" and "LDA", which are fitted to the rows of the other folds.

    Returns the scores (held_out, num_classes) by name, nothing if no row is held out. The scores are not calibrated:
    only their order is meaningful.
    """
    rows, folds, scores = problem.rows, make_folds(problem), dict[str, Tensor]()
    for name, score in (("raw cosine", score_cosine), ("LDA", score_lda)) if folds else ():
        parts = [score(rows.select(fold.train), rows.features[fold.held_out]) for fold in folds]
        scores[name] = torch.cat(parts)
    return scores


def score_cosine(rows: TrainingRows, queries: Tensor) -> Tensor:
    """Compute the cosines (m, num_classes) float64 of queries (m, dim) to class means of normalized rows."""
    unit = F.normalize(rows.features.double(), dim=1)
    means, _ = class_means(unit, rows.labels, rows.num_classes, rows.class_balanced_weights)
    return F.normalize(queries.double(), dim=1) @ F.normalize(means, dim=1).T


def score_lda(rows: TrainingRows, queries: Tensor) -> Tensor:
    """Score queries (m, dim) by linear discriminant analysis with a shrunken covariance, fitted to rows.

    The scores (m, num_classes) float64 are log-posteriors up to a constant per row, and minus infinity for a class
    without rows.

    Source: Fisher, "The use of multiple measurements in taxonomic problems" (1936); see `shrink_covariance`.
    """
    x, weights = rows.features.double(), rows.class_balanced_weights
    means, counts = class_means(x, rows.labels, rows.num_classes, weights)
    degrees = len(x) - int((counts > 0).sum())
    residuals = weigh(x - means[rows.labels], None if weights is None else weights.sqrt())
    basis, variances, residual_variance = shrink_covariance(residuals, degrees)
    constant = float(residual_variance) == 0 and len(variances) > 0  # directions outside the basis have no variance
    off = 0.0 if constant else 1 / math.sqrt(float(residual_variance) or 1.0)

    def whiten(x: Tensor) -> Tensor:
        return off * x + ((x @ basis) * (variances.rsqrt() - off)) @ basis.T

    return counts.log() - torch.cdist(whiten(queries.double()), whiten(means)).square() / 2


def update(crossed: Crossfit, features: Tensor, labels: Tensor, num_classes: int, groups: Tensor | None = None) -> None:
    """Add samples (n, ...) to the network of all rows and to the fold models, in place.

    `predict_held_out` then shows the effect on the held-out rows. A fold model thus gets no sample that is a duplicate
    or near-duplicate of its held-out rows, or belongs to one of their groups: ``groups`` (n,) are ids as in
    ``crossed.groups``, -1 for samples without a group. Raises the errors of `PrototypeNetwork.add_samples`.
    """
    known = len(crossed.whole.counts)
    crossed.whole.add_samples(features, labels, num_classes=num_classes)
    n_held_out, copies = len(crossed.labels), _group_duplicates(crossed, features)
    for fold, network in enumerate(crossed.folds):
        held_out = crossed.fold == fold
        unrelated = ~torch.isin(copies[n_held_out:], copies[:n_held_out][held_out])
        if groups is not None:
            unrelated &= (groups < 0) | ~torch.isin(groups, crossed.groups[held_out])
        network.arrange_classes(torch.cat([torch.arange(known), torch.full((num_classes - known,), -1)]))
        if bool(unrelated.any()):
            network.add_samples(features[unrelated], labels[unrelated])


def match_held_out(crossed: Crossfit, features: Tensor) -> Tensor:
    """Test for each row of features (n, dim) whether it equals a held-out row: (n,) bool."""
    return match_rows(features, crossed.features, need_encoder(crossed.whole).origin) >= 0


def find_contradicted(crossed: Crossfit, features: Tensor, labels: Tensor) -> Tensor:
    """Detect rows (n, dim) that equal a held-out row with another label: its class (n,) int64, or -1 for none."""
    contradicting = torch.full_like(labels, -1)
    matched = match_held_out(crossed, features)
    for label in labels[matched].unique().tolist():
        rows, others = (matched & (labels == label)).nonzero().flatten(), crossed.labels != label
        indices = match_rows(features[rows], crossed.features[others], need_encoder(crossed.whole).origin)
        contradicting[rows[indices >= 0]] = crossed.labels[others][indices[indices >= 0]]
    return contradicting


def _group_duplicates(crossed: Crossfit, features: Tensor) -> Tensor:
    """Compute the duplicate group (held_out + n,) int64 of each held-out row and of each row of features (n, dim)."""
    rows = torch.cat([crossed.features.double(), features.double()])
    encoder = need_encoder(crossed.whole)
    groups = group_duplicates(((rows - encoder.origin) / encoder.scale).float())
    return torch.arange(len(rows)) if groups is None else groups
