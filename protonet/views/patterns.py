"""Pattern views: how often each of 84 small patterns occurs in features that are a series or a picture.

Rows are convolved with fixed kernels at several dilations, and pooled to the share of places where the response is
above a threshold, over the whole row or part by part; a ridge regression of the class indicators reads these shares.
Kernels are fixed, thresholds are quantiles and the read-out is a closed form, so all of it are buffers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import class_means
from protonet.views.judge import Candidate, Judge, Kind
from protonet.views.view import Graph, LinearMap, Rows, Specification, Stored, View, expect


@dataclass(frozen=True)
class PatternRules:
    """How patterns are looked for, and bounds of the work."""

    taps: int = 9  #: Of a kernel: a stretch of a series, or 3 x 3 of a picture.
    high: int = 3  #: Taps of weight 2, all others having -1.
    quantiles: tuple[float, ...] = (0.3, 0.7)  #: Of a kernel's responses: its thresholds.
    margin: float = 1e-4  #: Added to thresholds, in standard deviations of the responses: where most places are equal.
    dilations: int = 5  #: Of a series, at the most: powers of two up to its length ...
    picture: tuple[int, ...] = (7, 14)  #: ... and of a picture, one more from each of these sides on.
    responses: int = 2**14  #: Of each kernel, that thresholds are quantiles of.
    chunk: float = 2**23  #: Responses that are worked on at a time.
    most_work: float = 1e9  #: Responses of all rows: with more, there is no such view.
    most_rows: int = 2048  #: Rows that the read-out is fitted to, at the most.
    least_deviation: float = 0.05  #: A share that varies by less is divided by this ...
    constant: float = 1e-3  #: ... and one that varies by less than this is left out.


PATTERNS = PatternRules()
RIDGES = (1e-2, 1e-1, 1.0)
#: The ridge where no row can judge.
UNJUDGED = 1e-1
#: Parts of each side over which shares are taken: 1 for the whole, and what is tried of a series and of a picture.
PARTS = {"series": (1, 4), "picture": (1, 3)}


@dataclass(frozen=True)
class Patterns:
    """A pattern view.

    Args:
        width: Features of a line: all of them for a series, fewer for a picture.
        parts: Along each side of a picture, or of a series, of which shares are taken.
        ridge: > 0, the penalty, in units of the mean squared norm of a row's shares.
    """

    width: int
    parts: int
    ridge: float
    source: ClassVar[Specification | None] = None
    shifted: ClassVar[bool] = False
    trained: ClassVar[bool] = False

    @property
    def traits(self) -> frozenset[str]:
        """Whether shares are taken anywhere, or part by part."""
        return frozenset({"patterns"} if self.parts == 1 else {"patterns", "local"})

    @property
    def name(self) -> str:
        """Where patterns are looked for; the ridge is a setting of the same view."""
        return "patterns" if self.parts == 1 else "local patterns"

    def fit(self, rows: Rows, source: LinearMap | None = None) -> PatternView:
        """Fit in closed form; the view has ``num_classes`` dimensions.

        Source: Dempster, Schmidt and Webb, "MiniRocket" (2021): its kernels; thresholds of quantiles, ridge regression.
        """
        n = len(rows.labels)
        chosen = torch.linspace(0, n - 1, min(n, PATTERNS.most_rows)).round().long().to(rows.features.device)
        bank = Bank.fit(rows.features[chosen], self.width)
        problem = _Problem(bank.shares(rows.features[chosen], self.parts)[0], rows.take(chosen))
        readout, offset = problem.solve(self.ridge)
        return PatternView(bank, self.parts, rows.features.shape[1], readout, offset)


@dataclass(frozen=True)
class PatternKind(Kind):
    """Patterns anywhere and part by part, where features are in an order; each at the ridge that folds find best."""

    ridges: tuple[float, ...] = RIDGES
    stage: ClassVar[str] = "patterns"

    @classmethod
    def for_effort(cls, effort: str) -> PatternKind:
        """Return one ridge for "fast"."""
        return cls((UNJUDGED,)) if effort == "fast" else cls()

    def unjudged(self) -> PatternKind:
        """Return the same with one ridge."""
        return PatternKind((UNJUDGED,))

    def candidates(self, judge: Judge) -> Iterator[Candidate]:
        """Judge each at its best ridge, the responses to the kernels computed once for all."""
        rows = judge.rows
        n, dim = rows.features.shape
        if not rows.width or n * dim * count_kernels() * len(list_dilations(rows.width, dim)) > PATTERNS.most_work:
            return
        parts = PARTS["series" if rows.width == dim else "picture"]
        cosines: dict[Patterns, list[Tensor]] = {}
        for fold in judge.folds:
            if judge.late():
                return
            own = judge.take(fold)
            bank = Bank.fit(own.features, rows.width)
            fitted, judged = (bank.shares(x, *parts) for x in (own.features, rows.features[fold.judge]))
            for count, shares, queries in zip(parts, fitted, judged, strict=True):
                problem = _Problem(shares, own, queries)
                for ridge in self.ridges:
                    cosines.setdefault(Patterns(rows.width, count, ridge), []).append(problem.cosines(ridge))
        for count in parts:
            settings = [Patterns(rows.width, count, ridge) for ridge in self.ridges]
            tried = [judge.judge(setting, torch.cat(cosines[setting])) for setting in settings]
            yield min(tried, key=lambda candidate: candidate.loss)


def count_kernels() -> int:
    """Return how many kernels there are."""
    return math.comb(PATTERNS.taps, PATTERNS.high)


@cache
def make_kernels() -> Tensor:
    """Return all kernels (84, taps): three taps of weight 2, the others -1, so that each sums to zero."""
    kernels = torch.full((count_kernels(), PATTERNS.taps), -1.0)
    for number, places in enumerate(itertools.combinations(range(PATTERNS.taps), PATTERNS.high)):
        kernels[number, list(places)] = 2.0
    return kernels


def list_dilations(width: int, dim: int) -> list[int]:
    """Return the distances of a kernel's taps in rows of dim features, lines of ``width`` of them."""
    if width == dim:
        most = max(0, int(math.log2(max(1, (dim - 1) / (PATTERNS.taps - 1)))))
        count = min(most + 1, PATTERNS.dilations)
        return sorted({2 ** round(each) for each in torch.linspace(0, most, count).tolist()})
    return [2**number for number in range(1 + sum(min(width, dim // width) >= side for side in PATTERNS.picture))]


class Bank(torch.nn.Module):
    """Kernels at some dilations, with thresholds.

    Args:
        width: As in `Patterns`.
        thresholds: (dilations, kernels, quantiles).
    """

    thresholds: Tensor

    def __init__(self, width: int, thresholds: Tensor) -> None:
        super().__init__()
        self.width, self._kernels = width, make_kernels()
        self.register_buffer("thresholds", thresholds)

    @classmethod
    def fit(cls, x: Tensor, width: int) -> Bank:
        """Take the thresholds from rows (n, dim)."""
        thresholds, kernels = [], make_kernels().to(x)
        some = x[:: max(1, math.ceil(x.numel() / PATTERNS.responses))]
        for dilation in list_dilations(width, x.shape[1]):
            responses = _respond(some, width, dilation, kernels).transpose(0, 1).flatten(1)  # (kernels, places)
            margin = PATTERNS.margin * responses.std(dim=1, correction=0)
            ordered = responses.sort(dim=1).values
            places = [round(share * (responses.shape[1] - 1)) for share in PATTERNS.quantiles]
            thresholds.append(ordered[:, places] + margin[:, None])
        return cls(width, torch.stack(thresholds))

    def shares(self, x: Tensor, *parts: int) -> list[Tensor]:
        """Return the shares of places above each threshold, for each number of parts.

        (n, dilations * quantiles * kernels * parts or parts^2) each; the responses are computed once for all.
        """
        if not len(x):
            return [each[:0] for each in self.shares(x.new_zeros(1, x.shape[1]), *parts)]
        at_once = max(1, int(PATTERNS.chunk / (x.shape[1] * count_kernels())))
        pools = [pooling(self.width, x.shape[1], each, x.device).to(x.dtype) for each in parts]
        if (self._kernels.dtype, self._kernels.device) != (x.dtype, x.device):
            self._kernels = self._kernels.to(x)
        pieces = [self._shares(rows, pools) for rows in x.split(at_once)]
        return [torch.cat(each) for each in zip(*pieces, strict=True)]

    def _shares(self, x: Tensor, pools: list[Tensor]) -> list[Tensor]:
        columns: list[list[Tensor]] = [[] for _ in pools]
        for dilation, thresholds in zip(list_dilations(self.width, x.shape[1]), self.thresholds, strict=True):
            responses = _respond(x, self.width, dilation, self._kernels)  # (n, kernels, dim)
            for threshold in thresholds.T:
                above = (responses > threshold[:, None]).to(x.dtype)
                for own, pool in zip(columns, pools, strict=True):
                    own.append((above @ pool).flatten(1))
        return [torch.cat(each, dim=1) for each in columns]


def _respond(x: Tensor, width: int, dilation: int, kernels: Tensor) -> Tensor:
    """Return the responses (n, kernels, dim) of rows (n, dim), zero beyond their ends."""
    if width == x.shape[1]:
        reach = dilation * (PATTERNS.taps // 2)
        series: Tensor = F.conv1d(x[:, None], kernels[:, None], padding=reach, dilation=dilation)
        return series
    side = math.isqrt(PATTERNS.taps)
    pictures = x.view(len(x), 1, -1, width)
    responses = F.conv2d(pictures, kernels.view(-1, 1, side, side), padding=dilation * (side // 2), dilation=dilation)
    return responses.flatten(2)


def pooling(width: int, dim: int, parts: int, device: torch.device | None = None) -> Tensor:
    """Return what takes means over parts of rows: (dim, parts), or (dim, parts^2) for pictures."""
    along = [_split(side, parts, device) for side in ([width] if width == dim else [dim // width, width])]
    pool = along[0]
    for other in along[1:]:
        pool = torch.kron(pool, other)
    return pool


def _split(length: int, parts: int, device: torch.device | None) -> Tensor:
    """Return means (length, parts) over parts as equal as can be."""
    parts = min(parts, length)
    owner = torch.arange(length, device=device) * parts // length
    indicators = F.one_hot(owner, parts).float()
    return indicators / indicators.sum(dim=0)


class _Problem:
    """Ridge regression of class indicators on shares, for any ridge.

    Args:
        shares: (n, features).
        rows: Whose they are.
        queries: (m, features) of rows to classify, if any.
    """

    def __init__(self, shares: Tensor, rows: Rows, queries: Tensor | None = None) -> None:
        self.rows = rows
        weights = torch.ones_like(rows.labels, dtype=torch.float64) if rows.shares is None else rows.shares
        self.weights = weights[:, None]
        shares = shares.double()
        self.mean = (self.weights * shares).mean(dim=0)
        deviation = (self.weights * (shares - self.mean).square()).mean(dim=0).sqrt()
        usable = deviation > PATTERNS.constant
        self.gain = torch.where(usable, 1 / deviation.clamp_min(PATTERNS.least_deviation), 0.0)
        self.z = (shares - self.mean) * self.gain
        size = float(self.z.square().sum(dim=1).mean()) or 1.0
        self.gain, self.z = self.gain / math.sqrt(size), self.z / math.sqrt(size)
        self.gram = self.z @ self.z.T
        indicators = F.one_hot(rows.labels, rows.num_classes).double()
        self.targets = indicators - (self.weights * indicators).mean(dim=0)
        self.to_queries = None if queries is None else ((queries.double() - self.mean) * self.gain) @ self.z.T

    def _dual(self, ridge: float) -> Tensor:
        penalty = torch.diag(ridge / self.weights[:, 0])
        dual: Tensor = torch.linalg.solve(self.gram + penalty, self.targets)
        return dual

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return the read-out (features, num_classes) of shares and what is added, (num_classes,)."""
        readout = self.gain[:, None] * (self.z.T @ self._dual(ridge))
        return readout, -self.mean @ readout

    def cosines(self, ridge: float) -> Tensor:
        """Return the cosines (m, num_classes) float32 of the queries to the prototypes, on the CPU, to be judged."""
        assert self.to_queries is not None
        dual = self._dual(ridge)
        unit = F.normalize(self.gram @ dual, dim=1)
        means, _ = class_means(unit, self.rows.labels, self.rows.num_classes, self.rows.shares)
        return (F.normalize(self.to_queries @ dual, dim=1) @ F.normalize(means, dim=1).T).float().cpu()


class PatternView(View):
    """Class scores that a ridge regression reads from the shares of patterns.

    Args:
        bank: The kernels and their thresholds.
        parts: As in `Patterns`.
        input_dim: Columns of the features.
        readout: (shares, num_classes).
        offset: (num_classes,).
    """

    kind = "patterns"
    readout: Tensor
    offset: Tensor

    def __init__(self, bank: Bank, parts: int, input_dim: int, readout: Tensor, offset: Tensor) -> None:
        super().__init__(None, (readout.shape[1],))
        self.bank, self.parts, self.input_dim = bank, parts, input_dim
        self.register_buffer("readout", readout.to(torch.float32))
        self.register_buffer("offset", offset.to(torch.float32))

    def forward(self, z: Tensor) -> Tensor:
        """Map features (n, input_dim) to class scores (n, num_classes)."""
        return torch.addmm(self.offset.to(z), self.bank.shares(z, self.parts)[0], self.readout.to(z))

    def describe(self) -> dict[str, Any]:
        """Return the width of a line, and the parts."""
        return {"width": self.bank.width, "parts": self.parts}

    @classmethod
    def restore(cls, stored: Stored, source: LinearMap | None, input_dim: int) -> PatternView:
        """Build the view again."""
        expect(source is None, "patterns that read a view")
        width, parts = stored.whole("width", input_dim, low=3), stored.whole("parts", input_dim, low=1)
        expect(input_dim % width == 0, "pictures of no whole number of lines")
        dilations = len(list_dilations(width, input_dim))
        thresholds = stored.take("bank.thresholds", dilations, count_kernels(), len(PATTERNS.quantiles))
        cells = pooling(width, input_dim, parts).shape[1]
        readout = stored.take("readout", thresholds.numel() * cells, None)
        return cls(Bank(width, thresholds), parts, input_dim, readout, stored.take("offset", readout.shape[1]))

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the convolutions, the comparisons, the means over parts and the read-out."""
        width, kernels = self.bank.width, graph.array(make_kernels())
        dim = self.input_dim
        pool = graph.array(pooling(width, dim, self.parts))
        side = math.isqrt(PATTERNS.taps)
        lines, shape = ([dim], [PATTERNS.taps]) if width == dim else ([dim // width, width], [side, side])
        x = graph.add("Reshape", rows, np.array([-1, 1, *lines]))
        columns = []
        for dilation, thresholds in zip(list_dilations(width, dim), graph.array(self.bank.thresholds), strict=True):
            reach = [dilation * (taps // 2) for taps in shape]
            weights = kernels.reshape(-1, 1, *shape)
            responses = graph.add("Conv", x, weights, dilations=[dilation] * len(shape), pads=reach * 2)
            responses = graph.add("Reshape", responses, np.array([-1, len(kernels), dim]))
            for threshold in thresholds.T:
                above = graph.cast(graph.add("Greater", responses, threshold[:, None]), "FLOAT")
                columns.append(graph.add("Flatten", graph.add("MatMul", above, pool)))
        shares = graph.add("Concat", *columns, axis=1)
        return [graph.add("Gemm", shares, graph.array(self.readout), graph.array(self.offset))]

    def products(self) -> list[tuple[int, int]]:
        """Return the kernels' taps at every place, and the read-out."""
        responses = self.bank.thresholds[..., 0].numel() * self.input_dim
        shares, num_classes = self.readout.shape
        return [(PATTERNS.taps, responses), (shares, num_classes)]
