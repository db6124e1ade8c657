"""Eigenbases of the gradients' second moments, in blocks of the sides of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from protonet.optimizer.settings import PRECONDITIONER, SEARCH


@dataclass
class Block:
    """A part of a side of matrices, of length n, with its own basis."""

    axis: int  #: 1 for rows, 2 for columns.
    start: int  #: Its first row or column.
    statistics: Tensor  #: (matrices, n, n), the average of the gradients' second moments.
    basis: Tensor  #: (matrices, n, n), its eigenvectors as columns.
    factors: Tensor  #: (matrices, n), the logarithms of the directions' factors.
    slopes: Tensor  #: (matrices, n), the averages of their squared slopes.

    def narrow(self, matrices: Tensor) -> Tensor:
        """View this part of matrices (matrices, rows, columns)."""
        return matrices.narrow(self.axis, self.start, self.basis.shape[2])

    def rotate(self, matrices: Tensor, rotations: Tensor) -> None:
        """Multiply this part of matrices by rotations (matrices, n, n), in place."""
        part = self.narrow(matrices)
        part.copy_(torch.bmm(rotations, part) if self.axis == 1 else torch.bmm(part, rotations.mT))

    def gather(self, gradient: Tensor) -> None:
        """Add gradients to the statistics."""
        part = self.narrow(gradient) if self.axis == 1 else self.narrow(gradient).mT
        self.statistics.lerp_(torch.bmm(part, part.mT), 1 - PRECONDITIONER.decay**PRECONDITIONER.gather_every)

    def update_basis(self, averages: Sequence[Tensor], square: Tensor) -> None:
        """Update the basis by a power step on the statistics, and rotate the averages that are kept in it."""
        trace = self.statistics.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        power = torch.bmm(self.statistics, self.basis).addcmul_(self.basis, PRECONDITIONER.damping * trace)
        basis = torch.linalg.qr(power)[0]
        rotation = torch.bmm(basis.mT, self.basis)
        self.basis.copy_(basis)
        for average in averages:
            self.rotate(average, rotation)
        overlaps = rotation.square()  # of the old directions with the new ones
        self.rotate(square, overlaps)
        for vector in (self.factors, self.slopes):
            vector.copy_((overlaps * vector[:, None]).sum(2))

    def adapt(self, uphill: Tensor, step: int) -> None:
        """Move the directions' factors by their slopes, relative to each other."""
        slope = self.narrow(uphill).sum(3 - self.axis)
        usual = self.slopes.lerp_(slope.square(), 1 - SEARCH.memory)
        alive = usual > SEARCH.negligible**2 * usual.amax(1, keepdim=True)
        sizes = slope * usual.rsqrt() * math.sqrt(1 - SEARCH.memory**step)
        moves = torch.where(alive, sizes, 0.0).clamp_(-1, 1)
        moves.sub_(alive * moves.sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp_(min=1))
        gain = SEARCH.direction_gain + SEARCH.early_direction_gain / step
        self.factors.sub_(moves, alpha=gain).clamp_(-SEARCH.max_log_factor, SEARCH.max_log_factor)

    def scale(self, matrices: Tensor) -> None:
        """Multiply this part of matrices in the basis by the factors, in place."""
        self.narrow(matrices).mul_(self.factors.exp().unsqueeze(3 - self.axis))


def choose_blocks(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """Choose the axis, the start and the length of each block of a matrix's sides."""
    blocks = list[tuple[int, int, int]]()
    if min(rows, columns) < 2:
        return blocks
    for axis, length, other in ((2, columns, rows), (1, rows, columns)):
        short = length <= min(PRECONDITIONER.max_length, PRECONDITIONER.max_ratio * other)
        if short and (not blocks or rows + columns <= PRECONDITIONER.max_sum):
            count = math.ceil(length / PRECONDITIONER.block_length)
            ends = [length * index // count for index in range(count + 1)]
            blocks += [(axis, start, end - start) for start, end in pairwise(ends)]
    return blocks
