"""Cross-fitting: the choice, made and fitted again without each fold, and what that says of unseen rows.

A network cannot be judged on rows that it was fitted to. The fold models, each fitted without one fold, can be judged
on that fold: how often they are right, what rows of a known class look like to them, and what new samples cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.encoder import Encoder
from protonet.fit.duplicates import group_duplicates, match_rows
from protonet.fit.networks import fit_choice
from protonet.fit.search import Progress, SelectedModel, ignore, split_rows
from protonet.fit.solver import Solution, untouched_globals
from protonet.fit.training_set import TrainingSet
from protonet.losses import class_means, weigh
from protonet.metrics import Metrics, Sample, measure, refit_variance_factor, score_known
from protonet.network import PrototypeNetwork
from protonet.selection.folds import Fold
from protonet.views.config import expect
from protonet.views.covariance import shrink_covariance
from protonet.views.view import TrainingRows

#: With fewer rows per class, a fold more or less is felt.
FEW_ROWS = 20
#: Crossfits of other folds that single rows are judged by; see analysis/results/mislabelled.md.
REPEATS = 3


class Crossfit(NamedTuple):
    """The network of all rows, the fold models, and the rows that these did not see."""

    whole: PrototypeNetwork  #: Fitted to all rows.
    folds: tuple[PrototypeNetwork, ...]
    """The fold models, each fitted without one fold; none where no class has two rows."""
    features: Tensor  #: (judged, dim) as they came, float32, or float64 where that would lose digits.
    labels: Tensor  #: (judged,) int64.
    weights: Tensor  #: (judged,) float64: the number of equal rows that each represents.
    fold: Tensor  #: (judged,) int64: which fold model did not see the row.
    groups: Tensor
    """(judged,) int64: rows of one number were held out together, of one group, as `protonet.fit.solver.Solution`
    numbers them, or nearly equal; -1 where each row is alone."""
    offset: Tensor
    """0-d float64: by how much the network of all rows scores such rows higher; see `protonet.metrics.calibrate`."""

    @property
    def sample(self) -> Sample:
        """The rows as a sample, for intervals that hold what the network of all rows does on fresh ones."""
        sample = Sample.of(len(self.labels), self.weights, self.groups)
        if len(self.folds) < 2:  # one network judges all
            return sample
        return sample._replace(
            variance_factor=refit_variance_factor(sample.effective_groups, len(self.labels.unique()))
        )


def crossfit(solution: Solution, *, deadline: float = math.inf, progress: Progress = ignore) -> Crossfit:
    """Choose and fit again without each fold.

    The folds are others than those that the choice was made on. What each view did on held-out rows is not measured
    again: the choice is made anew of what it did on the rows of the other folds.

    Args:
        solution: Of `protonet.fit.solver.solve_problem`. Its network, put on the CPU, is part of the result.
        deadline: ``time.monotonic()`` after which training takes no further step.
        progress: Called with the fold that begins and the fraction of finished folds.

    Returns:
        The networks, and every row that some network did not see.

    Source: cross-fitting, Stone, "Cross-validatory choice and assessment of statistical predictions" (1974).
    """
    problem, rows, labels = solution.problem, solution.problem.rows, solution.problem.rows.labels
    folds = make_folds(problem)
    models: list[PrototypeNetwork] = []
    with untouched_globals():
        for index, fold_rows in enumerate(folds):
            progress(f"fold {index + 1} of {len(folds)}", index / (len(folds) + 1))
            models.append(_fit_without(solution, fold_rows, deadline))
        progress("pairs of folds", len(folds) / (len(folds) + 1))
        offset = _measure_offset(solution, folds, models, deadline)
    held_out_rows = torch.cat([labels[:0], *(held_out for _, held_out in folds)])
    fold = torch.cat(
        [held_out_rows[:0], *(torch.full_like(held_out, index) for index, (_, held_out) in enumerate(folds))]
    )
    features = problem.original_features(held_out_rows)
    groups = torch.full_like(held_out_rows, -1) if rows.groups is None else rows.groups[held_out_rows]
    network = solution.network.cpu()
    return Crossfit(
        network, tuple(models), features, labels[held_out_rows], rows.sample_counts[held_out_rows], fold, groups, offset
    )


def list_tensors(crossed: Crossfit) -> dict[str, Tensor]:
    """Return everything but the networks by name, for a model file.

    Features are in the units of the networks, whose buffers hold the same rows, unless that would lose digits: files
    are compressed.
    """
    tensors = {name: getattr(crossed, name) for name in Crossfit._fields[2:]}
    encoder = need_encoder(crossed.whole)
    rows = ((crossed.features - encoder.origin) / encoder.scale).float()
    if torch.equal(_as_they_came(encoder, rows), crossed.features):
        del tensors["features"]
        tensors["rows"] = rows
    return tensors


def _as_they_came(encoder: Encoder, rows: Tensor) -> Tensor:
    """Return rows (n, dim) in the units of an encoder's views as they came: float64 where float32 would lose digits."""
    x = rows * encoder.scale
    return x.double() + encoder.origin if bool(encoder.origin.any()) else x


def restore_crossfit(
    network: PrototypeNetwork, folds: Sequence[PrototypeNetwork], tensors: Mapping[str, Tensor]
) -> Crossfit:
    """Return the crossfit of networks and of the tensors of `list_tensors`, which are not trusted.

    Raises:
        ValueError: The tensors are missing or do not fit; the reason in a few words.
    """
    available, encoder = dict(tensors), need_encoder(network)
    if "rows" in available:
        rows = available["rows"]
        sound = rows.ndim == 2 and rows.shape[1] == encoder.input_dim and rows.dtype == torch.float32
        expect(sound, "rows held out of another shape or type")
        available["features"] = _as_they_came(encoder, rows)
    expect(set(Crossfit._fields[2:]) <= available.keys(), "no rows that were held out")
    x, labels, weights, fold, groups, offset = fields = [available[name] for name in Crossfit._fields[2:]]
    shapes = x.shape == (len(labels), encoder.input_dim) and offset.shape == ()
    shapes = shapes and labels.shape == weights.shape == fold.shape == groups.shape and labels.ndim == 1
    types = x.dtype in {torch.float32, torch.float64} and {labels.dtype, fold.dtype, groups.dtype} == {torch.int64}
    types = types and {weights.dtype, offset.dtype} == {torch.float64}
    expect(shapes and types, "rows held out of another shape or type")
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (x, weights, offset))
    expect(finite and bool((weights > 0).all()), "rows held out that are not finite, or have no weight")
    for values, high in ((labels, len(network.counts)), (fold, len(folds))):
        expect(bool(((values >= 0) & (values < high)).all()), "rows held out of no class or no fold")
    return Crossfit(network, tuple(folds), *fields)


def make_folds(problem: TrainingSet, repeat: int = 0) -> list[Fold]:
    """Make the folds that `crossfit` holds out of a problem's rows, or those of another ``repeat``."""
    generator = torch.Generator().manual_seed(problem.rows.seed + 1 + repeat)
    return split_rows(problem.rows, generator)


def _fit_without(solution: Solution, fold: Fold, deadline: float) -> PrototypeNetwork:
    """Return a network that has nothing of the rows of a fold, neither of its parts nor the choice of them."""
    return _fit_part(solution, fold.train, solution.choose_without(fold.held_out), deadline)


def _fit_part(solution: Solution, rows: Tensor, choice: SelectedModel, deadline: float) -> PrototypeNetwork:
    """Return a network of a choice that is fitted to some rows (m,) int64."""
    problem = solution.problem
    return fit_choice(problem._replace(rows=problem.rows.select(rows)), choice, deadline)


def _measure_offset(solution: Solution, folds: list[Fold], models: list[PrototypeNetwork], deadline: float) -> Tensor:
    """Compute by how much a network of all rows scores unseen rows higher than a fold model does, 0-d float64.

    Without two folds they score lower than without one. Both networks have the choice of the fold model, so that the
    rows alone make the difference. The step to all rows is extrapolated: scores are about linear in one over the number
    of rows.
    """
    problem, labels = solution.problem, solution.problem.rows.labels
    few = len(labels) < FEW_ROWS * len(labels.unique())
    differences = [torch.zeros(0, dtype=torch.float64)]
    for one in range(len(folds) // 2 * 2) if few and len(folds) > 2 else ():  # one of an odd number has no partner
        fitted = folds[one].train[~torch.isin(folds[one].train, folds[one ^ 1].held_out)]
        network = _fit_part(solution, fitted, solution.choose_without(folds[one].held_out), deadline)
        rows = folds[one].held_out[network.seen[labels[folds[one].held_out]]]
        x = problem.original_features(rows)
        scores = [_score_rows(model, x, solution.network) for model in (models[one], network)]
        differences.append(scores[0] - scores[1])
    measured = torch.cat(differences)
    return measured.mean() * (1 - 2 / len(folds)) if len(measured) else measured.sum()


@torch.no_grad()
def predict_held_out(crossed: Crossfit) -> Tensor:
    """Return the logits (judged, num_classes) of each row by the fold model that did not see it."""
    logits = crossed.whole.sums.new_empty(len(crossed.labels), len(crossed.whole.counts))
    for fold, network in enumerate(crossed.folds):
        rows = crossed.fold == fold
        logits[rows] = network(crossed.features[rows])
    return logits


@torch.no_grad()
def score_held_out(crossed: Crossfit) -> Tensor:
    """Compute `protonet.metrics.score_known` (judged,) of each row by the fold model that did not see it.

    Scores of several networks are compared at the temperature and the class offsets of the network of all rows.
    """
    scores = torch.zeros(len(crossed.labels), dtype=torch.float64)
    for fold, network in enumerate(crossed.folds):
        rows = crossed.fold == fold
        scores[rows] = _score_rows(network, crossed.features[rows], crossed.whole)
    return scores


def _score_rows(network: PrototypeNetwork, x: Tensor, reference: PrototypeNetwork) -> Tensor:
    """Compute the scores (n,) of rows x (n, dim) by a network, with the temperature and offsets of the full fit."""
    cosines = (network(x).detach() - network.offsets) * network.temperature
    return score_known(network.mask_logits(cosines / reference.temperature + reference.offsets))


def measure_held_out(crossed: Crossfit) -> Metrics:
    """Judge the network of all rows by those that were held out, at least one."""
    return measure(predict_held_out(crossed), crossed.labels, crossed.sample)


def repeat_held_out(
    solution: Solution,
    crossed: Crossfit,
    times: int = REPEATS,
    *,
    deadline: float = math.inf,
    progress: Progress = ignore,
) -> Tensor:
    """Return what several crossfits, each of other folds, say of the held-out rows: for one row, less is up to chance.

    Args:
        solution: As `crossfit` had it.
        crossed: What that made of it: the first one.
        times: Number of crossfits, >= 1. If only a part of many rows is held out, there is one.
        deadline: ``time.monotonic()`` after which nothing more is fitted. A crossfit without all of its folds is left
            out.
        progress: Called with the repeat that begins and the fraction of finished repeats.

    Returns:
        (judged, num_classes) float64: the logarithm of the mean probability.

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
                network = _fit_without(solution, fold, deadline)
                with torch.no_grad():
                    again[fold.held_out] = network(problem.original_features(fold.held_out)).double().softmax(dim=1)
            again = again[torch.cat(held_out)]
            total += torch.where(again.isnan(), total / count, again)  # a row that these folds never hold out
            count += 1
    return (total / count).log()


def held_out_indices(problem: TrainingSet) -> Tensor:
    """Return the number, among the rows that `crossfit` holds out, of each row that came to the solver.

    Args:
        problem: As it was solved.

    Returns:
        (n,) int64 in the order of the loaders; -1 for a row that no fold model is judged on. Equal rows share one.
    """
    indices = torch.full_like(problem.rows.labels, -1)
    held_out = [rows for _, rows in make_folds(problem)]
    if held_out:
        indices[torch.cat(held_out)] = torch.arange(sum(map(len, held_out)))
    return indices[problem.indices]


#: What `score_frequent` is called.
FREQUENT = "most frequent class"


def score_frequent(counts: Tensor, rows: int) -> Tensor:
    """Return class scores (rows, num_classes) float64 that know no features: the numbers of rows of the classes.

    Args:
        counts: (num_classes,) of the rows that a model was fitted to.
        rows: How many are to be classified.
    """
    return counts.double().expand(rows, -1)


def predict_baselines(problem: TrainingSet) -> dict[str, Tensor]:
    """Classify each held-out row by baselines that are fitted to the other folds.

    Args:
        problem: As it was solved.

    Returns:
        By name, "raw cosine" and "LDA" (of a shrunken covariance), class scores (judged, num_classes) float64 in the
        order of `Crossfit.labels`. They have no temperature: only their order means anything. None where no row is
        held out.
    """
    folds, baselines = make_folds(problem), {"raw cosine": score_cosine, "LDA": score_lda}
    if not folds:
        return {}
    return {name: torch.cat([_score(score, problem.rows, fold) for fold in folds]) for name, score in baselines.items()}


def _score(score: Callable[..., Tensor], rows: TrainingRows, fold: Fold) -> Tensor:
    """Return the scores of a baseline, fitted without a fold, of its rows."""
    fitted = rows.select(fold.train)
    return score(
        fitted.features, fitted.labels, rows.features[fold.held_out], rows.num_classes, fitted.class_balanced_weights
    )


def score_cosine(x: Tensor, labels: Tensor, queries: Tensor, num_classes: int, weights: Tensor | None = None) -> Tensor:
    """Return the cosines (m, num_classes) float64 of queries (m, dim) to the class means of unit rows x (n, dim)."""
    means, _ = class_means(F.normalize(x.double(), dim=1), labels, num_classes, weights)
    return F.normalize(queries.double(), dim=1) @ F.normalize(means, dim=1).T


def score_lda(x: Tensor, labels: Tensor, queries: Tensor, num_classes: int, weights: Tensor | None = None) -> Tensor:
    """Fit linear discriminant analysis with a shrunken covariance, and score queries.

    Args:
        x: (n, dim) float32.
        labels: (n,) int64 in [0, num_classes).
        queries: (m, dim) float32.
        num_classes: Number of classes.
        weights: (n,) of the rows, of mean 1; None for 1.

    Returns:
        (m, num_classes) float64, the log posterior up to a constant per row; minus infinity for a class without rows.

    Source: Fisher, "The use of multiple measurements in taxonomic problems" (1936); see `shrink_covariance`.
    """
    means, counts = class_means(x.double(), labels, num_classes, weights)
    degrees = len(x) - int((counts > 0).sum())
    residuals = weigh(x.double() - means[labels], None if weights is None else weights.sqrt())
    basis, variances, residual_variance = shrink_covariance(residuals, degrees)
    constant = float(residual_variance) == 0 and len(variances) > 0  # directions outside the basis have no variance
    off = 0.0 if constant else 1 / math.sqrt(float(residual_variance) or 1.0)

    def whiten(rows: Tensor) -> Tensor:
        return off * rows + ((rows @ basis) * (variances.rsqrt() - off)) @ basis.T

    return counts.log() - torch.cdist(whiten(queries.double()), whiten(means)).square() / 2


def update(crossed: Crossfit, features: Tensor, labels: Tensor, num_classes: int, groups: Tensor | None = None) -> None:
    """Add samples to the network and to the fold models: `predict_held_out` then shows the effect on the known classes.

    A fold model gets none that equals a row that it is judged on, or nearly, or is of its group.

    Args:
        crossed: The networks, which are changed; the rows that are held out stay as they were.
        features: (n, dim) real, finite.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Classes from now on, at least as many as before.
        groups: (n,) int64, numbered as those of the crossfit are, -1 for others; None for none.

    Raises:
        InputTypeError: As `PrototypeNetwork.add_samples`.
        InputError: As `PrototypeNetwork.add_samples`.
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


def need_encoder(network: PrototypeNetwork) -> Encoder:
    """Return the encoder of a network, which is this library's, as solver and files say."""
    assert isinstance(network.encoder, Encoder)
    return network.encoder


def match_held_out(crossed: Crossfit, features: Tensor) -> Tensor:
    """Return which (n,) bool rows of features (n, dim), real and finite, are equal to one that was held out."""
    return match_rows(features, crossed.features, need_encoder(crossed.whole).origin)


def _group_duplicates(crossed: Crossfit, features: Tensor) -> Tensor:
    """Return the group of copies (judged + n,) int64 of each row that was held out, and of each of the features."""
    rows = torch.cat([crossed.features.double(), features.double()])
    encoder = need_encoder(crossed.whole)
    groups = group_duplicates(((rows - encoder.origin) / encoder.scale).float())
    return torch.arange(len(rows)) if groups is None else groups
