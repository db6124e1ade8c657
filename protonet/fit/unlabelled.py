"""Semi-supervised learning: pseudo-labels of unlabelled rows, and outliers among these rows.

Labels propagate over the graph of nearest neighbours in the embedding. Each unlabelled row then gets its most probable
class as a label, and the views are fitted to labelled and unlabelled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import CHUNK_SIZE
from protonet.views.view import TrainingRows


@dataclass(frozen=True)
class LabelPropagationConstants:
    """Parameters of label propagation; chosen on the development half of analysis/results/semi_supervised.md."""

    max_rows: int = 1024  #: Maximum number of unlabelled rows with few classes; more rows are subsampled.
    max_rows_per_class: int = 64  #: With many classes, the maximum is this number times the number of classes.
    max_rows_any_classes: int = 4096  #: Maximum number of unlabelled rows with any number of classes.
    n_neighbours: int = 7  #: Number of nearest neighbours to which each row has an edge.
    alpha: float = 0.95  #: Weight of a row's neighbours in [0, 1]; the initial probabilities have weight 1 - alpha.
    max_steps: int = 200  #: Maximum number of iterations.
    tolerance: float = 1e-4  #: The iteration stops if all probabilities change by less.
    noise_variance: float = 0.05
    """Variance of relative class frequencies that estimation errors explain. If the observed variance is lower, the
    classes are assumed to be equally frequent. If it is higher, frequencies are shrunk less."""
    balancing_steps: int = 30  #: Number of iterations that scale the probabilities to the shrunken class frequencies.


LABEL_PROPAGATION = LabelPropagationConstants()
#: Fraction of rows of known classes that are rejected as outliers, and minimum number of held-out rows for rejection.
OUTLIER_RATE, MIN_HELD_OUT_ROWS = 0.05, 20


class UnlabelledSample(NamedTuple):
    """A sample of the unlabelled rows, to which views may be fitted."""

    features: Tensor  #: (m, dim) float32, in the units of the training set.
    indices: Tensor  #: (m,) int64: index of each row of the sample among all unlabelled rows.
    n_unlabelled: int  #: Number of all unlabelled rows.


def propagate_labels(embedding: Tensor, labels: Tensor, initial_probabilities: Tensor) -> Tensor:
    """Propagate labels over the graph of nearest neighbours in an embedding.

    The embedding (n + m, dim) has n rows with ``labels`` (n,), then m unlabelled rows with class probabilities
    ``initial_probabilities`` (m, num_classes). Returns the class probabilities (m, num_classes) float32 of the
    unlabelled rows.

    Source: Zhou, Bousquet, Lal, Weston and Schölkopf, "Learning with local and global consistency" (2004), with edges
        scaled by both ends' neighbourhoods as in Zelnik-Manor and Perona, "Self-tuning spectral clustering" (2004).
    """
    n, classes = len(labels), initial_probabilities.shape[1]
    rows, others, weights = neighbour_graph(embedding, LABEL_PROPAGATION.n_neighbours)
    start = torch.cat([F.one_hot(labels, classes), initial_probabilities]).double()
    scores = start
    for _ in range(LABEL_PROPAGATION.max_steps):
        before = scores
        scores = (1 - LABEL_PROPAGATION.alpha) * start
        scores.index_add_(0, rows, weights[:, None] * before[others], alpha=LABEL_PROPAGATION.alpha)
        if float((scores - before).abs().max()) < LABEL_PROPAGATION.tolerance * (1 - LABEL_PROPAGATION.alpha):
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
    for first in range(0, n, CHUNK_SIZE // 4):
        cosines = embedding[first : first + CHUNK_SIZE // 4] @ embedding.T
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


def balance_class_frequencies(probabilities: Tensor) -> Tensor:
    """Scale class probabilities (m, num_classes) float64 so that class frequencies become more equal.

    The frequency of a class is its mean probability. Frequencies are shrunk towards equal ones as much as estimation
    errors may explain their variance. If the variance is at most ``LabelPropagationConstants.noise_variance``, the
    classes become equally frequent.

    Source: shrinkage by the ratio of variances, as James and Stein, "Estimation with quadratic loss" (1961).
    """
    present = probabilities.sum(dim=0) > 0  # classes with samples
    frequencies = probabilities.mean(dim=0)[present] * int(present.sum())
    pull = min(1.0, LABEL_PROPAGATION.noise_variance / max(float((frequencies - 1).square().mean()), 1e-12))
    target = (1 - pull) * frequencies + pull
    factors = torch.ones_like(probabilities[0])
    balanced = probabilities
    for _ in range(LABEL_PROPAGATION.balancing_steps):
        observed = balanced.mean(dim=0)[present] * len(frequencies)
        factors[present] *= (target / observed.clamp_min(1e-9)).sqrt()
        balanced = probabilities * factors
        balanced = balanced / balanced.sum(dim=1, keepdim=True)
    return balanced


def append_pseudo_labelled_rows(
    rows: TrainingRows, features: Tensor, probabilities: Tensor, weights: Tensor
) -> TrainingRows:
    """Append unlabelled rows to labelled rows, each with its most probable class as a pseudo-label.

    ``features`` (m, dim) and ``probabilities`` (m, num_classes) are those of the unlabelled rows. The weight of such a
    row is the probability of its pseudo-label times ``weights`` (m,), which is 0 for outliers. Rows of weight 0 are
    left out. A row is not added to its second class, too, since a rare class would get more wrong than correct rows.
    The result has no groups.
    """
    top_probabilities, classes = probabilities.max(dim=1)
    weights = top_probabilities.double() * weights
    used = weights > 0
    return replace(
        rows,
        features=torch.cat([rows.features, features[used]]),
        labels=torch.cat([rows.labels, classes[used]]),
        weights=torch.cat([rows.sample_counts, weights[used]]),
        sample_scale=1.0,
        groups=None,
    )


def rank_among_known_scores(known_scores: Tensor, scores: Tensor) -> Tensor:
    """Compute for each of ``scores`` (m,) the fraction (m,) of ``known_scores`` (n,) that are lower."""
    counts_below = torch.searchsorted(known_scores.sort().values, scores.contiguous())
    return counts_below.double() / max(1, len(known_scores))


def detect_outliers(ranks: Tensor, n_held_out: int) -> Tensor:
    """Compute a mask (m,) of outliers: rows whose rank is below ``OUTLIER_RATE``.

    The rank (m,) of a row is the fraction of held-out rows that look no more like the known classes. No row is an
    outlier if fewer than ``MIN_HELD_OUT_ROWS`` rows were held out.
    """
    return (ranks < OUTLIER_RATE) & (n_held_out >= MIN_HELD_OUT_ROWS)
