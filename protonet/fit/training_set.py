"""Training sets: labelled rows as views are fitted to them, sorted, scaled and without duplicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protonet._validation import check_weights
from protonet.fit.duplicates import merge_duplicates
from protonet.fit.loading import canonical_row_order, centre_columns
from protonet.views.view import CPU, TrainingRows


class ClassNameRows(NamedTuple):
    """Embedded class names, used as additional training rows that are never held out."""

    features: Tensor  #: (m, dim) features of the names, from `protonet.fit.names.embed_class_names`.
    labels: Tensor  #: (m,) int64: the class index of each name.
    sample_count: float  #: Number of samples that each name counts as.
    descriptions: tuple[str, ...] = ()
    """The description of each class, "" for a class without one. Empty if no class has a description."""

    def count_class_samples(self, num_classes: int) -> Tensor:
        """Compute for each class the number (num_classes,) int64 of samples that its name counts as, 0 without one."""
        return torch.bincount(self.labels, minlength=num_classes) * round(self.sample_count)

    def to_dict(self, classes: Sequence[str | int]) -> dict[str, Any]:
        """Convert to a dict for a model file: "weight", "classes" with an embedded name, and "descriptions"."""
        named = [classes[label] for label in self.labels.tolist()]
        return {"weight": self.sample_count, "classes": named, "descriptions": list(self.descriptions)}


class UnlabelledSample(NamedTuple):
    """A sample of the unlabelled rows, to which views may be fitted."""

    features: Tensor  #: (m, dim) float32, in the units of the training set.
    indices: Tensor  #: (m,) int64: index of each row of the sample among all unlabelled rows.
    n_unlabelled: int  #: Number of all unlabelled rows.


@dataclass(frozen=True)
class RowSampleLimits:
    """Size of the sample of rows that views are fitted to if rows are many; see analysis/results/scale.md."""

    max_rows: int = 32768
    """Maximum number of distinct rows in the sample. More rows change little, since feature maps (views) have at most
    1,024 units and trees of 4,096 rows."""
    max_per_class: int = 512
    """All rows of a class with at most this many rows are in the sample, unless there are many classes."""


ROW_SAMPLE = RowSampleLimits()


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSet:
    """Labelled rows as models are fitted to them: sorted, scaled and without duplicates. Many rows are sampled."""

    rows: TrainingRows  #: The rows, in an order that does not depend on the input; equal rows are merged.
    scale: float  #: The number by which input features were divided, after the origin was subtracted.
    origin: Tensor  #: (dim,) float32, subtracted from the input features; see `protonet.fit.loading.centre_columns`.
    n_duplicates: int  #: Number of input rows that are duplicates or near-duplicates of another one.
    row_indices: Tensor
    """(n,) int64: index in ``rows`` of each input row, in the order of the loaders; -1 for a row outside the sample."""
    rows_per_sample: float = 1.0
    """Number of distinct input rows divided by the number of rows in the sample; 1 if all rows are used."""
    unlabelled: UnlabelledSample | None = None  #: The unlabelled rows; None if there are none.
    device: torch.device = CPU  #: Device on which views are fitted; the tensors here are on the CPU.

    def add_unlabelled_rows(self, features: Tensor, indices: Tensor, total: int) -> TrainingSet:
        """Copy the training set with unlabelled rows added, which are scaled like the labelled rows.

        ``features`` (m, dim) are in input units, and may be a sample. ``indices`` (m,) are the indices of these
        rows among all ``total`` unlabelled rows.
        """
        scaled = ((features - self.origin) / self.scale).to(torch.float32)
        return replace(self, unlabelled=UnlabelledSample(scaled, indices, total))

    def pool_rows(self, max_labelled: int) -> tuple[TrainingRows, Tensor]:
        """Select evenly spaced labelled rows; return them, and their features followed by those of unlabelled rows."""
        assert self.unlabelled is not None
        n = len(self.rows.labels)
        some = self.rows.select(torch.arange(0, n, -(-n // max_labelled)))  # rows are sorted by label
        return some, torch.cat([some.features, self.unlabelled.features])

    def original_features(self, indices: Tensor) -> Tensor:
        """Compute the input features (m, dim) of the rows with these indices (m,), in their original units."""
        return to_input_units(self.rows.features[indices], self.origin, self.scale)


def to_input_units(rows: Tensor, origin: Tensor, scale: Tensor | float) -> Tensor:
    """Convert scaled rows (n, dim) back to input units: rows * scale + origin; float64 if float32 would lose digits."""
    x = rows * scale
    return x.double() + origin if bool(origin.any()) else x


def prepare_training_set(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    seed: int = 0,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    blocks: Tensor | None = None,
    names: ClassNameRows | None = None,
) -> tuple[TrainingSet, Tensor | None]:
    """Build a training set from labelled samples: centre, sort, scale and merge rows, and sample many rows.

    Features (n, dim) must be finite; the other arguments are those of `protonet.fit.solver.fit_solution`. Returns the
    training set, and the group id (groups,) in it of each input group, in ascending order; None without groups.
    """
    n, is_class_name = len(labels), None
    if names is not None:
        n_groups = None if groups is None else len(groups.unique())
        features, labels, weights, groups, is_class_name = append_class_names(names, features, labels, weights, groups)
    if weights is not None:
        weights = check_weights("weights", weights, n=len(labels))
        weights = weights / weights.max()
    features, origin = centre_columns(features, weights)
    order = canonical_row_order(features, labels, weights)
    if groups is not None:
        groups = groups.unique(return_inverse=True)[1]
    rows = TrainingRows(
        features,
        labels,
        num_classes,
        seed=seed,
        weights=weights,
        groups=groups,
        column_indices=blocks,
        is_class_name=is_class_name,
    ).select(order)
    scale = _compute_scale(rows.features, rows.weights) or 1.0
    rows.features.div_(scale)  # in place: these rows are a copy
    rows, repeated, joined, pooled = merge_duplicates(rows)
    distinct = len(rows.labels)
    rows, sampled = sample_training_rows(rows)
    pooled = sampled[pooled]
    rows = _scale_sample_weights(rows, n if names is None or n else names.sample_count * len(names.labels))
    indices = torch.empty_like(order).index_copy_(0, order, pooled)
    if names is not None and joined is not None:
        joined = joined[:n_groups]
    training_set = TrainingSet(
        rows=rows,
        scale=scale,
        origin=origin,
        n_duplicates=repeated,
        row_indices=indices[:n],
        rows_per_sample=distinct / len(rows.labels),
    )
    return training_set, joined


def sample_training_rows(rows: TrainingRows) -> tuple[TrainingRows, Tensor]:
    """Sample about ``ROW_SAMPLE.max_rows`` rows, and weight them so that each class keeps its summed weight.

    The rows must be sorted by class. The sample is evenly spaced in each class, and has all rows of class names.
    Returns the sample, and for each row its index (n,) in the sample, -1 for rows that are not in it.

    Source: stratified systematic sampling, Cochran, "Sampling techniques" (1977), sec. 8.
    """
    labels, n = rows.labels, len(rows.labels)
    if n <= ROW_SAMPLE.max_rows:
        return rows, torch.arange(n)
    counts = torch.bincount(labels)
    minimum = counts.clamp(max=min(ROW_SAMPLE.max_per_class, ROW_SAMPLE.max_rows // (2 * int((counts > 0).sum()))))
    others = (counts - minimum) * ((ROW_SAMPLE.max_rows - int(minimum.sum())) / max(1, n - int(minimum.sum())))
    size, count = (minimum + others.long())[labels], counts[labels]  # (n,): rows of the class in the sample, and in all
    rank = torch.arange(n) - (counts.cumsum(dim=0) - counts)[labels]
    chosen = (rank + 1) * size // count > rank * size // count
    if rows.is_class_name is not None:
        chosen |= rows.is_class_name
    weights = torch.ones(n, dtype=torch.float64) if rows.weights is None else rows.weights
    factors = torch.bincount(labels, weights) / torch.bincount(labels[chosen], weights[chosen], minlength=len(counts))
    sample = replace(rows.select(chosen), weights=(weights * factors[labels])[chosen], row_fraction=rows.row_fraction)
    return sample, torch.where(chosen, chosen.cumsum(dim=0) - 1, -1)


def append_class_names(
    names: ClassNameRows, features: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Append embedded class names to training rows.

    Returns five parts: features, labels, weights, group ids or None, and a mask of the rows that are class names. Each
    name is a group of its own.
    """
    n, m = len(labels), len(names.labels)
    features, labels = torch.cat([features, names.features.to(features)]), torch.cat([labels, names.labels])
    weights = torch.ones(n, dtype=torch.float64) if weights is None else weights.double()
    mean = float(weights.mean()) if n else 1.0
    weights = torch.cat([weights, torch.full((m,), names.sample_count * mean, dtype=torch.float64)])
    if groups is not None:
        groups = torch.cat([groups, int(groups.max()) + 1 + torch.arange(m)])
    return features, labels, weights, groups, torch.arange(n + m) >= n


def _compute_scale(features: Tensor, weights: Tensor | None) -> float:
    """Compute the root mean square of features (n, dim), rounded to a power of two, which keeps all digits."""
    if weights is None:
        size = float(torch.linalg.vector_norm(features, dtype=torch.float64)) / math.sqrt(features.numel())
    else:
        energies = torch.linalg.vector_norm(features, dim=1, dtype=torch.float64).square()  # (n,)
        size = math.sqrt(float(weights @ energies / weights.sum()) / features.shape[1])
    return math.ldexp(1.0, round(math.log2(size))) if size else 0.0


def _scale_sample_weights(rows: TrainingRows, n: float) -> TrainingRows:
    """Scale sample weights to a maximum of 1, or remove equal ones, so that a row of weight 2 equals a repeated row."""
    if rows.weights is None:
        return rows
    weights = rows.weights / rows.weights.max()
    alike, samples = bool((weights == 1).all()), weights
    if rows.is_class_name is not None and not bool(rows.is_class_name.all()):
        samples = weights[~rows.is_class_name]
    return replace(rows, weights=None if alike else weights, sample_scale=n / float(samples.sum()))
