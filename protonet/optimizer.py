"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

The direction is Adam's in the eigenbasis of the gradients' second moments (SOAP). Step sizes follow the slope that the
new gradient sees along the step before: downhill, and steps grow; uphill, and they shrink, which anneals at last. There
is one size for everything, and a factor for each direction of the eigenbases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

#: Matrices are turned on their sides, the shortest first, up to this length; not if a side is so many times the other.
SIDES, LONGEST, LONGER = ("left", "right"), 512, 8
#: The multiplications a step that this may cost, and the numbers that it may keep: in all, or more for each element.
BUDGET, ELEMENT_BUDGET, ROOM, ELEMENT_ROOM = 400e6, 380, 4e6, 4
#: Their statistics' decay and damping (else bases would hang on rounding); the eigenbases follow often, later seldom.
SIDE_DECAY, DAMPING, OFTEN, SETTLED, SELDOM = 0.98, 1e-4, 2, 20, 8
#: Directions without gradients are not blown up, nor gradients over ten times their usual size followed, nor any so
#: much larger than the first one that squares overflow.
FLOOR, SPIKE, LARGEST = 1e-2, 10.0, 1e15
#: A table is a tall matrix of which the first gradient leaves this share of the rows untouched, as embeddings are. It
#: takes longer steps, up to a limit, keeps second moments for longer (rows are rarely seen) and decays less.
TALL, UNTOUCHED = 1.5, 0.25
TABLE_RATE, TABLE_MOST, TABLE_BETA, TABLE_DECAY = 5.0, 0.02, 0.999, 0.2
#: Matrices with this many inputs take steps of the rate itself; its power is how others' depend on that.
INPUTS, INPUTS_POWER = 64, 0.25
#: How much the rate and a direction's factor move with a slope of one standard size, and how much more over the number
#: of steps; what slope is neutral; the slopes' memory; the furthest that a factor's logarithm goes,
#: and the share of the largest slope below which a direction's is rounding.
GAIN, DIRECTION_GAIN, HURRY, NEUTRAL, MEMORY, FURTHEST, NEGLIGIBLE = 0.015, 0.03, 0.3, 0.2, 0.95, 1.15, 1e-3
#: The longest step, per element, before the factors; the most that the rate moves away from the one that was given.
MOST, RANGE = 0.1, 1e4
#: What all parameters share is kept in the first group, where state dictionaries hold it.
SHARED = {"rate": 1.0, "slope_square": 0.0, "slopes": 0, "skipped": 0}


class CustomOptimizer(torch.optim.Optimizer):
    """Minimise with steps whose direction and size come from the gradients alone.

    Args:
        params: Parameters or groups of them, real and dense; groups may have settings of their own.
        lr: >= 0, where the search for the step size starts; a step is always a multiple of it, so that schedulers work.
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
        work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        if any(p.grad.is_sparse for _, p in work):
            raise ValueError("CustomOptimizer: `params` must have dense gradients; got a sparse one. Densify it.")
        if not work:
            return loss
        shared = self.param_groups[0]
        sizes = [float(size) for size in torch._foreach_norm([p.grad for _, p in work], math.inf)]
        if not all(map(math.isfinite, sizes)):
            shared["skipped"] += 1
            return loss
        live = [(group, p) for (group, p), size in zip(work, sizes, strict=True) if size or self.state[p]]
        gradients = [p.grad.to(torch.promote_types(p.dtype, torch.float32)) for _, p in live]
        fresh = []
        for (_, p), gradient in zip(live, gradients, strict=True):
            if not self.state[p]:
                _start(p, gradient, self.state[p])
                fresh.append(self.state[p])
        _choose_sides(fresh)
        read = [_read(self.state[p], gradient) for (_, p), gradient in zip(live, gradients, strict=True)]
        _adapt(shared, [slope for _, slope in read if slope is not None])
        for (group, p), (turned, _) in zip(live, read, strict=True):
            _move(p, self.state[p], turned, group, shared["rate"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: tensors come to the parameters' devices and keep at least float32, whatever those have."""
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, p in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                like = torch.empty(0, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
                _convert(self.state[p], state_dict["state"][number], like)


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
    """Put the tensors of a parameter's saved state into its state, of another one's dtype and on its device."""
    for name, value in saved.items():
        state[name] = value.to(like.device, like.dtype, copy=True) if isinstance(value, Tensor) else value


def _adapt(shared: dict[str, Any], slopes: list[Tensor]) -> None:
    """Move the rate by the slope along the last step, in units of the slopes' usual size."""
    slope = -sum(torch.stack([slope.double() for slope in slopes]).tolist()) if slopes else 0.0
    if slope == 0 or not math.isfinite(slope):
        return
    shared["slopes"] += 1
    shared["slope_square"] += (1 - MEMORY) * (slope * slope - shared["slope_square"])
    usual = math.sqrt(shared["slope_square"] / (1 - MEMORY ** shared["slopes"])) or math.inf
    move = (GAIN + HURRY / shared["slopes"]) * max(-1.0, min(1.0, slope / usual - NEUTRAL))
    shared["rate"] = max(1 / RANGE, min(RANGE, shared["rate"] * math.exp(move)))


def _start(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    """Fill a parameter's state: what it is, by its shape and first gradient, and empty averages."""
    largest = gradient.abs().max()
    state["step"] = 0
    state["unit"] = max(float(largest * (gradient / largest).square().mean().sqrt()), torch.finfo(torch.float32).tiny)
    matrix = p.ndim >= 2 and min(p.shape[0], p[0].numel()) > 1
    gradient = gradient.reshape((p.shape[0], -1) if matrix else p.shape)
    untouched = (gradient.flatten(1) == 0).all(1).float().mean() if p.ndim == 2 else 0.0
    state["table"] = p.ndim == 2 and p.shape[0] >= TALL * p.shape[1] and bool(untouched > UNTOUCHED)
    state["inputs"] = p[0].numel() if matrix and not state["table"] else INPUTS
    state["mean"], state["square"], state["last"] = (torch.zeros_like(gradient) for _ in range(3))
    if p.dtype.itemsize < 4:
        state["weight"] = p.to(gradient.dtype)


def _root_mean_square(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient)) / math.sqrt(gradient.numel())


def _choose_sides(states: list[dict[str, Any]]) -> None:
    """Choose the sides on which parameters that came together are turned: the shortest, as far as can be paid for."""
    sides = [
        (length, side, state)
        for state in states
        for shape in [state["mean"].shape]
        if len(shape) == 2 and min(shape) > 1 and not state["table"]
        for side, length, other in zip(SIDES, shape, reversed(shape), strict=True)
        if length <= min(LONGEST, LONGER * other)
    ]
    elements = sum(state["mean"].numel() for state in states)
    budget, room = max(BUDGET, ELEMENT_BUDGET * elements), max(ROOM, ELEMENT_ROOM * elements)
    sides.sort(key=lambda side: (side[0], side[1] == "left"))  # inputs' sides first: they gain more
    for (length, side), group in groupby(sides, itemgetter(0, 1)):
        chosen = [state for *_, state in group]
        # products at every step, and now and then a QR decomposition, which is slow where it is small
        budget -= sum(length * state["mean"].numel() + 0.2 * length**3 + 64 * length**2 for state in chosen)
        room -= 2 * length**2 * len(chosen)
        if min(budget, room) < 0:
            break
        for state in chosen:
            state[side] = state["mean"].new_zeros(length, length)
            for name in ("factors", "slopes"):
                state[f"{side}_{name}"] = state["mean"].new_zeros(length)


def _adapt_factors(state: dict[str, Any], uphill: Tensor) -> None:
    """Move the directions' factors by each one's slope along the last step, relative to each other."""
    for side in filter(state.__contains__, SIDES):
        slope = uphill.sum(1 if side == "left" else 0)
        usual = (state[f"{side}_slopes"].lerp_(slope**2, 1 - MEMORY) / (1 - MEMORY ** state["step"])).sqrt()
        alive = usual > NEGLIGIBLE * usual.max()
        moves = torch.where(alive, slope / usual, 0.0).clamp(-1, 1) * (DIRECTION_GAIN + HURRY / state["step"])
        moves -= alive * (moves.sum() / alive.sum().clamp(min=1))
        state[f"{side}_factors"].sub_(moves).clamp_(-FURTHEST, FURTHEST)


def _read(state: dict[str, Any], gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a gradient in its parameter's basis, and its slope along the last step, if there was one."""
    if state["mean"].dtype != gradient.dtype or state["mean"].device != gradient.device:
        _convert(state, state, gradient)
    gradient = gradient.reshape(state["mean"].shape) / state["unit"]
    if state["step"]:
        most = min(SPIKE * state["usual"], LARGEST)
        if _root_mean_square(gradient) > most:
            gradient = gradient.clamp(-LARGEST, LARGEST)
            gradient *= most / _root_mean_square(gradient)
    turned = _turn(gradient, state)
    slope = None
    if state["step"]:
        uphill = state["last"] * turned
        slope = uphill.sum() * state["unit"]
        _adapt_factors(state, uphill)
    state["step"] += 1
    for side in filter(state.__contains__, SIDES):
        square = gradient @ gradient.T if side == "left" else gradient.T @ gradient
        state[side].lerp_(square, 1 - SIDE_DECAY)
        if state["step"] == 1:
            state[f"{side}_basis"] = _eigenbasis(state[side])
    if state["step"] == 1:
        turned = _turn(gradient, state)
    elif state["step"] % (OFTEN if state["step"] <= SETTLED else SELDOM) == 0:
        turned = _refresh(state, turned)
    return turned, slope


def _eigenbasis(statistics: Tensor) -> Any:
    """Return the eigenvectors (n, n), columns by falling eigenvalue; where there are ties, the coordinates' order."""
    ties = torch.linspace(1, 0, len(statistics), dtype=torch.float64, device=statistics.device)
    damped = statistics.double() + DAMPING * statistics.trace() * torch.diag(ties)
    return torch.linalg.eigh(damped)[1].flip(1).to(statistics)


def _turn(gradient: Tensor, state: dict[str, Any], *, back: bool = False) -> Tensor:
    """Return a matrix in the eigenbases of its sides, or back from there."""
    left, right = (state.get(f"{side}_basis") for side in SIDES)
    gradient = gradient if left is None else (left if back else left.T) @ gradient
    return gradient if right is None else gradient @ (right.T if back else right)


def _refresh(state: dict[str, Any], turned: Tensor) -> Tensor:
    """Let the bases follow the statistics by one power step, the averages turn along; return the gradient, turned."""
    for side in filter(state.__contains__, SIDES):
        old = state[f"{side}_basis"]
        state[f"{side}_basis"] = new = torch.linalg.qr(state[side] @ old + DAMPING * state[side].trace() * old)[0]
        turn = new.T @ old
        shares = turn**2  # of each old direction in each new one
        for name in ("factors", "slopes"):
            state[f"{side}_{name}"] = shares @ state[f"{side}_{name}"]
        if side == "left":
            state["mean"], state["square"], turned = turn @ state["mean"], shares @ state["square"], turn @ turned
        else:
            state["mean"], state["square"] = state["mean"] @ turn.T, state["square"] @ shares.T
            turned = turned @ turn.T
    return turned


def _move(p: Tensor, state: dict[str, Any], turned: Tensor, group: dict[str, Any], rate: float) -> None:
    """Move a parameter by one step, along a gradient in its basis."""
    first, second = group["betas"]
    size = min(MOST, float(group["lr"]) * rate) * (INPUTS / state["inputs"]) ** INPUTS_POWER
    decay = size * group["weight_decay"] if p.ndim >= 2 else 0.0
    if state["table"]:
        second = max(second, TABLE_BETA)
        size = min(TABLE_MOST, TABLE_RATE * size)
        decay = TABLE_DECAY * size * group["weight_decay"]
    mean = state["mean"].lerp_(turned, 1 - first)
    square = state["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
    correction = 1 - second ** state["step"]
    state["usual"] = math.sqrt(float(square.mean()) / correction)
    root = (square / correction).add_((FLOOR * state["usual"]) ** 2).sqrt_().add_(group["eps"])
    ahead = torch.lerp(turned, mean, first).div_(1 - first ** (state["step"] + 1))
    state["last"] = ahead.div_(root).mul_(-size)
    for side in filter(state.__contains__, SIDES):
        factors = state[f"{side}_factors"].exp()
        state["last"] *= factors[:, None] if side == "left" else factors
    step = _turn(state["last"], state, back=True).reshape(p.shape)
    weight = state.get("weight", p)  # a finer copy, in which steps too small for the parameter's precision add up
    if weight is not p and not torch.equal(weight.to(p.dtype), p):
        weight.copy_(p)
    weight.mul_(1 - decay).add_(step)
    if weight is not p:
        p.copy_(weight)
