"""The optimizer's mathematics: shapes, errors, scale, the sides that it turns, and stacks of models."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis.optimizer_bench.workload import seed_initial_weights
from protonet.optimizer import CustomOptimizer, StackOptimizer, stepper
from protonet.optimizer.preconditioner import BasisBlock
from protonet.optimizer.search import OptimizerRun
from protonet.optimizer.settings import STEP_CONFIG, STEP_SIZE
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
    last = STEP_SIZE.final_rate_fraction / STEP_SIZE.anneal_fraction
    for total in (1, 7, 10, 400):
        bends = [(1 - STEP_SIZE.anneal_fraction) * total, (1 - STEP_SIZE.final_rate_fraction) * total]
        factors = [OptimizerRun(1.0, total).annealing_factor(steps) for steps in range(total + 3)]
        np.testing.assert_allclose(factors, np.interp(range(total + 3), bends, [1, last]))
    assert [OptimizerRun(1.0).annealing_factor(steps) for steps in (0, 10**9)] == [1, 1]


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
    *(("lr", {"lr": bad}) for bad in ("0.1", None, np.True_, np.ones(2))),
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


def list_sides(*shapes: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Return the axes, 1 for rows, and lengths of the blocks in which parameters of these shapes are turned."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = CustomOptimizer(parameters)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    sides = dict[int, list[tuple[int, int]]]()
    for batch in optimizer.stepper.batches:
        with_bases = (
            index for index, state in zip(batch.slice_ids, batch.states, strict=True) if "block0.basis" in state
        )
        for stack in batch.stacks:
            for index in islice(with_bases, stack.count):
                sides[index] = [(block.axis, block.basis.shape[2]) for block in stack.blocks]
    return [sides.get(index, []) for index in range(len(shapes))]


def test_sides_of_small_matrices_and_convolutions_are_turned_and_long_ones_are_not() -> None:
    assert list_sides((64, 32), (8, 3, 3, 3)) == [[(2, 32), (1, 64)], [(2, 27), (1, 8)]]
    assert list_sides((600, 64), (64, 600), (170, 20)) == [[(2, 64)], [(1, 64)], [(2, 20)]]
    assert list_sides((), (5,), (1, 7), (7, 1), (1, 1)) == [[]] * 5


def test_long_sides_are_turned_in_blocks_and_the_inputs_come_first_where_both_would_cost_too_much() -> None:
    """Blocks begin at multiples of 16, which makes their products faster."""
    thirds = [(2, 80), (2, 96), (2, 80)]
    assert list_sides((64, 256), (256, 256)) == [[*thirds, (1, 64)], thirds]
    assert list_sides((131, 90)) == [[(2, 90), (1, 64), (1, 67)]]


def test_bases_come_to_the_eigenvectors_of_the_second_moments() -> None:
    """Rows with second moments in the ratio of 1 to 4 to 16 along axes that are rotated at random."""
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    p = nn.Parameter(torch.zeros(3, 24, dtype=torch.float64))
    optimizer = CustomOptimizer([p])
    for _ in range(200):
        noise = torch.randn(3, 24, generator=generator, dtype=torch.float64)
        p.grad = axes @ torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)) @ noise
        optimizer.step()
    overlap = (axes.T @ find_rows(optimizer).basis[0]).abs()  # (axes, columns)
    torch.testing.assert_close(overlap, torch.eye(3, dtype=torch.float64).flip(1), rtol=0, atol=0.15)


def find_rows(optimizer: CustomOptimizer) -> BasisBlock:
    """Return the block of the rows of an optimizer's one matrix."""
    return next(block for block in optimizer.stepper.batches[0].stacks[0].blocks if block.axis == 1)


def test_a_direction_that_goes_on_downhill_gets_a_larger_factor_than_one_that_turns_back() -> None:
    """One direction has a constant slope, the other one the sharpest curvature that there is: steps overshoot."""
    p = nn.Parameter(torch.zeros(2, 8, dtype=torch.float64))
    optimizer = CustomOptimizer([p], weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        noise = torch.randn(2, 8, generator=generator, dtype=torch.float64)
        p.grad = torch.stack([torch.ones(8, dtype=torch.float64), 1e3 * p.detach()[1]]) + 0.1 * noise
        optimizer.step()
    rows = find_rows(optimizer)
    onward = int(rows.basis[0, 0].abs().argmax())  # the direction nearest to the row with the constant slope
    factors = rows.log_factors[0]
    assert factors[onward] > factors[1 - onward] + 0.2
    assert factors.abs().max() <= STEP_SIZE.max_log_step_factor


@pytest.mark.parametrize("turning", [False, True])
def test_directions_without_gradient_keep_their_factor(turning: bool) -> None:
    """Whether the others go steadily on or turn back, what is silent is not prepared to leap when it wakes."""
    p = nn.Parameter(torch.zeros(16, 16))
    optimizer = CustomOptimizer([p])
    generator = torch.Generator().manual_seed(0)
    for step in range(120):
        p.grad = 0.3 * torch.randn(16, 16, generator=generator) + 3 * torch.eye(16) * (-1) ** (step * turning)
        p.grad[12:] = 0
        optimizer.step()
    rows = find_rows(optimizer)
    silent = rows.basis[0, 12:].norm(dim=0) > 0.9
    assert int(silent.sum()) == 4
    assert float(rows.log_factors[0, silent].abs().max()) < 0.1


def test_no_step_is_much_longer_than_the_limit_and_the_factors_allow() -> None:
    p = nn.Parameter(torch.zeros(32, 32))
    optimizer = CustomOptimizer([p], lr=np.float32(0.1))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    longest = 0.0
    for _ in range(150):
        before = p.detach().clone()
        p.grad = 0.3 * torch.randn(32, 32, generator=generator)
        p.grad[0, 0] -= 1
        optimizer.step()
        longest = max(longest, float((p - before).detach().abs().max()))
    assert 0.1 < longest < 3


@pytest.mark.parametrize("sizes", [(1e-45, 1e-45), (1e-30, 1e10), (1e-45, 1e38)])
def test_gradients_of_extreme_sizes_leave_weights_finite(sizes: tuple[float, float]) -> None:
    p = nn.Parameter(torch.zeros(10))
    optimizer = CustomOptimizer([p])
    for size in (*sizes, *sizes):
        p.grad = torch.zeros(10)
        p.grad[0] = size
        optimizer.step()
    assert bool(p.isfinite().all())
    assert optimizer.skipped == 2 * (max(sizes) > 1e20)  # its square is not finite


def test_rows_of_an_embedding_that_are_seldom_seen_take_shorter_steps() -> None:
    """All gradients are of one size. Adam moves a row by its first gradient the farther, the later that comes."""
    p = nn.Parameter(torch.zeros(40, 4, dtype=torch.float64))
    optimizer = CustomOptimizer([p], weight_decay=0.0)
    for step in range(100):
        p.grad = torch.zeros_like(p)
        p.grad[0] = 1
        p.grad[1] = float(step == 99)
        before = p.detach().clone()
        optimizer.step()
    frequent, new, *others = (p.detach() - before).abs().amax(1).tolist()
    assert bool(optimizer.state[p]["embedding"])
    assert 0 < new < frequent
    assert not any(others)
    assert optimizer.state[p]["slow_avg"].numel() == 0


@pytest.mark.parametrize(("extra", "halfway"), [([], 0.625), ([(4, 3)], 1.0)], ids=["alone", "with a matrix"])
def test_steps_of_embeddings_shrink_over_the_last_fifths_of_a_run(extra: list[tuple[int, int]], halfway: float) -> None:
    """Half of the steps, of four fifths, remain after half of the run."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in [(40, 4), *extra]]
    optimizer = CustomOptimizer(parameters, total_steps=100)
    for _ in range(50):
        for p in parameters:
            p.grad = torch.zeros_like(p)
            p.grad[:3] = 1
        optimizer.step()
    run = optimizer.stepper.runs[0]
    assert run.annealing_factor(run.steps) == pytest.approx(halfway)


MEMBERS, STEPS = 3, 30
#: A matrix turned on both sides, one of odd length on one side, a bias, a vector, a convolution, a table.
STACK_SHAPES: list[tuple[int, ...]] = [(16, 32), (5, 41), (1, 7), (7,), (4, 3, 2, 2), (60, 5)]
#: Changes gradients (members, ...) of a parameter at a step, in place.
Change = Callable[[list[Tensor], int], object]


CHANGES: dict[str, Change] = {
    "nothing": lambda gradients, step: None,
    "one not finite": lambda gradients, step: gradients[1][2].view(-1)[:1].add_(math.nan if step == 4 else 0),
    "all not finite": lambda gradients, step: gradients[1].add_(math.inf if step == 4 else 0),
    "late": lambda gradients, step: gradients[0].mul_(float(step >= 2)),
    "late in one": lambda gradients, step: gradients[0][1].mul_(float(step >= 2)),
    "table": lambda gradients, step: gradients[5][:, 10:40].zero_(),
    "table in one": lambda gradients, step: gradients[5][0, 10:40].zero_(),
    "spike in one": lambda gradients, step: gradients[0][1].mul_(1e6 if step == 6 else 1),
}


@pytest.mark.parametrize(("members", "change"), [(1, "nothing"), *((MEMBERS, change) for change in CHANGES)])
def test_a_stack_is_its_members(members: int, change: str) -> None:
    generator = torch.Generator().manual_seed(0)
    stack, targets = (
        [torch.randn((members, *shape), generator=generator, dtype=torch.float64) for shape in STACK_SHAPES]
        for _ in range(2)
    )
    known = STEPS if change == "nothing" else None
    alone = [[nn.Parameter(weight[member].clone()) for weight in stack] for member in range(members)]
    optimizers = [
        CustomOptimizer(
            [{"params": parameters[:3], "weight_decay": 0.15}, {"params": parameters[3:], "weight_decay": 0.0}],
            total_steps=known,
        )
        for parameters in alone
    ]
    optimizer = StackOptimizer([(stack[:3], 0.15), (stack[3:], 0.0)], total_steps=known)
    for step in range(STEPS):
        noise = [0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in stack]
        gradients = [weight - target + part for weight, target, part in zip(stack, targets, noise, strict=True)]
        CHANGES[change](gradients, step)
        for member, (parameters, member_optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient[member].clone()
            member_optimizer.step()
        optimizer.step(gradients)
    for member, parameters in enumerate(alone):
        for p, weight in zip(parameters, stack, strict=True):
            torch.testing.assert_close(p.detach(), weight[member], rtol=1e-9, atol=1e-9)
    for run, member_optimizer in zip(optimizer.stepper.runs, optimizers, strict=True):
        alone_run = member_optimizer.stepper.runs[0]
        assert (run.steps, run.n_skipped, run.n_slopes, run.n_sign_changes) == (
            *(alone_run.steps, alone_run.n_skipped),
            *(alone_run.n_slopes, alone_run.n_sign_changes),
        )
        assert run.rate == pytest.approx(alone_run.rate, rel=1e-9)


def test_members_go_together_also_after_one_has_skipped_a_step() -> None:
    stack = [torch.ones(MEMBERS, 4, 3)]
    optimizer = StackOptimizer([(stack, 0.0)])
    gradient = torch.ones(MEMBERS, 4, 3)
    optimizer.step([gradient])
    assert [batch.slice_ids for batch in optimizer.stepper.batches] == [[0, 1, 2]]
    gradient[1] = math.nan
    optimizer.step([gradient])
    assert [batch.slice_ids for batch in optimizer.stepper.batches] == [[0, 1, 2]]
    assert [int(state["step"]) for state in optimizer.stepper.batches[0].states] == [2, 1, 2]
    assert [run.n_skipped for run in optimizer.stepper.runs] == [0, 1, 0]


@pytest.mark.parametrize(
    "shapes",
    [
        *([shape] * 3 for shape in ((16, 16), (9,), (4, 3, 2, 2))),
        *([(2, 3, 4), (2, 4, 3)], [(5,), (1, 5)], [(5,), (5, 1)], [(1, 5), (5,), (3,)], [(300,), (1, 300)]),
    ],
    ids=str,
)
def test_parameters_that_are_alike_go_together_and_as_if_they_were_alone(shapes: list[tuple[int, ...]]) -> None:
    """Settings that differ by nothing that counts keep them apart; one misses a step."""
    ends: list[list[Tensor]] = []
    for together in (True, False):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
        groups = [{"params": [p], "eps": 1e-8 + n * 1e-12} for n, p in enumerate(parameters)]
        optimizer = CustomOptimizer([{"params": parameters}] if together else groups)
        for step in range(STEPS):
            for index, p in enumerate(parameters):
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.grad = None if (step, index) == (5, 1) else p.detach() + 0.3 * noise
            optimizer.step()
            if len(shapes) == 3 == len({*shapes}) + 2:
                assert len(optimizer.stepper.batches) == (1 if together else 3)
        ends.append([p.detach() for p in parameters])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def train_with_layer_drop(model: nn.ModuleList, optimizer: CustomOptimizer, steps: range) -> list[int]:
    """Train a residual network, of whose layers a random third has no gradient in a step; return batch counts."""
    counts = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        target = x.flip(1).sin()
        for layer in model:
            if torch.rand((), generator=generator) > 0.3:
                x = x + layer(x)
        optimizer.zero_grad()
        if x.requires_grad:
            (x - target).square().mean().backward()
        optimizer.step()
        counts.append(len(optimizer.stepper.batches))
    return counts


def make_layers() -> nn.ModuleList:
    with seed_initial_weights(0):
        return nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 6)) for _ in range(5)
        ).double()


def test_layers_that_are_dropped_at_random_stay_in_their_batches_and_are_as_if_alone() -> None:
    """Two shapes of matrices, and vectors of two lengths: one batch. At first, few layers have had a gradient."""
    together, alone = make_layers(), make_layers()
    optimizer = CustomOptimizer(together.parameters())
    counts = train_with_layer_drop(together, optimizer, range(60))
    assert set(counts) == {1}
    groups = [{"params": [p], "eps": 1e-8 + n * 1e-13} for n, p in enumerate(alone.parameters())]  # not stacked
    apart = CustomOptimizer(groups)
    train_with_layer_drop(alone, apart, range(60))
    steps = [int(optimizer.state[p]["step"]) for p in together.parameters()]
    assert len({*steps}) > 2
    assert steps == [int(apart.state[p]["step"]) for p in alone.parameters()]
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_a_run_with_dropped_layers_resumes_bit_for_bit() -> None:
    model, other = make_layers(), make_layers()
    optimizer, fresh = CustomOptimizer(model.parameters()), CustomOptimizer(other.parameters())
    train_with_layer_drop(model, optimizer, range(20))
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    train_with_layer_drop(model, optimizer, range(20, 40))
    train_with_layer_drop(other, fresh, range(20, 40))
    assert same(model, other)


def make_batched(
    shapes: list[tuple[int, ...]], *, together: bool
) -> tuple[torch.Generator, list[nn.Parameter], CustomOptimizer]:
    """Draw parameters; they share batches if they are ``together``, otherwise each has settings of its own."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    groups = [{"params": [p], "eps": 1e-8 + n * 1e-13} for n, p in enumerate(parameters)]
    return generator, parameters, CustomOptimizer(parameters if together else groups)


def test_experts_of_tables_and_of_vectors_take_turns() -> None:
    """Two tables of equal width have gradients in turns, and the longest vector has one in every third step only."""
    shapes = [(40, 4), (60, 4), (3,), (7,), (5,)]
    ends = []
    for together in (True, False):
        generator, parameters, optimizer = make_batched(shapes, together=together)
        for step in range(40):
            for index, p in enumerate(parameters):
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                turn = index == step % 2 if index < 2 else index != 3 or step % 3 == 0
                p.grad = p.detach() + 0.3 * noise if turn else None
                if index < 2 and p.grad is not None:
                    p.grad[torch.rand(len(p), generator=generator) < 0.6] = 0
            optimizer.step()
        assert bool(optimizer.state[parameters[0]]["embedding"])
        assert len(optimizer.stepper.batches) == (2 if together else 5)
        ends.append([p.detach() for p in parameters])
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_more_elements_than_one_batch_holds_are_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of two shapes, a vector, and a matrix that is larger than a batch."""
    monkeypatch.setattr(stepper, "STEP_CONFIG", dataclasses.replace(STEP_CONFIG, max_batch_elements=100))
    shapes = [(4, 6), (6, 4), (4, 6), (9,), (12, 10), (4, 6), (6, 4)]
    ends = []
    for together in (True, False):
        generator, parameters, optimizer = make_batched(shapes, together=together)
        for _ in range(STEPS):
            for p in parameters:
                p.grad = p.detach() + 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
        if together:
            assert sorted(batch.slice_ids for batch in optimizer.stepper.batches) == [[1, 6], [3, 0, 2, 5], [4]]
        ends.append([p.detach() for p in parameters])
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
