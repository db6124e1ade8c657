from __future__ import annotations

import numpy as np
import torch
from scipy.stats import zscore

from protonet.episodes.features.sources import normalize_rows

ROWS = torch.randn(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
MEAN = ROWS[:5].mean(dim=0)


def test_oracles() -> None:
    numpy = ROWS.numpy()
    assert np.allclose(normalize_rows(ROWS, "l2"), numpy / np.linalg.norm(numpy, axis=1, keepdims=True))
    centred = numpy - MEAN.numpy()
    assert np.allclose(normalize_rows(ROWS, "cl2", MEAN), centred / np.linalg.norm(centred, axis=1, keepdims=True))
    assert np.allclose(normalize_rows(ROWS, "z"), zscore(numpy, axis=1))


def test_rows_that_have_no_direction_become_zeros() -> None:
    for dtype in [torch.float32, torch.float64]:
        same = torch.full((2, 7), 0.1, dtype=dtype)
        assert torch.equal(normalize_rows(same, "z"), torch.zeros_like(same))
        assert torch.equal(normalize_rows(0 * same, "l2"), torch.zeros_like(same))
        assert torch.equal(normalize_rows(same, "cl2", same[0]), torch.zeros_like(same))
