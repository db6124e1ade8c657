"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

The direction is Adam's in the eigenbasis of the gradients' second moments (SOAP). Half of the step follows
a mean of many more steps. The step size is one number for all parameters. A search raises it until the slope that the
new gradient sees along the last step turns uphill. From then on it follows that slope, less and less, and falls with
the number of steps. If that number is known, it falls to nothing. Each direction of the eigenbases has a factor, too.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

# Values without another source were chosen on the visible and tuning families of `analysis.optimizer_bench`;
# docs/decisions/optimizer-form.md has what was tried, and analysis/results what they reach.


@dataclass(frozen=True)
class PreconditionerConfig:
    """Which sides of matrices get eigenbases, inputs first, and how these follow the gradients."""

    max_length: int = 512  #: Rows or columns: a longer side gets no basis.
    max_ratio: int = 8  #: Ratio of a side to the other one: above it, the longer side gets no basis.
    block_length: int = 96  #: A longer side is split into blocks of about one length, each with its own basis.
    max_sum: int = 400  #: Largest sum of both sides with bases; beyond it the inputs alone get them, or the outputs.
    decay: float = 0.98  #: Decay per step of the second moments' average, in [0, 1).
    damping: float = 1e-4  #: Fraction of the trace that is added to the diagonal: no direction is left to rounding.
    gather_every: int = 2  #: Steps between two gradients that enter the average.
    early_steps: int = 20  #: Steps during which a basis is updated with each of these gradients.
    update_every: int = 8  #: Steps between two updates of a basis after them (the paper: 10).


@dataclass(frozen=True)
class StepConfig:
    """The parts of a step, and its bounds against single gradients and silent directions."""

    window: float = 6.0  #: The slow mean averages the last 1 / ``window`` of the steps.
    slow_fraction: float = 0.5  #: Part of the step that follows the slow mean, not the new gradient and Adam's mean.
    max_step: float = 0.1  #: Longest step per element, about, in units of the weights.
    #: Smallest root of a second moment, relative to the gradient's usual size: silent directions are not blown up.
    floor: float = 1e-2
    max_spike: float = 10.0  #: A gradient is scaled down to this many times its usual size.
    tiny: float = 1e-30  #: Smallest square of the usual size, against division by zero.
    batch_elements: int = 2**18  #: Elements of equal parameters that step as one: more would not stay in a cache.


@dataclass(frozen=True)
class EmbeddingConfig:
    """Settings of embeddings: tall matrices whose first gradient is zero in many rows, because rows are seldom seen."""

    min_ratio: float = 1.5  #: Smallest ratio of rows to columns.
    min_untouched: float = 0.25  #: Fraction of rows without gradient, exclusive.
    rate_factor: float = 5.0  #: Step size, relative to other parameters.
    max_step: float = 0.02  #: Longest step per element.
    min_beta2: float = 0.999  #: Smallest decay of the second moments (Adam's default).
    decay_factor: float = 0.2  #: Weight decay, relative to other parameters.


@dataclass(frozen=True)
class StepSizeSearch:
    """How the rate, which is the step size, is searched and follows slopes of their usual size."""

    growth: float = 0.4  #: Growth of the rate's logarithm per step of the search.
    usual_rate: float = 0.01  #: Up to it the rate grows unless evidence is against it, beyond it if evidence is for it.
    uphill: float = 0.5  #: Evidence against a rate below the usual one: the trend of slopes, in [0, 1].
    backtrack: float = 0.7  #: Factor of the rate at the end of the search.
    gain: float = 0.015  #: Largest change of the rate's logarithm per step after it, at a slope of the usual size ...
    late_gain: float = 4.0  #: ... or this over the number of steps, if that is less.
    turn_gain: float = 0.4  #: Added to it, over one plus the number of turns of the trend (Kesten's rule).
    fall: float = 0.0045  #: Fall of the rate's logarithm per step ...
    late_fall: float = 1.5  #: ... or this over the number of steps, if that is less.
    scheduled_fall: float = 1.0  #: The same while a scheduler lowers the rate: runs without one fall about as 1/steps.
    #: Reduction by a scheduler at which slopes cease to count, else the rate would grow by as much.
    max_reduction: float = 0.1
    min_search_factor: float = 0.5  #: Smallest factor of a scheduler at which the search goes on.
    trend: float = 0.7  #: Decay per step of the trend of slopes.
    memory: float = 0.95  #: Decay per step of the slopes' mean size.
    unit: float = 1.25  #: The usual size, in units of the mean size: of normal numbers, their root mean square.
    direction_gain: float = 0.03  #: Change of the logarithm of a direction's factor per step ...
    early_direction_gain: float = 0.3  #: ... and an addition to it, over the number of steps.
    max_log_factor: float = 1.15  #: Bound of the logarithm of a direction's factor: factors stay within a tenfold.
    negligible: float = 1e-3  #: Fraction of the largest direction's slope below which a slope is rounding.
    anneal_fraction: float = 0.45  #: Last fraction of a known number of steps, in which steps shrink linearly ...
    final_fraction: float = 1e-3  #: ... until this fraction of the steps remains: they never vanish.
    max_cap_steps: int = 100  #: Steps at the longest step that end the search, as in adversarial training.
    reference_steps: int = 1000  #: Steps for which gain and fall are meant; a larger known number stretches them.


PRECONDITIONER, STEP, EMBEDDING, SEARCH = PreconditionerConfig(), StepConfig(), EmbeddingConfig(), StepSizeSearch()
SKIPPED_BEFORE_WARNING = 10  #: Skipped steps before the first that is taken, after which a warning is given.
Group = dict[str, Any]  #: A parameter group.


@dataclass
class Run:
    """The state that all parameters share."""

    rate: float  #: Step size in units of the learning rate.
    total_steps: int | None = None  #: Number of steps of the run, if known.
    steps: int = 0  #: Steps taken.
    skipped: int = 0  #: Steps skipped because a gradient was not finite.
    settled_rate: float = 0.0  #: The rate at the end of the search; 0 during it.
    slopes: int = 0  #: Slopes that were seen.
    slope_size: float = 0.0  #: The slopes' mean size.
    trend: float = 0.0  #: Trend of the slopes, in [-1, 1].
    turns: int = 0  #: Changes of the trend's sign.
    steps_at_cap: int = 0  #: Steps of the search at the longest step.
    factor: float = 0.0  #: Largest ratio of a group's learning rate to its unit, at the last step ...
    peak_factor: float = 0.0  #: ... and at any step.

    def anneal(self, steps: int) -> float:
        """Compute the fraction of the rate after some steps: 1 until 55 % of all, then a linear fall."""
        if self.total_steps is None:
            return 1.0
        return min(1.0, max(SEARCH.final_fraction, 1 - steps / self.total_steps) / SEARCH.anneal_fraction)

    def __post_init__(self) -> None:
        """Validate the number of steps."""
        if self.total_steps is not None and (type(self.total_steps) is not int or self.total_steps < 1):
            _raise("total_steps", "be an int >= 1", repr(self.total_steps), "Use None if it is not known.")

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
        unit, reduced = lr * (self.peak_factor or 1.0), factor / (self.peak_factor or 1.0)
        self.slopes += 1
        self.slope_size += (1 - SEARCH.memory) * (abs(downhill) - self.slope_size)
        usual_size = SEARCH.unit * self.slope_size / (1 - SEARCH.memory**self.slopes)
        evidence, last_trend = max(-1.0, min(1.0, downhill / usual_size)), self.trend
        self.trend = SEARCH.trend * last_trend + (1 - SEARCH.trend) * evidence
        if self.settled_rate:
            self.turns += (last_trend > 0) != (self.trend > 0)
            stretch = max(1.0, (self.total_steps or 0) / SEARCH.reference_steps)
            trust = max(0.0, 1 - (1 - reduced) / SEARCH.max_reduction)
            gain = min(SEARCH.gain / stretch, SEARCH.late_gain / self.slopes) + SEARCH.turn_gain / (1 + self.turns)
            late_fall = trust * SEARCH.late_fall + (1 - trust) * SEARCH.scheduled_fall
            fall = min(SEARCH.fall / stretch, late_fall / self.slopes)
            # No slope takes the rate below it.
            min_rate = min(self.settled_rate, math.sqrt(stretch) / self.slopes / unit)
            self.rate = max(min_rate, self.rate * math.exp(trust * gain * evidence - fall))
        elif self.trend < (0 if self.rate * unit >= SEARCH.usual_rate and not rising else -SEARCH.uphill):
            self.rate *= SEARCH.backtrack
            self.settled_rate = self.rate
        elif reduced >= SEARCH.min_search_factor and not rising:  # a warm-up is waited for
            self.rate *= math.exp(SEARCH.growth * (self.trend if self.rate * unit >= SEARCH.usual_rate else 1))

    def _set_factor(self, factor: float, lr: float) -> None:
        """Set a scheduler's factor. If it is the largest so far, the rate gives back its growth at smaller ones."""
        if factor > self.peak_factor:
            if self.peak_factor:
                scale = max(self.peak_factor / factor, min(1.0, SEARCH.usual_rate / lr / self.rate))
                self.rate, self.settled_rate = self.rate * scale, self.settled_rate * scale
            self.peak_factor = factor
        self.factor = factor

    def limit(self, max_rate: float, *, end_search: bool) -> None:
        """Bound the rate, before its anneal and a scheduler's factor, so that these shorten the longest steps, too."""
        max_rate = max_rate / self.anneal(self.steps) / (self.peak_factor or 1.0)
        if self.rate >= max_rate:
            self.rate = max_rate
            self.steps_at_cap += not self.settled_rate
            if end_search and self.steps_at_cap >= SEARCH.max_cap_steps:
                self.settled_rate = self.settled_rate or max_rate


@dataclass
class Block:
    """A part of a side of matrices, of length n, with its own basis."""

    axis: int  #: 1 for rows, 2 for columns.
    start: int  #: Its first row or column.
    statistics: Tensor  #: (matrices, n, n), the average of the gradients' second moments.
    basis: Tensor  #: (matrices, n, n), its eigenvectors as columns.
    factors: Tensor  #: (matrices, n), the logarithms of the directions' factors.
    slopes: Tensor  #: (matrices, n), the averages of their squared slopes.

    def narrow(self, matrices: Tensor) -> Tensor:
        """View this part of matrices (matrices, rows, columns)."""
        return matrices.narrow(self.axis, self.start, self.basis.shape[2])

    def rotate(self, matrices: Tensor, rotations: Tensor) -> None:
        """Multiply this part of matrices by rotations (matrices, n, n), in place."""
        part = self.narrow(matrices)
        part.copy_(torch.bmm(rotations, part) if self.axis == 1 else torch.bmm(part, rotations.mT))

    def gather(self, gradient: Tensor) -> None:
        """Add gradients to the statistics."""
        part = self.narrow(gradient) if self.axis == 1 else self.narrow(gradient).mT
        self.statistics.lerp_(torch.bmm(part, part.mT), 1 - PRECONDITIONER.decay**PRECONDITIONER.gather_every)

    def update_basis(self, averages: Sequence[Tensor], square: Tensor) -> None:
        """Update the basis by a power step on the statistics, and rotate the averages that are kept in it."""
        trace = self.statistics.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        power = torch.bmm(self.statistics, self.basis).addcmul_(self.basis, PRECONDITIONER.damping * trace)
        basis = torch.linalg.qr(power)[0]
        rotation = torch.bmm(basis.mT, self.basis)
        self.basis.copy_(basis)
        for average in averages:
            self.rotate(average, rotation)
        overlaps = rotation.square()  # of the old directions with the new ones
        self.rotate(square, overlaps)
        for vector in (self.factors, self.slopes):
            vector.copy_((overlaps * vector[:, None]).sum(2))

    def adapt(self, uphill: Tensor, step: int) -> None:
        """Move the directions' factors by their slopes, relative to each other."""
        slope = self.narrow(uphill).sum(3 - self.axis)
        usual = self.slopes.lerp_(slope.square(), 1 - SEARCH.memory)
        alive = usual > SEARCH.negligible**2 * usual.amax(1, keepdim=True)
        sizes = slope * usual.rsqrt() * math.sqrt(1 - SEARCH.memory**step)
        moves = torch.where(alive, sizes, 0.0).clamp_(-1, 1)
        moves.sub_(alive * moves.sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp_(min=1))
        gain = SEARCH.direction_gain + SEARCH.early_direction_gain / step
        self.factors.sub_(moves, alpha=gain).clamp_(-SEARCH.max_log_factor, SEARCH.max_log_factor)

    def scale(self, matrices: Tensor) -> None:
        """Multiply this part of matrices in the basis by the factors, in place."""
        self.narrow(matrices).mul_(self.factors.exp().unsqueeze(3 - self.axis))


#: Tensors of a batch and of a block that have one slice for each parameter, and entries of a parameter's state that
#: all parameters of a batch share.
BATCH_TENSORS = ("mean", "slow_mean", "square", "last_step", "gradient_size")
BLOCK_TENSORS = ("statistics", "basis", "factors", "slopes")
SHARED_ENTRIES = ("step", "embedding")


@dataclass
class ParameterBatch:
    """Slices that are alike and step together, stacked.

    Tensors are of at least single precision and (slices, rows, columns). Convolutions are matrices, and a parameter of
    fewer than two dimensions is one row.
    """

    indices: list[int]  #: Indices of the slices.
    embedding: bool  #: See `EmbeddingConfig`.
    mean: Tensor  #: Adam's first moment, in the bases.
    slow_mean: Tensor  #: The mean over a longer window, in the bases.
    square: Tensor  #: Adam's second moment, in the bases.
    last_step: Tensor  #: The last step, in the bases.
    gradient_size: Tensor  #: (slices,), the gradients' usual root mean square; infinite at first.
    blocks: list[Block]
    count: Tensor  #: 0-d, on the CPU, the number of steps taken.

    @classmethod
    def initialize(cls, indices: list[int], gradient: Tensor, *, embedding: bool) -> ParameterBatch:
        """Initialize the batch of slices before their first step, from gradients as `_stack` makes them."""
        rows, columns = gradient.shape[1:]
        blocks = []
        for axis, start, n in [] if embedding else _choose_blocks(rows, columns):
            basis = torch.eye(n, dtype=gradient.dtype, device=gradient.device).repeat(len(gradient), 1, 1)
            blocks.append(Block(axis, start, torch.zeros_like(basis), basis, *basis.new_zeros(2, len(basis), n)))
        mean, slow_mean, square, last_step = (torch.zeros_like(gradient) for _ in range(4))
        size = gradient.new_full((len(gradient),), math.inf)
        return cls(indices, embedding, mean, slow_mean, square, last_step, size, blocks, torch.tensor(0))

    @classmethod
    def from_states(cls, indices: list[int], states: Sequence[dict[str, Tensor]]) -> ParameterBatch:
        """Stack copies of the states of slices, as `get_state` makes them; they have one shape and one step."""
        names = states[0].keys() - {*SHARED_ENTRIES}
        stacked = {name: torch.stack([state[name] for state in states]) for name in names}
        embedding, blocks = bool(states[0]["embedding"]), []
        for index, (axis, start, _) in enumerate([] if embedding else _choose_blocks(*stacked["mean"].shape[1:])):
            blocks.append(Block(axis, start, *(stacked.pop(f"block{index}.{name}") for name in BLOCK_TENSORS)))
        return cls(indices, embedding, **stacked, blocks=blocks, count=states[0]["step"].clone())

    def get_state(self, row: int) -> dict[str, Tensor]:
        """Get the state of one slice: views of the stacked tensors."""
        state = {"step": self.count, "embedding": torch.tensor(self.embedding)}
        state |= {name: getattr(self, name)[row] for name in BATCH_TENSORS}
        for index, block in enumerate(self.blocks):
            state |= {f"block{index}.{name}": getattr(block, name)[row] for name in BLOCK_TENSORS}
        return state

    def select(self, rows: list[int]) -> ParameterBatch:
        """Copy some of the slices to a batch of their own."""
        return ParameterBatch.from_states([self.indices[row] for row in rows], [self.get_state(row) for row in rows])

    def observe(self, gradient: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Update the bases by gradients; return these in the bases, and their slopes along the last step."""
        max_norms = STEP.max_spike * math.sqrt(gradient[0].numel()) * self.gradient_size
        gradient = gradient.to(self.mean.dtype).mul_((max_norms / norms).clamp_(max=1)[:, None, None])
        step = int(self.count.add_(1))
        if step == 1 or step % PRECONDITIONER.gather_every == 0:
            for block in self.blocks:
                block.gather(gradient)
                if step <= PRECONDITIONER.early_steps or step % PRECONDITIONER.update_every == 0:
                    block.update_basis((self.mean, self.slow_mean, self.last_step), self.square)
        for block in self.blocks:
            block.rotate(gradient, block.basis.mT)
        uphill = self.last_step * gradient
        for block in self.blocks:
            block.adapt(uphill, step)
        return gradient, uphill.sum((1, 2))

    def move(self, rotated: Tensor, rates: list[float], parameters: list[Tensor], group: Group) -> None:
        """Move parameters by one step, along gradients in the bases, and decay the weights of matrices."""
        step, beta1, beta2 = int(self.count), float(group["betas"][0]), float(group["betas"][1])
        beta2 = max(beta2, EMBEDDING.min_beta2) if self.embedding else beta2
        # The slow mean of an embedding's row that is seldom seen is out of date.
        slow_fraction = 0.0 if self.embedding else STEP.slow_fraction
        mean = self.mean.lerp_(rotated, 1 - beta1)
        slow_mean = self.slow_mean.lerp_(rotated, STEP.window / (step + STEP.window - 1))
        square = self.square.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        correction, scale = 1 - beta2**step, (1 - slow_fraction) / (1 - beta1 ** (step + 1))
        size = square.mean((1, 2))  # a rotation does not change it
        self.gradient_size.copy_(size.div(correction).add_(STEP.tiny).sqrt_())
        floor = size.mul_(STEP.floor**2 + float(group["eps"]) ** 2).add_(STEP.tiny)
        direction = torch.lerp(rotated, mean, beta1, out=self.last_step).add_(slow_mean, alpha=slow_fraction / scale)
        rate_factor, max_step = (EMBEDDING.rate_factor, EMBEDDING.max_step) if self.embedding else (1.0, STEP.max_step)
        sizes = [min(max_step, rate_factor * float(group["lr"]) * rate) for rate in rates]
        lengths: Any = sizes[0] if len({*sizes}) == 1 else floor.new_tensor(sizes)[:, None, None]
        direction.mul_((square + floor[:, None, None]).rsqrt_()).mul_(lengths * (-scale * math.sqrt(correction)))
        for block in self.blocks:
            block.scale(direction)
        update = direction.clone()
        for block in self.blocks:
            block.rotate(update, block.basis)
        if parameters[0].ndim > 1:
            decay = float(group["weight_decay"]) * (EMBEDDING.decay_factor if self.embedding else 1.0)
            # In full at usual steps, and none at short ones, which AdamW's decay would pull off the minimum.
            decays = [size * min(1.0, size / SEARCH.usual_rate) ** 2 * decay for size in sizes]
            torch._foreach_mul_(parameters, [1 - decay for decay in decays])
        torch._foreach_add_(parameters, [*update.view(-1, *parameters[0].shape)])


class Stepper:
    """The steps of one run, or of several runs that are computed together for speed.

    Each run has a slice of each parameter. Its index is the parameter's, times the number of runs, plus the run's.
    """

    def __init__(self, *runs: Run) -> None:
        self.runs = runs
        self.slices: list[tuple[Tensor, Group]] = []
        self.batches: list[ParameterBatch] = []

    def step(self, gradients: dict[int, Tensor]) -> None:
        """Take one step along gradients, by the slices' indices; a run skips it if one of its own is not finite."""
        n_runs, batches, self.batches = len(self.runs), self.batches, []
        for batch in batches:  # is split if only some of its slices have gradients
            rows = [[row for row, n in enumerate(batch.indices) if (n in gradients) == has] for has in (True, False)]
            self.batches += [batch.select(part) for part in rows] if all(rows) else [batch]
        active = [batch for batch in self.batches if batch.indices[0] in gradients]
        known = {index for batch in self.batches for index in batch.indices}
        indices = [batch.indices for batch in active] + [[index] for index in gradients if index not in known]
        stacks = [_stack([gradients[index] for index in part]) for part in indices]
        norms = [torch.linalg.vector_norm(stack, dim=(1, 2)) for stack in stacks]
        norm_of = dict(zip(chain(*indices), _to_floats(norms), strict=True))
        if bad := {index % n_runs for index, norm in norm_of.items() if not math.isfinite(norm)}:
            for run in bad:
                self.runs[run].skipped += 1
            self.step({index: gradient for index, gradient in gradients.items() if index % n_runs not in bad})
        elif new := [index for index, norm in norm_of.items() if norm and index not in known]:
            self._initialize(new, gradients)
            self.step(gradients)
        else:
            self._move(active, stacks, norms)
            for run in {index % n_runs for index in gradients if index in known}:  # the others have no state
                self.runs[run].steps += 1

    def _initialize(self, indices: list[int], gradients: dict[int, Tensor]) -> None:
        """Batch slices that are alike, before their first step."""
        alike = defaultdict[Any, list[int]](list)
        for index in indices:
            p, group = self.slices[index]
            tall = p.ndim == 2 and p.shape[0] >= EMBEDDING.min_ratio * p.shape[1]
            embedding = tall and bool((gradients[index] == 0).all(1).float().mean() > EMBEDDING.min_untouched)
            alike[p.shape, p.dtype, p.device, id(group), embedding].append(index)
        for (shape, *_, embedding), similar in alike.items():
            for part in _split_batches(shape, similar):
                stack = _stack([gradients[index] for index in part])
                self.batches.append(ParameterBatch.initialize(part, stack, embedding=embedding))

    def _move(self, active: list[ParameterBatch], stacks: list[Tensor], norms: list[Tensor]) -> None:
        """Update the rates by the gradients, and move the parameters of batches."""
        observed = [batch.observe(stack, norm) for batch, stack, norm in zip(active, stacks, norms, strict=False)]
        slopes = iter(_to_floats([slopes for _, slopes in observed]))
        groups = [self.slices[batch.indices[0]][1] for batch in active]
        evidence = defaultdict[int, list[tuple[float, float, float, float]]](list)
        for batch, group in zip(active, groups, strict=True):
            lr = float(group["unit_lr"] if "unit_lr" in group else group["lr"])
            factor = float(group["lr"]) / lr if lr else 0.0
            max_step = EMBEDDING.max_step / EMBEDDING.rate_factor if batch.embedding else STEP.max_step
            for index in batch.indices:
                evidence[index % len(self.runs)].append((next(slopes), lr, factor, max_step / (lr or 1.0)))
        # Embeddings alone stay at their short longest step for hundreds of steps, to their good.
        end_search = not all(batch.embedding for batch in active)
        for index, items in evidence.items():
            run, (run_slopes, lrs, factors, max_rates) = self.runs[index], zip(*items, strict=True)
            run.follow(math.fsum(run_slopes), max(lrs) or 1.0, max(factors))
            run.limit(max(max_rates), end_search=end_search)
        rates = [run.rate * run.anneal(run.steps) for run in self.runs]
        for batch, group, (rotated, _) in zip(active, groups, observed, strict=True):
            parameters = [self.slices[index][0] for index in batch.indices]
            batch.move(rotated, [rates[index % len(rates)] for index in batch.indices], parameters, group)


class CustomOptimizer(torch.optim.Optimizer):
    """Minimise with steps whose direction and size come from the gradients alone.

    Args:
        params: Parameters or groups of them, dense and not sharded. Groups may have their own settings, and keys that
            this optimizer does not read. Complex parameters are updated as pairs of real numbers.
        lr: >= 0, a unit. Schedulers multiply the steps by the ratio of a group's learning rate to that of the
            constructor; groups' units multiply them relative to the largest one. The value itself does not matter:
            the search for the step size starts at 0.01.
        betas: Two decays in [0, 1), of the gradients' mean and of their squares.
        weight_decay: >= 0, decoupled, of matrices alone. It is multiplied by the step size and, below 0.01, by the
            square of their ratio, so that it vanishes with short steps.
        eps: >= 0, in units of the gradients' usual size.
        total_steps: >= 1, the number of steps of the run. In the last 45 % of them steps shrink to nothing, and later
            ones hardly move. None if it is not known: the rate then falls by itself. It takes precedence over that of
            a loaded state, so that a run can be extended.
        foreach: Without effect, as steps are batched in any case.
        maximize: Whether to ascend.
        fused: Not supported: False or None.
        capturable: Not supported: False.
        differentiable: Not supported: False.

    Raises:
        ValueError: A setting that is out of range, or a sharded parameter; at a step, a sparse gradient.

    Source: Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam" (2024), arXiv:2409.11321, with Nesterov
        momentum, and second moments that rotate with their basis; Baydin et al., "Online learning rate adaptation
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
        max_lr = max(float(group["lr"]) for group in self.param_groups) or 1.0
        self.stepper = Stepper(Run(SEARCH.usual_rate / max_lr, total_steps))
        self._stepped: list[tuple[Tensor, Group]] = []  # parameters and groups of the batches
        self._states: list[dict[str, Tensor] | None] = []  # and their states, which are views of the batches

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        return self.stepper.runs[0].skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, which are validated."""
        _validate(self.defaults | param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(hasattr(p, "to_local") for p in group["params"]):
            self.param_groups.pop()
            _raise("params", "be whole tensors", "a DTensor (FSDP2, tensor parallelism)", "Use AdamW or DDP.")
        group["unit_lr"] = float(group["lr"])

    def _update_batches(self) -> None:
        """Stack the parameters' states anew if parameters, groups or states were replaced since the last step."""
        current = [(p, group) for group in self.param_groups for p in group["params"]]
        states = [self.state.get(p) for p, _ in current]
        if len(current) == len(self._stepped) and all(
            p is last_p and group is last_group and state is last_state
            for (p, group), (last_p, last_group), state, last_state in zip(
                current, self._stepped, states, self._states, strict=True
            )
        ):
            return
        self._stepped = current
        self.stepper.slices = [(_view_as_real(p), group) for p, group in current]
        self.stepper.batches = []
        alike = defaultdict[Any, list[int]](list)
        for index, ((p, group), state) in enumerate(zip(current, states, strict=True)):
            if state:
                shape = self.stepper.slices[index][0].shape
                counts = (bool(state["embedding"]), int(state["step"]), state["mean"].dtype)
                alike[shape, p.dtype, p.device, id(group), counts].append(index)
        for (shape, *_), indices in alike.items():
            for part in _split_batches(shape, indices):
                states_of_part = [self.state[current[index][0]] for index in part]
                self.stepper.batches.append(ParameterBatch.from_states(part, states_of_part))
        self._publish(self.stepper.batches)

    def _publish(self, batches: Iterable[ParameterBatch]) -> None:
        """Set the parameters' states to views of batches."""
        for batch in batches:
            for row, index in enumerate(batch.indices):
                self.state[self._stepped[index][0]] = batch.get_state(row)
        self._states = [self.state.get(p) for p, _ in self._stepped]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there; none if the norm of one of them is not finite.

        Args:
            closure: Computes gradients anew and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._update_batches()
        gradients = dict[int, Tensor]()
        for index, (p, group) in enumerate(self._stepped):
            if p.grad is None or not p.numel():
                continue
            if p.grad.is_sparse:
                _raise("params", "have dense gradients", "a sparse one", "Densify it.")
            gradient = _view_as_real(p.grad).reshape(self.stepper.slices[index][0].shape)
            gradients[index] = -gradient if group["maximize"] else gradient
        known, skipped = {id(batch): batch for batch in self.stepper.batches}, self.skipped
        self.stepper.step(gradients)
        if new := [batch for batch in self.stepper.batches if id(batch) not in known]:
            self._publish(new)
        if skipped < self.skipped == SKIPPED_BEFORE_WARNING and not self.stepper.runs[0].steps:
            text = f"CustomOptimizer: the first {self.skipped} steps were skipped; gradients are not finite"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Get what a copy or a pickle needs."""
        return {**super().__getstate__(), "run": asdict(self.stepper.runs[0])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; torch also calls it when a state is loaded, without a run."""
        state = dict(state)
        if run := state.pop("run", None):
            self.stepper = Stepper(Run(**run))
        self._stepped, self._states = [], []
        super().__setstate__(state)

    def state_dict(self) -> dict[str, Any]:
        """Copy the state by parameter, in plain tensors, and that of the run as ``run`` of the first group."""
        saved = super().state_dict()
        for index, state in saved["state"].items():
            saved["state"][index] = {name: value.clone() for name, value in state.items()}
        saved["param_groups"][0]["run"] = asdict(self.stepper.runs[0])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: tensors come to the parameters' devices and keep their precision.

        Raises:
            ValueError: A state of another optimizer, of an older version, or of parameters of other shapes.
        """
        groups, total_steps = state_dict["param_groups"], self.stepper.runs[0].total_steps
        saved_run = groups[0].get("run") if groups else None
        if not isinstance(saved_run, dict) or saved_run.keys() != {field.name for field in fields(Run)}:
            _raise_foreign_state()
        parameters = [p for group in self.param_groups for p in group["params"]]
        parameter_of = dict(zip([index for group in groups for index in group["params"]], parameters, strict=False))
        states = {index: state for index, state in state_dict["state"].items() if state and index in parameter_of}
        for index, state in states.items():
            _validate_state(_view_as_real(parameter_of[index]), state)
        super().load_state_dict({**state_dict, "state": {}})
        run = Run(**self.param_groups[0].pop("run"))
        run.total_steps = run.total_steps if total_steps is None else total_steps
        self.stepper = Stepper(run)
        for index, state in states.items():
            p = parameter_of[index]
            self.state[p] = {
                name: value.detach().to("cpu" if name in SHARED_ENTRIES else p.device, copy=True)
                for name, value in state.items()
            }


class StackOptimizer:
    """CustomOptimizer's steps for a stack of models, all at once, with a step size for each model.

    It is no `torch.optim.Optimizer`, because making the first one imports torch's compiler (about 1.1 CPU seconds). It
    has no hooks, schedulers or state dictionary.

    Args:
        groups: Weights (members, ...) and their weight decay, >= 0; each member's slice of a weight has at least one
            dimension.
        start: > 0, where the search for the step size starts.
        betas: Those of `CustomOptimizer`.
        eps: That of `CustomOptimizer`.
        total_steps: That of `CustomOptimizer`, of every member.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[Tensor], float]],
        start: float = SEARCH.usual_rate,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        total_steps: int | None = None,
    ) -> None:
        self.stepper = Stepper(*(Run(1.0, total_steps) for _ in groups[0][0][0]))
        for weights, decay in groups:
            group = {"lr": start, "betas": betas, "eps": eps, "weight_decay": decay}
            self.stepper.slices += [(part, group) for weight in weights for part in weight.detach().unbind()]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one step of every member with the weights' gradients (members, ...), in the groups' order.

        A member whose gradients are not finite stays where it is.
        """
        self.stepper.step(dict(enumerate(chain(*(gradient.unbind() for gradient in gradients)))))


def _validate(group: Group) -> None:
    """Raise an error for a setting that is not supported or out of range."""
    for name in ("fused", "capturable", "differentiable"):
        if group.get(name):
            _raise(name, "be off", repr(group[name]), "Each step reads numbers on the host, without autograd.")
    betas = group["betas"] if isinstance(group["betas"], (tuple, list)) else ()
    if len(betas) != 2:
        _raise("betas", "be two numbers", repr(group["betas"]), "Use the default.")
    values = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    for name, value in (values | {"betas[0]": betas[0], "betas[1]": betas[1]}).items():
        upper = 1.0 if name.startswith("betas") else math.inf
        numeric = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not numeric or isinstance(value, bool) or not 0 <= float(value) < upper:
            _raise(name, f"be in [0, {upper:g})", repr(value), "Use the default.")


def _validate_state(p: Tensor, state: dict[str, Tensor]) -> None:
    """Raise an error for a state that does not fit a parameter."""
    rows = max(1, p.shape[0]) if p.ndim > 1 else 1
    columns = p.numel() // rows
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(BATCH_TENSORS, (rows, columns))
    shapes |= dict.fromkeys(("gradient_size", *SHARED_ENTRIES), ())
    blocks = [] if bool(state.get("embedding")) else _choose_blocks(rows, columns)
    for index, (_, _, n) in enumerate(blocks):
        shapes |= {
            f"block{index}.{name}": (n, n) if name in ("statistics", "basis") else (n,) for name in BLOCK_TENSORS
        }
    if state.keys() != shapes.keys():
        _raise_foreign_state()
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            got = f"{name} {tuple(state[name].shape)} for a parameter {tuple(p.shape)}"
            _raise("state_dict", "have the parameters' shapes", got, "Load that of the same model.")


def _raise_foreign_state() -> NoReturn:
    _raise("state_dict", "be of this optimizer", "one of another, or of an older version", "Start without it.")


def _raise(name: str, constraint: str, got: str, remedy: str) -> NoReturn:
    """Raise the error of a value that violates a constraint."""
    raise ValueError(f"CustomOptimizer: `{name}` must {constraint}; got {got}. {remedy}")


def _view_as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as a real one, with pairs along its last axis."""
    if not tensor.is_complex():
        return tensor
    pairs = torch.view_as_real(tensor)
    return pairs.flatten(-2) if tensor.ndim and tensor.is_contiguous() else pairs


def _choose_blocks(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """Choose the axis, the start and the length of each block of a matrix's sides."""
    blocks = list[tuple[int, int, int]]()
    if min(rows, columns) < 2:
        return blocks
    for axis, length, other in ((2, columns, rows), (1, rows, columns)):
        short = length <= min(PRECONDITIONER.max_length, PRECONDITIONER.max_ratio * other)
        if short and (not blocks or rows + columns <= PRECONDITIONER.max_sum):
            count = math.ceil(length / PRECONDITIONER.block_length)
            ends = [length * index // count for index in range(count + 1)]
            blocks += [(axis, start, end - start) for start, end in pairwise(ends)]
    return blocks


def _split_batches(shape: Sequence[int], indices: list[int]) -> list[list[int]]:
    """Split the indices of slices of one shape into batches that fit a cache."""
    count = max(1, STEP.batch_elements // math.prod(shape))
    return [indices[start : start + count] for start in range(0, len(indices), count)]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors to matrices (slices, rows, columns) of at least single precision."""
    stacked = torch.stack(list(tensors))
    rows = stacked.shape[1] if stacked.ndim > 2 else 1
    return stacked.reshape(len(stacked), rows, -1).to(torch.promote_types(stacked.dtype, torch.float32))


def _to_floats(rows: Sequence[Tensor]) -> list[float]:
    """List the numbers of tensors (n,), with one transfer from the device."""
    floats: list[float] = torch.cat([row.to(rows[0].device) for row in rows]).tolist() if rows else []
    return floats
