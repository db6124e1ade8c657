"""Cross-validation of the whole procedure: the selection and the fit are repeated without each fold.

A network cannot be evaluated on its training rows. Each fold model is fitted without one fold, and evaluated on that
fold: its accuracy, the scores of rows of known classes, and the effect of new samples.
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

#: Below this number of rows per class, scores depend noticeably on the size of the training set.
FEW_ROWS = 20
#: Number of cross-validations for the scores of single rows; see analysis/results/mislabelled.md.
REPEATS = 3
#: The fields of `Crossfit` that are tensors, as a model file holds them.
HELD_OUT_TENSORS = ("features", "labels", "weights", "fold", "groups", "offset", "gain")


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossfit:
    """The network of all rows, the fold models, and their held-out rows."""

    whole: PrototypeNetwork  #: Fitted to all rows.
    folds: tuple[PrototypeNetwork, ...]
    """The fold models, each fitted without one fold; empty if no class has two rows."""
    features: Tensor  #: (held_out, dim) input features, float32, or float64 where float32 would lose digits.
    labels: Tensor  #: (held_out,) int64.
    weights: Tensor  #: (held_out,) float64: number of merged duplicates per row.
    fold: Tensor  #: (held_out,) int64: index of the fold model that the row was held out from.
    groups: Tensor
    """(held_out,) int64: rows with the same id were held out together, as near-duplicates or as rows of a group of
    `protonet.fit.solver.Solution`; -1 for single rows."""
    offset: Tensor
    """0-d float64: difference of the scores of held-out rows between the network of all rows and the fold models; see
    `protonet.metrics.calibrate`."""
    gain: Tensor
    """(2,) float64: estimated difference of the accuracy between the network of all rows and the fold models, and its
    standard error."""

    @property
    def sample(self) -> Sample:
        """The held-out rows as a sample, for intervals of the performance of the network of all rows on new rows."""
        sample = Sample.of(len(self.labels), self.weights, self.groups)
        if len(self.folds) < 2:  # a single model is evaluated
            return sample
        factor = refit_variance_factor(sample.effective_groups, len(self.labels.unique()))
        return sample._replace(variance_factor=factor, gain=float(self.gain[0]), gain_error=float(self.gain[1]))


def crossfit(solution: Solution, *, deadline: float = math.inf, progress: Progress = ignore) -> Crossfit:
    """Cross-validate the selection and the fit; the networks and all held-out rows.

    The folds differ from those of the selection. The out-of-fold evaluations of single views are not repeated: the
    model is selected again from their results on the rows of the other folds. The solution's network is moved to the
    CPU and becomes part of the result. After the deadline, training takes no further step.

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
        offset, gain = _extrapolate(solution, folds, models, deadline)
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
    """Collect all tensors except the networks' by name, for a model file.

    Features are stored in the units of the networks, whose buffers hold the same rows, so that the file compresses
    well; in their input units if digits would be lost.
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
    """Restore a crossfit from networks and the untrusted tensors of `list_tensors`, or raise a ValueError."""
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
    """Split a training set into the folds of `crossfit`, or into those of another ``repeat``."""
    return split_rows(problem.rows, 1 + repeat)


def fit_part(solution: Solution, rows: Tensor, held_out: Tensor, deadline: float) -> PrototypeNetwork:
    """Fit a network to rows (m,) int64, with a selection that does not use the held-out rows (k,) int64."""
    problem = solution.problem
    return fit_choice(replace(problem, rows=problem.rows.select(rows)), solution.choose_without(held_out), deadline)


def _extrapolate(
    solution: Solution, folds: list[Fold], models: list[PrototypeNetwork], deadline: float
) -> tuple[Tensor, Tensor]:
    """Estimate the offset and the gain of `Crossfit`, between the network of all rows and the fold models.

    A network without two folds is compared with the fold model without one of them, on the rows of that fold. Both have
    the selection of the fold model, so that the difference is due to the rows alone. It is extrapolated to all rows:
    scores and accuracy are approximately linear in the reciprocal of the number of rows. If rows are many, the offset
    is 0, and every other fold is enough for the gain.
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
    """Compute the logits (held_out, num_classes) of each row by the fold model that it was held out from."""
    logits = crossed.whole.sums.new_empty(len(crossed.labels), len(crossed.whole.counts))
    for fold, network in enumerate(crossed.folds):
        rows = crossed.fold == fold
        logits[rows] = network(crossed.features[rows])
    return logits


@torch.no_grad()
def score_held_out(crossed: Crossfit) -> Tensor:
    """Compute `protonet.metrics.score_known` (held_out,) of each row by the fold model that it was held out from.

    Scores of several networks are compared at the temperature and the class offsets of the network of all rows.
    """
    scores = torch.zeros(len(crossed.labels), dtype=torch.float64)
    for fold, network in enumerate(crossed.folds):
        rows = crossed.fold == fold
        scores[rows] = _score_logits(network, network(crossed.features[rows]), crossed.whole)
    return scores


def _score_logits(network: PrototypeNetwork, logits: Tensor, reference: PrototypeNetwork) -> Tensor:
    """Score how well logits (n, num_classes) fit a known class, with the full fit's temperature and offsets: (n,)."""
    cosines = (logits - network.offsets) * network.temperature
    return score_known(network.mask_logits(cosines / reference.temperature + reference.offsets))


def measure_held_out(crossed: Crossfit) -> Metrics:
    """Compute metrics on the held-out rows, at least one."""
    return measure(predict_held_out(crossed), crossed.labels, crossed.sample)


def repeat_held_out(
    solution: Solution,
    crossed: Crossfit,
    times: int = REPEATS,
    *,
    deadline: float = math.inf,
    progress: Progress = ignore,
) -> Tensor:
    """Average the held-out probabilities over repeated cross-validations, which reduces their variance.

    The first one is ``crossed``. If only a part of many rows is held out, there is one. A repeat that the deadline
    interrupts is discarded. Returns the logarithm (held_out, num_classes) float64 of the mean.

    Source: repeated cross-validation, Burman, "A comparative study of ordinary cross-validation, v-fold
        cross-validation and the repeated learning-testing methods" (1989).
    """
    problem, held_out = solution.problem, [rows for _, rows in make_folds(solution.problem)]
    total, count = predict_held_out(crossed).double().softmax(dim=1), 1
    with untouched_globals():
        for repeat in range(1, times if len(held_out) > 1 else 1):
            progress(f"cross-fit {repeat + 1} of {times}", (repeat - 1) / (times - 1))
            again = torch.full((len(problem.rows.labels), total.shape[1]), math.nan, dtype=torch.float64)
            for fold in make_folds(problem, repeat):
                if time.monotonic() >= deadline:
                    return (total / count).log()
                network = fit_part(solution, *fold, deadline)
                with torch.no_grad():
                    again[fold.held_out] = network(problem.original_features(fold.held_out)).double().softmax(dim=1)
            again = again[torch.cat(held_out)]
            total += torch.where(again.isnan(), total / count, again)  # a row that these folds never hold out
            count += 1
    return (total / count).log()


def held_out_indices(problem: TrainingSet) -> Tensor:
    """Map the input rows to indices (n,) of the held-out rows, in the order of the loaders.

    The index is -1 for a row that is never held out, or outside of the sample of many rows. Merged duplicates share an
    index.
    """
    indices = torch.full_like(problem.rows.labels, -1)
    held_out = [rows for _, rows in make_folds(problem)]
    if held_out:
        indices[torch.cat(held_out)] = torch.arange(sum(map(len, held_out)))
    return torch.where(problem.indices < 0, -1, indices[problem.indices])


#: Name of the baseline `score_frequent`.
FREQUENT = "most frequent class"


def score_frequent(counts: Tensor, rows: int) -> Tensor:
    """Compute class scores (rows, num_classes) float64 from class frequencies (num_classes,) alone."""
    return counts.double().expand(rows, -1)


def predict_baselines(problem: TrainingSet) -> dict[str, Tensor]:
    """Score each held-out row by baselines that are fitted to the other folds: (held_out, num_classes) each.

    The baselines are "raw cosine" and "LDA" with a shrunken covariance. The scores are not calibrated: only their order
    is meaningful. Empty if no row is held out.
    """
    folds, baselines = make_folds(problem), {"raw cosine": score_cosine, "LDA": score_lda}
    if not folds:
        return {}
    rows = problem.rows
    return {
        name: torch.cat([score(rows.select(fold.train), rows.features[fold.held_out]) for fold in folds])
        for name, score in baselines.items()
    }


def score_cosine(rows: TrainingRows, queries: Tensor) -> Tensor:
    """Compute the cosines (m, num_classes) float64 of queries (m, dim) to the class means of rows of unit norm."""
    unit = F.normalize(rows.features.double(), dim=1)
    means, _ = class_means(unit, rows.labels, rows.num_classes, rows.class_balanced_weights)
    return F.normalize(queries.double(), dim=1) @ F.normalize(means, dim=1).T


def score_lda(rows: TrainingRows, queries: Tensor) -> Tensor:
    """Score queries (m, dim) by linear discriminant analysis, fitted to rows with a shrunken covariance.

    The scores (m, num_classes) float64 are log posteriors up to a constant per row; minus infinity for a class without
    rows.

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
    """Add samples (n, ...) to the network and to the fold models; `predict_held_out` then shows the effect.

    A fold model gets no sample that is a duplicate or near-duplicate of its held-out rows, or belongs to their groups:
    ``groups`` (n,) are ids as in ``crossed.groups``, -1 for others. Raises the errors of
    `PrototypeNetwork.add_samples`.
    """
    known = len(crossed.whole.counts)
    crossed.whole.add_samples(features, labels, num_classes=num_classes)
    n_held_out, copies = len(crossed.labels), _group_duplicates(crossed, features)
    for fold, network in enumerate(crossed.folds):
        judged = crossed.fold == fold
        fresh = ~torch.isin(copies[n_held_out:], copies[:n_held_out][judged])
        if groups is not None:
            fresh &= (groups < 0) | ~torch.isin(groups, crossed.groups[judged])
        network.arrange_classes(torch.cat([torch.arange(known), torch.full((num_classes - known,), -1)]))
        if bool(fresh.any()):
            network.add_samples(features[fresh], labels[fresh])


def match_held_out(crossed: Crossfit, features: Tensor) -> Tensor:
    """Test which rows of features (n, dim), real and finite, equal a held-out row: (n,) bool."""
    return match_rows(features, crossed.features, need_encoder(crossed.whole).origin) >= 0


def find_contradicted(crossed: Crossfit, features: Tensor, labels: Tensor) -> Tensor:
    """Find the class (n,) int64 of an equal held-out row with another label than that (n,) of a row, or -1."""
    found = torch.full_like(labels, -1)
    matched = match_held_out(crossed, features)
    for label in labels[matched].unique().tolist():
        rows, others = (matched & (labels == label)).nonzero().flatten(), crossed.labels != label
        indices = match_rows(features[rows], crossed.features[others], need_encoder(crossed.whole).origin)
        found[rows[indices >= 0]] = crossed.labels[others][indices[indices >= 0]]
    return found


def _group_duplicates(crossed: Crossfit, features: Tensor) -> Tensor:
    """Group duplicates among held-out rows and features: (held_out + n,) int64."""
    rows = torch.cat([crossed.features.double(), features.double()])
    encoder = need_encoder(crossed.whole)
    groups = group_duplicates(((rows - encoder.origin) / encoder.scale).float())
    return torch.arange(len(rows)) if groups is None else groups
