"""Semi-supervised learning: pseudo-labels of unlabelled rows, and outliers among them.

Labels propagate over the graph of nearest neighbours in the embedding. Each unlabelled row then joins the labelled rows
with its most probable class, and the views are fitted to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from protonet.errors import InputTypeError, raise_input_error
from protonet.losses import CHUNK
from protonet.views.view import TrainingRows


@dataclass(frozen=True)
class PropagationRules:
    """Parameters of label propagation; chosen on the development half of analysis/results/semi_supervised.md."""

    max_rows: int = 1024  #: Maximum number of unlabelled rows; more are subsampled ...
    per_class: int = 64  #: ... to this or to this many rows per class, whichever is more, ...
    limit: int = 4096  #: ... but never to more than this.
    neighbours: int = 7  #: Edges of the graph from each row.
    alpha: float = 0.95  #: Weight of a row's neighbours; the remainder is the weight of its initial probabilities.
    max_steps: int = 200  #: Maximum number of iterations.
    tolerance: float = 1e-4  #: The iteration stops if no probability changes by more.
    noise_variance: float = 0.05
    """Variance of the class frequencies, in units of their mean, that estimation errors explain. Up to it, classes are
    assumed to be equally frequent; beyond it, frequencies are shrunk less and less."""
    balancing_steps: int = 30  #: Iterations that scale the probabilities to the shrunken class frequencies.


PROPAGATION = PropagationRules()
#: Fraction of rows of known classes that are rejected as outliers; and minimum number of held-out rows for that.
OUTLIER_RATE, MIN_HELD_OUT = 0.05, 20
#: A tensor or array (m, ...); or batches of inputs, alone or with labels.
Unlabelled = Tensor | np.ndarray | Iterable[Any] | Dataset[Any]
UNLABELLED_REMEDY = "Pass a tensor (m, ...), or batches of inputs."


class Pool(NamedTuple):
    """Unlabelled rows that were sampled for training."""

    features: Tensor  #: (m, dim) float32, in the units of the training set.
    indices: Tensor  #: (m,) int64: index of each one among all unlabelled rows.
    total: int  #: Number of all unlabelled rows.


def read_rows(source: object, dim: int, max_rows: int) -> tuple[Tensor, Tensor, int]:
    """Read unlabelled rows once, and sample up to ``max_rows`` of them, independently of their order.

    Returns features (sampled, dim), the indices (sampled,) int64 among all rows, and the number of all rows. Raises an
    InputTypeError or InputError if the source does not hold rows of ``dim`` finite real numbers.
    """
    sampled, keys, indices = [torch.empty(0, dim, dtype=torch.float32)], np.empty(0, np.int64), np.empty(0, np.int64)
    total = 0
    for batch_index, batch in enumerate(_open(source)):
        rows = _read_batch(batch, batch_index, dim)
        if not len(rows):
            continue
        bad = int((~torch.isfinite(rows.to(torch.float32))).any(dim=1).sum())
        if bad:
            got = f"NaN, infinity or more than float32 holds in {bad} of {len(rows)} rows of batch {batch_index}"
            raise_input_error("unlabelled", "be finite", got, "Drop or impute those rows.")
        hashes = _hash_rows(rows)
        keys, indices = np.concatenate([keys, hashes]), np.concatenate([indices, total + np.arange(len(rows))])
        parts = [*sampled, rows]
        total += len(rows)
        chosen = np.lexsort((indices, keys))[:max_rows]
        sampled = [_gather_rows(parts, chosen)]
        keys, indices = keys[chosen], indices[chosen]
    return sampled[0], torch.from_numpy(indices), total


def _open(source: object) -> Iterable[object]:
    """Convert a source of rows to an iterable of batches."""
    if isinstance(source, (torch.Tensor, np.ndarray)):
        return (source[first : first + CHUNK] for first in range(0, len(source), CHUNK))
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return DataLoader(source, batch_size=CHUNK)
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes)):
        raise_input_error(
            "unlabelled", "be rows or batches of rows", type(source).__name__, UNLABELLED_REMEDY, kind=InputTypeError
        )
    return source


def _read_batch(batch: object, batch_index: int, dim: int) -> Tensor:
    """Get the inputs (b, dim) of a batch, without labels."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 2 else batch
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biuf":
        inputs = torch.from_numpy(np.array(inputs))
    if not isinstance(inputs, Tensor) or inputs.is_complex():
        got = f"{type(inputs).__name__} in batch {batch_index}"
        raise_input_error("unlabelled", "hold rows of real numbers", got, UNLABELLED_REMEDY, kind=InputTypeError)
    if inputs.ndim < 2 or (len(inputs) and math.prod(inputs.shape[1:]) != dim):
        got = f"shape {tuple(inputs.shape)} in batch {batch_index}"
        remedy = "Pass the features of the labelled rows."
        raise_input_error("unlabelled", f"have {dim} features per row, as the labelled rows have", got, remedy)
    return inputs.detach().cpu().reshape(len(inputs), dim)


def _hash_rows(rows: Tensor) -> np.ndarray:
    """Hash rows (n, dim) to (n,) int64."""
    bits = rows.to(torch.float32).add(0.0).numpy().view(np.int32).astype(np.int64)  # -0.0 becomes 0.0
    odd = np.random.default_rng(0).integers(0, 2**62, rows.shape[1]) * 2 + 1
    mixed = (bits * odd).sum(axis=1)
    spread: np.ndarray = (mixed ^ (mixed >> 29)) * np.int64(0x1B873593CC9E2D51)
    return spread


def _gather_rows(parts: Sequence[Tensor], rows: np.ndarray) -> Tensor:
    """Gather rows (m,) from the concatenation of two parts (n, dim), in the wider of their types."""
    kinds = {torch.float64 if part.dtype in {torch.float64, torch.int64} else torch.float32 for part in parts[1:]}
    dtype = torch.float64 if torch.float64 in kinds | {parts[0].dtype} else torch.float32
    first = len(parts[0])
    selected = torch.empty(len(rows), parts[0].shape[1], dtype=dtype)
    old, chosen = torch.from_numpy(rows < first), torch.from_numpy(rows)
    selected[old] = parts[0][chosen[old]].to(dtype)
    selected[~old] = parts[1][chosen[~old] - first].to(dtype)
    return selected


def propagate_labels(embedding: Tensor, labels: Tensor, initial: Tensor) -> Tensor:
    """Propagate labels over the graph of nearest neighbours: probabilities (m, num_classes) float32.

    The embedding (n + m, dim) holds n rows of the labels (n,), then m unlabelled rows with probabilities ``initial``.

    Source: Zhou, Bousquet, Lal, Weston and Schölkopf, "Learning with local and global consistency" (2004), with edges
        scaled by both ends' neighbourhoods as in Zelnik-Manor and Perona, "Self-tuning spectral clustering" (2004).
    """
    n, classes = len(labels), initial.shape[1]
    rows, others, weights = neighbour_graph(embedding, PROPAGATION.neighbours)
    start = torch.cat([F.one_hot(labels, classes), initial]).double()
    scores = start
    for _ in range(PROPAGATION.max_steps):
        before = scores
        scores = (1 - PROPAGATION.alpha) * start
        scores.index_add_(0, rows, weights[:, None] * before[others], alpha=PROPAGATION.alpha)
        if float((scores - before).abs().max()) < PROPAGATION.tolerance * (1 - PROPAGATION.alpha):
            break
    probabilities = scores[n:]
    return balance_frequencies(probabilities / probabilities.sum(dim=1, keepdim=True)).float()


def neighbour_graph(embedding: Tensor, neighbours: int) -> tuple[Tensor, Tensor, Tensor]:
    """Build the symmetric graph of nearest neighbours of unit rows (n, dim).

    Let d be the cosine distance of two rows, and s and t the distances to their farthest neighbours. The weight of
    their edge is exp(-4 d / sqrt(s t)), divided by the square roots of both ends' degrees. Returns the two ends
    (edges,) of each edge, in both directions, and its weight (edges,) float64.
    """
    n = len(embedding)
    near, far = [torch.empty(0, 1)], [torch.empty(0, 1, dtype=torch.int64)]
    for first in range(0, n, CHUNK // 4):
        cosines = embedding[first : first + CHUNK // 4] @ embedding.T
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


def balance_frequencies(probabilities: Tensor) -> Tensor:
    """Scale probabilities (m, num_classes) float64 so that class frequencies shrink towards equal ones.

    The shrinkage is as strong as estimation errors may explain the variation. If ``PropagationRules.noise_variance``
    explains all of it, the classes become equally frequent.

    Source: shrinkage by the ratio of variances, as James and Stein, "Estimation with quadratic loss" (1961).
    """
    present = probabilities.sum(dim=0) > 0  # classes with samples
    frequencies = probabilities.mean(dim=0)[present] * int(present.sum())
    pull = min(1.0, PROPAGATION.noise_variance / max(float((frequencies - 1).square().mean()), 1e-12))
    target = (1 - pull) * frequencies + pull
    factors = torch.ones_like(probabilities[0])
    balanced = probabilities
    for _ in range(PROPAGATION.balancing_steps):
        observed = balanced.mean(dim=0)[present] * len(frequencies)
        factors[present] *= (target / observed.clamp_min(1e-9)).sqrt()
        balanced = probabilities * factors
        balanced = balanced / balanced.sum(dim=1, keepdim=True)
    return balanced


def pool_rows(rows: TrainingRows, features: Tensor, probabilities: Tensor, known: Tensor) -> TrainingRows:
    """Concatenate labelled and unlabelled rows (m, dim), each with its most probable class and that probability.

    Adding a row to its second class, too, would add more wrong rows to a rare class than it has correct ones. ``known``
    (m,) are the sample weights of the unlabelled rows, where a labelled row has 1. The result has no groups.
    """
    top_probabilities, classes = probabilities.max(dim=1)
    weights = top_probabilities.double() * known
    used = weights > 0
    return replace(
        rows,
        features=torch.cat([rows.features, features[used]]),
        labels=torch.cat([rows.labels, classes[used]]),
        weights=torch.cat([rows.sample_counts, weights[used]]),
        sample_scale=1.0,
        groups=None,
    )


def rank_scores(known_scores: Tensor, scores: Tensor) -> Tensor:
    """Compute the fraction of held-out scores of known classes (n,) that are below each score (m,)."""
    counts_below = torch.searchsorted(known_scores.sort().values, scores.contiguous())
    return counts_below.double() / max(1, len(known_scores))


def detect_outliers(ranks: Tensor, n_held_out: int) -> Tensor:
    """Flag rows (m,) whose ranks are below ``OUTLIER_RATE``; none if fewer than ``MIN_HELD_OUT`` rows were held out."""
    return (ranks < OUTLIER_RATE) & (n_held_out >= MIN_HELD_OUT)
