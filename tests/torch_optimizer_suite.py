"""The checks that torch makes of each of its optimizers, made of `CustomOptimizer`: run this file as a program.

It is a program of its own because torch's test library changes global settings: it forbids to set torch's flags, and
loads another profile of hypothesis. `OptimizerInfo`, the configurations, the errors and the comparison of runs come
from the installed torch. The checks themselves exist only in test files that torch does not install. They are written
anew here, under torch's names. Left out, with the reason:

- ``test_fused_*``, ``test_capturable_*``, ``test_*differentiable*``, ``test_*cuda_graphs``, ``test_grad_scaling_*``:
  these options are errors (`ERRORS` has them), since each step reads numbers on the host, without autograd.
- ``test_rosenbrock_sparse``: sparse gradients are errors; the function itself is minimized below.
- ``test_complex_2d``: one complex parameter against two real ones. Outliers and small second moments are judged by the
  root mean square of a whole parameter, so that a parameter is not the sum of its parts. ``test_complex`` holds.
- ``test_foreach_large_tensor``, ``test_peak_memory_foreach``, ``test_*_multigpu``, ``test_*cuda_params``: need a GPU.
- ``test_defaults_changed_to_foreach``: there is one implementation, whatever ``foreach`` is.
- "Tensor lr must be 1-element" among the errors of all optimizers: the error is raised, with this optimizer's text.
- ``test_lbfgs_*``, ``test_*adagrad*``, ``test_muon_*``, ``test_*closure_required``: of single optimizers.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.testing._internal import common_optimizers
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, run_tests

from protonet.optimizer import CustomOptimizer

library: Any = common_optimizers  # whose annotations do not hold
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "learning rate": {"lr": 0.03},
    "no weight decay": {"weight_decay": 0.0},
    "weight decay": {"weight_decay": 0.9},
    "maximize": {"maximize": True},
    "betas and eps": {"betas": (0.5, 0.9), "eps": 1e-3},
    "horizon": {"total_steps": 500},
    "tensor as learning rate": {"lr": torch.tensor(0.01)},
    "tensors as betas": {"betas": (torch.tensor([[[0.9]]]), torch.tensor(0.98))},
}
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "`lr` must be in"),
    ({"betas": (1.0, 0.0)}, r"`betas\[0\]` must be in \[0, 1\)"),
    ({"betas": (0.0, 1.0)}, r"`betas\[1\]` must be in \[0, 1\)"),
    ({"eps": -1.0}, "`eps` must be in"),
    ({"weight_decay": -1}, "`weight_decay` must be in"),
    ({"lr": torch.tensor([0.001, 0.001])}, "`lr` must be in"),
    *(({name: True}, f"`{name}` must be off") for name in ("fused", "capturable", "differentiable", "amsgrad")),
]


def list_inputs(device: str, dtype: torch.dtype | None = None) -> list[Any]:
    return [library.OptimizerInput(None, copy.deepcopy(settings), name) for name, settings in CONFIGURATIONS.items()]


def list_error_inputs(device: str, dtype: torch.dtype) -> list[Any]:
    """List torch's errors of all optimizers, but that for a learning rate of two elements, whose text is its own."""
    own = [
        library.ErrorOptimizerInput(
            library.OptimizerInput(None, settings, text), error_type=ValueError, error_regex=text
        )
        for settings, text in ERRORS
    ]
    sparse = Parameter(torch.ones(2, 2, device=device, dtype=dtype))
    sparse.grad = torch.ones_like(sparse).to_sparse()
    step_error = library.ErrorOptimizerInput(
        library.OptimizerInput([sparse], {}, "sparse gradient"),
        error_on=library.OptimizerErrorEnum.STEP_ERROR,
        error_type=ValueError,
        error_regex="must have dense gradients",
    )
    general = [e for e in library.get_error_inputs_for_all_optims(device, dtype) if "1-element" not in e.error_regex]
    return [*general, *own, step_error]


def list_all_inputs(device: str, dtype: torch.dtype, info: Any) -> list[Any]:
    """List the configurations; where torch has such kernels, on GPUs, also with ``foreach`` of True and of False."""
    inputs: list[Any] = library._get_optim_inputs_including_global_cliquey_kwargs(device, dtype, info)
    assert len(inputs) >= len(CONFIGURATIONS)
    return inputs


INFO = library.OptimizerInfo(
    CustomOptimizer,
    optim_inputs_func=list_inputs,
    optim_error_inputs_func=list_error_inputs,
    scheduler_inputs=next(info.scheduler_inputs for info in library.optim_db if info.optim_cls is AdamW),
    supported_impls=("foreach",),
    not_og_supported_flags=("foreach", "maximize", "fused", "capturable", "differentiable", "amsgrad"),
    has_capturable_arg=False,
    supports_complex=True,
)
library.optim_db.append(INFO)
Closure = Callable[[], Tensor]
Check = TypeVar("Check", bound=Callable[..., None])
for_each_dtype: Callable[[Check], Check] = library.optims([INFO], dtypes=[torch.float32, torch.float64])
once: Callable[[Check], Check] = library.optims([INFO], dtypes=[torch.float32])
of_complex: Callable[[Check], Check] = library.optims([INFO], dtypes=[torch.complex64])


def make_problem(device: str, dtype: torch.dtype, *, strided: bool = False) -> tuple[list[Parameter], Tensor]:
    """Make a weight (10, 5) and a bias (10,), every second element of a tensor if ``strided``, and an input (5,)."""
    draw = functools.partial(torch.randn, device=device, dtype=dtype)
    shapes = [(10, 5), (10,)]
    return [Parameter(draw((*s, 2))[..., 0] if strided else draw(s)) for s in shapes], draw(5)


def make_closure(optimizer: Any, parameters: list[Parameter], x: Tensor) -> Closure:
    weight, bias = parameters

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight.mv(x.to(weight.dtype)) + bias.to(weight.dtype)).pow(2).sum()
        loss.backward()
        return loss

    return closure


def schedule(schedulers: list[Any], loss: Tensor) -> None:
    for scheduler in schedulers:
        scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))


class TestCustomOptimizer(TestCase):
    """Each check gets a device, a type of parameters and the optimizer's `OptimizerInfo`."""

    def compare(self, actual: object, expected: object) -> None:
        """Compare tensors, and containers that may hold other values beside them, as torch's tests do."""
        equal = self.assertEqual  # a name by which the linter does not take it for unittest's
        equal(actual, expected)

    def make_trained(
        self, device: str, dtype: torch.dtype, info: Any, settings: dict[str, Any], steps: int = 6
    ) -> tuple[list[Parameter], Any, Closure]:
        parameters, x = make_problem(device, dtype)
        optimizer = info.optim_cls(parameters, **copy.deepcopy(settings))
        closure = make_closure(optimizer, parameters, x)
        for _ in range(steps):
            optimizer.step(closure)
        return parameters, optimizer, closure

    @once
    def test_infos_do_not_specify_global_cliquey_kwargs(
        self, device: str, dtype: torch.dtype, optim_info: library.OptimizerInfo
    ) -> None:
        for each in optim_info.optim_inputs_func(device):
            assert not {"foreach", "fused", "differentiable"} & each.kwargs.keys()

    @for_each_dtype
    def test_errors(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for error in optim_info.optim_error_inputs_func(device, dtype):
            given = error.optimizer_error_input
            params = [Parameter(torch.randn(1, device=device, dtype=dtype))] if given.params is None else given.params
            if error.error_on == library.OptimizerErrorEnum.STEP_ERROR:
                with pytest.raises(error.error_type, match=error.error_regex):
                    optim_info.optim_cls(params, **given.kwargs).step()
            elif error.error_type is UserWarning:
                with pytest.warns(error.error_type, match=error.error_regex):
                    optim_info.optim_cls(params, **given.kwargs)
            else:
                with pytest.raises(error.error_type, match=error.error_regex):
                    optim_info.optim_cls(params, **given.kwargs)

    @once
    def test_optimizer_can_be_printed(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            optimizer = self.make_trained(device, dtype, optim_info, each.kwargs)[1]
            assert "CustomOptimizer" in repr(optimizer)

    @for_each_dtype
    def test_forloop_goes_right_direction(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """With each configuration, without and with each list of schedulers, of whole and of strided parameters."""
        lists = [(), *optim_info.scheduler_inputs]
        for each, makers, strided in itertools.product(
            list_all_inputs(device, dtype, optim_info), lists, (False, True)
        ):
            parameters, x = make_problem(device, dtype, strided=strided)
            optimizer = optim_info.optim_cls(parameters, **copy.deepcopy(each.kwargs))
            closure = make_closure(optimizer, parameters, x)
            schedulers = [make(optimizer) for make in makers]
            first = closure()
            for _ in range(12):
                schedule(schedulers, optimizer.step(closure))
            assert (closure() > first) if each.kwargs.get("maximize") else (closure() < first), each

    @once
    def test_param_group_with_lrscheduler_goes_right_direction(
        self, device: str, dtype: torch.dtype, optim_info: library.OptimizerInfo
    ) -> None:
        for makers in optim_info.scheduler_inputs:
            parameters, x = make_problem(device, dtype)
            groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.01}]
            optimizer = optim_info.optim_cls(groups)
            closure = make_closure(optimizer, parameters, x)
            schedulers = [make(optimizer) for make in makers]
            first = closure()
            for _ in range(20):
                schedule(schedulers, optimizer.step(closure))
            assert closure() < first

    @for_each_dtype
    def test_tensor_lr(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """It equals a number, with and without a schedule; without one it is not written to."""
        makers: list[list[Callable[[Any], Any]]] = [[], [lambda each: StepLR(each, gamma=0.5, step_size=3)]]
        for shape, chosen in itertools.product([(), (1,), (1, 1)], makers):
            problems = [make_problem(device, dtype) for _ in range(2)]
            for p, q in zip(*(parameters for parameters, _ in problems), strict=True):
                q.data.copy_(p.data)
            rates = [0.02, torch.full(shape, 0.02, dtype=torch.float64)]
            optimizers = [optim_info.optim_cls(each[0], lr=lr) for each, lr in zip(problems, rates, strict=True)]
            schedulers = [[make(optimizer) for make in chosen] for optimizer in optimizers]
            for _ in range(8):
                for optimizer, (parameters, _), own in zip(optimizers, problems, schedulers, strict=True):
                    optimizer.step(make_closure(optimizer, parameters, problems[0][1]))
                    schedule(own, torch.ones(()))
            for p, q in zip(*(parameters for parameters, _ in problems), strict=True):
                self.compare(p, q)
            if not chosen:
                self.compare(rates[1], torch.full(shape, 0.02, dtype=torch.float64))

    @for_each_dtype
    def test_foreach_matches_forloop(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in optim_info.optim_inputs_func(device):
            tracker = library.TensorTracker()
            start, x = make_problem(device, dtype)
            for foreach in (False, True, None):
                parameters = copy.deepcopy(start)
                optimizer = optim_info.optim_cls(parameters, foreach=foreach, **copy.deepcopy(each.kwargs))
                for _ in range(7):
                    optimizer.step(make_closure(optimizer, parameters, x))
                    for p in parameters:
                        tensors = [p, *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq"))]
                        for tensor in tensors:
                            if foreach is None:
                                tracker.pop_check_set(tensor, self)
                            elif foreach:
                                tracker.add(tensor)
            assert tracker.all_popped()

    @for_each_dtype
    def test_step_is_noop_when_params_have_no_grad(
        self, device: str, dtype: torch.dtype, optim_info: library.OptimizerInfo
    ) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            parameters = [Parameter(torch.randn(2, 3, device=device, dtype=dtype)) for _ in range(2)]
            before = copy.deepcopy(parameters)
            optimizer = optim_info.optim_cls(parameters, **each.kwargs)
            optimizer.step()
            self.compare(parameters, before)

    @for_each_dtype
    def test_step_is_noop_for_zero_grads(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            p = Parameter(torch.randn(3, 2, device=device, dtype=dtype))
            before = p.detach().clone()
            optimizer = optim_info.optim_cls([p], **(each.kwargs | {"weight_decay": 0.0}))
            p.grad = torch.zeros_like(p)
            for _ in range(3):
                optimizer.step()
            self.compare(p, before)

    @once
    def test_rosenbrock_by_coordinates(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """Steps along one coordinate at a time, which torch makes of sparse gradients."""
        p = Parameter(torch.tensor([1.5, 1.5], device=device, dtype=dtype))
        optimizer = optim_info.optim_cls([p])
        for step in range(400):
            optimizer.zero_grad()
            ((1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2).backward()
            assert p.grad is not None
            p.grad[1 - step % 2] = 0
            optimizer.step()
        assert p.detach().cpu().dist(torch.ones(2)) < 0.7

    @of_complex
    def test_complex(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            p = Parameter(torch.randn(10, 5, device=device, dtype=dtype))
            q = Parameter(torch.view_as_real(p).detach().clone())
            optimizers = [optim_info.optim_cls([w], **copy.deepcopy(each.kwargs)) for w in (p, q)]
            for _ in range(4):
                p.grad = torch.randn_like(p)
                q.grad = torch.view_as_real(p.grad).clone()
                for optimizer in optimizers:
                    optimizer.step()
                self.compare(torch.view_as_real(p), q)

    @once
    def test_mixed_device_dtype(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
            parameters = [Parameter(torch.ones(2, 3, device=device, dtype=kind)) for kind in kinds * 2]
            optimizer = optim_info.optim_cls(parameters, **(each.kwargs | {"weight_decay": 0.0}))
            for _ in range(3):
                for p in parameters:
                    p.grad = p.detach().clone()
                optimizer.step()
            for p, kind in zip(parameters, kinds * 2, strict=True):
                assert p.dtype == kind
                assert (p.mean() > 1) == each.kwargs.get("maximize", False)  # single elements round in bfloat16

    @for_each_dtype
    def test_param_groups_weight_decay(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """The decay of a group takes effect, on matrices, and the loss falls."""
        ends = []
        for decay in (0.0, 0.9):
            torch.manual_seed(0)
            parameters, x = make_problem(device, dtype)
            groups = [{"params": [parameters[0]], "weight_decay": decay}, {"params": [parameters[1]]}]
            optimizer = optim_info.optim_cls(groups, weight_decay=0.0)
            closure = make_closure(optimizer, parameters, x)
            first = closure()
            for _ in range(10):
                optimizer.step(closure)
            assert closure() < first
            ends.append(parameters)
        assert not torch.equal(ends[0][0], ends[1][0])

    @for_each_dtype
    def test_param_groups_lr(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for settings in ({"lr": 0.001}, {}, {"lr": 0.01}):
            parameters, x = make_problem(device, dtype)
            idle = Parameter(torch.randn(2, device=device, dtype=dtype))
            before = idle.detach().clone()
            groups = [{"params": [parameters[0], idle], "lr": 0.002}, {"params": [parameters[1]]}]
            optimizer = optim_info.optim_cls(groups, **settings)
            closure = make_closure(optimizer, parameters, x)
            first = closure()
            for _ in range(20):
                optimizer.step(closure)
            assert closure() < first
            self.compare(idle, before)

    @for_each_dtype
    def test_load_nontensor_step(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            parameters, optimizer, closure = self.make_trained(device, dtype, optim_info, each.kwargs)
            saved = optimizer.state_dict()
            start = copy.deepcopy(parameters)
            optimizer.step(closure)
            expected = copy.deepcopy(parameters)
            for p, q in zip(parameters, start, strict=True):
                p.data.copy_(q.data)
            for state in saved["state"].values():
                state["step"] = state["step"].item()
            optimizer.load_state_dict(saved)
            optimizer.step(closure)
            self.compare(parameters, expected)

    @for_each_dtype
    def test_state_dict_deterministic(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            torch.manual_seed(1)
            parameters, optimizer, closure = self.make_trained(device, dtype, optim_info, each.kwargs)
            torch.manual_seed(1)
            x = make_problem(device, dtype)[1]
            others = copy.deepcopy(parameters)
            fresh = optim_info.optim_cls(others, **copy.deepcopy(each.kwargs))
            saved = copy.deepcopy(optimizer.state_dict())
            kept = copy.deepcopy(saved)
            fresh.load_state_dict(saved)
            for _ in range(6):
                optimizer.step(closure)
                fresh.step(make_closure(fresh, others, x))
                for p, q in zip(parameters, others, strict=True):
                    assert torch.equal(p, q), each
            self.compare(saved, kept)  # neither the load nor the steps change it
            self.compare(optimizer.state_dict(), fresh.state_dict())
            fresh.param_groups.extend(fresh.param_groups)  # repeated parameters keep their indices
            self.compare(optimizer.state_dict()["param_groups"][-1], fresh.state_dict()["param_groups"][-1])

    @once
    def test_can_load_older_state_dict(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """Checkpoints may lack the settings that came later."""
        for each, flag in itertools.product(
            list_all_inputs(device, dtype, optim_info), optim_info.not_og_supported_flags
        ):
            _, optimizer, closure = self.make_trained(device, dtype, optim_info, each.kwargs)
            saved = optimizer.state_dict()
            for group in saved["param_groups"]:
                del group[flag]
            optimizer.load_state_dict(saved)
            optimizer.step(closure)
            self.compare(optimizer.param_groups[0][flag], optimizer.defaults[flag])

    @once
    def test_can_load_from_to_named_state_dict(
        self, device: str, dtype: torch.dtype, optim_info: library.OptimizerInfo
    ) -> None:
        for named, other_named in itertools.product((False, True), repeat=2):
            model, other = Linear(4, 3, device=device, dtype=dtype), Linear(4, 3, device=device, dtype=dtype)
            x = torch.randn(5, 4, device=device, dtype=dtype)

            def train(model: Linear, optimizer: Any, x: Tensor = x) -> None:
                for _ in range(3):
                    optimizer.zero_grad()
                    model(x).square().sum().backward()
                    optimizer.step()

            optimizer = optim_info.optim_cls(model.named_parameters() if named else model.parameters())
            train(model, optimizer)
            fresh = optim_info.optim_cls(other.named_parameters() if other_named else other.parameters())
            other.load_state_dict(model.state_dict())
            fresh.load_state_dict(optimizer.state_dict())
            names = fresh.param_groups[0].get("param_names")
            self.compare(names, ["weight", "bias"] if named or other_named else None)
            train(model, optimizer)
            train(other, fresh)
            self.compare(model.state_dict(), other.state_dict())

    @once
    def test_save_load_equality_with_weights_only(
        self, device: str, dtype: torch.dtype, optim_info: library.OptimizerInfo
    ) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            _, optimizer, _ = self.make_trained(device, dtype, optim_info, each.kwargs)
            saved = optimizer.state_dict()
            buffer = io.BytesIO()
            torch.save(saved, buffer)
            buffer.seek(0)
            self.compare(torch.load(buffer, weights_only=True), saved)

    @once
    def test_step_hooks(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """Hooks of one optimizer and of all run in torch's order, with the arguments, until they are removed."""
        _, optimizer, closure = self.make_trained(device, dtype, optim_info, {})
        calls: list[str] = []

        def note(name: str, optimizer: Any, args: Any, kwargs: Any) -> None:
            self.compare((len(args), kwargs), (2, {}))
            calls.append(name)

        def replace(optimizer: Any, args: Any, kwargs: Any) -> Any:
            return (optimizer, None), {}

        handles = [
            register_optimizer_step_pre_hook(functools.partial(note, "all before")),
            register_optimizer_step_post_hook(functools.partial(note, "all after")),
            optimizer.register_step_pre_hook(functools.partial(note, "before")),
            optimizer.register_step_post_hook(functools.partial(note, "after")),
        ]
        optimizer.step(closure)
        self.compare(calls, ["all before", "before", "after", "all after"])
        with optimizer.register_step_pre_hook(replace):
            assert optimizer.step(closure) is None
        for handle in handles:
            handle.remove()
        optimizer.step(closure)
        self.compare(len(calls), 8)

    @once
    def test_state_dict_hooks(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        _, optimizer, closure = self.make_trained(device, dtype, optim_info, {})

        def before(optimizer: Any) -> None:
            optimizer.state["test"] = 1

        def after(optimizer: Any, state_dict: dict[str, Any]) -> None:
            if "test" in state_dict["state"]:
                state_dict["state"].pop("test")
                state_dict["ran_pre_hook"] = True

        def replace(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {"inner": state_dict}

        optimizer.register_state_dict_pre_hook(before)
        optimizer.register_state_dict_post_hook(after)
        saved = optimizer.state_dict()
        assert saved["ran_pre_hook"]
        assert "test" not in saved["state"]
        self.compare(optimizer.state["test"], 1)
        optimizer.step(closure)
        optimizer.load_state_dict(saved)
        optimizer.register_state_dict_post_hook(replace)
        self.compare(list(optimizer.state_dict()), ["inner"])

    @once
    def test_load_state_dict_hooks_and_prepend(
        self, device: str, dtype: torch.dtype, optim_info: library.OptimizerInfo
    ) -> None:
        for prepend in (False, True):
            _, optimizer, closure = self.make_trained(device, dtype, optim_info, {})

            def set_lr(lr: float, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
                state_dict = copy.deepcopy(state_dict)
                state_dict["param_groups"][0]["lr"] = lr
                return state_dict

            def note(name: str, optimizer: Any) -> None:
                optimizer.state[name] = len(optimizer.state)

            optimizer.register_load_state_dict_pre_hook(functools.partial(set_lr, 0.002))
            optimizer.register_load_state_dict_pre_hook(functools.partial(set_lr, 0.003), prepend=prepend)
            optimizer.register_load_state_dict_post_hook(functools.partial(note, "first"))
            optimizer.register_load_state_dict_post_hook(functools.partial(note, "second"), prepend=prepend)
            optimizer.load_state_dict(optimizer.state_dict())
            self.compare(optimizer.param_groups[0]["lr"], 0.002 if prepend else 0.003)
            order = [optimizer.state[name] for name in ("first", "second")]
            self.compare(order, [3, 2] if prepend else [2, 3])
            optimizer.step(closure)

    @once
    def test_deepcopy_copies_all_public_attrs(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            _, optimizer, _ = self.make_trained(device, dtype, optim_info, each.kwargs)
            names, copied = (
                {name for name in vars(one) if not name.startswith("_")}
                for one in (optimizer, copy.deepcopy(optimizer))
            )
            self.compare(names, copied)

    @once
    def test_non_empty_state(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for each in list_all_inputs(device, dtype, optim_info):
            parameters, optimizer, _ = self.make_trained(device, dtype, optim_info, each.kwargs, steps=1)
            self.compare(len(optimizer.state), 2)
            for p in parameters:
                assert len(optimizer.state[p]) > 0

    @once
    def test_set_default_dtype_works(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        usual, ends = torch.get_default_dtype(), []
        for default in (usual, torch.float64):
            torch.manual_seed(0)
            parameters, x = make_problem(device, dtype)
            try:
                torch.set_default_dtype(default)
                optimizer = optim_info.optim_cls(parameters)
                for _ in range(6):
                    optimizer.step(make_closure(optimizer, parameters, x))
            finally:
                torch.set_default_dtype(usual)
            ends.append(parameters)
        self.compare(*ends)

    @once
    def test_correctness_compiled(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """As in torch's tests of compiled optimizers: the compiled step is the step."""
        for each in list_all_inputs(device, dtype, optim_info):
            start, x = make_problem(device, dtype)
            ends = []
            for compiled in (False, True):
                parameters = copy.deepcopy(start)
                optimizer = optim_info.optim_cls(parameters, **copy.deepcopy(each.kwargs))
                step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
                for _ in range(4):
                    make_closure(optimizer, parameters, x)()
                    step()
                ends.append(parameters)
            for p, q in zip(*ends, strict=True):
                assert torch.equal(p, q), each

    @once
    def test_swa(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """Averages of weights, with the schedules of torch's guide to them."""
        model = Linear(4, 3, device=device, dtype=dtype)
        optimizer = optim_info.optim_cls(model.parameters())
        average = AveragedModel(model)
        schedulers = [LinearLR(optimizer, total_iters=4), SWALR(optimizer, swa_lr=0.005, anneal_epochs=3)]
        x = torch.randn(8, 4, device=device, dtype=dtype)
        first = model(x).square().sum().detach()
        ends = []
        for step in range(12):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            schedulers[step >= 4].step()
            if step >= 4:
                average.update_parameters(model)
                ends.append(model.weight.detach().clone())
        self.compare(average.module.weight, torch.stack(ends).mean(0))
        assert average(x).square().sum() < first


instantiate_device_type_tests(TestCustomOptimizer, globals(), only_for=("cpu", "cuda"))

if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step", category=UserWarning)
    run_tests()
