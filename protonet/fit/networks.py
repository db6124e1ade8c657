"""Fit the selected views to labelled rows, and to unlabelled rows if these improve the held-out log-loss.

Labels propagate over the graph of nearest neighbours in the embedding. Each unlabelled row then gets its most probable
class as a pseudo-label, unless it is an outlier.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.fit.search import FitProgress, SelectedModel, UnlabelledWeights, ignore_progress, split_training_rows
from protonet.fit.training_set import TrainingSet
from protonet.losses import MAX_CHUNK_ROWS
from protonet.metrics import score_known_class
from protonet.network import Encoder, PrototypeNetwork, split_weights
from protonet.selection.folds import Fold
from protonet.selection.scoring import fit_temperature, is_worse_by_one_error
from protonet.views.view import TrainingRows, View, ViewSpec


def fit_selected_model(
    training_set: TrainingSet, selected: SelectedModel, deadline: float = math.inf
) -> PrototypeNetwork:
    """Fit the selected views to all rows of a training set, and return the network of these views.

    Unlabelled rows are used if ``selected.unlabelled`` is set. The network takes features in input units. It is in eval
    mode, on the device of the training set. After the deadline, training ends, and only the view with the largest
    weight is fitted. The caller must be within the context `preserve_torch_state`.
    """
    network = fit_labelled_rows(training_set.rows.to(training_set.device), selected, deadline)
    if selected.unlabelled is not None and time.monotonic() < deadline:
        pooled = fit_with_unlabelled_rows(
            training_set, selected, selected.unlabelled, predict_pseudo_labels(training_set, network)[0], deadline
        )
        # Prototypes are means of all rows, but count as the labelled rows alone: samples added later move them as much.
        pooled.set_sums(pooled.sums * (network.counts / pooled.counts.clamp_min(1))[:, None], network.counts)
        network = pooled if time.monotonic() < deadline else network
    encoder = get_encoder(network)
    encoder.origin.copy_(training_set.origin)
    encoder.scale.fill_(training_set.scale)
    return network


def get_encoder(network: PrototypeNetwork) -> Encoder:
    """Get the `Encoder` of a network; networks of the solver and of model files always have one."""
    assert isinstance(network.encoder, Encoder)
    return network.encoder


def fit_labelled_rows(rows: TrainingRows, selected: SelectedModel, deadline: float = math.inf) -> PrototypeNetwork:
    """Fit the selected views to labelled rows, and return the network of these views in eval mode.

    The network takes features in the units of these rows, which may be scaled. After the deadline, only the view with
    the largest weight is fitted.
    """
    all_features, columns = rows.features, rows.columns
    rows = replace(rows.for_views(), shifts=selected.shifts, deadline=deadline)
    fitted: dict[ViewSpec, View] = {}
    for spec, _ in sorted(selected.views, key=lambda view: -view[1]):
        if not fitted or time.monotonic() < deadline:
            fit_view(spec, rows, fitted)
    chosen = [(fitted[spec], weight) for spec, weight in selected.views if spec in fitted]
    views = [view for view, _ in chosen]
    weights = split_weights(views, [weight for _, weight in chosen])
    encoder = Encoder(views, weights, origin=all_features.new_zeros(all_features.shape[1]), columns=columns)
    network = PrototypeNetwork(
        encoder, embedding_dim=encoder.embedding_dim, num_classes=rows.num_classes, temperature=selected.temperature
    )
    network.to(rows.features.device).set_prototypes(all_features, rows.labels, rows.sample_counts)
    if selected.offsets:
        network.set_offsets(torch.tensor(selected.offsets))
    return network.eval()


def fit_with_unlabelled_rows(
    training_set: TrainingSet,
    selected: SelectedModel,
    unlabelled: UnlabelledWeights,
    probabilities: Tensor,
    deadline: float = math.inf,
) -> PrototypeNetwork:
    """Fit the views of `select_semi_supervised_views` to labelled and unlabelled rows; return their network.

    Each unlabelled row gets the class of the largest of its ``probabilities`` (m, num_classes) as a pseudo-label. Its
    weight is this probability times ``unlabelled.weights``, and rows of weight 0 are left out. It is not added to its
    second class, too, since a rare class would get more wrong than correct rows.
    """
    assert training_set.unlabelled is not None
    selected = selected._replace(views=select_semi_supervised_views(selected.views), temperature=unlabelled.temperature)
    rows, (top_probabilities, classes) = training_set.rows, probabilities.max(dim=1)
    weights = top_probabilities.double() * unlabelled.weights
    used = weights > 0
    rows = replace(
        rows,
        features=torch.cat([rows.features, training_set.unlabelled.features[used]]),
        labels=torch.cat([rows.labels, classes[used]]),
        weights=torch.cat([rows.sample_counts, weights[used]]),
        sample_scale=1.0,
        groups=None,
    )
    return fit_labelled_rows(rows.to(training_set.device), selected, deadline)


#: Maximum number of labelled rows from which labels propagate.
MAX_POOLED_LABELLED_ROWS = 4096


@torch.no_grad()
def predict_pseudo_labels(training_set: TrainingSet, network: PrototypeNetwork) -> tuple[Tensor, Tensor]:
    """Compute class probabilities of the unlabelled rows by label propagation in the embedding of a network.

    Returns the probabilities (m, num_classes), and the logits (m, num_classes) of the network for these rows. The
    network is the result of `fit_labelled_rows`. It embeds the rows on the device of the training set; labels
    propagate on the CPU.
    """
    assert training_set.unlabelled is not None
    some, rows = training_set.pool_with_unlabelled_rows(MAX_POOLED_LABELLED_ROWS)
    embedding = torch.cat([network.embed(part.to(training_set.device)) for part in rows.split(MAX_CHUNK_ROWS)])
    logits = (embedding[len(some.labels) :] @ network.prototypes.T) / network.temperature
    logits = network.mask_logits(logits + network.offsets).cpu()
    return propagate_labels(embedding.cpu(), some.labels, logits.softmax(dim=1)), logits


#: Minimum total weight of the views that are fitted to unlabelled rows, as a fraction of the weight of all views. Views
#: with larger weights come first.
MIN_WEIGHT_FRACTION = 0.9


def select_semi_supervised_views(
    views: tuple[tuple[ViewSpec, float], ...], min_weight_fraction: float = MIN_WEIGHT_FRACTION
) -> tuple[tuple[ViewSpec, float], ...]:
    """Select the views that are fitted to unlabelled rows, too: those of the largest weights.

    Views are given and returned as pairs (spec, weight). Only views with a closed-form fit are selected, unless all
    views are trained by gradient descent. The total weight of the selected views is at least ``min_weight_fraction`` of
    the total weight of the views that may be selected.
    """
    untrained = [view for view in views if not view[0].is_trained] or list(views)
    ordered = sorted(untrained, key=lambda view: -view[1])
    total = sum(weight for _, weight in ordered)
    chosen: list[tuple[ViewSpec, float]] = []
    while ordered and sum(weight for _, weight in chosen) < min_weight_fraction * total:
        chosen.append(ordered.pop(0))
    return tuple(view for view in untrained if view in chosen)


def fit_view(spec: ViewSpec, rows: TrainingRows, fitted: dict[ViewSpec, View]) -> View:
    """Fit the view of a spec to rows; first fit the view whose features it reads, if the spec names one.

    A view that is already in ``fitted`` is not fitted again. New views are added to ``fitted``.
    """
    if spec not in fitted:
        source = None if spec.source is None else fit_view(spec.source, rows, fitted).source
        fitted[spec] = spec.fit(rows, source)
    return fitted[spec]


class SemiSupervisedResult(NamedTuple):
    """Whether unlabelled rows are used for the fit, and the held-out results on which this decision is based."""

    uses_unlabelled: bool  #: Whether the network is fitted to the unlabelled rows, too.
    held_out_losses: tuple[float, float] | None
    """Mean held-out log-losses: first without, then with the unlabelled rows. None if no row was held out."""
    is_significant: bool  #: Whether the two ``held_out_losses`` differ by more than one standard error.
    known_score_ranks: Tensor
    """(m,) float64: for each unlabelled row, the fraction of held-out rows of known classes that are less similar to
    the known classes, by `protonet.metrics.score_known_class`. A low rank means an outlier. 0 if no row was held
    out."""


def decide_use_of_unlabelled_rows(
    training_set: TrainingSet,
    selected: SelectedModel,
    deadline: float = math.inf,
    progress: FitProgress = ignore_progress,
) -> tuple[SelectedModel, SemiSupervisedResult]:
    """Decide by cross-validation whether the network is fitted to the unlabelled rows, too.

    They are used if this lowers the log-loss of held-out labelled rows, or if no row can be held out. They are not used
    if the deadline has passed. Outliers among the unlabelled rows always have weight 0.

    Returns two parts: the selected model, with the field ``unlabelled`` set if these rows are used; and the decision
    with the log-losses. Its field ``is_significant`` is False if the difference is within one standard error.
    """
    # Number of cross-validation folds that decide whether unlabelled rows are used.
    n_folds = 3
    rows, pool = training_set.rows, training_set.unlabelled
    assert pool is not None
    folds = split_training_rows(rows, 1, n_folds)

    def predict_fold(network: PrototypeNetwork, fold: Fold) -> Tensor:
        logits: Tensor = network(rows.features[fold.held_out].to(training_set.device))
        return logits.detach().cpu()

    probabilities, labelled_only = [], [torch.zeros(0, rows.num_classes, dtype=torch.float32)]
    scores = torch.zeros(len(pool.features), dtype=torch.float64)
    timed_out = selected, SemiSupervisedResult(False, None, False, torch.zeros_like(scores))
    for step, fold in enumerate(folds):
        progress(f"unlabelled rows, fold {step + 1} of {len(folds)}", step / (2 * len(folds)))
        part = replace(training_set, rows=rows.select(fold.train))
        network = fit_labelled_rows(part.rows.to(training_set.device), selected, deadline)
        if time.monotonic() >= deadline:
            return timed_out
        labelled_only.append(predict_fold(network, fold))
        fold_probabilities, logits = predict_pseudo_labels(part, network)
        probabilities.append(fold_probabilities)
        scores += score_known_class(logits) / len(folds)
    without = torch.cat(labelled_only)
    n_below = torch.searchsorted(score_known_class(without).sort().values, scores)
    ranks = n_below.double() / max(1, len(without))
    is_outlier = (ranks < OUTLIER_RATE) & (len(without) >= MIN_HELD_OUT_ROWS)
    unlabelled = UnlabelledWeights((~is_outlier).double(), selected.temperature)
    if not folds:  # with one row per class, no row can be held out
        return selected._replace(unlabelled=unlabelled), SemiSupervisedResult(True, None, False, ranks)
    pooled = []
    for step, (fold, fold_probabilities) in enumerate(zip(folds, probabilities, strict=True)):
        progress(f"unlabelled rows, fold {step + 1} of {len(folds)}", 0.5 + step / (2 * len(folds)))
        part = replace(training_set, rows=rows.select(fold.train))
        network = fit_with_unlabelled_rows(part, selected, unlabelled, fold_probabilities, deadline)
        if time.monotonic() >= deadline:
            return timed_out
        pooled.append(predict_fold(network, fold))
    held_out = torch.cat([fold.held_out for fold in folds])
    labels, seen = rows.labels[held_out], torch.bincount(rows.labels, minlength=rows.num_classes) > 0
    weights = None if rows.weights is None else rows.weights[held_out] / rows.weights[held_out].mean()
    factor_without, before = fit_temperature(without, labels, seen, weights)
    factor, after = fit_temperature(torch.cat(pooled), labels, seen, weights)
    losses = float(before.mean()), float(after.mean())
    learned = factor_without > 0 and factor > 0 and bool(unlabelled.weights.any()) and losses[1] < losses[0]
    decided = is_worse_by_one_error(after, before) or is_worse_by_one_error(before, after)
    outcome = SemiSupervisedResult(learned, losses, decided, ranks)
    if learned:
        temperature = selected.temperature * factor_without / factor
        selected = selected._replace(unlabelled=unlabelled._replace(temperature=temperature))
    return selected, outcome


#: Maximum number of unlabelled rows with few classes; more rows are subsampled.
LABEL_MAX_ROWS = 1024
#: With many classes, the maximum is this number times the number of classes.
MAX_ROWS_PER_CLASS = 64
#: Maximum number of unlabelled rows with any number of classes.
MAX_ROWS_ANY_CLASSES = 4096
#: Fraction of rows of known classes that are rejected as outliers, and minimum number of held-out rows for rejection.
OUTLIER_RATE, MIN_HELD_OUT_ROWS = 0.05, 20


#: Number of nearest neighbours to which each row has an edge.
N_NEIGHBOURS = 7
#: Weight of a row's neighbours in [0, 1]; the initial probabilities have weight 1 - alpha.
PROPAGATION_ALPHA = 0.95


def propagate_labels(embedding: Tensor, labels: Tensor, initial_probabilities: Tensor) -> Tensor:
    """Propagate labels over the graph of nearest neighbours in an embedding.

    The embedding (n + m, dim) has n rows with ``labels`` (n,), then m unlabelled rows with class probabilities
    ``initial_probabilities`` (m, num_classes). Returns the class probabilities (m, num_classes) float32 of the
    unlabelled rows.

    Source: Zhou, Bousquet, Lal, Weston and Schölkopf, "Learning with local and global consistency" (2004), with edges
        scaled by both ends' neighbourhoods as in Zelnik-Manor and Perona, "Self-tuning spectral clustering" (2004).
    """
    # Maximum number of iterations.
    max_steps = 200
    # The iteration stops if all probabilities change by less.
    tolerance = 1e-4
    n, classes = len(labels), initial_probabilities.shape[1]
    rows, others, weights = neighbour_graph(embedding, N_NEIGHBOURS)
    start = torch.cat([F.one_hot(labels, classes), initial_probabilities]).double()
    scores = start
    for _ in range(max_steps):
        before = scores
        scores = (1 - PROPAGATION_ALPHA) * start
        scores.index_add_(0, rows, weights[:, None] * before[others], alpha=PROPAGATION_ALPHA)
        if float((scores - before).abs().max()) < tolerance * (1 - PROPAGATION_ALPHA):
            break
    probabilities = scores[n:]
    return balance_class_frequencies(probabilities / probabilities.sum(dim=1, keepdim=True)).float()


def neighbour_graph(embedding: Tensor, neighbours: int) -> tuple[Tensor, Tensor, Tensor]:
    """Build the symmetric graph of nearest neighbours of unit rows (n, dim).

    Returns three tensors (edges,): the index of the row at the start of each edge, that of the row at the end, and the
    weight float64. Each edge is listed in both directions. If d is the cosine distance of two rows, and s and t are the
    distances to their farthest neighbours, the weight is exp(-4 d / sqrt(s t)), divided by the square roots of the
    degrees of both rows.
    """
    n = len(embedding)
    near, far = [torch.empty(0, 1)], [torch.empty(0, 1, dtype=torch.int64)]
    for first in range(0, n, MAX_CHUNK_ROWS // 4):
        cosines = embedding[first : first + MAX_CHUNK_ROWS // 4] @ embedding.T
        diagonal = torch.arange(len(cosines))
        cosines[diagonal, first + diagonal] = -2.0
        values, indices = cosines.topk(min(neighbours, n - 1), dim=1)
        near.append((1 - values).clamp_min(0))
        far.append(indices)
    distances, others = torch.cat(near[1:]).double(), torch.cat(far[1:])
    reach = distances[:, -1].clamp_min(torch.finfo(torch.float32).eps)
    weights = torch.exp(-4 * distances / (reach[:, None] * reach[others]).sqrt()).flatten()
    rows, others = torch.arange(n)[:, None].expand_as(others).flatten(), others.flatten()
    pairs = torch.cat([rows * n + others, others * n + rows])
    pairs, edge = pairs.unique(return_inverse=True)
    weights = torch.zeros(len(pairs), dtype=torch.float64).index_copy_(0, edge, weights.repeat(2))
    rows, others = pairs // n, pairs % n
    degrees = torch.zeros(n, dtype=torch.float64).index_add_(0, rows, weights).clamp_min(1e-30).sqrt()
    return rows, others, weights / (degrees[rows] * degrees[others])


#: Variance of relative class frequencies that estimation errors explain. If the observed variance is lower, the classes
#: are assumed to be equally frequent. If it is higher, frequencies are shrunk less.
NOISE_VARIANCE = 0.05
#: Number of iterations that scale the probabilities to the shrunken class frequencies.
N_BALANCING_STEPS = 30


def balance_class_frequencies(probabilities: Tensor) -> Tensor:
    """Scale class probabilities (m, num_classes) float64 so that class frequencies become more equal.

    The frequency of a class is its mean probability. Frequencies are shrunk towards equal ones as much as estimation
    errors may explain their variance. If the variance is at most ``NOISE_VARIANCE``, the
    classes become equally frequent.

    Source: shrinkage by the ratio of variances, as James and Stein, "Estimation with quadratic loss" (1961).
    """
    present = probabilities.sum(dim=0) > 0  # classes with samples
    frequencies = probabilities.mean(dim=0)[present] * int(present.sum())
    pull = min(1.0, NOISE_VARIANCE / max(float((frequencies - 1).square().mean()), 1e-12))
    target = (1 - pull) * frequencies + pull
    factors = torch.ones_like(probabilities[0])
    balanced = probabilities
    for _ in range(N_BALANCING_STEPS):
        observed = balanced.mean(dim=0)[present] * len(frequencies)
        factors[present] *= (target / observed.clamp_min(1e-9)).sqrt()
        balanced = probabilities * factors
        balanced = balanced / balanced.sum(dim=1, keepdim=True)
    return balanced
