"""Which sides of matrices the optimizer turns, what that costs, and the factors of the directions there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protonet.optimizer import LAW, SIDES, CustomOptimizer


def list_sides(*shapes: tuple[int, ...]) -> list[set[str]]:
    """Return the sides on which parameters of these shapes are turned after a step."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = CustomOptimizer(parameters)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    return [{"left", "right"} & state.keys() for state in optimizer.state_dict()["state"].values()]


def test_sides_of_small_matrices_and_convolutions_are_turned_and_long_ones_are_not() -> None:
    assert list_sides((64, 32), (8, 3, 3, 3)) == [{"left", "right"}, {"left", "right"}]
    assert list_sides((600, 64), (64, 600), (170, 20)) == [{"right"}, {"left"}, {"right"}]
    assert list_sides((), (5,), (1, 7), (7, 1), (1, 1)) == [set()] * 5


def test_the_inputs_sides_come_first_where_not_all_can_be_paid_for() -> None:
    shapes = [(256, 256)] * 16
    assert 2 * sum(a * a * b for a, b in shapes) > SIDES.budget[0]
    assert list_sides(*shapes) == [{"right"}] * 16


def test_equal_sides_are_turned_alike_and_the_order_of_parameters_says_nothing() -> None:
    shapes = [(64, 64), (256, 256), (32, 128), *[(256, 256)] * 15]
    sides = list_sides(*shapes)
    assert list_sides(*reversed(shapes)) == sides[::-1]
    assert sides[:3] == [{"left", "right"}, {"right"}, {"left", "right"}]


def test_a_direction_that_goes_on_downhill_gets_a_larger_factor_than_one_that_turns_back() -> None:
    """One direction has a constant slope, the other one the sharpest curvature that there is: steps overshoot."""
    p = nn.Parameter(torch.zeros(2, 8, dtype=torch.float64))
    optimizer = CustomOptimizer([p], weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        noise = torch.randn(2, 8, generator=generator, dtype=torch.float64)
        p.grad = torch.stack([torch.ones(8, dtype=torch.float64), 1e3 * p.detach()[1]]) + 0.1 * noise
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    onward = int(state["left_basis"][0].abs().argmax())  # the direction nearest to the row with the constant slope
    factors = state["left_factors"]
    assert factors[onward] > factors[1 - onward] + 0.2
    assert factors.abs().max() <= LAW.furthest


def test_factors_are_relative_to_each_other() -> None:
    p = nn.Parameter(torch.zeros(6, 5, dtype=torch.float64))
    optimizer = CustomOptimizer([p])
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # before a basis turns, which moves factors along
        p.grad = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        optimizer.step()
    for side in ("left", "right"):
        factors = optimizer.state_dict()["state"][0][f"{side}_factors"]
        assert factors.abs().max() > 0
        assert abs(float(factors.mean())) < 0.1


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
    state = optimizer.state_dict()["state"][0]
    silent = state["left_basis"][12:].norm(dim=0) > 0.9
    assert int(silent.sum()) == 4
    assert float(state["left_factors"][silent].abs().max()) < 0.1


def test_no_step_is_longer_than_the_limit_and_the_factors_allow() -> None:
    p = nn.Parameter(torch.zeros(32, 32))
    optimizer = CustomOptimizer([p], lr=0.1)
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
    assert optimizer.skipped == 0
