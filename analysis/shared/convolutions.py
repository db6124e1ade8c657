"""Random convolutions with ridge classification: the baseline that specialists use for series."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

N_KERNELS, KERNEL_LENGTHS = 500, (7, 9, 11)
PENALTIES = np.logspace(-3, 3, 10)


def fit_random_convolutions(x: np.ndarray, y: np.ndarray) -> Any:
    """Fit ridge classification on features of random convolutions to rows (n, dim), with the penalty cross-validated.

    Returns a scikit-learn pipeline whose ``predict`` maps rows (n, dim) to classes. Several channels of a series are
    one row, as the studies have them.

    Source: Dempster, Petitjean and Webb, "ROCKET: exceptionally fast and accurate time series classification using
        random convolutional kernels" (2020), with 500 kernels instead of 10,000.
    """
    from sklearn.linear_model import RidgeClassifierCV  # noqa: PLC0415 - optional
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415 - optional
    from sklearn.preprocessing import FunctionTransformer, StandardScaler  # noqa: PLC0415 - optional

    convolve = FunctionTransformer(compute_features)
    return make_pipeline(convolve, StandardScaler(), RidgeClassifierCV(PENALTIES)).fit(x, y)


def compute_features(x: np.ndarray) -> np.ndarray:
    """Compute the fraction of positive values and the maximum of each convolution: (n, 2 * N_KERNELS) float32."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(x).float()
    rows = (rows - rows.mean(dim=1, keepdim=True)) / (rows.std(dim=1, keepdim=True) + 1e-8)
    features = list[Tensor]()
    for _ in range(N_KERNELS):
        length = min(int(rng.choice(KERNEL_LENGTHS)), x.shape[1])
        weights = rng.normal(size=length)
        bias = rng.uniform(-1, 1)
        # At most so far apart that the kernel fits into the row; a row of one kernel has no choice.
        dilation = int(2 ** rng.uniform(0, np.log2(max(x.shape[1] - 1, 1) / max(length - 1, 1))))
        padding = dilation * (length - 1) // 2 * int(rng.integers(2))
        kernel = torch.from_numpy(weights - weights.mean()).float()[None, None]
        convolved = F.conv1d(rows[:, None], kernel, padding=padding, dilation=dilation)[:, 0] + bias
        features += [(convolved > 0).float().mean(dim=1), convolved.amax(dim=1)]
    return torch.stack(features, dim=1).numpy()
