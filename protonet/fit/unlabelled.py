"""Unlabelled rows: their class probabilities, and outliers among them.

Labels spread over the graph of nearest neighbours in an embedding. Each row, as its likeliest class, is then pooled
with the labelled ones, and the views are fitted to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
class SpreadRules:
    """How labels spread; set on the developing half of analysis/results/unlabelled.md."""

    most_rows: int = 1024  #: Rows without a label that are learned from, at the most; of more, so many are drawn ...
    per_class: int = 64  #: ... or this many per class, if that is more ...
    limit: int = 4096  #: ... but no more than this.
    neighbours: int = 7  #: Edges of the graph from each row.
    keep: float = 0.95  #: Fraction that a row takes from its neighbours; the remainder is its initial probability.
    steps: int = 200  #: Steps of the spreading, at the most.
    settled: float = 1e-4  #: Change of a share at which it ends.
    even: float = 0.05
    """Variance of the classes' shares, in units of the mean share, that is put down to errors: up to it the classes are
    taken for equally frequent, beyond it less and less."""
    balancing: int = 30  #: Steps that bring shares to what they are taken for.


SPREAD = SpreadRules()
#: Rows of known classes that are taken for unlike ones, as a share; and the fewest held-out rows for that.
OUTLIER_RATE, MIN_HELD_OUT = 0.05, 20
#: A tensor or array (m, ...); or batches of inputs, alone or with labels.
Unlabelled = Tensor | np.ndarray | Iterable[Any] | Dataset[Any]
REMEDY = "Pass a tensor (m, ...), or batches of inputs."


class Pool(NamedTuple):
    """Rows without a label, as they are learned from."""

    features: Tensor  #: (m, dim) float32, in the units of the problem.
    places: Tensor  #: (m,) int64: which of the rows that came each one is.
    total: int  #: How many came.


def read_rows(source: object, dim: int, most: int) -> tuple[Tensor, Tensor, int]:
    """Read rows without a label once, and draw some of them: which ones depends on the rows, not on their order.

    Args:
        source: A tensor or array (m, ...), or an iterable of batches: inputs (b, ...), alone or with labels, which are
            not looked at.
        dim: Features of a row.
        most: Rows that are kept, at the most; memory goes with it, however many come.

    Returns:
        Features (kept, dim), the number of each among those that came (kept,) int64, and how many came.

    Raises:
        InputTypeError: No rows of numbers.
        InputError: Another width, or a number that is not finite.
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
        chosen = np.lexsort((indices, keys))[:most]
        sampled = [_take(parts, chosen)]
        keys, indices = keys[chosen], indices[chosen]
    return sampled[0], torch.from_numpy(indices), total


def _open(source: object) -> Iterable[object]:
    """Return batches, whatever way the rows come."""
    if isinstance(source, (torch.Tensor, np.ndarray)):
        return (source[first : first + CHUNK] for first in range(0, len(source), CHUNK))
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return DataLoader(source, batch_size=CHUNK)
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes)):
        raise_input_error(
            "unlabelled", "be rows or batches of rows", type(source).__name__, REMEDY, kind=InputTypeError
        )
    return source


def _read_batch(batch: object, batch_index: int, dim: int) -> Tensor:
    """Return the inputs (b, dim) of a batch, without its labels, if it has some."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 2 else batch
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biuf":
        inputs = torch.from_numpy(np.array(inputs))
    if not isinstance(inputs, Tensor) or inputs.is_complex():
        got = f"{type(inputs).__name__} in batch {batch_index}"
        raise_input_error("unlabelled", "hold rows of real numbers", got, REMEDY, kind=InputTypeError)
    if inputs.ndim < 2 or (len(inputs) and math.prod(inputs.shape[1:]) != dim):
        got = f"shape {tuple(inputs.shape)} in batch {batch_index}"
        remedy = "Pass the features of the labelled rows."
        raise_input_error("unlabelled", f"have {dim} features per row, as the labelled rows have", got, remedy)
    return inputs.detach().cpu().reshape(len(inputs), dim)


def _hash_rows(rows: Tensor) -> np.ndarray:
    """Return a number (n,) int64 for each row (n, dim), the same for equal ones."""
    bits = rows.to(torch.float32).add(0.0).numpy().view(np.int32).astype(np.int64)  # -0.0 becomes 0.0
    odd = np.random.default_rng(0).integers(0, 2**62, rows.shape[1]) * 2 + 1
    mixed = (bits * odd).sum(axis=1)
    spread: np.ndarray = (mixed ^ (mixed >> 29)) * np.int64(0x1B873593CC9E2D51)
    return spread


def _take(parts: Sequence[Tensor], rows: np.ndarray) -> Tensor:
    """Return some rows (m,) of parts (n, dim) that follow each other, in the finest of their types."""
    kinds = {torch.float64 if part.dtype in {torch.float64, torch.int64} else torch.float32 for part in parts[1:]}
    dtype = torch.float64 if torch.float64 in kinds | {parts[0].dtype} else torch.float32
    first = len(parts[0])
    selected = torch.empty(len(rows), parts[0].shape[1], dtype=dtype)
    old, chosen = torch.from_numpy(rows < first), torch.from_numpy(rows)
    selected[old] = parts[0][chosen[old]].to(dtype)
    selected[~old] = parts[1][chosen[~old] - first].to(dtype)
    return selected


def propagate_labels(embedding: Tensor, labels: Tensor, believed: Tensor) -> Tensor:
    """Let labels spread over the graph of nearest neighbours.

    Args:
        embedding: (n + m, dim) unit rows: n labelled ones, then m others.
        labels: (n,) int64.
        believed: (m, num_classes) probabilities of the others, where the spreading starts.

    Returns:
        (m, num_classes) float32, rows summing to 1.

    Source: Zhou, Bousquet, Lal, Weston and Schölkopf, "Learning with local and global consistency" (2004), with edges
        scaled by both ends' neighbourhoods as in Zelnik-Manor and Perona, "Self-tuning spectral clustering" (2004).
    """
    n, classes = len(labels), believed.shape[1]
    rows, others, weights = link_neighbours(embedding, SPREAD.neighbours)
    start = torch.cat([F.one_hot(labels, classes), believed]).double()
    scores = start
    for _ in range(SPREAD.steps):
        before = scores
        scores = (1 - SPREAD.keep) * start
        scores.index_add_(0, rows, weights[:, None] * before[others], alpha=SPREAD.keep)
        if float((scores - before).abs().max()) < SPREAD.settled * (1 - SPREAD.keep):
            break
    probabilities = scores[n:]
    return balance_frequencies(probabilities / probabilities.sum(dim=1, keepdim=True)).float()


def link_neighbours(embedding: Tensor, neighbours: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the graph of nearest neighbours of unit rows (n, dim): the ends of each edge, and its weight.

    For two rows at a distance d, 1 less their cosine, the weight is exp(-4 d / sqrt(s t)), s and t being how far the
    farthest neighbour of each is; it is normalised by the roots of both ends' degrees.

    Returns:
        (edges,) int64, (edges,) int64 and (edges,) float64; each edge both ways.
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


def balance_frequencies(beliefs: Tensor) -> Tensor:
    """Bring how often each class is believed to occur towards equal shares, as far as its variation may be error.

    Args:
        beliefs: (m, num_classes) float64, rows summing to 1.

    Returns:
        The same; where ``SPREAD.even`` explains all of the variation the classes have equal shares.

    Source: shrinkage by the ratio of variances, as James and Stein, "Estimation with quadratic loss" (1961).
    """
    believed = beliefs.sum(dim=0) > 0  # the others are classes without a sample
    frequencies = beliefs.mean(dim=0)[believed] * int(believed.sum())
    pull = min(1.0, SPREAD.even / max(float((frequencies - 1).square().mean()), 1e-12))
    target = (1 - pull) * frequencies + pull
    factors = torch.ones_like(beliefs[0])
    balanced = beliefs
    for _ in range(SPREAD.balancing):
        observed = balanced.mean(dim=0)[believed] * len(frequencies)
        factors[believed] *= (target / observed.clamp_min(1e-9)).sqrt()
        balanced = beliefs * factors
        balanced = balanced / balanced.sum(dim=1, keepdim=True)
    return balanced


def pool_rows(rows: TrainingRows, features: Tensor, beliefs: Tensor, known: Tensor) -> TrainingRows:
    """Return labelled rows and others together, each of the others as its likeliest class, at that one's probability.

    A second class of each row would add more wrong rows to a rare class than it has right ones.

    Args:
        rows: The labelled ones.
        features: (m, dim) of the others.
        beliefs: (m, num_classes) their probabilities.
        known: (m,) >= 0: how much each of them counts, next to a labelled row.

    Returns:
        The rows, in no groups.
    """
    top_probabilities, classes = beliefs.max(dim=1)
    weights = top_probabilities.double() * known
    used = weights > 0
    return rows._replace(
        features=torch.cat([rows.features, features[used]]),
        labels=torch.cat([rows.labels, classes[used]]),
        weights=torch.cat([rows.sample_counts, weights[used]]),
        sample_scale=1.0,
        groups=None,
    )


def rank_scores(known_scores: Tensor, scores: Tensor) -> Tensor:
    """Return which share of rows of known classes, held out, has lower scores (n,) than each of others (m,) has."""
    counts_below = torch.searchsorted(known_scores.sort().values, scores.contiguous())
    return counts_below.double() / max(1, len(known_scores))


def find_outliers(ranks: Tensor, n_held_out: int) -> Tensor:
    """Return which rows (m,) are unlike every class, given their ranks among so many rows: none where these are few."""
    return (ranks < OUTLIER_RATE) & (n_held_out >= MIN_HELD_OUT)
