"""The optimizer as a piece of mathematics: any shape and dtype, errors, bad gradients, scale, its own step size."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protonet.optimizer import CustomOptimizer, StackOptimizer
from protonet.optimizer.search import OptimizerRun
from protonet.optimizer.settings import STEP_SIZE_SEARCH
from tests.optimizer_cases import distance, loss_on, make_model, same, train, trained, weights

SHAPES: list[tuple[int, ...]] = [
    (), (1,), (7,), (1, 1), (1, 9), (9, 1), (6, 4), (400, 3), (50_000, 16), (3, 4, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)
]  # fmt: skip
EMPTY: list[tuple[int, ...]] = [(0,), (0, 4), (4, 0), (2, 0, 3)]


def draw(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def descend(p: nn.Parameter, steps: int) -> float:
    """Return the share of the squared distance to a fixed target that is left after some steps."""
    target = draw(tuple(p.shape), 1).to(p.dtype)
    optimizer = CustomOptimizer([p])
    before = float((p.detach() - target).double().square().sum())
    for _ in range(steps):
        p.grad = (p.detach() - target).clone()
        optimizer.step()
    return float((p.detach() - target).double().square().sum()) / before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_shape_nears_its_minimum_with_a_precise_state(dtype: torch.dtype) -> None:
    for shape in SHAPES if dtype == torch.float32 else SHAPES[:8:3]:
        p = nn.Parameter(draw(shape).to(dtype))
        optimizer = CustomOptimizer([p])
        p.grad = torch.ones_like(p)
        optimizer.step()
        state = [item for item in optimizer.state_dict()["state"][0].values() if isinstance(item, Tensor)]
        assert not {torch.bfloat16, torch.float16} & {item.dtype for item in state}, shape
        assert descend(p, 10 if math.prod(shape) > 10**5 else 40) < 0.97, shape
        assert p.dtype == dtype


def test_no_gradient_to_speak_of_is_harmless() -> None:
    """Empty parameters, and gradients that are zero always, or at first."""
    for shape in [*EMPTY, (5, 3)]:
        still, late = nn.Parameter(draw(shape)), nn.Parameter(torch.ones(3, 2))
        optimizer = CustomOptimizer([still, late])
        for step in range(6):
            still.grad, late.grad = torch.zeros(shape), torch.full((3, 2), float(step > 2))
            optimizer.step()
        assert still.shape == shape
        assert bool(still.isfinite().all())
        assert bool((late < 1).all())


def test_memory_layouts_change_nothing() -> None:
    """Transposed parameters, gradients that are transposed or expanded, and channels_last."""
    grads = [draw((6, 4), 1), draw((4, 6), 2).t(), draw((6, 1), 3).expand(6, 4)]
    kernel = draw((4, 3, 2, 2))
    plain, strided = (
        [nn.Parameter(draw((6, 4)).contiguous()), nn.Parameter(kernel.clone())],
        [nn.Parameter(draw((6, 4)).t().contiguous().t()), nn.Parameter(kernel.to(memory_format=torch.channels_last))],
    )
    for ps, layout in ((plain, torch.contiguous_format), (strided, torch.channels_last)):
        optimizer = CustomOptimizer(ps)
        for grad in grads:
            ps[0].grad = grad.contiguous() if ps is plain else grad
            ps[1].grad = draw((4, 3, 2, 2), 5).contiguous(memory_format=layout)
            optimizer.step()
    assert not strided[0].is_contiguous()
    for p, q in zip(plain, strided, strict=True):
        torch.testing.assert_close(p, q)


def test_gradients_and_settings_are_not_written_to() -> None:
    model = make_model()
    optimizer = CustomOptimizer(model.parameters())
    loss_on(model, 0).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True) if p.grad is not None)
    settings = {name: optimizer.param_groups[0][name] for name in optimizer.defaults}
    assert settings == optimizer.defaults


def test_sparse_gradients_are_errors_before_anything_moves() -> None:
    first, last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))
    first.grad, last.grad = torch.ones(3), torch.ones(3, 2).to_sparse()
    optimizer = CustomOptimizer([first, last])
    with pytest.raises(ValueError, match=r"^CustomOptimizer: `.*` must .*; got .*sparse.*\. \S.*$"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))


def test_the_anneal_is_a_line_to_the_last_step() -> None:
    """Against interpolation between the places where the line bends."""
    last = STEP_SIZE_SEARCH.final_fraction / STEP_SIZE_SEARCH.anneal_fraction
    for total in (1, 7, 10, 400):
        bends = [(1 - STEP_SIZE_SEARCH.anneal_fraction) * total, (1 - STEP_SIZE_SEARCH.final_fraction) * total]
        factors = [OptimizerRun(1.0, total).anneal(steps) for steps in range(total + 3)]
        np.testing.assert_allclose(factors, np.interp(range(total + 3), bends, [1, last]))
    assert [OptimizerRun(1.0).anneal(steps) for steps in (0, 10**9)] == [1, 1]


def test_total_steps_change_only_the_end_of_a_run() -> None:
    total, ends = 50, []
    for total_steps in (None, total):
        model = make_model()
        optimizer = CustomOptimizer(model.parameters(), total_steps=total_steps)
        first = weights(train(model, optimizer, 20))
        last = weights(train(model, optimizer, total - 20, first=20))
        train(model, optimizer, 5, first=total)
        ends.append((first, last, weights(model)))
    assert all(torch.equal(p, q) for p, q in zip(ends[0][0], ends[1][0], strict=True))
    after = [math.dist(nn.utils.parameters_to_vector(a), nn.utils.parameters_to_vector(b)) for _, a, b in ends]
    assert after[1] < 0.05 * after[0]


@pytest.mark.parametrize(("factor", "shape"), [(0.01, (16,)), (1.0, (4, 4)), (100.0, (4, 4))])
def test_an_ill_conditioned_quadratic_converges_from_any_rate(factor: float, shape: tuple[int, ...]) -> None:
    """Condition number 1e4, axes rotated at random."""
    axes = torch.linalg.qr(draw((16, 16), 3))[0]
    hessian = axes @ torch.diag(torch.logspace(-4, 0, 16)) @ axes.T  # (16, 16)
    p, target = nn.Parameter(torch.zeros(shape)), draw(shape, 4)
    optimizer = CustomOptimizer([p])
    optimizer.param_groups[0]["lr"] *= factor
    losses = []
    for _ in range(400):
        gap = (p - target).flatten()
        loss = 0.5 * gap @ hessian @ gap
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert math.isfinite(max(losses))
    assert losses[-1] < 0.01 * losses[0]


def test_runs_repeat_and_touch_no_global_state() -> None:
    states = [*map(str, (np.random.get_state(), random.getstate(), torch.get_num_threads()))]  # noqa: NPY002 - the global one
    torch_state = torch.get_rng_state()
    assert same(trained(10), trained(10))
    assert states == [*map(str, (np.random.get_state(), random.getstate(), torch.get_num_threads()))]  # noqa: NPY002
    assert torch.equal(torch_state, torch.get_rng_state())


NOT_FINITE = (-1.0, math.nan, math.inf, -math.inf)
BAD: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: bad}) for name in ("lr", "weight_decay", "eps") for bad in NOT_FINITE),
    *(("betas[0]", {"betas": (bad, 0.98)}) for bad in NOT_FINITE),
    *(("betas[1]", {"betas": (0.9, bad)}) for bad in (*NOT_FINITE, 1.0)),
    *(("betas", {"betas": bad}) for bad in (0.9, (0.9,), None)),
    *(("lr", {"lr": bad}) for bad in ("0.1", None)),
    *((name, {name: True}) for name in ("fused", "capturable", "differentiable", "amsgrad")),
]


def test_invalid_settings_are_errors() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = CustomOptimizer([nn.Parameter(torch.ones(1))])
    for name, setting in BAD:
        message = rf"^CustomOptimizer: `{re.escape(name)}` must .*; got "
        with pytest.raises(ValueError, match=message):
            CustomOptimizer([{"params": [p], **setting}])
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [p], **setting})
        with pytest.raises((TypeError, ValueError), match=re.escape(name)):
            CustomOptimizer([p], **setting)
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=r"^CustomOptimizer: `lr` must be > 0"):  # a unit of 0 has no multiples
        CustomOptimizer([{"params": [p], "lr": 0.0}])
    total: Any
    for total in (0, -1, 10.0, True, "10"):
        for make in (
            lambda total: CustomOptimizer([p], total_steps=total),
            lambda total: StackOptimizer([([torch.ones(2, 3)], 0.0)], total_steps=total),
        ):
            with pytest.raises(ValueError, match=r"^CustomOptimizer: `total_steps` must be an int >= 1; got "):
                make(total)


def test_the_scale_of_the_loss_and_the_learning_rate_change_only_the_rounding() -> None:
    """First gradients are rank-deficient here: a basis that rounding chooses among them would show."""
    model = make_model()
    assert same(train(model, CustomOptimizer(model.parameters()), 20, scale=2.0**10), trained(20))
    expected = {dtype: trained(30, dtype) for dtype in (torch.float32, torch.float64)}
    for dtype, scale, lr, tolerance in (
        (torch.float32, 1e-3, 1e-3, 0.02),
        (torch.float64, 1e3, 1e-3, 1e-6),
        (torch.float64, 1.0, 1e-5, 1e-6),
        (torch.float64, 1e-3, 1.0, 1e-6),
    ):
        model = make_model(dtype)
        train(model, CustomOptimizer(model.parameters(), lr=lr), 30, scale=scale)
        assert distance(model, expected[dtype]) < tolerance, (dtype, scale, lr)
