"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

The direction is Adam's in the eigenbasis of the gradients' second moments (SOAP), half of it along a mean of many more
steps. The step size, one for everything, is searched for: it grows until the slope that the new gradient sees along the
step before turns uphill. From then on it follows that slope, less and less, and falls with the number of steps, and to
nothing where that number is known. There is a factor for each direction of the eigenbases, too.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

# Values without another source were chosen on the visible and tuning families of `analysis.optimizer_bench`;
# docs/decisions/optimizer-form.md has what was tried, and analysis/results what they reach.


@dataclass(frozen=True)
class Sides:
    """Which sides of matrices are turned into eigenbases, inputs' sides first, and how these follow the gradients."""

    longest: int = 512  #: Length, in rows or columns: a longer side is not turned.
    longer: int = 8  #: Ratio of a side to the other one: above it, the longer side is not turned.
    block: int = 96  #: A side beyond it is parted into blocks of about one length, each with a basis of its own.
    both: int = 400  #: Most that both sides sum to; beyond it the inputs' alone are turned, or the outputs'.
    decay: float = 0.98  #: Decay per step of the second moments' average, in [0, 1).
    damping: float = 1e-4  #: Share of the trace that is added to the diagonal: no direction is left to rounding.
    often: int = 2  #: Steps between two gradients that this takes in, and between two updates of a basis at first ...
    settled: int = 20  #: ... for this many steps ...
    seldom: int = 8  #: ... and after them (the paper: 10).


@dataclass(frozen=True)
class Shape:
    """What a step is made of, and what keeps single gradients and silent directions from ruling it."""

    window: float = 6.0  #: The slow mean looks back over one ``window``-th of the steps.
    share: float = 0.5  #: Of the step that follows the slow mean, not the new gradient and Adam's mean.
    longest: float = 0.1  #: Longest step per element, about, in units of the weights.
    #: Least root of a second moment, relative to the gradient's usual size: silent directions are not blown up.
    floor: float = 1e-2
    spike: float = 10.0  #: A gradient is scaled down to this many times its usual size.
    least: float = 1e-30  #: Least square of that size: no number is divided by zero.
    together: int = 2**18  #: Elements of parameters that are alike and step as one: more would not stay in a cache.


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
    """How the rate, the step size, is found, and follows slopes in their usual size."""

    growth: float = 0.4  #: In the search, the rate's logarithm grows by so much per step.
    usual: float = 0.01  #: Up to here it grows unless there is evidence against it, beyond if there is evidence for it.
    uphill: float = 0.5  #: Evidence against it: the trend of slopes, in [0, 1].
    back: float = 0.7  #: Factor of the rate at which such evidence is found.
    gain: float = 0.015  #: After it, most change of the rate's logarithm per step, at a slope of one usual size ...
    late_gain: float = 4.0  #: ... or this over the number of steps, if that is less.
    turn_gain: float = 0.4  #: Added to it, over one plus the number of times that the trend has turned (Kesten's rule).
    fall: float = 0.0045  #: What the rate's logarithm falls per step ...
    late_fall: float = 1.5  #: ... or this over the number of steps, if that is less.
    trend: float = 0.7  #: Decay per step of the trend of slopes.
    memory: float = 0.95  #: Decay per step of the slopes' mean size.
    unit: float = 1.25  #: The usual size, in units of the mean size: of normal numbers, their root mean square.
    direction_gain: float = 0.03  #: Change of the logarithm of a direction's factor per step ...
    direction_hurry: float = 0.3  #: ... and what is added to it, over the number of steps.
    furthest: float = 1.15  #: Furthest logarithm of a direction's factor, either way: factors stay within a tenfold.
    negligible: float = 1e-3  #: Share of the largest direction's slope below which a slope is rounding.
    annealed: float = 0.45  #: Of a known number of steps, in the last share that is so large, steps shrink linearly ...
    left: float = 1e-3  #: ... until this share of the steps is left: they never vanish.
    cap_steps: int = 100  #: Steps at the longest allowed step after which the search ends, as in adversarial training.
    tolerance: float = 0.1  #: Reduction of the learning rate by a scheduler at which slopes cease to count.
    stretch: int = 1000  #: Steps for which gain and fall are meant: a known number beyond it stretches them.


SIDES, SHAPE, TABLES, LAW = Sides(), Shape(), Tables(), Law()
Group = dict[str, Any]  #: Parameters' settings.


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
    steps_at_cap: int = 0  #: Steps of the search at the longest allowed step.
    factor: float = 0.0  #: Largest ratio of a group's learning rate to its unit, at the last step ...
    peak_factor: float = 0.0  #: ... and at any step.

    def anneal(self, steps: int) -> float:
        """Return the share of the rate that is left after some steps: 1 until 55 % of all, then a linear fall."""
        if self.total_steps is None:
            return 1.0
        return min(1.0, max(LAW.left, 1 - steps / self.total_steps) / LAW.annealed)

    def __post_init__(self) -> None:
        """Raise an error for a number of steps that is none."""
        if self.total_steps is not None and (type(self.total_steps) is not int or self.total_steps < 1):
            _refuse("total_steps", "be an int >= 1", repr(self.total_steps), "Use None where it is not known.")

    def follow(self, slope: float, lr: float, factor: float = 1.0) -> None:
        """Change the rate by the slope along the last step.

        Args:
            slope: Inner product of the new gradient and the last step.
            lr: Largest unit of the groups: their learning rate in the constructor.
            factor: Largest ratio of a group's learning rate to its unit, which a scheduler sets.
        """
        length, rising = self.rate * self.anneal(self.steps - 1) * self.factor, factor > self.peak_factor > 0
        self._set_factor(factor, lr)
        downhill = -slope / length if length else 0.0
        if downhill == 0 or not math.isfinite(downhill):
            return
        unit, share = lr * (self.peak_factor or 1.0), factor / (self.peak_factor or 1.0)
        self.slopes += 1
        self.slope_size += (1 - LAW.memory) * (abs(downhill) - self.slope_size)
        usual = LAW.unit * self.slope_size / (1 - LAW.memory**self.slopes)
        own, before = max(-1.0, min(1.0, downhill / usual)), self.trend
        self.trend = LAW.trend * before + (1 - LAW.trend) * own
        if self.found:
            self.turns += (before > 0) != (self.trend > 0)
            stretch = max(1.0, (self.total_steps or 0) / LAW.stretch)
            gain = min(LAW.gain / stretch, LAW.late_gain / self.slopes) + LAW.turn_gain / (1 + self.turns)
            trust = max(0.0, 1 - (1 - share) / LAW.tolerance)  # shorter steps' slopes would undo a scheduler's factor
            gain *= trust
            fall = min(LAW.fall / stretch, (trust * LAW.late_fall + 1 - trust) / self.slopes)
            least = min(self.found, math.sqrt(stretch) / self.slopes / unit)  # no slope takes the rate below it
            self.rate = max(least, self.rate * math.exp(gain * own - fall))
        elif self.trend < (0 if self.rate * unit >= LAW.usual and not rising else -LAW.uphill):
            self.rate *= LAW.back
            self.found = self.rate
        elif share >= 0.5 and not rising:
            self.rate *= math.exp(LAW.growth * (self.trend if self.rate * unit >= LAW.usual else 1))

    def _set_factor(self, factor: float, lr: float) -> None:
        """Set a scheduler's factor; if it is the largest so far, the rate gives back what it grew at smaller ones."""
        if factor > self.peak_factor:
            if self.peak_factor:
                kept = max(self.peak_factor / factor, min(1.0, LAW.usual / lr / self.rate))
                self.rate, self.found = self.rate * kept, self.found * kept
            self.peak_factor = factor
        self.factor = factor


@dataclass
class Block:
    """A part of a side of matrices, of length n, that is turned into a basis of its own."""

    axis: int  #: 1 for rows, 2 for columns.
    start: int  #: Its first row or column.
    statistics: Tensor  #: (shares, n, n), the average of the gradients' second moments.
    basis: Tensor  #: (shares, n, n), its eigenvectors as columns.
    factors: Tensor  #: (shares, n), the logarithms of the directions' factors.
    slopes: Tensor  #: (shares, n), the averages of their squared slopes.

    def pick(self, matrices: Tensor) -> Tensor:
        """Return this part of matrices (shares, rows, columns), a view."""
        return matrices.narrow(self.axis, self.start, self.basis.shape[2])

    def turn(self, matrices: Tensor, by: Tensor) -> None:
        """Multiply this part of matrices by others (shares, n, n), in place."""
        part = self.pick(matrices)
        part.copy_(torch.bmm(by, part) if self.axis == 1 else torch.bmm(part, by.mT))

    def gather(self, gradient: Tensor) -> None:
        """Let the statistics follow gradients."""
        part = self.pick(gradient) if self.axis == 1 else self.pick(gradient).mT
        self.statistics.lerp_(torch.bmm(part, part.mT), 1 - SIDES.decay**SIDES.often)

    def follow(self, averages: Sequence[Tensor], square: Tensor) -> None:
        """Let the basis follow the statistics by a power step, and what is kept in it turn along."""
        trace = self.statistics.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        power = torch.bmm(self.statistics, self.basis).addcmul_(self.basis, SIDES.damping * trace)
        new = torch.linalg.qr(power)[0]
        turn = torch.bmm(new.mT, self.basis)
        self.basis.copy_(new)
        for average in averages:
            self.turn(average, turn)
        shares = turn.square()  # of the old directions in the new ones
        self.turn(square, shares)
        for each in (self.factors, self.slopes):
            each.copy_((shares * each[:, None]).sum(2))

    def adapt(self, uphill: Tensor, step: int) -> None:
        """Move the directions' factors by their slopes, relative to each other."""
        slope = self.pick(uphill).sum(3 - self.axis)
        usual = self.slopes.lerp_(slope.square(), 1 - LAW.memory)
        alive = usual > LAW.negligible**2 * usual.amax(1, keepdim=True)
        sizes = slope * usual.rsqrt() * math.sqrt(1 - LAW.memory**step)
        moves = torch.where(alive, sizes, 0.0).clamp_(-1, 1)
        moves.sub_(alive * moves.sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp_(min=1))
        gain = LAW.direction_gain + LAW.direction_hurry / step
        self.factors.sub_(moves, alpha=gain).clamp_(-LAW.furthest, LAW.furthest)

    def scale(self, matrices: Tensor) -> None:
        """Multiply this part of matrices in the basis by the factors, in place."""
        self.pick(matrices).mul_(self.factors.exp().unsqueeze(3 - self.axis))


@dataclass
class Bundle:
    """Shares that are alike and step together, on top of each other.

    Tensors are of at least single precision and (shares, rows, columns): convolutions are matrices, and what has fewer
    dimensions is a row.
    """

    numbers: list[int]  #: Of the shares.
    table: bool  #: See `Tables`.
    mean: Tensor  #: Adam's first moment, in the bases.
    slow: Tensor  #: The mean over a longer window, in the bases.
    square: Tensor  #: Adam's second moment, in the bases.
    last: Tensor  #: The last step, in the bases.
    usual: Tensor  #: (shares,), the gradients' usual root mean square; infinite at first.
    blocks: list[Block]
    step: int = 0  #: How many were taken.
    count: Tensor = field(default_factory=lambda: torch.tensor(0))  #: The same, as the parameters' state has it.

    @classmethod
    def start(cls, numbers: list[int], gradient: Tensor, *, table: bool) -> Bundle:
        """Return what is kept of shares before their first step, along gradients as `_pile` has them."""
        rows, columns = gradient.shape[1:]
        blocks = []
        for axis, start, n in [] if table else _choose_blocks(rows, columns):
            basis = torch.eye(n, dtype=gradient.dtype, device=gradient.device).repeat(len(gradient), 1, 1)
            blocks.append(Block(axis, start, torch.zeros_like(basis), basis, *basis.new_zeros(2, len(basis), n)))
        mean, slow, square, last = (torch.zeros_like(gradient) for _ in range(4))
        return cls(numbers, table, mean, slow, square, last, gradient.new_full((len(gradient),), math.inf), blocks)

    @classmethod
    def from_states(cls, numbers: list[int], states: Sequence[dict[str, Tensor]]) -> Bundle:
        """Stack the states of parameters that `get_state` returned; they have one shape and one step."""
        stacked = {name: torch.stack([state[name] for state in states]) for name in states[0] if name not in _SCALARS}
        table, blocks = bool(states[0]["embedding"]), []
        for index, (axis, start, _) in enumerate([] if table else _choose_blocks(*stacked["mean"].shape[1:])):
            blocks.append(Block(axis, start, *(stacked.pop(f"block{index}.{name}") for name in _BLOCK_TENSORS)))
        step = int(states[0]["step"])
        return cls(numbers, table, **stacked, blocks=blocks, step=step, count=torch.tensor(step))

    def get_state(self, row: int) -> dict[str, Tensor]:
        """Return the state of one parameter: views of the stacked tensors."""
        state = {"step": self.count, "embedding": torch.tensor(self.table)}
        state |= {name: getattr(self, name)[row] for name in _TENSORS}
        for index, block in enumerate(self.blocks):
            state |= {f"block{index}.{name}": getattr(block, name)[row] for name in _BLOCK_TENSORS}
        return state

    def pick(self, rows: list[int]) -> Bundle:
        """Return the bundle of some of the shares, in copies."""
        return Bundle.from_states([self.numbers[row] for row in rows], [self.get_state(row) for row in rows])

    def read(self, gradient: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Let the bases follow gradients; return these in the bases, and their slopes along the last step."""
        most = SHAPE.spike * math.sqrt(gradient[0].numel()) * self.usual
        gradient = gradient.to(self.mean.dtype).mul_((most / norms).clamp_(max=1)[:, None, None])
        self.step += 1
        self.count.fill_(self.step)
        if self.step == 1 or self.step % SIDES.often == 0:
            for block in self.blocks:
                block.gather(gradient)
                if self.step <= SIDES.settled or self.step % SIDES.seldom == 0:
                    block.follow((self.mean, self.slow, self.last), self.square)
        for block in self.blocks:
            block.turn(gradient, block.basis.mT)
        uphill = self.last * gradient
        for block in self.blocks:
            block.adapt(uphill, self.step)
        return gradient, uphill.sum((1, 2))

    def move(self, turned: Tensor, rates: list[float], parameters: list[Tensor], group: Group) -> None:
        """Move parameters by one step, along gradients in the bases, and let the weights of matrices decay."""
        first, second = float(group["betas"][0]), max(float(group["betas"][1]), TABLES.beta if self.table else 0.0)
        # A row of a table that is seldom seen has a slow mean of long ago.
        share = 0.0 if self.table else SHAPE.share
        mean = self.mean.lerp_(turned, 1 - first)
        slow = self.slow.lerp_(turned, SHAPE.window / (self.step + SHAPE.window - 1))
        square = self.square.mul_(second).addcmul_(turned, turned, value=1 - second)
        correction, scale = 1 - second**self.step, (1 - share) / (1 - first ** (self.step + 1))
        size = square.mean((1, 2))  # turning does not change it
        self.usual.copy_(size.div(correction).add_(SHAPE.least).sqrt_())
        floor = size.mul_(SHAPE.floor**2 + float(group["eps"]) ** 2).add_(SHAPE.least)
        last = torch.lerp(turned, mean, first, out=self.last).add_(slow, alpha=share / scale)
        factor, most = (TABLES.rate, TABLES.most) if self.table else (1.0, SHAPE.longest)
        sizes = [min(most, factor * float(group["lr"]) * rate) for rate in rates]
        along: Any = sizes[0] if len({*sizes}) == 1 else floor.new_tensor(sizes)[:, None, None]
        last.mul_((square + floor[:, None, None]).rsqrt_()).mul_(along * (-scale * math.sqrt(correction)))
        for block in self.blocks:
            block.scale(last)
        step = last.clone()
        for block in self.blocks:
            block.turn(step, block.basis)
        if parameters[0].ndim > 1:
            decay = float(group["weight_decay"]) * (TABLES.decay if self.table else 1.0)
            # In full at usual steps, and gone at short ones, which AdamW's decay would pull off the minimum.
            torch._foreach_mul_(parameters, [1 - size * min(1.0, size / LAW.usual) ** 2 * decay for size in sizes])
        torch._foreach_add_(parameters, [*step.view(-1, *parameters[0].shape)])


_TENSORS = ("mean", "slow", "square", "last", "usual")  #: Of a batch, with a first axis of parameters.
_BLOCK_TENSORS = ("statistics", "basis", "factors", "slopes")
_SCALARS = ("step", "embedding")


class Steps:
    """The steps of one run, or of several that have nothing in common but the time that they take.

    Each run has a share of each parameter. Its number is the parameter's, times the number of runs, plus the run's.
    """

    def __init__(self, *runs: Run) -> None:
        self.runs = runs
        self.shares: list[tuple[Tensor, Group]] = []
        self.bundles: list[Bundle] = []

    def take(self, gradients: dict[int, Tensor]) -> None:
        """Take one step along gradients, by the shares' numbers, but in runs where one of these is not finite."""
        runs, bundles, self.bundles = len(self.runs), self.bundles, []
        for bundle in bundles:  # which is parted if some of its shares alone have gradients
            rows = [[row for row, n in enumerate(bundle.numbers) if (n in gradients) == here] for here in (True, False)]
            self.bundles += [bundle.pick(own) for own in rows] if all(rows) else [bundle]
        going = [bundle for bundle in self.bundles if bundle.numbers[0] in gradients]
        known = {number for bundle in self.bundles for number in bundle.numbers}
        numbers = [bundle.numbers for bundle in going] + [[number] for number in gradients if number not in known]
        piles = [_pile([gradients[number] for number in own]) for own in numbers]
        norms = [torch.linalg.vector_norm(pile, dim=(1, 2)) for pile in piles]
        found = dict(zip(chain(*numbers), _fetch(norms), strict=True))
        if bad := {number % runs for number, norm in found.items() if not math.isfinite(norm)}:
            for run in bad:
                self.runs[run].skipped += 1
            self.take({number: gradient for number, gradient in gradients.items() if number % runs not in bad})
        elif waking := [number for number, norm in found.items() if norm and number not in known]:
            self._start(waking, gradients)
            self.take(gradients)
        else:
            self._move(going, piles, norms)
            for run in {number % runs for number in gradients if number in known}:  # the others are without state
                self.runs[run].steps += 1

    def _start(self, waking: list[int], gradients: dict[int, Tensor]) -> None:
        """Put shares together that are alike, before their first step."""
        alike = defaultdict[Any, list[int]](list)
        for number in waking:
            p, group = self.shares[number]
            tall = p.ndim == 2 and p.shape[0] >= TABLES.tall * p.shape[1]
            table = tall and bool((gradients[number] == 0).all(1).float().mean() > TABLES.untouched)
            alike[p.shape, p.dtype, p.device, id(group), table].append(number)
        for (shape, *_, table), numbers in alike.items():
            count = max(1, SHAPE.together // math.prod(shape))
            for own in (numbers[start : start + count] for start in range(0, len(numbers), count)):
                self.bundles.append(Bundle.start(own, _pile([gradients[n] for n in own]), table=table))

    def _move(self, going: list[Bundle], piles: list[Tensor], norms: list[Tensor]) -> None:
        """Move bundles along gradients, with the rates that these make of them."""
        read = [bundle.read(pile, norm) for bundle, pile, norm in zip(going, piles, norms, strict=False)]
        found = iter(_fetch([slopes for _, slopes in read]))
        groups = [self.shares[bundle.numbers[0]][1] for bundle in going]
        evidence = defaultdict[int, list[tuple[float, float, float, float]]](list)
        for bundle, group in zip(going, groups, strict=True):
            lr = float(group["unit_lr"] if "unit_lr" in group else group["lr"])  # whatever schedulers made of it
            factor = float(group["lr"]) / lr if lr else 0.0
            most = (TABLES.most / TABLES.rate if bundle.table else SHAPE.longest) / (lr or 1.0)
            for number in bundle.numbers:
                evidence[number % len(self.runs)].append((next(found), lr, factor, most))
        for number, own in evidence.items():
            run, (slopes, lrs, factors, limits) = self.runs[number], zip(*own, strict=True)
            run.follow(math.fsum(slopes), max(lrs) or 1.0, max(factors))
            most = max(limits) / run.anneal(run.steps)  # what is at its limit is annealed, too
            most /= run.peak_factor or 1.0
            if run.rate >= most:
                run.rate = most
                run.steps_at_cap += not run.found
                if run.steps_at_cap >= LAW.cap_steps and not all(bundle.table for bundle in going):
                    run.found = run.found or most
        rates = [run.rate * run.anneal(run.steps) for run in self.runs]
        for bundle, group, (turned, _) in zip(going, groups, read, strict=True):
            parameters = [self.shares[number][0] for number in bundle.numbers]
            bundle.move(turned, [rates[number % len(rates)] for number in bundle.numbers], parameters, group)


class CustomOptimizer(torch.optim.Optimizer):
    """Minimise with steps whose direction and size come from the gradients alone.

    Args:
        params: Parameters or groups of them, dense and not sharded; groups may have settings of their own, and keys
            that this optimizer does not read. Complex ones are updated as pairs of real numbers.
        lr: >= 0, the unit: what schedulers multiply it by, and its ratios between groups, multiply the steps. Itself it
            does not matter: the search for the step size starts at 0.01.
        betas: Two decays in [0, 1), of the gradients' mean and of their squares.
        weight_decay: >= 0, decoupled, of matrices alone: times the step size and, below 0.01, the square of its share
            of that, so that it is gone where the steps are short.
        eps: >= 0, in units of the gradients' usual size.
        total_steps: >= 1, how many steps the run will have: in the last 45 % of them steps shrink to nothing, and what
            comes after goes nowhere. None where that is not known: the rate then falls by itself. It takes precedence
            over that of a loaded state, so that a run can be extended.
        foreach: Without effect, as steps are batched in any case.
        maximize: Whether to ascend.
        fused: Not supported: False or None.
        capturable: Not supported: False.
        differentiable: Not supported: False.

    Raises:
        ValueError: A setting that is unknown or out of range; a sharded parameter; later, a gradient
            that is sparse.

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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "foreach": foreach}
        unsupported = {"fused": fused, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, settings | unsupported | {"maximize": maximize})
        first = max(float(group["lr"]) for group in self.param_groups) or 1.0
        self.steps = Steps(Run(LAW.usual / first, total_steps))
        self._stepped: list[tuple[Tensor, Group]] = []  # parameters and groups of the batches
        self._states: list[dict[str, Tensor] | None] = []  # and their states, which are views of the batches

    @property
    def skipped(self) -> int:
        """How many steps were skipped because a gradient was not finite."""
        return self.steps.runs[0].skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, which are checked."""
        _check(self.defaults | param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(hasattr(p, "to_local") for p in group["params"]):
            self.param_groups.pop()
            _refuse("params", "be whole tensors", "a DTensor (FSDP2, tensor parallelism)", "Use AdamW or DDP.")
        group["unit_lr"] = float(group["lr"])

    def _update_batches(self) -> None:
        """Stack the parameters' states anew if parameters, groups or states were replaced since the last step."""
        current = [(p, group) for group in self.param_groups for p in group["params"]]
        states = [self.state.get(p) for p, _ in current]
        if len(current) == len(self._stepped) and all(
            p is old_p and group is old_group and state is old_state
            for (p, group), (old_p, old_group), state, old_state in zip(
                current, self._stepped, states, self._states, strict=True
            )
        ):
            return
        self._stepped = current
        self.steps.shares = [(_as_real(p), group) for p, group in current]
        self.steps.bundles = []
        alike = defaultdict[Any, list[int]](list)
        for number, ((p, group), state) in enumerate(zip(current, states, strict=True)):
            if state:
                shape, settings = self.steps.shares[number][0].shape, (id(group), state["mean"].dtype)
                counts = (bool(state["embedding"]), int(state["step"]))
                alike[shape, p.dtype, p.device, settings, counts].append(number)
        for (shape, *_), numbers in alike.items():
            count = max(1, SHAPE.together // math.prod(shape))
            for part in (numbers[start : start + count] for start in range(0, len(numbers), count)):
                self.steps.bundles.append(Bundle.from_states(part, [self.state[current[n][0]] for n in part]))
        self._publish(self.steps.bundles)

    def _publish(self, bundles: Iterable[Bundle]) -> None:
        """Let the parameters' states be views of batches."""
        for bundle in bundles:
            for row, number in enumerate(bundle.numbers):
                self.state[self._stepped[number][0]] = bundle.get_state(row)
        self._states = [self.state.get(p) for p, _ in self._stepped]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there; none if the norm of one of them is not finite.

        Args:
            closure: Computes gradients anew and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._update_batches()
        gradients = dict[int, Tensor]()
        for number, (p, group) in enumerate(self._stepped):
            if p.grad is None or not p.numel():
                continue
            if p.grad.is_sparse:
                _refuse("params", "have dense gradients", "a sparse one", "Densify it.")
            gradient = _as_real(p.grad).reshape(self.steps.shares[number][0].shape)
            gradients[number] = -gradient if group["maximize"] else gradient
        before, run = self.steps.bundles, self.steps.runs[0]
        skipped = run.skipped
        self.steps.take(gradients)
        known = {id(bundle) for bundle in before}
        if new := [bundle for bundle in self.steps.bundles if id(bundle) not in known]:
            self._publish(new)
        if run.skipped > skipped and run.skipped == _WARN_AFTER and not run.steps:
            text = f"CustomOptimizer: the first {_WARN_AFTER} steps were skipped; gradients are not finite"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle takes along."""
        return {**super().__getstate__(), "run": asdict(self.steps.runs[0])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; torch also calls it when a state is loaded, without a run."""
        state = dict(state)
        if run := state.pop("run", None):
            self.steps = Steps(Run(**run))
        self._stepped, self._states = [], []
        super().__setstate__(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter, in plain tensors, and that of the run in the first group."""
        saved = super().state_dict()
        saved["state"] = {
            number: {name: value.clone() for name, value in state.items()} for number, state in saved["state"].items()
        }
        saved["param_groups"][0]["run"] = asdict(self.steps.runs[0])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: tensors come to the parameters' devices and keep their precision.

        Raises:
            ValueError: A state of another optimizer, of an older version, or of parameters of other shapes.
        """
        groups = state_dict["param_groups"]
        run_state = groups[0].get("run") if groups else None
        if not isinstance(run_state, dict) or run_state.keys() != {field.name for field in fields(Run)}:
            _refuse("state_dict", "be of this optimizer", "one of another, or of an older version", "Start without it.")
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved_numbers = [number for group in groups for number in group["params"]]
        pairs = dict(zip(saved_numbers, parameters, strict=False))
        for number, state in state_dict["state"].items():
            if number in pairs and state:
                _check_state(_as_real(pairs[number]), state)
        total_steps = self.steps.runs[0].total_steps
        super().load_state_dict({**state_dict, "state": {}})
        self._stepped, self._states = [], []
        run = Run(**self.param_groups[0].pop("run"))
        if total_steps is not None:
            run.total_steps = total_steps
        self.steps = Steps(run)
        for number, state in state_dict["state"].items():
            if number in pairs and state:
                p = pairs[number]
                self.state[p] = {
                    name: value.detach().to("cpu" if name in _SCALARS else p.device, copy=True)
                    for name, value in state.items()
                }


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
        self.steps = Steps(*(Run(1.0, total_steps) for _ in groups[0][0][0]))
        for weights, decay in groups:
            group = {"lr": start, "betas": betas, "eps": eps, "weight_decay": decay}
            self.steps.shares += [(share, group) for weight in weights for share in weight.detach().unbind()]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one step of every member with the weights' gradients (members, ...), in the groups' order.

        A member whose gradients are not finite stays where it is.
        """
        self.steps.take(dict(enumerate(chain(*(gradient.unbind() for gradient in gradients)))))


def _check(group: Group) -> None:
    """Raise an error for a setting that is unknown or out of range."""
    for name in ("fused", "capturable", "differentiable"):
        if group.get(name):
            _refuse(name, "be off", repr(group[name]), "Each step reads numbers on the host, without autograd.")
    betas = group["betas"] if isinstance(group["betas"], (tuple, list)) else ()
    if len(betas) != 2:
        _refuse("betas", "be two numbers", repr(group["betas"]), "Use the default.")
    numbers = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    for name, value in (numbers | {"betas[0]": betas[0], "betas[1]": betas[1]}).items():
        most = 1.0 if name.startswith("betas") else math.inf
        number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not number or isinstance(value, bool) or not 0 <= float(value) < most:
            _refuse(name, f"be in [0, {most:g})", repr(value), "Use the default.")


def _refuse(name: str, constraint: str, got: str, remedy: str) -> NoReturn:
    """Raise the error of a value that is not what it must be."""
    raise ValueError(f"CustomOptimizer: `{name}` must {constraint}; got {got}. {remedy}")


_WARN_AFTER = 10  #: Skipped steps before the first one that is taken.


def _as_real(tensor: Tensor) -> Tensor:
    """Return a real view of a tensor, the pairs of a complex one in its last axis."""
    if not tensor.is_complex():
        return tensor
    real = torch.view_as_real(tensor)
    return real.flatten(-2) if tensor.ndim and tensor.is_contiguous() else real


def _check_state(p: Tensor, state: dict[str, Tensor]) -> None:
    """Raise an error for a state that is not that of a parameter of this shape."""
    rows = max(1, p.shape[0]) if p.ndim > 1 else 1
    shapes: dict[str, tuple[int, ...]] = {name: (rows, p.numel() // rows) for name in _TENSORS[:-1]} | {
        "usual": (),
        "step": (),
        "embedding": (),
    }
    if "embedding" in state and not bool(state["embedding"]):
        for index, (_, _, n) in enumerate(_choose_blocks(rows, p.numel() // rows)):
            lengths: dict[str, tuple[int, ...]] = {
                "statistics": (n, n),
                "basis": (n, n),
                "factors": (n,),
                "slopes": (n,),
            }
            shapes |= {f"block{index}.{name}": shape for name, shape in lengths.items()}
    if state.keys() != shapes.keys():
        _refuse("state_dict", "be of this optimizer", "one of another, or of an older version", "Start without it.")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            got = f"{name} {tuple(state[name].shape)} for a parameter {tuple(p.shape)}"
            _refuse("state_dict", "have the parameters' shapes", got, "Load that of the same model.")


def _choose_blocks(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """Return the axis, the start and the length of each block of the sides that are turned, of matrices."""
    blocks = list[tuple[int, int, int]]()
    if min(rows, columns) < 2:
        return blocks
    for axis, length, other in ((2, columns, rows), (1, rows, columns)):
        if length <= min(SIDES.longest, SIDES.longer * other) and (not blocks or rows + columns <= SIDES.both):
            count = math.ceil(length / SIDES.block)
            ends = [length * number // count for number in range(count + 1)]
            blocks += [(axis, start, end - start) for start, end in pairwise(ends)]
    return blocks


def _pile(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of tensors as matrices (shares, rows, columns) of at least single precision."""
    together = torch.stack(list(tensors))
    rows = together.shape[1] if together.ndim > 2 else 1
    return together.reshape(len(together), rows, -1).to(torch.promote_types(together.dtype, torch.float32))


def _fetch(rows: Sequence[Tensor]) -> list[float]:
    """Return the numbers of tensors (n,), one after the other, which are waited for once."""
    numbers: list[float] = torch.cat([row.to(rows[0].device) for row in rows]).tolist() if rows else []
    return numbers
