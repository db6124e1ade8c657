"""Radial views: a hidden layer of radial units at labelled samples, with a read-out in closed form.

Kernel ridge regression of the class indicators: the view of a row is its score for each class, and the prototypes
of such a view are near one-hot. Nothing in it is trained by gradient, so all of it are buffers.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import CHUNK, class_means
from protonet.views.config import Config, expect, size
from protonet.views.distances import distances, find_steps, round_distances
from protonet.views.judge import PRUNING, Candidate, Judge, Kind
from protonet.views.linear import Linear
from protonet.views.shifts import shift_rows
from protonet.views.view import Graph, LinearMap, Rows, Source, View, need_map


@dataclass(frozen=True)
class RadialRules:
    """Bounds of the work and of rounding; analysis/results/scale.md shows the times that they lead to."""

    most_units: int = 1024  #: Radial units of a view, at the most.
    distance_work: float = 2e8
    """Subtractions that one fit may spend on distances that are no matrix products, at the most."""
    product_work: float = 1.5e9  #: Multiplications that one fit may spend on products of kernels, at the most.
    single: float = 600.0  #: Read-outs of a class that sum to more, in absolute value, are worked with in float64.
    jitter: float = 1e-6  #: Added to the diagonal of the units' kernel, which is singular where rows are equal.
    median_rows: int = 4 * CHUNK  #: Rows that the median distance is taken of, at the most.
    same: float = 1e-6
    """A squared distance below this share of the mean one is rounding, or that of a unit to its own sample."""
    halving_rows: int = 16  #: A fold with this many held-out rows halves the bandwidths and ridges that are tried.
    exact: int = 2**14  #: Coordinates of all units up to which distances are not rounded: they are fast enough.
    terms: tuple[int, ...] = (16, 8, 4)
    """Whole numbers of 16 bits of which so many are added without overflow: fewer may be larger, that is finer, ..."""
    rounding: float = 0.002
    """... and the first are taken that leave a class score, of about 1, a standard error of at most this."""
    absolute_cost: float = 4.0  #: Multiplications that take as long as an absolute difference ...
    exponential_cost: float = 20.0  #: ... or as an exponential.
    few_units: int = 512  #: Units that find a bandwidth, on folds that settle it, at the most ...
    hope: tuple[float, float] = (0.8, 0.9)
    """... and the share of their log-loss, at the middle bandwidth and at the best, that may be left in the end."""


RADIAL = RadialRules()


@dataclass(frozen=True)
class Radial:
    """A radial view.

    Args:
        source: The linear view that it reads.
        norm: 1 for sums of absolute differences (a Laplacian kernel), 2 for squared Euclidean distances (a Gaussian
            one).
        squash: Take the hyperbolic tangent of what is read, feature by feature.
        shifted: Fit to shifted copies of the rows, too.
        bandwidth: > 0, in units of the median distance between samples and units.
        ridge: > 0, the penalty.
    """

    source: Linear
    norm: int
    squash: bool = False
    shifted: bool = False
    bandwidth: float = 2.0
    ridge: float = 0.1
    trained: ClassVar[bool] = False

    @property
    def kernel(self) -> str:
        """What the kernel is called."""
        return "laplacian" if self.norm == 1 else "gaussian"

    @property
    def traits(self) -> frozenset[str]:
        """The kernel, what it reads, and whether of shifted rows."""
        read = frozenset({"squashed"}) if self.squash else self.source.traits
        return read | ({self.kernel, "shifted"} if self.shifted else {self.kernel})

    @property
    def name(self) -> str:
        """The kernel and what it reads; bandwidth and ridge are settings of the same view."""
        name = f"{self.kernel} {'squashed' if self.squash else self.source.name}"
        return f"shifted {name}" if self.shifted else name

    def fit(self, rows: Rows, source: Source | None) -> RadialView:
        """Fit in closed form; the view has ``num_classes`` dimensions.

        Source: kernel ridge regression (Saunders et al. 1998); with more samples than units, the subset of regressors
            (Smola and Schoelkopf 2000).
        """
        problem = _Problem(self, need_map(source), rows)
        _, (readout,) = problem.solve(self.bandwidth, [self.ridge])
        config = RadialConfig(len(readout), readout.shape[1], self.norm, self.squash)
        bandwidth = readout.new_tensor(self.bandwidth * problem.median)
        return RadialView(config, problem.map, {"units": problem.units, "readout": readout, "bandwidth": bandwidth})

    def count_units(self, n: int, dim: int) -> int:
        """Return how many of n samples become radial units: all, unless that is too much work."""
        limits = [n, RADIAL.most_units, math.isqrt(int(RADIAL.product_work / n))]
        if self.norm == 1:
            limits.append(int(RADIAL.distance_work / (n * dim)))
        return max(1, min(limits))


CENTRED, STANDARDISED, RELEVANT, ROBUST, WHITENED = map(
    Linear, ("centred", "standardised", "relevant", "robust", "whitened")
)
#: What is tried by default ...
VIEWS = (
    Radial(CENTRED, 2),
    Radial(RELEVANT, 2),
    Radial(WHITENED, 2),
    Radial(STANDARDISED, 1),
    Radial(RELEVANT, 1),
    Radial(ROBUST, 1, squash=True),
    Radial(CENTRED, 2, shifted=True),
)
#: ... with these bandwidths and ridges, of which the folds take one.
BANDWIDTHS, RIDGES = (0.5, 1.0, 2.0, 4.0, 8.0), (1e-3, 1e-2, 1e-1, 1.0)
#: Bandwidth and ridge where no row can judge.
UNJUDGED = (2.0, 0.1)


@dataclass(frozen=True)
class RadialKind(Kind):
    """Radial views, each at the bandwidth and ridge that the folds find best."""

    views: tuple[Radial, ...] = VIEWS
    bandwidths: tuple[float, ...] = BANDWIDTHS
    ridges: tuple[float, ...] = RIDGES
    stage: ClassVar[str] = "radial views"
    share: ClassVar[float] = 3.0

    @classmethod
    def for_effort(cls, effort: str) -> RadialKind:
        """Return fewer views, bandwidths and ridges for "fast"."""
        if effort == "fast":
            return cls(tuple(view for view in VIEWS if view.source != RELEVANT), (1.0, 4.0), (1e-2, 1e-1))
        return cls()

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> RadialKind:
        """Return the same, and Gaussian views of each of some spans of columns alone."""
        own = [Radial(Linear("standardised", span), 2) for span in spans]
        return replace(self, views=(*self.views, *own))

    def unjudged(self) -> RadialKind:
        """Return the same views, with one bandwidth and ridge."""
        return RadialKind(self.views, UNJUDGED[:1], UNJUDGED[1:])

    def candidates(self, judge: Judge) -> Iterator[Candidate]:
        """Judge each view at its best setting, where the work allows two units per class; no more if it is late."""
        rows = judge.rows
        for view in self.views:
            if judge.late():
                return
            n = min(len(fold.fit) for fold in judge.folds) * (len(rows.shifts) if view.shifted else 1)
            enough = min(n, 2 * int(judge.seen.sum()))
            if judge.degrees < view.source.least_degrees or view.count_units(n, rows.features.shape[1]) < enough:
                continue
            if view.shifted and rows.shifts == (0,):
                continue
            settings = [replace(view, bandwidth=each, ridge=ridge) for each in self.bandwidths for ridge in self.ridges]
            candidate = _judge(judge, settings)
            if candidate is not None and not judge.late():
                yield candidate


def _judge(judge: Judge, settings: Sequence[Radial]) -> Candidate | None:
    """Return the best of several settings of one view; None if it is late, or pruned."""
    cosines = torch.zeros(len(settings), 0, judge.rows.num_classes, dtype=torch.float32)
    for number, (source, fold) in enumerate(zip(judge.sources(settings[0]), judge.folds, strict=True)):
        if judge.late():
            return None
        problem = _Problem(settings[0], need_map(source), judge.take(fold), judge.rows.features[fold.judge])
        settles = len(fold.judge) >= PRUNING.settled
        if number == 0 and settles and len(settings) > 1:
            settings = _climb(judge, problem.take_units(RADIAL.few_units), settings)
            if judge.late() or not settings:
                return None
            cosines = cosines[: len(settings)]
        tried: list[Tensor] = []
        for bandwidth in _list_bandwidths(settings):
            if judge.late():
                return None
            tried.append(problem.cosines([each for each in settings if each.bandwidth == bandwidth]))
        cosines = torch.cat([cosines, torch.cat(tried)], dim=1)
        halves = len(fold.judge) >= RADIAL.halving_rows
        if not halves and cosines.shape[1] < PRUNING.least_rows:
            continue  # too few rows to end a setting or the view
        best = _rank(judge, cosines)
        if judge.prunes(cosines[best[0]]):
            return None
        if halves:  # successive halving: the worse half is not tried on the next fold
            better = sorted(best[: 1 if settles else math.ceil(len(best) / 2)])
            cosines, settings = cosines[better], [settings[place] for place in better]
    best = _rank(judge, cosines)
    units, dim = problem.landmarks.shape
    cost = units * (dim * (RADIAL.absolute_cost if settings[0].norm == 1 else 1) + RADIAL.exponential_cost)
    return judge.judge(settings[best[0]], cosines[best[0]], cost)


def _climb(judge: Judge, problem: _Problem, settings: Sequence[Radial]) -> list[Radial]:
    """Return the better half of the settings of the best bandwidth; none where the view would be clearly worse.

    Bandwidths are tried from the middle on, either way for as long as that gets better.
    """
    bandwidths = _list_bandwidths(settings)

    @functools.cache
    def try_out(place: int) -> tuple[float, list[Radial], Tensor]:
        own = [each for each in settings if each.bandwidth == bandwidths[place]]
        cosines = problem.cosines(own)
        best = _rank(judge, cosines)
        kept = [own[number] for number in sorted(best[: math.ceil(len(best) / 2)])]
        return float(judge.losses(cosines[best[0]]).mean()), kept, cosines[best[0]]

    at = len(bandwidths) // 2
    if judge.prunes(try_out(at)[2], hope=RADIAL.hope[0]):
        return []
    for step in (-1, 1):
        while 0 <= at + step < len(bandwidths) and not judge.late() and try_out(at + step)[0] < try_out(at)[0]:
            at += step
    return [] if judge.prunes(try_out(at)[2], hope=RADIAL.hope[1]) else try_out(at)[1]


def _list_bandwidths(settings: Sequence[Radial]) -> list[float]:
    """Return the different bandwidths of settings, in their order."""
    return list(dict.fromkeys(each.bandwidth for each in settings))


def _rank(judge: Judge, cosines: Tensor) -> list[int]:
    """Return the numbers of (settings, n, num_classes) cosines of the first held-out rows, least log-loss first."""
    trials = [float(judge.losses(each).mean()) for each in cosines] if len(cosines) > 1 else [0.0]
    return sorted(range(len(trials)), key=lambda number: trials[number])


@dataclass(frozen=True)
class RadialConfig(Config):
    """Radial units, classes, and how distance is measured, as in `Radial`."""

    units: int = size()
    classes: int = size()
    norm: int = size(1, 2)
    squash: bool = False


class RadialView(View):
    """Class scores ``sum_j readout_j exp(-distance(z, landmark_j) / bandwidth)`` of a linear map z of the features.

    Buffers: ``units`` (units, input_dim), the features of the rows that are units, which many views share; ``readout``
    (units, classes); ``bandwidth`` 0-d, > 0, in units of the distance. ``landmarks`` (units, dim) are the units in the
    (squashed) map.
    """

    kind = "radial"
    config_type, reads = RadialConfig, LinearMap
    config: RadialConfig
    source: LinearMap
    units: Tensor
    landmarks: Tensor
    readout: Tensor
    bandwidth: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each buffer by name."""
        units = self.config.units
        return {"units": (units, self.input_dim), "readout": (units, self.config.classes), "bandwidth": ()}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of classes."""
        return (self.config.classes,)

    @torch.no_grad()
    def derive(self) -> None:
        """Compute the landmarks, and how precisely to work with them."""
        z = self.source(self.units)
        self.register_buffer("landmarks", torch.tanh(z) if self.config.squash else z, persistent=False)
        # Large read-outs cancel: in float32 a score near zero would depend on how the batch is rounded.
        self.large = bool(self.readout.abs().sum(dim=0).max() > RADIAL.single)
        self.terms = self._count_terms()

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Check that the bandwidth is positive, too."""
        super().check(tensors, prefix)
        expect(bool(tensors["bandwidth"] > 0), "a bandwidth that is not positive")

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, input_dim) to class scores (n, num_classes)."""
        dtype = torch.float64 if self.large else torch.promote_types(z.dtype, torch.float32)
        given, z = z.dtype, torch.tanh(z) if self.config.squash else z
        if self.terms is None or z.dtype == torch.float64 or z.requires_grad:
            apart = distances(z.to(dtype), self.landmarks.to(dtype), self.config.norm)
        else:
            apart = round_distances(z.to(torch.float32), self.landmarks, self.terms).to(dtype)
        bandwidth = self.bandwidth.to(dtype)
        kernel = torch.exp(apart / -bandwidth) if apart.requires_grad else apart.div_(-bandwidth).exp_()
        # Scores are small next to their terms: in float32, how the product is rounded would show. This layout is fast.
        return F.linear(kernel.double(), self.readout.double().T.contiguous()).to(given)

    def _count_terms(self) -> int | None:
        """Return how coarsely `round_distances` may round; None where that would not pay, or be too coarse."""
        if self.config.norm != 1 or self.landmarks.numel() <= RADIAL.exact:
            return None
        noise = math.sqrt(self.landmarks.shape[1] / 6) / float(self.bandwidth)  # of a kernel, in steps
        noise *= float(torch.linalg.vector_norm(self.readout, dim=0).max())
        steps = {terms: float(find_steps(self.landmarks, terms)[2]) for terms in RADIAL.terms}
        return next((terms for terms, step in steps.items() if noise * step <= RADIAL.rounding), None)

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the scores, in float64: large read-outs cancel."""
        rows = graph.add("Tanh", rows) if self.config.squash else rows
        z, terms = graph.cast(rows, "DOUBLE"), self.terms
        landmarks, readout = (graph.array(each.double()) for each in (self.landmarks, self.readout))
        if terms is not None:
            low, high, step = map(graph.array, find_steps(self.landmarks, terms))
            inside = graph.add("Min", graph.add("Max", rows, low), high)
            whole = graph.cast(graph.add("Round", graph.add("Div", graph.add("Sub", inside, low), step)), "DOUBLE")
            units = np.rint((graph.array(self.landmarks) - low) / step).astype(np.float64)
            beyond = graph.cast(graph.add("ReduceL1", graph.add("Sub", rows, inside), axes=[1]), "DOUBLE")
            apart = graph.add("Add", graph.add("Mul", graph.city_blocks(whole, units), step.astype(np.float64)), beyond)
        elif self.config.norm == 1:
            apart = graph.city_blocks(z, landmarks)
        else:
            squares = graph.add("ReduceSumSquare", z, axes=[1])
            products = graph.add("MatMul", z, -2 * landmarks.T)
            apart = graph.add("Add", graph.add("Add", products, np.square(landmarks).sum(axis=1)), squares)
            apart = graph.add("Max", apart, np.float64(0))
        kernel = graph.add("Exp", graph.add("Div", apart, -graph.array(self.bandwidth.double())))
        return [graph.cast(graph.add("MatMul", kernel, readout), "FLOAT")]

    def products(self) -> list[tuple[int, int]]:
        """Return the distances, as if they were a product, and the read-out."""
        units, classes = self.config.units, self.config.classes
        return [(self.source.config.dim, units), (units, classes)]


class _Problem:
    """Kernel ridge regression of class indicators on some rows, for any bandwidth and ridge.

    Args:
        view: What is read, and how distance is measured; its bandwidth and ridge do not matter.
        source: The map that is read, fitted to the same rows.
        rows: What is learned from.
        queries: (m, input_dim) features that `cosines` classifies, if any.
    """

    def __init__(self, view: Radial, source: LinearMap, rows: Rows, queries: Tensor | None = None) -> None:
        x, labels, self.num_classes, *_ = rows
        self.labels, self.map, self.own_shares = labels, source, rows.shares
        shares = torch.ones_like(labels, dtype=torch.float64) if rows.shares is None else rows.shares
        if view.shifted:
            copies = len(rows.shifts)
            x, labels, shares = shift_rows(x, rows.shifts), labels.repeat(copies), shares.repeat(copies)
        self.shares = shares[:, None]  # (n, 1)
        z = torch.cat([self._read(view, part) for part in x.split(CHUNK)])
        count = view.count_units(*z.shape)
        self.chosen = torch.linspace(0, len(z) - 1, count, dtype=torch.float64).round().long().to(z.device)
        self.units = x if len(self.chosen) == len(x) else x[self.chosen]
        self.landmarks = z[self.chosen]
        dtype = torch.float64 if view.norm == 2 else z.dtype  # squares cancel
        units = self.landmarks.to(dtype)
        self.between = torch.cat([distances(part.to(dtype), units, view.norm).double() for part in z.split(CHUNK)])
        apart = self.between[: RADIAL.median_rows]
        apart = apart[apart > RADIAL.same ** (view.norm / 2) * apart.mean()]
        self.median = float(apart.median()) if len(apart) else 1.0
        indicators = F.one_hot(labels, self.num_classes).to(torch.float64)
        self.targets = indicators - (self.shares * indicators).mean(dim=0)  # (n, num_classes)
        if queries is not None:
            self.to_queries = distances(self._read(view, queries).to(dtype), units, view.norm).double()

    def _read(self, view: Radial, x: Tensor) -> Tensor:
        """Return the linear map (n, dim) of features, squashed feature by feature if asked for."""
        z: Tensor = self.map(x)
        return torch.tanh(z) if view.squash else z

    def take_units(self, most: int) -> _Problem:
        """Return the same problem with fewer units, spread over these."""
        few = copy.copy(self)
        count = min(most, len(self.chosen))
        some = torch.linspace(0, len(self.chosen) - 1, count, dtype=torch.float64).round().long().to(self.chosen.device)
        few.chosen, few.landmarks, few.units = self.chosen[some], self.landmarks[some], self.units[some]
        few.between, few.to_queries = self.between[:, some], self.to_queries[:, some]
        return few

    def solve(self, bandwidth: float, ridges: Sequence[float]) -> tuple[Tensor, list[Tensor]]:
        """Return the kernel (n, units) float64 and the read-out (units, num_classes) for each ridge.

        The squared errors of rows are weighed: where every row is a unit, each has a ridge of its own.
        """
        kernel = torch.exp(-self.between / (bandwidth * self.median))
        gram, right, penalty = kernel, self.targets, torch.diag(1 / self.shares[self.chosen, 0])
        if len(self.landmarks) < len(kernel):  # a subset of regressors: normal equations, with a hair of jitter
            eye = torch.eye(len(penalty), dtype=torch.float64, device=kernel.device)
            penalty = kernel[self.chosen] + RADIAL.jitter * eye
            gram, right = kernel.T @ (self.shares * kernel), kernel.T @ (self.shares * self.targets)
        readouts = []
        for ridge in ridges:
            factor, failed = torch.linalg.cholesky_ex(gram + ridge * penalty)
            usable = not bool(failed) and bool(torch.isfinite(factor).all())
            readouts.append(torch.cholesky_solve(right, factor) if usable else torch.zeros_like(right))
        return kernel, readouts

    def cosines(self, settings: Sequence[Radial]) -> Tensor:
        """Classify the queries at each setting; those of one bandwidth share its work.

        Returns:
            (len(settings), m, num_classes) float32, on the CPU, where they are judged: the cosines to the class
            prototypes.
        """
        shape = (len(settings), len(self.to_queries), self.num_classes)
        cosines = self.to_queries.new_empty(shape, dtype=torch.float32)
        n = len(self.labels)  # the rows themselves come first, before their shifted copies
        for bandwidth in dict.fromkeys(each.bandwidth for each in settings):
            places = [place for place, each in enumerate(settings) if each.bandwidth == bandwidth]
            kernel, readouts = self.solve(bandwidth, [settings[place].ridge for place in places])
            query_kernel = torch.exp(-self.to_queries / (bandwidth * self.median))
            for place, readout in zip(places, readouts, strict=True):
                unit = F.normalize(kernel[:n] @ readout, dim=1)
                means, _ = class_means(unit, self.labels, self.num_classes, self.own_shares)
                cosines[place] = F.normalize(query_kernel @ readout, dim=1) @ F.normalize(means, dim=1).T
        return cosines.cpu()
