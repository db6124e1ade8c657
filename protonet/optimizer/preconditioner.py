"""Eigenbases of the gradients' second moments: a block-diagonal basis for the rows and the columns of a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from protonet.optimizer.settings import PRECONDITIONER, STEP_SIZE

Index = slice | Tensor  #: Indices of matrices, or a mask of them.


@dataclass(frozen=True)
class BasisBlock:
    """The eigenbases of n adjacent rows or columns of stacked matrices (matrices, rows, columns)."""

    axis: int  #: 1 for rows, 2 for columns.
    start_index: int  #: The index of the first row or column.
    second_moments: Tensor  #: (matrices, n, n), the average of the gradients' second moments.
    basis: Tensor  #: (matrices, n, n), the eigenvectors of ``second_moments`` as columns.
    log_factors: Tensor  #: (matrices, n), the logarithms of the eigenvectors' step size factors.
    squared_slopes: Tensor  #: (matrices, n), the averages of the squared slopes along eigenvectors.

    def view_block(self, matrices: Tensor) -> Tensor:
        """View the rows or columns of this block in stacked matrices (matrices, rows, columns)."""
        return matrices.narrow(self.axis, self.start_index, self.basis.shape[2])

    def update_statistics(self, gradients: Tensor, index: Index) -> None:
        """Update the moving averages of the second moments of the matrices with the indices ``index``."""
        part, decay = self.view_block(gradients)[index], PRECONDITIONER.second_moment_decay
        part = part if self.axis == 1 else part.mT
        average = self.second_moments[index]  # a view or a copy
        self.second_moments[index] = average.baddbmm_(part, part.mT, beta=decay, alpha=1 - decay)

    def update_basis(self, averages: Sequence[Tensor], square: Tensor, index: Index) -> None:
        """Update the bases of the matrices with the indices ``index`` by a power iteration; rotate their moments."""
        second_moments, old = self.second_moments[index], self.basis[index]
        trace = second_moments.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        power = torch.bmm(second_moments, old).addcmul_(old, PRECONDITIONER.damping * trace)
        basis = torch.linalg.qr(power)[0]
        # Averages rotate with their basis: the search for the rate misjudges the first steps if it sees another step
        # than the last one (docs/decisions/optimizer-cost.md).
        rotation = torch.bmm(basis.mT, old)
        # Second moments are mean squares: of a new direction, they are means of the old ones by squared overlaps.
        overlaps = rotation.square()
        self.basis[index] = basis
        for matrices, change in (*((average, rotation) for average in averages), (square, overlaps)):
            part = self.view_block(matrices)
            old_part = part[index]
            part[index] = torch.bmm(change, old_part) if self.axis == 1 else torch.bmm(old_part, change.mT)
        for vector in (self.log_factors, self.squared_slopes):
            vector[index] = (overlaps * vector[index][:, None]).sum(2)


class MatrixStack:
    """Matrices (count, rows, columns) of one shape, which are neighbours in a batch, and their eigenbases.

    Args:
        states: The states of the slices, whose second moments and bases are copied.
        matrices: Views (count, rows, columns) of the tensors of the batch: averages of gradients, ``exp_avg_sq`` and
            ``direction``.
        eigenvectors: Views (count, eigenvectors): step size factors, their logarithms, and averages of squared slopes.
    """

    def __init__(
        self, states: Sequence[Mapping[str, Tensor]], matrices: Sequence[Tensor], eigenvectors: Sequence[Tensor]
    ) -> None:
        *averages, self.exp_avg_sq, self.direction = matrices
        self.averages = [*averages, self.direction]  # which rotate with the bases
        self.count, *self.shape = self.direction.shape
        layout = choose_basis_blocks(*self.shape)
        factors, *others = eigenvectors
        vectors = [each.split([length for *_, length in layout], 1) for each in others]
        self.blocks = list[BasisBlock]()
        for n, (axis, start, _) in enumerate(layout):
            names = (f"block{n}.second_moments", f"block{n}.basis")
            tensors = (torch.stack([state[name] for state in states]) for name in names)
            self.blocks.append(BasisBlock(axis, start, *tensors, *(each[n] for each in vectors)))
        #: Of each side (rows or columns) that has some: axis, and lengths, bases and transposed bases of its blocks.
        self.sides = [
            (
                axis,
                [n for other, _, n in layout if other == axis],
                *zip(*((b.basis, b.basis.mT) for b in blocks), strict=True),
            )
            for axis, blocks in groupby(self.blocks, lambda block: block.axis)
        ]
        parts = factors.split([sum(lengths) for _, lengths, *_ in self.sides], 1)
        self._factors = [part.unsqueeze(3 - axis) for (axis, *_), part in zip(self.sides, parts, strict=True)]

    def view_bases(self, index: int) -> dict[str, Tensor]:
        """View the second moments and bases of the matrix with this index, by the names of their entries."""
        return {
            f"block{n}.{name}": getattr(block, name)[index]
            for n, block in enumerate(self.blocks)
            for name in ("second_moments", "basis")
        }

    def stack(self, matrices: Sequence[Tensor]) -> Tensor:
        """Stack tensors of any shape as matrices (count, rows, columns), which may be a view of a single one."""
        matrices = [matrix.reshape(self.shape) for matrix in matrices]
        return torch.stack(matrices) if self.count > 1 else matrices[0][None]

    def rotate(self, matrices: Tensor, *, back: bool = False) -> Tensor:
        """Transform matrices to the eigenbases of rows and columns, or ``back`` from them."""
        for axis, lengths, bases, transposed in self.sides:
            parts = matrices.split_with_sizes(lengths, axis)
            if axis == 1:
                rotated = [*map(torch.bmm, bases if back else transposed, parts)]
            else:
                rotated = [*map(torch.bmm, parts, transposed if back else bases)]
            matrices = torch.cat(rotated, axis) if len(rotated) > 1 else rotated[0]
        return matrices

    def update(self, gradients: Tensor, statistics_due: Sequence[bool], bases_due: Sequence[bool]) -> None:
        """Update second moments and bases of the matrices that are due, given gradients (count, rows, columns)."""
        statistics, bases = (slice(None) if all(due) else torch.tensor(due) for due in (statistics_due, bases_due))
        for block in self.blocks:
            if any(statistics_due):
                block.update_statistics(gradients, statistics)
            if any(bases_due):
                block.update_basis(self.averages, self.exp_avg_sq, bases)

    def sum_products(self, rotated: Tensor) -> Tensor:
        """Sum the products of gradients and ``direction`` for each eigenvector: (count, eigenvectors)."""
        products = rotated * self.direction
        sums = [products.sum(3 - axis) for axis, *_ in self.sides]
        return torch.cat(sums, 1) if len(sums) > 1 else sums[0]

    def scale_direction(self, floor: Tensor) -> None:
        """Divide ``direction`` by the root of second moments plus a floor (count, 1, 1); multiply it by the factors."""
        self.direction.mul_((self.exp_avg_sq + floor).rsqrt_())
        for factors in self._factors:
            self.direction.mul_(factors)


def adapt_step_factors(
    factors: Tensor, usual: Tensor, slopes: Tensor, lengths: Tensor, block_of: Tensor, steps: float | Tensor
) -> None:
    """Update log step size factors (n,) of eigenvectors: uphill slopes lower a factor, relative to others of the block.

    ``usual`` (n,) are moving averages of squared slopes, ``lengths`` (blocks,) the numbers of eigenvectors per block,
    ``block_of`` (n,) the block of each eigenvector, and ``steps`` the number of steps, one for all or one for each.
    Factors and averages are updated in place, slopes overwritten.
    """
    usual.mul_(STEP_SIZE.slope_decay).addcmul_(slopes, slopes, value=1 - STEP_SIZE.slope_decay)
    peaks = torch.segment_reduce(usual, "max", lengths=lengths, unsafe=True)
    silent = usual <= peaks.mul_(STEP_SIZE.min_relative_slope**2).index_select(0, block_of)
    bound = (1 - STEP_SIZE.slope_decay**steps) ** -0.5
    gain = (STEP_SIZE.eigenvector_gain + STEP_SIZE.early_eigenvector_gain / steps) / bound
    moves = slopes.mul_(usual.rsqrt()).masked_fill_(silent, 0).clamp_(-bound, bound)
    alive = torch.segment_reduce((~silent).to(moves.dtype), "sum", lengths=lengths, unsafe=True)
    means = torch.segment_reduce(moves, "sum", lengths=lengths, unsafe=True).div_(alive.clamp_(min=1))
    # Relative to the others of the block: the rate follows the slope of the whole step.
    moves.sub_(means.index_select(0, block_of)).masked_fill_(silent, 0)
    factors.sub_(moves.mul_(gain)).clamp_(-STEP_SIZE.max_log_step_factor, STEP_SIZE.max_log_step_factor)


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
