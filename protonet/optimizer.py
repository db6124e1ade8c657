"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

The direction is Adam's in the eigenbasis of the gradients' second moments (SOAP), half of it along a mean of many more
steps. The step size is searched for: it grows until the slope that the new gradient sees along the step before turns
uphill. From then on it follows that slope, less and less, and falls with the number of steps, and to nothing where
that number is known. There is one size for everything, and a factor for each direction of the eigenbases.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Values without another source were chosen on the visible and tuning families of `analysis.optimizer_bench`;
# docs/decisions/optimizer-form.md has what was tried, and analysis/results what they reach.


@dataclass(frozen=True)
class Sides:
    """Which sides of matrices are turned into eigenbases, the shortest first, and how these follow the gradients."""

    longest: int = 512  #: Length, in rows or columns: a longer side is not turned.
    longer: int = 8  #: Ratio of a side to the other one: above it, the longer side is not turned.
    #: Multiplications per step that turning may cost, over all parameters that start together, and for each element of
    #: theirs: the larger of both counts. A QR decomposition costs the last times length**3, with what goes with it, and
    #: small ones cost more than they multiply: the last but one times length**2. Measured.
    budget: tuple[float, float, float, float] = (350e6, 1100, 400, 4.6)
    room: tuple[float, float] = (4e6, 4)  #: Numbers that may be kept, likewise: at most four times Adam's state in all.
    decay: float = 0.98  #: Decay per step of the second moments' average, in [0, 1).
    #: Share of the trace added to the diagonal, graded: else bases would depend on rounding where there are ties.
    damping: float = 1e-4
    often: int = 2  #: Steps between two updates of a basis at first ...
    settled: int = 20  #: ... for this many steps ...
    seldom: int = 8  #: ... and after them (the paper: 10).
    length: int = 64  #: Beyond twice this, every such length adds the same again to all three and skips a gradient.


@dataclass(frozen=True)
class Shape:
    """What a step is made of, and what keeps single gradients and silent directions from ruling it."""

    window: float = 6.0  #: The slow mean looks back over one ``window``-th of the steps.
    share: float = 0.5  #: Of the step that follows the slow mean, not the new gradient and Adam's mean.
    inputs: int = 64  #: A matrix of so many inputs takes steps of the rate itself, as does all that is no matrix ...
    power: float = 0.25  #: ... and one of others that times ``(inputs / its inputs) ** power``.
    longest: float = 0.1  #: Longest step per element, before factors, in units of the weights.
    #: Least root of a second moment, relative to the gradient's usual size: silent directions are not blown up.
    floor: float = 1e-2
    spike: float = 10.0  #: A gradient is scaled down to this many times its usual size.
    least: float = 1e-30  #: Added to second moments: no number is divided by zero.
    largest: float = 1e15  #: Largest gradient, in units of the first one: squares do not overflow in float32.


@dataclass(frozen=True)
class Tables:
    """Tall matrices of which the first gradient leaves rows untouched, as embeddings are: rows are rarely seen."""

    tall: float = 1.5  #: Least rows per column.
    untouched: float = 0.25  #: Least share of rows without gradient, exclusive.
    rate: float = 5.0  #: Step size, relative to others' ...
    most: float = 0.02  #: ... and the most that it is.
    beta: float = 0.999  #: Least decay of the second moments (Adam's default).
    decay: float = 0.2  #: Weight decay, relative to others'.


@dataclass(frozen=True)
class Law:
    """How the rate, the step size of a matrix of 64 inputs, is found, and follows slopes in their usual size."""

    growth: float = 0.4  #: In the search, the rate's logarithm grows by so much per step.
    usual: float = 0.01  #: Up to here it grows unless there is evidence against it, beyond if there is evidence for it.
    uphill: float = 0.5  #: Evidence against it: the trend of slopes, in [0, 1].
    back: float = 0.7  #: Factor of the rate at which such evidence is found.
    gain: float = 0.015  #: After it, most change of the rate's logarithm per step, at a slope of one usual size ...
    late_gain: float = 4.0  #: ... or this over the number of steps, if that is less.
    turn_gain: float = 0.4  #: Added to it, over one plus the number of times that the trend has turned (Kesten's rule).
    fall: float = 0.0045  #: What the rate's logarithm falls per step ...
    late_fall: float = 1.5  #: ... or this over the number of steps, if that is less.
    least: float = 1.0  #: Over the number of steps: no slope takes the rate below it, from above.
    range: float = 1e4  #: Furthest factor of the rate, either way.
    trend: float = 0.7  #: Decay per step of the trend of slopes.
    memory: float = 0.95  #: Decay per step of the slopes' mean size.
    unit: float = 1.25  #: The usual size, in units of the mean size: of normal numbers, their root mean square.
    direction_gain: float = 0.03  #: Change of the logarithm of a direction's factor per step ...
    direction_hurry: float = 0.3  #: ... and what is added to it, over the number of steps.
    furthest: float = 1.15  #: Furthest logarithm of a direction's factor, either way: factors stay within a tenfold.
    negligible: float = 1e-3  #: Share of the largest direction's slope below which a slope is rounding.
    #: Of a known number of steps, in the last share that is so large, steps shrink linearly ...
    annealed: float = 0.6
    left: float = 1e-3  #: ... until this share of the steps is left: they never vanish.
    stretch: int = 1000  #: Steps for which gain, fall and least are meant: a known number beyond it stretches them.


SIDES, SHAPE, TABLES, LAW = Sides(), Shape(), Tables(), Law()
NAMES = ("left", "right")
AVERAGES = ("mean", "slow", "square", "last")  #: Tensors that are kept of every parameter.
ENDS = ("", "_basis", "_factors", "_slopes")  #: Of a side's tensors' names in a saved state.
STATE = {"step", "unit", "table", "usual", *AVERAGES}  #: What every parameter's saved state has.
ALIGNMENT = 64  #: Bytes at multiples of which torch lays tensors.


class Item(NamedTuple):
    """A parameter in a step, with a first dimension that counts the runs."""

    parameter: Tensor  #: (runs, ...), changed in place.
    gradient: Tensor
    group: dict[str, Any]  #: Its settings.


Work = dict[int, Item]  #: By the parameters' numbers.


@dataclass
class Run:
    """What the parameters of a run share."""

    rate: float  #: In units of the learning rate.
    total_steps: int | None = None  #: How many there will be, if that is known.
    steps: int = 0  #: That were taken.
    skipped: int = 0  #: Steps that were not, since a gradient was not finite.
    found: float = 0.0  #: The rate at the end of the search; 0 during it.
    slopes: int = 0
    slope_size: float = 0.0  #: The slopes' mean size.
    trend: float = 0.0
    turns: int = 0  #: Of the trend.

    def anneal(self, steps: int) -> float:
        """Return the share of the rate that is left after some steps: 1 until 40 % of all, then a linear fall."""
        if self.total_steps is None:
            return 1.0
        return min(1.0, max(LAW.left, 1 - steps / self.total_steps) / LAW.annealed)

    def follow(self, slope: float, lr: float) -> None:
        """Change the rate by the slope along the last step, in units of that step and of the largest learning rate."""
        downhill = -slope / (self.rate * self.anneal(self.steps - 1))  # a slope is that of a step as long as the rate
        if downhill == 0 or not math.isfinite(downhill):
            return
        self.slopes += 1
        self.slope_size += (1 - LAW.memory) * (abs(downhill) - self.slope_size)
        usual = LAW.unit * self.slope_size / (1 - LAW.memory**self.slopes)
        own, before = max(-1.0, min(1.0, downhill / usual)), self.trend
        self.trend = LAW.trend * before + (1 - LAW.trend) * own
        if self.found:
            self.turns += (before > 0) != (self.trend > 0)
            stretch = max(1.0, (self.total_steps or 0) / LAW.stretch)
            gain = min(LAW.gain / stretch, LAW.late_gain / self.slopes) + LAW.turn_gain / (1 + self.turns)
            fall = min(LAW.fall / stretch, LAW.late_fall / self.slopes)
            least = min(self.found, LAW.least * stretch / self.slopes / lr)
            self.rate = max(least, self.rate * math.exp(gain * own - fall))
        elif self.trend < (0 if self.rate * lr >= LAW.usual else -LAW.uphill):
            self.rate *= LAW.back
            self.found = self.rate
        else:
            self.rate *= math.exp(LAW.growth * (self.trend if self.rate * lr >= LAW.usual else 1))
        self.rate = max(1 / LAW.range, min(LAW.range, self.rate))


@dataclass
class Side:
    """What is kept of a turned side of length n."""

    statistics: Tensor  #: (shares, n, n), the average of the gradients' second moments.
    basis: Tensor  #: (shares, n, n), its eigenvectors as columns.
    factors: Tensor  #: (shares, n), the logarithms of the directions' factors.
    slopes: Tensor  #: (shares, n), the averages of their squared slopes.


@dataclass
class Bundle:
    """Parameters that are alike and step together, on top of each other; a share is one parameter's in one run.

    Tensors are (shares, rows, columns) of matrices, which convolutions are, too, else (shares, *shape), and of at least
    single precision.
    """

    numbers: list[int]  #: The parameter's, of each share.
    table: bool  #: See `Tables`.
    step: int  #: How many were taken.
    unit: list[float]  #: The first gradient's root mean square, of each share.
    usual: list[float]  #: The gradients' usual size, in these units.
    mean: Tensor  #: Adam's first moment, in the eigenbases, as are the three that follow.
    slow: Tensor  #: The mean over a longer window.
    square: Tensor  #: Adam's second moment.
    last: Tensor  #: The last step, without its size.
    sides: dict[str, Side] = field(default_factory=dict)  #: By `NAMES`.
    weight: Tensor | None = None  #: Like the mean, where weights are so coarse that small steps would be lost.

    def find_decay(self, group: dict[str, Any]) -> float:
        """Return the decay of the second moments."""
        return max(float(group["betas"][1]), TABLES.beta if self.table else 0.0)

    def read(self, gradient: Tensor, norms: Sequence[float], group: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return gradients in the bases, which follow them, and slopes along the last step, if there is one."""
        gradient = gradient.reshape(self.mean.shape)
        gradient = gradient * _spread(gradient, self._limit(norms, self.find_decay(group)))
        turned, slope = self.turn(gradient), None
        if self.step:
            slope = self._adapt_factors(self.last * turned)
        self.step += 1
        for name, side in self.sides.items():
            own, pace = gradient if name == "left" else gradient.mT, _pace(side.basis.shape[1])
            if self.step == 1 or self.step % pace == 0:
                side.statistics.lerp_(_times(own, own.mT), 1 - SIDES.decay**pace)
            if self.step == 1:
                side.basis.copy_(_each(_eigenbases, side.statistics))
            elif self.step % (pace * (SIDES.often if self.step <= pace * SIDES.settled else SIDES.seldom)) == 0:
                turned = self._refresh(name, turned)
        return self.turn(gradient) if self.step == 1 else turned, slope

    def _limit(self, norms: Sequence[float], decay: float) -> list[float]:
        """Return each share's factor on a gradient: to its unit, and down to what is usual, which follows."""
        root = math.sqrt(self.mean[0].numel())
        factors, before, after = [], 1 - decay**self.step, 1 - decay ** (self.step + 1)
        for place, (norm, unit, usual) in enumerate(zip(norms, self.unit, self.usual, strict=True)):
            size = norm / unit / root
            most = min(SHAPE.spike * usual, SHAPE.largest) if self.step else size
            factors.append(1 / unit if size <= most else most / norm * root)
            mean = decay * before * usual**2 + (1 - decay) * min(size, most) ** 2
            self.usual[place] = math.sqrt(mean / after)
        return factors

    def _adapt_factors(self, uphill: Tensor) -> Tensor:
        """Move the directions' factors by their slopes, relative to each other; return these slopes' sums."""
        memory = 1 - LAW.memory**self.step
        gain = LAW.direction_gain + LAW.direction_hurry / self.step
        slope = uphill.reshape(len(uphill), -1)
        for name, side in self.sides.items():
            slope = uphill.sum(-1 if name == "left" else -2)
            usual = side.slopes.lerp_(slope.square(), 1 - LAW.memory)
            alive = usual > LAW.negligible**2 * usual.amax(-1, keepdim=True)
            moves = torch.where(alive, slope * usual.rsqrt().mul_(math.sqrt(memory)), 0.0).clamp_(-1, 1)
            mean = moves.sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp_(min=1)
            side.factors.sub_(moves.sub_(alive * mean), alpha=gain).clamp_(-LAW.furthest, LAW.furthest)
        return slope.sum(1)

    def turn(self, gradient: Tensor, *, back: bool = False) -> Tensor:
        """Return matrices in the eigenbases of their sides, or back from there."""
        for name, side in self.sides.items():
            basis = side.basis if back == (name == "left") else side.basis.mT
            gradient = _times(basis, gradient) if name == "left" else _times(gradient, basis)
        return gradient

    def _refresh(self, name: str, turned: Tensor) -> Tensor:
        """Let a side's bases follow its statistics by a power step, and averages turn along; return the gradient."""
        side, left = self.sides[name], name == "left"
        power = _times(side.statistics, side.basis).addcmul_(side.basis, SIDES.damping * _trace(side.statistics))
        new = _each(lambda matrices: torch.linalg.qr(matrices)[0], power)
        turn = _times(new.mT, side.basis)
        shares = turn.square()  # of each old direction in each new one
        side.basis.copy_(new)
        for each in (side.factors, side.slopes):
            each.copy_((shares * each[:, None]).sum(-1))
        for average, by in ((self.mean, turn), (self.slow, turn), (self.square, shares)):
            average.copy_(_times(by, average) if left else _times(average, by.mT))
        return _times(turn, turned) if left else _times(turned, turn.mT)

    def move(self, turned: Tensor, rates: Sequence[float], items: Sequence[Item]) -> None:
        """Move parameters by one step, along gradients in the bases, and let the weights of matrices decay."""
        group, runs = items[0].group, len(rates)
        first, second = float(group["betas"][0]), self.find_decay(group)
        # A row of a table that is seldom seen has a slow mean of long ago. The length has what all directions share.
        share = 0.0 if self.table else SHAPE.share
        weight, correction = (1 - share) / (1 - first ** (self.step + 1)), 1 - second**self.step
        floors = [(SHAPE.floor * usual) ** 2 + float(group["eps"]) ** 2 for usual in self.usual]
        mean = self.mean.lerp_(turned, 1 - first)
        slow = self.slow.lerp_(turned, SHAPE.window / (self.step + SHAPE.window - 1))
        square = self.square.mul_(second).addcmul_(turned, turned, value=1 - second)
        last = torch.lerp(turned, mean, first, out=self.last).add_(slow, alpha=share / weight)
        last.mul_((square + _spread(square, [correction * floor + SHAPE.least for floor in floors])).rsqrt_())
        sizes = [self.limit(float(group["lr"]) * rate) for rate in rates]
        along = _spread(square, [-size * weight * math.sqrt(correction) for size in sizes] * len(items))
        for name, side in self.sides.items():
            last.mul_((side.factors.exp()[..., None] if name == "left" else side.factors.exp()[..., None, :]) * along)
            along = 1.0
        steps = self.turn(last if self.sides else last.mul_(along), back=True).split(runs)
        decay = float(group["weight_decay"]) * (TABLES.decay if self.table else 1.0) * (self.mean.ndim > 2)
        stays = _spread(items[0].parameter, [1 - size * decay for size in sizes])
        fine = [None] * len(items) if self.weight is None else self.weight.split(runs)
        for (p, *_), step, precise in zip(items, steps, fine, strict=True):
            own = p if precise is None else precise.view(p.shape)
            if own is not p and not torch.equal(own.to(p.dtype), p):
                own.copy_(p)
            own.mul_(stays).add_(step.reshape(p.shape))
            if own is not p:
                p.copy_(own)

    def limit(self, size: float) -> float:
        """Return a step size within what is allowed here."""
        matrix = not self.table and self.mean.ndim > 2 and min(self.mean.shape[1:]) > 1
        inputs = self.mean.shape[2] if matrix else SHAPE.inputs
        size = min(SHAPE.longest, size) * (SHAPE.inputs / inputs) ** SHAPE.power
        return min(TABLES.most, TABLES.rate * size) if self.table else size

    def save(self, row: int) -> dict[str, Any]:
        """Return a share's state in plain types."""
        state = {"step": self.step, "table": self.table, "unit": [self.unit[row]], "usual": [self.usual[row]]}
        state |= {name: getattr(self, name)[row] for name in AVERAGES}
        for name, side in self.sides.items():
            state |= {name + end: tensor[row] for end, tensor in zip(ENDS, vars(side).values(), strict=True)}
        return state if self.weight is None else state | {"weight": self.weight[row]}

    @classmethod
    def load(cls, number: int, state: dict[str, Any], parameter: Tensor) -> Bundle:
        """Return a bundle of a parameter (1, ...) from what `save` returned, now or in earlier versions."""
        like = _pile([parameter])
        tensors = {name: x.to(like, copy=True)[None] for name, x in state.items() if isinstance(x, Tensor)}
        flat = {name: _flatten(tensors[name].view(like.shape)) for name in (*AVERAGES, "weight") if name in tensors}
        unit, usual = (own if isinstance(own, list) else [own] for own in (state["unit"], state["usual"]))
        sides = {name: Side(*(tensors[name + end] for end in ENDS)) for name in NAMES if name in state}
        return cls([number], state["table"], state["step"], unit, usual, sides=sides, **flat)


class Steps:
    """The steps of one run, or of several runs whose parameters are stacked along a first dimension."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.bundles: list[Bundle] = []

    def take(self, work: Work) -> bool:
        """Take one step with the parameters that have gradients: move them, and change what is kept.

        Returns:
            False if the runs do not go alike: gradients that are not finite, that are zero so far, or that make a
            table, in some of the runs alone. Nothing has moved then, and each run has to take its step apart.
        """
        runs, known = len(self.runs), {number for bundle in self.bundles for number in bundle.numbers}
        self._divide(work)
        going = [bundle for bundle in self.bundles if bundle.numbers[0] in work]
        together = [bundle.numbers[::runs] for bundle in going] + [[number] for number in work if number not in known]
        piles = [_pile([work[number].gradient for number in numbers]) for numbers in together]
        flat = [pile.reshape(len(pile), -1) for pile in piles]
        norms = _fetch([torch.linalg.vector_norm(own, dim=1, dtype=torch.float64) for own in flat])  # no overflow
        finite = {all(math.isfinite(norm) for own in norms for norm in own[run::runs]) for run in range(runs)}
        if finite == {False}:
            for run in self.runs:
                run.skipped += 1
            return True
        fresh = [(*each, set(_find_tables(each[1]))) for each in zip(together, piles, norms, strict=True)][len(going) :]
        fresh = [each for each in fresh if any(each[2])]  # what has a gradient for the first time
        if len(finite) > 1 or any(len(tables) > 1 or not all(own) for _, _, own, tables in fresh):
            return False
        if fresh:
            new = [_start(numbers[0], pile, own, work, table=True in tables) for numbers, pile, own, tables in fresh]
            _choose_sides(new)
            self.bundles += _join(new, work)
            return self.take(work)
        groups = [work[bundle.numbers[0]].group for bundle in going]
        parts = zip(going, piles, norms, groups, strict=False)
        read = [bundle.read(pile, own, group) for bundle, pile, own, group in parts]
        self._follow(going, [slope for _, slope in read], groups)
        rates = [run.rate * run.anneal(run.steps) for run in self.runs]
        for run in self.runs:
            run.steps += 1
        for bundle, (turned, _) in zip(going, read, strict=True):
            bundle.move(turned, rates, [work[number] for number in bundle.numbers[::runs]])
        return True

    def _follow(self, bundles: list[Bundle], slopes: list[Tensor | None], groups: list[dict[str, Any]]) -> None:
        """Let the rates follow the slopes along the last step, as far as any parameter's step would change."""
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]  # whatever schedulers made of them
        sloping = [place for place, slope in enumerate(slopes) if slope is not None]
        lr = max((rates[place] for place in sloping), default=0.0) or 1.0
        found = _fetch([slope for slope in slopes if slope is not None])
        units = [bundles[place].unit for place in sloping]
        products = [a * b for own, unit in zip(found, units, strict=True) for a, b in zip(own, unit, strict=True)]
        longest = [TABLES.most / TABLES.rate if bundle.table else SHAPE.longest for bundle in bundles]
        most = max((limit / (rate or 1.0) for limit, rate in zip(longest, rates, strict=True)), default=math.inf)
        for number, run in enumerate(self.runs):
            if sloping:
                run.follow(math.fsum(products[number :: len(self.runs)]), lr)
            run.rate = min(run.rate, most / run.anneal(run.steps))  # inside the limits: what is at one is annealed, too

    def _divide(self, work: Work) -> None:
        """Part bundles of which some parameters alone have gradients, and follow parameters where they have gone."""
        bundles, self.bundles = self.bundles, []
        for bundle in bundles:
            rows = [[row for row, n in enumerate(bundle.numbers) if (n in work) == here] for here in (True, False)]
            for part in [_pick(bundle, own) for own in rows] if all(rows) else [bundle]:
                item = work.get(part.numbers[0])
                like = part.mean if item is None else _pile([item.gradient[:0]])
                self.bundles.append(_map(lambda own, to=like: own.to(to) if isinstance(own, Tensor) else own, part))

    def part(self, number: int) -> Steps:
        """Return the steps of one run alone."""
        own = Steps([self.runs[number]])
        own.bundles = [_pick(each, [*range(number, len(each.numbers), len(self.runs))]) for each in self.bundles]
        return own


class CustomOptimizer(torch.optim.Optimizer):
    """Minimise with steps whose direction and size come from the gradients alone.

    Args:
        params: Parameters or groups of them, real and dense; groups may have settings of their own.
        lr: >= 0; its changes and its ratios between groups scale the steps, so that schedulers work. Itself it does not
            matter: the search for the step size starts at 0.01.
        betas: Two decays in [0, 1), of the gradients' mean and of their squares.
        weight_decay: >= 0, decoupled, times the step size; of matrices alone.
        eps: >= 0, in units of the first gradient's root mean square.
        total_steps: >= 1, how many steps the run will have: in the last 60 % of them steps shrink to nothing, and what
            comes after goes nowhere. None where that is not known: the rate then falls by itself.

    Raises:
        TypeError: A complex parameter; an unknown setting.
        ValueError: A setting that is negative, not finite or out of range; later, a sparse gradient.

    Source: Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam" (2024), arXiv:2409.11321, with Nesterov
        momentum, and second moments that turn along with their basis; Baydin et al., "Online learning rate adaptation
        with hypergradient descent" (2018), arXiv:1703.04782, in signs of slopes.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.15,
        eps: float = 1e-8,
        total_steps: int | None = None,
    ) -> None:
        _check_total(total_steps)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        first = max(float(group["lr"]) for group in self.param_groups) or 1.0
        self.steps = Steps([Run(LAW.usual / first, total_steps)])

    @property
    def skipped(self) -> int:
        """How many steps were skipped because a gradient was not finite."""
        return self.steps.runs[0].skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, which are checked."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there; none if one of them is not finite.

        Args:
            closure: Computes gradients anew and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        there = [(p.grad, p, number) for number, (p, _) in enumerate(self._list()) if p.grad is not None and p.numel()]
        if any(gradient.is_sparse for gradient, *_ in there):
            raise ValueError("CustomOptimizer: `params` must have dense gradients; got a sparse one. Densify it.")
        if there:
            groups = [group for _, group in self._list()]
            self.steps.take({n: Item(p[None], gradient[None], groups[n]) for gradient, p, n in there})
        return loss

    def _list(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Return parameters with their groups; their places are their numbers."""
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle takes along."""
        return {**super().__getstate__(), "steps": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types: of each parameter, and of the run in the first group."""
        saved = super().state_dict()
        states = {n: bundle.save(row) for bundle in self.steps.bundles for row, n in enumerate(bundle.numbers)}
        saved["state"] = dict(sorted(states.items()))
        saved["param_groups"][0].update(asdict(self.steps.runs[0]))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: tensors come to the parameters' devices and keep at least float32, whatever those have."""
        states = state_dict["state"]
        if any(not state.keys() >= STATE for state in states.values()):
            got = "one of another optimizer, or of an older version"
            raise ValueError(f"CustomOptimizer: `state_dict` must be of this optimizer; got {got}. Start without it.")
        super().load_state_dict({**state_dict, "state": {}})
        steps = max((state["step"] for state in states.values()), default=0)  # earlier versions did not count them
        shared = asdict(self.steps.runs[0]) | {"steps": steps}
        first = self.param_groups[0]
        self.steps = Steps([Run(**{name: first.pop(name, value) for name, value in shared.items()})])
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        work = {n: Item(p[None], p[None], group) for n, (p, group) in enumerate(self._list())}
        loaded = [Bundle.load(n, states[old], work[n].parameter) for n, old in enumerate(numbers) if old in states]
        self.steps.bundles = _join(loaded, work)


class StackOptimizer:
    """CustomOptimizer's steps for a stack of models, all at once, and each model with a step size of its own.

    It is no `torch.optim.Optimizer`, the first of which imports torch's compiler (about 1.1 CPU seconds), and has no
    hooks, schedulers or state dictionary.

    Args:
        groups: Weights (members, ...) and their weight decay, >= 0; each member's share of a weight has at least one
            dimension.
        start: > 0, where the search for the step size starts.
        betas: Those of `CustomOptimizer`.
        eps: That of `CustomOptimizer`.
        total_steps: That of `CustomOptimizer`, of every member.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[Tensor], float]],
        start: float = LAW.usual,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        total_steps: int | None = None,
    ) -> None:
        _check_total(total_steps)
        self.weights: list[tuple[Tensor, dict[str, Any]]] = []
        for weights, decay in groups:
            group = {"lr": start, "betas": betas, "eps": eps, "weight_decay": decay}
            self.weights += [(weight.detach(), group) for weight in weights]
        #: The number of the first member, and the steps, of members that go together.
        self.parts = [(0, Steps([Run(1.0, total_steps) for _ in self.weights[0][0]]))]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one step of every member with the weights' gradients (members, ...), in the groups' order.

        A member whose gradients are not finite stays where it is. Members go on one by one once they differ in which
        gradients are zero or not finite: the result is the same, and takes longer.
        """
        waiting, self.parts = self.parts, []
        while waiting:
            first, steps = waiting.pop(0)
            members = slice(first, first + len(steps.runs))
            both = enumerate(zip(self.weights, gradients, strict=True))
            if steps.take({n: Item(weight[members], own[members], group) for n, ((weight, group), own) in both}):
                self.parts.append((first, steps))
            else:
                waiting += [(first + number, steps.part(number)) for number in range(len(steps.runs))]


def _check_total(total_steps: int | None) -> None:
    """Raise an error for a number of steps that is none."""
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        known = "Use None where it is not known."
        raise ValueError(f"CustomOptimizer: `total_steps` must be an int >= 1; got {total_steps!r}. {known}")


def _check(group: dict[str, Any]) -> None:
    """Raise an error for a setting that is unknown or out of range."""
    known = {"params", "lr", "betas", "weight_decay", "eps", "initial_lr", "max_lr", "min_lr", "param_names"}
    for name in sorted(group.keys() - known):
        raise TypeError(f"CustomOptimizer: `{name}` must be a setting; got {group[name]!r}. Remove it.")
    betas = group["betas"] if isinstance(group["betas"], (tuple, list)) else ()
    if len(betas) != 2:
        raise TypeError(f"CustomOptimizer: `betas` must be two numbers; got {group['betas']!r}. Use the default.")
    names = ("lr", "weight_decay", "eps")
    for name, value in (*((name, group[name]) for name in names), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
        most = 1.0 if name.startswith("betas") else math.inf
        number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not number or isinstance(value, bool) or not 0 <= float(value) < most:
            raise ValueError(f"CustomOptimizer: `{name}` must be in [0, {most:g}); got {value!r}. Use the default.")
    if any(p.is_complex() for p in group["params"]):
        raise TypeError("CustomOptimizer: `params` must be real; got a complex tensor. Pass torch.view_as_real of it.")


def _map(change: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return a bundle, or a part of one, with what is made of the tensors and lists of several alike ones."""
    if isinstance(first, (Tensor, list)):
        return change(first, *others)
    if isinstance(first, dict):
        return {name: _map(change, *(each[name] for each in (first, *others))) for name in first}
    if isinstance(first, (Bundle, Side)):
        return type(first)(**_map(change, *(vars(each) for each in (first, *others))))
    return first


def _pick(bundle: Bundle, rows: list[int]) -> Bundle:
    """Return the bundle of some of the shares, copied, and so aligned."""
    picked: Bundle = _map(lambda own: own[rows] if isinstance(own, Tensor) else [own[row] for row in rows], bundle)
    return picked


def _join(bundles: Sequence[Bundle], work: Work) -> list[Bundle]:
    """Return bundles of one parameter each, together where these are alike."""
    alike: defaultdict[Hashable, list[Bundle]] = defaultdict(list)
    for bundle in bundles:
        p, _, group = work[bundle.numbers[0]]
        alike[p.shape, p.dtype, p.device, id(group), bundle.step, bundle.table, tuple(bundle.sides)].append(bundle)
    return [
        _map(lambda *own: torch.cat(own) if isinstance(own[0], Tensor) else [*chain(*own)], *parts)
        for parts in alike.values()
    ]


def _start(number: int, gradient: Tensor, norms: list[float], work: Work, *, table: bool) -> Bundle:
    """Return the bundle, without sides, of a parameter with its first gradient (runs, ...)."""
    empty, parameter = _flatten(torch.zeros_like(gradient)), work[number].parameter
    root, tiny = math.sqrt(empty[0].numel()), torch.finfo(torch.float32).tiny
    unit, usual = [max(norm / root, tiny) for norm in norms], [0.0] * len(norms)
    mean, slow, square, last = (empty.clone() for _ in AVERAGES)
    start = Bundle([number] * len(norms), table, 0, unit, usual, mean, slow, square, last)
    if parameter.dtype.itemsize < 4:
        start.weight = _flatten(_pile([parameter])).clone()
    return start


def _flatten(parameter: Tensor) -> Tensor:
    """Return parameters (runs, ...) as matrices (runs, rows, columns), or as they are if they have fewer dimensions."""
    return parameter.flatten(2) if parameter.ndim > 2 else parameter


def _choose_sides(bundles: list[Bundle]) -> None:
    """Turn parameters that start together on their shortest sides, as far as can be paid for."""
    sides: defaultdict[tuple[int, bool, str], list[Bundle]] = defaultdict(list)
    for bundle in bundles:
        shape = bundle.mean.shape[1:]
        if len(shape) == 2 and min(shape) > 1 and not bundle.table:
            for name, length, other in zip(NAMES, shape, reversed(shape), strict=True):
                if length <= min(SIDES.longest, SIDES.longer * other):
                    sides[length, name == "left", name].append(bundle)  # inputs' sides first: they gain more
    elements = sum(bundle.mean[0].numel() for bundle in bundles)
    least, each, overhead, decomposition = SIDES.budget
    budget, room = max(least, each * elements), max(SIDES.room[0], SIDES.room[1] * elements)
    for (n, _, name), chosen in sorted(sides.items(), key=lambda pair: pair[0]):
        pace = _pace(n)
        for own in (n * bundle.mean[0].numel() for bundle in chosen):
            seldom = (4 * own + decomposition * n**3 + overhead * n**2) / SIDES.seldom  # the basis
            budget -= 2 * own + (own + seldom) / pace  # there and back, statistics and basis
        room -= 2 * n**2 * len(chosen)
        if min(budget, room) < 0:
            break
        for bundle in chosen:
            zeros = [bundle.mean.new_zeros(len(bundle.mean), *shape) for shape in ((n, n), (n, n), (n,), (n,))]
            both = {**bundle.sides, name: Side(*zeros)}
            bundle.sides = {which: both[which] for which in NAMES if which in both}


def _pace(length: int) -> int:
    """Return how many steps a side takes for what a short one does at each: turning long ones costs more."""
    return max(1, length // SIDES.length - 1)


def _eigenbases(statistics: Tensor) -> Tensor:
    """Return matrices' eigenvectors as columns (shares, n, n), by falling eigenvalue; ties as coordinates are."""
    ties = torch.linspace(1, 0, statistics.shape[1], dtype=torch.float64, device=statistics.device)
    traces = _trace(statistics.double())
    damped = statistics.double() + SIDES.damping * traces * torch.diag(ties)
    vectors: Tensor = torch.linalg.eigh(damped)[1]
    return vectors.flip(2).to(statistics)


def _trace(matrices: Tensor) -> Tensor:
    """Return the traces (shares, 1, 1) of matrices."""
    traces: Tensor = matrices.diagonal(dim1=1, dim2=2).sum(1)
    return traces[:, None, None]


def _aligned(*stacks: Tensor) -> bool:
    """Return whether all shares of stacks are aligned in memory as tensors of their own are.

    BLAS rounds otherwise where they are not, and a run's steps would depend on the runs beside it.
    """
    return all(len(stack) == 1 or math.prod(stack.shape[1:]) * stack.itemsize % ALIGNMENT == 0 for stack in stacks)


def _each(function: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Return what a function of stacks of matrices returns, share by share where these are not aligned."""
    if _aligned(*stacks):
        return function(*stacks)
    shares = zip(*(stack.split(1) for stack in stacks), strict=True)
    return torch.cat([function(*(share.clone() for share in own)) for own in shares])


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of two stacks of matrices."""
    return _each(torch.bmm, left, right)


def _spread(like: Tensor, values: Sequence[float]) -> Any:
    """Return what combines one number per share with a stack: the number itself where there is but one."""
    if all(value == values[0] for value in values):
        return values[0]
    return like.new_tensor(values).view(-1, *[1] * (like.ndim - 1))


def _find_tables(gradient: Tensor) -> list[bool]:
    """Return for each run whether the parameter (runs, ...) is a table, by its shape and first gradient."""
    shape = gradient.shape[1:]
    if len(shape) != 2 or shape[0] < TABLES.tall * shape[1]:
        return [False]
    return [bool(each) for each in (gradient == 0).all(-1).float().mean(-1) > TABLES.untouched]


def _pile(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors (runs, ...) as one (shares, ...), of at least single precision."""
    together = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    return together.to(torch.promote_types(together.dtype, torch.float32))


def _fetch(rows: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of tensors (n,), which are waited for once."""
    numbers = iter(torch.cat([row.to(rows[0].device) for row in rows]).tolist() if rows else [])
    return [list(islice(numbers, len(row))) for row in rows]
