"""A network that weights the views, trained on thousands of small data sets.

Its input are statistics of the training rows and of the held-out predictions of each view, its output the weights of
the views and a correction of the temperature. It corrects the weights that the held-out rows alone suggest. In its
training (`python -m analysis prior`), an example is a whole data set, and the loss is the log-loss of test rows. Its
parameters are constants: nothing is fitted to a user's data.
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

#: All traits of views; see `protonet.views.view.ViewSpec.traits`.
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
VIEW_FEATURES, PROBLEM_FEATURES = 10, 23  #: Numbers of statistics of each view, and of each data set.
#: Indices of the statistics of a data set that the temperature depends on: counts, and held-out results. Other
#: statistics of rows do not transfer between data sets.
TEMPERATURE_FEATURES = [0, 2, 3, 4, 18, 19, 20, 21, 22]
HIDDEN = 32  #: Units of each layer.
MIN_SPREAD = 1e-6  #: A view whose cosines have a lower standard deviation over the classes does not separate rows.
MIN_LOG_INFLUENCE = -9.0  #: Lower limit of the logarithm of a view's influence.
MAX_CORRELATED = 512  #: Maximum number of rows, and of features in no order, whose correlations are computed.
MIN_SCALE = 0.05  #: Lower limit of the inverse temperature of cosines in units of their standard deviation.
LOGIT_DEVIATION = 1.5  #: Standard deviation of the logits without held-out rows, before the network's correction.
LEARNED_ROWS = 8  #: Number of held-out rows that determine the temperature as much as the network does.


class Evidence(NamedTuple):
    """The input of the prior: statistics of a data set and of its views."""

    views: Tensor  #: (views, VIEW_FEATURES) float32: statistics of each view.
    traits: Tensor  #: (views, traits) float32, 0 or 1: the traits of each view.
    problem: Tensor  #: (PROBLEM_FEATURES,) float32: statistics of the data set.
    start: Tensor  #: (views,) float32: logarithms of the influences that held-out rows suggest.
    spread: Tensor  #: (views,) float64: standard deviation of each view's cosines over the classes of a row.
    factor: float  #: Inverse temperature that held-out rows suggest, for cosines in units of their spread.


def encode_traits(specs: Sequence[ViewSpec]) -> Tensor:
    """Encode the ``TRAITS`` of each view: (views, traits) float32, 0 or 1."""
    rows = [[float(trait in spec.traits) for trait in TRAITS] for spec in specs]
    return torch.tensor(rows, dtype=torch.float32)


def describe_rows(rows: TrainingRows) -> Tensor:
    """Compute statistics of labelled rows that do not depend on the unit of the features: (18,) float32."""
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
        math.log(_effective_dimension(centred) / min(n, dim)),
        math.log(_effective_dimension(unit) / min(n, dim)),
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

    The mean is over neighbouring features if ``ordered``, else over all pairs of evenly spaced features.
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


def _effective_dimension(x: Tensor) -> float:
    """Compute the effective dimension >= 1 of rows (n, dim): the participation ratio of the eigenvalues."""
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
    """Compute the input of the prior from training rows and the out-of-fold cosines of each view.

    Args:
        rows: The training rows, with their shifts.
        traits: (views, traits) of `encode_traits`.
        cosines: (n, num_classes) of the held-out rows, for each view. If the labels are None, the cosines of the
            training rows, of which only the spread is used.
        labels: (n,) int64 of the held-out rows; None if no row can be held out.
        weights: (n,) of the held-out rows; None for equal weights.
        losses: (n,) log-losses of each view, of `fit_scale_and_offsets`; None to compute them here.
        statistics: Statistics of the rows, of `describe_rows`; None to compute them here.
    """
    sizes = torch.bincount(rows.labels, rows.sample_counts, minlength=rows.num_classes)
    seen = sizes > 0
    seen_cosines = [select_seen(view, seen) for view in cosines]
    shape = seen_cosines[0].shape  # (n, seen)
    blocks = list(row_blocks(shape[0], len(cosines) * shape[1]))

    def stack(block: slice) -> Tensor:
        """Stack the cosines (views, m, seen) float64 of a block of rows, since all rows may not fit in memory."""
        return torch.stack([view[block] for view in seen_cosines]).double()

    variance = torch.empty(len(cosines), shape[0], dtype=torch.float64)
    for block in blocks:
        variance[:, block] = stack(block).var(dim=2, correction=0)
    spread = variance.mean(dim=1).sqrt()
    size = (spread.clamp_min(MIN_SPREAD) / spread.max().clamp_min(MIN_SPREAD)).log()
    columns = [size.clamp_min(MIN_LOG_INFLUENCE), (spread < MIN_SPREAD).double()]
    problem = describe_rows(rows) if statistics is None else statistics
    if labels is None:
        start = torch.where(spread > MIN_SPREAD, 0.0, MIN_LOG_INFLUENCE)
        columns += [torch.zeros(len(traits), dtype=torch.float64)] * 8
        problem, factor = torch.cat([problem, torch.zeros(5)]), LOGIT_DEVIATION
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
        start = influences[1].clamp_min(math.exp(MIN_LOG_INFLUENCE)).log()
        divisor = spread.clamp_min(MIN_SPREAD)[:, None, None]
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
        alike = inner / (squares.sqrt() * math.sqrt(mixed_square)).clamp_min(MIN_SPREAD)
        columns += [
            (means - means[best]).clamp_max(3.0),
            ((means - means[best]) / error.clamp_min(1e-3)).clamp_max(6.0),
            means / max_loss,
            right - right.max(),
            influences[0].clamp_min(math.exp(MIN_LOG_INFLUENCE)).log(),
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
            math.log(max(factor, MIN_SCALE)),
        ]
        problem = torch.cat([problem, torch.tensor(held_out)])
    views = torch.stack(columns, dim=1).float()
    return Evidence(views, traits, problem.float(), start.float(), spread, max(factor, MIN_SCALE))


class Layer(nn.Module):
    """A linear layer whose parameters are initialized with zeros.

    `torch.nn.Linear` would draw from the global random state, and `torch.nn.utils.skip_init`, which avoids this,
    imports five hundred modules in 0.7 s.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return F.linear(x, self.weight, self.bias)


class Prior(nn.Module):
    """A network that maps `Evidence` to the weights of views and a correction of the inverse temperature.

    Before training, it returns the weights that the held-out rows suggest, and no correction.
    """

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
        self.belief = Layer(len(TEMPERATURE_FEATURES), HIDDEN)
        self.size = Layer(HIDDEN, 1)
        self.trust = nn.Parameter(torch.zeros(1, dtype=torch.float32))  # log factor on the start

    def forward(
        self, views: Tensor, traits: Tensor, problem: Tensor, start: Tensor, present: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute log influences (tasks, views) of views, and the log correction (tasks,) of the inverse temperature.

        Args:
            views: (tasks, views, VIEW_FEATURES) statistics of the views.
            traits: (tasks, views, traits), 0 or 1.
            problem: (tasks, PROBLEM_FEATURES) statistics of the data sets.
            start: (tasks, views) log influences that held-out rows suggest.
            present: (tasks, views) mask of the views that each data set has, at least one.
        """
        views = (views - self.view_mean) / self.view_deviation
        problem = (problem - self.problem_mean) / self.problem_deviation
        wide = problem[:, None].expand(-1, views.shape[1], -1)
        hidden = F.gelu(self.first(torch.cat([views, traits, wide], dim=2)))
        influence = start.masked_fill(~present, -torch.inf).softmax(dim=1)
        context = (influence[..., None] * hidden).sum(dim=1)  # (tasks, hidden)
        both = torch.cat([hidden, context[:, None].expand_as(hidden)], dim=2)
        second = F.gelu(self.second(both))
        score = start * self.trust.exp() + self.score(second)[..., 0]
        log_influence = score.masked_fill(~present, -torch.inf).log_softmax(dim=1)
        size = self.size(F.gelu(self.belief(problem[:, TEMPERATURE_FEATURES])))[:, 0]
        return log_influence, size

    @torch.no_grad()
    def weigh(self, evidence: Evidence) -> tuple[Tensor, float]:
        """Compute weights (views,) float64 of the cosines of views, and the correction of the inverse temperature.

        The weights sum to 1. They are 0 for views with less than ``WEIGHTS.min_influence`` of the influence, and for
        views that do not separate rows; if no view separates rows, all are 0.
        """
        separates = evidence.spread > MIN_SPREAD
        if not bool(separates.any()):
            return torch.zeros_like(evidence.spread), 1.0
        inputs = (evidence.views, evidence.traits, evidence.problem, evidence.start, separates)
        log_influence, size = self(*(tensor[None] for tensor in inputs))
        influence = drop_small_influence(log_influence[0].double().exp())
        weights = torch.where(separates, influence / evidence.spread.clamp_min(MIN_SPREAD), 0.0)
        return weights / weights.sum(), float(size.exp())


def drop_small_influence(influence: Tensor) -> Tensor:
    """Set influences (views,) below ``WEIGHTS.min_influence`` to 0, but never the largest one."""
    return torch.where(influence >= min(WEIGHTS.min_influence, float(influence.max())), influence, 0.0)


def serialize_prior(prior: Prior) -> str:
    """Encode the parameters of a prior as text: float16, little-endian, base64."""
    parameters = torch.cat([value.flatten() for value in prior.state_dict().values()])
    return base64.b64encode(parameters.to(torch.float16).numpy().astype("<f2").tobytes()).decode()


def deserialize_prior(text: str) -> Prior:
    """Decode a prior from the text of `serialize_prior`."""
    prior = Prior()
    values = torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f2").astype(np.float32))
    state = prior.state_dict()
    parts = values.split([value.numel() for value in state.values()])
    prior.load_state_dict({name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)})
    return prior.requires_grad_(False)


@functools.cache
def load_published_prior() -> Prior:
    """Load the pretrained prior of the library."""
    return deserialize_prior("".join(NUMBERS))
