"""`CustomOptimizer`: the optimizer as a `torch.optim.Optimizer`, with validation, saving and loading of its state."""

from __future__ import annotations

import copy
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from protonet.optimizer.batches import SCALAR_ENTRIES, ParameterBatch, SliceState, list_entry_shapes
from protonet.optimizer.search import OptimizerRun
from protonet.optimizer.settings import N_SKIPPED_BEFORE_WARNING, STEP_SIZE, ParameterGroup, raise_error
from protonet.optimizer.stepper import Stepper


class CustomOptimizer(torch.optim.Optimizer):
    """Minimize a loss by gradient steps; the optimizer adapts the step size, so that no learning rate has to be tuned.

    Args:
        params: Parameters or parameter groups, dense and not sharded. Groups may have their own settings, and keys that
            this optimizer does not read. Complex parameters are updated as pairs of real numbers.
        lr: The initial learning rate of each group, >= 0, and > 0 in at least one group. Only ratios matter: between
            groups, and between the current and the initial learning rate, which a scheduler changes. The step size is
            their product with a factor that is adapted; its initial value is 0.01 for the largest ``lr``.
        betas: Decay rates in [0, 1) of the averages of the gradients and of their squares.
        weight_decay: >= 0, decoupled, of matrices alone. It is multiplied by the step size and, if that is below 0.01,
            by the square of its ratio to 0.01, so that it vanishes with the step size.
        eps: >= 0, relative to the root mean square of recent gradients.
        total_steps: >= 1, the number of steps of the training run. In the last 45 % of them the step size decreases
            nearly to 0, and it stays there. None if the number is unknown: the step size then decays by itself. A
            number replaces that of a loaded state, so that a run can be extended.
        foreach: Ignored, since parameters are always updated in batches.
        maximize: Whether to maximize the objective.
        fused: Not supported: False or None.
        capturable: Not supported: False.
        differentiable: Not supported: False.
        amsgrad: Not supported: False.
        sharded: Whether the processes of torch's default group hold different parameters of one model, as with
            ZeroRedundancyOptimizer. They then use one step size, and skip the same steps.

    Raises:
        ValueError: A setting that is out of range, or a sharded parameter; at a step, a sparse gradient.

    Source: Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam" (2024), arXiv:2409.11321, with Nesterov
        momentum, and second moments that rotate with their basis; Baydin et al., "Online learning rate adaptation
        with hypergradient descent" (2018), arXiv:1703.04782, with normalized and clipped hypergradients.
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
        amsgrad: bool = False,
        sharded: bool = False,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "foreach": foreach}
        unsupported = {"fused": fused, "capturable": capturable, "differentiable": differentiable, "amsgrad": amsgrad}
        super().__init__(params, settings | unsupported | {"maximize": maximize})
        max_lr = max(float(group["lr"]) for group in self.param_groups)
        if not max_lr:
            raise_error("lr", "be > 0 in one group at least, as the unit of later values", "0", "Use the default.")
        self.stepper = Stepper(OptimizerRun(STEP_SIZE.usual_step_size / max_lr, total_steps), sharded=sharded)
        self._saved_run: dict[str, Any] | None = None  # a copy of the entry of the first group
        self._entries: list[Any] = []  # of each parameter of the batches: itself, its group
        self._views: list[SliceState] = []  # of each parameter of the batches: its state in them; empty if it has none

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        return self.stepper.runs[0].n_skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, after validation of its settings."""
        _validate_group(self.defaults | param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.pop("run", None)  # of another optimizer
        if any(hasattr(p, "to_local") for p in group["params"]):
            self.param_groups.pop()
            raise_error("params", "be whole tensors", "a DTensor (FSDP2, tensor parallelism)", "Use AdamW or DDP.")
        group["unit_lr"] = float(group["lr"])

    def _update_batches(self) -> None:
        """Rebuild the stacked batches if parameters, groups or entries of states were replaced since the last step."""
        self._synchronize_run()
        entries = [x for group in self.param_groups for p in group["params"] for x in (p, group)]
        states = [self.state.get(p) or {} for group in self.param_groups for p in group["params"]]
        same = len(entries) == len(self._entries) and all(map(operator.is_, entries, self._entries))
        if same and all(map(_is_unchanged, states, self._views)):
            return
        self._entries, self._views, self.stepper.batches = entries, [{}] * len(states), []
        self.stepper.slices = [(_view_as_real(p), group) for p, group in self._list_parameters()]
        self.stepper.add_states(
            {
                index: _read_state(self.stepper.slices[index][0], state, "state")
                for index, state in enumerate(states)
                if not _OWN_ENTRIES.isdisjoint(state)
            }
        )
        self._set_parameter_states(self.stepper.batches)

    def _list_parameters(self) -> Iterable[tuple[Tensor, ParameterGroup]]:
        """List pairs of each parameter and its parameter group."""
        return zip(self._entries[::2], self._entries[1::2], strict=True)

    def _synchronize_run(self) -> None:
        """Load the `OptimizerRun` from the entry "run" of the first group if it was replaced, else store it there.

        torch's ZeroRedundancyOptimizer saves and loads only the states of the parameters and the entries of the groups.
        """
        group = self.param_groups[0] if self.param_groups else {}
        if group.get("run", self._saved_run) != self._saved_run:
            total_steps = self.stepper.runs[0].total_steps
            run = OptimizerRun(**group["run"])
            run.total_steps = run.total_steps if total_steps is None else total_steps
            self.stepper, self._entries = Stepper(run, sharded=self.stepper.sharded), []
        # A copy, to notice at the next step that the entry was replaced.
        self._saved_run = {**vars(self.stepper.runs[0])}
        group["run"] = {**self._saved_run}

    def _set_parameter_states(self, batches: Iterable[ParameterBatch]) -> None:
        """Set the state of each parameter, which users see, to views of the stacked tensors of the batches.

        Entries that users have added remain.
        """
        for batch in batches:
            for index, state in zip(batch.slice_ids, batch.states, strict=True):
                self._views[index] = state
                self.state[self._entries[2 * index]].update(state)

    # A compiled function calls it as it is: a step depends on the values of gradients. torch's public name for this
    # would import the compiler with this module.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; skip the step if the norm of a gradient is not finite.

        Args:
            closure: A function that recomputes the gradients and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._update_batches()
        gradients = dict[int, Tensor]()
        for index, (p, group) in enumerate(self._list_parameters()):
            if p.grad is None or not p.numel():
                continue
            if p.grad.is_sparse:
                raise_error("params", "have dense gradients", "a sparse one", "Densify it.")
            gradient = p.grad
            if p.is_complex():
                gradient = _view_as_real(gradient).reshape(self.stepper.slices[index][0].shape)
            gradients[index] = -gradient if group["maximize"] else gradient
        known, skipped = {id(batch): batch for batch in self.stepper.batches}, self.skipped
        self.stepper.step(gradients)
        self._synchronize_run()
        if new := [batch for batch in self.stepper.batches if id(batch) not in known]:
            self._set_parameter_states(new)
        if skipped < self.skipped == N_SKIPPED_BEFORE_WARNING and not self.stepper.runs[0].steps:
            text = f"CustomOptimizer: the first {self.skipped} steps were skipped; gradients are not finite"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to be copied or pickled."""
        self._synchronize_run()
        return {**super().__getstate__(), "sharded": self.stepper.sharded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a copy or pickle; torch also calls this method in `load_state_dict`."""
        state = dict(state)
        if "sharded" in state:  # a copy
            self.stepper, self._saved_run = Stepper(OptimizerRun(1.0), sharded=state.pop("sharded")), None
        self._entries = []
        super().__setstate__(state)
        for group in self.param_groups:  # of a checkpoint that lacks settings
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._synchronize_run()

    def state_dict(self) -> dict[str, Any]:
        """Copy the states of the parameters, and the step size state as the entry "run" of the first group."""
        self._synchronize_run()
        with self.register_state_dict_post_hook(_copy_states, prepend=True):  # before the users' hooks
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`; tensors are copied to the devices of the parameters and keep their precision.

        Raises:
            ValueError: The state is of another optimizer, an older version, or parameters of other shapes.
        """
        states = dict[Tensor, dict[str, Any]]()
        restore = functools.partial(_restore_states, states=states)
        # Users' hooks see and change the real state: the first of these two runs after theirs, the second one before.
        # In between, torch casts the state to the types of the parameters, which would lose precision.
        with (
            self.register_load_state_dict_pre_hook(functools.partial(_check_state_dict, states=states)),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ):
            super().load_state_dict(state_dict)


def _copy_states(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace the states in the result of `state_dict` by copies, which later steps do not change."""
    state_dict["state"] = {
        key: {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        if isinstance(state, dict)
        else state
        for key, state in state_dict["state"].items()
    }


def _check_state_dict(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], *, states: dict[Tensor, dict[str, Any]]
) -> None:
    """Raise a ValueError if a state is not of this optimizer; else put a copy of each parameter's state in ``states``.

    Tensors keep their precision, and are copied to the device of their parameter.
    """
    groups = state_dict["param_groups"]
    run = groups[0].get("run") if groups else None
    if not isinstance(run, dict) or run.keys() != {field.name for field in fields(OptimizerRun)}:
        _raise_foreign_state("state_dict")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in zip([index for group in groups for index in group["params"]], parameters, strict=False):
        if state := state_dict["state"].get(index):
            states[p] = {
                name: value.detach().to(p.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in state.items()
            }
            if not _OWN_ENTRIES.isdisjoint(state):
                states[p] |= _read_state(_view_as_real(p), states[p], "state_dict")


def _restore_states(optimizer: torch.optim.Optimizer, *, states: dict[Tensor, dict[str, Any]]) -> None:
    """Replace the loaded states of parameters by ``states``."""
    optimizer.state.update(states)


def _validate_group(group: ParameterGroup) -> None:
    """Raise a ValueError if a setting of a parameter group is not supported or out of range."""
    on_host = "Each step reads numbers on the host, without autograd."
    unsupported = dict.fromkeys(("fused", "capturable", "differentiable"), on_host)
    unsupported["amsgrad"] = "The second moments rotate with their basis, so that a maximum over steps has no meaning."
    for name, reason in unsupported.items():
        if group.get(name):
            raise_error(name, "be off", repr(group[name]), reason)
    betas = group["betas"] if isinstance(group["betas"], (tuple, list)) else ()
    if len(betas) != 2:
        raise_error("betas", "be two numbers", repr(group["betas"]), "Use the default.")
    values = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    for name, value in (values | {"betas[0]": betas[0], "betas[1]": betas[1]}).items():
        upper = 1.0 if name.startswith("betas") else math.inf
        numeric = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
        if not numeric or isinstance(value, bool) or not 0 <= float(value) < upper:
            raise_error(name, f"be in [0, {upper:g})", repr(value), "Use the default.")


#: Entries of each state that are the optimizer's own; users may add others.
_OWN_ENTRIES = list_entry_shapes(1, 1, embedding=False).keys()


def _is_unchanged(state: dict[str, Any], views: SliceState) -> bool:
    """Test whether a parameter's state holds the views of the batches; without views, none of their entries."""
    if not views:
        return not state or _OWN_ENTRIES.isdisjoint(state)
    return all(map(operator.is_, map(state.get, views), views.values()))


def _read_state(p: Tensor, state: dict[str, Any], argument: str) -> SliceState:
    """Read the optimizer's own entries of the state of a parameter ``p``: tensors of one type, on its device.

    Raises:
        ValueError: An entry is missing or does not fit the parameter; the message names the ``argument``.
    """
    rows = max(1, p.shape[0]) if p.ndim > 1 else 1
    shapes = list_entry_shapes(rows, p.numel() // rows, embedding=bool(state.get("embedding")))
    if not shapes.keys() <= state.keys():
        _raise_foreign_state(argument)
    tensors = {name: torch.as_tensor(state[name]).detach() for name in shapes}
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            got = f"{name} {tuple(tensors[name].shape)} for a parameter {tuple(p.shape)}"
            raise_error(argument, "have the parameters' shapes", got, "Load that of the same model.")
    numbers = {name: tensors.pop(name).to("cpu", torch.float64) for name in SCALAR_ENTRIES}
    numbers["embedding"] = tensors.pop("embedding").to("cpu", torch.bool)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.float32)
    return numbers | {name: tensor.to(p.device, dtype) for name, tensor in tensors.items()}


def _raise_foreign_state(argument: str) -> NoReturn:
    raise_error(argument, "be of this optimizer", "one of another, or of an older version", "Start without it.")


def _view_as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as a real one, with real and imaginary parts along its last axis."""
    if not tensor.is_complex():
        return tensor
    pairs = torch.view_as_real(tensor)
    return pairs.flatten(-2) if tensor.ndim and tensor.is_contiguous() else pairs
