"""Eigenbases of the gradients' second moments: a block-diagonal basis for the rows and the columns of a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from protonet.optimizer.settings import PRECONDITIONER, STEP_SIZE


@dataclass
class BasisBlock:
    """The eigenbases of n adjacent rows or columns of stacked matrices (matrices, rows, columns)."""

    axis: int  #: 1 for rows, 2 for columns.
    start_index: int  #: The index of the first row or column.
    second_moments: Tensor  #: (matrices, n, n), the average of the gradients' second moments.
    basis: Tensor  #: (matrices, n, n), the eigenvectors of ``second_moments`` as columns.
    log_factors: Tensor  #: (matrices, n), the logarithms of the eigenvectors' step size factors.
    squared_slopes: Tensor  #: (matrices, n), the averages of the squared slopes along eigenvectors.
    transposed_basis: Tensor = field(init=False)  #: The transpose of ``basis``, a view.

    def __post_init__(self) -> None:
        """Set ``transposed_basis`` to a view of the basis."""
        self.transposed_basis = self.basis.mT

    def view_block(self, matrices: Tensor) -> Tensor:
        """View the rows or columns of this block in stacked matrices (matrices, rows, columns)."""
        n = self.basis.shape[2]
        return matrices if n == matrices.shape[self.axis] else matrices.narrow(self.axis, self.start_index, n)

    def rotate_block(self, matrices: Tensor, rotation: Tensor, transposed: Tensor) -> Tensor:
        """Multiply this block's rows or columns of matrices by rotations (matrices, n, n) or their transposes."""
        part = self.view_block(matrices)
        return torch.bmm(rotation, part) if self.axis == 1 else torch.bmm(part, transposed)

    def update_statistics(self, gradient: Tensor, index: Tensor | None = None) -> None:
        """Update the moving average of the second moments with gradients (matrices, rows, columns).

        ``index`` are the indices of the matrices that have gradients; None if all have.
        """
        part = self.view_block(gradient) if self.axis == 1 else self.view_block(gradient).mT
        decay = PRECONDITIONER.second_moment_decay
        if index is None:
            self.second_moments.baddbmm_(part, part.mT, beta=decay, alpha=1 - decay)
        else:
            old = self.second_moments.index_select(0, index)
            self.second_moments.index_copy_(0, index, old.baddbmm_(part, part.mT, beta=decay, alpha=1 - decay))

    def update_basis(self, averages: Sequence[Tensor], square: Tensor) -> None:
        """Update the basis by a power iteration; rotate moments ``averages`` and ``square`` to the new basis."""
        trace = self.second_moments.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        power = torch.bmm(self.second_moments, self.basis).addcmul_(self.basis, PRECONDITIONER.damping * trace)
        basis = torch.linalg.qr(power)[0]
        # Averages rotate with their basis: the search for the rate misjudges the first steps if it sees another step
        # than the last one (docs/decisions/optimizer-cost.md).
        rotation = torch.bmm(basis.mT, self.basis)
        self.basis.copy_(basis)
        for average in averages:
            self.view_block(average).copy_(self.rotate_block(average, rotation, rotation.mT))
        # Second moments are mean squares: of a new direction, they are means of the old ones by squared overlaps.
        overlaps = rotation.square_()
        self.view_block(square).copy_(self.rotate_block(square, overlaps, overlaps.mT))
        for vector in (self.log_factors, self.squared_slopes):
            vector.copy_((overlaps * vector[:, None]).sum(2))


def rotate(sides: Sequence[Sequence[BasisBlock]], matrices: Tensor, *, back: bool = False) -> Tensor:
    """Transform matrices (matrices, rows, columns) to the eigenbases of rows and columns, or ``back`` from them."""
    for blocks in sides:
        step = 1 if back else -1
        parts = [block.rotate_block(matrices, *(block.basis, block.transposed_basis)[::step]) for block in blocks]
        matrices = parts[0] if len(parts) == 1 else torch.cat(parts, blocks[0].axis)
    return matrices


def adapt_step_factors(
    factors: Tensor, usual: Tensor, slopes: Tensor, lengths: Tensor, block_of: Tensor, steps: Sequence[float]
) -> None:
    """Update log step size factors (n,) of eigenvectors: uphill slopes lower a factor, relative to others of the block.

    ``usual`` (n,) are moving averages of squared slopes, ``lengths`` (blocks,) the numbers of eigenvectors per block,
    ``block_of`` (n,) the block of each eigenvector, and ``steps`` the numbers of steps, one for all blocks or one for
    each. Factors and averages are updated in place, slopes overwritten.
    """
    usual.mul_(STEP_SIZE.slope_decay).addcmul_(slopes, slopes, value=1 - STEP_SIZE.slope_decay)
    peaks = torch.segment_reduce(usual, "max", lengths=lengths, unsafe=True)
    silent = usual <= peaks.mul_(STEP_SIZE.min_relative_slope**2).index_select(0, block_of)
    moves = slopes.mul_(usual.rsqrt()).masked_fill_(silent, 0)
    bounds = [1 / math.sqrt(1 - STEP_SIZE.slope_decay**step) for step in steps]
    gains = [
        (STEP_SIZE.eigenvector_gain + STEP_SIZE.early_eigenvector_gain / step) / bound
        for step, bound in zip(steps, bounds, strict=True)
    ]
    each = None if len(steps) == 1 else slopes.new_tensor([bounds, gains]).index_select(1, block_of)  # (2, n)
    if each is None:
        moves.clamp_(-bounds[0], bounds[0])
    else:
        moves.clamp_(-each[0], each[0])
    alive = torch.segment_reduce((~silent).to(moves.dtype), "sum", lengths=lengths, unsafe=True)
    means = torch.segment_reduce(moves, "sum", lengths=lengths, unsafe=True).div_(alive.clamp_(min=1))
    # Relative to the others of the block: the rate follows the slope of the whole step.
    moves.sub_(means.index_select(0, block_of)).masked_fill_(silent, 0)
    if each is None:
        factors.sub_(moves, alpha=gains[0])
    else:
        factors.addcmul_(moves, each[1], value=-1)
    factors.clamp_(-STEP_SIZE.max_log_step_factor, STEP_SIZE.max_log_step_factor)


def get_update_intervals(step: float) -> tuple[int, int]:
    """Get the numbers of steps between two updates of second moments, and of bases, at a step, by its number from 1."""
    # Bases change slowly after the first steps: longer intervals save 13 % of a step (median of ten networks), and cost
    # 1 % of the ratio on the visible workloads (docs/decisions/optimizer-cost.md).
    if step > PRECONDITIONER.n_frequent_steps:
        return PRECONDITIONER.late_gradient_interval, PRECONDITIONER.late_basis_update_interval
    early = step <= PRECONDITIONER.n_early_steps
    interval = PRECONDITIONER.gradient_interval
    return interval, interval if early else PRECONDITIONER.basis_update_interval


def choose_basis_blocks(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """Choose the blocks of rows and columns of a matrix that get eigenbases, as triples (axis, start, length)."""
    blocks = list[tuple[int, int, int]]()
    if min(rows, columns) < 2:
        return blocks
    for axis, length, other in ((2, columns, rows), (1, rows, columns)):
        short = length <= min(PRECONDITIONER.max_side_length, PRECONDITIONER.max_aspect_ratio * other)
        # Both sides are worth their cost: a basis of the inputs alone loses 8 % of the ratio, of the shorter side 54 %.
        if short and (not blocks or rows + columns <= PRECONDITIONER.max_side_sum):
            # Short blocks are cheap, but blocks of 64 lose 10 % of the ratio.
            count, unit = math.ceil(length / PRECONDITIONER.block_length), PRECONDITIONER.block_alignment
            ends = [round(length * index / count / unit) * unit for index in range(count)] + [length]
            blocks += [(axis, start, end - start) for start, end in pairwise(ends)]
    return blocks
