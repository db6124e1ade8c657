"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

The direction is Adam's in the eigenbasis of the gradients' second moments (SOAP), half of it along a mean of many more
steps. Step sizes are found from below: they grow until the slope that the new gradient sees along the step before turns
uphill. From then on they follow that slope, less and less, and fall with the number of steps. There is one size for
everything, and a factor for each direction of the eigenbases.

The arithmetic is `take_step`, a function on plain state. `CustomOptimizer` wraps it as a `torch.optim.Optimizer`;
`StackOptimizer` takes the same steps for a stack of models at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Values without another source were chosen on the visible and tuning families of `analysis.optimizer_bench`;
# analysis/results/optimizer_bench.md has what they reach there and on families that chose nothing.


@dataclass(frozen=True)
class Sides:
    """Which sides of a matrix are turned into an eigenbasis, the shortest sides first."""

    longest: int = 512  #: Length, in rows or columns: a longer side is not turned.
    longer: int = 8  #: Ratio of a side to the other one: above it, the longer side is not turned.
    #: Multiplications per step that turning may cost, over all parameters that start together ...
    budget: float = 400e6
    element_budget: float = 380  #: ... or this many for each element of theirs, if that is more.
    room: float = 4e6  #: Numbers that bases and statistics may keep, over all parameters that start together ...
    element_room: float = 4  #: ... or this many for each element: the whole state is then at most four times Adam's.
    #: Multiplications of a QR decomposition, spread over the steps between two: times length**3 ...
    decomposition: float = 0.2
    overhead: float = 64  #: ... and what small ones cost more than they multiply, times length**2.
    kept: float = 2  #: Numbers that a side of length n keeps, in units of n**2: statistics and basis.


@dataclass(frozen=True)
class Bases:
    """How eigenbases follow the gradients' second moments. SOAP's paper updates them every 10 steps."""

    decay: float = 0.98  #: Decay per step of the second moments' average, in [0, 1).
    #: Share of the trace added to the diagonal, graded: else bases would depend on rounding where there are ties.
    damping: float = 1e-4
    often: int = 2  #: Steps between two updates of a basis at first ...
    settled: int = 20  #: ... for this many steps ...
    seldom: int = 8  #: ... and after them.


@dataclass(frozen=True)
class Limits:
    """What keeps single gradients and silent directions from ruling the steps."""

    #: Weight decay is at most this over the weights' root mean square: weights may be meant to be large.
    decay: float = 0.05
    #: Least root of a second moment, relative to the gradient's usual size: silent directions are not blown up.
    floor: float = 1e-2
    spike: float = 10.0  #: A gradient is scaled down to this many times its usual size.
    largest: float = 1e15  #: Largest gradient, in units of the first one: squares do not overflow in float32.
    step: float = 0.1  #: Longest step per element, before the directions' factors, in units of the weights.


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
class Search:
    """How the rate, the step size of a matrix of 64 inputs, is found in the first steps."""

    below: float = 0.1  #: Where it starts, in units of the learning rate.
    growth: float = 0.4  #: Growth of its logarithm per step.
    usual: float = 0.01  #: Up to here it grows unless there is evidence against it, beyond if there is evidence for it.
    uphill: float = 0.5  #: Evidence against it: the trend of slopes, in [0, 1].
    back: float = 0.7  #: Factor of the rate at which such evidence is found.


@dataclass(frozen=True)
class Slopes:
    """How rates follow the slope along the step before, in units of the slopes' usual size."""

    gain: float = 0.015  #: Most change of the rate's logarithm per step, at a slope of one usual size ...
    late_gain: float = 4.0  #: ... or this over the number of steps, if that is less.
    turn_gain: float = 0.4  #: Added to it, over one plus the number of times that the trend of slopes has turned.
    fall: float = 0.0045  #: What the rate's logarithm falls per step ...
    late_fall: float = 1.5  #: ... or this over the number of steps, if that is less.
    least: float = 1.0  #: Over the number of steps: no slope takes the rate below it, from above.
    trend: float = 0.7  #: Decay per step of the trend.
    memory: float = 0.95  #: Decay per step of the slopes' mean size.
    unit: float = 1.25  #: The usual size, in units of the mean size: of normal numbers, their root mean square.
    direction_gain: float = 0.03  #: Change of the logarithm of a direction's factor per step ...
    direction_hurry: float = 0.3  #: ... and what is added to it, over the number of steps.
    furthest: float = 1.15  #: Furthest logarithm of a direction's factor, either way: factors stay within a tenfold.
    negligible: float = 1e-3  #: Share of the largest direction's slope below which a slope is rounding.
    range: float = 1e4  #: Furthest factor of the rate, either way.


@dataclass(frozen=True)
class Averages:
    """What the step follows beside the new gradient and Adam's mean."""

    window: float = 6.0  #: The slow mean looks back over one ``window``-th of the steps.
    share: float = 0.5  #: Of the step that follows it.


@dataclass(frozen=True)
class Inputs:
    """How the step size of a matrix depends on its inputs: ``(reference / inputs) ** power``."""

    reference: int = 64  #: Inputs of a matrix that takes steps of the rate itself, as do all that are no matrices.
    power: float = 0.25


NAMES = ("left", "right")
SIDES, BASES, LIMITS, TABLES, INPUTS = Sides(), Bases(), Limits(), Tables(), Inputs()
SEARCH, SLOPES, AVERAGES = Search(), Slopes(), Averages()
#: Bytes at multiples of which torch lays tensors.
ALIGNMENT = 64
#: What all parameters of a run share, at its start; CustomOptimizer keeps it in the first group.
SHARED: dict[str, Any] = {
    "rate": SEARCH.below,  #: In units of the learning rate.
    "found": 0.0,  #: The rate at the end of the search; 0 during it.
    "slopes": 0,
    "slope_size": 0.0,  #: The slopes' mean size.
    "trend": 0.0,
    "turns": 0,
    "skipped": 0,
}
#: What every parameter's state has after a step.
STATE = {"step", "unit", "table", "inputs", "mean", "slow", "square", "last", "usual"}


class Work(NamedTuple):
    """A parameter in a step: its gradient, its state (empty before the first) and its group's settings."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: dict[str, Any]


def take_step(runs: Sequence[dict[str, Any]], work: Sequence[Work], *, stacked: bool = False) -> bool:
    """Take one step of a run, or of several runs whose parameters are stacked along a first dimension.

    Args:
        runs: Of each run, what its parameters share: a copy of ``SHARED`` at first, changed in place.
        work: Parameters of any shape, or (runs, ...) if stacked; they and their states are changed in place. Within a
            state, tensors have the same first dimension, and numbers that differ by run are lists, one per run.
        stacked: Does the first dimension of parameters and gradients count the runs?

    Returns:
        False if the runs do not go alike: gradients that are not finite, that are zero so far, or that make a table,
        in some of the runs alone. Nothing has changed then, and each run has to take its step apart. True otherwise.
    """
    sizes = [_largest(item.gradient, stacked) for item in work]  # of each parameter in each run
    finite = {all(map(math.isfinite, column)) for column in zip(*sizes, strict=True)}
    if len(finite) > 1:
        return False
    if False in finite:
        for run in runs:
            run["skipped"] += 1
        return True
    starts = []  # of each parameter, whether it starts now (None: its gradient is zero so far) and as a table
    for item, row in zip(work, sizes, strict=True):
        kinds = {False} if item.state else {bool(size) or None for size in row}
        tables = set(_find_tables(item.gradient, stacked)) if kinds == {True} else {False}
        if len(kinds) > 1 or len(tables) > 1:
            return False
        starts.append((*kinds, *tables))
    live, fresh = [], []
    for item, (start, table) in zip(work, starts, strict=True):
        if start is None:
            continue
        gradient = item.gradient.to(torch.promote_types(item.parameter.dtype, torch.float32))
        live.append((item, gradient))
        if start:
            _start(item.parameter, gradient, item.state, table=table, stacked=stacked)
            fresh.append(item.state)
    _choose_sides(fresh, stacked)
    read = [_read(item.state, gradient, stacked) for item, gradient in live]
    lr = max((_first_rate(item.group) for item, _ in live), default=0.0)
    _adapt(runs, [slope for _, slope in read if slope is not None], lr or 1.0)
    # No wind-up: where every step stands at its limit, the rate goes no further, and so comes back at once.
    most = max((_largest_rate(item) for item, _ in live), default=math.inf)
    for run in runs:
        run["rate"] = min(run["rate"], most)
    rates = [run["rate"] for run in runs]
    for (item, _), (turned, _) in zip(live, read, strict=True):
        _move(item.parameter, item.state, turned, item.group, rates, stacked)
    return True


class CustomOptimizer(torch.optim.Optimizer):
    """Minimise with steps whose direction and size come from the gradients alone.

    Args:
        params: Parameters or groups of them, real and dense; groups may have settings of their own.
        lr: >= 0; the search for the step size starts at a tenth of it and finds nearly the same from others. A step is
            always a multiple of it, so that schedulers work.
        betas: Two decays in [0, 1), of the gradients' mean and of their squares.
        weight_decay: >= 0, decoupled, times the step size; of matrices alone.
        eps: >= 0, in units of the first gradient's root mean square.

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
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self.param_groups[0].update(SHARED)

    @property
    def skipped(self) -> int:
        """How many steps were skipped because a gradient was not finite."""
        return int(self.param_groups[0]["skipped"])

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
        there = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        if any(p.grad.is_sparse for _, p in there):
            raise ValueError("CustomOptimizer: `params` must have dense gradients; got a sparse one. Densify it.")
        if there:
            take_step(self.param_groups[:1], [Work(p, p.grad, self.state[p], group) for group, p in there])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: tensors come to the parameters' devices and keep at least float32, whatever those have."""
        if any(not entry.keys() >= STATE for entry in state_dict["state"].values()):
            got = "one of another optimizer, or of an older version"
            raise ValueError(f"CustomOptimizer: `state_dict` must be of this optimizer; got {got}. Start without it.")
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, p in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                like = torch.empty(0, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
                _convert(self.state[p], state_dict["state"][number], like)


class StackOptimizer:
    """CustomOptimizer's steps for a stack of models, all at once, and each model with a step size of its own.

    It is no `torch.optim.Optimizer`, the first of which imports torch's compiler (about 1.1 CPU seconds), and has no
    hooks, schedulers or state dictionary.

    Args:
        groups: Weights (members, ...) and their weight decay, >= 0; each member's share of a weight has at least one
            dimension.
        lr: >= 0, a tenth of which is where the search for the step size starts.
        betas: Those of `CustomOptimizer`.
        eps: That of `CustomOptimizer`.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[Tensor], float]],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps}
        self.weights = [
            (weight.detach(), {**settings, "weight_decay": decay}) for weights, decay in groups for weight in weights
        ]
        members = len(self.weights[0][0])
        states: list[dict[str, Any]] = [{} for _ in self.weights]
        self.parts = [(slice(0, members), [dict(SHARED) for _ in range(members)], states)]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one step of every member with the weights' gradients (members, ...), in the groups' order.

        A member whose gradients are not finite stays where it is. Members go on one by one once they differ in which
        gradients are zero or not finite: the result is the same, and takes longer.
        """
        waiting, self.parts = self.parts, []
        while waiting:
            members, runs, states = waiting.pop(0)
            work = [
                Work(weight[members], gradient[members], state, group)
                for (weight, group), gradient, state in zip(self.weights, gradients, states, strict=True)
            ]
            if take_step(runs, work, stacked=True):
                self.parts.append((members, runs, states))
                continue
            for number, run in enumerate(runs):
                own = slice(members.start + number, members.start + number + 1)
                waiting.append((own, [run], [_take_member(state, number) for state in states]))


def _take_member(state: dict[str, Any], number: int) -> dict[str, Any]:
    """Return one member's share of a stacked state, copied, and so aligned."""
    own = slice(number, number + 1)
    shares = {name: value[own] if isinstance(value, (Tensor, list)) else value for name, value in state.items()}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in shares.items()}


def _check(group: dict[str, Any]) -> None:
    """Raise an error for a setting that is unknown or out of range."""
    known = {"params", "lr", "betas", "weight_decay", "eps", "initial_lr", "max_lr", "min_lr", "param_names", *SHARED}
    for name in sorted(group.keys() - known):
        raise TypeError(f"CustomOptimizer: `{name}` must be a setting; got {group[name]!r}. Remove it.")
    betas = group["betas"] if isinstance(group["betas"], (tuple, list)) else ()
    if len(betas) != 2:
        raise TypeError(f"CustomOptimizer: `betas` must be two numbers; got {group['betas']!r}. Use the default.")
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    for name, value in {**settings, "betas[0]": betas[0], "betas[1]": betas[1]}.items():
        most = 1.0 if name.startswith("betas") else math.inf
        number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not number or isinstance(value, bool) or not 0 <= float(value) < most:
            raise ValueError(f"CustomOptimizer: `{name}` must be in [0, {most:g}); got {value!r}. Use the default.")
    if any(p.is_complex() for p in group["params"]):
        raise TypeError("CustomOptimizer: `params` must be real; got a complex tensor. Pass torch.view_as_real of it.")


def _convert(state: dict[str, Any], saved: dict[str, Any], like: Tensor) -> None:
    """Put a parameter's saved state into its state, tensors of another one's dtype and on its device."""
    for name, value in saved.items():
        if isinstance(value, Tensor):
            state[name] = value.to(like.device, like.dtype, copy=True)
        else:
            state[name] = [value] if isinstance(value, float) else value  # earlier versions had numbers, not lists


def _each(function: Callable[..., tuple[Tensor, ...]], *stacks: Tensor) -> Sequence[Tensor]:
    """Return what a function of tensors returns, of the matrices of one run or of each run's share of stacks of them.

    Shares are as aligned in memory as tensors of their own: BLAS rounds otherwise where they are not, and a run's steps
    must not depend on its place in the stack.
    """
    if stacks[0].ndim == 2:
        return function(*stacks)
    if len(stacks[0]) == 1:
        return [result[None] for result in function(*(stack[0] for stack in stacks))]
    results = [function(*shares) for shares in zip(*map(_align, stacks), strict=True)]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def _align(stack: Tensor) -> Sequence[Tensor]:
    """Return each run's share of a stack, copied where it is not aligned."""
    shares = stack.unbind()
    return shares if stack.stride(0) * stack.itemsize % ALIGNMENT == 0 else [share.clone() for share in shares]


def _dims(tensor: Tensor, stacked: bool) -> tuple[int, ...]:
    """Return the dimensions of one run's share."""
    return tuple(range(int(stacked), tensor.ndim))


def _numbers(values: Tensor) -> list[float]:
    """Return one number per run, from a 0-d tensor or (runs,)."""
    numbers: list[float] = values.reshape(-1).tolist()
    return numbers


def _spread(like: Tensor, *rows: list[float]) -> Any:
    """Return, for each row of one number per run, what combines it with a tensor: the number itself for one run."""
    if len(rows[0]) == 1:
        return [row[0] for row in rows]
    return like.new_tensor(rows).view(len(rows), -1, *[1] * (like.ndim - 1)).unbind()


def _largest(gradient: Tensor, stacked: bool) -> list[float]:
    """Return the largest absolute value in each run's share of a gradient; NaN and infinity count."""
    return _numbers(torch.linalg.vector_norm(gradient, math.inf, _dims(gradient, stacked)))


def _find_tables(gradient: Tensor, stacked: bool) -> list[bool]:
    """Return for each run whether the parameter is a table, by its shape and first gradient."""
    shape = gradient.shape[int(stacked) :]
    if len(shape) != 2 or shape[0] < TABLES.tall * shape[1]:
        return [False]
    untouched = (gradient == 0).all(-1).float().mean(-1)
    return [bool(each) for each in (untouched > TABLES.untouched).reshape(-1)]


def _first_rate(group: dict[str, Any]) -> float:
    """Return the learning rate that a group was given, whatever a scheduler has made of it."""
    return float(group.get("initial_lr", group["lr"]))


def _largest_rate(item: Work) -> float:
    """Return the rate, in units of the learning rate, at which a parameter's step comes to its limit."""
    most = TABLES.most / TABLES.rate if item.state["table"] else LIMITS.step
    return most / (_first_rate(item.group) or 1.0)


def _adapt(runs: Sequence[dict[str, Any]], slopes: list[Tensor], lr: float) -> None:
    """Move each run's rate, in units of ``lr``, by the slope along its last step."""
    if not slopes:
        return
    together = torch.stack([slope.double() for slope in slopes]).reshape(len(slopes), -1)  # (parameters, runs)
    for run, column in zip(runs, together.T.tolist(), strict=True):
        downhill = -sum(column) / run["rate"]  # a slope is that of a step as long as the rate
        if downhill == 0 or not math.isfinite(downhill):
            continue
        run["slopes"] += 1
        run["slope_size"] += (1 - SLOPES.memory) * (abs(downhill) - run["slope_size"])
        usual = SLOPES.unit * run["slope_size"] / (1 - SLOPES.memory ** run["slopes"])
        own = max(-1.0, min(1.0, downhill / usual))
        before = run["trend"]
        run["trend"] = SLOPES.trend * before + (1 - SLOPES.trend) * own
        if run["found"]:
            run["turns"] += (before > 0) != (run["trend"] > 0)
            _follow_slope(run, own, lr)
        else:
            _search(run, lr)
        run["rate"] = max(1 / SLOPES.range, min(SLOPES.range, run["rate"]))


def _search(run: dict[str, Any], lr: float) -> None:
    """Let a rate grow, or end its search and go back where the trend says that steps have become too long."""
    usual = run["rate"] * lr >= SEARCH.usual
    if run["trend"] < (0 if usual else -SEARCH.uphill):
        run["rate"] *= SEARCH.back
        run["found"] = run["rate"]
    else:
        run["rate"] *= math.exp(SEARCH.growth * (run["trend"] if usual else 1))


def _follow_slope(run: dict[str, Any], own: float, lr: float) -> None:
    """Move a rate by its last slope in units of the usual one, and let it fall."""
    gain = min(SLOPES.gain, SLOPES.late_gain / run["slopes"]) + SLOPES.turn_gain / (1 + run["turns"])
    fall = min(SLOPES.fall, SLOPES.late_fall / run["slopes"])
    least = min(run["found"], SLOPES.least / run["slopes"] / lr)
    run["rate"] = max(least, run["rate"] * math.exp(gain * own - fall))


def _start(p: Tensor, gradient: Tensor, state: dict[str, Any], *, table: bool, stacked: bool) -> None:
    """Fill a parameter's state: what it is, by its shape and first gradient, and empty averages."""
    runs, shape = p.shape[: int(stacked)], p.shape[int(stacked) :]
    dims = _dims(gradient, stacked)
    largest = gradient.abs().amax(dims, keepdim=True)
    units = largest.reshape(runs) * (gradient / largest).square().mean(dims).sqrt()
    state["step"] = 0
    state["unit"] = [max(unit, torch.finfo(torch.float32).tiny) for unit in _numbers(units)]
    columns = math.prod(shape[1:])
    matrix = len(shape) >= 2 and min(shape[0], columns) > 1
    gradient = gradient.reshape((*runs, shape[0], columns) if matrix else p.shape)
    state["table"] = table
    state["inputs"] = columns if matrix and not table else INPUTS.reference
    for name in ("mean", "slow", "square", "last"):
        state[name] = torch.zeros_like(gradient)
    if p.dtype.itemsize < 4:
        state["weight"] = p.to(gradient.dtype)


def _choose_sides(states: list[dict[str, Any]], stacked: bool) -> None:
    """Choose the sides on which parameters that came together are turned: the shortest, as far as can be paid for."""
    shapes = [state["mean"].shape[int(stacked) :] for state in states]
    sides = [
        (length, side, state)
        for state, shape in zip(states, shapes, strict=True)
        if len(shape) == 2 and min(shape) > 1 and not state["table"]
        for side, length, other in zip(NAMES, shape, reversed(shape), strict=True)
        if length <= min(SIDES.longest, SIDES.longer * other)
    ]
    elements = sum(map(math.prod, shapes))
    budget = max(SIDES.budget, SIDES.element_budget * elements)
    room = max(SIDES.room, SIDES.element_room * elements)
    sides.sort(key=lambda side: (side[0], side[1] == "left"))  # inputs' sides first: they gain more
    for (length, side), group in groupby(sides, itemgetter(0, 1)):
        chosen = [state for *_, state in group]
        # products at every step, and now and then a QR decomposition, which is slow where it is small
        own = SIDES.decomposition * length**3 + SIDES.overhead * length**2
        budget -= sum(length * math.prod(state["mean"].shape[int(stacked) :]) + own for state in chosen)
        room -= SIDES.kept * length**2 * len(chosen)
        if min(budget, room) < 0:
            break
        for state in chosen:
            runs = state["mean"].shape[: int(stacked)]
            state[side] = state["mean"].new_zeros(*runs, length, length)
            for name in ("factors", "slopes"):
                state[f"{side}_{name}"] = state["mean"].new_zeros(*runs, length)


def _adapt_factors(state: dict[str, Any], uphill: Tensor) -> None:
    """Move the directions' factors by each one's slope along the last step, relative to each other."""
    memory = 1 - SLOPES.memory ** state["step"]
    gain = SLOPES.direction_gain + SLOPES.direction_hurry / state["step"]
    for side in filter(state.__contains__, NAMES):
        slope = uphill.sum(-1 if side == "left" else -2)
        usual = (state[f"{side}_slopes"].lerp_(slope**2, 1 - SLOPES.memory) / memory).sqrt()
        alive = usual > SLOPES.negligible * usual.amax(-1, keepdim=True)
        moves = torch.where(alive, slope / usual, 0.0).clamp(-1, 1) * gain
        moves -= alive * (moves.sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp(min=1))
        state[f"{side}_factors"].sub_(moves).clamp_(-SLOPES.furthest, SLOPES.furthest)


def _limit(gradient: Tensor, usual: list[float], stacked: bool) -> None:
    """Scale each run's share of a gradient down, in place, where it is far over its usual size."""
    norms = _numbers(torch.linalg.vector_norm(gradient, dim=_dims(gradient, stacked)))
    for number, (norm, own) in enumerate(zip(norms, usual, strict=True)):
        most = min(LIMITS.spike * own, LIMITS.largest)
        share = gradient[number] if stacked else gradient
        if norm / math.sqrt(share.numel()) > most:
            share.clamp_(-LIMITS.largest, LIMITS.largest)
            share *= most / (float(torch.linalg.vector_norm(share)) / math.sqrt(share.numel()))


def _read(state: dict[str, Any], gradient: Tensor, stacked: bool) -> tuple[Tensor, Tensor | None]:
    """Return a gradient in its parameter's basis, and its slope along the last step, if there was one."""
    if state["mean"].dtype != gradient.dtype or state["mean"].device != gradient.device:
        _convert(state, state, gradient)
    gradient = gradient.reshape(state["mean"].shape)
    (unit,) = _spread(gradient, state["unit"])
    gradient = gradient / unit
    first, slope = state["step"] == 0, None
    turned = gradient
    if not first:
        _limit(gradient, state["usual"], stacked)
        turned = _turn(gradient, state)
        uphill = state["last"] * turned
        slope = uphill.sum(_dims(uphill, stacked)) * (unit.reshape(-1) if isinstance(unit, Tensor) else unit)
        _adapt_factors(state, uphill)
    state["step"] += 1
    for side in filter(state.__contains__, NAMES):
        (square,) = _each(lambda own: (own @ own.T,), gradient if side == "left" else gradient.mT)
        state[side].lerp_(square, 1 - BASES.decay)
        if first:
            state[f"{side}_basis"] = _each(_eigenbasis, state[side])[0].mT
    if first:
        turned = _turn(gradient, state)
    elif state["step"] % (BASES.often if state["step"] <= BASES.settled else BASES.seldom) == 0:
        turned = _refresh(state, turned)
    return turned, slope


def _eigenbasis(statistics: Tensor) -> tuple[Tensor]:
    """Return a matrix's eigenvectors as rows (n, n), by falling eigenvalue; ties in the coordinates' order."""
    ties = torch.linspace(1, 0, len(statistics), dtype=torch.float64, device=statistics.device)
    damped = statistics.double() + BASES.damping * statistics.trace() * torch.diag(ties)
    return (torch.linalg.eigh(damped)[1].flip(1).to(statistics).T,)


def _turn(gradient: Tensor, state: dict[str, Any], *, back: bool = False) -> Tensor:
    """Return a matrix in the eigenbases of its sides, or back from there."""
    left, right = (state.get(f"{side}_basis") for side in NAMES)
    factors = [gradient]
    if left is not None:
        factors.insert(0, left if back else left.mT)
    if right is not None:
        factors.append(right.mT if back else right)
    return gradient if len(factors) == 1 else _each(lambda *own: (reduce(torch.matmul, own),), *factors)[0]


def _follow(
    statistics: Tensor, old: Tensor, factors: Tensor, slopes: Tensor, *averages: Tensor, left: bool
) -> tuple[Tensor, ...]:
    """Let a side's basis (n, n) follow its statistics by one power step; return it, its columns as rows.

    Along with it: the directions' factors and slopes (n,), the means, the squares and the gradient, all of them turned.
    """
    power = statistics @ old + BASES.damping * statistics.trace() * old
    new = torch.linalg.householder_product(*torch.geqrf(power))  # the Q of its QR decomposition
    turn = new.T @ old
    shares = turn**2  # of each old direction in each new one
    turns = (turn, turn, shares, turn)
    turned = [each @ own if left else own @ each.T for each, own in zip(turns, averages, strict=True)]
    return new.T, shares @ factors, shares @ slopes, *turned


def _refresh(state: dict[str, Any], turned: Tensor) -> Tensor:
    """Let the bases follow the statistics, and the averages turn along; return the gradient, turned."""
    for side in filter(state.__contains__, NAMES):
        names = (f"{side}_basis", f"{side}_factors", f"{side}_slopes", "mean", "slow", "square")
        follow = partial(_follow, left=side == "left")
        *kept, turned = _each(follow, state[side], *(state[name] for name in names), turned)
        state.update(zip(names, kept, strict=True))
        state[f"{side}_basis"] = state[f"{side}_basis"].mT
    return turned


def _share(p: Tensor, state: dict[str, Any], stacked: bool) -> list[float]:
    """Return the most weight decay of each run's share of a parameter; found anew now and then."""
    if state["step"] % BASES.seldom == 1:
        sizes = _numbers(torch.linalg.vector_norm(state.get("weight", p), dim=_dims(p, stacked)))
        count = p.numel() // len(sizes)
        state["share"] = [LIMITS.decay * math.sqrt(count) / size if size else math.inf for size in sizes]
    found: list[float] = state["share"]
    return found


def _move(
    p: Tensor, state: dict[str, Any], turned: Tensor, group: dict[str, Any], rates: list[float], stacked: bool
) -> None:
    """Move a parameter by one step, along a gradient in its basis."""
    first, second = group["betas"]
    inputs = (INPUTS.reference / state["inputs"]) ** INPUTS.power
    sizes = [min(LIMITS.step, float(group["lr"]) * rate) * inputs for rate in rates]
    decays = [
        min(group["weight_decay"], share) if p.ndim - stacked >= 2 else 0.0 for share in _share(p, state, stacked)
    ]
    if state["table"]:
        second = max(second, TABLES.beta)
        sizes = [min(TABLES.most, TABLES.rate * size) for size in sizes]
        decays = [TABLES.decay * decay for decay in decays]
    mean = state["mean"].lerp_(turned, 1 - first)
    square = state["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
    correction = 1 - second ** state["step"]
    means = _numbers(square.mean(_dims(square, stacked)))
    state["usual"] = [math.sqrt(each / correction) for each in means]
    floors = [(LIMITS.floor * usual) ** 2 for usual in state["usual"]]
    floor, along = _spread(square, floors, [-size for size in sizes])
    root = (square / correction).add_(floor).sqrt_().add_(group["eps"])
    ahead = torch.lerp(turned, mean, first).div_(1 - first ** (state["step"] + 1))
    slow = state["slow"].lerp_(turned, AVERAGES.window / (state["step"] + AVERAGES.window - 1))
    ahead.lerp_(slow, AVERAGES.share)
    state["last"] = ahead.div_(root).mul_(along)
    for side in filter(state.__contains__, NAMES):
        factors = state[f"{side}_factors"].exp()
        state["last"] *= factors[..., None] if side == "left" else factors[..., None, :]
    step = _turn(state["last"], state, back=True).reshape(p.shape)
    weight = state.get("weight", p)  # a finer copy, in which steps too small for the parameter's precision add up
    if weight is not p and not torch.equal(weight.to(p.dtype), p):
        weight.copy_(p)
    (kept,) = _spread(weight, [1 - size * decay for size, decay in zip(sizes, decays, strict=True)])
    weight.mul_(kept).add_(step)
    if weight is not p:
        p.copy_(weight)
