"""Normalisation of all rows before methods see them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.errors import raise_input_error

ROWS_PER_BLOCK = 8192  #: Rows that are normalised at a time where all are.


def normalize_rows(rows: Tensor, kind: str, mean: Tensor | None = None) -> Tensor:
    """Normalise rows, each alone; a row of zeros (l2, cl2) or of equal features (z) becomes one of zeros.

    Args:
        rows: (n, dim) of any floating dtype.
        kind: One of ``NORMALIZATIONS``.
        mean: (dim,) of the base classes' rows, for cl2.

    Returns:
        (n, dim), float64 if ``rows`` are, otherwise float32; for "none", ``rows`` themselves.

    Raises:
        InputError: The mean is missing for cl2, or given for another kind.

    Source: l2 and cl2, Wang et al., "SimpleShot" (2019), sec. 3, https://arxiv.org/abs/1911.04623; z, Fei et al.,
        "Z-score normalization, hubness, and few-shot learning" (2021), ICCV.
    """
    if (kind == "cl2") != (mean is not None):
        raise_input_error("mean", "be given for cl2, and for nothing else", kind, "Pass the base classes' mean.")
    if kind == "none":
        return rows
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if kind == "z":
        centred = rows - rows.mean(dim=1, keepdim=True)
        lost = centred.abs().amax(dim=1) <= 8 * torch.finfo(rows.dtype).eps * rows.abs().amax(dim=1)  # rounding errors
        rows = centred.masked_fill(lost[:, None], 0)
    elif mean is not None:
        rows = rows - mean.to(rows.dtype)
    unit: Tensor = F.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny ** 0.5)
    return rows.shape[1] ** 0.5 * unit if kind == "z" else unit
