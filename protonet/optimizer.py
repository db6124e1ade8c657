"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

The direction is Adam's in the eigenbasis of the gradients' second moments (SOAP). The size of the steps follows the
slope that the new gradient sees along the step before: still downhill, and steps grow; uphill, and they shrink. Early
on that finds the scale, and later, where noise makes the slope turn, it anneals. All of it happens in ``step()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

#: Sides of a matrix up to this length are rotated; of two, the longer one only up to ``SECOND_SIDE``.
SIDES = ("left", "right")
SIDE, SECOND_SIDE = 300, 300
#: Decay of the sides' statistics, and the steps at which their eigenbases follow: often at first, then seldom.
SIDE_DECAY, FIRST_STEPS, EVERY = 0.95, (2, 4, 7), 2
#: Least share of a second moment's mean root: directions without gradients are not blown up.
FLOOR = 1e-2
#: A table is a tall matrix of which the first gradient leaves this share of the rows untouched, as embeddings are.
TALL, UNTOUCHED = 1.5, 0.25
#: Tables take longer steps, up to a limit, keep second moments for longer (rows are rarely seen) and decay less.
TABLE_RATE, TABLE_MOST, TABLE_BETA, TABLE_DECAY = 5.0, 0.016, 0.999, 0.2
#: Matrices with this many inputs take steps of the rate itself; its power is how others' depend on that.
INPUTS, INPUTS_POWER = 64, 0.25
#: How much the rate moves with a slope of one standard size, at first more; what slope is neutral; the slopes' memory.
GAIN, HURRY, NEUTRAL, MEMORY = 0.015, 20.0, 0.05, 0.95
#: The longest step, per element, and the most that the rate moves away from the one that was given.
MOST, RANGE = 0.1, 1e4


class CustomOptimizer(torch.optim.Optimizer):
    """Minimise with steps whose direction and size come from the gradients alone.

    Args:
        params: Parameters or groups of them, real and dense; groups may have settings of their own.
        lr: >= 0, where the search for the step size starts; a step is always a multiple of it, so that schedulers work.
        betas: Two decays in [0, 1), of the gradients' mean and of their squares.
        weight_decay: >= 0, decoupled, times the step size; of matrices alone.
        eps: > 0, in units of the first gradient's root mean square.

    Attributes:
        state: Holds an entry "shared" beside those of the parameters: ``rate``, the factor on ``lr`` that was found,
            and ``skipped``, the number of steps that were skipped because a gradient was not finite.

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
        lr: float = 5e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.15,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self.state["shared"] = {"rate": 1.0, "square": 0.0, "slopes": 0, "step": 0, "skipped": 0}  # type: ignore[index]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, which are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in sorted(
            group.keys() - {"params", "lr", "betas", "weight_decay", "eps", "initial_lr", "param_names"}
        ):
            self.param_groups.pop()
            raise TypeError(f"CustomOptimizer: `{name}` must be a setting; got {group[name]!r}. Remove it.")
        values = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        values |= {f"betas[{index}]": beta for index, beta in enumerate(group["betas"])}
        for name, value in values.items():
            high = 1.0 if name.startswith("betas") else math.inf
            if not (isinstance(value, (int, float, Tensor)) and 0 <= float(value) < high) or (
                name == "eps" and not value
            ):
                self.param_groups.pop()
                constraint = "in [0, 1)" if high == 1 else "finite and " + ("> 0" if name == "eps" else ">= 0")
                raise ValueError(
                    f"CustomOptimizer: `{name}` must be {constraint}; got {value!r}. Leave it at its default."
                )
        if any(p.is_complex() for p in group["params"]):
            self.param_groups.pop()
            raise TypeError(
                "CustomOptimizer: `params` must be real; got a complex tensor. Pass torch.view_as_real of it."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there; none if one of them is not finite.

        Args:
            closure: Computes gradients anew and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        if any(p.grad.is_sparse for _, p in work):
            raise ValueError(
                "CustomOptimizer: `params` must have dense gradients; got a sparse one. Pass sparse=False."
            )
        shared: dict[str, Any] = self.state["shared"]  # type: ignore[index]
        sizes = [size.double() for size in torch._foreach_norm([p.grad for _, p in work], math.inf)]
        if sizes and not bool(torch.isfinite(torch.stack(sizes)).all()):
            shared["skipped"] += 1
            return loss
        live = []
        for (group, p), size in zip(work, sizes, strict=True):
            if self.state[p] or float(size):
                live.append((group, p, self._read(p)))
        self._adapt(shared, [slope for _, _, (_, slope) in live])
        for group, p, (gradient, _) in live:
            _move(p, self.state[p], gradient, group, shared["rate"])
        return loss

    def _read(self, p: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradient in the parameter's basis, and its slope along the last step, if there was one."""
        state = self.state[p]
        gradient = p.grad.to(torch.promote_types(p.dtype, torch.float32))  # type: ignore[union-attr]
        if not state:
            _start(p, gradient, state)
        gradient = gradient.reshape(state["mean"].shape) / state["unit"]
        turned = _turn(gradient, state)
        slope = (state["last"] * turned).sum() * state["unit"] if state["step"] else None
        state["step"] += 1
        for side in SIDES:
            if side in state:
                square = gradient @ gradient.T if side == "left" else gradient.T @ gradient
                state[side].lerp_(square, 1 - SIDE_DECAY)
        if state["step"] == 1:
            for side in SIDES:
                if side in state:
                    state[f"{side}_basis"] = torch.linalg.eigh(state[side])[1]
            turned = _turn(gradient, state)
        elif state["step"] in FIRST_STEPS or state["step"] % EVERY == 0:
            turned = _refresh(state, turned)
        return turned, slope

    def _adapt(self, shared: dict[str, Any], slopes: list[Tensor | None]) -> None:
        """Move the rate by the slope along the last step, in units of the slopes' usual size."""
        known = [slope.double() for slope in slopes if slope is not None]
        shared["step"] += 1
        slope = -float(torch.stack(known).sum()) if known else 0.0
        if slope == 0 or not math.isfinite(slope):
            return
        shared["slopes"] += 1
        shared["square"] += (1 - MEMORY) * (slope * slope - shared["square"])
        usual = math.sqrt(shared["square"] / (1 - MEMORY ** shared["slopes"]))
        gain = GAIN * (1 + HURRY / shared["slopes"])
        move = gain * max(-1.0, min(1.0, slope / usual - NEUTRAL))
        shared["rate"] = max(1 / RANGE, min(RANGE, shared["rate"] * math.exp(move)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: tensors come to the parameters' devices and keep at least float32, whatever those have."""
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, p in zip(numbers, parameters, strict=True):
            work = torch.promote_types(p.dtype, torch.float32)
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device, work, copy=True)
        self.state["shared"] = dict(state_dict["state"]["shared"])  # type: ignore[index]


def _start(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    """Fill a parameter's state: what it is, by its shape and first gradient, and empty averages."""
    largest = gradient.abs().max()
    state["step"] = 0
    state["unit"] = float(largest * (gradient / largest).square().mean().sqrt())
    matrix = p.ndim >= 2 and min(p.shape[0], p[0].numel()) > 1
    shape = (p.shape[0], -1) if matrix else p.shape
    gradient = gradient.reshape(shape)
    untouched = (gradient.flatten(1) == 0).all(1).float().mean() if p.ndim == 2 else 0.0
    state["table"] = p.ndim == 2 and p.shape[0] >= TALL * p.shape[1] and bool(untouched > UNTOUCHED)
    state["inputs"] = p[0].numel() if matrix and not state["table"] else INPUTS
    state["mean"], state["square"], state["last"] = (torch.zeros_like(gradient) for _ in range(3))
    if p.dtype.itemsize < 4:
        state["weight"] = p.to(gradient.dtype)
    if matrix and not state["table"]:
        for side, length, other in zip(SIDES, gradient.shape, reversed(gradient.shape), strict=True):
            if length <= (SIDE if length <= other else SECOND_SIDE):
                state[side] = gradient.new_zeros(length, length)
                state[f"{side}_basis"] = torch.eye(length, dtype=gradient.dtype, device=p.device)


def _turn(gradient: Tensor, state: dict[str, Any], *, back: bool = False) -> Tensor:
    """Return a matrix in the eigenbases of its sides, or back from there."""
    left, right = (state.get(f"{side}_basis") for side in SIDES)
    if left is not None:
        gradient = (left if back else left.T) @ gradient
    if right is not None:
        gradient = gradient @ (right.T if back else right)
    return gradient


def _refresh(state: dict[str, Any], turned: Tensor) -> Tensor:
    """Let the bases follow the statistics by one power step, the averages turn along; return the gradient, turned."""
    for side in SIDES:
        if side not in state:
            continue
        old = state[f"{side}_basis"]
        new = torch.linalg.qr(state[side] @ old)[0]
        if not bool(torch.isfinite(new).all()):  # the statistics overflowed
            state[side].zero_()
            continue
        state[f"{side}_basis"] = new
        turn = new.T @ old
        if side == "left":
            state["mean"], state["square"], turned = turn @ state["mean"], turn**2 @ state["square"], turn @ turned
        else:
            turn = turn.T
            state["mean"], state["square"], turned = state["mean"] @ turn, state["square"] @ turn**2, turned @ turn
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
    floor = FLOOR**2 * float(square.mean()) / correction
    root = (square / correction).add_(floor).sqrt_().add_(group["eps"])
    ahead = torch.lerp(turned, mean, first).div_(1 - first ** (state["step"] + 1))
    state["last"] = ahead.div_(root).mul_(-size)
    step = _turn(state["last"], state, back=True).reshape(p.shape)
    if "weight" not in state:
        p.mul_(1 - decay).add_(step)
        return
    weight = state["weight"]  # steps too small for the parameter's own precision add up here
    if not torch.equal(weight.to(p.dtype), p):
        weight.copy_(p)
    p.copy_(weight.mul_(1 - decay).add_(step))
