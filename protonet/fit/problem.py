"""A problem: labelled rows as views are fitted to them, and what fits a choice of views to some of them."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from protonet._checks import check_weights
from protonet.encoder import Encoder
from protonet.fit.copies import pool_copies
from protonet.fit.loading import centre_columns, order_rows
from protonet.fit.search import Choice, Pooling
from protonet.fit.unlabelled import Pool, pool_rows, spread_labels
from protonet.losses import CHUNK
from protonet.network import PrototypeNetwork
from protonet.views.mlp import MLP
from protonet.views.view import Rows, Specification, View

#: Of the weight of the views that are not trained, what those have that are fitted to rows without a label, too.
POOLED_SHARE = 0.9
#: Labelled rows that labels spread from, at the most.
MOST_SEEDS = 4096


class Problem(NamedTuple):
    """Labelled rows, as views are fitted to them."""

    rows: Rows  #: In canonical order, of unit scale, equal ones once; with the seed of all that is drawn.
    scale: float  #: Of the features as they came, less the origin.
    origin: Tensor  #: (dim,) float32; see `protonet.fit.loading.centre_columns`.
    repeated: int  #: How many of the rows that came are equal to another one, or nearly.
    places: Tensor  #: (n,) int64: the number, in ``rows``, of each row that came, in the order of the loaders.
    pool: Pool | None = None  #: Rows without a label.

    def add_pool(self, features: Tensor, places: Tensor, total: int) -> Problem:
        """Return the problem with rows (m, dim) that have no label, given their numbers and how many came."""
        scaled = ((features - self.origin) / self.scale).to(torch.float32)
        return self._replace(pool=Pool(scaled, places, total))

    def features_as_they_came(self, places: Tensor) -> Tensor:
        """Return the features (m, dim) of some rows (m,): float32, or float64 where that would lose digits."""
        return self._undo(self.rows.features[places])

    def show_pool(self) -> Tensor:
        """Return the features (m, dim) of the pool, if there is one, as `features_as_they_came` does."""
        return self._undo(self.rows.features[:0] if self.pool is None else self.pool.features)

    def _undo(self, features: Tensor) -> Tensor:
        x = features * self.scale
        return x.double() + self.origin if bool(self.origin.any()) else x


def pose_problem(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    seed: int = 0,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    blocks: Tensor | None = None,
) -> tuple[Problem, Tensor | None]:
    """Return a problem of samples as they came, and the number (groups,) of each group that was given.

    Args:
        features: (n, dim) float32 or float64, finite.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        seed: As in `solve_problem`, and so are the others.
        weights: The same.
        groups: The same.
        blocks: The same.
    """
    if weights is not None:
        weights = check_weights("solve", "weights", weights, n=len(labels))
        weights = weights / weights.max()
    features, origin = centre_columns(features, weights)
    order = order_rows(features, labels)
    features, labels = features[order], labels[order]
    weights = None if weights is None else weights[order]
    if groups is not None:
        groups = groups[order].unique(return_inverse=True)[1]
    scale = _find_scale(features, weights) or 1.0
    features.div_(scale)  # in place: these rows are a copy
    rows = Rows(features, labels, num_classes, seed=seed, weights=weights, groups=groups, blocks=blocks)
    rows, repeated, joined, pooled = pool_copies(rows)
    rows = _compare_weights(rows, len(order))
    return Problem(rows, scale, origin, repeated, torch.empty_like(order).index_copy_(0, order, pooled)), joined


def _find_scale(features: Tensor, weights: Tensor | None) -> float:
    """Return the root mean square of features (n, dim) of rows of some weights (n,)."""
    if weights is None:
        return float(torch.linalg.vector_norm(features, dtype=torch.float64)) / math.sqrt(features.numel())
    energies = torch.linalg.vector_norm(features, dim=1, dtype=torch.float64).square()  # (n,)
    return math.sqrt(float(weights @ energies / weights.sum()) / features.shape[1])


def _compare_weights(rows: Rows, n: int) -> Rows:
    """Return rows whose weights stand for n rows that came, the largest of them 1; None where all are.

    A row of weight 2 and a row that came twice are the same from here on, to the last digit: what is decided on
    held-out rows, and what is trained, would make more of the least difference.
    """
    if rows.weights is None:
        return rows
    weights = rows.weights / rows.weights.max()
    alike = bool((weights == 1).all())
    return rows._replace(weights=None if alike else weights, unit=n / float(weights.sum()))


def fit_choice(problem: Problem, choice: Choice, deadline: float = math.inf) -> PrototypeNetwork:
    """Fit the chosen views and train the chosen MLPs on all rows of a problem; call it within `untouched_globals`.

    Args:
        problem: The rows. Those that were chosen on, or some of them with every class among them.
        choice: What `protonet.fit.search.select` decided.
        deadline: ``time.monotonic()`` after which training ends, and no view is fitted but the one of most weight.

    Returns:
        The network in eval mode, on the CPU, for features as they came.
    """
    network = fit_rows(problem.rows, choice, deadline)
    if choice.pooling is not None and time.monotonic() < deadline:
        pooled = fit_pooled(problem, choice, choice.pooling, believe(problem, network)[0], deadline)
        # Prototypes are means of all, but count as the labelled rows: samples that come with a label move them as ever.
        pooled.set_sums(pooled.sums * (network.counts / pooled.counts.clamp_min(1))[:, None], network.counts)
        network = pooled if time.monotonic() < deadline else network
    encoder = network.encoder
    assert isinstance(encoder, Encoder)
    encoder.scale.fill_(problem.scale)
    encoder.origin.copy_(problem.origin)
    return network


def fit_rows(rows: Rows, choice: Choice, deadline: float = math.inf) -> PrototypeNetwork:
    """Do what `fit_choice` does, to labelled rows alone; the network is for features in their units."""
    rows = rows._replace(shifts=choice.shifts, deadline=deadline)
    fitted: dict[Specification, View] = {}
    for specification, _ in sorted(choice.views, key=lambda each: -each[1]):
        if not fitted or time.monotonic() < deadline:
            fit_view(specification, rows, fitted)
    found = [(fitted[each], weight) for each, weight in choice.views if each in fitted]
    weights = torch.tensor([weight for _, weight in found], dtype=torch.float32)
    encoder = Encoder([view for view, _ in found], weights, input_dim=rows.features.shape[1])
    network = PrototypeNetwork(
        encoder, embedding_dim=encoder.embedding_dim, num_classes=rows.num_classes, temperature=choice.temperature
    )
    network.set_prototypes(rows.features, rows.labels, rows.times)
    return network.eval()


def fit_pooled(
    problem: Problem, choice: Choice, pooling: Pooling, beliefs: Tensor, deadline: float = math.inf
) -> PrototypeNetwork:
    """Fit to labelled rows and to those without a label.

    Args:
        problem: With its pool.
        choice: As in `fit_choice`. Learned views stay out, unless there is nothing else; so do those of little weight.
        pooling: How the pool is used.
        beliefs: Of the pool, from `believe`.
        deadline: As in `fit_choice`.

    Returns:
        The network, for features in the units of the problem's rows.
    """
    assert problem.pool is not None
    choice = choice._replace(views=leave_out(choice.views), temperature=pooling.temperature)
    return fit_rows(pool_rows(problem.rows, problem.pool.features, beliefs, pooling.known), choice, deadline)


@torch.no_grad()
def believe(problem: Problem, network: PrototypeNetwork) -> tuple[Tensor, Tensor]:
    """Return what the rows of a problem's pool are likely to be, (m, num_classes) that sum to 1, and their logits.

    Args:
        problem: With its pool.
        network: Of `fit_rows`, fitted to the problem's rows.
    """
    assert problem.pool is not None
    n = len(problem.rows.labels)
    some = problem.rows.take(torch.arange(0, n, -(-n // MOST_SEEDS)))  # rows are in the order of their labels
    rows = torch.cat([some.features, problem.pool.features])
    embedding = torch.cat([network.embed(part) for part in rows.split(CHUNK)])
    logits = (embedding[len(some.labels) :] @ network.prototypes.T) / network.temperature
    logits = logits.masked_fill(~network.seen, torch.finfo(logits.dtype).min)
    return spread_labels(embedding, some.labels, logits.softmax(dim=1)), logits


def leave_out(
    views: tuple[tuple[Specification, float], ...], share: float = POOLED_SHARE
) -> tuple[tuple[Specification, float], ...]:
    """Return the views that are fitted to many rows: none that is trained, and those that hold a share of the weight.

    Where all are trained, these count.
    """
    closed = [view for view in views if not isinstance(view[0], MLP)] or list(views)
    ordered = sorted(closed, key=lambda view: -view[1])
    total, kept = sum(weight for _, weight in ordered), 0.0
    chosen = []
    for view in ordered:
        if kept < share * total:
            chosen.append(view)
            kept += view[1]
    return tuple(view for view in closed if view in chosen)


def fit_view(specification: Specification, rows: Rows, fitted: dict[Specification, View]) -> View:
    """Return a view fitted to rows, and what it reads before it, each once."""
    if specification not in fitted:
        source = None if specification.source is None else fit_view(specification.source, rows, fitted)
        fitted[specification] = specification.fit(rows, source)
    return fitted[specification]
