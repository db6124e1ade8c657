"""The contest's official data. Only studies may use its seeds, not the library."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet._validation import check_int
from protonet.datasets import Split

NUM_CLASSES, DIM = 128, 384
PROTOTYPE_RADIUS, NOISE_DEVIATION = 2.5, 0.4
PROTOTYPE_SEED, TRAIN_SEED, VAL_SEED, TEST_SEED = 2025, 1337, 2026, 4242


def sample_official(n_train: int = 16, n_val: int = 4, n_test: int = 8) -> Split:
    """Sample the official data, equal to the contest's to the bit, given samples per class, each >= 1.

    Returns:
        Features of 384 columns, float32, and labels in [0, 128), int64, in the evaluator's order.

    Source: Frontier-CS, ``research/problems/imagenet_pareto``; seeds and order as its evaluator has them.
    """
    n_train = check_int("n_train", n_train, low=1)
    n_val = check_int("n_val", n_val, low=1)
    n_test = check_int("n_test", n_test, low=1)
    generator = torch.Generator().manual_seed(PROTOTYPE_SEED)
    prototypes = (
        torch.nn.functional.normalize(torch.randn(NUM_CLASSES, DIM, generator=generator), dim=1) * PROTOTYPE_RADIUS
    )
    return Split(
        *_sample_rows(prototypes, n_train, TRAIN_SEED),
        *_sample_rows(prototypes, n_val, VAL_SEED),
        *_sample_rows(prototypes, n_test, TEST_SEED),
        num_classes=NUM_CLASSES,
        noise_covariance=NOISE_DEVIATION**2 * torch.eye(DIM, dtype=torch.float64),
        radius=PROTOTYPE_RADIUS,
    )


def _sample_rows(prototypes: Tensor, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sample n rows per class, sorted by class, and shuffle them, all with one generator."""
    generator = torch.Generator().manual_seed(seed)
    rows = [prototype + NOISE_DEVIATION * torch.randn(n, DIM, generator=generator) for prototype in prototypes]
    order = torch.randperm(NUM_CLASSES * n, generator=generator)
    labels = torch.arange(NUM_CLASSES).repeat_interleave(n)  # (num_classes * n,)
    return torch.cat(rows)[order], labels[order]
