"""A problem: labelled rows as views are fitted to them, and rows without a label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protonet._validation import check_weights
from protonet.fit.duplicates import merge_duplicates
from protonet.fit.loading import centre_columns, order_rows
from protonet.fit.unlabelled import Pool
from protonet.views.view import TrainingRows


class ClassNameRows(NamedTuple):
    """What classes are called, as rows, which are fitted to and never judged; see `protonet.fit.names`."""

    x: Tensor  #: (m, dim) as features.
    labels: Tensor  #: (m,) int64, the number of each one's class.
    weight: float  #: How many samples each counts as.
    descriptions: tuple[str, ...] = ()  #: One per class, "" for none; empty if no class has a description.

    def count_samples(self, num_classes: int) -> Tensor:
        """Return how many samples the names of each class (num_classes,) count as, int64."""
        return torch.bincount(self.labels, minlength=num_classes) * round(self.weight)

    def describe(self, classes: Sequence[str | int]) -> dict[str, Any]:
        """Describe the names for a model file: their weight, the classes that have one, all descriptions."""
        named = [classes[label] for label in self.labels.tolist()]
        return {"weight": self.weight, "classes": named, "descriptions": list(self.descriptions)}


class TrainingSet(NamedTuple):
    """Labelled rows, as views are fitted to them."""

    rows: TrainingRows  #: In canonical order, of unit scale, equal ones once; with the seed of all that is drawn.
    scale: float  #: Scale of the input features, less the origin.
    origin: Tensor  #: (dim,) float32; see `protonet.fit.loading.centre_columns`.
    repeated: int  #: How many of the rows that came are equal to another one, or nearly.
    places: Tensor  #: (n,) int64: the number, in ``rows``, of each row that came, in the order of the loaders.
    pool: Pool | None = None  #: Rows without a label.
    device: torch.device = torch.device("cpu")  #: Where views are fitted; all that is here is on the CPU.

    def add_pool(self, features: Tensor, indices: Tensor, total: int) -> TrainingSet:
        """Return the problem with rows (m, dim) that have no label, given their numbers and how many came."""
        scaled = ((features - self.origin) / self.scale).to(torch.float32)
        return self._replace(pool=Pool(scaled, indices, total))

    def features_as_they_came(self, indices: Tensor) -> Tensor:
        """Return the features (m, dim) of some rows (m,): float32, or float64 where that would lose digits."""
        x = self.rows.features[indices] * self.scale
        return x.double() + self.origin if bool(self.origin.any()) else x


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
    """Return a problem of samples as they came, and the number (groups,) of each group that was given.

    Args:
        features: (n, dim) float32 or float64, finite.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        seed: As in `solve_problem`.
        weights: As in `solve_problem`.
        groups: As in `solve_problem`.
        blocks: As in `solve_problem`.
        names: As in `solve_problem`.
    """
    n, is_class_name = len(labels), None
    if names is not None:
        several = None if groups is None else len(groups.unique())
        features, labels, weights, groups, is_class_name = add_names(names, features, labels, weights, groups)
    if weights is not None:
        weights = check_weights("weights", weights, n=len(labels))
        weights = weights / weights.max()
    features, origin = centre_columns(features, weights)
    order = order_rows(features, labels, weights)
    features, labels = features[order], labels[order]
    weights = None if weights is None else weights[order]
    if groups is not None:
        groups = groups[order].unique(return_inverse=True)[1]
    scale = _compute_scale(features, weights) or 1.0
    features.div_(scale)  # in place: these rows are a copy
    is_class_name = None if is_class_name is None else is_class_name[order]
    rows = TrainingRows(
        features,
        labels,
        num_classes,
        seed=seed,
        weights=weights,
        groups=groups,
        blocks=blocks,
        is_class_name=is_class_name,
    )
    rows, repeated, joined, pooled = merge_duplicates(rows)
    rows = _compare_weights(rows, n if names is None or n else names.weight * len(names.labels))
    indices = torch.empty_like(order).index_copy_(0, order, pooled)
    if names is not None and joined is not None:
        joined = joined[:several]
    return TrainingSet(rows, scale, origin, repeated, indices[:n]), joined


def add_names(
    names: ClassNameRows, features: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return rows with names behind them, what each weighs, its group, and which ones are names."""
    n, m = len(labels), len(names.labels)
    weights = torch.ones(n, dtype=torch.float64) if weights is None else weights.double()
    is_class_name = torch.arange(n + m) >= n
    mean = float(weights.mean()) if n else 1.0
    weights = torch.cat([weights, torch.full((m,), names.weight * mean, dtype=torch.float64)])
    if groups is not None:
        groups = torch.cat([groups, int(groups.max()) + 1 + torch.arange(m)])
    return (
        torch.cat([features, names.x.to(features)]),
        torch.cat([labels, names.labels]),
        weights,
        groups,
        is_class_name,
    )


def _compute_scale(features: Tensor, weights: Tensor | None) -> float:
    """Return the root mean square of features (n, dim) of rows of some weights (n,), to the nearest power of two.

    Divided by that, features keep all of their digits: a model file holds each row once, for views and as it came.
    """
    if weights is None:
        size = float(torch.linalg.vector_norm(features, dtype=torch.float64)) / math.sqrt(features.numel())
    else:
        energies = torch.linalg.vector_norm(features, dim=1, dtype=torch.float64).square()  # (n,)
        size = math.sqrt(float(weights @ energies / weights.sum()) / features.shape[1])
    return math.ldexp(1.0, round(math.log2(size))) if size else 0.0


def _compare_weights(rows: TrainingRows, n: float) -> TrainingRows:
    """Return rows with weights of n input samples, divided by the largest; None if all are 1.

    A row of weight 2 and a repeated row are equal from here on, to the last digit: selection on held-out rows and
    training would amplify the least difference.
    """
    if rows.weights is None:
        return rows
    weights = rows.weights / rows.weights.max()
    alike, samples = bool((weights == 1).all()), weights
    if rows.is_class_name is not None and not bool(rows.is_class_name.all()):
        samples = weights[~rows.is_class_name]
    return rows._replace(weights=None if alike else weights, sample_scale=n / float(samples.sum()))
