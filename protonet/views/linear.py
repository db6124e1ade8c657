"""Linear views, fitted in closed form: the features raw, centred, scaled feature by feature, or whitened.

Such a view is one affine map, diagonal plus low rank, whose output is compared by cosine. Its statistics come from
labelled samples without any gradient, so they are buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from protonet.losses import CHUNK, class_means, weigh
from protonet.views.config import Config, number
from protonet.views.covariance import COVARIANCE, discriminant_gains, shrink_covariance
from protonet.views.judge import Candidate, Judge, Kind, embed_fold
from protonet.views.view import Graph, LinearMap, LinearMapConfig, Rows, Source, Specification, View

#: From the simplest to the most fitted; ties in selection go to the earlier one.
SCALINGS = ("raw", "centred", "standardised", "relevant", "robust", "whitened")


@dataclass(frozen=True)
class LinearRules:
    """How linear views are fitted; what the bias coordinate is worth was measured on iris and spectra."""

    bias: float = 3.0  #: The bias coordinate of scaled and whitened views, whose features have unit mean square.
    most_bias: float = 1e6  #: The largest bias coordinate that is read from a file.
    relevance: float = 5.0  #: The excess of the F statistic over 1 at which half of a feature is taken for signal ...
    least_relevance: float = 0.05  #: ... and the least excess.
    tiny: float = 1e-30  #: What is divided by instead of zero.
    constant: float = 1e-6  #: A feature that varies by less than this share of its root mean square is constant.
    quartiles: float = 1.349  #: The distance of the quartiles of normal features, in standard deviations.
    least_spread: float = 0.1
    """Share of the standard deviation below which the distance of the quartiles says nothing."""


LINEAR = LinearRules()


@dataclass(frozen=True)
class Linear:
    """A linear view.

    Args:
        scaling: One of ``SCALINGS``.
        span: The first column that is read, and the one behind the last; None for all.
    """

    scaling: str
    span: tuple[int, int] | None = None
    source: ClassVar[Specification | None] = None
    shifted: ClassVar[bool] = False
    trained: ClassVar[bool] = False

    @property
    def traits(self) -> frozenset[str]:
        """The scaling."""
        return frozenset({self.scaling})

    @property
    def name(self) -> str:
        """The scaling, and which columns it is of."""
        return self.scaling if self.span is None else f"{self.scaling} {self.span[0]}-{self.span[1] - 1}"

    @property
    def least_degrees(self) -> int:
        """Degrees of freedom within the classes that it takes to fit it."""
        return 2 if self.scaling in {"relevant", "whitened"} else 0

    def fit(self, rows: Rows, source: Source | None = None) -> LinearView:
        """Fit to labelled rows, scaled so that they have about unit mean square per feature.

        Source: standardised and whitened views as in Snell et al. 2017 (cosine prototypes) after LDA's sphering.
        """
        seen = rows.features
        if self.span is not None:
            rows = rows.take_columns(*self.span)
        features, shares = rows.features, rows.shares
        dim, scaling = features.shape[1], self.scaling
        shift = features.new_zeros(dim, dtype=torch.float64)
        gain = torch.ones_like(shift)
        basis, coefficient = shift.new_zeros(dim, 0), shift.new_zeros(0)
        if scaling != "raw":
            shift = _mean(features, shares)
        if scaling in {"standardised", "relevant", "robust"}:
            deviation = _mean((features - shift.to(features.dtype)).square(), shares).sqrt()
            usable = deviation > LINEAR.constant * _mean(features.square(), shares).sqrt()
            if scaling == "robust":  # median and interquartile range, unless half of the values are one
                lower, shift, upper = _quartiles(features, shares)
                spread = (upper - lower) / LINEAR.quartiles
                deviation = torch.where(spread > LINEAR.least_spread * deviation, spread, deviation)
            if rows.blocks is not None:
                variances = torch.bincount(rows.blocks, deviation.square() * usable)
                deviation = variances[rows.blocks].sqrt()
            gain = torch.where(usable, 1 / deviation.clamp_min(LINEAR.tiny), 0.0)
            if scaling == "relevant":
                gain *= _relevance(rows)
        if scaling == "whitened":
            gain, basis, coefficient = _whitening(rows)
        config = LinearMapConfig(seen.shape[1], dim, basis.shape[1], 0 if self.span is None else self.span[0])
        affine = LinearMap(config, {"shift": shift, "gain": gain, "basis": basis, "coefficient": coefficient})
        size = affine(seen[:CHUNK]).square().mean().sqrt()
        size = torch.where(size > LINEAR.tiny, size, 1.0)  # where rows do not vary, no size is too small for others
        affine.gain /= size
        affine.coefficient /= size
        return LinearView(LinearConfig(0.0 if scaling in {"raw", "centred"} else LINEAR.bias), affine)


@dataclass(frozen=True)
class LinearKind(Kind):
    """All scalings that the rows allow, the simplest first; none of them is pruned."""

    scalings: tuple[str, ...] = SCALINGS
    stage: ClassVar[str] = "linear views"

    def unjudged(self) -> LinearKind:
        """Return what one row per class allows."""
        return LinearKind(tuple(each for each in self.scalings if not Linear(each).least_degrees))

    def candidates(self, judge: Judge) -> Iterator[Candidate]:
        """Judge each scaling; what others may read is kept."""
        for specification in map(Linear, self.scalings):
            if judge.degrees < specification.least_degrees:
                continue
            cosines = judge.cosines(partial(embed_fold, judge.fit(specification)))
            yield judge.judge(specification, cosines)
            if judge.late():
                return


@dataclass(frozen=True)
class LinearConfig(Config):
    """A constant coordinate that joins each row; 0 for none.

    The plane becomes a sphere's cap, on which the cosine also sees how far from the mean a row is: of few features the
    direction alone tells too little.
    """

    bias: float = number(0.0, LINEAR.most_bias)


class LinearView(View):
    """The rows of an affine map, with a bias coordinate."""

    kind = "linear"
    config_type, reads = LinearConfig, LinearMap
    config: LinearConfig
    source: LinearMap

    @property
    def map(self) -> LinearMap:
        """What others read of it: the rows without the bias coordinate."""
        return self.source

    @property
    def sizes(self) -> tuple[int, ...]:
        """The width of the rows."""
        return (self.source.config.dim + bool(self.config.bias),)

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, dim) to (n, dim), or (n, dim + 1) with the bias coordinate."""
        return nn.functional.pad(z, (0, 1), value=self.config.bias) if self.config.bias else z

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the bias coordinate."""
        return [graph.pad(rows, int(self.config.bias > 0), self.config.bias)]


def _mean(features: Tensor, shares: Tensor | None) -> Tensor:
    """Return the weighted mean (dim,) float64 of features (n, dim)."""
    return weigh(features, shares).mean(dim=0, dtype=torch.float64)


def _quartiles(features: Tensor, shares: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the quartiles (dim,) of each feature, of at most ``CHUNK`` rows spread over the data."""
    step = max(1, len(features) // CHUNK)
    ordered, order = features[::step].sort(dim=0)
    if shares is None:
        quartiles = [ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75)]
    else:
        below = shares[::step][order].cumsum(dim=0)  # (rows, dim): the weight of each value and of those below it
        last = below[-1] - below[-1] / len(below)
        places = [(below <= (share * last).round()).sum(dim=0) for share in (0.25, 0.5, 0.75)]
        quartiles = [ordered.gather(0, place[None])[0] for place in places]
    return tuple(quartile.to(torch.float64) for quartile in quartiles)  # type: ignore[return-value]


def _relevance(rows: Rows) -> Tensor:
    """Return for each feature (dim,) a factor in (0, 1): how much its class means differ, by the F statistic.

    Under no difference F is about 1; the excess e over it gives ``sqrt(e / (e + LINEAR.relevance))``, a shrunken
    signal share.
    """
    (features, labels, num_classes, *_), shares = rows, rows.shares
    means, counts = class_means(features, labels, num_classes, shares)
    seen = int((counts > 0).sum())
    apart = weigh((features - means[labels]).square(), shares)
    within = apart.sum(dim=0, dtype=torch.float64) / max(1, len(features) - seen)
    between = (counts[:, None] * (means - weigh(features, shares).mean(dim=0)).square()).sum(dim=0, dtype=torch.float64)
    excess = (between / max(1, seen - 1) / within.clamp_min(LINEAR.tiny) - 1).clamp_min(LINEAR.least_relevance)
    return (excess / (excess + LINEAR.relevance)).sqrt()


def _whitening(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return gain (dim,), basis (dim, rank) and coefficient (rank,) of the whitened view."""
    (x, labels, num_classes, *_), shares = rows, rows.shares
    means, counts = class_means(x, labels, num_classes, shares)
    if shares is not None:  # rows that are worth as much as the weighted ones; Kish, "Survey sampling" (1965), sec. 8.2
        counts = counts.square() / torch.bincount(labels, shares.square(), minlength=num_classes).clamp_min(LINEAR.tiny)
    seen = counts > 0
    degrees = len(x) - int(seen.sum())
    shots = float(1 / (1 / counts[seen]).mean())
    dim = x.shape[1]
    covariance = shrink_covariance(weigh(x - means[labels], None if shares is None else shares.sqrt()), degrees)
    rank = len(covariance.variances)
    deviations = means[seen].to(torch.float64) - _mean(x, shares)
    along = (deviations @ covariance.basis).square().mean(dim=0)  # (rank,)
    within, between = covariance.variances, along
    multiplicity = torch.ones_like(within)
    if rank < dim:  # one more entry stands for all directions off the basis
        off = (deviations.square().sum(dim=1).mean() - along.sum()).clamp_min(0) / (dim - rank)
        within = torch.cat([within, covariance.rest[None]])
        between = torch.cat([between, off[None]])
        multiplicity = torch.cat([multiplicity, multiplicity.new_full((1,), dim - rank)])
    floor = within.max() * COVARIANCE.null
    gains = discriminant_gains(within.clamp_min(floor.clamp_min(LINEAR.tiny)), between, multiplicity, shots)
    rest = gains[rank] if rank < dim else gains.new_zeros(())
    return rest.expand(dim).clone(), covariance.basis, gains[:rank] - rest
