"""Fill gaps that training rows did not have: cells that are missing for the first time in new rows.

A classifier that never saw a gap in a column cannot know what it means. The features of such a cell are drawn from
their normal distribution given the other features of the row: averaged over the draws, predictions are about those of
a model without this column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from protonet.views.config import UntrustedComponent, raise_unless


@dataclass(frozen=True, eq=False)
class GapFiller:
    """Fills gaps in rows of features, from the means and correlations of the features of training rows.

    Source: multiple imputation, Rubin, "Multiple imputation for nonresponse in surveys" (1987), sec. 5.3.
    """

    mean: np.ndarray  #: (dim,) float64: the means of the features, which may be much larger than their deviations.
    deviation: np.ndarray  #: (dim,) float32, > 0: their standard deviations, 1 for a constant feature.
    correlation: np.ndarray  #: (dim, dim) float32: their correlations, shrunk towards 0.
    #: (columns,) float32, 1 or 0: whether no training row had a gap in the column.
    was_complete: np.ndarray

    MAX_FEATURES: ClassVar = 256  #: Maximum number of features; more are an embedding, and their matrix is large.
    N_DRAWS: ClassVar = 8  #: Number of draws for each row. Of 4, 8 and 16, after which log-losses differ by .01 nats.

    @classmethod
    def fit(cls, x: np.ndarray, was_complete: np.ndarray) -> GapFiller | None:
        """Fit to features x (n, dim) of training rows; None if all columns had gaps, or features are too many.

        Source: Chen, Wiesel, Eldar and Hero, "Shrinkage algorithms for MMSE covariance estimation" (2010), eq. 23.
        """
        n, dim = x.shape
        if n < 2 or not 1 < dim <= cls.MAX_FEATURES or not was_complete.any():
            return None
        values = x.astype(np.float64)
        mean, deviation = values.mean(axis=0), values.std(axis=0)
        is_constant = deviation <= 1e-12 * np.sqrt(np.square(values).mean(axis=0))  # but for rounding
        deviation[is_constant] = 1.0
        z = np.where(is_constant, 0.0, (values - mean) / deviation)
        sample = z.T @ z / n
        square = np.square(sample).sum()
        excess = (n + 1 - 2 / dim) * (square - np.trace(sample) ** 2 / dim)
        shrinkage = min(1.0, ((1 - 2 / dim) * square + np.trace(sample) ** 2) / max(excess, 1e-12))
        correlation = (1 - shrinkage) * sample
        np.fill_diagonal(correlation, 1.0)
        return cls(mean, *(part.astype(np.float32) for part in (deviation, correlation, was_complete)))

    def fill(self, x: np.ndarray) -> np.ndarray:
        """Replace NaN in rows x (n, dim) by the expected features given the others of the row."""
        return x if not np.isnan(x).any() else self._impute(x, np.zeros((1, x.shape[1])))[0]

    def draw(self, x: np.ndarray) -> np.ndarray:
        """Replace NaN in rows x (n, dim) by draws: (N_DRAWS, n, dim). All rows have the same quasi-random numbers."""
        scores = torch.special.ndtri((torch.arange(self.N_DRAWS, dtype=torch.float64) + 0.5) / self.N_DRAWS).numpy()
        generator = np.random.default_rng(0)
        return self._impute(x, np.stack([generator.permutation(scores) for _ in range(x.shape[1])], axis=1))

    def _impute(self, x: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Replace NaN in rows x (n, dim), for each row of ``noise`` (draws, dim) in standard deviations."""
        filled = np.repeat(x[None], len(noise), axis=0)
        z = (x - self.mean) / self.deviation
        correlation = self.correlation.astype(np.float64)
        patterns, index = np.unique(np.isnan(x), axis=0, return_inverse=True)
        for number, gaps in enumerate(patterns):
            if not gaps.any():
                continue
            rows = np.flatnonzero(index.reshape(-1) == number)
            known = ~gaps
            across = correlation[np.ix_(gaps, known)]
            slopes = np.linalg.solve(correlation[np.ix_(known, known)], across.T)  # (known, gaps)
            root = np.linalg.cholesky(correlation[np.ix_(gaps, gaps)] - across @ slopes + 1e-6 * np.eye(gaps.sum()))
            # einsum, unlike a product of matrices, sums every row in the same order.
            expected = np.einsum("nk,kg->ng", z[np.ix_(rows, known)], slopes)
            drawn = expected + np.einsum("dg,hg->dh", noise[:, gaps], root)[:, None]
            filled[:, rows[:, None], gaps.nonzero()[0]] = drawn * self.deviation[gaps] + self.mean[gaps]
        return filled

    def stored_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a model file stores, as a dict by key."""
        return dict(vars(self))

    @classmethod
    def restore(cls, stored: UntrustedComponent, n_columns: int, dim: int) -> GapFiller:
        """Restore from the untrusted tensors of a model file; raise a ValueError if they are invalid."""
        raise_unless(dim <= cls.MAX_FEATURES, "a filler of gaps of too many features")
        shapes = {"deviation": (dim,), "correlation": (dim, dim), "was_complete": (n_columns,)}
        mean = stored.pop_tensor("mean", dim, dtype=torch.float64).numpy()
        filler = cls(mean, **{name: stored.pop_tensor(name, *shape).numpy() for name, shape in shapes.items()})
        sound = bool((filler.deviation > 0).all() and (filler.correlation == filler.correlation.T).all())
        raise_unless(sound and bool(np.linalg.eigvalsh(filler.correlation)[0] > 0), "no usable filler of gaps")
        return filler
