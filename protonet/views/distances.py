"""Products and distances of rows whose digits do not depend on the rest of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

#: The largest whole number of 16 bits, and how many such are compared at once: they stay in the processor's cache.
LARGEST, TILE = 2**15 - 1, 2**19


#: Columns from which BLAS multiplies every row in the same way: measured, 12 of MKL with AVX-512.
WIDE = 16


def row_matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply (n, k) by (k, m), each row to the same digits wherever it is in a batch.

    BLAS sums a product of few columns in an order that depends on n and on the row's place. Sums in float64, rounded
    once, hide that. MPS has no float64.

    Returns:
        (n, m) of the dtype of ``rows``.
    """
    if matrix.shape[1] >= WIDE or rows.device.type == "mps":
        return rows @ matrix
    return (rows.double() @ matrix.double()).to(rows.dtype)


def distances(z: Tensor, landmarks: Tensor, norm: int) -> Tensor:
    """Return (n, units): sums of absolute differences for norm 1, squared Euclidean distances for norm 2."""
    if norm == 1:
        return city_blocks(z, landmarks)
    squares = landmarks.square().sum(dim=1) - 2 * (z @ landmarks.T)
    return (squares + z.square().sum(dim=1, keepdim=True)).clamp_min(0)


def city_blocks(z: Tensor, landmarks: Tensor) -> Tensor:
    """Return sums of absolute differences (n, units); to ONNX, which has no such operator, landmark by landmark."""
    if not torch.onnx.is_in_onnx_export():
        return torch.cdist(z, landmarks, p=1.0)
    from torch._higher_order_ops.scan import scan  # noqa: PLC0415 - slow to import

    def step(carry: Tensor, landmark: Tensor) -> tuple[Tensor, Tensor]:
        return carry.clone(), (z - landmark).abs().sum(dim=1)

    sums: Tensor = scan(step, z.new_zeros(1), landmarks, dim=0)[1].T
    return sums


def find_steps(landmarks: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the least and the largest landmarks (dim,), and the step, 0-d, of `round_distances`."""
    low, high = landmarks.amin(dim=0), landmarks.amax(dim=0)
    return low, high, (high - low).max().clamp_min(torch.finfo(landmarks.dtype).tiny) / (LARGEST // terms)


def round_distances(z: Tensor, landmarks: Tensor, terms: int) -> Tensor:
    """Return (n, units) sums of absolute differences of coordinates rounded to whole steps; torch.cdist takes 15 times.

    The sum of ``|a - b|`` is that of 2 max(a, b) - a - b. Between the least and the largest landmark a coordinate is a
    whole number of steps, such that ``terms`` of them add up in 16 bits; what lies beyond is added as it is. A row's
    distances do not depend on the others.

    Args:
        z: (n, dim) float32.
        landmarks: (units, dim) float32.
        terms: Coordinates that are added at a time, in `RadialRules.terms`.
    """
    low, high, step = find_steps(landmarks, terms)
    inside = z.clamp(low, high)
    if torch.compiler.is_compiling():  # sums of whole numbers up to 2**24 are exact in float32
        whole = (((each - low) / step).round() for each in (inside, landmarks))
        return city_blocks(*whole) * step + (z - inside).abs().sum(dim=1, keepdim=True)
    rows, units = (((each - low) / step).round_().to(torch.int16).T.contiguous() for each in (inside, landmarks))
    sums = [each.sum(dim=0, dtype=torch.int32) for each in (rows, units)]
    larger = torch.zeros(len(z), len(landmarks), dtype=z.dtype, device=z.device)
    size = max(1, TILE // (terms * len(landmarks)))
    tile, part = (units.new_empty(some, size, len(landmarks)) for some in (terms, 1))  # written to again and again
    for block, columns in zip(larger.split(size), rows.split(size, dim=1), strict=True):
        for some, others in zip(columns.split(terms), units.split(terms), strict=True):
            pairs, added = tile[: len(some), : len(block)], part[0, : len(block)]
            torch.maximum(some[:, :, None], others[:, None], out=pairs)
            block.add_(torch.sum(pairs, dim=0, dtype=torch.int16, out=added))
    larger.mul_(2).sub_(sums[0][:, None]).sub_(sums[1])
    return larger.mul_(step).add_((z - inside).abs_().sum(dim=1, keepdim=True))
