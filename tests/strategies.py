"""Hypothesis strategies and small data sets that several tests share."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**31 - 1)


def blobs(seed: int, *, classes: int = 5, rows: int = 6, dim: int = 8, noise: float = 0.4) -> tuple[Tensor, Tensor]:
    """Return shuffled Gaussian classes around random directions: features (n, dim), labels (n,)."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(classes, dim, generator=generator), dim=1) * 2.5
    labels = torch.arange(classes).repeat_interleave(rows)
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return centres[labels] + noise * torch.randn(len(labels), dim, generator=generator), labels
