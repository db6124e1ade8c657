"""Handwritten digits: 1,797 images of 8x8 pixels, 10 classes, shipped with scikit-learn."""

from __future__ import annotations

import torch

from protonet.datasets.dataset import Dataset
from protonet.errors import optional_packages


def load_digits() -> Dataset:
    """Load scikit-learn's digits.

    Returns:
        1,797 rows of 64 grey values in [0, 1], and the classes "0" to "9".

    Raises:
        MissingPackageError: scikit-learn is missing; the message says how to install it.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits" (1998), UCI repository: its test set, as
        shipped with scikit-learn. https://doi.org/10.24432/C50P49
    """
    with optional_packages():
        from sklearn import datasets  # noqa: PLC0415 - optional
    x, y = datasets.load_digits(return_X_y=True)
    rows, names = torch.from_numpy(x).float() / 16, tuple(map(str, range(10)))
    return Dataset(rows, torch.from_numpy(y).long(), names, shape=(1, 8, 8))
