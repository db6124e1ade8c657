"""Which sides of matrices the optimizer turns, into which bases, the directions' factors, and how long steps are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protonet.optimizer import CustomOptimizer
from protonet.optimizer.preconditioner import BasisBlock
from protonet.optimizer.settings import STEP_SIZE_SEARCH


def list_sides(*shapes: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Return the axes, 1 for rows, and lengths of the blocks in which parameters of these shapes are turned."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = CustomOptimizer(parameters)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    blocks_of = {index: batch.blocks for batch in optimizer.stepper.batches for index in batch.indices}
    return [[(block.axis, block.basis.shape[2]) for block in blocks_of[index]] for index in range(len(shapes))]


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
    return next(block for block in optimizer.stepper.batches[0].blocks if block.axis == 1)


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
    factors = rows.factors[0]
    assert factors[onward] > factors[1 - onward] + 0.2
    assert factors.abs().max() <= STEP_SIZE_SEARCH.max_log_factor


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
    assert float(rows.factors[0, silent].abs().max()) < 0.1


def test_no_step_is_much_longer_than_the_limit_and_the_factors_allow() -> None:
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
    assert optimizer.state[p]["slow_mean"].numel() == 0


@pytest.mark.parametrize(("extra", "halfway"), [([], 0.625), ([(4, 3)], 1.0)], ids=["alone", "with a matrix"])
def test_steps_of_embeddings_alone_shrink_over_the_last_four_fifths_of_a_run(
    extra: list[tuple[int, int]], halfway: float
) -> None:
    """Half of the steps, of four fifths, remain after half of the run."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in [(40, 4), *extra]]
    optimizer = CustomOptimizer(parameters, total_steps=100)
    for _ in range(50):
        for p in parameters:
            p.grad = torch.zeros_like(p)
            p.grad[:3] = 1
        optimizer.step()
    run = optimizer.stepper.runs[0]
    assert run.anneal(run.steps) == pytest.approx(halfway)
