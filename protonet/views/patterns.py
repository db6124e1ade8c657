"""Pattern views: how often each of 84 small patterns occurs in features that are a series or a picture.

Rows are convolved with fixed kernels at several dilations, and pooled to the share of places where the response is
above a threshold, over the whole row or part by part; a ridge regression of the class indicators reads these shares.
Kernels are fixed, thresholds are quantiles and the read-out is a closed form, so all of it are buffers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import class_means
from protonet.views.config import Config, expect, size
from protonet.views.judge import Candidate, Judge, Kind
from protonet.views.view import Graph, Rows, Source, Specification, View


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
    chunk: float = 2**19  #: Responses that are worked on at a time: those that a core's cache holds.
    most_work: float = 1e9  #: Responses of all rows: with more, there is no such view.
    place_cost: float = 30.0  #: Multiplications that take as long as a kernel's response at a place.
    most_rows: int = 2048  #: Rows that the read-out is fitted to, at the most.
    least_deviation: float = 0.05  #: A share that varies by less is divided by this ...
    constant: float = 1e-3  #: ... and one that varies by less than this is left out.


PATTERNS = PatternRules()
RIDGES = (1e-2, 1e-1, 1.0)
#: The ridge where no row can judge.
UNJUDGED = 1e-1
#: Parts of a series, and of each side of a picture, over which local shares are taken.
PARTS = {"series": 4, "picture": 3}


@dataclass(frozen=True)
class Shares:
    """The shares of patterns, part by part: what pattern views read.

    Args:
        width: Features of a line: all of them for a series, fewer for a picture.
    """

    width: int
    source: ClassVar[Specification | None] = None
    shifted: ClassVar[bool] = False
    trained: ClassVar[bool] = False
    name: ClassVar[str] = "shares of patterns"
    traits: ClassVar[frozenset[str]] = frozenset({"patterns", "local"})

    def fit(self, rows: Rows, source: Source | None = None) -> View:
        """Take the thresholds from the rows."""
        return SharesView(Config(), Bank.fit(rows.features, self.width))


@dataclass(frozen=True)
class Patterns:
    """A pattern view.

    Args:
        width: As in `Shares`.
        local: Are shares taken part by part, or over the whole row?
        ridge: > 0, the penalty, in units of the mean squared norm of a row's shares.
    """

    width: int
    local: bool
    ridge: float
    shifted: ClassVar[bool] = False
    trained: ClassVar[bool] = False

    @property
    def source(self) -> Shares:
        """The shares, which the views of all ridges and parts have in common."""
        return Shares(self.width)

    @property
    def traits(self) -> frozenset[str]:
        """Whether shares are taken anywhere, or part by part."""
        return frozenset({"patterns", "local"} if self.local else {"patterns"})

    @property
    def name(self) -> str:
        """Where patterns are looked for; the ridge is a setting of the same view."""
        return "local patterns" if self.local else "patterns"

    def fit(self, rows: Rows, source: Source | None) -> PatternView:
        """Fit in closed form; the view has ``num_classes`` dimensions.

        Source: Dempster, Schmidt and Webb, "MiniRocket" (2021): its kernels; thresholds of quantiles, ridge regression.
        """
        assert isinstance(source, Bank)  # of `Shares`
        bank, rows = source, rows.take(_spread_rows(rows.features))
        problem = _Problem(bank.pool(bank(rows.features), local=self.local), rows)
        readout, offset = problem.solve(self.ridge)
        return PatternView(PatternConfig(len(offset), self.local), bank, {"readout": readout, "offset": offset})


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
        cosines: dict[Patterns, list[Tensor]] = {}
        for fold in judge.folds:
            if judge.late():
                return
            fitted = judge.take(fold)
            bank = Bank.fit(fitted.features, rows.width)
            shares, queries = bank(fitted.features), bank(rows.features[fold.judge])
            for local in (False, True):
                problem = _Problem(bank.pool(shares, local=local), fitted, bank.pool(queries, local=local))
                for ridge in self.ridges:
                    cosines.setdefault(Patterns(rows.width, local, ridge), []).append(problem.cosines(ridge))
        for local in (False, True):
            settings = [Patterns(rows.width, local, ridge) for ridge in self.ridges]
            cost = PATTERNS.place_cost * dim * count_kernels() * len(list_dilations(rows.width, dim)) / 2
            tried = [judge.judge(setting, torch.cat(cosines[setting]), cost) for setting in settings]
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
        return sorted({2 ** round(each) for each in torch.linspace(0, most, count, device="cpu").tolist()})
    return [2**number for number in range(1 + sum(min(width, dim // width) >= side for side in PATTERNS.picture))]


@cache
def find_taps(width: int, dim: int, dilation: int, parts: int) -> Tensor:
    """Return which features lie under a kernel's taps, (dim, taps) int64, place by place as `split_places` has them.

    Where there is none, it is ``dim``.
    """
    reach = range(-(PATTERNS.taps // 2), PATTERNS.taps // 2 + 1)
    side = range(-(math.isqrt(PATTERNS.taps) // 2), math.isqrt(PATTERNS.taps) // 2 + 1)
    steps = [(0, step) for step in reach] if width == dim else [(down, right) for down in side for right in side]
    line, place = torch.arange(dim)[:, None] // width, torch.arange(dim)[:, None] % width
    down, right = (dilation * torch.tensor(step) for step in zip(*steps, strict=True))
    there = (line + down >= 0) & (line + down < dim // width) & (place + right >= 0) & (place + right < width)
    return torch.where(there, (line + down) * width + place + right, dim)[split_places(width, dim, parts)[0]]


@cache
def split_places(width: int, dim: int, parts: int) -> tuple[Tensor, list[int]]:
    """Return the places (dim,) int64, those of a part side by side, and how many each part has."""
    every = torch.arange(dim, device="cpu")  # sizes of parts are known on the meta device, too
    line, place = every // width, every % width
    height, across = min(parts, dim // width), min(parts, width)
    part = (line * height // (dim // width)) * across + place * across // width
    return part.argsort(stable=True), part.bincount().tolist()


@dataclass(frozen=True)
class BankConfig(Config):
    """Features, those of a line as in `Shares`, and parts along each side of a picture, or of a series."""

    input_dim: int = size()
    width: int = size(3)
    parts: int = size()

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.input_dim % self.width == 0, "pictures of no whole number of lines")
        expect(self.parts <= self.input_dim, "more parts than features")


class Bank(Source):
    """Kernels at some dilations, with thresholds: from features to the shares of places above each, part by part.

    Its buffer is ``thresholds`` (dilations, kernels, quantiles).

    Attributes:
        counts: How many places each part has.
        shares: How many shares a row has in each part.
    """

    kind = "patterns"
    config_type = BankConfig
    config: BankConfig
    thresholds: Tensor
    kernels: Tensor
    taps: Tensor

    def __init__(self, config: Config, tensors: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(config, tensors)
        self.counts = split_places(self.config.width, self.config.input_dim, self.config.parts)[1]
        self.shares = self.thresholds.numel()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each buffer by name."""
        dilations = list_dilations(self.config.width, self.config.input_dim)
        return {"thresholds": (len(dilations), count_kernels(), len(PATTERNS.quantiles))}

    def derive(self) -> None:
        """Put the constants on the device of the rest."""
        shape = self.config.width, self.config.input_dim
        taps = torch.stack([find_taps(*shape, dilation, self.config.parts) for dilation in list_dilations(*shape)])
        for name, value in (("kernels", make_kernels().to(self.thresholds)), ("taps", taps)):
            self.register_buffer(name, value.to(self.thresholds.device), persistent=False)

    @property
    def size(self) -> int:
        """How many shares a row has."""
        return self.shares * len(self.counts)

    @classmethod
    def fit(cls, x: Tensor, width: int) -> Bank:
        """Take the thresholds from rows (n, dim), of many from some."""
        dim = x.shape[1]
        x = x[_spread_rows(x)]
        some, thresholds, kernels = x[:: max(1, math.ceil(x.numel() / PATTERNS.responses))], [], make_kernels().to(x)
        for dilation in list_dilations(width, dim):
            taps = find_taps(width, dim, dilation, 1).to(x.device)
            responses = _respond(some, taps, kernels).flatten(0, 1).T  # (kernels, places)
            margin = PATTERNS.margin * responses.std(dim=1, correction=0)
            ordered = responses.sort(dim=1).values
            places = [round(share * (responses.shape[1] - 1)) for share in PATTERNS.quantiles]
            thresholds.append(ordered[:, places] + margin[:, None])
        config = BankConfig(dim, width, PARTS["series" if width == dim else "picture"])
        return cls(config, {"thresholds": torch.stack(thresholds)})

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, dim) to shares (n, dilations * quantiles * kernels * cells)."""
        if torch.compiler.is_compiling():
            return self._share_traced(x)
        at_once = max(1, int(PATTERNS.chunk / (self.config.input_dim * count_kernels())))
        return torch.cat([self._share(rows) for rows in x.split(at_once)])

    def _share_traced(self, x: Tensor) -> Tensor:
        """Return the shares without buffers that are written to; eagerly it takes longer."""
        kernels, columns = self.kernels.to(x.dtype), []
        for taps, thresholds in zip(self.taps.unbind(0), self.thresholds.unbind(0), strict=True):
            responses = _respond(x, taps, kernels)
            for threshold in thresholds.unbind(1):
                above = (responses > threshold).to(x.dtype)
                columns.append(torch.stack([part.mean(dim=1) for part in above.split(self.counts, dim=1)], dim=2))
        return torch.stack(columns, dim=1).flatten(1)

    def _share(self, x: Tensor) -> Tensor:
        """Return the shares of a few rows."""
        above = x.new_empty(len(x), self.config.input_dim, count_kernels())
        sums = x.new_empty(*self.thresholds.shape[::2], len(self.counts), len(x), count_kernels())
        kernels = self.kernels.to(x.dtype)
        for number, taps in enumerate(self.taps):
            responses = _respond(x, taps, kernels)
            for quantile, threshold in enumerate(self.thresholds[number].T.contiguous()):
                torch.gt(responses, threshold, out=above)
                for part, out in zip(above.split(self.counts, dim=1), sums[number, quantile], strict=True):
                    torch.sum(part, dim=1, out=out)
        for count, part in zip(self.counts, sums.unbind(2), strict=True):
            part.div_(count)
        return sums.permute(3, 0, 1, 4, 2).flatten(1)

    def pool(self, shares: Tensor, *, local: bool) -> Tensor:
        """Return the shares of views: as they are, or over whole rows (n, dilations * quantiles * kernels)."""
        if local:
            return shares
        parts, dim = shares.view(-1, self.shares, len(self.counts)).unbind(2), self.config.input_dim
        return torch.stack([count / dim * part for count, part in zip(self.counts, parts, strict=True)]).sum(dim=0)

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add the products, the comparisons and the means over parts."""
        kernels, columns = graph.constant(graph.array(make_kernels().T)), []
        cells = F.one_hot(torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))).float().T
        means = graph.constant(graph.array(cells / cells.sum(dim=1, keepdim=True)))  # (cells, places)
        padded = graph.pad(x, 1, 0.0)
        for number, taps in enumerate(graph.array(self.taps)):
            responses = graph.add("MatMul", graph.add("Gather", padded, taps, axis=1), kernels)
            for threshold in graph.array(self.thresholds[number].T):
                above = graph.cast(graph.add("Greater", responses, threshold), "FLOAT")
                shares = graph.add("Transpose", graph.add("MatMul", means, above), perm=[0, 2, 1])
                columns.append(graph.add("Flatten", shares))
        return graph.add("Concat", *columns, axis=1)

    def products(self) -> list[tuple[int, int]]:
        """Return the kernels' taps at every place."""
        return [(PATTERNS.taps, self.thresholds[..., 0].numel() * self.config.input_dim)]


def _spread_rows(x: Tensor) -> Tensor:
    """Return which of some rows are fitted to: all, or some of many."""
    n = len(x)
    return torch.linspace(0, n - 1, min(n, PATTERNS.most_rows)).round().long().to(x.device)


def _respond(x: Tensor, taps: Tensor, kernels: Tensor) -> Tensor:
    """Return the responses (n, places, kernels) of rows (n, dim) at places with these taps, zero beyond their ends."""
    values = F.pad(x, (0, 1)).index_select(1, taps.flatten()).view(-1, PATTERNS.taps)
    return (values @ kernels.T).view(-1, len(taps), len(kernels))


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


class SharesView(View):
    """The shares themselves, for views that read them."""

    kind = "shares"
    reads = Bank
    source: Bank

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of shares."""
        return (self.source.size,)


@dataclass(frozen=True)
class PatternConfig(Config):
    """Classes, and whether shares are local as in `Patterns`."""

    classes: int = size()
    local: bool = True


class PatternView(View):
    """Class scores that a ridge regression reads from the shares of patterns.

    Buffers: ``readout`` (shares, classes) and ``offset`` (classes,).
    """

    kind = "patterns"
    config_type, reads = PatternConfig, Bank
    config: PatternConfig
    source: Bank
    readout: Tensor
    offset: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each buffer by name."""
        shares, classes = self.source.size if self.config.local else self.source.shares, self.config.classes
        return {"readout": (shares, classes), "offset": (classes,)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of classes."""
        return (self.config.classes,)

    def forward(self, z: Tensor) -> Tensor:
        """Map shares (n, cells of all) to class scores (n, num_classes)."""
        shares = self.source.pool(z, local=self.config.local)
        # Scores are small next to their terms: in float32, how the product is rounded would show.
        return F.linear(shares.double(), self.readout.double().T.contiguous(), self.offset.double()).to(z.dtype)

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the read-out, of whole rows by that of their parts."""
        cells = self.readout.new_tensor(self.source.counts) / self.input_dim
        readout = self.readout if self.config.local else torch.einsum("sc,p->spc", self.readout, cells).flatten(0, 1)
        return [graph.add("Gemm", rows, graph.array(readout), graph.array(self.offset))]

    def products(self) -> list[tuple[int, int]]:
        """Return the read-out."""
        return [(self.readout.shape[0], self.readout.shape[1])]
