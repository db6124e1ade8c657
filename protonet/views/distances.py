"""Matrix products and distances whose results for a row do not depend on the other rows of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet._compat import is_compiling

INT16_MAX = 2**15 - 1  #: The largest 16-bit integer.
DISTANCE_TILE_SIZE = 2**19  #: Number of pairs of coordinates that are compared at once, so that they fit in the cache.
#: If the matrix has at least this many columns, the product of a row does not depend on the other rows of the batch.
#: Measured for MKL with AVX-512: 12.
MIN_BATCH_INVARIANT_COLUMNS = 16


def batch_invariant_matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """Compute ``rows @ matrix`` (n, m) such that the last digits of a row do not depend on the other rows.

    If m is small, BLAS sums in an order that depends on n and on the index of the row. Sums in float64 that are rounded
    to float32 hide this. MPS has no float64: on it, the digits may depend on the other rows.

    Args:
        rows: (n, k) floating.
        matrix: (k, m) of the same type.
    """
    if matrix.shape[1] >= MIN_BATCH_INVARIANT_COLUMNS or rows.device.type == "mps":
        return rows @ matrix
    return (rows.double() @ matrix.double()).to(rows.dtype)


def batch_invariant_distances(z: Tensor, landmarks: Tensor, norm: int) -> Tensor:
    """Compute distances (n, units) of rows z (n, dim) to landmarks (units, dim).

    The distances are L1 distances if ``norm`` is 1, and squared Euclidean distances if it is 2.
    """
    if norm == 1:
        return l1_distances(z, landmarks)
    squares = landmarks.square().sum(dim=1) - 2 * (z @ landmarks.T)
    return (squares + z.square().sum(dim=1, keepdim=True)).clamp_min(0)


def l1_distances(z: Tensor, landmarks: Tensor) -> Tensor:
    """Compute the L1 distances (n, units) of rows z (n, dim) to landmarks (units, dim)."""
    # ONNX has no operator for L1 distances, and gets a loop. The first use of `torch.onnx` imports it, for 0.5 s.
    if not (is_compiling() and torch.onnx.is_in_onnx_export()):
        return torch.cdist(z, landmarks, p=1.0)
    from torch._higher_order_ops.scan import scan  # noqa: PLC0415 - slow to import

    def add_distances(carry: Tensor, landmark: Tensor) -> tuple[Tensor, Tensor]:
        return carry.clone(), (z - landmark).abs().sum(dim=1)

    sums: Tensor = scan(add_distances, z.new_zeros(1), landmarks, dim=0)[1].T
    return sums


def quantization_grid(landmarks: Tensor, n_terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute minima and maxima (dim,) of landmarks (units, dim), and a grid step for sums of ``n_terms`` values."""
    low, high = landmarks.amin(dim=0), landmarks.amax(dim=0)
    return low, high, (high - low).max().clamp_min(torch.finfo(landmarks.dtype).tiny) / (INT16_MAX // n_terms)


def quantized_l1_distances(z: Tensor, landmarks: Tensor, n_terms: int) -> Tensor:
    """Approximate the L1 distances (n, units) of rows z (n, dim) to landmarks (units, dim), 15 times as fast as cdist.

    Coordinates are rounded to the grid of `quantization_grid`, so that a sum of ``n_terms`` coordinates fits in 16
    bits. Integer maxima give the distances, since ``|a - b|`` equals 2 max(a, b) - a - b. A coordinate outside the
    range of the landmarks is clamped to it; its distance from the range is added without rounding.
    """
    low, high, step = quantization_grid(landmarks, n_terms)
    inside = z.clamp(low, high)
    if is_compiling():  # sums of integers up to 2**24 are exact in float32
        integers = (((value - low) / step).round() for value in (inside, landmarks))
        return l1_distances(*integers) * step + (z - inside).abs().sum(dim=1, keepdim=True)
    rows, units = (((value - low) / step).round_().to(torch.int16).T.contiguous() for value in (inside, landmarks))
    row_sums, unit_sums = (value.sum(dim=0, dtype=torch.int32) for value in (rows, units))
    maxima = torch.zeros(len(z), len(landmarks), dtype=z.dtype, device=z.device)  # (n, units): sums of max(a, b)
    tile_rows = max(1, DISTANCE_TILE_SIZE // (n_terms * len(landmarks)))
    tile = units.new_empty(n_terms, tile_rows, len(landmarks))  # both buffers are reused
    tile_sums = units.new_empty(tile_rows, len(landmarks))
    for block, block_rows in zip(maxima.split(tile_rows), rows.split(tile_rows, dim=1), strict=True):
        for row_terms, unit_terms in zip(block_rows.split(n_terms), units.split(n_terms), strict=True):
            pairs, sums = tile[: len(row_terms), : len(block)], tile_sums[: len(block)]
            torch.maximum(row_terms[:, :, None], unit_terms[:, None], out=pairs)
            block.add_(torch.sum(pairs, dim=0, dtype=torch.int16, out=sums))
    l1 = maxima.mul_(2).sub_(row_sums[:, None]).sub_(unit_sums)
    return l1.mul_(step).add_((z - inside).abs_().sum(dim=1, keepdim=True))
