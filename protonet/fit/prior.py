"""Prior learned from thousands of small problems: the weight of each view, and the temperature.

A small network, permutation-equivariant over views, maps statistics of a problem and of the held-out predictions of
each view to mixture weights and a temperature. It starts from the weights that the held-out rows alone suggest. Each
training episode was a whole problem, its loss the log-loss of test rows: `python -m analysis prior`. Its weights are
fixed: nothing in them is fitted to a user's data.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.fit.prior_numbers import NUMBERS
from protonet.selection.scoring import (
    WEIGHTS,
    fit_scale_and_offsets,
    fit_weights,
    row_blocks,
    select_seen,
    soft_weights,
)
from protonet.views.view import TrainingRows, ViewSpec, order_columns, select_evenly

#: Traits of views; see `protonet.views.view.ViewSpec.traits`.
TRAITS = (
    "raw",
    "centred",
    "standardised",
    "relevant",
    "robust",
    "whitened",
    "squashed",
    "gaussian",
    "laplacian",
    "shifted",
    "convolution",
    "local",
    "forest",
    "learned",
    "transformer",
)
VIEW_FEATURES, PROBLEM_FEATURES = 10, 23  #: Numbers of input features per view, and per problem.
#: Indices of the problem features that the factor depends on: counts, and held-out results. Other statistics of
#: rows do not transfer between data sets.
SIZED = [0, 2, 3, 4, 18, 19, 20, 21, 22]
HIDDEN = 32  #: Units of each layer.
LEAST_SPREAD = 1e-6  #: Spread of a view's cosines; below it, the view does not separate rows.
LEAST = -9.0  #: Lower limit of the logarithm of an influence.
MAX_CORRELATED = 512  #: Maximal number of rows, and of features in no order, whose correlations are computed.
LEAST_FACTOR = 0.05  #: Lower limit of the factor on the cosines over their spread.
SPREAD = 1.5  #: Standard deviation of the logits without held-out rows, before the learned correction.
FEW = 8  #: Held-out rows that weigh as much as the learned temperature.


class Evidence(NamedTuple):
    """Statistics of a problem and its views."""

    views: Tensor  #: (views, view features) float32
    traits: Tensor  #: (views, traits) float32, 0 or 1
    problem: Tensor  #: (problem features,) float32
    start: Tensor  #: (views,) float32: logarithms of the influences that held-out rows suggest
    spread: Tensor  #: (views,) float64: standard deviation of each view's cosines over the classes of a row
    factor: float  #: On the sum of the influences times the cosines over their spread: what held-out rows suggest.


def encode_traits(specs: Sequence[ViewSpec]) -> Tensor:
    """Encode the ``TRAITS`` of each view: (views, traits) float32, 0 or 1."""
    rows = [[float(trait in spec.traits) for trait in TRAITS] for spec in specs]
    return torch.tensor(rows, dtype=torch.float32)


def describe_rows(rows: TrainingRows) -> Tensor:
    """Compute statistics of labelled rows, (problem features,) float32, whatever units their features have."""
    x = rows.features
    n, dim = x.shape
    counts = torch.bincount(rows.labels, minlength=rows.num_classes)
    counts = counts[counts > 0].double()
    centred = (x - x.mean(dim=0)).double()
    deviation = centred.square().mean(dim=0).sqrt()
    varies = deviation > 1e-6 * deviation.max().clamp_min(1e-30)
    deviation, centred = deviation[varies].clamp_min(1e-30), centred[:, varies]
    if not len(deviation):
        deviation, centred = torch.ones(1, dtype=torch.float64), centred.new_zeros(n, 1)
    unit = centred / deviation
    values = x[:, varies] if bool(varies.any()) else x
    ascending = values.sort(dim=0).values
    distinct = (ascending[1:] > ascending[:-1]).double().mean() if n > 1 else torch.tensor(1.0)
    blocks = dim if rows.blocks is None else int(rows.blocks.max()) + 1
    statistics = [
        math.log(n),
        math.log(dim),
        math.log(len(counts)),
        float(counts.log().mean()),
        float(counts.min().log()),
        math.log(n / dim),
        float(rows.blocks is not None),
        math.log(blocks / dim),
        math.log(len(rows.shifts)),
        math.log(_spread_of_spectrum(centred) / min(n, dim)),
        math.log(_spread_of_spectrum(unit) / min(n, dim)),
        float(deviation.log().std(correction=0)),
        math.log1p(float(x.mean(dim=0).double().square().sum() / deviation.square().sum())),
        math.log(float(unit.pow(4).mean()) + 0.1),
        float(distinct),
        float((x == 0).double().mean()),
        float((x.amin(dim=0) >= 0).double().mean()),
        _mean_correlation(unit, ordered=rows.shifts != (0,)),
    ]
    return torch.tensor(statistics, dtype=torch.float32).clamp(-12, 12)


def _mean_correlation(unit: Tensor, *, ordered: bool) -> float:
    """Compute the mean absolute correlation of standardized features (n, dim).

    It is that of neighbours if features are in an order, else of all pairs.
    """
    n, dim = unit.shape
    if dim < 2:
        return 0.0
    if ordered:
        return float((unit[:, 1:] * unit[:, :-1]).mean(dim=0).abs().mean())
    columns = order_columns(unit, torch.arange(dim))[select_evenly(dim, MAX_CORRELATED)]
    part = unit[select_evenly(n, MAX_CORRELATED)][:, columns]
    correlation = (part.T @ part / len(part)).abs()
    return float((correlation.sum() - correlation.trace()) / (len(columns) * (len(columns) - 1)))


def _spread_of_spectrum(x: Tensor) -> float:
    """Compute the participation ratio of the eigenvalues of rows (n, dim), >= 1: their effective dimension."""
    gram = x @ x.T if len(x) < x.shape[1] else x.T @ x
    square = float(gram.square().sum())
    return max(1.0, float(gram.trace()) ** 2 / square) if square > 0 else 1.0


def gather_evidence(
    rows: TrainingRows,
    traits: Tensor,
    cosines: Sequence[Tensor],
    labels: Tensor | None,
    weights: Tensor | None = None,
    losses: Sequence[Tensor] | None = None,
    statistics: Tensor | None = None,
) -> Evidence:
    """Compute the evidence on each view, the input of the prior.

    Rows have their shifts; ``traits`` (views, traits) are of `encode_traits`. The cosines (n, num_classes) of each
    view, the labels (n,) and the weights (n,) are of rows held out. If no row can be held out, the cosines are of the
    labelled rows, and only their spread is used. The losses (n,) of each view are of `fit_scale_and_offsets`, the
    statistics of `describe_rows`; None to compute them here.
    """
    sizes = torch.bincount(rows.labels, rows.sample_counts, minlength=rows.num_classes)
    seen = sizes > 0
    seen_cosines = [select_seen(view, seen) for view in cosines]
    shape = seen_cosines[0].shape  # (n, seen)
    blocks = list(row_blocks(shape[0], len(cosines) * shape[1]))

    def stack(block: slice) -> Tensor:
        """Stack the cosines (views, m, seen) float64 of some rows; those of all rows may not fit in memory."""
        return torch.stack([view[block] for view in seen_cosines]).double()

    variance = torch.empty(len(cosines), shape[0], dtype=torch.float64)
    for block in blocks:
        variance[:, block] = stack(block).var(dim=2, correction=0)
    spread = variance.mean(dim=1).sqrt()
    size = (spread.clamp_min(LEAST_SPREAD) / spread.max().clamp_min(LEAST_SPREAD)).log()
    columns = [size.clamp_min(LEAST), (spread < LEAST_SPREAD).double()]
    problem = describe_rows(rows) if statistics is None else statistics
    if labels is None:
        start = torch.where(spread > LEAST_SPREAD, 0.0, LEAST)
        columns += [torch.zeros(len(traits), dtype=torch.float64)] * 8
        problem, factor = torch.cat([problem, torch.zeros(5)]), SPREAD
    else:
        n, max_loss = len(labels), math.log(max(2, int(seen.sum())))
        if losses is None:
            losses = [fit_scale_and_offsets(view, labels, sizes, weights)[2] for view in cosines]
        stacked_losses = torch.stack(list(losses))  # (views, n)
        means = stacked_losses.mean(dim=1)
        best = int(means.argmin())
        error = (stacked_losses - stacked_losses[best]).std(dim=1, correction=0) / math.sqrt(n)
        right = torch.stack([(view.argmax(dim=1) == labels).double().mean() for view in cosines])
        soft = soft_weights(cosines, losses)
        joint = fit_weights(cosines, labels, sizes, soft, weights)
        influences = [(view * spread / (view * spread).sum().clamp_min(1e-30)) for view in (soft, joint)]
        start = influences[1].clamp_min(math.exp(LEAST)).log()
        divisor = spread.clamp_min(LEAST_SPREAD)[:, None, None]
        targets = (seen.cumsum(dim=0) - 1)[labels]
        mixed = torch.empty(shape, dtype=torch.float64)
        for block in blocks:
            mixed[block] = torch.tensordot(influences[1], stack(block) / divisor, dims=1)
        factor, offsets, mixture_losses = fit_scale_and_offsets(mixed, targets, sizes[seen], weights)
        pull, inner, squares = (torch.zeros_like(spread) for _ in range(3))
        mixed_square = 0.0
        for block in blocks:
            scaled, part = stack(block) / divisor, mixed[block]
            logits = factor * part if offsets is None else factor * part + offsets
            wrong = logits.softmax(dim=1) - F.one_hot(targets[block], shape[1])
            pull += factor * torch.einsum("nc,vnc->v", wrong, scaled) / n  # of the mixture's loss along each influence
            flat = scaled - scaled.mean(dim=2, keepdim=True)
            common = part - part.mean(dim=1, keepdim=True)
            inner += torch.einsum("vnc,nc->v", flat, common)
            squares += flat.square().sum(dim=(1, 2))
            mixed_square += float(common.square().sum())
        alike = inner / (squares.sqrt() * math.sqrt(mixed_square)).clamp_min(LEAST_SPREAD)
        columns += [
            (means - means[best]).clamp_max(3.0),
            ((means - means[best]) / error.clamp_min(1e-3)).clamp_max(6.0),
            means / max_loss,
            right - right.max(),
            influences[0].clamp_min(math.exp(LEAST)).log(),
            start,
            (pull - (influences[1] * pull).sum()).clamp(-3, 3),
            alike,
        ]
        mixed_right = float((mixed.argmax(dim=1) == targets).double().mean())
        held_out = [
            1.0,
            math.log(n),
            float(mixture_losses.mean()) / max_loss,
            mixed_right,
            math.log(max(factor, LEAST_FACTOR)),
        ]
        problem = torch.cat([problem, torch.tensor(held_out)])
    views = torch.stack(columns, dim=1).float()
    return Evidence(views, traits, problem.float(), start.float(), spread, max(factor, LEAST_FACTOR))


class Layer(nn.Module):
    """A linear layer of zeros; `torch.nn.Linear` would draw from the global random state.

    To go without that draw, `torch.nn.utils.skip_init` imports five hundred modules, for 0.7 s.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return F.linear(x, self.weight, self.bias)


class Prior(nn.Module):
    """Network from evidence to influences and the temperature; untrained, it returns those of the held-out rows."""

    view_mean: Tensor
    view_deviation: Tensor
    problem_mean: Tensor
    problem_deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("view", VIEW_FEATURES), ("problem", PROBLEM_FEATURES)):
            self.register_buffer(f"{name}_mean", torch.zeros(size, dtype=torch.float32))
            self.register_buffer(f"{name}_deviation", torch.ones(size, dtype=torch.float32))
        self.first = Layer(VIEW_FEATURES + len(TRAITS) + PROBLEM_FEATURES, HIDDEN)
        self.second = Layer(2 * HIDDEN, HIDDEN)
        self.score = Layer(HIDDEN, 1)
        self.belief = Layer(len(SIZED), HIDDEN)
        self.size = Layer(HIDDEN, 1)
        self.trust = nn.Parameter(torch.zeros(1, dtype=torch.float32))  # in what the held-out rows suggest, a logarithm

    def forward(
        self, views: Tensor, traits: Tensor, problem: Tensor, start: Tensor, there: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the logarithms of the influences (tasks, views) and of the correction of the factor (tasks,).

        Inputs are views (tasks, views, view features), traits (tasks, views, traits), problem (tasks, problem
        features), start (tasks, views), and the mask ``there`` (tasks, views) of the present views, at least one.
        """
        views = (views - self.view_mean) / self.view_deviation
        problem = (problem - self.problem_mean) / self.problem_deviation
        wide = problem[:, None].expand(-1, views.shape[1], -1)
        hidden = F.gelu(self.first(torch.cat([views, traits, wide], dim=2)))
        influence = start.masked_fill(~there, -torch.inf).softmax(dim=1)
        context = (influence[..., None] * hidden).sum(dim=1)  # (tasks, hidden)
        both = torch.cat([hidden, context[:, None].expand_as(hidden)], dim=2)
        second = F.gelu(self.second(both))
        score = start * self.trust.exp() + self.score(second)[..., 0]
        log_influence = score.masked_fill(~there, -torch.inf).log_softmax(dim=1)
        size = self.size(F.gelu(self.belief(problem[:, SIZED])))[:, 0]
        return log_influence, size

    @torch.no_grad()
    def weigh(self, evidence: Evidence) -> tuple[Tensor, float]:
        """Compute the weights (views,) float64 of the views' cosines, summing to 1, and the correction of the factor.

        Views of less than ``WEIGHTS.min_influence`` of the influence get 0, as do views that do not separate rows,
        possibly all.
        """
        there = evidence.spread > LEAST_SPREAD
        if not bool(there.any()):
            return torch.zeros_like(evidence.spread), 1.0
        given = (evidence.views, evidence.traits, evidence.problem, evidence.start, there)
        log_influence, size = self(*(tensor[None] for tensor in given))
        influence = drop_small_influence(log_influence[0].double().exp())
        weights = torch.where(there, influence / evidence.spread.clamp_min(LEAST_SPREAD), 0.0)
        return weights / weights.sum(), float(size.exp())


def drop_small_influence(influence: Tensor) -> Tensor:
    """Set influences (views,) below ``WEIGHTS.min_influence`` to 0, but never the largest one."""
    return torch.where(influence >= min(WEIGHTS.min_influence, float(influence.max())), influence, 0.0)


def serialize_prior(prior: Prior) -> str:
    """Encode the weights of a prior as text: float16, little-endian, base64."""
    every = torch.cat([value.flatten() for value in prior.state_dict().values()])
    return base64.b64encode(every.to(torch.float16).numpy().astype("<f2").tobytes()).decode()


def deserialize_prior(text: str) -> Prior:
    """Decode the prior that `serialize_prior` wrote."""
    prior = Prior()
    values = torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f2").astype(np.float32))
    state = prior.state_dict()
    parts = values.split([value.numel() for value in state.values()])
    prior.load_state_dict({name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)})
    return prior.requires_grad_(False)


@functools.cache
def load_published_prior() -> Prior:
    """Load the pretrained prior of the library, trained on all tasks."""
    return deserialize_prior("".join(NUMBERS))
