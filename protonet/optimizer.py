"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

The direction is Adam's in the eigenbasis of the gradients' second moments (SOAP), half of it along a mean of many more
steps. The step size is searched for: it grows until the slope that the new gradient sees along the step before turns
uphill. From then on it follows that slope, less and less, and falls with the number of steps. There is one size for
everything, and a factor for each direction of the eigenbases.

The arithmetic is `take_step`, a function on plain state. `CustomOptimizer` wraps it as a `torch.optim.Optimizer`;
`StackOptimizer` takes the same steps for a stack of models at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
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
    budget: float = 350e6
    element_budget: float = 1100  #: ... or this many for each element of theirs, if that is more.
    room: float = 4e6  #: Numbers that bases and statistics may keep, over all parameters that start together ...
    element_room: float = 4  #: ... or this many for each element: the whole state is then at most four times Adam's.
    #: What a QR decomposition and the products with it cost, times length**3 ...
    decomposition: float = 4.6
    overhead: float = 400  #: ... and what small ones cost more than they multiply, times length**2.
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
    #: Beyond twice this, every such length adds the same again to all three, and skips a gradient in the statistics.
    length: int = 64


@dataclass(frozen=True)
class Limits:
    """What keeps single gradients and silent directions from ruling the steps."""

    #: Weight decay is at most this over the weights' root mean square: weights may be meant to be large.
    decay: float = 0.05
    #: Least root of a second moment, relative to the gradient's usual size: silent directions are not blown up.
    floor: float = 1e-2
    spike: float = 10.0  #: A gradient is scaled down to this many times its usual size.
    least: float = 1e-30  #: Added to second moments: no number is divided by zero.
    plain: float = 1e-15  #: Norms between this and its inverse are computed without scaling.
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
class Horizon:
    """How a known number of steps shapes the rate. Source: a study of eighteen workloads, docs/decisions."""

    fall: float = 0.6  #: In the last share of the steps that is so large, steps shrink linearly ...
    least: float = 1e-3  #: ... until this share of the steps is left: they never vanish.
    unit: int = 1000  #: The steps for which the constants of `Slopes` are meant: a longer run stretches them.


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
SEARCH, SLOPES, HORIZON, AVERAGES = Search(), Slopes(), Horizon(), Averages()
#: Bytes at multiples of which torch lays tensors.
ALIGNMENT = 64
#: What all parameters of a run share, at its start; CustomOptimizer keeps it in the first group.
SHARED: dict[str, Any] = {
    "rate": 1.0,  #: In units of the learning rate.
    "found": 0.0,  #: The rate at the end of the search; 0 during it.
    "slopes": 0,
    "slope_size": 0.0,  #: The slopes' mean size.
    "trend": 0.0,
    "turns": 0,
    "skipped": 0,
    "steps": 0,  #: That were taken.
    "total_steps": None,  #: How many there will be, if that is known.
}
#: What every parameter's state has after a step.
STATE = {"step", "unit", "table", "inputs", "mean", "slow", "square", "last", "usual"}


class Work(NamedTuple):
    """A parameter in a step: its gradient, its state (empty before the first) and its group's settings."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: dict[str, Any]


class Bundle(NamedTuple):
    """Parameters that are alike and take a step together; a share is one parameter's in one run."""

    items: Sequence[Work]
    gradient: Tensor  #: (shares, ...), of at least single precision.
    norms: list[float]  #: The gradient's, of each share.
    lengths: list[float]  #: The weights' norm, of each share, where it is needed.


class Stack(NamedTuple):
    """The states of parameters that are alike, on top of each other."""

    tensors: dict[str, Tensor]  #: (shares, ...), of which the tensors of the states are views.
    means: list[Tensor]  #: These views of the first one: they tell whether a state still is the one that it was.


Stacks = dict[tuple[int, ...], Stack]


def take_step(runs: Sequence[dict[str, Any]], work: Sequence[Work], stacks: Stacks, *, stacked: bool = False) -> bool:
    """Take one step of a run, or of several runs whose parameters are stacked along a first dimension.

    Args:
        runs: Of each run, what its parameters share: a copy of ``SHARED`` at first, changed in place.
        work: Parameters of any shape, or (runs, ...) if stacked; they and their states are changed in place. Within a
            state, tensors have the same first dimension, and numbers that differ by run are lists, one per run.
        stacks: What this function left there at the step before; empty at first, or if that is lost.
        stacked: Does the first dimension of parameters and gradients count the runs?

    Returns:
        False if the runs do not go alike: gradients that are not finite, that are zero so far, or that make a table,
        in some of the runs alone. Nothing has changed then, and each run has to take its step apart. True otherwise.
    """
    if not stacked:
        work = [Work(p[None], gradient[None], state, group) for p, gradient, state, group in work]
    bundles = _bundle(work)
    norms = list(chain.from_iterable(bundle.norms for bundle in bundles))  # run after run, for each parameter
    finite = {all(map(math.isfinite, norms[number :: len(runs)])) for number in range(len(runs))}
    if len(finite) > 1:
        return False
    if False in finite:
        for run in runs:
            run["skipped"] += 1
        return True
    going = [bundle for bundle in bundles if bundle.items[0].state]
    fresh: list[tuple[Bundle, bool]] = []
    for bundle in bundles:
        item, kinds = bundle.items[0], set(map(bool, bundle.norms))
        if item.state or kinds == {False}:
            continue
        tables = set(_find_tables(item.gradient))
        if len(kinds) > 1 or len(tables) > 1:
            return False
        fresh.append((bundle, tables.pop()))
    for bundle, table in fresh:
        _start(bundle, table=table, stacked=stacked)
    _choose_sides([bundle.items[0].state for bundle, _ in fresh], stacked)
    going += _join([bundle for bundle, _ in fresh])
    kept = [_find_stack(bundle, stacks, stacked) for bundle in going]
    stacks.clear()
    stacks.update((_name(bundle.items), stack) for bundle, stack in zip(going, kept, strict=True))
    read = [_read(bundle, stack.tensors) for bundle, stack in zip(going, kept, strict=True)]
    _adapt(runs, [(bundle, slope) for bundle, (_, slope) in zip(going, read, strict=True) if slope is not None])
    # No wind-up: where every step stands at its limit, the rate goes no further, and so comes back at once.
    most = max((_largest_rate(bundle.items[0]) for bundle in going), default=math.inf)
    rates = []
    for run in runs:
        share = anneal(run["steps"], run["total_steps"])  # inside the limits: what stands at its limit falls, too
        run["rate"] = min(run["rate"], most / share)
        run["steps"] += 1
        rates.append(run["rate"] * share)
    for bundle, stack, (turned, _) in zip(going, kept, read, strict=True):
        _move(bundle, stack.tensors, turned, rates)
    return True


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
        self.param_groups[0].update(SHARED, rate=SEARCH.usual / first, total_steps=total_steps)

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
            stacks: Stacks = self.__dict__.setdefault("stacks", {})  # copies and pickles go without
            take_step(self.param_groups[:1], [Work(p, p.grad, self.state[p], group) for group, p in there], stacks)
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
        steps = max((state["step"] for state in self.state.values()), default=0)
        self.param_groups[0] = {**SHARED, "steps": steps, **self.param_groups[0]}  # earlier versions did not count


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
        start: float = SEARCH.usual,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        total_steps: int | None = None,
    ) -> None:
        _check_total(total_steps)
        settings = {"lr": start, "betas": betas, "eps": eps}
        self.weights = [
            (weight.detach(), {**settings, "weight_decay": decay}) for weights, decay in groups for weight in weights
        ]
        members = len(self.weights[0][0])
        states: list[dict[str, Any]] = [{} for _ in self.weights]
        stacks: Stacks = {}
        self.parts = [
            (slice(0, members), [{**SHARED, "total_steps": total_steps} for _ in range(members)], states, stacks)
        ]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one step of every member with the weights' gradients (members, ...), in the groups' order.

        A member whose gradients are not finite stays where it is. Members go on one by one once they differ in which
        gradients are zero or not finite: the result is the same, and takes longer.
        """
        waiting, self.parts = self.parts, []
        while waiting:
            members, runs, states, stacks = waiting.pop(0)
            work = [
                Work(weight[members], gradient[members], state, group)
                for (weight, group), gradient, state in zip(self.weights, gradients, states, strict=True)
            ]
            if take_step(runs, work, stacks, stacked=True):
                self.parts.append((members, runs, states, stacks))
                continue
            for number, run in enumerate(runs):
                own = slice(members.start + number, members.start + number + 1)
                waiting.append((own, [run], [_take_member(state, number) for state in states], {}))


def _take_member(state: dict[str, Any], number: int) -> dict[str, Any]:
    """Return one member's share of a stacked state, copied, and so aligned."""
    own = slice(number, number + 1)
    shares = {name: value[own] if isinstance(value, (Tensor, list)) else value for name, value in state.items()}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in shares.items()}


def _check_total(total_steps: int | None) -> None:
    """Raise an error for a number of steps that is none."""
    whole = isinstance(total_steps, int) and not isinstance(total_steps, bool)
    if total_steps is not None and not (whole and total_steps >= 1):
        known = "Use None where it is not known."
        raise ValueError(f"CustomOptimizer: `total_steps` must be an int >= 1; got {total_steps!r}. {known}")


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


def _bundle(work: Sequence[Work]) -> list[Bundle]:
    """Return parameters (runs, ...) with their norms, together where they are alike; without a state, one by one."""
    alike: dict[tuple[Any, ...], list[Work]] = {}
    for number, item in enumerate(work):
        alike.setdefault(_describe(item) if item.state else (number,), []).append(item)
    groups = list(alike.values())
    gradients = [_pile([item.gradient for item in items], items[0].parameter) for items in groups]
    decaying = [_needs_length(items[0]) for items in groups]
    weights = [
        _pile([_find_weight(item) for item in items], gradient)
        for items, gradient, needed in zip(groups, gradients, decaying, strict=True)
        if needed
    ]
    measured = iter(_measure([*weights, *gradients]))
    lengths = [next(measured) if needed else [] for needed in decaying]
    norms = list(measured)
    return [Bundle(*parts) for parts in zip(groups, gradients, norms, lengths, strict=True)]


def _describe(item: Work) -> tuple[Any, ...]:
    """Return what is the same of parameters that are alike."""
    p, state, group = item.parameter, item.state, item.group
    kinds = (state["step"], state["table"], "left_basis" in state, "right_basis" in state, "share" in state)
    settings = (_first_rate(group), float(group["lr"]), *map(float, group["betas"]), float(group["eps"]))
    return (p.shape, p.dtype, p.device, *kinds, *settings, float(group["weight_decay"]))


def _join(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Return bundles of one item each, together where they have become alike."""
    alike: dict[tuple[Any, ...], list[Bundle]] = {}
    for bundle in bundles:
        alike.setdefault(_describe(bundle.items[0]), []).append(bundle)
    joined = []
    for parts in alike.values():
        items, gradients, norms, lengths = zip(*parts, strict=True)
        together = gradients[0] if len(parts) == 1 else torch.cat(gradients)
        joined.append(Bundle([*chain(*items)], together, [*chain(*norms)], [*chain(*lengths)]))
    return joined


def _pile(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return tensors (runs, ...) as one (shares, ...), of at least single precision."""
    together = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    return together.to(torch.promote_types(like.dtype, torch.float32))


def _find_weight(item: Work) -> Tensor:
    """Return a parameter (runs, ...), or a finer copy, in which steps too small for its precision add up."""
    weight = item.state.get("weight")
    return item.parameter if weight is None else weight.view(item.parameter.shape)


def _needs_length(item: Work) -> bool:
    """Return whether weight decay needs the norm of a parameter (runs, ...), which is found anew now and then."""
    if item.parameter.ndim < 3 or not item.group["weight_decay"]:
        return False
    return "share" not in item.state or item.state["step"] % BASES.seldom == 0


def _measure(stacks: Sequence[Tensor]) -> list[list[float]]:
    """Return the norms of tensors' shares; those of any finite numbers are finite, and 0 only if all of these are."""
    flat = [stack.reshape(len(stack), -1) for stack in stacks]
    found = _fetch([torch.linalg.vector_norm(each, dim=1) for each in flat])
    for number, (each, norms) in enumerate(zip(flat, found, strict=True)):
        if not all(LIMITS.plain < norm < 1 / LIMITS.plain for norm in norms):  # squares may under- or overflow
            largest = each.abs().amax(1)
            unit = largest.clamp(min=torch.finfo(each.dtype).tiny)
            scaled = torch.linalg.vector_norm(each / unit[:, None], dim=1)
            found[number] = [a * b for a, b in zip(*_fetch([unit, scaled]), strict=True)]
    return found


def _fetch(rows: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of tensors (n,), which are waited for once."""
    numbers = iter(torch.cat([row.to(rows[0].device) for row in rows]).tolist() if rows else [])
    return [list(islice(numbers, len(row))) for row in rows]


def _name(items: Sequence[Work]) -> tuple[int, ...]:
    """Return what a stack of parameters' states is called."""
    return tuple(id(item.state) for item in items)


def _find_stack(bundle: Bundle, stacks: Stacks, stacked: bool) -> Stack:
    """Return a bundle's states on top of each other; they become views of it, unless they are already."""
    states, like = [item.state for item in bundle.items], bundle.gradient
    for state in states:
        if state["mean"].dtype != like.dtype or state["mean"].device != like.device:
            _convert(state, state, like)
    known = stacks.get(_name(bundle.items))
    if known and all(state["mean"] is mean for state, mean in zip(states, known.means, strict=True)):
        return known
    tensors = {}
    for name in [name for name, value in states[0].items() if isinstance(value, Tensor) and name != "weight"]:
        parts = [state[name] if stacked else state[name][None] for state in states]
        tensors[name] = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
        for state, own in zip(states, tensors[name].chunk(len(states)), strict=True):
            state[name] = own if stacked else own[0]
    return Stack(tensors, [state["mean"] for state in states])


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


def _first_rate(group: dict[str, Any]) -> float:
    """Return the learning rate that a group was given, whatever a scheduler has made of it."""
    return float(group.get("initial_lr", group["lr"]))


def _largest_rate(item: Work) -> float:
    """Return the rate, in units of the learning rate, at which a parameter's step comes to its limit."""
    most = TABLES.most / TABLES.rate if item.state["table"] else LIMITS.step
    return most / (_first_rate(item.group) or 1.0)


def _adapt(runs: Sequence[dict[str, Any]], read: Sequence[tuple[Bundle, Tensor]]) -> None:
    """Move each run's rate by the slope along its last step, of which each bundle has that of its shares."""
    if not read:
        return
    lr = max(_first_rate(bundle.items[0].group) for bundle, _ in read) or 1.0
    slopes = _fetch([slope for _, slope in read])
    units = (chain.from_iterable(item.state["unit"] for item in bundle.items) for bundle, _ in read)
    parts = [a * b for own, unit in zip(slopes, units, strict=True) for a, b in zip(own, unit, strict=True)]
    for number, run in enumerate(runs):
        length = run["rate"] * anneal(run["steps"] - 1, run["total_steps"])  # of the step whose slope this is
        downhill = -math.fsum(parts[number :: len(runs)]) / length
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


def anneal(steps: int, total_steps: int | None) -> float:
    """Return the share of the rate that is left after some of all steps: 1 until 40 % of them, then a linear fall."""
    if total_steps is None:
        return 1.0
    return min(1.0, max(HORIZON.least, 1 - steps / total_steps) / HORIZON.fall)


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
    stretch = max(1.0, (run["total_steps"] or 0) / HORIZON.unit)
    gain = min(SLOPES.gain / stretch, SLOPES.late_gain / run["slopes"]) + SLOPES.turn_gain / (1 + run["turns"])
    fall = min(SLOPES.fall / stretch, SLOPES.late_fall / run["slopes"])
    least = min(run["found"], SLOPES.least * stretch / run["slopes"] / lr)
    run["rate"] = max(least, run["rate"] * math.exp(gain * own - fall))


def _start(bundle: Bundle, *, table: bool, stacked: bool) -> None:
    """Fill the state of a bundle's only item: what it is, by its shape and first gradient, and empty averages."""
    (item,), gradient = bundle.items, bundle.gradient
    state, shape = item.state, item.parameter.shape[1:]
    usual = [norm / math.sqrt(math.prod(shape)) for norm in bundle.norms]
    columns = math.prod(shape[1:])
    matrix = len(shape) >= 2 and min(shape[0], columns) > 1
    state["step"] = 0
    state["unit"] = [max(own, torch.finfo(torch.float32).tiny) for own in usual]
    state["usual"] = [0.0 for _ in usual]
    state["table"] = table
    state["inputs"] = columns if matrix and not table else INPUTS.reference
    runs = gradient.shape[: int(stacked)]
    for name in ("mean", "slow", "square", "last"):
        state[name] = gradient.new_zeros((*runs, shape[0], columns) if matrix else (*runs, *shape))
    if item.parameter.dtype.itemsize < 4:
        weight = item.parameter if stacked else item.parameter[0]
        state["weight"] = weight.to(gradient.dtype)


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
        budget -= sum(_price(length, state["mean"].shape[int(stacked) :].numel()) for state in chosen)
        room -= SIDES.kept * length**2 * len(chosen)
        if min(budget, room) < 0:
            break
        for state in chosen:
            runs = state["mean"].shape[: int(stacked)]
            for name in (side, f"{side}_basis"):
                state[name] = state["mean"].new_zeros(*runs, length, length)
            for name in ("factors", "slopes"):
                state[f"{side}_{name}"] = state["mean"].new_zeros(*runs, length)


def _price(length: int, elements: int) -> float:
    """Return the multiplications per step that a side of a matrix costs."""
    pace, own = _pace(length), length * elements
    decomposition = SIDES.decomposition * length**3 + SIDES.overhead * length**2
    return 2 * own + own / pace + (4 * own + decomposition) / (pace * BASES.seldom)  # there and back, and now and then


def _adapt_factors(stack: dict[str, Tensor], uphill: Tensor, step: int) -> Tensor:
    """Move the directions' factors by each one's slope along the last step, relative to each other.

    Returns:
        The sum of the slopes, of each share.
    """
    memory = 1 - SLOPES.memory**step
    gain = SLOPES.direction_gain + SLOPES.direction_hurry / step
    slope = None
    for side in filter(stack.__contains__, NAMES):
        slope = uphill.sum(-1 if side == "left" else -2)
        usual = stack[f"{side}_slopes"].lerp_(slope.square(), 1 - SLOPES.memory)
        alive = usual > SLOPES.negligible**2 * usual.amax(-1, keepdim=True)
        moves = torch.where(alive, slope * usual.rsqrt().mul_(math.sqrt(memory)), 0.0).clamp_(-1, 1)
        mean = moves.sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp_(min=1)
        moves.sub_(alive * mean)
        stack[f"{side}_factors"].sub_(moves, alpha=gain).clamp_(-SLOPES.furthest, SLOPES.furthest)
    return (uphill.reshape(len(uphill), -1) if slope is None else slope).sum(1)


def _limit(bundle: Bundle) -> list[float]:
    """Return each share's factor on a gradient: to units of the first one, and down to what is usual, which follows."""
    item = bundle.items[0]
    decay, step = _second_decay(item), item.state["step"]
    root = math.sqrt(math.prod(item.parameter.shape[1:]))
    usual = chain.from_iterable(each.state["usual"] for each in bundle.items)
    units = chain.from_iterable(each.state["unit"] for each in bundle.items)
    factors, sizes = [], []
    for norm, unit, own in zip(bundle.norms, units, usual, strict=True):
        size = norm / unit / root
        most = min(LIMITS.spike * own, LIMITS.largest) if step else size
        factors.append(1 / unit if size <= most else most / norm * root)
        mean = decay * (1 - decay**step) * own**2 + (1 - decay) * min(size, most) ** 2
        sizes.append(math.sqrt(mean / (1 - decay ** (step + 1))))
    runs = len(item.parameter)
    for number, each in enumerate(bundle.items):
        each.state["usual"] = sizes[number * runs : (number + 1) * runs]
    return factors


def _second_decay(item: Work) -> float:
    """Return the decay of a parameter's second moments."""
    second = float(item.group["betas"][1])
    return max(second, TABLES.beta) if item.state["table"] else second


def _read(bundle: Bundle, stack: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return gradients in their parameters' bases, and their slopes along the last step, if there was one."""
    step = bundle.items[0].state["step"]
    gradient = bundle.gradient.reshape(stack["mean"].shape)
    gradient = gradient * _spread(gradient, _limit(bundle))
    slope = None
    if step:
        turned = _turn(gradient, stack)
        slope = _adapt_factors(stack, stack["last"] * turned, step)
    step += 1
    for item in bundle.items:
        item.state["step"] = step
    for side in filter(stack.__contains__, NAMES):
        own, pace = gradient if side == "left" else gradient.mT, _pace(stack[side].shape[1])
        if step == 1 or step % pace == 0:
            stack[side].lerp_(_times(own, own.mT), 1 - BASES.decay**pace)
        if step == 1:
            stack[f"{side}_basis"].copy_(_each(_eigenbases, stack[side]))
        elif step % (pace * (BASES.often if step <= pace * BASES.settled else BASES.seldom)) == 0:
            turned = _refresh(stack, turned, side)
    if step == 1:
        turned = _turn(gradient, stack)
    return turned, slope


def _pace(length: int) -> int:
    """Return how many steps a side takes for what a short one does at each: turning long ones costs more."""
    return max(1, length // BASES.length - 1)


def _eigenbases(statistics: Tensor) -> Tensor:
    """Return matrices' eigenvectors as columns (shares, n, n), by falling eigenvalue; ties as coordinates are."""
    ties = torch.linspace(1, 0, statistics.shape[1], dtype=torch.float64, device=statistics.device)
    traces = _trace(statistics.double())
    damped = statistics.double() + BASES.damping * traces * torch.diag(ties)
    vectors: Tensor = torch.linalg.eigh(damped)[1]
    return vectors.flip(2).to(statistics)


def _trace(matrices: Tensor) -> Tensor:
    """Return the traces (shares, 1, 1) of matrices."""
    traces: Tensor = matrices.diagonal(dim1=1, dim2=2).sum(1)
    return traces[:, None, None]


def _turn(gradient: Tensor, stack: dict[str, Tensor], *, back: bool = False) -> Tensor:
    """Return matrices in the eigenbases of their sides, or back from there."""
    if "left" in stack:
        basis = stack["left_basis"]
        gradient = _times(basis if back else basis.mT, gradient)
    if "right" in stack:
        basis = stack["right_basis"]
        gradient = _times(gradient, basis.mT if back else basis)
    return gradient


def _orthonormalise(matrices: Tensor) -> Tensor:
    """Return the Q of matrices' QR decompositions."""
    q: Tensor = torch.linalg.householder_product(*torch.geqrf(matrices))
    return q


def _refresh(stack: dict[str, Tensor], turned: Tensor, side: str) -> Tensor:
    """Let a side's bases follow its statistics by a power step, and the averages turn along; return the gradient."""
    left, statistics, old = side == "left", stack[side], stack[f"{side}_basis"]
    power = _times(statistics, old).addcmul_(old, BASES.damping * _trace(statistics))
    new = _each(_orthonormalise, power)
    turn = _times(new.mT, old)
    shares = turn.square()  # of each old direction in each new one
    old.copy_(new)
    for name in (f"{side}_factors", f"{side}_slopes"):
        stack[name].copy_((shares * stack[name][:, None]).sum(-1))
    for name, by in (("mean", turn), ("slow", turn), ("square", shares)):
        stack[name].copy_(_times(by, stack[name]) if left else _times(stack[name], by.mT))
    return _times(turn, turned) if left else _times(turned, turn.mT)


def _move(bundle: Bundle, stack: dict[str, Tensor], turned: Tensor, rates: list[float]) -> None:
    """Move parameters by one step, along a gradient in their bases."""
    item, runs = bundle.items[0], len(rates)
    state, group, step = item.state, item.group, item.state["step"]
    first, second = float(group["betas"][0]), _second_decay(item)
    inputs = (INPUTS.reference / state["inputs"]) ** INPUTS.power
    sizes = [min(LIMITS.step, float(group["lr"]) * rate) * inputs for rate in rates]
    if state["table"]:
        sizes = [min(TABLES.most, TABLES.rate * size) for size in sizes]
    correction = 1 - second**step
    usual = chain.from_iterable(each.state["usual"] for each in bundle.items)
    floors = [correction * ((LIMITS.floor * own) ** 2 + float(group["eps"]) ** 2) + LIMITS.least for own in usual]
    mean = stack["mean"].lerp_(turned, 1 - first)
    slow = stack["slow"].lerp_(turned, AVERAGES.window / (step + AVERAGES.window - 1))
    square = stack["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
    # the means' shares of the step; what they and the root have in common is in its length
    share = 0.0 if state["table"] else AVERAGES.share  # a row that is seldom seen has a slow mean of long ago
    weight = (1 - share) / (1 - first ** (step + 1))
    last = torch.lerp(turned, mean, first, out=stack["last"]).add_(slow, alpha=share / weight)
    last.mul_((square + _spread(square, floors)).rsqrt_())
    along: Any = [-size * weight * math.sqrt(correction) for size in sizes] * len(bundle.items)
    along = _spread(square, along)
    for side in filter(stack.__contains__, NAMES):
        factors = stack[f"{side}_factors"].exp()
        last.mul_((factors[..., None] if side == "left" else factors[..., None, :]) * along)
        along = 1.0
    if not {"left", "right"} & stack.keys():
        last.mul_(along)
    steps = _turn(last, stack, back=True)
    for number, (each, own) in enumerate(zip(bundle.items, steps.split(runs), strict=True)):
        _add(each, own, sizes, bundle.lengths[number * runs : (number + 1) * runs])


def _add(item: Work, step: Tensor, sizes: list[float], lengths: list[float]) -> None:
    """Add a step to a parameter, and let weights decay that are matrices."""
    p, state, weight = item.parameter, item.state, _find_weight(item)
    if weight is not p and not torch.equal(weight.to(p.dtype), p):
        weight.copy_(p)
    if lengths:
        most = LIMITS.decay * math.sqrt(math.prod(p.shape[1:]))
        state["share"] = [most / length if length else math.inf for length in lengths]
    decay = item.group["weight_decay"] * (TABLES.decay if state["table"] else 1.0)
    if decay and p.ndim > 2:
        shares = [share * (TABLES.decay if state["table"] else 1.0) for share in state["share"]]
        weight.mul_(_spread(weight, [1 - size * min(decay, own) for size, own in zip(sizes, shares, strict=True)]))
    weight.add_(step.reshape(weight.shape))
    if weight is not p:
        p.copy_(weight)
