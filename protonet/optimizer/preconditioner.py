"""Eigenbases of the gradients' second moments: a block-diagonal basis for the rows and the columns of a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

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

    def update_statistics(self, gradient: Tensor, index: Tensor | None) -> None:
        """Update the moving average of the second moments of the matrices with these indices (None: all)."""
        part = self.view_block(_select(gradient, index))
        part = part if self.axis == 1 else part.mT
        decay = PRECONDITIONER.second_moment_decay
        second_moments = _select(self.second_moments, index)
        _replace(self.second_moments, index, second_moments.baddbmm_(part, part.mT, beta=decay, alpha=1 - decay))

    def update_basis(self, averages: Sequence[Tensor], square: Tensor, index: Tensor | None) -> None:
        """Update the basis of the matrices with these indices (None: all) by a power iteration.

        Moments ``averages`` and ``square`` of all matrices are rotated to the new basis.
        """
        second_moments, old = _select(self.second_moments, index), _select(self.basis, index)
        trace = second_moments.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        power = torch.bmm(second_moments, old).addcmul_(old, PRECONDITIONER.damping * trace)
        basis = torch.linalg.qr(power)[0]
        # Averages rotate with their basis: the search for the rate misjudges the first steps if it sees another step
        # than the last one (docs/decisions/optimizer-cost.md).
        rotation = torch.bmm(basis.mT, old)
        _replace(self.basis, index, basis)
        for average in map(self.view_block, averages):
            _replace(average, index, self._rotate(_select(average, index), rotation))
        # Second moments are mean squares: of a new direction, they are means of the old ones by squared overlaps.
        overlaps, square = rotation.square_(), self.view_block(square)
        _replace(square, index, self._rotate(_select(square, index), overlaps))
        for vector in (self.log_factors, self.squared_slopes):
            _replace(vector, index, (overlaps * _select(vector, index)[:, None]).sum(2))

    def _rotate(self, part: Tensor, rotation: Tensor) -> Tensor:
        """Multiply this block's rows or columns of matrices by rotations (matrices, n, n)."""
        return torch.bmm(rotation, part) if self.axis == 1 else torch.bmm(part, rotation.mT)


def _select(tensor: Tensor, index: Tensor | None) -> Tensor:
    """Select the matrices with these indices; None selects all."""
    return tensor if index is None else tensor.index_select(0, index)


def _replace(tensor: Tensor, index: Tensor | None, values: Tensor) -> None:
    """Replace the matrices with these indices, or all, in place."""
    if index is not None:
        tensor.index_copy_(0, index, values)
    elif values is not tensor:
        tensor.copy_(values)


class MatrixStack:
    """Matrices (count, rows, columns) of one shape, which are neighbours in a batch, and their eigenbases.

    Args:
        states: The states of the slices, whose second moments and bases are copied.
        exp_avg: Views of the entries of the batch: (count, rows, columns).
        slow_avg: The same.
        exp_avg_sq: The same.
        direction: The same.
        factors: View of the step size factors of the batch: (count, eigenvectors).
        eigenvector_state: View of their logarithms, and of the averages of squared slopes: (2, count, eigenvectors).
    """

    def __init__(
        self,
        states: Sequence[Mapping[str, Tensor]],
        exp_avg: Tensor,
        slow_avg: Tensor,
        exp_avg_sq: Tensor,
        direction: Tensor,
        factors: Tensor,
        eigenvector_state: Tensor,
    ) -> None:
        self.averages, self.exp_avg_sq, self.direction = (exp_avg, slow_avg, direction), exp_avg_sq, direction
        self.count, *self.shape = direction.shape
        self.n_eigenvectors = factors.shape[1]
        layout = choose_basis_blocks(*self.shape)
        vectors = eigenvector_state.split([length for *_, length in layout], 2)
        self.blocks = list[BasisBlock]()
        for n, (axis, start, _) in enumerate(layout):
            tensors = (
                torch.stack([state[f"block{n}.{name}"] for state in states]) for name in ("second_moments", "basis")
            )
            self.blocks.append(BasisBlock(axis, start, *tensors, *vectors[n]))
        #: The blocks of each side (rows or columns) that has some, with the axis of the side and their lengths.
        self.sides = [
            (axis, [*blocks], [length for other, _, length in layout if other == axis])
            for axis, blocks in groupby(self.blocks, lambda block: block.axis)
        ]
        parts = factors.split([sum(lengths) for *_, lengths in self.sides], 1)
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
        for axis, blocks, lengths in self.sides:
            parts = matrices.split_with_sizes(lengths, axis) if len(blocks) > 1 else [matrices]
            parts = [
                torch.bmm(part, block.transposed_basis if back else block.basis)
                if axis == 2
                else torch.bmm(block.basis if back else block.transposed_basis, part)
                for block, part in zip(blocks, parts, strict=True)
            ]
            matrices = torch.cat(parts, axis) if len(parts) > 1 else parts[0]
        return matrices

    def update_statistics(self, gradients: Tensor, is_due: Sequence[bool]) -> None:
        """Update the second moments of the matrices that are due, given the gradients of all (count, rows, columns)."""
        for block in self.blocks:
            block.update_statistics(gradients, self._find(is_due))

    def update_bases(self, is_due: Sequence[bool]) -> None:
        """Update the bases of the matrices that are due, and rotate their moments and last steps to the new ones."""
        for block in self.blocks:
            block.update_basis(self.averages, self.exp_avg_sq, self._find(is_due))

    def _find(self, is_due: Sequence[bool]) -> Tensor | None:
        """Find the indices of the matrices that are due; None if all are."""
        return None if all(is_due) else torch.tensor(is_due, device=self.direction.device).nonzero()[:, 0]

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
